"""The answers: what a step takes, the largest batch that fits, and settings that make a wanted batch fit.

What one of several GPUs holds, with ``batch`` rows on each:

* **DDP**: everything, and the buckets through which gradients are averaged: as large as the gradients, and beside them
  (``gradient_as_bucket_view``, off by default, would make them one).
* **FSDP2** (``fully_shard`` on decoder layers, the rest in the unit around them, as accelerate and Trainer wrap): a share of
  packed weights, adapters, gradients and the optimizer's state; NF4's scales stay whole. Gathered, that is whole on every GPU:
  the unit around the layers (embedding, head, final norm) during the step; of the decoder layers the one that computes, and the
  next one, whose bytes travel meanwhile. A layer's gradients are whole until they are scattered: once as they are computed and
  once laid side by side for the wire.

Activations are those of one GPU: neither strategy splits a sequence. Rows that do not divide by the number of GPUs are padded by
FSDP2; that is not counted. What NCCL allocates lies outside of PyTorch's allocator (:data:`~.settings.NCCL`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from ..quantization.options import MEMORY
from . import kept
from .kept import BACKWARD, DENSE, EMBEDDING, FORWARD, KINDS, PER_LAYER
from .long_sequences import in_tiles, long_moments
from .moments import COPIES, FINAL_NORM, GRADIENTS, LOGITS, RECORDING, Moment, moments
from .settings import NCCL, Settings, usable
from .shapes import ModelShape, model_shape

GB = 10**9
OFFLOAD_BUFFERS = 2
"""Decoder layers whose weights are on the GPU with ``memory="smallest"``."""
LARGEST = 1 << 16
"""Batches are not searched beyond."""
BUSY_TOKENS = 2048
"""Of a micro-batch that keeps a GPU busy: below, :func:`fit` gives up speed of another kind first."""

LAYERS_GATHERED = {"forward": 2, "recomputation": 2, "MLP": 2, "layer": 2, "first layer": 1, "final norm": 1}
"""Moment -> decoder layers whose weights are there. Forward frees each one after it ran, the last included; backward fetches the
last one while the final norm is at work, and ends with nothing to fetch."""
SCATTERING = ("MLP", "layer", "first layer")
"""Moments at which a layer's gradients are whole."""

