"""``memory="auto"``: how much a training step keeps, chosen where the steps are known and lowered when memory runs out.

The base begins with one layout of each weight, which is what evaluation and generation need. The first training step knows the
number of its tokens, whether layers are checkpointed and how the loss is computed. It keeps both layouts (``"fast"``) if the
estimator says that a step with a quarter more tokens fits into the memory that is free then; else, and where layers are
checkpointed, which costs more time than the second layout saves, the base stays at ``"small"``.

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
from transformers.utils import ModelOutput

from ..fusion.loss_attach import computes_supervised_loss
from ..fusion.mlp import FusedGatedMLP
from ..fusion.probe import hooked, innermost, watched
from ..memory import Settings, model_shape
from ..memory.device import free_bytes, gpu_settings, longer, step_bytes
from ..quantization.freeze import frozen_bytes
from ..quantization.layouts import keep_layouts
from .cuda_graphs import GraphedForward
from .graph_recording import Replay
from .host_checkpoints import pass_goes_to_host, restart_pass
from .offload.enable import enable_offload, offloaded
from .packing import packed_forward
from .repeating import RepeatableCall, RepeatedBackward

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
    """Have a base in NVFP4 train as with ``memory="fast"`` or ``"small"`` from now on."""
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
        level: ``"fast"``, ``"small"`` or ``"smallest"`` (with other backends than NVFP4: ``"fast"``, whatever is done below).
        lines: what was chosen and done, and why.
    """

    def __init__(self, decoder: nn.Module, settings: Settings, level: str):
        self._decoder = weakref.ref(decoder)  # no cycle
        self.settings, self.level = settings, level
        self.chosen = level != "small"  # else the first training step does
        self.can_shrink = level != "smallest"  # without giving up recordings
        self.lines: list[str] = []
        self.completed = 0  # tokens of the longest step whose backward ran without a recording

    @property
    def decoder(self) -> nn.Module:
        return self._decoder()

    def __reduce__(self):
        known = {name: value for name, value in vars(self).items() if name not in ("_decoder", "settings", "level")}
        return MemoryLevel, (self.decoder, self.settings, self.level), known | {"lines": list(self.lines)}

    def __str__(self) -> str:
        return "\n".join(self.lines or [f"memory='auto': {self.level!r}, until the first training step"])

    # -- a call of the decoder

    def __call__(self, forward: PackedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``forward.unguarded`` returns."""
        decoder = self.decoder
        if not torch.is_grad_enabled() and kwargs.get("use_cache") is False:  # else a cache may have grown, and not be repeated
            function = partial(forward.unguarded, *args, **kwargs)
            return RepeatableCall(function, function, _device(decoder), partial(self.drop_recordings, forward)).forward()
        if not (torch.is_grad_enabled() and decoder.training):
            return forward.unguarded(*args, **kwargs)
        first = next((t for t in (*kwargs.values(), *args) if isinstance(t, Tensor)), None)
        tokens = 0 if first is None else first.shape[0] * first.shape[1]
        if not self.chosen:
            self.choose(int(SPARE * tokens), forward)
        if isinstance(forward.inner, GraphedForward):
            forward.inner.needs_memory = self.can_shrink
        call = RepeatableCall(
            partial(forward.unguarded, *args, **kwargs),
            lambda: forward.unrecorded(*args, **kwargs),  # of what there is then; autograd's thread records nothing
            _device(decoder),
            partial(self.give_up, forward, tokens),
        )
        output = call.forward()
        if tokens > self.completed and not _recorded(output) and _can_be_cut(decoder, output, (*args, *kwargs.values())):
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
        """Keep both layouts, if a step of so many tokens fits then."""
        self.chosen = True
        fits, why = self._both_layouts_fit(tokens, forward)
        if fits:
            try:
                set_level(self.decoder, "fast")
                self.level, self.can_shrink = "fast", True
            except torch.OutOfMemoryError:
                set_level(self.decoder, "small")
                fits, why = False, "there was no memory for a second layout of each weight"
        self._say(logging.INFO if fits else logging.WARNING, f"{self.level!r}: {why}")

    def _both_layouts_fit(self, tokens: int, forward: PackedForward | None) -> tuple[bool, str]:
        """And why."""
        decoder = self.decoder
        if any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in decoder.parameters()):  # FSDP2, ZeRO-3
            return False, "the weights are sharded"
        if _checkpointed(decoder):
            return False, "its layers are checkpointed, so memory comes before time"
        rooms = [free_bytes(device) for device in {p.device for p in decoder.parameters()}]
        if None in rooms:
            return True, "it does not train on a GPU"
        have = sum(rooms)
        try:
            known = replace(
                self.settings,
                memory="fast",
                checkpointing=_checkpointed(decoder),
                host_checkpoints=pass_goes_to_host(),
                cuda_graphs=forward is not None and getattr(forward.inner, "can_record", False),
                loss="supervised" if computes_supervised_loss() else "full",
                accumulation=2,  # gradients may be there during forward
                **gpu_settings(),
            )
            needed, estimated = step_bytes(model_shape(decoder.config), longer(known, max(1, tokens))), "by estimate"
        except ValueError:  # a model that the estimator does not know
            needed, estimated = UNKNOWN * frozen_bytes(decoder), f"{UNKNOWN} times its weights, since the model is not known"
        return needed <= have, (
            f"with both layouts of its weights, a step of {tokens:,} tokens takes {needed / GIB:.2f} GiB more ({estimated}), and "
            f"{have / GIB:.2f} GiB are free"
        )

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
        if self.settings.backend == "nvfp4" and self.level == "fast":
            set_level(decoder, "small")
            self.level = "small"
            return "'small' from now on"
        if _enable_checkpointing(decoder):
            self.can_shrink = False
            return "decoder layers are checkpointed from now on"
        self.can_shrink = False
        if offloaded(decoder):
            return None
        try:
            enable_offload(decoder)
        except ValueError as reason:
            logger.info("memory='auto': weights cannot be offloaded: %s", reason)
            return None
        if graphed is not None:
            forward.inner = graphed.plain
        self.level = "smallest"
        return "the frozen weights of decoder layers are on the host from now on"

    def _say(self, importance: int, line: str) -> None:
        self.lines.append(f"memory='auto': {line}")
        logger.log(importance, self.lines[-1])


def _device(decoder: nn.Module) -> torch.device:
    """Where the decoder computes: that of something that is not offloaded."""
    return next((p for p in decoder.parameters() if p.is_floating_point() and not p.is_meta), torch.empty(0)).device


def _free_unused() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _checkpointed(decoder: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in decoder.modules())


def _enable_checkpointing(decoder: nn.Module) -> bool:
    """Returns whether it was off, and could be switched on."""
    if _checkpointed(decoder) or not getattr(decoder, "supports_gradient_checkpointing", False):
        return False
    # transformers 5.20 calls it by another name
    enable = getattr(decoder, "activation_checkpointing_enable", None) or decoder.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return True


def _recorded(output: Any) -> bool:
    """Whether a call of the decoder was replayed: its backward has its memory already."""
    return isinstance(getattr(getattr(output, "last_hidden_state", None), "grad_fn", None), Replay._backward_cls)


def _can_be_cut(decoder: nn.Module, output: Any, arguments: tuple) -> bool:
    """Whether nothing but the decoder's parameters gets a gradient through its last hidden state, and nobody but the call's
    caller looks at what it computes."""
    if not isinstance(output, ModelOutput) or [k for k, v in output.items() if v is not None] != ["last_hidden_state"]:
        return False
    if not output.last_hidden_state.requires_grad or pass_goes_to_host():  # which could not be repeated in backward
        return False
    for value in arguments:
        plain = not value.requires_grad if isinstance(value, Tensor) else isinstance(value, bool | int | float | str | None)
        if not plain:  # a gradient, or a cache that may have one
            return False
    if any(p._backward_hooks for p in decoder.parameters()):
        return False  # they would be called twice
    for module in decoder.modules():
        if module is not decoder and hooked(module) and watched(module):
            return False
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and getattr(function, "keywords", {}).get("use_reentrant", True):
            return False  # PyTorch's reentrant kind cannot be differentiated into gradients of one's own
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
