"""Tables of what the other benchmarks of this repository have left in ``results/``: data in, Markdown out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import roofline

from . import paper, summaries
from .costs import GB, find, gigabytes, markdown, method, milliseconds

PRESETS = ("paper", "balanced", "high")
SHAPES = {"1b": "Llama-1B", "3b": "Llama-3B", "8b": "Llama-8B"}
LOSSES = (  # rows of perplexity.py that are shown: weights, inputs, title
    ("NF4", "exact", "NF4, BF16 inputs (QLoRA)"),
    ("to nearest", "exact", "NVFP4 to nearest, BF16 inputs"),
    ("to nearest", "paper", "NVFP4 to nearest, one term: direct quantisation"),
    ("to nearest", "high", "**NVFP4 to nearest, `high`: this project's default**"),
    ("BF16", "paper", "BF16 weights, one term: what activations cost alone"),
    ("BF16", "high", "BF16 weights, `high`"),
    ("GPTQ for paper", "as calibrated", "**GPTQ, one term: the paper's recipe**"),
    ("GPTQ for paper, centred", "as calibrated", "GPTQ, one term, centred"),
    ("GPTQ for balanced", "as calibrated", "GPTQ, `balanced`"),
    (
        "GPTQ for paper, centred",
        "two terms at all sites (high)",
        "GPTQ (for one centred term), two terms everywhere",
    ),
    ("GPTQ for balanced", "exact", "GPTQ, BF16 inputs"),
)

CLOCKS = {  # method of the accuracy table -> (case of step_time.py, rows of the paper's Tables 2 and 9)
    "bf16": ("bf16-ours-graphs", "BF16 LoRA"),
    "nf4": ("qlora-ours-graphs", "QLoRA"),
    "paper": ("nvfp4-paper-graphs", ""),
    "paper_gptq": ("nvfp4-paper-graphs", "PACT"),
    "balanced": ("nvfp4-graphs", ""),
    "balanced_gptq": ("nvfp4-graphs", ""),
    "high": ("nvfp4-high-graphs", ""),
}


def measured_on(files: dict[str, dict]) -> str:
    """Where each file comes from; ``files``: name -> content. Runs of several sessions say their commits themselves."""
    rows = []
    for name, data in files.items():
        e = data["environment"]
        own = [run["commit"] for run in data.get("runs", ()) if isinstance(run, dict) and "commit" in run]
        kept = [c for c in data.get("settings", {}).get("kept_from", "").split(", ") if c]
        commits = [c[:7] + ("-dirty" if c.endswith("-dirty") else "") for c in own or [*kept, e.get("commit", "unknown")]]
        versions = [e.get(k, "–") for k in ("torch", "triton", "transformers", "peft", "bitsandbytes")]
        rows.append([f"`{name}`", e.get("gpu", "CPU"), e.get("driver", "–"), *versions, ", ".join(dict.fromkeys(commits))])
    return markdown(["", "GPU", "driver", "torch", "triton", "transformers", "peft", "bitsandbytes", "commit"], rows)


def larger_models(trained: list[dict], largest: list[dict]) -> str:
    """Step, peak, device time of ``bench_train.py`` at 4 x 1024, and the largest batches under 16 GiB. Of several rows of one
    case the first counts."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in trained:
        device = f"{row['device_total_ms']:.1f}" if "device_total_ms" in row else "–"
        rows.setdefault((row["shape"], row["case"]), [milliseconds(row), device, gigabytes(row), "–", "–"])
    for row in largest:
        speed = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "–"
        cells = rows.setdefault((row["shape"], row["case"]), ["–"] * 5)
        cells[3:] = [str(row.get("largest_batch", "failed")), speed]
    lines = [[f"{SHAPES[shape]}, {method(case)}", *cells] for (shape, case), cells in sorted(rows.items(), key=lambda r: r[0][0])]
    return markdown(["", "step ms", "device ms", "peak GB", "largest batch", "tokens/s there"], lines)


def perplexity(shipped: dict, rotated: dict) -> str:
    rows = []
    for weights, inputs, title in LOSSES:
        cells = []
        for data in (shipped, rotated):
            row = next((r for r in data["rows"] if (r["weights"], r["inputs"]) == (weights, inputs)), None)
            cells.append(f"{row['dnll']:.3f} ± {row['se']:.3f}" if row else "–")
        rows.append([title, *cells])
    return markdown(["nats per token above BF16 (± standard error)", "shipped weights", "rotated weights"], rows)


