"""JSON files that are written next to an adapter. Each says the version of its format; stock PEFT does not look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VERSION = 1


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that :func:`read` reads."""
    path.write_text(json.dumps({"format_version": VERSION, **content}, indent=2, sort_keys=True) + "\n")


def read(path: Path) -> dict[str, Any]:
    """What was written.

    Raises:
        ValueError: the file is damaged or newer than this package.
    """
    try:
        content = json.loads(path.read_text())
        version = content.pop("format_version")
        if type(version) is not int or version < 1:
            raise ValueError(f"format_version={version!r}")
        newer = version > VERSION
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); delete it to go on without it") from error
    if newer:
        raise ValueError(f"{path}: format version {version}; this package reads up to {VERSION}: upgrade peft_nvfp4")
    return content
