"""Tables of trained models, for the report: pure functions of the runs in ``accuracy``, ``ablations`` and others.

Every figure says what it varies over. A cell of an accuracy table is the median over seeds, with the mean ± standard deviation
and the number of seeds; differences are paired by seed (the same first values and rows), with the standard error of their mean.
Nothing is selected: all runs of a method's learning rate count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .image_tasks import TASKS as IMAGE_TASKS

PAPER = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))
"""What others published: the only figures in the report that are typed by hand."""

METRICS = ("accuracy", "exact_match", "f1", "rouge_l", "last_number")
REFERENCE = "bf16"
Run = Mapping[str, Any]


class Measure(NamedTuple):
    """What is read from a run (None: the run does not have it), the factor with which it is shown, and its digits."""

    of: Callable[[Run], float | None]
    scale: int
    digits: int


POINTS = Measure(lambda run: next((run[name] for name in METRICS if run.get(name) is not None), None), 100, 1)
"""The task's own metric, in per cent."""
NATS = Measure(lambda run: run.get("nll"), 1, 3)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], right: bool = True) -> str:
    """A table; ``right``: its columns but the first are on the right."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("| --- |" + " ---: |" * (len(head) - 1) if right else "|" + "---|" * len(head))
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


class Spread(NamedTuple):
    """Of some values; nan where there are too few."""

    median: float
    mean: float
    sd: float
    se: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    sd = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.median(values), statistics.fmean(values), sd, sd / math.sqrt(len(values)), len(values))


def number(value: float | None, digits: int) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def plus_minus(found: tuple[float, float] | None, digits: int) -> str:
    """A difference and its standard error."""
    return "–" if found is None else f"{signed(found[0], digits)} ± {number(found[1], digits)}"


class Scores:
    """The runs of one table with one set of weights.

    Attributes:
        tasks: that have runs which count, in order.
        labels: method -> label, in order.
        before: (task, method) -> run before training; tasks_before, labels_before: of these.
        subsets: (task, part of it).
    """

    def __init__(self, content: Mapping[str, Any], weights: str = "shipped"):
        runs = [run for run in content["runs"] if run["weights"] == weights]
        self.finals = [run for run in runs if run["kind"] == "final"]
        self.tasks = list(dict.fromkeys(run["task"] for run in self.finals))
        self.labels = {run["method"]: run["label"] for run in self.finals}
        self.before = {(run["task"], run["method"]): run for run in runs if run["kind"] == "zero_shot"}
        self.tasks_before = list(dict.fromkeys(task for task, _ in self.before))
        self.labels_before = {method: run["label"] for (_, method), run in self.before.items()}
        self.subsets = list(dict.fromkeys((run["task"], name) for run in self.finals for name in run.get("subsets", ())))
        self._by_seed: dict[tuple[str, str], dict[int, Run]] = {}
        for run in self.finals:
            self._by_seed.setdefault((run["task"], run["method"]), {})[run["seed"]] = run

    def seeds(self, task: str, method: str) -> dict[int, Run]:
        return self._by_seed.get((task, method), {})

    def spread(self, task: str, method: str, measure: Measure = POINTS) -> Spread | None:
        values = [v for v in map(measure.of, self.seeds(task, method).values()) if v is not None]
        return spread([measure.scale * v for v in values]) if values else None

    def rates(self, task: str, method: str) -> str:
        """Learning rates of the runs that count."""
        return ", ".join(f"{lr:g}" for lr in sorted({run["lr"] for run in self.seeds(task, method).values()})) or "–"

    def fewest(self, method: str) -> int:
        """Seeds that the method has on every task."""
        return min(len(self.seeds(task, method)) for task in self.tasks)

    def subset(self, task: str, method: str, name: str) -> str:
        """Median accuracy of a part of a mixed task."""
        found = self.spread(task, method, Measure(lambda run: run["subsets"][name].get("accuracy"), 100, 1))
        return number(found.median if found else None, 1)

    def common(self) -> list[str]:
        """The tasks that all methods have."""
        return [task for task in self.tasks if all(self.seeds(task, method) for method in self.labels)]

    def unlearnt(self) -> dict[str, tuple[float, Spread]]:
        """Tasks on which BF16 LoRA does not score above the untrained BF16 model by two standard errors: the untrained score, and
        BF16 LoRA's. What a method scores there says how little it changed the model, so they are in no average. Without a run of
        the untrained model, or with one seed, a task counts."""
        found = {}
        for (task, method), run in self.before.items():
            trained = self.spread(task, REFERENCE) if method == REFERENCE else None
            if trained and trained.n > 1 and trained.mean - 100 * POINTS.of(run) <= 2 * trained.se:
                found[task] = 100 * POINTS.of(run), trained
        return found

    def counted(self) -> list[str]:
        """The tasks that averages are over: those that all methods have and that BF16 LoRA learns."""
        dropped = self.unlearnt()
        return [task for task in self.common() if task not in dropped]

    def difference(self, task: str, one: str, other: str, measure: Measure = POINTS) -> tuple[float, float] | None:
        """``one`` minus ``other`` over the seeds that both have: mean and standard error."""
        a, b = self.seeds(task, one), self.seeds(task, other)
        pairs = [(measure.of(a[seed]), measure.of(b[seed])) for seed in a if seed in b]
        found = [x - y for x, y in pairs if x is not None and y is not None]
        return (measure.scale * spread(found).mean, measure.scale * spread(found).se) if found else None

    def mean_difference(
        self, one: str, other: str, measure: Measure = POINTS, tasks: Sequence[str] | None = None
    ) -> tuple[float, float] | None:
        """The same averaged over tasks (default: those that count), whose noise is independent; None unless all have it."""
        parts = [self.difference(task, one, other, measure) for task in (self.counted() if tasks is None else tasks)]
        if not parts or None in parts:
            return None
        return statistics.fmean(mean for mean, _ in parts), math.sqrt(sum(se**2 for _, se in parts)) / len(parts)

    def averages(self) -> dict[str, float]:
        """Method -> mean over the tasks that count of its medians."""
        tasks = self.counted()
        found = {m: [self.spread(task, m) for task in tasks] for m in self.labels} if tasks else {}
        return {method: statistics.fmean(s.median for s in cells) for method, cells in found.items()}


def accuracy(scores: Scores) -> str:
    """Methods by tasks: median (mean ± sd, n) in per cent, and the average over the tasks that count."""
    common, averages = scores.counted(), scores.averages()
    before = {task: 100 * POINTS.of(run) for (task, method), run in scores.before.items() if method == REFERENCE}
    mean = statistics.fmean(before.get(task, math.nan) for task in common) if common else None
    rows = [["Zero-shot, BF16", *(number(before.get(task), 1) for task in scores.tasks), number(mean, 1)]]
    for method, label in scores.labels.items():
        cells = [scores.spread(task, method) for task in scores.tasks]
        shown = [f"{s.median:.1f} ({s.mean:.1f} ± {number(s.sd, 1)}, {s.n})" if s else "–" for s in cells]
        rows.append([label, *shown, number(averages.get(method), 1)])
    return markdown(["method", *scores.tasks, f"average of {len(common)}"], rows, right=False)


def differences(scores: Scores, name: str, measure: Measure) -> str:
    """Methods by tasks: paired difference from BF16 LoRA ± standard error."""
    rows = []
    for method in (m for m in scores.labels if m != REFERENCE):
        found = [scores.difference(task, method, REFERENCE, measure) for task in scores.tasks]
        found.append(scores.mean_difference(method, REFERENCE, measure))
        rows.append([scores.labels[method], *(plus_minus(d, measure.digits) for d in found)])
    head = [f"{name} − BF16 LoRA's", *scores.tasks, f"average of {len(scores.counted())}"]
    return markdown(head, rows, right=False)


def verdicts(scores: Scores) -> str:
    """What was asked of this project's recipe: within a point of BF16 LoRA on average, and not below NF4 QLoRA."""
    lines = []
    for method in ("high", "balanced_gptq", "balanced", "paper_gptq"):
        for other, title, limit in (("bf16", "BF16 LoRA", -1.0), ("nf4", "NF4 QLoRA", 0.0)):
            found = scores.mean_difference(method, other)
            if found is None:
                continue
            near = found[0] + found[1] >= limit  # false where the error is not known
            met = "met" if found[0] >= limit else "**missed**" + (", by less than the error" if near else "")
            nats = scores.mean_difference(method, other, NATS)
            beside = f"in nats {plus_minus(nats, 3)}, less is better"
            if scores.unlearnt():
                whole = scores.mean_difference(method, other, tasks=scores.common())
                beside += f"; over all tasks {plus_minus(whole, 1)} points"
            lines.append(
                f"- `{method}`, average minus {title}'s: {plus_minus(found, 1)} points; at least {signed(limit)} was asked for: "
                f"{met} ({beside})."
            )
    return "\n".join(lines)