def cosines(data: dict) -> str:
    rows = [
        [name, f"{r['cosine']:.3f} ± {r['cosine_sd']:.3f}", f"{r['scale']:.3f}", f"{r['cosine_to_bf16']:.3f}"]
        for name, r in data["rows"].items()
    ]
    return markdown(["backward", "cosine to the exact one (± sd)", "scale", "cosine to the BF16 model's"], rows)


def calibrations(files: list[dict]) -> str:
    rows = []
    for data in files:
        whole = f"{data['whole_model_s']:.0f}" + ("" if data["seconds"] == data["whole_model_s"] else " (extrapolated)")
        errors = [f"{data['means'][k]:.1f}" for k in ("w4a4_nearest", "w4a4", "a4")]
        tokens = " x ".join(map(str, data["tokens"]))
        rows.append([data["model"], str(data["layers"]), tokens, whole, f"{data['peak_gib']:.1f}", *errors])
    head = ["", "layers run", "tokens", "whole model, s", "peak GiB", "W4A4 to nearest, %", "GPTQ, %", "activations alone, %"]
    return markdown(head, rows)


def vision(data: dict) -> str:
    """Held-out error by calibration; one run each, so no variance is known."""
    kinds = list(next(iter(data["errors"].values())))
    names = [f"{kind}: image / text" for kind in kinds]
    rows = [[name, *(f"{e[k]['image']:.3f} / {e[k]['text']:.3f}" for k in kinds)] for name, e in data["errors"].items()]
    return markdown(["calibration", *names], rows)


def estimator(data: dict) -> str:
    rows = []
    for shape in dict.fromkeys(r["shape"] for r in data["rows"]):
        own = [r for r in data["rows"] if r["shape"] == shape and "ratio" in r]
        worst = max(own, key=lambda r: abs(r["ratio"] - 1))
        mean = sum(abs(r["ratio"] - 1) for r in own) / len(own)
        near = sum(abs(r["ratio"] - 1) <= 0.07 for r in own)
        where = f"{worst['ratio']:.3f} ({method(worst['case'])}, {worst['batch']} x {worst['seq']})"
        largest = max(r["peak_allocated"] for r in own)
        rows.append([SHAPES[shape], str(len(own)), str(near), f"{100 * mean:.1f} %", where, f"{largest / GB:.1f}"])
    return markdown(["", "peaks measured", "within 7 %", "mean error", "worst", "largest peak, GB"], rows)


def projection() -> str:
    """Step times of ``roofline.py``, beside the paper's one."""
    rows = []
    for card in roofline.CARDS:
        for shape in roofline.SHAPES:
            step = {a: roofline.project(card, shape, roofline.Step(accuracy=a)) for a in PRESETS}
            totals = [f"{sum(times.values()):.0f}" for times in step.values()]
            same = (card.name, shape.name) == ("RTX 5080", "Llama-3.2-1B")
            measured = f"{paper.CHECKPOINTING['PACT'][0]}" if same else ""
            rows.append([f"{card.name}, {shape.name}", *totals, measured])
    return markdown(["", *(f"`{preset}`, projected ms" for preset in PRESETS), "the paper, measured ms"], rows)


# ---------------------------------------------------------------------------------------------- accuracy in short, and time


def difference(
    accuracy: dict | None,
    one: str,
    other: str,
    weights: str = "shipped",
    tasks: Callable[[dict, str], list[str]] = summaries.counted,
    value: Callable[[dict], float | None] = summaries.score_of,
    scale: float = 100.0,
) -> tuple[float, float] | None:
    """Points (``scale`` x ``value``) that ``one`` is above ``other``, averaged over ``tasks``, and the standard error (of paired
    seeds)."""
    table = summaries.by_method(summaries.finals(accuracy["runs"], weights)) if accuracy else {}
    names = tasks(accuracy, weights) if accuracy else []
    pairs = [summaries.paired(table[task].get(one, {}), table[task].get(other, {}), value) for task in names]
    whole = summaries.combined(pairs)
    return None if whole is None else (scale * whole["mean"], scale * whole["se"])


