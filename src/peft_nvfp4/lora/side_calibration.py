"""The calibration that a saved adapter refers to: which folder, and that it is still the one of training.

An adapter's side-car names the folder of the calibration that its base was frozen with, and the SHA-256 of that folder's
manifest, which holds the digests of all its files. Whoever writes an adapter must not choose what is read from the disk of
whoever loads it: the side-car's folder is used only if it lies in the adapter's own. Any other one is named by the caller, and
has to have the digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ..calibration.store import MANIFEST

DIGEST = "calibration_sha256"
"""Name of the digest in a side-car."""


class RecordedFolder(str):
    """The ``calibration`` of a config that was read from an adapter's side-car.

    Attributes:
        digest: of its manifest in training, if that is known.
        trusted: the caller has named it, or it lies in the adapter's folder.
    """

    digest: str | None = None
    trusted = False


def manifest_digest(folder: str | Path) -> str | None:
    """SHA-256 of a calibration's manifest; None where there is none."""
    path = Path(folder) / MANIFEST
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def entries(folder: str, adapter: Path) -> dict[str, Any]:
    """What the side-car in the folder ``adapter`` says of a calibration: its folder, relative to the adapter's if it lies in
    that, and its digest."""
    digest = manifest_digest(folder) or getattr(folder, "digest", None)
    inside, adapter = Path(folder).resolve(), adapter.resolve()
    name = str(inside.relative_to(adapter)) if inside.is_dir() and inside.is_relative_to(adapter) else str(folder)
    return {"calibration": name} | ({} if digest is None else {DIGEST: digest})


def recorded(content: dict[str, Any], adapter: Path, given: str | Path | None) -> RecordedFolder | None:
    """The folder that a side-car in ``adapter`` names, or the one that is ``given`` by the caller.

    Raises:
        ValueError: an entry has a wrong type, or there was no calibration.
    """
    folder, digest = content.get("calibration"), content.get(DIGEST)
    if not isinstance(folder, str | None) or not isinstance(digest, str | None):
        raise ValueError(f"calibration and {DIGEST} are strings, got {folder!r} and {digest!r}")
    if folder is None:
        if given is not None:
            raise ValueError(f"the adapter was trained without a calibration, got calibration={str(given)!r}")
        return None
    inside = (adapter / folder).resolve()
    if given is None and inside.is_dir() and inside.is_relative_to(adapter.resolve()):
        given = inside
    result = RecordedFolder(folder if given is None else given)
    result.digest, result.trusted = digest, given is not None
    return result


def check(folder: str | None) -> None:
    """Before a base is frozen with a calibration.

    Raises:
        ValueError: nobody but a side-car names the folder, or it holds another calibration than the side-car says.
    """
    if not isinstance(folder, RecordedFolder):
        return
    if not folder.trusted:
        raise ValueError(
            f"the adapter was trained on a base with the calibration {str(folder)!r}, which is not in the adapter's folder. If "
            "you trust that folder, name it: NVFP4LoraConfig.from_pretrained(adapter, calibration=folder), and give that as "
            "config= to PeftModel.from_pretrained (peft-nvfp4: --calibration folder)"
        )
    digest = manifest_digest(folder)
    if None not in (digest, folder.digest) and digest != folder.digest:
        raise ValueError(
            f"{folder} holds another calibration than the adapter was trained with: the SHA-256 of its {MANIFEST} is {digest}, "
            f"then it was {folder.digest}"
        )
