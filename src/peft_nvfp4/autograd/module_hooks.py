"""Hooks of modules, as far as they may change a tensor on its way from where it was quantised to where the codes are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.nn.modules.module as torch_module
from torch import nn

KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
"""Backward hooks among them: PyTorch hands a module that has some another tensor."""
GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global_{kind}") for kind in KINDS)

Hook = TypeVar("Hook", bound=Callable)


def hooks_of(module: nn.Module) -> list[dict]:
    """A module's dictionaries of hooks: the very objects, so that they tell at any time what it has."""
    return [vars(module)[f"_{kind}"] for kind in KINDS]


def observing(hook: Hook) -> Hook:
    """Mark a hook that changes nothing of what it is handed."""
    hook.observes_only = True
    return hook


def may_change(hooks: Sequence[dict]) -> bool:
    """Whether there is a hook that may change what it is handed, among these or those of all modules."""
    if not any(hooks) and not any(GLOBAL_HOOKS):
        return False
    return not all(observes_only(hook) for group in (*hooks, *GLOBAL_HOOKS) for hook in group.values())


def observes_only(hook: Callable) -> bool:
    """PEFT's own hooks on LoRA layers (names of adapters, places of an aLoRA's invocation) add arguments, and leave x alone;
    those of transformers collect hidden states."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return getattr(hook, "observes_only", False) or module.startswith(("peft.tuners.", "transformers.utils.output_capturing"))
