"""Row-wise computations a tile of rows at a time, for sequences so long that one layer's inner activations do not fit.

    y = f(x), row by row;   for every tile t:   y[t] = f(x[t])
    dx[t] = df(x[t])^T dy[t],   dp = sum over t of dp[t], for every trained parameter p of f

What is kept for backward is what f reads of x, and nothing of what f computes: backward computes a tile again, with its graph,
takes its gradients and goes on to the next. So nothing of size rows x (inner width of f) ever exists.

Numbers: a row of y and of dx is computed from the same numbers as without tiles; a matrix product of fewer rows may sum in
another order. dp is summed over the tiles in FP32 (or dp's dtype, if that is wider), from the first tile to the last. For FP32
parameters the two orders of a sum of M products differ by 2 M u sum |products| at most, u = 2^-24; for BF16 ones each tile's dp
is rounded before it is added, which adds 2^-9 sum over t of |dp[t]|. Seeds of dropout are drawn for every tile: another mask
than without tiles, from the same distribution.

Inside a checkpoint of PyTorch's (not reentrant) f does not run when the layer is computed again: what f reads is saved *before*
f runs, and saving the last tensor that backward asks for ends the recomputation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Thread(threading.local):
    wants_tiles = False


THREAD = _Thread()


def wanted() -> bool:
    """Whether layers that run in this thread now are to compute in tiles."""
    return not torch.compiler.is_compiling() and THREAD.wants_tiles


@contextmanager
def tiling() -> Iterator[None]:
    """Within the context, modules that can compute in tiles do."""
    before, THREAD.wants_tiles = THREAD.wants_tiles, True
    try:
        yield
    finally:
        THREAD.wants_tiles = before


def tiles(rows: int, most: int) -> list[slice]:
    """Slices of nearly equal length, ``most`` rows at most."""
    pieces = -(-rows // most)
    return [slice(rows * i // pieces, rows * (i + 1) // pieces) for i in range(pieces)]


def in_tiles(
    function: Callable[..., Tensor],
    x: Tensor,
    most: int,
    parameters: Sequence[Tensor],
    kept: Sequence[Tensor] = (),
    input_of: Callable[..., Tensor] | None = None,
) -> Tensor:
    """y (M, N) = f(x) of x (M, K), ``most`` rows at a time.

    Args:
        function: (rows of x, the same rows of every tensor in ``kept``) -> rows of y.
        parameters: the trained ones that it computes with.
        kept: tensors of M rows that backward finds x in; without any, x is kept.
        input_of: the same rows of all of ``kept`` -> those of x.
    """
    computation = _Computation(function, input_of, tiles(len(x), most), tuple(parameters), x.device.type)
    if torch.is_grad_enabled() and (x.requires_grad or parameters):
        computation.saved = _Kept.apply(torch.empty(0, device=x.device, requires_grad=True), *(kept or (x.detach(),)))
    return _InTiles.apply(x, computation, tuple(kept), *parameters)


class _Computation:
    """A function of rows, its tiles, and the state in which it was called."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        input_of: Callable[..., Tensor] | None,
        slices: list[slice],
        parameters: tuple[Tensor, ...],
        kind: str,
    ):
        self.function, self.input_of, self.slices, self.parameters = function, input_of, slices, parameters
        self.saved: Tensor | None = None  # an output of _Kept
        self.autocast = dict(
            device_type=kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        self.generator = torch.get_rng_state()  # the CPU's, of which seeds are drawn

    def again(self, saved: Sequence[Tensor], rows: slice, needs_x: bool) -> tuple[Tensor, Tensor]:
        """(x, y) of a tile, with the graph between them."""
        kept = [t[rows] for t in saved]
        x = (kept.pop() if self.input_of is None else self.input_of(*kept)).detach().requires_grad_(needs_x)
        with torch.enable_grad(), torch.autocast(**self.autocast):
            return x, self.function(x.view_as(x), *kept)  # no leaf: linears that read one are not computed together


class _Kept(torch.autograd.Function):
    """Saves tensors as any node does (hooks apply). They are read from the node of its empty output."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise AssertionError("nothing is computed from this output")


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, computation: _Computation, kept: tuple[Tensor, ...], *parameters: Tensor):
        ctx.computation, y = computation, None
        for rows in computation.slices:
            part = computation.function(x[rows], *(t[rows] for t in kept))
            if y is None:
                y = part.new_empty(len(x), part.shape[1])
            y[rows] = part
            del part  # before the next tile needs its room
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        computation: _Computation = ctx.computation
        if computation.saved is None:
            raise RuntimeError("a second backward pass: say retain_graph=True in the first one")
        saved, needs_x, dx = computation.saved.grad_fn.saved_tensors, ctx.needs_input_grad[0], None
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            computation.saved = None  # autograd lets go of what a node has saved when it runs the node; this one never runs
        trained = [p for p, needed in zip(computation.parameters, ctx.needs_input_grad[3:]) if needed]
        sums: list[Tensor | None] = [None] * len(trained)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(computation.generator)
            for rows in computation.slices:
                x, y = computation.again(saved, rows, needs_x)
                gradients = list(torch.autograd.grad(y, [x] * needs_x + trained, dy[rows], allow_unused=True))
                del y
                if needs_x:
                    part = gradients.pop(0)
                    dx = part.new_empty(len(dy), part.shape[1]) if dx is None else dx
                    dx[rows] = part
                    del part
                sums = [_added(total, g) for total, g in zip(sums, gradients)]
        totals = iter(zip(trained, sums))
        found = [next(totals) if needed else None for needed in ctx.needs_input_grad[3:]]
        return dx, None, None, *(None if f is None or f[1] is None else f[1].to(f[0].dtype) for f in found)


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide if total is None else total.add_(wide)
