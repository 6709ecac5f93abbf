"""Who reads what: the structure of a model, found by running it once on two tokens.

Fusing a norm with the quantisation of its output is right only if nothing but frozen linears of one input spec reads that
output. Names do not tell (``post_attention_layernorm`` feeds the MLP in Llama and the residual stream in Gemma 2), so
:func:`observe` runs the model and watches every PyTorch function that is handed the output of a norm. Frozen linears return
zeros meanwhile: the run costs next to nothing, also for a large model on a CPU.

Linears of one module that are handed the same tensor (q, k and v; gate and up) form a group. Of one module only: the cross
attention of all decoder layers reads one tensor, too, but each layer is computed in its own time, and checkpointed by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..autograd.module_hooks import hooks_of, observes_only
from ..nn.frozen_linear import FrozenLinear

HARMLESS = frozenset("__get__ __hash__ size dim numel is_floating_point is_complex stride get_device".split())
"""Functions that look at a tensor without reading its values: those that return no tensor. (Some properties do, such as mT.)"""
CONVERSIONS = frozenset({"to", "contiguous"})
"""Functions that return the very tensor where there is nothing to do. accelerate moves the input of every module that way when it
spreads a model over devices."""


@dataclass
class Readers:
    """What reads the output of one module, and how the module is called.

    Attributes:
        linears: dotted names of frozen linears (their LoRA layers), in order of use.
        others: names of other functions.
        calls: how often the module ran.
        simple: always with one tensor and nothing else, and returned a tensor.
        converted: something asked for it elsewhere or otherwise, where it was so already, and was given the same tensor.
    """

    linears: list[str] = field(default_factory=list)
    others: set[str] = field(default_factory=set)
    calls: int = 0
    simple: bool = True
    converted: bool = False


class _Run(TorchFunctionMode):
    """What one run of a model has shown so far: while it is entered, functions that are handed a producer's output are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: dict[str, Readers] = defaultdict(Readers)
        self.produced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # output of a producer -> its name
        self.groups: list[list[str]] = []
        self.group_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> version, {module: its group}

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        result = func(*args, **(kwargs or {}))
        if name in HARMLESS:
            if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                return result
            name = f".{func.__self__.__name__}" if name == "__get__" else name
        for leaf in tree_leaves((args, kwargs or {})):
            if not isinstance(leaf, Tensor) or leaf not in self.produced:
                continue
            readers = self.readers[self.produced[leaf]]
            if name in CONVERSIONS and result is leaf:
                readers.converted = True
            else:
                readers.others.add(name)
        return result

    def produces(self, name: str) -> Callable:
        """Forward hook of a producer."""

        def note(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            reader = self.readers[name]
            reader.calls += 1
            reader.simple &= len(args) == 1 and not kwargs and isinstance(output, Tensor)
            if isinstance(output, Tensor):
                self.produced[output] = name

        return note

    def stand_in(self, name: str, linear: FrozenLinear) -> Callable:
        """Forward of a linear: notes what it is called with, returns zeros."""

        def forward(x: Tensor, *args, **kwargs) -> Tensor:
            with torch._C.DisableTorchFunction():
                if x in self.produced:
                    self.readers[self.produced[x]].linears.append(name)
                version, groups = self.group_of.get(x, (None, {}))
                if version != x._version:
                    self.group_of[x] = x._version, (groups := {})
                parent = name.rpartition(".")[0]
                if parent not in groups:
                    self.groups.append(groups.setdefault(parent, []))
                groups[parent].append(name)
                return x.new_zeros(*x.shape[:-1], linear.out_features)

        return forward


def observe(
    model: nn.Module, producers: Mapping[str, nn.Module], run: Callable[[], object]
) -> tuple[dict[str, Readers], list[list[str]]]:
    """Readers of every producer's output during ``run()``, which calls the model, and the groups: names of the frozen linears of
    one module that were handed the same tensor. Nothing of the model changes: it runs in evaluation mode, without gradient, and
    is put back as it was."""
    seen, linears = _Run(), frozen_linears(model)
    handles = [module.register_forward_hook(seen.produces(name), with_kwargs=True) for name, module in producers.items()]
    try:
        with standing_in({m: seen.stand_in(name, base_of(m)) for name, m in linears.items()}), modes_kept(model), torch.no_grad():
            model.eval()
            with seen:
                run()
    finally:
        for handle in handles:
            handle.remove()
    return dict(seen.readers), seen.groups


def between(model: nn.Module, producer: str, readers: Iterable[str]) -> list[nn.Module]:
    """The modules that a producer's output passes on its way to its readers (dotted names), these included: those that hold the
    producer, or a reader, but not both."""
    found = {}
    for reader in readers:
        names = producer.split("."), reader.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(*names)) if a != b), min(map(len, names)))
        for parts in names:
            found |= dict.fromkeys(".".join(parts[:end]) for end in range(shared + 1, len(parts) + 1))
    return [model.get_submodule(name) for name in found if name != producer]


