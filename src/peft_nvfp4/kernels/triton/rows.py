"""Rows held in registers, in Triton: how they are loaded, stored, reduced, and how 1 / d is taken.

A program holds a row (or a stretch of one) in one of two forms; the rounding mode says which (:mod:`.codes`):

* mode EXACT: a tuple of two FP32 tensors ``lo`` and ``hi`` of shape (NB, 8): block b's elements with even and with odd k;
* mode PAIR: words of two BF16 values, (NB, 8) int32, as in :mod:`.pairs`.

Kernels load, round and store through :func:`load_values` and its companions and need not know the form. All 16 values of a block
sit in one thread, so the block maximum, the block sums and the packing of nibbles need no exchange between threads. K, the width,
is a compile-time constant: where the programs divide it no load or store of pairs is masked, which saves up to a tenth of all
instructions. Splits and joins of a last axis are register moves here; a reduction written as ``tl.max(axis=1)`` would leave its
order, and what happens to NaN, to the compiler.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ...numerics import formats
from .codes import PAIR
from .pairs import load_pairs, pack, reciprocal_approx, store_pairs, unpack

BLOCK: tl.constexpr = tl.constexpr(formats.BLOCK)
HALF: tl.constexpr = tl.constexpr(formats.BLOCK // 2)
INF: tl.constexpr = tl.constexpr(float("inf"))


@triton.constexpr_function
def padded_k(K):
    """K rounded up to the storage's multiple."""
    return -(-K // formats.K_ALIGN) * formats.K_ALIGN


@triton.jit
def load_row(ptr, blk, K, NB: tl.constexpr):
    """(lo, hi) of the blocks ``blk`` (NB,) of the row at ``ptr``, in the row's dtype; 0 beyond K. Every thread reads the two
    halves of its block with 16-byte loads (four quarters in FP32)."""
    if ptr.dtype.element_ty.primitive_bitwidth == 32:
        k = blk[:, None] * BLOCK + tl.arange(0, 4)[None, :]
        a = tl.load(ptr + k, mask=k < K, other=0.0)
        b = tl.load(ptr + k + 4, mask=k + 4 < K, other=0.0)
        c = tl.load(ptr + k + 8, mask=k + 8 < K, other=0.0)
        d = tl.load(ptr + k + 12, mask=k + 12 < K, other=0.0)
        x = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), [0, 2, 3, 1])  # (NB, half, quarter, 4) = the block in order
    else:
        k = blk[:, None] * BLOCK + tl.arange(0, HALF)[None, :]
        a = tl.load(ptr + k, mask=k < K, other=0.0)
        b = tl.load(ptr + k + HALF, mask=k + HALF < K, other=0.0)
        x = tl.permute(tl.join(a, b), [0, 2, 1])
    return tl.split(tl.reshape(x, [NB, HALF, 2]))


@triton.jit
def load_values(ptr, blk, K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr):
    """Values of the blocks ``blk`` (NB,) of the row at ``ptr``; 0 beyond K."""
    if MODE == PAIR:
        return load_pairs(ptr, blk, K, NB)
    else:
        lo, hi = load_row(ptr, blk, K, NB)
        return lo.to(tl.float32), hi.to(tl.float32)


@triton.jit
def store_values(ptr, x, blk, K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr):
    """Inverse of :func:`load_values`, in the pointer's dtype (FP32 to BF16 rounds to nearest even)."""
    if MODE == PAIR:
        store_pairs(ptr, x, blk, K, NB)
    else:
        dtype: tl.constexpr = ptr.dtype.element_ty
        k = blk[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(ptr + k, tl.reshape(tl.join(x[0].to(dtype), x[1].to(dtype)), [NB, BLOCK]), mask=k < K)


@triton.jit
def to_floats(x, MODE: tl.constexpr):
    """(lo, hi) in FP32."""
    if MODE == PAIR:
        return unpack(x)
    else:
        return x[0], x[1]


@triton.jit
def rounded(lo, hi, dtype: tl.constexpr, MODE: tl.constexpr):
    """Values of FP32 (lo, hi), rounded to ``dtype`` (BF16 under PAIR)."""
    if MODE == PAIR:
        return pack(lo, hi)
    else:
        return lo.to(dtype).to(tl.float32), hi.to(dtype).to(tl.float32)


@triton.jit
def max_nan(a, b):
    """Maximum that keeps NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(lo, hi, NB: tl.constexpr):
    """max |x| of every block, NaN if it holds one."""
    a, b = tl.split(tl.reshape(max_nan(tl.abs(lo), tl.abs(hi)), [NB, 4, 2]))
    a, b = tl.split(tl.reshape(max_nan(a, b), [NB, 2, 2]))
    a, b = tl.split(max_nan(a, b))
    return max_nan(a, b)


@triton.jit
def _fold(v, NB: tl.constexpr, N: tl.constexpr):
    """(NB, N) -> (NB, N / 2): first half plus second half."""
    a, b = tl.split(tl.permute(tl.reshape(v, [NB, 2, N // 2]), [0, 2, 1]))
    return a + b


@triton.jit
def block_sum(lo, hi, NB: tl.constexpr):
    """Sum of every block by halving (16 -> 8 -> 4 -> 2 -> 1), the order of the reference: the last step joins even and odd k."""
    lo = tl.reshape(_fold(_fold(_fold(lo, NB, 8), NB, 4), NB, 2), [NB])
    hi = tl.reshape(_fold(_fold(_fold(hi, NB, 8), NB, 4), NB, 2), [NB])
    return lo + hi


@triton.jit
def row_max(v):
    """Maximum along axis 0 of non-negative numbers, as integers, for which there is an instruction that spans a warp."""
    return tl.max(v.to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)


@triton.jit
def row_sum(lo, hi, NB: tl.constexpr):
    """Sum of the whole row (scalar), independent of any order: see fused_reference.row_sum."""
    partial = block_sum(lo, hi, NB)
    bits = partial.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, axis=0)
    finite = largest < 0x7F800000
    exponent = tl.minimum(tl.maximum(largest >> 23, 48), 254)
    up = ((300 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 46) << 23).to(tl.float32, bitcast=True)
    fixed = tl.sum((tl.where(finite, partial, 0.0) * up).to(tl.int64), axis=0)
    return tl.where(finite, fixed.to(tl.float32) * down, largest.to(tl.float32, bitcast=True))


@triton.jit
def reciprocal(d, CLEARED: tl.constexpr, MODE: tl.constexpr):
    """1 / d, correctly rounded, of d with its last bits cleared, 1 or 3; |d| in 2**-126 .. 2**126. See
    fused_reference.reciprocal."""
    d = (d.to(tl.int32, bitcast=True) & -(1 << CLEARED)).to(tl.float32, bitcast=True)
    n = reciprocal_approx(d) if MODE == PAIR else libdevice.fast_dividef(1.0, d)
    if CLEARED == 1:
        n = tl.fma(n, tl.fma(d, n, -1.0) * -1.0, n)
    return tl.fma(n, tl.fma(d, n, -1.0) * -1.0, n)
