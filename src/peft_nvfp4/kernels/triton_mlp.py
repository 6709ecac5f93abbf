"""act(gate) * up with its quantisation in one pass, and its backward from the codes of gate and up, in Triton.

Formulas and rounding: :mod:`peft_nvfp4.fused_reference`. One program per row. The forward reads gate and up once and writes
D(h~), the terms of h~ and the NVFP4 copies of gate and up; the backward reads dh and those copies (3.1 bytes a value instead of
6) and writes both gradients, if wanted also in NVFP4, and h~ again if it was not kept.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import fused_reference
from ..formats import padded_k
from .triton_blocks import load_quantized, quantize_store, quantize_store_terms
from .triton_codes import round_to
from .triton_quantize import empty_terms, rows_contiguous
from .triton_rows import BLOCK, load_row, reciprocal, store_row
from .triton_tables import EXACT_MATH, mode_for, num_warps, row_blocks

LOG2E: tl.constexpr = tl.constexpr(fused_reference.LOG2E)
MAGIC: tl.constexpr = tl.constexpr(fused_reference.EXP2_MAGIC)
LIMIT: tl.constexpr = tl.constexpr(fused_reference.EXP2_LIMIT)
C4: tl.constexpr = tl.constexpr(fused_reference.EXP2_COEFFICIENTS[0])
C3: tl.constexpr = tl.constexpr(fused_reference.EXP2_COEFFICIENTS[1])
C2: tl.constexpr = tl.constexpr(fused_reference.EXP2_COEFFICIENTS[2])
C1: tl.constexpr = tl.constexpr(fused_reference.EXP2_COEFFICIENTS[3])
GELU_C0: tl.constexpr = tl.constexpr(fused_reference.GELU_C0)
GELU_C1: tl.constexpr = tl.constexpr(fused_reference.GELU_C1)


@triton.jit
def _sigmoid(z):
    t = tl.minimum(tl.maximum(z * (LOG2E * -1.0), LIMIT * -1.0), LIMIT)
    magic = t + MAGIC
    f = t - (magic - MAGIC)
    p = (((f * C4 + C3) * f + C2) * f + C1) * f + 1.0
    exponent = magic.to(tl.int32, bitcast=True) << 23
    return reciprocal((p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True) + 1.0)


@triton.jit
def _gate(g, GELU: tl.constexpr):
    """sigma with act(g) = g * sigma."""
    return _sigmoid(g * ((g * g) * GELU_C1 + GELU_C0)) if GELU else _sigmoid(g)


@triton.jit
def _gate_gradient(g, sigma, GELU: tl.constexpr):
    """d act / dg."""
    inner = g * (1.0 - sigma)
    if GELU:
        inner = inner * ((g * g) * (3.0 * GELU_C1) + GELU_C0)
    return sigma * (inner + 1.0)


@triton.jit(do_not_specialize=["M"])
def gated_kernel(
    gate_ptr,  # (M, K)
    up_ptr,  # (M, K)
    centre_ptr,  # (K,) float32, where HAS_CENTRE
    codes_ptr,  # (T, M, KP / 2) uint8
    scales_ptr,  # (T, M, KP / 16) uint8
    gscale_ptr,  # (T, M) float32
    h_ptr,  # (M, K)
    gate_codes_ptr,  # (M, KP / 2) uint8
    gate_scales_ptr,
    gate_gscale_ptr,
    up_codes_ptr,
    up_scales_ptr,
    up_gscale_ptr,
    M,
    K,
    KP,
    gate_stride,
    up_stride,
    NB: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_CENTRE: tl.constexpr,
    GELU: tl.constexpr,
    MODE: tl.constexpr,
    TERMS_MODE: tl.constexpr,
):
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    lo_g, hi_g = load_row(gate_ptr + row * gate_stride, blk, K, NB)
    lo_u, hi_u = load_row(up_ptr + row * up_stride, blk, K, NB)
    lo_g, hi_g, lo_u, hi_u = lo_g.to(tl.float32), hi_g.to(tl.float32), lo_u.to(tl.float32), hi_u.to(tl.float32)
    quantize_store(gate_codes_ptr, gate_scales_ptr, gate_gscale_ptr, row, lo_g, hi_g, blk, KP, NB, MODE)
    quantize_store(up_codes_ptr, up_scales_ptr, up_gscale_ptr, row, lo_u, hi_u, blk, KP, NB, MODE)
    lo, hi = (lo_g * _gate(lo_g, GELU)) * lo_u, (hi_g * _gate(hi_g, GELU)) * hi_u
    lo, hi = round_to(lo, hi, dtype, MODE)
    lo, hi = quantize_store_terms(
        codes_ptr, scales_ptr, gscale_ptr, centre_ptr, row, lo, hi, blk, M, K, KP, NB, TERMS, HAS_CENTRE, TERMS_MODE
    )  # fmt: skip
    store_row(h_ptr + row * K, lo, hi, blk, K, NB)


@triton.jit(do_not_specialize=["M"])
def gated_backward_kernel(
    dh_ptr,  # (M, K)
    gate_codes_ptr,  # (M, KP / 2) uint8
    gate_scales_ptr,
    gate_gscale_ptr,
    up_codes_ptr,
    up_scales_ptr,
    up_gscale_ptr,
    centre_ptr,  # (K,) float32, where HAS_CENTRE
    dgate_ptr,  # (M, K)
    dup_ptr,
    codes_ptr,  # (2, M, KP / 2) uint8: dgate, dup; where QUANTIZE
    scales_ptr,
    gscale_ptr,
    h_codes_ptr,  # (T, M, KP / 2) uint8, where TERMS
    h_scales_ptr,
    h_gscale_ptr,
    M,
    K,
    KP,
    dh_stride,
    NB: tl.constexpr,
    QUANTIZE: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_CENTRE: tl.constexpr,
    GELU: tl.constexpr,
    MODE: tl.constexpr,
    TERMS_MODE: tl.constexpr,
):
    dtype: tl.constexpr = dh_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    codes, scales = row * (KP // 2), row * (KP // BLOCK)
    lo_g, hi_g = load_quantized(gate_codes_ptr + codes, gate_scales_ptr + scales, tl.load(gate_gscale_ptr + row), blk, KP)
    lo_u, hi_u = load_quantized(up_codes_ptr + codes, up_scales_ptr + scales, tl.load(up_gscale_ptr + row), blk, KP)
    lo_d, hi_d = load_row(dh_ptr + row * dh_stride, blk, K, NB)
    lo_d, hi_d = lo_d.to(tl.float32), hi_d.to(tl.float32)
    lo_s, hi_s = _gate(lo_g, GELU), _gate(hi_g, GELU)
    lo_a, hi_a = lo_g * lo_s, hi_g * hi_s
    if TERMS:
        lo, hi = round_to(lo_a * lo_u, hi_a * hi_u, dtype, MODE)
        quantize_store_terms(
            h_codes_ptr, h_scales_ptr, h_gscale_ptr, centre_ptr, row, lo, hi, blk, M, K, KP, NB, TERMS, HAS_CENTRE, TERMS_MODE
        )  # fmt: skip
    lo, hi = round_to(lo_d * lo_a, hi_d * hi_a, dtype, MODE)
    store_row(dup_ptr + row * K, lo, hi, blk, K, NB)
    if QUANTIZE:
        quantize_store(codes_ptr, scales_ptr, gscale_ptr, row + M, lo, hi, blk, KP, NB, MODE)
    lo = (lo_d * lo_u) * _gate_gradient(lo_g, lo_s, GELU)
    hi = (hi_d * hi_u) * _gate_gradient(hi_g, hi_s, GELU)
    lo, hi = round_to(lo, hi, dtype, MODE)
    store_row(dgate_ptr + row * K, lo, hi, blk, K, NB)
    if QUANTIZE:
        quantize_store(codes_ptr, scales_ptr, gscale_ptr, row, lo, hi, blk, KP, NB, MODE)


# ---------------------------------------------------------------------------------------------- launches


def silu_mul_quantize(gate: Tensor, up: Tensor, centre: Tensor | None, act: str, terms: int) -> tuple[Tensor, ...]:
    """(codes, scales, gscale, h, then the same three of gate and of up); see fused_ops for the shapes."""
    m, k = gate.shape
    gate, up = rows_contiguous(gate), rows_contiguous(up)
    parts = empty_terms(gate, terms, m, k)
    h = gate.new_empty(m, k)
    kept = [t[0] for _ in range(2) for t in empty_terms(gate, 1, m, k)]
    if m:
        nb = row_blocks(k)
        gated_kernel[(m,)](
            gate, up, gate if centre is None else centre, *parts, h, *kept, m, k, padded_k(k), gate.stride(0), up.stride(0),
            NB=nb, TERMS=terms, HAS_CENTRE=centre is not None, GELU=act == "gelu_tanh", MODE=mode_for(gate.dtype),
            TERMS_MODE=mode_for(gate.dtype, centre is None), num_warps=num_warps(nb, "mlp"), **EXACT_MATH,
        )  # fmt: skip
    return *parts, h, *kept


def silu_mul_backward(
    dh: Tensor,
    gate_codes: Tensor,
    gate_scales: Tensor,
    gate_gscale: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    up_gscale: Tensor,
    centre: Tensor | None,
    act: str,
    quantize: bool,
    recompute_terms: int,
) -> tuple[Tensor, ...]:
    """(dgate, dup, their codes, scales and gscale stacked, the recomputed terms of h~); see fused_ops for the shapes."""
    m, k = dh.shape
    dh = rows_contiguous(dh)
    kept = [t.contiguous() for t in (gate_codes, gate_scales, gate_gscale, up_codes, up_scales, up_gscale)]
    dgate, dup = dh.new_empty(m, k), dh.new_empty(m, k)
    quantized = empty_terms(dh, 2 if quantize else 0, m, k)
    parts = empty_terms(dh, recompute_terms, m, k)
    if m:
        nb = row_blocks(k)
        gated_backward_kernel[(m,)](
            dh, *kept, dh if centre is None else centre,
            dgate, dup, *quantized, *parts, m, k, padded_k(k), dh.stride(0),
            NB=nb, QUANTIZE=quantize, TERMS=recompute_terms, HAS_CENTRE=centre is not None, GELU=act == "gelu_tanh",
            MODE=mode_for(dh.dtype), TERMS_MODE=mode_for(dh.dtype, centre is None), num_warps=num_warps(nb, "mlp_backward"),
            **EXACT_MATH,
        )  # fmt: skip
    return dgate, dup, *quantized, *parts
