"""Rows of data files, each with the place where it stands, so that every later error can name it.

Text files are read by Python's own parsers, with lines as an editor counts them: U+2028 within a string ends no line, a byte
order mark is no text, blank lines count. Parquet files and data sets of the Hub are read by the ``datasets`` library.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets

datasets.disable_progress_bars()  # the commands print their own progress and errors
datasets.logging.set_verbosity(logging.CRITICAL)

KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""Ends of the names of data files."""
Row = tuple[str, dict[str, Any]]
"""(its place, as ``line 3`` or ``row 3``; value of every column)."""


def read_rows(name: str, split: str) -> list[Row]:
    """All rows of a file, or of a data set of the ``datasets`` library. Raises ValueError, with the line, for what cannot be read
    and for columns that differ in number; FileNotFoundError if there is no such data."""
    path, known = Path(name), ", ".join(KINDS)
    kind = path.suffix.lower()
    if kind not in KINDS:
        if path.is_file():
            raise ValueError(f"{name}: data files end in {known}")
        return _of_hub(name, split, known)
    if not path.is_file():
        raise FileNotFoundError(f"no data at {name}")
    if kind == ".parquet":
        try:
            return _numbered(map(_without_nulls, datasets.Dataset.from_parquet(str(path), keep_in_memory=True)))
        except Exception as error:  # the library raises many kinds for a file that it cannot read
            cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
            raise ValueError(f"{name} cannot be read as parquet ({_words(cause)})") from error
    text = _text(path)
    readers = {".jsonl": _json_lines, ".json": _json, ".txt": _paragraphs, ".csv": _csv, ".tsv": _csv}
    try:
        rows = list(readers[kind](text, "\t") if kind == ".tsv" else readers[kind](text))
    except Unreadable as error:
        raise ValueError(f"{name}, {error}") from error
    if not rows:
        raise ValueError(f"{name} holds no rows")
    return rows


class Unreadable(ValueError):
    """Its message begins with the place."""


def _of_hub(name: str, split: str, known: str) -> list[Row]:
    try:
        return _numbered(map(_without_nulls, datasets.load_dataset(name, split=split)))
    except Exception as error:  # the library raises many kinds for a name that it does not know
        raise FileNotFoundError(f"no data at {name} ({_words(error)}): give a file that ends in {known}") from error


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _numbered(rows: Iterable[dict[str, Any]]) -> list[Row]:
    return [(f"row {number}", row) for number, row in enumerate(rows, 1)]


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object of a column the keys of all others, with null for a value: a tool would get the parameters of the
    others. Columns themselves keep theirs."""

    def dropped(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: dropped(v) for key, v in part.items() if v is not None}
        return [dropped(v) for v in part] if isinstance(part, list) else part

    return {column: dropped(content) for column, content in value.items()}


def _text(path: Path) -> str:
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path}, line 1: the file is UTF-16: save it as UTF-8")
    line = lambda at: content.count(b"\n", 0, at) + 1
    if (at := content.find(b"\0")) >= 0:
        raise ValueError(f"{path}, line {line(at)}: a NUL byte, so this is no text in UTF-8: save the file as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {line(error.start)}: {error.object[error.start]:#04x} is no UTF-8: save the file as UTF-8"
        ) from error


def _object(text: str, line: int) -> Any:
    """JSON without what no tokenizer takes. ``line`` is where the text begins."""
    try:
        value = json.loads(text, parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise Unreadable(f"line {line + error.lineno - 1}: no JSON ({error.msg}, column {error.colno})") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise Unreadable(f"line {line}: {half} is half of a character, whose other half is missing") from error
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Unreadable(f"line {line}: no JSON that can be read ({what})") from error
    return value


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no value")


def _row(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise Unreadable(f'{place}: a row is an object, such as {{"prompt": ..., "completion": ...}}')
    return place, value


def _json_lines(text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _row(f"line {number}", _object(line, number))


def _json(text: str) -> Iterator[Row]:
    """A list of objects, or one; or JSON lines under another name."""
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        whole = _object(text, 1) if lines else []
    except Unreadable:
        try:
            json.loads(lines[0])  # a line of its own
        except (ValueError, RecursionError):
            pass
        else:
            yield from _json_lines(text)
            return
        raise
    for number, value in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield _row(f"row {number}", value)


def _csv(text: str, delimiter: str = ",") -> Iterator[Row]:
    """All text: otherwise the label 01 would become the number 1, and NA nothing."""
    before = csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header, line = None, 1
    try:
        for cells in reader:
            place, line = f"line {line}", reader.line_num + 1
            if len(cells) < 2 and not "".join(cells).strip():
                continue
            if header is None:
                header = cells
                if len(set(header)) < len(header):
                    raise Unreadable(f"{place}: two columns have the same name ({', '.join(header)})")
            elif len(cells) != len(header):
                raise Unreadable(f"{place}: {len(cells)} cells, and the header has {len(header)} ({', '.join(header)})")
            else:
                yield place, dict(zip(header, cells))
    except csv.Error as error:
        raise Unreadable(f"line {line}: no CSV ({error})") from error
    finally:
        csv.field_size_limit(before)


def _paragraphs(text: str) -> Iterator[Row]:
    paragraph = []
    for number, line in enumerate([*text.replace("\r\n", "\n").split("\n"), ""], 1):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield f"line {number - len(paragraph)}", {"text": "\n".join(paragraph)}
            paragraph = []
