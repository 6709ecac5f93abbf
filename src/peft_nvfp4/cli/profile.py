"""``peft-nvfp4 profile``."""

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.table import Table

from ..quantization.options import Options
from .common import base_option, command, console, quiet_libraries, write_json


@command
def profile(
    model: Annotated[str, typer.Argument(help="Folder with a config.json, Hub id, llama-1b, llama-3b or llama-8b.")],
    backend: Annotated[str, base_option("backend")] = Options.backend,
    batch: Annotated[int, typer.Option(help="Rows at a time.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens of a row.")] = 1024,
    supervised: Annotated[int, typer.Option(help="Labels at the end of each row.")] = 32,
    rank: Annotated[int, typer.Option("--rank", "-r", help="Of the adapters.")] = 16,
    accuracy: Annotated[str, base_option("accuracy")] = Options.accuracy,
    memory: Annotated[str, base_option("memory")] = Options.memory,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay recorded steps.")] = False,
    checkpointing: Annotated[bool, typer.Option(help="Checkpoint decoder layers.")] = False,
    layers: Annotated[Optional[int], typer.Option(help="Fewer layers than the model has.")] = None,  # noqa: UP045
    dtype: Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")] = "auto",
    trace: Annotated[Optional[Path], typer.Option(help="Chrome trace to this file.")] = None,  # noqa: UP045
    png: Annotated[Optional[Path], typer.Option(help="Draw times and memory.")] = None,  # noqa: UP045
    json_file: Annotated[Optional[str], typer.Option("--json", help="Write to this file; - is the output.")] = None,  # noqa: UP045
) -> None:
    """Time of a training step by category, as the paper's Table 11, with random weights of the model's shape."""
    out = console(stderr=json_file == "-")
    with quiet_libraries(), out.status("Profiling"):
        from ._run import profiling

        settings = {"r": rank, "lora_alpha": 2 * rank, "accuracy": accuracy, "memory": memory}
        sizes = {"batch": batch, "seq": seq, "supervised": supervised, "layers": layers, "dtype": dtype}
        how = {"cuda_graphs": cuda_graphs, "checkpointing": checkpointing, "trace": trace}
        result = profiling.profile(model, backend=backend, **how, **sizes, **settings)
        if png is not None:
            profiling.png(result, png)
    write_json(result, json_file)
    if json_file == "-":
        return
    out.print(_times(result))
    out.print(_dearest(result))
    for path, what in ((trace, "Chrome trace"), (png, "Drawn")):
        if path is not None:
            out.print(f"{what}: {path}", markup=False, soft_wrap=True)


def _times(result: dict) -> Table:
    kind = "device" if "device_ms" in result else "operators on the CPU"
    title = f"{result['model']}, {result['backend']}, {result['batch']} x {result['seq']} tokens, {result['device']} ({kind})"
    table = Table(title=title, title_justify="left")
    for name in ("", "ms of a step", "share"):
        table.add_column(name, justify="right" if name else "left")
    total = result["total_ms"] or 1.0
    for name, ms in result["times_ms"].items():
        table.add_row(name, f"{ms:.2f}", f"{100 * ms / total:.1f} %")
    table.add_section()
    launches = "" if result["launches"] is None else f"{result['launches']:.0f} launches"
    table.add_row("all", f"{result['total_ms']:.2f}", launches)
    return table


def _dearest(result: dict, shown: int = 8) -> Table:
    table = Table(title="what takes longest", title_justify="left")
    for name, justify in (("", "left"), ("category", "left"), ("ms", "right"), ("times", "right")):
        table.add_column(name, justify=justify, overflow="ellipsis", no_wrap=True)
    for kernel in result["kernels"][:shown]:
        row = (kernel["name"][:48].replace("[", r"\["), kernel["category"], f"{kernel['ms']:.2f}", f"{kernel['count']:.0f}")
        table.add_row(*row)
    return table
