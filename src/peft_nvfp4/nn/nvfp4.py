"""NVFP4 frozen linear: PACT's projection.

Weight W (N, K) is kept as its forward layout W_f (codes along K) and, with ``weight_layouts="cached"``, also as its backward
layout W_b (the transpose, codes along N, made from D(W_f)). Forward quantises the input per token, multiplies FP4 by FP4 and
accumulates in FP32; backward quantises the incoming gradient and multiplies it by W_b: the formulas, and the autograd Function,
are in :mod:`peft_nvfp4.autograd.frozen_linear`.

All parameters are bytes: ``weight`` (N, Kp/2) and ``weight_scales`` (N, Kp/16) and ``weight_gscale`` (4, one FP32), the same
with the prefix ``backward_`` for W_b, and, where an offset is subtracted, ``input_offset`` (4K) and ``output_offset`` (4N), FP32
too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor, nn

from .. import ops
from ..autograd.activation_cache import QuantizedInput, quantized_input
from ..autograd.frozen_linear import Branch, Linear, StraightThrough, autocast_input, frozen_linear, no_autocast, total_constant
from ..kernels import dispatch
from ..numerics import reference
from ..numerics.formats import E2M1_MAX, E4M3_MAX, WEIGHT, WEIGHT_BACKWARD, QuantizedMatrix
from ..ops.core import FLOATS
from .frozen_linear import FrozenLinear, FrozenOptions, frozen, unsafe_view
from .group import SharedInputGroup
from .registry import register_backend

PARAMETERS = (
    *("weight", "weight_scales", "weight_gscale"),
    *("backward_weight", "backward_scales", "backward_gscale"),
    *("input_offset", "output_offset"),
)


PACK_ON_GPU = 1 << 18
"""Weights of at least so many elements that are on the CPU are packed on the GPU, if there is one: same bits, in a fraction of
the time."""


def _packing_device(weight: Tensor) -> torch.device:
    large = weight.device.type == "cpu" and weight.numel() >= PACK_ON_GPU
    return torch.device("cuda") if large and torch.cuda.is_available() else weight.device


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def next_power_of_two(g: Tensor) -> Tensor:
    """The global scale to quantise under where ``g`` (1,) is there already. Kernels that quantise take it for a power of two,
    which another tool's need not be."""
    return reference.power_of_two_scale(g * (E2M1_MAX * E4M3_MAX))


