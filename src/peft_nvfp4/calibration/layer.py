"""One decoder layer: collect the moments of its inputs, solve for its weights, put frozen linears in their place, measure errors.

While moments are collected, the layer's linears are dense and read D(Q(x)), as they will: what reaches a later linear has gone
through quantised inputs already.

**Where a second NVFP4 term pays.** The presets give two terms to all norm outputs. A survey finds out what one term costs at each
input of this model: every layer is run on some data with one input rounded and everything else exact, and the error of the
layer's output noted, per token and relative to it. The choice is greedy: the largest drop of squared error per multiplication
first, until the budget is used up. (The error of an output is what can be measured one layer at a time. How far it moves the loss
differs between layers: a guide.) On SmolLM2-135M, GPTQ, nats above BF16: one term everywhere .224, a budget of a third .120, two
terms at all norm outputs (two thirds) .100, everywhere .066.

**Backward layouts** are solved for D(W_f)^T, not for W^T: the gradient belongs to the function that is computed, only its
rounding errors get smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..autograd.frozen_linear import rounded_input
from ..fusion.probe import standing_in
from ..nn.frozen_linear import FrozenOptions
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics import reference
from ..numerics.formats import WEIGHT
from ..numerics.matmul import exact_matmul
from .gptq import GPTQOptions, gptq, gptq_backward, output_error
from .moments import Moments
from .store import BACKWARD, replace_linears
from .structure import Stack


@dataclass
class LinearGroup:
    """The linears of a layer that read one input."""

    names: list[str]  # within the layer
    linears: list[nn.Linear]
    terms: int  # NVFP4 terms of the input
    offset: Tensor | None = None  # (K,)
    moments: Moments | None = None  # of D(x~), once collected
    sample: Tensor | None = None  # (tokens, K) inputs that did not enter the moments, for the errors


def run_dense(groups: Sequence[LinearGroup], run: Callable[[], Tensor], visit: Callable = lambda *_: None) -> Tensor:
    """``run()``, which runs a layer, with dense linears that read D(x~); ``visit(group, x, values)`` sees the input of each group
    once."""
    latest: dict[int, tuple[Tensor, Tensor]] = {}  # of every group: x and D(x~), computed once for all of its linears

    def forward_of(group: LinearGroup, linear: nn.Linear) -> Callable:
        def forward(x: Tensor) -> Tensor:
            before, values = latest.get(id(group), (None, None))
            if before is not x:
                values = rounded_input(x, group.terms, group.offset)
                latest[id(group)] = x, values
                if before is None:
                    visit(group, x, values)
            return F.linear(values, linear.weight, linear.bias)

        return forward

    forwards = {linear: forward_of(group, linear) for group in groups for linear in group.linears}
    with standing_in(forwards), torch.no_grad():
        return run()


@dataclass
class Survey:
    """What was measured of one group."""

    names: list[str]  # dotted names of the linears in the model
    work: int  # multiplications per token of one term
    one: float  # mean squared relative error of the layer's output with one term
    two: float  # with two terms


def survey_layer(stack: Stack, index: int, groups: Sequence[LinearGroup], hidden: Sequence[Tensor], name: str) -> list[Survey]:
    """Measure the groups of a layer on some batches, exact inputs of the layer in ``hidden``."""
    with torch.no_grad():
        exact = [stack.run(index, batch, h).float() for batch, h in enumerate(hidden)]

    def error(group: LinearGroup, terms: int) -> float:
        total, probe = 0.0, LinearGroup(group.names, group.linears, terms)
        for batch, y in enumerate(exact):
            d = run_dense([probe], lambda: stack.run(index, batch, hidden[batch])).float() - y
            total += (d.square().sum(-1) / y.square().sum(-1).clamp(min=1e-30)).mean().item() / len(exact)
        return total

    work = [sum(linear.weight.numel() for linear in group.linears) for group in groups]
    return [Survey([f"{name}.{n}" for n in g.names], size, error(g, 1), error(g, 2)) for g, size in zip(groups, work)]


def choose_terms(surveys: Sequence[Survey], budget: float) -> dict[str, int]:
    """Linear -> terms. ``budget``: multiplications that may be added, as a share of those of one term everywhere."""
    terms = {name: 1 for s in surveys for name in s.names}
    left = budget * sum(s.work for s in surveys)
    for s in sorted(surveys, key=lambda s: (s.two - s.one) / s.work):
        if s.two < s.one and s.work <= left * (1 + 1e-9):
            left -= s.work
            terms.update(dict.fromkeys(s.names, 2))
    return terms


def freeze_group(
    layer: nn.Module, group: LinearGroup, layouts: str, solver: GPTQOptions | None, name: str
) -> dict[str, NVFP4FrozenLinear]:
    """Replace the linears of a group by frozen ones, rounded to nearest without ``solver`` and where GPTQ is not possible."""
    weights, packed = [linear.weight.detach() for linear in group.linears], None
    if solver is not None and group.moments is not None:
        packed = gptq(weights, group.moments, solver, f"{name}.{' + '.join(group.names)}")
    if packed is None:
        gscale = ops.shared_gscale(weights)
        packed = [ops.quantize_weight(w, WEIGHT, gscale) for w in weights]
    options, frozen = FrozenOptions(layouts, terms=group.terms), {}
    for n, linear, q in zip(group.names, group.linears, packed):
        frozen[n] = NVFP4FrozenLinear(linear.in_features, linear.out_features, linear.bias, linear.weight.dtype, options, q)
        frozen[n].set_offset(group.offset)
    replace_linears(layer, frozen)
    return frozen


def solve_backward(
    linears: dict[str, NVFP4FrozenLinear], moments: dict[str, Moments], options: GPTQOptions, name: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Give the linears new backward layouts W_b, solved against the moments of D(Q(dy)).

    Returns:
        The errors of dx (per cent, on the tokens W_b was solved for) against the layout that requantising gave, and the tensors
        to be kept.
    """
    errors, tensors = {}, {}
    for n, linear in linears.items():
        w, h = linear.dequantize(torch.float32).T, moments[n].h
        error = lambda: round(100 * output_error(w, reference.dequantize(linear.backward_layout), h), 4)  # noqa: B023
        requantized = error()
        solved = gptq_backward(linear.forward_layout, moments[n], options, f"{name}.{n} (backward)")
        if solved is not None:  # else the layout that is there stays
            linear._put(*BACKWARD, solved)
        errors[n] = {"dx_requantized": requantized, "dx": error()}
        tensors.update({f"{name}.{n}.{key}": getattr(linear, key).detach() for key in BACKWARD})
    return errors, tensors


