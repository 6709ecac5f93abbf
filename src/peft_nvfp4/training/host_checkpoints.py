"""Gradient checkpoints in the host's memory: sequences whose residual streams do not fit on the GPU.

>>> model.gradient_checkpointing_enable()          # or TrainingArguments(gradient_checkpointing=True)
>>> enable_host_checkpoints(model)
>>> print(host_checkpoint_status(model))

With gradient checkpointing a decoder layer keeps its input alone: 8 kB a token and layer of Llama-8B, 262 kB a token of all
layers, which is most of what a long sequence takes. Here that input goes to page-locked host memory while its layer computes,
and comes back while the layer after it runs backward. A layer takes longer than the copy: it computes 26 d^2 FLOP a token, for
2 d bytes, which is 13 d FLOP a byte: with d = 4096 and 25 GB/s, a GPU of 1.3 PFLOP/s waits for nothing.

How: transformers calls a function for every checkpointed layer (``_gradient_checkpointing_func``). In its place stands one that
hands PyTorch's own ``checkpoint`` (the kind that is not reentrant, whatever was asked for) a function without the layer's
input; when the layer is computed again, the function fetches it. What a layer computes is not touched, so results are the same
bit for bit. In such a step MLPs, and the norm before the head, compute a tile of tokens at a time
(:mod:`peft_nvfp4.autograd.tiles`), attention's backward takes an eighth of the heads at a time
(:mod:`peft_nvfp4.autograd.long_attention`), and no CUDA graph is replayed: launches take no time next to so many tokens.

Buffers on the host are kept from step to step, one a layer, of the longest sequence so far. Where the host is short of memory a
step that was to use it raises before anything is computed (or, if nobody has asked for this, keeps its checkpoints on the GPU).
Rejected: ``torch.autograd.graph.save_on_cpu`` (pins new memory for every tensor, copies without overlap).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..autograd.tiles import in_tiles
from ..fusion.norm import looks_like_rmsnorm, plus_one
from ..fusion.probe import innermost, watched
from .checkpoint_transfers import Buffers
from .host_pass import RUNNING, CheckpointFunction, Pass, replaceable
from .offload.host_memory import HostMemoryShort
from .packed_attention import attention
from .packing import decoder_of
from .resting_weights import RestingWeights

NORM_VALUES = 8 << 20
"""Of a tile of a norm, whose backward takes five such matrices in FP32."""
SHARE = 8
"""Checkpoints that would take more than this part (1/8) of the GPU's memory go to the host without being asked for."""


@dataclass
class HostCheckpointStatus:
    """What :func:`host_checkpoint_status` returns.

    Attributes:
        enabled: for long sequences (``"automatic"``), for all of them (``"always"``), or not (``"no"``).
        passes: forward passes whose checkpoints went to the host; ``last_bytes``: of the last of them.
        host_bytes: of the buffers; ``pinned``: the GPU reads them by itself.
        rested: times that embedding and head left the GPU, too, in forward or in backward.
        reason: why a pass that was long enough kept its checkpoints on the GPU, the last time.
    """

    enabled: str = "no"
    passes: int = 0
    last_bytes: int = 0
    host_bytes: int = 0
    pinned: bool = False
    rested: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.enabled == "no":
            return "checkpoints stay on the device"
        pages = "page-locked" if self.pinned else "pageable"
        line = f"checkpoints on the host ({self.enabled}): {self.passes} passes, {self.host_bytes / 1e9:.2f} GB in {pages} memory"
        return f"{line}; on the device: {self.reason}" if self.reason else line


# ---------------------------------------------------------------------------------------------- which passes


