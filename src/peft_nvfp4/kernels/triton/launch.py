"""How the Triton kernels are launched: their constants, which are stored and never searched at run time, and :func:`launch`.

A program of most kernels holds one row. ``BLOCKS_PER_THREAD`` says how many blocks of 16 values each thread keeps: more means
fewer threads per row and fewer repeated instructions, less means fewer registers and more warps in flight. Chosen on an H200 at
4096 x 8192 and 4096 x 2048 (benchmarks/bench_ops.py --sweep).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ...numerics.formats import BLOCK, padded_k

BLOCKS_PER_THREAD = {"terms": 2, "quantize": 1, "norm": 2, "norm_backward": 1, "mlp": 2, "mlp_backward": 1}
REGISTERS = {"mlp": 80, "mlp_backward": 64}
"""Caps per thread under PAIR: room for two or three programs of 8,192 values on a multiprocessor, at a few spilled words."""
MAX_BLOCKS = 2048
"""Of a row that fits in one program: 32,768 values."""
CHUNK_BLOCKS = 128
"""Blocks per program where the row need not be in one program."""
DEQUANTIZE = {"words": 256, "words_per_thread": 2}
"""32-bit words of codes (8 values) per program and per thread of ``dequantize``."""
TRANSPOSE = {"blocks": 32, "words": 8}
"""Blocks along N and words along K per program of ``transpose_requantize``, one of each per thread: 512 x 64 values."""
RANDOM_CHUNK = 1024
"""Philox counters (4 numbers) per program."""

EXACT_MATH = {"enable_fp_fusion": False}
"""Every launch: contraction of a * b + c would change bits."""

EXACT, PAIR = range(2)
"""Rounding modes, explained in :mod:`.codes`."""
INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's CPU interpreter, which knows no inline PTX."""


def mode_for(dtype: torch.dtype, k: int = 0, *rows: Tensor) -> int:
    """Rounding mode for values of ``dtype``, and for their terms unless an offset was subtracted (then EXACT). PAIR needs BF16's
    8 bits, and the ``rows`` of width ``k`` to be rows of pairs."""
    if dtype != torch.bfloat16 or INTERPRETED:
        return EXACT
    pairs = k % 2 == 0 and all((x.shape[0] == 1 or x.stride(0) % 2 == 0) and x.data_ptr() % 4 == 0 for x in rows)
    return PAIR if pairs else EXACT


def rows_contiguous(x: Tensor) -> Tensor:
    """x (..., K) with K contiguous; rows may have any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_blocks(k: int) -> int:
    """Blocks of a row of K values, rounded up to a power of two."""
    return triton.next_power_of_2(max(padded_k(k) // BLOCK, 2))


def options_for(nb: int, kernel: str, mode: int) -> dict[str, int | bool]:
    """Launch options of a program that holds ``nb`` blocks."""
    warps = min(max(nb // (32 * BLOCKS_PER_THREAD[kernel]), 1), 32)
    options = {"num_warps": warps, **EXACT_MATH}
    if mode == PAIR and kernel in REGISTERS:
        options["maxnreg"] = min(REGISTERS[kernel], 65536 // (32 * warps))  # all that a multiprocessor has
    return options


def launch_rows(
    kernel: triton.JITFunction,
    name: str,
    shape: tuple[int, int],
    mode: int,
    tensors: Sequence[Tensor],
    numbers: Sequence[int | float],
    constants: dict,
) -> None:
    """Launch a kernel whose program holds one of M rows of K values; ``shape`` is (M, K), ``name`` one of
    :data:`BLOCKS_PER_THREAD`. The kernel's first constants are K, NB and MODE."""
    m, k = shape
    if m:
        nb = row_blocks(k)
        constants = {"K": k, "NB": nb, "MODE": mode, **constants}
        launch(kernel, (m,), tensors, numbers, constants, **options_for(nb, name, mode))


def launch_words(
    kernel: triton.JITFunction, rows: int, k: int, tensors: Sequence[Tensor], numbers: Sequence[int], constants: dict
) -> None:
    """Launch a kernel whose program decodes some 32-bit words of codes of a row of K values: NW, its first constant."""
    words = padded_k(k) // 8
    nw = min(triton.next_power_of_2(words), DEQUANTIZE["words"])
    warps = min(max(nw // (32 * DEQUANTIZE["words_per_thread"]), 1), 32)
    grid = (rows, triton.cdiv(words, nw))
    launch(kernel, grid, tensors, numbers, {"NW": nw, **constants}, num_warps=warps, **EXACT_MATH)


_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}
"""What a launch is specialised on -> its kernel, which keeps the function alive whose ``id`` is in the key."""


def _number_kind(n: int | float) -> int:
    """What Triton may compile a number for: type (float; int32 or wider), the value 1, divisibility by 16."""
    if type(n) is float:
        return 0
    return (1 if n == 1 else 2 if n % 16 == 0 else 3) + (0 if -(1 << 31) <= n < 1 << 31 else 3)


def launch(
    kernel: triton.JITFunction,
    grid: Sequence[int],
    tensors: Sequence[Tensor],
    numbers: Sequence[int | float],
    constants: dict,
    **options: int | bool,
) -> None:
    """``kernel[grid](*tensors, *numbers, **constants, **options)`` on the current device and stream.

    Triton's own way finds out at every call what to specialise a kernel on, and reads its settings from the environment. On a
    host where a BF16 GEMM call takes 23 us that took 25 us of 43 (H200 machine, Triton 3.6), for a kernel that runs for 3. Here a
    compiled kernel is remembered by all that it depends on. Hooks of a launch (profilers) are called as always. Triton's settings
    (``TRITON_DEBUG``, instrumentation) count at the first launch of a kind. Triton's interpreter, and a kernel with hooks of its
    own, take Triton's way every time.

    Args:
        kernel: its parameters are the tensors, the numbers (no bool) and the constants, in this order.
        constants: ``tl.constexpr`` parameters by name; a name always has values of one type.
    """
    direct = not INTERPRETED and not kernel.pre_run_hooks
    if direct:
        key = (
            id(kernel),
            torch.cuda.current_device(),
            *[(t.dtype, t.data_ptr() % 16 == 0) for t in tensors],
            *map(_number_kind, numbers),
            *constants.values(),
            *options.items(),
        )
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *constants.values())
            return
    if list(constants) != kernel.arg_names[len(tensors) + len(numbers) :]:
        raise TypeError(f"{kernel.__name__}: constants {list(constants)}, its parameters are {kernel.arg_names}")
    compiled = kernel[tuple(grid)](*tensors, *numbers, **constants, **options)
    if direct and compiled is not None:  # None: a hook of Triton's compiler took over
        _compiled[key] = compiled
