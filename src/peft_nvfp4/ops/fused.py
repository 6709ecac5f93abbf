"""Operators of the fused producers: schema, checks and shapes of each, over :mod:`peft_nvfp4.numerics.fused_reference`.

Like :mod:`peft_nvfp4.ops` these live in the ``torch.library`` namespace ``peft_nvfp4``, have the plain-PyTorch reference as their
default implementation and refuse to be differentiated. The one or two NVFP4 *terms* of a matrix travel as tensors with a leading
term axis (T, M, ...), since an operator returns a fixed number of tensors; what was not asked for is an empty tensor.

The public functions take and return what those of the reference do, in the same order, with views of these tensors as
:class:`~peft_nvfp4.numerics.formats.QuantizedMatrix`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import fused_reference
from ..numerics.formats import QuantizedMatrix
from ..numerics.fused_reference import ACTIVATIONS, GatedGrads, GatedOutput, NormOutput
from .core import FLOATS, Operator, check, check_matrix, check_offset, check_seed, check_terms
from .linear import check_matrices, empty_terms, matrices, stacked, tensor_lists

# ---------------------------------------------------------------------------------------------- RMSNorm


def _check_norm(op: str, name: str, x: Tensor, gamma: Tensor, offset: Tensor | None) -> None:
    check_matrix(op, name, x)
    check(
        tuple(gamma.shape) == (x.shape[1],) and gamma.dtype in FLOATS,
        lambda: f"{op}: gamma must be ({x.shape[1]},) of a floating dtype, got {tuple(gamma.shape)} {gamma.dtype}",
    )
    check_offset(op, offset, x.shape[1])


def _check_rmsnorm_quantize(x, gamma, offset, eps: float, plus_one: bool, terms: int) -> None:
    _check_norm("rmsnorm_quantize", "x", x, gamma, offset)
    check_terms("rmsnorm_quantize", terms)


def _rmsnorm_quantize_reference(x, gamma, offset, eps: float, plus_one: bool, terms: int):
    out = fused_reference.rmsnorm_quantize(x, gamma, offset, eps, plus_one, terms)
    return *stacked(out.parts), out.y, out.rstd


def _rmsnorm_quantize_shapes(x, gamma, offset, eps: float, plus_one: bool, terms: int):
    return *empty_terms(x, terms, *x.shape), x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


_rmsnorm_quantize = Operator(
    "rmsnorm_quantize",
    "(Tensor x, Tensor gamma, Tensor? offset, float eps, bool plus_one, int terms) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _check_rmsnorm_quantize,
    _rmsnorm_quantize_reference,
    _rmsnorm_quantize_shapes,
)


def rmsnorm_quantize(x: Tensor, gamma: Tensor, offset: Tensor | None, eps: float, plus_one: bool, terms: int) -> NormOutput:
    """RMSNorm of x (M, d), quantised in the same pass; see :func:`fused_reference.rmsnorm_quantize`."""
    *parts, y, rstd = _rmsnorm_quantize(x, gamma, offset, eps, plus_one, terms)
    return NormOutput(matrices(*parts, x.shape[1]), y, rstd)


def _check_rmsnorm_backward(dy, codes, scales, gscale, offset, gamma, rstd, plus_one: bool) -> None:
    op, m = "rmsnorm_backward", dy.shape[0]
    _check_norm(op, "dy", dy, gamma, offset)
    check_matrices(op, codes, scales, gscale, m, dy.shape[1], per_row=True)
    check(
        tuple(rstd.shape) == (m,) and rstd.dtype == torch.float32,
        lambda: f"{op}: rstd must be ({m},) float32, got {tuple(rstd.shape)} {rstd.dtype}",
    )


_rmsnorm_backward = Operator(
    "rmsnorm_backward",
    "(Tensor dy, Tensor[] codes, Tensor[] scales, Tensor[] gscale, Tensor? offset, Tensor gamma, Tensor rstd, "
    "bool plus_one) -> Tensor",
    _check_rmsnorm_backward,
    lambda dy, codes, scales, gscale, *rest: fused_reference.rmsnorm_backward(
        dy, matrices(codes, scales, gscale, dy.shape[1]), *rest
    ),
    lambda dy, *rest: dy.new_empty(dy.shape),
)


def rmsnorm_backward(
    dy: Tensor,
    parts: Sequence[QuantizedMatrix],
    offset: Tensor | None,
    gamma: Tensor,
    rstd: Tensor,
    plus_one: bool,
) -> Tensor:
    """dx (M, d) from the kept terms of y and the statistic; see :func:`fused_reference.rmsnorm_backward`."""
    return _rmsnorm_backward(dy, *tensor_lists(parts), offset, gamma, rstd, plus_one)


# ---------------------------------------------------------------------------------------------- act(gate) * up


def _check_gated(op: str, name: str, x: Tensor, offset: Tensor | None, act: str) -> None:
    check_matrix(op, name, x)
    check_offset(op, offset, x.shape[1])
    check(act in ACTIVATIONS, lambda: f"{op}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")


def _check_silu_mul_quantize(gate: Tensor, up: Tensor, offset: Tensor | None, act: str, terms: int, keep_h: bool) -> None:
    _check_gated("silu_mul_quantize", "gate", gate, offset, act)
    check(
        up.shape == gate.shape and up.dtype == gate.dtype,
        lambda: f"silu_mul_quantize: up must be {tuple(gate.shape)} {gate.dtype}, got {tuple(up.shape)} {up.dtype}",
    )
    check_terms("silu_mul_quantize", terms)


def _silu_mul_quantize_reference(gate: Tensor, up: Tensor, offset: Tensor | None, act: str, terms: int, keep_h: bool):
    out = fused_reference.silu_mul_quantize(gate, up, offset, act, terms, keep_h)
    return *stacked(out.parts), out.h, *out.gate[:3], *out.up[:3]


def _silu_mul_quantize_shapes(gate: Tensor, up: Tensor, offset: Tensor | None, act: str, terms: int, keep_h: bool):
    kept = [t.new_empty(t.shape[1:]) for _ in range(2) for t in empty_terms(gate, 1, *gate.shape)]
    return *empty_terms(gate, terms, *gate.shape), gate.new_empty(gate.shape if keep_h else (0,)), *kept


_silu_mul_quantize = Operator(
    "silu_mul_quantize",
    "(Tensor gate, Tensor up, Tensor? offset, str act, int terms, bool keep_h) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _check_silu_mul_quantize,
    _silu_mul_quantize_reference,
    _silu_mul_quantize_shapes,
)


def silu_mul_quantize(gate: Tensor, up: Tensor, offset: Tensor | None, act: str, terms: int, keep_h: bool = True) -> GatedOutput:
    """h = act(gate) * up (M, f) quantised in the same pass, with copies of gate and up for backward; without ``keep_h``, D(h~) is
    not written; see :func:`fused_reference.silu_mul_quantize`."""
    out, k = _silu_mul_quantize(gate, up, offset, act, terms, keep_h), gate.shape[1]
    return GatedOutput(matrices(*out[:3], k), out[3], QuantizedMatrix(*out[4:7], k), QuantizedMatrix(*out[7:10], k))


def _check_silu_mul_backward(dh, gc, gs, gg, uc, us, ug, act: str) -> None:
    op = "silu_mul_backward"
    _check_gated(op, "dh", dh, None, act)
    check_matrices(f"{op} (gate)", [gc], [gs], [gg], *dh.shape, per_row=True)
    check_matrices(f"{op} (up)", [uc], [us], [ug], *dh.shape, per_row=True)


def _silu_mul_backward_reference(dh, gc, gs, gg, uc, us, ug, act: str):
    k = dh.shape[1]
    return tuple(fused_reference.silu_mul_backward(dh, QuantizedMatrix(gc, gs, gg, k), QuantizedMatrix(uc, us, ug, k), act))


_silu_mul_backward = Operator(
    "silu_mul_backward",
    "(Tensor dh, Tensor gate_codes, Tensor gate_scales, Tensor gate_gscale, Tensor up_codes, Tensor up_scales, "
    "Tensor up_gscale, str act) -> (Tensor, Tensor)",
    _check_silu_mul_backward,
    _silu_mul_backward_reference,
    lambda dh, *rest: (dh.new_empty(dh.shape), dh.new_empty(dh.shape)),
)


def silu_mul_backward(dh: Tensor, gate: QuantizedMatrix, up: QuantizedMatrix, act: str) -> GatedGrads:
    """Gradients of gate and up (M, f) from their NVFP4 copies; see :func:`fused_reference.silu_mul_backward`."""
    return GatedGrads(*_silu_mul_backward(dh, *gate[:3], *up[:3], act))


def _check_gated_values(gc, gs, gg, uc, us, ug, offset, act: str, terms: int, k: int, dtype: torch.dtype) -> None:
    op = "gated_values"
    check(dtype in FLOATS, lambda: f"{op}: dtype must be float32, bfloat16 or float16, got {dtype}")
    check(act in ACTIVATIONS, lambda: f"{op}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")
    check_matrices(f"{op} (gate)", [gc], [gs], [gg], gc.shape[0], k, per_row=True)
    check_matrices(f"{op} (up)", [uc], [us], [ug], gc.shape[0], k, per_row=True)
    check_offset(op, offset, k)
    check_terms(op, terms)


def _gated_values_reference(gc, gs, gg, uc, us, ug, offset, act: str, terms: int, k: int, dtype: torch.dtype):
    gate, up = QuantizedMatrix(gc, gs, gg, k), QuantizedMatrix(uc, us, ug, k)
    return fused_reference.gated_values(gate, up, offset, act, terms, dtype)


_gated_values = Operator(
    "gated_values",
    "(Tensor gate_codes, Tensor gate_scales, Tensor gate_gscale, Tensor up_codes, Tensor up_scales, Tensor up_gscale, "
    "Tensor? offset, str act, int terms, int k, ScalarType dtype) -> Tensor",
    _check_gated_values,
    _gated_values_reference,
    lambda gc, gs, gg, uc, us, ug, offset, act, terms, k, dtype: gc.new_empty(gc.shape[0], k, dtype=dtype),
)


def gated_values(
    gate: QuantizedMatrix, up: QuantizedMatrix, offset: Tensor | None, act: str, terms: int, dtype: torch.dtype
) -> Tensor:
    """D(h~) (M, f) from the NVFP4 copies of gate and up; see :func:`fused_reference.gated_values`."""
    return _gated_values(*gate[:3], *up[:3], offset, act, terms, gate.k, dtype)


# ---------------------------------------------------------------------------------------------- dropout


def _check_dropout(x: Tensor, p: float, seed: Tensor) -> None:
    check(x.dtype in FLOATS, lambda: f"dropout: x must be float32, bfloat16 or float16, got {x.dtype}")
    check(0.0 <= p < 1.0, lambda: f"dropout: p must be in [0, 1), got {p}")
    check_seed("dropout", seed)


dropout = Operator(
    "dropout",
    "(Tensor x, float p, Tensor seed) -> Tensor",
    _check_dropout,
    lambda x, p, seed: fused_reference.dropout(x, p, seed).contiguous(),
    lambda x, p, seed: torch.empty_like(x, memory_format=torch.contiguous_format),
)


# ---------------------------------------------------------------------------------------------- rotary embedding


def _check_rotary_embedding(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> None:
    op = "rotary_embedding"
    check(q.ndim == 4, lambda: f"{op}: q must be (B, H, S, D), got shape {tuple(q.shape)}")
    check(q.dtype in FLOATS, lambda: f"{op}: q must be float32, bfloat16 or float16, got {q.dtype}")
    b, _, s, d = q.shape
    check(d % 2 == 0, lambda: f"{op}: D must be even, got {d}")
    check(
        k is None or (k.ndim == 4 and (k.shape[0], *k.shape[2:], k.dtype) == (b, s, d, q.dtype)),
        lambda: f"{op}: k must be {(b, 'H', s, d)} {q.dtype}, got {tuple(k.shape)} {k.dtype}",
    )
    for name, t in (("cos", cos), ("sin", sin)):
        check(
            t.ndim == 3 and t.shape[0] in (1, b) and tuple(t.shape[1:]) == (s, d) and t.dtype == q.dtype,
            lambda: f"{op}: {name} must be (1 or {b}, {s}, {d}) {q.dtype}, got {tuple(t.shape)} {t.dtype}",
        )


def _rotary_embedding_reference(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool):
    q, k = fused_reference.rotary_embedding(q, k, cos, sin, backward)
    return q, q.new_empty(0) if k is None else k


def _rotary_embedding_shapes(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool):
    output = fused_reference.rotary_output
    return output(q, backward), q.new_empty(0) if k is None else output(k, backward)


_rotary_embedding = Operator(
    "rotary_embedding",
    "(Tensor q, Tensor? k, Tensor cos, Tensor sin, bool backward) -> (Tensor, Tensor)",
    _check_rotary_embedding,
    _rotary_embedding_reference,
    _rotary_embedding_shapes,
)


def rotary_embedding(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor | None]:
    """Rotary embedding of q and k (B, H, S, D), or the gradients of its inputs; see :func:`fused_reference.rotary_embedding`."""
    q, out = _rotary_embedding(q, k, cos, sin, backward)
    return q, None if k is None else out
