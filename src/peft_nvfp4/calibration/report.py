"""What a calibration did: errors per layer against rounding to nearest, time and memory, as JSON and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPORT = "report"
KEYS = ("w4a4", "w4a16", "weight")
TITLES = {"w4a4": "output, W4A4", "w4a16": "output, W4A16", "weight": "weight"}


@dataclass
class Report:
    """Attributes:
    settings: of the calibration.
    device: where it ran.
    tokens: of calibration, without padding: fewer than asked for, where the data held fewer.
    layers: dotted name -> {"linears": {name: errors in per cent}, "seconds", "peak_gib", "sites", "not_reached"}.
    survey: list of layers -> the measured sites, where terms were chosen under a budget.
    dense: planned linears outside of the calibrated layers, left as they were.
    """

    settings: dict[str, Any]
    device: str = "cpu"
    tokens: int = 0
    layers: dict[str, dict] = field(default_factory=dict)
    survey: dict[str, list[dict]] = field(default_factory=dict)
    dense: list[str] = field(default_factory=list)

    @staticmethod
    def summary(row: dict) -> str:
        """One line on one layer: mean W4A4 output error, against rounding to nearest."""
        rows = [r for r in row["linears"].values() if "w4a4" in r]
        if not rows:
            return ""
        ours, nearest = (sum(r[key] for r in rows) / len(rows) for key in ("w4a4", "w4a4_nearest"))
        return f"W4A4 error {ours:.1f} % (to nearest {nearest:.1f} %)"

    def means(self) -> dict[str, float]:
        """Every error, averaged over all linears."""
        rows = [r for layer in self.layers.values() for r in layer["linears"].values()]
        keys = [key for key in (*KEYS, *(f"{k}_nearest" for k in KEYS), "a4") if any(key in r for r in rows)]
        return {key: sum(r[key] for r in rows if key in r) / sum(key in r for r in rows) for key in keys}

    def __str__(self) -> str:
        means, seconds = self.means(), sum(row.get("seconds", 0) for row in self.layers.values())
        lines = [f"{len(self.layers)} layers in {seconds:.0f} s on {self.device}, {self.tokens:,} tokens of calibration"]
        lines += [
            f"{TITLES[key]} error: {means[key]:.2f} % (to nearest {means[f'{key}_nearest']:.2f} %)"
            for key in KEYS
            if key in means
        ]
        if self.dense:
            lines.append(f"left dense: {len(self.dense)} linears outside of these layers ({self.dense[0]}, ...)")
        return "\n".join(lines)

    def save(self, folder: Path) -> None:
        """``report.json``, and ``report.png`` where matplotlib is installed."""
        content = {**asdict(self), "means": self.means()}
        (folder / f"{REPORT}.json").write_text(json.dumps(content, indent=1) + "\n")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return
        self._draw(Figure(figsize=(11, 7.5), layout="constrained")).savefig(folder / f"{REPORT}.png", dpi=120)

    def _draw(self, figure):
        """One panel per error, one line per linear name; dashed: to nearest."""
        axes = figure.subplots(2, 2).flat
        names = list(dict.fromkeys(n for row in self.layers.values() for n in row["linears"]))
        for axis, key in zip(axes, KEYS):
            for number, n in enumerate(names):
                for style, suffix in (("-", ""), (":", "_nearest")):
                    values = [row["linears"].get(n, {}).get(key + suffix, float("nan")) for row in self.layers.values()]
                    axis.plot(values, style, color=f"C{number % 10}", label=None if suffix else n.rpartition(".")[2], lw=1.2)
            axis.set(title=f"{TITLES[key]} error, % (dotted: to nearest)", xlabel="layer", ylim=(0, None))
        axes = list(figure.axes)
        axes[0].legend(fontsize=7, ncols=2)
        rows = list(self.layers.values())
        axes[3].bar(range(len(rows)), [row.get("seconds", 0) for row in rows], color="0.7")
        axes[3].set(title="seconds (bars), peak GiB (line)", xlabel="layer")
        axes[3].twinx().plot([row.get("peak_gib", 0) for row in rows], color="C3")
        return figure
