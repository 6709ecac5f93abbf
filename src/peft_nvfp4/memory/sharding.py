"""What one of several GPUs holds: the same step under DDP or FSDP2. ``batch`` is that of one GPU.

* **DDP**: everything, and the buckets through which gradients are averaged: as large as the gradients, and beside them
  (``gradient_as_bucket_view``, off by default, would make them one).
* **FSDP2** (``fully_shard`` on decoder layers, the rest in the unit around them, as accelerate and Trainer wrap): a share of
  packed weights, adapters, gradients and the optimizer's state; NF4's scales stay whole. Gathered, that is whole on every GPU:
  the unit around the layers (embedding, head, final norm) during the step; of the decoder layers the one that computes, and the
  next one, whose bytes travel meanwhile. A layer's gradients are whole until they are scattered: once as they are computed and
  once laid side by side for the wire.

Activations are those of one GPU: neither strategy splits a sequence. Rows that do not divide by the number of GPUs are padded by
FSDP2; that is not counted. What NCCL allocates lies outside of PyTorch's allocator (:data:`~.cards.NCCL`).
"""

from __future__ import annotations

from . import weights
from .settings import Settings
from .shapes import ModelShape

LAYERS_GATHERED = {"forward": 2, "recomputation": 2, "MLP": 2, "layer": 2, "first layer": 1, "final norm": 1}
"""Moment -> decoder layers whose weights are there. Forward frees each one after it ran, the last included; backward fetches the
last one while the final norm is at work, and ends with nothing to fetch."""

IN_BACKWARD = ("MLP", "layer", "first layer")

LAYER = "layers gathered"
ROOT = "embedding and head gathered"
SCATTERED = "gradients of a layer, before they are scattered"
BUCKETS = "buckets of DDP"


def per_card(
    shape: ModelShape, settings: Settings, static: dict[str, int], moments: dict[str, dict[str, int]]
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """(static bytes, bytes of every moment) of one GPU, from those of a GPU that is alone."""
    if settings.cards == 1:
        return static, moments
    if settings.strategy == "ddp":
        return static | {BUCKETS: weights.gradients(shape, settings)}, moments
    return _shares(shape, settings, static), {
        name: _gathered(name, parts, shape, settings, static) for name, parts in moments.items()
    }


def _share(count: int, settings: Settings) -> int:
    return -(-count // settings.cards)


def _shares(shape: ModelShape, settings: Settings, static: dict[str, int]) -> dict[str, int]:
    whole = beside_codes(shape, settings)
    forward = "frozen linears, forward layout"
    return {
        name: whole + _share(count - whole, settings) if name == forward else _share(count, settings)
        for name, count in static.items()
    }


def _gathered(name: str, parts: dict[str, int], shape: ModelShape, settings: Settings, static: dict[str, int]) -> dict[str, int]:
    """A moment's parts with what is gathered then, and a share of the gradients."""
    found = {part: _share(count, settings) if part == "gradients" else count for part, count in parts.items()}
    found[LAYER] = LAYERS_GATHERED.get(name, 0) * layer_bytes(shape, settings, static)
    found[ROOT] = static["embedding and head"] if name != "optimizer" else 0
    if name in IN_BACKWARD:
        found[SCATTERED] = 2 * static["adapters"] // shape.layers
    return found


def layer_bytes(shape: ModelShape, settings: Settings, static: dict[str, int]) -> int:
    """What travels for one decoder layer: packed weights in all layouts that are kept, norms, adapters."""
    inside = ("frozen linears, forward layout", "frozen linears, backward layout", weights.DENSE, "norms and biases", "adapters")
    return (sum(static.get(name, 0) for name in inside) - beside_codes(shape, settings)) // shape.layers


def beside_codes(shape: ModelShape, settings: Settings) -> int:
    """Bytes that every GPU keeps of a packed base: what bitsandbytes has beside NF4's codes. (All that experts have is cut.)"""
    if settings.format != "nf4":
        return 0
    packed = [p for p in shape.projections if settings.is_packed(p) and not p.of_experts]
    codes = sum(-(-p.inputs * p.outputs // 2) for p in packed)
    return shape.layers * (sum(weights.forward_layout(p, settings, shape.dtype_bytes) for p in packed) - codes)
