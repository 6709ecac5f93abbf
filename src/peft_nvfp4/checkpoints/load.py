"""From the files of a published checkpoint to frozen layers, while transformers loads the rest of the model.

Before loading, the headers of the files say which linears are packed, whether every tensor is there in its type and shape, and
whether there is one that cannot be represented. A packed linear's place in the model is then taken by a :class:`PackedLinear`,
whose parameters have the names, types and shapes that the files have, so that transformers fills them as it fills any other.
After loading they become frozen layers, one at a time, without a copy of their bytes; those that this package does not freeze
(an output head, ``skip_modules``) become dense ones. Whatever is wrong raises a ValueError that names tensor and file.

Rejected: transformers' own weight converters. They convert tensors by patterns of names, which have changed their meaning between
releases, and a float tensor that matches one may be cast before it is converted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..nn.frozen_linear import FrozenOptions
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import BLOCK, E4M3_MAX_BITS, GSCALE_EXPONENTS
from ..ops import dequantize
from ..quantization.linears import is_plain_linear
from .layouts import COMPRESSED_TENSORS, MODELOPT, PARTS, REFUSED, Layout
from .settings import INSTEAD, Published

_DTYPES = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")


# ---------------------------------------------------------------------------------------------- files


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


def check_files(files: Iterable[str], packed: bool) -> None:
    """A packed model is in no pickle."""
    if pickles := [file for file in files if packed and not file.endswith(".safetensors")]:
        raise ValueError(
            f"{pickles[0]} is not a safetensors file; a packed model is read from those only (a pickle can run code). Ask its "
            "author for safetensors"
        )


def check_indices(files: Iterable[str], folder: str | None) -> None:
    """The indices of sharded models beside these files, and in the folder that was to be loaded, name nothing outside of it."""
    folders = {Path(file).parent for file in files}
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


def stored_in(files: Iterable[str]) -> Iterable[Stored]:
    """The tensors of the safetensors files among these. Raises ValueError for a file that is truncated or damaged."""
    for file in files:
        if file.endswith(".safetensors"):
            try:
                with safe_open(file, framework="pt") as f:
                    slices = {key: f.get_slice(key) for key in f.keys()}  # noqa: SIM118 (not a mapping)
                    tensors = [Stored(key, file, s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()]
            except SafetensorError as error:
                raise ValueError(f"{file} is truncated or damaged: {error}. Download it again") from error
            yield from tensors


# ---------------------------------------------------------------------------------------------- before loading


class PackedLinear(nn.Module):
    """Holds the tensors of a packed linear, under their names in the files, while they are loaded."""

    def __init__(self, linear: nn.Linear, layout: Layout, parts: Mapping[str, Stored]):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.layout, self.dtype = layout, linear.weight.dtype
        self.bias = linear.bias
        for leaf in (*layout.required, layout.input_scale):
            if leaf in parts:
                empty = torch.empty(parts[leaf].shape, dtype=_DTYPES[parts[leaf].dtype], device="meta")
                self.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
        self._is_hf_initialized = True  # not to be initialised: what is missing is an error
        self.train(linear.training)

    def tensors(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if name != "bias"}


def packed_linears(
    model: nn.Module, published: Published, stored: Mapping[str, Stored], planned: Iterable[str]
) -> dict[str, dict[str, Stored]]:
    """Dotted name of every linear that is packed in the files -> its tensors.

    Args:
        stored: name in the model -> tensor in the files; a part of a weight (:data:`.layouts.PARTS`) under its own last name.
        planned: names of the linears that this package would freeze; those that are dense in the files stay dense.
    """
    layout, linears = published.layout, {}
    for name, part in stored.items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "weight" and part.dtype in _FP8:
            raise ValueError(f"{part} is an FP8 weight, and peft_nvfp4 reads NVFP4 and dense ones. {INSTEAD}")
        if leaf in PARTS or leaf == layout.codes and part.dtype == "U8":
            linears.setdefault(stem, {})[leaf] = part
    for stem, parts in linears.items():
        if "weight" not in parts and f"{stem}.weight" in stored:
            parts["weight"] = stored[f"{stem}.weight"]
        _check_linear(model, stem, layout, parts)
    if absent := [n for n in planned if n not in linears and f"{n}.weight" not in stored]:
        files = ", ".join(sorted({part.file for part in stored.values()}))
        raise ValueError(f"{absent[0]} (and {len(absent) - 1} more) is missing in {files}; download the files again")
    if not linears:
        raise ValueError(
            f"{published.origin} says {layout.name}, and no linear in the files is packed: the settings are another model's"
        )
    return linears


def _check_linear(model: nn.Module, stem: str, layout: Layout, parts: dict[str, Stored]) -> None:
    first = next(iter(parts.values()))
    for leaf, part in parts.items():
        if leaf in REFUSED:
            raise ValueError(f"{part}: this linear cannot be represented, {REFUSED[leaf]}. {INSTEAD}")
    module = submodule(model, stem)
    if module is None or not is_plain_linear(module) or first.converted:
        kind = "nothing" if module is None else type(module).__name__
        why = "transformers rearranges this weight on loading" if first.converted else f"{type(model).__name__} has {kind} there"
        raise ValueError(
            f"{first} belongs to a packed linear, but {why}, and only the weight of a plain linear is read packed. {INSTEAD}"
        )
    if module.in_features % BLOCK:
        raise ValueError(f"{first}: the linear has {module.in_features} inputs, which is not a multiple of {BLOCK}")
    headers = layout.headers(module.out_features, module.in_features)
    expected = {f"{stem}.{leaf}": headers[leaf] for leaf in headers if leaf in layout.required or leaf in parts}
    check_stored(expected, {f"{stem}.{leaf}": part for leaf, part in parts.items()})
    for leaf, part in parts.items():
        if leaf not in headers:
            raise ValueError(f"{part} is of another layout than {layout.name}, which the settings say")


def check_stored(expected: Mapping[str, tuple[str, Sequence[tuple[int, ...]]]], stored: Mapping[str, Stored]) -> None:
    """The files hold tensors of these names, each of this type (safetensors' word for it) and one of these shapes."""
    if missing := [name for name in expected if name not in stored]:
        files = {stored[name].file for name in expected if name in stored} or {tensor.file for tensor in stored.values()}
        raise ValueError(f"{', '.join(missing)} missing in {', '.join(sorted(files))}; download the files again")
    for name, (dtype, shapes) in expected.items():
        if stored[name].dtype != dtype:
            raise ValueError(f"{stored[name]} is {stored[name].dtype}, expected {dtype}")
        if stored[name].shape not in shapes:
            raise ValueError(f"{stored[name]} has the shape {stored[name].shape}, expected {shapes[0]}")


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """The module of this dotted name; None if there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


# ---------------------------------------------------------------------------------------------- after loading


def check_loaded(
    parameters: Mapping[str, nn.Parameter], origin: Callable[[str], str], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Every parameter (a bias among them: nothing would initialise it) was loaded, and scales are what scales can be. The last
    part of a name says what it holds, in this package's layout or a published one. ``origin``: name -> name and file, for
    messages; ``shapes``: those that are not known from the headers of files already."""
    flags: dict[str, Tensor] = {}
    for name, p in parameters.items():
        if p.is_meta or not getattr(p, "_is_hf_initialized", False):
            raise ValueError(f"{origin(name)} was not loaded: it is missing in the checkpoint")
        if shapes and tuple(p.shape) != shapes[name]:
            raise ValueError(f"{origin(name)} has the shape {tuple(p.shape)}, expected {shapes[name]}")
        leaf = name.rpartition(".")[2]
        if leaf.endswith(("_scales", MODELOPT.scales)) and p.numel():
            flags[name] = p.detach().view(torch.uint8).amax() > E4M3_MAX_BITS
        elif leaf.endswith(("_gscale", MODELOPT.gscale, COMPRESSED_TENSORS.gscale)):
            g = p.detach().clone().view(torch.float32)  # a copy: in a mapped file, four bytes may lie anywhere
            g = 1 / g if leaf == COMPRESSED_TENSORS.gscale else g
            low, high = (2.0**e for e in GSCALE_EXPONENTS)
            flags[name] = ~((g >= low) & (g <= high)).all()  # NaN is not
    if (name := first_set(flags)) is not None:
        scales = name.endswith(("_scales", MODELOPT.scales))
        what = "NaN or negative scales" if scales else "a global scale that is not finite and positive, or of no usable size"
        raise ValueError(f"{origin(name)} is corrupt: it holds {what}. Download the file again, or ask its author")


def first_set(flags: Mapping[str, Tensor]) -> str | None:
    """Name of the first flag that is set, None if none is. Waits once for each device, not once for each flag."""
    for device in {flag.device: None for flag in flags.values()}:
        names = [name for name, flag in flags.items() if flag.device == device]
        for name, flag in zip(names, torch.stack([flags[name] for name in names]).tolist()):
            if flag:
                return name
    return None


def frozen_layer(packed: PackedLinear, options: FrozenOptions) -> NVFP4FrozenLinear:
    """The frozen layer with a packed linear's bytes."""
    w = packed.layout.read(packed.tensors(), packed.in_features)
    layer = NVFP4FrozenLinear(packed.in_features, packed.out_features, packed.bias, packed.dtype, options, w)
    stored = packed.tensors().get(packed.layout.input_scale)
    scale = 0.0 if stored is None else packed.layout.read_gscale(stored).item()  # to multiply with; for an export alone
    layer.published_input_scale = scale if 0.0 < scale < float("inf") else None
    return layer.train(packed.training)


def dense_linear(packed: PackedLinear) -> nn.Linear:
    """The dense linear with a packed one's values, rounded once to the model's dtype."""
    with torch.device("meta"):
        linear = nn.Linear(packed.in_features, packed.out_features)
    w = packed.layout.read(packed.tensors(), packed.in_features)
    linear.weight = nn.Parameter(dequantize(w, torch.float32).to(packed.dtype))
    linear.bias = packed.bias
    return linear.train(packed.training)
