"""What the commands share: where text goes, how errors look, how options of one kind are read."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from ..quantization.options import help_of

DEBUG = {"on": bool(os.environ.get("PEFT_NVFP4_DEBUG"))}
"""Set by ``--debug``: errors with their tracebacks."""

EXPECTED = (ValueError, OSError, RuntimeError, ImportError, KeyError, TypeError, NotImplementedError, AttributeError)
"""Errors that a wrong option, file or environment may raise; their message is for the user."""


EXTRA = ("trl", "datasets", "torchmetrics", "matplotlib")
"""Packages of the extra ``cli`` that only some commands need."""


class UserError(Exception):
    """Something the user can mend; the message is the whole explanation."""


def console(stderr: bool = False) -> Console:
    """For people; a log file, which has no width, gets 100 columns."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() or os.environ.get("COLUMNS") else 100)


def explained(error: BaseException) -> str:
    """One paragraph."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRA:
        return f"this command needs {error.name}: pip install 'peft_nvfp4[cli]'"
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    known = isinstance(error, UserError | ValueError | FileNotFoundError | ImportError)
    return text if known and text else f"{type(error).__name__}: {text}" if text else type(error).__name__


def command(function: Callable) -> Callable:
    """A command whose errors are one paragraph on the error stream and the exit code 1."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (typer.Exit, typer.Abort):  # which are RuntimeErrors, too
            raise
        except (UserError, *EXPECTED) as error:
            if DEBUG["on"]:
                traceback.print_exc()
            else:
                out = console(stderr=True)
                out.print(Text("Error: ", style="bold red") + Text(explained(error), style="default"))
                if not isinstance(error, UserError | ValueError | FileNotFoundError):
                    out.print(Text("(peft-nvfp4 --debug COMMAND shows where it happened)", style="dim"))
            raise typer.Exit(1) from None

    return run


def base_option(name: str, *flags: str, **settings: Any) -> Any:
    """Flag of a command for a field of :class:`~peft_nvfp4.quantization.options.Options`, with its help."""
    return typer.Option(*flags, help=help_of(name), **settings)


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.1f} MB"


def write_json(content: Any, path: str | None) -> None:
    """Nothing without a path; ``-`` is the standard output."""
    if path is None:
        return
    text = json.dumps(content, indent=1, default=str)
    if path == "-":
        print(text)
    else:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n", encoding="utf-8")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the progress bars and warnings of transformers, which would tear ours apart."""
    level, bars = logging.get_verbosity(), getattr(logging, "is_progress_bar_enabled", lambda: True)()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        if not DEBUG["on"]:
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")  # with what the model was saved with
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
