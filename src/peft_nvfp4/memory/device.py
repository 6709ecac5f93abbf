"""The GPU that is here: what the estimator has to know about it, and what is free on it and on the host."""

from __future__ import annotations

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


def free_host_bytes() -> int:
    """Bytes of the host's memory that are free, or soon would be."""
    return psutil.virtual_memory().available


def step_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes of a GPU that a step takes besides what is loaded before the first one, fragmentation included."""
    found = estimate(shape, settings)
    return int((found.peak - sum(found.static.get(name, 0) for name in LOADED)) / (1 - FRAGMENTATION))

