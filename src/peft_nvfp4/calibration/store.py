"""A calibration on disk: one safetensors file per layer, and a manifest.

    manifest.json                settings, fingerprint, and for every layer: its file, its linears (terms of their input), errors
    layers_00000.safetensors     <linear>.weight, .weight_scales, .weight_gscale [, .input_centre]
    backward_00000.safetensors   <linear>.backward_weight, .backward_scales, .backward_gscale, where those are calibrated too

Every file is written under another name and renamed, the manifest last: whatever kills the process, what the manifest lists is
whole. The fingerprint covers settings, data and the model's weights; a folder made from something else is refused, not mixed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..nn.frozen_linear import FrozenOptions, frozen
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import QuantizedMatrix
from .check import check_manifest

MANIFEST = "manifest.json"
VERSION = 1
STORED = ("weight", "weight_scales", "weight_gscale", "input_centre")
PARTS = ("layers", "backward")
SAMPLED = 4096
"""Elements of every parameter that enter the fingerprint."""


class Store:
    """The folder of one calibration.

    Raises:
        ValueError: the folder holds a calibration of something else.
    """

    def __init__(self, folder: str | Path, fingerprint: Mapping[str, str], settings: Mapping[str, Any]):
        self.folder = Path(folder)
        self.manifest = {"format_version": VERSION, "fingerprint": dict(fingerprint), "settings": dict(settings)}
        self.manifest.update({part: {} for part in PARTS})
        if (self.folder / MANIFEST).is_file():
            found = read_manifest(self.folder)
            differs = [key for key, value in fingerprint.items() if found["fingerprint"].get(key) != value]
            if differs:
                raise ValueError(
                    f"{self.folder} holds a calibration with other {' and '.join(differs)}; give another output_dir, or delete it"
                )
            self.manifest = found
        self.folder.mkdir(parents=True, exist_ok=True)

    def finished(self, layer: str, part: str = "layers") -> dict | None:
        """The manifest's entry of a layer that is complete."""
        return self.manifest[part].get(layer)

    def save(self, layer: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any], part: str = "layers") -> None:
        file = f"{part}_{len(self.manifest[part]):05d}.safetensors"
        unfinished = self.folder / f"{file}.part"
        # copies: linears of a site share their centre, which a file cannot
        save_file({name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, unfinished)
        os.replace(unfinished, self.folder / file)
        self.manifest[part][layer] = {"file": file, **entry}
        self.write()

    def write(self) -> None:
        unfinished = self.folder / f"{MANIFEST}.part"
        unfinished.write_text(json.dumps(self.manifest, indent=1) + "\n")
        os.replace(unfinished, self.folder / MANIFEST)

    def tensors(self, layer: str) -> dict[str, Tensor]:
        return load_layer(self.folder, self.manifest, layer)


def load_layer(folder: str | Path, manifest: Mapping[str, Any], layer: str) -> dict[str, Tensor]:
    """All tensors of a layer, of both parts."""
    files = [manifest[part][layer]["file"] for part in PARTS if layer in manifest[part]]
    return {name: t for file in files for name, t in load_file(Path(folder) / file).items()}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        newer = manifest["format_version"] > VERSION
        if not newer:
            check_manifest(manifest, PARTS)
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no calibration: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid manifest of a calibration ({error}); delete it") from error
    if newer:
        version = manifest["format_version"]
        raise ValueError(f"{path}: format version {version}; this package reads up to {VERSION}: upgrade peft_nvfp4")
    return manifest


def stored_tensors(name: str, layer: NVFP4FrozenLinear) -> dict[str, Tensor]:
    """What a layer's file keeps of one linear."""
    found = {key: getattr(layer, key) for key in STORED}
    return {f"{name}.{key}": t.detach() for key, t in found.items() if t is not None}


def build(linear: nn.Linear, tensors: Mapping[str, Tensor], options: FrozenOptions) -> NVFP4FrozenLinear:
    """The frozen layer with the stored bits, in place of ``linear``."""
    device = linear.weight.device
    at = {key: t.to(device) for key, t in tensors.items()}
    n, k = linear.out_features, linear.in_features
    q = QuantizedMatrix(at["weight"], at["weight_scales"], at["weight_gscale"].view(torch.float32), k)
    layer = NVFP4FrozenLinear(k, n, linear.bias, linear.weight.dtype, options, q)
    if "backward_weight" in at and layer.backward_weight is not None:
        layer.backward_weight = frozen(at["backward_weight"])
        layer.backward_scales, layer.backward_gscale = frozen(at["backward_scales"]), frozen(at["backward_gscale"])
    if "input_centre" in at:
        layer.set_centre(at["input_centre"].view(torch.float32))
    return layer.train(linear.training)


def share_centre(layers: Sequence[NVFP4FrozenLinear]) -> None:
    """Linears of a site recognise a shared input by the identity of its centre."""
    for layer in layers[1:]:
        layer.input_centre = layers[0].input_centre


def install(layer: nn.Module, name: str, entry: Mapping, tensors: Mapping[str, Tensor], layouts: str, gradients: str) -> None:
    """Replace the linears of a layer by the ones a finished layer's file describes."""
    for group in entry["sites"]:
        built = []
        for n in group:
            linear, prefix = layer.get_submodule(n), f"{name}.{n}."
            own = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
            terms = entry["linears"][n]["terms"]
            new = build(linear, own, FrozenOptions(layouts, gradients, terms))
            new.shares_input, new.calibrated = len(group) > 1, True
            parent, _, child = n.rpartition(".")
            setattr(layer.get_submodule(parent), child, new)
            built.append(new)
        if built[0].input_centre is not None:
            share_centre(built)


# ---------------------------------------------------------------------------------------------- fingerprint


def digest(items: Any) -> str:
    """SHA-256 of a tree of tensors, numbers and strings."""
    h = hashlib.sha256()
    _feed(h, items)
    return h.hexdigest()[:32]


def _feed(h, item: Any) -> None:
    if isinstance(item, Tensor):
        h.update(f"{item.dtype}{tuple(item.shape)}".encode())
        h.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(item, Mapping):
        for key in sorted(item):
            h.update(f"{key}:".encode())
            _feed(h, item[key])
    elif isinstance(item, list | tuple):
        h.update(f"[{len(item)}".encode())
        for value in item:
            _feed(h, value)
    else:
        h.update(f"{type(item).__name__}{item}".encode())


def model_digest(model: nn.Module) -> str:
    """Names, shapes, and a sample of the values of every parameter."""
    h = hashlib.sha256()
    for name, p in model.named_parameters():
        flat = p.detach().reshape(-1)
        h.update(f"{name}{p.dtype}{tuple(p.shape)}".encode())
        _feed(h, flat[:: max(1, flat.numel() // SAMPLED)])
    return h.hexdigest()[:32]
