"""LoRA on frozen experts, through PEFT's ``target_parameters``.

>>> NVFP4LoraConfig(target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])

PEFT keeps the adapters of all experts of a projection in one pair, A (rE, K) and B (N, rE), and adds B_e A_e to every expert's
dense weight before it is used. A packed weight has nothing to add to, so here the pairs of all experts are one branch of the
projection (:mod:`peft_nvfp4.autograd.experts`), as any LoRA branch is of a linear. Parameters, names and checkpoints are PEFT's
own: an adapter trained here loads on a dense model with stock PEFT. (PEFT itself turns "all-linear" and the expert projections'
old names into ``target_parameters`` for Mixtral and Qwen.)
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from ..autograd.experts import ExpertsBranch
from ..nn.experts.frozen_experts import FrozenExperts
from ..numerics.matmul import exact_matmul


class ParamWrapper(PeftParamWrapper):
    """LoRA over one projection of :class:`~peft_nvfp4.nn.experts.frozen_experts.FrozenExperts`. (Named as PEFT's own, which
    looks for wrappers that are there already by the name of their class.)"""

    _unmerged: dict[str, nn.Parameter] | None = None  # the frozen projection while adapters are merged

    # -- making an adapter

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        experts: FrozenExperts = self.get_base_layer()
        if self.parameter_name not in experts.projections:
            raise ValueError(
                f"target_parameters names {self.parameter_name!r} of frozen experts, which is no projection: name one of "
                f"{', '.join(experts.projections)}"
            )
        self.num_experts, self._param_ndim = experts.experts, 3
        n, k = experts.projections[self.parameter_name]
        return (k, n) if getattr(experts, "is_transposed", False) else (n, k)  # update_layer exchanges (experts, out, in)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        init = config.init_lora_weights
        if isinstance(init, str) and init.lower() != "gaussian":
            raise ValueError(
                f"init_lora_weights={init!r} reads or rewrites the base weight, which is not supported for the packed experts of "
                f"{self.parameter_name!r}. Use True or 'gaussian', or leave the experts dense (skip_modules=['experts'])"
            )
        if getattr(config, "merge_aware", False):
            raise ValueError(
                f"merge_aware=True is not supported on packed experts ({self.parameter_name!r}): their adapters would be trained "
                "without the rounding of the merge. Leave the experts out of target_parameters, or train without merge_aware"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    # -- forward

    def _branch(self, name: str) -> ExpertsBranch:
        """Of the adapter ``name``."""
        return ExpertsBranch(*self._factors(name), self.scaling[name])

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A (E, r, K) and B (E, N, r), in PEFT's order."""
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        a = a.view(self.num_experts, -1, a.shape[1])
        return a, b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1)

    def forward(self, x: Tensor, *args: Any, adapters: dict | None = None, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        if self.disable_adapters and self.merged:
            self.unmerge()
        names = [name for name in self.active_adapters if name in self.lora_A]
        adapters = dict(adapters or {})
        if names and not self.disable_adapters and not self.merged:
            adapters[self.parameter_name] = [self._branch(name) for name in names]
        return self.base_layer(x, *args, adapters=adapters, **kwargs)

    # -- merging: on dequantised weights, quantised once; the original bytes come back, exactly

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Fold adapters into the frozen weights. A failure leaves them as they were.

        Raises:
            ValueError: an adapter holds NaN or Inf.
        """
        experts: FrozenExperts = self.get_base_layer()
        new = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not new:
            return
        names = [*self.merged_adapters, *new]
        before = experts.snapshot(self.parameter_name)
        original = self._unmerged or before
        experts.restore(original)
        try:
            dense = self.dense_with(names)
            experts.requantize_(self.parameter_name, dense)
        except BaseException:
            experts.restore(before)
            raise
        self._unmerged, self.merged_adapters = original, names

    @torch.no_grad()
    def dense_with(self, names: list[str]) -> Tensor:
        """The dense FP32 weights (E, N, K) that merging ``names`` gives, before they are rounded.

        Raises:
            ValueError: they hold NaN or Inf.
        """
        dense = self.get_base_layer().dequantize(self.parameter_name, torch.float32)
        with exact_matmul():
            for name in names:
                a, b = self._factors(name)
                dense += self.scaling[name] * (b.float() @ a.float())
        if not torch.isfinite(dense).all():
            raise ValueError(f"NaNs detected in the merged weights. One of the adapters {', '.join(names)} seems to be broken")
        return dense

    def unmerge(self) -> None:
        """Restore the frozen weights byte for byte."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self.get_base_layer().restore(self._unmerged)
        self.merged_adapters, self._unmerged = [], None

    def chain(self) -> list[ParamWrapper]:
        """This wrapper and those inside it: one for each projection of the experts."""
        found, layer = [], self
        while isinstance(layer, ParamWrapper):
            found.append(layer)
            layer = layer.base_layer
        return found

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None) -> nn.Module:
        """What takes this layer's place in ``merge_and_unload()`` (dense experts) and ``unload()`` (the frozen ones)."""
        experts: FrozenExperts = self.get_base_layer()
        if not merge:
            return experts
        dense = {}
        for wrapper in self.chain():
            new = [name for name in check_adapters_to_merge(wrapper, adapter_names) if name in wrapper.lora_A]
            names = [*wrapper.merged_adapters, *new]
            if wrapper._unmerged is not None:
                experts.restore(wrapper._unmerged)
            dense[wrapper.parameter_name] = wrapper.dense_with(names)
        return experts.to_experts(dense)
