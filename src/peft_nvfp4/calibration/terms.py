"""Where a second NVFP4 term pays: chosen site by site from measured errors, under a budget of FP4 work in the forward pass.

The presets give two terms to all norm outputs. A survey finds out what one term costs at each site of this model: every layer is
run on some data with one site's input rounded and everything else exact, and the error of the layer's output noted, per token and
relative to it. The choice is greedy: the largest drop of squared error per multiplication first, until the budget is used up.
(The error of an output is what can be measured one layer at a time. How far it moves the loss differs between layers: a guide.)

On SmolLM2-135M, GPTQ, nats above BF16: one term everywhere .224, a budget of a third .120, two terms at all norm outputs (two
thirds) .100, everywhere .066.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .layer import SiteInput, run_dense


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
    found = [Survey([f"{name}.{n}" for n in s.names], sum(m.weight.numel() for m in s.linears), 0.0, 0.0) for s in sites]
    for batch, h in enumerate(hidden):
        with torch.no_grad():
            exact = stack.run(index, batch, h).float()
        for site, row in zip(sites, found):
            for terms, key in ((1, "one"), (2, "two")):
                probe = SiteInput(site.names, site.linears, terms)
                out = run_dense(layer, [probe], lambda: stack.run(index, batch, h), lambda *_: None)
                d = (out.float() - exact).square().sum(-1) / exact.square().sum(-1).clamp(min=1e-30)
                setattr(row, key, getattr(row, key) + d.mean().item() / len(hidden))
    return found


def choose(surveys: Sequence[Survey], budget: float) -> dict[str, int]:
    """Linear -> terms. ``budget``: multiplications that may be added, as a share of those of one term everywhere."""
    total = sum(s.work for s in surveys)
    terms = {name: 1 for s in surveys for name in s.names}
    left = budget * total
    for s in sorted(surveys, key=lambda s: (s.two - s.one) / s.work):
        if s.two < s.one and s.work <= left * (1 + 1e-9):
            left -= s.work
            terms.update(dict.fromkeys(s.names, 2))
    return terms


def as_rows(surveys: Sequence[Survey]) -> list[dict]:
    return [asdict(s) for s in surveys]
