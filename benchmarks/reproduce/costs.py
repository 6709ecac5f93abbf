"""Tables and plots of what ``memory.py`` and ``step_time.py`` measured, the paper's figures beside: data in, Markdown out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import paper

GB, MIB = 1e9, 2**20
SHORT_OF = {
    "bf16": "BF16 LoRA",
    "qlora": "QLoRA",
    "liger": "Liger",
    "ckpt": "checkpointing",
    "codes": '`activations="nvfp4"`',
    "transient": "transient",
    "recompute": "recompute MLP",
    "once": "recompute attention",
    "graphs": "CUDA graphs",
    "compile": "`torch.compile`",
}


def method(case: str) -> str:
    """A case of ``bench_train.py`` in words. ``bf16`` and ``nf4`` in code are this package's backends."""
    words, *options = case.split("-")
    own = words == "nvfp4" or {"ours", "codes"} & set(options)
    title = f"`{ {'qlora': 'nf4'}.get(words, words) }`".replace(" ", "") if own else SHORT_OF[words]
    if words == "nvfp4":
        preset = next((o for o in options if o in ("paper", "high")), "balanced")
        title += f" {preset}"
    return ", ".join([title, *(SHORT_OF.get(o, o) for o in options if o not in ("ours", "paper", "balanced", "high"))])


