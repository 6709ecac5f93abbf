"""``peft-nvfp4 inspect``."""

from dataclasses import asdict
from typing import Annotated, Optional

import typer

from .common import command, console, quiet_libraries, write_json


@command
def inspect(
    adapter: Annotated[str, typer.Argument(help="Folder of the adapter.")],
    model: Annotated[Optional[str], typer.Option("--model", "-m", help="Base model (the one the adapter names).")] = None,  # noqa: UP045
    probe: Annotated[bool, typer.Option(help="Run a few tokens with and without it.")] = True,
    dtype: Annotated[str, typer.Option(help="To load in: auto, bf16, fp16 or fp32.")] = "auto",
    layers: Annotated[Optional[int], typer.Option(help="Keep only the first: a quick look.")] = None,  # noqa: UP045
    json_file: Annotated[Optional[str], typer.Option("--json", help="Write to this file; - is the output.")] = None,  # noqa: UP045
) -> None:
    """Does an adapter fit a base model, and is that the one it was trained on? Exit code 1 if it does not fit."""
    out = console(stderr=json_file == "-")
    with quiet_libraries(), out.status("Inspecting"):
        from ._run import conversion

        report = conversion.inspect(adapter, model, probe, dtype, layers)
    write_json(asdict(report), json_file)
    out.print(str(report), markup=False, highlight=False)
    raise typer.Exit(0 if report.binds else 1)
