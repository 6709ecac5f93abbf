"""Tuples of tuples of tensors, as flat lists and back.

A Function takes and saves tensors one by one; what it computes with are tuples of tuples, which say what each tensor is. A leaf
of such a tree is a tensor or None; what else is in it (numbers, words) is part of its structure. (``torch.utils._pytree`` does
the same for any type, at ten times the cost, and counts numbers among the leaves.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Structure = list[tuple | None]
"""The nodes of a tree, parents before children: (type, number of children) of a tuple, (value,) of a constant, None of a leaf."""


def flatten(tree: tuple) -> tuple[list[Tensor | None], Structure]:
    """The leaves of a tree, from left to right, and its structure."""
    leaves, structure, pending = [], [], [tree]
    while pending:
        node = pending.pop()
        kind = type(node)
        if node is None or kind is Tensor:
            leaves.append(node)
            structure.append(None)
        elif isinstance(node, tuple):
            structure.append((kind, len(node)))
            pending += node[::-1]
        elif isinstance(node, Tensor):  # a parameter; asked last, since asking is slow
            leaves.append(node)
            structure.append(None)
        else:
            structure.append((node,))
    return leaves, structure


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Inverse of :func:`flatten`; other leaves give another tree of the same structure."""
    ready, leaves = [], list(leaves)  # what is put together from the right: the last of the list is what comes first
    for step in reversed(structure):
        if step is None:
            ready.append(leaves.pop())
        elif len(step) == 1:
            ready.append(step[0])
        else:
            kind, size = step
            first = len(ready) - size
            children = ready[first:][::-1]
            del ready[first:]
            ready.append(tuple(children) if kind is tuple else kind._make(children))
    return ready[0]
