"""Training and test data from files: rows of four kinds, as token ids and labels.

| format | a row has | learned, or scored |
|---|---|---|
| ``chat`` | ``messages``: a list of ``{"role", "content"}`` | what the assistant says |
| ``prompt`` | ``prompt`` and ``completion`` | the completion |
| ``classification`` | ``text`` and ``label`` | the label's word after the text |
| ``text`` | ``text`` (a .txt file is one row for each paragraph) | everything |

Files: .jsonl, .json, .csv, .tsv, .txt. ``movies`` is the packaged sentiment task; another name is looked up in ``datasets``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUILTIN = "movies"
FORMATS = {"chat": ("messages",), "prompt": ("prompt", "completion"), "classification": ("text", "label"), "text": ("text",)}
"""Format -> columns of a row. The first whose columns are all there is what a file is taken for."""
TEMPLATE = "{text}\nLabel:"
"""Of a classification's prompt."""
IGNORED = -100


@dataclass
class Rows:
    """A data set.

    Attributes:
        format: a word of :data:`FORMATS`.
        rows: dictionaries with the format's columns.
        labels: of a classification, in the order in which they came.
    """

    format: str
    rows: list[dict[str, Any]]
    labels: list[str] = field(default_factory=list)


def read(
    name: str,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    split: str = "train",
    limit: int | None = None,
    seed: int = 0,
) -> Rows:
    """Rows of a file, of ``movies``, or of a data set of the ``datasets`` library.

    Args:
        columns: format's column -> name in the file.
        template: of a classification's prompt, with ``{text}`` where the text goes.
        split: of ``movies`` (train, test) and of a data set.
        limit: rows at most.

    Raises:
        FileNotFoundError, ValueError: the message says what was expected.
    """
    if name == BUILTIN:
        return _movies(split, limit, seed)
    path = Path(name)
    raw = _read_file(path) if path.is_file() else _read_dataset(name, split)
    raw = raw[:limit]
    if not raw:
        raise ValueError(f"{name} holds no rows")
    columns = dict(columns or {})
    if format == "auto":
        first = raw[0] if isinstance(raw[0], Mapping) else {}
        format = next((f for f, need in FORMATS.items() if all(columns.get(c, c) in first for c in need)), "")
        if not format and not first:
            raise ValueError(f"{name}, row 1: expected an object with named values, got {raw[0]!r:.60}")
        if not format:
            wanted = "; ".join(f"{f}: {', '.join(need)}" for f, need in FORMATS.items())
            raise ValueError(
                f"the columns of {name} ({', '.join(map(str, raw[0]))}) fit no format. Formats and their columns: {wanted}."
                " Other names are given with --columns prompt=question,completion=answer"
            )
    if format not in FORMATS:
        raise ValueError(f"format must be auto, {', '.join(FORMATS)}, got {format!r}")
    rows = [_row(item, i, format, columns, name) for i, item in enumerate(raw, 1)]
    return _classified(rows, template or TEMPLATE) if format == "classification" else Rows(format, rows)


