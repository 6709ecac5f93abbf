"""Operators of a mixture's experts, over :mod:`peft_nvfp4.numerics.grouped`, which explains them.

Their default implementation is a loop over the experts, which waits for the device once; kernels compute all experts together
and wait for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import grouped as definition
from ..numerics.formats import BLOCK, QuantizedMatrix, padded_k
from ..numerics.grouped import GroupedDgrad, GroupedFprop
from .core import Operator, check, check_float, check_matrix, check_seed, check_shape
from .linear import check_matrices, matrices, tensor_lists


def check_stack(op: str, q: QuantizedMatrix, n: int, k: int, experts: int) -> None:
    """Shapes and dtypes of a matrix (n, k) of every expert."""
    kp, byte = padded_k(k), torch.uint8
    check_shape(op, "codes of a stack", q.codes, (experts, n, kp // 2), byte)
    check_shape(op, "scales of a stack", q.scales, (experts, n, kp // BLOCK), byte)
    check_shape(op, "gscale of a stack", q.gscale, (experts,), torch.float32)


def _check_ends(op: str, ends: Tensor) -> None:
    check(ends.ndim == 1 and ends.dtype == torch.int32, lambda: f"{op}: ends must be (E,) int32, got {tuple(ends.shape)}")


def _check_fprop(p: GroupedFprop) -> None:
    op = "grouped_fprop"
    check_float(op, p.dtype)
    _check_ends(op, p.ends)
    check_matrices(op, p.terms, per_row=True)
    (experts,), n, k = p.ends.shape, p.weight.codes.shape[1], p.terms[0].k
    check(p.weight.k == k, lambda: f"{op}: the input has K={k}, the weights K={p.weight.k}")
    check_stack(op, p.weight, n, k, experts)
    check(p.sources is None or p.sources.dtype == torch.int64, lambda: f"{op}: sources must be int64")
    check((p.a is None) == (p.up is None), lambda: f"{op}: a and up are given together or not at all")
    if p.a is not None:
        check_shape(op, "a", p.a, (experts, p.a.shape[1], k), p.dtype)
        check_shape(op, "up", p.up, (experts, n, p.a.shape[1]), p.dtype)
    check_shape(op, "constant", p.constant, (experts, n))


def _fprop_shapes(p: GroupedFprop) -> tuple[Tensor, Tensor]:
    rows = p.terms[0].codes.shape[0] if p.sources is None else p.sources.shape[0]
    widths = p.weight.codes.shape[1], 0 if p.a is None else p.a.shape[1]
    return tuple(p.ends.new_empty(rows, width, dtype=p.dtype) for width in widths)


grouped_fprop = Operator(
    "grouped_fprop",
    "(Tensor[] x_codes, Tensor[] x_scales, Tensor[] x_gscale, Tensor? sources, Tensor ends, Tensor w_codes, Tensor w_scales, "
    "Tensor w_gscale, int k, ScalarType dtype, float[]? factors, Tensor? a, Tensor? up, Tensor? constant) -> (Tensor, Tensor)",
    _check_fprop,
    definition.grouped_fprop,
    _fprop_shapes,
    lambda p: (*tensor_lists(p.terms), p.sources, p.ends, *p.weight, p.dtype, p.factors, p.a, p.up, p.constant),
    lambda codes, scales, gscale, sources, ends, w_codes, w_scales, w_gscale, k, dtype, factors, a, up, constant: (
        GroupedFprop(
            *(matrices(codes, scales, gscale, k), sources, ends, QuantizedMatrix(w_codes, w_scales, w_gscale, k), dtype),
            *(None if factors is None else tuple(factors), a, up, constant),
        ),
    ),
)
"""``grouped_fprop(product: GroupedFprop) -> (y (R, N), h (R, r))``."""


def _check_dgrad(p: GroupedDgrad) -> None:
    op = "grouped_dgrad"
    check_matrix(op, "dy", p.dy)
    _check_ends(op, p.ends)
    (experts,), (rows, n) = p.ends.shape, p.dy.shape
    k = p.weight.codes.shape[1] if p.quantized else p.weight.k
    check_stack(op, p.weight, *((k, n) if p.quantized else (n, k)), experts)
    check_seed(op, p.seed)
    check((p.g is None) == (p.a is None), lambda: f"{op}: g and a are given together or not at all")
    if p.g is not None:
        check_shape(op, "g", p.g, (rows, p.a.shape[1]), p.dy.dtype)
        check_shape(op, "a", p.a, (experts, p.a.shape[1], k), p.dy.dtype)


grouped_dgrad = Operator(
    "grouped_dgrad",
    "(Tensor dy, Tensor ends, Tensor w_codes, Tensor w_scales, Tensor w_gscale, int k, bool quantized, Tensor? seed, "
    "float[]? factors, Tensor? g, Tensor? a) -> Tensor",
    _check_dgrad,
    definition.grouped_dgrad,
    lambda p: p.dy.new_empty(p.dy.shape[0], p.weight.codes.shape[1] if p.quantized else p.weight.k),
    lambda p: (p.dy, p.ends, *p.weight, p.quantized, p.seed, p.factors, p.g, p.a),
    lambda dy, ends, codes, scales, gscale, k, quantized, seed, factors, g, a: (
        GroupedDgrad(
            *(dy, ends, QuantizedMatrix(codes, scales, gscale, k), quantized, seed),
            *(None if factors is None else tuple(factors), g, a),
        ),
    ),
)
"""``grouped_dgrad(product: GroupedDgrad) -> Tensor``: dx (R, K)."""


def _check_mm(x: Tensor, w: Tensor, ends: Tensor) -> None:
    check_matrix("grouped_mm", "x", x)
    _check_ends("grouped_mm", ends)
    check_shape("grouped_mm", "w", w, (ends.shape[0], w.shape[1], x.shape[1]), x.dtype)


grouped_mm = Operator(
    "grouped_mm",
    "(Tensor x, Tensor w, Tensor ends) -> Tensor",
    _check_mm,
    definition.grouped_mm,
    lambda x, w, ends: x.new_empty(x.shape[0], w.shape[1]),
)


def _check_outer(x: Tensor, y: Tensor, sources: Tensor | None, ends: Tensor, dtype: torch.dtype) -> None:
    check_matrix("grouped_outer", "x", x)
    check_matrix("grouped_outer", "y", y)
    check_float("grouped_outer", dtype)
    _check_ends("grouped_outer", ends)
    check_shape("grouped_outer", "sources", sources, (x.shape[0],), torch.int64)


grouped_outer = Operator(
    "grouped_outer",
    "(Tensor x, Tensor y, Tensor? sources, Tensor ends, ScalarType dtype) -> Tensor",
    _check_outer,
    definition.grouped_outer,
    lambda x, y, sources, ends, dtype: x.new_empty(ends.shape[0], x.shape[1], y.shape[1], dtype=dtype),
)


def _check_combine(rows: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype) -> None:
    check_matrix("combine", "rows", rows)
    check_float("combine", dtype)
    check(places.ndim == 2 and places.dtype == torch.int64, lambda: f"combine: places must be (T, k) int64, got {places.dtype}")
    check_shape("combine", "weights", weights, tuple(places.shape))


combine = Operator(
    "combine",
    "(Tensor rows, Tensor places, Tensor? weights, ScalarType dtype) -> Tensor",
    _check_combine,
    definition.combine,
    lambda rows, places, weights, dtype: rows.new_empty(places.shape[0], rows.shape[1], dtype=dtype),
)


def _check_spread(
    dy: Tensor, weights: Tensor, places: Tensor, order: Tensor, rows: Tensor | None, dtype: torch.dtype
) -> None:
    check_matrix("spread", "dy", dy)
    check_float("spread", dtype)
    check_shape("spread", "weights", weights, tuple(places.shape))
    check_shape("spread", "order", order, (places.numel(),), torch.int64)
    check_shape("spread", "rows", rows, (places.numel(), dy.shape[1]), dtype)


spread = Operator(
    "spread",
    "(Tensor dy, Tensor weights, Tensor places, Tensor order, Tensor? rows, ScalarType dtype) -> (Tensor, Tensor)",
    _check_spread,
    definition.spread,
    lambda dy, weights, places, order, rows, dtype: (
        dy.new_empty(order.shape[0], dy.shape[1], dtype=dtype),
        weights.new_empty((0,) if rows is None else weights.shape),
    ),
)


def _check_transpose(q: QuantizedMatrix, factors: tuple[float, ...] | None) -> None:
    check_stack("grouped_transpose", q, q.codes.shape[1], q.k, q.codes.shape[0])


def _transpose_shapes(q: QuantizedMatrix, factors: tuple[float, ...] | None) -> tuple[Tensor, Tensor, Tensor]:
    experts, n, _ = q.codes.shape
    kept = q.codes.new_empty(experts, q.k, padded_k(n) // 2), q.codes.new_empty(experts, q.k, padded_k(n) // BLOCK)
    return *kept, q.gscale.new_empty(experts)


grouped_transpose = Operator(
    "grouped_transpose",
    "(Tensor codes, Tensor scales, Tensor gscale, int k, float[]? factors) -> (Tensor, Tensor, Tensor)",
    _check_transpose,
    definition.grouped_transpose,
    _transpose_shapes,
    lambda q, factors: (*q, factors),
    lambda codes, scales, gscale, k, factors: (
        QuantizedMatrix(codes, scales, gscale, k),
        None if factors is None else tuple(factors),
    ),
    flat_result=lambda q: q[:3],
    result=lambda args, flat: QuantizedMatrix(*flat, args[0].codes.shape[1]),
)
"""``grouped_transpose(q, factors) -> QuantizedMatrix``: the backward layouts (K, N) of a stack of forward weights q (N, K), each
as :data:`~.matrix.transpose_requantize` makes it; ``factors``: of their global scales, None where all are 1."""
