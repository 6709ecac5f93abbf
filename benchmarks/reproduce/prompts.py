"""Rows of the data sets as what a model reads and what it should say; the forms of the prompts are in ``prompts.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

Row = Mapping[str, Any]
FORMS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
_JINJA = jinja2.Environment(keep_trailing_newline=True, autoescape=False)
_template, _expression = cache(_JINJA.from_string), cache(_JINJA.compile_expression)


@dataclass(frozen=True)
class Item:
    """One example.

    Attributes:
        context: text that loses its end where the whole is too long; may be empty.
        question: what follows it, never cut.
        target: what should be said next, with its leading space if it has one.
        candidates: what is scored; the target is ``candidates[gold]``. Empty where the answer is generated.
        group: rows of one group are in one split (a passage, a word, a question).
        subset: part of the task that is reported by itself as well.
        references: all answers that count (generation); the target is the first.
    """

    context: str
    question: str
    target: str
    candidates: tuple[str, ...] = ()
    gold: int = 0
    group: str = ""
    subset: str = ""
    references: tuple[str, ...] = ()


def item(form: str, row: Row, subset: str = "") -> Item:
    """The row in a form of ``prompts.yaml``."""
    fields = FORMS[form]
    context, question, group, gold = (
        _template(fields.get(name, "")).render(row) for name in ("context", "question", "group", "gold")
    )
    if "answers" in fields:
        references = _texts(fields["answers"], row)
        return Item(context, question, f" {references[0]}", group=group, subset=subset, references=references)
    choices = _texts(fields["choices"], row, before=" ")
    right = int(gold) if gold.isdigit() else int(gold == "True")
    return Item(context, question, choices[right], choices, right, group, subset)


def _texts(given: str | Sequence[str], row: Row, before: str = "") -> tuple[str, ...]:
    """Of an expression (``before`` stands before each text), or of templates."""
    if isinstance(given, str):
        return tuple(f"{before}{text}" for text in _expression(given)(**row))
    return tuple(_template(text).render(row) for text in given)


def lettered(row: Row) -> dict[str, Any] | None:
    """A row with "A. first\\nB. second" as options and "B. second" as answer, with ``readings`` (first, second) and ``gold`` 1.
    None if the answer is none of the options: the files have a few such rows."""
    lines = [line.strip() for line in row["options"].split("\n") if re.match(r"\s*[A-H]\.", line)]
    texts = tuple(line[2:].strip() for line in lines)
    gold = [i for i, line in enumerate(lines) if line[:2] == row["answer"].strip()[:2]]
    return {**row, "readings": texts, "gold": gold[0]} if len(gold) == 1 and len(texts) > 1 and all(texts) else None
