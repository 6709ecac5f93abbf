"""JSON files that are written next to an adapter. Each says the version of its format; stock PEFT does not look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

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


def find(adapter: str, subfolder: str | None, hub_options: dict[str, Any], name: str) -> Path | None:
    """Path of a file next to an adapter, local or on the Hub; None if the adapter has none.

    Raises:
        LocalEntryNotFoundError: that cannot be known: the Hub cannot be reached.
    """
    folder = Path(adapter, subfolder or "")
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(str(adapter), name, subfolder=subfolder, **hub_options))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        return None


def find_quietly(adapter: str, subfolder: str | None, hub_options: dict[str, Any], name: str) -> Path | None:
    """:func:`find`, and None where the Hub gives no answer."""
    try:
        return find(adapter, subfolder, hub_options, name)
    except (OSError, ValueError):
        return None
