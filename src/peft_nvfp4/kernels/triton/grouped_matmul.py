"""Grouped products in Triton: the rows of every expert times its matrix, whose codes are decoded in the loop.

One kernel for all experts. A program computes a tile of one expert's rows; which expert and which rows it finds out from where
the experts' rows end, on the device, so the grid is of a size that holds for every routing (``rows / BM + experts``) and programs
beyond the last tile do nothing. Rows of the input are found by their sources: nothing is gathered into memory.

As in :mod:`.matmul` the weight is the first operand: a tile of it is decoded to BF16 in registers, and y comes out transposed.
The low-rank product of an adapter joins the FP32 sum before the one rounding. A global scale that is no power of two is split:
its significand multiplies the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...numerics.formats import QuantizedMatrix
from .decode import operand, scale_factor
from .launch import EXACT_MATH, INTERPRETED, ceil_div, launch, power_of_two, rows_contiguous
from .rows import BLOCK

FEW = {"rows_of_w": 64, "blocks": 8, "warps": 4, "stages": 3}
MANY = {"rows_of_w": 128, "blocks": 4, "warps": 8, "stages": 3}
"""Tile of the weight: rows, and blocks of 16 along K; up to 32 rows of an expert, and beyond."""
MOST_ROWS = 128
"""Of an expert in a program: the average of all experts, rounded up to a power of two, at least 16 and at most this."""


@triton.jit
def _place(ends_ptr, COUNT: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, end of its rows) of this program's tile; (COUNT, ...) beyond the last tile."""
    e = tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + e, mask=e < COUNT, other=0)
    begin = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < COUNT), other=0)
    tiles = tl.where(e < COUNT, (end - begin + BM - 1) // BM, 0)
    tile = tl.program_id(1)
    before = (tl.cumsum(tiles, axis=0) <= tile) & (e < COUNT)
    expert = tl.sum(before.to(tl.int32), axis=0)
    first = tl.sum(tl.where(e == expert, begin, 0), axis=0) + (tile - tl.sum(tl.where(before, tiles, 0), axis=0)) * BM
    return expert.to(tl.int64), first, tl.sum(tl.where(e == expert, end, 0), axis=0)


@triton.jit
def _rows(x_ptr, row, k, x_stride, K: tl.constexpr, MASKED: tl.constexpr, dtype: tl.constexpr):
    """Values (BM, columns) of rows of the input."""
    at = x_ptr + row[:, None] * x_stride + k[None, :]
    x = tl.load(at, mask=(k < K)[None, :], other=0.0) if MASKED else tl.load(at)
    return x.to(dtype)


@triton.jit
def grouped_kernel(
    x_ptr, x2_ptr,  # (T, K) bfloat16: D(x~), or D of both terms where TERMS == 2
    sources_ptr,  # (R,) int64, where GATHERS: the row of x of every row
    ends_ptr,  # (COUNT,) int32
    codes, scales, gscale,  # stacks: (COUNT N, NB) int64, (COUNT N, NB) uint8, (COUNT,) float32 ...
    dense_ptr,  # ... or, where DENSE, bfloat16 (COUNT, N, K) by its strides
    hidden_ptr, up_ptr,  # (R, RANK), (COUNT, N, RANK) by its strides, bfloat16
    constant_ptr,  # (COUNT, N), where HAS_CONSTANT
    out_ptr,  # (R, N)
    N, x_stride, w_expert, w_row, w_column, hidden_stride, up_expert, up_row, up_column,
    K: tl.constexpr, NB: tl.constexpr,
    COUNT: tl.constexpr, EXPERTS: tl.constexpr,  # experts; rounded up to a power of two
    TERMS: tl.constexpr, GATHERS: tl.constexpr, DENSE: tl.constexpr,
    RANK: tl.constexpr, R: tl.constexpr,  # 0 without adapters; a power of two >= RANK
    HAS_CONSTANT: tl.constexpr, SPLIT: tl.constexpr, PTX: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    expert, first, end = _place(ends_ptr, COUNT, EXPERTS, BM)
    if expert < COUNT:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        m = first + tl.arange(0, BM)
        mine = tl.minimum(m, end - 1).to(tl.int64)
        row = tl.load(sources_ptr + mine) if GATHERS else mine
        w_n = tl.minimum(n, N - 1).to(tl.int64)
        dtype: tl.constexpr = tl.bfloat16 if PTX else tl.float32
        acc = tl.zeros((BN, BM), tl.float32)
        for start in range(0, NB, KB):
            blk = start + tl.arange(0, KB)[None, :]
            k = start * BLOCK + tl.arange(0, KB * BLOCK)
            if DENSE:
                at = dense_ptr + expert * w_expert + w_n[:, None] * w_row + k[None, :].to(tl.int64) * w_column
                w = (tl.load(at, mask=(k < K)[None, :], other=0.0) if MASKED else tl.load(at)).to(dtype)
            else:
                w_row_of = (expert * N + w_n)[:, None]
                w = operand(codes, scales, gscale + expert, w_row_of, 0, blk, NB, NB, BN, KB, MASKED, PTX, SPLIT)
            acc = tl.dot(w, tl.trans(_rows(x_ptr, row, k, x_stride, K, MASKED, dtype)), acc)
            if TERMS == 2:
                acc = tl.dot(w, tl.trans(_rows(x2_ptr, row, k, x_stride, K, MASKED, dtype)), acc)
        if SPLIT:
            acc *= scale_factor(tl.load(gscale + expert))
        if RANK > 0:
            r = tl.arange(0, R)
            h = tl.load(hidden_ptr + mine[:, None] * hidden_stride + r[None, :], mask=(r < RANK)[None, :], other=0.0)
            at = up_ptr + expert * up_expert + w_n[:, None] * up_row + r[None, :] * up_column
            up = tl.load(at, mask=(r < RANK)[None, :], other=0.0)
            acc = tl.dot(up.to(dtype), tl.trans(h.to(dtype)), acc)
        if HAS_CONSTANT:
            acc += tl.load(constant_ptr + expert * N + w_n).to(tl.float32)[:, None]
        inside = (m < end)[None, :] & (n < N)[:, None]
        tl.store(out_ptr + m[None, :].to(tl.int64) * N + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_matmul(
    xs: Sequence[Tensor],
    sources: Tensor | None,
    ends: Tensor,
    weight: QuantizedMatrix | Tensor,
    hidden: Tensor | None = None,
    up: Tensor | None = None,
    split: bool = False,
    constant: Tensor | None = None,
) -> Tensor:
    """y (R, N) in BF16: ``sum over xs of x_r @ W_e.T + hidden_r @ up_e.T + constant_e`` for the rows r of every expert e, rounded
    once.

    Args:
        xs: one or two (T, K) in BF16, of the same strides.
        sources: (R,) int64, the row of x of every row; None: itself.
        ends: (E,) int32, where the rows of every expert end.
        weight: a stack of W (N, K), or dense (E, N, K) in BF16 of any strides.
        hidden, up: (R, r) and (E, N, r) of any strides, in BF16; both or none.
        split: the global scales may be no powers of two.
        constant: (E, N).
    """
    x, dense = rows_contiguous(xs[0]), isinstance(weight, Tensor)
    experts, n = (weight if dense else weight.codes).shape[:2]
    rows, k = x.shape[0] if sources is None else sources.shape[0], x.shape[1]
    y = x.new_empty(rows, n)
    if not y.numel():
        return y
    nb = ceil_div(k, BLOCK.value) if dense else weight.scales.shape[2]
    bm = min(max(power_of_two(ceil_div(rows, experts)), 16), MOST_ROWS)
    tile = FEW if bm <= 32 else MANY
    bn, kb = min(max(power_of_two(n), 16), tile["rows_of_w"]), min(power_of_two(nb), tile["blocks"])
    packed = (y, y, ends) if dense else (weight.codes, weight.scales, weight.gscale)
    second = rows_contiguous(xs[-1])
    tensors = (x, second, ends if sources is None else sources, ends, *packed, weight if dense else y)
    hidden = y if hidden is None else rows_contiguous(hidden)
    tensors += (hidden, y if up is None else up, y if constant is None else constant.contiguous(), y)
    rank = 0 if up is None else up.shape[2]
    strides = (n, x.stride(0), *(weight.stride() if dense else (0, 0, 0)), hidden.stride(0) if rank else 0)
    numbers = (*strides, *(up.stride() if rank else (0, 0, 0)))
    masked = nb % kb != 0 or k != nb * BLOCK.value
    constants = {"K": k, "NB": nb, "COUNT": experts, "EXPERTS": power_of_two(experts), "TERMS": len(xs)}
    constants |= {"GATHERS": sources is not None, "DENSE": dense, "RANK": rank, "R": max(16, power_of_two(rank)) if rank else 0}
    constants |= {"HAS_CONSTANT": constant is not None, "SPLIT": split, "PTX": not INTERPRETED, "MASKED": masked}
    constants |= {"BM": bm, "BN": bn, "KB": kb}
    grid = ceil_div(n, bn), rows // bm + min(experts, rows), 1
    options = {"num_warps": tile["warps"], "num_stages": tile["stages"], **EXACT_MATH}
    launch(grouped_kernel, grid, tensors, numbers, constants, **options)
    return y
