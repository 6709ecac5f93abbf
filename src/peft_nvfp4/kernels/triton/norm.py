"""RMSNorm and its quantisation in one pass, and the norm's backward from the codes, in Triton.

Formulas, rounding and the order of sums: :mod:`peft_nvfp4.numerics.fused_reference`. One program per row. The forward reads x
once and writes the codes, D(y~) and the statistic; the backward reads dy and the codes and writes dx.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.formats import BLOCK as BLOCK_SIZE
from ...numerics.formats import QuantizedMatrix
from ...numerics.formats import padded_k as padded
from ...numerics.fused_reference import GAMMA_RANGE, NormOutput
from ...ops.linear import empty_terms, matrices
from .blocks import load_quantized, store_terms
from .codes import EXACT, PAIR
from .launch import launch_rows, mode_for, rows_contiguous
from .pairs import multiply
from .rows import BLOCK, INF, load_row, load_values, padded_k, reciprocal, rounded, row_sum, store_values, to_floats


def _shifted_bits(x: float) -> int:
    """Bits of an FP32 number without its sign, shifted left by 1."""
    return 2 * struct.unpack("i", struct.pack("f", x))[0]


LEAST: tl.constexpr = tl.constexpr(_shifted_bits(GAMMA_RANGE[0]))
RANGE: tl.constexpr = tl.constexpr(_shifted_bits(GAMMA_RANGE[1]) - _shifted_bits(GAMMA_RANGE[0]))


@triton.jit
def _weight(gamma_ptr, blk, K: tl.constexpr, NB: tl.constexpr, PLUS_ONE: tl.constexpr, WEIGHT_MODE: tl.constexpr):
    lo, hi = to_floats(load_values(gamma_ptr, blk, K, NB, WEIGHT_MODE), WEIGHT_MODE)
    if PLUS_ONE:
        lo, hi = lo + 1.0, hi + 1.0
    return lo, hi


@triton.jit
def _inverse(w, SHORT: tl.constexpr):
    """1 / w, 0 where that would only amplify noise. SHORT: w has 8 bits (BF16), so that clearing more changes nothing."""
    inverse = reciprocal(w, 3, PAIR) if SHORT else reciprocal(w, 1, EXACT)
    above = (w.to(tl.int32, bitcast=True) << 1) - LEAST  # without the sign, numbers compare like their bits; NaN is largest
    return tl.where(above.to(tl.uint32, bitcast=True) <= RANGE, inverse, 0.0)


@triton.jit(do_not_specialize=["M"])
def norm_kernel(
    x_ptr,  # (M, K)
    gamma_ptr,  # (K,)
    offset_ptr,  # (K,) float32, where HAS_OFFSET
    codes_ptr, scales_ptr, gscale_ptr,  # (T, M, KP / 2) uint8, (T, M, KP / 16) uint8, (T, M) float32
    y_ptr,  # (M, K)
    rstd_ptr,  # (M,) float32
    M, x_stride, eps, inverse_k,
    K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr, TERMS: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PLUS_ONE: tl.constexpr, WEIGHT_MODE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    x = load_values(x_ptr + row * x_stride, blk, K, NB, MODE)
    lo, hi = to_floats(x, MODE)
    variance = row_sum(lo * lo, hi * hi, NB) * inverse_k
    d = tl.sqrt_rn(variance + eps)
    limit = tl.where(d == 0.0, INF, tl.where(d == INF, 0.0, float("nan")))  # Newton's steps turn 0 and Inf into NaN
    rstd = tl.where((d > 0.0) & (d < INF), reciprocal(d, 1, EXACT), limit)
    tl.store(rstd_ptr + row, rstd)
    lo, hi = lo * rstd, hi * rstd
    if MODE == PAIR and WEIGHT_MODE == PAIR and not PLUS_ONE:
        y = multiply(load_values(gamma_ptr, blk, K, NB, PAIR), rounded(lo, hi, dtype, MODE))
    else:
        lo_w, hi_w = _weight(gamma_ptr, blk, K, NB, PLUS_ONE, WEIGHT_MODE)
        if not PLUS_ONE:
            lo, hi = to_floats(rounded(lo, hi, dtype, MODE), MODE)
        lo, hi = lo_w * lo, hi_w * hi
        y = rounded(lo, hi, dtype, MODE)
    if PADDED:  # a row with Inf or NaN has rstd 0, Inf or NaN, and 0 * NaN would spoil blocks that are padding alone
        inside = (blk * BLOCK < K)[:, None]
        y = tl.where(inside, y, 0) if MODE == PAIR else (tl.where(inside, y[0], 0.0), tl.where(inside, y[1], 0.0))
    store_terms(codes_ptr, scales_ptr, gscale_ptr, y_ptr, offset_ptr, row, y, blk, M, K, NB, MODE, TERMS, HAS_OFFSET, True, True)


@triton.jit
def norm_backward_kernel(
    dy_ptr,  # (M, K)
    codes_ptr, scales_ptr, gscale_ptr,  # first term: (M, KP / 2) uint8, (M, KP / 16) uint8, (M,) float32
    codes2_ptr, scales2_ptr, gscale2_ptr,  # second term, where TERMS == 2
    offset_ptr,  # (K,) float32, where HAS_OFFSET
    gamma_ptr,  # (K,)
    rstd_ptr,  # (M,) float32
    dx_ptr,  # (M, K)
    dy_stride, inverse_k,
    K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr, TERMS: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PLUS_ONE: tl.constexpr, WEIGHT_MODE: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    KP: tl.constexpr = padded_k(K)
    codes, scales = row * (KP // 2), row * (KP // BLOCK)
    lo, hi = to_floats(load_values(dy_ptr + row * dy_stride, blk, K, NB, MODE), MODE)
    lo_d, hi_d = load_quantized(codes_ptr + codes, scales_ptr + scales, tl.load(gscale_ptr + row), blk, K, NB, MODE)
    if TERMS == 2:
        g = tl.load(gscale2_ptr + row)
        lo_2, hi_2 = load_quantized(codes2_ptr + codes, scales2_ptr + scales, g, blk, K, NB, MODE)
        lo_d, hi_d = lo_d + lo_2, hi_d + hi_2
    if HAS_OFFSET:
        lo_c, hi_c = load_row(offset_ptr, blk, K, NB)
        lo_d, hi_d = lo_d + lo_c, hi_d + hi_c
    c = row_sum(lo * lo_d, hi * hi_d, NB) * inverse_k
    rstd = tl.load(rstd_ptr + row)
    lo_w, hi_w = _weight(gamma_ptr, blk, K, NB, PLUS_ONE, WEIGHT_MODE)
    SHORT: tl.constexpr = WEIGHT_MODE == PAIR and not PLUS_ONE
    lo = rstd * (lo_w * lo - (lo_d * _inverse(lo_w, SHORT)) * c)
    hi = rstd * (hi_w * hi - (hi_d * _inverse(hi_w, SHORT)) * c)
    store_values(dx_ptr + row * K, rounded(lo, hi, dtype, MODE), blk, K, NB, MODE)


def rmsnorm_quantize(x: Tensor, gamma: Tensor, offset: Tensor | None, eps: float, plus_one: bool, terms: int) -> NormOutput:
    """The operator ``rmsnorm_quantize``."""
    m, k = x.shape
    x, gamma = rows_contiguous(x), gamma.contiguous()
    parts, y, rstd = empty_terms(x, terms, m, k), x.new_empty(m, k), x.new_empty(m, dtype=torch.float32)
    constants = {"TERMS": terms, "HAS_OFFSET": offset is not None, "PLUS_ONE": plus_one}
    constants |= {"WEIGHT_MODE": mode_for(gamma.dtype, k, gamma[None]), "PADDED": padded(k) - k >= BLOCK_SIZE}
    tensors = (x, gamma, x if offset is None else offset, *parts, y, rstd)
    launch_rows(norm_kernel, "norm", (m, k), mode_for(x.dtype, k, x), tensors, (m, x.stride(0), eps, 1.0 / k), constants)
    return NormOutput(matrices(*parts, k), y, rstd)


def rmsnorm_backward(
    dy: Tensor, parts: Sequence[QuantizedMatrix], offset: Tensor | None, gamma: Tensor, rstd: Tensor, plus_one: bool
) -> Tensor:
    """dx (M, K) in dy's dtype."""
    k = dy.shape[1]
    dy, gamma = rows_contiguous(dy), gamma.contiguous()
    dx = dy.new_empty(dy.shape)
    kept = [[t.contiguous() for t in part[:3]] for part in parts]
    tensors = (dy, *kept[0], *kept[-1], dy if offset is None else offset, gamma, rstd.contiguous(), dx)
    constants = {"TERMS": len(parts), "HAS_OFFSET": offset is not None, "PLUS_ONE": plus_one}
    constants |= {"WEIGHT_MODE": mode_for(gamma.dtype, k, gamma[None])}
    mode = mode_for(dy.dtype, k, dy)
    launch_rows(norm_backward_kernel, "norm_backward", dy.shape, mode, tensors, (dy.stride(0), 1.0 / k), constants)
    return dx
