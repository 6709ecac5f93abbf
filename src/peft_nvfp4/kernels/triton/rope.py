"""Rotary position embedding of queries and keys in one launch, and its backward, in Triton.

Formulas and rounding: :mod:`peft_nvfp4.numerics.fused_reference`. What is rotated are rows of D values, one per token and head. A
program takes several consecutive rows, heads fastest, first those of q, then those of k: with the usual storage (B, S, H, D) it
reads and writes one contiguous piece. Each row is read as its two halves, so every value is loaded once; cos and sin are loaded
per row as well, H times as often as needed, but from the L1 cache, and in the layout of the row: nothing moves between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...numerics.fused_reference import rotary_output
from .launch import EXACT_MATH, ceil_div, launch, power_of_two, rows_contiguous

PAIRS = 2048
"""Pairs of values (one of each half) per program: 16 per thread, four 16-byte loads of BF16 from memory in flight."""
WARPS = 4


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _rotate_rows(
    x_ptr, out_ptr, cos_ptr, sin_ptr, first, S, stride_h, stride_s, out_h, out_s, cos_s,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to ``first + ROWS`` of one batch element; row = token * H + head."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    half: tl.constexpr = D // 2
    row = first + tl.arange(0, ROWS)
    token, head = (row // H).to(tl.int64), (row % H).to(tl.int64)
    i = tl.arange(0, LANES)[None, :]
    inside = (row < S * H)[:, None] & (i < half)
    x_at = x_ptr + (token * stride_s + head * stride_h)[:, None] + i
    cos_at = cos_ptr + (token * cos_s)[:, None] + i
    sin_at = sin_ptr + (token * cos_s)[:, None] + i
    x1 = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + half, mask=inside, other=0.0).to(tl.float32)
    cos1 = tl.load(cos_at, mask=inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_at + half, mask=inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_at, mask=inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_at + half, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        y1 = _rounded(_rounded(x1 * cos1, dtype) + _rounded(x2 * sin2, dtype), dtype) + 0.0
        y2 = _rounded(_rounded(x2 * cos2, dtype) - _rounded(x1 * sin1, dtype), dtype) + 0.0
    else:
        y1 = _rounded(x1 * cos1, dtype) - _rounded(x2 * sin1, dtype)
        y2 = _rounded(x2 * cos2, dtype) + _rounded(x1 * sin2, dtype)
    out_at = out_ptr + (token * out_s + head * out_h)[:, None] + i
    tl.store(out_at, y1.to(dtype), mask=inside)
    tl.store(out_at + half, y2.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["S"])
def rotary_kernel(
    q_ptr,  # (B, HQ, S, D) with these strides and 1
    k_ptr,  # (B, HK, S, D), where HK > 0
    cos_ptr,  # (1 or B, S, D), cos_b = 0 for 1; sin likewise
    sin_ptr,
    q_out_ptr,  # (B, HQ, S, D)
    k_out_ptr,  # (B, HK, S, D)
    S,
    q_b, q_h, q_s,
    k_b, k_h, k_s,
    cos_b, cos_s,
    q_out_b, q_out_h, q_out_s,
    k_out_b, k_out_h, k_out_s,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    cos_ptr += batch * cos_b
    sin_ptr += batch * cos_b
    q_blocks = tl.cdiv(S * HQ, ROWS)
    if block < q_blocks:
        _rotate_rows(
            q_ptr + batch * q_b, q_out_ptr + batch * q_out_b, cos_ptr, sin_ptr, block * ROWS, S,
            q_h, q_s, q_out_h, q_out_s, cos_s, HQ, D, ROWS, LANES, BACKWARD,
        )  # fmt: skip
    elif HK > 0:
        _rotate_rows(
            k_ptr + batch * k_b, k_out_ptr + batch * k_out_b, cos_ptr, sin_ptr, (block - q_blocks) * ROWS, S,
            k_h, k_s, k_out_h, k_out_s, cos_s, HK, D, ROWS, LANES, BACKWARD,
        )  # fmt: skip


def rotary_embedding(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor | None]:
    """The operator ``rotary_embedding``."""
    q_out, k_out = (None if x is None else rotary_output(x, backward) for x in (q, k))
    outputs = [t for t in (q_out, k_out) if t is not None and t.numel()]
    b, heads, s, d = q.shape
    k_heads = 0 if k is None else k.shape[1]
    if not outputs:
        return q_out, k_out
    if any(t.stride(-1) != 1 for t in outputs):  # a layout that no attention has: eager keeps it, so do we
        dense = rotary_embedding(q.contiguous(), None if k is None else k.contiguous(), cos, sin, backward)
        return q_out.copy_(dense[0]), None if k is None else k_out.copy_(dense[1])
    queries, keys = rows_contiguous(q), rows_contiguous(k if k_heads else q)
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    lanes = power_of_two(max(d // 2, 1))
    rows = max(PAIRS // lanes, 1)
    out = k_out if k_heads else q_out
    grid = (ceil_div(s * heads, rows) + ceil_div(s * k_heads, rows), b)
    of_cos = (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))
    numbers = (s, *queries.stride()[:3], *keys.stride()[:3], *of_cos, *q_out.stride()[:3], *out.stride()[:3])
    constants = {"HQ": heads, "HK": k_heads, "D": d, "ROWS": rows, "LANES": lanes, "BACKWARD": backward}
    launch(rotary_kernel, grid, (queries, keys, cos, sin, q_out, out), numbers, constants, num_warps=WARPS, **EXACT_MATH)
    return q_out, k_out
