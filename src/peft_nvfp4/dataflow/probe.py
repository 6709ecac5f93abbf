"""Who reads what: the structure of a model, found by running it once on two tokens.

Fusing a norm with the quantisation of its output is right only if nothing but frozen linears of one input spec reads that
output. Names do not tell (``post_attention_layernorm`` feeds the MLP in Llama and the residual stream in Gemma 2), so
:func:`observe` runs the model and watches every PyTorch function that is handed the output of a norm. Frozen linears return
zeros meanwhile: the run costs next to nothing, also for a large model on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..backends import FrozenLinear

HARMLESS = frozenset("__get__ __hash__ size dim numel is_floating_point is_complex stride data_ptr get_device".split())
"""Functions that look at a tensor without reading its values."""


@dataclass
class Readers:
    """What reads the output of one module."""

    linears: list[str] = field(default_factory=list)  # dotted names of frozen linears (their LoRA layers), in order of use
    others: set[str] = field(default_factory=set)  # names of other functions


class _Watch(TorchFunctionMode):
    """Notes functions that receive a watched tensor."""

    def __init__(self, produced: WeakTensorKeyDictionary, readers: dict[str, Readers]):
        self.produced, self.readers = produced, readers

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name not in HARMLESS:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and leaf in self.produced:
                    self.readers[self.produced[leaf]].others.add(name)
        return func(*args, **(kwargs or {}))


def observe(model: nn.Module, producers: dict[str, nn.Module], run: Callable[[], object]) -> dict[str, Readers]:
    """Readers of every producer's output during ``run()``, which calls the model. Nothing of the model changes: it runs in
    evaluation mode, without gradient, and is put back as it was."""
    readers: dict[str, Readers] = defaultdict(Readers)
    produced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    training = {module: module.training for module in model.modules()}
    linears = frozen_linears(model)

    def produces(name: str) -> Callable:
        return lambda module, args, output: produced.__setitem__(output, name) if isinstance(output, Tensor) else None

    def stand_in(name: str, linear: FrozenLinear) -> Callable:
        def forward(x: Tensor, *args, **kwargs) -> Tensor:
            with torch._C.DisableTorchFunction():
                if x in produced:
                    readers[produced[x]].linears.append(name)
                return x.new_zeros(*x.shape[:-1], linear.out_features)

        return forward

    handles = [module.register_forward_hook(produces(name)) for name, module in producers.items()]
    try:
        for name, module in linears.items():
            module.forward = stand_in(name, base_of(module))  # on the instance, for the time of this run
        model.eval()
        with torch.no_grad(), _Watch(produced, readers):
            run()
    finally:
        for handle in handles:
            handle.remove()
        for module in linears.values():
            module.__dict__.pop("forward", None)
        for module, flag in training.items():
            module.training = flag
    return dict(readers)


def base_of(module: nn.Module) -> nn.Module:
    """The layer below an adapter, or the module itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def frozen_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Dotted name -> frozen linear, or the LoRA layer around it."""
    found: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name.startswith(inside or ("\0",)) and isinstance(base_of(module), FrozenLinear):
            found[name] = module
            inside += (name + ".",)
    return found
