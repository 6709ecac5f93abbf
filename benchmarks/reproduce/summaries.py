"""Runs as tables and plots, for the report: pure functions of what ``accuracy.json``, ``ablations.json``, ``long_run.json`` hold.

Every figure says what it varies over. A cell of an accuracy table is the median over seeds, with the mean +- standard deviation
and the number of seeds beside it; differences from BF16 LoRA are paired by seed (the same first values and rows), with the
standard error of their mean. Nothing is selected: all runs of a method's learning rate count.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS = ("accuracy", "exact_match", "f1", "rouge_l", "last_number")
REFERENCE = "bf16"
PACKAGED = {
    "sentiment": "SST-2: sentences of film reviews",
    "commonsense": "COPA, ARC: PIQA, SIQA, CommonsenseQA, OpenBookQA",
    "wic": "WiC: pairs of WordNet examples",
    "boolq": "BoolQ",
    "asdiv": "GSM8K: ASDiv, exact match",
    "disfl_qa": "SQuAD: Disfl-QA, F1",
    "xsum": "SAMSum: XSum, ROUGE-L",
    "referent": "WSC: DisambiguationQA",
}
"""Task -> the paper's data set that it stands for, and what it is."""
Run = Mapping[str, Any]


# ---------------------------------------------------------------------------------------------- numbers


def score_of(run: Run) -> float | None:
    """The task's own metric, in [0, 1]."""
    return next((run[name] for name in METRICS if run.get(name) is not None), None)


