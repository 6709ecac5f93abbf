"""The native layout on disk: a model's own state dict, sharded by transformers, with packed linears.

| tensor | shape, uint8 | |
|---|---|---|
| ``<linear>.weight`` | (N, Kp/2) | codes, two a byte, even k in the low nibble |
| ``<linear>.weight_scales`` | (N, Kp/16) | block scales, E4M3 bits, at most 0x7E |
| ``<linear>.weight_gscale`` | (4,) | global scale, one FP32, little endian |

Experts that are 3-D parameters have the same three tensors for each projection, with a leading dimension for the expert:
``<experts>.gate_up_proj`` (E, N, Kp/2), ``<experts>.gate_up_proj_scales``, ``<experts>.gate_up_proj_gscale`` (E, 4), and so on.

Kp is K rounded up to 32. Everything else (embeddings, norms, heads, biases) is stored as by transformers. Backward layouts are
not stored: they are made from the forward ones, with the same bits, in a fraction of the time.

Files are checked by their headers before anything is loaded. What only the bytes can tell (NaN scales) is checked when they are
on their device. Every message names tensor and file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer

from ..checkpoints.layouts import PARTS
from ..checkpoints.load import Stored, check_loaded, check_stored, stored_in, submodule
from ..nn.experts.frozen_experts import FrozenExperts, bias_name, frozen_experts
from ..nn.experts.packing import packed_of, stack_name
from ..nn.frozen_linear import FrozenOptions
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import BLOCK, QuantizedMatrix, padded_k
from ..quantization.freeze import frozen_layers

PACKED = ("weight", "weight_scales", "weight_gscale")
BACKWARD = ("backward_weight", "backward_scales", "backward_gscale")

MADV_PAGEOUT = 21
"""Linux 5.4 and later; older kernels refuse the advice, and nothing happens."""


# ---------------------------------------------------------------------------------------------- before loading


def conversions(
    model: nn.Module, quantizer: HfQuantizer | None = None
) -> tuple[list[WeightRenaming], list[WeightConverter], tuple[str, dict[str, bool]]]:
    """What transformers does on loading, with this quantizer: changes of names, of tensors, and what else
    ``rename_source_key`` asks for."""
    mapping = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings, converters = ([c for c in mapping if isinstance(c, kind)] for kind in (WeightRenaming, WeightConverter))
    return renamings, converters, (model.base_model_prefix, dict.fromkeys(model.state_dict(keep_vars=True), True))


def stored_tensors(model: nn.Module, files: Iterable[str], quantizer: HfQuantizer) -> dict[str, Stored]:
    """Name in the model -> the tensor that transformers will load there, with this quantizer. (A tensor that is split on loading
    is under the name of its first part.)"""
    renamings, converters, context = conversions(model, quantizer)
    tensors = {}
    for stored in stored_in(files):
        stem, dot, leaf = stored.key.rpartition(".")
        part = leaf in PACKED[1:] or leaf in PARTS  # not in the model yet: named after its weight
        name, converter = rename_source_key(f"{stem}.weight" if part else stored.key, renamings, converters, *context)
        name = f"{name.rpartition('.')[0]}{dot}{leaf}" if part else name
        tensors[name] = replace(stored, converted=converter is not None)
    return tensors


def packed_shapes(name: str, module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name in the model -> shape, of every packed tensor that the files hold of a linear or of experts."""
    if isinstance(module, FrozenExperts):
        projections = {(projection, (module.experts,)): size for projection, size in module.projections.items()}
    else:
        projections = {("weight", ()): (module.out_features, module.in_features)}
    shapes = {}
    for (projection, leading), (n, k) in projections.items():
        for leaf, shape in zip(PACKED, ((n, padded_k(k) // 2), (n, padded_k(k) // BLOCK), (4,))):
            shapes[f"{name}.{stack_name(projection, leaf)}"] = (*leading, *shape)
    return shapes


def check_layout(model: nn.Module, planned: Iterable[str], stored: Mapping[str, Stored]) -> None:
    """The files, where there are any (and not a state_dict in their place), hold the packed tensors of the planned linears and
    experts, in the right type and shape, and of no other linears."""
    planned = set(planned)
    for name, tensor in stored.items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "weight_scales" and stem not in planned and isinstance(submodule(model, stem), nn.Linear):
            raise ValueError(
                f"{tensor} belongs to a packed linear, and {stem} of {type(model).__name__} stays dense "
                "by its class or by skip_modules"
            )
    for name in planned if stored else ():
        check_stored({key: ("U8", [shape]) for key, shape in packed_shapes(name, model.get_submodule(name)).items()}, stored)


def empty_layer(linear: nn.Linear, options: FrozenOptions) -> NVFP4FrozenLinear:
    """A frozen layer on the meta device with the parameters that the files hold."""
    codes, scales, _ = packed_shapes("", linear).values()
    w = QuantizedMatrix(
        torch.empty(codes, dtype=torch.uint8, device="meta"),
        torch.empty(scales, dtype=torch.uint8, device="meta"),
        torch.empty(1, dtype=torch.float32, device="meta"),
        linear.in_features,
    )
    forward_only = replace(options, weight_layouts="transient")  # the backward layout is made when the forward one is there
    layer = NVFP4FrozenLinear(linear.in_features, linear.out_features, linear.bias, linear.weight.dtype, forward_only, w)
    layer.options = options
    layer._is_hf_initialized = True  # not to be initialised: what is missing is an error
    return layer.train(linear.training)


# ---------------------------------------------------------------------------------------------- after loading


def finish(model: nn.Module, names: Iterable[str], origin: Callable[[str], str]) -> None:
    """Check the linears and experts of these names, which were loaded, and make what the files do not hold: backward layouts."""
    modules = {name: model.get_submodule(name) for name in names}
    parameters, shapes = {}, {}
    for name, module in modules.items():
        parameters |= {f"{name}.{leaf}": p for leaf, p in module.named_parameters(recurse=False)}
        shapes |= packed_shapes(name, module)
        if isinstance(module, NVFP4FrozenLinear):
            shapes[f"{name}.bias"] = (module.out_features,)
        else:
            shapes |= {f"{name}.{bias_name(key)}": (module.experts, n) for key, (n, _) in module.projections.items()}
    check_loaded(parameters, origin, shapes)
    for module in modules.values():
        if isinstance(module, NVFP4FrozenLinear):
            _complete(module)
        else:
            for projection in module.projections:
                for layer in (layers := module.layers(projection)):
                    _complete(layer)
                module.store(projection, [packed_of(layer) for layer in layers])


def _complete(layer: NVFP4FrozenLinear) -> None:
    """Make the backward layout."""
    w = layer.forward_layout
    layer._store(w._replace(gscale=w.gscale.clone()))  # a copy: in a mapped file, four bytes may lie anywhere


def release(files: Iterable[str]) -> None:
    """Advise the kernel to drop the resident pages of all mappings of these files, which have been read, and give freed heap
    memory back. Where there is no such call (other systems than Linux), nothing happens.

    What is read from a mapped file counts as resident until the mapping goes: on a CPU, with the last dense parameter of the
    file. Job schedulers and people look at that number, and a streaming load would seem to hold the whole BF16 model.
    ``MADV_PAGEOUT`` drops clean pages of a file and never loses a byte (``MADV_DONTNEED`` would throw away what somebody wrote
    into another private mapping of the same file).
    """
    paths = {os.path.realpath(file) for file in files}
    try:
        with open("/proc/self/maps") as maps:
            ranges = [line.split(maxsplit=5) for line in maps]
        libc = ctypes.CDLL(None)
        madvise = libc.madvise
    except (OSError, AttributeError):
        return
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for fields in ranges:
        if len(fields) == 6 and fields[5].rstrip("\n") in paths:
            start, end = (int(address, 16) for address in fields[0].split("-"))
            madvise(start, end - start, MADV_PAGEOUT)


def saved_state_dict(model: nn.Module) -> dict[str, Tensor] | None:
    """The state dict without backward layouts, which :func:`finish` makes again; None where transformers saves an adapter."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return None
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):  # with names that no model without them has
        raise ValueError(
            "the model carries an adapter. Save the adapter (PeftModel.save_pretrained), or merge or unload it and save what "
            "that returns"
        )
    if calibrated := [name for name, layer in frozen_layers(model) if layer.calibrated]:
        raise ValueError(
            f"{calibrated[0]} (and {len(calibrated) - 1} more) come from a calibration, whose folder is their checkpoint: load "
            "the dense model and give the folder to NVFP4LoraConfig(calibration=...)"
        )
    packed = {f"{name}.{leaf}" for name, _ in frozen_layers(model) for leaf in BACKWARD}
    for name, experts in frozen_experts(model):
        packed |= {f"{name}.{stack_name(projection, leaf)}" for projection in experts.projections for leaf in BACKWARD}
    return {key: tensor for key, tensor in model.state_dict().items() if key not in packed}
