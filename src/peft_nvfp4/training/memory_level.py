"""``memory="auto"``: how much a training step keeps, chosen where the steps are known and lowered when memory runs out.

The base begins with one layout of each weight, which is what evaluation and generation need. The first training step knows the
number of its tokens, whether layers are checkpointed and how the loss is computed. It keeps both layouts (``"fast"``) in as many
decoder layers as, by the estimator, a step with a quarter more tokens leaves room for in the memory that is free then. The others
stay at ``"small"``; all do where layers are checkpointed, which costs more time than the second layout saves.

A step that runs out of memory is repeated with less, in this order:

    recordings        of other input shapes are dropped; they are made anew when they are met again
    ``"small"``       one layout of each weight, the MLPs' inner activation is recomputed
    checkpointing     of decoder layers
    offload           the frozen weights of decoder layers go to the host

Each is said in one line, as a warning of this module's logger and in ``model.base_model.nvfp4_steps``. Nothing is raised again
later: a batch that is as long may come again.

Whatever fails is repeated as a whole. Forward: the decoder's call, which includes the recording of a step, and so its first
backward. Backward of a recorded step takes no memory but for gradients. Backward of a step that is not recorded, of more tokens
than any before: the decoder's graph is cut off (:mod:`.repeating`). Evaluation drops recordings, and nothing else. What is
outside of the decoder (the loss, the optimizer) is not repeated. The forward pass is the same bit for bit at every level; a
level's gradients are those of a run that begins at it.
"""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..fusion.loss_attach import computes_supervised_loss
from ..fusion.mlp import FusedGatedMLP
from ..fusion.probe import innermost
from ..memory import Settings, model_shape
from ..memory.device import free_bytes, gpu_settings, step_bytes
from ..quantization.freeze import frozen_bytes
from ..quantization.layouts import keep_layouts
from .cuda_graphs import GraphedForward
from .host_pass import restart_pass
from .offload.enable import enable_offload, find_layers, offloaded
from .offload.host_memory import HostMemoryShort
from .packing import packed_forward
from .repeating import RepeatableCall, RepeatedBackward, can_be_cut, recorded

if TYPE_CHECKING:
    from .packing import PackedForward

logger = logging.getLogger(__name__)

SPARE = 1.25
"""A step of so many times the first one's tokens must fit before both layouts are kept."""
SUPPOSED_TOKENS = 4096
"""Of a step, where it has to be chosen without one."""
UNKNOWN = 4
"""Times its weights that are free where a model that the estimator does not know keeps both layouts."""
LOADED_SHARE, TRAINED = 0.85, 4
"""Of the free memory, taken by a model before its first step, the rest is for that; of a trained parameter with its gradient and
Adam's two moments, in times its own size."""
GIB = 1 << 30


def set_level(model: nn.Module, level: str) -> None:
    """Have a base in NVFP4, or a part of it, train as with ``memory="fast"`` or ``"small"`` from now on."""
    keep_layouts(model, "cached" if level == "fast" else "transient")
    for module in model.modules():
        if isinstance(module, FusedGatedMLP):
            module.recompute = level != "fast"


