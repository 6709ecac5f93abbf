"""NVFP4 quantisation in Triton, of rows held as in :mod:`.rows`: scales, blocks, whole rows, their way to and from memory.

Every kernel of the package is made of these functions. The reference is :mod:`peft_nvfp4.numerics.reference`; how codes are found
without changing a bit, :mod:`.codes`.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.target_info import cuda_capability_geq

from ...numerics import formats
from .codes import EXACT, PAIR, TWO23, decode_e2m1, pack_nibbles, round_e2m1
from .pairs import (
    amax_pairs,
    both,
    convert_from_e4m3,
    convert_to_e4m3,
    decode_words,
    divides,
    join_codes,
    load,
    multiply,
    multiply_add,
    opaque,
    round_pairs,
    store,
    two_roundings,
    unpack,
)
from .rows import BLOCK, HALF, INF, block_amax, block_sum, load_row, padded_k, row_max, store_values, to_floats

RULES = {"max6": 0, "four_over_six": 1, "mse": 2}
MAX6 = tl.constexpr(0)
FOUR_OVER_SIX = tl.constexpr(1)
STOCHASTIC = tl.constexpr(3)

E2M1_MAX: tl.constexpr = tl.constexpr(formats.E2M1_MAX)
E4M3_MAX: tl.constexpr = tl.constexpr(formats.E4M3_MAX)
E4M3_NAN: tl.constexpr = tl.constexpr(formats.E4M3_NAN)
E4M3_MAX_BITS: tl.constexpr = tl.constexpr(formats.E4M3_MAX_BITS)
SCALES_A_TILE: tl.constexpr = tl.constexpr(formats.SWIZZLE_COLS)
TILE_BYTES: tl.constexpr = tl.constexpr(formats.SWIZZLE_ROWS * formats.SWIZZLE_COLS)
G_MIN: tl.constexpr = tl.constexpr(formats.GSCALE_EXPONENTS[0])
G_MAX: tl.constexpr = tl.constexpr(formats.GSCALE_EXPONENTS[1])

# ------------------------------------------------------------------------------------------- scales


@triton.jit
def power_of_two_scale(amax):
    """(g, 1 / g) with g = 2**ceil(log2(amax / 2688)), 1 where amax is 0; exact."""
    bits = amax.to(tl.int32, bitcast=True)
    e = (bits >> 23) - (127 + 11) + ((bits & 0x7FFFFF) > 0x280000).to(tl.int32)
    e = tl.minimum(tl.maximum(e, G_MIN), G_MAX)
    e = tl.where(amax > 0.0, e, 0)
    return ((e + 127) << 23).to(tl.float32, bitcast=True), ((127 - e) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(v, MODE: tl.constexpr):
    """(bits int32, value float32) of non-negative v: to nearest even, saturating; NaN, which stands for Inf - Inf, too. Integer
    arithmetic where there are no E4M3 conversions (before SM89)."""
    if MODE == PAIR and cuda_capability_geq(8, 9):
        return convert_to_e4m3(v)
    else:
        v = tl.minimum(v, E4M3_MAX)
        bits = v.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        subnormal = tl.fma(v, 512.0, TWO23)
        is_subnormal = v < 0.015625
        code = tl.where(is_subnormal, subnormal.to(tl.int32, bitcast=True) - 0x4B000000, normal - (120 << 3))
        value = tl.where(is_subnormal, (subnormal - TWO23) * 0.001953125, (normal << 20).to(tl.float32, bitcast=True))
        return code, value


@triton.jit
def decode_e4m3(bits, MODE: tl.constexpr = EXACT):
    """FP32 value of E4M3 bits (int32, sign clear)."""
    if MODE == PAIR and cuda_capability_geq(8, 9):
        return convert_from_e4m3(bits)
    else:
        normal = ((bits + (120 << 3)) << 20).to(tl.float32, bitcast=True)
        value = tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)
        return tl.where(bits == E4M3_NAN, float("nan"), value)


@triton.jit
def max6_scale(a, MODE: tl.constexpr):
    """(bits, s) of the scale a / 6, a = amax / g finite. The division's remainder is corrected: it is correctly rounded."""
    v = a * (1.0 / E2M1_MAX)
    return encode_e4m3(tl.fma(tl.fma(v, E2M1_MAX * -1.0, a), 1.0 / E2M1_MAX, v), MODE)


