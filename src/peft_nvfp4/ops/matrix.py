"""Operators on one matrix: quantize, dequantize, the backward layout of a weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import reference
from ..numerics.formats import BLOCK, WEIGHT_BACKWARD, NVFP4Format, QuantizedMatrix, padded_k
from .core import Operator, check, check_matrix, check_packed, check_seed


def _check_quantize(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None, seed: Tensor | None) -> None:
    check_matrix("quantize", "x", x)
    check(not fmt.stochastic or seed is not None, lambda: "quantize: stochastic rounding needs a seed (an int64 scalar tensor)")
    check_seed("quantize", seed)
    if gscale is not None:
        check(gscale.dtype == torch.float32, lambda: f"quantize: gscale must be float32, got {gscale.dtype}")
        check(
            gscale.ndim == 1 and gscale.shape[0] in (1, x.shape[0]),
            lambda: f"quantize: gscale must be (1,) or ({x.shape[0]},), got {tuple(gscale.shape)}",
        )


def _quantize_reference(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None, seed: Tensor | None) -> QuantizedMatrix:
    q = reference.quantize(x, fmt, gscale, seed)
    return q if gscale is None else q._replace(gscale=q.gscale.clone())  # an output may not alias an input


def _quantize_shapes(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, kp, byte = x.shape[0], padded_k(x.shape[1]), torch.uint8
    n = gscale.shape[0] if gscale is not None else (rows if fmt.global_scale == "row" else 1)
    return x.new_empty(rows, kp // 2, dtype=byte), x.new_empty(rows, kp // BLOCK, dtype=byte), x.new_empty(n, dtype=torch.float32)


_quantize = Operator(
    "quantize",
    "(Tensor x, Tensor? gscale, Tensor? seed, str rule, bool per_row, bool stochastic) -> (Tensor, Tensor, Tensor)",
    _check_quantize,
    _quantize_reference,
    _quantize_shapes,
    lambda x, fmt, gscale, seed: (x, gscale, seed, fmt.rule, fmt.global_scale == "row", fmt.stochastic),
    lambda x, gscale, seed, rule, per_row, stochastic: (
        *(x, NVFP4Format(rule, "row" if per_row else "tensor", stochastic), gscale, seed),
    ),
    flat_result=lambda q: q[:3],
    result=lambda args, flat: QuantizedMatrix(*flat, args[0].shape[1]),
)


def quantize(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None = None, seed: Tensor | None = None) -> QuantizedMatrix:
    """Quantise x (R, K) along K to NVFP4; see :func:`peft_nvfp4.numerics.reference.quantize`."""
    return _quantize(x, fmt, gscale, seed)


CHUNK = 1 << 22
"""Elements quantised at a time by :func:`quantize_weight`: the FP32 temporaries of a chunk take some 100 MB."""
CHUNK_CPU = 1 << 18
"""The same on a CPU, where temporaries that fit into its caches take two thirds of the time, and 10 MB."""


def _amax(w: Tensor) -> Tensor:
    """(1,) FP32: the largest magnitude of a finite weight, without a copy of it."""
    low, high = w.detach().aminmax() if w.numel() else (w.new_zeros(()), w.new_zeros(()))
    return torch.maximum(-low, high).float().reshape(1)


def weight_gscale(w: Tensor) -> Tensor:
    """(1,) FP32: the global scale that a finite weight needs."""
    return shared_gscale([w])


def shared_gscale(weights: Sequence[Tensor]) -> Tensor:
    """The global scale (1,) that fits all of some weights, on the first one's device: linears that read one input share it. (Not
    the largest of their scales: that of a weight of zeros is 1.)"""
    return reference.power_of_two_scale(torch.stack([_amax(w).to(weights[0].device) for w in weights]).amax(0))


def quantize_weight(w: Tensor, fmt: NVFP4Format, gscale: Tensor | None = None) -> QuantizedMatrix:
    """``quantize`` for large finite matrices with one global scale: same bits, by chunks of rows, so that the temporaries stay
    small."""
    gscale = weight_gscale(w) if gscale is None else gscale
    step = max(1, (CHUNK_CPU if w.device.type == "cpu" else CHUNK) // max(1, w.shape[1]))
    parts = [quantize(w[i : i + step], fmt, gscale) for i in range(0, max(1, w.shape[0]), step)]
    if len(parts) == 1:
        return parts[0]
    return QuantizedMatrix(torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), gscale, w.shape[1])


def _check_dequantize(q: QuantizedMatrix, dtype: torch.dtype) -> None:
    check_packed("dequantize", *q)
    check(dtype.is_floating_point, lambda: f"dequantize: dtype must be a floating one, got {dtype}")


_dequantize = Operator(
    "dequantize",
    "(Tensor codes, Tensor scales, Tensor gscale, int k, ScalarType dtype) -> Tensor",
    _check_dequantize,
    lambda q, dtype: reference.dequantize(q, dtype).contiguous(),
    lambda q, dtype: q.codes.new_empty(q.codes.shape[0], q.k, dtype=dtype),
    lambda q, dtype: (*q, dtype),
    lambda *flat: (QuantizedMatrix(*flat[:4]), flat[4]),
)


def dequantize(q: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values (R, K) of a quantised matrix; exact in FP32 and BF16."""
    return _dequantize(q, dtype)


def _check_transpose_requantize(q: QuantizedMatrix, factor: float) -> None:
    check_packed("transpose_requantize", *q)
    check(q.gscale.shape[0] == 1, lambda: f"transpose_requantize: a weight has one global scale, got {q.gscale.shape[0]}")


def _transpose_requantize_shapes(q: QuantizedMatrix, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    np_ = padded_k(q.codes.shape[0])
    return q.codes.new_empty(q.k, np_ // 2), q.codes.new_empty(q.k, np_ // BLOCK), q.gscale.new_empty(1)


transpose_requantize = Operator(
    "transpose_requantize",
    "(Tensor codes, Tensor scales, Tensor gscale, int k, float factor) -> (Tensor, Tensor, Tensor)",
    _check_transpose_requantize,
    lambda q, factor: reference.transpose_requantize(q, WEIGHT_BACKWARD),
    _transpose_requantize_shapes,
    lambda q, factor: (*q, factor),
    lambda *flat: (QuantizedMatrix(*flat[:4]), flat[4]),
    flat_result=lambda q: q[:3],
    result=lambda args, flat: QuantizedMatrix(*flat, args[0].codes.shape[0]),
)
"""``transpose_requantize(q, factor) -> QuantizedMatrix``: the backward layout (K, N) of a forward weight q (N, K): D(q)
transposed, quantised along N with one global scale, which is a power of two whatever q's is. ``factor`` is q's scale factor:
kernels quantise BF16 values where it is 1, and FP32 values where D(q) needs them."""
