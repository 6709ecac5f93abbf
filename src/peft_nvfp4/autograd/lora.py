"""LoRA branches: the arithmetic of ``s * dropout(x) @ A.T @ B.T`` forward and backward, for any number of branches at once.

The branches of all linears that read one input (q, k and v; gate and up) are computed together: their A are stacked into one
matrix, so that x is read once for all of them, forward and in both backward products. A branch with dropout has a mask of its own
and is computed by itself. The products with B, and g with A, are part of the frozen products (:mod:`peft_nvfp4.ops.linear`).

Adapters are FP32 masters as a rule, x is BF16: A and s * B are rounded to x's dtype once, in the forward, and these copies are
what backward uses (2 bytes a parameter until then). dA and dB leave in the masters' dtype, straight from the FP32 accumulators.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics.formats import QuantizedMatrix
from ..numerics.matmul import mm
from ..ops import fused


class Branch(NamedTuple):
    """One plain LoRA branch as the Functions see it."""

    a: Tensor  # (r, K)
    b: Tensor  # (N, r)
    scaling: float
    dropout: float  # probability; 0 outside training


_TAPES: list = []
"""The innermost is that of the CUDA graph being recorded (peft_nvfp4.training.graph_recording.SeedTape). Not per thread: backward, and
with it what activation checkpointing computes again, runs in a thread of autograd's."""


def draw_seed() -> Tensor:
    """A seed from PyTorch's CPU generator: follows ``torch.manual_seed``, is restored by activation checkpointing, and needs
    no synchronisation with a GPU."""
    if not torch.compiler.is_compiling() and _TAPES:
        return _TAPES[-1].draw()
    return torch.randint(-(2**62), 2**62, (), dtype=torch.int64)


def no_autocast(x: Tensor):
    """Context in which autocast is off, so that FP32 arithmetic stays FP32. Free when autocast is not on."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()






# ---------------------------------------------------------------------------------------------- any number of branches


class Adapter(NamedTuple):
    """A branch ready for the products, in the activations' dtype."""

    a: Tensor | None  # (r, K); None where it is part of a stack
    sb: Tensor  # (N, r), scaling * B
    seed: Tensor | None  # of its dropout mask
    rank: int
    scaling: float
    dropout: float


class Adapters(NamedTuple):
    """All branches of one input. Those without dropout see the same x: their A are the rows of ``stack``, in order."""

    stack: Tensor | None  # (sum of r, K)
    items: tuple[Adapter, ...]

    def tensors(self) -> list[Tensor | None]:
        """What to save for backward; inverse: :func:`restore`."""
        return [self.stack, *(t for item in self.items for t in (item.a, item.sb, item.seed))]

    def stacked(self) -> list[int]:
        return [i for i, item in enumerate(self.items) if item.a is None]


Source = tuple[Tensor, Tensor, Tensor | None, float, float]
"""A, B, seed or None, scaling, dropout."""


def prepare(branches: Sequence[Source], dtype: torch.dtype) -> Adapters:
    """A and s * B of every branch, rounded once to ``dtype``."""
    together = [a for a, _, _, _, p in branches if p == 0.0]
    stack = None
    if together:
        stack = (together[0] if len(together) == 1 else torch.cat(together)).to(dtype)
    items = []
    for a, b, seed, scaling, p in branches:
        own = None if p == 0.0 else a.to(dtype)
        items.append(Adapter(own, (b if scaling == 1.0 else b * scaling).to(dtype), seed, a.shape[0], scaling, p))
    return Adapters(stack, tuple(items))


def restore(saved: Sequence[Tensor | None], constants: Sequence[tuple[int, float, float]]) -> Adapters:
    """Inverse of :meth:`Adapters.tensors`; ``constants``: rank, scaling, dropout of every branch."""
    items = [Adapter(*saved[1 + 3 * i : 4 + 3 * i], *c) for i, c in enumerate(constants)]
    return Adapters(saved[0], tuple(items))


def down(x: Tensor | None, adapters: Adapters, stacked: bool = True) -> list[Tensor | None]:
    """h (M, r) = dropout(x) @ A.T of every branch; None of those without dropout if ``stacked`` is False."""
    hidden: list[Tensor | None] = [None] * len(adapters.items)
    together = adapters.stacked()
    if together and stacked:
        parts = mm(x, adapters.stack.T).split([adapters.items[i].rank for i in together], dim=1)
        for i, part in zip(together, parts):
            hidden[i] = part
    for i, item in enumerate(adapters.items):
        if item.a is not None:
            hidden[i] = mm(fused.dropout(x, item.dropout, item.seed), item.a.T)
    return hidden


class Needs(NamedTuple):
    """Which gradients are wanted: of x, and of every A and B with their dtypes (None: not)."""

    x: bool
    a: Sequence[torch.dtype | None]
    b: Sequence[torch.dtype | None]


