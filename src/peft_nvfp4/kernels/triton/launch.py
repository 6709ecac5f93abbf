"""Launching a Triton kernel again, without Triton looking at every argument again.

``kernel[grid](...)`` finds out each time what to specialise the kernel on: types, alignment of pointers, numbers that are 1 or a
multiple of 16. On a host where a BF16 GEMM call takes 23 us, that took 25 us of 43 (H200 machine, Triton 3.6), for a kernel that
runs for 3. So :func:`launch` remembers the compiled kernel by what can differ between calls, and calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
from torch import Tensor

DIRECT = False
"""Use what is remembered. Off: timed (18 us a launch), but its results have not been compared on a GPU yet."""
_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}


def launch(
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    numbers: Sequence,
    constants: dict,
    **options,
) -> None:
    """``kernel[grid](*tensors, *numbers, **constants, **options)``.

    The kernel's parameters are in this order. It must name all ``numbers`` in ``do_not_specialize``: only then do their values
    not matter. Tensors that are not all aligned to 16 bytes take Triton's way.
    """
    address = 0
    for t in tensors if DIRECT else ():
        address |= t.data_ptr()
    if not DIRECT or address % 16 or triton.knobs.runtime.interpret:
        kernel[grid](*tensors, *numbers, **constants, **options)
        return
    key = (id(kernel), tensors[0].device.index, *(t.dtype for t in tensors), *constants.values(), *options.values())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*tensors, *numbers, *constants.values())
        return
    if list(constants) != kernel.arg_names[len(tensors) + len(numbers) :]:
        raise TypeError(f"{kernel.__name__}: constants {list(constants)}, declared are {kernel.arg_names}")
    _compiled[key] = kernel[grid](*tensors, *numbers, **constants, **options)
