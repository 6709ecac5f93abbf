"""The report's plots, from the same data as its tables."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from .costs import GB, cases, clocked, composed, method, parts
from .tables import NATS, POINTS, REFERENCE, Scores


def curves(scores: Scores, path: Path) -> None:
    """A long run's training loss and gradient norm (means of 50 steps) and held-out loss over steps."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for run in scores.finals:
        curve = run["curve"]
        for axes, name in zip(panels, ("loss", "gradient_norm")):
            values = curve[name]
            window = max(1, min(50, len(values) // 4))
            means = [statistics.fmean(values[i : i + window]) for i in range(0, len(values) - window + 1, window)]
            axes.plot([window * (i + 0.5) for i in range(len(means))], means, label=run["label"], linewidth=1)
        points = [p for p in curve["held_out"] if p["step"]] or curve["held_out"]  # the untrained model would set the scale
        panels[2].plot([p["step"] for p in points], [p["nll"] for p in points], marker=".", label=run["label"])
    for axes, title in zip(panels, ("training loss", "gradient norm", "held-out nats per token")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels[2].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def differences(scores: Scores, path: Path) -> None:
    """Paired differences from BF16 LoRA by task, of the score and of nll, with standard errors."""
    methods = [m for m in scores.labels if m != REFERENCE]
    figure = Figure(figsize=(12, 1.5 + 0.35 * len(scores.tasks) * max(1, len(methods)) / 3), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, title, measure in zip(panels, ("points", "nats"), (POINTS, NATS)):
        for i, name in enumerate(methods):
            for j, task in enumerate(scores.tasks):
                if found := scores.difference(task, name, REFERENCE, measure):
                    y, error = j + (i - len(methods) / 2) * 0.8 / len(methods), 0 if math.isnan(found[1]) else found[1]
                    label = scores.labels[name] if j == 0 else None
                    axes.errorbar(found[0], y, xerr=error, fmt="o", color=f"C{i}", label=label, markersize=4)
        axes.axvline(0, color="gray", linewidth=1)
        axes.set_title(f"difference from BF16 LoRA, {title}")
    panels[0].set_yticks(range(len(scores.tasks)), scores.tasks)
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def clock(scores: Scores, times: dict, path: Path) -> None:
    """Average score over the seconds that the steps take (Figure 5)."""
    axes = (figure := Figure(figsize=(6, 3.8), layout="constrained")).subplots()
    for row in clocked(scores, times):
        if row["step_ms"]:
            error = row["difference"][1] if row["difference"] else 0.0
            axes.errorbar(row["seconds"], row["average"], yerr=0.0 if math.isnan(error) else error, fmt="o", label=row["label"])
    axes.set_xlabel("seconds of the steps, Llama-1B's shapes, 4 x 1024")
    axes.set_ylabel("average score, SmolLM2-135M")
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)


def memory(data: dict, path: Path) -> None:
    """Composition over length (Figure 1), and peak over batch at 1024 tokens."""
    stacks = {f"{method(r['case'])}, {r['seq']}": {name: n / GB for name, n in parts(r).items()} for r in composed(data)}
    peaks = [row | {"y": row["peak_allocated"] / GB} for row in data["peaks"] if row.get("peak_allocated")]
    _bars_and_lines(stacks, "GB", "batch 4: what the peak is made of, over sequence length", peaks, "GB", "peak", path)


def times(data: dict, path: Path) -> None:
    """The breakdown at the first point, and step time over batch at 1024 tokens."""
    stacks = {method(row["case"]): row["times_ms"] for row in data["times"] if "times_ms" in row}
    steps = [row | {"y": row["step_ms"]} for row in data["times"] if row.get("step_ms")]
    _bars_and_lines(stacks, "ms on the device", "where a step's time goes", steps, "ms", "step time", path)


def _bars_and_lines(
    stacks: dict[str, dict[str, float]], width: str, title: str, rows: list[dict], unit: str, what: str, path: Path
) -> None:
    """On the left a stacked bar for each title; on the right ``y`` of the rows of 1024 tokens, over the tokens of a step."""
    figure = Figure(figsize=(13, 2.5 + 0.17 * len(stacks)), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    titles = [name.replace("`", "") for name in stacks]
    left = [0.0] * len(titles)
    for part in next(iter(stacks.values()), {}):
        widths = [stack[part] for stack in stacks.values()]
        bars.barh(titles, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths)]
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=7)
    bars.set_xlabel(width)
    bars.set_title(title, fontsize=9)
    for case in cases(rows):
        found = sorted((r["batch"] * r["seq"], r["y"]) for r in rows if r["case"] == case and r["seq"] == 1024)
        if len(found) > 1:
            lines.plot(*zip(*found), marker="o", markersize=3, linewidth=1, label=method(case).replace("`", ""))
    lines.set_xlabel("tokens of a step (rows of 1024)")
    lines.set_ylabel(unit)
    lines.set_title(f"{what} over batch", fontsize=9)
    for axes in (bars, lines):
        axes.legend(fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
