"""Rows of data for the commands, in the formats of TRL's ``SFTTrainer`` and one more.

| format | a row has | learned, or scored |
|---|---|---|
| ``chat`` | ``messages`` (or ``conversations``): a list of ``{"role", "content"}`` | what the assistant says |
| ``prompt`` | ``prompt`` and ``completion``, texts or lists of messages | the completion |
| ``classification`` | ``text`` and ``label`` | the label after the text |
| ``text`` | ``text`` (a .txt file is one row for each paragraph) | everything |

A conversation may have ``tools`` and ``chat_template_kwargs``, and messages ``tool_calls``: the chat template gets them. Files:
.jsonl, .json, .csv, .tsv, .parquet, .txt. Any other name is that of a data set on the Hub, or of a folder with one. Rows without
any text are left out, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
from trl import maybe_convert_to_chatml

from .reading import read_rows

FORMATS = {"chat": ("messages",), "prompt": ("prompt", "completion"), "classification": ("text", "label"), "text": ("text",)}
"""Format -> columns of a row. The first whose columns are all there is what a file is taken for."""
EXTRAS = ("tools", "chat_template_kwargs")
"""Further columns of a conversation, for its chat template."""
ROLES = {"human": "user", "gpt": "assistant"}
"""Of ``conversations`` as ShareGPT has them."""
TEMPLATE = "{text}\nLabel:"
"""Of a classification's prompt."""
MOST_LABELS = 100
"""A classification with more labels is none: every row is scored with each of them."""


@dataclass
class Rows:
    """A data set."""

    name: str
    format: str  # a word of FORMATS
    data: datasets.Dataset  # with the columns place, and messages, text, or prompt and completion; EXTRAS where rows have them
    labels: Sequence[str] = ()  # of a classification: the completions of all rows, in the order in which they came
    empty: Sequence[str] = ()  # places of rows that were left out, because they have no text

    @property
    def conversational(self) -> bool:
        """Rows are lists of messages, of which the tokenizer's chat template makes a text."""
        return any(isinstance(feature, datasets.List) for feature in self.data.features.values())

    def losses(self) -> list[str]:
        """What to say of the rows that were left out."""
        count = f"{len(self.empty)} row{'s were' if len(self.empty) > 1 else ' was'} left out"
        return [f"{count}: no text (the first: {self.empty[0]})"] if self.empty else []

    def by_turn(self) -> Rows:
        """Conversations as prompts and completions: a row for each turn of the assistant, with the messages before it."""
        if self.format != "chat":
            return self
        turns = [
            {**row, "prompt": messages[:i], "completion": [message]}
            for row in self.data
            for messages in [row.pop("messages")]
            for i, message in enumerate(messages)
            if i and message["role"] == "assistant"
        ]
        return replace(self, format="prompt", data=_dataset(turns))

    def pairs(self) -> list[tuple[Any, Any]]:
        """(prompt, completion) of every row but of conversations; the prompt of a text is empty."""
        texts = self.format == "text"
        return [("", row["text"]) if texts else (row["prompt"], row["completion"]) for row in self.data]

    def rendered(self, tokenizer: Any) -> list[tuple[str, str]]:
        """(prompt, the same with its completion) by turn, as texts, rendered as TRL does for training. Raises ValueError, with
        the place of the row, where the tokenizer's chat template refuses a conversation."""
        if not self.conversational:
            return [(prompt, prompt + completion) for prompt, completion in self.pairs()]
        rendered = []
        for row in self.by_turn().data:
            prompt = self._render(row, row["prompt"], tokenizer, add_generation_prompt=True)
            rendered.append((prompt, self._render(row, row["prompt"] + row["completion"], tokenizer)))
        return rendered

    def check_template(self, tokenizer: Any) -> None:
        """Raises ValueError, with the place of the row, where the tokenizer cannot write a conversation as it is."""
        for row in self.data if self.format == "chat" else ():
            self._render(row, row["messages"], tokenizer)

    def _render(self, row: Mapping, messages: list, tokenizer: Any, **how: Any) -> str:
        check_chat_template(tokenizer)
        settings = (row.get("chat_template_kwargs") or {}) | how
        try:
            return tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False, **settings)
        except Exception as error:  # a template raises what it wants, and what Python raises for values that it does not expect
            words = " ".join(str(error).split())
            system = messages[0]["role"] == "system" and " (the text of a system message can be put before that of the user)"
            raise ValueError(
                f"{self.name}, {row['place']}: the chat template of this tokenizer refuses the conversation: {words}. Write it "
                f"as the template wants it{system or ''}, or give the tokenizer another chat_template"
            ) from error

    def plain(self) -> list[Any]:
        """Every row as one text, or with its messages and tools."""
        return list(self.data) if self.format == "chat" else [prompt + end for prompt, end in self.pairs()]


