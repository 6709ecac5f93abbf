"""Memory of the host that a GPU can read while it computes (page-locked, "pinned").

PyTorch's own pinned allocator rounds every request up to a power of two, up to twice what a decoder layer needs. Here a request
takes whole pages of its own, which are locked in place once a GPU is going to read them.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

LEFT_TO_OTHERS = 1 << 30
"""Bytes of the host's free memory that are not taken."""
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}  # Windows has no flags


class HostMemoryShort(RuntimeError):
    """The host has not enough memory. Nothing was computed, and nothing has changed."""


class _Pages(mmap.mmap):
    """Pages that are unlocked before they are given back. (Tensors made from them keep them alive.)"""

    locked_at = 0
    reader: torch.device | None = None  # the GPU that reads them

    def __del__(self) -> None:
        if self.locked_at and not sys.is_finalizing():  # by then CUDA has ended, and the system takes everything back
            torch.cuda.synchronize(self.reader)  # a copy may still read them
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)


class HostBuffer:
    """``bytes_`` bytes on the host. Raises :class:`HostMemoryShort` where the system does not give them.

    Attributes:
        data: the bytes, ``uint8``.
        pinned: whether a GPU reads them by itself.
    """

    def __init__(self, bytes_: int):
        try:
            self._pages = _Pages(-1, max(bytes_, 1), **_PRIVATE)
        except OSError as error:
            raise HostMemoryShort(
                f"the system refused {bytes_ / 1e9:.2f} GB of the host's memory ({error.strerror}): free some of it, or raise "
                "the limit of this process (ulimit -v)"
            ) from error
        with torch.inference_mode(False):
            self.data: Tensor = torch.frombuffer(self._pages, dtype=torch.uint8)[:bytes_]
        self.pinned, self._asked = False, False

    def pin(self, device: torch.device) -> bool:
        """Lock the pages in place, for copies to ``device``; False where the system refuses (it may limit locked memory): copies
        then take longer."""
        self._pages.reader = device
        if not self._asked and self.data.numel():
            self._asked = True
            address = self.data.data_ptr()
            with torch.cuda.device(device):  # the current one may be another, which would get a context
                self.pinned = int(torch.cuda.cudart().cudaHostRegister(address, len(self._pages), 0)) == 0
                self._pages.locked_at = address if self.pinned else 0
                if not self.pinned:
                    with suppress(RuntimeError):  # CUDA keeps the error until somebody asks; the next kernel would raise it
                        torch.zeros(1, device="cuda")
            if self.pinned and hasattr(mmap, "MADV_DONTFORK"):
                self._pages.madvise(mmap.MADV_DONTFORK)  # a forked data loader would otherwise move them when it writes
        return self.pinned
