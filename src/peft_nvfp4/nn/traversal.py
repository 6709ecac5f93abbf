"""Walks over all modules of a model, as PyTorch does them, in less time.

Trainer asks a model in every step for its parameters (to clip, and to drop gradients), for their number, and to be in training
mode. Between the end of a backward and the next forward the GPU has nothing to do, so it waits for these walks: Trainer looks at
every loss (``logging_nan_inf_filter``). A model with LoRA on every linear has more than a thousand modules, and PyTorch's walks
go through a generator for each level of each of them, which takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from torch import nn

WALKS = ("named_modules", "named_parameters", "_named_members")
"""Methods by which PyTorch walks; a class with one of its own is walked by that."""


@cache
def _is_walked_plainly(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in WALKS)


@cache
def _keeps_its_mode_plainly(kind: type[nn.Module]) -> bool:
    """Whether ``module.training = mode`` only puts it into the instance's dictionary. (To find that out is most of what ``train``
    costs.)"""
    return kind.__setattr__ is nn.Module.__setattr__ and not hasattr(kind, "training")


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    """``root.modules()``: every module once, parents before children."""
    seen, left = set(), [root]
    while left:
        module = left.pop()
        if id(module) in seen:
            continue
        if not _is_walked_plainly(type(module)):
            for inner in module.modules():
                if id(inner) not in seen:
                    seen.add(id(inner))
                    yield inner
            continue
        seen.add(id(module))
        yield module
        if children := module._modules:
            left += [child for child in reversed(children.values()) if child is not None]


def parameters_of(root: nn.Module) -> Iterator[nn.Parameter]:
    """``root.parameters()``: every parameter once, in the same order."""
    if not _is_walked_plainly(type(root)):
        yield from (p for _, p in root.named_parameters())
        return
    seen = set()
    for module in modules_of(root):
        for p in module._parameters.values():
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                yield p


def set_mode(root: nn.Module, mode: bool) -> None:
    """``child.train(mode)`` for everything below ``root``, and the mode of ``root`` itself. A module with a ``train`` of its own
    (of its class, or set on the instance) is called."""
    left = [root]
    while left:
        module = left.pop()
        if _keeps_its_mode_plainly(type(module)):
            module.__dict__["training"] = mode
        else:
            module.training = mode
        for child in module._modules.values():
            if child is None:
                continue
            if type(child).train is nn.Module.train and "train" not in child.__dict__:
                left.append(child)
            else:
                child.train(mode)
