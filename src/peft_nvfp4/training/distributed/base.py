"""Whether every process holds the same frozen bytes, and making it so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...nn.frozen_linear import FrozenLinear

CHUNK = 1 << 22
"""Words of 8 bytes that are summed at a time: bounds the temporary memory."""


def frozen_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(dotted name of a module, what it holds that is not trained) for every module that holds something: packed weights with all
    their scales, and parameters without gradient (norms, embeddings)."""
    for name, module in model.named_modules():
        tensors = {key: p for key, p in module.named_parameters(recurse=False) if not p.requires_grad}
        if isinstance(module, FrozenLinear):
            tensors = {**module.packed_tensors(), **tensors}
        if tensors:
            yield name, tensors


def base_checksums(model: nn.Module) -> dict[str, int]:
    """A 64-bit checksum of each module's frozen tensors, by dotted name. Sums of integers: the same on every device."""
    sums = {}
    for name, tensors in frozen_tensors(model):
        if any(isinstance(t, DTensor) for t in tensors.values()):
            raise ValueError(f"{name} is sharded already; compare the bases before fully_shard")
        total = 0
        for key, t in sorted(tensors.items()):
            label = f"{key}{tuple(t.shape)}{t.dtype}".encode()  # Python's own hash is another one in every process
            total = (total * 1000003 + _checksum(t) + int.from_bytes(label, "little") % (2**61 - 1)) % 2**64
        sums[name] = total
    return sums


def _checksum(t: Tensor) -> int:
    """Sum of all words, each mixed and multiplied by an odd number that belongs to its place, modulo 2**64."""
    data = t.detach().reshape(-1).contiguous().view(torch.uint8)
    words = (F.pad(data, (0, rest)) if (rest := -data.numel() % 8) else data).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK]
        odd = torch.arange(2 * start + 1, 2 * (start + part.numel()) + 1, 2, device=t.device)
        total += ((part ^ (part >> 32)) * odd).sum()
    return int(total) % 2**64


def check_same_base(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compare the frozen weights of all processes. Every process of the group has to call it.

    Raises:
        ValueError: on every process, naming the first module that differs.
    """
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        _compare(
            base_checksums(model),
            group,
            "Load the same checkpoint with the same settings on every process, or take rank 0's weights everywhere with "
            "peft_nvfp4.training.distributed.broadcast_base(model)",
        )


def _compare(here: dict[str, Any], group: dist.ProcessGroup | None, way_out: str) -> None:
    """Raises ValueError on every process where one of them has another dictionary."""
    everywhere: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, here, group=group)
    first = everywhere[0]
    for rank, other in enumerate(everywhere[1:], start=1):
        if differing := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            raise ValueError(
                f"the frozen weights of rank 0 and rank {rank} differ, first at {differing[0]!r} ({len(differing)} of "
                f"{len(first)} modules). {way_out}"
            )


@torch.no_grad()
def broadcast_base(model: nn.Module, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite every frozen tensor with rank ``src``'s, in place. Shapes must be the same on all processes.

    Raises:
        ValueError: a process has other modules or shapes.
    """
    here = dict(frozen_tensors(model))
    shapes = {name: [(key, t.shape, t.dtype) for key, t in sorted(tensors.items())] for name, tensors in here.items()}
    _compare(shapes, group, "Names or shapes are others, so their weights cannot be replaced: load the same model everywhere")
    send([t for tensors in here.values() for _, t in sorted(tensors.items())], src, group)
    for module in model.modules():
        if hasattr(module, "rewritten"):  # frozen linears and experts
            module.rewritten()


def send(tensors: list[Tensor], src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast tensors, wherever they are: NCCL takes those on a GPU only."""
    on_gpu = dist.get_backend(group) == "nccl"
    for t in tensors:
        data = t.detach()
        sent = data.cuda() if on_gpu and not data.is_cuda else data.contiguous()
        dist.broadcast(sent, src=src, group=group)
        if sent.data_ptr() != data.data_ptr():
            data.copy_(sent)
        elif not data.is_inference():
            torch.autograd.graph.increment_version(data)  # copies of weights are kept by version
