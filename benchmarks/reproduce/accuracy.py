"""The paper's accuracy tables (2 and 3) with this package's backends: every method on every task.

    python benchmarks/reproduce/accuracy.py --plan --rate 400            # how much that is, and when what is done
    python benchmarks/reproduce/accuracy.py --seconds 550 --work /tmp/w  # all GPUs there are; again: goes on where it stopped
    python benchmarks/reproduce/accuracy.py --with long_run ablations --seconds 550 --work /tmp/w
    python benchmarks/reproduce/accuracy.py --small                      # 2 steps of a cut model on a CPU: does it run?
    python benchmarks/reproduce/accuracy.py --tasks sst2 rte boolq_hub   # the paper's own data sets, from a hub

A method's learning rate on a task is the one of 3e-4, 7e-4, 1.5e-3 (3e-3 as well if that was best) with the least validation loss
in a run whose seed is not among those that count. Then five seeds at that rate: all of them are in the table. Task by task, on
the shipped weights and on the rotated ones, so that a plan that is cut off leaves whole columns of both tables. Data and model:
``python -m reproduce.sources`` and ``python examples/smollm2_reviews.py fetch``. Results: ``results/reproduce/accuracy.json``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # in place of this folder, whose modules are a package's

from reproduce import ablations, long_run, tasks  # noqa: E402
from reproduce.jobs import GRID, Group  # noqa: E402
from reproduce.methods import DEFAULT, METHODS  # noqa: E402
from reproduce.runner import add_arguments, adjusted, execute, parse_weights, settle  # noqa: E402

TABLE = "accuracy"


def groups(args: argparse.Namespace) -> list[Group]:
    """Task by task, for each task both sets of weights, and for these all methods."""
    return [
        Group(TABLE, task, weights, METHODS[method], lrs=tuple(args.lrs))
        for task in args.tasks
        for weights in args.weights
        for method in args.methods
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parse_weights(parser)
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, default=list(tasks.DEFAULT))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(DEFAULT))
    parser.add_argument("--lrs", nargs="+", type=float, default=list(GRID), help="of the sweep; a single one is taken as it is")
    parser.add_argument("--with", dest="others", nargs="*", default=[], choices=["ablations", "long_run"], help="in one go")
    args = settle(parser.parse_args())
    plan = groups(args)
    if "long_run" in args.others:
        plan += long_run.groups()
    if "ablations" in args.others:
        plan += ablations.groups(args.out)
    settings = {"lrs": list(args.lrs), "layers": args.layers, "calibration": list(args.calibration), "weights": args.weights}
    execute(adjusted(plan, args), args, settings)


if __name__ == "__main__":
    main()
