"""What the seven-task runs say, by the rule of docs/accuracy.md: pure functions of the runs of ``seven_tasks``, Markdown out.

Differences are paired by seed. ``p`` is that of all sign flips: were both methods alike, every paired difference could as well
have the other sign, and p is the share of the 2^n ways in which the mean is at least as far from zero. It needs no distribution.
Holm's correction over the tasks: the smallest of k counts k times, the next one k - 1 times, and none less than the one before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .seven_tasks import LEVERS, PLANS, QUESTION, RATES
from .tables import NATS, POINTS, Measure, Scores, markdown, number, plus_minus, signed

DEFAULT = "high"
LIMITS = {"bf16": ("BF16 LoRA", -0.5), "nf4": ("NF4 QLoRA", 0.0)}
"""Of the default's average minus the other's, in points."""
LARGEST_ERROR = 0.35
TITLES = {"shipped": "Weights as shipped (4-bit before)", "rotated": "The same function, residual stream rotated"}


def sign_flips(differences: Sequence[float]) -> float:
    """Two-sided p of their mean being zero; exact."""
    sums = torch.zeros(1, dtype=torch.float64)
    for d in differences:
        sums = torch.cat([sums + d, sums - d])
    total = abs(sum(differences))
    return (sums.abs() >= total * (1 - 1e-9)).double().mean().item()


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Corrected for their number."""
    found, least = {}, 0.0
    for i, name in enumerate(sorted(p, key=p.get)):
        least = max(least, min(1.0, (len(p) - i) * p[name]))
        found[name] = least
    return {name: found[name] for name in p}


def paired(scores: Scores, task: str, one: str, other: str, measure: Measure = POINTS) -> dict[int, float]:
    """Seed -> ``one`` minus ``other``, in the measure's unit, where both have a score."""
    a, b = ({seed: measure.of(run) for seed, run in scores.seeds(task, method).items()} for method in (one, other))
    return {seed: measure.scale * (a[seed] - b[seed]) for seed in sorted(a.keys() & b.keys()) if None not in (a[seed], b[seed])}


def average_p(scores: Scores, one: str, other: str) -> float:
    """Of the tasks' average, over the seeds that all tasks have."""
    found = [paired(scores, task, one, other) for task in PLANS]
    seeds = set.intersection(*(set(f) for f in found))
    return sign_flips([statistics.fmean(f[seed] for f in found) for seed in sorted(seeds)])


def page(content: Mapping[str, Any]) -> str:
    """The section of the report; one line where nothing was run."""
    parts = []
    for weights, title in TITLES.items():
        scores = Scores(content, weights)
        if scores.finals:
            parts += [f"### {title}", _methods(scores), *_answers(scores), _levers(scores), _rates(scores)]
    return "\n\n".join(part for part in parts if part) or "Here: not run."


def _methods(scores: Scores) -> str:
    """Mean ± standard deviation over seeds, in per cent."""
    rows = []
    for method in (m for m in (*QUESTION, *LEVERS) if m in scores.labels):
        cells = [scores.spread(task, method) for task in PLANS]
        shown = [f"{s.mean:.1f} ± {number(s.sd, 1)} ({s.n})" if s else "–" for s in cells]
        mean = statistics.fmean(s.mean for s in cells) if None not in cells else None
        rows.append([scores.labels[method], *shown, number(mean, 1)])
    return "Score, %: mean ± standard deviation (seeds).\n\n" + markdown(["method", *PLANS, "average"], rows, right=False)


def _answers(scores: Scores) -> list[str]:
    """The default against each of the others: a table by task, and the verdict in a line."""
    parts, lines = [], []
    for other, (title, _) in LIMITS.items():
        if missing := [task for task in PLANS if not paired(scores, task, DEFAULT, other)]:
            lines.append(f"- `{DEFAULT}` and {title}: no verdict yet, runs are missing ({', '.join(missing)}).")
            continue
        flips = {task: sign_flips(list(paired(scores, task, DEFAULT, other).values())) for task in PLANS}
        corrected, rows = holm(flips), []
        for task in PLANS:
            points, nats = (scores.difference(task, DEFAULT, other, measure) for measure in (POINTS, NATS))
            rows.append([task, plus_minus(points, 2), plus_minus(nats, 3), f"{flips[task]:.3f}", f"{corrected[task]:.3f}"])
            rows[-1].append(str(len(paired(scores, task, DEFAULT, other))))
        points, nats = (scores.mean_difference(DEFAULT, other, measure, list(PLANS)) for measure in (POINTS, NATS))
        rows.append(["average", plus_minus(points, 2), plus_minus(nats, 3), f"{average_p(scores, DEFAULT, other):.3f}", "", ""])
        parts.append(markdown([f"`{DEFAULT}` − {title}", "points", "nats", "p", "p, Holm", "pairs"], rows))
        lines.append(_verdict(scores, other, points, nats, corrected))
    return [*parts, "\n".join(lines)]


def _verdict(
    scores: Scores, other: str, points: tuple[float, float], nats: tuple[float, float], corrected: Mapping[str, float]
) -> str:
    title, limit = LIMITS[other]
    below = [t for t, p in corrected.items() if p < 0.05 and scores.difference(t, DEFAULT, other)[0] < 0]
    asked = {f"average of at least {signed(limit)} points": points[0] >= limit}
    if other == "nf4":
        asked |= {"no more nats": nats[0] <= 0, "on no task below it": not below}
    asked[f"error of at most {LARGEST_ERROR}"] = points[1] <= LARGEST_ERROR  # false where it is not known
    said = "; ".join(f"{what}: {'met' if met else '**missed**'}" for what, met in asked.items())
    return f"- `{DEFAULT}` minus {title}: {plus_minus(points, 2)} points. {said}" + (f" ({', '.join(below)})." if below else ".")


def _levers(scores: Scores) -> str:
    """What each lever changes of the default, on the tasks that both have."""
    rows = []
    for method in (m for m in LEVERS if m in scores.labels):
        tasks = [task for task in PLANS if scores.difference(task, method, DEFAULT)]
        if not tasks:
            continue
        points, nats = (scores.mean_difference(method, DEFAULT, measure, tasks) for measure in (POINTS, NATS))
        cost = [_cost(scores, method, name) - _cost(scores, DEFAULT, name) for name in ("weight_bytes", "prepared_s", "train_s")]
        rows.append([scores.labels[method], plus_minus(points, 2), plus_minus(nats, 3), f"{cost[0] / 2**20:+.1f}"])
        rows[-1] += [f"{seconds:+.1f}" for seconds in cost[1:]] + [str(len(tasks))]
    head = ["lever", "points", "nats", "MiB of weights", "s to prepare", "s to train, of a job", "tasks"]
    return "" if not rows else f"Minus `{DEFAULT}`, mean ± standard error over paired seeds:\n\n" + markdown(head, rows)


def _cost(scores: Scores, method: str, name: str) -> float:
    found = [run[name] for task in scores.tasks for run in scores.seeds(task, method).values() if name in run]
    return statistics.median(found) if found else math.nan


def _rates(scores: Scores) -> str:
    """Chosen learning rates; those at an end of what may be tried are marked."""
    mark = lambda text: "**" if text in (f"{RATES[0]:g}", f"{RATES[-1]:g}") else ""
    rows = []
    for method, label in scores.labels.items():
        rates = [scores.rates(task, method) for task in PLANS]
        rows.append([label, *(f"{mark(rate)}{rate}{mark(rate)}" for rate in rates)])
    return "Learning rates:\n\n" + markdown(["method", *PLANS], rows, right=False)
