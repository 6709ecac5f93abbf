"""Result files of this folder: ``NAME.json`` of the published sessions, and ``NAME.jsonl``, one line for each finished run.

A command appends a line when a run is finished and skips the runs that either file has. So a command that was stopped goes on
when it is called again. The report reads both files; a line wins over an older row with the same identity. A session begins with
a line that holds its environment and settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environment import commit, environment

FOLDER = Path(__file__).resolve().parents[1] / "results" / "reproduce"
LISTS = {"memory": ("peaks", "largest"), "step_time": ("times",)}
"""File -> lists of rows in it; every other file has one list, ``runs``. A line names its list in the field ``table``."""
IDENTITY = {
    "peaks": ("case", "batch", "seq"),
    "largest": ("case", "cap_gib"),
    "times": ("case", "batch", "seq"),
    "runs": ("task", "weights", "method", "kind", "lr", "seed", "steps", "batch", "rows"),
}
"""List -> fields that tell its rows apart."""


def identity(row: Mapping[str, Any]) -> tuple:
    name = row["table"] if row["table"] in IDENTITY else "runs"
    return name, *(row.get(field) for field in IDENTITY[name])


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """What ``NAME.json`` and ``NAME.jsonl`` hold together; None if there is neither."""
    published, appended = folder / f"{name}.json", folder / f"{name}.jsonl"
    if not published.is_file() and not appended.is_file():
        return None
    content = json.loads(published.read_text(encoding="utf-8")) if published.is_file() else {}
    lines = [json.loads(line) for line in appended.read_text(encoding="utf-8").splitlines()] if appended.is_file() else []
    for line in lines:
        content |= line if "environment" in line else {}
    for section in LISTS.get(name, ("runs",)):
        rows = [{"table": section, **row} for row in content.get(section, ())]
        rows += [line for line in lines if "table" in line and identity(line)[0] == section]
        content[section] = list({identity(row): row for row in rows}.values())
    return content


class RunLog:
    """Appends to ``FOLDER/NAME.jsonl``."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.jsonl"
        self.head = {"environment": environment(), "settings": dict(settings)}
        if self.path.is_file():  # a process that was killed may have left half a line
            text = self.path.read_text(encoding="utf-8")
            self.path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        content = read(folder, name) or {}
        rows = [row for section in LISTS.get(name, ("runs",)) for row in content.get(section, ())]
        self.rows = {identity(row): row for row in rows}

    def find(self, key: Mapping[str, Any]) -> dict | None:
        """The row with the identity of ``key``. Rows of failed runs are not found: those runs are tried again."""
        row = self.rows.get(identity(key))
        return None if row is None or "error" in row else row

    def add(self, row: Mapping[str, Any]) -> None:
        row = {**row, "commit": commit()}
        with open(self.path, "a", encoding="utf-8") as file:
            if self.head:
                file.write(json.dumps(self.head) + "\n")
                self.head = {}
            file.write(json.dumps(row) + "\n")
        self.rows[identity(row)] = row
