"""How much of an adapter survives a merge, measured per layer and on the logits of a probe set; and the report of a merge.

W is the weight under the adapter, delta = s B A what the adapter adds, W' what is stored after merging. Then

    effect   = |delta| / |W|                         size of the adapter's change
    retained = <W' - W, delta> / <delta, delta>      1: all of it is there; 0: rounding swallowed it
    error    = |W' - (W + delta)| / |delta|          what rounding added, in units of the adapter
    steps    = rms(delta) / rms(step)                step: distance of neighbouring NVFP4 values at each weight. A delta well
                                                     below half a step moves few weights, or none

On a probe set, the logits of base, adapter and merged model take the place of W, W + delta and W'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..fusion.probe import modes_kept
from ..numerics.formats import BLOCK, QuantizedMatrix

KEPT_WELL = 0.5
"""Below this share of the adapter, a merge is called a near no-op."""

DROWNED = 1.0
"""Above this many times the adapter's own size, what rounding added drowns it."""


@dataclass
class Retention:
    """What is left of a change, as sums that can be added over layers and batches; the module's docstring defines the ratios.

    Attributes:
        along: <W' - W, delta>.
        size: <delta, delta>.
        lost: |W' - (W + delta)|^2.
        norm: |W|^2.
    """

    along: float = 0.0
    size: float = 0.0
    lost: float = 0.0
    norm: float = 0.0

    @classmethod
    def between(cls, before: Tensor, wanted: Tensor, after: Tensor) -> Retention:
        """Of W, W + delta and W', tensors of one shape in float32; sums are in float64."""
        delta = wanted - before
        products = ((after - before) * delta, delta.square(), (after - wanted).square(), before.square())
        return Retention(*(product.sum(dtype=torch.float64).item() for product in products))

    def __add__(self, other: Retention) -> Retention:
        return Retention(self.along + other.along, self.size + other.size, self.lost + other.lost, self.norm + other.norm)

    @property
    def effect(self) -> float:
        return (self.size / self.norm) ** 0.5 if self.norm else float("inf") if self.size else 0.0

    @property
    def retained(self) -> float:
        """1 where the adapter adds nothing."""
        return self.along / self.size if self.size else 1.0

    @property
    def error(self) -> float:
        """0 where the adapter adds nothing."""
        return (self.lost / self.size) ** 0.5 if self.size else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The ratios, and what else there is, without the sums."""
        fields = {name: value for name, value in vars(self).items() if name not in ("along", "size", "lost", "norm")}
        return fields | {"effect": self.effect, "retained": self.retained, "error": self.error}


@dataclass(kw_only=True)
class LayerReport(Retention):
    """What is left of the adapter of one layer.

    Attributes:
        name: dotted name, without the adapter's wrapping.
        stored: format of the merged weight.
        changed: share of weights whose stored value is another one now.
        steps: see the module's docstring; None where the weight is not stored in NVFP4.
    """

    name: str
    stored: str
    changed: float
    steps: float | None = None


@dataclass(kw_only=True)
class ProbeReport(Retention):
    """What is left of the adapter's effect on the logits of a probe set.

    Attributes:
        positions: tokens whose logits were compared.
        same_choice: share of positions at which merged and adapter prefer the same token.
        changed_choice: share of positions at which the adapter prefers another token than the base.
        kept_choice: of those, the share at which the merged model prefers the adapter's; None where there are none.
    """

    positions: int
    same_choice: float
    changed_choice: float
    kept_choice: float | None


@dataclass
class MergeReport:
    """What a merge did to an adapter.

    Attributes:
        to: format of the merged model.
        adapters: names of what was merged.
        merge_aware: they were trained with the merged weight, so that the merged model *is* what was trained.
        layers: one entry for every adapted layer.
        probe: on the logits, if there was a probe set.
        unequal_scales: groups of linears of one input (q/k/v, gate/up) whose global scales differ now: engines that fuse such
            linears need equal ones.
        warnings: what a user should know.
    """

    to: str
    adapters: list[str]
    merge_aware: bool = False
    layers: list[LayerReport] = field(default_factory=list)
    probe: ProbeReport | None = None
    unequal_scales: list[list[str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def weights(self) -> Retention:
        """Over all layers, each weighted by the square of its delta."""
        return sum(self.layers, Retention())

    @property
    def retained(self) -> float:
        """Of all weights; 1 where the adapter adds nothing."""
        return self.weights.retained

    @property
    def error(self) -> float:
        """Of all weights; 0 where the adapter adds nothing."""
        return self.weights.error

    @property
    def steps(self) -> float | None:
        """Root mean square over layers; None where nothing is stored in NVFP4."""
        known = [layer.steps for layer in self.layers if layer.steps is not None]
        return (sum(s * s for s in known) / len(known)) ** 0.5 if known else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        layers = [layer.as_dict() for layer in self.layers]
        total = {"retained": self.retained, "error": self.error, "steps": self.steps}
        return {**asdict(self), "layers": layers, "probe": self.probe and self.probe.as_dict(), "total": total}

    def __str__(self) -> str:
        aware = " (trained merge-aware: the merged model is the trained function)" if self.merge_aware else ""
        lines = [f"merged {', '.join(self.adapters)} into {self.to}{aware}"]
        steps = "" if self.steps is None else f"; its delta is {self.steps:.2f} rounding steps"
        lines.append(f"weights: {self.retained:.1%} of the adapter retained, error {self.error:.2f} x the adapter{steps}")
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


# ---------------------------------------------------------------------------------------------- weights


def rounding_step(q: QuantizedMatrix, values: Tensor) -> Tensor:
    """(R, K): distance from each of ``values`` = D(q) to the next larger NVFP4 magnitude under its block's scale (at 6, the next
    smaller)."""
    scale = q.scales.view(torch.float8_e4m3fn).float() * q.gscale[:, None]
    scale = scale.repeat_interleave(BLOCK, dim=1)[:, : q.k]
    magnitude = values.abs() / torch.where(scale > 0, scale, 1.0)
    return scale * torch.where(magnitude < 1.75, 0.5, torch.where(magnitude < 3.5, 1.0, 2.0))


def measure_layer(name: str, stored: str, before: Tensor, wanted: Tensor, after: Tensor, step: Tensor | None) -> LayerReport:
    """Compare W, W + delta and W', all of one shape, float32."""
    sums = Retention.between(before, wanted, after)
    steps = None if step is None else (sums.size / max(step.square().sum(dtype=torch.float64).item(), 1e-300)) ** 0.5
    changed = (after != before).float().mean().item()
    return LayerReport(**vars(sums), name=name, stored=stored, changed=changed, steps=steps)


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
    sums = sum(map(Retention.between, base, adapter, merged), Retention())
    of_base, of_adapter, of_merged = (torch.cat([batch.argmax(-1) for batch in batches]) for batches in (base, adapter, merged))
    changed, same = of_adapter != of_base, of_adapter == of_merged
    return ProbeReport(
        **vars(sums),
        positions=len(same),
        same_choice=same.double().mean().item(),
        changed_choice=changed.double().mean().item(),
        kept_choice=same[changed].double().mean().item() if changed.any() else None,
    )
