"""Bytes that a training step puts on the wire, counted where PyTorch asks for them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


@dataclass
class WireCount:
    """What one process asked for.

    Attributes:
        payload: collective -> bytes of the full tensor: what is gathered, or what is reduced.
        world: number of processes.
    """

    world: int = 1
    payload: Counter = field(default_factory=Counter)

    def add(self, kind: str, bytes_: int) -> None:
        self.payload[kind] += bytes_

    def sent(self, kind: str) -> float:
        """Bytes that each process sends (and receives) in a ring: (n-1)/n of the tensor for a gather or a scatter, twice that for
        an all-reduce, which is both."""
        passes = 2 if kind == "all_reduce" else 1
        return passes * self.payload[kind] * (self.world - 1) / self.world

    @property
    def total_sent(self) -> float:
        """Of all collectives."""
        return sum(self.sent(kind) for kind in self.payload)


COLLECTIVES = {
    "all_gather_into_tensor": ("all_gather", 0, ("output_tensor", "output")),
    "all_gather_single": ("all_gather", 0, ("output_tensor", "output")),  # the same from PyTorch 2.13
    "reduce_scatter_tensor": ("reduce_scatter", 1, ("input",)),
    "reduce_scatter_single": ("reduce_scatter", 1, ("input",)),
    "all_reduce": ("all_reduce", 0, ("tensor",)),
}
"""Function of torch.distributed -> kind, position and names of the argument that is the full tensor."""


@contextmanager
def count_bytes() -> Iterator[WireCount]:
    """Count FSDP2's collectives within the context. (DDP's are asked for in C++: :func:`count_ddp`.)"""
    count = WireCount(dist.get_world_size())
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    for name, original in originals.items():
        setattr(dist, name, _counted(original, count, *COLLECTIVES[name]))
    try:
        yield count
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _counted(original: Callable, count: WireCount, kind: str, position: int, names: tuple[str, ...]) -> Callable:
    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        tensor = args[position] if len(args) > position else next(kwargs[name] for name in names if name in kwargs)
        count.add(kind, tensor.nbytes)
        return original(*args, **kwargs)

    return counted


def count_ddp(model: nn.parallel.DistributedDataParallel) -> WireCount:
    """Count what DDP reduces from now on (a communication hook, which DDP takes once and before the first backward)."""
    count = WireCount(dist.get_world_size(model.process_group))

    def hook(group, bucket):  # DDP accepts no annotation that is a string
        count.add("all_reduce", bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    model.register_comm_hook(model.process_group, hook)
    return count