@triton.jit
def max6_scale_up(a, MODE: tl.constexpr):
    """The smallest E4M3 scale under which nothing saturates."""
    bits, s = max6_scale(a, MODE)
    bits = tl.where((s * E2M1_MAX < a) & (bits < E4M3_MAX_BITS), bits + 1, bits)
    return bits, decode_e4m3(bits, MODE)


# ------------------------------------------------------------------------------------------- blocks and rows


@triton.jit
def amax_values(x, NB: tl.constexpr, MODE: tl.constexpr):
    """max |x| of every block, NaN if it holds one."""
    return amax_pairs(x, NB) if MODE == PAIR else block_amax(x[0], x[1], NB)


@triton.jit
def finite_part(amax):
    """Maxima of the blocks that are finite, 0 for the others: what the global scale follows."""
    return tl.where(amax < INF, amax, 0.0)


@triton.jit
def round_blocks(x, s, g, finite, NB: tl.constexpr, MODE: tl.constexpr, BOUNDED: tl.constexpr, GRID: tl.constexpr):
    """Codes of every block under the scales s (NB,): (codes, grid values where GRID). Codes are bytes (NB, 8) uint8, under PAIR
    words (NB, 2) int32. Blocks with s = 0 and blocks that are not finite give zeros."""
    sg = s * g
    ok = finite & (s > 0.0)
    if MODE == PAIR:
        return round_pairs(x, sg, ok, NB, BOUNDED, GRID)
    else:
        lo, hi = x
        sg, ok = sg[:, None], ok[:, None]
        r = libdevice.fast_dividef(1.0, sg)  # one approximate instruction: see codes; Inf where s is 0
        lo_n, lo_grid = round_e2m1(lo, sg, r, ok)
        hi_n, hi_grid = round_e2m1(hi, sg, r, ok)
        return pack_nibbles(lo_n, hi_n), (lo_grid, hi_grid)


@triton.jit
def remainder(x, grid, sg, MODE: tl.constexpr):
    """x - D(x), exact. Not -sg: Triton computes that as 0 - sg, and the sign of zero would be another."""
    negative = sg * -1.0
    if MODE == PAIR:
        return multiply_add(grid, both(negative)[:, None], x)
    else:
        return tl.fma(grid[0], negative[:, None], x[0]), tl.fma(grid[1], negative[:, None], x[1])


@triton.jit
def _candidate(x, s, finite, NB: tl.constexpr, MODE: tl.constexpr, BOUNDED: tl.constexpr):
    """round_blocks for values in units of g, and the squared error of every block."""
    codes, grid = round_blocks(x, s, 1.0, finite, NB, MODE, BOUNDED, True)
    lo, hi = to_floats(remainder(x, grid, s, MODE), MODE)
    return codes, block_sum(lo * lo, hi * hi, NB)


@triton.jit
def search_blocks(x, amax, inverse_g, NB: tl.constexpr, RULE: tl.constexpr, MODE: tl.constexpr, BOUNDED: tl.constexpr):
    """(codes, scale bits) under the rules that compare squared errors; otherwise as :func:`quantize_blocks`."""
    if MODE == PAIR and RULE == FOUR_OVER_SIX:
        return four_over_six_pairs(multiply(x, both(inverse_g * PAIR_UNIT)), amax * inverse_g, NB, BOUNDED)
    else:
        finite, amax = amax < INF, finite_part(amax)
        bits, s = max6_scale(amax * inverse_g, MODE)
        # x / g, exact: g is a power of two (what BF16 rounds off, below 2**-133, has no effect on any code)
        x = multiply(x, both(inverse_g)) if MODE == PAIR else (x[0] * inverse_g, x[1] * inverse_g)
        codes, error = _candidate(x, s, finite, NB, MODE, BOUNDED)
        nearest = bits
        for i in tl.static_range(1 if RULE == FOUR_OVER_SIX else 8):
            if RULE == FOUR_OVER_SIX:
                bits_i, s_i = encode_e4m3(amax * inverse_g * 0.25, MODE)
            else:  # the offsets -2, -1, 1, 2, ... 6 of formats.MSE_OFFSETS
                bits_i = tl.minimum(tl.maximum(nearest + (i - 2 if i < 2 else i - 1), 1), E4M3_MAX_BITS)
                s_i = decode_e4m3(bits_i, MODE)
            codes_i, error_i = _candidate(x, s_i, finite, NB, MODE, BOUNDED)
            better = (error_i < error) & (amax > 0.0)
            bits, error = (tl.where(better, bits_i, bits), tl.where(better, error_i, error))
            codes = tl.where(better[:, None], codes_i, codes)
        return codes, tl.where(finite, bits, E4M3_NAN)


