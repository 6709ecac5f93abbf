"""``peft-nvfp4 doctor``."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from ..diagnostics.doctor import run as tool
from ..diagnostics.doctor.results import FAILED, NOT_RUN, PASSED, WARNING, Result
from .common import quiet_libraries

STYLES = {PASSED: "green", WARNING: "yellow", FAILED: "bold red", NOT_RUN: "dim"}


def _table(title: str, columns: list[str], rows: list[tuple[str, ...]], styles: list[str] | None = None) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(columns), expand=False)
    for name in columns or [""] * len(rows[0]):
        table.add_column(name, overflow="fold")
    for i, row in enumerate(rows):
        table.add_row(*row, style=styles[i] if styles else None)
    return table


def _show(console: Console, report: tool.Report) -> None:
    escape = lambda text: str(text).replace("[", r"\[")
    console.print(_table("machine", [], [(name, escape(value)) for name, value in report.machine.items()]))
    if report.advice:
        rows = [("WRONG" if a.wrong else "note", escape(a.text)) for a in report.advice]
        console.print(_table("set-up", [], rows, ["bold red" if a.wrong else "" for a in report.advice]))
    rows = [(o.operator, o.implementation, escape(o.note)) for o in report.kernels.operators]
    rows += [("", f"not {implementation}", escape(reason)) for implementation, reason in report.kernels.skipped.items()]
    console.print(_table("kernels", ["operator", "implementation", "note"], rows))
    rows = [(c.outcome, c.group, c.name, escape(c.detail)) for c in report.checks]
    styles = [STYLES[c.outcome] for c in report.checks]
    console.print(_table("checks", ["", "of", "check", "what was found"], rows, styles))
    console.print(report.verdict, style="green" if report.ok else "bold red")


def doctor(
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Also write the report to this file.")] = None,  # noqa: UP045
    plain: Annotated[bool, typer.Option("--plain", help="Text instead of tables, to paste into an issue.")] = False,
) -> None:
    """What this machine has, what is wrong with it, and whether it computes what it should. Exit code 1 if something is wrong."""
    console = Console()

    def say(result: Result) -> None:
        if result.outcome == FAILED and not plain:
            console.print(f"FAILED {result.group}: {result.name}", style="red", markup=False)

    with quiet_libraries():
        report = tool.run(say)
    if plain:
        print(report)
    else:
        _show(console, report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    raise typer.Exit(0 if report.ok else 1)
