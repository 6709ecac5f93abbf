"""The backward layout of a frozen weight in Triton: W_b (K, N) = Q(D(W_f).T) from W_f (N, K), without a BF16 copy of the weight.

Pass 1 finds the largest magnitude, exactly, from codes and scales. Pass 2: a program takes 128 rows (N) by 256 columns (K) of
W_f. A thread loads the words (8 codes along K) of 16 neighbouring rows, so that after unpacking it holds, for each of 8 columns,
a whole block along N; the searching scale rule needs no exchange between threads, and only the finished codes (half a byte a
value) are transposed on their way to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK as BLOCK_SIZE
from ..formats import padded_k
from .triton_blocks import RULES, decode_e4m3, power_of_two_scale, quantize_blocks
from .triton_codes import decode_e2m1
from .triton_rows import BLOCK, HALF, INF, block_amax
from .triton_tables import EXACT_MATH, TRANSPOSE_REGISTERS, TRANSPOSE_TILE, mode_for


@triton.jit
def _word_scale(codes_ptr, scales_ptr, gscale_ptr, n, word, N, KP, g_stride):
    """Codes (int32) and scale s g of the words ``word`` (1, KW) of the rows ``n`` (NB, 1)."""
    inside = (n < N) & (word * 8 < KP)
    codes = tl.load(codes_ptr + n.to(tl.int64) * (KP // 8) + word, mask=inside, other=0)
    bits = tl.load(scales_ptr + n.to(tl.int64) * (KP // BLOCK) + word // 2, mask=inside, other=0).to(tl.int32)
    return codes, decode_e4m3(bits) * tl.load(gscale_ptr + n * g_stride, mask=n < N, other=1.0)


@triton.jit
def _eight_rows(codes_ptr, scales_ptr, gscale_ptr, n, word, N, KP, g_stride, NB: tl.constexpr, KW: tl.constexpr):
    """Words and scales of the rows n, n + 2, ... n + 14: both (NB * KW, 8). Joining adds a last axis inside the thread, its most
    significant bit first."""
    c0, s0 = _word_scale(codes_ptr, scales_ptr, gscale_ptr, n, word, N, KP, g_stride)
    c1, s1 = _word_scale(codes_ptr, scales_ptr, gscale_ptr, n + 2, word, N, KP, g_stride)
    c2, s2 = _word_scale(codes_ptr, scales_ptr, gscale_ptr, n + 4, word, N, KP, g_stride)
    c3, s3 = _word_scale(codes_ptr, scales_ptr, gscale_ptr, n + 6, word, N, KP, g_stride)
    c4, s4 = _word_scale(codes_ptr, scales_ptr, gscale_ptr, n + 8, word, N, KP, g_stride)
    c5, s5 = _word_scale(codes_ptr, scales_ptr, gscale_ptr, n + 10, word, N, KP, g_stride)
    c6, s6 = _word_scale(codes_ptr, scales_ptr, gscale_ptr, n + 12, word, N, KP, g_stride)
    c7, s7 = _word_scale(codes_ptr, scales_ptr, gscale_ptr, n + 14, word, N, KP, g_stride)
    codes = tl.join(tl.join(tl.join(c0, c4), tl.join(c2, c6)), tl.join(tl.join(c1, c5), tl.join(c3, c7)))
    scale = tl.join(tl.join(tl.join(s0, s4), tl.join(s2, s6)), tl.join(tl.join(s1, s5), tl.join(s3, s7)))
    return tl.reshape(codes, [NB * KW, HALF]), tl.reshape(scale, [NB * KW, HALF])


@triton.jit
def transpose_amax_kernel(codes_ptr, scales_ptr, gscale_ptr, amax_ptr, N, KP, g_stride, NB: tl.constexpr, KW: tl.constexpr):
    """Bits of the largest magnitude among those blocks along N that are finite."""
    n = (tl.program_id(0) * NB + tl.arange(0, NB)[:, None]) * BLOCK
    word = tl.program_id(1) * KW + tl.arange(0, KW)[None, :]
    lo_codes, lo_scale = _eight_rows(codes_ptr, scales_ptr, gscale_ptr, n, word, N, KP, g_stride, NB, KW)
    hi_codes, hi_scale = _eight_rows(codes_ptr, scales_ptr, gscale_ptr, n + 1, word, N, KP, g_stride, NB, KW)
    lo_most = lo_codes & 7
    hi_most = hi_codes & 7
    for j in tl.static_range(1, 8):
        lo_most = tl.maximum(lo_most, (lo_codes >> (4 * j)) & 7)
        hi_most = tl.maximum(hi_most, (hi_codes >> (4 * j)) & 7)
    amax = block_amax(decode_e2m1(lo_most) * lo_scale, decode_e2m1(hi_most) * hi_scale, NB * KW)
    largest = tl.max(tl.where(amax < INF, amax, 0.0), axis=0)
    tl.atomic_max(amax_ptr, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def transpose_kernel(
    codes_ptr,  # (N, KP / 8) int32
    scales_ptr,  # (N, KP / 16) uint8
    gscale_ptr,  # (N,) or (1,) float32
    amax_ptr,  # (1,) int32, bits of the maximum
    out_codes_ptr,  # (K, NP / 8) int32
    out_scales_ptr,  # (K, NP / 16) uint8
    out_gscale_ptr,  # (1,) float32
    N,
    K,
    KP,
    NP,
    g_stride,
    NB: tl.constexpr,
    KW: tl.constexpr,
    RULE: tl.constexpr,
    MODE: tl.constexpr,
):
    g, inverse_g = power_of_two_scale(tl.load(amax_ptr).to(tl.float32, bitcast=True))
    tl.store(out_gscale_ptr, g)
    block = tl.program_id(0) * NB + tl.arange(0, NB)[:, None]
    word = tl.program_id(1) * KW + tl.arange(0, KW)[None, :]
    lo_codes, lo_scale = _eight_rows(codes_ptr, scales_ptr, gscale_ptr, block * BLOCK, word, N, KP, g_stride, NB, KW)
    hi_codes, hi_scale = _eight_rows(codes_ptr, scales_ptr, gscale_ptr, block * BLOCK + 1, word, N, KP, g_stride, NB, KW)
    for j in tl.static_range(8):
        lo = decode_e2m1(lo_codes >> (4 * j)) * lo_scale
        hi = decode_e2m1(hi_codes >> (4 * j)) * hi_scale
        packed, bits, _, _, _ = quantize_blocks(lo, hi, block_amax(lo, hi, NB * KW), g, inverse_g, NB * KW, RULE, MODE)
        k = word * 8 + j
        inside = (block * BLOCK < NP) & (k < K)
        words = tl.reshape(packed.to(tl.int32), [NB, KW, 2, 4]) << (tl.arange(0, 4) * 8)[None, None, None, :]
        at = k.to(tl.int64)[:, :, None] * (NP // 8) + block[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        tl.store(out_codes_ptr + at, tl.sum(words, axis=3), mask=inside[:, :, None])
        at = k.to(tl.int64) * (NP // BLOCK) + block
        tl.store(out_scales_ptr + at, tl.reshape(bits, [NB, KW]).to(tl.uint8), mask=inside)


# ---------------------------------------------------------------------------------------------- launch


def transpose_requantize(codes: Tensor, scales: Tensor, gscale: Tensor, k: int, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """The operator ``transpose_requantize``: codes (K, Np/2), scales (K, Np/16), gscale (1,)."""
    n, np_ = codes.shape[0], padded_k(codes.shape[0])
    out_codes = codes.new_empty(k, np_ // 2)
    out_scales = codes.new_empty(k, np_ // BLOCK_SIZE)
    out_gscale = gscale.new_empty(1)
    if n == 0 or k == 0:
        return out_codes, out_scales, out_gscale.fill_(1.0)
    codes, scales = codes.contiguous().view(torch.int32), scales.contiguous()
    amax = codes.new_zeros(1)
    nb, kw = TRANSPOSE_TILE
    kp, g_stride = padded_k(k), int(gscale.shape[0] > 1)
    grid = (triton.cdiv(np_, BLOCK_SIZE * nb), triton.cdiv(kp, 8 * kw))
    transpose_amax_kernel[grid](codes, scales, gscale, amax, n, kp, g_stride, NB=nb, KW=kw, num_warps=nb)
    transpose_kernel[grid](
        codes, scales, gscale, amax, out_codes.view(torch.int32), out_scales, out_gscale, n, k, kp, np_, g_stride,
        NB=nb, KW=kw, RULE=RULES[rule], MODE=mode_for(torch.bfloat16), num_warps=nb, maxnreg=TRANSPOSE_REGISTERS, **EXACT_MATH,
    )  # fmt: skip
    return out_codes, out_scales, out_gscale
