"""All decoder layers whose packed weights are on the host: two buffers on the device, what is copied when, and who computes.

:mod:`peft_nvfp4.training.offload.enable` describes the whole.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .host_memory import HostBuffer
from .layers import OffloadedLayer, view_of
from .read_ahead import ReadAhead, settle

TIMED = 512
"""Copies whose times are remembered."""


@dataclass
class OffloadStatus:
    """What was moved so far.

    Attributes:
        layers, host_bytes: what lives on the host; ``pinned``: the GPU reads it by itself.
        left_bytes: of layers that the host had no room to gather: a thread reads them from where they were loaded, which are
            files where the base was saved packed (:mod:`.read_ahead`).
        device_bytes: of the two buffers.
        copies, moved_bytes: from host to device; ``ahead``: copies begun before the layer was called.
        copy_ms, waited_ms: of the last :data:`TIMED` copies to a GPU: how long they took, and how long layers waited for them.
    """

    layers: int = 0
    host_bytes: int = 0
    pinned: bool = False
    left_bytes: int = 0
    device_bytes: int = 0
    copies: int = 0
    ahead: int = 0
    moved_bytes: int = 0
    copy_ms: float = 0.0
    waited_ms: float = 0.0

    @property
    def overlap(self) -> float:
        """Share of the copying that nobody waited for."""
        return 1.0 - min(1.0, self.waited_ms / self.copy_ms) if self.copy_ms else 0.0

    def __str__(self) -> str:
        if not self.layers:
            return "frozen weights are on the device"
        pages = "page-locked" if self.pinned else "pageable"
        left = f", {self.left_bytes / 1e9:.2f} GB where they were loaded, for want of room" if self.left_bytes else ""
        return (
            f"{self.layers} layers, {self.host_bytes / 1e9:.2f} GB in {pages} host memory{left}, "
            f"{self.device_bytes / 1e9:.2f} GB of buffers; {self.copies} copies ({self.ahead} ahead of their layer), "
            f"{self.moved_bytes / 1e9:.2f} GB moved, {self.overlap:.0%} of the copying overlapped"
        )


class Slot:
    """A buffer on the device."""

    def __init__(self, bytes_: int, device: torch.device):
        with torch.inference_mode(False):
            self.data = torch.empty(bytes_, dtype=torch.uint8, device=device)
        self.holds: OffloadedLayer | None = None  # whose bytes are here, or on their way
        self.versions: list[int] = []  # of those parameters when they were copied: somebody may write to the host's bytes
        self.user: OffloadedLayer | None = None  # whose parameters point here
        self.copied: Any = None  # events at the beginning and the end of the copy, on a GPU
        self.timed = False  # how long a layer waited for it
        self.readers: list[Any] = []  # streams that have waited for the copy, and may be reading what is here
        self.reading: Any = None  # while a thread reads what comes here: its future
        self.staging: HostBuffer | None = None  # page-locked, where that thread reads to


class Offload:
    """All offloaded layers of a model.

    Attributes:
        device: where layers compute; follows ``model.to(device)``.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device):
        self.device, self.status = device, OffloadStatus()
        self.slots: list[Slot] = []
        self.stream: Any = None
        self.ahead: ReadAhead | None = None  # of layers that the host has no room for
        self.times: deque[tuple] = deque(maxlen=TIMED)
        self.task = -1  # backward whose end has been arranged for
        self.fetched_for: tuple | None = None  # layer and direction whose neighbour has been asked for
        self.running: list[OffloadedLayer] = []  # those that compute now, the innermost last, all in one thread
        self.thread = 0
        self.mutex = threading.RLock()  # of what is kept here; held while a copy is begun, not while a layer computes
        self.layers = [OffloadedLayer(self, i, module) for i, module in enumerate(layers)]
        for layer in self.layers:
            layer.pack()

    def __getstate__(self) -> dict:
        """Copies (and pickles) begin without buffers."""
        empty = {"slots": [], "stream": None, "ahead": None, "times": deque(maxlen=TIMED)}
        empty |= {"task": -1, "fetched_for": None, "running": []}
        return {name: value for name, value in (vars(self) | empty).items() if name != "mutex"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, mutex=threading.RLock())

    def place(self, device: torch.device) -> None:
        """Compute on ``device`` from now on. Buffers on another one are let go."""
        if device != self.device:
            self._drop_slots()
            self.device, self.stream = device, None
            self.times.clear()

    # -- who computes

    def begin(self, layer: OffloadedLayer, direction: int, unwind: bool = False) -> None:
        """Until :meth:`end`, this thread computes with a layer's bytes, and no other one may have others fetched. ``unwind``:
        if the layer was begun before, an exception has ended what was begun since."""
        with self.mutex:
            self.use(layer, direction)
            if unwind and layer in self.running:
                del self.running[self.running.index(layer) :]
            self.running.append(layer)
            self.thread = threading.get_ident()

    def end(self, layer: OffloadedLayer) -> bool:
        """Returns whether this thread had begun."""
        with self.mutex:
            begun = layer in self.running and self.thread == threading.get_ident()
            if begun:
                del self.running[-1 - self.running[::-1].index(layer) :]
            return begun

    def use(self, layer: OffloadedLayer, direction: int) -> None:
        """Point a layer's parameters into its buffer, and fetch its neighbour. Where they point there already, next to nothing.

        Raises:
            RuntimeError: another thread is computing with a layer.
        """
        with self.mutex:
            self._refuse_other_threads()
            if not layer.swapped:
                self._swap(layer)
            self._wait(self._slot(layer))
            task = torch._C._current_graph_task_id()
            if task not in (-1, self.task):
                self.task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
            if self.fetched_for != (layer.index, direction):
                self.fetched_for = layer.index, direction
                self._fetch_neighbour(layer, direction)

    def release(self, layer: OffloadedLayer | None = None) -> None:
        """Nothing runs (or this layer does not): the parameters point to the host."""
        with self.mutex:
            self._refuse_other_threads()
            for other in self.layers if layer is None else [layer]:
                other.point_to_host()
            self.fetched_for = None
            if layer is None:
                self.task = -1

    def _backward_ends(self) -> None:
        with self.mutex:
            if not self.running:  # a thread that has begun since goes on
                self.release()

    def _refuse_other_threads(self) -> None:
        if not self.running or self.thread == threading.get_ident():
            return
        if self.thread not in sys._current_frames():  # it has ended, in the middle of a layer
            self.running.clear()
            return
        raise RuntimeError(
            "offload computes in one thread at a time, since all layers share two buffers, and another thread is in decoder "
            f"layer {self.running[-1].index}. Hold a threading.Lock while the model is called, differentiated or saved, give "
            "each thread a copy.deepcopy(model), or call peft_nvfp4.disable_offload(model)"
        )

    def _swap(self, layer: OffloadedLayer) -> None:
        for other in self.layers:
            if other.swapped:
                other.point_to_host()
        self._load(layer, ahead=False)
        slot = self._slot(layer)
        layer.swapped = [(p, home) for p, home, _ in layer.places]
        if not layer.views:
            layer.views = [view_of(slot.data, start, home) for _, home, start in layer.places]
        for (p, _, _), view in zip(layer.places, layer.views):
            p.data = view
        slot.user = layer

    def _fetch_neighbour(self, layer: OffloadedLayer, direction: int) -> None:
        neighbour = layer.index + direction
        if neighbour == len(self.layers) and not layer.module.training:
            neighbour = 0  # no backward follows, but perhaps the next token
        if 0 <= neighbour < len(self.layers):
            self._load(self.layers[neighbour], ahead=True)

    # -- copies

    def _slot(self, layer: OffloadedLayer) -> Slot:
        return self.slots[layer.index % len(self.slots)]

    def settle(self) -> None:
        """The thread that reads has ended what it was asked to do, well or not."""
        for slot in self.slots:
            with suppress(Exception):  # nobody will compute with what it has read
                settle(slot)

    def _drop_slots(self) -> None:
        self.settle()
        self.slots = []
        for layer in self.layers:
            layer.forget_views()

    def _make_slots(self) -> None:
        size = max(layer.size for layer in self.layers)
        if self.slots and self.slots[0].data.device == self.device and self.slots[0].data.numel() >= size:
            return
        self._drop_slots()
        self.slots = [Slot(size, self.device) for _ in range(min(2, len(self.layers)))]
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self.stream is not None:
            for slot in self.slots:  # their memory is not given to anybody while a copy into it may be on its way
                slot.data.record_stream(self.stream)

    def _load(self, layer: OffloadedLayer, ahead: bool) -> None:
        """Copy a layer's bytes to its buffer, unless they are there (or, ahead of time, another layer computes there)."""
        if not layer.swapped and layer.pack():
            for other in self.layers:  # all were merged, probably: buffers are made for the largest of them at once
                other.swapped or other.pack()
        if ahead and layer.size > self.slots[0].data.numel():  # larger buffers would take the place of those that are in use
            return
        self._make_slots()
        slot = self._slot(layer)
        versions = layer.versions()
        if slot.holds is layer and slot.versions == versions or ahead and slot.user is not None:
            return
        if slot.reading is not None:
            settle(slot)
        self.status.copies += 1
        self.status.ahead += ahead
        self.status.moved_bytes += layer.size
        slot.holds, slot.versions = layer, versions
        if self.stream is not None:
            for stream in {torch.cuda.current_stream(self.device), *slot.readers}:
                self.stream.wait_stream(stream)
            slot.readers = []
        if layer.host is None:
            self.ahead = self.ahead or ReadAhead()
            self.ahead.begin(self, layer, slot)
        elif self.stream is None:
            slot.data[: layer.size].copy_(layer.host.data)
        else:
            layer.host.pin(self.device)
            self.copy(layer.host.data, slot, layer.size)

    def copy(self, source: Tensor, slot: Slot, size: int) -> None:
        """To a slot on a GPU, in the order of the copying stream."""
        with torch.cuda.stream(self.stream), torch.no_grad():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            slot.data[:size].copy_(source[:size], non_blocking=True)
            end.record()
        slot.copied, slot.timed = (begin, end), False

    def _wait(self, slot: Slot) -> None:
        """The current stream goes on when the buffer is filled."""
        if slot.reading is not None:
            settle(slot)
        if self.stream is None:
            return
        stream = torch.cuda.current_stream(self.device)
        if stream in slot.readers:
            return
        slot.readers.append(stream)
        slot.data.record_stream(stream)
        asked, went_on = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        asked.record(stream)
        stream.wait_event(slot.copied[1])
        went_on.record(stream)
        if not slot.timed:
            self.times.append((*slot.copied, asked, went_on))
            slot.timed = True

    def measured(self) -> OffloadStatus:
        status = replace(self.status)
        status.layers, status.device_bytes = len(self.layers), sum(slot.data.nbytes for slot in self.slots)
        hosts = [layer.host for layer in self.layers if layer.host is not None]
        status.host_bytes, status.pinned = sum(h.data.nbytes for h in hosts), all(h.pinned for h in hosts)
        status.left_bytes = sum(layer.size for layer in self.layers if layer.host is None)
        if self.stream is not None:
            torch.cuda.synchronize(self.device)
        status.copy_ms = sum(begin.elapsed_time(end) for begin, end, _, _ in self.times)
        status.waited_ms = sum(asked.elapsed_time(went_on) for _, _, asked, went_on in self.times)
        return status
