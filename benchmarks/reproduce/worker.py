"""One process that takes groups from the board and runs them, on several CUDA streams at once.

A 135M model's kernels are too small to fill a large GPU; so a worker keeps several *lanes*, each with a stream, a model and a
random state of its own. Each in turn replays a few recorded steps (:mod:`reproduce.recording`), and the GPU runs them side by
side. Lanes share nothing that a step writes to, and none waits for the device: what cannot go on yields.

    python -m reproduce.worker BOARD NAME OPTIONS        # started by reproduce.runner
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from environment import commit

from . import encoding
from .jobs import BEYOND, KEY, Board, Group, Runs, chosen_lr
from .methods import Workshop
from .recording import WAITING
from .scoring import Evaluation
from .tasks import TASKS
from .training import Pause, Recipe, Trainee, reset, train

MODELS = 4
"""A lane keeps: making one takes seconds."""
NEAR = 2
"""Tasks among which a lane looks for work for a model that it has, before it makes another."""
MARGIN = 3.0
"""Seconds before the end in which nothing is started, whatever the last run took."""
PATIENCE = 0.5
"""Seconds between two looks at the board."""
HOARD = 16 * 2**30
"""Bytes that PyTorch may hold without using them: forgotten recordings' memory is not given back by itself."""


@dataclass
class Options:
    """Attributes:
    lanes: at once in this process.
    until: UNIX time after which nothing is started; None: no end.
    layers, samples, length, graphs, shipped: of :class:`~reproduce.methods.Workshop`.
    """

    folder: str
    device: str
    lanes: int = 1
    until: float | None = None
    layers: int | None = None
    samples: int = 128
    length: int = 512
    graphs: bool = True
    shipped: str | None = None

    def workshop(self) -> Workshop:
        shipped = None if self.shipped is None else Path(self.shipped)
        return Workshop(Path(self.folder), self.device, self.layers, self.samples, self.length, self.graphs, shipped)


class Shelf:
    """Data of the tasks, encoded once for all lanes of a process."""

    def __init__(self, device: str):
        self.device = device
        self.kept: dict[tuple, Any] = {}

    def of(self, group: Group, tokenizer: Any) -> tuple[encoding.Encoded, Evaluation, Evaluation]:
        """(training set, validation, test)."""
        key = (group.task, group.rows)
        if key not in self.kept:
            task, rows = TASKS[group.task], group.rows
            splits = task.splits()
            made = [Evaluation.of(s[:rows], task, tokenizer, self.device) for s in (splits.validation, splits.test)]
            self.kept[key] = (encoding.training_set(splits.train, task, tokenizer, rows), *made)
            if self.device == "cuda":
                torch.cuda.current_stream().synchronize()  # made on one lane's stream, read on others
        return self.kept[key]


