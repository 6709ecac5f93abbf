"""Heat maps of quantisation statistics: layers down, linears across, one panel for each kind of tensor (needs matplotlib)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .statistics_hooks import NUMBERS, SITES

if TYPE_CHECKING:
    from .statistics import Statistics

PERCENT = NUMBERS[:3]
TITLES = {"weight": "weight", "input": "input activation", "gradient": "incoming gradient"}


def short(name: str) -> str:
    """A layer's name without what all of them begin with."""
    return re.sub(r"^(model\.)*(language_model\.|text_model\.)?(layers\.)?", "", name)


def place(name: str) -> tuple[str, str]:
    """(row, column) of a linear in the heat map: its layer (all before it, where none has a number), and its last name."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    above, _, last = name.rpartition(".")
    return numbered[0] if numbered else above, last


def grid(found: Statistics, site: str, number: str) -> tuple[list[str], list[str], list[list[float]]]:
    """(rows, columns, values, NaN where there is no such linear) of one heat map. In the order of the model."""
    values = {place(name): value for name, value in found.of(site, number).items()}
    rows, columns = list(dict.fromkeys(r for r, _ in values)), list(dict.fromkeys(c for _, c in values))
    return rows, columns, [[values.get((r, c), float("nan")) for c in columns] for r in rows]


def heat_map(found: Statistics, path: str | Path | BinaryIO, number: str = "error") -> None:
    """One panel for each kind of tensor, layers down, linears across.

    Raises:
        ValueError: nothing to draw.
    """
    from matplotlib.figure import Figure

    if number not in PERCENT:
        raise ValueError(f"a heat map shows one of {', '.join(PERCENT)}, got {number!r}")
    panels = [(site, *grid(found, site, number)) for site in SITES if found.of(site, number)]
    if not panels:
        raise ValueError(f"nothing was measured that has {number}")
    height = max(3.0, 1.8 + 0.26 * max(len(rows) for _, rows, _, _ in panels))
    figure = Figure(figsize=(1.2 + 3.6 * len(panels), height), layout="constrained")
    for axes, (site, rows, columns, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        image = axes.imshow([[100 * v for v in row] for row in values], aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=axes, format="%.3g").ax.tick_params(labelsize=8)
        axes.set_xticks(range(len(columns)), [c.removesuffix("_proj") for c in columns], rotation=45, ha="right", fontsize=8)
        step, first = -(-len(rows) // 40), site == panels[0][0]
        shown = _layer_labels(rows)[::step] if first or rows != panels[0][1] else []
        axes.set_yticks(range(0, len(rows), step) if shown else [], shown, fontsize=8)
        axes.set_title(f"{TITLES[site]}: {number}, %", fontsize=10)
        axes.set_ylabel("layer" if first else "")
    figure.savefig(path, dpi=130)


def _layer_labels(rows: list[str]) -> list[str]:
    """Numbers, where all layers are of one tower."""
    towers = {row.rpartition(".")[0] for row in rows}
    return [row.rpartition(".")[2] if len(towers) == 1 else short(row) for row in rows]
