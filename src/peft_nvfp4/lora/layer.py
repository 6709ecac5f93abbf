"""The LoRA layer over any frozen linear.

It is PEFT's own ``lora.Linear`` (same parameters, same names, same checkpoints) with three differences:

* The forward hands the plain branches to the frozen layer (:meth:`FrozenLinear.lora_forward`), which knows what a branch sees
  of its input and how little to keep for backward. Where a module below has hooks, or is another one than PEFT makes, it is
  called, as PEFT does (:mod:`peft_nvfp4.nn.plain`). Adapters are FP32 masters (PEFT's default); they are cast to the
  activations' dtype, never the activations to theirs: an FP32 copy of the input would cost seven times its NVFP4 form.
* Merging works on dequantised weights and quantises once, after the last adapter; unmerging puts the original bytes back,
  exactly. Unloading with a merge gives a dense ``nn.Linear``: a small adapter added to a 4-bit weight would mostly be lost.
* Initialisations that read or rewrite the base weight (PiSSA, OLoRA, CorDA, MiCA, LoRA-GA, ...) get it dense and have it
  requantised. Those that make up for its rounding are in :mod:`peft_nvfp4.lora.inits`. What cannot work on a packed base raises.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import VARIANT_KWARG_KEYS
from peft.tuners.lora.layer import Linear as PeftLoraLinear
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .. import ops
from ..autograd.activation_cache import QuantizedInput
from ..autograd.frozen_linear import Branch, autocast_input, no_autocast
from ..autograd.lora import lora_branch
from ..nn.frozen_linear import FrozenLinear
from ..nn.plain import Obstacle, StepsAside, obstacle
from ..nn.registry import BACKENDS
from ..nn.traversal import set_mode
from ..numerics.matmul import exact_matmul
from ..training.offload.frozen_methods import computing
from . import inits, merge_aware
from .inits import RESIDUAL_INITS

DENSE_INITS = ("pissa", "corda", "olora", "mica", "orthogonal", "lora_ga")
INITS = (*DENSE_INITS, "gaussian", "eva", *RESIDUAL_INITS)
MATRIX, DROPOUT = (nn.Linear,), (nn.Dropout, nn.Identity)
"""What PEFT makes A and B of, and the dropout."""
DENSE_VARIANTS = ("velora_config", "use_bdlora")
"""Initialisations and variants that read the base weight (or its dtype) when an adapter is made."""

REFUSED = {
    "use_qalora": "QA-LoRA is defined on GPTQ's integer groups",
    "kasa_config": "KaSA replaces the base weight by its truncated SVD at run time",
}


def refuse_unsupported(config: LoraConfig, backend: str) -> None:
    """Raise on what cannot work on a packed base and what PEFT would ignore or get wrong there.

    Raises:
        ValueError: naming the option and the way out.
    """
    for option, reason in REFUSED.items():
        if getattr(config, option, None):
            raise ValueError(
                f"{option} does not work on a {backend} base: {reason}. Leave it out, or use a dense model with LoraConfig."
            )
    init = config.init_lora_weights
    if isinstance(init, str) and not init.lower().startswith(INITS):
        raise ValueError(f"unknown init_lora_weights={init!r}; known: True, False, {', '.join(INITS)}")
    if init in RESIDUAL_INITS and backend == "bf16":
        raise ValueError(f"init_lora_weights={init!r} starts from the rounding error of the base, and a bf16 base has none.")


class FrozenLoraLinear(StepsAside, PeftLoraLinear):
    """LoRA over a :class:`FrozenLinear`."""

    _unmerged: dict[str, nn.Parameter] | None = None  # snapshot of the frozen layer while adapters are merged
    _in_dense = False  # PEFT's own merge is running on the dense weight
    _merged_layer: tuple | None = None  # what merge-aware adapters compute with outside of training, and what it was made from
    _factors: tuple[Tensor, Tensor] | None = None  # what the adapter being made starts from
    merge_aware_adapters: frozenset[str] = frozenset()

    # -- making an adapter

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        base = self.get_base_layer()
        init = config.init_lora_weights
        refuse_unsupported(config, base.backend)
        needs_dense = (
            isinstance(init, str)
            and init.lower().startswith(DENSE_INITS)
            or any(getattr(config, v, None) for v in DENSE_VARIANTS)
        )
        if needs_dense and self.merged:
            raise ValueError(
                f"unmerge {', '.join(self.merged_adapters)} before adding an adapter with init_lora_weights={init!r}"
            )
        if init in RESIDUAL_INITS:
            self._factors, config = inits.take(base, r, init), copy.copy(config)
            config.init_lora_weights = True  # PEFT's own LoftQ knows other formats
        with base.dense_weight() if needs_dense else nullcontext():
            super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        aware = {adapter_name} if getattr(config, "merge_aware", False) else set()
        self.merge_aware_adapters = self.merge_aware_adapters - {adapter_name} | aware

    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        super().reset_lora_parameters(adapter_name, init_lora_weights)
        if self._factors is not None:  # here, before a variant (DoRA) looks at A and B
            inits.fill(self, adapter_name, self._factors)
            self._factors = None

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.merge_aware_adapters -= {adapter_name}

    def train(self, mode: bool = True) -> FrozenLoraLinear:
        if not isinstance(mode, bool):
            return super().train(mode)  # which says so
        self._merged_layer = None
        set_mode(self, mode)
        return self

    # -- forward

    def branches(self, adapters: Sequence[str], everywhere: bool = True) -> list[Branch] | Obstacle:
        """Plain branches of these adapters, or what stands against computing them and the base layer without calling a module.
        ``everywhere``: see :func:`~peft_nvfp4.nn.plain.obstacle`."""
        below = self._modules  # this is asked in every call, and attributes of a module are slow
        lora_a, lora_b, lora_dropout = below["lora_A"]._modules, below["lora_B"]._modules, below["lora_dropout"]._modules
        modules, branches = [(below["base_layer"], BACKENDS.loaded)], []
        for name in adapters:
            a, b, dropout = lora_a[name], lora_b[name], lora_dropout[name]
            modules += (a, MATRIX), (b, MATRIX), (dropout, DROPOUT)
            if a._parameters.get("bias") is not None:
                return Obstacle(a, "it has a bias")
            p = dropout.p if dropout.training and type(dropout) is nn.Dropout else 0.0
            branches.append(Branch(a.weight, b.weight, self.scaling[name], p))
        suspicious = everywhere and _has_any_global_hook()
        for module, kinds in modules:  # a quick look; what it means is for obstacle() to find out
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
                suspicious = True
            elif type(module) not in kinds or "forward" in module.__dict__ or module._compiled_call_impl is not None:
                suspicious = True
        if suspicious and (found := obstacle(*modules, everywhere=everywhere)):
            return found
        return branches

    def _active(self) -> list[str]:
        """The adapters that a call adds now."""
        if self._disable_adapters or self.merged_adapters:
            return []
        there = self._modules["lora_A"]._modules
        return [name for name in self.active_adapters if name in there]

    def plain_branches(self) -> list[Branch] | None:
        """The branches that a call adds now; None where forward is something else: a variant such as DoRA, merge-aware, or a call
        of a module that has to be called."""
        active = self._active()
        variant, aware = self.lora_variant, self.merge_aware_adapters
        if (variant or aware) and any(name in variant or name in aware for name in active):
            return None
        branches = self.branches(active)
        return None if isinstance(branches, Obstacle) else branches

    def forward_codes(self, x: Tensor, branches: Sequence[Branch], quantized: QuantizedInput) -> Tensor:
        """``forward(x)`` of a layer with these :meth:`plain_branches`, given x~; x (..., in_features) carries shape and gradient,
        and may have no values."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        return self._with_lora_biases(self.base_layer.forward_codes(x, branches, quantized), self._active())

    def _with_lora_biases(self, y: Tensor, adapters: Sequence[str]) -> Tensor:
        b = self._modules["lora_B"]._modules
        for name in adapters:
            if (bias := b[name].bias) is not None:
                y = y + (bias * self.scaling[name]).to(y.dtype)
        return y

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs:
            self._check_forward_args(x, *args, **kwargs)
        adapter_names = kwargs.pop("adapter_names", None)
        variant_kwargs = {key: kwargs.pop(key, None) for key in VARIANT_KWARG_KEYS}
        if self._disable_adapters:
            if self.merged_adapters:
                self.unmerge()
            return self.base_layer(x, *args, **kwargs)
        if adapter_names is not None:
            self._refuse_partly_merge_aware([name for name in adapter_names if name in self.merge_aware_adapters], [])
            return self._mixed_batch_forward(x, *args, adapter_names=adapter_names, **variant_kwargs, **kwargs)
        if self.merged_adapters:
            return self.base_layer(x, *args, **kwargs)
        active = self._active()
        if self.merge_aware_adapters and (aware := [name for name in active if name in self.merge_aware_adapters]):
            self._refuse_partly_merge_aware(aware, active)
            return merge_aware.forward(self, x, active)
        branches = self.branches(active)
        if isinstance(branches, Obstacle):
            self.step_aside(branches)
        elif not self.lora_variant or not any(name in self.lora_variant for name in active):
            return self._with_lora_biases(self._modules["base_layer"].lora_forward(x, branches), active)  # attributes are slow
        return self._forward_in_parts(x, active, variant_kwargs, calls_modules=isinstance(branches, Obstacle))

    def _refuse_partly_merge_aware(self, aware: list[str], active: list[str]) -> None:
        if aware and aware != active:
            raise ValueError(
                f"{', '.join(aware)} was trained merge-aware: its function is that of one merged weight, which other adapters, "
                "or rows of a batch without it, do not share. Activate it alone (or with other merge-aware adapters)"
            )

    def _base_output(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the base layer returns, and what a branch sees of x."""
        base = self.base_layer
        if obstacle((base, BACKENDS.loaded)) is None:
            return base.forward_with_lora_input(x)
        seen = getattr(self.get_base_layer(), "lora_input", None)  # not of a user's own layer
        return base(x), x if seen is None else seen(x)

    def _with_branch(self, y: Tensor, x: Tensor, name: str, variant_kwargs: dict[str, Any]) -> Tensor:
        """y and what an adapter adds to it for x: a variant (DoRA and the like), a plain branch, or PEFT's modules, called."""
        branches = None if name in self.lora_variant else self.branches([name])
        if isinstance(branches, list):
            return self._with_lora_biases(y + lora_branch(autocast_input(x), *branches).to(y.dtype), [name])
        cast = self._cast_input_dtype(x, self.lora_A[name].weight.dtype)
        if name in self.lora_variant:
            return self.lora_variant[name].forward(self, active_adapter=name, x=cast, result=y, **variant_kwargs)
        z = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](cast)))
        return y + (z * self.scaling[name]).to(y.dtype)

    def _forward_in_parts(self, x: Tensor, active: list[str], variant_kwargs: dict[str, Any], calls_modules: bool) -> Tensor:
        """Base layer and adapters one after the other, as PEFT does, on the input that a branch of this base sees."""
        y, seen = self._base_output(x)
        if calls_modules and getattr(self.get_base_layer(), "quantizes_input", False):
            seen = seen.clone()  # a hook may edit what it is given, and that is for this layer's adapters alone
        dtype = y.dtype
        for name in active:
            if calls_modules:  # as in PEFT, the next adapter sees what a hook of this one has edited in place, in any dtype
                seen = self._cast_input_dtype(seen, self.lora_A[name].weight.dtype)
            y = self._with_branch(y, seen, name, variant_kwargs)
        return y.to(dtype)

    def _mixed_batch_forward(self, x: Tensor, *args: Any, adapter_names: list[str], **kwargs: Any) -> Tensor:
        """Rows of one batch through different adapters (inference); ``"__base__"`` is none."""
        variant_kwargs = {key: kwargs.pop(key, None) for key in VARIANT_KWARG_KEYS}
        y, x = self._base_output(x)
        offsets = variant_kwargs.get("alora_offsets")
        for name in dict.fromkeys(adapter_names):
            if name == "__base__" or name not in self.lora_A:
                continue
            rows = [i for i, item in enumerate(adapter_names) if item == name]
            if name in self.lora_variant and offsets is not None:
                variant_kwargs["alora_offsets"] = [offsets[i] for i in rows]
            out = self._with_branch(y[rows], x[rows], name, variant_kwargs)
            y = y.index_put((torch.tensor(rows, device=y.device),), out.to(y.dtype))
        return y

    # -- merging

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Fold adapters into the frozen weight: dequantise the original, add every merged adapter in FP32, quantise once. A
        failure (NaN in an adapter, say) leaves the layer as it was.

        Raises:
            ValueError: an adapter holds NaN or Inf (with or without ``safe_merge``: a packed weight cannot hold them).
        """
        base = self.get_base_layer()
        if self._in_dense:
            return super().merge(safe_merge=safe_merge, adapter_names=adapter_names)  # a variant replaying merges
        new = check_adapters_to_merge(self, adapter_names)
        if not any(name in self.lora_A for name in new):
            return None
        before, already = base.snapshot(), list(self.merged_adapters)
        try:
            if self._unmerged is None:
                self._unmerged = before
            base.restore(self._unmerged)
            self._merge_densely(already + new, safe_merge, requantize=True)
        except BaseException:
            base.restore(before)
            self.merged_adapters = already
            self._unmerged = self._unmerged if already else None
            raise
        return None

    def _merge_densely(self, names: list[str], safe_merge: bool, requantize: bool) -> tuple[Tensor, Tensor | None]:
        """PEFT's own merge of ``names`` on the dense FP32 weight; returns the merged dense weight and bias."""
        base = self.get_base_layer()
        self.merged_adapters = []
        # FP32 products whatever is allowed elsewhere: merge-aware training has to have met the same bits
        with no_autocast(base.weight), exact_matmul(), base.dense_weight(requantize=requantize):
            self._in_dense, bias_dtype = True, None if base.bias is None else base.bias.dtype
            try:
                super().merge(safe_merge=safe_merge, adapter_names=names)
            finally:
                self._in_dense = False
                if base.bias is not None:  # a safe merge leaves it in the weight's dtype, here FP32
                    base.bias.data = base.bias.data.to(bias_dtype)
            weight = base.weight.data
            if not torch.isfinite(weight).all() or base.bias is not None and not torch.isfinite(base.bias).all():
                raise ValueError(
                    f"NaNs detected in the merged weights. One of the adapters {', '.join(names)} seems to be broken"
                )
        return weight, base.bias

    @torch.no_grad()
    def dense_with(self, names: list[str]) -> Tensor:
        """The dense FP32 weight that merging ``names`` gives before it is rounded; the layer stays as it is."""
        base, before, merged = self.get_base_layer(), self.get_base_layer().snapshot(), self.merged_adapters
        try:
            return self._merge_densely(names, False, requantize=False)[0]
        finally:
            base.restore(before)
            self.merged_adapters = merged

    def unmerge(self) -> None:
        """Restore the frozen weight byte for byte."""
        if self._in_dense:
            return super().unmerge()
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return None
        self.get_base_layer().restore(self._unmerged)
        self.merged_adapters, self._unmerged = [], None
        return None

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None) -> nn.Module:
        """What takes this layer's place in ``merge_and_unload()`` (a dense nn.Linear) and ``unload()`` (the frozen layer)."""
        base: FrozenLinear = self.get_base_layer()
        if not merge:
            return base
        names = list(self.merged_adapters) + check_adapters_to_merge(self, adapter_names)
        if self._unmerged is not None:
            base.restore(self._unmerged)
        weight, bias = self._merge_densely(names, safe_merge, requantize=False)
        if names and self.merge_aware_adapters.issuperset(names):  # what was trained is the rounded sum
            with computing(base):
                weight = ops.dequantize(merge_aware.requantized(base, weight))
        return base.to_linear(weight, bias)

    def __repr__(self) -> str:
        return super().__repr__().replace("lora.", "lora.frozen.", 1)
