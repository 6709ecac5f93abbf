"""A calibration on disk: one safetensors file per layer, and a manifest.

    manifest.json                settings, fingerprint, and for every layer: SHA-256 of its file, linears (terms, errors), sites
    layers_00000.safetensors     <linear>.weight, .weight_scales, .weight_gscale [, .input_offset]
    backward_00000.safetensors   <linear>.backward_weight, .backward_scales, .backward_gscale, where those are calibrated too

Files are numbered in the order of the manifest's layers. Every file is written under another name and renamed, the manifest last:
whatever kills the process, what the manifest lists is whole. The fingerprint covers settings, data and the model's weights; a
folder made from something else is refused, not mixed.

A folder is looked at before anything of a model is replaced. The manifest holds the SHA-256 of every file and of itself: what is
damaged is an error that names the file, and leaves the model as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..nn.frozen_linear import FrozenOptions, frozen
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import QuantizedMatrix
from ..quantization.freeze import _carry_attributes

MANIFEST = "manifest.json"
VERSION = 2
STORED = ("weight", "weight_scales", "weight_gscale", "input_offset")
PARTS = ("layers", "backward")
SAMPLED = 4096
"""Elements of every parameter that enter the fingerprint."""


class Store:
    """The folder of one calibration; without a folder nothing is kept.

    Raises:
        ValueError: the folder holds a calibration of something else.
    """

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
            self.manifest = stored
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, layer: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any], part: str = "layers") -> None:
        """Keep a layer that is complete; ``manifest[part][layer]`` is its entry from then on."""
        if self.folder is None:
            return
        path = self.folder / _file(part, len(self.manifest[part]))
        unfinished = path.with_suffix(".part")
        # copies: linears of a site share their offset, which a file cannot
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
    """All tensors of a layer, of both parts.

    Raises:
        ValueError: a file, which is named, is missing or not what was written.
    """
    tensors = {}
    for entries, part in ((manifest[part], part) for part in PARTS if layer in manifest[part]):
        path = Path(folder) / _file(part, list(entries).index(layer))
        content = path.read_bytes() if path.is_file() else b""
        if _sha256(content) != entries[layer]["sha256"]:
            raise ValueError(f"{path} is missing, truncated or damaged; calibrate again")
        tensors |= load(content)
    return tensors


# ---------------------------------------------------------------------------------------------- frozen linears


def stored_tensors(name: str, layer: NVFP4FrozenLinear) -> dict[str, Tensor]:
    """What a layer's file keeps of one linear."""
    tensors = {key: getattr(layer, key) for key in STORED}
    return {f"{name}.{key}": t.detach() for key, t in tensors.items() if t is not None}


def install(layer: nn.Module, name: str, entry: Mapping, tensors: Mapping[str, Tensor], layouts: str) -> None:
    """Replace the linears of a layer by the ones a finished layer's file describes."""
    for group in entry["sites"]:
        built = {}
        for n in group:
            prefix = f"{name}.{n}."
            stored = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
            options = FrozenOptions(layouts, terms=entry["linears"][n]["terms"])
            built[n] = _build(layer.get_submodule(n), stored, options)
        replace_site(layer, built)


def _build(linear: nn.Linear, tensors: Mapping[str, Tensor], options: FrozenOptions) -> NVFP4FrozenLinear:
    """The frozen layer with the stored bits, in place of ``linear``."""
    device = linear.weight.device
    tensors = {key: t.to(device) for key, t in tensors.items()}
    n, k = linear.out_features, linear.in_features
    q = QuantizedMatrix(tensors["weight"], tensors["weight_scales"], tensors["weight_gscale"].view(torch.float32), k)
    layer = NVFP4FrozenLinear(k, n, linear.bias, linear.weight.dtype, options, q)
    if "backward_weight" in tensors and layer.backward_weight is not None:
        layer.backward_weight = frozen(tensors["backward_weight"])
        layer.backward_scales, layer.backward_gscale = frozen(tensors["backward_scales"]), frozen(tensors["backward_gscale"])
    if "input_offset" in tensors:
        layer.set_offset(tensors["input_offset"].view(torch.float32))
    return layer


def replace_site(layer: nn.Module, linears: Mapping[str, NVFP4FrozenLinear]) -> None:
    """Put the calibrated linears of a site in the place of those of these names."""
    for name, new in linears.items():
        old = layer.get_submodule(name)
        new.shares_input, new.calibrated = len(linears) > 1, True
        _carry_attributes(old, new)
        layer.set_submodule(name, new.train(old.training))
    share_offset(list(linears.values()))


def share_offset(linears: Sequence[NVFP4FrozenLinear]) -> None:
    """Linears of a site recognise a shared input by the identity of its offset, where it has one."""
    if linears[0].input_offset is not None:
        for linear in linears[1:]:
            linear.input_offset = linears[0].input_offset


# ---------------------------------------------------------------------------------------------- fingerprint


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest(tree: Any) -> str:
    """SHA-256 of a tree of tensors, numbers and strings."""
    leaves, structure = tree_flatten(tree)
    h = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            h.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            h.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            h.update(f"{type(leaf).__name__}{leaf};".encode())
    return h.hexdigest()


def model_digest(model: nn.Module) -> str:
    """Names, shapes, and a sample of the values of every parameter."""
    flat = {name: (p.shape, p.detach().reshape(-1)) for name, p in model.named_parameters()}
    return digest({n: (tuple(shape), values[:: max(1, values.numel() // SAMPLED)]) for n, (shape, values) in flat.items()})
