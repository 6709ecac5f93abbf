"""Gated MLP that keeps its gate and up activations in NVFP4.

    h = act(gate(x)) * up(x);  y = down(h)

The product is computed from BF16 gate and up in FP32 and quantised in the same pass; what backward needs are the codes of gate,
up and h (0.56 bytes a value each instead of 2). Gradients come from D(gate~) and D(up~), in FP32. As an option (``recompute``), h
is not kept: D(h~), for down's dA, is made anew from D(gate~) and D(up~)
(:func:`peft_nvfp4.numerics.fused_reference.gated_values`). It is then a product of quantised factors, close to the forward's, and
backward keeps a sixth (one term) to a quarter (two) less.

Source: PACT, Table 7, row SiLU-multiply.

:func:`recognise` finds out whether a module is one, and which of its linears is which, by running it with linears that return
random numbers: names, halves of a fused ``gate_up_proj`` and activations need no table.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..autograd import activation_cache
from ..autograd.activation_cache import GatedSource, QuantizedInput
from ..autograd.frozen_linear import autocast_input
from ..autograd.fused import GatedQuantize, as_parts
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.fused_reference import ACTIVATIONS
from .probe import base_of, hooked, modes_kept, share_hooks, standing_in


@dataclass(frozen=True)
class GatedParts:
    """Which child of a gated MLP is which.

    Attributes:
        first: names of gate and up in the order in which they are called; of one linear if it computes both.
        down: name of the last linear.
        gate: index of the gate, among the two linears or the two halves of the one.
        act: activation, a word of :data:`ACTIVATIONS`; None if what down gets is something else than ``act(gate(x)) * up(x)``.
    """

    first: tuple[str, ...]
    down: str
    gate: int
    act: str | None


class FusedGatedMLP(nn.Module):
    """Takes the place of a gated MLP. It owns the original's children under their names, so state-dict keys and adapter targets
    do not change, and runs the original where fusing does not apply (``down`` not in NVFP4 any more, or more than one input).
    With ``recompute``, h~ is kept all the same where gate and up are not (nothing before them is trained): it is less.
    """

    def __init__(self, original: nn.Module, parts: GatedParts, recompute: bool = False):
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        self.parts, self.recompute, self.training = parts, recompute, original.training
        self._outside = (original,)
        share_hooks(original, self)

    @property
    def original(self) -> nn.Module:
        """The module this one replaced, with the children as they are now."""
        module = self._outside[0]
        module._modules.update(self._modules)
        module.training = self.training
        return module

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        parts = self.parts
        down = base_of(self._modules[parts.down])
        if not isinstance(down, NVFP4FrozenLinear) or args or kwargs:
            return self.original.forward(x, *args, **kwargs)
        gate, up = self._gate_and_up(x)
        offset, terms, f, shape = down.input_offset, down.options.terms, gate.shape[-1], gate.shape
        mu = None if offset is None else offset.view(torch.float32)
        placeholder = _reads_only_codes(self._modules[parts.down], gate)
        h, *flat = GatedQuantize.apply(gate.reshape(-1, f), up.reshape(-1, f), mu, parts.act, terms, placeholder)
        del gate, up  # the largest activations of a layer: nothing needs them any more
        h = h.view(shape)
        *codes, gate_copy, up_copy = as_parts(flat, f)
        kept = h.requires_grad  # gate and up are
        source = GatedSource(gate_copy, up_copy, parts.act) if self.recompute and kept else None
        entry = QuantizedInput(tuple(codes), offset, h.dtype, from_producer=True, placeholder=placeholder, source=source)
        activation_cache.put(h, entry)
        return self._modules[parts.down](h)

    def _gate_and_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.parts
        pair = [self._modules[name](x) for name in parts.first]
        if len(pair) == 1:
            pair = pair[0].chunk(2, dim=-1)
        return pair[parts.gate], pair[1 - parts.gate]


def _reads_only_codes(down: nn.Module, like: Tensor) -> bool:
    """Whether nobody but a plain frozen linear, with plain branches, will look at the tensor that ``down`` is called with; the
    tensor will be one like ``like``."""
    if autocast_input(like).dtype != like.dtype:
        return False
    if torch.compiler.is_compiling() or torch.nn.modules.module._has_any_global_hook():
        return False
    for module in (down, base_of(down)):
        if hooked(module) or "forward" in vars(module) or module._compiled_call_impl is not None:
            return False
    branches = down.plain_branches() if hasattr(down, "plain_branches") else []
    return branches is not None and base_of(down).input_offset is None


# ---------------------------------------------------------------------------------------------- recognising one


def looks_like_gated_mlp(module: nn.Module) -> bool:
    """Two linears into a third, or one into one half as wide, and callable with a tensor alone."""
    if isinstance(module, FusedGatedMLP) or _input_width(_linears(module)) is None:
        return False
    try:
        inspect.signature(module.forward).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    """Name -> linear (or LoRA layer) of the direct children; empty if a child that is none contains one."""
    if hasattr(module, "get_base_layer"):
        return {}
    children = dict(module.named_children())
    found = {name: child for name, child in children.items() if isinstance(base_of(child), nn.Linear)}
    inner = (m for name, child in children.items() if name not in found for m in child.modules())
    return {} if any(isinstance(m, nn.Linear) for m in inner) else found


def _input_width(linears: dict[str, nn.Module]) -> int | None:
    """Of a gated MLP with these linears; None if their shapes are not those of one."""
    if len(linears) not in (2, 3):
        return None
    for *first, down in itertools.permutations(map(base_of, linears.values())):
        widths = {linear.in_features for linear in first}
        if len(widths) == 1 and all(linear.out_features * len(first) == 2 * down.in_features for linear in first):
            return widths.pop()
    return None


def recognise(module: nn.Module) -> GatedParts | None:
    """The parts of a module that computes down(f(gate(x), up(x))), with ``act`` set if f is that of a gated MLP, in training as
    in evaluation. None for any other module."""
    linears = _linears(module)
    device = base_of(next(iter(linears.values()))).weight.device
    with modes_kept(module), torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        evaluated, trained = (_parts(module.train(mode), linears, device) for mode in (False, True))
    return evaluated if evaluated is None or evaluated == trained else replace(evaluated, act=None)  # a dropout inside, say


def _parts(module: nn.Module, linears: dict[str, nn.Module], device: torch.device) -> GatedParts | None:
    generator = torch.Generator().manual_seed(0)
    calls: list[tuple[str, Tensor, Tensor]] = []  # name of a linear, what it was called with, what it returned

    def random(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, generator=generator, device="cpu").to(device)

    def stand_in(name: str) -> Callable:
        def forward(x: Tensor, *args, **kwargs) -> Tensor:
            y = random(*x.shape[:-1], base_of(linears[name]).out_features)
            calls.append((name, x.clone(), y))
            return y.clone()

        return forward

    x = random(1, 3, _input_width(linears))
    with standing_in({m: stand_in(name) for name, m in linears.items()}):
        y = module.forward(x.clone())  # without hooks
    if sorted(name for name, *_ in calls) != sorted(linears) or not isinstance(y, Tensor):
        return None
    *first, (down, h, last) = calls
    if not torch.equal(y, last) or not all(torch.equal(seen, x) for _, seen, _ in first):
        return None
    names = tuple(name for name, *_ in first)
    pair = [value for *_, value in first] if len(first) == 2 else first[0][2].chunk(2, dim=-1)
    if h.shape != pair[0].shape:
        return None
    for gate, (act, function) in itertools.product((0, 1), ACTIVATIONS.items()):
        expected = function(pair[gate]) * pair[1 - gate]
        if torch.allclose(h.float(), expected, rtol=1e-5, atol=1e-6):
            return GatedParts(names, down, gate, act)
    return GatedParts(names, down, 0, None)
