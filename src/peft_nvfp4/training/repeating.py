"""A call, and the backward of what it returned, that are computed again after the GPU's memory was not enough.

Autograd writes gradients into ``.grad`` while backward runs, so a backward that fails half way cannot simply be run again. Here
the graph is cut at the last hidden state: outside there is one node, :class:`RepeatedBackward`, between it and the parameters. In
backward that node differentiates the graph inside into gradients of its own, which go to the parameters when all of them are
there. If memory runs out, they are dropped, with the graph; the call is made again, with the same random numbers, and
differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..fusion.probe import hooked, watched
from .graph_recording import Replay
from .host_pass import pass_goes_to_host

GiveUp = Callable[[], bool]
"""Gives up something that takes memory; returns whether there was anything."""


class RepeatableCall:
    """A call of a decoder.

    Args:
        function: the call. Made again, it must compute the same from the same random numbers.
        within_backward: the same in another way, by which it is made again in backward.
        device: where it computes.
        give_up: called after each error of memory, when what the failed call held has been freed. The last error is raised where
            nothing is left to give up.
    """

    def __init__(
        self, function: Callable[[], Any], within_backward: Callable[[], Any], device: torch.device, give_up: GiveUp
    ):
        self.function, self.within_backward, self.device, self.give_up = function, within_backward, device, give_up
        self.state = self._random_state()
        self.autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def _random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else [])]

    def _set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state[1], self.device)

    def forward(self) -> Any:
        """The function's result."""
        return self._repeated(self.function)

    def _repeated(self, function: Callable[[], Any]) -> Any:
        while True:
            try:
                return function()
            except torch.OutOfMemoryError as error:
                failure = _without_frames(error)
            if not self.give_up():
                raise failure
            self._set_random_state(self.state)

    def again(self) -> Any:
        """The result once more, in backward; the random numbers that others draw stay what they would have been."""
        after, (enabled, dtype) = self._random_state(), self.autocast
        self._set_random_state(self.state)
        try:
            with torch.enable_grad(), torch.autocast(self.device.type, dtype, enabled):
                return self._repeated(self.within_backward)
        finally:
            self._set_random_state(after)

    def gradients(
        self, graph: list[Tensor], parameters: Sequence[Tensor], dy: Tensor, keep_graph: bool
    ) -> Sequence[Tensor | None]:
        """Of the parameters, from ``dy``, the gradient of the last hidden state. ``graph`` holds that, and nobody else may; where
        the call is made again, that of its new result."""
        while True:
            try:
                return torch.autograd.grad(graph[0], parameters, dy, allow_unused=True, retain_graph=keep_graph)
            except torch.OutOfMemoryError as error:
                failure = _without_frames(error)
            graph.clear()
            if not self.give_up():
                raise failure
            graph.append(self.again().last_hidden_state)


def _without_frames(error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
    """The frames of an error, and of the one it interrupted, hold the tensors of the failed call. They go before it is repeated.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


class RepeatedBackward(torch.autograd.Function):
    """The node between a call's last hidden state, alone in the list ``graph``, and the parameters. ``finished`` is called at the
    end of backward."""

    @staticmethod
    def forward(ctx, call: RepeatableCall, graph: list[Tensor], finished: Callable[[], None], *parameters: Tensor) -> Tensor:
        ctx.call, ctx.graph, ctx.finished, ctx.parameters = call, graph, finished, parameters
        return graph[0].detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        if not ctx.graph:
            raise RuntimeError("backward runs a second time for one forward: say retain_graph=True in the first one")
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = ctx.call.gradients(ctx.graph, ctx.parameters, dy, keep)
        if not keep:
            ctx.graph.clear()
        ctx.finished()
        return None, None, None, *gradients


def recorded(output: Any) -> bool:
    """Whether a call of the decoder was replayed: its backward has its memory already."""
    return isinstance(getattr(getattr(output, "last_hidden_state", None), "grad_fn", None), Replay._backward_cls)


def can_be_cut(decoder: nn.Module, output: Any, arguments: tuple) -> bool:
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