@register_backend("nvfp4")
class NVFP4FrozenLinear(FrozenLinear):
    """Frozen linear in NVFP4, W4A4.

    Args:
        w: W_f (N, K).
        scale_factor: of its global scale: 1 for a power of two, as this package makes them; None where it may be another tool's:
            it is looked at, which waits for a GPU.

    Attributes:
        group: the linears that read the same input, this one among them, where a run of the model has shown which they are
            (:func:`peft_nvfp4.attach`): they are computed together, when the first of them is called.
    """

    quantizes_input = True
    group: SharedInputGroup | None = None
    _scale_factor: float | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: Tensor | None,
        compute_dtype: torch.dtype,
        options: FrozenOptions,
        w: QuantizedMatrix,
        scale_factor: float | None = None,
    ):
        super().__init__(in_features, out_features, bias, compute_dtype, options)
        for name in PARAMETERS:
            self.register_parameter(name, None)
        self._store(w, scale_factor)

    @classmethod
    def quantize(
        cls, linear: nn.Linear, options: FrozenOptions | None = None, *, gscale: Tensor | None = None
    ) -> NVFP4FrozenLinear:
        """Quantise ``linear.weight`` with the searching scale rule ("mse"), under ``gscale`` or the next power of two.

        Raises:
            ValueError: the weight holds NaN or Inf.
        """
        weight = linear.weight.detach()
        if not torch.isfinite(weight).all():
            raise ValueError("weight holds NaN or Inf; a quantised layer cannot represent them")
        home, weight = weight.device, weight.to(_packing_device(weight))
        w = ops.quantize_weight(weight, WEIGHT, None if gscale is None else next_power_of_two(gscale.to(weight.device)))
        options = options or FrozenOptions()
        layer = cls(linear.in_features, linear.out_features, linear.bias, weight.dtype, options, w, 1.0)
        return layer.train(linear.training).to(home)

    # -- storage

    def _store(self, w: QuantizedMatrix, scale_factor: float | None = None) -> None:
        """Keep W_f and, where the options ask for it, W_b. ``scale_factor`` of the global scale: looked at if it is not given."""
        self._put("weight", "weight_scales", "weight_gscale", w, scale_factor)
        self._store_backward(w)

    def _store_backward(self, w: QuantizedMatrix) -> None:
        if self.options.weight_layouts == "cached" and self.options.gradients != "bf16":
            values = torch.bfloat16 if self.scale_factor == 1.0 else torch.float32  # D(W_f) is exact in it
            w_b = ops.quantize_weight(ops.dequantize(w, values).T, WEIGHT_BACKWARD)  # transpose_requantize, by chunks
            self._put("backward_weight", "backward_scales", "backward_gscale", w_b)

    def keep_layouts(self, weight_layouts: str) -> None:
        """From now on keep both layouts (``"cached"``), W_b made of W_f, or only W_f (``"transient"``): the same bits."""
        self.options = replace(self.options, weight_layouts=weight_layouts)
        if weight_layouts == "transient":
            self.backward_weight = self.backward_scales = self.backward_gscale = None
        elif self.backward_weight is None:
            self._store_backward(self.forward_layout)

    @property
    def scale_factor(self) -> float:
        """Of the global scale of W_f: 1 for a power of two, as this package's own are."""
        if self._scale_factor is None:  # it was nowhere, or in pieces, when it was bound
            self._look()
        return self._scale_factor or 1.0

    def _look(self, known: float | None = None) -> None:
        """Keep the significand of the global scale that is there now. At once: looking waits for a GPU, and within a forward
        neither a compiler nor the recording of a CUDA graph could do it."""
        self._scale_factor = known
        if known is None and not self.weight_gscale.is_meta and not hasattr(self.weight_gscale, "device_mesh"):
            self._scale_factor = reference.scale_factor(self.weight_gscale.view(torch.float32))

    def rewritten(self) -> None:
        self._look()

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args, **kwargs) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if f"{prefix}weight_gscale" in state_dict:  # an adapter's has none
            self._look()

    def _put(self, codes: str, scales: str, gscale: str, q: QuantizedMatrix, scale_factor: float | None = None) -> None:
        for name, data in ((codes, q.codes), (scales, q.scales), (gscale, _bytes(q.gscale))):
            setattr(self, name, frozen(data))  # a new parameter: snapshots, and layers that share the old one, keep it
        if gscale == "weight_gscale":
            self._look(scale_factor)

    @property
    def forward_layout(self) -> QuantizedMatrix:
        """W_f (N, K)."""
        held = self._parameters  # attributes of a module are slow
        if "weight" not in held:
            held = held | vars(self)  # a replica of DataParallel has its parameters as attributes
        gscale = held["weight_gscale"].view(torch.float32)
        return QuantizedMatrix(held["weight"], held["weight_scales"], gscale, self.in_features)

    @property
    def backward_layout(self) -> QuantizedMatrix | None:
        """W_b (K, N) if it is kept."""
        held = self._parameters
        if "weight" not in held:
            held = held | vars(self)
        if held["backward_weight"] is None:
            return None
        gscale = held["backward_gscale"].view(torch.float32)
        return QuantizedMatrix(held["backward_weight"], held["backward_scales"], gscale, self.out_features)

    def set_offset(self, mu: Tensor | None) -> None:
        """Subtract the constant mu (in_features,) from every input before quantising it, and add D(W_f) mu to the output.

        mu is typically the mean input on calibration data: a constant costs nothing in the GEMM, and what remains is smaller.
        """
        if mu is None:
            self.input_offset = self.output_offset = None
            return
        if tuple(mu.shape) != (self.in_features,) or not torch.isfinite(mu).all():
            raise ValueError(f"the offset must hold {self.in_features} finite values, got shape {tuple(mu.shape)}")
        mu = mu.detach().to(self.weight.device, torch.float32)
        self.input_offset = frozen(_bytes(mu))
        self.output_offset = frozen(_bytes(self.dequantize(torch.float32) @ mu))

    @property
    def _offset(self) -> Tensor | None:
        return None if self.input_offset is None else self.input_offset.view(torch.float32)

    @property
    def _constant(self) -> Tensor | None:
        return None if self.output_offset is None else self.output_offset.view(torch.float32)

    # -- the contract

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return ops.dequantize(self.forward_layout, dtype or self.compute_dtype)

    def requantize_(self, weight: Tensor) -> None:
        self._check_dense(weight)
        weight = weight.detach().to(self.weight.device)
        needed = ops.weight_gscale(weight)
        present = next_power_of_two(self.weight_gscale.view(torch.float32))  # if it is large enough: siblings share it
        self._store(ops.quantize_weight(weight, WEIGHT, torch.maximum(needed, present)), 1.0)
        if self.input_offset is not None:
            self.set_offset(self._offset)

    def snapshot(self) -> dict[str, nn.Parameter]:
        return {name: data for name, data in super().snapshot().items() if name not in ("input_offset", "output_offset")}

    def restore(self, snapshot: Mapping[str, nn.Parameter]) -> None:
        before = self.weight_gscale
        super().restore(snapshot)
        if self.weight_gscale is not before:
            self._look()
        if self.input_offset is not None:  # the constant belongs to the weight that is stored now
            self.set_offset(self._offset)

    def lora_input(self, x: Tensor) -> Tensor:
        cast = autocast_input(x)
        x2 = self._flat(cast)
        with no_autocast(x):
            quantized = quantized_input(x, x2, self.options.terms, self.input_offset, self.shares_input, self.call_hooks)
            return self._seen(cast, x2, quantized)

    @staticmethod
    def _seen(cast: Tensor, x2: Tensor, quantized: QuantizedInput) -> Tensor:
        return cast if quantized.from_producer else StraightThrough.apply(cast, quantized.dequantized(x2))

    def forward_with_lora_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cast = autocast_input(x)
        x2 = self._flat(cast)
        with no_autocast(x):
            quantized = quantized_input(x, x2, self.options.terms, self.input_offset, self.shares_input, self.call_hooks)
            (y,) = frozen_linear(x2, quantized, [self.operands(())])
            seen = self._seen(cast, x2, quantized)
        return unsafe_view(y, (*x.shape[:-1], self.out_features)), seen

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_forward(x, ())

    def plain_branches(self) -> Sequence[Branch]:
        """As of a LoRA layer: none."""
        return ()

    def forward_codes(self, x: Tensor, branches: Sequence[Branch], quantized: QuantizedInput) -> Tensor:
        """:meth:`lora_forward`, given x~: x (..., in_features) carries shape and gradient, and may have no values."""
        return self.lora_forward(x, branches, quantized)

    def lora_forward(self, x: Tensor, branches: Sequence[Branch], quantized: QuantizedInput | None = None) -> Tensor:
        x2 = self._flat(autocast_input(x))
        with no_autocast(x):
            if quantized is None:
                quantized = quantized_input(x, x2, self.options.terms, self.input_offset, self.shares_input, self.call_hooks)
            few_rows = None if torch.is_grad_enabled() else dispatch.few_rows_module(x2)
            if few_rows is not None and self._draws_nothing(branches):
                y = self._generate(few_rows, branches, x2, quantized)
            elif self.group is not None and not torch.compiler.is_compiling():
                # the first member that is called computes all of them; a later one may find its y here, computed before
                y = self.group.output(self, branches, x, x2, quantized)
            else:
                (y,) = frozen_linear(x2, quantized, [self.operands(branches)])
        return unsafe_view(y, (*x.shape[:-1], self.out_features))

    def _flat(self, x: Tensor) -> Tensor:
        """x (..., in_features) as a matrix."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"the input's last dimension must be {self.in_features}, got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            self._refuse_integers(x)
            raise RuntimeError(f"the input must be float32, bfloat16 or float16, got {x.dtype}")
        return x.reshape(-1, self.in_features)

    def operands(self, branches: Sequence[Branch]) -> Linear:
        """This layer with its branches as the autograd Function takes it, its weights on the device. Gradients are rounded
        stochastically in training only, as dropout is: evaluation draws no random numbers."""
        there, gradients = None if self.hosted is None else self.hosted.fetch(), self.options.gradients
        constant = self.output_offset
        return Linear(
            self.forward_layout,
            self.backward_layout,
            self.bias,
            None if constant is None else constant.view(torch.float32),
            self._scale_factor or self.scale_factor,
            "nvfp4" if gradients == "nvfp4_sr" and not self.training else gradients,
            tuple(branches),
            there=there,
        )

    def _draws_nothing(self, branches: Sequence[Branch]) -> bool:
        """Whether a call needs no random numbers. (The first pass of reentrant checkpointing, which is without autograd too, must
        draw those that the second one will.)"""
        stochastic = self.options.gradients == "nvfp4_sr" and self.training
        return not stochastic and not any(branch.dropout for branch in branches)

    def _generate(self, kernel: ModuleType, branches: Sequence[Branch], x2: Tensor, quantized: QuantizedInput) -> Tensor:
        """y (M, out_features) of few rows, without autograd: no Function, no copies of the adapters, two launches. In generation
        that bookkeeping took most of the time."""
        if self.hosted is not None:
            self.hosted.fetch()
        xd = quantized.dequantized(x2) if branches else None
        constant = total_constant(self.bias, self._constant)
        values = xd if self.input_offset is None and len(quantized.terms) == 1 else None
        adapters = [(b.a, b.b, b.scaling) for b in branches]
        return kernel.linear(quantized.terms, self.forward_layout, constant, adapters, xd, values, self.scale_factor)

    def extra_repr(self) -> str:
        o = self.options
        return f"{super().extra_repr()}, terms={o.terms}, weight_layouts={o.weight_layouts}, gradients={o.gradients}"
