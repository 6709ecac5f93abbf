"""Decoder layers whose weights the host has no room to hold in page-locked memory: a disk as a second level.

``from_pretrained`` leaves the tensors of a base that was saved packed memory-mapped in its safetensors files
(``peft-nvfp4 quantize``, or ``save_pretrained``). Such pages count as free: the system keeps them while nobody wants their room,
and reads them again. So a layer that the host has no room to copy stays where it is, and a thread gathers its bytes, a layer
ahead, in a page-locked buffer beside each of the two on the GPU. Nothing is written to a disk. Weights that are in ordinary
memory (a base that was packed in this process) stay there in the same way.

The thread waits for the last copy out of its buffer, reads, and launches the copy to the GPU; whoever computes with the layer
waits for the thread first. That copy comes after everything that was launched before it was asked for: the copying stream was
told to wait then. One thread reads for all layers, in the order of their use.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .host_memory import HostBuffer
from .layers import OffloadedLayer, view_of

if TYPE_CHECKING:
    from .transfers import Offload, Slot


def gather(layer: OffloadedLayer, buffer: Tensor) -> None:
    """Copy a layer's bytes from where its parameters lie at rest to their places in a buffer of bytes."""
    with torch.no_grad():
        for _, home, start in layer.places:
            view_of(buffer, start, home).copy_(home)


class ReadAhead:
    """The thread of one model."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "nvfp4_read_ahead")

    def begin(self, owner: Offload, layer: OffloadedLayer, slot: Slot) -> None:
        """Have a layer's bytes in the slot by the time that :func:`settle` returns."""
        slot.reading = self.pool.submit(_read, owner, layer, slot)


def _read(owner: Offload, layer: OffloadedLayer, slot: Slot) -> None:
    if owner.stream is None:
        gather(layer, slot.data)
        return
    if slot.staging is None:
        slot.staging = HostBuffer(slot.data.numel())
        slot.staging.pin(owner.device)
    elif slot.copied is not None:
        slot.copied[1].synchronize()
    gather(layer, slot.staging.data)
    owner.copy(slot.staging.data, slot, layer.size)


def settle(slot: Slot) -> None:
    """Wait until the thread has read what it was asked to, and raise its error."""
    reading: Future | None = slot.reading
    if reading is None:
        return
    slot.reading = None
    try:
        reading.result()
    except BaseException:
        slot.holds = None  # to be read again, by whoever wants it
        if slot.user is not None:
            slot.user.point_to_host()
        raise
