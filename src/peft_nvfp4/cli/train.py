"""``peft-nvfp4 train``. Its flags are the fields of :class:`~peft_nvfp4.cli._run.options.TrainOptions` that have a help text."""

import typing
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ._run.options import TrainOptions, gathered
from .common import Outcome, command, console, pairs, show, with_options

ARGUMENTS = ("model", "dataset")


def _flag(field: Field, hint: Any) -> tuple[Any, None]:
    """(annotation, default) for typer. None stands for: not given."""
    kind = str if typing.get_origin(hint) is dict else next((t for t in typing.get_args(hint) if t is not type(None)), hint)
    words, flags = field.metadata["help"], field.metadata["flags"]
    given = typer.Argument(help=words, show_default=False) if field.name in ARGUMENTS else typer.Option(*flags, help=words)
    return Annotated[kind | None, given], None


HINTS = typing.get_type_hints(TrainOptions)


@with_options({f.name: _flag(f, HINTS[f.name]) for f in fields(TrainOptions) if f.metadata["help"] is not None})
@command
def train(
    *,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with these options.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the output's last checkpoint.")] = False,
    **flags: Any,
) -> Outcome:
    """Fine-tune a LoRA adapter on a frozen base, with TRL's SFTTrainer.

    Everything can also be said in one YAML file (--config), further fields of NVFP4LoraConfig and SFTConfig in it under lora: and
    trainer:. Ctrl-C stops after the running step, with a checkpoint to --resume from.
    """
    from ._run import training

    options = gathered(flags | {"columns": pairs(flags["columns"])}, config, resume)
    out = console()
    result = training.run(options, resume, lambda text: show(out, text))
    loss = "" if result.loss is None else f", mean loss {result.loss:.4f}"
    score = "" if result.eval_loss is None else f", eval loss {result.eval_loss:.4f}"
    done = f"{result.steps} steps in {result.seconds:.0f} s{loss}{score}. Adapter: {result.output}"
    if not result.finished:
        done = f"Stopped after step {result.steps}{loss}. Go on with: peft-nvfp4 train --resume --output {result.output}"
    return Outcome(asdict(result), [done], 0 if result.finished else 130)
