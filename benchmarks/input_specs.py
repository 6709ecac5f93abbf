"""The inputs of a Llama's linears, changed while the weights stay: terms and offsets, site by site; exact; rounded before dense
weights. What :mod:`perplexity` measures with, and others that compare input specs on one set of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peft_nvfp4.autograd.frozen_linear import rounded_input
from peft_nvfp4.fusion.probe import standing_in
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.quantization.freeze import frozen_layers

SITES = {
    "q/k/v": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate/up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
NORMS, ALL = ("q/k/v", "gate/up"), tuple(SITES)


@dataclass(frozen=True)
class Inputs:
    """Treatment of inputs: sites with two terms, and sites with an offset; ``last``: two terms in the last layer only."""

    two: tuple[str, ...] = ()
    centred: tuple[str, ...] = ()
    last: bool = False

    def terms(self, site: str, layer: int, layers: int) -> int:
        return 1 + (site in self.two and (not self.last or layer + 1 == layers))


def layer_of(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def site_of(name: str) -> tuple[int, str]:
    """(layer, site) of a linear's dotted name."""
    return layer_of(name), next(site for site, members in SITES.items() if name.rpartition(".")[2] in members)


def set_inputs(model: nn.Module, inputs: Inputs, offsets: dict[str, Tensor] | None = None) -> None:
    """Give the frozen linears of ``model`` other terms and offsets, the latter from ``offsets`` (name -> mean input)."""
    layers = frozen_layers(model)
    count = 1 + max(layer_of(name) for name, _ in layers)
    groups: dict[tuple[int, str], list[NVFP4FrozenLinear]] = {}
    for name, linear in layers:
        index, site = site_of(name)
        linear.options = replace(linear.options, terms=inputs.terms(site, index, count))
        centred = site in inputs.centred and linear.options.terms == 1
        linear.set_offset(offsets[name] if centred else None)
        groups.setdefault((index, site), []).append(linear)
    for members in groups.values():
        for member in members:
            member.input_offset = members[0].input_offset  # by its identity they know that their input is shared


def offsets_of(model: nn.Module) -> dict[str, Tensor]:
    """Name of a centred linear -> its mean input."""
    found = {name: linear.input_offset for name, linear in frozen_layers(model)}
    return {name: offset.detach().view(torch.float32).clone() for name, offset in found.items() if offset is not None}


def added_work(model: nn.Module) -> float:
    """Multiplications of second terms, as a share of those of the first ones."""
    sizes = [(m.in_features * m.out_features, m.options.terms - 1) for _, m in frozen_layers(model)]
    return sum(n * extra for n, extra in sizes) / sum(n for n, _ in sizes)


@contextmanager
def exact_inputs(model: nn.Module) -> Iterator[None]:
    """Within the context the frozen linears multiply x, not D(x~), by D(W): W4A16."""

    def forward_of(m: NVFP4FrozenLinear) -> Callable:
        return lambda x: F.linear(x, m.dequantize(x.dtype), m.bias)

    with standing_in({m: forward_of(m) for _, m in frozen_layers(model)}):
        yield


@contextmanager
def rounded_inputs(model: nn.Module, inputs: Inputs, offsets: dict[str, Tensor] | None = None) -> Iterator[None]:
    """Within the context the dense linears of the decoder read D(x~): W16A4."""
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
    count = 1 + max(layer_of(name) for name in linears)

    def forward_of(name: str, m: nn.Linear) -> Callable:
        index, site = site_of(name)
        terms = inputs.terms(site, index, count)
        offset = offsets[name] if site in inputs.centred and terms == 1 else None
        return lambda x: F.linear(rounded_input(x, terms, offset), m.weight, m.bias)

    with standing_in({m: forward_of(name, m) for name, m in linears.items()}):
        yield
