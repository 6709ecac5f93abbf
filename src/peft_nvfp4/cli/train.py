"""``peft-nvfp4 train``. Its flags are the fields of :class:`~peft_nvfp4.cli._run.options.TrainOptions` that have a help text."""

import inspect
import sys
import typing
from contextlib import redirect_stdout
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ._run.options import TrainOptions, gathered
from .common import UserError, command, console, quiet_libraries, write_json

ARGUMENTS = ("model", "dataset")


def pairs(text: str | None) -> dict[str, str] | None:
    """``a=b,c=d``."""
    if text is None:
        return None
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(name and sign and value for name, sign, value in parts):
        raise UserError(f"write columns as prompt=question,completion=answer, got {text!r}")
    return {name.strip(): value.strip() for name, _, value in parts}


def _parameter(field: Field, hint: Any) -> inspect.Parameter:
    """Of the command's function. None stands for: not given."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] if typing.get_origin(hint) is not dict else [str]
    words, flags = field.metadata["help"], field.metadata["flags"]
    if field.name in ARGUMENTS:
        given = typer.Argument(help=words, show_default=False)
    else:
        given = typer.Option(*flags, help=words)
    annotation = Annotated[Optional[kinds[0] if kinds else hint], given]  # noqa: UP045
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _with_flags(function: typing.Callable) -> typing.Callable:
    """The function with a parameter for every field of ``TrainOptions`` in place of ``**flags``."""
    hints = typing.get_type_hints(TrainOptions)
    flags = [_parameter(f, hints[f.name]) for f in fields(TrainOptions) if f.metadata["help"] is not None]
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    function.__signature__ = inspect.Signature([*flags, *own])
    function.__annotations__ = {p.name: p.annotation for p in (*flags, *own)}
    return function


@_with_flags
@command
def train(
    *,
    config: Annotated[Optional[Path], typer.Option("--config", "-c", help="YAML file with these options.")] = None,  # noqa: UP045
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the output's last checkpoint.")] = False,
    json_file: Annotated[Optional[str], typer.Option("--json", help="Result to this file; - is the output.")] = None,  # noqa: UP045
    **flags: Any,
) -> None:
    """Fine-tune a LoRA adapter on a frozen base, with TRL's SFTTrainer.

    Everything can also be said in one YAML file (--config), further fields of NVFP4LoraConfig and SFTConfig in it under lora: and
    trainer:. Ctrl-C stops after the running step, with a checkpoint to --resume from.
    """
    options = gathered(flags | {"columns": pairs(flags["columns"])}, config, resume)
    out = console(stderr=json_file == "-")
    say = lambda text: out.print(text, markup=False, highlight=False, soft_wrap=True)
    with quiet_libraries(), redirect_stdout(sys.stderr if json_file == "-" else sys.stdout):  # Trainer prints its progress
        from ..training.callbacks import NonFiniteError, OutOfMemory
        from ._run import training

        try:
            result = training.run(options, resume, say)
        except (NonFiniteError, OutOfMemory) as error:
            raise UserError(str(error)) from error
    write_json(asdict(result), json_file)
    loss = "" if result.loss is None else f", mean loss {result.loss:.4f}"
    score = "" if result.eval_loss is None else f", eval loss {result.eval_loss:.4f}"
    if not result.finished:
        say(f"Stopped after step {result.steps}{loss}. Go on with: peft-nvfp4 train --resume --output {result.output}")
        raise typer.Exit(130)
    say(f"{result.steps} steps in {result.seconds:.0f} s{loss}{score}. Adapter: {result.output}")
