"""The tables of dpo-and-grpo.md, out of ``benchmarks/results``."""

from __future__ import annotations

import json
from pathlib import Path

from page_parts import table

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WINDOW = 5  # steps of which the first and the last reward are means
BASES = {"merged": "BF16, adapter merged", "bf16": "BF16", "nf4": "NF4", "nvfp4": "NVFP4"}


def grpo() -> str:
    """Every seed of ``grpo_seeds.py``, and their mean."""
    runs = json.loads((RESULTS / "grpo_cpu.json").read_text("utf-8"))["runs"]
    mean = lambda values: sum(values) / len(values)
    rows = {
        str(run["seed"]): (mean(run["reward"][:WINDOW]), mean(run["reward"][-WINDOW:]), run["greedy_before"], run["greedy_after"])
        for run in runs
    }
    rows["mean"] = tuple(map(mean, zip(*rows.values())))
    header = ["seed", f"reward, first {WINDOW} steps", f"last {WINDOW} steps", "likeliest answer right, before", "after"]
    return table(header, [[name, *(f"{value:.2f}" for value in values)] for name, values in rows.items()])


def rollouts() -> str:
    """Every pair of ``rollout_drift.py``, FP32 and BF16 activations beside each other."""
    by_dtype = {
        dtype: {(row["rollouts"], row["trained"]): row for row in json.loads(path.read_text("utf-8"))["rows"]}
        for dtype in ("fp32", "bf16")
        if (path := RESULTS / f"rollout_drift_{dtype}_cpu.json").is_file()
    }
    header = ["rollouts on", "training on", "activations", "max", "mean", "KL", "k3"]
    rows = []
    for pair in next(iter(by_dtype.values())):
        for dtype, found in by_dtype.items():
            numbers = [f"{found[pair][name]:.1e}" for name in ("max", "mean", "kl", "k3")]
            rows.append([BASES[pair[0]], BASES[pair[1]], dtype.upper(), *numbers])
    return table(header, rows)
