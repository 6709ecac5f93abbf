"""Rounding to E2M1 in Triton, without a chain of seven comparisons.

The code (0..7) of a magnitude q = |x| / (s g) is the nearest integer, ties to even, of the concave function
min(2 q, q + 2, q / 2 + 4), capped at 7; adding 2**23 to an FP32 number (1024 to an FP16 one) rounds it to an integer in exactly
that way, and the code stands in the low bits. What must be exact is the comparison of x with the midpoints, that is q there:

* :func:`round_e2m1`: q0 = x r with r about 1 / (s g); the remainder x - q0 s g is exact in a fused multiply-add (s g has 4
  significant bits), and q0 + remainder * r is the correctly rounded quotient. It equals a midpoint t only if x = s g t: otherwise
  x differs from s g t by an ulp of x, which is more than half an ulp of q (mantissas: ulp ratio 2 m_t / m_x > 1).
* :mod:`.pairs`, where x has at most 8 significant bits (BF16): then x / (s g) differs from a midpoint by 1/256 of it or not
  at all, and rounding x r to FP16 (11 bits) gives the midpoint exactly where it should. The rest runs on pairs of FP16 numbers,
  half the instructions. It needs values that *are* BF16: BF16 inputs, and what a first term left of them (x - D(x) fits 8 bits:
  either D(x) = 0, or D(x) is within a factor 2 of x).

``MODE`` says which: ``PAIR`` the second, on rows of BF16 whose words can be read as pairs, ``EXACT`` the first, everywhere else.

No result depends on the last bits of r, on the order of lanes, or on contraction (compile with ``enable_fp_fusion=False``).
"""

import triton
import triton.language as tl

from . import launch

EXACT = tl.constexpr(launch.EXACT)
PAIR = tl.constexpr(launch.PAIR)

TWO23: tl.constexpr = tl.constexpr(8388608.0)


@triton.jit
def round_e2m1(x, sg, r, ok):
    """Round x (NB, 8) to the grid under the scale sg and its approximate reciprocal r, both (NB, 1).

    Returns (nibble in the low 4 bits of an int32, grid value in FP32). Where not ok (NB, 1), both are 0: the cap of the magnitude
    does that at no cost.
    """
    q = tl.abs(x) * r
    q = tl.fma(tl.fma(q, sg * -1.0, tl.abs(x)), r, q)  # the quotient, correctly rounded where it matters; NaN if x r overflows
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
def pack_nibbles(lo, hi):
    """Bytes (uint8) of the nibbles of even and odd k, as round_e2m1 returns them."""
    return (lo | (hi << 4)).to(tl.uint8)
