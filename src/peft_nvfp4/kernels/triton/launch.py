"""How the Triton kernels are launched: their constants, which are stored and never searched at run time, and :func:`launch`.

A program of most kernels holds one row. ``BLOCKS_PER_THREAD`` says how many blocks of 16 values each thread keeps: more means
fewer threads per row and fewer repeated instructions, less means fewer registers and more warps in flight. Chosen on an H200 at
4096 x 8192 and 4096 x 2048 (benchmarks/bench_ops.py --sweep).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller

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
    for x in rows:
        if x.data_ptr() % 4 or x.stride(0) % 2 and x.shape[0] != 1:
            return EXACT
    return EXACT if k % 2 else PAIR


def rows_contiguous(x: Tensor) -> Tensor:
    """x (..., K) with K contiguous; rows may have any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def power_of_two(n: int) -> int:
    """The least power of two that is at least n; 0 for 0. (Triton's own helpers cost a microsecond or two a call.)"""
    return 1 << (n - 1).bit_length() if n else 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def row_blocks(k: int) -> int:
    """Blocks of a row of K values, rounded up to a power of two."""
    return power_of_two(max(padded_k(k) // BLOCK, 2))


def options_for(nb: int, kernel: str, mode: int) -> dict[str, int | bool]:
    """Launch options of a program that holds ``nb`` blocks."""
    warps = min(max(nb // (32 * BLOCKS_PER_THREAD[kernel]), 1), 32)
    options = {"num_warps": warps, **EXACT_MATH}
    if mode == PAIR and kernel in REGISTERS:
        options["maxnreg"] = min(REGISTERS[kernel], 65536 // (32 * warps))  # all that a multiprocessor has
    return options


# ---------------------------------------------------------------------------------------------- launching


ADDRESS, DEVICE, DTYPE = methodcaller("data_ptr"), methodcaller("get_device"), attrgetter("dtype")


class Plan:
    """All of a launch but its grid, its tensors and the values of its numbers.

    Attributes:
        constants: ``tl.constexpr`` parameters by name, in the kernel's order.
        options: of the compiler.
        words: places of tensors of bytes that the kernel reads as 32-bit words.
        columns: programs of a row.
        compiled: what else a launch is specialised on -> how to launch what was compiled for it.
    """

    __slots__ = ("kernel", "constants", "values", "options", "words", "columns", "compiled")

    def __init__(
        self,
        kernel: triton.JITFunction,
        constants: dict,
        options: dict[str, int | bool],
        words: Sequence[int] = (),
        columns: int = 1,
    ):
        self.kernel, self.constants, self.options, self.words, self.columns = kernel, constants, options, words, columns
        self.values = tuple(constants.values())
        self.compiled: dict[tuple, tuple[triton.compiler.CompiledKernel, Callable, int, tuple]] = {}

    def launch(self, grid: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int | float]) -> None:
        """``kernel[grid](*tensors, *numbers, **constants, **options)`` on the current device, that of the tensors, and its
        current stream."""
        addresses = [*map(ADDRESS, tensors)]
        key = (*map(DTYPE, tensors), *map(DEVICE, tensors), *[address & 15 for address in addresses])
        found = None if INTERPRETED or self.kernel.pre_run_hooks else self.compiled.get(key)
        if found is None:
            self._by_triton(key, grid, tensors, numbers)
            return
        compiled, run, function, metadata = found
        runtime = triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # chains of hooks, as long as nobody replaced them
            compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *self.values)
            return
        stream = triton.runtime.driver.active.get_current_stream(tensors[0].get_device())
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream, function, metadata, None, None, None, *addresses, *numbers, *self.values)

    def _by_triton(self, key: tuple, grid: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int | float]) -> None:
        """Triton's own way, which compiles what it has not compiled yet."""
        names = self.kernel.arg_names[len(tensors) + len(numbers) :]
        if list(self.constants) != names:
            raise TypeError(f"{self.kernel.__name__}: constants {list(self.constants)}, its parameters are {names}")
        tensors = [t.view(torch.int32) if i in self.words else t for i, t in enumerate(tensors)]
        compiled = self.kernel[tuple(grid)](*tensors, *numbers, **self.constants, **self.options)
        # None: a hook of Triton's compiler took over
        if compiled is not None and not INTERPRETED and not self.kernel.pre_run_hooks:
            self.compiled[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata


_plans: dict[tuple, Plan] = {}
"""By what they are made of; kernels by their ``id``: a plan keeps its kernel alive."""
MOST_PLANS = 1 << 14
"""Beyond, they are made anew: sizes of batches are among the numbers."""


def _remember(key: tuple, plan: Plan) -> Plan:
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def launch_rows(
    kernel: triton.JITFunction,
    name: str,
    shape: tuple[int, int],
    mode: int,
    tensors: Sequence[Tensor],
    numbers: tuple[int | float, ...],
    constants: dict,
) -> None:
    """Launch a kernel whose program holds one of M rows of K values; ``shape`` is (M, K), ``name`` one of
    :data:`BLOCKS_PER_THREAD`. The kernel's first constants are K, NB and MODE."""
    m, k = shape
    if not m:
        return
    key = (id(kernel), k, mode, numbers, *constants.values())
    if (plan := _plans.get(key)) is None:
        nb = row_blocks(k)
        plan = _remember(key, Plan(kernel, {"K": k, "NB": nb, "MODE": mode, **constants}, options_for(nb, name, mode)))
    plan.launch((m,), tensors, numbers)


def launch_words(
    kernel: triton.JITFunction, rows: int, k: int, tensors: Sequence[Tensor], numbers: tuple[int, ...], constants: dict
) -> None:
    """Launch a kernel whose program decodes some 32-bit words of codes of a row of K values: NW, its first constant. Its first
    tensors are the codes (bytes), scales and global scales of two matrices."""
    key = (id(kernel), k, numbers, *constants.values())
    if (plan := _plans.get(key)) is None:
        words = padded_k(k) // 8
        nw = min(power_of_two(words), DEQUANTIZE["words"])
        warps = min(max(nw // (32 * DEQUANTIZE["words_per_thread"]), 1), 32)
        options = {"num_warps": warps, **EXACT_MATH}
        plan = _remember(key, Plan(kernel, {"NW": nw, **constants}, options, (0, 3), ceil_div(words, nw)))
    plan.launch((rows, plan.columns), tensors, numbers)


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
    """``kernel[grid](*tensors, *numbers, **constants, **options)`` on the current device, that of the tensors.

    Triton's own way finds out at every call what to specialise a kernel on, reads its settings from the environment, asks the
    driver about every pointer, and describes the launch to hooks, whether there are any or not. On a host where a BF16 GEMM call
    takes 23 us all that took 30 us of 43 (H200 machine, Triton 3.6), for a kernel that runs for 3. Here a compiled kernel is
    remembered by all that it depends on. Hooks of a launch (profilers) are called as always. Triton's settings (``TRITON_DEBUG``,
    instrumentation) count at the first launch of a kind. Triton's interpreter, and a kernel with hooks of its own, take Triton's
    way every time; so does a tensor that is not on the GPU, which raises there.

    Args:
        kernel: its parameters are the tensors, the numbers (no bool) and the constants, in this order.
        constants: ``tl.constexpr`` parameters by name; a name always has values of one type.
    """
    key = (id(kernel), *map(_number_kind, numbers), *constants.values(), *options.items())
    plan = _plans.get(key) or _remember(key, Plan(kernel, constants, options))
    plan.launch(grid, tensors, numbers)
