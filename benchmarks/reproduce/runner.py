"""Runs groups of fine-tunings one after the other, in one process on one device.

A *group* is one method on one task. Its learning rate is chosen by a sweep on the validation split; then come the runs that
count, with other seeds. Each finished run is a line of a JSONL file (:mod:`reproduce.run_log`), and what that file has is not run
again: the same command goes on where it was stopped. A group that fails is reported at the end and costs the others nothing.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import common
import torch
from torch import nn

from . import scoring
from .methods import Method, Models
from .run_log import FOLDER, RunLog
from .tasks import GENERATED, TASKS
from .training import Encoded, Recipe, reset, token_losses, train, training_set

GRID = (3e-4, 7e-4, 1.5e-3)
BEYOND = 3e-3
"""Tried as well where the largest of the grid came out best."""
SWEEP_SEED = 100
"""Of the sweep's runs; it is not among those that count."""


@dataclass(frozen=True)
class Group:
    """Attributes:
    lrs: learning rates of the sweep; a single one is taken as it is.
    seeds: of the runs that count.
    curve: steps between two held-out scores (0: only at the end).
    rows: of training, validation and test data at most; None: the task's own.
    zero_shot: score the model before training as well.
    """

    table: str
    task: str
    weights: str
    method: Method
    lrs: tuple[float, ...] = GRID
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 200
    batch: int = 16
    curve: int = 0
    rows: int | None = None
    zero_shot: bool = False

    def key(self, kind: str, lr: float | None = None, seed: int | None = None) -> dict[str, Any]:
        """Fields that tell a run from all others."""
        found = {"table": self.table, "task": self.task, "weights": self.weights, "method": self.method.name, "kind": kind}
        steps = 0 if kind == "zero_shot" else self.steps
        return found | {"lr": lr, "seed": seed, "steps": steps, "batch": self.batch, "rows": self.rows}


def chosen_lr(group: Group, log: RunLog) -> float | None:
    """The learning rate with the least validation loss; None while the sweep is not finished."""
    if len(group.lrs) == 1:
        return group.lrs[0]
    swept = {}
    for lr in (*group.lrs, BEYOND):
        if row := log.find(group.key("sweep", lr, SWEEP_SEED)):
            swept[lr] = row["validation_nll"] if row["finite"] and row["validation_nll"] is not None else float("inf")
    if not set(group.lrs) <= swept.keys():
        return None
    best = min(swept, key=swept.get)
    return None if best == max(group.lrs) < BEYOND and BEYOND not in swept else best


def missing(group: Group, log: RunLog) -> list[tuple[str, float | None, int | None]]:
    """(kind, learning rate, seed) of the runs to do next: before training, the sweep, the runs that count."""
    runs: list[tuple[str, float | None, int | None]] = [("zero_shot", None, None)] if group.zero_shot else []
    lr = chosen_lr(group, log)
    if lr is None:
        runs += [("sweep", rate, SWEEP_SEED) for rate in group.lrs]
        if all(log.find(group.key(*run)) for run in runs):
            runs = [("sweep", BEYOND, SWEEP_SEED)]
    else:
        runs += [("final", lr, seed) for seed in group.seeds]
    return [run for run in runs if log.find(group.key(*run)) is None]


def run_group(group: Group, log: RunLog, lab: Any) -> None:
    """Whatever of the group's runs there is not yet. ``lab``: makes, trains and scores models, as :class:`TextLab`."""
    model = lab.adapted(group)
    while runs := missing(group, log):
        for kind, lr, seed in runs:
            start = time.perf_counter()
            result: dict[str, Any] = {}
            if kind == "zero_shot":
                reset(model, 0)
            else:
                result = lab.train(model, group, Recipe(lr, seed, group.steps, group.batch, curve=group.curve))
                result["train_s"] = time.perf_counter() - start
            scores = lab.score(model, group, "validation" if kind == "sweep" else "test")
            if kind == "sweep":
                scores = {"validation_nll": scores["nll"], "validation_accuracy": scores.get("accuracy")}
            result |= scores | {"seconds": time.perf_counter() - start}
            log.add(group.key(kind, lr, seed) | {"label": group.method.label} | result)
            shown = {name: round(value, 4) for name, value in result.items() if isinstance(value, float)}
            print(f"{group.table}, {group.task}, {group.weights}, {group.method.name}, {kind} {seed}: {shown}", flush=True)


