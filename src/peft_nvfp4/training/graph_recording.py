"""What a CUDA graph of a training step consists of: the recorded forward and backward, and the seeds they read.

:mod:`peft_nvfp4.training.cuda_graphs` decides what is recorded and when; nothing here knows about models of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..autograd import seeds
from ..autograd.frozen_linear import no_autocast

WARMUPS = 2


class Unsupported(Exception):
    """This call cannot be replayed; the message is the reason."""


class SharedMemory:
    """What the recordings of one model have in common. They may share it because no two are ever between forward and backward at
    the same time.

    Attributes:
        pool: of the allocator, for everything that lives between the beginning of a forward and the end of its backward.
        gradients: of the parameters, written by every recording; None for those that get none.
    """

    def __init__(self, pool: Any = None):
        self.pool, self.gradients = pool, None
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Memory in the shape of ``like``, the same for all recordings, as long as it is large enough."""
        flat = self._buffers.get(name)
        if flat is None or flat.numel() < like.numel() or flat.dtype != like.dtype:
            flat = self._buffers[name] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        return flat[: like.numel()].view(like.shape)


class CudaRecording:
    """Forward and backward of ``run(**inputs)``, which returns one tensor, in two CUDA graphs.

    Args:
        parameters: what is differentiated: aliases of the model's parameters (:func:`substituted`).
    """

    def __init__(self, run: Callable[..., Tensor], inputs: dict[str, Tensor], parameters: list[Tensor], shared: SharedMemory):
        self.inputs = {name: t.clone() for name, t in inputs.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # compiles kernels and makes workspaces, which a capture may not; once more where nothing of the model ran before
            for _ in range(1 if shared.gradients else WARMUPS):
                y = run(**self.inputs)
                self.y, self.dy = (shared.buffer(name, y) for name in ("y", "dy"))
                with no_autocast(y):
                    gradients = torch.autograd.grad(y, parameters, torch.ones_like(y), allow_unused=True)
                if shared.gradients is None:
                    shared.gradients = [None if g is None else torch.empty_like(g) for g in gradients]
                del y, gradients
        self.gradients = shared.gradients
        torch.cuda.current_stream().wait_stream(side)
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # thread_local: the pinning thread of a data loader may go on meanwhile
        with torch.cuda.graph(self.forward_graph, pool=shared.pool, capture_error_mode="thread_local"):
            y = run(**self.inputs)
            self.y.copy_(y.detach())
        # backward runs outside of the forward's autocast, as it does in eager code
        with no_autocast(y), torch.cuda.graph(self.backward_graph, pool=shared.pool, capture_error_mode="thread_local"):
            gradients = torch.autograd.grad(y, parameters, self.dy, allow_unused=True)
            present = [(mine, g) for mine, g in zip(self.gradients, gradients, strict=True) if g is not None]
            torch._foreach_copy_(*map(list, zip(*present)))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        torch._foreach_copy_(list(self.inputs.values()), [inputs[name] for name in self.inputs])
        self.forward_graph.replay()
        return self.y.clone()

    def backward(self, dy: Tensor) -> list[Tensor | None]:
        """Gradients of the parameters, in memory of their own: ``.grad`` outlives the next replay."""
        self.dy.copy_(dy)
        self.backward_graph.replay()
        copies = iter(torch._foreach_mul([g for g in self.gradients if g is not None], 1.0))
        return [None if g is None else next(copies) for g in self.gradients]


class ForwardRecording:
    """``run(**inputs)``, which returns one tensor, in a CUDA graph without backward. A call like it ran before.

    Args:
        pool: of the allocator, for what lives while it is replayed.

    Attributes:
        unrecorded: what ``run`` returned before it was recorded.
    """

    def __init__(self, run: Callable[..., Tensor], inputs: dict[str, Tensor], pool: Any):
        self.inputs = {name: t.clone() for name, t in inputs.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.unrecorded = run(**self.inputs)  # makes workspaces, which a capture may not
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.y = run(**self.inputs)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        torch._foreach_copy_(list(self.inputs.values()), [inputs[name] for name in self.inputs])
        self.graph.replay()
        return self.y.clone()


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


@contextmanager
def recordable_checkpoints(model: nn.Module) -> Iterator[None]:
    """Within the context layers with gradient checkpointing, of either kind, are computed again in a way that can be recorded.
    PyTorch's own puts the GPU's random numbers back for that, which a capture forbids. Seeds come from the CPU's.

    Raises:
        Unsupported: dropout of PyTorch's own in such a layer, which draws on the GPU.
    """
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) and m.training]
    for layer in layers:
        inner = [m for name, m in layer.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and "lora_" not in name]
        if any(m.p > 0 for m in inner) or any(getattr(m, "attention_dropout", 0.0) for m in layer.modules()):
            raise Unsupported("dropout in the model's own layers does not go with gradient checkpointing under a recording")
    before = [(m, vars(m).get("_gradient_checkpointing_func")) for m in layers]
    try:
        for layer in layers:
            layer._gradient_checkpointing_func = _checkpoint
        yield
    finally:
        for layer, function in before:
            del layer._gradient_checkpointing_func
            if function is not None:
                layer._gradient_checkpointing_func = function


def _checkpoint(function: Callable, *args: Any) -> Any:
    state, calls = torch.get_rng_state(), []

    def run(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            return function(*args)
        with torch.random.fork_rng(devices=[]):  # the CPU's
            torch.set_rng_state(state)
            return function(*args)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def capturing(device: torch.device, tape: SeedTape) -> Iterator[None]:
    """Within the context a recording is made: what that runs beforehand, and the capture, leave no trace.

    Raises:
        Unsupported: whatever a model does that a capture forbids: said, and the call goes on without.
    """
    cached = torch.is_autocast_cache_enabled()
    generators = [device] if device.type == "cuda" else []
    torch.set_autocast_cache_enabled(False)  # its copies of weights would be made in, and die with, the recording
    try:
        # a capture that fails may leave its own stream the current one: stream() puts back what was
        here = torch.cuda.stream(torch.cuda.current_stream() if device.type == "cuda" else None)
        with here, torch.random.fork_rng(generators), tape.recording():
            yield
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"recording failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    finally:
        torch.set_autocast_cache_enabled(cached)


def check_devices(tensors: Iterable[Tensor]) -> None:
    """Raises Unsupported unless all of them are on the current device: a capture records the streams of that one alone."""
    current = torch.device("cuda", torch.cuda.current_device())
    if {t.device for t in tensors} != {current}:
        raise Unsupported(f"not all of the decoder and its inputs are on the current device, {current}")


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