LAYER = "layers gathered"
ROOT = "embedding and head gathered"
SCATTERED = "gradients of a layer, before they are scattered"
BUCKETS = "buckets of DDP"
GROUPS = {
    **dict.fromkeys((FORWARD, BACKWARD, DENSE, EMBEDDING, "norms and biases", LAYER, ROOT), "weights"),
    **dict.fromkeys(("adapters", "optimizer", GRADIENTS, COPIES, BUCKETS, SCATTERED), "adapters and optimizer"),
    **dict.fromkeys((*KINDS, *PER_LAYER, FINAL_NORM, RECORDING), "activations"),
    LOGITS: "logits and loss",
}
"""Category -> its bar in the paper's Figure 1; the others are workspace and temporary."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of one training step, on one GPU."""

    shape: ModelShape
    settings: Settings
    static: dict[str, int]  # category -> bytes that are always there
    moments: dict[str, Moment]  # moment -> part -> bytes on top of that
    at: str  # the moment of the peak
    host: int  # bytes that a paged optimizer may keep in the host's memory
    offloaded: int  # bytes of frozen weights in the host's memory
    checkpoints: int  # bytes of decoder layers' inputs in the host's memory

    @property
    def peak(self) -> int:
        """Of PyTorch's allocator (``torch.cuda.max_memory_allocated``)."""
        return sum(self.categories().values())

    def categories(self) -> dict[str, int]:
        """Category -> bytes at the peak, those that are there."""
        return {name: n for name, n in {**self.static, **self.moments[self.at]}.items() if n > 0}

    def groups(self) -> dict[str, int]:
        """The categories of the paper's Figure 1: few enough for a bar."""
        total = Counter()
        for name, n in self.categories().items():
            total[GROUPS.get(name, "workspace and temporary")] += n
        return dict(total)

    @property
    def saved_per_token_and_layer(self) -> int:
        """Bytes that one layer keeps for backward."""
        if self.settings.checkpointing:
            return self.shape.dtype_bytes * self.shape.hidden
        return sum(kept.layer(self.shape, self.settings).values())

    @property
    def saved_besides_per_layer(self) -> int:
        """Bytes that a layer of a mixture keeps for backward whatever the number of tokens."""
        return 0 if self.settings.checkpointing else sum(kept.per_layer(self.shape, self.settings).values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers leave out, and which of them are bounds."""
        shape, settings, notes = self.shape, self.settings, list(self.shape.notes)
        if shape.mixture and settings.packs_experts(shape):
            notes.append("what experts keep does not depend on the routing")
            if settings.backend == "nf4":
                notes[-1] += (
                    "; an expert in flight is taken to get every token, and each of its tensors to be rounded up by 511 bytes: "
                    "upper bounds"
                )
            if settings.recompute_mlp:
                notes.append(f"memory={settings.memory!r} recomputes nothing of experts")
        elif shape.mixture:
            notes.append("experts stay dense, computed by transformers' grouped_mm")
            if any(map(settings.is_target, shape.experts)):
                notes.append("PEFT adds adapters to the weights of all experts in each forward, and autograd keeps the sums")
        return tuple(notes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "trained_parameters": kept.adapter_parameters(self.shape, self.settings),
            "settings": {k: list(v) if isinstance(v, tuple | list | set) else v for k, v in vars(self.settings).items()},
            "peak_bytes": self.peak,
            "peak_at": self.at,
            "categories": self.categories(),
            "groups": self.groups(),
            "moments": {name: sum((self.static | parts).values()) for name, parts in self.moments.items()},
            "saved_per_token_and_layer": self.saved_per_token_and_layer,
            "saved_besides_per_layer": self.saved_besides_per_layer,
            "host_bytes": self.host,
            "offloaded_bytes": self.offloaded,
            "checkpoint_bytes": self.checkpoints,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{name.ljust(40)}{n / GB:9.3f} GB" for name, n in self.categories().items()]
        return "\n".join([*lines, f"{'peak, at: ' + self.at:40}{self.peak / GB:9.3f} GB", *self.notes])


def estimate(model: Any, settings: Settings | None = None) -> Estimate:
    """Memory of a training step. ``model`` is what :func:`~peft_nvfp4.memory.shapes.model_shape` takes: a name, a path, a config.
    Raises ValueError if the model is of a kind that is not understood, or the settings do not fit it."""
    shape, settings = model_shape(model), settings or Settings()
    settings.check(shape)
    if settings.packs_experts(shape) and settings.backend == "nf4":  # counted on the host, which cannot be recorded: run without
        settings = replace(settings, cuda_graphs=False)
    static, offloaded = _offload(shape, settings, kept.static(shape, settings))
    parts = long_moments(shape, settings) if in_tiles(shape, settings) else moments(shape, settings)
    host, checkpoints = kept.host_bytes(shape, settings), kept.checkpoint_bytes(shape, settings) * settings.host_checkpoints
    if settings.cards > 1 and settings.strategy == "ddp":
        static |= {BUCKETS: kept.gradients(shape, settings)}
    elif settings.cards > 1:
        parts = {name: _gathered(name, moment, shape, settings, static) for name, moment in parts.items()}
        static, host = _shares(shape, settings, static), host // settings.cards
    at = max(parts, key=lambda name: sum((static | parts[name]).values()))
    return Estimate(shape, settings, static, parts, at, host, offloaded, checkpoints)


# ---------------------------------------------------------------------------------------------- weights elsewhere


def _offload(shape: ModelShape, settings: Settings, static: dict[str, int]) -> tuple[dict[str, int], int]:
    """(static bytes with packed weights of two layers on the GPU, bytes on the host). What bitsandbytes keeps beside NF4 codes,
    and linears that stay dense, stay on the GPU."""
    if not settings.offload:
        return static, 0
    packed = [p for p in shape.projections if settings.is_packed(p)]
    forward = sum(kept.forward_layout(p, settings, shape.dtype_bytes) for p in packed)
    layer = {
        FORWARD: forward - beside_codes(shape, settings) // shape.layers,
        BACKWARD: sum(kept.backward_layout(p, settings) for p in packed),
    }
    absent = max(0, shape.layers - OFFLOAD_BUFFERS)
    return static | {name: static[name] - absent * count for name, count in layer.items()}, shape.layers * sum(layer.values())


def beside_codes(shape: ModelShape, settings: Settings) -> int:
    """Bytes that every GPU keeps of a packed base: what bitsandbytes has beside NF4's codes. (All that experts have is cut.)"""
    if settings.format != "nf4":
        return 0
    packed = [p for p in shape.projections if settings.is_packed(p) and not p.of_experts]
    codes = sum(-(-p.inputs * p.outputs // 2) for p in packed)
    return shape.layers * (sum(kept.forward_layout(p, settings, shape.dtype_bytes) for p in packed) - codes)


def layer_bytes(shape: ModelShape, settings: Settings, static: dict[str, int]) -> int:
    """What travels for one decoder layer: packed weights in all layouts that are kept, norms, adapters."""
    inside = (FORWARD, BACKWARD, DENSE, "norms and biases", "adapters")
    return (sum(static.get(name, 0) for name in inside) - beside_codes(shape, settings)) // shape.layers


def _shares(shape: ModelShape, settings: Settings, static: dict[str, int]) -> dict[str, int]:
    whole = beside_codes(shape, settings)
    shares = {name: -(-count // settings.cards) for name, count in (static | {FORWARD: static[FORWARD] - whole}).items()}
    return shares | {FORWARD: whole + shares[FORWARD]}


def _gathered(name: str, parts: Moment, shape: ModelShape, settings: Settings, static: dict[str, int]) -> Moment:
    """A moment's parts with what is gathered then, and a share of the gradients."""
    return {
        **{part: -(-count // settings.cards) if part == GRADIENTS else count for part, count in parts.items()},
        LAYER: LAYERS_GATHERED.get(name, 0) * layer_bytes(shape, settings, static),
        ROOT: static[EMBEDDING] if name != "optimizer" else 0,
        SCATTERED: 2 * static["adapters"] // shape.layers if name in SCATTERING else 0,
    }


# ---------------------------------------------------------------------------------------------- what fits


def room(settings: Settings, memory: int) -> int:
    """Bytes of tensors that fit into so much memory of a GPU: :func:`~.settings.usable`, less NCCL's if there are several."""
    return usable(memory - (NCCL if settings.cards > 1 else 0))


def largest_batch(model: Any, settings: Settings, memory: int) -> int:
    """Rows of the largest micro-batch (of each of several GPUs) whose step fits into so many bytes of a GPU; 0 if one is too
    many."""
    shape, limit = model_shape(model), room(settings, memory)
    return bisect_right(range(1, LARGEST + 1), limit, key=lambda batch: estimate(shape, replace(settings, batch=batch)).peak)


LEVELS = ("fast", "small", "smallest")
"""Of ``memory``, each takes less than the one before."""
LONGEST_STEP = 256
"""Tokens to which a longest sequence is given."""


def longest_context(model: Any, settings: Settings, memory: int) -> Estimate | None:
    """A step over the longest row that fits into so many bytes of a GPU, a multiple of :data:`LONGEST_STEP` tokens, with decoder
    layers checkpointed and the checkpoints on the host; None if not even the shortest does."""
    shape, limit = model_shape(model), room(settings, memory)
    settings = replace(settings, batch=1, accumulation=1, checkpointing=True, host_checkpoints=True, cuda_graphs=False)
    of = lambda n: estimate(shape, replace(settings, sequence=n * LONGEST_STEP, positions=None))
    count = bisect_right(range(1, LARGEST + 1), limit, key=lambda n: of(n).peak)
    return of(count) if count else None


class Plan(NamedTuple):
    """What :func:`fit` chose."""

    settings: Settings  # ``batch`` rows at a time, ``accumulation`` times a step
    estimate: Estimate
    changed: tuple[str, ...]  # what was given up to make it fit, in words; empty if nothing


SACRIFICES: tuple[dict[str, Any], ...] = ({"memory": "small"}, {"checkpointing": True}, {"memory": "smallest"})
"""In the order of what they cost, least first: 6 %, then a quarter to a third of a step (H200), then the host's link."""


def sacrificed(settings: Settings, change: dict[str, Any]) -> Settings:
    """The settings with one of :data:`SACRIFICES`; as they are where it is not to be had, or they give up more already."""
    if memory := change.get("memory"):
        excluded = memory == "smallest" and settings.excludes_offload
        if settings.liger or excluded or MEMORY.index(memory) <= MEMORY.index(settings.memory):
            return settings
    return replace(settings, **change)


def fit(model: Any, settings: Settings, memory: int, wanted: int) -> Plan:
    """Settings whose step over ``wanted`` rows fits into so many bytes of a GPU: micro-batches first (accumulation costs next to
    nothing as long as the GPU stays busy), then what costs time. Raises ValueError if not even one row fits."""
    shape, best = model_shape(model), None
    enough = min(wanted, -(-BUSY_TOKENS // settings.sequence))
    for candidate in accumulate(SACRIFICES, sacrificed, initial=settings):
        micro = largest_batch(shape, replace(candidate, accumulation=1), memory)
        if micro < wanted:  # several micro-batches: gradients are there during forward
            micro = largest_batch(shape, replace(candidate, accumulation=2), memory)
        if micro and (best is None or micro > best[0]):
            best = micro, candidate
        if micro >= enough:
            break
    if best is None:
        least, limit = estimate(shape, replace(candidate, batch=1)).peak, room(settings, memory)
        raise ValueError(
            f"one row of {settings.sequence} tokens takes {least / 2**30:.2f} GiB with backend {settings.backend} and everything "
            f"given up that can be, and {memory / 2**30:.2f} GiB of GPU memory leave {limit / 2**30:.2f} GiB: "
            "train with a shorter sequence length, a smaller model, or backend nvfp4"
        )
    micro, candidate = best
    micro = next(n for n in range(min(micro, wanted), 0, -1) if wanted % n == 0)
    chosen = replace(candidate, batch=micro, accumulation=wanted // micro)
    changed = [f"memory={chosen.memory!r}"] if chosen.memory != settings.memory else []
    changed += ["decoder layers are checkpointed"] if chosen.checkpointing > settings.checkpointing else []
    return Plan(chosen, estimate(shape, chosen), tuple(changed))
