"""What a check says: passed, noticed, failed or not run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from ...kernels.implementations import first_line

PASSED, WARNING, FAILED, NOT_RUN = "passed", "warning", "FAILED", "not run"


@dataclass(frozen=True)
class Result:
    """One check."""

    group: str
    name: str
    outcome: str
    detail: str = ""  # the result in words, or why it was not run


class Noticed(Exception):
    """Not wrong, but worth a line in the report."""


def checked(group: str, check: Callable[..., str], *arguments: object, name: str = "") -> Result:
    """Runs a check, which returns the detail or raises AssertionError or :class:`Noticed` with it. The name is the function's by
    default."""
    try:
        outcome, detail = PASSED, check(*arguments)
    except Noticed as reason:
        outcome, detail = WARNING, str(reason)
    except AssertionError as wrong:
        outcome, detail = FAILED, " ".join(str(wrong).split())
    except Exception as error:  # the report is for finding out what happens on unknown machines: everything is kept
        frame = traceback.extract_tb(error.__traceback__)[-1]
        outcome, detail = FAILED, f"{first_line(error)} ({frame.name}, line {frame.lineno})"
    return Result(group, name or check.__name__.replace("_", " "), outcome, detail)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
