"""NVFP4 frozen linear: PACT's projection.

Weight W (N, K) is kept as its forward layout W_f (codes along K) and, with ``weight_layouts="cached"``, also as its backward
layout W_b (the transpose, codes along N, made from D(W_f)). Forward quantises the input per token, multiplies FP4 by FP4 and
accumulates in FP32; backward quantises the incoming gradient and multiplies it by W_b. See :mod:`peft_nvfp4.linear`.

All parameters are bytes: ``weight`` (N, Kp/2) and ``weight_scales`` (N, Kp/16) and ``weight_gscale`` (4, one FP32), the same
with the prefix ``backward_`` for W_b, and, where a site is centred, ``input_centre`` (4K) and ``output_centre`` (4N), FP32 too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import ops
from ..formats import WEIGHT, WEIGHT_BACKWARD, QuantizedMatrix
from ..linear import Branch, LinearSpec, NVFP4LoraLinear, draw_seed, fake_quantize, no_autocast
from . import FrozenLinear, FrozenOptions, autocast_input, register_backend


def _frozen(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@register_backend("nvfp4")
class NVFP4FrozenLinear(FrozenLinear):
    """Frozen linear in NVFP4, W4A4."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: Tensor | None,
        compute_dtype: torch.dtype,
        options: FrozenOptions,
        w: QuantizedMatrix,
    ):
        super().__init__(in_features, out_features, bias, compute_dtype, options)
        for name in ("weight", "weight_scales", "weight_gscale", "backward_weight", "backward_scales", "backward_gscale"):
            self.register_parameter(name, None)
        self.input_centre: nn.Parameter | None = None
        self.output_centre: nn.Parameter | None = None
        self._store(w)

    @classmethod
    def quantize(
        cls, linear: nn.Linear, options: FrozenOptions | None = None, *, gscale: Tensor | None = None
    ) -> NVFP4FrozenLinear:
        """Quantise ``linear.weight`` with the searching scale rule ("mse").

        Raises:
            ValueError: the weight holds NaN or Inf.
        """
        weight = linear.weight.detach()
        if not torch.isfinite(weight).all():
            raise ValueError("weight holds NaN or Inf; a quantised layer cannot represent them")
        w = ops.quantize_weight(weight, WEIGHT, gscale)
        options = options or FrozenOptions()
        layer = cls(linear.in_features, linear.out_features, linear.bias, weight.dtype, options, w)
        return layer.train(linear.training)

    # -- storage

    def _store(self, w: QuantizedMatrix) -> None:
        """Keep W_f and, where the options ask for it, W_b."""
        self._put("weight", "weight_scales", "weight_gscale", w)
        if self.options.weight_layouts == "cached" and self.options.gradients != "bf16":
            w_b = ops.quantize_weight(ops.dequantize(w, torch.bfloat16).T, WEIGHT_BACKWARD)  # transpose_requantize, by chunks
            self._put("backward_weight", "backward_scales", "backward_gscale", w_b)

    def _put(self, codes: str, scales: str, gscale: str, q: QuantizedMatrix) -> None:
        for name, data in ((codes, q.codes), (scales, q.scales), (gscale, _bytes(q.gscale))):
            parameter = getattr(self, name)
            if parameter is None:
                setattr(self, name, _frozen(data))
            else:
                parameter.data = data  # a new tensor: a snapshot of the old one stays as it is

    @property
    def forward_layout(self) -> QuantizedMatrix:
        """W_f (N, K)."""
        return QuantizedMatrix(self.weight, self.weight_scales, self.weight_gscale.view(torch.float32), self.in_features)

    @property
    def backward_layout(self) -> QuantizedMatrix | None:
        """W_b (K, N) if it is kept."""
        if self.backward_weight is None:
            return None
        return QuantizedMatrix(
            self.backward_weight, self.backward_scales, self.backward_gscale.view(torch.float32), self.out_features
        )

    def set_centre(self, mu: Tensor | None) -> None:
        """Subtract the constant mu (in_features,) from every input before quantising it, and add D(W_f) mu to the output.

        mu is typically the mean input on calibration data: a constant costs nothing in the GEMM, and what remains is smaller.
        """
        if mu is None:
            self.input_centre = self.output_centre = None
            return
        if tuple(mu.shape) != (self.in_features,) or not torch.isfinite(mu).all():
            raise ValueError(f"the centre must hold {self.in_features} finite values, got shape {tuple(mu.shape)}")
        mu = mu.detach().to(self.weight.device, torch.float32)
        self.input_centre = _frozen(_bytes(mu))
        self.output_centre = _frozen(_bytes(self.dequantize(torch.float32) @ mu))

    @property
    def _centre(self) -> Tensor | None:
        return None if self.input_centre is None else self.input_centre.view(torch.float32)

    # -- the contract

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return ops.dequantize(self.forward_layout, dtype or self.compute_dtype)

    def requantize_(self, weight: Tensor) -> None:
        self._check_dense(weight)
        self._store(ops.quantize_weight(weight.detach().to(self.weight.device), WEIGHT))
        if self.input_centre is not None:
            self.set_centre(self._centre)

    def lora_input(self, x: Tensor) -> Tensor:
        return fake_quantize(autocast_input(x), self.options.terms, self._centre)

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_forward(x, ())

    def lora_forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        x = autocast_input(x)
        if x.shape[-1] != self.in_features:
            raise ValueError(f"the input's last dimension must be {self.in_features}, got shape {tuple(x.shape)}")
        spec = LinearSpec(
            self.in_features,
            self.out_features,
            self.options.terms,
            self.options.gradients,
            tuple(b.scaling for b in branches),
            tuple(b.dropout for b in branches),
        )
        flat = [t for b in branches for t in (b.a, b.b, draw_seed() if b.dropout else None)]
        sr_seed = draw_seed() if self.options.gradients == "nvfp4_sr" and torch.is_grad_enabled() else None
        back = self.backward_layout
        out = None if self.output_centre is None else self.output_centre.view(torch.float32)
        with no_autocast(x):
            y = NVFP4LoraLinear.apply(
                x.reshape(-1, self.in_features),
                self.bias,
                self._centre,
                out,
                *self.forward_layout[:3],
                *(back[:3] if back is not None else (None, None, None)),
                sr_seed,
                spec,
                *flat,
            )
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        o = self.options
        return f"{super().extra_repr()}, terms={o.terms}, weight_layouts={o.weight_layouts}, gradients={o.gradients}"


def expected_bytes(out_features: int, in_features: int, layouts: int) -> int:
    """Bytes of ``layouts`` (1 or 2) NVFP4 layouts of an (out, in) weight, global scales included."""
    from ..formats import packed_bytes

    total = packed_bytes(out_features, in_features) + 4
    return total if layouts == 1 else total + packed_bytes(in_features, out_features) + 4
