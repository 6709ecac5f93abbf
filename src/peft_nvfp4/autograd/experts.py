"""Differentiable products of a mixture's experts: all experts of a projection together, with LoRA branches, as one Function.

The notation is that of :mod:`.frozen_linear`; a subscript e is an expert's, r a row's (a token and one of its k experts). Rows
are sorted by expert (:class:`~peft_nvfp4.numerics.grouped.Routing`).

    y_r  = D(x~_r) @ D(W_e).T + bias_e + h_r @ (s B_e).T   h_r = D(x~_r) @ A_e.T
    dB_e = s * sum_r dy_r.T h_r,   dA_e = sum_r g_r.T D(x~_r)   g_r = dy_r @ (s B_e)
    dx_r = D(Q(dy_r)) @ D(W_b,e).T + g_r @ A_e

An input that tokens share is quantised once per token, before it is gathered: x~ is (T, K), its gradient the sum over a token's
rows, FP32 and rounded once. Several adapters are one of their total rank. (PEFT allows no dropout on these parameters.)

Kept for backward: the codes of x~ (T tokens, not T k rows), h, where rows come from and where experts end; the rows that
:class:`WeightedSum` adds up only where the routing weights have a gradient, which is their product with dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics.formats import QuantizedMatrix
from ..numerics.grouped import GroupedDgrad, GroupedFprop, Routing
from ..ops import grouped
from .activation_cache import QuantizedInput, dequantized
from .frozen_linear import no_autocast
from .seeds import draw_seed
from .trees import flatten, unflatten


class ExpertsBranch(NamedTuple):
    """One LoRA branch of all experts of a projection."""

    a: Tensor  # (E, r, K)
    b: Tensor  # (E, N, r)
    scaling: float


class ExpertsLinear(NamedTuple):
    """One projection of all experts, with its branches."""

    weight: QuantizedMatrix  # stack of W_f (N, K)
    backward_weight: QuantizedMatrix | None  # stack of W_b (K, N), or None: computed in backward
    factors: tuple[float, ...] | None  # of the global scales of W_f; None: all are 1
    gradients: str  # a word of :data:`.frozen_linear.GRADIENTS`
    branches: tuple[ExpertsBranch, ...]
    bias: Tensor | None = None  # (E, N), frozen
    rounding_seed: Tensor | None = None
    there: AbstractContextManager | None = None  # as of :class:`.frozen_linear.Linear`


class ExpertsCall(NamedTuple):
    """Everything that :class:`ExpertsFunction` depends on: a tree, as are its gradients."""

    x: Tensor  # (T, K), or (R, K) where not ``gathers``; read for its dtype
    terms: tuple[QuantizedMatrix, ...]  # of x~
    routing: Routing
    gathers: bool  # rows are those of their tokens
    linear: ExpertsLinear


class _Saved(NamedTuple):
    terms: tuple[QuantizedMatrix, ...]  # empty without branches
    routing: Routing
    gathers: bool
    linear: ExpertsLinear  # without branches
    a: Tensor | None  # (E, r, K) of all branches
    up: Tensor | None  # (E, N, r), times their scalings
    hidden: Tensor | None  # (R, r)


def experts_linear(
    x: Tensor, quantized: QuantizedInput, routing: Routing, gathers: bool, linear: ExpertsLinear
) -> Tensor:
    """y (R, N) of every row, for x (T, K), whose rows are gathered, or (R, K)."""
    if linear.gradients == "nvfp4_sr":
        linear = linear._replace(rounding_seed=draw_seed())
    leaves, structure = flatten(ExpertsCall(x, quantized.terms, routing, gathers, linear))
    return ExpertsFunction.apply(structure, *leaves)


def _joined(branches: Sequence[ExpertsBranch], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """A and s * B of all branches, side by side along the rank, rounded once to ``dtype``: two launches a branch."""
    if not branches:
        return None, None
    first, ranks = branches[0], [branch.a.shape[1] for branch in branches]
    (experts, _, k), n = first.a.shape, first.b.shape[1]
    a, up = first.a.new_empty(experts, sum(ranks), k, dtype=dtype), first.b.new_empty(experts, n, sum(ranks), dtype=dtype)
    for branch, its_a, its_up in zip(branches, a.split(ranks, 1), up.split(ranks, 2)):
        its_a.copy_(branch.a)
        if branch.scaling == 1.0:
            its_up.copy_(branch.b)
        else:
            torch.mul(branch.b, branch.scaling, out=its_up)  # in B's dtype, rounded on its way out
    return a, up


class ExpertsFunction(torch.autograd.Function):
    """y (R, N) of all experts of a projection; gradients of x and of A and B."""

    @staticmethod
    def forward(ctx, structure, *leaves):
        call: ExpertsCall = unflatten(structure, leaves)
        linear, routing, dtype = call.linear, call.routing, call.x.dtype
        a, up = _joined(linear.branches, dtype)
        sources = _sources(routing) if call.gathers else None
        product = GroupedFprop(call.terms, sources, routing.ends, linear.weight, dtype, linear.factors, a, up, linear.bias)
        y, hidden = grouped.grouped_fprop.run(product)
        saved = _Saved(
            *(call.terms if linear.branches else (), routing, call.gathers, linear._replace(branches=(), bias=None)),
            *(a, up, hidden if linear.branches else None),
        )
        leaves, ctx.saved_structure = flatten(saved)
        ctx.save_for_backward(*leaves)
        ctx.structure, ctx.branches = structure, [(b.a.shape[1], b.scaling, b.a.dtype, b.b.dtype) for b in linear.branches]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        saved: _Saved = unflatten(ctx.saved_structure, ctx.saved_tensors)
        needs: ExpertsCall = unflatten(ctx.structure, ctx.needs_input_grad[1:])
        gradients: ExpertsCall = unflatten(ctx.structure, [None] * (len(ctx.needs_input_grad) - 1))
        ends, trained = saved.routing.ends, needs.linear.branches
        dx, branches = None, gradients.linear.branches  # of which only the tensors are gradients
        with no_autocast(dy), saved.linear.there or nullcontext():
            g = None
            if saved.up is not None and (needs.x or any(branch.a for branch in trained)):
                g = grouped.grouped_mm.run(dy, saved.up.transpose(1, 2), ends)
            if any(branch.a or branch.b for branch in trained):
                pairs = _gradients_of_branches(saved, trained, ctx.branches, dy, g)
                branches = tuple(branch._replace(a=da, b=db) for branch, (da, db) in zip(branches, pairs))
            if needs.x:
                dx = grouped.grouped_dgrad.run(_input_gradient(saved, dy, g))
                if saved.gathers:
                    dx = grouped.combine.run(dx, saved.routing.places, None, dx.dtype)
        return None, *flatten(gradients._replace(x=dx, linear=gradients.linear._replace(branches=branches)))[0]


def _gradients_of_branches(
    saved: _Saved, needs: Sequence[ExpertsBranch], branches: Sequence[tuple], dy: Tensor, g: Tensor | None
) -> list[tuple[Tensor | None, Tensor | None]]:
    """dA and dB of every branch, each in its dtype; None for one that is not trained."""
    ends, ranks = saved.routing.ends, [rank for rank, *_ in branches]
    das = dbs = [None] * len(branches)
    if any(branch.b for branch in needs):
        dtype = next(b for need, (_, _, _, b) in zip(needs, branches) if need.b)
        dbs = grouped.grouped_outer.run(dy, saved.hidden, None, ends, dtype).split(ranks, 2)
    if any(branch.a for branch in needs):
        dtype = next(a for need, (_, _, a, _) in zip(needs, branches) if need.a)
        sources = _sources(saved.routing) if saved.gathers else None
        das = grouped.grouped_outer.run(g, dequantized(saved.terms, None, dy.dtype), sources, ends, dtype).split(ranks, 1)
    found = []
    for need, (_, scaling, a, b), da, db in zip(needs, branches, das, dbs):
        db = (db if scaling == 1.0 else db.mul_(scaling)).to(b) if need.b else None
        found.append((da.to(a) if need.a else None, db))
    return found


def _sources(routing: Routing) -> Tensor:
    """(R,) the token of every row."""
    return routing.order // routing.places.shape[1]


def _input_gradient(saved: _Saved, dy: Tensor, g: Tensor | None) -> GroupedDgrad:
    linear, ends, a = saved.linear, saved.routing.ends, None if g is None else saved.a
    if linear.gradients == "bf16":
        return GroupedDgrad(dy, ends, linear.weight, False, None, linear.factors, g, a)
    weight = linear.backward_weight or grouped.grouped_transpose.run(linear.weight, linear.factors)
    return GroupedDgrad(dy, ends, weight, True, linear.rounding_seed, None, g, a)


class SortedRows(torch.autograd.Function):
    """Rows of x (T, K) in the order of their experts: (R, K). A token's gradient is one sum over its rows, FP32 and rounded once,
    in an order that does not change. (PyTorch's gradient of ``x[index]`` adds them in memory, rounding after each.)"""

    @staticmethod
    def forward(ctx, x: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(routing.places)
        return x[_sources(routing)]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        (places,) = ctx.saved_tensors
        return grouped.combine.run(dy, places, None, dy.dtype), None


class WeightedSum(torch.autograd.Function):
    """y (T, N) in ``dtype``: the sum over a token's k rows, times their weights (T, k). Nothing depends on an order of additions
    in memory, so that a forward that is computed again (checkpointing) gives the same bits."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights, routing.places, routing.order)
        ctx.dtype = rows.dtype
        return grouped.combine.run(rows, routing.places, weights, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        rows, weights, places, order = ctx.saved_tensors
        drows, dweights = grouped.spread.run(dy, weights, places, order, rows, ctx.dtype)
        return drows, None if rows is None else dweights, None, None
