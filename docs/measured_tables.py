"""Figures that were measured: tables and sentences out of ``benchmarks/results``, and of the pages that are made of them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from page_parts import paragraph, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = "–"


# ---------------------------------------------------------------------------------------------- a Trainer script

METHODS = {
    "peft": "PEFT, BF16",
    "qlora": "PEFT + bitsandbytes, QLoRA",
    "unsloth-bf16": "Unsloth, BF16",
    "unsloth": "Unsloth, QLoRA",
    "nvfp4": "**`nvfp4`**",
    "nf4": "`nf4`",
    "bf16": "`bf16`",
}
"""Word of ``bench_dropin.py`` and ``bench_unsloth.py`` -> what README calls it. Words after it are in :data:`VARIANTS`."""
VARIANTS = {"ckpt": "`gradient_checkpointing=True`", "eager": "without recordings"}
SHAPES = {"1b": "Llama-3.2-1B", "3b": "Llama-3.2-3B", "8b": "Llama-3.1-8B"}
LENGTHS = {"fixed": "1024 tokens a row", "varied": "32 to 1024 tokens a row"}
FILES = ("dropin_h200", "unsloth_h200")
"""Unsloth has a process of its own; it is in the tables where it was measured."""


def _base(word: str) -> str:
    """The word of :data:`METHODS` that a method begins with; else its own first word."""
    known = [name for name in METHODS if word == name or word.startswith(f"{name}-")]
    return max(known, key=len, default=word.partition("-")[0])


def _method(word: str) -> str:
    """Title of a row."""
    base = _base(word)
    variants = [variant for variant in word.removeprefix(base).split("-") if variant]
    return ", ".join([METHODS.get(base, f"`{base}`"), *(VARIANTS.get(variant, f"`{variant}`") for variant in variants)])


def _measured() -> dict[str, dict]:
    """The results files that are there, by name: environment and rows."""
    paths = {name: RESULTS / f"{name}.json" for name in FILES}
    return {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.exists()}


def _dropin() -> dict[tuple[str, str], dict[str, dict]]:
    """(shape, lengths) -> method -> row, of the rows that were measured."""
    groups: dict[tuple[str, str], dict[str, dict]] = {}
    for row in (row for file in _measured().values() for row in file["rows"]):
        if row.get("median_ms") is not None:
            groups.setdefault((row["shape"], row["lengths"]), {})[row["method"]] = row
    return groups


def _cells(row: dict | None) -> tuple[str, str]:
    if row is None:
        return NOT_MEASURED, NOT_MEASURED
    return f"{row['median_ms']:.0f} ({row['mean_ms']:.0f}) ms", f"{row['peak_gb']:.1f} GB"


def dropin() -> str:
    """README's: what is compared, for one shape, without variants."""
    groups = {lengths: rows for (shape, lengths), rows in _dropin().items() if shape == "1b"}
    header = ["Llama-3.2-1B"] + [cell for lengths in groups for cell in (f"{LENGTHS[lengths]}: step, median (mean)", "peak")]
    rows = []
    for word, title in METHODS.items():
        measured = [group.get(word) for group in groups.values()]
        if any(measured):
            rows.append([title, *(cell for row in measured for cell in _cells(row))])
    return table(header, rows)


def dropin_all() -> str:
    """Everything in the file: a table for each shape and lengths."""
    order = list(METHODS)
    position = lambda word: (order.index(_base(word)) if _base(word) in order else len(order), word)
    header = ["", "step, median", "mean", "first half of the run", "peak of tensors", "reserved by PyTorch"]
    parts = []
    for (shape, lengths), group in _dropin().items():
        rows = [
            [_method(word), f"{row['median_ms']:.0f} ms", f"{row['mean_ms']:.0f} ms", f"{row['first_half_s']:.1f} s"]
            + [f"{row['peak_gb']:.2f} GB", f"{row['reserved_gb']:.2f} GB"]
            for word, row in sorted(group.items(), key=lambda item: position(item[0]))
        ]
        parts.append(f"### {SHAPES[shape]}, {LENGTHS[lengths]}\n\n{table(header, rows)}")
    names = ("torch", "transformers", "peft", "bitsandbytes", "unsloth")
    versions = "; ".join(
        ", ".join([file["environment"]["gpu"], *(f"{n} {file['environment'][n]}" for n in names if n in file["environment"])])
        + f" (`benchmarks/results/{name}.json`)"
        for name, file in _measured().items()
    )
    note = f"""Steps are those of the second half of a run. A number of tokens that is new takes a moment once, for its recording:
        that is in the first half, and in the means where lengths vary. {versions}."""
    return "\n\n".join([*parts, paragraph(note)])