class Upstream(NamedTuple):
    """g = dy @ (s * B): the gradients of h."""

    stacked: Tensor | None  # (M, sum of r) of the branches without dropout, the columns in the order of the stack's rows
    dropped: dict[int, Tensor]  # of the others, by their index


def backward(
    dys: Sequence[Tensor], x: Tensor | None, hidden: Sequence[Tensor], adapters: Adapters, needs: Needs
) -> tuple[list[Tensor | None], list[Tensor | None], Upstream]:
    """(dA of every branch, dB of every branch, what dx is made of).

    Args:
        dys: the gradient (M, N) of the output that each branch belongs to.
        x: (M, K) what the branches saw; needed where an A is.
        hidden: of :func:`down`.
    """
    items, stacked = adapters.items, adapters.stacked()
    das: list[Tensor | None] = [None] * len(items)
    dbs: list[Tensor | None] = [None] * len(items)
    for i, (item, dy, h) in enumerate(zip(items, dys, hidden)):
        if needs.b[i]:
            db = mm(dy.T, h.to(dy.dtype), needs.b[i])
            dbs[i] = db if item.scaling == 1.0 else db * item.scaling
    through = needs.x or any(needs.a[i] for i in stacked)
    parts = [mm(dys[i], items[i].sb) for i in stacked] if through else []
    g = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] if parts else None
    dtype = next((needs.a[i] for i in stacked if needs.a[i]), None)
    if dtype is not None:
        for i, da in zip(stacked, mm(g.T, x, dtype).split([items[i].rank for i in stacked])):
            das[i] = da.to(needs.a[i]) if needs.a[i] else None
    dropped = {}
    for i, item in enumerate(items):
        if item.a is not None and (needs.x or needs.a[i]):
            dropped[i] = mm(dys[i], item.sb)
            if needs.a[i]:
                das[i] = mm(dropped[i].T, fused.dropout(x, item.dropout, item.seed), needs.a[i])
    return das, dbs, Upstream(g, dropped)


def add_dropped(dx: Tensor | None, adapters: Adapters, dropped: dict[int, Tensor]) -> Tensor | None:
    """dx plus ``dropout(g @ A)`` of the branches with dropout, in place."""
    for i, g in dropped.items():
        item = adapters.items[i]
        extra = fused.dropout(mm(g, item.a), item.dropout, item.seed)
        dx = extra if dx is None else dx.add_(extra)
    return dx


# ---------------------------------------------------------------------------------------------- one branch, any backend


class LoraBranch(torch.autograd.Function):
    """One LoRA branch over an unquantised input, for backends that do not quantise activations: saves x (or, given its codes,
    those, and takes dA from D(x~)) and h, draws the dropout mask again in backward."""

    @staticmethod
    def forward(ctx, x, a, b, seed, scaling: float, p: float, *codes):
        adapters = prepare([(a, b, seed, scaling, p)], x.dtype)
        (h,) = down(x, adapters)
        ctx.save_for_backward(*(codes or (x,)), h, *adapters.tensors())
        ctx.constants, ctx.dtypes, ctx.k = [(a.shape[0], scaling, p)], (a.dtype, b.dtype), x.shape[1] if codes else None
        return mm(h, adapters.items[0].sb.T)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        saved = ctx.saved_tensors
        needs_x, *needs_ab = ctx.needs_input_grad[:3]
        if ctx.k is None:
            x, h, *saved = saved
        else:
            *codes, h = saved[:4]
            saved = saved[4:]
            x = fused.dequantize_terms([QuantizedMatrix(*codes, ctx.k)], None, h.dtype) if needs_ab[0] else None
        needs_a, needs_b = (dtype if need else None for dtype, need in zip(ctx.dtypes, needs_ab))
        with no_autocast(dy):
            adapters = restore(saved, ctx.constants)
            (da,), (db,), gs = backward([dy.to(h.dtype)], x, [h], adapters, Needs(needs_x, [needs_a], [needs_b]))
            dx = None
            if needs_x:
                dx = None if gs.stacked is None else mm(gs.stacked, adapters.stack)
                dx = add_dropped(dx, adapters, gs.dropped)
        return dx, da, db, *([None] * (len(ctx.needs_input_grad) - 3))


def lora_branch(x: Tensor, branch: Branch, kept: QuantizedMatrix | None = None) -> Tensor:
    """``s * dropout(x) @ A.T @ B.T`` for x (..., K), in x's dtype. ``kept``: Q(x), to be kept for backward instead of x."""
    seed = draw_seed() if branch.dropout else None
    codes = () if kept is None else kept[:3]
    with no_autocast(x):
        y = LoraBranch.apply(x.reshape(-1, x.shape[-1]), branch.a, branch.b, seed, branch.scaling, branch.dropout, *codes)
    return y.view(*x.shape[:-1], y.shape[-1])
