"""``peft-nvfp4 quantize``."""

from dataclasses import asdict
from typing import Annotated, Optional

import typer

from .common import command, console, quiet_libraries, size, write_json


def say_written(out, written) -> None:
    """One line on a folder that was written."""
    before = "" if written.dense_bytes is None else f" ({size(written.dense_bytes)} in BF16)"
    out.print(
        f"{written.folder}: {size(written.bytes)}{before}, {written.packed} linears packed in NVFP4",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def names(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


@command
def quantize(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a dense model.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write.")],
    skip_modules: Annotated[Optional[str], typer.Option(help="Names to leave dense, with commas between.")] = None,  # noqa: UP045
    layers: Annotated[Optional[int], typer.Option(help="Keep only the first: a quick look.")] = None,  # noqa: UP045
    json_file: Annotated[Optional[str], typer.Option("--json", help="Write to this file; - is the output.")] = None,  # noqa: UP045
) -> None:
    """Pack a model's linears in NVFP4 and save it: 4.5 bits a weight, loaded with from_pretrained."""
    out = console(stderr=json_file == "-")
    with quiet_libraries(), out.status("Packing"):
        from ._run import conversion

        written = conversion.quantize(model, output, names(skip_modules), layers)
    write_json(asdict(written), json_file)
    say_written(out, written)
