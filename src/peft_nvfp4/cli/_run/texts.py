"""Rows of data for the commands: read by the ``datasets`` library, in the formats of TRL's ``SFTTrainer`` and one more.

| format | a row has | learned, or scored |
|---|---|---|
| ``chat`` | ``messages`` (or ``conversations``): a list of ``{"role", "content"}`` | what the assistant says |
| ``prompt`` | ``prompt`` and ``completion``, texts or lists of messages | the completion |
| ``classification`` | ``text`` and ``label`` | the label after the text |
| ``text`` | ``text`` (a .txt file is one row for each paragraph) | everything |

Files: .jsonl, .json, .csv, .tsv, .parquet, .txt. Any other name is that of a data set on the Hub, or of a folder with one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pandas
from trl import apply_chat_template, is_conversational, maybe_convert_to_chatml

datasets.disable_progress_bars()  # the commands print their own progress and errors
datasets.logging.set_verbosity(logging.CRITICAL)

FORMATS = {"chat": ("messages",), "prompt": ("prompt", "completion"), "classification": ("text", "label"), "text": ("text",)}
"""Format -> columns of a row. The first whose columns are all there is what a file is taken for."""
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}
"""End of a file's name -> builder of the ``datasets`` library."""
TEMPLATE = "{text}\nLabel:"
"""Of a classification's prompt."""
MOST_LABELS = 100
"""A classification with more labels is none: every row is scored with each of them."""


@dataclass
class Rows:
    """A data set."""

    format: str  # a word of FORMATS
    data: datasets.Dataset  # with the columns messages, text, or prompt and completion
    labels: Sequence[str] = ()  # of a classification: its completions, in the order in which they came

    @property
    def conversational(self) -> bool:
        """Rows are lists of messages, of which the tokenizer's chat template makes a text."""
        return is_conversational(self.data[0])

    def by_turn(self) -> Rows:
        """Conversations as prompts and completions: a row for each turn of the assistant, with the messages before it."""
        if self.format != "chat":
            return self
        return Rows("prompt", self.data.map(_turns, batched=True, remove_columns=self.data.column_names))

    def pairs(self) -> list[tuple[Any, Any]]:
        """(prompt, completion) of every row but of conversations; the prompt of a text is empty."""
        texts = self.format == "text"
        return [("", row["text"]) if texts else (row["prompt"], row["completion"]) for row in self.data]

    def rendered(self, tokenizer: Any) -> list[tuple[str, str]]:
        """:meth:`pairs` by turn, as texts."""
        if not self.conversational:
            return self.pairs()
        check_chat_template(tokenizer)
        rendered = [apply_chat_template(row, tokenizer) for row in self.by_turn().data]
        return [(row["prompt"], row["completion"]) for row in rendered]

    def plain(self) -> list[Any]:
        """Every row as one text, or as one list of messages."""
        return list(self.data["messages"]) if self.format == "chat" else [prompt + end for prompt, end in self.pairs()]


