"""fprop and dgrad on FP4 tensor cores, over a GEMM that a tier brings (:mod:`tiers`).

A tier is one function, ``gemms``: all weights of one input at once, so that what is made of the input is made once,

    gemms(terms, weights, *, constants, adds, outs=None, dtype=torch.bfloat16) -> [y of every weight]
    y = g_row * g_weight * sum over terms of (codes and block scales of x) @ (those of W).T + constant + add

exact products, accumulated in FP32, rounded once to ``dtype``. What it may rely on:

* one or two terms, whose global scales, one per row, have the same values: K can be doubled, [codes 1 | codes 2] x [W | W];
* weights have one global scale, and all block scales are linear (row-major): a kernel that reads them swizzled swizzles them
  itself;
* ``constant`` is None or (N,) FP32; ``add`` is None or (M, N) in ``dtype``; an out may be the add (then it accumulates in place);
* M, N and K are at least 1, every tensor is contiguous.

The low-rank parts join as ``add``. So they are rounded to ``dtype`` once by themselves, before the one rounding of the sum: two
roundings, the first relative to the smaller part. (Adding them after the product would cost the same traffic, and round the
larger part twice.) dgrad accumulates linear by linear: one more rounding for each after the first, which :mod:`..linear_ops`
allows.

Swizzled copies of the weights' scales are not kept: they would take a ninth of the weights' memory again (0.5 GB per layout of an
8B model), and making them reads and writes N * K / 16 bytes, a small part of what the product itself reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import ops
from ...numerics.formats import GRADIENT, GRADIENT_STOCHASTIC, QuantizedMatrix
from ...numerics.matmul import mm
from ...ops import linear

Gemms = Callable[..., list[Tensor]]


def single(gemms: Gemms) -> Callable[..., Tensor]:
    """``gemms`` as a function of one weight."""

    def gemm(terms, weight, *, constant=None, add=None, out=None, dtype=torch.bfloat16):
        outs = None if out is None else [out]
        return gemms(terms, [weight], constants=[constant], adds=[add], outs=outs, dtype=dtype)[0]

    return gemm


# ---------------------------------------------------------------------------------------------- fprop


def rows(arguments: tuple) -> int:
    """M of a product, given the operator's arguments."""
    return arguments[0][0].shape[0]


def takes_fprop(
    x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, values, hidden, ups, owner, a, k, dtype, factors=()
) -> bool:
    """Whether a product is one that :func:`fprop` computes: BF16, not empty, weights with one global scale."""
    sizes = [k, x_codes[0].shape[0], *(c.shape[0] for c in w_codes)]
    return dtype == torch.bfloat16 and all(sizes) and all(g.shape[0] == 1 for g in w_gscale)


def fprop(gemms: Gemms, *arguments) -> list[Tensor]:
    """The operator ``fprop``, for what :func:`takes_fprop`. ``factors`` are for emulating: a GEMM applies the global scales to
    its FP32 sums, whatever they are."""
    linear.check_fprop(*arguments)
    x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, values, hidden, ups, owner, a, k, dtype = arguments[:14]
    terms = linear._matrices(x_codes, x_scales, x_gscale, k)
    hidden, made = linear.low_rank(terms, values, a, hidden, ups, dtype)
    adds = []
    for i in range(len(w_codes)):
        own = [j for j, of in enumerate(owner) if of == i]
        adds.append(mm(_join([hidden[j] for j in own]), _join([ups[j] for j in own]).T, dtype) if own else None)
    ys = gemms(
        [_with_row_scales(t) for t in terms],
        [_contiguous(w) for w in linear._matrices(w_codes, w_scales, w_gscale, k)],
        constants=[None if c is None else c.float().contiguous() for c in constants],
        adds=adds,
        dtype=dtype,
    )
    return ys if made is None else [*ys, made]


def _join(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(pieces), dim=1) if len(pieces) > 1 else pieces[0]


def _contiguous(q: QuantizedMatrix) -> QuantizedMatrix:
    return QuantizedMatrix(q.codes.contiguous(), q.scales.contiguous(), q.gscale.contiguous(), q.k)


def _with_row_scales(q: QuantizedMatrix) -> QuantizedMatrix:
    return _contiguous(q._replace(gscale=q.gscale.expand(q.codes.shape[0])))


# ---------------------------------------------------------------------------------------------- dgrad


def takes_dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k: int) -> bool:
    """Whether a product is one that :func:`dgrad` computes."""
    sizes = [k, dys[0].shape[0], *(dy.shape[1] for dy in dys)]
    return dys[0].dtype == torch.bfloat16 and all(sizes) and all(g.shape[0] == 1 for g in w_gscale)


def dgrad(gemms: Gemms, dys, w_codes, w_scales, w_gscale, seeds, g, a, k: int) -> Tensor:
    """The operator ``dgrad``, for what :func:`takes_dgrad`."""
    linear.check_dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k)
    weights = linear._matrices(w_codes, w_scales, w_gscale, [dy.shape[1] for dy in dys])
    dx = None if g is None else mm(g, a, dys[0].dtype)
    for dy, w, seed in zip(dys, weights, seeds):
        q = ops.quantize(dy, GRADIENT) if seed is None else ops.quantize(dy, GRADIENT_STOCHASTIC, seed=seed)
        outs = None if dx is None else [dx]
        (dx,) = gemms([_with_row_scales(q)], [_contiguous(w)], constants=[None], adds=[dx], outs=outs, dtype=dys[0].dtype)
    return dx
