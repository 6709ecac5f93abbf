"""One decoder layer: collect the moments of its sites, solve for its weights, put frozen linears in their place, measure errors.

While moments are collected, the layer's linears are dense and read D(Q(x)), as they will: what reaches a later site of the layer
has gone through quantised inputs already. With ``true_sequential`` the sites are done one after the other instead, each fed by
frozen linears: one more run of the layer per site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from ..quantization.freeze import _carry_attributes
from .gptq import GPTQOptions, gptq
from .hessian import Moments
from .store import share_centre


class Reached(Exception):
    """The site that a run was for has its input."""


@dataclass
class SiteInput:
    """What is known of one site: the linears that read one input.

    Attributes:
        names: of the linears, within the layer.
        terms: NVFP4 terms of the input.
        centre: (K,) or None.
        moments: of D(x~), once collected.
        sample: (tokens, K) inputs that did not enter the moments, for the errors.
    """

    names: list[str]
    linears: list[nn.Linear]
    terms: int
    centre: Tensor | None = None
    moments: Moments | None = None
    sample: Tensor | None = None
    _last: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @property
    def k(self) -> int:
        return self.linears[0].in_features

    def values(self, x: Tensor) -> Tensor:
        """D(x~), made once for all linears of the site."""
        if self._last is None or self._last[0] is not x:
            self._last = x, rounded_input(x, self.terms, self.centre)
        return self._last[1]

    def forget(self) -> None:
        self._last = None


def run_dense(
    layer: nn.Module, sites: Sequence[SiteInput], run: Callable[[], Tensor], take: Callable, rounded: bool = True
) -> Tensor | None:
    """Run the layer with its dense linears reading D(x~) (or x); ``take(site, x, values)`` sees the input of each site once."""
    taken: set[int] = set()

    def forward_of(site: SiteInput, linear: nn.Linear) -> Callable:
        def forward(x: Tensor) -> Tensor:
            values = site.values(x) if rounded else x
            if id(site) not in taken:
                taken.add(id(site))
                take(site, x, values)
            return F.linear(values, linear.weight, linear.bias)

        return forward

    pairs = [(site, linear) for site in sites for linear in site.linears]
    with standing_in({linear: forward_of(site, linear) for site, linear in pairs}), torch.no_grad():
        try:
            return run()
        except Reached:
            return None
        finally:
            for site in sites:
                site.forget()


def fitting(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The tokens' mask, if x has these tokens in this order."""
    return mask if mask is not None and mask.numel() == x.numel() // x.shape[-1] else None


# ---------------------------------------------------------------------------------------------- solving


def freeze_site(
    layer: nn.Module, site: SiteInput, options: FrozenOptions, solver: GPTQOptions | None, name: str
) -> dict[str, NVFP4FrozenLinear]:
    """Replace the linears of a site by frozen ones; ``solver`` None rounds to nearest."""
    weights = [linear.weight.detach() for linear in site.linears]
    if solver is None or site.moments is None:
        gscale = ops.shared_gscale(weights)
        packed = [ops.quantize_weight(w, WEIGHT, gscale) for w in weights]
    else:
        packed = [s.q for s in gptq(weights, site.moments, solver, name=f"{name}.{' + '.join(site.names)}")]
    frozen: dict[str, NVFP4FrozenLinear] = {}
    for name_, linear, q in zip(site.names, site.linears, packed):
        new = NVFP4FrozenLinear(linear.in_features, linear.out_features, linear.bias, linear.weight.dtype, options, q)
        new.train(linear.training)
        new.shares_input, new.calibrated = len(site.names) > 1, True
        _carry_attributes(linear, new)
        if site.centre is not None:
            new.set_centre(site.centre)
        frozen[name_] = new
    if site.centre is not None:
        share_centre(list(frozen.values()))
    for name_, new in frozen.items():
        parent, _, child = name_.rpartition(".")
        setattr(layer.get_submodule(parent), child, new)
    return frozen


# ---------------------------------------------------------------------------------------------- errors


def site_errors(site: SiteInput, frozen: dict[str, NVFP4FrozenLinear]) -> dict[str, dict[str, float]]:
    """Per linear, in per cent: error of the weight, and of the output on the sample (mean over tokens of the relative error),
    with rounded inputs (W4A4) and exact ones (W4A16); the same for rounding to nearest."""
    found = {}
    x = site.sample
    values = None if x is None else rounded_input(x, site.terms, site.centre).float()
    for name, linear in zip(site.names, site.linears):
        w = linear.weight.detach().float()
        layer = frozen[name]
        solved = layer.dequantize(torch.float32)
        nearest = reference.dequantize(ops.quantize_weight(w, WEIGHT, layer.forward_layout.gscale))
        row = {"weight": _percent(solved - w, w), "weight_nearest": _percent(nearest - w, w), "terms": site.terms}
        row["centred"] = site.centre is not None
        if x is not None and x.numel():
            with exact_matmul():
                y = x.float() @ w.T
                for key, v in (("", solved), ("_nearest", nearest)):
                    row[f"w4a4{key}"] = _tokens(values @ v.T - y, y)
                    row[f"w4a16{key}"] = _tokens(x.float() @ v.T - y, y)
                row["a4"] = _tokens(values @ w.T - y, y)
        found[name] = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
    return found


def _percent(d: Tensor, w: Tensor) -> float:
    return 100 * (d.norm() / w.norm().clamp(min=1e-30)).item()


def _tokens(d: Tensor, y: Tensor) -> float:
    return 100 * (d.norm(dim=1) / y.norm(dim=1).clamp(min=1e-30)).mean().item()
