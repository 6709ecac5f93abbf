"""act(gate) * up with its quantisation in one pass, and its backward from the codes of gate and up, in Triton.

Formulas and rounding: :mod:`peft_nvfp4.numerics.fused_reference`. One program per row. The forward reads gate and up once and
writes D(h~), the terms of h~ and the NVFP4 copies of gate and up; the backward reads dh and those copies (3.1 bytes a value
instead of 6) and writes both gradients. ``gated_values`` makes D(h~) anew from those copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import fused_reference
from ...numerics.formats import QuantizedMatrix
from ...numerics.fused_reference import GatedGrads, GatedOutput
from ...ops.linear import empty_matrix, empty_terms, matrices
from .blocks import amax_values, finite_part, load_quantized, quantize_store, store_terms
from .codes import PAIR
from .launch import launch_rows, mode_for, rows_contiguous
from .rows import BLOCK, load_values, padded_k, reciprocal, rounded, row_max, store_values, to_floats

SCALE: tl.constexpr = tl.constexpr(fused_reference.EXP2_SCALE)
START: tl.constexpr = tl.constexpr(fused_reference.EXP2_START)
SPAN: tl.constexpr = tl.constexpr(-fused_reference.EXP2_SPAN)
MAGIC: tl.constexpr = tl.constexpr(fused_reference.EXP2_MAGIC)
C4, C3, C2, C1 = map(tl.constexpr, fused_reference.EXP2_COEFFICIENTS)
GELU_C0: tl.constexpr = tl.constexpr(fused_reference.GELU_C0)
GELU_C1: tl.constexpr = tl.constexpr(fused_reference.GELU_C1)


@triton.jit
def _sigmoid(z, MODE: tl.constexpr):
    if MODE == PAIR:  # clamped to 0 .. 1, which the GPU does at no cost but only if told so
        v = tl.inline_asm_elementwise(
            "add.rn.sat.f32 $0, $1, $2;", "=f,f,f", [z * SCALE, tl.full(z.shape, START, tl.float32)], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        v = tl.minimum(tl.maximum(z * SCALE + START, 0.0), 1.0)
    magic = tl.fma(v, SPAN, MAGIC)
    f = tl.fma(v, SPAN, (magic - MAGIC) * -1.0)
    p = tl.fma(tl.fma(tl.fma(tl.fma(f, C4, C3), f, C2), f, C1), f, 1.0)
    exponent = magic.to(tl.int32, bitcast=True) << 23
    return reciprocal((p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True) + 1.0, 3, MODE)


@triton.jit
def _gate(g, GELU: tl.constexpr, MODE: tl.constexpr):
    """sigma with act(g) = g * sigma."""
    return _sigmoid(g * ((g * g) * GELU_C1 + GELU_C0), MODE) if GELU else _sigmoid(g, MODE)


@triton.jit
def _gate_gradient(g, sigma, GELU: tl.constexpr):
    """d act / dg."""
    inner = g * (1.0 - sigma)
    if GELU:
        inner = inner * ((g * g) * (3.0 * GELU_C1) + GELU_C0)
    return sigma * (inner + 1.0)


@triton.jit
def _product(lo_g, hi_g, lo_u, hi_u, dtype: tl.constexpr, GELU: tl.constexpr, MODE: tl.constexpr):
    """act(gate) * up, rounded to ``dtype``."""
    return rounded((lo_g * _gate(lo_g, GELU, MODE)) * lo_u, (hi_g * _gate(hi_g, GELU, MODE)) * hi_u, dtype, MODE)


@triton.jit(do_not_specialize=["M"])
def gated_kernel(
    gate_ptr, up_ptr,  # (M, K)
    offset_ptr,  # (K,) float32, where HAS_OFFSET
    codes_ptr, scales_ptr, gscale_ptr,  # (T, M, KP / 2) uint8, (T, M, KP / 16) uint8, (T, M) float32
    h_ptr,  # (M, K), where KEEP_H
    gate_codes_ptr, gate_scales_ptr, gate_gscale_ptr,  # as those of one term
    up_codes_ptr, up_scales_ptr, up_gscale_ptr,
    M, gate_stride, up_stride,
    K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr,
    TERMS: tl.constexpr, HAS_OFFSET: tl.constexpr, GELU: tl.constexpr, KEEP_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    gate = load_values(gate_ptr + row * gate_stride, blk, K, NB, MODE)
    up = load_values(up_ptr + row * up_stride, blk, K, NB, MODE)
    gate_amax, up_amax = amax_values(gate, NB, MODE), amax_values(up, NB, MODE)
    gate_max, up_max = tl.split(row_max(tl.join(finite_part(gate_amax), finite_part(up_amax))))  # one exchange between warps
    quantize_store(gate_codes_ptr, gate_scales_ptr, gate_gscale_ptr, row, gate, gate_amax, gate_max, blk, K, NB, MODE)
    quantize_store(up_codes_ptr, up_scales_ptr, up_gscale_ptr, row, up, up_amax, up_max, blk, K, NB, MODE)
    lo_g, hi_g = to_floats(gate, MODE)
    lo_u, hi_u = to_floats(up, MODE)
    h = _product(lo_g, hi_g, lo_u, hi_u, gate_ptr.dtype.element_ty, GELU, MODE)
    store_terms(
        codes_ptr, scales_ptr, gscale_ptr, h_ptr, offset_ptr, row, h, blk, M, K, NB, MODE, TERMS, HAS_OFFSET, True, KEEP_H
    )


@triton.jit
def _load_gate_up(
    gate_codes_ptr, gate_scales_ptr, gate_gscale_ptr, up_codes_ptr, up_scales_ptr, up_gscale_ptr, row, blk,
    K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """(lo, hi) of D(gate) and of D(up), FP32, of a row."""
    KP: tl.constexpr = padded_k(K)
    codes, scales = row * (KP // 2), row * (KP // BLOCK)
    g = tl.load(gate_gscale_ptr + row)
    lo_g, hi_g = load_quantized(gate_codes_ptr + codes, gate_scales_ptr + scales, g, blk, K, NB, MODE)
    g = tl.load(up_gscale_ptr + row)
    lo_u, hi_u = load_quantized(up_codes_ptr + codes, up_scales_ptr + scales, g, blk, K, NB, MODE)
    return lo_g, hi_g, lo_u, hi_u


@triton.jit
def gated_backward_kernel(
    dh_ptr,  # (M, K)
    gate_codes_ptr, gate_scales_ptr, gate_gscale_ptr,  # (M, KP / 2) uint8, (M, KP / 16) uint8, (M,) float32
    up_codes_ptr, up_scales_ptr, up_gscale_ptr,
    dgate_ptr, dup_ptr,  # (M, K)
    dh_stride,
    K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = dh_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    lo_g, hi_g, lo_u, hi_u = _load_gate_up(
        gate_codes_ptr, gate_scales_ptr, gate_gscale_ptr, up_codes_ptr, up_scales_ptr, up_gscale_ptr, row, blk, K, NB, MODE
    )
    lo_d, hi_d = to_floats(load_values(dh_ptr + row * dh_stride, blk, K, NB, MODE), MODE)
    lo_s, hi_s = _gate(lo_g, GELU, MODE), _gate(hi_g, GELU, MODE)
    lo_a, hi_a = lo_g * lo_s, hi_g * hi_s
    dup = rounded(lo_d * lo_a, hi_d * hi_a, dtype, MODE)
    store_values(dup_ptr + row * K, dup, blk, K, NB, MODE)
    lo, hi = (lo_d * lo_u) * _gate_gradient(lo_g, lo_s, GELU), (hi_d * hi_u) * _gate_gradient(hi_g, hi_s, GELU)
    dgate = rounded(lo, hi, dtype, MODE)
    store_values(dgate_ptr + row * K, dgate, blk, K, NB, MODE)


@triton.jit
def gated_values_kernel(
    gate_codes_ptr, gate_scales_ptr, gate_gscale_ptr,  # (M, KP / 2) uint8, (M, KP / 16) uint8, (M,) float32
    up_codes_ptr, up_scales_ptr, up_gscale_ptr,
    offset_ptr,  # (K,) float32, where HAS_OFFSET
    out_ptr,  # (M, K)
    K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr,
    TERMS: tl.constexpr, HAS_OFFSET: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    lo_g, hi_g, lo_u, hi_u = _load_gate_up(
        gate_codes_ptr, gate_scales_ptr, gate_gscale_ptr, up_codes_ptr, up_scales_ptr, up_gscale_ptr, row, blk, K, NB, MODE
    )
    h = _product(lo_g, hi_g, lo_u, hi_u, out_ptr.dtype.element_ty, GELU, MODE)
    store_terms(out_ptr, out_ptr, out_ptr, out_ptr, offset_ptr, row, h, blk, 0, K, NB, MODE, TERMS, HAS_OFFSET, False, True)


def silu_mul_quantize(gate: Tensor, up: Tensor, offset: Tensor | None, act: str, terms: int, keep_h: bool) -> GatedOutput:
    """The operator ``silu_mul_quantize``."""
    m, k = gate.shape
    gate, up = rows_contiguous(gate), rows_contiguous(up)
    parts = empty_terms(gate, terms, m, k)
    h = gate.new_empty((m, k) if keep_h else (0,))
    kept_gate, kept_up = empty_matrix(gate, m, k), empty_matrix(gate, m, k)
    tensors = (gate, up, gate if offset is None else offset, *parts, h, *kept_gate[:3], *kept_up[:3])
    constants = {"TERMS": terms, "HAS_OFFSET": offset is not None, "GELU": act == "gelu_tanh", "KEEP_H": keep_h}
    mode = mode_for(gate.dtype, k, gate, up)
    launch_rows(gated_kernel, "mlp", (m, k), mode, tensors, (m, gate.stride(0), up.stride(0)), constants)
    return GatedOutput(matrices(*parts, k), h, kept_gate, kept_up)


def silu_mul_backward(dh: Tensor, gate: QuantizedMatrix, up: QuantizedMatrix, act: str) -> GatedGrads:
    """The operator ``silu_mul_backward``."""
    dh, dgate, dup = rows_contiguous(dh), dh.new_empty(dh.shape), dh.new_empty(dh.shape)
    tensors = (dh, *(t.contiguous() for t in (*gate[:3], *up[:3])), dgate, dup)
    mode, constants = mode_for(dh.dtype, dh.shape[1], dh), {"GELU": act == "gelu_tanh"}
    launch_rows(gated_backward_kernel, "mlp_backward", dh.shape, mode, tensors, (dh.stride(0),), constants)
    return GatedGrads(dgate, dup)


def gated_values(
    gate: QuantizedMatrix, up: QuantizedMatrix, offset: Tensor | None, act: str, terms: int, dtype: torch.dtype
) -> Tensor:
    """The operator ``gated_values``."""
    m, k = gate.codes.shape[0], gate.k
    out = gate.codes.new_empty(m, k, dtype=dtype)
    constants = {"TERMS": terms, "HAS_OFFSET": offset is not None, "GELU": act == "gelu_tanh"}
    tensors = (*(t.contiguous() for t in (*gate[:3], *up[:3])), out if offset is None else offset, out)
    launch_rows(gated_values_kernel, "mlp", (m, k), mode_for(dtype, k, out), tensors, (), constants)
    return out
