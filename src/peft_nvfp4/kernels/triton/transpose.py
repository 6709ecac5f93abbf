"""The backward layout of a frozen weight in Triton: W_b (K, N) = Q(D(W_f).T) from W_f (N, K), without a BF16 copy of the weight.

Pass 1 finds the largest magnitude, exactly, from codes and scales. Pass 2 quantises. In both a thread loads the words (8 codes
along K) of 16 neighbouring rows, so that after unpacking it holds, for each of 8 columns, a whole block along N, and the search
for a scale needs no exchange between threads. A warp takes 4 blocks by 8 words: what it reads of a row, and what it writes of
one, are 32 bytes, the unit in which memory is moved, and nothing need be transposed on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.formats import BLOCK as BLOCK_SIZE
from ...numerics.formats import padded_k
from .blocks import (
    FOUR_OVER_SIX,
    MAX6,
    PAIR_UNIT,
    RULES,
    amax_values,
    decode_e4m3,
    four_over_six_pairs,
    power_of_two_scale,
    quantize_blocks,
    search_blocks,
)
from .codes import PAIR, decode_e2m1
from .launch import EXACT_MATH, TRANSPOSE, launch, mode_for
from .pairs import both, decode_e4m3_pairs, decode_nibbles, interleave, multiply, opaque, pack
from .rows import BLOCK, HALF, INF, row_max


@triton.jit
def _rows(codes_ptr, scales_ptr, gscale_ptr, n, word, N, KP, WHOLE: tl.constexpr, PER_ROW: tl.constexpr):
    """Codes, bits of the block scale (both int32) and global scale of the words ``word`` (KW, 1) of the rows ``n`` (1, NB). In
    this order of the axes the compiler lets neighbouring threads take neighbouring words in loads and in stores."""
    at = n.to(tl.int64) * (KP // 8) + word
    at_scale = n.to(tl.int64) * (KP // BLOCK) + word // 2
    if WHOLE:
        codes, bits = tl.load(codes_ptr + at), tl.load(scales_ptr + at_scale)
        g = tl.load(gscale_ptr + n) if PER_ROW else tl.zeros_like(n).to(tl.float32)
    else:
        inside = (n < N) & (word * 8 < KP)
        codes = tl.load(codes_ptr + at, mask=inside, other=0)
        bits = tl.load(scales_ptr + at_scale, mask=inside, other=0)
        g = tl.load(gscale_ptr + n, mask=n < N, other=1.0) if PER_ROW else tl.zeros_like(n).to(tl.float32)
    return codes, bits.to(tl.int32), tl.broadcast_to(g, codes.shape)


@triton.jit
def _eight(x0, x1, x2, x3, x4, x5, x6, x7):
    """Eight tensors (KW, NB) -> (KW * NB, 8). Joining adds a last axis inside the thread, its most significant bit first."""
    x = tl.join(tl.join(tl.join(x0, x4), tl.join(x2, x6)), tl.join(tl.join(x1, x5), tl.join(x3, x7)))
    return tl.reshape(x, [x0.shape[0] * x0.shape[1], HALF])


@triton.jit
def _every_other_row(codes_ptr, scales_ptr, gscale_ptr, n, word, N, KP, WHOLE: tl.constexpr, PER_ROW: tl.constexpr):
    """:func:`_rows` of the rows n, n + 2, ... n + 14, (KW * NB, 8) each."""
    c0, s0, g0 = _rows(codes_ptr, scales_ptr, gscale_ptr, n, word, N, KP, WHOLE, PER_ROW)
    c1, s1, g1 = _rows(codes_ptr, scales_ptr, gscale_ptr, n + 2, word, N, KP, WHOLE, PER_ROW)
    c2, s2, g2 = _rows(codes_ptr, scales_ptr, gscale_ptr, n + 4, word, N, KP, WHOLE, PER_ROW)
    c3, s3, g3 = _rows(codes_ptr, scales_ptr, gscale_ptr, n + 6, word, N, KP, WHOLE, PER_ROW)
    c4, s4, g4 = _rows(codes_ptr, scales_ptr, gscale_ptr, n + 8, word, N, KP, WHOLE, PER_ROW)
    c5, s5, g5 = _rows(codes_ptr, scales_ptr, gscale_ptr, n + 10, word, N, KP, WHOLE, PER_ROW)
    c6, s6, g6 = _rows(codes_ptr, scales_ptr, gscale_ptr, n + 12, word, N, KP, WHOLE, PER_ROW)
    c7, s7, g7 = _rows(codes_ptr, scales_ptr, gscale_ptr, n + 14, word, N, KP, WHOLE, PER_ROW)
    codes, bits = (_eight(c0, c1, c2, c3, c4, c5, c6, c7), _eight(s0, s1, s2, s3, s4, s5, s6, s7))
    return codes, bits, _eight(g0, g1, g2, g3, g4, g5, g6, g7)


@triton.jit
def _tile(
    codes_ptr, scales_ptr, gscale_ptr, unit, N, KP,
    NB: tl.constexpr, KW: tl.constexpr, WHOLE: tl.constexpr, PER_ROW: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """This program's tile for :func:`_column`: (codes, codes, scale, scale), (KW * NB, 8) each: of even and odd rows, or under
    PAIR the pairs of codes 0..3 of both and of codes 4..7, and the pair of scales (twice)."""
    n = (tl.program_id(0) * NB + tl.arange(0, NB)[None, :]) * BLOCK
    word = tl.program_id(1) * KW + tl.arange(0, KW)[:, None]
    lo, lo_bits, lo_g = _every_other_row(codes_ptr, scales_ptr, gscale_ptr, n, word, N, KP, WHOLE, PER_ROW)
    hi, hi_bits, hi_g = _every_other_row(codes_ptr, scales_ptr, gscale_ptr, n + 1, word, N, KP, WHOLE, PER_ROW)
    g = tl.load(gscale_ptr)
    if MODE == PAIR:
        scale = decode_e4m3_pairs(lo_bits, hi_bits)
        if PER_ROW:
            scale = multiply(multiply(scale, pack(lo_g, hi_g)), both(unit))
        else:
            scale = multiply(scale, both(g * unit))
        return interleave(lo, hi, False), interleave(lo, hi, True), scale, scale
    else:
        lo_scale = decode_e4m3(lo_bits, MODE) * (lo_g if PER_ROW else g)
        hi_scale = decode_e4m3(hi_bits, MODE) * (hi_g if PER_ROW else g)
        return lo, hi, lo_scale, hi_scale


@triton.jit
def _column(tile, j: tl.constexpr, MODE: tl.constexpr):
    """Values of the column j of 8: of every word a block along N."""
    if MODE == PAIR:
        return multiply(decode_nibbles(tile[j // 4], j % 4), tile[2])
    else:
        return decode_e2m1(tile[0] >> (4 * j)) * tile[2], decode_e2m1(tile[1] >> (4 * j)) * tile[3]


@triton.jit
def transpose_amax_kernel(
    codes_ptr, scales_ptr, gscale_ptr, amax_ptr, N, KP,
    NB: tl.constexpr, KW: tl.constexpr, WHOLE: tl.constexpr, PER_ROW: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude among those blocks along N that are finite."""
    tile = _tile(codes_ptr, scales_ptr, gscale_ptr, tl.full([], 1.0, tl.float32), N, KP, NB, KW, WHOLE, PER_ROW, MODE)
    most = tl.zeros([KW * NB], tl.float32)
    for j in tl.static_range(8):
        amax = amax_values(_column(tile, j, MODE), KW * NB, MODE)
        most = tl.maximum(most, tl.where(amax < INF, amax, 0.0))
    tl.atomic_max(amax_ptr, row_max(most).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def transpose_kernel(
    codes_ptr, scales_ptr, gscale_ptr,  # (N, KP / 8) int32, (N, KP / 16) uint8, (N,) or (1,) float32
    amax_ptr,  # (1,) int32, bits of the maximum
    out_codes_ptr, out_scales_ptr, out_gscale_ptr,  # (K, NP / 8) int32, (K, NP / 16) uint8, (1,) float32
    N, K, KP, NP,
    NB: tl.constexpr, KW: tl.constexpr,
    WHOLE: tl.constexpr,  # the tiles divide both sides
    PER_ROW: tl.constexpr,  # N global scales
    RULE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    g, inverse_g = power_of_two_scale(tl.load(amax_ptr).to(tl.float32, bitcast=True))
    tl.store(out_gscale_ptr, g)
    # under PAIR, and where the rule wants them so, values come in units of 2**8 g
    SCALED: tl.constexpr = MODE == PAIR and RULE == FOUR_OVER_SIX
    unit = inverse_g * PAIR_UNIT if SCALED else tl.full([], 1.0, tl.float32)
    tile = _tile(codes_ptr, scales_ptr, gscale_ptr, unit, N, KP, NB, KW, WHOLE, PER_ROW, MODE)
    block = opaque(tl.program_id(0) * NB + tl.arange(0, NB)[None, :], MODE)
    word = tl.program_id(1) * KW + tl.arange(0, KW)[:, None]
    for j in tl.static_range(8):
        x = _column(tile, j, MODE)
        amax = amax_values(x, KW * NB, MODE)
        if RULE == MAX6:
            codes, bits, _, _ = quantize_blocks(x, amax, g, inverse_g, KW * NB, MODE, False, False)
        elif SCALED:
            codes, bits = four_over_six_pairs(x, amax * (1.0 / PAIR_UNIT), KW * NB, False)
        else:
            codes, bits = search_blocks(x, amax, inverse_g, KW * NB, RULE, MODE, False)
        if MODE != PAIR:
            words = tl.reshape(codes.to(tl.int32), [KW * NB, 2, 4]) << (tl.arange(0, 4) * 8)[None, None, :]
            codes = tl.sum(words, axis=2)
        codes, bits = (tl.reshape(codes, [KW, NB, 2]), tl.reshape(bits, [KW, NB]).to(tl.uint8))
        k = word * 8 + j
        at = k.to(tl.int64) * (NP // BLOCK) + block
        at_codes = at[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        if WHOLE:
            tl.store(out_codes_ptr + at_codes, codes)
            tl.store(out_scales_ptr + at, bits)
        else:
            inside = (block * BLOCK < NP) & (k < K)
            tl.store(out_codes_ptr + at_codes, codes, mask=inside[:, :, None])
            tl.store(out_scales_ptr + at, bits, mask=inside)


# ---------------------------------------------------------------------------------------------- launch


def transpose_requantize(
    codes: Tensor, scales: Tensor, gscale: Tensor, k: int, rule: str, scale_factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator ``transpose_requantize``: codes (K, Np/2), scales (K, Np/16), gscale (1,). Under a global scale that is no
    power of two, values are no BF16 numbers: the kernels then compute in FP32."""
    n, np_ = codes.shape[0], padded_k(codes.shape[0])
    out_codes = codes.new_empty(k, np_ // 2)
    out_scales = codes.new_empty(k, np_ // BLOCK_SIZE)
    out_gscale = gscale.new_empty(1)
    if n == 0 or k == 0:
        return out_codes, out_scales, out_gscale.fill_(1.0)
    codes, scales = codes.contiguous().view(torch.int32), scales.contiguous()
    amax = codes.new_zeros(1)
    nb, kw, kp = TRANSPOSE["blocks"], TRANSPOSE["words"], padded_k(k)
    mode = mode_for(torch.bfloat16 if scale_factor == 1.0 else torch.float32)
    constants = {"NB": nb, "KW": kw, "WHOLE": n % (BLOCK_SIZE * nb) == 0 and k % (8 * kw) == 0, "PER_ROW": gscale.shape[0] > 1}
    options = {"num_warps": max(nb * kw // 32, 1), **EXACT_MATH}
    grid = (triton.cdiv(np_, BLOCK_SIZE * nb), triton.cdiv(kp, 8 * kw))
    tensors = (codes, scales, gscale, amax)
    launch(transpose_amax_kernel, grid, tensors, (n, kp), {**constants, "MODE": mode}, **options)
    tensors += (out_codes.view(torch.int32), out_scales, out_gscale)
    launch(transpose_kernel, grid, tensors, (n, k, kp, np_), {**constants, "RULE": RULES[rule], "MODE": mode}, **options)
    return out_codes, out_scales, out_gscale
