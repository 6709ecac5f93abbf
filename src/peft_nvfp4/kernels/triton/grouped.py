"""A mixture's rows in Triton: ``combine``, ``spread`` and ``grouped_outer`` (:mod:`peft_nvfp4.numerics.grouped`).

Rows are found by their places, so nothing is gathered into memory first, and no program's work depends on another's: sums have
one order. ``combine`` and ``spread`` read every row once. ``grouped_outer`` is a product whose long side is summed over an
expert's rows: a program computes a tile of one expert's result and walks over that expert's rows. It is made for gradients of
adapters, whose rank is one of the sides: the other side gives the programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import grouped as definition
from .launch import EXACT_MATH, INTERPRETED, ceil_div, launch, power_of_two, rows_contiguous

COLUMNS = {"columns": 1024, "warps": 4}
"""Columns per program of ``combine`` and per step of ``spread``."""
OUTER = {"side": 128, "rows": 64, "warps": 4, "stages": 3}
"""Longest side of a tile of ``grouped_outer``, and rows per step."""


@triton.jit
def _product(value, weight, WIDE: tl.constexpr):
    """value * weight as PyTorch computes it: rounded to the wider of their dtypes."""
    return (value.to(tl.float32) * weight.to(tl.float32)).to(WIDE).to(tl.float32)


@triton.jit
def combine_kernel(
    rows_ptr,  # (R, N)
    places_ptr,  # (T, CHOSEN) int64; -1: none
    weights_ptr,  # (T, CHOSEN) where WEIGHTED
    out_ptr,  # (T, N)
    N, rows_stride,
    CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr,
    FP32: tl.constexpr,  # products are; else BF16
    BN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    wide: tl.constexpr = tl.float32 if FP32 else tl.bfloat16
    y = tl.zeros((BN,), tl.float32)
    for j in tl.static_range(CHOSEN):
        place = tl.load(places_ptr + token * CHOSEN + j)
        x = tl.load(rows_ptr + place * rows_stride + n, mask=(n < N) & (place >= 0), other=0.0)
        if WEIGHTED:
            weight = tl.load(weights_ptr + token * CHOSEN + j)
            y += tl.where(place >= 0, _product(x, weight, wide), 0.0)
        else:
            y += x.to(tl.float32)
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def spread_kernel(
    dy_ptr,  # (T, N)
    weights_ptr, places_ptr,  # (T, CHOSEN)
    order_ptr,  # (R,) int64
    rows_ptr,  # (R, N) where HAS_ROWS
    drows_ptr,  # (R, N)
    dweights_ptr,  # (T, CHOSEN) where HAS_ROWS
    N, dy_stride, rows_stride,
    CHOSEN: tl.constexpr, HAS_ROWS: tl.constexpr, FP32: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(order_ptr + row)
    here = tl.load(places_ptr + at) >= 0
    weight = tl.load(weights_ptr + at)
    dy_ptr += at // CHOSEN * dy_stride
    wide: tl.constexpr = tl.float32 if FP32 else tl.bfloat16
    total = tl.zeros((BN,), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        dy = tl.load(dy_ptr + n, mask=n < N, other=0.0)
        tl.store(drows_ptr + row * N + n, _product(dy, weight, wide).to(drows_ptr.dtype.element_ty), mask=n < N)
        if HAS_ROWS:
            x = tl.load(rows_ptr + row * rows_stride + n, mask=(n < N) & here, other=0.0)
            total += dy.to(tl.float32) * x.to(tl.float32)
    if HAS_ROWS:
        dweight = tl.where(here, tl.sum(total, axis=0), 0.0)
        tl.store(dweights_ptr + at, dweight.to(dweights_ptr.dtype.element_ty))


@triton.jit
def outer_kernel(
    x_ptr,  # (R, M)
    y_ptr,  # (R, N), or (T, N) where GATHERS
    sources_ptr,  # (R,) int64
    ends_ptr,  # (E,) int32
    out_ptr,  # (E, M, N)
    M, N, x_stride, y_stride,
    GATHERS: tl.constexpr,
    PTX: tl.constexpr,  # False: the interpreter, which multiplies BF16 wrongly
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(N, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    operand: tl.constexpr = tl.bfloat16 if PTX else tl.float32
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(start, end, BR):
        r = first + tl.arange(0, BR)
        inside = (r < end)[:, None]
        x = tl.load(x_ptr + r.to(tl.int64)[:, None] * x_stride + m[None, :], mask=inside & (m < M)[None, :], other=0.0)
        source = tl.load(sources_ptr + r, mask=r < end, other=0) if GATHERS else r.to(tl.int64)
        y = tl.load(y_ptr + source[:, None] * y_stride + n[None, :], mask=inside & (n < N)[None, :], other=0.0)
        acc = tl.dot(tl.trans(x.to(operand)), y.to(operand), acc)
    at = expert * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def _columns(n: int) -> tuple[int, dict[str, int]]:
    """Columns of a program, and launch options."""
    columns = min(power_of_two(n), COLUMNS["columns"])
    return columns, {"num_warps": max(1, COLUMNS["warps"] * columns // COLUMNS["columns"]), **EXACT_MATH}


def _wide(dtype: torch.dtype, weights: Tensor) -> bool:
    return torch.promote_types(dtype, weights.dtype) != torch.bfloat16


def combine(rows: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The operator ``combine``."""
    (tokens, chosen), n = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, n, dtype=dtype)
    if out.numel():
        rows, (columns, options) = rows_contiguous(rows), _columns(n)
        constants = {"CHOSEN": chosen, "WEIGHTED": weights is not None}
        constants |= {"FP32": weights is None or _wide(rows.dtype, weights), "BN": columns}
        tensors = rows, places.contiguous(), places if weights is None else weights.contiguous(), out
        launch(combine_kernel, (tokens, ceil_div(n, columns), 1), tensors, (n, rows.stride(0)), constants, **options)
    return out