def _row(item: Any, number: int, format: str, columns: Mapping[str, str], name: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ValueError(f"{name}, row {number}: expected an object with named values, got {type(item).__name__}")
    missing = [columns.get(c, c) for c in FORMATS[format] if item.get(columns.get(c, c)) is None]
    if missing:
        raise ValueError(f"{name}, row {number}: no {', '.join(missing)}, which the format {format!r} needs")
    row = {c: item[columns.get(c, c)] for c in FORMATS[format]}
    if format == "chat":
        _check_messages(row["messages"], f"{name}, row {number}")
        return row
    return {key: value if isinstance(value, str) else str(value) for key, value in row.items()}


def _check_messages(messages: Any, where: str) -> None:
    good = isinstance(messages, Sequence) and not isinstance(messages, str) and messages
    if not good or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
        raise ValueError(f"{where}: messages is a list of objects with role and content")
    if not any(m["role"] == "assistant" for m in messages):
        raise ValueError(f"{where}: no message of the assistant, so nothing to learn from")


def _classified(rows: list[dict[str, Any]], template: str) -> Rows:
    if "{text}" not in template:
        raise ValueError(f"a template has {{text}} where the text goes, got {template!r}")
    labels = list(dict.fromkeys(row["label"] for row in rows))
    if len(labels) > 100:
        raise ValueError(f"{len(labels)} different labels: that is no classification; use the format prompt")
    made = [
        {"prompt": template.replace("{text}", row["text"]), "completion": " " + row["label"], "label": row["label"]}
        for row in rows
    ]
    return Rows("classification", made, labels)


def _movies(split: str, limit: int | None, seed: int) -> Rows:
    from ... import data

    train, test = data.movie_reviews(seed)
    chosen = (test if split == "test" else train)[:limit]
    names = [label.strip() for label in data.LABELS]
    rows = [{"prompt": e.text + data.PROMPT, "completion": data.LABELS[e.label], "label": names[e.label]} for e in chosen]
    return Rows("classification", rows, names)


# ---------------------------------------------------------------------------------------------- files


def _read_file(path: Path) -> list[Any]:
    kind = path.suffix.lower()
    try:
        if kind == ".jsonl":
            return _read_jsonl(path)
        if kind == ".json":
            content = _json(path.read_text(encoding="utf-8"), str(path))
            if not isinstance(content, list):
                raise ValueError(f"{path}: a .json file holds a list of rows; one row a line is .jsonl")
            return content
        if kind in (".csv", ".tsv"):
            with open(path, newline="", encoding="utf-8-sig") as file:
                return list(csv.DictReader(file, delimiter="\t" if kind == ".tsv" else ","))
        if kind == ".txt":
            return [{"text": part.strip()} for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a table of text: {error}") from error
    raise ValueError(f"{path}: data files end in .jsonl, .json, .csv, .tsv or .txt")


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            rows.append(_json(line, f"{path}, line {number}"))
    return rows


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def _read_dataset(name: str, split: str) -> list[Any]:
    looks_like_file = Path(name).suffix.lower() in (".jsonl", ".json", ".csv", ".tsv", ".txt")
    try:
        if looks_like_file:
            raise FileNotFoundError
        from datasets import load_dataset

        return list(load_dataset(name, split=split))
    except Exception as error:  # whatever the library raises for a name that is none: said, with the ways out
        why = "" if looks_like_file else f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise FileNotFoundError(f"no data at {name}{why}: give a .jsonl, .json, .csv, .tsv or .txt file, or {BUILTIN}") from error


# ---------------------------------------------------------------------------------------------- tokens


@dataclass
class Encoded:
    """Token ids and labels of every row, and how many rows were cut."""

    rows: list[dict[str, list[int]]]
    cut: int = 0

    @property
    def longest(self) -> int:
        return max(len(row["input_ids"]) for row in self.rows)


def encode(rows: Rows, tokenizer: Any, max_length: int) -> Encoded:
    """Rows as the model reads them.

    Raises:
        ValueError: nothing is left to learn from, or the tokenizer cannot write conversations.
    """
    found = Encoded([])
    for row in rows.rows:
        if rows.format == "text":
            ids = _ended(list(tokenizer(row["text"]).input_ids), tokenizer)
            parts = [ids[i : i + max_length] for i in range(0, len(ids), max_length)]
            found.rows += [{"input_ids": part, "labels": list(part)} for part in parts if len(part) > 1]
            continue
        ids, labels = _conversation(row["messages"], tokenizer) if rows.format == "chat" else _pair(row, tokenizer)
        if len(ids) > max_length:
            found.cut += 1
            ids, labels = ids[-max_length:], labels[-max_length:]  # what is to be learned stands at the end
        if any(label != IGNORED for label in labels[1:]):
            found.rows.append({"input_ids": ids, "labels": labels})
    if not found.rows:
        raise ValueError(f"no row has anything to learn within {max_length} tokens")
    return found


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def prompt_ids(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """Of a row with a prompt, without what some tokenizers end a text with."""
    ids = list(tokenizer(row["prompt"]).input_ids)
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


def completion_ids(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _pair(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    first = prompt_ids(row, tokenizer)
    second = _ended(completion_ids(row["completion"], tokenizer), tokenizer)
    return first + second, [IGNORED] * len(first) + second


def chat_ids(messages: Sequence[Mapping], tokenizer: Any, reply: bool = False) -> list[int]:
    """A conversation in the tokenizer's own template; ``reply``: with the beginning of the assistant's turn."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "this tokenizer has no chat template: use rows with prompt and completion, or an instruct model's tokenizer"
        )
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _conversation(messages: Sequence[Mapping], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Every turn of the assistant is learned whose tokens are the same in the conversation up to it and in the whole one (some
    templates rewrite earlier turns); the last one always is."""
    ids = chat_ids(messages, tokenizer)
    labels = [IGNORED] * len(ids)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for i in turns:
        before, after = chat_ids(messages[:i], tokenizer, reply=True), chat_ids(messages[: i + 1], tokenizer)
        if ids[: len(after)] == after and after[: len(before)] == before:
            labels[len(before) : len(after)] = ids[len(before) : len(after)]
    if all(label == IGNORED for label in labels):
        raise ValueError(
            "the tokenizer's chat template does not say where the assistant's turns begin: use prompt and completion"
        )
    return ids, labels


class Collator:
    """Rows as a batch, padded on the right to a multiple of 8. Counts the tokens that are not padding."""

    def __init__(self, pad_id: int | None, multiple: int = 8):
        self.pad_id, self.multiple, self.tokens = pad_id or 0, multiple, 0

    def __call__(self, rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.multiple) * self.multiple
        fill = lambda values, pad: torch.tensor([[*v, *[pad] * (width - len(v))] for v in values])
        self.tokens += sum(len(row["input_ids"]) for row in rows)
        return {
            "input_ids": fill([row["input_ids"] for row in rows], self.pad_id),
            "attention_mask": fill([[1] * len(row["input_ids"]) for row in rows], 0),
            "labels": fill([row["labels"] for row in rows], IGNORED),
        }
