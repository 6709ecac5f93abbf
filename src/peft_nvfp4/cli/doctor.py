"""``peft-nvfp4 doctor``."""

from typing import Annotated

import typer
from rich.text import Text

from .common import Outcome, command

STYLES = {"passed": "green", "warning": "yellow", "(FAILED|SOMETHING IS WRONG).*": "bold red", "not run": "dim"}


@command(busy="Checking")
def doctor(plain: Annotated[bool, typer.Option("--plain", help="Without colours, to paste into an issue.")] = False) -> Outcome:
    """What this machine has, what is wrong with it, and whether it computes what it should. Exit code 1 if something is wrong."""
    from ..diagnostics.doctor import run as tool

    report = tool.run()
    text = Text(str(report))
    for words, style in {} if plain else STYLES.items():
        text.highlight_regex(rf"(?m)^ *{words}", style)
    return Outcome(report.as_dict(), [text], 0 if report.ok else 1)
