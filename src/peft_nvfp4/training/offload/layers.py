"""A decoder layer whose packed weights are on the host: it gathers them in one buffer there, has the hooks that run before and
after it, and fetches the bytes for whoever computes with them. :mod:`peft_nvfp4.training.offload.enable` describes the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...autograd.hosted import version
from ...memory.device import free_host_bytes
from ...quantization.freeze import frozen_modules
from .frozen_methods import ON_DEVICE, DeviceMethod, HostApply, packed_parameters
from .host_memory import LEFT_TO_OTHERS, HostBuffer, HostMemoryShort

if TYPE_CHECKING:
    from .transfers import Offload

ALIGNMENT = 256
"""Bytes: every tensor begins where kernels may read it in the widest words."""
ATTRIBUTE = "_nvfp4_offload"
"""Attribute of a decoder layer that holds its :class:`OffloadedLayer`."""


class Arrangement:
    """The places of a layer's packed tensors, as they were for a forward; the context in which its backward reads them there."""

    def __init__(self, layer: OffloadedLayer):
        self.layer = layer

    def __enter__(self) -> None:
        self._check()  # before it is fetched: offload may be over
        self.layer.owner.begin(self.layer, -1)
        try:
            self._check()  # fetching arranges anew what was replaced
        except RuntimeError:
            self.layer.owner.end(self.layer)
            raise

    def _check(self) -> None:
        if self.layer.arrangement is not self:
            raise RuntimeError(
                f"the frozen weights of decoder layer {self.layer.index} were merged, moved or brought back from the host "
                "between forward and backward: run the forward again"
            )

    def __exit__(self, *exception: Any) -> None:
        self.layer.owner.end(self.layer)


class OffloadedLayer:
    """A decoder layer: where its packed tensors are, and its hooks. ``hosted`` of the frozen layers in it
    (:class:`peft_nvfp4.autograd.hosted.Hosted`)."""

    def __init__(self, owner: Offload, index: int, module: nn.Module):
        self.owner, self.index, self.module = owner, index, module
        self.packed = [m for _, m in frozen_modules(module)]
        self.host: HostBuffer | None = None  # None also where the host has no room for it
        self.size = 0  # of that, or of the layer in a buffer
        self.places: list[tuple[nn.Parameter, Tensor, int]] = []  # parameter, its bytes on the host, where in the buffer
        self.swapped: list[tuple[nn.Parameter, Tensor]] = []  # while it is in use: parameters, and what they were
        self.views: list[Tensor] = []  # of its buffer on the device: made once, since making them takes a millisecond
        self.arrangement = Arrangement(self)  # another one whenever places or views change
        self.handles = [
            module.register_forward_pre_hook(self.offloaded_layer_begins, prepend=True),
            module.register_forward_hook(self.offloaded_layer_ends, always_call=True),
            module.register_state_dict_pre_hook(self.rest),  # an interrupted backward leaves parameters in a buffer
            module.register_load_state_dict_pre_hook(self.rest),
        ]
        setattr(module, ATTRIBUTE, self)
        for layer in self.packed:
            layer._apply, layer.hosted = HostApply(owner, layer), self
            for name in ON_DEVICE:
                if hasattr(type(layer), name):
                    setattr(layer, name, DeviceMethod(owner, layer, name))

    def __getstate__(self) -> dict:
        """A copy (or a pickle) makes its own buffer when it runs."""
        self.owner.release(self)
        return vars(self) | {"host": None, "places": [], "views": [], "arrangement": None}

    # -- storage

    def parameters(self) -> list[nn.Parameter]:
        """The packed ones, as the frozen layers have them now."""
        return [p for m in self.packed for p in packed_parameters(m).values()]

    def versions(self) -> list[int]:
        """Counts of what was written into the parameters in place (``load_state_dict``)."""
        return [version(p) for p, _, _ in self.places]

    def pack(self) -> bool:
        """Bring the bytes together on the host, if they are not there yet or some were replaced (a merge). What was replaced may
        be referred to still, so a new buffer is made. Where the host has no room for one, they stay where they are on it
        (:mod:`.read_ahead`). Returns whether anything was new."""
        parameters = self.parameters()
        known = len(parameters) == len(self.places) and all(
            p is q and p.data_ptr() == home.data_ptr() and p.dtype == home.dtype
            for p, (q, home, _) in zip(parameters, self.places)
        )
        if known:
            return False
        starts, size = [], 0
        for p in parameters:
            starts.append(size)
            size += -(-p.nbytes // ALIGNMENT) * ALIGNMENT
        self.owner.settle()
        self.host, self.size, self.places = self._room(size, parameters), size, []
        self.forget_views()
        with torch.no_grad():
            for p, start in zip(parameters, starts):
                home = p.data if self.host is None else view_of(self.host.data, start, p)
                if self.host is not None:
                    home.copy_(p.data)
                    p.data = home
                self.places.append((p, home, start))
        for slot in self.owner.slots:
            slot.holds = None if slot.holds is self else slot.holds
        return True

    def _room(self, size: int, parameters: list[nn.Parameter]) -> HostBuffer | None:
        """A buffer on the host; None where there is no room for one, and the parameters are on the host as they are.

        Raises:
            HostMemoryShort: there is no room, and they are not.
        """
        free = max(0, free_host_bytes() - LEFT_TO_OTHERS)
        if size <= free:
            return HostBuffer(size)
        if not all(p.is_cpu for p in parameters):
            raise HostMemoryShort(
                f"the weights of decoder layer {self.index} take {size / 1e9:.2f} GB of the host's memory, and "
                f"{free / 1e9:.2f} GB are free: free some of it, or save the base packed (peft-nvfp4 quantize) and load that on "
                "the CPU, where weights stay in their files"
            )
        return None

    def forget_views(self) -> None:
        self.views, self.arrangement = [], Arrangement(self)

    def fetch(self) -> Arrangement:
        """Have the parameters point to their bytes on the device."""
        self.owner.use(self, -1 if in_backward() else 1)
        return self.arrangement

    # -- hooks

    def offloaded_layer_begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("offload and torch.compile exclude each other: call peft_nvfp4.disable_offload(model) first")
        if module is not self.module:
            raise RuntimeError("offload does not work in nn.DataParallel: start one process per GPU (torchrun) instead")
        device = self.owner.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("CUDA graphs cannot record layers with offload: the copies are no part of a recording")
        self.owner.begin(self, -1 if in_backward() else 1, unwind=True)

    def offloaded_layer_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.owner.end(self) and not in_backward():  # within it, of checkpointing: backward of this layer is next
            self.owner.release(self)

    def rest(self, *args: Any) -> None:
        self.owner.release()

    def point_to_host(self) -> None:
        for p, home in self.swapped:
            p.data = home
        self.swapped = []
        for slot in self.owner.slots:
            slot.user = None if slot.user is self else slot.user


def view_of(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes of a contiguous tensor like ``like`` in a buffer of bytes."""
    with torch.inference_mode(False):
        return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def in_backward() -> bool:
    """Whether autograd calls."""
    return torch._C._current_graph_task_id() != -1
