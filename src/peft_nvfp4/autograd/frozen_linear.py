"""The differentiable core: frozen NVFP4 matrix products of one input, with LoRA branches, as one autograd Function.

Notation: x (M, K) input, W (N, K) a frozen weight, A (r, K), B (N, r) an adapter, s its scaling, Q quantise, D dequantise,
m a dropout mask (0 or 1/(1-p)), mu an optional constant vector per channel.

    x~   = Q(x - mu)  [and Q of what that left over, with two terms]        D(x~) = mu + D(term 1) [+ D(term 2)]
    y    = D(x~) @ D(W_f).T + bias + sum_i h_i @ (s_i * B_i).T              h_i = (m_i * D(x~)) @ A_i.T
    dx   = D(Q(dy)) @ D(W_b).T + sum_i m_i * (g_i @ A_i)                    g_i = dy @ (s_i * B_i)
    dA_i = g_i.T @ (m_i * D(x~)),   dB_i = s_i * dy.T @ h_i,   dbias = sum over M of dy

Linears that read the same x (q, k and v; gate and up) go through one call: y, dy, W are then lists, dx the sum over them. That
dequantises x~ once instead of once per linear, and stacks the adapters (:mod:`peft_nvfp4.autograd.lora`).

The adapter gradients are the exact ones of the function that was computed (they use D(x~), not x). The input gradient is the
quantised one of the paper (Table 7): x -> D(x~) counts as the identity, dy is quantised along N and multiplied by the
backward layout W_b (K, N). With ``gradients="bf16"`` it is dy @ D(W_f), not quantised at all.

Kept for backward: the codes of x~ (0.56 bytes a value and term instead of 2), h_i, and a seed instead of each mask. Where x~ is
the product of a gated MLP, it can be made anew from gate and up, which the MLP keeps (``SiteSpec.recompute``); where x is what
attention keeps for its own backward, from x, which then costs nothing (``SiteSpec.keeps_input``).

Rejected: building the same from separate operators. Autograd would then save D(x~) in BF16 once per branch, which is most of
what NVFP4 activations are meant to avoid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..numerics.formats import WEIGHT_BACKWARD, QuantizedMatrix
from ..numerics.matmul import add_mm, mm
from ..numerics.reference import without_significand
from ..ops import fused
from ..ops import linear as linear_ops
from . import lora
from .lora import Branch, Needs, draw_seed, lora_branch, no_autocast

__all__ = ["Branch", "draw_seed", "lora_branch"]  # this module's users need them with it

GRADIENTS = ("nvfp4", "nvfp4_sr", "bf16")


class Frozen(NamedTuple):
    """The tensors of one frozen linear."""

    bias: Tensor | None  # (N,)
    constant: Tensor | None  # (N,) float32, D(W_f) @ mu
    codes: Tensor  # W_f (N, K): codes, block scales, global scale
    scales: Tensor
    gscale: Tensor
    b_codes: Tensor | None  # W_b (K, N), or None: made where it is needed
    b_scales: Tensor | None
    b_gscale: Tensor | None
    sr_seed: Tensor | None  # of stochastic rounding


@dataclass(frozen=True)
class LinearSpec:
    """What is not a tensor of one linear.

    Attributes:
        n: outputs.
        gradients: ``"nvfp4"`` (to nearest), ``"nvfp4_sr"`` (stochastic) or ``"bf16"`` (not quantised).
        scalings, dropouts: per branch.
        significand: of the global scale of W_f. Where it is not 1, W_f is of another tool's checkpoint, D(W_f) does not fit in
            BF16, and products that are emulated multiply their sums by it.
    """

    n: int
    gradients: str
    scalings: tuple[float, ...]
    dropouts: tuple[float, ...]
    significand: float = 1.0


@dataclass(frozen=True)
class SiteSpec:
    """Everything about one call of :class:`NVFP4Linears` that is not a tensor.

    Attributes:
        k: inputs.
        terms: 1 or 2 NVFP4 terms of the input.
        linears: those that read it.
        recompute: activation of the gated MLP from whose gate and up backward makes x~ anew; None where it is kept.
        keeps_input: x itself is kept, and backward quantises it anew: for an x that others keep in any case.
    """

    k: int
    terms: int
    linears: tuple[LinearSpec, ...]
    recompute: str | None = None
    keeps_input: bool = False

    @property
    def kept(self) -> int:
        """Tensors of the input at the head of the variable ones: its terms, then gate and up if it is recomputed."""
        return 3 * self.terms + (6 if self.recompute else 0)


# ---------------------------------------------------------------------------------------------- the input x~


def quantize_input(x: Tensor, terms: int, centre: Tensor | None) -> list[QuantizedMatrix]:
    """x (M, K) as one or two NVFP4 terms; the second quantises what the first left over (FP32 difference)."""
    return fused.quantize_terms(x, centre, terms)


def dequantize_input(parts: list[QuantizedMatrix], centre: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D(x~) (M, K), summed in FP32 and rounded once to ``dtype``."""
    return _in_range(lambda d: fused.dequantize_terms(parts, centre, d), dtype)


