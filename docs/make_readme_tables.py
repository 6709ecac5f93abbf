"""Figures in README and these pages, made from results files and from the estimator.

    python docs/make_readme_tables.py          # writes them into the pages

A page marks where a table goes, and the script replaces what lies between the two marks:

    <!-- made by docs/make_readme_tables.py: NAME -->
    <!-- end -->

NAME is a function of this file. A test compares the pages with what the script makes.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from peft_nvfp4.memory import BUILTIN, ModelShape, Settings, card, estimate, largest_batch, longest_context, model_shape, room

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"(<!-- made by docs/make_readme_tables\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "–"


def pages() -> list[Path]:
    """Pages that have a mark."""
    return [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if MARK.search(page.read_text("utf-8"))]


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return MARK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 150, break_long_words=False, break_on_hyphens=False)


# ---------------------------------------------------------------------------------------------- a Trainer script

METHODS = {
    "peft": "PEFT, BF16",
    "qlora": "PEFT + bitsandbytes, QLoRA",
    "unsloth": "Unsloth, QLoRA",
    "unsloth-16bit": "Unsloth, BF16",
    "nvfp4": "**`nvfp4`**",
    "nf4": "`nf4`",
    "bf16": "`bf16`",
}
"""Word of ``bench_dropin.py`` -> what README calls it. Words after a hyphen are in :data:`VARIANTS`."""
VARIANTS = {"ckpt": "`gradient_checkpointing=True`", "eager": "without recordings"}
SHAPES = {"1b": "Llama-3.2-1B", "3b": "Llama-3.2-3B", "8b": "Llama-3.1-8B"}
LENGTHS = {"fixed": "1024 tokens a row", "varied": "32 to 1024 tokens a row"}


def _method(word: str) -> str:
    """Title of a row."""
    if word in METHODS:
        return METHODS[word]
    name, *variants = word.split("-")
    return ", ".join([METHODS.get(name, f"`{name}`"), *(VARIANTS.get(variant, f"`{variant}`") for variant in variants)])


def _dropin() -> dict[tuple[str, str], dict[str, dict]]:
    """(shape, lengths) -> method -> row of the results file, of the rows that were measured."""
    groups: dict[tuple[str, str], dict[str, dict]] = {}
    for row in json.loads((RESULTS / "dropin_h200.json").read_text("utf-8"))["rows"]:
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
    order = {word: number for number, word in enumerate(METHODS)}
    header = ["", "step, median", "mean", "first half of the run", "peak of tensors", "reserved by PyTorch"]
    parts = []
    for (shape, lengths), group in _dropin().items():
        rows = [
            [_method(word), f"{row['median_ms']:.0f} ms", f"{row['mean_ms']:.0f} ms", f"{row['first_half_s']:.1f} s"]
            + [f"{row['peak_gb']:.2f} GB", f"{row['reserved_gb']:.2f} GB"]
            for word, row in sorted(group.items(), key=lambda item: (order.get(item[0].partition("-")[0], len(order)), item[0]))
        ]
        parts.append(f"### {SHAPES[shape]}, {LENGTHS[lengths]}\n\n{table(header, rows)}")
    environment = json.loads((RESULTS / "dropin_h200.json").read_text("utf-8"))["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "transformers", "peft", "bitsandbytes"))
    note = f"""Steps are those of the second half of a run. A number of tokens that is new takes a moment once, for its
        recording: that is in the first half, and in the means where lengths vary. {environment["gpu"]}, {versions}
        (`benchmarks/results/dropin_h200.json`)."""
    return "\n\n".join([*parts, paragraph(note)])


# ---------------------------------------------------------------------------------------------- what fits


def _qwen(hidden: int, intermediate: int, layers: int, heads: int, **more) -> ModelShape:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    return model_shape({"model_type": "qwen3", "tie_word_embeddings": False, **sizes, **more})


def _models() -> dict[str, ModelShape]:
    """Sizes as the models' published ``config.json`` files have them."""
    llama_70b = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    llama_70b |= {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
    return {
        "Llama-3.2-1B": BUILTIN["llama-1b"],
        "Llama-3.2-3B": BUILTIN["llama-3b"],
        "Qwen3-4B": _qwen(2560, 9728, 36, 32, tie_word_embeddings=True),
        "Llama-3.1-8B": BUILTIN["llama-8b"],
        "Qwen3-8B": _qwen(4096, 12288, 36, 32),
        "Qwen3-14B": _qwen(5120, 17408, 40, 40),
        "Qwen3-32B": _qwen(5120, 25600, 64, 64),
        "Llama-3.1-70B": model_shape(llama_70b),
    }


CARDS = ("RTX 4070", "RTX 5080", "RTX 4090", "RTX 5090", "A100 80GB")
SMALL = Settings(memory="small", checkpointing=True, cuda_graphs=True)
HOSTED = replace(SMALL, host_checkpoints=True, cuda_graphs=False)
OFFLOADED = replace(HOSTED, memory="smallest")
QLORA = Settings(backend="nf4-liger", loss="liger", checkpointing=True)
PLANS = {
    "`fast`": replace(SMALL, memory="fast", checkpointing=False),
    "`small`": replace(SMALL, checkpointing=False),
    "QLoRA": replace(QLORA, checkpointing=False),
    "`fast`, ckpt": replace(SMALL, memory="fast"),
    "`small`, ckpt": SMALL,
    "QLoRA, ckpt": QLORA,
    "`small`, ckpt on the host": HOSTED,
    "`smallest`, ckpt on the host": OFFLOADED,
}
"""What ``get_peft_model`` gives with a word of ``memory``, and PEFT on bitsandbytes with Liger's kernels."""


def _on(name: str, plan: Settings, sequence: int = 2048) -> tuple[Settings, int]:
    """A plan on a card, and the card's memory."""
    gpu = card(name)
    return replace(plan, sequence=sequence, native_fp4=gpu.fp4, workspace=gpu.workspace), gpu.memory


def _rows_that_fit(shape: ModelShape, name: str, plan: Settings) -> str:
    return str(largest_batch(shape, *_on(name, plan)) or NOT_MEASURED)


def _with_memory(name: str) -> str:
    return name if "GB" in name else f"{name}, {round(card(name).memory / 2**30)} GB"


def fits() -> str:
    """README's: rows of 2048 tokens with checkpointing: this package, QLoRA, this package with checkpoints on the host."""
    shapes = _models()
    names = ("Llama-3.2-3B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B")
    rows = [
        [name, *(" / ".join(_rows_that_fit(shapes[name], gpu, plan) for plan in (SMALL, QLORA, HOSTED)) for gpu in CARDS[:4])]
        for name in names
    ]
    return table(["", *map(_with_memory, CARDS[:4])], rows)


def fits_all() -> str:
    """A table a card: rows of 2048 tokens."""
    shapes, parts = _models(), []
    for gpu in CARDS:
        rows = [[name, *(_rows_that_fit(shape, gpu, plan) for plan in PLANS.values())] for name, shape in shapes.items()]
        parts.append(f"### {_with_memory(gpu)}\n\n{table(['', *PLANS], rows)}")
    return "\n\n".join(parts)


def longest_rows() -> str:
    """Thousands of tokens of the longest row: this package with ``small`` and with ``smallest``, QLoRA."""
    rows = [[name, *(" / ".join(_longest(shape, gpu)) for gpu in CARDS)] for name, shape in _models().items()]
    return table(["", *map(_with_memory, CARDS)], rows)


def _longest(shape: ModelShape, name: str) -> list[str]:
    cells = []
    for plan in (HOSTED, OFFLOADED):
        step = longest_context(shape, *_on(name, plan))
        cells.append(NOT_MEASURED if step is None else f"{step.settings.sequence >> 10}k")
    settings, memory = _on(name, QLORA)
    peak = lambda thousands: estimate(shape, replace(settings, sequence=thousands << 10)).peak
    longest = bisect_right(range(1, 1 << 10), room(settings, memory), key=peak)
    return [*cells, f"{longest}k" if longest else NOT_MEASURED]


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


TABLES = {f.__name__: f for f in (dropin, dropin_all, fits, fits_all, longest_rows, estimator, loss_curve, roofline)}


def main() -> None:
    for page in pages():
        page.write_text(filled(page.read_text("utf-8")), encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
