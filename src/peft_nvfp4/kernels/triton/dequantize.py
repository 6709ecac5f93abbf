"""Dequantisation in Triton: ``dequantize`` and ``dequantize_terms``, and the operands of emulated products.

A thread turns one 32-bit word of codes into 8 values and writes them with one 16-byte store (BF16); neighbouring threads take
neighbouring words. Two terms and an offset are summed in FP32, in the reference's order, and rounded once.

A GPU without FP4 tensor cores multiplies dequantised operands. Several products that are summed (two terms of an input, linears
that read one input, the low-rank product of an adapter) are one product of matrices laid side by side along K: one GEMM, summed
in FP32, rounded once. :func:`write_operand` fills columns of such a matrix, so that laying side by side costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.formats import QuantizedMatrix, padded_k
from .blocks import decode_e4m3, store_terms
from .codes import decode_e2m1
from .launch import launch_rows, launch_words, mode_for, power_of_two, rows_contiguous
from .rows import BLOCK, load_values


@triton.jit
def _term(codes_ptr, scales_ptr, gscale_ptr, row, g_stride, word, KP, NW: tl.constexpr):
    """Values (NW, 8) of the words ``word`` of row ``row``."""
    inside = word * 8 < KP
    codes = tl.load(codes_ptr + row * (KP // 8) + word, mask=inside, other=0)
    bits = tl.load(scales_ptr + row * (KP // BLOCK) + word // 2, mask=inside, other=0).to(tl.int32)
    sg = decode_e4m3(bits) * tl.load(gscale_ptr + row * g_stride)
    return decode_e2m1(codes[:, None] >> (tl.arange(0, 8) * 4)[None, :]) * sg[:, None]


@triton.jit
def _terms(
    codes_ptr, scales_ptr, gscale_ptr, codes2_ptr, scales2_ptr, gscale2_ptr, row, g_stride, g2_stride, word, KP,
    NW: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """The same, with a second term added where there is one."""
    value = _term(codes_ptr, scales_ptr, gscale_ptr, row, g_stride, word, KP, NW)
    if TERMS == 2:
        value = value + _term(codes2_ptr, scales2_ptr, gscale2_ptr, row, g2_stride, word, KP, NW)
    return value


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, gscale_ptr,  # (R, KP / 8) int32, (R, KP / 16) uint8, (R,) or (1,) float32
    codes2_ptr, scales2_ptr, gscale2_ptr,  # the second term's, where TERMS == 2
    offset_ptr,  # (K,) float32, where HAS_OFFSET
    out_ptr,  # (R, K)
    K, KP, g_stride, g2_stride,
    NW: tl.constexpr, TERMS: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * NW + tl.arange(0, NW)
    value = _terms(
        codes_ptr, scales_ptr, gscale_ptr, codes2_ptr, scales2_ptr, gscale2_ptr, row, g_stride, g2_stride, word, KP, NW, TERMS
    )
    k = word[:, None] * 8 + tl.arange(0, 8)[None, :]
    if HAS_OFFSET:
        value = value + tl.load(offset_ptr + k, mask=k < K, other=0.0)
    tl.store(out_ptr + row * K + k, value.to(out_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def operand_kernel(
    codes_ptr, scales_ptr, gscale_ptr,  # (R, KP / 8) int32, (R, KP / 16) uint8, (R,) or (1,) float32
    codes2_ptr, scales2_ptr, gscale2_ptr,  # the second term's, where TERMS == 2
    extra_ptr,  # (R, E) by its strides extra_row, extra_column
    out_ptr,  # (R, columns), rows out_stride apart
    K, KP, g_stride, g2_stride,
    E, extra_row, extra_column,
    out_stride,
    extra_at,  # column of out where the extra columns start ...
    extra_first,  # ... their window: E columns from here on, zeros in the others
    extra_width,
    NW: tl.constexpr, TERMS: tl.constexpr, COPIES: tl.constexpr,
    EXTRA: tl.constexpr,  # extra_width, rounded up to a power of two; 0: none
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * NW + tl.arange(0, NW)
    value = _terms(
        codes_ptr, scales_ptr, gscale_ptr, codes2_ptr, scales2_ptr, gscale2_ptr, row, g_stride, g2_stride, word, KP, NW, TERMS
    )
    value = value.to(out_ptr.dtype.element_ty)
    k = word[:, None] * 8 + tl.arange(0, 8)[None, :]
    for copy in tl.static_range(COPIES):
        tl.store(out_ptr + row * out_stride + copy * K + k, value, mask=k < K)
    if EXTRA:
        if tl.program_id(1) == 0:
            column = tl.arange(0, EXTRA)
            at = column - extra_first
            extra = tl.load(extra_ptr + row * extra_row + at * extra_column, mask=(at >= 0) & (at < E), other=0.0)
            tl.store(out_ptr + row * out_stride + extra_at + column, extra, mask=column < extra_width)


@triton.jit
def rounded_kernel(
    x_ptr,  # (M, K), rows x_stride apart
    extra_ptr,  # (M, E) by its strides extra_row, extra_column
    out_ptr,  # (M, columns), rows out_stride apart
    x_stride, out_stride,
    E, extra_row, extra_column,
    extra_width,
    K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr,
    EXTRA: tl.constexpr,  # extra_width, rounded up to a power of two; 0: none
):  # fmt: skip
    """D(Q(x)) of a row, without the codes in between, and extra columns after it: E of them given, then zeros."""
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    x = load_values(x_ptr + row * x_stride, blk, K, NB, MODE)
    if EXTRA:
        column = tl.arange(0, EXTRA)
        extra = tl.load(extra_ptr + row * extra_row + column * extra_column, mask=column < E, other=0.0)
        tl.store(out_ptr + row * out_stride + K + column, extra, mask=column < extra_width)
    out_ptr += row * (out_stride - K)
    store_terms(out_ptr, out_ptr, out_ptr, out_ptr, out_ptr, row, x, blk, 0, K, NB, MODE, 1, False, False, True)


def _packed(q: QuantizedMatrix) -> tuple[Tensor, Tensor, Tensor]:
    return q.codes.contiguous(), q.scales.contiguous(), q.gscale


def dequantize_terms(terms: Sequence[QuantizedMatrix], offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum of one or two terms and the offset, (R, K) in ``dtype``."""
    rows, k = terms[0].codes.shape[0], terms[0].k
    out = terms[0].codes.new_empty(rows, k, dtype=dtype)
    if out.numel():
        first, last = _packed(terms[0]), _packed(terms[-1])
        tensors = (*first, *last, out if offset is None else offset, out)
        numbers = (k, padded_k(k), int(first[2].numel() > 1), int(last[2].numel() > 1))
        launch_words(dequantize_kernel, rows, k, tensors, numbers, {"TERMS": len(terms), "HAS_OFFSET": offset is not None})
    return out


