"""``peft-nvfp4 statistics``."""

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..quantization.options import Options
from .common import base_option, command, console, quiet_libraries, write_json
from .train import pairs


@command
def statistics(
    dataset: Annotated[str, typer.Argument(help="A data file as for train.")],
    model: Annotated[Optional[str], typer.Option("--model", "-m", help="Folder or Hub id.")] = None,  # noqa: UP045
    adapter: Annotated[Optional[str], typer.Option(help="A trained adapter: its base and settings.")] = None,  # noqa: UP045
    backend: Annotated[str, base_option("backend")] = Options.backend,
    accuracy: Annotated[str, base_option("accuracy")] = Options.accuracy,
    calibration: Annotated[Optional[str], base_option("calibration")] = None,  # noqa: UP045
    limit: Annotated[int, typer.Option(help="Rows of the data.")] = 8,
    batch: Annotated[int, typer.Option(help="Rows at a time.")] = 2,
    max_length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    columns: Annotated[Optional[str], typer.Option(help="text=body")] = None,  # noqa: UP045
    tokens: Annotated[Optional[int], typer.Option(help="Look at so many tokens of a tensor only.")] = None,  # noqa: UP045
    layers: Annotated[Optional[int], typer.Option(help="Keep only the first: a quick look.")] = None,  # noqa: UP045
    dtype: Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")] = "auto",
    worst: Annotated[int, typer.Option(help="Rows of the table.")] = 12,
    by: Annotated[str, typer.Option(help="error, underflow or saturation.")] = "error",
    png: Annotated[Optional[Path], typer.Option(help="Heat maps, layer by linear.")] = None,  # noqa: UP045
    json_file: Annotated[Optional[str], typer.Option("--json", help="Write to this file; - is the output.")] = None,  # noqa: UP045
) -> None:
    """What quantising does to weights, activations and gradients, layer by layer, on your data.

    Nothing is trained: forward and backward passes with a fresh adapter, or with a trained one.
    """
    out = console(stderr=json_file == "-")
    with quiet_libraries(), out.status("Measuring"):
        from ._run import statistics as tools

        if by not in tools.PERCENT:
            raise ValueError(f"--by must be one of {', '.join(tools.PERCENT)}, got {by!r}")
        sizes = {"limit": limit, "batch": batch, "max_length": max_length, "rows": tokens, "layers": layers, "dtype": dtype}
        own = {"backend": backend, "accuracy": accuracy, "calibration": calibration}
        own = own if adapter is None else {}
        found = tools.measure(model, dataset, adapter=adapter, columns=pairs(columns), **sizes, **own)
        if png is not None:
            found.png(png, by)
    write_json(found.as_dict(), json_file)
    if json_file == "-":
        return
    out.print(_means(found))
    out.print(_worst(found, worst, by))
    if any(not s.used for sites in found.layers.values() for s in sites.values()):
        out.print("* not quantised by this model: what one NVFP4 term would do", markup=False)
    if png is not None:
        out.print(f"Drawn: {png}", markup=False, soft_wrap=True)


def _means(found) -> Table:
    from ..diagnostics.plots import SITES, TITLES
    from ._run import statistics as tools

    title = f"{len(found.layers)} frozen linears, on average"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("tensor", "error %", "underflow %", "saturation %"):
        table.add_column(name, justify="left" if name == "tensor" else "right")
    for site in SITES:
        if found.of(site, "amax"):
            table.add_row(TITLES[site], *(tools.percent(found.mean(site, number)) for number in tools.PERCENT))
    return table


def _worst(found, count: int, by: str) -> Table:
    from ._run import statistics as tools

    table = Table(
        title=f"the largest {by} (in per cent)", title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    for number, name in enumerate(tools.HEADER):
        wraps = {"overflow": "fold"} if number == 0 else {"no_wrap": True}
        table.add_column(name, justify="left" if number < 2 else "right", **wraps)
    for row in found.worst(count, by=by):
        table.add_row(*tools.cells(*row))
    return table
