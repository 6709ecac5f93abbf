"""RMSNorm and its quantisation in one pass, and the norm's backward from the codes, in Triton.

Formulas, rounding and the order of sums: :mod:`peft_nvfp4.fused_reference`. One program per row. The forward reads x (and the
residual) once and writes the codes, D(y~), the statistic and the new residual; the backward reads dy and the codes and writes dx.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import fused_reference
from ..formats import BLOCK as BLOCK_SIZE
from ..formats import padded_k
from .triton_blocks import load_quantized, quantize_store_terms
from .triton_codes import EXACT, round_to
from .triton_quantize import empty_terms, rows_contiguous
from .triton_rows import BLOCK, INF, load_row, reciprocal, row_sum, store_row
from .triton_tables import EXACT_MATH, mode_for, num_warps, row_blocks

GAMMA_MIN: tl.constexpr = tl.constexpr(fused_reference.GAMMA_RANGE[0])
GAMMA_MAX: tl.constexpr = tl.constexpr(fused_reference.GAMMA_RANGE[1])


@triton.jit
def _weight(gamma_ptr, blk, K, NB: tl.constexpr, PLUS_ONE: tl.constexpr):
    lo, hi = load_row(gamma_ptr, blk, K, NB)
    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    if PLUS_ONE:
        lo, hi = lo + 1.0, hi + 1.0
    return lo, hi


@triton.jit
def _inverse(w):
    """1 / w, 0 where that would only amplify noise."""
    return tl.where((tl.abs(w) >= GAMMA_MIN) & (tl.abs(w) <= GAMMA_MAX), reciprocal(w), 0.0)


@triton.jit
def _rstd(d):
    """1 / d of d = sqrt(variance + eps): 0, Inf and NaN apart, which Newton's steps turn into NaN."""
    limit = tl.where(d == 0.0, INF, tl.where(d == INF, 0.0, float("nan")))
    return tl.where((d > 0.0) & (d < INF), reciprocal(d), limit)


