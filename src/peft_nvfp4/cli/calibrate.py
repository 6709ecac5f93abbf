"""``peft-nvfp4 calibrate``."""

from dataclasses import asdict
from typing import Annotated, Optional

import typer

from ..quantization.options import Options
from .common import base_option, command, console, quiet_libraries, write_json
from .train import pairs


@command
def calibrate(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a dense model.")],
    dataset: Annotated[str, typer.Argument(help="Texts: .txt, .jsonl, .csv, ...")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder; the same command goes on where it was stopped.")],
    method: Annotated[str, typer.Option(help="gptq or nearest.")] = "gptq",
    accuracy: Annotated[str, base_option("accuracy")] = Options.accuracy,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Choose terms by measured errors, for this share of forward work."),
    ] = None,
    offset: Annotated[bool, typer.Option(help="Subtract the mean input (of one term: balanced, paper).")] = False,
    backward: Annotated[str, typer.Option(help="Backward layouts: requantize or gptq.")] = "requantize",
    samples: Annotated[int, typer.Option(help="Sequences.")] = 128,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    columns: Annotated[Optional[str], typer.Option(help="text=body")] = None,  # noqa: UP045
    limit: Annotated[Optional[int], typer.Option(help="Rows at most.")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(help="Of the choice of texts.")] = 0,
    layers: Annotated[Optional[int], typer.Option(help="Keep only the first: a quick look.")] = None,  # noqa: UP045
    json_file: Annotated[Optional[str], typer.Option("--json", help="Write to this file; - is the output.")] = None,  # noqa: UP045
) -> None:
    """GPTQ weights, terms and offsets from a few texts, for train --calibration."""
    options = {
        **{"method": method, "accuracy": accuracy, "budget": budget, "offset": offset, "backward": backward},
        **{"samples": samples, "seq_len": seq, "batch_size": batch, "seed": seed},
    }
    out = console(stderr=json_file == "-")
    with quiet_libraries():
        from ._run import conversion

        report = conversion.calibrate(model, dataset, output, options, limit, pairs(columns) or {}, layers)
    write_json({**asdict(report), "means": report.means()}, json_file)
    out.print(str(report), markup=False, highlight=False)
    out.print(f"Train with it: peft-nvfp4 train MODEL DATA --calibration {output}", markup=False, soft_wrap=True)
