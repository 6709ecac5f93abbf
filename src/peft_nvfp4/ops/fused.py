"""Operators of the fused producers: schema, checks and shapes of each, over :mod:`peft_nvfp4.numerics.fused_reference`.

Every one takes and returns what the function of the reference does that has its name. In the schema the one or two NVFP4 *terms*
of a matrix are tensors with a leading term axis (T, M, ...), and what was not asked for is an empty tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import fused_reference
from ..numerics.formats import QuantizedMatrix
from ..numerics.fused_reference import ACTIVATIONS, GatedGrads, GatedOutput, NormOutput
from .core import FLOATS, Operator, check, check_float, check_matrix, check_offset, check_seed, check_shape, check_terms
from .linear import check_matrices, empty_terms, matrices, stacked, tensor_lists


def _check_norm(op: str, name: str, x: Tensor, gamma: Tensor, offset: Tensor | None) -> None:
    check_matrix(op, name, x)
    check_shape(op, "gamma", gamma, (x.shape[1],), *FLOATS)
    check_offset(op, offset, x.shape[1])


def _check_rmsnorm_quantize(x: Tensor, gamma: Tensor, offset: Tensor | None, eps: float, plus_one: bool, terms: int) -> None:
    _check_norm("rmsnorm_quantize", "x", x, gamma, offset)
    check_terms("rmsnorm_quantize", terms)


rmsnorm_quantize = Operator(
    "rmsnorm_quantize",
    "(Tensor x, Tensor gamma, Tensor? offset, float eps, bool plus_one, int terms) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _check_rmsnorm_quantize,
    fused_reference.rmsnorm_quantize,
    lambda x, gamma, offset, eps, plus_one, terms: (
        *empty_terms(x, terms, *x.shape),
        x.new_empty(x.shape),
        x.new_empty(x.shape[0], dtype=torch.float32),
    ),
    flat_result=lambda out: (*stacked(out.parts), out.y, out.rstd),
    result=lambda args, flat: NormOutput(matrices(*flat[:3], args[0].shape[1]), *flat[3:]),
)


def _check_rmsnorm_backward(
    dy: Tensor, parts: Sequence[QuantizedMatrix], offset: Tensor | None, gamma: Tensor, rstd: Tensor, plus_one: bool
) -> None:
    op, m = "rmsnorm_backward", dy.shape[0]
    _check_norm(op, "dy", dy, gamma, offset)
    check_matrices(op, parts, (m, dy.shape[1]), per_row=True)
    check_shape(op, "rstd", rstd, (m,), torch.float32)


rmsnorm_backward = Operator(
    "rmsnorm_backward",
    "(Tensor dy, Tensor[] codes, Tensor[] scales, Tensor[] gscale, Tensor? offset, Tensor gamma, Tensor rstd, "
    "bool plus_one) -> Tensor",
    _check_rmsnorm_backward,
    fused_reference.rmsnorm_backward,
    lambda dy, *rest: dy.new_empty(dy.shape),
    lambda dy, parts, *rest: (dy, *tensor_lists(parts), *rest),
    lambda dy, codes, scales, gscale, *rest: (dy, matrices(codes, scales, gscale, dy.shape[1]), *rest),
)


def _check_act(op: str, act: str) -> None:
    check(act in ACTIVATIONS, lambda: f"{op}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")


def _check_gate_up(op: str, gate: QuantizedMatrix, up: QuantizedMatrix, shape: tuple[int, int]) -> None:
    for name, q in (("gate", gate), ("up", up)):
        check_matrices(f"{op} ({name})", [q], shape, per_row=True)


def _check_silu_mul_quantize(gate: Tensor, up: Tensor, offset: Tensor | None, act: str, terms: int, keep_h: bool) -> None:
    op = "silu_mul_quantize"
    check_matrix(op, "gate", gate)
    check_shape(op, "up", up, tuple(gate.shape), gate.dtype)
    check_offset(op, offset, gate.shape[1])
    _check_act(op, act)
    check_terms(op, terms)


def _silu_mul_quantize_shapes(gate: Tensor, up: Tensor, offset: Tensor | None, act: str, terms: int, keep_h: bool):
    kept = [t.new_empty(t.shape[1:]) for _ in range(2) for t in empty_terms(gate, 1, *gate.shape)]
    return *empty_terms(gate, terms, *gate.shape), gate.new_empty(gate.shape if keep_h else (0,)), *kept


silu_mul_quantize = Operator(
    "silu_mul_quantize",
    "(Tensor gate, Tensor up, Tensor? offset, str act, int terms, bool keep_h) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _check_silu_mul_quantize,
    fused_reference.silu_mul_quantize,
    _silu_mul_quantize_shapes,
    flat_result=lambda out: (*stacked(out.parts), out.h, *out.gate[:3], *out.up[:3]),
    result=lambda args, flat: GatedOutput(matrices(*flat[:3], args[0].shape[1]), flat[3], *_gate_up(flat[4:], args[0].shape[1])),
)


def _check_silu_mul_backward(dh: Tensor, gate: QuantizedMatrix, up: QuantizedMatrix, act: str) -> None:
    check_matrix("silu_mul_backward", "dh", dh)
    _check_act("silu_mul_backward", act)
    _check_gate_up("silu_mul_backward", gate, up, tuple(dh.shape))


GATE_UP = "Tensor gate_codes, Tensor gate_scales, Tensor gate_gscale, Tensor up_codes, Tensor up_scales, Tensor up_gscale"


def _gate_up(flat: tuple[Tensor, ...], k: int) -> tuple[QuantizedMatrix, QuantizedMatrix]:
    return QuantizedMatrix(*flat[:3], k), QuantizedMatrix(*flat[3:6], k)


silu_mul_backward = Operator(
    "silu_mul_backward",
    f"(Tensor dh, {GATE_UP}, str act) -> (Tensor, Tensor)",
    _check_silu_mul_backward,
    fused_reference.silu_mul_backward,
    lambda dh, *rest: (dh.new_empty(dh.shape), dh.new_empty(dh.shape)),
    lambda dh, gate, up, act: (dh, *gate[:3], *up[:3], act),
    lambda dh, *flat: (dh, *_gate_up(flat, dh.shape[1]), flat[6]),
    flat_result=tuple,
    result=lambda args, flat: GatedGrads(*flat),
)


def _check_gated_values(
    gate: QuantizedMatrix, up: QuantizedMatrix, offset: Tensor | None, act: str, terms: int, dtype: torch.dtype
) -> None:
    check_float("gated_values", dtype)
    _check_act("gated_values", act)
    _check_gate_up("gated_values", gate, up, (gate.codes.shape[0], gate.k))
    check_offset("gated_values", offset, gate.k)
    check_terms("gated_values", terms)


gated_values = Operator(
    "gated_values",
    f"({GATE_UP}, Tensor? offset, str act, int terms, int k, ScalarType dtype) -> Tensor",
    _check_gated_values,
    fused_reference.gated_values,
    lambda gate, up, offset, act, terms, dtype: gate.codes.new_empty(gate.codes.shape[0], gate.k, dtype=dtype),
    lambda gate, up, offset, act, terms, dtype: (*gate[:3], *up[:3], offset, act, terms, gate.k, dtype),
    lambda *flat: (*_gate_up(flat, flat[9]), *flat[6:9], flat[10]),
)


def _check_dropout(x: Tensor, p: float, seed: Tensor) -> None:
    check_float("dropout", x.dtype, "x")
    check(0.0 <= p < 1.0, lambda: f"dropout: p must be in [0, 1), got {p}")
    check_seed("dropout", seed)


dropout = Operator(
    "dropout",
    "(Tensor x, float p, Tensor seed) -> Tensor",
    _check_dropout,
    lambda x, p, seed: fused_reference.dropout(x, p, seed).contiguous(),
    lambda x, p, seed: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def _check_rotary_embedding(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> None:
    op = "rotary_embedding"
    check(q.ndim == 4, lambda: f"{op}: q must be (B, H, S, D), got shape {tuple(q.shape)}")
    check_float(op, q.dtype, "q")
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


def _without_none(q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor]:
    return q, q.new_empty(0) if k is None else k


def _rotary_embedding_shapes(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    output = fused_reference.rotary_output
    return _without_none(output(q, backward), None if k is None else output(k, backward))


rotary_embedding = Operator(
    "rotary_embedding",
    "(Tensor q, Tensor? k, Tensor cos, Tensor sin, bool backward) -> (Tensor, Tensor)",
    _check_rotary_embedding,
    fused_reference.rotary_embedding,
    _rotary_embedding_shapes,
    flat_result=lambda out: _without_none(*out),
    result=lambda args, flat: (flat[0], None if args[1] is None else flat[1]),
)
