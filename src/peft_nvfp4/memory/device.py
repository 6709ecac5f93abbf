"""The GPU that is here: what the estimator has to know about it, and what is free on it and on the host."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from ..kernels import dispatch, implementations
from .kept import DENSE, EMBEDDING, FORWARD
from .run import estimate
from .settings import CARDS, FRAGMENTATION, Settings
from .shapes import ModelShape

LOADED = (FORWARD, DENSE, EMBEDDING, "norms and biases", "adapters")
"""Static categories of an estimate that are on the GPU before the first step, where the base keeps one layout of its weights."""


def gpu_settings() -> dict[str, Any]:
    """Fields of :class:`~.settings.Settings` that depend on the GPU; empty without one."""
    if not torch.cuda.is_available():
        return {}
    used = next(o.implementation for o in dispatch.status().operators if o.operator == "fprop")
    large = torch.cuda.get_device_capability()[0] in (9, 10)
    workspaces = {card.workspace for card in CARDS.values()}
    return {"workspace": max(workspaces) if large else min(workspaces), "native_fp4": used in implementations.NATIVE}


def free_bytes(device: torch.device) -> int | None:
    """Bytes that tensors of this process can still take on a GPU: what the driver has left, or the process may take
    (``torch.cuda.set_per_process_memory_fraction``), and what PyTorch's allocator holds without using. None of another device."""
    if device.type != "cuda":
        return None
    device = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free, allowed - reserved)) + reserved - torch.cuda.memory_allocated(device)


CONTROL_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where Linux says what a container may use (control groups of version 2, and 1): the folder, files of the limit and of what
is used, and what of that is pages of files, which it lets go of."""


def free_host_bytes() -> int:
    """Bytes of the host's memory that are free, or soon would be, for this process: a container that takes more than its limit
    is killed."""
    available = psutil.virtual_memory().available
    for folder, limit, used, files in CONTROL_GROUPS:
        try:
            allowed, taken, rest = (Path(folder, name).read_text() for name in (limit, used, "memory.stat"))
        except OSError:  # another version, or no container
            continue
        if allowed.strip() != "max":
            cached = dict(line.split() for line in rest.splitlines() if line).get(files, 0)
            available = min(available, int(allowed) - int(taken) + int(cached))
    return max(0, available)


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def grow_segments() -> None:
    """Have PyTorch's allocator extend a segment of a GPU's memory from now on where it would add another one
    (``expandable_segments``, on Linux), unless the environment sets the allocator up. Segments of fixed size leave pieces in
    which a larger tensor has no room. Without this a checkpointed step of Llama-8B reserved 16.8 GB on an H200, with 8.5 in
    tensors (``benchmarks/results/dropin_h200.json``); with it nobody has measured that step yet."""
    if sys.platform == "linux" and not any(map(os.environ.get, ALLOCATOR_VARIABLES)):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def step_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes of a GPU that a step takes besides what is loaded before the first one, fragmentation included."""
    found = estimate(shape, settings)
    return int((found.peak - sum(found.static.get(name, 0) for name in LOADED)) / (1 - FRAGMENTATION))

