"""fprop and dgrad on FP4 tensor cores, over a GEMM that an implementation brings (:mod:`implementations`).

An implementation is one function, ``gemms``: all weights of one input at once, so that what is made of the input is made once,

    gemms(terms, weights, *, constants, adds, low_ranks=None, outs=None, dtype=torch.bfloat16) -> [y of every weight]
    y = g_row * g_weight * sum over terms of (codes and block scales of x) @ (those of W).T + hidden @ up.T + constant + add

exact products, accumulated in FP32, rounded once to ``dtype``. What it may rely on:

* one or two terms, whose global scales, one per row, have the same values: K can be doubled, [codes 1 | codes 2] x [W | W];
* weights have one global scale; block scales are linear (row-major), but for what :func:`dgrad` was told to quantise otherwise;
* ``constant`` is None or (N,) FP32; ``add`` is None or (M, N) in ``dtype``; an out may be the add (then it accumulates in place);
* a low-rank product is None or hidden (M, r), up (N, r), both BF16;
* M, N and K are at least 1, every tensor but the low-rank ones is contiguous.

An implementation may sum a low-rank product with the others (the extension does), or make it before and add it
(:func:`with_products`); then it is rounded to ``dtype`` once by itself, before the one rounding of the sum. (Adding it after the
product would round the larger part twice.) dgrad accumulates linear by linear: one more rounding for each after the first, which
:mod:`peft_nvfp4.numerics.products` allows.

Swizzled copies of the weights' scales are not kept: they would take a ninth of the weights' memory again (0.5 GB per layout of an
8B model), and making them reads and writes N * K / 16 bytes, a small part of what the product itself reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import ops
from ...numerics import reference
from ...numerics.formats import GRADIENT, GRADIENT_STOCHASTIC, QuantizedMatrix
from ...numerics.products import Dgrad, ForwardLinear, Fprop, LowRank
from ...numerics.reference import mm
from ...ops import linear

Gemms = Callable[..., list[Tensor]]


class Unavailable(Exception):
    """An implementation is not there. ``broken``: something is there, but does not work as it should, which the user is told."""

    def __init__(self, reason: str, broken: bool = False):
        super().__init__(reason)
        self.broken = broken


def single(gemms: Gemms) -> Callable[..., Tensor]:
    """``gemms`` as a function of one weight."""

    def gemm(terms, weight, *, constant=None, add=None, low_rank=None, out=None, dtype=torch.bfloat16):
        outs = None if out is None else [out]
        return gemms(terms, [weight], constants=[constant], adds=[add], low_ranks=[low_rank], outs=outs, dtype=dtype)[0]

    return gemm


def with_products(adds: Sequence[Tensor | None], low_ranks: Sequence[LowRank | None] | None, dtype) -> list[Tensor | None]:
    """What is added, with the low-rank products in it: each rounded to ``dtype``."""
    if low_ranks is None:
        return list(adds)
    products = [None if p is None else mm(p.hidden, p.up.T, dtype) for p in low_ranks]
    return [add if p is None else p if add is None else p + add for p, add in zip(products, adds)]


def takes_fprop(p: Fprop) -> bool:
    """Whether a product is one that :func:`fprop` computes: BF16, not empty, weights with one global scale."""
    weights = [item.weight for item in p.linears]
    sizes = [p.terms[0].k, p.terms[0].codes.shape[0], *(w.codes.shape[0] for w in weights)]
    return p.dtype == torch.bfloat16 and all(sizes) and all(w.gscale.shape[0] == 1 for w in weights)


def fprop(gemms: Gemms, p: Fprop) -> list[Tensor]:
    """The operator ``fprop``, for what :func:`takes_fprop`. Scale factors are for emulating: a GEMM applies the global scales to
    its FP32 sums, whatever they are."""
    p, h = reference.with_hidden(p, linear.dequantize_input.run)
    low_ranks = [_joined(item) for item in p.linears]
    # codes and low-rank products are summed before global scales are applied; dividing h by one is exact for a power of two alone
    exact = [item.scale_factor == 1.0 for item in p.linears]
    ys = gemms(
        [_with_row_scales(t) for t in p.terms],
        [_contiguous(item.weight) for item in p.linears],
        constants=[None if item.constant is None else item.constant.float().contiguous() for item in p.linears],
        adds=with_products([None] * len(exact), [None if e else low for e, low in zip(exact, low_ranks)], p.dtype),
        low_ranks=[low if e else None for e, low in zip(exact, low_ranks)],
        dtype=p.dtype,
    )
    return ys if h is None else [*ys, h]


def _joined(item: ForwardLinear) -> LowRank | None:
    """All adapters of a linear as one."""
    return LowRank(*map(join, zip(*item.adapters))) if item.adapters else None


def join(pieces: Sequence[Tensor]) -> Tensor | None:
    """Matrices side by side; None for none."""
    return torch.cat(list(pieces), dim=1) if len(pieces) > 1 else pieces[0] if pieces else None


def _contiguous(q: QuantizedMatrix) -> QuantizedMatrix:
    return QuantizedMatrix(*(t.contiguous() for t in q[:3]), q.k)


def _with_row_scales(q: QuantizedMatrix) -> QuantizedMatrix:
    return _contiguous(q._replace(gscale=q.gscale.expand(q.codes.shape[0])))


def takes_dgrad(p: Dgrad) -> bool:
    """Whether a product is one that :func:`dgrad` computes."""
    weights, dy = [item.weight for item in p.linears], p.linears[0].dy
    sizes = [dy.shape[0], *(size for w in weights for size in (w.codes.shape[0], w.k))]
    return dy.dtype == torch.bfloat16 and all(sizes) and all(w.gscale.shape[0] == 1 for w in weights)


def dgrad(gemms: Gemms, p: Dgrad, quantize: Callable[..., QuantizedMatrix] = ops.quantize) -> Tensor:
    """The operator ``dgrad``, for what :func:`takes_dgrad`. ``quantize(dy, fmt, seed=...)``: nothing but ``gemms`` reads what it
    returns, which may therefore be in a layout that only ``gemms`` knows."""
    dtype = p.linears[0].dy.dtype
    dx, low_rank = None, None if p.g is None else LowRank(p.g, p.a.T)
    for dy, weight, seed in p.linears:
        q = quantize(dy, GRADIENT if seed is None else GRADIENT_STOCHASTIC, seed=seed)
        operands, outs = ([_with_row_scales(q)], [_contiguous(weight)]), None if dx is None else [dx]
        (dx,) = gemms(*operands, constants=[None], adds=[dx], low_ranks=[low_rank], outs=outs, dtype=dtype)
        low_rank = None
    return dx