def images(content: Mapping[str, Any], methods: Mapping[str, Any]) -> str:
    """Table 4: a table for each model and task that was run, or one that says that none was."""
    parts = []
    for weights, task in dict.fromkeys((run["weights"], run["task"]) for run in content["runs"]):
        stands_for = IMAGE_TASKS[task].stands_for
        note = f"{weights} on `{task}`" + ("" if IMAGE_TASKS[task].hub else f", which stands in for {stands_for}") + ":"
        parts += [note, _image_table(Scores(content, weights), task, methods)]
    return "\n\n".join(parts or ["Here: not run.", _image_table(Scores({"runs": []}), "", methods)])


def _image_table(scores: Scores, task: str, methods: Mapping[str, Any]) -> str:
    head = ["", "paper: before", "paper: after", "before", "after", "nats before", "nats after"]
    head += ["nats after − BF16 LoRA's", "learning rate"]
    rows = []
    for name, method in methods.items():
        cells = [f"{100 * v:.1f}" for v in PAPER["science_qa"][name]] if name in PAPER["science_qa"] else ["–", "–"]
        before, after, nll = scores.before.get((task, name)), scores.spread(task, name), scores.spread(task, name, NATS)
        first = [f"{100 * POINTS.of(before):.1f}", f"{before['nll']:.3f}"] if before else ["not run"] * 2
        last = ["not run"] * 4
        if after:
            difference = None if name == REFERENCE else scores.difference(task, name, REFERENCE, NATS)
            last = [f"{after.median:.1f} ({after.mean:.1f} ± {number(after.sd, 1)}, {after.n})"]
            last += [f"{nll.mean:.3f} ± {number(nll.sd, 3)}", plus_minus(difference, 3), scores.rates(task, name)]
        rows.append([method.label, *cells, first[0], last[0], first[1], *last[1:]])
    return markdown(head, rows)
