"""Tables of memory and time, for the report, with the paper's figures beside them; and of what other benchmarks left in
``results/``. Data in, Markdown out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from .tables import PAPER, Scores, markdown

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
SHAPES = {"1b": "Llama-1B", "3b": "Llama-3B", "8b": "Llama-8B"}


def method(case: str) -> str:
    """A case of ``bench_train.py`` in words. ``bf16`` and ``nf4`` in code are this package's backends."""
    words, *options = case.split("-")
    ours = words == "nvfp4" or {"ours", "codes"} & set(options)
    title = f"`{'nf4' if words == 'qlora' else words}`" if ours else SHORT_OF[words]
    if words == "nvfp4":
        title += " " + next((o for o in options if o in ("paper", "high")), "balanced")
    return ", ".join([title, *(SHORT_OF.get(o, o) for o in options if o not in ("ours", "paper", "balanced", "high"))])


def cases(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows))


def find(rows: list[dict], case: str, batch: int, seq: int) -> dict:
    return next((r for r in rows if (r["case"], r.get("batch"), r.get("seq")) == (case, batch, seq)), {})


def _cell(row: dict, text: str | None) -> str:
    return text or ("does not fit" if "skipped" in row else "failed" if "error" in row else "–")


def gigabytes(row: dict) -> str:
    return _cell(row, f"{row['peak_allocated'] / GB:.2f}" if row.get("peak_allocated") else None)


def milliseconds(row: dict) -> str:
    return _cell(row, f"{row['step_ms']:.1f} ({row['spread_ms']:.1f})" if row.get("step_ms") else None)


def grid(unit: str, rows: list[dict], cell: Callable[[dict], str]) -> str:
    """Cases by batch and length."""
    points = sorted({(row["batch"], row["seq"]) for row in rows if "batch" in row}, key=lambda p: (p[1], p[0]))
    lines = [[method(case), *(cell(find(rows, case, b, s)) for b, s in points)] for case in cases(rows)]
    return markdown([unit, *(f"{b} x {s}" for b, s in points)], lines)


def parts(row: dict) -> dict[str, int]:
    """What the peak is made of. *rest*: logits and their gradient, gradients, workspaces, temporary tensors."""
    kept = row.get("kept") or row["kept_in_layers"] + row.get("kept_outside", 0)
    found = {"weights": row["weights"], "adapters, optimizer": row["adapters"], "kept for backward": kept}
    return found | {"rest": max((row.get("peak_allocated") or 0) - sum(found.values()), 0)}


def composed(memory: dict) -> list[dict]:
    """Rows at batch 4 whose parts are known, by method and length."""
    rows = [r for r in memory["peaks"] if r["batch"] == 4 and "kept_in_layers" in r]
    wide = [c for c in cases(rows) if len({r["seq"] for r in rows if r["case"] == c}) > 2]
    return sorted((r for r in rows if r["case"] in wide), key=lambda r: (wide.index(r["case"]), r["seq"]))


def estimates(memory: dict) -> str:
    """Estimator over measurement: rows, worst, how many within 7 %."""
    ratios = {(r["case"], r["batch"], r["seq"]): r["ratio"] for r in memory["peaks"] if "ratio" in r}
    (case, batch, seq), worst = max(ratios.items(), key=lambda item: abs(item[1] - 1))
    near = sum(abs(r - 1) <= 0.07 for r in ratios.values())
    where = f"{method(case)} at {batch} x {seq}"
    return f"{near} of {len(ratios)} within 7 %; the furthest is {where}: estimate / measured {worst:.3f}."


def largest(memory: dict) -> str:
    rows = {(row["case"], row["cap_gib"]): row for row in memory["largest"]}
    caps = sorted({cap for _, cap in rows})
    published = {name: [str(batch), f"{tokens:,}"] for name, (batch, tokens) in PAPER["largest"].items()}
    beside = {"bf16-liger": published["BF16 LoRA"], "qlora-liger": published["QLoRA"], "nvfp4-paper": published["PACT"]}
    lines = []
    for case in cases(memory["largest"]):
        batches = [_cell(row, str(row.get("largest_batch", ""))) for row in (rows.get((case, c), {}) for c in caps)]
        speed = rows.get((case, 16.0), {}).get("tokens_per_s")
        lines.append([method(case), *batches, f"{speed:,.0f}" if speed else "–", *beside.get(case, ["", ""])])
    lines.append(["TE (paper only)", *["–"] * (len(caps) + 1), *published["TE"]])
    head = ["", *(f"{c:g} GiB" for c in caps), "tokens/s at 16 GiB", "paper: batch", "paper: tokens/s"]
    return markdown(head, lines)


def saved_codes(memory: dict, times: dict) -> str:
    """Compressing what is saved: baseline against compressed, as Table 10."""
    lines = []
    for batch, seq in ((4, 512), (8, 512)):
        shape, settings = f"{batch} x {seq}", [row[2:] for row in PAPER["hyc_lora"] if row[:2] == [batch, seq]]
        first = settings[0][1]
        for name, mib, ms in settings:
            ratio = f"{mib / first:.2f}" if mib and first else "–"
            lines.append([shape, f"HyC-LoRA, {name} (paper)", f"{mib:,}" if mib else "OOM", ratio, f"{ms}" if ms else "n/a"])
        base = find(memory["peaks"], "bf16-ours", batch, seq).get("peak_allocated")
        for case in ("bf16-ours", "bf16-codes", "nvfp4-paper"):
            row = find(memory["peaks"], case, batch, seq)
            peak = row.get("peak_allocated")
            ratio = f"{peak / base:.2f}" if peak and base else "–"
            step = milliseconds(find(times["times"], case, batch, seq))
            lines.append([shape, method(case), _cell(row, f"{peak / MIB:,.0f}" if peak else None), ratio, step])
    return markdown(["shape", "setting", "MiB", "of own baseline", "step ms"], lines)


