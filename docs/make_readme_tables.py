"""Figures in README and these pages, made from results files and from the estimator.

    python docs/make_readme_tables.py          # writes them into the pages

A page marks where a table goes, and the script replaces what lies between the two marks:

    <!-- made by docs/make_readme_tables.py: NAME -->
    <!-- end -->

NAME is a function of one of the modules beside it whose names end in ``_tables``. A test compares the pages with what the script
makes.
"""

from __future__ import annotations

import re
from pathlib import Path

from fit_tables import fits, fits_all, longest_rows
from measured_tables import (
    ROOT,
    accuracies,
    demo,
    dropin,
    dropin_all,
    estimator,
    larger,
    loss_curve,
    perplexities,
    presets,
    roofline,
    steps,
)
from memory_tables import contexts, mixtures
from reinforcement_tables import grpo, rollouts

MARK = re.compile(r"(<!-- made by docs/make_readme_tables\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MEASURED = (dropin, dropin_all, steps, larger, presets, accuracies, perplexities, estimator, demo, loss_curve, roofline)
TABLES = {make.__name__: make for make in (*MEASURED, fits, fits_all, longest_rows, contexts, mixtures, grpo, rollouts)}


def pages() -> list[Path]:
    """Pages that have a mark."""
    return [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if MARK.search(page.read_text("utf-8"))]


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return MARK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def main() -> None:
    for page in pages():
        page.write_text(filled(page.read_text("utf-8")), encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
