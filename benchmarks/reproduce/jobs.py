"""Training runs as jobs for several processes on one device.

A *job* is some runs of one method on one task that are trained together (:mod:`reproduce.together`) and scored. The processes
share the device: while one of them issues launches, which is most of the time of a small model's step, another one computes. The
caller says which job comes next whenever there is room, and gets the rows of every finished one, so all that is known about
order, choice and time is with the caller.
"""

from __future__ import annotations

import fcntl
import gc
import math
import multiprocessing
import pickle
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from peft_nvfp4.lora.layer import FrozenLoraLinear

from . import scoring
from .methods import Method, Models, Text
from .tasks import GENERATED, TASKS, Splits, Task
from .together import Diverged, WideAdapters, together, train_together
from .training import Encoded, Recipe, training_set

TOKENS_ON_GPU = 131072
"""Of a batch of scoring, all runs together."""


KEPT = 4
"""Models that a process has at most."""


@dataclass(frozen=True)
class Job:
    """Attributes:
    task: a key of :data:`reproduce.tasks.TASKS`.
    sizes: rows of validation and test data that its splits are made with.
    split: ``validation`` or ``test``: what the trained runs are scored on.
    runs: (learning rate, seed) of each.
    rows: of training, validation and test data at most; None: the task's own.
    """

    task: str
    sizes: tuple[int, int]
    weights: str
    method: Method
    split: str
    runs: tuple[tuple[float, int], ...]
    steps: int = 200
    batch: int = 16
    rows: int | None = None

    @property
    def its_task(self) -> Task:
        return replace(TASKS[self.task], validation=self.sizes[0], test=self.sizes[1])

    def halves(self) -> tuple[Job, Job]:
        half = len(self.runs) // 2
        return replace(self, runs=self.runs[:half]), replace(self, runs=self.runs[half:])


@dataclass
class Outcome:
    """Attributes:
    rows: what was seen of each run, in the job's order.
    error: why there is nothing; empty if there is.
    """

    job: Job
    rows: list[dict[str, Any]]
    seconds: float
    error: str = ""


