"""What a CUDA graph of a training step consists of: the recorded forward and backward, and the seeds they read.

:mod:`peft_nvfp4.training.cuda_graphs` decides what is recorded and when; nothing here knows about models of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import seeds
from ..autograd.frozen_linear import no_autocast

WARMUPS = 2


class Unsupported(Exception):
    """This call cannot be replayed; the message is the reason."""


class CudaRecording:
    """Forward and backward of ``run(**inputs)``, which returns one tensor, in two CUDA graphs. ``parameters``, aliases of the
    model's (:func:`substituted`), are differentiated. Recordings of one model share the memory ``pool``: no two are ever between
    forward and backward at the same time."""

    def __init__(self, run: Callable[..., Tensor], inputs: dict[str, Tensor], parameters: list[Tensor], pool: Any):
        self.inputs = {name: t.clone() for name, t in inputs.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUPS):  # compiles kernels and makes workspaces, which a capture may not
                y = run(**self.inputs)
                with no_autocast(y):
                    torch.autograd.grad(y, parameters, torch.ones_like(y), allow_unused=True)
                del y
        torch.cuda.current_stream().wait_stream(side)
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # thread_local: the pinning thread of a data loader may go on meanwhile
        with torch.cuda.graph(self.forward_graph, pool=pool, capture_error_mode="thread_local"):
            y = run(**self.inputs)
        self.dy = torch.empty_like(y)
        # backward runs outside of the forward's autocast, as it does in eager code
        with no_autocast(y), torch.cuda.graph(self.backward_graph, pool=pool, capture_error_mode="thread_local"):
            grads = torch.autograd.grad(y, parameters, self.dy, allow_unused=True)
        self.y, self.grads = y.detach(), grads

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        torch._foreach_copy_(list(self.inputs.values()), [inputs[name] for name in self.inputs])
        self.forward_graph.replay()
        return self.y.clone()

    def backward(self, dy: Tensor) -> list[Tensor | None]:
        """Gradients of the parameters, in memory of their own: ``.grad`` outlives the next replay."""
        self.dy.copy_(dy)
        self.backward_graph.replay()
        recorded = [g for g in self.grads if g is not None]
        copies = iter(torch._foreach_mul(recorded, 1.0) if recorded else ())
        return [None if g is None else next(copies) for g in self.grads]


class Ticket:
    """Belongs to a forward whose backward has not run yet: alive as long as its autograd graph is."""

    open = True


class Replay(torch.autograd.Function):
    """Replays a recording's forward, and in backward its backward, once."""

    @staticmethod
    def forward(ctx, recording, inputs: dict[str, Tensor], ticket: Ticket, *parameters):
        ctx.recording, ctx.ticket = recording, ticket
        return recording.forward(inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        if not ctx.ticket.open:
            raise RuntimeError(
                "a CUDA graph cannot run backward twice for one forward (retain_graph): disable_cuda_graphs(model) first"
            )
        ctx.ticket.open = False
        return None, None, None, *ctx.recording.backward(dy)


@contextmanager
def substituted(module: nn.Module, parameters: list[nn.Parameter], aliases: list[nn.Parameter]) -> Iterator[None]:
    """Within the context the module computes with other parameters (over the same memory). Autograd accumulates into a parameter
    on the stream where the parameter was first used; if an earlier loss is still referenced, so is that node, and a capture on
    another stream would have to wait for a stream that it does not record."""
    instead = dict(zip(map(id, parameters), aliases))
    places = [(m, name, p) for m in module.modules() for name, p in m._parameters.items() if id(p) in instead]
    for owner, name, p in places:
        owner._parameters[name] = instead[id(p)]
    try:
        yield
    finally:
        for owner, name, p in places:
            owner._parameters[name] = p


class SeedTape:
    """Seeds of one recording, in one device tensor that is refilled before each replay. While recording, a seed is drawn from the
    CPU generator as always, but what the kernels get is the place on the tape that is reserved for it. Activation checkpointing
    draws the same number a second time, and gets the same place."""

    LENGTH = 4096

    def __init__(self, device: torch.device):
        self.buffer = torch.zeros(self.LENGTH, dtype=torch.int64, device=device)
        self.places: dict[int, int] = {}

    def draw(self) -> Tensor:
        number = int(torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device="cpu"))
        place = self.places.setdefault(number, len(self.places))
        if place >= self.LENGTH:
            raise Unsupported(f"more than {self.LENGTH} random seeds in a step")
        return self.buffer[place]

    def refill(self) -> None:
        """Draw what eager code would draw."""
        if self.places:
            numbers = torch.randint(-(2**62), 2**62, (len(self.places),), dtype=torch.int64, device="cpu")
            self.buffer[: len(self.places)].copy_(numbers, non_blocking=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        seeds.TAPES.append(self)
        try:
            yield
        finally:
            seeds.TAPES.pop()