def check_chat_template(tokenizer: Any) -> None:
    """Raises ValueError if a tokenizer cannot write conversations."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "this tokenizer has no chat template: use rows with prompt and completion, or an instruct model's tokenizer"
        )


def _turns(batch: Mapping[str, list]) -> dict[str, list]:
    turns = [(messages, i) for messages in batch["messages"] for i, m in enumerate(messages) if m["role"] == "assistant" and i]
    return {"prompt": [messages[:i] for messages, i in turns], "completion": [[messages[i]] for messages, i in turns]}


def read(
    name: str,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    split: str = "train",
    limit: int | None = None,
) -> Rows:
    """Rows of a file, or of a data set of the ``datasets`` library.

    Args:
        columns: format's column -> name in the file.
        template: of a classification's prompt, with ``{text}`` where the text goes.
        split: of a data set that is no file.
        limit: rows at most.
    """
    data = _load(name, split)
    data = data if limit is None else data.select(range(min(limit, len(data))))
    if not len(data):
        raise ValueError(f"{name} holds no rows")
    for wanted, there in (columns or {}).items():
        if there not in data.column_names:
            raise ValueError(f"{name} has no column {there}; it has {', '.join(data.column_names)}")
        if wanted != there:
            data = data.remove_columns({wanted} & set(data.column_names)).rename_column(there, wanted)
    if "conversations" in data.column_names:
        data = data.map(maybe_convert_to_chatml, remove_columns="conversations")
    format = _format_of(name, format, data.column_names)
    data = data.select_columns(FORMATS[format])
    _check(name, format, data)
    if not isinstance(data[0][data.column_names[0]], list):  # numbers as they are written
        strings = datasets.Features({column: datasets.Value("string") for column in data.column_names})
        data = data.map(lambda row: {column: str(value) for column, value in row.items()}, features=strings)
    return _classified(data, template or TEMPLATE) if format == "classification" else Rows(format, data)


def _load(name: str, split: str) -> datasets.Dataset:
    path, known = Path(name), ", ".join(BUILDERS)
    kind = BUILDERS.get(path.suffix.lower())
    if path.is_file() and kind is None:
        raise ValueError(f"{name}: data files end in {known}")
    if kind is not None and not path.is_file():
        raise FileNotFoundError(f"no data at {name}")
    try:
        if kind is None:
            return datasets.load_dataset(name, split=split)
        if kind == "csv":  # all text: otherwise the label 01 would become the number 1, and NA nothing
            cells = {"sep": "\t" if path.suffix.lower() == ".tsv" else ",", "dtype": str, "keep_default_na": False}
            return datasets.Dataset.from_pandas(pandas.read_csv(path, index_col=False, encoding="utf-8-sig", **cells))
        settings = {"sample_by": "paragraph"} if kind == "text" else {}
        return datasets.load_dataset(kind, data_files=str(path), split="train", **settings)
    except Exception as error:  # the library raises many kinds for a name or a file that it cannot read
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        words = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        if kind is None:
            raise FileNotFoundError(f"no data at {name} ({words}): give a file that ends in {known}") from error
        raise ValueError(f"{name} has no rows, or cannot be read as {kind} ({words})") from error


def _format_of(name: str, format: str, there: Sequence[str]) -> str:
    """The format's name; of ``auto`` the first that the columns fit."""
    if format not in ("auto", *FORMATS):
        raise ValueError(f"format must be auto, {', '.join(FORMATS)}, got {format!r}")
    fitting = [known for known, need in FORMATS.items() if set(need) <= set(there) and format in ("auto", known)]
    if not fitting:
        formats = "; ".join(f"{known}: {', '.join(need)}" for known, need in FORMATS.items())
        what = "no format" if format == "auto" else f"not the format {format}"
        raise ValueError(
            f"the columns of {name} ({', '.join(there)}) fit {what}. Formats and their columns: {formats}."
            " Other names are given with --columns prompt=question,completion=answer"
        )
    return fitting[0]


def _check(name: str, format: str, data: datasets.Dataset) -> None:
    """Raises ValueError, with the number of the row, where a value is missing or of a wrong kind."""
    for column, feature in data.features.items():
        if str(getattr(feature, "dtype", "")).startswith(("timestamp", "date")):
            raise ValueError(f"{name}: {column} is all dates, whose spelling is lost: give a .csv file, where everything is text")
    for number, row in enumerate(data, 1):
        where = f"{name}, row {number}"
        for column, value in row.items():
            if value is None:
                raise ValueError(f"{where}: no {column}, which the format {format!r} needs")
            if (column == "messages" or isinstance(value, list)) and not _are_messages(value):
                raise ValueError(f"{where}: {column} is a list of objects with role and content")
        if len({isinstance(value, list) for value in (*row.values(), *data[0].values())}) > 1:
            raise ValueError(f"{where}: some values are texts, others lists of messages")
        if format == "chat" and not any(message["role"] == "assistant" for message in row["messages"][1:]):
            raise ValueError(f"{where}: no message of the assistant after another one, so nothing to learn from")


def _are_messages(value: Any) -> bool:
    good = lambda m: isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m
    return isinstance(value, list) and bool(value) and all(map(good, value))


def _classified(data: datasets.Dataset, template: str) -> Rows:
    if "{text}" not in template:
        raise ValueError(f"a template has {{text}} where the text goes, got {template!r}")
    pair = lambda row: {"prompt": template.replace("{text}", row["text"]), "completion": f" {row['label']}"}
    data = data.map(pair, remove_columns=data.column_names)
    labels = list(dict.fromkeys(data["completion"]))
    if len(labels) > MOST_LABELS:
        raise ValueError(f"{len(labels)} different labels: that is no classification; use the format prompt")
    return Rows("classification", data, labels)