@triton.jit(do_not_specialize=["M"])
def norm_kernel(
    x_ptr,  # (M, K)
    residual_ptr,  # (M, K), where HAS_RESIDUAL
    gamma_ptr,  # (K,)
    centre_ptr,  # (K,) float32, where HAS_CENTRE
    codes_ptr,  # (T, M, KP / 2) uint8
    scales_ptr,  # (T, M, KP / 16) uint8
    gscale_ptr,  # (T, M) float32
    y_ptr,  # (M, K)
    rstd_ptr,  # (M,) float32
    sum_ptr,  # (M, K) x + residual, where HAS_RESIDUAL
    M,
    K,
    KP,
    x_stride,
    residual_stride,
    eps,
    inverse_k,
    NB: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_CENTRE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    MODE: tl.constexpr,
    PADDED: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    lo, hi = load_row(x_ptr + row * x_stride, blk, K, NB)
    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    if HAS_RESIDUAL:
        lo_r, hi_r = load_row(residual_ptr + row * residual_stride, blk, K, NB)
        lo, hi = round_to(lo + lo_r.to(tl.float32), hi + hi_r.to(tl.float32), dtype, EXACT)
        store_row(sum_ptr + row * K, lo, hi, blk, K, NB)
    variance = row_sum(lo * lo, hi * hi, NB) * inverse_k
    rstd = _rstd(tl.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + row, rstd)
    lo_w, hi_w = _weight(gamma_ptr, blk, K, NB, PLUS_ONE)
    lo, hi = lo * rstd, hi * rstd
    if not PLUS_ONE:
        lo, hi = round_to(lo, hi, dtype, EXACT)
    lo, hi = round_to(lo_w * lo, hi_w * hi, dtype, EXACT)
    if PADDED:  # a row with Inf or NaN has rstd 0, Inf or NaN, and 0 * NaN would spoil blocks that are padding alone
        inside = (blk * BLOCK < K)[:, None]
        lo, hi = tl.where(inside, lo, 0.0), tl.where(inside, hi, 0.0)
    lo, hi = quantize_store_terms(
        codes_ptr, scales_ptr, gscale_ptr, centre_ptr, row, lo, hi, blk, M, K, KP, NB, TERMS, HAS_CENTRE, MODE
    )  # fmt: skip
    store_row(y_ptr + row * K, lo, hi, blk, K, NB)


@triton.jit
def norm_backward_kernel(
    dy_ptr,  # (M, K)
    codes_ptr,  # (M, KP / 2) uint8, first term
    scales_ptr,  # (M, KP / 16) uint8
    gscale_ptr,  # (M,) float32
    codes2_ptr,  # second term, where TERMS == 2
    scales2_ptr,
    gscale2_ptr,
    centre_ptr,  # (K,) float32, where HAS_CENTRE
    gamma_ptr,  # (K,)
    rstd_ptr,  # (M,) float32
    residual_grad_ptr,  # (M, K), where HAS_RESIDUAL
    dx_ptr,  # (M, K)
    K,
    KP,
    dy_stride,
    residual_stride,
    inverse_k,
    NB: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_CENTRE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    codes, scales = row * (KP // 2), row * (KP // BLOCK)
    lo, hi = load_row(dy_ptr + row * dy_stride, blk, K, NB)
    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    lo_d, hi_d = load_quantized(codes_ptr + codes, scales_ptr + scales, tl.load(gscale_ptr + row), blk, KP)
    if TERMS == 2:
        lo_2, hi_2 = load_quantized(codes2_ptr + codes, scales2_ptr + scales, tl.load(gscale2_ptr + row), blk, KP)
        lo_d, hi_d = lo_d + lo_2, hi_d + hi_2
    if HAS_CENTRE:
        lo_c, hi_c = load_row(centre_ptr, blk, K, NB)
        lo_d, hi_d = lo_d + lo_c, hi_d + hi_c
    c = row_sum(lo * lo_d, hi * hi_d, NB) * inverse_k
    rstd = tl.load(rstd_ptr + row)
    lo_w, hi_w = _weight(gamma_ptr, blk, K, NB, PLUS_ONE)
    lo = rstd * (lo_w * lo - (lo_d * _inverse(lo_w)) * c)
    hi = rstd * (hi_w * hi - (hi_d * _inverse(hi_w)) * c)
    if HAS_RESIDUAL:
        lo_r, hi_r = load_row(residual_grad_ptr + row * residual_stride, blk, K, NB)
        lo, hi = lo + lo_r.to(tl.float32), hi + hi_r.to(tl.float32)
    store_row(dx_ptr + row * K, lo, hi, blk, K, NB)


# ---------------------------------------------------------------------------------------------- launches


def rmsnorm_quantize(
    x: Tensor, residual: Tensor | None, gamma: Tensor, centre: Tensor | None, eps: float, plus_one: bool, terms: int
) -> tuple[Tensor, ...]:
    """(codes, scales, gscale, y, rstd, x + residual); see fused_ops for the shapes."""
    m, k = x.shape
    x = rows_contiguous(x)
    codes, scales, gscale = empty_terms(x, terms, m, k)
    y = x.new_empty(m, k)
    rstd = x.new_empty(m, dtype=torch.float32)
    total = x.new_empty((m, k) if residual is not None else (0,))
    if m:
        nb = row_blocks(k)
        residual = x if residual is None else rows_contiguous(residual)
        norm_kernel[(m,)](
            x, residual, gamma.contiguous(), x if centre is None else centre, codes, scales, gscale, y, rstd, total,
            m, k, padded_k(k), x.stride(0), residual.stride(0), eps, 1.0 / k,
            NB=nb, TERMS=terms, HAS_RESIDUAL=total.numel() > 0, HAS_CENTRE=centre is not None, PLUS_ONE=plus_one,
            MODE=mode_for(x.dtype, centre is None), PADDED=padded_k(k) - k >= BLOCK_SIZE,
            num_warps=num_warps(nb, "norm"), **EXACT_MATH,
        )  # fmt: skip
    return codes, scales, gscale, y, rstd, total


def rmsnorm_backward(
    dy: Tensor,
    codes: list[Tensor],
    scales: list[Tensor],
    gscale: list[Tensor],
    centre: Tensor | None,
    gamma: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None,
    plus_one: bool,
) -> Tensor:
    """dx (M, K) in dy's dtype."""
    m, k = dy.shape
    dy = rows_contiguous(dy)
    dx = dy.new_empty(m, k)
    codes, scales, gscale = ([t.contiguous() for t in tensors] for tensors in (codes, scales, gscale))
    if m:
        nb, last = row_blocks(k), len(codes) - 1
        around = dy if residual_grad is None else rows_contiguous(residual_grad)
        norm_backward_kernel[(m,)](
            dy, codes[0], scales[0], gscale[0], codes[last], scales[last], gscale[last], dy if centre is None else centre,
            gamma.contiguous(), rstd.contiguous(), around, dx, k, padded_k(k), dy.stride(0), around.stride(0), 1.0 / k,
            NB=nb, TERMS=len(codes), HAS_RESIDUAL=residual_grad is not None, HAS_CENTRE=centre is not None,
            PLUS_ONE=plus_one, num_warps=num_warps(nb, "norm_backward"), **EXACT_MATH,
        )  # fmt: skip
    return dx
