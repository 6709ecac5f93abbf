"""``memory="auto"`` without a GPU: whether a CPU keeps the values of frozen NVFP4 weights between steps.

A CPU has no FP4 products. It multiplies dequantised operands, and would dequantise every weight twice a step: W_f in forward, W_b
in backward. Before the first training step the values of both are made once, in FP32 (8 bytes a weight beside the 9 bits that
are stored), if they take no more than :data:`SHARE` of the host's memory that is free then. The results do not change by a bit
(:func:`peft_nvfp4.numerics.reference.keep_values`); evaluation reads W_f's values, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..memory.device import free_host_bytes
from ..numerics.reference import keep_values
from ..quantization.layouts import layouts
from .packing import packed_forward

if TYPE_CHECKING:
    from .packing import PackedForward

logger = logging.getLogger(__name__)

SHARE = 0.5
"""Of the free memory of the host. The rest is for activations, gradients and others."""
GIB = 1 << 30


class HostLevel:
    """The ``guard`` of a decoder's :class:`~.packing.PackedForward`: looks for the first training step.

    Attributes:
        line: what was chosen, and why; empty before.
    """

    line = ""

    def __call__(self, forward: PackedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``forward.unguarded`` returns."""
        if not self.line and torch.is_grad_enabled() and forward.decoder.training:
            self.choose(forward.decoder)
        return forward.unguarded(*args, **kwargs)

    def __reduce__(self):
        return HostLevel, ()  # a copy has weights of its own, of which nothing is kept yet

    def __str__(self) -> str:
        return self.line or "memory='auto': values of weights are made anew until the first training step"

    def close(self) -> None:
        """Steps will not be seen any more: nothing is kept that is not yet."""

    def choose(self, decoder: nn.Module) -> None:
        """Keep the values, if there is room for them."""
        found = {id(w.codes): w for w in layouts(decoder) if w.codes.is_cpu}  # linears may share a weight
        needed, free = sum(4 * w.codes.shape[0] * w.k for w in found.values()), free_host_bytes()
        kept = needed <= SHARE * free
        if kept:
            for w in found.values():
                keep_values(w)
        self.line = (
            f"memory='auto': values of weights are {'kept' if kept else 'made anew at each use'}, since they take "
            f"{needed / GIB:.2f} GiB and {free / GIB:.2f} GiB of the host's memory are free"
        )
        logger.info(self.line)


def follow_host_memory(model: nn.Module) -> None:
    """Have the base of a (PEFT) model in NVFP4 keep values of its weights on a CPU, where there is memory for them."""
    packed = packed_forward(model)
    if packed is not None and packed.guard is None and next(layouts(packed.decoder), None) is not None:
        packed.guard = HostLevel()


def host_level(model: nn.Module) -> HostLevel | None:
    """What :func:`follow_host_memory` watches a model with."""
    packed = packed_forward(model)
    return packed.guard if packed is not None and isinstance(packed.guard, HostLevel) else None
