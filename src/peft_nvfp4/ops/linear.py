"""The operators on the path of an activation x through frozen linears: quantize the input, multiply, multiply back.

    quantize_input    x (M, K) -> x~, one or two NVFP4 terms
    dequantize_input  x~ -> D(x~) (M, K)
    fprop             y of all frozen linears that read x~, LoRA included
    dgrad             dx of all of them

Every implementation takes the products as :class:`~peft_nvfp4.numerics.products.Fprop` and
:class:`~peft_nvfp4.numerics.products.Dgrad`; only the ``torch.library`` operator has them as a flat list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import reference
from ..numerics.formats import BLOCK, QuantizedMatrix, padded_k
from ..numerics.products import BackwardLinear, Dgrad, ForwardLinear, Fprop, LowRank
from .core import Operator, check, check_float, check_matrix, check_offset, check_packed, check_seed, check_shape, check_terms


def empty_terms(like: Tensor, terms: int, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (T, rows, Kp/2), block scales (T, rows, Kp/16) and global scales (T, rows) of ``terms`` matrices."""
    kp, byte = padded_k(k), torch.uint8
    return (
        like.new_empty(terms, rows, kp // 2, dtype=byte),
        like.new_empty(terms, rows, kp // BLOCK, dtype=byte),
        like.new_empty(terms, rows, dtype=torch.float32),
    )


def empty_matrix(like: Tensor, rows: int, k: int) -> QuantizedMatrix:
    """One matrix (rows, K) with a global scale per row, uninitialised."""
    kp, byte = padded_k(k), torch.uint8
    scales, gscale = like.new_empty(rows, kp // BLOCK, dtype=byte), like.new_empty(rows, dtype=torch.float32)
    return QuantizedMatrix(like.new_empty(rows, kp // 2, dtype=byte), scales, gscale, k)


def stacked(matrices: Sequence[QuantizedMatrix]) -> tuple[Tensor, Tensor, Tensor]:
    """One or two matrices as tensors with a leading axis of terms: an operator returns a fixed number of tensors."""
    if len(matrices) == 1:
        return matrices[0].codes[None], matrices[0].scales[None], matrices[0].gscale[None]
    return tuple(torch.stack(tensors) for tensors in list(zip(*matrices))[:3])


def matrices(codes: Sequence[Tensor], scales: Sequence[Tensor], gscale: Sequence[Tensor], k: int) -> tuple[QuantizedMatrix, ...]:
    """Inverse of :func:`stacked` and :func:`tensor_lists`."""
    if isinstance(codes, Tensor):  # iterating over one is a function in Python
        codes, scales, gscale = codes.unbind(), scales.unbind(), gscale.unbind()
    return tuple([QuantizedMatrix(c, s, g, k) for c, s, g in zip(codes, scales, gscale)])


def tensor_lists(several: Sequence[QuantizedMatrix]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Codes, block scales and global scales of some matrices."""
    return [q.codes for q in several], [q.scales for q in several], [q.gscale for q in several]


def _check_quantize_input(x: Tensor, offset: Tensor | None, terms: int) -> None:
    check_matrix("quantize_terms", "x", x)
    check_offset("quantize_terms", offset, x.shape[1])
    check_terms("quantize_terms", terms)


quantize_input = Operator(
    "quantize_terms",
    "(Tensor x, Tensor? offset, int terms) -> (Tensor, Tensor, Tensor)",
    _check_quantize_input,
    reference.quantize_terms,
    lambda x, offset, terms: empty_terms(x, terms, *x.shape),
    flat_result=stacked,
    result=lambda args, flat: matrices(*flat, args[0].shape[1]),
)
"""``quantize_input(x, offset, terms) -> tuple[QuantizedMatrix, ...]``: x~ of x (M, K), x minus the offset (K,) float32 as one or
two NVFP4 terms with a global scale per row; see :func:`peft_nvfp4.numerics.reference.quantize_terms`."""


def check_matrices(
    op: str, terms: Sequence[QuantizedMatrix], shape: tuple[int, int] | None = None, per_row: bool = False
) -> None:
    """The terms of one matrix, of this shape if it is given."""
    check(len(terms) in (1, 2), lambda: f"{op}: a matrix has one or two terms, got {len(terms)}")
    rows, k = shape or (terms[0].codes.shape[0], terms[0].k)
    for c, s, g, _ in terms:
        check_packed(op, c, s, g, k)
        check(c.shape[0] == rows, lambda: f"{op}: the terms must have {rows} rows, got {c.shape[0]}")
        check(not per_row or g.shape[0] == rows, lambda: f"{op}: gscale must hold {rows} values, got {g.shape[0]}")


def _check_dequantize_input(terms: Sequence[QuantizedMatrix], offset: Tensor | None, dtype: torch.dtype) -> None:
    check_matrices("dequantize_terms", terms)
    check_offset("dequantize_terms", offset, terms[0].k)
    check_float("dequantize_terms", dtype)


dequantize_input = Operator(
    "dequantize_terms",
    "(Tensor[] codes, Tensor[] scales, Tensor[] gscale, Tensor? offset, int k, ScalarType dtype) -> Tensor",
    _check_dequantize_input,
    reference.dequantize_terms,
    lambda terms, offset, dtype: terms[0].codes.new_empty(terms[0].codes.shape[0], terms[0].k, dtype=dtype),
    lambda terms, offset, dtype: (*tensor_lists(terms), offset, terms[0].k, dtype),
    lambda codes, scales, gscale, offset, k, dtype: (matrices(codes, scales, gscale, k), offset, dtype),
)
"""``dequantize_input(terms, offset, dtype) -> Tensor``: D(x~) (M, K), terms and offset summed in FP32 and rounded once."""


def _check_fprop(p: Fprop) -> None:
    check_float("fprop", p.dtype)
    check_matrices("fprop (input)", p.terms)
    m, k, rank = p.terms[0].codes.shape[0], p.terms[0].k, 0
    check_shape("fprop", "values", p.values, (m, k))
    for weight, constant, _, adapters in p.linears:
        check(weight.k == k, lambda: f"fprop: the input has K={k}, a weight K={weight.k}")
        check_packed("fprop (weight)", *weight)
        n = weight.codes.shape[0]
        check_shape("fprop", "a constant", constant, (n,))
        for h, up in adapters:
            check(up.shape[0] == n, lambda: f"fprop: up must be ({n}, r), got {tuple(up.shape)}")
            check_shape("fprop", "h", h, (m, up.shape[1]))
            rank += up.shape[1] if h is None else 0
    check(
        p.a is None and rank == 0 or p.a is not None and tuple(p.a.shape) == (rank, k) and p.a.dtype == p.dtype,
        lambda: f"fprop: a must be ({rank}, {k}) {p.dtype} for the adapters without h",
    )


def _fprop_shapes(p: Fprop) -> list[Tensor]:
    codes = p.terms[0].codes
    widths = [linear.weight.codes.shape[0] for linear in p.linears] + ([] if p.a is None else [p.a.shape[0]])
    return [codes.new_empty(codes.shape[0], n, dtype=p.dtype) for n in widths]


def _flat_fprop(p: Fprop) -> tuple:
    adapters = [(i, adapter) for i, linear in enumerate(p.linears) for adapter in linear.adapters]
    return (
        *tensor_lists(p.terms),
        *tensor_lists([linear.weight for linear in p.linears]),
        [linear.constant for linear in p.linears],
        [linear.scale_factor for linear in p.linears],
        [adapter.hidden for _, adapter in adapters],
        [adapter.up for _, adapter in adapters],
        [i for i, _ in adapters],
        *(p.values, p.a, p.terms[0].k, p.dtype),
    )


def _fprop_of_flat(
    x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, factors, hidden, ups, owners, values, a, k, dtype
) -> tuple[Fprop]:
    adapters = [[LowRank(h, up) for h, up, owner in zip(hidden, ups, owners) if owner == i] for i in range(len(w_codes))]
    weights = matrices(w_codes, w_scales, w_gscale, k)
    linears = [ForwardLinear(*linear) for linear in zip(weights, constants, factors, adapters)]
    return (Fprop(matrices(x_codes, x_scales, x_gscale, k), linears, dtype, values, a),)


fprop = Operator(
    "fprop",
    "(Tensor[] x_codes, Tensor[] x_scales, Tensor[] x_gscale, Tensor[] w_codes, Tensor[] w_scales, Tensor[] w_gscale, "
    "Tensor?[] constants, float[] factors, Tensor?[] hidden, Tensor[] ups, int[] owners, Tensor? values, Tensor? a, int k, "
    "ScalarType dtype) -> Tensor[]",
    _check_fprop,
    reference.fprop,
    _fprop_shapes,
    _flat_fprop,
    _fprop_of_flat,
)
"""``fprop(product: Fprop) -> list[Tensor]``: y (M, N) of every linear; after them, if ``product.a`` is given, h (M, sum of r)."""


def _check_dgrad(p: Dgrad) -> None:
    k, m = p.linears[0].weight.codes.shape[0], p.linears[0].dy.shape[0]
    for dy, weight, seed in p.linears:
        check_matrix("dgrad", "dy", dy)
        check_packed("dgrad (weight)", *weight[:3], dy.shape[1])
        check(weight.codes.shape[0] == k, lambda: f"dgrad: the backward layout must have {k} rows, got {weight.codes.shape[0]}")
        check_seed("dgrad", seed)
    check(
        (p.g is None) == (p.a is None) and (p.g is None or p.g.shape[0] == m and tuple(p.a.shape) == (p.g.shape[1], k)),
        lambda: f"dgrad: g must be ({m}, r) and a (r, {k})",
    )


def _flat_dgrad(p: Dgrad) -> tuple:
    weights = tensor_lists([linear.weight for linear in p.linears])
    return [linear.dy for linear in p.linears], *weights, [linear.seed for linear in p.linears], p.g, p.a


def _dgrad_of_flat(dys, w_codes, w_scales, w_gscale, seeds, g, a) -> tuple[Dgrad]:
    weights = (QuantizedMatrix(*w, dy.shape[1]) for *w, dy in zip(w_codes, w_scales, w_gscale, dys))
    return (Dgrad([BackwardLinear(*linear) for linear in zip(dys, weights, seeds)], g, a),)


dgrad = Operator(
    "dgrad",
    "(Tensor[] dys, Tensor[] w_codes, Tensor[] w_scales, Tensor[] w_gscale, Tensor?[] seeds, Tensor? g, Tensor? a) -> Tensor",
    _check_dgrad,
    reference.dgrad,
    lambda p: p.linears[0].dy.new_empty(p.linears[0].dy.shape[0], p.linears[0].weight.codes.shape[0]),
    _flat_dgrad,
    _dgrad_of_flat,
)
"""``dgrad(product: Dgrad) -> Tensor``: dx (M, K) in the gradients' dtype."""
