"""The differentiable core: frozen NVFP4 matrix products of one input, with LoRA branches, as one autograd Function.

Notation: x (M, K) input, W (N, K) a frozen weight, A (r, K), B (N, r) an adapter, s its scaling, Q quantise, D dequantise,
m a dropout mask (0 or 1/(1-p)), mu an optional constant offset per channel.

    x~   = Q(x - mu)  [and Q of what that left over, with a residual term]  D(x~) = mu + D(term 1) [+ D(residual term)]
    y    = D(x~) @ D(W_f).T + bias + sum_i h_i @ (s_i * B_i).T              h_i = (m_i * D(x~)) @ A_i.T
    dB_i = s_i * dy.T @ h_i,   dA_i = g_i.T @ (m_i * D(x~))                 g_i = dy @ (s_i * B_i)
    dx   = D(Q(dy)) @ D(W_b).T + sum_i m_i * (g_i @ A_i),   dbias = sum over M of dy

:class:`FrozenLinearFunction` computes them in this order. Precision: every product has exact operands, FP32 sums and one rounding
to the dtype of the activations (of dA and dB: to that of A and B). A and s * B are rounded to the activations' dtype once, in
forward.

* D(x~) @ D(W_f).T is a product of 4-bit values (W4A4): :func:`peft_nvfp4.ops.linear.fprop`.
* D(Q(dy)) @ D(W_b).T is one, too: x -> D(x~) counts as the identity, dy is quantised along N, W_b (K, N) is the backward layout.
  This is the quantised gradient of the paper (Table 7): :func:`peft_nvfp4.ops.linear.dgrad`. With ``gradients="bf16"`` it is
  dy @ D(W_f), not quantised at all.
* dA and dB are the exact gradients of the function that was computed: they use D(x~), not x, and dy, not Q(dy).

Linears that read the same x (q, k and v; gate and up) go through one call, so that x~ is dequantised once and the A of all
branches without dropout are the rows of one matrix: x is read once for all of them. A branch with dropout has a mask of its own
and is computed by itself.

Kept for backward: the codes of x~ (0.56 bytes a value and term instead of 2), h_i, and a seed instead of each mask. Where x~ is
the product of a gated MLP, it can be computed from gate and up, which the MLP keeps (``Call.source``); where x is what attention
keeps for its own backward, from x, which then costs nothing (``Call.keeps_x``).

Rejected: building the same from separate operators. Autograd would then save D(x~) in BF16 once per branch, which is most of
what NVFP4 activations are meant to avoid.

The file is long because the whole path is in it, in the order in which it is walked: what a call depends on, the Function with
its input gradient, the adapters' share, and at the end straight-through values and autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..numerics.formats import QuantizedMatrix
from ..numerics.products import BackwardLinear, Dgrad, ForwardLinear, Fprop, LowRank
from ..numerics.reference import add_mm, mm, without_scale_factor
from ..ops import fused
from ..ops import linear as linear_ops
from .activation_cache import GatedSource, QuantizedInput, dequantized, kept_by_attention, saturated
from .seeds import draw_seed
from .tiles import THREAD

# ---------------------------------------------------------------------------------------------- what a call depends on


class Branch(NamedTuple):
    """One plain LoRA branch."""

    a: Tensor  # (r, K)
    b: Tensor  # (N, r)
    scaling: float
    dropout: float  # probability; 0 outside training
    seed: Tensor | None = None  # of its dropout mask, drawn by :func:`frozen_linear`


class Linear(NamedTuple):
    """One frozen linear with its branches."""

    weight: QuantizedMatrix  # W_f (N, K)
    backward_weight: QuantizedMatrix | None  # W_b (K, N), or None: computed in backward
    bias: Tensor | None  # (N,)
    constant: Tensor | None  # (N,) float32, D(W_f) @ mu
    scale_factor: float  # of W_f: 1, but for another tool's checkpoint
    gradients: str  # how dy is rounded for dx, see FrozenOptions
    branches: tuple[Branch, ...]
    rounding_seed: Tensor | None = None  # of stochastic rounding, drawn by :func:`frozen_linear`
    there: AbstractContextManager | None = None  # within it backward may read the weights (:mod:`.hosted`); None: always


class Call(NamedTuple):
    """Everything that :class:`FrozenLinearFunction` depends on."""

    x: Tensor  # (M, K); read for its dtype, and where keeps_x
    terms: tuple[QuantizedMatrix, ...]  # of x~, one or two
    offset: Tensor | None  # mu (K,) float32
    dequantized: Tensor | None  # D(x~) (M, K) in x's dtype; None: fprop computes it, and h
    source: GatedSource | None  # gate and up: backward computes D(x~) from them instead of keeping the terms
    keeps_x: bool  # backward quantises x anew instead of keeping the terms
    linears: tuple[Linear, ...]


def frozen_linear(x: Tensor, quantized: QuantizedInput, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """y (M, N) of every linear and its branches, for x (M, K) and its quantised form."""
    # Seeds in the order of the linears: computed together or one by one, the numbers are the same. Not only with autograd on:
    # reentrant checkpointing draws its first seeds without, and must draw the same numbers.
    drawn = []
    for linear in linears:
        if any(branch.dropout for branch in linear.branches):
            branches = tuple(b._replace(seed=draw_seed()) if b.dropout else b for b in linear.branches)
            linear = linear._replace(branches=branches)
        drawn.append(linear if linear.gradients != "nvfp4_sr" else linear._replace(rounding_seed=draw_seed()))
    # attention keeps its output in any case: backward quantises that again, to the same codes, instead of keeping them too
    keeps_x = quantized.source is None and not quantized.from_producer and kept_by_attention(x)
    call = Call(x, quantized.terms, quantized.offset_values, None, quantized.source, keeps_x, tuple(drawn))
    in_tiles = not torch.compiler.is_compiling() and THREAD.wants_tiles
    if dequantized_input_is_needed(call) and not (in_tiles and fprop_can_dequantize(call, quantized)):
        call = call._replace(dequantized=quantized.dequantized(x))
    return FrozenLinearFunction.apply(call, *differentiable(call))


def differentiable(call: Call) -> list[Tensor | None]:
    """What a call has gradients of: x, then of every linear its bias, and A and B of its branches."""
    inputs = [call.x]
    for linear in call.linears:
        inputs.append(linear.bias)
        for branch in linear.branches:
            inputs += (branch.a, branch.b)
    return inputs


def dequantized_input_is_needed(call: Call) -> bool:
    """Who dequantises x~ for the branches: True if the caller does, once for all linears of this input. False if there are none,
    or if D(x~) is the operand of fprop in any case (one term, no offset, BF16 on a GPU): h is then computed there."""
    branches = [branch for linear in call.linears for branch in linear.branches]
    is_operand_of_fprop = call.x.is_cuda and call.x.dtype == torch.bfloat16 and len(call.terms) == 1 and call.offset is None
    if is_operand_of_fprop:
        return any(branch.dropout for branch in branches)
    return len(branches) > 0  # bool() of a list is not traced by torch.compile of PyTorch 2.11


def fprop_can_dequantize(call: Call, quantized: QuantizedInput) -> bool:
    """Whether D(x~), which nobody has made yet, need not outlast the computation of h: of many tokens (:mod:`.tiles`) fprop makes
    it, the same, and lets go of it before it makes y."""
    there = quantized.values is not None or quantized.from_producer and not quantized.placeholder
    plain = call.offset is None and call.x.dtype == torch.bfloat16
    return plain and not there and not any(branch.dropout for linear in call.linears for branch in linear.branches)


# ---------------------------------------------------------------------------------------------- the Function


class Saved(NamedTuple):
    """What backward reads."""

    number_of_terms: int
    terms: tuple[QuantizedMatrix, ...]  # of x~; empty where it is computed from ``x`` or ``source``, and without branches
    x: Tensor | None
    source: GatedSource | None
    offset: Tensor | None
    linears: tuple[Linear, ...]  # without bias and branches
    adapters: Adapters
    hidden: tuple[Tensor, ...]  # h (M, r) of every branch


class Layout(NamedTuple):
    """The constants of a :class:`Saved`, and how many tensors there are of what."""

    number_of_terms: int
    terms: tuple[int, ...]  # K of each
    source: tuple[int, str] | None  # width and activation
    linears: tuple[tuple, ...]  # of each: K, N if W_b is kept, scale factor, gradients, there
    adapters: tuple[tuple, ...]  # of each: rank, scaling, dropout


def to_save(saved: Saved) -> tuple[list[Tensor | None], Layout]:
    """The tensors that backward reads, one by one as a Function saves them, and what else it has to know. (A general walk over
    such a tree took a third of the Python of a step.)"""
    stack, items = saved.adapters
    tensors, source, linears = [saved.x, saved.offset, stack, *saved.hidden], None, []
    for term in saved.terms:
        tensors += term[:3]
    if saved.source is not None:
        gate, up, act = saved.source
        tensors += (*gate[:3], *up[:3])
        source = gate.k, act
    for w, w_b, _, _, factor, gradients, _, seed, there in saved.linears:
        tensors += (*w[:3], *(NO_MATRIX if w_b is None else w_b[:3]), seed)
        linears.append((w.k, None if w_b is None else w_b.k, factor, gradients, there))
    for item in items:
        tensors += item[:3]
    adapters = tuple([item[3:] for item in items])
    return tensors, Layout(saved.number_of_terms, tuple([term.k for term in saved.terms]), source, tuple(linears), adapters)


NO_MATRIX = (None, None, None)


def saved_of(tensors: Sequence[Tensor | None], layout: Layout) -> Saved:
    """Inverse of :func:`to_save`."""
    count = len(layout.adapters)
    x, offset, stack, *hidden = tensors[: 3 + count]
    rest = iter(tensors[3 + count :])
    matrix = lambda k: QuantizedMatrix(next(rest), next(rest), next(rest), k)
    terms, source, linears = tuple([matrix(k) for k in layout.terms]), None, []
    if layout.source is not None:
        k, act = layout.source
        source = GatedSource(matrix(k), matrix(k), act)
    for k, n, factor, gradients, there in layout.linears:
        w, w_b = matrix(k), matrix(n)
        linears.append(Linear(w, None if n is None else w_b, None, None, factor, gradients, (), next(rest), there))
    items = tuple([Adapter(next(rest), next(rest), next(rest), *constants) for constants in layout.adapters])
    return Saved(layout.number_of_terms, terms, x, source, offset, tuple(linears), Adapters(stack, items), tuple(hidden))


class FrozenLinearFunction(torch.autograd.Function):
    """Frozen NVFP4 linears of one input, each with any number of plain LoRA branches: a tuple of y (M, N). See the module's
    docstring for the formulas. The input is quantised by the caller, once for all linears that share it.

    ``waiting_in`` of a node: a weak reference to the entry of the activation cache where outputs of this call wait for their
    linears (:class:`peft_nvfp4.nn.group.SharedInputGroup`). Once backward is here, nobody will come for them.
    """

    @staticmethod
    def forward(ctx, *arguments: Any) -> tuple[Tensor, ...]:
        """A :class:`Call`, then what :func:`differentiable` finds in it. (Not two parameters: where nothing needs a gradient,
        torch.compile takes a call with as many arguments as parameters for one without ``ctx``.)"""
        call: Call = arguments[0]
        dtype, xd = call.x.dtype, call.dequantized
        branches = [branch for linear in call.linears for branch in linear.branches]
        adapters = cast_adapters(branches, dtype)
        hidden = [None] * len(branches) if xd is None else hidden_of(xd, adapters)
        # D(x~) is the operand of the frozen product where it is the sum of the terms, unrounded
        exact = call.offset is None and (dtype == torch.float32 or dtype == torch.bfloat16 and len(call.terms) == 1)
        low_rank = iter([LowRank(h, item.up) for h, item in zip(hidden, adapters.items)])
        linears = [
            ForwardLinear(
                linear.weight,
                total_constant(linear.bias, linear.constant),
                linear.scale_factor,
                [next(low_rank) for _ in linear.branches],
            )
            for linear in call.linears
        ]
        a = adapters.stack if xd is None else None
        ys = linear_ops.fprop.run(Fprop(call.terms, linears, dtype, xd if exact else None, a))
        if a is not None:
            hidden = columns_of(ys.pop(), [item.rank for item in adapters.items])
        # without branches, backward reads nothing of the input
        x = call.x if call.keeps_x and branches else None
        source = call.source if branches else None
        terms = call.terms if x is None and source is None and branches else ()
        saved = Saved(len(call.terms), terms, x, source, call.offset, call.linears, adapters, tuple(hidden))
        tensors, ctx.layout = to_save(saved)
        ctx.save_for_backward(*tensors)
        ctx.dtypes = [(branch.a.dtype, branch.b.dtype) for branch in branches]
        ctx.branches = [len(linear.branches) for linear in call.linears]
        ctx.waiting_in = None
        ctx.set_materialize_grads(False)  # a linear whose output nobody used has no gradient: not zeros, with which AdamW decays
        return tuple(ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys):
        if ctx.waiting_in is not None and (entry := ctx.waiting_in()) is not None:
            entry.outputs.clear()
        used, dtypes, dx = [dy is not None for dy in dys], ctx.dtypes, None
        if not any(used):
            return (None,) * len(ctx.needs_input_grad)
        saved = saved_of(ctx.saved_tensors, ctx.layout)
        needs_x, flags = ctx.needs_input_grad[1], iter(ctx.needs_input_grad[2:])
        needs = [(next(flags), [(next(flags), next(flags)) for _ in range(count)]) for count in ctx.branches]
        if not all(used):
            of_branches = [flag for flag, count in zip(used, ctx.branches) for _ in range(count)]
            saved, dtypes = only(saved, used, of_branches), list(compress(dtypes, of_branches))
            needs, dys = list(compress(needs, used)), list(compress(dys, used))
        branches = [branch for _, of_linear in needs for branch in of_linear]
        dtypes_a = [dtype if need else None for (need, _), (dtype, _) in zip(branches, dtypes)]
        dtypes_b = [dtype if need else None for (_, need), (_, dtype) in zip(branches, dtypes)]
        # ``there`` after unpacking, for which checkpointing may have run other layers; one call is of one decoder layer
        with no_autocast(dys[0]), saved.linears[0].there or NOTHING:
            xd = _dequantized_input(saved, dys[0].dtype) if any(dtypes_a) else None
            branch_dys = [dy for dy, (_, of_linear) in zip(dys, needs) for _ in of_linear]
            dbs = gradients_of_b(branch_dys, saved.hidden, saved.adapters, dtypes_b)
            das, gs = gradients_of_a(branch_dys, xd, saved.adapters, dtypes_a, needs_x)
            del xd
            if needs_x:
                dx = _input_gradient(dys, saved.linears, gs.stacked, saved.adapters.stack)
                dx = add_dropped(dx, saved.adapters, gs.dropped)
            dbias = [dy.sum(0) if need else None for dy, (need, _) in zip(dys, needs)]
        gradients, pairs, biases = [None, dx], iter(zip(das, dbs)), iter(dbias)
        for flag, count in zip(used, ctx.branches):
            gradients.append(next(biases) if flag else None)
            for _ in range(count):
                gradients += next(pairs) if flag else (None, None)
        return tuple(gradients)


def only(saved: Saved, linears: Sequence[bool], branches: Sequence[bool]) -> Saved:
    """What backward reads where only these linears, with these branches, have a gradient."""
    stack, items = saved.adapters
    stacked = [item.a is None for item in items]
    rows = [] if stack is None else stack.split([item.rank for item in compress(items, stacked)])
    rows = list(compress(rows, compress(branches, stacked)))
    adapters = Adapters(torch.cat(rows) if rows else None, tuple(compress(items, branches)))
    hidden = tuple(compress(saved.hidden, branches))
    return saved._replace(linears=tuple(compress(saved.linears, linears)), adapters=adapters, hidden=hidden)


def total_constant(bias: Tensor | None, constant: Tensor | None) -> Tensor | None:
    """What the epilogue adds to every row of a product: the bias (N,) and D(W_f) @ mu (N,) float32."""
    if constant is None:
        return bias
    return constant if bias is None else bias.float() + constant


def _dequantized_input(saved: Saved, dtype: torch.dtype) -> Tensor:
    """D(x~) (M, K) from what was kept of it."""
    if saved.x is not None:
        terms = linear_ops.quantize_input.run(saved.x, saved.offset, saved.number_of_terms)
        return dequantized(terms, saved.offset, dtype)
    if saved.source is None:
        return dequantized(saved.terms, saved.offset, dtype)
    gate, up, act = saved.source
    wide = torch.float32 if dtype == torch.float16 else dtype
    values = fused.gated_values(gate, up, saved.offset, act, saved.number_of_terms, wide)
    return values if wide == dtype else saturated(values, dtype)


def _input_gradient(dys: Sequence[Tensor], linears: Sequence[Linear], g: Tensor | None, a: Tensor | None) -> Tensor:
    """dx (M, K) of the frozen weights and of the branches without dropout: g = dy @ (s * B) (M, r), A (r, K) of all of them."""
    quantized, dense = [], None
    for dy, linear in zip(dys, linears):
        if linear.gradients == "bf16":
            part = _dense_gradient(dy, linear.weight, linear.scale_factor)
            dense = part if dense is None else dense.add_(part)
            continue
        backward_weight = linear.backward_weight
        if backward_weight is None:
            backward_weight = ops.transpose_requantize(linear.weight, linear.scale_factor)
        quantized.append(BackwardLinear(dy, backward_weight, linear.rounding_seed))
    if not quantized:
        return dense if g is None else add_mm(dense, g, a)
    dx = linear_ops.dgrad.run(Dgrad(quantized, g, a if g is not None else None))
    return dx if dense is None else dx.add_(dense)


def _dense_gradient(dy: Tensor, w: QuantizedMatrix, scale_factor: float) -> Tensor:
    """dy @ D(W_f), rounded once; exact products, whatever the global scale."""
    wd = ops.dequantize(without_scale_factor(w, scale_factor), dy.dtype)
    return mm(dy, wd) if scale_factor == 1.0 else mm(dy, wd, torch.float32).mul_(scale_factor).to(dy.dtype)


# ---------------------------------------------------------------------------------------------- the adapters' share


class Adapter(NamedTuple):
    """A branch as the products use it, in the activations' dtype."""

    a: Tensor | None  # (r, K); None where it is part of the stack
    up: Tensor  # (N, r), scaling * B
    seed: Tensor | None  # of its dropout mask
    rank: int
    scaling: float
    dropout: float


