"""One expert's packed tensors in stacks with those of the others, and back to a frozen linear.

A frozen linear's tensors become bytes under a name of the projection's; a slice of the stacks becomes a frozen linear again,
without a copy. The inverse pair is :func:`packed_of` and :data:`FROM_PACKED`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...numerics import reference
from ...numerics.formats import QuantizedMatrix
from ..frozen_linear import FrozenLinear, FrozenOptions, frozen
from ..registry import BACKENDS

LEAVES = (
    *("weight", "weight_scales", "weight_gscale", "backward_weight", "backward_scales", "backward_gscale"),  # nvfp4
    *("absmax", "nested_absmax", "offset"),  # nf4
)


def stack_name(name: str, leaf: str) -> str:
    """Name of the parameter that holds one packed tensor of all experts of a projection."""
    leaf = leaf.removeprefix("weight").removesuffix("_weight").lstrip("_")
    return f"{name}_{leaf}" if leaf else name


def packed_of(layer: FrozenLinear) -> dict[str, Tensor]:
    """The tensors to store of a frozen linear, as bytes. (bitsandbytes' code books are the same for all weights.)"""
    tensors = {leaf: t.detach() for leaf, t in layer.packed_tensors().items() if leaf in LEAVES}
    return {leaf: t.reshape(-1).view(torch.uint8) if t.is_floating_point() else t for leaf, t in tensors.items()}


def scale_factors(stacks: Mapping[str, Tensor], experts: int) -> list[float]:
    """Of every expert's global scale (:func:`peft_nvfp4.numerics.reference.scale_factor`), 1 where there is none; one look."""
    scales = stacks.get("weight_gscale")
    if scales is None or scales.is_meta:
        return [1.0] * experts
    return reference.split_scale(scales.detach().view(torch.float32).view(-1))[1].tolist()


def _nvfp4(
    tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype, options: FrozenOptions, scale_factor: float
) -> FrozenLinear:
    w = QuantizedMatrix(tensors["weight"], tensors["weight_scales"], tensors["weight_gscale"].view(torch.float32), k)
    forward_only = replace(options, weight_layouts="transient")  # the backward layout is there, or is not wanted
    layer = BACKENDS["nvfp4"](k, n, None, dtype, forward_only, w, scale_factor)
    layer.options = options
    for leaf, t in tensors.items():
        setattr(layer, leaf, frozen(t))
    return layer


def _nf4(
    tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype, options: FrozenOptions, scale_factor: float
) -> FrozenLinear:
    import bitsandbytes as bnb
    from bitsandbytes import functional as F

    layer = BACKENDS["nf4"](k, n, None, dtype, options)
    code, nested_code = _code_books(tensors["weight"].device)
    floats = {leaf: tensors[leaf].view(torch.float32) for leaf in ("nested_absmax", "offset")}
    nested = F.QuantState(floats["nested_absmax"], code=nested_code, blocksize=256, dtype=torch.float32)
    state = F.QuantState(
        tensors["absmax"],
        shape=torch.Size((n, k)),
        code=code,
        blocksize=64,
        quant_type="nf4",
        dtype=dtype,
        offset=floats["offset"].reshape(()),
        state2=nested,
    )
    settings = dict(quant_state=state, blocksize=64, quant_type="nf4", module=layer, bnb_quantized=True)
    layer.weight, layer.quant_state = bnb.nn.Params4bit(tensors["weight"], False, **settings), state
    return layer


@functools.cache
def _code_books(device: torch.device) -> tuple[Tensor, Tensor]:
    """bitsandbytes' values of NF4 and of its scales' scales: the same for all experts, one copy a device."""
    from bitsandbytes import functional as F

    with torch.inference_mode(False):
        return F.get_4bit_type("nf4", device=device), F.create_dynamic_map().to(device)


FROM_PACKED = {"nvfp4": _nvfp4, "nf4": _nf4}
"""Backend -> a frozen linear around one expert's packed tensors, with its :func:`scale_factors`; the inverse of
:func:`packed_of`."""
