"""A calibration on disk: one safetensors file per layer, and a manifest.

    manifest.json                settings, fingerprint, and for every layer: its file, its linears (terms of their input), errors
    layers_00000.safetensors     <linear>.weight, .weight_scales, .weight_gscale [, .input_offset]
    backward_00000.safetensors   <linear>.backward_weight, .backward_scales, .backward_gscale, where those are calibrated too

Every file is written under another name and renamed, the manifest last: whatever kills the process, what the manifest lists is
whole. The fingerprint covers settings, data and the model's weights; a folder made from something else is refused, not mixed.

A folder is looked at before anything of a model is replaced. What is damaged in it is an error that names the file, and leaves
the model as it was: of every linear the tensors are compared with what it needs, by the headers of the files. Read are scales and
offsets, in which not every byte is a value.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..nn.frozen_linear import FrozenOptions, frozen
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import BLOCK, E4M3_MAX_BITS, GSCALE_EXPONENTS, QuantizedMatrix, padded_k

MANIFEST = "manifest.json"
VERSION = 1
STORED = ("weight", "weight_scales", "weight_gscale", "input_offset")
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
            stored = read_manifest(self.folder)
            differs = [key for key, value in fingerprint.items() if stored["fingerprint"].get(key) != value]
            if differs:
                raise ValueError(
                    f"{self.folder} holds a calibration with other {' and '.join(differs)}; give another output_dir, or delete it"
                )
            self.manifest = stored
        self.folder.mkdir(parents=True, exist_ok=True)

    def finished(self, layer: str, part: str = "layers") -> dict | None:
        """The manifest's entry of a layer that is complete."""
        return self.manifest[part].get(layer)

    def save(self, layer: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any], part: str = "layers") -> None:
        file = f"{part}_{len(self.manifest[part]):05d}.safetensors"
        unfinished = self.folder / f"{file}.part"
        # copies: linears of a site share their offset, which a file cannot
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
            _check_manifest(manifest)
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no calibration: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid manifest of a calibration ({error}); delete it") from error
    if newer:
        version = manifest["format_version"]
        raise ValueError(f"{path}: format version {version}; this package reads up to {VERSION}: upgrade peft_nvfp4")
    return manifest


# ---------------------------------------------------------------------------------------------- checks


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    """It has the shape that :class:`Store` writes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: what is wrong with it; the caller names the file.
    """
    settings = manifest["settings"]
    FrozenOptions(settings["weight_layouts"], settings["gradients"])
    if not _names(settings["layers"]) or not isinstance(settings["backward"], str):
        raise ValueError("settings name no layers")
    if not isinstance(manifest["fingerprint"], dict):
        raise ValueError("no fingerprint")
    for part in PARTS:
        for name, entry in manifest[part].items():
            file = entry["file"]
            plain = isinstance(file, str) and "\0" not in file and file == PurePosixPath(file).name == PureWindowsPath(file).name
            if not plain:
                raise ValueError(f"{name} is in {file!r}, which is no file of this folder")
            if part == "layers":
                _check_sites(name, entry)


def _check_sites(name: str, entry: Mapping[str, Any]) -> None:
    if not isinstance(entry["sites"], list) or not all(_names(group) for group in entry["sites"]):
        raise ValueError(f"the linears of {name} are not in groups of names")
    linears = [n for group in entry["sites"] for n in group]
    if sorted(linears) != sorted(entry["linears"]):
        raise ValueError(f"the groups of {name} do not hold its linears, each once")
    for n in linears:
        FrozenOptions(terms=entry["linears"][n]["terms"])


def _names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def check_layer(layer: nn.Module, name: str, folder: str | Path, manifest: Mapping[str, Any]) -> None:
    """The files of one layer hold what its linears need.

    Raises:
        ValueError: naming tensor and file.
    """
    linears = [n for group in manifest["layers"][name]["sites"] for n in group]
    for part in PARTS:
        if name not in manifest[part]:
            continue
        path = Path(folder) / manifest[part][name]["file"]
        try:
            with safe_open(path, "pt") as file:
                for n in linears:
                    _check_linear(layer, n, f"{name}.{n}.", file, path, backward=part == "backward")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is missing, truncated or damaged: {error}") from error


def _check_linear(layer: nn.Module, n: str, prefix: str, file: Any, path: Path, backward: bool) -> None:
    try:
        linear = layer.get_submodule(n)
    except AttributeError:
        linear = None
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"{path} holds {prefix[:-1]}, which is no linear of this model")
    rows, columns = (linear.in_features, linear.out_features) if backward else (linear.out_features, linear.in_features)
    width, stem = padded_k(columns), "backward_" if backward else "weight_"
    codes = "backward_weight" if backward else "weight"
    shapes = {codes: (rows, width // 2), f"{stem}scales": (rows, width // BLOCK), f"{stem}gscale": (4,)}
    keys = set(file.keys())
    if not backward and f"{prefix}input_offset" in keys:
        shapes["input_offset"] = (4 * columns,)
    for leaf, shape in shapes.items():
        key = f"{prefix}{leaf}"
        if key not in keys:
            raise ValueError(f"{key} is missing in {path}")
        header = file.get_slice(key)
        dtype, stored = header.get_dtype(), tuple(header.get_shape())
        if dtype != "U8" or stored != shape:
            raise ValueError(f"{key} in {path} is {dtype} {stored}, expected U8 {shape}")
        if leaf != codes and not _possible(leaf, file.get_tensor(key)):
            raise ValueError(f"{key} in {path} is corrupt: it holds NaN, or values that it cannot have")


def _possible(leaf: str, stored: Tensor) -> bool:
    if leaf.endswith("_scales"):
        return not stored.numel() or int(stored.amax()) <= E4M3_MAX_BITS
    values = stored.clone().view(torch.float32)  # a copy: in a mapped file, four bytes may lie anywhere
    if leaf == "input_offset":
        return bool(values.isfinite().all())
    return bool(((values >= 2.0 ** GSCALE_EXPONENTS[0]) & (values <= 2.0 ** GSCALE_EXPONENTS[1])).all())


# ---------------------------------------------------------------------------------------------- frozen linears


def stored_tensors(name: str, layer: NVFP4FrozenLinear) -> dict[str, Tensor]:
    """What a layer's file keeps of one linear."""
    tensors = {key: getattr(layer, key) for key in STORED}
    return {f"{name}.{key}": t.detach() for key, t in tensors.items() if t is not None}


def install(layer: nn.Module, name: str, entry: Mapping, tensors: Mapping[str, Tensor], layouts: str, gradients: str) -> None:
    """Replace the linears of a layer by the ones a finished layer's file describes."""
    for group in entry["sites"]:
        built = []
        for n in group:
            prefix = f"{name}.{n}."
            stored = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
            options = FrozenOptions(layouts, gradients, entry["linears"][n]["terms"])
            built.append(_build(layer.get_submodule(n), stored, options))
            replace_linear(layer, n, built[-1], len(group) > 1)
        share_offset(built)


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
    return layer.train(linear.training)


def replace_linear(layer: nn.Module, name: str, new: NVFP4FrozenLinear, shares_input: bool) -> None:
    """Put a calibrated linear in the place of the one of this name."""
    new.shares_input, new.calibrated = shares_input, True
    parent, _, child = name.rpartition(".")
    setattr(layer.get_submodule(parent), child, new)


def share_offset(linears: Sequence[NVFP4FrozenLinear]) -> None:
    """Linears of a site recognise a shared input by the identity of its offset, where it has one."""
    if linears[0].input_offset is not None:
        for linear in linears[1:]:
            linear.input_offset = linears[0].input_offset


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
