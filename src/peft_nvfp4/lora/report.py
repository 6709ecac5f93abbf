"""How much of an adapter survives a merge, measured per layer and on the logits of a probe set; and the report of a merge.

W is the weight under the adapter, delta = s B A what the adapter adds, W' what is stored after merging. Then

    effect   = |delta| / |W|                         size of the adapter's change
    retained = <W' - W, delta> / <delta, delta>      1: all of it is there; 0: rounding swallowed it
    error    = |W' - (W + delta)| / |delta|          what rounding added, in units of the adapter

On a probe set, the logits of base, adapter and merged model take the place of W, W + delta and W'. Where the adapter adds
nothing, effect is 0, retained 1 and error 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..fusion.probe import modes_kept

KEPT_WELL = 0.5
"""Below this share of the adapter, a merge is called a near no-op."""

DROWNED = 1.0
"""Above this many times the adapter's own size, what rounding added drowns it."""


@dataclass
class LayerReport:
    """What is left of the adapter of one layer.

    Attributes:
        name: dotted name, without the adapter's wrapping.
        stored: format of the merged weight.
        changed: share of weights whose stored value is another one now.
        size: <delta, delta>, the layer's weight in the figures of the whole merge.
        effect, retained, error: see the module's docstring.
    """

    name: str
    stored: str
    changed: float
    size: float
    effect: float
    retained: float
    error: float


@dataclass
class ProbeReport:
    """What is left of the adapter's effect on the logits of a probe set.

    Attributes:
        positions: tokens whose logits were compared.
        same_choice: share of positions at which merged and adapter prefer the same token.
        changed_choice: share of positions at which the adapter prefers another token than the base.
        size, effect, retained, error: as in :class:`LayerReport`.
    """

    positions: int
    same_choice: float
    changed_choice: float
    size: float
    effect: float
    retained: float
    error: float


@dataclass
class MergeReport:
    """What a merge did to an adapter.

    Attributes:
        to: format of the merged model.
        adapters: names of what was merged.
        layers: one entry for every adapted layer.
        retained, error: over all layers, each weighted by its ``size``.
        merge_aware: they were trained with the merged weight, so that the merged model *is* what was trained.
        probe: on the logits, if there was a probe set.
        unequal_scales: groups of linears of one input (q/k/v, gate/up) whose global scales differ now: engines that fuse such
            linears need equal ones.
        warnings: what a user should know.
    """

    to: str
    adapters: list[str]
    layers: list[LayerReport]
    retained: float
    error: float
    merge_aware: bool = False
    probe: ProbeReport | None = None
    unequal_scales: list[list[str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        aware = " (trained merge-aware: the merged model is the trained function)" if self.merge_aware else ""
        lines = [f"merged {', '.join(self.adapters)} into {self.to}{aware}"]
        lines.append(f"weights: {self.retained:.1%} of the adapter retained, error {self.error:.2f} x the adapter")
        lines += [
            f"  {layer.name}: {layer.retained:.1%}, error {layer.error:.2f}, {layer.changed:.1%} changed"
            for layer in sorted(self.layers, key=lambda layer: layer.retained)[:3]
        ]
        if self.probe is not None:
            p = self.probe
            lines.append(
                f"logits ({p.positions} positions): {p.retained:.1%} of the adapter's effect retained, error {p.error:.2f} x the "
                f"effect; same choice as the adapter at {p.same_choice:.1%}"
            )
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


def figures(before: Sequence[Tensor], wanted: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, float]:
    """size, effect, retained and error of W, W + delta and W', given in parts of one shape, float32; sums are in float64."""
    along = size = lost = norm = 0.0
    total = lambda t: t.sum(dtype=torch.float64).item()
    for w, sum_, stored in zip(before, wanted, after):
        delta = sum_ - w
        along, size = along + total((stored - w) * delta), size + total(delta.square())
        lost, norm = lost + total((stored - sum_).square()), norm + total(w.square())
    effect = (size / norm) ** 0.5 if norm else float("inf") if size else 0.0
    retained, error = (along / size, (lost / size) ** 0.5) if size else (1.0, 0.0)
    return {"size": size, "effect": effect, "retained": retained, "error": error}


def measure_layer(name: str, stored: str, before: Tensor, wanted: Tensor, after: Tensor) -> LayerReport:
    """Compare W, W + delta and W', all of one shape, float32."""
    changed = (after != before).float().mean().item()
    return LayerReport(name, stored, changed, **figures([before], [wanted], [after]))


def weighted(layers: Sequence[LayerReport]) -> dict[str, float]:
    """retained and error of all layers together."""
    size = sum(layer.size for layer in layers)
    if not size:
        return {"retained": 1.0, "error": 0.0}
    lost = sum(layer.error**2 * layer.size for layer in layers)
    return {"retained": sum(layer.retained * layer.size for layer in layers) / size, "error": (lost / size) ** 0.5}


# ---------------------------------------------------------------------------------------------- logits


def as_batches(probe: Any) -> list[Any]:
    """A probe set as a list of batches: it may be a batch, which is a tensor (of token ids) or a mapping of tensors."""
    batches = [probe] if isinstance(probe, Tensor | Mapping) else list(probe)
    if not batches or not all(isinstance(batch, Tensor | Mapping) for batch in batches):
        raise ValueError("probe is a tensor of token ids, a batch (mapping of tensors), or a list of those, and not empty")
    return batches


@torch.no_grad()
def probe_logits(model: nn.Module, batches: Iterable[Any]) -> list[Tensor]:
    """(positions, vocabulary) float32 on the CPU of every batch; padding, by its attention mask, left out. The model runs in
    evaluation mode and is afterwards in the mode it was in."""
    device = next(p.device for p in model.parameters())
    per_batch = []
    with modes_kept(model):
        model.eval()
        for batch in batches:
            mask = None
            if isinstance(batch, Mapping):
                batch = {key: t.to(device) if isinstance(t, Tensor) else t for key, t in batch.items() if key != "labels"}
                mask, output = batch.get("attention_mask"), model(**batch)
            else:
                output = model(batch.to(device))
            logits = getattr(output, "logits", output)
            logits = logits[0] if isinstance(logits, tuple) else logits
            kept = logits[mask.bool()] if mask is not None and mask.shape == logits.shape[:-1] else logits
            per_batch.append(kept.reshape(-1, logits.shape[-1]).float().cpu())
    return per_batch


def compare_logits(base: list[Tensor], adapter: list[Tensor], merged: list[Tensor]) -> ProbeReport:
    """From the logits of the same batches, see :func:`probe_logits`."""
    of_base, of_adapter, of_merged = (torch.cat([batch.argmax(-1) for batch in batches]) for batches in (base, adapter, merged))
    same, changed = (of_adapter == of_merged).double().mean().item(), (of_adapter != of_base).double().mean().item()
    return ProbeReport(len(of_base), same, changed, **figures(base, adapter, merged))
