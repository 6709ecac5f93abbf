"""Is the default as accurate as BF16 LoRA, and never below QLoRA? Seven tasks, by a rule that was written down before its runs.

    python benchmarks/reproduce/seven_tasks.py --out OUT --work WORK      # again: goes on where it stopped
    python benchmarks/reproduce/seven_tasks.py --small                    # 2 steps of a cut model on a CPU: does it run?

The rule, the same for every method (docs/accuracy.md has it in words):

* A learning rate for each method and task: the one with the best mean of the task's own score on validation rows, over two seeds
  that do not count; the smaller loss decides between equal scores. :data:`RATES` are tried from the middle; while the best is the
  first or the last one that was tried, the next one beyond it is tried as well.
* Then twelve seeds at that rate (24 on WiC, whose runs vary most), scored on test rows. All of them count.
* 200 steps of 16 rows, rank 16 on all linears, AdamW, a tenth of the steps warm-up, then down to 0.

Data and model: ``python benchmarks/reproduce/sources.py FOLDER`` and ``python examples/smollm2_reviews.py fetch``.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from reproduce.jobs import Job, Lab, Outcome, run_jobs
from reproduce.methods import LEVERS as VARIANTS
from reproduce.methods import METHODS, ROTATED, SHIPPED, WEIGHTS, Method, Models
from reproduce.run_log import RunLog
from reproduce.runner import parse, shared_arguments
from reproduce.tables import POINTS

TABLE = "seven_tasks"
RATES = (3.2e-5, 8e-5, 2e-4, 5e-4, 1.25e-3, 3.1e-3, 8e-3, 2e-2)
FIRST = slice(2, 6)
"""Of :data:`RATES`, what every sweep begins with."""
SWEEP_SEEDS = (100, 101)


@dataclass(frozen=True)
class Plan:
    """How one task is run.

    Attributes:
        validation, test: rows at most.
        tokens: of a row on average, to estimate memory and time.
        seeds: of the runs that count.
    """

    validation: int
    test: int
    tokens: int
    seeds: int = 12


PLANS = {
    "boolq": Plan(500, 1500, 141),
    "wic": Plan(1000, 2000, 38, 24),
    "asdiv": Plan(300, 400, 52),
    "sentiment": Plan(1000, 2000, 28),
    "commonsense": Plan(600, 1000, 21),
    "disfl_qa": Plan(150, 200, 196),
    "xsum": Plan(100, 200, 234),
}
"""In order. One of long rows comes first: beside the short ones, which leave a device waiting for launches, it keeps it busy."""

QUESTION = ("bf16", "nf4", "high")
LEVERS = ("high_gptq", "high_eora", "high_gptq_eora", "w4a16", "w4a16_gptq", *(method.name for method in VARIANTS))
WAVES = (
    *((SHIPPED, QUESTION, share) for share in (0.5, 1.0)),
    *((weights, methods, 0.5) for weights, methods in ((SHIPPED, LEVERS), (ROTATED, QUESTION), (ROTATED, LEVERS))),
)
"""(weights, methods, share of the seeds), in order of priority; then everything to the end."""

TOGETHER, TOKENS_TOGETHER = 12, 24_000
"""Runs of a job, and tokens of a step of all of them, at most."""
TOKENS_AT_ONCE = 96_000
"""Of the steps of all jobs that run on the device (BF16 keeps about 1 MB for each)."""


@dataclass(frozen=True)
class Group:
    """A method on a task, with one set of weights: a learning rate is chosen for it."""

    task: str
    weights: str
    method: Method
    seeds: tuple[int, ...]
    steps: int = 200
    batch: int = 16
    rows: int | None = None

    def key(self, kind: str, lr: float, seed: int) -> dict:
        """Fields that tell a run from all others."""
        found = {"table": TABLE, "task": self.task, "weights": self.weights, "method": self.method.name, "kind": kind}
        return found | {"lr": lr, "seed": seed, "steps": self.steps, "batch": self.batch, "rows": self.rows}


# ---------------------------------------------------------------------------------------------- the rule


def sweep_score(group: Group, log: RunLog, lr: float) -> tuple[float, float] | None:
    """(mean score, minus the mean loss) on validation rows; the largest is best. None: not all seeds have run."""
    rows = [log.find(group.key("sweep", lr, seed)) for seed in SWEEP_SEEDS]
    if None in rows:
        return None
    if not all(row["finite"] for row in rows):
        return -float("inf"), -float("inf")
    return statistics.fmean(row["validation_score"] for row in rows), -statistics.fmean(row["validation_nll"] for row in rows)


def rates_to_try(group: Group, log: RunLog) -> list[float]:
    """Rates that the sweep still needs; empty: the choice can be made."""
    tried = {lr: found for lr in RATES if (found := sweep_score(group, log, lr)) is not None}
    if missing := [lr for lr in RATES[FIRST] if lr not in tried]:
        return missing
    best = RATES.index(max(tried, key=tried.get))
    return [lr for lr in RATES[max(best - 1, 0) : best + 2] if lr not in tried]


def chosen_rate(group: Group, log: RunLog) -> float | None:
    """The rate with the best score; None while the sweep is not finished."""
    return None if rates_to_try(group, log) else max(RATES, key=lambda lr: sweep_score(group, log, lr) or (-float("inf"),) * 2)


def missing(group: Group, log: RunLog) -> list[tuple[str, float, int]]:
    """(kind, learning rate, seed) of the runs to do next: the sweep, then the runs that count."""
    if rates := rates_to_try(group, log):
        runs = [("sweep", lr, seed) for lr in rates for seed in SWEEP_SEEDS]
    else:
        runs = [("final", chosen_rate(group, log), seed) for seed in group.seeds]
    return [run for run in runs if log.find(group.key(*run)) is None]


# ---------------------------------------------------------------------------------------------- what is run next


def groups(args) -> list[Group]:
    """In order of priority, a group once in every wave."""
    everything = [(weights, args.methods, 1.0) for weights in args.weights]
    waves = [(w, [m for m in methods if m in args.methods], share) for w, methods, share in WAVES if w in args.weights]
    names = [name for name in PLANS if name in args.tasks]
    return [
        Group(name, weights, METHODS[method], tuple(range(round(share * PLANS[name].seeds))))
        for weights, methods, share in [*waves, *everything]
        for name in names
        for method in methods
    ]


class Queue:
    """Which job comes next, and what becomes of its outcome.

    Args:
        plan: in order of priority.
        seconds: from now; a job that would not end in time is not started.
    """

    def __init__(self, plan: Sequence[Group], log: RunLog, seconds: float):
        self.plan, self.log, self.end = plan, log, time.monotonic() + seconds
        self.failed: dict[tuple, str] = {}
        self.finished: deque[tuple[int, float]] = deque(maxlen=8)  # tokens and seconds of the last jobs, without preparations

    def next_job(self, running: Sequence[Job]) -> Job | None:
        """The first of :meth:`jobs` for which there is room and time."""
        room = TOKENS_AT_ONCE - sum(map(tokens_of_a_step, running))
        left = self.end - time.monotonic()
        return next((job for job in self.jobs(running) if tokens_of_a_step(job) <= room and self.estimate(job) < left), None)

    def jobs(self, running: Sequence[Job]) -> Iterator[Job]:
        """Those that could be started, in order."""
        busy = {_name(job.task, job.weights, job.method, *run) for job in running for run in job.runs} | self.failed.keys()
        for group in self.plan:
            name = group.task, group.weights, group.method
            runs = [run for run in missing(group, self.log) if _name(*name, *run[1:]) not in busy]
            if runs:
                most = min(TOGETHER, max(1, TOKENS_TOGETHER // (group.batch * PLANS[group.task].tokens)))
                count = -(-len(runs) // -(-len(runs) // most))  # pieces of nearly equal size
                split = "validation" if runs[0][0] == "sweep" else "test"
                part = tuple(run[1:] for run in runs[:count])
                sizes = PLANS[group.task].validation, PLANS[group.task].test
                yield Job(group.task, sizes, group.weights, group.method, split, part, group.steps, group.batch, group.rows)

    def estimate(self, job: Job) -> float:
        """Seconds, from the last jobs: what the slowest of them took, for a smaller job its share of the tokens."""
        tokens = job.steps * tokens_of_a_step(job)
        largest = max((done for done, _ in self.finished), default=tokens)
        slowest = max((seconds * min(1.0, tokens / done) for done, seconds in self.finished), default=0.0)
        return slowest * max(1.0, tokens / largest)

    def take(self, outcome: Outcome) -> None:
        """Log the rows of a job."""
        job, kind = outcome.job, "sweep" if outcome.job.split == "validation" else "final"
        title = f"{job.task}, {job.weights}, {job.method.name}, {kind} of {len(job.runs)}"
        if outcome.error:
            self.failed |= {_name(job.task, job.weights, job.method, *run): f"{title}: {outcome.error}" for run in job.runs}
            print(f"{title}: {outcome.error}", flush=True)
            return
        seconds = max((row.get("train_s", 0.0) + row.get("score_s", 0.0) for row in outcome.rows), default=0.0)
        self.finished.append((job.steps * tokens_of_a_step(job), seconds))
        group = Group(job.task, job.weights, job.method, (), job.steps, job.batch, job.rows)
        for (lr, seed), row in zip(job.runs, outcome.rows):
            if kind == "sweep":
                left_out = ("by_row", "samples", "subsets", "choice_nll", "nll")
                found = {"validation_nll": row.get("nll"), "validation_score": POINTS.of(row)}
                row = found | {name: value for name, value in row.items() if name not in left_out}
            self.log.add(group.key(kind, lr, seed) | {"label": job.method.label} | row)
        found = ", ".join(f"{lr:g}/{seed}: {100 * (POINTS.of(row) or 0):.1f}" for (lr, seed), row in zip(job.runs, outcome.rows))
        print(f"{title}: {outcome.seconds:.0f} s, {found}", flush=True)


def _name(task: str, weights: str, method: Method, lr: float, seed: int) -> tuple:
    return task, weights, method.name, lr, seed


def tokens_of_a_step(job: Job) -> int:
    return len(job.runs) * job.batch * PLANS[job.task].tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = shared_arguments(__doc__)
    parser.add_argument("--model", type=Path, help="folder of another model than SmolLM2-135M-Instruct")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="rotated: off the 4-bit grid")
    parser.add_argument("--tasks", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*QUESTION, *LEVERS])
    parser.add_argument("--processes", type=int, help="on the device; default 8 on a GPU, none beside this one on a CPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop in time")
    args = parse(parser, argv)
    processes = args.processes if args.processes is not None else 8 if args.device.type == "cuda" else 0
    plan, layers = groups(args), None
    if args.small:
        plan, layers = [replace(group, seeds=(0,), steps=2, batch=2, rows=8) for group in plan], 2
    settings = {name: value for name, value in vars(args).items() if isinstance(value, int | list | tuple)}
    queue = Queue(plan, RunLog(args.out, TABLE, settings), args.seconds)
    warnings.filterwarnings("ignore", message=".*tokens of calibration for linears")
    lab = Lab(Models(args.work, args.device, layers, *args.calibration, args.model), args.work)
    run_jobs(queue.next_job, queue.take, lab, processes, args.seconds)
    if queue.failed:
        raise SystemExit("\n".join(["failed:", *dict.fromkeys(queue.failed.values())]))


if __name__ == "__main__":
    main()
