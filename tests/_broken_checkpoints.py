"""Checkpoints in several files, broken in one place, and the error that has to name it."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file


class Bomb:
    """Whoever unpickles it opens a file of that name."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][tensor]


def change(folder: Path, copy_to: Path, tensor: str, function) -> Path:
    """Copy a checkpoint and apply ``function`` to one tensor (None removes it; a new one goes to the first file): its file."""
    shutil.copytree(folder, copy_to)
    path = copy_to / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = copy_to / index["weight_map"].setdefault(tensor, min(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    tensors = load_file(file)
    tensors[tensor] = function(tensors.get(tensor))
    save_file({name: t for name, t in tensors.items() if t is not None}, file, metadata={"format": "pt"})
    return file


def truncate(folder: Path, copy_to: Path, tensor: str, keep: float) -> Path:
    """Copy a checkpoint and keep that share of the tensor's file."""
    shutil.copytree(folder, copy_to)
    file = shard_of(copy_to, tensor)
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    return file


def assert_refused(load, folder, *parts) -> None:
    """The error names every part, and nothing is returned."""
    with pytest.raises(ValueError) as error:
        load(folder)
    message = str(error.value)
    assert [part for part in map(str, parts) if part not in message] == [], message
