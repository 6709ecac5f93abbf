"""One decoder layer: collect the moments of its sites, solve for its weights, put frozen linears in their place, measure errors.

While moments are collected, the layer's linears are dense and read D(Q(x)), as they will: what reaches a later site of the layer
has gone through quantised inputs already.

**Where a second NVFP4 term pays.** The presets give two terms to all norm outputs. A survey finds out what one term costs at each
site of this model: every layer is run on some data with one site's input rounded and everything else exact, and the error of the
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
from .store import replace_site


@dataclass
class SiteInput:
    """What is known of one site: the linears that read one input.

    Attributes:
        names: of the linears, within the layer.
        terms: NVFP4 terms of the input.
        offset: (K,) or None.
        moments: of D(x~), once collected.
        sample: (tokens, K) inputs that did not enter the moments, for the errors.
    """

    names: list[str]
    linears: list[nn.Linear]
    terms: int
    offset: Tensor | None = None
    moments: Moments | None = None
    sample: Tensor | None = None

    @property
    def k(self) -> int:
        return self.linears[0].in_features


def run_dense(layer: nn.Module, sites: Sequence[SiteInput], run: Callable[[], Tensor], visit: Callable) -> Tensor:
    """Output of the layer with dense linears that read D(x~); ``visit(site, x, values)`` sees the input of each site once."""
    latest: dict[int, tuple[Tensor, Tensor]] = {}  # of every site: x and D(x~), computed once for all of its linears

    def forward_of(site: SiteInput, linear: nn.Linear) -> Callable:
        def forward(x: Tensor) -> Tensor:
            before, values = latest.get(id(site), (None, None))
            if before is not x:
                values = rounded_input(x, site.terms, site.offset)
                latest[id(site)] = x, values
                if before is None:
                    visit(site, x, values)
            return F.linear(values, linear.weight, linear.bias)

        return forward

    pairs = [(site, linear) for site in sites for linear in site.linears]
    with standing_in({linear: forward_of(site, linear) for site, linear in pairs}), torch.no_grad():
        return run()


# ---------------------------------------------------------------------------------------------- terms


@dataclass
class Survey:
    """What was measured of one site.

    Attributes:
        names: dotted names of its linears in the model.
        work: multiplications per token of one term.
        one, two: mean squared relative error of the layer's output with one and two terms.
    """

    names: list[str]
    work: int
    one: float
    two: float


def survey_layer(stack: Any, index: int, sites: Sequence[SiteInput], hidden: Sequence[Tensor], name: str) -> list[Survey]:
    """Measure the sites of a layer on some batches, exact inputs of the layer in ``hidden``."""
    layer = stack.layers[index]
    surveys = [Survey([f"{name}.{n}" for n in s.names], sum(m.weight.numel() for m in s.linears), 0.0, 0.0) for s in sites]
    for batch, h in enumerate(hidden):
        with torch.no_grad():
            exact = stack.run(index, batch, h).float()
        for site, survey in zip(sites, surveys):
            for terms, key in ((1, "one"), (2, "two")):
                probe = SiteInput(site.names, site.linears, terms)
                out = run_dense(layer, [probe], lambda: stack.run(index, batch, h), lambda *_: None)
                d = (out.float() - exact).square().sum(-1) / exact.square().sum(-1).clamp(min=1e-30)
                setattr(survey, key, getattr(survey, key) + d.mean().item() / len(hidden))
    return surveys


def choose_terms(surveys: Sequence[Survey], budget: float) -> dict[str, int]:
    """Linear -> terms. ``budget``: multiplications that may be added, as a share of those of one term everywhere."""
    total = sum(s.work for s in surveys)
    terms = {name: 1 for s in surveys for name in s.names}
    left = budget * total
    for s in sorted(surveys, key=lambda s: (s.two - s.one) / s.work):
        if s.two < s.one and s.work <= left * (1 + 1e-9):
            left -= s.work
            terms.update(dict.fromkeys(s.names, 2))
    return terms


# ---------------------------------------------------------------------------------------------- solving


def freeze_site(
    layer: nn.Module, site: SiteInput, options: FrozenOptions, solver: GPTQOptions | None, name: str
) -> dict[str, NVFP4FrozenLinear]:
    """Replace the linears of a site by frozen ones, rounded to nearest without ``solver`` and where GPTQ is not possible."""
    weights, packed = [linear.weight.detach() for linear in site.linears], None
    if solver is not None and site.moments is not None:
        packed = gptq(weights, site.moments, solver, f"{name}.{' + '.join(site.names)}")
    if packed is None:
        gscale = ops.shared_gscale(weights)
        packed = [ops.quantize_weight(w, WEIGHT, gscale) for w in weights]
    frozen: dict[str, NVFP4FrozenLinear] = {}
    for linear_name, linear, q in zip(site.names, site.linears, packed):
        new = NVFP4FrozenLinear(linear.in_features, linear.out_features, linear.bias, linear.weight.dtype, options, q)
        new.set_offset(site.offset)
        frozen[linear_name] = new
    replace_site(layer, frozen)
    return frozen


BACKWARD = ("backward_weight", "backward_scales", "backward_gscale")


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
        w = linear.dequantize(torch.float32).T
        solved = gptq_backward(linear.forward_layout, moments[n], options, f"{name}.{n} (backward)")
        row = {"dx_requantized": _output_percent(w, linear.backward_layout, moments[n])}
        if solved is not None:  # else the layout that is there stays
            linear._put(*BACKWARD, solved)
        row["dx"] = _output_percent(w, linear.backward_layout, moments[n])
        errors[n] = row
        tensors.update({f"{name}.{n}.{key}": getattr(linear, key).detach() for key in BACKWARD})
    return errors, tensors


# ---------------------------------------------------------------------------------------------- errors


def site_errors(site: SiteInput, frozen: dict[str, NVFP4FrozenLinear]) -> dict[str, dict[str, float]]:
    """Per linear, in per cent: error of the weight, and of the output on the sample (mean over tokens of the relative error),
    with rounded inputs (W4A4) and exact ones (W4A16); the same for rounding to nearest."""
    errors = {}
    x = site.sample
    values = None if x is None else rounded_input(x, site.terms, site.offset).float()
    for name, linear in zip(site.names, site.linears):
        w = linear.weight.detach().float()
        layer = frozen[name]
        solved = layer.dequantize(torch.float32)
        nearest = reference.dequantize(ops.quantize_weight(w, WEIGHT, layer.forward_layout.gscale))
        row = {"weight": _percent(solved - w, w), "weight_nearest": _percent(nearest - w, w), "terms": site.terms}
        if x is not None and x.numel():
            with exact_matmul():
                y = x.float() @ w.T
                for key, v in (("", solved), ("_nearest", nearest)):
                    row[f"w4a4{key}"] = _token_percent(values @ v.T - y, y)
                    row[f"w4a16{key}"] = _token_percent(x.float() @ v.T - y, y)
                row["a4"] = _token_percent(values @ w.T - y, y)
        errors[name] = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
    return errors


def _percent(d: Tensor, w: Tensor) -> float:
    return 100 * (d.norm() / w.norm().clamp(min=1e-30)).item()


def _token_percent(d: Tensor, y: Tensor) -> float:
    return 100 * (d.norm(dim=1) / y.norm(dim=1).clamp(min=1e-30)).mean().item()


def _output_percent(w: Tensor, layout: Any, moments: Moments) -> float:
    return round(100 * output_error(w, reference.dequantize(layout), moments.h), 4)