class MemoryLevel:
    """Of a decoder under ``memory="auto"``: the ``guard`` of its :class:`~.packing.PackedForward`.

    Args:
        settings: of the estimator, as far as they are known before the first step.
        level: what the base begins with.

    Attributes:
        model: the model around the decoder, called; None if it is not known.
        level: ``"fast"``, ``"small"`` or ``"smallest"`` (with other backends than NVFP4: ``"fast"``, whatever is done below).
        lines: what was chosen and done, and why.
    """

    def __init__(self, decoder: nn.Module, settings: Settings, level: str):
        self._decoder, self.model = weakref.ref(decoder), lambda: None  # no cycles
        self.settings, self.level = settings, level
        self.chosen = level != "small"  # else the first training step does
        self.partly = False  # some layers are "fast"
        self.can_shrink = level != "smallest"  # without giving up recordings
        self.lines: list[str] = []
        self.completed = 0  # tokens of the longest step whose backward ran without a recording

    @property
    def decoder(self) -> nn.Module:
        return self._decoder()

    def __reduce__(self):
        known = {name: value for name, value in vars(self).items() if name not in ("_decoder", "model", "settings", "level")}
        return MemoryLevel, (self.decoder, self.settings, self.level), known | {"lines": list(self.lines)}

    def __str__(self) -> str:
        return "\n".join(self.lines or [f"memory='auto': {self.level!r}, until the first training step"])

    # -- a call of the decoder

    def __call__(self, forward: PackedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``forward.unguarded`` returns."""
        decoder, inputs = self.decoder, _inputs(args, kwargs)
        training = torch.is_grad_enabled() and decoder.training
        evaluation = not torch.is_grad_enabled() and kwargs.get("use_cache") is False  # else a cache grows, and not twice
        if inputs is None or not (training or evaluation):
            return forward.unguarded(*args, **kwargs)
        if evaluation:
            function = partial(forward.unguarded, *args, **kwargs)
            return RepeatableCall(function, function, inputs.device, partial(self.drop_recordings, forward)).forward()
        tokens = inputs.shape[:2].numel()
        if not self.chosen:
            self.choose(int(SPARE * tokens), forward)
        if isinstance(forward.inner, GraphedForward):
            forward.inner.needs_memory = self.can_shrink
        call = RepeatableCall(
            partial(forward.unguarded, *args, **kwargs),
            lambda: forward.unrecorded(*args, **kwargs),  # of what there is then; autograd's thread records nothing
            inputs.device,
            partial(self.give_up, forward, tokens),
        )
        output = call.forward()
        if tokens > self.completed and not recorded(output) and can_be_cut(decoder, output, (*args, *kwargs.values())):
            parameters = [p for p in decoder.parameters() if p.requires_grad]
            graph, finished = [output.last_hidden_state], partial(self._completes, tokens)
            output.last_hidden_state = RepeatedBackward.apply(call, graph, finished, *parameters)
        return output

    def _completes(self, tokens: int) -> None:
        self.completed = max(tokens, self.completed)

    # -- more

    def close(self) -> None:
        """Steps will not be seen any more: choose now, if the first one is still to come."""
        if not self.chosen:
            self.choose(SUPPOSED_TOKENS)

    def choose(self, tokens: int, forward: PackedForward | None = None) -> None:
        """Be ``"fast"`` in as many decoder layers as a step of so many tokens leaves room for."""
        self.chosen = True
        share, why = self._fitting_share(tokens, forward)
        layers = find_layers(self.decoder)
        fast = [self.decoder] if share == 1.0 else layers[: int(share * len(layers))]
        try:
            for module in fast:
                set_level(module, "fast")
        except torch.OutOfMemoryError:
            set_level(self.decoder, "small")
            fast, why = [], "there was no memory for a second layout of each weight"
        self.level, self.partly = "fast" if share == 1.0 and fast else "small", bool(fast) and share < 1.0
        self.can_shrink = True
        words = f"'fast' in {len(fast)} of {len(layers)} decoder layers, else 'small'" if self.partly else repr(self.level)
        costs_time = self.level != "fast" and not checkpointed(self.decoder)
        self._say(logging.WARNING if costs_time else logging.INFO, f"{words}: {why}")

    def _fitting_share(self, tokens: int, forward: PackedForward | None) -> tuple[float, str]:
        """Of decoder layers that may be ``"fast"``, and why. Between none and all of them the peak of a step is no higher than on
        the straight line: that of several moments, each of which grows by as much with every layer."""
        decoder = self.decoder
        if any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in decoder.parameters()):  # FSDP2, ZeRO-3
            return 0.0, "the weights are sharded"
        if checkpointed(decoder):
            return 0.0, "its layers are checkpointed, so memory comes before time"
        rooms = [free_bytes(device) for device in {p.device for p in decoder.parameters()}]
        if None in rooms:
            return 1.0, "it does not train on a GPU"
        free = sum(rooms)
        try:
            shape, settings = model_shape(decoder.config), self._settings_of_a_step(tokens, forward)
            fast, small = (step_bytes(shape, replace(settings, memory=level)) for level in ("fast", "small"))
            source = "by estimate"
        except ValueError:  # a model that the estimator does not know
            fast = small = UNKNOWN * frozen_bytes(decoder)
            source = f"{UNKNOWN} times its weights, since the model is not known"
        share = 1.0 if fast <= free else max(0.0, (free - small) / (fast - small)) if fast > small else 0.0
        return share, (
            f"a step of {tokens:,} tokens with both layouts of all weights takes {fast / GIB:.2f} GiB more ({source}), and "
            f"{free / GIB:.2f} GiB are free"
        )

    def _settings_of_a_step(self, tokens: int, forward: PackedForward | None) -> Settings:
        return replace(
            self.settings,
            batch=1,
            sequence=max(1, tokens),
            cuda_graphs=forward is not None and getattr(forward.inner, "can_record", False),
            loss="full" if self._makes_all_logits(forward) else "supervised",
            accumulation=2,  # gradients may be there during forward
            **gpu_settings(),
        )

    def _makes_all_logits(self, forward: PackedForward | None) -> bool:
        """Whether the call that runs now does, for its loss or its caller. Not where the package computes the loss, nor where TRL
        does, whose forward of the model makes tiles of them."""
        model = self.model()
        of_trl = model is not None and "forward" in vars(model) and forward is not None and forward.labelled
        return not (computes_supervised_loss() or of_trl)

    # -- less

    def give_up(self, forward: PackedForward, tokens: int) -> bool:
        """Take less memory from now on, after a step of so many tokens has run out of it. Returns whether that was possible."""
        restart_pass()
        _free_unused()
        if (done := self._take_less(forward)) is None:
            return False
        _free_unused()
        self._say(logging.WARNING, f"a step of {tokens:,} tokens ran out of memory and is repeated: {done}")
        if isinstance(forward.inner, GraphedForward):
            forward.inner.needs_memory = self.can_shrink
        return True

    def drop_recordings(self, forward: PackedForward) -> bool:
        """As :meth:`give_up`, for a call of evaluation: what it takes does not depend on the level."""
        _free_unused()
        dropped = isinstance(forward.inner, GraphedForward) and forward.inner.forget()
        _free_unused()
        if dropped:
            self._say(logging.WARNING, "a call of evaluation ran out of memory and is repeated: all recordings were dropped")
        return dropped

    def _take_less(self, forward: PackedForward) -> str | None:
        decoder, graphed = self.decoder, forward.inner if isinstance(forward.inner, GraphedForward) else None
        if graphed is not None and graphed.forget():
            return "the recordings of earlier steps were dropped"
        if self.settings.backend == "nvfp4" and (self.level == "fast" or self.partly):
            set_level(decoder, "small")
            self.level, self.partly = "small", False
            return "'small' from now on"
        if _enable_checkpointing(decoder):
            self.can_shrink = False
            return "decoder layers are checkpointed from now on"
        self.can_shrink = False
        if offloaded(decoder):
            return None
        try:
            enable_offload(decoder)
        except (ValueError, HostMemoryShort) as reason:
            logger.info("memory='auto': weights cannot be offloaded: %s", reason)
            return None
        if graphed is not None:
            forward.inner = graphed.plain
        self.level = "smallest"
        return "the frozen weights of decoder layers are on the host from now on"

    def _say(self, importance: int, line: str) -> None:
        self.lines.append(f"memory='auto': {line}")
        logger.log(importance, self.lines[-1])


def _inputs(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The token ids or embeddings of a call, (B, T) or (B, T, d)."""
    inputs = kwargs.get("input_ids", args[0] if args else None)
    inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
    return inputs if isinstance(inputs, Tensor) else None


def _free_unused() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def checkpointed(decoder: nn.Module) -> bool:
    """Whether a module has checkpointed layers."""
    return any(getattr(module, "gradient_checkpointing", False) for module in decoder.modules())


def _enable_checkpointing(decoder: nn.Module) -> bool:
    """Returns whether it was off, and could be switched on."""
    if checkpointed(decoder) or not getattr(decoder, "supports_gradient_checkpointing", False):
        return False
    # transformers 5.20 calls it by another name
    enable = getattr(decoder, "activation_checkpointing_enable", None) or decoder.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return True


# ---------------------------------------------------------------------------------------------- public


def follow_memory(model: nn.Module, settings: Settings, level: str, line: str | None = None) -> None:
    """Have the base of a (PEFT) model, which begins at ``level``, keep what there is memory for. A model without a decoder to be
    watched keeps what fits a step of :data:`SUPPOSED_TOKENS` tokens."""
    packed = packed_forward(model)
    if packed is None:
        if level == "small":
            MemoryLevel(innermost(model), settings, level).choose(SUPPOSED_TOKENS)
        return
    packed.guard = MemoryLevel(packed.decoder, settings, level)
    packed.guard.model = weakref.ref(innermost(model))
    if line is not None:
        packed.guard._say(logging.WARNING, line)


def memory_level(model: nn.Module) -> MemoryLevel | None:
    """What :func:`follow_memory` watches a model with."""
    packed = packed_forward(model)
    return packed.guard if packed is not None and isinstance(packed.guard, MemoryLevel) else None


def forget_memory(model: nn.Module) -> None:
    """Inverse of :func:`follow_memory`; what is kept stays as it is."""
    if memory_level(model) is not None:
        packed_forward(model).guard = None


def too_large_for_the_gpu(model: nn.Module) -> str | None:
    """Why the frozen weights of a model that is on the CPU have to stay there; None if they need not."""
    parameters = list(model.parameters())
    if any(p.device.type != "cpu" for p in parameters):
        return None
    taken, have = sum(p.nbytes * (TRAINED if p.requires_grad else 1) for p in parameters), free_bytes(torch.device("cuda"))
    if taken <= LOADED_SHARE * have:
        return None
    return (
        f"'smallest': the model, its gradients and its optimizer take {taken / GIB:.2f} GiB, more than {LOADED_SHARE:.0%} of the "
        f"{have / GIB:.2f} GiB that are free on the GPU. The frozen weights of decoder layers stay on the host"
    )