def check_chat_template(tokenizer: Any) -> None:
    """Raises ValueError if a tokenizer cannot write conversations."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "this tokenizer has no chat template: use rows with prompt and completion, or an instruct model's tokenizer"
        )


def read(
    name: str,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    split: str = "train",
    limit: int | None = None,
    labels: Iterable[str] = (),
) -> Rows:
    """Rows of a file, or of a data set of the ``datasets`` library. Raises ValueError, with the place, for a row that is wrong.

    Args:
        columns: format's column -> name in the file.
        template: of a classification's prompt, with ``{text}`` where the text goes.
        split: of a data set that is no file.
        limit: rows at most.
        labels: of a classification, besides those of all rows in the data.
    """
    rows = read_rows(name, split)
    names = list(dict.fromkeys(column for _, row in rows for column in row))
    if missing := [there for there in (columns or {}).values() if there not in names]:
        raise ValueError(f"{name} has no column {missing[0]}; it has {', '.join(names)}")
    if columns:
        rows = [(place, _renamed(row, columns)) for place, row in rows]
        names = list(dict.fromkeys(column for _, row in rows for column in row))
    if "conversations" in names:
        rows = [(place, _as_messages(row)) for place, row in rows]
        names[names.index("conversations")] = "messages"
    format = _format_of(name, format, names)
    kept, empty = [], []
    extras = [column for column in EXTRAS if column in names and format in ("chat", "prompt")]
    for place, row in rows[:limit]:
        where = f"{name}, {place}"
        row = _checked(where, format, row, extras)
        if row is not None and len(_kinds(row, format) | _kinds((kept or [row])[0], format)) > 1:
            raise ValueError(f"{where}: some values are texts, others lists of messages")
        empty.append(place) if row is None else kept.append({**row, "place": place})
    if not kept:
        raise ValueError(f"{name} holds no rows{' with a text' * bool(empty)}")
    if format == "classification":
        found = [f" {row['label']}" for _, row in rows if row.get("label") not in (None, "")]
        return _classified(name, kept, template or TEMPLATE, [f" {label}" for label in labels] + found, empty)
    return Rows(name, format, _dataset(kept), empty=empty)


def _dataset(rows: list[dict[str, Any]]) -> datasets.Dataset:
    """With messages and tools as they are: Arrow's own types would give every message the keys of all others."""
    conversation, extra, text = datasets.List(datasets.Json()), datasets.Json(), datasets.Value("string")
    kind = lambda column, value: extra if column in EXTRAS else conversation if isinstance(value, list) else text
    return datasets.Dataset.from_list(rows, datasets.Features({column: kind(column, v) for column, v in rows[0].items()}))


def _renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    kept = {column: value for column, value in row.items() if column not in {*columns, *columns.values()}}
    return kept | {wanted: row.get(there) for wanted, there in columns.items()}


def _as_messages(row: dict[str, Any]) -> dict[str, Any]:
    row = maybe_convert_to_chatml(row)
    for message in messages if isinstance(messages := row.get("messages"), list) else ():
        if isinstance(message, dict) and isinstance(role := message.get("role"), str):
            message["role"] = ROLES.get(role, role)
    return row


