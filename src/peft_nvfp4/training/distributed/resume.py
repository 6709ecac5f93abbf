"""Going on from a checkpoint of transformers' Trainer on another number of processes, or under another strategy.

>>> trainer.train(resume_from_checkpoint=make_resumable(trainer))

Adapters, scheduler and the place in the data are stored alike on any number of processes. The optimizer's state is not: without
FSDP it is ``optimizer.pt``, with parameters by number; FSDP with ``FULL_STATE_DICT`` writes ``optimizer.bin``, by name. The file
that is missing is written from the one that is there (without FSDP into a folder within the checkpoint, since Trainer refuses one
that holds FSDP's files). What FSDP writes with ``SHARDED_STATE_DICT`` is for FSDP, on any number of processes.

A step has to see the same rows: as many rows per process times processes times accumulation. Then what goes on is the same sum in
another order: equal up to rounding, not bit for bit. Trainer restores the states of random generators only on as many processes
as wrote them: with dropout (or stochastic rounding of gradients) a run on another number draws other numbers, as good as the
first. Every process has to see the checkpoint's folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

BY_NUMBER, BY_NAME, SHARDED = OPTIMIZERS = "optimizer.pt", "optimizer.bin", "optimizer_0"
STATE, MODEL = "trainer_state.json", "pytorch_model_fsdp"
ALONE = "without-fsdp"


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest checkpoint of a run that was written to its end (a process may have died while it wrote one) and whose adapters
    are finite; None without."""
    number = lambda path: path.name.partition("-")[2]
    numbered = [path for path in Path(folder).glob("checkpoint-*") if number(path).isdigit()]
    whole = [path for path in numbered if _ended(path / STATE) and any((path / name).exists() for name in OPTIMIZERS)]
    newest_first = sorted(whole, key=lambda path: int(number(path)), reverse=True)
    return next((str(path) for path in newest_first if _finite(path)), None)


def _finite(checkpoint: Path) -> bool:
    """Whether the adapters of a checkpoint can be read, and no value in them is NaN or infinite."""
    for path in (*checkpoint.rglob("adapter_model.safetensors"), *checkpoint.rglob("adapter_model.bin")):
        try:
            tensors = load_file(path) if path.suffix == ".safetensors" else _read(path)
        except (SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError):
            return False
        if not all(t.isfinite().all() for t in tensors.values() if t.is_floating_point()):
            return False
    return True


def _ended(state: Path) -> bool:
    """Trainer writes this file last. Half a file is none."""
    try:
        return isinstance(json.loads(state.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False


def make_resumable(trainer: Any, checkpoint: str | Path | None = None) -> str | None:
    """A checkpoint that ``trainer.train(resume_from_checkpoint=...)`` can read here: the given one, or the last whole one of
    ``trainer.args.output_dir`` (None if there is none). Every process has to call it; the first one writes. A checkpoint that was
    sharded by FSDP raises ValueError in a run that is not, and the other way round."""
    checkpoint = checkpoint or last_checkpoint(trainer.args.output_dir)
    if checkpoint is None:
        return None
    folder, fsdp = Path(checkpoint), bool(trainer.is_fsdp_enabled)
    if not fsdp and not (folder / BY_NUMBER).exists() and not (folder / BY_NAME).exists() and (folder / SHARDED).exists():
        raise ValueError(
            f"{folder} was written by FSDP with SHARDED_STATE_DICT: go on with FSDP (on any number of processes, one included), "
            "or write checkpoints with FULL_STATE_DICT"
        )
    if fsdp and (folder / BY_NUMBER).exists() and not any((folder / name).exists() for name in (BY_NAME, SHARDED)):
        kind = str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
        if "FULL" not in kind:  # on every process: one that raises alone leaves the others waiting below
            raise ValueError(
                "a checkpoint without FSDP is read by FSDP with FULL_STATE_DICT only, and this run has "
                f"{kind.rpartition('.')[2]}: set fsdp_state_dict_type to FULL_STATE_DICT"
            )
        state = by_name(_read(folder / BY_NUMBER), parameter_names(trainer))
        trainer.accelerator.wait_for_everyone()  # before the first one writes what the others look for
        if trainer.args.process_index == 0:
            _save(state, folder / BY_NAME)
    elif not fsdp and (folder / BY_NAME).exists() and trainer.args.process_index == 0:
        _without_fsdp(folder)
    trainer.accelerator.wait_for_everyone()
    return str(folder / ALONE if not fsdp and (folder / BY_NAME).exists() else folder)


def _without_fsdp(folder: Path) -> None:
    """The same checkpoint as a run without FSDP writes it."""
    shutil.rmtree(folder / ALONE, ignore_errors=True)
    (folder / ALONE).mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.name != BY_NAME and not path.name.startswith(MODEL):
            shutil.copy2(path, folder / ALONE)
        elif (path / "adapter_config.json").is_file() and path.name != ALONE:  # a further adapter
            shutil.copytree(path, folder / ALONE / path.name)
    _save(by_number(_read(folder / BY_NAME)), folder / ALONE / BY_NUMBER)


def _save(state: dict, path: Path) -> None:
    """The whole file or none: a process may die while it writes."""
    torch.save(state, path.with_name(path.name + ".part"))
    os.replace(path.with_name(path.name + ".part"), path)


def _read(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)


def parameter_names(trainer: Any) -> list[list[str]]:
    """Names of the trained parameters in the groups that Trainer makes: with weight decay, and without."""
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    return [[name for name in trained if name in decayed], [name for name in trained if name not in decayed]]


def by_name(state: dict, names: list[list[str]]) -> dict:
    """An optimizer's state dict with names instead of numbers; ValueError where the groups are of other sizes."""
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(group) for group in names]:
        raise ValueError(f"the checkpoint's optimizer has groups of {sizes} parameters, this run of {[len(g) for g in names]}")
    return _renamed(state, [name for group in names for name in group])


def by_number(state: dict) -> dict:
    """Inverse of :func:`by_name`."""
    return _renamed(state, range(sum(len(group["params"]) for group in state["param_groups"])))


def _renamed(state: dict, names: Sequence) -> dict:
    """With these names of the parameters, which are listed in the order of their groups."""
    new = dict(zip((old for group in state["param_groups"] for old in group["params"]), names))
    groups = [{**group, "params": [new[old] for old in group["params"]]} for group in state["param_groups"]]
    return {"state": {new[old]: entry for old, entry in state["state"].items()}, "param_groups": groups}
