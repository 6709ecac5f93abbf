"""The composition of memory as a picture (the paper's Figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .run import Estimate, estimate

GIB = 2**30
GROUPS = ("weights", "adapters and optimizer", "activations", "logits and loss", "workspace and temporary")
COLOURS = ("#4C72B0", "#55A868", "#DD8452", "#C44E52", "#8C8C8C")


def over_lengths(base: Estimate) -> list[Estimate]:
    """The same at sequences of half to four times the length."""
    sequence, positions = base.settings.sequence, base.settings.positions
    return [
        estimate(base.shape, replace(base.settings, sequence=n, positions=None if positions is None else min(positions, n)))
        for n in sorted({max(1, sequence // 2), sequence, 2 * sequence, 4 * sequence})
    ]


def png(estimates: Sequence[Estimate], labels: Sequence[str], path: str | Path, title: str, limit: int | None = None) -> None:
    """One stacked bar for each estimate; ``limit``: bytes of a line across (what a card holds)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.6 + 1.3 * len(estimates)), 4.6), layout="constrained")
    axes = figure.subplots()
    below = [0.0] * len(estimates)
    for group, colour in zip(GROUPS, COLOURS):
        heights = [e.groups().get(group, 0) / GIB for e in estimates]
        axes.bar(range(len(estimates)), heights, bottom=below, color=colour, label=group, width=0.65)
        below = [a + b for a, b in zip(below, heights)]
    for i, total in enumerate(below):
        axes.annotate(f"{total:.2f}", (i, total), ha="center", va="bottom", fontsize=9, xytext=(0, 2), textcoords="offset points")
    if limit is not None:
        axes.axhline(limit / GIB, color="black", linestyle="--", linewidth=1)
        axes.annotate("fits below", (-0.45, limit / GIB), va="bottom", fontsize=8, xytext=(0, 2), textcoords="offset points")
    axes.set_xticks(range(len(estimates)), labels)
    axes.set_xlim(-0.5, len(estimates) - 0.5)
    axes.set_ylabel("GPU memory at the peak of a step (GiB)")
    axes.set_title(title, fontsize=10)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=140)
