"""Launch constants of the Triton kernels: stored, never searched at run time.

A program holds one row. ``BLOCKS_PER_THREAD`` says how many blocks of 16 values each thread keeps: more means fewer threads per
row and fewer repeated instructions, less means fewer registers and more warps in flight. The numbers follow from the compiler's
register counts (two programs of the widest common row should fit on a multiprocessor), not from measurements yet.
"""

from __future__ import annotations

import torch
import triton

from ..formats import BLOCK, padded_k

BLOCKS_PER_THREAD = {
    "terms": 2,
    "quantize": 1,
    "norm": 2,
    "norm_backward": 1,
    "mlp": 1,
    "mlp_backward": 1,
}
MAX_BLOCKS = 2048
"""Rows wider than 16 * 2048 = 32,768 do not fit in one program."""
CHUNK_BLOCKS = 128
"""Blocks per program where the row need not be in one program."""
DEQUANTIZE = {"words": 512, "words_per_thread": 2}
"""32-bit words of codes (8 values) per program and per thread of ``dequantize``."""
TRANSPOSE_TILE = (8, 32)
"""Blocks along N and words along K per program of ``transpose_requantize``: 128 x 256 values."""
TRANSPOSE_REGISTERS = 96
"""Cap per thread, so that two programs fit on a multiprocessor (146 without it; the cap costs 8 spilled words)."""
RANDOM_CHUNK = 1024
"""Philox counters (4 numbers) per program."""

PACKED_FP16 = True
"""Round BF16 values in inline PTX on pairs of FP16 numbers (PAIR) rather than leaving the pairing to the compiler (FAST). The CPU
interpreter cannot run inline PTX."""
E2M1_INSTRUCTION = False
"""Use the FP4 conversion instruction of SM100 and later. Off: it should give the same bits and has not been run."""

EXACT_MATH = {"enable_fp_fusion": False}
"""Every launch: contraction of a * b + c would change bits."""

EXACT, FAST, PAIR, CONVERT = range(4)
"""Rounding modes, explained in triton_codes."""


def mode_for(dtype: torch.dtype, exact: bool = True) -> int:
    """Rounding mode. All but EXACT and CONVERT need values with BF16's 8 bits: BF16 tensors from which nothing was subtracted
    (``exact``)."""
    if E2M1_INSTRUCTION and torch.cuda.get_device_capability()[0] >= 10:
        return CONVERT
    if dtype == torch.bfloat16 and exact:
        return PAIR if PACKED_FP16 and not triton.knobs.runtime.interpret else FAST
    return EXACT


def row_blocks(k: int) -> int:
    """Blocks of a row of K values, rounded up to a power of two."""
    return triton.next_power_of_2(max(padded_k(k) // BLOCK, 2))


def num_warps(nb: int, kernel: str) -> int:
    """Warps of a program that holds ``nb`` blocks."""
    return min(max(nb // (32 * BLOCKS_PER_THREAD[kernel]), 1), 32)
