"""Whether an activation is the output of attention, which autograd keeps for attention's own backward."""

from __future__ import annotations

import re

import torch
from torch import Tensor

VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "TransposeBackward")
ATTENTION = re.compile(r"ScaledDotProduct\w*(Flash|Efficient|Cudnn|FusedOverrideable)|FlashAttn\w*Func")
"""Autograd nodes of attention kernels that keep their output for backward (plain matrix products do not)."""


def kept_by_attention(x: Tensor) -> bool:
    """Whether x is a view of an attention kernel's output. Asked of the names of autograd's nodes: reading what a node has saved
    would unpack it, which hooks (checkpointing, offloading) may answer with work."""
    if torch.compiler.is_compiling():  # a graph has no nodes yet; what is kept is the compiler's choice
        return False
    node = x.grad_fn
    while node is not None and type(node).__name__.startswith(VIEWS):
        node = node.next_functions[0][0]
    return node is not None and ATTENTION.search(type(node).__name__) is not None
