"""Products of a mixture's experts, each with the rows that were routed to it: the definition, as a loop over the experts.

Rows are sorted by expert (:class:`Routing`), so an expert's are neighbours. A *stack* is a matrix of every expert: a
:class:`~peft_nvfp4.numerics.formats.QuantizedMatrix` whose tensors have a leading axis E, codes (E, N, Kp/2), block scales
(E, N, Kp/16), a global scale (E,).

    grouped_fprop       y_r = D(x~_r) @ D(W_e).T + constant_e + h_r @ up_e.T,   h_r = D(x~_r) @ A_e.T   (r: a row of the expert e)
    grouped_dgrad       dx_r = D(Q(dy_r)) @ D(W_b,e).T + g_r @ A_e
    grouped_transpose   W_b,e of W_f,e
    grouped_mm          y_r = x_r @ W_e.T
    grouped_outer       G_e = sum over the rows r of e of x_r y_r.T
    combine             y_t = sum over the k rows of token t, each times its weight
    spread              the gradients of ``combine``

Each is, for one expert, what :mod:`.reference` defines for one linear: the same operands, bit for bit. A row's result depends on
that row and its expert alone. Rows after the last expert's are nobody's: what results there is not defined, and nothing reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .formats import GRADIENT_STOCHASTIC, WEIGHT_BACKWARD, QuantizedMatrix
from .products import BackwardLinear, Dgrad, ForwardLinear, Fprop, LowRank


class Routing(NamedTuple):
    """Where rows come from and where they go. T tokens with k experts each are R = T k rows."""

    order: Tensor  # (R,) int64: place of a row in the flattened (T, k); its token is that // k
    places: Tensor  # (T, k) int64: the row of a token's j-th expert; -1 where that expert is not here
    ends: Tensor  # (E,) int32: the rows of expert e end here, and begin where those of e - 1 end


def route(index: Tensor, experts: int) -> Routing:
    """Sort the rows by expert. Nothing waits for the device, and every size is known beforehand.

    Args:
        index: (T, k) experts of every token; those of ``experts`` or more are of other processes.
    """
    flat = index.reshape(-1)
    ordered, order = flat.sort(stable=True)
    each = torch.arange(experts, device=index.device, dtype=index.dtype)
    ends = torch.searchsorted(ordered, each, right=True, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Routing(order, torch.where(flat < experts, places, -1).view(index.shape), ends)


class GroupedFprop(NamedTuple):
    """y (R, N) of rows of x~ in ``dtype``, and h (R, r) of the adapters."""

    terms: Sequence[QuantizedMatrix]  # of x~, one or two, each (T, K)
    sources: Tensor | None  # (R,) int64: the row of x~ that a row is; None: itself
    ends: Tensor  # (E,) int32
    weight: QuantizedMatrix  # stack of W_f (N, K)
    dtype: torch.dtype
    factors: tuple[float, ...] | None = None  # of the global scales (:func:`.reference.scale_factor`); None: all are 1
    a: Tensor | None = None  # (E, r, K) in ``dtype``
    up: Tensor | None = None  # (E, N, r) in ``dtype``: scaling * B
    constant: Tensor | None = None  # (E, N), added to every row of an expert


class GroupedDgrad(NamedTuple):
    """dx (R, K) of dy (R, N) in its dtype."""

    dy: Tensor
    ends: Tensor  # (E,) int32
    weight: QuantizedMatrix  # stack of W_b (K, N); of W_f (N, K) where not ``quantized``
    quantized: bool = True  # dy is: False, dx = dy @ D(W_f) + g @ A
    seed: Tensor | None = None  # int64 scalar: round dy stochastically
    factors: tuple[float, ...] | None = None  # of W_f's global scales
    g: Tensor | None = None  # (R, r): the gradient of h
    a: Tensor | None = None  # (E, r, K) in dy's dtype


def segments(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any. Waits for a GPU."""
    start = 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            yield e, slice(start, end)
        start = end


def one(stack: QuantizedMatrix, e: int) -> QuantizedMatrix:
    """The matrix of one expert."""
    return QuantizedMatrix(stack.codes[e], stack.scales[e], stack.gscale[e : e + 1], stack.k)


def rows_of(q: QuantizedMatrix, rows: slice | Tensor) -> QuantizedMatrix:
    """Some rows of a matrix with a global scale per row."""
    return QuantizedMatrix(q.codes[rows], q.scales[rows], q.gscale[rows], q.k)