# ---------------------------------------------------------------------------------------------- a step, taken apart

STEPS = {
    "bf16": "BF16 LoRA, transformers + PEFT, eager",
    "bf16-liger": "the same, Liger's kernels",
    "bf16-compile": "the same, `torch.compile`",
    "qlora": "QLoRA, bitsandbytes + PEFT, eager",
    "qlora-liger": "the same, Liger's kernels",
    "nvfp4-paper-graphs": '`nvfp4`, `accuracy="paper"`, CUDA graphs',
    "nvfp4-paper-recompute-graphs": "... with the MLP's inner activation recomputed",
    "nvfp4-paper-transient-recompute-graphs": '... and with one layout of weights: `memory="small"`',
    "nvfp4-paper-transient-recompute-ckpt": "... and with gradient checkpointing, eager",
    "nvfp4-graphs": '`nvfp4`, `accuracy="balanced"`, CUDA graphs',
    "nvfp4-high-graphs": '`nvfp4`, `accuracy="high"` (the default), CUDA graphs',
}
"""Case of ``bench_train.py`` -> what it is called here."""
LARGER = {
    "bf16-liger": "BF16 LoRA, Liger's kernels",
    "qlora-liger": "QLoRA, Liger's kernels",
    "nvfp4-paper-recompute-graphs": "`nvfp4`, `paper`, inner activation recomputed, CUDA graphs",
    "nvfp4-paper-recompute-once-graphs": "the same, attention's codes recomputed",
    "nvfp4-paper-transient-recompute-once-graphs": 'the same, one layout: `memory="small"`',
    "nvfp4-graphs": "`nvfp4`, `balanced`, CUDA graphs",
}


