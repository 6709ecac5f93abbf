"""Rounding to E2M1 in Triton, without a chain of seven comparisons.

The code (0..7) of a magnitude q = |x| / (s g) is the nearest integer, ties to even, of the concave function
min(2 q, q + 2, q / 2 + 4), capped at 7; adding 2**23 to an FP32 number (1024 to an FP16 one) rounds it to an integer in exactly
that way, and the code stands in the low bits. What must be exact is the comparison of x with the midpoints, that is q there:

* ``MODE == EXACT``: q0 = x r with r about 1 / (s g); the remainder x - q0 s g is exact in a fused multiply-add (s g has 4
  significant bits), and q0 + remainder * r is the correctly rounded quotient. It equals a midpoint t only if x = s g t: otherwise
  x differs from s g t by an ulp of x, which is more than half an ulp of q (mantissas: ulp ratio 2 m_t / m_x > 1).
* ``MODE == FAST``: x has at most 8 significant bits (BF16). Then x / (s g) differs from a midpoint by 1/256 of it or not at all,
  and rounding x r to FP16 (11 bits) gives the midpoint exactly where it should. The rest runs on pairs of FP16 numbers, half the
  instructions. It needs values that *are* BF16: BF16 inputs, and what a first term left of them (x - D(x) fits 8 bits: either
  D(x) = 0, or D(x) is within a factor 2 of x).
* ``MODE == PAIR``: FAST in inline PTX on pairs as they lie in memory: :mod:`triton_pairs`. Not for odd K.

No result depends on the last bits of r, on the order of lanes, or on contraction (compile with ``enable_fp_fusion=False``).
"""

import triton
import triton.language as tl

from . import tables

EXACT = tl.constexpr(tables.EXACT)
FAST = tl.constexpr(tables.FAST)
PAIR = tl.constexpr(tables.PAIR)

TWO23: tl.constexpr = tl.constexpr(8388608.0)


@triton.jit
def _fp16(like, value: tl.constexpr):
    return tl.full(like.shape, value, tl.float16)


@triton.jit
def quotient(x, sg, r):
    """x / sg, correctly rounded where it matters (see the module's docstring), from r about 1 / sg; NaN if x r overflows."""
    q = x * r
    return tl.fma(tl.fma(q, sg * -1.0, x), r, q)


@triton.jit
def round_e2m1(x, sg, r, ok, MODE: tl.constexpr):
    """Round x (NB, 8) to the grid under the scale sg and its approximate reciprocal r, both (NB, 1).

    Returns (nibble, grid value in FP32). Where not ok (NB, 1), both are 0: the cap of the magnitude does that at no cost. The
    nibble stands in the low 4 bits of an int32, under FAST of an FP16 number in 1024..1039.
    """
    if MODE == FAST:
        q = (x * r).to(tl.float16)
        sign = q.to(tl.int16, bitcast=True) & tl.where(ok, -32768, 0).to(tl.int16)
        q = tl.abs(q)
        n = tl.minimum(tl.fma(q, _fp16(q, 2.0), _fp16(q, 1028.0)), q + _fp16(q, 1030.0))
        cap = tl.where(ok, 1035.0, 1028.0).to(tl.float16)
        n = tl.minimum(n, tl.minimum(tl.fma(q, _fp16(q, 0.5), _fp16(q, 1032.0)), cap))  # 1028 + code
        grid = tl.maximum(tl.fma(n, _fp16(q, 0.5), _fp16(q, -514.0)), n - _fp16(q, 1030.0))
        grid = tl.maximum(grid, tl.fma(n, _fp16(q, 2.0), _fp16(q, -2064.0)))  # max(c / 2, c - 2, 2 c - 8)
        grid = (grid.to(tl.int16, bitcast=True) | sign).to(tl.float16, bitcast=True)
        four = (sign | 0x4400).to(tl.float16, bitcast=True)  # +4 or -4: 1028 + code - four = 1024 + code + (0 or 8)
        return n - four, grid.to(tl.float32)
    else:
        q = quotient(tl.abs(x), sg, r)
        n = tl.minimum(tl.fma(q, 2.0, TWO23), q + (TWO23 + 2.0))
        cap = tl.where(ok, TWO23 + 7.0, TWO23)
        n = tl.minimum(n, tl.minimum(tl.fma(q, 0.5, TWO23 + 4.0), cap))
        sign = (x.to(tl.int32, bitcast=True) >> 28) & tl.where(ok, 8, 0)
        nibble = n.to(tl.int32, bitcast=True) | sign
        return nibble, decode_e2m1(nibble)


@triton.jit
def decode_e2m1(nibble):
    """FP32 value of a code 0..15 (int32): exponent and mantissa bits moved to FP32's, whose subnormals are E2M1's at 2**-126."""
    bits = ((nibble & 8) << 28) | ((nibble & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def pack_nibbles(lo, hi, MODE: tl.constexpr):
    """Bytes (uint8) of the nibbles of even and odd k, as round_e2m1 returns them."""
    if MODE == FAST:
        byte = tl.fma(hi - _fp16(hi, 1024.0), _fp16(hi, 16.0), lo)
        return byte.to(tl.int16, bitcast=True).to(tl.uint8)
    else:
        return (lo | (hi << 4)).to(tl.uint8)
