"""Launch constants of the Triton kernels: stored, never searched at run time.

A program holds one row. ``BLOCKS_PER_THREAD`` says how many blocks of 16 values each thread keeps: more means fewer threads per
row and fewer repeated instructions, less means fewer registers and more warps in flight. Chosen on an H200 at 4096 x 8192 and
4096 x 2048 (benchmarks/bench_ops.py --sweep).
"""

from __future__ import annotations

import torch
import triton

from ...numerics.formats import BLOCK, padded_k

BLOCKS_PER_THREAD = {"terms": 2, "quantize": 1, "norm": 2, "norm_backward": 1, "mlp": 2, "mlp_backward": 1}
REGISTERS = {"mlp": 80, "mlp_backward": 64}
"""Caps per thread under PAIR: room for two or three programs of 8,192 values on a multiprocessor, at a few spilled words."""
MAX_BLOCKS = 2048
"""Rows wider than 16 * 2048 = 32,768 do not fit in one program."""
CHUNK_BLOCKS = 128
"""Blocks per program where the row need not be in one program."""
CENTRED_ROWS = 1
"""Rows per program of ``quantize_terms`` with a centre: more would read the centre less often, at the price of registers."""
DEQUANTIZE = {"words": 256, "words_per_thread": 2}
"""32-bit words of codes (8 values) per program and per thread of ``dequantize``."""
TRANSPOSE = {"blocks": 32, "words": 8}
"""Blocks along N and words along K per program of ``transpose_requantize``, one of each per thread: 512 x 64 values."""
RANDOM_CHUNK = 1024
"""Philox counters (4 numbers) per program."""

PACKED_FP16 = True
"""Round BF16 values in inline PTX on pairs of FP16 numbers (PAIR) rather than leaving the pairing to the compiler (FAST). The CPU
interpreter cannot run inline PTX."""
EXACT_MATH = {"enable_fp_fusion": False}
"""Every launch: contraction of a * b + c would change bits."""

EXACT, FAST, PAIR = range(3)
"""Rounding modes, explained in triton_codes."""


def mode_for(dtype: torch.dtype, k: int = 0, *rows: torch.Tensor) -> int:
    """Rounding mode for values of ``dtype``, and for their terms unless a centre was subtracted (then EXACT): all but EXACT need
    BF16's 8 bits. PAIR also needs the ``rows`` of width ``k`` to be rows of pairs."""
    if dtype != torch.bfloat16:
        return EXACT
    pairs = k % 2 == 0 and all((x.shape[0] == 1 or x.stride(0) % 2 == 0) and x.data_ptr() % 4 == 0 for x in rows)
    return PAIR if PACKED_FP16 and pairs and not triton.knobs.runtime.interpret else FAST


def row_blocks(k: int) -> int:
    """Blocks of a row of K values, rounded up to a power of two."""
    return triton.next_power_of_2(max(padded_k(k) // BLOCK, 2))


def num_warps(nb: int, kernel: str) -> int:
    """Warps of a program that holds ``nb`` blocks."""
    return min(max(nb // (32 * BLOCKS_PER_THREAD[kernel]), 1), 32)


def launch(nb: int, kernel: str, mode: int) -> dict[str, int | bool]:
    """Launch options of a program that holds ``nb`` blocks."""
    options = {"num_warps": num_warps(nb, kernel), **EXACT_MATH}
    if mode == PAIR and kernel in REGISTERS:
        options["maxnreg"] = min(REGISTERS[kernel], 65536 // (32 * options["num_warps"]))  # all that a multiprocessor has
    return options
