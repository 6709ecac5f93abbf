"""``peft-nvfp4 estimate``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.table import Table

from ..memory import (
    LEVELS,
    Estimate,
    Settings,
    card,
    estimate,
    fit,
    largest_batch,
    longest_context,
    model_shape,
    parse_bytes,
    room,
)
from .common import Batch, Outcome, Rank, base_option, command, stacked_bars, table, with_options

GIB, MIB = 2**30, 2**20


OPTIONS = {
    "backend": Annotated[str, typer.Option(help="nvfp4, nf4, bf16; to compare: nf4-liger, bf16-liger.")],
    "sequence": Annotated[int, typer.Option("--seq", help="Tokens of a row.")],
    "rank": Rank,
    "targets": Annotated[str, typer.Option(help="all-linear, or names with commas between.")],
    "accuracy": Annotated[str, base_option("accuracy")],
    "memory": Annotated[str, base_option("memory")],
    "checkpointing": Annotated[bool, typer.Option(help="Keep only the inputs of decoder layers for backward.")],
    "cuda_graphs": Annotated[bool, typer.Option(help="Steps are replayed.")],
    "optimizer": Annotated[str, typer.Option(help="As transformers names it: paged_adamw_8bit, ...")],
    "loss": Annotated[str, typer.Option(help="supervised (in chunks), full (all logits at once) or liger.")],
    "positions": Annotated[int | None, typer.Option(help="Supervised positions of a row (all).")],
    "padded": Annotated[bool, typer.Option(help="Rows are padded: attention gets a mask.")],
    "cards": Annotated[int, typer.Option("--gpus", help="Each with --batch rows at a time.")],
    "strategy": Annotated[str, typer.Option(help="Of several GPUs: ddp or fsdp2.")],
}
"""Fields of :class:`~peft_nvfp4.memory.Settings`; its defaults, but for the batch."""


@with_options({name: (option, getattr(Settings, name)) for name, option in OPTIONS.items()} | {"batch": (Batch, 4)})
@command(models=False)
def estimate_command(
    model: Annotated[
        str, typer.Argument(help="Folder with a config.json, that file, a Hub id, or llama-1b, llama-3b, llama-8b.")
    ],
    card_name: Annotated[str | None, typer.Option("--card", help='A GPU: "RTX 5080".')] = None,
    max_memory: Annotated[str | None, typer.Option(help="GPU memory: 16GiB.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw it for several lengths.")] = None,
    longest: Annotated[bool, typer.Option("--longest-context", help="Instead, the longest row of each level of memory.")] = False,
    **options: Any,
) -> Outcome:
    """How much GPU memory a training step takes, from config.json alone.

    With --card or --max-memory also the largest batch that fits, and settings for the batch that was asked for; with
    --longest-context, instead, the longest row that trains on that card.
    """
    available = None if max_memory is None else parse_bytes(max_memory)
    if card_name is not None:
        gpu = card(card_name)
        options |= {"native_fp4": gpu.fp4, "workspace": gpu.workspace}
        available = available or gpu.memory
    if options["targets"] != "all-linear":
        options["targets"] = tuple(name.strip() for name in options["targets"].split(","))
    settings = Settings(**options)
    if longest:
        return _longest(model, settings, available)
    step = estimate(model_shape(model), settings)
    report, lines = step.as_dict(), _words(step)
    if available is not None:
        answers, more = _whether_it_fits(step, available)
        report, lines = report | answers, lines + more
    if png is not None:
        bars = {f"{e.settings.sequence} tokens": {name: n / GIB for name, n in e.groups().items()} for e in _over_lengths(step)}
        limit = None if available is None else room(settings, available) / GIB
        stacked_bars(bars, png, "GPU memory at the peak of a step (GiB)", _title(step), limit)
        lines.append(f"Drawn: {png}")
    return Outcome(report, [_table(step), *lines])


def _longest(model: str, settings: Settings, available: int | None) -> Outcome:
    """Tokens of the longest row, of every level of ``memory``."""
    if available is None:
        raise ValueError("the longest context is that of a GPU: name one (--card), or its memory (--max-memory)")
    shape = model_shape(model)
    steps = {level: longest_context(shape, replace(settings, memory=level), available) for level in LEVELS}
    found = {
        level: None if step is None else {"tokens": step.settings.sequence, "host_bytes": step.checkpoints + step.offloaded}
        for level, step in steps.items()
    }
    rows = [
        (level, "none", "") if entry is None else (level, f"{entry['tokens']:,}", f"{entry['host_bytes'] / GIB:.1f}")
        for level, entry in found.items()
    ]
    title = f"{shape.name or 'model'}: longest row in {available / GIB:.2f} GiB, {settings.backend}, r={settings.rank}"
    shown = table(title, ("memory", "tokens", "GiB of the host"), rows)
    note = "With gradient checkpointing; checkpoints (and with smallest the frozen weights) are in the host's memory."
    return Outcome({"model": shape.name, "memory_bytes": available, "longest_context": found}, [shown, note])


def _over_lengths(step: Estimate) -> list[Estimate]:
    """The same at sequences of half to four times the length: the paper's Figure 1."""
    s, lengths = step.settings, sorted({max(1, step.settings.sequence // 2), *(n * step.settings.sequence for n in (1, 2, 4))})
    positions = lambda n: None if s.positions is None else min(s.positions, n)
    return [estimate(step.shape, replace(s, sequence=n, positions=positions(n))) for n in lengths]


def _title(step: Estimate) -> str:
    s = step.settings
    several = f"; each of {s.cards} GPUs ({s.strategy})" if s.cards > 1 else ""
    return f"{step.shape.name or 'model'}: {s.backend}, {s.batch} x {s.sequence} tokens, r={s.rank}{several}"


def _table(step: Estimate) -> Table:
    parts = step.categories()
    bar = lambda n: Bar(max(parts.values()), 0, n, width=24)
    rows = [(name, bar(n), f"{n / GIB:.3f}", f"{100 * n / step.peak:.1f} %") for name, n in parts.items()]
    return table(_title(step), ("at the peak", "", "GiB", "share"), [*rows, ("all", "", f"{step.peak / GIB:.3f}", "")], words=2)


def _words(step: Estimate) -> list[str]:
    kept = f"{step.saved_per_token_and_layer:,} bytes per token and layer"
    if besides := step.saved_besides_per_layer:
        kept += f", and {besides / MIB:,.1f} MiB a layer besides"
    lines = [f"The peak is at: {step.at}. Kept for backward: {kept}."]
    if step.settings.cards > 1:
        s = step.settings
        rows = "1 row" if s.batch == 1 else f"{s.batch} rows"
        lines.append(f"Each of {s.cards} GPUs takes {rows}: {s.batch * s.cards} at a time.")
    if step.offloaded:
        lines.append(f"{step.offloaded / GIB:.2f} GiB of frozen weights are in the host's memory, and of two layers on the GPU.")
    if step.host:
        lines.append(f"The paged optimizer may keep {step.host / GIB:.2f} GiB in the host's memory.")
    return lines + [f"Note: {note}." for note in step.notes]


def _whether_it_fits(step: Estimate, available: int) -> tuple[dict[str, Any], list[str]]:
    """(for JSON, in words): whether the step fits into so much memory of a GPU, the largest batch, and what would make it fit."""
    shape, s = step.shape, step.settings
    limit, largest = room(s, available), largest_batch(shape, s, available)
    fits = step.peak <= limit
    report = {"memory_bytes": available, "usable_bytes": limit, "fits": fits, "largest_batch": largest}
    line = (
        f"{available / GIB:.2f} GiB of GPU memory hold {limit / GIB:.2f} GiB of tensors (CUDA and the allocator take the rest): "
        f"{'it fits' if fits else 'it does not fit'}. Largest batch at this length: {largest}."
    )
    if fits:
        return report, [line]
    try:
        plan = fit(shape, s, available, s.batch)
    except ValueError as error:
        return report, [line, f"Nothing makes it fit: {error}."]
    chosen, changed = plan.settings, "; ".join(plan.changed) or "nothing else changed"
    report["plan"] = {"batch": chosen.batch, "accumulation": chosen.accumulation, "changed": list(plan.changed)}
    advice = (
        f"{s.batch} rows a step fit as {chosen.accumulation} x {chosen.batch} ({changed}): {plan.estimate.peak / GIB:.2f} GiB. "
        "peft-nvfp4 train --max-memory does this by itself."
    )
    return report, [line, advice]
