"""How much of an adapter survives a merge: measured per layer, and on the logits of a probe set.

W is the weight under the adapter, delta = s B A what the adapter adds, W' what is stored after merging. Then

    retained = <W' - W, delta> / <delta, delta>      1: all of it is there; 0: rounding swallowed it
    error    = |W' - (W + delta)| / |delta|          what rounding added, in units of the adapter
    steps    = rms(delta) / rms(step)                step: distance of neighbouring NVFP4 values at each weight. A delta well
                                                     below half a step moves few weights, or none

and likewise on a probe set, with the logits of base and adapter in place of W and W + delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.formats import BLOCK, QuantizedMatrix

KEPT_WELL = 0.5
"""Below this share of the adapter, a merge is called a near no-op."""

DROWNED = 1.0
"""Above this many times the adapter's own size, what rounding added drowns it."""


@dataclass
class LayerRetention:
    """Of one linear.

    Attributes:
        name: dotted name, without the adapter's wrapping.
        stored: format of the merged weight.
        delta: |delta| / |W|.
        retained, error, steps: see the module's docstring; ``steps`` is None where the weight is not stored in NVFP4.
        changed: share of weights whose stored value is another one now.
    """

    name: str
    stored: str
    delta: float
    retained: float
    error: float
    changed: float
    steps: float | None = None
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)  # <W' - W, delta>, <delta, delta>, |W' - W - delta|^2

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "sums"}