def _dequantize_terms(terms: Sequence[QuantizedMatrix], offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D(x~); in FP16 the largest finite number at most, as adapters see it everywhere."""
    if dtype != torch.float16:
        return reference.dequantize_terms(terms, offset, dtype)
    return reference.dequantize_terms(terms, offset, torch.float32).clamp(-65504.0, 65504.0).to(dtype)


def grouped_fprop(p: GroupedFprop, fprop: Callable = reference.fprop) -> tuple[Tensor, Tensor]:
    """(y (R, N), h (R, r)), r = 0 without adapters. ``fprop``: another implementation of :func:`.reference.fprop`."""
    rows = p.terms[0].codes.shape[0] if p.sources is None else p.sources.shape[0]
    y = torch.zeros(rows, p.weight.codes.shape[1], dtype=p.dtype, device=p.ends.device)
    h = y.new_zeros(rows, 0 if p.a is None else p.a.shape[1])
    dense = {"dequantize_terms": _dequantize_terms} if fprop is reference.fprop else {}
    for e, here in segments(p.ends):
        terms = [rows_of(t, here if p.sources is None else p.sources[here]) for t in p.terms]
        factor = 1.0 if p.factors is None else p.factors[e]
        adapters = () if p.a is None else [LowRank(None, p.up[e])]
        constant = None if p.constant is None else p.constant[e]
        linear = ForwardLinear(one(p.weight, e), constant, factor, adapters)
        y[here], *hidden = fprop(Fprop(terms, [linear], p.dtype, None, None if p.a is None else p.a[e]), **dense)
        if hidden:
            h[here] = hidden[0]
    return y, h


def grouped_dgrad(p: GroupedDgrad, dgrad: Callable = reference.dgrad) -> Tensor:
    """dx (R, K). ``dgrad``: another implementation of :func:`.reference.dgrad`, for dy that is rounded to nearest."""
    k = p.weight.codes.shape[1] if p.quantized else p.weight.k
    dx = p.dy.new_zeros(p.dy.shape[0], k)
    whole = None if p.seed is None else reference.quantize(p.dy, GRADIENT_STOCHASTIC, None, p.seed)
    for e, here in segments(p.ends):
        w, g, a = one(p.weight, e), *((None, None) if p.g is None else (p.g[here], p.a[e]))
        if not p.quantized:
            dx[here] = _dense_gradient(p.dy[here], w, 1.0 if p.factors is None else p.factors[e], g, a)
        elif whole is None:
            dx[here] = dgrad(Dgrad([BackwardLinear(p.dy[here], w)], g, a))
        else:  # an element's random number depends on its place in dy
            rounded = rows_of(whole, here)
            dx[here] = reference.dgrad(Dgrad([BackwardLinear(p.dy[here], w)], g, a), quantize=lambda *_: rounded)
    return dx


def _dense_gradient(dy: Tensor, w: QuantizedMatrix, factor: float, g: Tensor | None, a: Tensor | None) -> Tensor:
    """dy @ D(W_f), rounded, plus g @ a."""
    wd = reference.dequantize(reference.without_scale_factor(w, factor), dy.dtype)
    dx = reference.mm(dy, wd) if factor == 1.0 else reference.mm(dy, wd, torch.float32).mul_(factor).to(dy.dtype)
    return dx if g is None else reference.add_mm(dx, g, a)


def grouped_transpose(q: QuantizedMatrix, factors: tuple[float, ...] | None) -> QuantizedMatrix:
    """The stack of backward layouts (K, N) of a stack of forward weights (N, K)."""
    each = [reference.transpose_requantize(one(q, e), WEIGHT_BACKWARD) for e in range(len(q.codes))]
    codes, scales, gscale = (torch.stack(tensors) for tensors in list(zip(*each))[:3])
    return QuantizedMatrix(codes, scales, gscale.view(-1), q.codes.shape[1])


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x_r @ w_e.T (R, N) of x (R, K) and w (E, N, K), in x's dtype."""
    y = x.new_zeros(x.shape[0], w.shape[1])
    for e, here in segments(ends):
        y[here] = reference.mm(x[here], w[e].T)
    return y


def grouped_outer(x: Tensor, y: Tensor, sources: Tensor | None, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """x_e.T @ y_e (E, M, N) in ``dtype`` of the rows of every expert, x (R, M) and y (R, N), or (T, N) by ``sources``; zeros
    where an expert has no rows."""
    gradients = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1], dtype=dtype)
    for e, here in segments(ends):
        theirs = y[here] if sources is None else y[sources[here]]
        gradients[e] = reference.mm(x[here].T, theirs.to(x.dtype), dtype)
    return gradients


def combine(rows: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y (T, N) in ``dtype``: the sum over a token's rows, times their weights (T, k) where there are any. Products are rounded as
    PyTorch rounds them, the sum is FP32 in the order of the k experts. A place of -1 adds nothing."""
    here = places >= 0
    picked = rows[places.clamp(min=0)] if len(rows) else rows.new_zeros(*places.shape, rows.shape[1])
    picked = picked.masked_fill_(~here[..., None], 0.0)
    if weights is not None:
        picked = picked * weights.unsqueeze(-1)
    return picked.sum(1).to(dtype)


def spread(
    dy: Tensor, weights: Tensor, places: Tensor, order: Tensor, rows: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`combine`: of its rows (R, N) in their ``dtype``, and of the weights (T, k) if the rows are given
    (else empty)."""
    wide = torch.promote_types(dtype, weights.dtype)
    drows = (dy.to(wide)[order // places.shape[1]] * weights.reshape(-1)[order][:, None]).to(dtype)
    if rows is None:
        return drows, weights.new_empty(0)
    picked = rows[places.clamp(min=0)] if len(rows) else rows.new_zeros(*places.shape, rows.shape[1])
    picked = picked.masked_fill_((places < 0)[..., None], 0.0)
    return drows, (dy.to(wide)[:, None] * picked).sum(-1).to(weights.dtype)
