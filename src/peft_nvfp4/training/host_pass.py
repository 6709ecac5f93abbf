"""A forward pass of a decoder whose checkpoints go to the host, and what stands in the place of PyTorch's ``checkpoint`` in it.

:mod:`peft_nvfp4.training.host_checkpoints` describes the whole and decides which passes are such.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..autograd.tiles import tiling
from .checkpoint_transfers import Buffers, Checkpoint
from .resting_weights import is_short


class Pass:
    """A forward pass of a decoder whose checkpoints go to the host.

    Args:
        bytes_: of one checkpoint.
        norms: what computes in tiles.
        own_embeddings: the first layer's input is the decoder's own, and nobody watches it.
        rest: called before the first layer, and before each one that backward computes again.
        come_back: undoes it.
    """

    def __init__(
        self,
        buffers: Buffers,
        bytes_: int,
        norms: list[nn.Module],
        own_embeddings: bool,
        rest: Callable[[], None],
        come_back: Callable[[], None],
    ):
        self.buffers, self.bytes, self.norms, self.own_embeddings = buffers, bytes_, norms, own_embeddings
        self.rest, self.come_back = rest, come_back
        self.last: Checkpoint | None = None
        self.leaving: Tensor | None = None  # the last one's values, until their copy has ended

    def keep(self, hidden: Tensor) -> tuple[Checkpoint, Tensor]:
        """(what is fetched in backward, what the layer is called with now)."""
        self.settle()
        if self.last is None:
            self.rest()
        if self.last is None and self.own_embeddings and hidden.is_leaf:
            # marked for the reentrant kind, which notices nothing else: autograd would hold them, and compute their gradient
            hidden = hidden.detach()
        self.last, self.leaving = Checkpoint(self.buffers, hidden, self.last), hidden.detach()
        return self.last, hidden

    def settle(self) -> None:
        if self.leaving is not None:
            self.last.wait()
            self.leaving = None


RUNNING: ContextVar[Pass | None] = ContextVar("host_checkpoints_pass", default=None)


def pass_goes_to_host() -> bool:
    """Whether a forward pass whose checkpoints go to the host runs in this context."""
    return RUNNING.get() is not None


def restart_pass() -> None:
    """The forward pass that runs in this context begins once more, after an error that somebody has caught."""
    if (running := RUNNING.get()) is not None:
        running.settle()
        running.last = None
        running.come_back()


def pass_is_short_of_memory() -> bool:
    """Whether the pass that runs may want more memory of the GPU than there is."""
    running = RUNNING.get()
    return running is not None and is_short(running.bytes, running.buffers.device)


class CheckpointFunction:
    """In the place of a layer's ``_gradient_checkpointing_func``.

    Args:
        plain: what transformers has put there: PyTorch's ``checkpoint`` with the user's settings.
    """

    def __init__(self, plain: partial):
        self.plain = plain

    @property
    def keywords(self) -> dict[str, Any]:
        """The user's settings, where others look for them."""
        return self.plain.keywords

    def __call__(self, function: Callable, *args: Any) -> Any:
        running = RUNNING.get()
        if running is None or not args or not isinstance(args[0], Tensor):
            return self.plain(function, *args)
        hidden, *others = args
        kept, *first = running.keep(hidden)
        rest = running.rest
        del hidden, args, running

        def run(anchor: Tensor, *others: Any) -> Any:
            with tiling():
                if first:
                    return function(first.pop(), *others)  # no name here: it would be held
                rest()
                return function(kept.fetch(), *others)

        # of nothing, but on the layer's device: there are the random numbers that are to be drawn again
        anchor = torch.empty(0, device=kept.device)
        return checkpoint(run, anchor, *others, **self.plain.keywords | {"use_reentrant": False})


def replaceable(function: Any) -> bool:
    return isinstance(function, partial) and function.func is checkpoint and not function.args