def _format_of(name: str, format: str, there: Sequence[str]) -> str:
    """The format's name; of ``auto`` the first that the columns fit."""
    if format not in ("auto", *FORMATS):
        raise ValueError(f"format must be auto, {', '.join(FORMATS)}, got {format!r}")
    fitting = [known for known, need in FORMATS.items() if set(need) <= set(there) and format in ("auto", known)]
    if not fitting:
        formats = "; ".join(f"{known}: {', '.join(need)}" for known, need in FORMATS.items())
        what = "no format" if format == "auto" else f"not the format {format}"
        raise ValueError(
            f"the columns of {name} ({', '.join(map(str, there))[:500]}) fit {what}. Formats and their columns: {formats}."
            " Other names are given with --columns prompt=question,completion=answer"
        )
    return fitting[0]


def _checked(where: str, format: str, row: Mapping[str, Any], extras: Sequence[str]) -> dict[str, Any] | None:
    """The columns of a row that its format has, numbers as texts; None without any text. Raises ValueError where a value is
    missing or of a wrong kind."""
    result = {}
    for column in FORMATS[format]:
        value = row.get(column)
        if value is None or value != value or value == "" and column == "label":
            raise ValueError(f"{where}: no {column}, which the format {format!r} needs")
        chat = column == "messages" or isinstance(value, list) and format == "prompt"
        if chat and value != [] and not _are_messages(value):
            raise ValueError(
                f"{where}: {column} is a list of objects with role and content (a text, or parts of type text; none is needed "
                "beside tool_calls)"
            )
        if not chat and not isinstance(value, str | int | float):
            raise ValueError(f"{where}: {column} is a text, got {type(value).__name__}")
        result[column] = value if chat else str(value)
    texts = [text for value in result.values() for text in ([value] if isinstance(value, str) else map(_said, value))]
    if format == "chat" and result["messages"]:
        spoken = [message for message in result["messages"][1:] if message["role"] == "assistant"]
        if not spoken:
            raise ValueError(f"{where}: no message of the assistant after another one, so nothing to learn from")
        texts = map(_said, spoken)
    if not any(text.strip() for text in texts) or format == "classification" and not result["text"].strip():
        return None
    if bare := [column for column, value in result.items() if value == []]:
        raise ValueError(f"{where}: {bare[0]} is a list of objects with role and content, and this one is empty")
    return result | {column: _extra(where, column, row.get(column)) for column in extras}


def _kinds(row: Mapping[str, Any], format: str) -> set[bool]:
    """Whether the values of a row are lists of messages."""
    return {isinstance(row[column], list) for column in FORMATS[format]}


def _said(message: Mapping[str, Any]) -> str:
    """What a message says; calls of tools are something said."""
    content = message.get("content") or ""
    words = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return words + "call" * bool(message.get("tool_calls"))


def _are_messages(value: Any) -> bool:
    part = lambda p: isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str)
    text = lambda content: isinstance(content, str) or isinstance(content, list) and all(map(part, content))
    calls = lambda m: isinstance(m.get("tool_calls"), list) and m["tool_calls"] and m.get("content") is None
    good = lambda m: isinstance(m, Mapping) and isinstance(m.get("role"), str) and (text(m.get("content")) or calls(m))
    return isinstance(value, list) and all(map(good, value))


def _extra(where: str, column: str, value: Any) -> Any:
    """Tools, as a list of objects or its JSON; arguments of the template, as an object. Empty ones are none."""
    kind, words = (list, "a list of objects, or its JSON") if column == "tools" else (dict, "an object")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {column} is {words}, and this is no JSON ({error})") from error
    if not value:
        return None if column == "tools" else {}
    if not isinstance(value, kind) or not all(isinstance(tool, dict | str) for tool in value):
        raise ValueError(f"{where}: {column} is {words}, got {type(value).__name__}")
    return value


def _classified(name: str, rows: list[dict], template: str, labels: Iterable[str], empty: Sequence[str]) -> Rows:
    if "{text}" not in template:
        raise ValueError(f"a template has {{text}} where the text goes, got {template!r}")
    prompt = lambda row: template.replace("{text}", row["text"])
    data = [{"prompt": prompt(row), "completion": f" {row['label']}", "place": row["place"]} for row in rows]
    labels = list(dict.fromkeys(labels))
    if len(labels) > MOST_LABELS:
        raise ValueError(f"{len(labels)} different labels: that is no classification; use the format prompt")
    return Rows(name, "classification", _dataset(data), labels, empty)