class Adapters(NamedTuple):
    """All branches of one input. Those without dropout see the same x: their A are the rows of ``stack``, in order."""

    stack: Tensor | None  # (sum of r, K)
    items: tuple[Adapter, ...]


def cast_adapters(branches: Sequence[Branch], dtype: torch.dtype) -> Adapters:
    """A and s * B of every branch, rounded once to ``dtype``."""
    if len(branches) > 0 and not torch.compiler.is_compiling() and all(dtype != t.dtype for b in branches for t in b[:2]):
        return _cast_together(branches, dtype)
    shared = [branch.a for branch in branches if not branch.dropout]
    stack = None if not shared else (shared[0] if len(shared) == 1 else torch.cat(shared)).to(dtype)
    items = []
    for a, b, scaling, dropout, seed in branches:
        up = (b if scaling == 1.0 else b * scaling).to(dtype)
        items.append(Adapter(a.to(dtype) if dropout else None, up, seed, a.shape[0], scaling, dropout))
    return Adapters(stack, tuple(items))


def _cast_together(branches: Sequence[Branch], dtype: torch.dtype) -> Adapters:
    """:func:`cast_adapters` in two launches, where A and B are of another dtype (FP32, PEFT's default)."""
    shared = [branch.a for branch in branches if not branch.dropout]
    stack = shared[0].new_empty(sum(a.shape[0] for a in shared), shared[0].shape[1], dtype=dtype) if shared else None
    rows = () if stack is None else (stack,) if len(shared) == 1 else stack.split_with_sizes([a.shape[0] for a in shared])
    own = [torch.empty_like(branch.a, dtype=dtype) if branch.dropout else None for branch in branches]
    ups, bs = [torch.empty_like(branch.b, dtype=dtype) for branch in branches], [branch.b for branch in branches]
    if any(branch.scaling != 1.0 for branch in branches):
        bs = torch._foreach_mul(bs, [branch.scaling for branch in branches])
    masters = [*shared, *(branch.a for branch in branches if branch.dropout), *bs]
    torch._foreach_copy_([*rows, *(a for a in own if a is not None), *ups], masters)
    return Adapters(
        stack, tuple([Adapter(a, up, b.seed, b.a.shape[0], b.scaling, b.dropout) for a, up, b in zip(own, ups, branches)])
    )


