"""``peft-nvfp4 merge``."""

from dataclasses import asdict
from typing import Annotated, Optional

import typer

from .common import command, console, quiet_libraries, write_json
from .quantize import say_written


@command
def merge(
    adapter: Annotated[str, typer.Argument(help="Folder of the adapter.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write.")],
    model: Annotated[Optional[str], typer.Option("--model", "-m", help="Base model (the one the adapter names).")] = None,  # noqa: UP045
    to: Annotated[str, typer.Option(help="bf16, fp16, fp32 or nvfp4.")] = "bf16",
    layout: Annotated[str, typer.Option(help="Of a model in nvfp4: compressed-tensors or modelopt.")] = "compressed-tensors",
    gguf: Annotated[bool, typer.Option("--gguf", help="Write a dense model as model.gguf, too (llama.cpp).")] = False,
    probe: Annotated[Optional[str], typer.Option(help="Data on which to compare the logits: a file.")] = None,  # noqa: UP045
    dtype: Annotated[str, typer.Option(help="To load in: auto, bf16, fp16 or fp32.")] = "auto",
    layers: Annotated[Optional[int], typer.Option(help="Keep only the first: a quick look.")] = None,  # noqa: UP045
    json_file: Annotated[Optional[str], typer.Option("--json", help="Write to this file; - is the output.")] = None,  # noqa: UP045
) -> None:
    """Merge an adapter into its base model, and say how much of it is left."""
    out = console(stderr=json_file == "-")
    with quiet_libraries(), out.status("Merging"):
        from ._run import conversion

        written, report = conversion.merge(adapter, output, model, to, layout, probe, dtype, layers, gguf)
    write_json({**asdict(written), "report": asdict(report)}, json_file)
    out.print(str(report), markup=False, highlight=False)
    say_written(out, written)