def signed(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def points(found: tuple[float, float] | None) -> str:
    if found is None:
        return "not measured"
    return signed(found[0]) + (" (one seed)" if math.isnan(found[1]) else f" ± {found[1]:.1f}")


def verdicts(accuracy: dict, weights: str) -> list[str]:
    """What was asked of this project's recipe: within a point of BF16 LoRA on average, and not below NF4 QLoRA."""
    lines = []
    for name in ("high", "balanced_gptq", "balanced", "paper_gptq"):
        for other, title, limit in (("bf16", "BF16 LoRA", -1.0), ("nf4", "NF4 QLoRA", 0.0)):
            if found := difference(accuracy, name, other, weights):
                near = found[0] + found[1] >= limit  # false where the error is not known
                met = "met" if found[0] >= limit else "**missed**" + (", by less than the error" if near else "")
                lines.append(
                    f"`{name}`, average minus {title}'s: {points(found)} points; at least {signed(limit)} was asked for: {met}"
                    f"{_beside(accuracy, name, other, weights)}."
                )
    return lines


def _beside(accuracy: dict, name: str, other: str, weights: str) -> str:
    """The same difference in nats, and in points over the tasks that do not count as well."""
    parts = []
    if nats := difference(accuracy, name, other, weights, value=lambda run: run.get("nll"), scale=1.0):
        error = "" if math.isnan(nats[1]) else f" ± {nats[1]:.3f}"
        parts.append(f"in nats {signed(nats[0], 3)}{error}, less is better")
    if summaries.unlearnt(accuracy, weights) and (found := difference(accuracy, name, other, weights, summaries.common_tasks)):
        parts.append(f"over all tasks {points(found)} points")
    return f" ({'; '.join(parts)})" if parts else ""


def left_out(accuracy: dict, weights: str) -> list[str]:
    """Which tasks are in no average, and why."""
    return [
        f"`{task}` is in no average: BF16 LoRA scores {100 * own['mean']:.1f} ± {100 * own['se']:.1f} (standard error) there, "
        f"the untrained model {100 * before:.1f}. A score then says how little a method changed the model."
        for task, (before, own) in summaries.unlearnt(accuracy, weights).items()
    ]


def clocked(accuracy: dict, times: dict) -> list[dict]:
    """What :func:`against_time` shows, as data: average score after so many steps, and what these steps take."""
    runs, rows = accuracy["runs"], []
    for name, mean in summaries.averages(accuracy).items():
        if name not in CLOCKS:
            continue
        case, there = CLOCKS[name]
        own = [r for r in runs if r["kind"] == "final" and r["method"] == name]
        step = find(times["times"], case, *paper.ASSUMED_SHAPE).get("step_ms")
        rows.append({"name": name, "label": own[0]["label"], "median": 100 * mean["median"], "steps": own[0]["steps"]})
        rows[-1] |= {"step_ms": step, "paper": there}
    return rows


def against_time(accuracy: dict, times: dict) -> str:
    """Average score after the same number of steps, beside the time of these steps for Llama-1B's shapes (Figure 5)."""
    lines = []
    for row in clocked(accuracy, times):
        step, own = row["step_ms"], difference(accuracy, row["name"], "bf16")
        theirs = paper.ACCURACY["Llama-1B"].get(row["paper"], ((), None))[1]
        clock = paper.CHECKPOINTING.get(row["paper"])
        took = [f"{step:.1f}", f"{step * row['steps'] / 1e3:.1f}"] if step else ["–", "–"]
        lines.append(
            [row["label"], f"{row['median']:.1f}", points(own) if row["name"] != "bf16" else "–", str(row["steps"]), *took]
        )
        lines[-1] += [f"{100 * theirs:.1f}" if theirs else "–", f"{clock[0]}" if clock else "–"]
    head = ["", "average score", "minus BF16 LoRA's", "steps", "step ms", "seconds of these steps"]
    return markdown([*head, "paper: average", "paper: step ms"], lines)


def draw_clock(accuracy: dict, times: dict, path: Path) -> None:
    """Average score over the seconds that the steps take (Figure 5)."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 3.8), layout="constrained")).subplots()
    for row in clocked(accuracy, times):
        if row["step_ms"]:
            error = (difference(accuracy, row["name"], "bf16") or (0.0, 0.0))[1]
            error = 0.0 if math.isnan(error) else error
            axes.errorbar(row["step_ms"] * row["steps"] / 1e3, row["median"], yerr=error, fmt="o", label=row["label"])
    axes.set_xlabel("seconds of the steps, Llama-1B's shapes, 4 x 1024")
    axes.set_ylabel("average score, SmolLM2-135M")
    if axes.containers:
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)
