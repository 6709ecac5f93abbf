"""Steps under a cap on the GPU's memory, as they were measured: long contexts and whole mixtures."""

from __future__ import annotations

import json

from measured_tables import RESULTS, SHAPES
from page_parts import paragraph, table

GIB = 1 << 30
MODELS = SHAPES | {"32b": "32B", "70b": "Llama-3.1-70B", "qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "gpt-oss-20b"}
LAYERS = {"8b": 32, "32b": 64, "70b": 80}
UNSLOTH = {8: 2_972, 12: 21_848, 16: 40_724, 24: 78_475, 48: 191_728, 80: 342_733}
"""GiB -> tokens of Llama-3.1-8B, QLoRA r=32, batch 1: Unsloth's own table in its documentation."""
UNSLOTH_70B = {80: 89_389}


def _published(row: dict) -> str:
    found = {"8b": UNSLOTH, "70b": UNSLOTH_70B}.get(row["shape"], {}).get(int(row["cap_gib"]))
    return f"{found:,}" if found else "–"


def contexts() -> str:
    """Of ``bench_context.py``: what ran under which cap."""
    file = json.loads((RESULTS / "context_h200.json").read_text("utf-8"))
    ran = sorted((row for row in file["rows"] if row.get("fits")), key=lambda r: (LAYERS[r["shape"]], r["cap_gib"], r["length"]))
    rows = []
    for row in ran:
        whole = row["layers"] == LAYERS[row["shape"]]
        layers = "all" if whole else f"{row['layers']} of {LAYERS[row['shape']]}"
        step = f"{row['seconds']:.1f} s" if whole else "–"
        memory = [f"{row['peak'] / GIB:.2f} GiB", f"{row['estimate'] / GIB:.2f} GiB"]
        rows.append([MODELS[row["shape"]], f"{row['cap_gib']:.0f} GiB", f"`{row['memory']}`", f"{row['length']:,}", layers])
        rows[-1] += [step, *memory, _published(row)]
    header = ["", "cap", "`memory`", "tokens", "layers that compute", "step", "peak", "estimate", "Unsloth's own table, longest"]
    return table(header, rows)


def mixtures() -> str:
    """Of ``bench_mixture.py``."""
    rows = []
    for name in ("mixture_h200", "gpt_oss_h200"):
        path = RESULTS / f"{name}.json"
        for row in json.loads(path.read_text("utf-8"))["rows"] if path.exists() else ():
            if row.get("fits"):
                memory = "dense, BF16" if row["memory"] == "dense" else f"`{row['memory']}`, `{row['optimizer']}`"
                cap = f"{row['cap']:.0f} GiB" if row["cap"] else "none"
                figures = [f"{row['seconds']:.2f} s", f"{row['tokens_per_s']:,.0f}", f"{row['peak'] / GIB:.2f} GiB"]
                rows.append([MODELS[row["shape"]], memory, cap, *figures, f"{row['estimate'] / GIB:.2f} GiB"])
    note = """One row of 4,096 tokens, LoRA r=16 on attention and experts, gradient checkpointing, a step's median
        (`benchmarks/bench_mixture.py`, `benchmarks/results/mixture_h200.json`)."""
    header = ["", "base and optimizer", "cap", "step", "tokens/s", "peak", "estimate"]
    return f"{table(header, rows)}\n\n{paragraph(note)}"
