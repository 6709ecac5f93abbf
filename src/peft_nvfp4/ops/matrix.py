"""Operators on one matrix: quantize, dequantize, the backward layout of a weight.

The public functions take and return :class:`~peft_nvfp4.numerics.formats.QuantizedMatrix`; the operators speak tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import reference
from ..numerics.formats import BLOCK, NVFP4Format, QuantizedMatrix, padded_k
from .core import FLOATS, Operator, check, check_packed, check_seed

# ---------------------------------------------------------------------------------------------- quantize


def _check_quantize(x: Tensor, gscale: Tensor | None, seed: Tensor | None, rule: str, per_row: bool, stochastic: bool) -> None:
    check(x.ndim == 2, lambda: f"quantize: x must be a matrix (R, K), got shape {tuple(x.shape)}")
    check(x.dtype in FLOATS, lambda: f"quantize: x must be float32, bfloat16 or float16, got {x.dtype}")
    check(not stochastic or seed is not None, lambda: "quantize: stochastic rounding needs a seed (an int64 scalar tensor)")
    check_seed("quantize", seed)
    if gscale is not None:
        check(gscale.dtype == torch.float32, lambda: f"quantize: gscale must be float32, got {gscale.dtype}")
        check(
            gscale.ndim == 1 and gscale.shape[0] in (1, x.shape[0]),
            lambda: f"quantize: gscale must be (1,) or ({x.shape[0]},), got {tuple(gscale.shape)}",
        )


def _quantize_reference(x: Tensor, gscale: Tensor | None, seed: Tensor | None, rule: str, per_row: bool, stochastic: bool):
    q = reference.quantize(x, NVFP4Format(rule, "row" if per_row else "tensor", stochastic), gscale, seed)
    return q.codes, q.scales, q.gscale.clone() if gscale is not None else q.gscale  # an output may not alias an input


def _quantize_shapes(x: Tensor, gscale: Tensor | None, seed: Tensor | None, rule: str, per_row: bool, stochastic: bool):
    rows, kp, byte = x.shape[0], padded_k(x.shape[1]), torch.uint8
    n = gscale.shape[0] if gscale is not None else (rows if per_row else 1)
    return x.new_empty(rows, kp // 2, dtype=byte), x.new_empty(rows, kp // BLOCK, dtype=byte), x.new_empty(n, dtype=torch.float32)


_quantize = Operator(
    "quantize",
    "(Tensor x, Tensor? gscale, Tensor? seed, str rule, bool per_row, bool stochastic) -> (Tensor, Tensor, Tensor)",
    _check_quantize,
    _quantize_reference,
    _quantize_shapes,
)


def quantize(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None = None, seed: Tensor | None = None) -> QuantizedMatrix:
    """Quantise x (R, K) along K to NVFP4; see :func:`peft_nvfp4.numerics.reference.quantize`.

    Raises:
        RuntimeError: x is no matrix or not of a floating dtype; gscale has a wrong shape; a stochastic format without seed.
    """
    return QuantizedMatrix(*_quantize(x, gscale, seed, fmt.rule, fmt.global_scale == "row", fmt.stochastic), x.shape[1])


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
    return reference.power_of_two_scale(_amax(w))


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


# ---------------------------------------------------------------------------------------------- dequantize


def _check_dequantize(codes: Tensor, scales: Tensor, gscale: Tensor, k: int, dtype: torch.dtype) -> None:
    check_packed("dequantize", codes, scales, gscale, k)
    check(dtype.is_floating_point, lambda: f"dequantize: dtype must be a floating one, got {dtype}")


_dequantize = Operator(
    "dequantize",
    "(Tensor codes, Tensor scales, Tensor gscale, int k, ScalarType dtype) -> Tensor",
    _check_dequantize,
    lambda codes, scales, gscale, k, dtype: reference.dequantize(QuantizedMatrix(codes, scales, gscale, k), dtype).contiguous(),
    lambda codes, scales, gscale, k, dtype: codes.new_empty(codes.shape[0], k, dtype=dtype),
)


def dequantize(q: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values (R, K) of a quantised matrix; exact in FP32 and BF16."""
    return _dequantize(*q, dtype)


# ---------------------------------------------------------------------------------------------- transpose_requantize


def _transpose_requantize_shapes(codes: Tensor, scales: Tensor, gscale: Tensor, k: int, rule: str, factor: float = 1.0):
    np_ = padded_k(codes.shape[0])
    return codes.new_empty(k, np_ // 2), codes.new_empty(k, np_ // BLOCK), gscale.new_empty(1)


_transpose_requantize = Operator(
    "transpose_requantize",
    "(Tensor codes, Tensor scales, Tensor gscale, int k, str rule, float factor=1.) -> (Tensor, Tensor, Tensor)",
    lambda codes, scales, gscale, k, rule, factor=1.0: check_packed("transpose_requantize", codes, scales, gscale, k),
    lambda codes, scales, gscale, k, rule, factor=1.0: reference.transpose_requantize(
        QuantizedMatrix(codes, scales, gscale, k), NVFP4Format(rule)
    )[:3],
    _transpose_requantize_shapes,
)


def transpose_requantize(q: QuantizedMatrix, fmt: NVFP4Format, factor: float = 1.0) -> QuantizedMatrix:
    """Backward layout (K, N) of a forward weight (N, K): D(q) transposed, quantised along N with one global scale, which is a
    power of two whatever q's is.

    Args:
        factor: scale factor of q. Kernels quantise BF16 values where it is 1, and FP32 values where D(q) needs them.

    Raises:
        ValueError: a format with row scales or stochastic rounding (a weight has neither).
    """
    if fmt.stochastic or fmt.global_scale != "tensor":
        raise ValueError(f"transpose_requantize: a weight has one global scale and is rounded to nearest, got {fmt}")
    return QuantizedMatrix(*_transpose_requantize(*q, fmt.rule, factor), q.codes.shape[0])
