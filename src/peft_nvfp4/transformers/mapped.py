"""Give back the pages of checkpoint files that have been read.

safetensors files are mapped into memory, and what is read from a mapping counts as resident until the mapping goes: on a CPU,
with the last dense parameter of the file. Such pages cost nothing but the number: the kernel takes them back when it needs them.
But job schedulers and people look at that number, and a streaming load would seem to hold the whole BF16 model.

``MADV_PAGEOUT`` drops clean pages of a file and never loses a byte: a page that is needed again is read again. (``MADV_DONTNEED``
would throw away what somebody wrote into another private mapping of the same file.) On the same occasion freed heap memory goes
back, of which quantising on a CPU leaves much.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

MADV_PAGEOUT = 21
"""Linux 5.4 and later; older kernels refuse the advice, and nothing happens."""


def release(files: Iterable[str]) -> None:
    """Advise the kernel to drop resident pages of all mappings of these files. Advice only: where there is no such call (other
    systems than Linux), the kernel decides alone, as it would have."""
    paths = {os.path.realpath(file) for file in files}
    try:
        with open("/proc/self/maps") as maps:
            ranges = [line.split(maxsplit=5) for line in maps]
        libc = ctypes.CDLL(None)
        madvise = libc.madvise
    except (OSError, AttributeError):
        return
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for fields in ranges:
        if len(fields) == 6 and fields[5].rstrip("\n") in paths:
            start, end = (int(address, 16) for address in fields[0].split("-"))
            madvise(start, end - start, MADV_PAGEOUT)
