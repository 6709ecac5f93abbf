"""The two products of a training step as operators: fprop and dgrad of all frozen linears that read one input, LoRA included.

    fprop:  y_i = D(x~) @ D(W_i).T + constant_i + sum_j h_j @ up_j.T      over the branches j of linear i; h = D(x~) @ A.T
    dgrad:  dx  = sum_i D(Q(dy_i)) @ D(W_b,i).T + g @ A

Exact products, FP32 accumulation, one rounding to the activations' dtype (a kernel may round the low-rank part by itself, and
dgrad once more for every linear after the first). That is what one FP4 tensor core kernel with the low-rank product in its
epilogue computes; the reference below, and the emulation in :mod:`peft_nvfp4.kernels.emulated`, compute the same up to the order
of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..numerics.formats import GRADIENT, GRADIENT_STOCHASTIC, QuantizedMatrix
from ..numerics.matmul import mm
from . import FLOATS, _check, _check_packed, _check_seed, _define, fused

Parts = Sequence[Tensor]


def _matrices(codes: Parts, scales: Parts, gscale: Parts, k: int | Sequence[int]) -> list[QuantizedMatrix]:
    ks = [k] * len(codes) if isinstance(k, int) else k
    return [QuantizedMatrix(*tensors) for tensors in zip(codes, scales, gscale, ks)]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, r) @ b (r, N) in FP32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype != torch.float32 else a.float() @ b.float()


# ---------------------------------------------------------------------------------------------- fprop


def check_fprop(
    x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, values, hidden, ups, owner, a, k, dtype, factors=()
):
    _check(len(x_codes) in (1, 2), lambda: f"fprop: an input has one or two terms, got {len(x_codes)}")
    _check(dtype in FLOATS, lambda: f"fprop: dtype must be float32, bfloat16 or float16, got {dtype}")
    _check(len(constants) == len(w_codes), lambda: f"fprop: {len(w_codes)} linears, but {len(constants)} constants")
    m = x_codes[0].shape[0]
    for c, s, g in zip(x_codes, x_scales, x_gscale):
        _check_packed("fprop (input)", c, s, g, k)
        _check(c.shape[0] == m, lambda: f"fprop: both terms of an input have the same rows, got {m} and {c.shape[0]}")
    for c, s, g, constant in zip(w_codes, w_scales, w_gscale, constants):
        _check_packed("fprop (weight)", c, s, g, k)
        _check(
            constant is None or tuple(constant.shape) == (c.shape[0],),
            lambda: f"fprop: a constant must be ({c.shape[0]},), got {tuple(constant.shape)}",
        )
    _check(values is None or tuple(values.shape) == (m, k), lambda: f"fprop: values must be {(m, k)}, got {tuple(values.shape)}")
    for h, up, i in zip(hidden, ups, owner):
        n = w_codes[i].shape[0]
        _check(up.shape[0] == n, lambda: f"fprop: up must be ({n}, r), got {tuple(up.shape)}")
        _check(
            h is None or (h.shape[0] == m and h.shape[1] == up.shape[1]),
            lambda: f"fprop: h must be ({m}, {up.shape[1]}), got {tuple(h.shape)}",
        )
    rank = sum(up.shape[1] for h, up in zip(hidden, ups) if h is None)
    _check(
        a is None and rank == 0 or a is not None and tuple(a.shape) == (rank, k) and a.dtype == dtype,
        lambda: f"fprop: a must be ({rank}, {k}) {dtype} for the branches without h",
    )
    _check(len(factors) in (0, len(w_codes)), lambda: f"fprop: {len(w_codes)} linears, but {len(factors)} factors")


def low_rank(terms: Sequence[QuantizedMatrix], values: Tensor | None, a: Tensor | None, hidden, ups, dtype: torch.dtype):
    """(h of every branch, D(x~) @ a.T of those that had none, in one matrix; None if all had)."""
    if a is None:
        return list(hidden), None
    x = values if values is not None else fused.dequantize_terms(terms, None, dtype)
    h = mm(x, a.T)
    parts = iter(h.split([up.shape[1] for given, up in zip(hidden, ups) if given is None], dim=1))
    return [next(parts) if given is None else given for given in hidden], h


def reference_fprop(
    x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, values, hidden, ups, owner, a, k, dtype, factors=()
):
    check_fprop(
        x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, values, hidden, ups, owner, a, k, dtype, factors
    )
    terms = _matrices(x_codes, x_scales, x_gscale, k)
    hidden, made = low_rank(terms, values, a, hidden, ups, dtype)
    ys = []
    factors = factors or [1.0] * len(w_codes)
    for i, (w, constant) in enumerate(zip(_matrices(w_codes, w_scales, w_gscale, k), constants)):
        own = [j for j, of in enumerate(owner) if of == i]
        y = ops.matmul(terms, w, constant, torch.float32 if own else dtype, values, factors[i])
        for j in own:
            y += _product(hidden[j], ups[j].T)
        ys.append(y.to(dtype))
    return ys if made is None else [*ys, made]


def _fake_fprop(
    x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, values, hidden, ups, owner, a, k, dtype, factors=()
):
    check_fprop(
        x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, values, hidden, ups, owner, a, k, dtype, factors
    )
    widths = [c.shape[0] for c in w_codes] + ([] if a is None else [a.shape[0]])
    return [x_codes[0].new_empty(x_codes[0].shape[0], n, dtype=dtype) for n in widths]


_fprop = _define(
    "fprop",
    "(Tensor[] x_codes, Tensor[] x_scales, Tensor[] x_gscale, Tensor[] w_codes, Tensor[] w_scales, Tensor[] w_gscale, "
    "Tensor?[] constants, Tensor? values, Tensor?[] hidden, Tensor[] ups, int[] owner, Tensor? a, int k, ScalarType dtype, "
    "float[] factors=[]) -> Tensor[]",
    reference_fprop,
    _fake_fprop,
)


def fprop(
    terms: Sequence[QuantizedMatrix],
    values: Tensor | None,
    weights: Sequence[QuantizedMatrix],
    constants: Sequence[Tensor | None],
    hidden: Sequence[Tensor | None],
    ups: Sequence[Tensor],
    owner: Sequence[int],
    a: Tensor | None,
    dtype: torch.dtype,
    factors: Sequence[float] = (),
) -> list[Tensor]:
    """y (M, N) of every weight (N, K) for the input x~ (M, K); after them, if a is given, h (M, sum of r) of its branches.

    Args:
        values: D(x~) (M, K), if the caller has it unrounded; see :func:`peft_nvfp4.ops.matmul`.
        constants: (N,) added to every row of a linear's y, or None.
        hidden, ups, owner: h (M, r) or None, scaled B (N, r) and the index of the linear, of every branch.
        a: (sum of r, K) in ``dtype``: A of the branches whose h is None, in their order. D(x~) is then without a centre.
        factors: significands of the weights' global scales, or none at all; see :func:`peft_nvfp4.ops.matmul`.
    """
    for w in weights:
        if w.k != terms[0].k:
            raise RuntimeError(f"fprop: the input has K={terms[0].k}, a weight K={w.k}")
    x, w = (tuple([t[i] for t in several] for i in range(3)) for several in (terms, weights))
    rest = (list(constants), values, list(hidden), list(ups), list(owner), a, terms[0].k, dtype, list(factors))
    return _fprop(*x, *w, *rest)


# ---------------------------------------------------------------------------------------------- dgrad


def check_dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k: int) -> None:
    _check(len(dys) == len(w_codes) == len(seeds), lambda: f"dgrad: {len(dys)} gradients, {len(w_codes)} weights")
    for dy, c, s, gs, seed in zip(dys, w_codes, w_scales, w_gscale, seeds):
        _check(dy.ndim == 2 and dy.dtype in FLOATS, lambda: f"dgrad: dy must be a float matrix, got {dy.dtype} {dy.shape}")
        _check_packed("dgrad (weight)", c, s, gs, dy.shape[1])
        _check(c.shape[0] == k, lambda: f"dgrad: the backward layout must have {k} rows, got {c.shape[0]}")
        _check_seed("dgrad", seed)
    _check(
        (g is None) == (a is None) and (g is None or g.shape[0] == dys[0].shape[0] and tuple(a.shape) == (g.shape[1], k)),
        lambda: f"dgrad: g must be ({dys[0].shape[0]}, r) and a (r, {k})",
    )


def reference_dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k: int) -> Tensor:
    check_dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k)
    weights = _matrices(w_codes, w_scales, w_gscale, [dy.shape[1] for dy in dys])
    dtype, single = dys[0].dtype, len(dys) == 1 and g is None
    dx = None
    for dy, w, seed in zip(dys, weights, seeds):
        q = ops.quantize(dy, GRADIENT) if seed is None else ops.quantize(dy, GRADIENT_STOCHASTIC, seed=seed)
        part = ops.matmul([q], w, None, dtype if single else torch.float32)
        dx = part if dx is None else dx.add_(part)
    return (dx if g is None else dx.add_(_product(g, a))).to(dtype)


def _fake_dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k: int) -> Tensor:
    check_dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k)
    return dys[0].new_empty(dys[0].shape[0], k)


_dgrad = _define(
    "dgrad",
    "(Tensor[] dys, Tensor[] w_codes, Tensor[] w_scales, Tensor[] w_gscale, Tensor?[] seeds, Tensor? g, Tensor? a, int k) "
    "-> Tensor",
    reference_dgrad,
    _fake_dgrad,
)


def dgrad(
    dys: Sequence[Tensor],
    weights: Sequence[QuantizedMatrix],
    seeds: Sequence[Tensor | None],
    g: Tensor | None,
    a: Tensor | None,
) -> Tensor:
    """dx (M, K) in the gradients' dtype.

    Args:
        dys: (M, N) of every linear; quantised here, to nearest, or stochastically where there is a seed.
        weights: backward layouts (K, N).
        g, a: (M, r) and (r, K): the low-rank part of all branches without dropout, or None.
    """
    w = tuple([t[i] for t in weights] for i in range(3))
    return _dgrad(list(dys), *w, list(seeds), g, a, weights[0].codes.shape[0])
