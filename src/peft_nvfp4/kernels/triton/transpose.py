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

from ...numerics.formats import BLOCK as BLOCK_SIZE
from ...numerics.formats import QuantizedMatrix, padded_k
from .blocks import (
    FOUR_OVER_SIX,
    PAIR_UNIT,
    amax_values,
    decode_e4m3,
    finite_part,
    four_over_six_pairs,
    power_of_two_scale,
    search_blocks,
)
from .codes import PAIR, decode_e2m1
from .launch import EXACT_MATH, TRANSPOSE, ceil_div, launch, mode_for
from .pairs import both, decode_e4m3_pairs, decode_nibbles, interleave, load, multiply, opaque, store
from .rows import BLOCK, HALF, row_max


@triton.jit
def _rows(codes_ptr, scales_ptr, n, word, N, KP, WHOLE: tl.constexpr):
    """Codes and bits of the block scale, both int32, of the words ``word`` (KW, 1) of the rows ``n`` (1, NB). In this order of
    the axes the compiler lets neighbouring threads take neighbouring words in loads and in stores."""
    inside = (n < N) & (word * 8 < KP)
    codes = load(codes_ptr + n.to(tl.int64) * (KP // 8) + word, inside, WHOLE)
    bits = load(scales_ptr + n.to(tl.int64) * (KP // BLOCK) + word // 2, inside, WHOLE)
    return codes, bits.to(tl.int32)


@triton.jit
def _eight(x0, x1, x2, x3, x4, x5, x6, x7):
    """Eight tensors (KW, NB) -> (KW * NB, 8). Joining adds a last axis inside the thread, its most significant bit first."""
    x = tl.join(tl.join(tl.join(x0, x4), tl.join(x2, x6)), tl.join(tl.join(x1, x5), tl.join(x3, x7)))
    return tl.reshape(x, [x0.shape[0] * x0.shape[1], HALF])


@triton.jit
def _every_other_row(codes_ptr, scales_ptr, n, word, N, KP, WHOLE: tl.constexpr):
    """:func:`_rows` of the rows n, n + 2, ... n + 14, (KW * NB, 8) each."""
    c0, s0 = _rows(codes_ptr, scales_ptr, n, word, N, KP, WHOLE)
    c1, s1 = _rows(codes_ptr, scales_ptr, n + 2, word, N, KP, WHOLE)
    c2, s2 = _rows(codes_ptr, scales_ptr, n + 4, word, N, KP, WHOLE)
    c3, s3 = _rows(codes_ptr, scales_ptr, n + 6, word, N, KP, WHOLE)
    c4, s4 = _rows(codes_ptr, scales_ptr, n + 8, word, N, KP, WHOLE)
    c5, s5 = _rows(codes_ptr, scales_ptr, n + 10, word, N, KP, WHOLE)
    c6, s6 = _rows(codes_ptr, scales_ptr, n + 12, word, N, KP, WHOLE)
    c7, s7 = _rows(codes_ptr, scales_ptr, n + 14, word, N, KP, WHOLE)
    return _eight(c0, c1, c2, c3, c4, c5, c6, c7), _eight(s0, s1, s2, s3, s4, s5, s6, s7)


@triton.jit
def _tile(
    codes_ptr, scales_ptr, gscale_ptr, unit, N, KP, NB: tl.constexpr, KW: tl.constexpr, WHOLE: tl.constexpr, MODE: tl.constexpr
):
    """This program's tile for :func:`_column`: (codes, codes, scale, scale), (KW * NB, 8) each: of even and odd rows, or under
    PAIR the pairs of codes 0..3 of both and of codes 4..7, and the pair of scales (twice)."""
    n = (tl.program_id(0) * NB + tl.arange(0, NB)[None, :]) * BLOCK
    word = tl.program_id(1) * KW + tl.arange(0, KW)[:, None]
    lo, lo_bits = _every_other_row(codes_ptr, scales_ptr, n, word, N, KP, WHOLE)
    hi, hi_bits = _every_other_row(codes_ptr, scales_ptr, n + 1, word, N, KP, WHOLE)
    g = tl.load(gscale_ptr)
    if MODE == PAIR:
        scale = multiply(decode_e4m3_pairs(lo_bits, hi_bits), both(g * unit))
        return interleave(lo, hi, False), interleave(lo, hi, True), scale, scale
    else:
        return lo, hi, decode_e4m3(lo_bits, MODE) * g, decode_e4m3(hi_bits, MODE) * g


@triton.jit
def _column(tile, j: tl.constexpr, MODE: tl.constexpr):
    """Values of the column j of 8: of every word a block along N."""
    if MODE == PAIR:
        return multiply(decode_nibbles(tile[j // 4], j % 4), tile[2])
    else:
        return decode_e2m1(tile[0] >> (4 * j)) * tile[2], decode_e2m1(tile[1] >> (4 * j)) * tile[3]


@triton.jit
def _of_stack(codes_ptr, scales_ptr, gscale_ptr, rows, columns):
    """The matrix (rows, columns padded) of this program in a stack: pointers to its words of codes, scales, global scale."""
    at = tl.program_id(2).to(tl.int64)
    first = at * rows * columns
    return codes_ptr + first // 8, scales_ptr + first // BLOCK, gscale_ptr + at


@triton.jit
def transpose_amax_kernel(
    codes_ptr, scales_ptr, gscale_ptr, amax_ptr, N, KP,
    NB: tl.constexpr, KW: tl.constexpr, WHOLE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude among those blocks along N that are finite, of every matrix of a stack."""
    codes_ptr, scales_ptr, gscale_ptr = _of_stack(codes_ptr, scales_ptr, gscale_ptr, N, KP)
    tile = _tile(codes_ptr, scales_ptr, gscale_ptr, tl.full([], 1.0, tl.float32), N, KP, NB, KW, WHOLE, MODE)
    most = tl.zeros([KW * NB], tl.float32)
    for j in tl.static_range(8):
        most = tl.maximum(most, finite_part(amax_values(_column(tile, j, MODE), KW * NB, MODE)))
    tl.atomic_max(amax_ptr + tl.program_id(2), row_max(most).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def transpose_kernel(
    codes_ptr, scales_ptr, gscale_ptr,  # (E, N, KP / 8) int32, (E, N, KP / 16) uint8, (E,) float32
    amax_ptr,  # (E,) int32, bits of the maximum
    out_codes_ptr, out_scales_ptr, out_gscale_ptr,  # (E, K, NP / 8) int32, (E, K, NP / 16) uint8, (E,) float32
    N, K, KP, NP,
    NB: tl.constexpr, KW: tl.constexpr,
    WHOLE: tl.constexpr,  # the tiles divide both sides
    MODE: tl.constexpr,
):  # fmt: skip
    codes_ptr, scales_ptr, gscale_ptr = _of_stack(codes_ptr, scales_ptr, gscale_ptr, N, KP)
    out_codes_ptr, out_scales_ptr, out_gscale_ptr = _of_stack(out_codes_ptr, out_scales_ptr, out_gscale_ptr, K, NP)
    g, inverse_g = power_of_two_scale(tl.load(amax_ptr + tl.program_id(2)).to(tl.float32, bitcast=True))
    tl.store(out_gscale_ptr, g)
    unit = inverse_g * PAIR_UNIT if MODE == PAIR else tl.full([], 1.0, tl.float32)  # PAIR: values come in units of 2**8 g
    tile = _tile(codes_ptr, scales_ptr, gscale_ptr, unit, N, KP, NB, KW, WHOLE, MODE)
    block = opaque(tl.program_id(0) * NB + tl.arange(0, NB)[None, :], MODE)
    word = tl.program_id(1) * KW + tl.arange(0, KW)[:, None]
    for j in tl.static_range(8):
        x = _column(tile, j, MODE)
        amax = amax_values(x, KW * NB, MODE)
        if MODE == PAIR:
            codes, bits = four_over_six_pairs(x, amax * (1.0 / PAIR_UNIT), KW * NB, False)
        else:
            codes, bits = search_blocks(x, amax, inverse_g, KW * NB, FOUR_OVER_SIX, MODE, False)
            words = tl.reshape(codes.to(tl.int32), [KW * NB, 2, 4]) << (tl.arange(0, 4) * 8)[None, None, :]
            codes = tl.sum(words, axis=2)
        k = word * 8 + j
        at = k.to(tl.int64) * (NP // BLOCK) + block
        at_codes = at[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        inside = (block * BLOCK < NP) & (k < K)
        store(out_codes_ptr + at_codes, tl.reshape(codes, [KW, NB, 2]), inside[:, :, None], WHOLE)
        store(out_scales_ptr + at, tl.reshape(bits, [KW, NB]).to(tl.uint8), inside, WHOLE)


def transpose_requantize(q: QuantizedMatrix, factor: float) -> QuantizedMatrix:
    """The operator ``transpose_requantize``. Under a global scale that is no power of two, values are no BF16 numbers: the
    kernels then compute in FP32."""
    stack = QuantizedMatrix(q.codes[None], q.scales[None], q.gscale, q.k)
    codes, scales, gscale, n = grouped_transpose(stack, None if factor == 1.0 else (factor,))
    return QuantizedMatrix(codes[0], scales[0], gscale, n)


def grouped_transpose(q: QuantizedMatrix, factors: tuple[float, ...] | None) -> QuantizedMatrix:
    """The operator ``grouped_transpose``: the same for every matrix of a stack."""
    codes, scales, gscale, k = q
    experts, n = codes.shape[:2]
    np_ = padded_k(n)
    out = codes.new_empty(experts, k, np_ // 2), codes.new_empty(experts, k, np_ // BLOCK_SIZE), gscale.new_empty(experts)
    if n == 0 or k == 0 or experts == 0:
        out[2].fill_(1.0)
        return QuantizedMatrix(*out, n)
    codes, scales = codes.contiguous().view(torch.int32), scales.contiguous()
    amax = codes.new_zeros(experts)
    nb, kw, kp = TRANSPOSE["blocks"], TRANSPOSE["words"], padded_k(k)
    mode = mode_for(torch.bfloat16 if factors is None else torch.float32)
    constants = {"NB": nb, "KW": kw, "WHOLE": n % (BLOCK_SIZE * nb) == 0 and k % (8 * kw) == 0, "MODE": mode}
    options = {"num_warps": max(nb * kw // 32, 1), **EXACT_MATH}
    grid = (ceil_div(np_, BLOCK_SIZE * nb), ceil_div(kp, 8 * kw), experts)
    tensors = (codes, scales, gscale, amax)
    launch(transpose_amax_kernel, grid, tensors, (n, kp), constants, **options)
    tensors += (out[0].view(torch.int32), *out[1:])
    launch(transpose_kernel, grid, tensors, (n, k, kp, np_), constants, **options)
    return QuantizedMatrix(*out, n)
