"""``peft-nvfp4 chat``: talk to what was trained."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .common import Base, Calibration, Dtype, Layers, Outcome, command, console, show

QUIT, RESET = ("/quit", "/exit"), "/reset"


@command
def chat(
    folder: Annotated[str, typer.Argument(help="Folder of the adapter; or a model, folder or Hub id.")],
    model: Base = None,
    system: Annotated[str | None, typer.Option(help="The system's message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 1024,
    temperature: Annotated[float | None, typer.Option(help="0: the likeliest token (the model's setting).")] = None,
    calibration: Calibration = None,
    dtype: Dtype = "auto",
    layers: Layers = None,
) -> Outcome:
    """Talk to a model, with the adapter that was just trained.

    /reset forgets the conversation, /quit leaves, Ctrl-C stops an answer. Without a terminal, lines of the input are questions.
    """
    from ._run import chatting, models

    adapter = folder if (Path(folder) / models.ADAPTER).is_file() else None
    out, interactive = console(), sys.stdin.isatty()
    with out.status("Loading"):
        loaded, tokenizer = models.load_with_adapter(folder if adapter is None else model, adapter, dtype, layers, calibration)
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if temperature is not None:
        how |= {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature > 0 else {})
    talk = chatting.Chat(loaded, tokenizer, system, models.training_options(adapter).get("template"), **how)
    if interactive:
        hint = "" if talk.remembers else " This tokenizer has no chat template: every question is a prompt of its own."
        out.print(f"/reset forgets, /quit leaves, Ctrl-C stops an answer.{hint}", style="dim", highlight=False)
    for question in _questions(out, interactive):
        if question == RESET:
            talk.reset()
            continue
        try:
            answer = talk.answer(question, lambda text: out.print(text, end="", markup=False, highlight=False, soft_wrap=True))
        except ValueError as error:  # the conversation is too long: it may go on after /reset
            if not interactive:
                raise
            show(out, f"{error}")
            continue
        out.print()
        if interactive:
            stopped = ", stopped" if answer.stopped else ""
            speed = f"{answer.tokens} tokens, {answer.tokens / answer.seconds:.1f} a second{stopped}"
            out.print(speed, style="dim", highlight=False)
    return Outcome({"messages": talk.messages})


def _questions(out: Console, interactive: bool) -> Iterator[str]:
    """Lines that are not empty, until /quit or the end of the input. At a terminal Ctrl-C forgets the line."""
    if interactive:
        try:
            import readline  # noqa: F401  arrow keys; not on Windows
        except ImportError:
            out.print("no line editing: Python has no readline here", style="dim")
    while True:
        try:
            line = out.input("[bold]>[/bold] ") if interactive else sys.stdin.readline()
        except KeyboardInterrupt:
            out.print()
            continue
        except EOFError:
            out.print()
            return
        if not interactive and not line:
            return
        if (line := line.strip()) in QUIT:
            return
        if line:
            yield line