def breakdown(times: dict) -> str:
    chosen = ("bf16", "bf16-liger", "qlora-liger", "bf16-codes", "nvfp4-paper-graphs", "nvfp4-graphs")
    rows = {r["case"]: r for r in times["times"] if "times_ms" in r}
    shown = [rows[case] for case in chosen if case in rows]
    lines = []
    for name, (bf16, pact, categories) in PAPER["breakdown"].items():
        values = [sum(row["times_ms"][k] for k in categories) if categories else row["total_ms"] for row in shown]
        lines.append([name, f"{bf16}", f"{pact}", *(f"{v:.1f}" for v in values)])
    launches = [f"{row['launches']:.0f}" if row.get("launches") else "–" for row in shown]
    lines.append(["Launches", "–", "–", *launches])
    return markdown(["device ms", "paper: BF16 LoRA", "paper: PACT", *(method(row["case"]) for row in shown)], lines)


CLOCKS = {  # method of the accuracy table -> (case of step_time.py, row of the paper's Tables 2 and 9)
    "bf16": ("bf16-ours-graphs", "BF16 LoRA"),
    "nf4": ("qlora-ours-graphs", "QLoRA"),
    "paper": ("nvfp4-paper-graphs", ""),
    "paper_gptq": ("nvfp4-paper-graphs", "PACT"),
    "balanced": ("nvfp4-graphs", ""),
    "balanced_gptq": ("nvfp4-graphs", ""),
    "high": ("nvfp4-high-graphs", ""),
}


def clocked(scores: Scores, times: dict) -> list[dict]:
    """Average score after so many steps, and what these steps take for Llama-1B's shapes, by method (Figure 5)."""
    rows = []
    for name, average in scores.averages().items():
        if name in CLOCKS:
            case, row_of_paper = CLOCKS[name]
            steps = next(run["steps"] for run in scores.finals if run["method"] == name)
            step_ms = find(times["times"], case, 4, 1024).get("step_ms")
            row = {"label": scores.labels[name], "average": average, "steps": steps, "step_ms": step_ms, "paper": row_of_paper}
            row["seconds"] = step_ms and step_ms * steps / 1e3
            rows.append(row | {"difference": None if name == "bf16" else scores.mean_difference(name, "bf16")})
    return rows


def measured_on(modules: Iterable[str], others: Iterable[str], file: Mapping[str, dict]) -> str:
    """Where each file comes from. Runs of several sessions say their commits themselves."""
    rows = []
    for name, shown in (*((module, f"reproduce/{module}.json") for module in modules), *((name, name) for name in others)):
        data = file[name]
        e = data["environment"]
        commits = [run["commit"] for run in data.get("runs", ()) if "commit" in run]
        if not commits:
            kept = data.get("settings", {}).get("kept_from", "").split(", ")
            commits = [*filter(None, kept), e.get("commit", "unknown")]
        short = dict.fromkeys(c[:7] + "-dirty" * c.endswith("-dirty") for c in commits)
        versions = [e.get(k, "–") for k in ("torch", "triton", "transformers", "peft", "bitsandbytes")]
        rows.append([f"`{shown}`", e.get("gpu", "CPU"), e.get("driver", "–"), *versions, ", ".join(short)])
    return markdown(["", "GPU", "driver", "torch", "triton", "transformers", "peft", "bitsandbytes", "commit"], rows)


def larger_models(file: Mapping[str, dict], trained: Sequence[str], largest: Sequence[str]) -> str:
    """Step, peak, device time of ``bench_train.py`` at 4 x 1024, and the largest batches under 16 GiB, from the files with these
    names. Of several rows of one case the first counts."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in (row for name in trained for row in file[name]["rows"]):
        device = f"{row['device_total_ms']:.1f}" if "device_total_ms" in row else "–"
        rows.setdefault((row["shape"], row["case"]), [milliseconds(row), device, gigabytes(row), "–", "–"])
    for row in (row for name in largest for row in file[name]["rows"]):
        speed = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "–"
        cells = rows.setdefault((row["shape"], row["case"]), ["–"] * 5)
        cells[3:] = [str(row.get("largest_batch", "failed")), speed]
    lines = [[f"{SHAPES[shape]}, {method(case)}", *cells] for (shape, case), cells in sorted(rows.items(), key=lambda r: r[0][0])]
    return markdown(["", "step ms", "device ms", "peak GB", "largest batch", "tokens/s there"], lines)


def estimator(data: dict) -> str:
    rows = []
    for shape in dict.fromkeys(r["shape"] for r in data["rows"]):
        measured = [r for r in data["rows"] if r["shape"] == shape and "ratio" in r]
        worst = max(measured, key=lambda r: abs(r["ratio"] - 1))
        mean = sum(abs(r["ratio"] - 1) for r in measured) / len(measured)
        near = sum(abs(r["ratio"] - 1) <= 0.07 for r in measured)
        where = f"{worst['ratio']:.3f} ({method(worst['case'])}, {worst['batch']} x {worst['seq']})"
        most = max(r["peak_allocated"] for r in measured)
        rows.append([SHAPES[shape], str(len(measured)), str(near), f"{100 * mean:.1f} %", where, f"{most / GB:.1f}"])
    return markdown(["", "peaks measured", "within 7 %", "mean error", "worst", "largest peak, GB"], rows)
