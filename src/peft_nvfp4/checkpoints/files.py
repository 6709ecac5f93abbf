"""The files of a checkpoint, looked at before anything of them is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from safetensors import SafetensorError, safe_open


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, as its header describes it."""

    key: str
    file: str
    dtype: str  # as safetensors writes it: "U8", "BF16"
    shape: tuple[int, ...]
    converted: bool = False  # transformers changes the weight that it is or belongs to on loading: splits, merges or permutes it

    def __str__(self) -> str:
        return f"{self.key} in {self.file}"


def check_files(files: Sequence[str] | None, packed: bool) -> None:
    """Every file can be read. (The indices that name them: :func:`check_indices`.)

    Raises:
        ValueError: a truncated or damaged file; a packed model in a pickle.
    """
    for file in files or ():
        if file.endswith(".safetensors"):
            try:
                with safe_open(file, framework="pt"):
                    pass
            except SafetensorError as error:
                raise ValueError(f"{file} is truncated or damaged: {error}. Download it again") from error
        elif packed:
            raise ValueError(
                f"{file} is not a safetensors file; a packed model is read from those only (a pickle can run code). Ask its "
                "author for safetensors"
            )


def check_indices(files: Sequence[str] | None, folder: str | None) -> None:
    """The indices of sharded models beside these files, and in the folder that was to be loaded, name files inside their folders.

    Raises:
        ValueError: a path that is absolute or goes up.
    """
    folders = {Path(file).parent for file in files or ()}
    folders |= {Path(*parent.parts[: parent.parts.index("..")]) for parent in folders if ".." in parent.parts[1:]}
    if folder and Path(folder).is_dir():
        folders.add(Path(folder))
    for index in sorted(index for each in folders for index in each.glob("*.index.json")):
        try:
            names = json.loads(index.read_text())["weight_map"].values()
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            continue  # transformers reads it, and says what is wrong with it
        for name in names:
            paths = (PurePosixPath(str(name)), PureWindowsPath(str(name)))
            if any(path.is_absolute() or path.drive or ".." in path.parts for path in paths):
                raise ValueError(f"{index} names {name!r}, which is outside its folder; do not trust this checkpoint")


def stored_in(file: str) -> Iterable[Stored]:
    """The tensors of a safetensors file."""
    with safe_open(file, framework="pt") as f:
        for key in f.keys():  # noqa: SIM118 (not a mapping)
            slice_ = f.get_slice(key)
            yield Stored(key, file, slice_.get_dtype(), tuple(slice_.get_shape()))