def hidden_of(xd: Tensor, adapters: Adapters) -> list[Tensor]:
    """h_i = (m_i * D(x~)) @ A_i.T (M, r) of every branch."""
    ranks = [item.rank for item in adapters.items if item.a is None]
    stacked = iter(columns_of(mm(xd, adapters.stack.T), ranks) if ranks else ())
    return [
        next(stacked) if item.a is None else mm(fused.dropout.run(xd, item.dropout, item.seed), item.a.T)
        for item in adapters.items
    ]


def columns_of(h: Tensor, ranks: Sequence[int]) -> Sequence[Tensor]:
    """h (M, sum of r) -> h_i (M, r) of every branch. (``Tensor.split`` is a function in Python.)"""
    return (h,) if len(ranks) == 1 else h.split_with_sizes(ranks, 1)


def gradients_of_b(
    dys: Sequence[Tensor], hidden: Sequence[Tensor], adapters: Adapters, dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    """dB_i = s_i * dy_i.T @ h_i (N, r) in its dtype; None where there is none."""
    triples = zip(dys, hidden, dtypes)
    gradients = [None if dtype is None else mm(dy.T, h.to(dy.dtype), dtype) for dy, h, dtype in triples]
    scaled = [i for i, item in enumerate(adapters.items) if gradients[i] is not None and item.scaling != 1.0]
    if scaled:
        torch._foreach_mul_([gradients[i] for i in scaled], [adapters.items[i].scaling for i in scaled])
    return gradients


class HiddenGradients(NamedTuple):
    """g_i = dy_i @ (s_i * B_i): the gradients of h."""

    stacked: Tensor | None  # (M, sum of r) of the branches without dropout, the columns in the order of the stack's rows
    dropped: dict[int, Tensor]  # of the others, by their index


def gradients_of_a(
    dys: Sequence[Tensor], xd: Tensor | None, adapters: Adapters, dtypes: Sequence[torch.dtype | None], needs_x: bool
) -> tuple[list[Tensor | None], HiddenGradients]:
    """dA_i = g_i.T @ (m_i * D(x~)) (r, K) in its dtype, None where there is none; and g, of which dx is made."""
    items, gradients = adapters.items, [None] * len(adapters.items)
    shared = [i for i, item in enumerate(items) if item.a is None]
    parts = [mm(dys[i], items[i].up) for i in shared] if needs_x or any(dtypes[i] for i in shared) else []
    g = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] if parts else None
    dtype = next((dtypes[i] for i in shared if dtypes[i]), None)
    if dtype is not None:
        for i, da in zip(shared, mm(g.T, xd, dtype).split_with_sizes([items[i].rank for i in shared])):
            gradients[i] = da.to(dtypes[i]) if dtypes[i] else None
    dropped = {}
    for i, (item, dy) in enumerate(zip(items, dys)):
        if item.a is not None and (needs_x or dtypes[i]):
            dropped[i] = mm(dy, item.up)
            if dtypes[i]:
                gradients[i] = mm(dropped[i].T, fused.dropout.run(xd, item.dropout, item.seed), dtypes[i])
    return gradients, HiddenGradients(g, dropped)


