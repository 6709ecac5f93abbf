"""NVFP4 quantisation in Triton, of rows held as in :mod:`triton_rows`: scales, blocks, whole rows, their way to and from memory.

Every kernel of the package is made of these functions. The reference is :mod:`peft_nvfp4.reference`; how codes are found without
changing a bit, :mod:`triton_codes`.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .. import formats
from .triton_codes import CONVERT, PAIR, TWO23, convert_pairs, decode_e2m1, pack_nibbles, round_e2m1, round_pairs
from .triton_rows import BLOCK, HALF, INF, block_amax, block_sum, load_row

RULES = {"max6": 0, "four_over_six": 1, "mse": 2}
MAX6 = tl.constexpr(0)
FOUR_OVER_SIX = tl.constexpr(1)
MSE = tl.constexpr(2)
STOCHASTIC = tl.constexpr(3)

E2M1_MAX: tl.constexpr = tl.constexpr(formats.E2M1_MAX)
E4M3_MAX: tl.constexpr = tl.constexpr(formats.E4M3_MAX)
E4M3_NAN: tl.constexpr = tl.constexpr(formats.E4M3_NAN)
E4M3_MAX_BITS: tl.constexpr = tl.constexpr(formats.E4M3_MAX_BITS)
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
def inverse_power(g):
    """1 / g of a power of two, exact."""
    return (0x7F000000 - g.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(v):
    """(bits int32, value float32) of non-negative v: to nearest even, saturating; NaN, which stands for Inf - Inf, too. Integer
    arithmetic, so that it runs where E4M3 conversions do not exist (before SM89)."""
    v = tl.minimum(v, E4M3_MAX)
    bits = v.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    subnormal = tl.fma(v, 512.0, TWO23)
    is_subnormal = v < 0.015625
    code = tl.where(is_subnormal, subnormal.to(tl.int32, bitcast=True) - 0x4B000000, normal - (120 << 3))
    value = tl.where(is_subnormal, (subnormal - TWO23) * 0.001953125, (normal << 20).to(tl.float32, bitcast=True))
    return code, value


@triton.jit
def decode_e4m3(bits):
    """FP32 value of E4M3 bits (int32, sign clear)."""
    normal = ((bits + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)
    return tl.where(bits == E4M3_NAN, float("nan"), value)


@triton.jit
def max6_scale(a):
    """(bits, s) of the scale a / 6, a = amax / g finite. The division's remainder is corrected: it is correctly rounded."""
    v = a * (1.0 / E2M1_MAX)
    return encode_e4m3(tl.fma(tl.fma(v, E2M1_MAX * -1.0, a), 1.0 / E2M1_MAX, v))


@triton.jit
def max6_scale_up(a):
    """The smallest E4M3 scale under which nothing saturates."""
    bits, s = max6_scale(a)
    bits = tl.where((s * E2M1_MAX < a) & (bits < E4M3_MAX_BITS), bits + 1, bits)
    return bits, decode_e4m3(bits)


# ------------------------------------------------------------------------------------------- blocks and rows


@triton.jit
def round_blocks(lo, hi, s, g, finite, MODE: tl.constexpr):
    """Codes of every block under the scales s (NB,): (bytes (NB, 8) uint8, grid values lo and hi, scale (NB, 1) of those).
    Blocks with s = 0 give zeros; blocks that are not finite give code 0 and scale NaN."""
    sg = (s * g)[:, None]
    ok = (finite & (s > 0.0))[:, None]
    r = libdevice.fast_dividef(1.0, sg)  # one approximate instruction: see triton_codes; Inf where s is 0
    if MODE == PAIR:
        byte, lo_grid, hi_grid = round_pairs(lo * r, hi * r, ok)
        packed = byte.to(tl.uint8)
    elif MODE == CONVERT:
        byte = convert_pairs(lo, hi, sg, r, ok)
        packed, lo_grid, hi_grid = byte.to(tl.uint8), decode_e2m1(byte), decode_e2m1(byte >> 4)
    else:
        lo_n, lo_grid = round_e2m1(lo, sg, r, ok, MODE)
        hi_n, hi_grid = round_e2m1(hi, sg, r, ok, MODE)
        packed = pack_nibbles(lo_n, hi_n, MODE)
    return packed, lo_grid, hi_grid, tl.where(finite[:, None], sg, float("nan"))


@triton.jit
def remainder(lo, hi, lo_grid, hi_grid, sg):
    """x - D(x), exact. Not -sg: Triton computes that as 0 - sg, and the sign of zero would be another."""
    negative = sg * -1.0
    return tl.fma(lo_grid, negative, lo), tl.fma(hi_grid, negative, hi)


@triton.jit
def _candidate(lo, hi, s, finite, NB: tl.constexpr, MODE: tl.constexpr):
    """round_blocks for values in units of g, and the squared error of every block."""
    packed, lo_grid, hi_grid, sg = round_blocks(lo, hi, s, 1.0, finite, MODE)
    lo, hi = remainder(lo, hi, lo_grid, hi_grid, s[:, None])
    return packed, lo_grid, hi_grid, block_sum(lo * lo, hi * hi, NB)