def run_groups(groups: Sequence[Group], log: RunLog, lab: Any) -> list[str]:
    """Run them in order; the failures, by group."""
    failures = []
    for group in groups:
        if missing(group, log):
            try:
                run_group(group, log, lab)
            except Exception as error:  # another group may work
                traceback.print_exc()
                failures.append(f"{group.task}, {group.weights}, {group.method.name}: {type(error).__name__}: {error}")
            gc.collect()  # a model with an adapter refers to itself
            common.release(lab.device)
    return failures


class TextLab:
    """The packaged language model (or another one) on the tasks of :mod:`reproduce.tasks`."""

    def __init__(self, models: Models):
        self.models, self.device = models, models.device
        self.tokenizer: Any = None
        self.splits = cache(lambda task: TASKS[task].splits())
        self.training_set = cache(lambda task, rows: training_set(self.splits(task).train[:rows], TASKS[task], self.tokenizer))

    def adapted(self, group: Group) -> nn.Module:
        """A frozen model with an adapter."""
        model, self.tokenizer = self.models.adapted(group.method, group.weights)
        return model

    def train(self, model: nn.Module, group: Group, recipe: Recipe) -> dict:
        data = self.training_set(group.task, group.rows)

        def loss_of(batch: torch.Tensor) -> torch.Tensor:
            losses, _ = token_losses(model, Encoded(data.ids[batch], data.at[batch], data.labels[batch]), self.device)
            return losses.mean()

        return train(model, len(data), recipe, loss_of, lambda: self.score(model, group, "test", answers=False))

    def score(self, model: nn.Module, group: Group, split: str, answers: bool = True) -> dict:
        """``split``: ``validation`` (likelihoods only) or ``test`` (generated answers as well, if the task wants them)."""
        items, task = getattr(self.splits(group.task), split)[: group.rows], TASKS[group.task]
        found = scoring.likelihoods(model, items, task, self.tokenizer)
        if answers and split == "test" and task.kind == GENERATED and not group.curve:
            found |= scoring.answers(model, items, task, self.tokenizer)
        return found


def shared_arguments(doc: str) -> argparse.ArgumentParser:
    """What all tables' commands take."""
    parser = common.parser(doc)
    parser.set_defaults(out=FOLDER)
    parser.add_argument("--work", type=Path, help="folder of rotated weights and calibrations; kept if named")
    parser.add_argument("--calibration", type=int, nargs=2, default=(128, 512), metavar=("SAMPLES", "TOKENS"))
    parser.add_argument("--small", action="store_true", help="2 steps, 8 rows, one seed on the CPU: does it run?")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments, with ``--small`` as what it stands for and a folder in ``work``."""
    args = parser.parse_args(argv)
    if args.small:
        args.device, args.calibration = torch.device("cpu"), (4, 64)
        args.out = args.out if args.out != FOLDER else Path(tempfile.gettempdir()) / "peft_nvfp4_small"
    args.work = args.work or Path(tempfile.mkdtemp(prefix="reproduce_"))
    return args


def execute(groups: Sequence[Group], args: argparse.Namespace, lab: Any) -> None:
    """Run the groups of one table.

    Raises:
        SystemExit: a group failed; the message says which.
    """
    if args.small:
        tiny = {"steps": 2, "batch": 2, "rows": 8, "seeds": (0,)}
        groups = [replace(g, lrs=g.lrs[:1], curve=min(g.curve, 2), **tiny) for g in groups]
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path | torch.device)}
    log = RunLog(args.out, groups[0].table, settings)
    warnings.filterwarnings("ignore", message=".*tokens of calibration for linears")
    if failures := run_groups(groups, log, lab):
        raise SystemExit("\n".join(["failed:", *failures]))


def text_command(
    doc: str, plan: Callable[[argparse.Namespace], Sequence[Group]], argv: Sequence[str] | None, *options: tuple[str, dict]
) -> None:
    """A command over the text tasks. ``options``: further arguments, (name, what argparse takes)."""
    parser = shared_arguments(doc)
    parser.add_argument("--model", type=Path, help="folder of another model than SmolLM2-135M-Instruct")
    for name, named in options:
        parser.add_argument(name, **named)
    args = parse(parser, argv)
    execute(plan(args), args, TextLab(Models(args.work, args.device, 2 if args.small else None, *args.calibration, args.model)))