class Lane:
    """One model at work."""

    def __init__(self, board: Board, worker: str, number: int, options: Options, shelf: Shelf, workshop: Workshop):
        self.board, self.worker, self.id = board, worker, f"{worker}/{number}"
        self.options, self.shelf, self.workshop = options, shelf, workshop
        self.models: OrderedDict[tuple, Trainee] = OrderedDict()
        self.random = torch.get_rng_state()
        cuda = options.device == "cuda"
        self.stream = torch.cuda.Stream() if cuda else None
        self.capture = torch.cuda.Stream() if cuda else None
        self.pace = 0.0  # seconds of the last run, by its steps
        self.work = self.groups()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Streams and random state of this lane."""
        torch.set_rng_state(self.random)
        try:
            if self.stream is None:
                yield
            else:
                torch.cuda.graph.default_capture_stream = self.capture
                with torch.cuda.stream(self.stream):
                    yield
        finally:
            self.random = torch.get_rng_state()

    # -- choosing

    def late(self, steps: int = 0) -> bool:
        until = self.options.until
        return until is not None and time.time() + max(MARGIN, steps * self.pace) > until

    def next_group(self) -> Group | None:
        """The first that is free and ready; but one of the first tasks with free ones whose model is at hand comes before it."""
        ready = self.ready()
        near = list(dict.fromkeys((g.table, g.task) for g in ready))[:NEAR]
        at_hand = [g for g in ready if (g.weights, g.method.name) in self.models and (g.table, g.task) in near]
        for group in (*at_hand, *ready):
            if self.board.claim(group, self.id):
                return group
        return None

    def free(self) -> list[Group]:
        runs, claimed = self.board.runs(), self.board.claimed()
        return [g for g in self.board.plan() if g.name not in claimed and runs.left(g)]

    def ready(self) -> list[Group]:
        """Those that are free, without those that wait for their calibration."""
        return [g for g in self.free() if self.workshop.calibrated(g.weights, g.method.calibration)]

    # -- working

    def groups(self) -> Generator[bool | None, None, None]:
        while not self.late():
            group = self.next_group()
            if group is None:
                if not self.free():
                    return
                again = time.time() + PATIENCE  # for a calibration, or for what another lane gives back
                while time.time() < again:
                    yield WAITING
                continue
            try:
                yield from self.one_group(group)
                self.board.finished(group)
            except Exception as error:
                self.board.failed(group.name, traceback.format_exc())
                print(f"{self.id}: {group.name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                self.drop_models()
                if _fatal(error):
                    raise

    def drop_models(self) -> None:
        while self.models:
            self.models.popitem()[1].release()
        self.tidy()

    def tidy(self) -> None:
        """Give memory back; only where it is much, since this waits for the device."""
        if self.options.device == "cuda" and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > HOARD:
            torch.cuda.empty_cache()

    def trainee(self, group: Group) -> Trainee:
        key = (group.weights, group.method.name)
        for other, trainee in self.models.items():
            if other != key:
                trainee.forget_recordings()
        self.tidy()
        if key not in self.models:
            while len(self.models) >= MODELS:
                self.models.popitem(last=False)[1].release()
            self.models[key] = self.workshop.trainee(group.method, group.weights)
        self.models.move_to_end(key)
        return self.models[key]

    def one_group(self, group: Group) -> Generator[bool | None, None, None]:
        trainee = self.trainee(group)
        yield
        data, validation, test = self.shelf.of(group, trainee.tokenizer)
        runs = self.board.runs()
        if group.table == "accuracy" and not runs.find(group, "zero_shot", None, None):
            yield from self.zero_shot(group, trainee, test)
        while (lr := chosen_lr(group, runs)) is None:
            swept = runs.swept(group)
            lr = next((lr for lr in group.lrs if lr not in swept), BEYOND)
            for seed in group.sweep_seeds:
                if runs.find(group, "sweep", lr, seed) is None:
                    if self.late(group.steps):
                        return
                    yield from self.run(group, trainee, data, validation, "sweep", lr, seed, runs)
        for seed in group.seeds:
            if runs.find(group, "final", lr, seed) is None:
                if self.late(group.steps):
                    return
                yield from self.run(group, trainee, data, test, "final", lr, seed, runs)

    def zero_shot(self, group: Group, trainee: Trainee, test: Evaluation) -> Generator[bool | None, None, None]:
        reset(trainee.model, 0)
        result = yield from test.run(trainee)
        self.record(group, "zero_shot", None, None, result, Runs())

    def run(self, group, trainee, data, split, kind, lr, seed, runs: Runs) -> Generator[bool | None, None, None]:
        start = time.time()
        recipe = Recipe(lr, seed, group.steps, group.batch, curve=group.curve)

        def held_out(t: Trainee):
            return split.run(t, answers=False)

        pause = None
        if group.curve:  # long enough to be cut off: it goes on from here in another session, and what there is counts as it is
            pause = Pause(self.late, Path(self.options.folder) / "paused" / f"{group.name}.{seed}.pt")
        result = yield from train(trainee, data, recipe, held_out, pause)
        trained = time.time() - start
        if result["steps"] < group.steps:
            if result["steps"]:
                self.record(group, kind, lr, seed, result | {"train_s": trained, "planned": group.steps}, runs)
            return
        answers = kind == "final" and not group.curve
        scores = yield from split.run(trainee, answers=answers)
        if kind == "sweep":
            scores = {"validation_nll": scores["nll"], "validation_accuracy": scores.get("accuracy")}
        seconds = time.time() - start
        self.pace = seconds / group.steps
        result |= scores | {"train_s": trained, "seconds": seconds, "recorded": trainee.step.piece.why_not is None}
        self.record(group, kind, lr, seed, result, runs)

    def record(self, group: Group, kind: str, lr, seed, result: dict, runs: Runs) -> None:
        made = {"label": group.method.label, "commit": commit()}  # a table may be of several sessions
        row = dict(zip(KEY, group.key(kind, lr, seed))) | made | _rounded(result)
        runs.add(row)
        self.board.record(self.worker, row)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def _fatal(error: Exception) -> bool:
    """After an error of the device itself nothing else in this process would work; memory that ran out can be had again."""
    return "CUDA error" in str(error) and not isinstance(error, torch.OutOfMemoryError)


def work(board: Board, worker: str, options: Options, tick: Callable[[], None] = lambda: None) -> None:
    """Until nothing is left, or the time is over. ``tick`` is called now and then."""
    shelf, workshop = Shelf(options.device), options.workshop()
    lanes = [Lane(board, worker, i, options, shelf, workshop) for i in range(options.lanes)]
    while lanes:
        idle = True
        for lane in list(lanes):
            with lane.at_work():
                try:
                    idle &= next(lane.work) is WAITING
                except StopIteration:
                    lane.drop_models()
                    lanes.remove(lane)
        if idle:
            time.sleep(0.001)
        tick()


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    board, worker, options = Board(Path(sys.argv[1])), sys.argv[2], Options(**json.loads(sys.argv[3]))
    if worker.startswith("calibrate:"):
        _, weights, name = worker.split(":")
        import texts

        from . import sources

        paths = [sources.path_of(file) for file in ("c4_demo.jsonl", "wiki_demo.txt")]
        options.workshop().calibrate(weights, name, texts.split(paths)[0])
    else:
        work(board, worker, options)


if __name__ == "__main__":
    main()
