"""fprop and dgrad on FP4 tensor cores, over a GEMM that an implementation brings (:mod:`implementations`).

An implementation is one function, ``gemms``: all weights of one input at once, so that what is made of the input is made once,

    gemms(terms, weights, *, constants, adds, outs=None, dtype=torch.bfloat16) -> [y of every weight]
    y = g_row * g_weight * sum over terms of (codes and block scales of x) @ (those of W).T + constant + add

exact products, accumulated in FP32, rounded once to ``dtype``. What it may rely on:

* one or two terms, whose global scales, one per row, have the same values: K can be doubled, [codes 1 | codes 2] x [W | W];
* weights have one global scale, and all block scales are linear (row-major);
* ``constant`` is None or (N,) FP32; ``add`` is None or (M, N) in ``dtype``; an out may be the add (then it accumulates in place);
* M, N and K are at least 1, every tensor is contiguous.

The low-rank parts join as ``add``. So they are rounded to ``dtype`` once by themselves, before the one rounding of the sum.
(Adding them after the product would round the larger part twice.) dgrad accumulates linear by linear: one more rounding for each
after the first, which :mod:`peft_nvfp4.numerics.products` allows.

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
from ...numerics.products import Dgrad, Fprop
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

    def gemm(terms, weight, *, constant=None, add=None, out=None, dtype=torch.bfloat16):
        outs = None if out is None else [out]
        return gemms(terms, [weight], constants=[constant], adds=[add], outs=outs, dtype=dtype)[0]

    return gemm


def takes_fprop(p: Fprop) -> bool:
    """Whether a product is one that :func:`fprop` computes: BF16, not empty, weights with one global scale."""
    weights = [item.weight for item in p.linears]
    sizes = [p.terms[0].k, p.terms[0].codes.shape[0], *(w.codes.shape[0] for w in weights)]
    return p.dtype == torch.bfloat16 and all(sizes) and all(w.gscale.shape[0] == 1 for w in weights)


def fprop(gemms: Gemms, p: Fprop) -> list[Tensor]:
    """The operator ``fprop``, for what :func:`takes_fprop`. Scale factors are for emulating: a GEMM applies the global scales to
    its FP32 sums, whatever they are."""
    p, h = reference.with_hidden(p, linear.dequantize_input.run)
    adds = []
    for item in p.linears:
        hidden, ups = zip(*item.adapters) if item.adapters else ((), ())
        adds.append(mm(join(hidden), join(ups).T, p.dtype) if hidden else None)
    ys = gemms(
        [_with_row_scales(t) for t in p.terms],
        [_contiguous(item.weight) for item in p.linears],
        constants=[None if item.constant is None else item.constant.float().contiguous() for item in p.linears],
        adds=adds,
        dtype=p.dtype,
    )
    return ys if h is None else [*ys, h]


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


def dgrad(gemms: Gemms, p: Dgrad) -> Tensor:
    """The operator ``dgrad``, for what :func:`takes_dgrad`."""
    dtype = p.linears[0].dy.dtype
    dx = None if p.g is None else mm(p.g, p.a, dtype)
    for dy, weight, seed in p.linears:
        q = ops.quantize(dy, GRADIENT if seed is None else GRADIENT_STOCHASTIC, seed=seed)
        outs = None if dx is None else [dx]
        (dx,) = gemms([_with_row_scales(q)], [_contiguous(weight)], constants=[None], adds=[dx], outs=outs, dtype=dtype)
    return dx