def add_dropped(dx: Tensor | None, adapters: Adapters, dropped: dict[int, Tensor]) -> Tensor | None:
    """dx plus m_i * (g_i @ A_i) of the branches with dropout, in place."""
    for i, g in dropped.items():
        item = adapters.items[i]
        part = fused.dropout.run(mm(g, item.a), item.dropout, item.seed)
        dx = part if dx is None else dx.add_(part)
    return dx


# ---------------------------------------------------------------------------------------------- straight through


class StraightThrough(torch.autograd.Function):
    """``values`` in the forward, x's gradient in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, values: Tensor) -> Tensor:
        return values.view(x.shape).clone()  # an output must not be the caller's tensor

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


@torch.no_grad()
def rounded_input(x: Tensor, terms: int = 1, offset: Tensor | None = None) -> Tensor:
    """D(x~) for x (..., K), without gradient."""
    quantized = linear_ops.quantize_input(x.detach().reshape(-1, x.shape[-1]), offset, terms)
    return dequantized(quantized, offset, x.dtype).view(x.shape)


def fake_quantize(x: Tensor, terms: int = 1, offset: Tensor | None = None) -> Tensor:
    """D(x~) for x (..., K), with the straight-through gradient."""
    return StraightThrough.apply(x, rounded_input(x, terms, offset))


# ---------------------------------------------------------------------------------------------- autocast


class _AutocastOff:
    """``torch.autocast(kind, enabled=False)`` where it is on, at a tenth of the cost: every linear enters it."""

    __slots__ = ("kind",)

    def __init__(self, kind: str):
        self.kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.kind, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self.kind, True)


NOTHING = nullcontext()


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Context in which autocast is off, so that FP32 arithmetic stays FP32. Free when autocast is not on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return NOTHING
    return torch.autocast(kind, enabled=False) if torch.compiler.is_compiling() else _AutocastOff(kind)


def autocast_input(x: Tensor) -> Tensor:
    """x in the dtype that autocast prescribes for a linear layer, if autocast is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.is_floating_point() else x
