"""What a decode step is: a call of the decoder with one new token for each row and a cache, and its mask.

:mod:`peft_nvfp4.training.decoding` records and replays such steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from .graph_recording import Unsupported
from .key_values import layers_of
from .packed_attention import WITH_SINKS

INPUTS = ("input_ids", "inputs_embeds", "position_ids", "cache_position")
"""Tensors that a recording is given anew for each step, of one column."""


class Step(NamedTuple):
    """A call of the decoder with one new token for each row."""

    cache_name: str  # of the argument
    cache: DynamicCache
    mask: Tensor | None  # (rows, length + 1), of the caller
    inputs: dict[str, Tensor]  # of one column
    constants: dict[str, Any]
    rows: int
    length: int  # tokens in the cache


def step_of(named: dict[str, Any]) -> Step | None:
    """What a call of the decoder is as a step; None: it is none (a prompt, no cache).

    Raises:
        Unsupported: it is one that has no recording.
    """
    caches = {name: value for name, value in named.items() if isinstance(value, Cache)}
    tokens = next((named[n] for n in ("input_ids", "inputs_embeds") if isinstance(named.get(n), Tensor)), None)
    if len(caches) != 1 or tokens is None or tokens.ndim < 2:
        return None
    ((cache_name, cache),) = caches.items()
    if type(cache) is DynamicCache and not any(getattr(layer, "is_initialized", True) for layer in cache.layers):
        return None
    if tokens.shape[1] != 1:
        if type(cache) is DynamicCache:
            raise Unsupported("several tokens at once follow a cache")
        return None
    layers = layers_of(cache)
    rows, length = layers[0].keys.shape[0], layers[0].keys.shape[2]
    if any(t.shape[0] != rows or t.shape[2] != length for layer in layers for t in (layer.keys, layer.values)):
        raise Unsupported("the layers of its cache differ in length")
    if tokens.shape[0] != rows or length == 0:
        raise Unsupported(f"it has {tokens.shape[0]} rows, its cache {rows} of {length} tokens")
    others = {k: v for k, v in named.items() if v is not None and k not in (cache_name, "attention_mask")}
    inputs = {k: v for k, v in others.items() if isinstance(v, Tensor)}
    constants = {k: v for k, v in others.items() if k not in inputs}
    _check_arguments(named.get("attention_mask"), inputs, constants, rows, length)
    return Step(cache_name, cache, named.get("attention_mask"), inputs, constants, rows, length)


def _check_arguments(mask: Any, inputs: dict[str, Tensor], constants: dict[str, Any], rows: int, length: int) -> None:
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (rows, length + 1)):
        raise Unsupported(f"attention_mask is {tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}")
    for name, tensor in inputs.items():
        if name not in INPUTS:
            raise Unsupported(f"the decoder is called with {name}")
        columns = tensor.shape[1] if name == "inputs_embeds" else tensor.shape[-1]
        if columns != 1 or tensor.requires_grad:
            raise Unsupported(f"{name} has shape {tuple(tensor.shape)}")
    for name, value in constants.items():
        if not isinstance(value, bool | int | float | str):
            raise Unsupported(f"the decoder is called with {name} ({type(value).__name__})")
        if value and name.startswith("output_"):
            raise Unsupported(f"it is asked for {name}")


def mask_of(visible: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    """(B, S) booleans -> what the attention of this name takes for a mask of one query: (B, 1, 1, S)."""
    visible = visible[:, None, None, :]
    if implementation in ("eager", WITH_SINKS):  # which add it to the scores
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
    return visible