def group_errors(group: LinearGroup, frozen: dict[str, NVFP4FrozenLinear]) -> dict[str, dict[str, float]]:
    """Per linear, in per cent: error of the weight, and of the output on the sample (mean over tokens of the relative error),
    with rounded inputs (W4A4) and exact ones (W4A16); the same for rounding to nearest."""
    errors, x = {}, group.sample
    values = None if x is None else rounded_input(x, group.terms, group.offset).float()
    for name, linear in zip(group.names, group.linears):
        w = linear.weight.detach().float()
        solved = frozen[name].dequantize(torch.float32)
        nearest = reference.dequantize(ops.quantize_weight(w, WEIGHT, frozen[name].forward_layout.gscale))
        row = {"weight": _percent(solved - w, w), "weight_nearest": _percent(nearest - w, w)}
        if x is not None and x.numel():
            with exact_matmul():
                y = x.float() @ w.T
                for key, v in (("", solved), ("_nearest", nearest)):
                    row[f"w4a4{key}"] = _token_percent(values @ v.T - y, y)
                    row[f"w4a16{key}"] = _token_percent(x.float() @ v.T - y, y)
                row["a4"] = _token_percent(values @ w.T - y, y)
        errors[name] = {key: round(value, 4) for key, value in row.items()}
    return errors


def _percent(d: Tensor, w: Tensor) -> float:
    return 100 * (d.norm() / w.norm().clamp(min=1e-30)).item()


def _token_percent(d: Tensor, y: Tensor) -> float:
    return 100 * (d.norm(dim=1) / y.norm(dim=1).clamp(min=1e-30)).mean().item()