def finals(runs: Iterable[Run], weights: str | None = None) -> list[Run]:
    return [r for r in runs if r["kind"] == "final" and (weights is None or r["weights"] == weights)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, mean, standard deviation (nan for one value), standard error and number."""
    sd = statistics.stdev(values) if len(values) > 1 else math.nan
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "sd": sd,
        "se": sd / math.sqrt(len(values)),
        "n": len(values),
    }


def by_method(runs: Iterable[Run]) -> dict[str, dict[str, dict[int, Run]]]:
    """Task -> method -> seed -> run."""
    found: dict[str, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        found[run["task"]][run["method"]][run["seed"]] = run
    return found


def paired(a: Mapping[int, Run], b: Mapping[int, Run], value=score_of) -> dict[str, float] | None:
    """a minus b over the seeds that both have."""
    pairs = [(value(a[seed]), value(b[seed])) for seed in a if seed in b]
    differences = [x - y for x, y in pairs if x is not None and y is not None]
    return spread(differences) if differences else None


def common_tasks(content: Mapping[str, Any], weights: str = "shipped") -> list[str]:
    """The tasks that all methods have."""
    runs = finals(content["runs"], weights)
    table, methods = by_method(runs), set(_labels(runs))
    return [task for task, own in table.items() if set(own) == methods]


def unlearnt(content: Mapping[str, Any], weights: str = "shipped") -> dict[str, tuple[float, dict[str, float]]]:
    """Tasks on which BF16 LoRA does not score above the untrained BF16 model by two standard errors: the untrained score, and
    BF16 LoRA's. What a method scores there says how little it changed the model, so they are in no average. Without a run of the
    untrained model, or with one seed, a task counts."""
    table, found = by_method(finals(content["runs"], weights)), {}
    for run in content["runs"]:
        if (run["kind"], run["weights"], run["method"]) != ("zero_shot", weights, REFERENCE) or score_of(run) is None:
            continue
        scores = [v for v in map(score_of, table.get(run["task"], {}).get(REFERENCE, {}).values()) if v is not None]
        if len(scores) > 1 and (own := spread(scores))["mean"] - score_of(run) <= 2 * own["se"]:
            found[run["task"]] = score_of(run), own
    return found


def counted(content: Mapping[str, Any], weights: str = "shipped") -> list[str]:
    """The tasks that averages are over: those that all methods have and that BF16 LoRA learns."""
    dropped = unlearnt(content, weights)
    return [task for task in common_tasks(content, weights) if task not in dropped]


def combined(differences: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    """Mean of paired differences of several tasks, and its standard error (tasks and their noise are independent); None if one is
    missing."""
    if not differences or None in differences:
        return None
    error = math.sqrt(sum(d["se"] ** 2 for d in differences)) / len(differences)
    return {"mean": statistics.fmean(d["mean"] for d in differences), "se": error}


def average(runs: Sequence[Run], method: str, tasks: Sequence[str], value=score_of) -> dict[str, float] | None:
    """Mean over tasks of a method's medians, and of its paired differences from the reference with their standard error; None
    without tasks, or unless the method has all of them."""
    table = by_method(finals(runs))
    cells, differences = [], []
    for task in tasks:
        own = table.get(task, {}).get(method)
        values = [v for v in map(value, (own or {}).values()) if v is not None]
        if not values:
            return None
        cells.append(statistics.median(values))
        differences.append(paired(own, table[task].get(REFERENCE, {}), value))
    if not cells:
        return None
    whole = combined(differences)
    return {"median": statistics.fmean(cells), "tasks": len(cells)} | (
        {"difference": whole["mean"], "se": whole["se"]} if whole else {}
    )


# ---------------------------------------------------------------------------------------------- text


def _number(value: float, digits: int) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _signed(value: float, digits: int) -> str:
    return "–" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")


def _difference(d: Mapping[str, float] | None, scale: float, digits: int) -> str:
    return "–" if d is None else f"{_signed(scale * d['mean'], digits)} ± {_number(scale * d['se'], digits)}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _labels(runs: Iterable[Run]) -> dict[str, str]:
    """Method -> label, in the order of the runs."""
    return {r["method"]: r["label"] for r in runs}


def _tasks(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(r["task"] for r in runs))


# ---------------------------------------------------------------------------------------------- accuracy


def accuracy_table(content: Mapping[str, Any], weights: str = "shipped") -> str:
    """Methods by tasks: median (mean ± sd, n) in per cent, and the average over the tasks that count (:func:`counted`)."""
    runs = finals(content["runs"], weights)
    zero = [r for r in content["runs"] if r["kind"] == "zero_shot" and r["weights"] == weights]
    tasks, labels, table = _tasks(runs), _labels(runs), by_method(runs)
    common = counted(content, weights)
    rows = []
    before = {r["task"]: 100 * score_of(r) for r in zero if r["method"] == REFERENCE}
    shared = [before.get(task, math.nan) for task in common]
    values = [_number(before.get(task, math.nan), 1) for task in tasks]
    rows.append(["Zero-shot, BF16", *values, _number(statistics.fmean(shared), 1) if shared else "–"])
    for method, label in labels.items():
        cells = []
        for task in tasks:
            values = [100 * v for v in map(score_of, table[task].get(method, {}).values()) if v is not None]
            s = spread(values) if values else None
            cells.append(f"{s['median']:.1f} ({s['mean']:.1f} ± {_number(s['sd'], 1)}, {s['n']})" if s else "–")
        mean = average(runs, method, common)
        rows.append([label, *cells, _number(100 * mean["median"], 1) if mean and common else "–"])
    return markdown(["method", *tasks, f"average of {len(common)}"], rows)


def difference_table(content: Mapping[str, Any], weights: str = "shipped", value: str = "score") -> str:
    """Methods by tasks: paired difference from BF16 LoRA ± standard error, of the score (points) or of ``nll`` (nats)."""
    runs = finals(content["runs"], weights)
    tasks, labels, table = _tasks(runs), _labels(runs), by_method(runs)
    common = counted(content, weights)
    of, scale, digits = (score_of, 100, 1) if value == "score" else (lambda r: r.get(value), 1, 3)
    rows = []
    for method, label in labels.items():
        if method == REFERENCE:
            continue
        cells = [_difference(paired(table[t].get(method, {}), table[t].get(REFERENCE, {}), of), scale, digits) for t in tasks]
        mean = average(runs, method, common, of)
        whole = {"mean": mean["difference"], "se": mean["se"]} if common and mean and "difference" in mean else None
        rows.append([label, *cells, _difference(whole, scale, digits)])
    return markdown([f"{value} − BF16 LoRA's", *tasks, f"average of {len(common)}"], rows)


def rate_table(content: Mapping[str, Any], weights: str = "shipped") -> str:
    """The learning rate that validation chose, by method and task."""
    runs = finals(content["runs"], weights)
    tasks, labels, table = _tasks(runs), _labels(runs), by_method(runs)
    rows = []
    for method, label in labels.items():
        rates = [sorted({r["lr"] for r in table[t].get(method, {}).values()}) for t in tasks]
        rows.append([label, *(", ".join(f"{lr:g}" for lr in found) or "–" for found in rates)])
    return markdown(["learning rate", *tasks], rows)


def zero_shot_table(content: Mapping[str, Any], weights: str = "shipped") -> str:
    """Before any training: score (per cent) and nll of every method."""
    runs = [r for r in content["runs"] if r["kind"] == "zero_shot" and r["weights"] == weights]
    tasks, labels = _tasks(runs), _labels(runs)
    found = {(r["task"], r["method"]): r for r in runs}
    rows = []
    for method, label in labels.items():
        cells = [found.get((task, method)) for task in tasks]
        rows.append([label, *("–" if r is None else f"{100 * score_of(r):.1f} ({r['nll']:.3f})" for r in cells)])
    return markdown(["zero-shot: score (nll)", *tasks], rows)


def subset_table(content: Mapping[str, Any], weights: str = "shipped") -> str:
    """Parts of the mixed task, median accuracy in per cent."""
    runs = [r for r in finals(content["runs"], weights) if r.get("subsets")]
    labels, table = _labels(runs), by_method(runs)
    names = [(task, name) for task in _tasks(runs) for name in dict.fromkeys(n for r in runs for n in r["subsets"])]
    rows = []
    for method, label in labels.items():
        cells = []
        for task, name in names:
            scores = [r["subsets"].get(name, {}).get("accuracy") for r in table[task].get(method, {}).values()]
            scores = [100 * s for s in scores if s is not None]
            cells.append(_number(statistics.median(scores), 1) if scores else "–")
        rows.append([label, *cells])
    return markdown(["method", *(name for _, name in names)], rows)


def averages(content: Mapping[str, Any], weights: str = "shipped") -> dict[str, dict[str, float]]:
    """Method -> average over the tasks that count (``median``, ``difference`` from BF16 LoRA ± ``se``), as shares."""
    runs = finals(content["runs"], weights)
    common = counted(content, weights)
    found = {method: average(runs, method, common) for method in _labels(runs)} if common else {}
    return {method: mean for method, mean in found.items() if mean}


# ---------------------------------------------------------------------------------------------- ablations


def ablation_table(content: Mapping[str, Any]) -> str:
    """Variant: paired differences from its base, score (points) and nll (nats) ± standard error, by task."""
    runs = finals(content["runs"])
    tasks, labels, table = _tasks(runs), _labels(runs), by_method(runs)
    head = ["base", "variant", *(f"{task}: {what}" for task in tasks for what in ("Δ points", "Δ nll")), "n"]
    rows = []
    for method, label in labels.items():
        base, _, variant = method.partition(":")
        cells, counts = [], []
        for task in tasks:
            own, its_base = table[task].get(method, {}), table[task].get(base, {})
            if not variant:
                scores, nlls = [100 * s for s in map(score_of, own.values())], [r["nll"] for r in own.values()]
                cells += [f"{statistics.fmean(v):.{d}f}" if v else "–" for v, d in ((scores, 1), (nlls, 3))]
            else:
                cells += [_difference(paired(own, its_base), 100, 1), _difference(paired(own, its_base, _nll), 1, 3)]
            counts.append(len(own))
        rows.append([labels.get(base, base), label if variant else "**itself**", *cells, str(min(counts))])
    return markdown(head, rows)


def _nll(run: Run) -> float:
    return run["nll"]


# ---------------------------------------------------------------------------------------------- long run


def long_run_table(content: Mapping[str, Any]) -> str:
    """Training loss of the last tenth, held-out loss at the least and at the end, mean gradient norm of the last tenth."""
    rows = []
    for run in finals(content["runs"]):
        curve = run.get("curve")
        if not curve:
            continue
        points, tail = curve["held_out"], max(1, len(curve["loss"]) // 10)
        least = min(points, key=lambda p: p["nll"])
        norm = statistics.fmean(curve["gradient_norm"][-tail:])
        steps = f"{run['steps']} of {run['planned']}" if "planned" in run else str(run["steps"])
        rows.append(
            [run["label"], steps, f"{run['train_loss']:.4f}", f"{least['nll']:.4f} (step {least['step']})"]
            + [f"{points[-1]['nll']:.4f} (step {points[-1]['step']})", f"{norm:.3f}"]
        )
    return markdown(["method", "steps", "training loss", "least held-out", "last held-out", "gradient norm"], rows)


# ---------------------------------------------------------------------------------------------- plots


def plot_long_run(content: Mapping[str, Any], path: Path) -> None:
    """Training loss and gradient norm (means of 50 steps) and held-out loss over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for run in finals(content["runs"]):
        curve = run.get("curve")
        if not curve:
            continue
        for axes, name in zip(panels, ("loss", "gradient_norm")):
            values = curve[name]
            window = max(1, min(50, len(values) // 4))
            means = [statistics.fmean(values[i : i + window]) for i in range(0, len(values) - window + 1, window)]
            axes.plot([window * (i + 0.5) for i in range(len(means))], means, label=run["label"], linewidth=1)
        points = [p for p in curve["held_out"] if p["step"]] or curve["held_out"]  # the untrained model would set the scale
        panels[2].plot([p["step"] for p in points], [p["nll"] for p in points], marker=".", label=run["label"])
    for axes, title in zip(panels, ("training loss", "gradient norm", "held-out nats per token")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels[2].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def plot_accuracy(content: Mapping[str, Any], path: Path, weights: str = "shipped") -> None:
    """Paired differences from BF16 LoRA by task, of the score and of nll, with standard errors."""
    from matplotlib.figure import Figure

    runs = finals(content["runs"], weights)
    tasks, labels, table = _tasks(runs), _labels(runs), by_method(runs)
    methods = [m for m in labels if m != REFERENCE]
    figure = Figure(figsize=(12, 1.5 + 0.35 * len(tasks) * max(1, len(methods)) / 3), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, of, scale) in zip(panels, (("points", score_of, 100), ("nats", _nll, 1))):
        for i, method in enumerate(methods):
            for j, task in enumerate(tasks):
                d = paired(table[task].get(method, {}), table[task].get(REFERENCE, {}), of)
                if d:
                    y, se = j + (i - len(methods) / 2) * 0.8 / len(methods), 0 if math.isnan(d["se"]) else d["se"]
                    label = labels[method] if j == 0 else None
                    axes.errorbar(scale * d["mean"], y, xerr=scale * se, fmt="o", color=f"C{i}", label=label, markersize=4)
        axes.axvline(0, color="gray", linewidth=1)
        axes.set_title(f"difference from BF16 LoRA, {title}")
    panels[0].set_yticks(range(len(tasks)), tasks)
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=8)
    figure.savefig(path, dpi=130)