class Lab:
    """Runs jobs in this process; what it has made for one job is there for the next.

    Args:
        folder: of what is made once for all processes: rows, rotated weights, calibrations.
    """

    def __init__(self, models: Models, folder: Path):
        self.models, self.folder = models, folder
        self.device = models.device
        self.tokens = TOKENS_ON_GPU if self.device.type == "cuda" else scoring.TOKENS
        self.tokenizer: Any = None
        self.data = cache(self._data)
        self.adapters: dict[tuple[str, ...], WideAdapters] = {}
        self.prepared: dict[tuple[str, ...], float] = {}
        """Seconds in which a model was loaded, calibrated if nobody had done it before, and frozen."""

    def run(self, job: Job) -> Outcome:
        start = time.perf_counter()
        try:
            return Outcome(job, self._rows(job), time.perf_counter() - start)
        except Exception as error:  # the other jobs may work
            traceback.print_exc()
            return Outcome(job, [], time.perf_counter() - start, f"{type(error).__name__}: {error}"[:300])
        finally:
            self._release()

    def _rows(self, job: Job) -> list[dict[str, Any]]:
        """In halves where memory does not suffice for all runs, or one of them diverged."""
        try:
            return self._trained_and_scored(job)
        except Diverged:
            if len(job.runs) == 1:
                return [{"finite": False}]
        except torch.OutOfMemoryError:
            if len(job.runs) == 1:
                raise
        self._release()  # outside of the except block: its traceback holds the step's tensors
        return [row for half in job.halves() for row in self._rows(half)]

    def _release(self) -> None:
        """Give memory back, which other processes want."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _trained_and_scored(self, job: Job) -> list[dict[str, Any]]:
        adapters = self._adapters(job)
        task = job.its_task
        splits, rows = self.data(task)
        rows = Encoded(rows.ids[: job.rows], rows.at[: job.rows], rows.labels[: job.rows])
        recipes = [Recipe(lr, seed, job.steps, job.batch) for lr, seed in job.runs]
        start = time.perf_counter()
        seen = train_together(adapters, rows, recipes, self.device, job.method.ratio)
        trained = time.perf_counter()
        found = scores(adapters, getattr(splits, job.split)[: job.rows], task, self.tokenizer, self.tokens)
        times = {"train_s": trained - start, "score_s": time.perf_counter() - trained, "together": len(recipes)}
        made = {"weight_bytes": weight_bytes(adapters.model), "prepared_s": self.prepared[self._key(job)]}
        return [a | b | times | made for a, b in zip(seen, found)]

    def _adapters(self, job: Job) -> WideAdapters:
        key = self._key(job)
        if key not in self.adapters:
            start = time.perf_counter()
            text = Text(job.task, lambda: self._training_text(job)) if job.method.own_text else None
            with alone(self.folder):  # what several processes want is made once
                self.models.dense(job.weights)
                if job.method.calibration is not None:
                    self.models.calibration(job.weights, job.method.calibration, text)
            while len(self.adapters) >= KEPT:
                del self.adapters[next(iter(self.adapters))]
            model, self.tokenizer = self.models.adapted(job.method, job.weights, text)
            self.prepared[key] = time.perf_counter() - start
            self.adapters[key] = WideAdapters(model, drawn=job.method.starts_from is None)
        return self.adapters[key]

    @staticmethod
    def _key(job: Job) -> tuple[str, ...]:
        """What a model depends on."""
        return job.weights, job.method.name, *([job.task] if job.method.own_text else [])

    def _training_text(self, job: Job) -> list[str]:
        items = job.its_task.splits().train[: job.rows]
        return [f"{item.context}{item.question}{item.target}" for item in items]

    def _data(self, task: Task) -> tuple[Splits, Encoded]:
        """Rows of a task; from a file, if another process has made it."""
        path = self.folder / "rows" / f"{task.name}.pickle"
        with alone(self.folder, task.name):
            if not path.is_file():
                splits = task.splits()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(pickle.dumps((splits, training_set(splits.train, task, self.tokenizer))))
        return pickle.loads(path.read_bytes())


def weight_bytes(model: torch.nn.Module) -> int:
    """Of the adapted linears: their frozen weights, all layouts and scales."""
    return sum(layer.get_base_layer().frozen_bytes() for layer in model.modules() if isinstance(layer, FrozenLoraLinear))


@contextmanager
def alone(folder: Path, name: str = "models") -> Iterator[None]:
    """Among processes of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def scores(adapters: WideAdapters, items: Sequence, task: Task, tokenizer: Any, tokens: int) -> list[dict[str, Any]]:
    """Of every run: the task's own score and likelihoods; ``by_row``: the score of each row, see :func:`packed`."""
    runs, model = adapters.runs, adapters.model
    with together(runs):
        nll = scoring.candidate_losses(model, items, task, tokenizer, runs, tokens)
        texts = scoring.written_answers(model, items, task, tokenizer, runs, tokens) if task.kind == GENERATED else None
    gold, subsets = [item.gold if texts is None else 0 for item in items], [item.subset for item in items]
    found = []
    for run in range(runs):
        row = scoring.summary(nll[run], gold, subsets)
        if texts is None:
            by_row = (nll[run].argmin(1) == torch.tensor(gold)).tolist()
        else:
            by_row = scoring.answer_scores(texts[run], items, task)
            samples = [[text, item.references[0]] for text, item in zip(texts[run][:2], items)]
            row |= {task.metric: sum(by_row) / len(by_row), "samples": samples}
        found.append(row | {"by_row": packed(by_row)})
    return found


def packed(scores: Sequence[float]) -> str | list[int]:
    """Hits and misses as hexadecimal bits, the first row's after a leading 1; other scores in thousandths."""
    if all(type(score) is bool for score in scores):
        return f"{int('1' + ''.join(str(int(hit)) for hit in scores), 2):x}"
    return [round(1000 * score) for score in scores]


# ---------------------------------------------------------------------------------------------- processes

_LAB: Lab | None = None


def _start(models: Models, folder: Path) -> None:
    global _LAB
    torch.set_num_threads(2)
    _LAB = Lab(models, folder)


def _run(job: Job) -> Outcome:
    return _LAB.run(job)


def run_jobs(
    next_job: Callable[[Sequence[Job]], Job | None], done: Callable[[Outcome], None], lab: Lab, processes: int, seconds: float
) -> None:
    """Run jobs until there are no more, or the time is over: then what runs is stopped.

    Args:
        next_job: of those that run now -> the next one to start; None: not now.
        done: takes every outcome.
        processes: 0: in this process, one after the other.
        seconds: from now.
    """
    end = time.monotonic() + seconds
    if processes == 0:
        while time.monotonic() < end and (job := next_job(())) is not None:
            done(lab.run(job))
        return
    finished: queue.Queue[Outcome] = queue.Queue()
    running: list[Job] = []
    pool = multiprocessing.get_context("spawn").Pool(processes, _start, (lab.models, lab.folder))
    try:
        while time.monotonic() < end:
            while len(running) < processes and (job := next_job(tuple(running))) is not None:
                running.append(job)
                lost = lambda error, job=job: finished.put(Outcome(job, [], 0.0, f"{type(error).__name__}: {error}"))
                pool.apply_async(_run, (job,), callback=finished.put, error_callback=lost)
            if not running:
                break
            try:
                outcome = finished.get(timeout=None if math.isinf(end) else max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            running.remove(outcome.job)
            done(outcome)
    finally:
        pool.terminate()