def _csv(name: str) -> list[dict[str, str]]:
    with open(RESULTS / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def steps() -> str:
    """The 1B model: time, peak, and what a layer keeps for backward."""
    found = {row["case"]: row for row in _csv("train_h200")}
    rows = [
        [title, f"{float(found[case]['step_ms']):.1f} ({float(found[case]['step_min_ms']):.1f}) ms"]
        + [f"{float(found[case]['peak_allocated']) / 1e9:.2f} GB", _saved(found[case]["saved_allocator"])]
        for case, title in STEPS.items()
    ]
    return table(["", "step, median (least)", "peak memory", "kept for backward, per token and layer"], rows)


def _saved(text: str) -> str:
    return f"{float(text):,.0f} bytes" if text else ""


def larger() -> str:
    """3B and 8B, and the largest batches under a cap of 16 GiB."""
    steps = {(row["shape"], row["case"]): row for row in _csv("train_h200_3b_8b")}
    batches = {(r["shape"], r["case"]): r for name in ("", "_3b", "_8b") for r in _csv(f"train_h200_largest{name}")}
    rows = []
    for case, title in LARGER.items():
        cells = []
        for shape in ("3b", "8b"):
            row = steps.get((shape, case))
            cells += [f"{float(row['step_ms']):.0f} ms", f"{float(row['peak_allocated']) / 1e9:.1f} GB"] if row else ["", ""]
        rows.append([title, *cells, *(_largest(batches.get((shape, case))) for shape in ("1b", "3b", "8b"))])
    header = ["", "3B: step", "peak", "8B: step", "peak", "largest batch, tokens/s: 1B", "3B", "8B"]
    return table(header, rows)


def _largest(row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    return f"{row['largest_batch']}, {float(row['tokens_per_s']):,.0f}" if row["tokens_per_s"] else "none fits"


# ---------------------------------------------------------------------------------------------- accuracy

PRESETS = {
    '`accuracy="high"` (default)': "NVFP4 high to nearest (default)",
    '`"balanced"`': "NVFP4 balanced to nearest",
    '`"paper"`': "NVFP4 to nearest",
    '`backend="nf4"`': "NF4 QLoRA",
}
"""What a user writes -> row of REPORT.md, which is made of ``results/reproduce/accuracy.json``."""


MORE = {
    '`backend="nf4"` (QLoRA)': ("NF4 QLoRA", "none, BF16"),
    '`accuracy="high"` (the default)': ("NVFP4 high to nearest (default)", "two everywhere"),
    '`"balanced"`': ("NVFP4 balanced to nearest", "two where a norm feeds the linears"),
    '`"paper"`': ("NVFP4 to nearest", "one"),
    '`"balanced"`, GPTQ weights': ("NVFP4 balanced + GPTQ", "as above"),
    '`"paper"`, GPTQ weights (PACT)': ("NVFP4 + GPTQ (PACT)", "one"),
}
"""The same with weights of a calibration, and the terms of an activation."""


def _averages() -> list[dict[str, str]]:
    """Method of REPORT.md -> its average minus BF16 LoRA's: of the score, of nats."""
    report = (ROOT / "benchmarks" / "REPORT.md").read_text("utf-8")
    parts = []
    for head in ("| score − BF16 LoRA's |", "| nll − BF16 LoRA's |"):
        lines = report[report.index(head) :].partition("\n\n")[0].splitlines()
        parts.append({cells[1].strip(): cells[-2].strip() for cells in (line.split("|") for line in lines)})
    return parts


def presets() -> str:
    titles = ("score, points", "nats per token")
    return table(["", *PRESETS], [[title, *(found[n] for n in PRESETS.values())] for title, found in zip(titles, _averages())])


def accuracies() -> str:
    header = ["", "score, points", "held-out nats per token", "NVFP4 terms of an activation"]
    points, nats = _averages()
    return table(header, [[title, points[name], nats[name], terms] for title, (name, terms) in MORE.items()])


PERPLEXITIES = {
    ("NF4", "BF16"): ("NF4", "exact"),
    ("NVFP4 to nearest", "BF16"): ("to nearest", "exact"),
    ("NVFP4 to nearest", "one term (`paper`)"): ("to nearest", "paper"),
    ("NVFP4 to nearest", "**two terms (`high`, the default)**"): ("to nearest", "high"),
    ("BF16 weights", "one term: what activations cost alone"): ("BF16", "paper"),
    ("NVFP4, GPTQ", "one term"): ("GPTQ for paper", "as calibrated"),
    ("NVFP4, GPTQ", "one term, centred"): ("GPTQ for paper, centred", "as calibrated"),
    ("NVFP4, GPTQ", "`balanced`"): ("GPTQ for balanced", "as calibrated"),
    ("NVFP4, GPTQ (for one centred term)", "two terms (`high`)"): ("GPTQ for paper, centred", "two terms at all sites (high)"),
    ("NVFP4, GPTQ (for `balanced`)", "BF16"): ("GPTQ for balanced", "exact"),
}
"""(weights, inputs) -> the same in the words of ``perplexity.py``."""


def perplexities() -> str:
    """Nats above BF16 before training, of the weights as shipped and rotated."""
    found = []
    for weights in ("shipped", "rotated_full"):
        lines = (RESULTS / f"perplexity_{weights}_cuda.md").read_text("utf-8").splitlines()
        cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
        found.append({(row[1], row[2]): row[3].partition(" ±")[0] for row in cells})
    rows = [[*title, *(nats[key] for nats in found)] for title, key in PERPLEXITIES.items()]
    return table(["", "inputs", "shipped weights", "rotated weights"], rows)


# ---------------------------------------------------------------------------------------------- claims


def estimator() -> str:
    """How near the estimates were, of the file's own estimates."""
    rows = list(csv.DictReader((RESULTS / "peaks_h200.csv").read_text("utf-8").splitlines()))
    ratios = {(row["shape"], row["case"], row["batch"], row["seq"]): float(row["ratio"]) for row in rows}
    close = sum(abs(ratio - 1) <= 0.02 for ratio in ratios.values())
    furthest = max(ratios, key=lambda key: abs(ratios[key] - 1))
    shape, case, batch, seq = furthest
    off = ratios[furthest] - 1
    others = max(abs(ratio - 1) for key, ratio in ratios.items() if "nvfp4" not in key[1])
    return paragraph(
        f"""Against peaks measured on an H200 (Llama 1B, 3B and 8B, six settings, three sizes of batch each), {close} of
        {len(ratios)} estimates are within 2 %. The furthest is {abs(100 * off):.1f} % too {"small" if off < 0 else "large"}
        (`{case}`, {shape.upper()}, {batch} x {seq} tokens); of BF16 and QLoRA none is off by more than {100 * others:.1f} %
        (`benchmarks/results/peaks_h200.csv`). The package takes up to 4.4 % less since, by derivation; these peaks have not
        been measured again."""
    )


def demo() -> str:
    report = json.loads((RESULTS / "cpu_demo" / "demo.json").read_text("utf-8"))
    settings, base = report["settings"], report["zero_shot"]
    rows = [("before training", f"{base['accuracy']:.1%}", f"{base['nll']:.3f}", "", f"{base['linear_mb']:.0f} MB in BF16")]
    for backend, r in report["backends"].items():
        accuracy, nll, seconds = f"{r['accuracy']:.1%}", f"{r['nll']:.3f}", f"{r['train_seconds']:.0f} s"
        rows.append((f"`{backend}`", accuracy, nll, seconds, f"{r['frozen_mb']:.1f} MB"))
    threads, minutes = report["environment"]["threads"], report["total_seconds"] / 60
    how = paragraph(
        f"""What it printed on a CPU: {settings["steps"]} steps of {settings["batch_size"]} sentences, peak learning rate
        {settings["lr"]:g}, {threads} thread{"s" * (threads > 1)}, FP32, {minutes:.1f} minutes in all, on two cores
        of a server with nothing else to do (`benchmarks/results/cpu_demo`)."""
    )
    header = (f"{settings['rows']} held-out sentences", "accuracy", "NLL", "training", "frozen linears")
    return f"{how}\n\n{table(header, rows)}"


def loss_curve() -> str:
    runs = {name: run["losses"] for name, run in json.loads((RESULTS / "loss_curve.json").read_text("utf-8"))["runs"].items()}

    def apart(a: str, b: str) -> tuple[float, float]:
        """Mean and largest distance of two curves, each a mean of 20 steps."""
        smooth = [[sum(losses[i : i + 20]) / 20 for i in range(len(losses) - 19)] for losses in (runs[a], runs[b])]
        distances = [abs(x - y) for x, y in zip(*smooth)]
        return sum(distances) / len(distances), max(distances)

    devices, fusion = apart("cpu_fp32", "h200_fp32"), apart("h200_bf16", "h200_bf16_unfused")
    return paragraph(
        f"""200 steps of the demo (`accuracy="balanced"`, FP32) on a CPU and on an H200: means of 20 losses differ by
        {devices[0]:.3f} on average and {devices[1]:.3f} at most. Two runs on the H200 in BF16, with fused norms and MLPs
        and without, differ by {fusion[0]:.3f} and {fusion[1]:.3f}. One run each (`benchmarks/results/loss_curve.json`)."""
    )


def roofline() -> str:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import roofline as model

    ours, paper = model.sums()
    return paragraph(
        f"""Like for like with the paper's Table 11 (Llama-3.2-1B, RTX 5080, logits at all positions) the projection says
        {ours:.1f} ms where the paper's rows add up to {paper:.1f}: {100 * (ours / paper - 1):.0f} % more. Steps with a loss
        on few tokens are projected to take less; the paper has no such row to compare."""
    )
