"""``peft-nvfp4 tune``."""

import torch
import typer

from ..kernels import tiers


def _obstacle() -> str:
    """Why there is nothing to tune; empty if there is."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        tiers.working_gemms("cutlass", torch.device("cuda", torch.cuda.current_device()))
    except tiers.Unavailable as reason:
        return str(reason)
    return ""


def tune() -> None:
    """Measure the tiles of the FP4 extension on this GPU, and keep the fastest of each shape for training."""
    obstacle = _obstacle()
    if obstacle:
        typer.echo(
            f"Nothing to tune: {obstacle}. Tiles belong to the FP4 extension for RTX 50xx; training works without it, and what "
            "runs instead is shown by: peft-nvfp4 doctor",
            err=True,
        )
        raise typer.Exit(1)
    from ..kernels.fp4 import tiles

    tiles.tune(say=typer.echo)
