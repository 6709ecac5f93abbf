"""Methods of the frozen layers while their packed bytes are on the host: each finds them where it needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...nn.frozen_linear import frozen

ON_DEVICE = ("dequantize", "requantize_", "restore", "set_offset", "to_linear", "to_experts")
"""Methods of a frozen layer that compute with the weight, and find it on the compute device."""


VECTORS = ("bias", "input_offset", "output_offset")
"""One number a channel: these stay on the device, as do biases of experts. Norms and adapters read the input's offset in their
own backward, too."""


def packed_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Those of a frozen layer that go to the host, by name."""
    parameters = layer.named_parameters(recurse=False)
    return {name: p for name, p in parameters if not (name in VECTORS or name.endswith("_bias") or p.requires_grad)}


@dataclass
class HostApply:
    """``_apply`` of a frozen layer: casts and moves everything but the packed bytes, which stay on the host."""

    owner: Any  # the Offload
    layer: nn.Module

    def __call__(self, fn: Any, recurse: bool = True) -> nn.Module:
        layer, owner = self.layer, self.owner
        owner.release()
        kept = packed_parameters(layer)
        for name, p in kept.items():
            layer._parameters[name] = frozen(torch.empty(0, dtype=p.dtype, device=owner.device))
        try:
            type(layer)._apply(layer, fn, recurse)
        finally:
            stand_ins = {name: layer._parameters[name] for name in kept}
            layer._parameters.update(kept)
        for name, stand_in in stand_ins.items():
            if kept[name].is_floating_point():
                kept[name].data = kept[name].data.to(stand_in.dtype)
        owner.place(next(iter(stand_ins.values())).device)
        state = getattr(layer, "_state", None)
        if state is not None:  # what bitsandbytes keeps beside a parameter moves with it; this one stays
            state.to(owner.device)
        return layer


@dataclass
class DeviceMethod:
    """A method of a frozen layer, called with the packed bytes on the compute device."""

    owner: Any  # the Offload
    layer: nn.Module
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with on_device(self.layer, self.owner.device):
            return getattr(type(self.layer), self.name)(self.layer, *args, **kwargs)


def computing(layer: nn.Module) -> AbstractContextManager:
    """Within the context a frozen layer's packed tensors are where it computes, for code that reads several of them."""
    method = vars(layer).get("dequantize")
    return on_device(layer, method.owner.device) if isinstance(method, DeviceMethod) else nullcontext()


@contextmanager
def on_device(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context a frozen layer's packed tensors are on ``device``; new ones that it has got by then go to the host."""
    before = [(p, p.data) for p in packed_parameters(layer).values() if p.device != device]
    for p, _ in before:
        p.data = p.data.to(device)
    try:
        yield
    finally:
        for p, home in before:
            p.data = home
        if before:
            for p in packed_parameters(layer).values():
                p.data = p.data.cpu()
