"""The answers: what a step takes, the largest batch that fits, and settings that make a wanted batch fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..quantization.options import MEMORY
from . import activations, mixtures, weights
from .cards import CONTEXT, FRAGMENTATION, NCCL, usable
from .common import KINDS, PER_LAYER
from .moments import moments
from .settings import Settings
from .shapes import ModelShape, model_shape
from .sharding import BUCKETS, LAYER, ROOT, SCATTERED, beside_codes, per_card

GB = 10**9
OFFLOAD_BUFFERS = 2
"""Decoder layers whose weights are on the GPU with ``memory="smallest"``."""
LARGEST = 1 << 16
"""Batches are not searched beyond."""
BUSY_TOKENS = 2048
"""Of a micro-batch that keeps a GPU busy: below, :func:`fit` gives up speed of another kind first."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of one training step, on one GPU.

    Attributes:
        shape, settings: of what.
        static: category -> bytes that are always there.
        moments: moment -> part -> bytes on top of that.
        at: the moment of the peak.
        host: bytes that a paged optimizer may keep in the host's memory.
        offloaded: bytes of frozen weights that are there.
    """

    shape: ModelShape
    settings: Settings
    static: dict[str, int]
    moments: dict[str, dict[str, int]]
    at: str
    host: int
    offloaded: int = 0

    @property
    def peak(self) -> int:
        """Of PyTorch's allocator (``torch.cuda.max_memory_allocated``)."""
        return sum(self.categories().values())

    def categories(self) -> dict[str, int]:
        """Category -> bytes at the peak, those that are there."""
        parts = {**self.static, **self.moments[self.at]}
        return {name: n for name, n in parts.items() if n > 0}

    def groups(self) -> dict[str, int]:
        """The categories of the paper's Figure 1: few enough for a bar."""
        of = {
            **dict.fromkeys((*self.static, LAYER, ROOT), "weights"),
            **dict.fromkeys(("adapters", "optimizer", "gradients", "copies of adapters"), "adapters and optimizer"),
            **dict.fromkeys((BUCKETS, SCATTERED), "adapters and optimizer"),
            **dict.fromkeys((*KINDS, *PER_LAYER, "final norm", "inputs and outputs of the recording"), "activations"),
            "logits and loss": "logits and loss",
        }
        total: dict[str, int] = {}
        for name, n in self.categories().items():
            group = of.get(name, "workspace and temporary")
            total[group] = total.get(group, 0) + n
        return total

    @property
    def saved_per_token_and_layer(self) -> int:
        """Bytes that one layer keeps for backward."""
        kinds = activations.layer(self.shape, self.settings)
        return self.shape.dtype_bytes * self.shape.hidden if self.settings.checkpointing else sum(kinds.values())

    @property
    def saved_besides_per_layer(self) -> int:
        """Bytes that a layer of a mixture keeps for backward whatever the number of tokens."""
        return 0 if self.settings.checkpointing else sum(mixtures.fixed(self.shape, self.settings).values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers leave out, and which of them are bounds."""
        return (*self.shape.notes, *mixtures.notes(self.shape, self.settings))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        settings = {k: v if isinstance(v, str | int | bool | None) else list(v) for k, v in vars(self.settings).items()}
        return {
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "trained_parameters": weights.adapter_parameters(self.shape, self.settings),
            "settings": settings,
            "peak_bytes": self.peak,
            "peak_at": self.at,
            "categories": self.categories(),
            "groups": self.groups(),
            "moments": {name: sum(self.static.values()) + sum(parts.values()) for name, parts in self.moments.items()},
            "saved_per_token_and_layer": self.saved_per_token_and_layer,
            "saved_besides_per_layer": self.saved_besides_per_layer,
            "host_bytes": self.host,
            "offloaded_bytes": self.offloaded,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{name.ljust(40)}{n / GB:9.3f} GB" for name, n in self.categories().items()]
        return "\n".join([*lines, f"{'peak, at: ' + self.at:40}{self.peak / GB:9.3f} GB", *self.notes])


def estimate(model: Any, settings: Settings | None = None) -> Estimate:
    """Memory of a training step.

    Args:
        model: what :func:`~peft_nvfp4.memory.shapes.model_shape` takes: a name, a path, a config.

    Raises:
        ValueError: the model is of a kind that is not understood, or the settings do not fit it.
    """
    shape, settings = model_shape(model), settings or Settings()
    settings.check(shape)
    settings = mixtures.as_run(shape, settings)
    whole, offloaded = offload(shape, settings, weights.static(shape, settings))
    static, parts = per_card(shape, settings, whole, moments(shape, settings))
    at = max(parts, key=lambda name: sum(parts[name].values()))
    host = weights.host_bytes(shape, settings)
    return Estimate(
        shape, settings, static, parts, at, host // (settings.cards if settings.strategy == "fsdp2" else 1), offloaded
    )


def offload(shape: ModelShape, settings: Settings, static: dict[str, int]) -> tuple[dict[str, int], int]:
    """(static bytes with packed weights of two layers on the GPU, bytes on the host). What bitsandbytes keeps beside NF4 codes,
    and linears that stay dense, stay on the GPU."""
    if not settings.offload:
        return static, 0
    packed = [p for p in shape.projections if settings.is_packed(p)]
    forward = sum(weights.forward_layout(p, settings, shape.dtype_bytes) for p in packed)
    layer = {
        "frozen linears, forward layout": forward - beside_codes(shape, settings) // shape.layers,
        "frozen linears, backward layout": sum(weights.backward_layout(p, settings) for p in packed),
    }
    gone = max(0, shape.layers - OFFLOAD_BUFFERS)
    there = static | {name: static[name] - gone * count for name, count in layer.items()}
    return there, shape.layers * sum(layer.values())


def room(settings: Settings, memory: int, context: int = CONTEXT, fragmentation: float = FRAGMENTATION) -> int:
    """Bytes of tensors that fit into so much memory of a GPU: :func:`~.cards.usable`, less NCCL's if there are several."""
    return usable(memory, context + (NCCL if settings.cards > 1 else 0), fragmentation)


def largest_batch(
    model: Any, settings: Settings, memory: int, context: int = CONTEXT, fragmentation: float = FRAGMENTATION
) -> int:
    """Rows of the largest micro-batch (of each of several GPUs) whose step fits into so many bytes of a GPU; 0: one is too many.

    Args:
        context, fragmentation: see :func:`~peft_nvfp4.memory.cards.usable`.
    """
    shape, limit = model_shape(model), room(settings, memory, context, fragmentation)

    def fits(batch: int) -> bool:
        return estimate(shape, replace(settings, batch=batch)).peak <= limit

    return _bisect(fits)


def _bisect(fits: Callable[[int], bool]) -> int:
    good, bad = 0, 1
    while bad <= LARGEST and fits(bad):
        good, bad = bad, bad * 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


@dataclass(frozen=True)
class Plan:
    """What :func:`fit` chose.

    Attributes:
        settings: ``batch`` rows at a time, ``accumulation`` times a step.
        estimate: of that.
        changed: what was given up to make it fit, in words; empty if nothing.
    """

    settings: Settings
    estimate: Estimate
    changed: tuple[str, ...]


SACRIFICES: tuple[dict[str, Any], ...] = ({"memory": "small"}, {"checkpointing": True}, {"memory": "smallest"})
"""In the order of what they cost, least first: 6 %, then a quarter to a third of a step (H200), then the host's link."""


def _candidates(asked: Settings) -> list[Settings]:
    """The settings, then with more and more given up."""
    found = [asked]
    for change in SACRIFICES:
        if (changed := sacrificed(found[-1], change)) != found[-1]:
            found.append(changed)
    return found


def _given_up(asked: Settings, settings: Settings) -> tuple[str, ...]:
    memory = (f"memory={settings.memory!r}",) if settings.memory != asked.memory else ()
    return (*memory, "decoder layers are checkpointed") if settings.checkpointing > asked.checkpointing else memory


def sacrificed(settings: Settings, change: dict[str, Any]) -> Settings:
    """The settings with one of :data:`SACRIFICES`; as they are where it is not to be had, or they give up more already."""
    if memory := change.get("memory"):
        excluded = memory == "smallest" and (settings.cuda_graphs or settings.cards > 1 and settings.strategy == "fsdp2")
        if settings.liger or excluded or MEMORY.index(memory) <= MEMORY.index(settings.memory):
            return settings
    return replace(settings, **change)


def fit(
    model: Any,
    settings: Settings,
    memory: int,
    wanted: int,
    context: int = CONTEXT,
    fragmentation: float = FRAGMENTATION,
) -> Plan:
    """Settings whose step over ``wanted`` rows fits into so many bytes of a GPU: micro-batches first (accumulation costs next to
    nothing as long as the GPU stays busy), then what costs time.

    Raises:
        ValueError: not even one row fits with everything given up; the message says what it takes.
    """
    shape, best = model_shape(model), None
    enough = min(wanted, -(-BUSY_TOKENS // settings.sequence))
    for candidate in _candidates(settings):
        micro = largest_batch(shape, replace(candidate, accumulation=1), memory, context, fragmentation)
        if micro < wanted:  # several micro-batches: gradients are there during forward
            micro = largest_batch(shape, replace(candidate, accumulation=2), memory, context, fragmentation)
        if micro and (best is None or micro > best[0]):
            best = micro, candidate
        if micro >= enough:
            break
    if best is None:
        least, limit = estimate(shape, replace(candidate, batch=1)).peak, room(settings, memory, context)
        raise ValueError(
            f"one row of {settings.sequence} tokens takes {least / 2**30:.2f} GiB with backend {settings.backend} and everything "
            f"given up that can be, and {memory / 2**30:.2f} GiB of GPU memory leave {limit / 2**30:.2f} GiB: "
            "train with a shorter sequence length, a smaller model, or backend nvfp4"
        )
    micro, candidate = best
    micro = next(n for n in range(min(micro, wanted), 0, -1) if wanted % n == 0)
    chosen = replace(candidate, batch=micro, accumulation=wanted // micro)
    return Plan(chosen, estimate(shape, chosen), _given_up(settings, chosen))
