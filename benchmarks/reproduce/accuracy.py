"""The paper's accuracy tables (2 and 3) with this package's backends: every method on every task.

    python benchmarks/reproduce/accuracy.py --out OUT --work WORK      # again: goes on where it stopped
    python benchmarks/reproduce/accuracy.py --small                    # 2 steps of a cut model on a CPU: does it run?
    python benchmarks/reproduce/accuracy.py --tasks sst2 rte boolq_hub # the paper's own data sets, from a hub

A method's learning rate on a task is the one of 3e-4, 7e-4, 1.5e-3 (3e-3 as well if that was best) with the least validation loss
in a run whose seed is not among those that count. Then five seeds at that rate: all of them are in the table. Data and model:
``python benchmarks/reproduce/sources.py FOLDER`` and ``python examples/smollm2_reviews.py fetch``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # in place of this folder, whose modules are a package's

from reproduce.methods import DEFAULT, METHODS, WEIGHTS  # noqa: E402
from reproduce.runner import GRID, Group, text_command  # noqa: E402
from reproduce.tasks import DEFAULT as DEFAULT_TASKS  # noqa: E402
from reproduce.tasks import TASKS  # noqa: E402

TABLE = "accuracy"
OPTIONS = (
    ("--weights", dict(nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="rotated: off the 4-bit grid")),
    ("--tasks", dict(nargs="+", choices=TASKS, default=list(DEFAULT_TASKS))),
    ("--methods", dict(nargs="+", choices=METHODS, default=list(DEFAULT))),
    ("--lrs", dict(nargs="+", type=float, default=list(GRID), help="of the sweep; a single one is taken as it is")),
)


def groups(args) -> list[Group]:
    """Task by task, for each task both sets of weights, and for these all methods."""
    return [
        Group(TABLE, task, weights, METHODS[method], lrs=tuple(args.lrs), zero_shot=True)
        for task in args.tasks
        for weights in args.weights
        for method in args.methods
    ]


def main(argv: Sequence[str] | None = None) -> None:
    text_command(__doc__, groups, argv, *OPTIONS)


if __name__ == "__main__":
    main()