def spread(
    dy: Tensor, weights: Tensor, places: Tensor, order: Tensor, rows: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The operator ``spread``."""
    count, n, chosen = len(order), dy.shape[1], places.shape[1]
    drows, dweights = dy.new_empty(count, n, dtype=dtype), weights.new_empty(0 if rows is None else weights.shape)
    if count and n:
        dy, (columns, options) = rows_contiguous(dy), _columns(n)
        rows_ = drows if rows is None else rows_contiguous(rows)
        constants = {"CHOSEN": chosen, "HAS_ROWS": rows is not None, "FP32": _wide(dtype, weights), "BN": columns}
        tensors = dy, weights.contiguous(), places.contiguous(), order, rows_, drows, dweights
        launch(spread_kernel, (count, 1, 1), tensors, (n, dy.stride(0), rows_.stride(0)), constants, **options)
    return drows, dweights


def grouped_outer(x: Tensor, y: Tensor, sources: Tensor | None, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """The operator ``grouped_outer``. Operands are BF16; of others the definition's loop."""
    if not x.dtype == y.dtype == torch.bfloat16:
        return definition.grouped_outer(x, y, sources, ends, dtype)
    experts, m, n = len(ends), x.shape[1], y.shape[1]
    out = x.new_empty(experts, m, n, dtype=dtype)
    if out.numel():
        x, y = rows_contiguous(x), rows_contiguous(y)
        sides = [min(max(power_of_two(side), 16), OUTER["side"]) for side in (m, n)]
        if sides[0] * sides[1] > OUTER["side"] * 64:  # no adapter's gradient; its accumulator would not fit
            sides = [min(side, 64) for side in sides]
        constants = {"GATHERS": sources is not None, "PTX": not INTERPRETED}
        constants |= {"BM": sides[0], "BN": sides[1], "BR": OUTER["rows"]}
        grid = ceil_div(m, sides[0]) * ceil_div(n, sides[1]), experts, 1
        tensors, numbers = (x, y, ends if sources is None else sources, ends, out), (m, n, x.stride(0), y.stride(0))
        options = {"num_warps": OUTER["warps"], "num_stages": OUTER["stages"]}
        launch(outer_kernel, grid, tensors, numbers, constants, **options, **EXACT_MATH)
    return out
