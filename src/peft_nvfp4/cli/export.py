"""``peft-nvfp4 export``."""

from dataclasses import asdict
from typing import Annotated, Optional

import typer

from .common import command, console, quiet_libraries, write_json
from .quantize import say_written


@command
def export(
    model: Annotated[str, typer.Argument(help="Model in NVFP4 (of quantize, or merge --to nvfp4), or a dense one.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write.")],
    layout: Annotated[str, typer.Option(help="compressed-tensors (vLLM) or modelopt (TensorRT-LLM).")] = "compressed-tensors",
    layers: Annotated[Optional[int], typer.Option(help="Keep only the first: a quick look.")] = None,  # noqa: UP045
    json_file: Annotated[Optional[str], typer.Option("--json", help="Write to this file; - is the output.")] = None,  # noqa: UP045
) -> None:
    """Write an NVFP4 model in the layout of a serving engine."""
    out = console(stderr=json_file == "-")
    with quiet_libraries(), out.status("Exporting"):
        from ._run import conversion

        written, report = conversion.export(model, output, layout, layers)
    write_json({**asdict(written), "report": asdict(report)}, json_file)
    say_written(out, written)
    inexact = f"; {len(report.inexact)} global scales are off by one unit in the last place" if report.inexact else ""
    out.print(f"{layout}, {report.scheme}, {len(report.dense)} linears dense{inexact}", markup=False, highlight=False)
