"""Inputs of checkpointed layers on their way to the host's memory and back.

:mod:`peft_nvfp4.training.host_checkpoints` describes the whole and decides when.

Order between streams: the copy to the host waits for the layer before; the layer's input is held until the next layer begins,
which waits for the copy. A copy back waits for what was launched before it, since the memory that it writes may be in use until
then; the layer that reads it waits for the copy. So the allocator needs to know of one stream only. On a CPU the same code
copies at once.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from ..memory.device import free_host_bytes
from .offload.host_memory import LEFT_TO_OTHERS, HostBuffer, HostMemoryShort


class Buffers:
    """Host memory for checkpoints, used again from step to step; and the stream on which they travel."""

    def __init__(self) -> None:
        self.free: list[HostBuffer] = []
        self.taken: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self.device: torch.device | None = None
        self.stream: Any = None

    @property
    def all(self) -> list[HostBuffer]:
        return [*self.free, *self.taken]

    def prepare(self, count: int, bytes_: int, device: torch.device) -> None:
        """Have room for ``count`` checkpoints of so many bytes, from ``device``, or raise :class:`HostMemoryShort`."""
        if device != self.device:
            self.free, self.device = [], device
            self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        size = rounded(bytes_)
        self.free = [buffer for buffer in self.free if buffer.data.numel() >= bytes_]  # shorter ones make room first
        missing = max(0, count - len(self.free))
        wanted = missing * size
        available = free_host_bytes() - LEFT_TO_OTHERS
        if wanted > max(available, 0):
            raise HostMemoryShort(
                f"the checkpoints of {count} layers take {count * size / 1e9:.1f} GB of the host's memory, {wanted / 1e9:.1f} GB "
                f"more than they have, and {max(available, 0) / 1e9:.1f} GB are free: train with shorter sequences, free some of "
                "the host's memory, or keep checkpoints on the GPU (peft_nvfp4.disable_host_checkpoints(model))"
            )
        self.free += [HostBuffer(size) for _ in range(missing)]

    def take(self, bytes_: int) -> HostBuffer:
        at = next((i for i, buffer in enumerate(self.free) if buffer.data.numel() >= bytes_), None)
        buffer = HostBuffer(rounded(bytes_)) if at is None else self.free.pop(at)
        if self.stream is not None:
            buffer.pin(self.device)
        self.taken.add(buffer)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Copies that are still on their way come first: all are on one stream."""
        self.taken.discard(buffer)
        self.free.append(buffer)


def rounded(bytes_: int) -> int:
    """Up to a sixteenth of a power of two: sequences of nearly the same length share buffers."""
    step = 1 << max(0, bytes_.bit_length() - 5)
    return -(-bytes_ // step) * step


class Checkpoint:
    """The input of one layer, on the host from :meth:`keep` to :meth:`fetch`.

    Args:
        before: that of the layer before, which is fetched ahead.
    """

    def __init__(self, buffers: Buffers, hidden: Tensor, before: Checkpoint | None):
        self.buffers, self.before = buffers, before
        self.shape, self.dtype, self.device, self.requires_grad = hidden.shape, hidden.dtype, hidden.device, hidden.requires_grad
        self.bytes = hidden.nbytes
        self.values: Tensor | None = None  # on the device, or on the way
        self.arrived: Any = None  # event at the end of the last copy
        self.buffer: HostBuffer | None = None
        self.buffer = buffers.take(hidden.nbytes)
        self._copy(self.home, hidden.detach())

    @property
    def home(self) -> Tensor:
        return self.buffer.data[: self.bytes].view(self.dtype).view(self.shape)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        stream = self.buffers.stream
        if stream is None:
            to.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            self.arrived = stream.record_event()

    def wait(self) -> None:
        """The current stream goes on when the last copy has ended."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
            self.arrived = None

    def begin(self) -> None:
        """Fetching, if it has not begun."""
        if self.values is None and self.buffer is not None:
            self.values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self._copy(self.values, self.home)

    def fetch(self) -> Tensor:
        """The input, on the device, no leaf of autograd's. That of the layer before is on its way then.

        Raises:
            RuntimeError: it was fetched by a backward pass that did not retain its graph.
        """
        if self.buffer is None:
            raise RuntimeError(
                "a second backward pass through a checkpointed layer: the first one has let go of what it needs; call "
                "backward(retain_graph=True) there"
            )
        self.begin()
        self.wait()
        values, self.values = self.values, None
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.release()
        if self.before is not None:
            self.before.begin()
        return values.requires_grad_().view(self.shape) if self.requires_grad else values

    def release(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self.buffers.give(buffer)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.wait()  # the memory of values goes back to the current stream
            self.release()
