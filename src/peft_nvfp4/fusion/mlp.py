"""Gated MLP that keeps its gate and up activations in NVFP4.

    h = act(gate(x)) * up(x);  y = down(h)

The product is computed from BF16 gate and up in FP32 and quantised in the same pass; what backward needs are the codes of gate,
up and h (0.56 bytes a value each instead of 2). Gradients come from D(gate~) and D(up~), in FP32. As an option (``recompute``), h
is not kept: D(h~), for down's dA, is made anew from D(gate~) and D(up~)
(:func:`peft_nvfp4.numerics.fused_reference.gated_values`). It is then a product of quantised factors, close to the forward's, and
backward keeps a sixth (one term) to a quarter (two) less.

Source: PACT, Table 7, row SiLU-multiply.

:func:`recognise` finds out whether a module is one, and which of its linears is which, by running it with linears that return
random numbers of every magnitude: names, halves of a fused ``gate_up_proj`` and activations need no table.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..autograd import activation_cache
from ..autograd.activation_cache import GatedSource, QuantizedInput, dequantized
from ..autograd.frozen_linear import Branch, autocast_input
from ..autograd.fused import GatedQuantize, as_parts
from ..autograd.tiles import in_tiles, wanted
from ..nn.frozen_linear import FrozenLinear
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..nn.plain import obstacle
from ..numerics.recognition import activation_of, rows_for, samples
from .fused_module import FusedModule
from .probe import base_of, modes_kept, standing_in

TILE_VALUES = 32 << 20
"""Of gate, of up and of their product, where an MLP runs in tiles: 64 MiB of BF16, in which a GPU is busy, and a weight that is
made for every tile costs a twentieth of its product."""


def tile_rows(width: int) -> int:
    """Tokens of a tile of an MLP with this inner width."""
    return max(256, TILE_VALUES // width // 256 * 256)


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


class FusedGatedMLP(FusedModule):
    """Takes the place of a gated MLP. It owns the original's children under their names, so state-dict keys and adapter targets
    do not change, and runs the original where fusing does not apply: ``down`` is not in NVFP4 any more, there is more than one
    input, the activation has hooks or is another one, or a setting of the original has changed (:mod:`peft_nvfp4.nn.plain`). With
    ``recompute``, h~ is kept all the same where gate and up are not (nothing before them is trained): it is less; and where
    ``down`` is called with h itself, for a hook's or a wrapper's sake.
    """

    def __init__(self, original: nn.Module, parts: GatedParts, recompute: bool = False):
        super().__init__(original)
        self.parts, self.recompute = parts, recompute
        self._take_the_place_of(original, [original.get_submodule(name) for name in (*parts.first, parts.down)])

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        parts = self.parts
        down = self._modules[parts.down]
        if isinstance(base := down._modules.get("base_layer"), NVFP4FrozenLinear):
            down = base
        elif hasattr(down, "get_base_layer"):  # inside a wrapper, too
            down = down.get_base_layer()
        if not isinstance(down, NVFP4FrozenLinear) or args or kwargs or self.was_edited():
            return self.call_original(x, *args, **kwargs)
        if wanted() and x.numel() // x.shape[-1] > (most := tile_rows(down.in_features)) and self._is_plain():
            return self._in_tiles(x, down, most)
        return self._compute(x, down)

    def _compute(self, x: Tensor, down: NVFP4FrozenLinear) -> Tensor:
        parts = self.parts
        gate, up = self._gate_and_up(x)
        offset, terms, f, shape = down.input_offset, down.options.terms, gate.shape[-1], gate.shape
        mu = None if offset is None else offset.view(torch.float32)
        branches = _branches_of_codes(self._modules[parts.down], gate)
        placeholder = branches is not None and offset is None
        h, *flat = GatedQuantize.apply(gate.reshape(-1, f), up.reshape(-1, f), mu, parts.act, terms, placeholder)
        del gate, up  # the largest activations of a layer: nothing needs them any more
        h = h.view(shape)
        *codes, gate_copy, up_copy = as_parts(flat, f)
        kept = h.requires_grad  # gate and up are
        # in a call of down that may be checkpointed by itself, h is all that the second run has: it could not save these again
        alone = branches is None and not torch.compiler.is_compiling()
        source = GatedSource(gate_copy, up_copy, parts.act) if self.recompute and kept and not alone else None
        entry = QuantizedInput(tuple(codes), offset, h.dtype, from_producer=True, placeholder=placeholder, source=source)
        if branches is not None:  # as an argument: nobody can change h in between
            return self._modules[parts.down].forward_codes(h, branches, entry)
        activation_cache.put(h, entry)
        return self._modules[parts.down](h)

    def _is_plain(self) -> bool:
        """Whether nobody looks at what is computed inside: a hook would see tiles, and see them twice."""
        children = (self._modules[name] for name in (*self.parts.first, self.parts.down))
        return all(_plain_branches(child) is not None for child in children)

    def _in_tiles(self, x: Tensor, down: NVFP4FrozenLinear, most: int) -> Tensor:
        """``most`` tokens at a time. Backward finds x in the codes that a fused norm keeps in any case."""
        k, function, kept, input_of = x.shape[-1], lambda part: self._compute(part, down), (), None
        if (entry := self._codes_of_a_norm(x)) is not None:
            # of the entry no more than this: whoever holds it holds codes, and this is held until backward
            kept, offset, dtypes = tuple(t for term in entry.terms for t in term[:3]), entry.offset, (x.dtype, entry.dtype)

            def function(part: Tensor, *codes: Tensor) -> Tensor:
                activation_cache.put(part, QuantizedInput(as_parts(codes, k), offset, dtypes[1], from_producer=True))
                return self._compute(part, down)

            def input_of(*codes: Tensor) -> Tensor:
                return dequantized(as_parts(codes, k), None if offset is None else offset.view(torch.float32), dtypes[0])

        trained = [p for p in self.parameters() if p.requires_grad]
        return in_tiles(function, x.reshape(-1, k), most, trained, kept, input_of).view(*x.shape[:-1], down.out_features)

    def _codes_of_a_norm(self, x: Tensor) -> QuantizedInput | None:
        """x~, where x is D(x~)."""
        reader = base_of(self._modules[self.parts.first[0]])
        if not isinstance(reader, NVFP4FrozenLinear):
            return None
        dtype = autocast_input(x[..., :0]).dtype
        entry = activation_cache.get(x, reader.options.terms, reader.input_offset, dtype)
        return entry if entry is not None and entry.from_producer else None

    def _gate_and_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.parts
        pair = [self._modules[name](x) for name in parts.first]
        if len(pair) == 1:
            pair = pair[0].chunk(2, dim=-1)
        return pair[parts.gate], pair[1 - parts.gate]


def _branches_of_codes(down: nn.Module, like: Tensor) -> Sequence[Branch] | None:
    """The branches with which ``down.forward_codes`` computes what a call of ``down`` with a tensor like ``like`` would. None
    where somebody may look at that tensor: a hook, a wrapper, a subclass, autocast, a compiler."""
    if autocast_input(like).dtype != like.dtype or torch.compiler.is_compiling():
        return None
    return _plain_branches(down)


def _plain_branches(down: nn.Module) -> Sequence[Branch] | None:
    """What a call of this linear adds, where nobody looks at the call: no hook, wrapper or subclass."""
    # of exactly that class: what a wrapper passes on as an attribute is not how it is called
    if "forward_codes" not in vars(type(down)) or obstacle((down, (type(down),))):
        return None
    return down.plain_branches()


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
    in evaluation, in FP32 as in the model's dtype. None for any other module."""
    linears = _linears(module)
    first = base_of(next(iter(linears.values())))
    device, dtype = first.weight.device, first.compute_dtype if isinstance(first, FrozenLinear) else first.weight.dtype
    with modes_kept(module), torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        runs = itertools.product((False, True), dict.fromkeys((torch.float32, dtype)))
        parts, *others = (_parts(module.train(mode), linears, device, dtype) for mode, dtype in runs)
    return parts if parts is None or all(other == parts for other in others) else replace(parts, act=None)  # a dropout, say


def _parts(module: nn.Module, linears: dict[str, nn.Module], device: torch.device, dtype: torch.dtype) -> GatedParts | None:
    """Of one mode of ``module``, by samples in ``dtype``."""
    generator = torch.Generator("cpu").manual_seed(0)
    calls: list[tuple[str, Tensor, Tensor]] = []  # name of a linear, what it was called with, what it returned

    def random(*shape: int) -> Tensor:
        return samples(*shape, generator=generator).to(device, dtype)

    def stand_in(name: str) -> Callable:
        def forward(x: Tensor, *args, **kwargs) -> Tensor:
            y = random(*x.shape[:-1], base_of(linears[name]).out_features)
            calls.append((name, x.clone(), y))
            return y.clone()

        return forward

    x = random(1, rows_for(min(base_of(linear).out_features for linear in linears.values())), _input_width(linears))
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
    for gate in (0, 1):
        if act := activation_of(h, pair[gate], pair[1 - gate]):
            return GatedParts(names, down, gate, act)
    return GatedParts(names, down, 0, None)
