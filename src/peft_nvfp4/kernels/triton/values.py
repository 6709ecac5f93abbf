"""The values of a row in the two forms that the kernels compute with; the rounding mode says which.

* Mode PAIR: words of two BF16 values, (NB, 8) int32, as in :mod:`triton_pairs`.
* Every other mode: a tuple (lo, hi) of FP32 tensors (NB, 8), as in :mod:`triton_rows`.

Kernels load, round and store through these functions and need not know the form. K, the width, is a compile-time constant: where
the programs divide it no load or store is masked, which saves up to a tenth of all instructions.
"""

import triton
import triton.language as tl

from .codes import PAIR
from .pairs import load_pairs, pack, store_pairs, unpack
from .rows import load_row, store_row


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
    """Inverse of :func:`load_values`, in the pointer's dtype."""
    if MODE == PAIR:
        store_pairs(ptr, x, blk, K, NB)
    else:
        store_row(ptr, x[0], x[1], blk, K, NB)


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
