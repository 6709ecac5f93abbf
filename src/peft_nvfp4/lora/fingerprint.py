"""What base an adapter was trained on: a record written next to the adapter when it is saved.

``nvfp4_base.json`` holds the format of the base, a hash of what its linears store and, where the base was dense when the adapter
was made, a hash of those dense weights: an adapter can then be told apart from one of another model even on a base of another
format. Stock PEFT does not look at the file. (The settings to train on with are in ``nvfp4_adapter.json``. An adapter of a plain
``LoraConfig`` has none: those that its base was frozen with, ``accuracy`` and ``skip_modules``, are here, too.)

Hashed are names, shapes and an evenly spread sample of at most 64 KiB of every tensor: two bases that differ in a few single
weights only may be taken for the same; different models, calibrations, initialisations that rewrite the base, are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from ..calibration.store import digest
from ..nn.experts.frozen_experts import is_experts
from ..nn.wrapping import warn_caller
from ..quantization.freeze import frozen_matrices, frozen_modules
from ..quantization.frozen_as import accuracy_of, skipped_of
from ..quantization.linears import is_plain_linear
from ..quantization.plan import kept_dense
from . import side_files

BASE_FILE = "nvfp4_base.json"
SAMPLE = 1 << 16
DERIVED = ("backward_weight", "backward_scales", "backward_gscale", "output_offset")
"""Endings of the names of packed tensors that follow from the others."""

_RECORD = "_peft_nvfp4_base"
_READ = "_peft_nvfp4_base_read"


def _digest(tensors: Mapping[str, Tensor]) -> str:
    return digest({name: [*tensors[name].shape, _sample(tensors[name])] for name in sorted(tensors)})


def _sample(t: Tensor) -> Tensor:
    flat = t.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // SAMPLE) | 1][:SAMPLE]  # an odd step: it meets every column of a matrix
    return flat.float() if flat.is_floating_point() else flat  # the same values in another dtype are the same weights


def base_record(model: nn.Module) -> dict[str, Any]:
    """Format and fingerprint of a model as a base for adapters.

    Returns:
        ``format`` ("nvfp4", "nf4", or "bf16", which stands for any dense one), ``fingerprint`` of what its linears store and
        how they quantise their inputs, and ``source``: of the weights if they are dense.
    """
    frozen = frozen_modules(model)
    backend = frozen[0][1].backend if frozen else "bf16"
    stored = _dense_experts(model) if backend == "bf16" else {}
    if not frozen:
        stored |= _dense_linears(model)
    for name, module in frozen:
        name = name.replace(".base_layer", "")
        packed = {key: t for key, t in module.packed_tensors().items() if not key.endswith(DERIVED)}
        stored |= {name if key == "weight" and backend == "bf16" else f"{name}.{key}": t for key, t in packed.items()}
    for name, _, options in frozen_matrices(model) if backend == "nvfp4" else ():
        stored[f"{name}.terms"] = torch.tensor(options.terms, device="cpu")
    weights = _digest(stored)
    return {
        "format": backend,
        "fingerprint": weights,
        "source": weights if backend == "bf16" else None,
    }


def source_fingerprint(model: nn.Module) -> str | None:
    """Of a model's dense weights; None where they are not dense, or not loaded."""
    weights = {**_dense_linears(model), **_dense_experts(model)}
    dense = weights and not frozen_modules(model) and all(w.is_floating_point() and not w.is_meta for w in weights.values())
    return _digest(weights) if dense else None


def _dense_linears(model: nn.Module) -> dict[str, Tensor]:
    """Dotted name -> weight of the linears that freezing would replace."""
    keep = kept_dense(model)
    return {name: m.weight for name, m in model.named_modules() if is_plain_linear(m) and id(m) not in keep}


def _dense_experts(model: nn.Module) -> dict[str, Tensor]:
    """Dotted name -> weights of the experts that freezing would pack."""
    mixtures = [(name.replace(".base_layer", ""), m) for name, m in model.named_modules() if is_experts(m)]
    return {f"{name}.{key}": p for name, m in mixtures for key, p in m.named_parameters() if p.ndim == 3}


def remember(config: LoraConfig, model: nn.Module, source: str | None) -> None:
    """Note what ``model`` is in the config of an adapter that is about to be trained on it; :func:`write` puts it on
    disk."""
    if config.inference_mode or any(p.is_meta for p in model.parameters()):
        return  # loaded to be used: what it was trained on is not known here
    record = base_record(model)
    record["source"] = record["source"] or source
    record["init"] = config.init_lora_weights if isinstance(config.init_lora_weights, str) else None
    record |= {"accuracy": accuracy_of(model), "skip_modules": skipped_of(model)}
    setattr(config, _RECORD, record)  # not a field: adapter_config.json stays what stock PEFT knows


def write(config: LoraConfig, folder: str | Path) -> None:
    """Write the record of a config that has one."""
    record = getattr(config, _RECORD, None)
    if record is not None:
        side_files.write(Path(folder) / BASE_FILE, record)


def read(folder: str | Path) -> dict[str, Any] | None:
    """The record next to a saved adapter, None if there is none.

    Raises:
        ValueError: the file is damaged or newer than this package.
    """
    path = Path(folder) / BASE_FILE
    return read_file(path) if path.is_file() else None


def read_file(path: Path) -> dict[str, Any]:
    """The record in a file.

    Raises:
        ValueError: it is damaged or newer than this package.
    """
    content = side_files.read(path)
    for key, kind in (
        ("format", str),
        ("fingerprint", str),
        ("init", str | None),
        ("accuracy", str | None),
        ("skip_modules", list | None),
    ):
        if not isinstance(content.get(key), kind):
            raise ValueError(f"{path} is damaged ({key} is {content.get(key)!r}); delete it to go on without it")
    return content


# ---------------------------------------------------------------------------------------------- an adapter on another base


def note(config: LoraConfig, record: dict[str, Any]) -> None:
    """Keep in a config that was read from files what they say of the base; :func:`warn_of_another_base` compares."""
    setattr(config, _READ, record)


def warn_of_another_base(config: LoraConfig, model: nn.Module) -> None:
    """A saved adapter is about to be put on a base of another format than it was trained on."""
    record = getattr(config, _READ, None)
    if record is None:
        return
    frozen = frozen_modules(model)
    now = frozen[0][1].backend if frozen else "nf4" if getattr(model, "is_loaded_in_4bit", False) else "bf16"
    if now != record["format"]:
        warn_caller(
            f"this adapter was trained on a base in {record['format']} and is put on one that is "
            f"{'dense' if now == 'bf16' else 'in ' + now}: logits will differ. For its own base, pass "
            "config=NVFP4LoraConfig.from_pretrained(folder) and the dense model to PeftModel.from_pretrained"
        )
