"""``peft-nvfp4 estimate``."""

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.bar import Bar
from rich.table import Table

from ..memory import Estimate, Settings, card, estimate, fit, largest_batch, model_shape, parse_bytes, room
from ..memory import draw as drawing
from .common import base_option, command, console, write_json

GIB, MIB = 2**30, 2**20


def _settings(options: dict, card_name: str | None) -> tuple[Settings, int | None]:
    """(settings, memory of the card)."""
    if card_name is None:
        return Settings(**options), None
    found = card(card_name)
    return Settings(**options, native_fp4=found.fp4, workspace=found.workspace), found.memory


def _table(found: Estimate) -> Table:
    s = found.settings
    title = f"{found.shape.name or 'model'}: {s.backend}, {s.batch} x {s.sequence} tokens, r={s.rank}"
    title += f"; each of {s.cards} GPUs ({s.strategy})" if s.cards > 1 else ""
    table = Table(title=title, title_justify="left")
    for name, justify in (("at the peak", "left"), ("", "left"), ("GiB", "right"), ("share", "right")):
        table.add_column(name, justify=justify)
    parts = found.categories()
    for name, n in parts.items():
        table.add_row(name, Bar(max(parts.values()), 0, n, width=24), f"{n / GIB:.3f}", f"{100 * n / found.peak:.1f} %")
    table.add_section()
    table.add_row("all", "", f"{found.peak / GIB:.3f}", "")
    return table


def _words(found: Estimate) -> list[str]:
    kept = f"{found.saved_per_token_and_layer:,} bytes per token and layer"
    if besides := found.saved_besides_per_layer:
        kept += f", and {besides / MIB:,.1f} MiB a layer besides"
    lines = [f"The peak is at: {found.at}. Kept for backward: {kept}."]
    if found.settings.cards > 1:
        s = found.settings
        rows = "1 row" if s.batch == 1 else f"{s.batch} rows"
        lines.append(f"Each of {s.cards} GPUs takes {rows}: {s.batch * s.cards} at a time.")
    if found.offloaded:
        lines.append(f"{found.offloaded / GIB:.2f} GiB of frozen weights are in the host's memory, and of two layers on the GPU.")
    if found.host:
        lines.append(f"The paged optimizer may keep {found.host / GIB:.2f} GiB in the host's memory.")
    return lines + [f"Note: {note}." for note in found.notes]


@command
def estimate_command(
    model: Annotated[
        str, typer.Argument(help="Folder with a config.json, that file, a Hub id, or llama-1b, llama-3b, llama-8b.")
    ],
    backend: Annotated[str, typer.Option(help="nvfp4, nf4, bf16; to compare: nf4-liger, bf16-liger.")] = "nvfp4",
    batch: Annotated[int, typer.Option(help="Rows at a time.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens of a row.")] = 1024,
    rank: Annotated[int, typer.Option("--rank", "-r", help="Of the adapters.")] = 16,
    targets: Annotated[str, typer.Option(help="all-linear, or names with commas between.")] = "all-linear",
    accuracy: Annotated[str, base_option("accuracy")] = Settings.accuracy,
    memory: Annotated[str, base_option("memory")] = Settings.memory,
    checkpointing: Annotated[bool, typer.Option(help="Keep only the inputs of decoder layers for backward.")] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="Steps are replayed.")] = False,
    optimizer: Annotated[str, typer.Option(help="As transformers names it: paged_adamw_8bit, ...")] = "adamw_torch_fused",
    loss: Annotated[str, typer.Option(help="supervised (in chunks), full (all logits at once) or liger.")] = "supervised",
    positions: Annotated[Optional[int], typer.Option(help="Supervised positions of a row (all).")] = None,  # noqa: UP045
    padded: Annotated[bool, typer.Option(help="Rows are padded: attention gets a mask.")] = False,
    card_name: Annotated[Optional[str], typer.Option("--card", help='A GPU: "RTX 5080".')] = None,  # noqa: UP045
    gpus: Annotated[int, typer.Option(help="Each with --batch rows at a time.")] = 1,
    strategy: Annotated[str, typer.Option(help="Of several GPUs: ddp or fsdp2.")] = "ddp",
    max_memory: Annotated[Optional[str], typer.Option(help="GPU memory: 16GiB.")] = None,  # noqa: UP045
    png: Annotated[Optional[Path], typer.Option(help="Draw it for several lengths.")] = None,  # noqa: UP045
    json_file: Annotated[Optional[str], typer.Option("--json", help="Write to this file; - is the output.")] = None,  # noqa: UP045
) -> None:
    """How much GPU memory a training step takes, from config.json alone.

    With --card or --max-memory also the largest batch that fits, and settings for the batch that was asked for.
    """
    names = targets if targets == "all-linear" else tuple(name.strip() for name in targets.split(","))
    options = {
        **{"backend": backend, "batch": batch, "sequence": seq, "rank": rank, "targets": names, "accuracy": accuracy},
        **{"memory": memory, "checkpointing": checkpointing, "cuda_graphs": cuda_graphs, "optimizer": optimizer, "loss": loss},
        **{"positions": positions, "padded": padded, "cards": gpus, "strategy": strategy},
    }
    settings, available = _settings(options, card_name)
    available = parse_bytes(max_memory) if max_memory is not None else available
    shape = model_shape(model)
    found = estimate(shape, settings)
    report, lines = found.as_dict(), _words(found)
    if available is not None:
        largest = largest_batch(shape, settings, available)
        limit = room(settings, available)
        report |= {"memory_bytes": available, "usable_bytes": limit, "fits": found.peak <= limit}
        report["largest_batch"] = largest
        lines.append(
            f"{available / GIB:.2f} GiB of GPU memory hold {limit / GIB:.2f} GiB of tensors (CUDA and the allocator take "
            f"the rest): {'it fits' if report['fits'] else 'it does not fit'}. Largest batch at this length: {largest}."
        )
        if not report["fits"]:
            lines.append(_advice(shape, settings, available, report))
    if png is not None:
        several = drawing.over_lengths(found)
        title = f"{shape.name or 'model'}, {backend}, batch {batch}, LoRA r={rank}"
        title += f", {gpus} GPUs ({strategy})" if gpus > 1 else ""
        limit = None if available is None else room(settings, available)
        drawing.png(several, [f"{e.settings.sequence} tokens" for e in several], png, title, limit)
        lines.append(f"Drawn: {png}")
    write_json(report, json_file)
    if json_file == "-":
        return
    out = console()
    out.print(_table(found))
    for line in lines:
        out.print(line, markup=False, highlight=False)


def _advice(shape, settings: Settings, memory: int, report: dict) -> str:
    try:
        plan = fit(shape, settings, memory, settings.batch)
    except ValueError as error:
        return f"Nothing makes it fit: {error}."
    s = plan.settings
    report["plan"] = {"batch": s.batch, "accumulation": s.accumulation, "changed": list(plan.changed)}
    changed = "; ".join(plan.changed) or "nothing else changed"
    return (
        f"{settings.batch} rows a step fit as {s.accumulation} x {s.batch} ({changed}): {plan.estimate.peak / GIB:.2f} GiB. "
        "peft-nvfp4 train --max-memory does this by itself."
    )