def markdown(header: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; the first column on the left, the others on the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def points(rows: list[dict]) -> list[tuple[int, int]]:
    """(batch, length) of the rows, by length and batch."""
    return sorted({(r["batch"], r["seq"]) for r in rows if "batch" in r}, key=lambda p: (p[1], p[0]))


def cases(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(r["case"] for r in rows))


def find(rows: list[dict], case: str, batch: int, seq: int) -> dict:
    return next((r for r in rows if (r["case"], r.get("batch"), r.get("seq")) == (case, batch, seq)), {})


def gigabytes(row: dict) -> str:
    if row.get("peak_allocated"):
        return f"{row['peak_allocated'] / GB:.2f}"
    return "does not fit" if "skipped" in row else "failed" if "error" in row else "–"


def milliseconds(row: dict) -> str:
    if row.get("step_ms"):
        return f"{row['step_ms']:.1f} ({row['spread_ms']:.1f})"
    return "does not fit" if "skipped" in row else "failed" if "error" in row else "–"


# ---------------------------------------------------------------------------------------------- memory


def parts(row: dict) -> dict[str, int]:
    """What the peak is made of. *rest*: logits and their gradient, gradients, workspaces, temporary tensors."""
    kept = row.get("kept") or row.get("kept_in_layers", 0) + row.get("kept_outside", 0)
    found = {"weights": row["weights"], "adapters, optimizer": row["adapters"], "kept for backward": kept}
    return found | {"rest": max((row.get("peak_allocated") or 0) - sum(found.values()), 0)}


def composed(memory: dict) -> list[dict]:
    """Rows at batch 4 whose parts are known, by method and length."""
    rows = [r for r in memory["peaks"] if r["batch"] == 4 and "kept_in_layers" in r]
    wide = [c for c in cases(rows) if len({r["seq"] for r in rows if r["case"] == c}) > 2]
    return sorted((r for r in rows if r["case"] in wide), key=lambda r: (wide.index(r["case"]), r["seq"]))


def composition(memory: dict) -> str:
    rows = []
    for row in composed(memory):
        found = parts(row)
        total = row.get("peak_allocated") or sum(found.values())
        share = f"{100 * found['kept for backward'] / total:.0f} %"
        rows.append([method(row["case"]), str(row["seq"]), *(f"{n / GB:.2f}" for n in found.values()), gigabytes(row), share])
    return markdown(["", "length", "weights", "adapters, optimizer", "kept for backward", "rest", "peak", "kept, share"], rows)


def peaks(memory: dict) -> str:
    rows, grid = memory["peaks"], points(memory["peaks"])
    lines = [[method(c), *(gigabytes(find(rows, c, b, s)) for b, s in grid)] for c in cases(rows)]
    return markdown(["GB", *(f"{b} x {s}" for b, s in grid)], lines)


def estimates(memory: dict) -> str:
    """Estimator over measurement: rows, worst, how many within 7 %."""
    ratios = {(r["case"], r["batch"], r["seq"]): r["ratio"] for r in memory["peaks"] if "ratio" in r}
    if not ratios:
        return "No peak was measured."
    (case, batch, seq), worst = max(ratios.items(), key=lambda item: abs(item[1] - 1))
    near = sum(abs(r - 1) <= 0.07 for r in ratios.values())
    return (
        f"{near} of {len(ratios)} within 7 %; the furthest is {method(case)} at {batch} x {seq}: estimate / measured {worst:.3f}."
    )


def largest(memory: dict) -> str:
    rows = memory["largest"]
    caps = sorted({r["cap_gib"] for r in rows})
    there = {"bf16-liger": "BF16 LoRA", "qlora-liger": "QLoRA", "nvfp4-paper": "PACT"}
    lines = []
    for case in cases(rows):
        own = {r["cap_gib"]: r for r in rows if r["case"] == case}
        batches = [str(own[c].get("largest_batch", "failed")) if c in own else "–" for c in caps]
        speed = own.get(16.0, {}).get("tokens_per_s")
        batch, tokens = paper.LARGEST["Llama-1B"].get(there.get(case), ("", ""))
        theirs = [str(batch), f"{tokens:,}"] if case in there else ["", ""]
        lines.append([method(case), *batches, f"{speed:,.0f}" if speed else "–", *theirs])
    te = paper.LARGEST["Llama-1B"]["TE"]
    lines.append(["TE (paper only)", *["–"] * (len(caps) + 1), str(te[0]), f"{te[1]:,}"])
    head = ["", *(f"{c:g} GiB" for c in caps), "tokens/s at 16 GiB", "paper: batch", "paper: tokens/s"]
    return markdown(head, lines)


def saved_codes(memory: dict, times: dict | None) -> str:
    """Compressing what is saved: own baseline against compressed, as Table 10."""
    lines = []
    for (batch, seq), settings in paper.HYC_LORA_MEASURED.items():
        base = settings["Own baseline"]
        for name, (mib, ms) in settings.items():
            ratio = f"{mib / base[0]:.2f}" if mib and base[0] else "–"
            lines.append(
                [f"{batch} x {seq}", f"HyC-LoRA, {name} (paper)", f"{mib:,}" if mib else "OOM", ratio, f"{ms}" if ms else "n/a"]
            )
        base_row = find(memory["peaks"], "bf16-ours", batch, seq)
        for case in ("bf16-ours", "bf16-codes", "nvfp4-paper"):
            row = find(memory["peaks"], case, batch, seq)
            peak, first = row.get("peak_allocated"), base_row.get("peak_allocated")
            step = milliseconds(find(times["times"], case, batch, seq)) if times else "–"
            mib = f"{peak / MIB:,.0f}" if peak else gigabytes(row)
            lines.append([f"{batch} x {seq}", method(case), mib, f"{peak / first:.2f}" if peak and first else "–", step])
    return markdown(["shape", "setting", "MiB", "of own baseline", "step ms"], lines)


def checkpointing(memory: dict, times: dict | None) -> str:
    batch, seq = paper.ASSUMED_SHAPE
    mine = {
        "BF16 LoRA": ("bf16", "bf16-liger"),
        "BF16 + checkpointing": ("bf16-ckpt", "bf16-liger-ckpt"),
        "PACT": ("nvfp4-paper", "nvfp4-paper-recompute-once-graphs", "nvfp4"),
        "PACT + checkpointing": ("nvfp4-paper-ckpt", "nvfp4-ckpt"),
    }
    lines = []
    for name, (ms, gb) in paper.CHECKPOINTING.items():
        lines.append([f"{name} (paper)", f"{ms}", f"{gb:.2f}"])
        for case in mine[name]:
            step = milliseconds(find(times["times"], case, batch, seq)) if times else "–"
            lines.append([method(case), step, gigabytes(find(memory["peaks"], case, batch, seq))])
    return markdown(["", "step ms", "peak GB"], lines)


# ---------------------------------------------------------------------------------------------- time


def steps(times: dict) -> str:
    rows, grid = times["times"], points(times["times"])
    lines = [[method(c), *(milliseconds(find(rows, c, b, s)) for b, s in grid)] for c in cases(rows)]
    return markdown(["ms", *(f"{b} x {s}" for b, s in grid)], lines)


def breakdown(times: dict) -> str:
    chosen = ("bf16", "bf16-liger", "qlora-liger", "bf16-codes", "nvfp4-paper-graphs", "nvfp4-graphs")
    rows = {r["case"]: r for r in times["times"] if "times_ms" in r}
    shown = [c for c in chosen if c in rows] or list(rows)
    lines = []
    for name, (bf16, pact) in paper.BREAKDOWN.items():
        own = paper.PROFILED.get(name)
        values = [sum(rows[c]["times_ms"][k] for k in own) if own else rows[c]["total_ms"] for c in shown]
        lines.append([name, f"{bf16}", f"{pact}", *(f"{v:.1f}" for v in values)])
    launches = [f"{rows[c]['launches']:.0f}" if rows[c].get("launches") else "–" for c in shown]
    lines.append(["Launches", "–", "–", *launches])
    return markdown(["device ms", "paper: BF16 LoRA", "paper: PACT", *map(method, shown)], lines)


# ---------------------------------------------------------------------------------------------- plots


def draw_memory(memory: dict, path: Path) -> None:
    """Composition over length (Figure 1), and peak over batch at 1024 tokens."""
    rows = composed(memory)
    figure, left, right = panels(len(rows))
    bars(left, {f"{method(r['case'])}, {r['seq']}": {name: n / GB for name, n in parts(r).items()} for r in rows})
    left.set_xlabel("GB")
    left.set_title("batch 4: what the peak is made of, over sequence length", fontsize=9)
    lines(right, [r | {"y": r["peak_allocated"] / GB} for r in memory["peaks"] if r.get("peak_allocated")], "GB", "peak")
    figure.savefig(path, dpi=110)


def draw_times(times: dict, path: Path) -> None:
    """The breakdown at the first point, and step time over batch at 1024 tokens."""
    shown = [r for r in times["times"] if "times_ms" in r]
    figure, left, right = panels(len(shown))
    bars(left, {method(r["case"]): r["times_ms"] for r in shown})
    left.set_xlabel("ms on the device")
    left.set_title("where a step's time goes", fontsize=9)
    lines(right, [r | {"y": r["step_ms"]} for r in times["times"] if r.get("step_ms")], "ms", "step time")
    figure.savefig(path, dpi=110)


def panels(rows: int) -> tuple:
    """A figure with a panel of so many bars and one of curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.5 + 0.17 * rows), layout="constrained")
    return figure, *figure.subplots(1, 2)


def bars(axes, values: dict[str, dict[str, float]]) -> None:
    """Stacked, one for each title."""
    titles = [title.replace("`", "") for title in values]
    left = [0.0] * len(titles)
    for name in next(iter(values.values()), {}):
        widths = [own[name] for own in values.values()]
        axes.barh(titles, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if titles:
        axes.legend(fontsize=7, frameon=False)


def lines(axes, rows: list[dict], unit: str, what: str) -> None:
    """``y`` of every method with several batches at one length, over tokens."""
    for case in cases(rows):
        own = sorted((r["batch"] * r["seq"], r["y"]) for r in rows if r["case"] == case and r["seq"] == 1024)
        if len(own) > 1:
            axes.plot(*zip(*own), marker="o", markersize=3, linewidth=1, label=method(case).replace("`", ""))
    axes.set_xlabel("tokens of a step (rows of 1024)")
    axes.set_ylabel(unit)
    axes.set_title(f"{what} over batch", fontsize=9)
    if axes.lines:
        axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