def _in_range(values: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> Tensor:
    """``values(dtype)``, through FP32 if that is FP16: a rounding up of the largest value may pass FP16's end where x itself did
    not."""
    return values(dtype) if dtype != torch.float16 else values(torch.float32).clamp(-65504.0, 65504.0).to(dtype)


class StraightThrough(torch.autograd.Function):
    """``values`` in the forward, x's gradient in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, values: Tensor) -> Tensor:
        return values.view(x.shape).clone()  # an output must not be the caller's tensor

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


@torch.no_grad()
def rounded_input(x: Tensor, terms: int = 1, centre: Tensor | None = None) -> Tensor:
    """D(x~) for x (..., K), without gradient."""
    parts = quantize_input(x.detach().reshape(-1, x.shape[-1]), terms, centre)
    return dequantize_input(parts, centre, x.dtype).view(x.shape)


def fake_quantize(x: Tensor, terms: int = 1, centre: Tensor | None = None) -> Tensor:
    """D(x~) for x (..., K), with the straight-through gradient."""
    return StraightThrough.apply(x, rounded_input(x, terms, centre))


# ---------------------------------------------------------------------------------------------- the Function


class Operands(NamedTuple):
    """The variable inputs of :class:`NVFP4Linears`, by what they are."""

    parts: list[QuantizedMatrix]  # x~
    frozen: list[Frozen]
    sources: list[lora.Source]  # all branches, in the order of their linears
    owner: list[int]  # index of the linear of every branch


def operands(spec: SiteSpec, flat: Sequence[Tensor | None]) -> Operands:
    """Inverse of :func:`flatten`."""
    parts = [QuantizedMatrix(*flat[3 * i : 3 * i + 3], spec.k) for i in range(spec.terms)]
    at, width = spec.kept, len(Frozen._fields)
    frozen = [Frozen(*flat[at + width * i : at + width * (i + 1)]) for i in range(len(spec.linears))]
    at += width * len(frozen)
    sources, owner = [], []
    for index, linear in enumerate(spec.linears):
        for scaling, p in zip(linear.scalings, linear.dropouts):
            sources.append((*flat[at : at + 3], scaling, p))
            owner.append(index)
            at += 3
    return Operands(parts, frozen, sources, owner)


def flatten(parts: Sequence[QuantizedMatrix], frozen: Sequence[Frozen], sources: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The variable inputs: the terms of x~ (and gate and up, if it is recomputed), the frozen linears, then (A, B, dropout seed
    or None) of all branches."""
    return [t for part in parts for t in part[:3]] + [t for item in frozen for t in item] + list(sources)


FIXED = 4
"""Inputs of :class:`NVFP4Linears` before the variable ones."""


class NVFP4Linears(torch.autograd.Function):
    """Frozen NVFP4 linears of one input, each with any number of plain LoRA branches: a tuple of y (M, N). See the module's
    docstring for the formulas.

    The input is quantised by the caller (once for all linears that share it): x is here for its gradient and dtype only.
    """

    @staticmethod
    def forward(ctx, x, xd, centre, spec, *flat):
        # x (M, K); xd D(x~) (M, K) in x's dtype, or None if nobody has computed it; centre (K,) float32
        parts, frozen, sources, owner = operands(spec, flat)
        adapters = lora.prepare(sources, x.dtype)
        inside = centre is None and spec.terms == 1 and x.dtype != torch.float16  # then the product's operand is D(x~)
        if xd is None and not (inside and len(adapters.stacked()) == len(sources)):
            xd = dequantize_input(parts, centre, x.dtype)
        hidden = lora.down(xd, adapters, stacked=not inside)
        # xd may stand for the operand of the frozen product where it is the sum of the terms, unrounded
        values = xd if centre is None and (x.dtype == torch.float32 or x.dtype == torch.bfloat16 and spec.terms == 1) else None
        weights = [QuantizedMatrix(*linear[2:5], spec.k) for linear in frozen]
        constants = [total_constant(linear.bias, linear.constant) for linear in frozen]
        ups = [item.sb for item in adapters.items]
        a = adapters.stack if inside else None
        factors = [its.significand for its in spec.linears]
        ys = linear_ops.fprop(parts, values, weights, constants, hidden, ups, owner, a, x.dtype, factors)
        if a is not None:
            *ys, made = ys
            for i, h in zip(adapters.stacked(), made.split([adapters.items[i].rank for i in adapters.stacked()], dim=1)):
                hidden[i] = h
        ctx.spec, ctx.branches, ctx.owner = spec, [(a.rank, a.scaling, a.dropout) for a in adapters.items], owner
        ctx.dtypes = [(a.dtype, b.dtype) for a, b, *_ in sources]
        kept = flat[3 * spec.terms : spec.kept] if spec.recompute else flat[: spec.kept]
        kept = (x,) if spec.keeps_input else kept
        kept = kept if sources else ()  # no adapter: nothing of x is needed
        layers = [t for linear in frozen for t in linear[2:]]
        ctx.save_for_backward(centre, *layers, *hidden, *adapters.tensors(), *kept)
        return tuple(ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys):
        spec, owner = ctx.spec, ctx.owner
        needs = ctx.needs_input_grad
        centre, frozen, hidden, adapters, kept = _saved(ctx)
        first = FIXED + spec.kept
        per_branch = first + len(Frozen._fields) * len(frozen)
        wanted = Needs(
            needs[0],
            [a if needs[per_branch + 3 * i] else None for i, (a, _) in enumerate(ctx.dtypes)],
            [b if needs[per_branch + 3 * i + 1] else None for i, (_, b) in enumerate(ctx.dtypes)],
        )
        grads: list[Tensor | None] = [None] * len(needs)
        with no_autocast(dys[0]):
            for i, dy in enumerate(dys):
                if needs[first + len(Frozen._fields) * i]:
                    grads[first + len(Frozen._fields) * i] = dy.sum(0)
            xd = None
            if any(wanted.a):
                xd = _input_again(kept, centre, spec, dys[0].dtype)
            das, dbs, gs = lora.backward([dys[i] for i in owner], xd, hidden, adapters, wanted)
            del xd
            if needs[0]:
                grads[0] = lora.add_dropped(_input_gradient(dys, frozen, spec, adapters.stack, gs.stacked), adapters, gs.dropped)
        for i, (da, db) in enumerate(zip(das, dbs)):
            grads[per_branch + 3 * i], grads[per_branch + 3 * i + 1] = da, db
        return tuple(grads)


def _input_again(kept: Sequence[Tensor], centre: Tensor | None, spec: SiteSpec, dtype: torch.dtype) -> Tensor:
    """D(x~) (M, K) from what was kept of it."""
    if spec.keeps_input:
        return dequantize_input(quantize_input(kept[0], spec.terms, centre), centre, dtype)
    parts = [QuantizedMatrix(*kept[i : i + 3], spec.k) for i in range(0, len(kept), 3)]
    if spec.recompute is None:
        return dequantize_input(parts, centre, dtype)
    return _in_range(lambda d: fused.gated_values(*parts, centre, spec.recompute, spec.terms, d), dtype)


def _saved(ctx) -> tuple[Tensor | None, list[Frozen], list[Tensor], lora.Adapters, Sequence[Tensor]]:
    """(centre, frozen linears, hidden, adapters, tensors of the terms of x~ or of what it is made from)."""
    saved = ctx.saved_tensors  # read once: under checkpointing every reading recomputes
    at, width = 1, len(Frozen._fields) - 2
    frozen = [Frozen(None, None, *saved[at + width * i : at + width * (i + 1)]) for i in range(len(ctx.spec.linears))]
    at += width * len(frozen)
    n = len(ctx.branches)
    hidden, at = saved[at : at + n], at + n
    adapters, at = lora.restore(saved[at:], ctx.branches), at + 1 + 3 * n
    return saved[0], frozen, hidden, adapters, saved[at:]


def total_constant(bias: Tensor | None, constant: Tensor | None) -> Tensor | None:
    """What the epilogue adds to every row of a product: the bias (N,) and D(W_f) @ mu (N,) float32."""
    if constant is None:
        return bias
    return constant if bias is None else bias.float() + constant


def _input_gradient(dys, frozen: Sequence[Frozen], spec: SiteSpec, stack: Tensor | None, g: Tensor | None) -> Tensor:
    """dx (M, K) of the frozen weights and of the branches without dropout: A in ``stack``, g = dy @ (s * B) of all of them."""
    rounded, dense = [], None
    for dy, linear, its in zip(dys, frozen, spec.linears):
        w = QuantizedMatrix(*linear[2:5], spec.k)
        if its.gradients == "bf16":
            part = _dense_gradient(dy, w, its.significand)
            dense = part if dense is None else dense.add_(part)
            continue
        back = linear[5:8]
        if back[0] is None:
            w_b = ops.transpose_requantize(w, WEIGHT_BACKWARD, its.significand)
        else:
            w_b = QuantizedMatrix(*back, its.n)
        rounded.append((dy, w_b, linear.sr_seed))
    if not rounded:
        return dense if g is None else add_mm(dense, g, stack)
    dx = linear_ops.dgrad(*zip(*rounded), g, stack if g is not None else None)
    return dx if dense is None else dx.add_(dense)


def _dense_gradient(dy: Tensor, w: QuantizedMatrix, significand: float) -> Tensor:
    """dy @ D(W_f), rounded once; exact products, whatever the global scale."""
    wd = ops.dequantize(without_significand(w, significand), dy.dtype)
    return mm(dy, wd) if significand == 1.0 else mm(dy, wd, torch.float32).mul_(significand).to(dy.dtype)
