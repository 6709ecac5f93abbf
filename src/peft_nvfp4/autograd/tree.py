"""Trees of tuples, taken apart into tensors and put together again.

An autograd Function takes and saves tensors one by one; what it computes with are tuples of tuples, which say what each tensor is.
A leaf is a tensor or None. Whatever else is in a tree (numbers, words) is part of its structure. (``torch.utils._pytree`` does the
same for any type, at six times the cost, and counts numbers among the leaves.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Node(NamedTuple):
    kind: type  # tuple, or a NamedTuple
    size: int


class Constant(NamedTuple):
    value: Any


Structure = list[Node | Constant | None]
"""The nodes of a tree, parents before children; None stands for a leaf."""


def flatten(tree: tuple) -> tuple[list[Tensor | None], Structure]:
    """The leaves of a tree, from left to right, and its structure."""
    leaves, structure, pending = [], [], [tree]
    while pending:
        node = pending.pop()
        if node is None or isinstance(node, Tensor):
            leaves.append(node)
            structure.append(None)
        elif isinstance(node, tuple):
            structure.append(Node(type(node), len(node)))
            pending.extend(node[::-1])
        else:
            structure.append(Constant(node))
    return leaves, structure


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Inverse of :func:`flatten`; other leaves give another tree of the same structure."""
    ready, leaves = [], list(leaves)  # what is put together from the right: on top of the list is what comes first
    for step in reversed(structure):
        if step is None:
            ready.append(leaves.pop())
        elif type(step) is Constant:
            ready.append(step.value)
        else:
            first = len(ready) - step.size
            children = ready[first:][::-1]
            del ready[first:]
            ready.append(tuple(children) if step.kind is tuple else step.kind(*children))
    return ready[0]