PAIR_UNIT: tl.constexpr = tl.constexpr(2.0**-8)


@triton.jit
def four_over_six_pairs(x, amax, NB: tl.constexpr, BOUNDED: tl.constexpr):
    """:func:`search_blocks` of BF16 pairs x, in units of 2**8 g, whose blocks have the maxima amax in units of g. What does not
    depend on the candidate is computed once; the sum of squares, which decides, is 2**-16 of the reference's."""
    finite, amax = amax < INF, finite_part(amax)
    bits, s = max6_scale(amax, PAIR)
    bits_4, s_4 = encode_e4m3(amax * 0.25, PAIR)
    n, n_4, left, left_4 = two_roundings(x, s * PAIR_UNIT, s_4 * PAIR_UNIT, finite & (s > 0.0), finite & (s_4 > 0.0), BOUNDED)
    lo, hi = unpack(left)
    lo_4, hi_4 = unpack(left_4)
    better = (block_sum(lo_4 * lo_4, hi_4 * hi_4, NB) < block_sum(lo * lo, hi * hi, NB)) & (amax > 0.0)
    codes = join_codes(x, tl.where(better[:, None], n_4, n), finite & (tl.where(better, s_4, s) > 0.0), NB)
    return codes, tl.where(finite, tl.where(better, bits_4, bits), E4M3_NAN)


@triton.jit
def quantize_blocks(x, amax, g, inverse_g, NB: tl.constexpr, MODE: tl.constexpr, BOUNDED: tl.constexpr, GRID: tl.constexpr):
    """All blocks under the global scale g by the rule max6: (codes, scale bits, grid values where GRID, their scale). amax is
    amax_values'. BOUNDED: g need not suit the values."""
    finite = amax < INF
    bits, s = max6_scale(finite_part(amax) * inverse_g, MODE)
    codes, grid = round_blocks(x, s, g, finite, NB, MODE, BOUNDED, GRID)
    return (codes, tl.where(finite, bits, E4M3_NAN), grid, tl.where(finite, s * g, float("nan")))


# ------------------------------------------------------------------------------------------- in and out


@triton.jit
def store_codes(
    codes_ptr, scales_ptr, codes, bits, blk, K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr, SWIZZLED: tl.constexpr = False
):
    """Codes and block scales (NB,) of one row whose storage starts at the pointers. SWIZZLED: four scales of the row lie
    together, the next four a tile of 512 bytes further."""
    WHOLE: tl.constexpr = divides(NB, K)
    inside = blk * BLOCK < padded_k(K)
    if MODE == PAIR:
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        at = blk[:, None] * 2 + tl.arange(0, 2)[None, :]
    else:
        at = blk[:, None] * HALF + tl.arange(0, HALF)[None, :]
    store(codes_ptr + at, codes, inside[:, None], WHOLE)
    scale_at = opaque(blk, MODE)
    if SWIZZLED:
        scale_at = scale_at // SCALES_A_TILE * TILE_BYTES + scale_at % SCALES_A_TILE
    store(scales_ptr + scale_at, bits.to(tl.uint8), inside, WHOLE)


