"""What the commands share: the shape of a command, options that several have, how tables and errors look.

``--help`` imports every module of this package, so none of them imports PyTorch, transformers or PEFT before a command runs:
functions import what they need.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..quantization.options import help_of
from ._run.folders import check_writable

DEBUG = {"on": bool(os.environ.get("PEFT_NVFP4_DEBUG"))}
"""Set by ``--debug``: errors with their tracebacks."""
EXTRA = ("trl", "datasets", "torchmetrics", "matplotlib")
"""Packages of the extra ``cli`` that only some commands need."""
EXPLAINED = (ValueError, FileNotFoundError, ImportError)
"""Errors whose message is the whole explanation; those of training are, too (:func:`_explained`)."""

Json = Annotated[str | None, typer.Option("--json", help="Write to this file; - is the output.")]
Output = Annotated[str, typer.Option("--output", "-o", help="Folder to write.")]
Base = Annotated[str | None, typer.Option("--model", "-m", help="Folder or Hub id (the one the adapter names).")]
Columns = Annotated[str | None, typer.Option(help="prompt=question, completion=answer")]
Limit = Annotated[int | None, typer.Option(help="Rows at most.")]
Batch = Annotated[int, typer.Option(help="Rows at a time.")]
Rank = Annotated[int, typer.Option("--rank", "-r", help="Of the adapters.")]
Layers = Annotated[int | None, typer.Option(help="Keep only the first: a quick look.")]
Dtype = Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")]


class Outcome(NamedTuple):
    """Of a command: what ``--json`` writes, what people see (texts and rich's tables), the exit code."""

    content: Any
    shown: Iterable[Any] = ()
    code: int = 0


def command(function: Callable[..., Outcome] | None = None, *, busy: str = "", models: bool = True) -> Callable:
    """A command out of a function that returns an :class:`Outcome`: with the option ``--json`` (``-``: the JSON is all that goes
    to the standard output), libraries that are quiet, and errors of one paragraph on the error stream with the exit code 1.
    ``busy`` is shown while the function runs; without it progress bars are. ``models=False``: it works without PyTorch,
    transformers and PEFT."""
    if function is None:
        return functools.partial(command, busy=busy, models=models)

    @with_options({"json_file": (Json, None)})
    @functools.wraps(function)
    def run(*, json_file: str | None = None, **options: Any) -> None:
        try:
            for path in (json_file, options.get("png"), options.get("trace")):
                if path not in (None, "-"):
                    check_writable(Path(path).parent)  # before hours of work
            with redirect_stdout(sys.stderr if json_file == "-" else sys.stdout):
                out = console()
                with out.status(busy) if busy else nullcontext(), libraries(bars=not busy) if models else nullcontext():
                    content, shown, code = function(**options)
                for item in shown:
                    show(out, item)
            write_json(content, json_file)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:  # any error is reported in one paragraph; --debug shows where it happened
            report(error)
            raise typer.Exit(1) from None
        if code:
            raise typer.Exit(code)

    return run


def with_options(options: dict[str, tuple[Any, Any]]) -> Callable[[Callable], Callable]:
    """Decorator: gives a function with ``**`` parameters that typer makes options of, name -> (annotation, default)."""

    def decorated(function: Callable) -> Callable:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
        function.__signature__ = inspect.Signature(parameters)
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorated


def base_option(name: str) -> Any:
    """Flag of a command for a field of :class:`~peft_nvfp4.quantization.options.Options`, with its help."""
    return typer.Option(help=help_of(name))


Calibration = Annotated[str | None, base_option("calibration")]


def pairs(text: str | None) -> dict[str, str] | None:
    """``a=b,c=d``."""
    if text is None:
        return None
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(name and sign and value for name, sign, value in parts):
        raise ValueError(f"write columns as prompt=question,completion=answer, got {text!r}")
    return {name.strip(): value.strip() for name, _, value in parts}


def console(stderr: bool = False) -> Console:
    """For people; a log file, which has no width, gets 100 columns."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() or os.environ.get("COLUMNS") else 100)


def show(out: Console, item: Any) -> None:
    """A text as it is, or a table."""
    out.print(item, markup=False, highlight=False, soft_wrap=not isinstance(item, Table))


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]], words: int = 1) -> Table:
    """A table whose first columns are ``words``; the others are numbers, to the right. Texts are shown as they are, whatever rich
    would read in their brackets and colons."""
    result = Table(title=Text(title, "table.title"), title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for number, name in enumerate(header):
        result.add_column(Text(name), justify="left" if number < words else "right", no_wrap=number > 0, overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return result


def stacked_bars(bars: Mapping[str, Mapping[str, float]], path: Path, unit: str, title: str, limit: float | None = None) -> None:
    """Draw a bar for each label, a part of it for each name, and a line across at the limit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 2.6 + 1.3 * len(bars)), 4.6), layout="constrained")
    axes, heights = figure.subplots(), [0.0] * len(bars)
    for name in dict.fromkeys(name for parts in bars.values() for name in parts):
        sizes = [parts.get(name, 0.0) for parts in bars.values()]
        drawn = axes.bar(list(bars), sizes, bottom=heights, label=name, width=0.65)
        heights = [height + size for height, size in zip(heights, sizes)]
    axes.bar_label(drawn, [f"{height:.2f}" for height in heights], padding=2, fontsize=9)
    if limit is not None:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label="fits below")
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.margins(y=0.12)
    figure.legend(loc="outside right center", fontsize=8, reverse=True)
    figure.savefig(path, dpi=140)


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


def report(error: Exception) -> None:
    """On the error stream: one paragraph, or the traceback with ``--debug``."""
    if DEBUG["on"]:
        traceback.print_exc()
        return
    words = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in EXTRA:
        words = f"this command needs {error.name}: pip install 'peft_nvfp4[cli]'"
    if not _explained(error) or not words:
        words = f"{type(error).__name__}: {words}"
    out = console(stderr=True)
    out.print(Text("Error: ", style="bold red") + Text(words, style="default"), soft_wrap=True)  # paths stay whole
    if not _explained(error):
        out.print(Text("(peft-nvfp4 --debug COMMAND shows where it happened)", style="dim"))


def _explained(error: Exception) -> bool:
    training = sys.modules.get("peft_nvfp4.training.callbacks")  # where it is not imported, its errors were not raised
    return isinstance(error, EXPLAINED + (() if training is None else (training.NonFiniteError, training.OutOfMemory)))


@contextmanager
def libraries(bars: bool = False) -> Iterator[None]:
    """The package with its hooks into PEFT, and transformers without warnings, and without progress bars (its own, and ours of
    freezing, calibrating and merging) where they would tear another line apart."""
    from transformers.utils import logging

    from .. import api  # noqa: F401  installs the hooks

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not bars:
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
            if shown:
                logging.enable_progress_bar()
