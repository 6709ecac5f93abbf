"""A calibration on disk: one safetensors file per layer, and a manifest.

    manifest.json                settings, fingerprint, and for every layer: SHA-256 of its file, linears (terms, errors), sites
    layers_00000.safetensors     <linear>.weight, .weight_scales, .weight_gscale [, .input_offset]
    backward_00000.safetensors   <linear>.backward_weight, .backward_scales, .backward_gscale, where those are calibrated too

Of a layer, ``sites`` are the names of the linears that read one input, group by group. Files are numbered in the order of the
manifest's layers. Every file is written under another name and renamed, the manifest last:
whatever kills the process, what the manifest lists is whole. The fingerprint covers settings, data and the model's weights; a
folder made from something else is refused, not mixed.

The manifest holds the SHA-256 of every file and of itself. All files are read before anything of a model is replaced: what is
damaged is an error that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn

from ..nn.frozen_linear import FrozenOptions, frozen
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import QuantizedMatrix
from ..quantization.freeze import _carry_attributes

MANIFEST = "manifest.json"
VERSION = 2
STORED = ("weight", "weight_scales", "weight_gscale", "input_offset")
BACKWARD = ("backward_weight", "backward_scales", "backward_gscale")
PARTS = ("layers", "backward")
SAMPLED = 4096
"""Elements of every parameter that enter the fingerprint."""


class Store:
    """The folder of one calibration; without a folder nothing is kept. Raises ValueError if it holds a calibration of something
    else, or a damaged one."""

    def __init__(self, folder: str | Path | None, fingerprint: Mapping[str, str], settings: Mapping[str, Any]):
        self.folder = None if folder is None else Path(folder)
        self.manifest = {"format_version": VERSION, "fingerprint": dict(fingerprint), "settings": dict(settings)}
        self.manifest.update({part: {} for part in PARTS})
        if self.folder is None:
            return
        if (self.folder / MANIFEST).is_file():
            stored = read_manifest(self.folder)
            differs = [key for key, value in fingerprint.items() if stored["fingerprint"].get(key) != value]
            if differs:
                raise ValueError(
                    f"{self.folder} holds a calibration with other {' and '.join(differs)}; give another output_dir, or delete it"
                )
            for layer in stored["layers"]:
                load_layer(self.folder, stored, layer)
            self.manifest = stored
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, layer: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any], part: str = "layers") -> None:
        """Keep a layer that is complete; ``manifest[part][layer]`` is its entry from then on."""
        if self.folder is None:
            return
        path = self.folder / _file(part, len(self.manifest[part]))
        unfinished = path.with_suffix(".part")
        # copies: linears of a group share their offset, which a file cannot
        save_file({name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, unfinished)
        os.replace(unfinished, path)
        self.manifest[part][layer] = {**entry, "sha256": _sha256(path.read_bytes())}
        self.write()

    def write(self) -> None:
        if self.folder is not None:
            write_manifest(self.folder, self.manifest)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    unfinished = folder / f"{MANIFEST}.part"
    content = {**manifest, "sha256": _sha256(json.dumps(manifest).encode())}
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(unfinished, folder / MANIFEST)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        version = manifest["format_version"]
        if type(version) is not int or version < 1:
            raise ValueError(f"format_version={version!r}")
        newer = version > VERSION
        damaged = not newer and manifest.pop("sha256") != _sha256(json.dumps(manifest).encode())
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no calibration: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid manifest of a calibration ({error}); delete it") from error
    if newer:
        raise ValueError(f"{path}: format version {version}; this package reads up to {VERSION}: upgrade peft_nvfp4")
    if damaged:
        raise ValueError(f"{path} is damaged: it is not what a calibration has written; calibrate again")
    return manifest


def _file(part: str, number: int) -> str:
    return f"{part}_{number:05d}.safetensors"


def load_layer(folder: str | Path, manifest: Mapping[str, Any], layer: str) -> dict[str, Tensor]:
    """All tensors of a layer, of both parts."""
    tensors = {}
    for entries, part in ((manifest[part], part) for part in PARTS if layer in manifest[part]):
        path = Path(folder) / _file(part, list(entries).index(layer))
        content = path.read_bytes() if path.is_file() else b""
        if _sha256(content) != entries[layer]["sha256"]:
            raise ValueError(f"{path} is missing, truncated or damaged; calibrate again")
        tensors |= load(content)
    return tensors


def stored_tensors(name: str, linear: NVFP4FrozenLinear) -> dict[str, Tensor]:
    """What a layer's file keeps of one linear."""
    return {f"{name}.{key}": t.detach() for key in STORED if (t := getattr(linear, key)) is not None}


def install(layer: nn.Module, name: str, entry: Mapping, tensors: Mapping[str, Tensor], layouts: str) -> None:
    """Replace the linears of a layer by the ones a finished layer's file describes."""
    for names in entry["sites"]:
        built = {}
        for n in names:
            linear, prefix = layer.get_submodule(n), f"{name}.{n}."
            device = linear.weight.device
            stored = {key.removeprefix(prefix): t.to(device) for key, t in tensors.items() if key.startswith(prefix)}
            options = FrozenOptions(layouts, terms=entry["linears"][n]["terms"])
            built[n] = _build(linear, stored, options)
        replace_linears(layer, built)


def _build(linear: nn.Linear, tensors: Mapping[str, Tensor], options: FrozenOptions) -> NVFP4FrozenLinear:
    """The frozen layer with the stored bits, in place of ``linear``."""
    k = linear.in_features
    q = QuantizedMatrix(tensors["weight"], tensors["weight_scales"], tensors["weight_gscale"].view(torch.float32), k)
    layer = NVFP4FrozenLinear(k, linear.out_features, linear.bias, linear.weight.dtype, options, q)
    if layer.backward_weight is not None:
        for key in tensors.keys() & BACKWARD:
            setattr(layer, key, frozen(tensors[key]))
    if "input_offset" in tensors:
        layer.set_offset(tensors["input_offset"].view(torch.float32))
    return layer


def replace_linears(layer: nn.Module, linears: Mapping[str, NVFP4FrozenLinear]) -> None:
    """Put the calibrated linears that read one input in the place of those of these names."""
    for name, new in linears.items():
        old = layer.get_submodule(name)
        new.shares_input, new.calibrated = len(linears) > 1, True
        _carry_attributes(old, new)
        layer.set_submodule(name, new.train(old.training))
        new.input_offset = next(iter(linears.values())).input_offset  # by its identity they know that their input is shared


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest(tree: Any) -> str:
    """SHA-256 of nested dictionaries and sequences of tensors, numbers and strings. Hashed is JSON, with a tensor's dtype, shape
    and bytes in its place: the same in every version of PyTorch."""

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return f"{type(leaf).__name__} {leaf}"
        content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(leaf.dtype), *leaf.shape, _sha256(content)]

    return _sha256(json.dumps(tree, default=plain, sort_keys=True).encode())


def model_digest(model: nn.Module) -> str:
    """Names, shapes, and a sample of the values of every parameter."""
    sample = lambda p: p.detach().reshape(-1)[:: max(1, p.numel() // SAMPLED)]
    return digest({name: [*p.shape, sample(p)] for name, p in model.named_parameters()})
