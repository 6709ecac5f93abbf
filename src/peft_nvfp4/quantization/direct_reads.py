"""Linears whose weight is read by the module around them, instead of being called: they must stay dense.

A packed weight computes what a dense one does when its layer is called. Some modules do not call it: Mamba hands
``self.out_proj.weight`` to a kernel, WavLM the three projections to ``F.multi_head_attention_forward``. They would take bytes for
a matrix (and pass over an adapter). On the CPU the same modules may call the layer, so a run does not show it: the source does.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

HARMLESS = frozenset({"device", "ndim", "is_meta", "requires_grad", "requires_grad_"})
"""What a packed weight answers as a dense one does. (Not its dtype: activations are cast to that.)"""

NEVER_RUN = re.compile(r"pretraining_tp|slow_but_exact|uint8|is_floating_point")
"""Conditions of code that no packed weight meets: tensor parallelism as it was in pretraining, a test for dense weights."""


def read_directly(model: nn.Module, values_only: bool = False) -> set[int]:
    """ids of the linears of ``model`` whose ``.weight`` a method of a module around them reads. ``values_only``: not where it
    reads the dtype alone, to which a dense weight under an adapter answers rightly."""
    found = set()
    for module in model.modules():
        reads = _reads(type(module))
        for path in reads.values if values_only else reads.values | reads.dtypes:
            try:
                linear = module.get_submodule(path)
            except AttributeError:  # of another variant of the class
                continue
            linear = linear.get_base_layer() if isinstance(linear, BaseTunerLayer) else linear
            if isinstance(linear, nn.Linear):
                found.add(id(linear))
    return found


@functools.cache
def _reads(cls: type[nn.Module]) -> _Reads:
    """What the methods of a class read. (PyTorch's own classes are not looked at: their linears are handled by class.)"""
    visitor = _Reads()
    for owner in cls.__mro__:
        if owner.__module__.startswith("torch.") or not issubclass(owner, nn.Module):
            continue
        for name, method in vars(owner).items():
            method = inspect.unwrap(method) if inspect.isfunction(method) else None
            if method is not None and "weight" in method.__code__.co_names and not re.match("_*init|reset|tie", name):
                visitor.visit(ast.parse(_source(method)))
    return visitor


def _source(method: object) -> str:
    try:
        return textwrap.dedent(inspect.getsource(method))
    except (OSError, TypeError):  # made at run time
        return ""


class _Reads(ast.NodeVisitor):
    """Collects x.y of every ``self.x.y.weight`` that is not only compared, or asked for its device or the like.

    Attributes:
        values, dtypes: names of which the weight, or nothing but its dtype, is read.
    """

    def __init__(self) -> None:
        self.values: set[str] = set()
        self.dtypes: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        body = [] if NEVER_RUN.search(test) else [node.test, *node.body]
        for child in body + ([] if "_is_quantized" in test else node.orelse):
            self.visit(child)

    def visit_Compare(self, node: ast.Compare) -> None:  # of dtypes
        for child in (node.left, *node.comparators):
            if not ast.unparse(child).endswith(".weight.dtype"):
                self.visit(child)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) not in ("isinstance", "hasattr"):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        match = re.fullmatch(r"self\.(\w+(?:\.\w+)*)\.weight(?:\.(\w+))?", ast.unparse(node))
        if match is None:
            self.generic_visit(node)
        elif match[2] not in HARMLESS:
            (self.dtypes if match[2] == "dtype" else self.values).add(match[1])