def dequantize(q: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """The operator ``dequantize``."""
    return dequantize_terms([q], None, dtype)


def write_operand(
    out: Tensor,
    q: QuantizedMatrix,
    copies: int = 1,
    extra: Tensor | None = None,
    first: int = 0,
    width: int = 0,
    residual: QuantizedMatrix | None = None,
) -> None:
    """D(q) (R, K) into the first columns of out (R, >= copies * K + width), ``copies`` times side by side; after them ``width``
    columns: zeros, but for extra (R, E) from the column ``first`` of them on. With a residual term D(q) + D(residual), summed in
    FP32 and rounded once."""
    source, columns = (out, 0) if extra is None else (extra, extra.shape[1])
    k, packed = q.k, _packed(q)
    second = packed if residual is None else _packed(residual)
    per_row = int(packed[2].numel() > 1), int(second[2].numel() > 1)
    numbers = (k, padded_k(k), *per_row, columns, *source.stride(), out.stride(0), copies * k, first, width)
    constants = {"TERMS": 1 if residual is None else 2, "COPIES": copies, "EXTRA": power_of_two(width)}
    launch_words(operand_kernel, q.codes.shape[0], k, (*packed, *second, source, out), numbers, constants)


def write_rounded(out: Tensor, x: Tensor, extra: Tensor | None = None, width: int = 0) -> None:
    """D(Q(x)) of x (M, K), a row's global scale, to nearest, into the first columns of out (M, >= K + width); both with rows of
    any stride. After them ``width`` columns: extra (M, E), then zeros."""
    x = rows_contiguous(x)
    source, columns = (x, 0) if extra is None else (extra, extra.shape[1])
    numbers = (x.stride(0), out.stride(0), columns, *source.stride(), width)
    mode = mode_for(x.dtype, x.shape[1], x, out)
    launch_rows(rounded_kernel, "terms", x.shape, mode, (x, source, out), numbers, {"EXTRA": power_of_two(width)})
