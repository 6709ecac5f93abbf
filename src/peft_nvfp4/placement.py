"""Inputs follow a module to its device, in a model that accelerate has spread over several (``device_map``).

accelerate wraps ``forward`` of a module so that inputs are moved to the module's device first. A module that is put in its place
has no such wrapper, and needs none where the module around it is on the same device and has moved them already. Where the
``device_map`` cuts right there (``"model.layers.3.mlp": 1``), :func:`follow` gives the new module a hook that moves its inputs.
"""

from __future__ import annotations

import torch
from torch import nn


class MoveInputs:
    """Forward pre-hook: tensors among the inputs go to ``device``; those that are there already stay the same tensors."""

    def __init__(self, device: torch.device | int | str):
        self.device = device

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        from accelerate.utils import send_to_device  # here: it takes a while to import, and is needed for such a model only

        return send_to_device(args, self.device), send_to_device(kwargs, self.device)


def follow(parent: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """``new``, which takes the place of ``old`` in ``parent``, moves its inputs if ``old`` did so and ``parent`` does not.
    A second call changes nothing."""
    device = _device(old)
    if device is None or device == _device(parent):
        return
    if not any(isinstance(hook, MoveInputs) for hook in new._forward_pre_hooks.values()):
        new.register_forward_pre_hook(MoveInputs(device), with_kwargs=True)


def _device(module: nn.Module) -> torch.device | int | str | None:
    """Where accelerate moves a module's inputs, if it does."""
    return getattr(getattr(module, "_hf_hook", None), "execution_device", None)