@triton.jit
def _store(codes_ptr, scales_ptr, gscale_ptr, row, codes, bits, g, blk, K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr):
    """Codes, block scales and global scale as row ``row`` of a matrix."""
    KP: tl.constexpr = padded_k(K)
    store_codes(codes_ptr + row * (KP // 2), scales_ptr + row * (KP // BLOCK), codes, bits, blk, K, NB, MODE)
    tl.store(gscale_ptr + row, g)


@triton.jit
def quantize_store(
    codes_ptr, scales_ptr, gscale_ptr, row, x, amax, largest, blk, K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr
):
    """A whole row under the rule max6, with the global scale that follows from its largest magnitude, stored as row ``row`` of a
    matrix."""
    g, inverse_g = power_of_two_scale(largest)
    codes, bits, _, _ = quantize_blocks(x, amax, g, inverse_g, NB, MODE, False, False)
    _store(codes_ptr, scales_ptr, gscale_ptr, row, codes, bits, g, blk, K, NB, MODE)


@triton.jit
def store_terms(
    codes_ptr, scales_ptr, gscale_ptr, values_ptr, offset_ptr, row, x, blk, M,
    K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr,
    TERMS: tl.constexpr, HAS_OFFSET: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One or two terms of a row x, or of x - offset (an FP32 difference, whose terms are EXACT), under one global scale. They are
    stored as rows ``row`` and ``row + M`` of a matrix (CODES), their sum plus the offset, D(x~), as row ``row`` of another
    (VALUES)."""
    TERMS_MODE: tl.constexpr = EXACT if HAS_OFFSET else MODE
    if HAS_OFFSET:
        offset = load_row(offset_ptr, blk, K, NB)
        lo, hi = to_floats(x, MODE)
        x = (lo - offset[0], hi - offset[1])
    amax = amax_values(x, NB, TERMS_MODE)
    g, inverse_g = power_of_two_scale(row_max(finite_part(amax)))
    codes, bits, grid, sg = quantize_blocks(x, amax, g, inverse_g, NB, TERMS_MODE, False, VALUES or TERMS == 2)
    if CODES:
        _store(codes_ptr, scales_ptr, gscale_ptr, row, codes, bits, g, blk, K, NB, TERMS_MODE)
    if VALUES:  # exact
        if TERMS_MODE == PAIR:
            d = multiply(grid, both(sg)[:, None])
        else:
            d = (grid[0] * sg[:, None], grid[1] * sg[:, None])
    if TERMS == 2:
        x = remainder(x, grid, sg, TERMS_MODE)
        codes, bits, grid, sg = quantize_blocks(x, amax_values(x, NB, TERMS_MODE), g, inverse_g, NB, TERMS_MODE, False, VALUES)
        if CODES:
            _store(codes_ptr, scales_ptr, gscale_ptr, row + M, codes, bits, g, blk, K, NB, TERMS_MODE)
        if VALUES:
            if TERMS_MODE == PAIR:  # rounded to BF16 once, as after a sum in FP32
                d = multiply_add(grid, both(sg)[:, None], d)
            else:
                d = (d[0] + grid[0] * sg[:, None], d[1] + grid[1] * sg[:, None])
    if VALUES:
        if HAS_OFFSET:
            d = (d[0] + offset[0], d[1] + offset[1])
        store_values(values_ptr + row * K, d, blk, K, NB, TERMS_MODE)


@triton.jit
def load_quantized(codes_ptr, scales_ptr, g, blk, K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr):
    """Dequantised (lo, hi), FP32, of the row whose storage starts at the pointers."""
    WHOLE: tl.constexpr = divides(NB, K)
    inside = blk * BLOCK < padded_k(K)
    sg = decode_e4m3(load(scales_ptr + opaque(blk, MODE), inside, WHOLE).to(tl.int32), MODE) * g
    if MODE == PAIR:
        words = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + blk[:, None] * 2 + tl.arange(0, 2)[None, :]
        return decode_words(load(words, inside[:, None], WHOLE), sg, NB)
    else:
        byte = blk[:, None] * HALF + tl.arange(0, HALF)[None, :]
        packed = tl.load(codes_ptr + byte, mask=inside[:, None], other=0).to(tl.int32)
        return decode_e2m1(packed) * sg[:, None], decode_e2m1(packed >> 4) * sg[:, None]
