"""A calibration's folder, looked at before anything of a model is replaced: whatever is damaged in it is an error that names the
file, and leaves the model as it was.

Of every linear its tensors are compared with what it needs, by the headers of the files; read are scales and centres, in which
not every byte is a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..nn.frozen_linear import FrozenOptions
from ..numerics.formats import BLOCK, E4M3_MAX_BITS, GSCALE_EXPONENTS, padded_k


def check_manifest(manifest: Mapping[str, Any], parts: Sequence[str]) -> None:
    """It has the shape that :mod:`.store` writes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: what is wrong with it; the caller names the file.
    """
    settings = manifest["settings"]
    FrozenOptions(settings["weight_layouts"], settings["gradients"])
    if not _names(settings["layers"]) or not isinstance(settings["backward"], str):
        raise ValueError("settings name no layers")
    if not isinstance(manifest["fingerprint"], dict):
        raise ValueError("no fingerprint")
    for part in parts:
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


def check_layer(layer: nn.Module, name: str, folder: str | Path, manifest: Mapping[str, Any], parts: Sequence[str]) -> None:
    """The files of one layer hold what its linears need.

    Raises:
        ValueError: naming tensor and file.
    """
    linears = [n for group in manifest["layers"][name]["sites"] for n in group]
    for part in parts:
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
    if not backward and f"{prefix}input_centre" in keys:
        shapes["input_centre"] = (4 * columns,)
    for leaf, shape in shapes.items():
        key = f"{prefix}{leaf}"
        if key not in keys:
            raise ValueError(f"{key} is missing in {path}")
        found = file.get_slice(key)
        if found.get_dtype() != "U8" or tuple(found.get_shape()) != shape:
            raise ValueError(f"{key} in {path} is {found.get_dtype()} {tuple(found.get_shape())}, expected U8 {shape}")
        if leaf != codes and not _possible(leaf, file.get_tensor(key)):
            raise ValueError(f"{key} in {path} is corrupt: it holds NaN, or values that it cannot have")


def _possible(leaf: str, stored: torch.Tensor) -> bool:
    if leaf.endswith("_scales"):
        return not stored.numel() or int(stored.amax()) <= E4M3_MAX_BITS
    values = stored.clone().view(torch.float32)  # a copy: in a mapped file, four bytes may lie anywhere
    if leaf == "input_centre":
        return bool(values.isfinite().all())
    return bool(((values >= 2.0 ** GSCALE_EXPONENTS[0]) & (values <= 2.0 ** GSCALE_EXPONENTS[1])).all())
