"""Dequantisation in Triton: ``dequantize`` and ``dequantize_terms``.

A thread turns one 32-bit word of codes into 8 values and writes them with one 16-byte store (BF16); neighbouring threads take
neighbouring words. Two terms and an offset are summed in FP32, in the reference's order, and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.formats import padded_k
from .blocks import decode_e4m3
from .codes import decode_e2m1
from .launch import launch_words
from .rows import BLOCK


@triton.jit
def _term(codes_ptr, scales_ptr, gscale_ptr, row, g_stride, word, KP, NW: tl.constexpr):
    """Values (NW, 8) of the words ``word`` of row ``row``."""
    inside = word * 8 < KP
    codes = tl.load(codes_ptr + row * (KP // 8) + word, mask=inside, other=0)
    bits = tl.load(scales_ptr + row * (KP // BLOCK) + word // 2, mask=inside, other=0).to(tl.int32)
    sg = decode_e4m3(bits) * tl.load(gscale_ptr + row * g_stride)
    return decode_e2m1(codes[:, None] >> (tl.arange(0, 8) * 4)[None, :]) * sg[:, None]


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
    value = _term(codes_ptr, scales_ptr, gscale_ptr, row, g_stride, word, KP, NW)
    if TERMS == 2:
        value = value + _term(codes2_ptr, scales2_ptr, gscale2_ptr, row, g2_stride, word, KP, NW)
    k = word[:, None] * 8 + tl.arange(0, 8)[None, :]
    if HAS_OFFSET:
        value = value + tl.load(offset_ptr + k, mask=k < K, other=0.0)
    tl.store(out_ptr + row * K + k, value.to(out_ptr.dtype.element_ty), mask=k < K)


# ---------------------------------------------------------------------------------------------- launches


def dequantize_terms(
    codes: list[Tensor], scales: list[Tensor], gscale: list[Tensor], offset: Tensor | None, k: int, dtype: torch.dtype
) -> Tensor:
    """Sum of one or two terms and the offset, (R, K) in ``dtype``."""
    rows, kp = codes[0].shape[0], padded_k(k)
    out = codes[0].new_empty(rows, k, dtype=dtype)
    if out.numel() == 0:
        return out
    terms = [(c.contiguous().view(torch.int32), s.contiguous(), g) for c, s, g in zip(codes, scales, gscale)]
    tensors = (*terms[0], *terms[-1], out if offset is None else offset, out)
    numbers = (k, kp, int(gscale[0].shape[0] > 1), int(gscale[-1].shape[0] > 1))
    launch_words(dequantize_kernel, rows, k, tensors, numbers, {"TERMS": len(terms), "HAS_OFFSET": offset is not None})
    return out


def dequantize(codes: Tensor, scales: Tensor, gscale: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The operator ``dequantize``."""
    return dequantize_terms([codes], [scales], [gscale], None, k, dtype)
