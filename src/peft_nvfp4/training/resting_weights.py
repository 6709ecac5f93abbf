"""Embedding and output head in the host's memory while decoder layers compute, where the GPU's memory would not be enough
otherwise.

Between the embedding and the head nothing reads them; nor does backward, where they are frozen: the loss at labels has computed
the gradient of the head's input by then (:mod:`peft_nvfp4.fusion.loss`). Of Llama-8B the two take 2.1 GB, which is 27,000
tokens of one layer's backward. So the first layer sends them away, in forward and in backward. The head comes back at the end
of the decoder's forward, both at the end of backward; or with the next forward, if there is none, or if it fails. A parameter
points to its host's copy meanwhile: whoever reads it finds its bytes. The copy is made once; weights that changed are copied
again.

What comes back is elsewhere on the GPU, which discards recordings of shorter steps: so weights leave only if they have to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..memory.device import free_bytes, free_host_bytes
from .offload.host_memory import LEFT_TO_OTHERS, HostBuffer, HostMemoryShort

BACKWARD, CONSTANT = 10, 1 << 30
"""A layer's backward takes so many times its input, and so many bytes besides."""


class Home(NamedTuple):
    """The host's copy of a parameter, and what it was made of."""

    parameter: nn.Parameter
    buffer: HostBuffer
    values: Tensor
    version: int
    address: int


def is_short(checkpoint: int, device: torch.device) -> bool:
    """Whether the backward of a layer whose input has so many bytes may want more memory than there is."""
    free = free_bytes(device)
    return free is not None and free < BACKWARD * checkpoint + CONSTANT


class RestingWeights:
    """Of one model. Copies begin with none.

    Attributes:
        away: those that point to their host's copies now, and their devices.
        bytes: of the host's copies.
        times: that they have left.
    """

    def __init__(self) -> None:
        self.times = 0
        self.homes: dict[int, Home] = {}
        self.away: list[tuple[nn.Parameter, torch.device]] = []
        self.task = -1  # backward that has decided

    @property
    def bytes(self) -> int:
        return sum(home.values.nbytes for home in self.homes.values())

    def leave_if_needed(self, parameters: Iterable[nn.Parameter], needed: int, device: torch.device) -> None:
        """In forward once, in backward at every layer: what is decided at the first one counts until its end."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task == self.task:
            return
        self.task = task
        if is_short(needed, device):
            self.times += 1
            self._leave(parameters)
        if self.away and task != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.come_back)

    def _leave(self, parameters: Iterable[nn.Parameter]) -> None:
        gone = {id(p) for p, _ in self.away}  # since forward, or since a pass that was begun once more
        for p in parameters:
            if id(p) in gone:
                continue
            plain = type(p) is nn.Parameter and not p.requires_grad and not p.is_inference() and p.data.is_contiguous()
            if plain and (home := self._home(p)) is not None:
                self.away.append((p, p.device))
                p.data = home.values

    def _home(self, p: nn.Parameter) -> Home | None:
        """None where the host has no room."""
        home = self.homes.get(id(p))
        if home is None or home.parameter is not p or (home.version, home.address) != (p._version, p.data_ptr()):
            if p.nbytes > free_host_bytes() - LEFT_TO_OTHERS:
                return None
            try:
                buffer = HostBuffer(p.nbytes)
            except HostMemoryShort:
                return None
            if p.is_cuda:
                buffer.pin(p.device)
            values = buffer.data.view(p.dtype).view(p.shape)
            with torch.no_grad():
                values.copy_(p)
            home = self.homes[id(p)] = Home(p, buffer, values, p._version, p.data_ptr())
        return home

    def come_back(self, those: Iterable[nn.Parameter] | None = None) -> None:
        """To where they were, if they are away: all, or those."""
        self.task, ids = -1, None if those is None else set(map(id, those))
        for p, device in list(self.away):  # one is away until it is back: there may be no memory for it
            if ids is not None and id(p) not in ids:
                continue
            home = self.homes[id(p)]
            with torch.no_grad():
                if p.data_ptr() == home.values.data_ptr():  # else somebody has given it other values meanwhile
                    p.data = home.values.to(device, non_blocking=True, copy=True)
            self.homes[id(p)] = home._replace(version=p._version, address=p.data_ptr())
            self.away = [entry for entry in self.away if entry[0] is not p]
