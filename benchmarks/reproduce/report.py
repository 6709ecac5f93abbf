"""Writes ``benchmarks/REPORT.md`` from the template ``report.md.j2``: what was measured, with the paper's figures beside it.

    python benchmarks/reproduce/report.py            # no GPU; the tests fail while page and results differ

All figures come from the result files in ``results/`` (:mod:`reproduce.run_log`) and from ``paper.yaml``; the template has prose
and the simple tables. Plots go to ``results/reproduce/``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

import jinja2
import roofline

from reproduce import costs, plots, tables, verdict
from reproduce.image_text import METHODS as IMAGE_METHODS
from reproduce.run_log import read
from reproduce.tables import Scores

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE.parent / "results", HERE.parent / "REPORT.md"
MODULES = ("accuracy", "ablations", "long_run", "memory", "step_time")
IMAGES = "image_text"
"""Of Table 4: no real model for it is at hand, so the page is whole without it."""
SEVEN = "seven_tasks"
"""Of the question by its rule; the page is whole before its runs are made."""


class Results:
    """Content of the result files: those of this folder by the script's name, others by the file's."""

    def __init__(self, folder: Path = RESULTS):
        self.folder = folder

    def __getitem__(self, name: str) -> dict:
        """
        Raises:
            FileNotFoundError: the page is not whole without the file.
        """
        if name not in (*MODULES, IMAGES, SEVEN):
            return json.loads((self.folder / name).read_text(encoding="utf-8"))
        content = read(self.folder / "reproduce", name) or ({"runs": []} if name in (IMAGES, SEVEN) else None)
        if content is None:
            raise FileNotFoundError(f"no {name}.json in {self.folder / 'reproduce'}; benchmarks/reproduce/{name}.py makes it")
        return content


def links(names: Iterable[str]) -> str:
    return ", ".join(f"[`{name}`](results/{name})" for name in names)


def made_by(name: str) -> str:
    """The line below a table of this folder's scripts: command and result file."""
    return f"`python benchmarks/reproduce/{name}.py` → {links([f'reproduce/{name}.json'])}"


def unfinished(not_finished: Iterable[str]) -> list[str]:
    """What of a plan is missing, by task and weights; names: table.task.weights.method.hash."""
    missing: dict[str, list[str]] = {}
    for name in not_finished:
        place, method, _ = name.partition(".")[2].rsplit(".", 2)
        missing.setdefault(place.replace(".", ", ", 1), []).append(f"`{method}`")
    return [f"{place}: {', '.join(methods)}" for place, methods in missing.items()]


def page(file: Results | None = None) -> str:
    file = file or Results()
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    jinja.globals.update(costs=costs, paper=tables.PAPER, tables=tables, roofline=roofline, links=links, made_by=made_by)
    jinja.globals.update(fixed=tables.number, signed=tables.signed, plus_minus=tables.plus_minus)
    return jinja.get_template("report.md.j2").render(
        file=file,
        trained={weights: Scores(file["accuracy"], weights) for weights in ("shipped", "rotated")},
        ablations=Scores(file["ablations"]),
        unfinished=unfinished(file["ablations"].get("not_finished", ())),
        long_run=Scores(file["long_run"]),
        seven_tasks=verdict.page(file[SEVEN]),
        image_text=tables.images(file[IMAGES], IMAGE_METHODS),
        memory=file["memory"],
        step_time=file["step_time"],
        largest_batch={r["case"]: r.get("largest_batch") for r in file["memory"]["largest"] if r["cap_gib"] == 16.0},
        modules=[*MODULES, *(name for name in (IMAGES, SEVEN) if file[name]["runs"])],
    )


def draw(file: Results, folder: Path) -> None:
    """The plots that the page shows."""
    plots.memory(file["memory"], folder / "memory.png")
    plots.times(file["step_time"], folder / "step_time.png")
    plots.curves(Scores(file["long_run"]), folder / "long_run.png")
    for weights in ("shipped", "rotated"):
        plots.differences(Scores(file["accuracy"], weights), folder / f"accuracy_{weights}.png")
    plots.clock(Scores(file["accuracy"]), file["step_time"], folder / "clock.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-plots", action="store_true")
    args = parser.parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    if not args.no_plots:
        draw(Results(), RESULTS / "reproduce")


if __name__ == "__main__":
    main()
