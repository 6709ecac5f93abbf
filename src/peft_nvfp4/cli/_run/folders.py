"""What the commands write: whether they can, before work starts; a folder that is whole or not there; a disk that is full."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
WORDS = ("No space left", "failed writing", "file write failed", "unexpected pos")
"""Of the errors of safetensors and PyTorch where the system refused to write."""


def check_writable(folder: str | Path) -> None:
    """Make a folder, and raise ValueError if nothing can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if (full := write_failure(error, folder)) is not None:
            raise ValueError(f"{full}. Make room there, or choose another folder") from error
        raise ValueError(f"cannot write to {folder} ({error.strerror}): choose another folder") from error


def write_failure(error: BaseException | None, folder: str | Path) -> str | None:
    """In words, if an error (or what it came from) says that the disk of a folder took no more; else None."""
    reason, seen = error, 0
    while reason is not None and seen < 10:
        if isinstance(reason, OSError) and reason.errno in FULL or any(words in str(reason) for words in WORDS):
            place = Path(folder).resolve()
            place = next(path for path in (place, *place.parents) if path.exists())
            disk = next(path for path in (place, *place.parents) if os.path.ismount(path) or path == path.parent)
            free = shutil.disk_usage(place).free
            words = " ".join((getattr(reason, "strerror", None) or str(reason)).split())[:120]
            return f"writing to {folder} failed ({words}); its disk, mounted at {disk}, has {free / 1e6:,.0f} MB left"
        reason, seen = reason.__cause__ or reason.__context__, seen + 1
    return None


@contextmanager
def kept_writes(folder: str | Path, afterwards: str) -> Iterator[None]:
    """Within the context a full disk raises ValueError that names it, and says what to do afterwards."""
    try:
        yield
    except Exception as error:
        if (full := write_failure(error, folder)) is None:
            raise
        raise ValueError(f"{full}. {afterwards}") from error


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to fill. An error within the context leaves nothing there, so that the same command can be given again. Raises
    ValueError if it holds something already, or cannot be written."""
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already and not empty: choose another output folder")
    known = path.exists()
    check_writable(path)
    try:
        with kept_writes(path, "Nothing was kept there: make room, and give the same command again"):
            yield path
    except BaseException:
        for child in path.iterdir():
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        if not known:
            path.rmdir()
        raise