class HostCheckpoints:
    """What watches a decoder's calls. Copies (and pickles) of a model begin without buffers."""

    def __init__(self, automatic: bool):
        self.automatic, self.status, self.buffers = automatic, HostCheckpointStatus(), Buffers()
        self.resting, self.model = RestingWeights(), lambda: None
        self._found: tuple | None = None

    def __reduce__(self):
        return HostCheckpoints, (self.automatic,)

    def host_checkpoints_begin(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before the decoder's forward."""
        if torch.compiler.is_compiling():
            return
        RUNNING.set(None)
        self.resting.come_back()  # after a backward that failed
        if not (decoder.training and torch.is_grad_enabled()):
            return
        layers, norms = self.parts(decoder)
        if not layers or not all(layer.gradient_checkpointing for layer in layers):
            return
        inputs = kwargs.get("input_ids", args[0] if args else None)
        inputs = inputs if isinstance(inputs, Tensor) and not inputs.is_floating_point() else None
        tokens = _rows(kwargs.get("inputs_embeds")) if inputs is None else inputs.numel()
        parameter = next(decoder.parameters())
        bytes_ = tokens * decoder.config.get_text_config().hidden_size * parameter.dtype.itemsize
        if not bytes_ or not self.wants(len(layers) * bytes_, parameter.device):
            return
        if any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in decoder.parameters()):  # FSDP2, ZeRO-3
            self.status.reason = "the weights are sharded"
            return
        if not all(_prepared(layer) for layer in layers):
            self.status.reason = "something else than PyTorch's checkpoint computes the layers again"
            return
        try:
            self.buffers.prepare(len(layers), bytes_, parameter.device)
        except HostMemoryShort as error:
            if not self.automatic:
                raise
            self.status.reason = str(error)
            return
        self.status.passes, self.status.last_bytes = self.status.passes + 1, len(layers) * bytes_
        norms = [norm for norm in norms if "forward" not in vars(norm)]
        own = inputs is not None and _embeds_unwatched(decoder)
        running = Pass(self.buffers, bytes_, norms, own, partial(self.rest, bytes_), self.resting.come_back)
        for norm in running.norms:
            norm.forward = partial(_norm_in_tiles, weakref.ref(norm))
        RUNNING.set(running)

    def wants(self, bytes_: int, device: torch.device) -> bool:
        """Whether checkpoints of so many bytes, of all layers, are to go to the host."""
        return not self.automatic or bytes_ > _device_memory(device) // SHARE

    def host_checkpoints_end(self, decoder: nn.Module, args: tuple, output: Any) -> None:
        """After it, or where it has raised."""
        if torch.compiler.is_compiling():
            return
        running = RUNNING.get()
        if running is not None:
            RUNNING.set(None)
            running.settle()
            self.resting.come_back(_ends(self.model(), ("get_output_embeddings",)))  # which is next
            for norm in running.norms:
                del norm.forward

    def rest(self, bytes_: int) -> None:
        """Embedding and head, if layers with inputs of so many bytes need their room."""
        self.resting.leave_if_needed(_ends(self.model()), bytes_, self.buffers.device)

    def parts(self, decoder: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The checkpointed layers, and the norms beside them (the one before the head)."""
        if self._found is None or self._found[0]() is not decoder:
            layers = list(_outermost(decoder))
            norms = [m for m in decoder.children() if looks_like_rmsnorm(m) and plus_one(m) is not None]
            self._found = weakref.ref(decoder), [list(map(weakref.ref, modules)) for modules in (layers, norms)]
        layers, norms = ([ref() for ref in refs] for refs in self._found[1])
        return layers, norms


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost(child)


ENDS = ("get_input_embeddings", "get_output_embeddings")


def _ends(model: nn.Module | None, names: tuple[str, ...] = ENDS) -> list[nn.Parameter]:
    """Of the embedding and the output head."""
    modules = (getattr(model, name, lambda: None)() for name in names)
    return list({id(p): p for m in modules if m is not None for p in m.parameters()}.values())


def _embeds_unwatched(decoder: nn.Module) -> bool:
    try:
        return not watched(decoder.get_input_embeddings())
    except (AttributeError, NotImplementedError):
        return False


def _rows(embeddings: Any) -> int:
    return embeddings.shape[:-1].numel() if isinstance(embeddings, Tensor) else 0


def _device_memory(device: torch.device) -> int:
    """Bytes that PyTorch may use of a GPU; of anything else no limit."""
    if device.type != "cuda":
        return sys.maxsize
    return int(torch.cuda.get_device_properties(device).total_memory * torch.cuda.get_per_process_memory_fraction(device))


def _prepared(layer: nn.Module) -> bool:
    function = layer._gradient_checkpointing_func
    if not isinstance(function, CheckpointFunction) and replaceable(function):
        layer._gradient_checkpointing_func = function = CheckpointFunction(function)
    return isinstance(function, CheckpointFunction)


def norm_rows(width: int) -> int:
    """Tokens of a tile of a norm."""
    return max(256, NORM_VALUES // width)


def _norm_in_tiles(norm: weakref.ref[nn.Module], x: Tensor) -> Tensor:
    """A norm of a known formula, whose backward takes five FP32 matrices as wide as its input."""
    module = norm()
    compute, most = type(module).forward.__get__(module), norm_rows(x.shape[-1])
    flat = x.reshape(-1, x.shape[-1])
    if len(flat) <= most:
        return compute(x)
    return in_tiles(compute, flat, most, [p for p in module.parameters() if p.requires_grad]).view(x.shape)


# ---------------------------------------------------------------------------------------------- public


def can_checkpoint(model: nn.Module) -> bool:
    """Whether a model has a decoder with layers that transformers can checkpoint."""
    decoder = decoder_of(model)
    return decoder is not None and any(True for _ in _outermost(decoder))


def enable_host_checkpoints(model: nn.Module, automatic: bool = False) -> None:
    """Keep gradient checkpoints of a (PEFT) model of transformers on the host from now on, while its layers are checkpointed.

    Args:
        automatic: only in passes whose checkpoints would take more than an eighth of the GPU's memory, and only if the host has
            room for them. A model where they always go to the host stays one.

    Raises:
        ValueError: no decoder with checkpointed layers was found.
    """
    decoder = decoder_of(model)
    if not can_checkpoint(model):
        raise ValueError(f"{type(model).__name__} has no decoder with layers that transformers can checkpoint")
    if (watching := _watching(model)) is not None:
        watching.automatic &= automatic
        return
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention  # for good, as packing does: it is transformers' own but for long sequences
    watching = HostCheckpoints(automatic)
    watching.model = weakref.ref(innermost(model))
    decoder.register_forward_pre_hook(watching.host_checkpoints_begin, with_kwargs=True)
    decoder.register_forward_hook(watching.host_checkpoints_end, always_call=True)


def disable_host_checkpoints(model: nn.Module) -> None:
    """Keep them on the device again, and free the host's memory. Nothing happens to a model that keeps them there."""
    if (watching := _watching(model)) is None:
        return
    watching.resting.come_back()
    decoder = decoder_of(model)
    for hooks in (decoder._forward_pre_hooks, decoder._forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is watching]:
            del hooks[key]
            for marked in (decoder._forward_pre_hooks_with_kwargs, decoder._forward_hooks_always_called):
                marked.pop(key, None)
    for layer in _outermost(decoder):
        function = vars(layer).get("_gradient_checkpointing_func")
        if isinstance(function, CheckpointFunction):
            layer._gradient_checkpointing_func = function.plain


def host_checkpoint_status(model: nn.Module) -> HostCheckpointStatus:
    """What went to the host so far."""
    if (watching := _watching(model)) is None:
        return HostCheckpointStatus()
    status, buffers = watching.status, watching.buffers.all
    status.enabled, status.rested = "automatic" if watching.automatic else "always", watching.resting.times
    status.host_bytes, status.pinned = sum(b.data.nbytes for b in buffers), bool(buffers) and all(b.pinned for b in buffers)
    return status


def _watching(model: nn.Module) -> HostCheckpoints | None:
    decoder = decoder_of(model)
    hooks = () if decoder is None else decoder._forward_pre_hooks.values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, HostCheckpoints)), None)