@contextmanager
def standing_in(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Within the context these modules have another ``forward``, on the instance. What stood there (a hook of accelerate's, say)
    comes back."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, forward in before.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Training flags of all modules are put back."""
    training = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag


def innermost(model: nn.Module) -> nn.Module:
    """The model without a PeftModel, or torch.compile's module, around it: what is attached to it is found by every holder."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hooked(module: nn.Module) -> bool:
    """Whether somebody watches or serves this module's calls (sharding, tensor parallelism, a user): then it keeps them."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


HARMLESS_HOOKS = frozenset(
    {
        *("make_inputs_require_grads", "output_capturing_hook"),
        *("host_checkpoints_begin", "host_checkpoints_end", "offloaded_layer_begins", "offloaded_layer_ends"),
    }
)
"""Hooks of transformers and PEFT that do the same in every call, to whatever shape (for checkpointing), or nothing but while
hidden states are asked for (they stay once somebody did); and this package's own, which change no tensor."""


def watched(module: nn.Module, observers: bool = True) -> list[str]:
    """Names of hooks of this module that may look at what passes, or change it; or those that may change it."""
    hooks = [hook for group in hooks_of(module) for hook in group.values() if observers or not observes_only(hook)]
    names = [getattr(hook, "__name__", type(hook).__name__) for hook in hooks]
    return [name for name in names if name not in HARMLESS_HOOKS]


@contextmanager
def without_observers(model: nn.Module) -> Iterator[None]:
    """Within the context hooks that only look (:func:`~peft_nvfp4.autograd.module_hooks.observing`) are not called."""
    marked = lambda hook: getattr(hook, "observes_only", False)  # transformers' own collect what its losses read
    groups = [group for module in model.modules() for group in hooks_of(module) if any(map(marked, group.values()))]
    before = [group.copy() for group in groups]
    try:
        for group in groups:
            for key in [key for key, hook in group.items() if marked(hook)]:
                del group[key]
        yield
    finally:
        for group, hooks in zip(groups, before):
            group.clear()
            group.update(hooks)


def special_tokens(config: object) -> set[int]:
    """Tokens that stand for something else than text (an image, say), by the names of settings of a transformers config."""
    if not hasattr(config, "get_text_config"):
        return set()
    settings = [*config.to_dict().items(), *config.get_text_config().to_dict().items()]
    return {value for key, value in settings if key.endswith(("token_id", "token_index")) and isinstance(value, int)}


def base_of(module: nn.Module) -> nn.Module:
    """The layer below an adapter, or the module itself. (Also a wrapper that passes attributes on: it is called for itself.)"""
    return module.get_base_layer() if hasattr(type(module), "get_base_layer") else module


def frozen_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Dotted name -> frozen linear, or the LoRA layer around it."""
    found: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name.startswith(inside or ("\0",)) and isinstance(base_of(module), FrozenLinear):
            found[name] = module
            inside += (name + ".",)
    return found


def share_hooks(source: nn.Module, target: nn.Module) -> None:
    """Hooks of ``source``, and those that are added to or removed from either module later, are hooks of both."""
    for name, hooks in vars(source).items():
        if "hook" in name and name.startswith(("_forward_", "_backward_", "_is_full_backward_")):
            setattr(target, name, hooks)
