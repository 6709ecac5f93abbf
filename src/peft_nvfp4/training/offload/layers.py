"""Decoder layers whose packed weights are on the host: their bytes there, two buffers on the device, and what is copied when.

:class:`OffloadedLayer` is one decoder layer: it gathers the packed bytes in one buffer of the host and has the hooks that run
before and after it. :class:`Offload` holds all of them and the buffers on the device, decides what is copied when, and counts.
:mod:`peft_nvfp4.training.offload.enable` describes the whole.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...quantization.freeze import frozen_modules
from .frozen_methods import ON_DEVICE, DeviceMethod, HostApply, packed_parameters
from .host_memory import HostBuffer

ALIGNMENT = 256
"""Bytes: every tensor begins where kernels may read it in the widest words."""
TIMED = 512
"""Copies whose times are remembered."""
ATTRIBUTE = "_nvfp4_offload"
"""Attribute of a decoder layer that holds its :class:`OffloadedLayer`."""


@dataclass
class OffloadStatus:
    """What was moved so far.

    Attributes:
        layers, host_bytes: what lives on the host; ``pinned``: the GPU reads it by itself.
        device_bytes: of the two buffers.
        copies, moved_bytes: from host to device; ``ahead``: copies begun before the layer was called.
        copy_ms, waited_ms: of the last :data:`TIMED` copies to a GPU: how long they took, and how long layers waited for them.
    """

    layers: int = 0
    host_bytes: int = 0
    pinned: bool = False
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
        return (
            f"{self.layers} layers, {self.host_bytes / 1e9:.2f} GB in {pages} host memory, {self.device_bytes / 1e9:.2f} GB of "
            f"buffers; {self.copies} copies ({self.ahead} ahead of their layer), {self.moved_bytes / 1e9:.2f} GB moved, "
            f"{self.overlap:.0%} of the copying overlapped"
        )


class _Slot:
    """A buffer on the device."""

    def __init__(self, bytes_: int, device: torch.device):
        with torch.inference_mode(False):
            self.data = torch.empty(bytes_, dtype=torch.uint8, device=device)
        self.holds: OffloadedLayer | None = None  # whose bytes are here, or on their way
        self.versions: list[int] = []  # of those parameters when they were copied: somebody may write to the host's bytes
        self.user: OffloadedLayer | None = None  # whose parameters point here
        self.copied: Any = None  # events at the beginning and the end of the copy, on a GPU
        self.timed = False  # how long a layer waited for it


class OffloadedLayer:
    """A decoder layer: where its packed tensors are, and its hooks."""

    def __init__(self, owner: Offload, index: int, module: nn.Module):
        self.owner, self.index, self.module = owner, index, module
        self.packed = [m for _, m in frozen_modules(module)]
        self.host: HostBuffer | None = None
        self.size = 0  # of that
        self.places: list[tuple[nn.Parameter, Tensor, int]] = []  # parameter, its bytes on the host, where in the buffer
        self.swapped: list[tuple[nn.Parameter, Tensor]] = []  # while it is in use: parameters, and what they were
        self.views: list[Tensor] = []  # of its buffer on the device: made once, since making them takes a millisecond
        self.handles = [
            module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.leave, always_call=True),
            module.register_state_dict_pre_hook(self.rest),  # an interrupted backward leaves parameters in a buffer
            module.register_load_state_dict_pre_hook(self.rest),
        ]
        setattr(module, ATTRIBUTE, self)
        for layer in self.packed:
            layer._apply = HostApply(owner, layer)
            for name in ON_DEVICE:
                if hasattr(type(layer), name):
                    setattr(layer, name, DeviceMethod(owner, layer, name))

    def __getstate__(self) -> dict:
        """A copy (or a pickle) makes its own buffer when it runs."""
        self.release()
        return vars(self) | {"host": None, "places": [], "views": []}

    # -- storage

    def parameters(self) -> list[nn.Parameter]:
        """The packed ones, as the frozen layers have them now."""
        return [p for m in self.packed for p in packed_parameters(m).values()]

    def versions(self) -> list[int]:
        """Counts of what was written into the parameters in place (``load_state_dict``)."""
        return [0 if p.is_inference() else p._version for p, _, _ in self.places]

    def pack(self) -> None:
        """Bring the bytes together on the host, if they are not there yet or some were replaced (a merge). What was replaced may
        be referred to still, so a new buffer is made."""
        parameters = self.parameters()
        known = len(parameters) == len(self.places) and all(
            p is q and p.data_ptr() == home.data_ptr() and p.dtype == home.dtype
            for p, (q, home, _) in zip(parameters, self.places)
        )
        if known:
            return
        starts, size = [], 0
        for p in parameters:
            starts.append(size)
            size += -(-p.nbytes // ALIGNMENT) * ALIGNMENT
        self.host, self.size, self.places, self.views = HostBuffer(size), size, [], []
        with torch.no_grad():
            for p, start in zip(parameters, starts):
                home = _view(self.host.data, start, p)
                home.copy_(p.data)
                p.data = home
                self.places.append((p, home, start))
        for slot in self.owner.slots:
            slot.holds = None if slot.holds is self else slot.holds

    # -- hooks

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("offload and torch.compile exclude each other: call peft_nvfp4.disable_offload(model) first")
        if module is not self.module:
            raise RuntimeError("offload does not work in nn.DataParallel: start one process per GPU (torchrun) instead")
        device = self.owner.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("CUDA graphs cannot record layers with offload: the copies are no part of a recording")
        if self.index == 0 and torch.is_grad_enabled() and not in_backward() and _cache_has_gradients(kwargs):
            raise RuntimeError(
                "offload cannot send gradients through a cache of keys and values into an earlier forward: nothing tells "
                "when its layers are needed. Fill the cache under torch.no_grad(), or run the whole sequence at once"
            )
        self.owner.use(self, -1 if in_backward() else 1)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():  # checkpointing: backward of this layer is next
            return
        self.release()
        for t in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(t, Tensor) and t.requires_grad:
                t.register_hook(self.before_backward)

    def before_backward(self, grad: Tensor) -> None:
        self.owner.use(self, -1)

    def rest(self, *args: Any) -> None:
        self.owner.release()

    def release(self) -> None:
        """Point the parameters back to the host."""
        for p, home in self.swapped:
            p.data = home
        self.swapped = []
        for slot in self.owner.slots:
            slot.user = None if slot.user is self else slot.user


class Offload:
    """All offloaded layers of a model.

    Attributes:
        device: where layers compute; follows ``model.to(device)``.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device):
        self.device, self.status = device, OffloadStatus()
        self.slots: list[_Slot] = []
        self.stream: Any = None
        self.times: deque[tuple] = deque(maxlen=TIMED)
        self.task = -1  # backward whose end has been arranged for
        self.layers = [OffloadedLayer(self, i, module) for i, module in enumerate(layers)]
        for layer in self.layers:
            layer.pack()

    def __getstate__(self) -> dict:
        """Copies (and pickles) begin without buffers."""
        return vars(self) | {"slots": [], "stream": None, "times": deque(maxlen=TIMED), "task": -1}

    def place(self, device: torch.device) -> None:
        """Compute on ``device`` from now on. Buffers on another one are let go."""
        if device != self.device:
            self.device, self.stream = device, None
            self._drop_slots()
            self.times.clear()

    def use(self, layer: OffloadedLayer, direction: int) -> None:
        """Point a layer's parameters into its buffer, and fetch its neighbour."""
        for other in self.layers:
            if other is not layer and other.swapped:
                other.release()
        if not layer.swapped:
            self._load(layer, ahead=False)
            slot = self._slot(layer)
            self._wait(slot)
            layer.swapped = [(p, home) for p, home, _ in layer.places]
            if not layer.views:
                layer.views = [_view(slot.data, start, home) for _, home, start in layer.places]
            for (p, _, _), view in zip(layer.places, layer.views):
                p.data = view
            slot.user = layer
        task = torch._C._current_graph_task_id()
        if task not in (-1, self.task):
            self.task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.release)
        neighbour = layer.index + direction
        if neighbour == len(self.layers) and not layer.module.training:
            neighbour = 0  # no backward follows, but perhaps the next token
        if 0 <= neighbour < len(self.layers):
            self._load(self.layers[neighbour], ahead=True)

    def release(self) -> None:
        """Nothing runs: all parameters point to the host."""
        for layer in self.layers:
            layer.release()
        self.task = -1

    # -- copies

    def _slot(self, layer: OffloadedLayer) -> _Slot:
        return self.slots[layer.index % len(self.slots)]

    def _drop_slots(self) -> None:
        self.slots = []
        for layer in self.layers:
            layer.views = []

    def _make_slots(self) -> None:
        size = max(layer.size for layer in self.layers)
        if self.slots and self.slots[0].data.device == self.device and self.slots[0].data.numel() >= size:
            return
        self._drop_slots()
        self.slots = [_Slot(size, self.device) for _ in range(min(2, len(self.layers)))]
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self.stream is not None:
            for slot in self.slots:  # their memory is not given to anybody while a copy into it may be on its way
                slot.data.record_stream(self.stream)

    def _load(self, layer: OffloadedLayer, ahead: bool) -> None:
        """Copy a layer's bytes to its buffer, unless they are there (or, ahead of time, another layer computes there)."""
        if not layer.swapped:
            layer.pack()
        self._make_slots()
        slot = self._slot(layer)
        versions = layer.versions()
        if slot.holds is layer and slot.versions == versions or ahead and slot.user is not None:
            return
        size = layer.size
        self.status.copies += 1
        self.status.ahead += ahead
        self.status.moved_bytes += size
        slot.holds, slot.versions = layer, versions
        if self.stream is None:
            slot.data[:size].copy_(layer.host.data)
            return
        layer.host.pin(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            slot.data[:size].copy_(layer.host.data, non_blocking=True)
            end.record()
        slot.copied, slot.timed = (begin, end), False

    def _wait(self, slot: _Slot) -> None:
        """The current stream goes on when the buffer is filled."""
        if self.stream is None:
            return
        stream = torch.cuda.current_stream(self.device)
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
        if self.stream is not None:
            torch.cuda.synchronize(self.device)
        status.copy_ms = sum(begin.elapsed_time(end) for begin, end, _, _ in self.times)
        status.waited_ms = sum(asked.elapsed_time(went_on) for _, _, asked, went_on in self.times)
        return status


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes of a contiguous tensor like ``like`` in a buffer of bytes."""
    with torch.inference_mode(False):
        return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _cache_has_gradients(kwargs: dict[str, Any]) -> bool:
    """Whether an argument is a cache whose keys or values come from a forward that is differentiated."""
    lists = [layers for value in kwargs.values() if isinstance(layers := getattr(value, "layers", None), list)]
    tensors = (getattr(part, name, None) for layers in lists for part in layers for name in ("keys", "values"))
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def in_backward() -> bool:
    """Whether autograd calls."""
    return torch._C._current_graph_task_id() != -1