@dataclass
class ProbeRetention:
    """On the logits of a probe set.

    Attributes:
        positions: tokens whose logits were compared.
        effect: |adapter - base| / |base|, of the logits.
        retained, error: as for weights.
        same_choice: share of positions at which merged and adapter prefer the same token.
        changed_choice: share of positions at which the adapter prefers another token than the base.
        kept_choice: of those, the share at which the merged model prefers the adapter's; None where there are none.
    """

    positions: int
    effect: float
    retained: float
    error: float
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
    layers: list[LayerRetention] = field(default_factory=list)
    probe: ProbeRetention | None = None
    unequal_scales: list[list[str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def retained(self) -> float:
        """Over all layers, each weighted by the square of its delta. 1 where the adapter adds nothing."""
        along, size, _ = map(sum, zip(*(layer.sums for layer in self.layers)))
        return along / size if size else 1.0

    @property
    def error(self) -> float:
        """Over all layers; 0 where the adapter adds nothing."""
        _, size, error = map(sum, zip(*(layer.sums for layer in self.layers)))
        return (error / size) ** 0.5 if size else 0.0

    @property
    def steps(self) -> float | None:
        """Root mean square over layers; None where nothing is stored in NVFP4."""
        known = [layer.steps for layer in self.layers if layer.steps is not None]
        return (sum(s * s for s in known) / len(known)) ** 0.5 if known else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        total = {"retained": self.retained, "error": self.error, "steps": self.steps}
        layers = [layer.as_dict() for layer in self.layers]
        return {**asdict(self), "layers": layers, "total": total}

    def __str__(self) -> str:
        aware = " (trained merge-aware: the merged model is the trained function)" if self.merge_aware else ""
        lines = [f"merged {', '.join(self.adapters)} into {self.to}{aware}"]
        steps = "" if self.steps is None else f"; its delta is {self.steps:.2f} rounding steps"
        lines.append(f"weights: {self.retained:.1%} of the adapter retained, error {self.error:.2f} x the adapter{steps}")
        worst = sorted(self.layers, key=lambda layer: layer.retained)[:3]
        lines += [
            f"  {layer.name}: {layer.retained:.1%}, error {layer.error:.2f}, {layer.changed:.1%} changed" for layer in worst
        ]
        if self.probe is not None:
            p = self.probe
            lines.append(
                f"logits ({p.positions} positions): {p.retained:.1%} of the adapter's effect retained, error {p.error:.2f} x the "
                f"effect; same choice as the adapter at {p.same_choice:.1%}"
            )
        return "\n".join(lines + [f"warning: {w}" for w in self.warnings])


# ---------------------------------------------------------------------------------------------- weights


def rounding_step(q: QuantizedMatrix, values: Tensor) -> Tensor:
    """(R, K): distance from each of ``values`` = D(q) to the next larger NVFP4 magnitude under its block's scale (at 6, the next
    smaller)."""
    scale = q.scales.view(torch.float8_e4m3fn).float() * q.gscale[:, None]
    scale = scale.repeat_interleave(BLOCK, dim=1)[:, : q.k]
    magnitude = values.abs() / torch.where(scale > 0, scale, 1.0)
    return scale * torch.where(magnitude < 1.75, 0.5, torch.where(magnitude < 3.5, 1.0, 2.0))


def measure_layer(name: str, stored: str, before: Tensor, dense: Tensor, after: Tensor, step: Tensor | None) -> LayerRetention:
    """Compare W, W + delta and W', all of one shape, float32."""
    delta, survived = dense - before, after - before
    along, size = (survived * delta).sum(dtype=torch.float64).item(), delta.square().sum(dtype=torch.float64).item()
    error = (after - dense).square().sum(dtype=torch.float64).item()
    norm = before.square().sum(dtype=torch.float64).item()
    return LayerRetention(
        name,
        stored,
        delta=(size / norm) ** 0.5 if norm else float("inf") if size else 0.0,
        retained=along / size if size else 1.0,
        error=(error / size) ** 0.5 if size else 0.0,
        changed=(after != before).float().mean().item(),
        steps=None if step is None else (size / max(step.square().sum(dtype=torch.float64).item(), 1e-300)) ** 0.5,
        sums=(along, size, error),
    )


# ---------------------------------------------------------------------------------------------- logits


def as_batches(probe: Any) -> list[Any]:
    """A probe set as a list of batches: it may be a batch, which is a tensor (of token ids) or a mapping of tensors."""
    batches = [probe] if isinstance(probe, Tensor | Mapping) else list(probe)
    if not batches or not all(isinstance(batch, Tensor | Mapping) for batch in batches):
        raise ValueError("probe is a tensor of token ids, a batch (mapping of tensors), or a list of those, and not empty")
    return batches


@torch.no_grad()
def probe_logits(model: nn.Module, batches: Iterable[Any]) -> list[Tensor]:
    """(positions, vocabulary) float32 on the CPU of every batch; padding, by its attention mask, left out."""
    device = next(p.device for p in model.parameters())
    found = []
    with evaluating(model):
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
            found.append(kept.reshape(-1, logits.shape[-1]).float().cpu())
    return found


@contextmanager
def evaluating(model: nn.Module):
    """Within the context the model is in evaluation mode; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def compare_logits(base: list[Tensor], adapter: list[Tensor], merged: list[Tensor]) -> ProbeRetention:
    """From the logits of the same batches."""
    along = size = error = norm = 0.0
    positions = same = changed = kept = 0
    for b, a, m in zip(base, adapter, merged):
        effect = a - b
        along += ((m - b) * effect).sum(dtype=torch.float64).item()
        size += effect.square().sum(dtype=torch.float64).item()
        error += (m - a).square().sum(dtype=torch.float64).item()
        norm += b.square().sum(dtype=torch.float64).item()
        choice, of_base, of_merged = a.argmax(-1), b.argmax(-1), m.argmax(-1)
        other = choice != of_base
        positions, same = positions + len(choice), same + (choice == of_merged).sum().item()
        changed, kept = changed + other.sum().item(), kept + (other & (choice == of_merged)).sum().item()
    return ProbeRetention(
        positions,
        effect=(size / norm) ** 0.5 if norm else 0.0,
        retained=along / size if size else 1.0,
        error=(error / size) ** 0.5 if size else 0.0,
        same_choice=same / positions,
        changed_choice=changed / positions,
        kept_choice=kept / changed if changed else None,
    )