@triton.jit
def quantize_blocks(lo, hi, amax, g, inverse_g, NB: tl.constexpr, RULE: tl.constexpr, MODE: tl.constexpr):
    """All blocks under the global scale g: (bytes, scale bits, grid values lo and hi, their scale). amax is block_amax's."""
    finite = amax < INF
    amax = tl.where(finite, amax, 0.0)
    bits, s = max6_scale(amax * inverse_g)
    if RULE == MAX6:
        packed, lo_grid, hi_grid, sg = round_blocks(lo, hi, s, g, finite, MODE)
    else:
        lo, hi = lo * inverse_g, hi * inverse_g  # exact: g is a power of two
        packed, lo_grid, hi_grid, error = _candidate(lo, hi, s, finite, NB, MODE)
        nearest = bits
        for i in tl.static_range(1 if RULE == FOUR_OVER_SIX else 8):
            if RULE == FOUR_OVER_SIX:
                bits_i, s_i = encode_e4m3(amax * inverse_g * 0.25)
            else:  # the offsets -2, -1, 1, 2, ... 6 of formats.MSE_OFFSETS
                bits_i = tl.minimum(tl.maximum(nearest + (i - 2 if i < 2 else i - 1), 1), E4M3_MAX_BITS)
                s_i = decode_e4m3(bits_i)
            packed_i, lo_i, hi_i, error_i = _candidate(lo, hi, s_i, finite, NB, MODE)
            better = (error_i < error) & (amax > 0.0)
            bits, s, error = tl.where(better, bits_i, bits), tl.where(better, s_i, s), tl.where(better, error_i, error)
            packed = tl.where(better[:, None], packed_i, packed)
            lo_grid, hi_grid = tl.where(better[:, None], lo_i, lo_grid), tl.where(better[:, None], hi_i, hi_grid)
        sg = tl.where(finite, s * g, float("nan"))[:, None]
    return packed, tl.where(finite, bits, E4M3_NAN), lo_grid, hi_grid, sg


@triton.jit
def quantize_row(lo, hi, NB: tl.constexpr, RULE: tl.constexpr, MODE: tl.constexpr):
    """A whole row with its own global scale: (bytes, scale bits, g, grid values lo and hi, their scale)."""
    amax = block_amax(lo, hi, NB)
    g, inverse_g = power_of_two_scale(tl.max(tl.where(amax < INF, amax, 0.0), axis=0))
    packed, bits, lo_grid, hi_grid, sg = quantize_blocks(lo, hi, amax, g, inverse_g, NB, RULE, MODE)
    return packed, bits, g, lo_grid, hi_grid, sg


# ------------------------------------------------------------------------------------------- in and out


@triton.jit
def store_codes(codes_ptr, scales_ptr, packed, bits, blk, KP):
    """Codes (NB, 8) uint8 and block scales (NB,) of one row whose storage starts at the pointers."""
    inside = blk * BLOCK < KP
    byte = blk[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(codes_ptr + byte, packed, mask=inside[:, None])
    tl.store(scales_ptr + blk, bits.to(tl.uint8), mask=inside)


@triton.jit
def quantize_store(codes_ptr, scales_ptr, gscale_ptr, row, lo, hi, blk, KP, NB: tl.constexpr, MODE: tl.constexpr):
    """quantize_row under the rule max6, stored as row ``row`` of a matrix: (grid values lo and hi, their scale)."""
    packed, bits, g, lo_grid, hi_grid, sg = quantize_row(lo, hi, NB, MAX6, MODE)
    store_codes(codes_ptr + row * (KP // 2), scales_ptr + row * (KP // BLOCK), packed, bits, blk, KP)
    tl.store(gscale_ptr + row, g)
    return lo_grid, hi_grid, sg


@triton.jit
def quantize_store_terms(
    codes_ptr, scales_ptr, gscale_ptr, centre_ptr, row, lo, hi, blk, M, K, KP,
    NB: tl.constexpr, TERMS: tl.constexpr, HAS_CENTRE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One or two terms of x - centre, stored as rows ``row`` and ``row + M``; returns D(x~) = sum of the terms + centre."""
    if HAS_CENTRE:
        lo_c, hi_c = load_row(centre_ptr, blk, K, NB)
        lo, hi = lo - lo_c, hi - hi_c
    lo_grid, hi_grid, sg = quantize_store(codes_ptr, scales_ptr, gscale_ptr, row, lo, hi, blk, KP, NB, MODE)
    lo_d, hi_d = lo_grid * sg, hi_grid * sg
    if TERMS == 2:
        lo, hi = remainder(lo, hi, lo_grid, hi_grid, sg)
        lo_grid, hi_grid, sg = quantize_store(codes_ptr, scales_ptr, gscale_ptr, row + M, lo, hi, blk, KP, NB, MODE)
        lo_d, hi_d = lo_d + lo_grid * sg, hi_d + hi_grid * sg
    if HAS_CENTRE:
        lo_d, hi_d = lo_d + lo_c, hi_d + hi_c
    return lo_d, hi_d


@triton.jit
def load_quantized(codes_ptr, scales_ptr, g, blk, KP):
    """Dequantised (lo, hi) of the row whose storage starts at the pointers."""
    inside = blk * BLOCK < KP
    byte = blk[:, None] * HALF + tl.arange(0, HALF)[None, :]
    packed = tl.load(codes_ptr + byte, mask=inside[:, None], other=0).to(tl.int32)
    sg = (decode_e4m3(tl.load(scales_ptr + blk, mask=inside, other=0).to(tl.int32)) * g)[:, None]
    return decode_e2m1(packed) * sg, decode_e2m1(packed >> 4) * sg
