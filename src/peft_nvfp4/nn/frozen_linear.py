"""Frozen linear layers: one base class, one subclass per storage format (:mod:`peft_nvfp4.nn.registry` finds it by its word).

A frozen linear is an ``nn.Linear`` to everyone who asks (PEFT finds its targets by that), holds nothing but ``uint8``
parameters without gradient (only those survive ``.to(dtype)``, ``half()``, FSDP2 and TRL's casts unharmed; "bf16" keeps its dense
weight), and offers conversions in inverse pairs: ``quantize``/``dequantize``, ``snapshot``/``restore``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..autograd.activation_cache import quantized_input
from ..autograd.frozen_linear import Branch, autocast_input
from ..autograd.hosted import Hosted
from ..autograd.lora import lora_branch
from ..autograd.module_hooks import hooks_of
from ..ops.core import FLOATS
from .frozen_options import FrozenOptions

unsafe_view = torch.ops.aten._unsafe_view.default
"""``y.view(shape)`` that autograd takes for no view. What a module returns may be edited in place; a view that a Function or a
part under ``no_grad`` (reentrant checkpointing's first run) has returned must not be."""


def frozen(data: Tensor) -> nn.Parameter:
    """A parameter without gradient."""
    return nn.Parameter(data, requires_grad=False)


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is frozen and may be stored packed. Differentiable in its input and its bias only.

    Attributes:
        backend: the registry's word.
        options: see :class:`FrozenOptions`.
        compute_dtype: dtype that :meth:`dequantize` returns; follows ``.to(dtype)`` and ``.half()``.
        dense_dtype: dtype of what :meth:`to_linear` makes, where it is not ``compute_dtype`` (an adopted bitsandbytes layer
            computes in one dtype and belongs to a model in another).
        calibrated: weight and input spec come from a calibration (:mod:`peft_nvfp4.calibration`), not from a config's preset.
        shares_input: other linears read the same input (q/k/v, gate/up): what one quantises, the others find.
        quantizes_input: adapters see D(x~), one tensor for all linears that read x, and not x.
        hosted: what fetches the packed tensors, where they are elsewhere between uses.
        call_hooks: :func:`~peft_nvfp4.autograd.module_hooks.hooks_of` of this layer and of a LoRA layer around it.
    """

    backend: ClassVar[str]
    quantizes_input: ClassVar[bool] = False
    shares_input = False
    calibrated = False
    hosted: Hosted | None = None

    def __init__(
        self, in_features: int, out_features: int, bias: Tensor | None, compute_dtype: torch.dtype, options: FrozenOptions
    ):
        nn.Module.__init__(self)  # not nn.Linear's: it would allocate the dense weight
        self.in_features, self.out_features = in_features, out_features
        self.bias = None if bias is None else frozen(bias.detach())
        self.compute_dtype = compute_dtype
        self.dense_dtype: torch.dtype | None = None
        self.options = options
        self.call_hooks = hooks_of(self)

    # -- what a backend provides

    @classmethod
    def quantize(cls, linear: nn.Linear, options: FrozenOptions | None = None, *, gscale: Tensor | None = None) -> FrozenLinear:
        """A frozen layer that computes what ``linear`` did, up to the format's error.

        ``gscale``: (1,) FP32 global scale to use instead of the weight's own.
        """
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight (out_features, in_features) that the layer computes with, in ``dtype`` (default ``compute_dtype``)."""
        raise NotImplementedError

    def requantize_(self, weight: Tensor) -> None:
        """Replace the stored weight by (the quantised form of) a dense one (out_features, in_features)."""
        raise NotImplementedError

    def rewritten(self) -> None:
        """To be called by whoever writes into the packed tensors in place: what was found out about them is found out again."""

    def packed_tensors(self) -> dict[str, Tensor]:
        """Every tensor the frozen weight occupies, by name."""
        return {name: p for name, p in self.named_parameters(recurse=False) if name != "bias"}

    def lora_input(self, x: Tensor) -> Tensor:
        """What a LoRA branch sees of input x: x itself, unless the backend quantises activations."""
        return x

    def forward_with_lora_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``forward(x)`` and ``lora_input(x)``, sharing what they share."""
        return self(x), self.lora_input(x)

    def lora_forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        """``forward(x)`` plus plain LoRA branches, x (..., in_features) -> (..., out_features)."""
        cast = autocast_input(x)
        y, kept = self(cast), None
        if branches and self.options.activations == "nvfp4" and torch.is_grad_enabled():  # Q(x), kept for backward instead of x
            if cast.dtype not in FLOATS:
                raise RuntimeError(f"an input that is kept as NVFP4 codes must be float32, bfloat16 or float16, got {x.dtype}")
            x2 = cast.reshape(-1, x.shape[-1])
            kept = quantized_input(x, x2, 1, None, self.shares_input, self.call_hooks).terms[0]
        for branch in branches:
            y = y + lora_branch(cast, branch, kept).to(y.dtype)
        return y

    # -- what all backends share

    @property
    def W_q(self) -> nn.Parameter:
        """Exists so that PEFT's ``dequantize_module_weight`` calls :meth:`dequantize` (DoRA asks it for the weight)."""
        if self.weight.is_floating_point():
            raise AttributeError("the weight is dense right now")  # hasattr() is False, PEFT takes .weight
        return self.weight

    def snapshot(self) -> dict[str, nn.Parameter]:
        """The stored parameters, to be given back to :meth:`restore`. Packed ones by reference: nothing changes them in place,
        :meth:`requantize_` binds new ones (another layer may share the old). The bias as a copy."""
        state = dict(self.named_parameters(recurse=False))
        if self.bias is not None:
            state["bias"] = nn.Parameter(self.bias.detach().clone(), requires_grad=self.bias.requires_grad)
        return state

    def restore(self, snapshot: Mapping[str, nn.Parameter]) -> None:
        """Put back exactly the bytes of a snapshot, on the device where the layer is now. (A dense weight or bias follows a cast
        that the layer has seen since.)"""
        for name, saved in snapshot.items():
            now = getattr(self, name)
            if name == "bias":
                now.data = saved.data.to(now.device, now.dtype, copy=True)
            elif saved.device == now.device and saved.dtype == now.dtype:
                setattr(self, name, saved)
            else:
                setattr(self, name, frozen(saved.data.to(now.device, now.dtype)))

    @contextmanager
    def dense_weight(self, requantize: bool = True) -> Iterator[nn.Parameter]:
        """Within the context ``self.weight`` is dense FP32, for code that reads or rewrites it (merging, PiSSA, OLoRA, ...).
        What was changed is requantised on leaving, unless ``requantize`` is False or an exception ends the context."""
        packed = self.weight
        if in_pieces(self):
            raise ValueError(
                "the weights are sharded (FSDP2): save the adapter, load it with its base on one process, and merge there"
            )
        self.weight = frozen(self.dequantize(torch.float32).clone())
        try:
            yield self.weight
            after = self.weight.data
        finally:
            self.weight = packed
        if requantize and not torch.equal(after, self.dequantize(torch.float32)):
            self.requantize_(after)

    def to_linear(self, weight: Tensor | None = None, bias: Tensor | None = None) -> nn.Linear:
        """A dense ``nn.Linear`` in ``dense_dtype`` (or ``compute_dtype``) with the dequantised, or the given, weight and bias."""
        dtype = self.dense_dtype or self.compute_dtype
        weight = self.dequantize(dtype) if weight is None else weight.to(dtype)
        bias = self.bias if bias is None else bias
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=bias is not None)
        linear.weight = frozen(weight.detach().clone())
        if bias is not None:
            linear.bias = frozen(bias.detach().to(dtype).clone())
        return linear.train(self.training)

    def frozen_bytes(self) -> int:
        """Bytes that the frozen weight occupies (all layouts, all scales; without the bias)."""
        return sum(t.numel() * t.element_size() for t in self.packed_tensors().values())

    def _check_dense(self, weight: Tensor) -> None:
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(f"weight must be {(self.out_features, self.in_features)}, got {tuple(weight.shape)}")
        if not torch.isfinite(weight).all():
            raise ValueError("weight holds NaN or Inf; a quantised layer cannot represent them")

    def _apply(self, fn, recurse: bool = True):
        # compute_dtype follows whatever cast is applied to floating tensors; packed bytes are not cast by anything
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device="meta" if self.weight.is_meta else self.weight.device))

        def keeps_bytes(t: Tensor) -> Tensor:  # Module.type() casts integers too
            cast = fn(t)
            return cast if t.is_floating_point() or cast.dtype == t.dtype else t.to(cast.device)

        super()._apply(keeps_bytes, recurse)
        self.compute_dtype = probe.dtype
        return self

    def _refuse_integers(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise RuntimeError(
                f"the input of a frozen linear ({self.in_features} -> {self.out_features}, {self.backend}) must be float32, "
                f"bfloat16 or float16, got {x.dtype}. If the model casts it to this linear's weight.dtype, which is uint8 where "
                "weights are packed, leave the linear dense: name it in skip_modules (freeze_model, NVFP4LoraConfig, PactConfig)"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend}"


def in_pieces(layer: FrozenLinear) -> bool:
    """Whether FSDP2 holds the layer's weight in pieces right now (a DTensor)."""
    return hasattr(layer.weight, "device_mesh")
