"""Operators of the fused producers: schema, checks and fake of each in one place, over :mod:`peft_nvfp4.numerics.fused_reference`.

Like :mod:`peft_nvfp4.ops` these live in the ``torch.library`` namespace ``peft_nvfp4``, have the plain-PyTorch reference as their
default implementation and refuse to be differentiated. The one or two NVFP4 *terms* of a matrix travel as tensors with a leading
term axis (T, M, ...), since an operator returns a fixed number of tensors; what was not asked for is an empty tensor.

The public functions take and return what those of the reference do, in the same order, with views of these tensors as
:class:`~peft_nvfp4.numerics.formats.QuantizedMatrix`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..numerics import fused_reference
from ..numerics.formats import BLOCK, QuantizedMatrix, padded_k
from ..numerics.fused_reference import ACTIVATIONS, GatedGrads, GatedOutput, NormOutput
from . import FLOATS, _check, _check_packed, _check_seed, _checked, _define

OPERATORS: dict[str, tuple[Callable, Callable]] = {}
"""name -> (argument check, reference implementation with that check)."""


def _operator(name: str, schema: str, check: Callable, reference: Callable, fake: Callable) -> Callable:
    implementation = _checked(check, reference)
    OPERATORS[name] = (check, implementation)
    return _define(name, schema, implementation, _checked(check, fake))


# ---------------------------------------------------------------------------------------------- shared pieces


def _check_matrix(op: str, name: str, t: Tensor) -> None:
    _check(t.ndim == 2, lambda: f"{op}: {name} must be a matrix (M, K), got shape {tuple(t.shape)}")
    _check(t.dtype in FLOATS, lambda: f"{op}: {name} must be float32, bfloat16 or float16, got {t.dtype}")


def _check_centre(op: str, centre: Tensor | None, k: int) -> None:
    _check(
        centre is None or (tuple(centre.shape) == (k,) and centre.dtype == torch.float32),
        lambda: f"{op}: centre must be ({k},) float32, got {tuple(centre.shape)} {centre.dtype}",
    )


def _check_terms(op: str, terms: int) -> None:
    _check(1 <= terms <= 2, lambda: f"{op}: the number of terms must be 1 or 2, got {terms}")


def _check_parts(op: str, codes: Sequence[Tensor], scales, gscale, rows: int, k: int, per_row: bool) -> None:
    _check(len(codes) in (1, 2), lambda: f"{op}: a matrix has one or two terms, got {len(codes)}")
    for c, s, g in zip(codes, scales, gscale):
        _check_packed(op, c, s, g, k)
        _check(c.shape[0] == rows, lambda: f"{op}: the terms must have {rows} rows, got {c.shape[0]}")
        _check(not per_row or g.shape[0] == rows, lambda: f"{op}: gscale must hold {rows} values, got {g.shape[0]}")


def empty_terms(like: Tensor, terms: int, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Storage of ``terms`` matrices: codes (T, R, Kp/2), scales (T, R, Kp/16), gscale (T, R)."""
    kp, byte = padded_k(k), torch.uint8
    return (
        like.new_empty(terms, rows, kp // 2, dtype=byte),
        like.new_empty(terms, rows, kp // BLOCK, dtype=byte),
        like.new_empty(terms, rows, dtype=torch.float32),
    )


def _stack(parts: Sequence[QuantizedMatrix]) -> tuple[Tensor, ...]:
    """(codes, scales, gscale) of the terms of a matrix, each with a leading term axis."""
    return tuple(torch.stack(tensors) for tensors in list(zip(*parts))[:3])


def _parts(codes: Sequence[Tensor], scales: Sequence[Tensor], gscale: Sequence[Tensor], k: int) -> list[QuantizedMatrix]:
    """Inverse of :func:`_stack` and :func:`_split`."""
    return [QuantizedMatrix(c, s, g, k) for c, s, g in zip(codes, scales, gscale)]


def _split(parts: Sequence[QuantizedMatrix]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [p.codes for p in parts], [p.scales for p in parts], [p.gscale for p in parts]


# ---------------------------------------------------------------------------------------------- terms


def _check_quantize_terms(x: Tensor, centre: Tensor | None, terms: int) -> None:
    _check_matrix("quantize_terms", "x", x)
    _check_centre("quantize_terms", centre, x.shape[1])
    _check_terms("quantize_terms", terms)


_quantize_terms = _operator(
    "quantize_terms",
    "(Tensor x, Tensor? centre, int terms) -> (Tensor, Tensor, Tensor)",
    _check_quantize_terms,
    lambda x, centre, terms: _stack(fused_reference.quantize_terms(x, centre, terms)),
    lambda x, centre, terms: empty_terms(x, terms, *x.shape),
)


def quantize_terms(x: Tensor, centre: Tensor | None, terms: int) -> list[QuantizedMatrix]:
    """x (M, K) minus centre (K,) as one or two NVFP4 terms with a global scale per row."""
    return _parts(*_quantize_terms(x, centre, terms), x.shape[1])


def _check_dequantize_terms(codes: Sequence[Tensor], scales, gscale, centre: Tensor | None, k: int, dtype: torch.dtype) -> None:
    _check_parts("dequantize_terms", codes, scales, gscale, codes[0].shape[0] if codes else 0, k, per_row=False)
    _check_centre("dequantize_terms", centre, k)
    _check(dtype in FLOATS, lambda: f"dequantize_terms: dtype must be float32, bfloat16 or float16, got {dtype}")


_dequantize_terms = _operator(
    "dequantize_terms",
    "(Tensor[] codes, Tensor[] scales, Tensor[] gscale, Tensor? centre, int k, ScalarType dtype) -> Tensor",
    _check_dequantize_terms,
    lambda codes, scales, gscale, centre, k, dtype: fused_reference.dequantize_terms(
        _parts(codes, scales, gscale, k), centre, dtype
    ).contiguous(),
    lambda codes, scales, gscale, centre, k, dtype: codes[0].new_empty(codes[0].shape[0], k, dtype=dtype),
)


def dequantize_terms(parts: Sequence[QuantizedMatrix], centre: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum of the terms and the centre, in FP32, rounded once to ``dtype``: (M, K)."""
    return _dequantize_terms(*_split(parts), centre, parts[0].k, dtype)


# ---------------------------------------------------------------------------------------------- RMSNorm


def _check_norm(op: str, name: str, x: Tensor, gamma: Tensor, centre: Tensor | None) -> None:
    _check_matrix(op, name, x)
    _check(
        tuple(gamma.shape) == (x.shape[1],) and gamma.dtype in FLOATS,
        lambda: f"{op}: gamma must be ({x.shape[1]},) of a floating dtype, got {tuple(gamma.shape)} {gamma.dtype}",
    )
    _check_centre(op, centre, x.shape[1])


def _check_rmsnorm_quantize(x, gamma, centre, eps: float, plus_one: bool, terms: int) -> None:
    _check_norm("rmsnorm_quantize", "x", x, gamma, centre)
    _check_terms("rmsnorm_quantize", terms)


def _rmsnorm_quantize_reference(x, gamma, centre, eps: float, plus_one: bool, terms: int):
    out = fused_reference.rmsnorm_quantize(x, gamma, centre, eps, plus_one, terms)
    return *_stack(out.parts), out.y, out.rstd


def _rmsnorm_quantize_fake(x, gamma, centre, eps: float, plus_one: bool, terms: int):
    return *empty_terms(x, terms, *x.shape), x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


_rmsnorm_quantize = _operator(
    "rmsnorm_quantize",
    "(Tensor x, Tensor gamma, Tensor? centre, float eps, bool plus_one, int terms) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _check_rmsnorm_quantize,
    _rmsnorm_quantize_reference,
    _rmsnorm_quantize_fake,
)


def rmsnorm_quantize(x: Tensor, gamma: Tensor, centre: Tensor | None, eps: float, plus_one: bool, terms: int) -> NormOutput:
    """RMSNorm of x (M, d), quantised in the same pass; see :func:`fused_reference.rmsnorm_quantize`."""
    *parts, y, rstd = _rmsnorm_quantize(x, gamma, centre, eps, plus_one, terms)
    return NormOutput(_parts(*parts, x.shape[1]), y, rstd)


def _check_rmsnorm_backward(dy, codes, scales, gscale, centre, gamma, rstd, plus_one: bool) -> None:
    op, m = "rmsnorm_backward", dy.shape[0]
    _check_norm(op, "dy", dy, gamma, centre)
    _check_parts(op, codes, scales, gscale, m, dy.shape[1], per_row=True)
    _check(
        tuple(rstd.shape) == (m,) and rstd.dtype == torch.float32,
        lambda: f"{op}: rstd must be ({m},) float32, got {tuple(rstd.shape)} {rstd.dtype}",
    )


_rmsnorm_backward = _operator(
    "rmsnorm_backward",
    "(Tensor dy, Tensor[] codes, Tensor[] scales, Tensor[] gscale, Tensor? centre, Tensor gamma, Tensor rstd, "
    "bool plus_one) -> Tensor",
    _check_rmsnorm_backward,
    lambda dy, codes, scales, gscale, *rest: fused_reference.rmsnorm_backward(
        dy, _parts(codes, scales, gscale, dy.shape[1]), *rest
    ),
    lambda dy, *rest: dy.new_empty(dy.shape),
)


def rmsnorm_backward(
    dy: Tensor,
    parts: Sequence[QuantizedMatrix],
    centre: Tensor | None,
    gamma: Tensor,
    rstd: Tensor,
    plus_one: bool,
) -> Tensor:
    """dx (M, d) from the kept terms of y and the statistic; see :func:`fused_reference.rmsnorm_backward`."""
    return _rmsnorm_backward(dy, *_split(parts), centre, gamma, rstd, plus_one)


# ---------------------------------------------------------------------------------------------- act(gate) * up


def _check_gated(op: str, name: str, x: Tensor, centre: Tensor | None, act: str) -> None:
    _check_matrix(op, name, x)
    _check_centre(op, centre, x.shape[1])
    _check(act in ACTIVATIONS, lambda: f"{op}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")


def _check_silu_mul_quantize(gate: Tensor, up: Tensor, centre: Tensor | None, act: str, terms: int, keep_h: bool) -> None:
    _check_gated("silu_mul_quantize", "gate", gate, centre, act)
    _check(
        up.shape == gate.shape and up.dtype == gate.dtype,
        lambda: f"silu_mul_quantize: up must be {tuple(gate.shape)} {gate.dtype}, got {tuple(up.shape)} {up.dtype}",
    )
    _check_terms("silu_mul_quantize", terms)


def _silu_mul_quantize_reference(gate: Tensor, up: Tensor, centre: Tensor | None, act: str, terms: int, keep_h: bool):
    out = fused_reference.silu_mul_quantize(gate, up, centre, act, terms, keep_h)
    return *_stack(out.parts), out.h, *out.gate[:3], *out.up[:3]


def _silu_mul_quantize_fake(gate: Tensor, up: Tensor, centre: Tensor | None, act: str, terms: int, keep_h: bool):
    kept = [t.new_empty(t.shape[1:]) for _ in range(2) for t in empty_terms(gate, 1, *gate.shape)]
    return *empty_terms(gate, terms, *gate.shape), gate.new_empty(gate.shape if keep_h else (0,)), *kept


_silu_mul_quantize = _operator(
    "silu_mul_quantize",
    "(Tensor gate, Tensor up, Tensor? centre, str act, int terms, bool keep_h) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _check_silu_mul_quantize,
    _silu_mul_quantize_reference,
    _silu_mul_quantize_fake,
)


def silu_mul_quantize(gate: Tensor, up: Tensor, centre: Tensor | None, act: str, terms: int, keep_h: bool = True) -> GatedOutput:
    """h = act(gate) * up (M, f) quantised in the same pass, with copies of gate and up for backward; without ``keep_h``, D(h~) is
    not written; see :func:`fused_reference.silu_mul_quantize`."""
    out, k = _silu_mul_quantize(gate, up, centre, act, terms, keep_h), gate.shape[1]
    return GatedOutput(_parts(*out[:3], k), out[3], QuantizedMatrix(*out[4:7], k), QuantizedMatrix(*out[7:10], k))


def _check_silu_mul_backward(dh, gc, gs, gg, uc, us, ug, act: str) -> None:
    op = "silu_mul_backward"
    _check_gated(op, "dh", dh, None, act)
    _check_parts(f"{op} (gate)", [gc], [gs], [gg], *dh.shape, per_row=True)
    _check_parts(f"{op} (up)", [uc], [us], [ug], *dh.shape, per_row=True)


def _silu_mul_backward_reference(dh, gc, gs, gg, uc, us, ug, act: str):
    k = dh.shape[1]
    return tuple(fused_reference.silu_mul_backward(dh, QuantizedMatrix(gc, gs, gg, k), QuantizedMatrix(uc, us, ug, k), act))


_silu_mul_backward = _operator(
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


def _check_gated_values(gc, gs, gg, uc, us, ug, centre, act: str, terms: int, k: int, dtype: torch.dtype) -> None:
    op = "gated_values"
    _check(dtype in FLOATS, lambda: f"{op}: dtype must be float32, bfloat16 or float16, got {dtype}")
    _check(act in ACTIVATIONS, lambda: f"{op}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")
    _check_parts(f"{op} (gate)", [gc], [gs], [gg], gc.shape[0], k, per_row=True)
    _check_parts(f"{op} (up)", [uc], [us], [ug], gc.shape[0], k, per_row=True)
    _check_centre(op, centre, k)
    _check_terms(op, terms)


def _gated_values_reference(gc, gs, gg, uc, us, ug, centre, act: str, terms: int, k: int, dtype: torch.dtype):
    gate, up = QuantizedMatrix(gc, gs, gg, k), QuantizedMatrix(uc, us, ug, k)
    return fused_reference.gated_values(gate, up, centre, act, terms, dtype)


_gated_values = _operator(
    "gated_values",
    "(Tensor gate_codes, Tensor gate_scales, Tensor gate_gscale, Tensor up_codes, Tensor up_scales, Tensor up_gscale, "
    "Tensor? centre, str act, int terms, int k, ScalarType dtype) -> Tensor",
    _check_gated_values,
    _gated_values_reference,
    lambda gc, gs, gg, uc, us, ug, centre, act, terms, k, dtype: gc.new_empty(gc.shape[0], k, dtype=dtype),
)


def gated_values(
    gate: QuantizedMatrix, up: QuantizedMatrix, centre: Tensor | None, act: str, terms: int, dtype: torch.dtype
) -> Tensor:
    """D(h~) (M, f) from the NVFP4 copies of gate and up; see :func:`fused_reference.gated_values`."""
    return _gated_values(*gate[:3], *up[:3], centre, act, terms, gate.k, dtype)


# ---------------------------------------------------------------------------------------------- dropout


def _check_dropout(x: Tensor, p: float, seed: Tensor) -> None:
    _check(x.dtype in FLOATS, lambda: f"dropout: x must be float32, bfloat16 or float16, got {x.dtype}")
    _check(0.0 <= p < 1.0, lambda: f"dropout: p must be in [0, 1), got {p}")
    _check_seed("dropout", seed)


dropout = _operator(
    "dropout",
    "(Tensor x, float p, Tensor seed) -> Tensor",
    _check_dropout,
    lambda x, p, seed: fused_reference.dropout(x, p, seed).contiguous(),
    lambda x, p, seed: torch.empty_like(x, memory_format=torch.contiguous_format),
)


# ---------------------------------------------------------------------------------------------- rotary embedding


def _check_rotary_embedding(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> None:
    op = "rotary_embedding"
    _check(q.ndim == 4, lambda: f"{op}: q must be (B, H, S, D), got shape {tuple(q.shape)}")
    _check(q.dtype in FLOATS, lambda: f"{op}: q must be float32, bfloat16 or float16, got {q.dtype}")
    b, _, s, d = q.shape
    _check(d % 2 == 0, lambda: f"{op}: D must be even, got {d}")
    _check(
        k is None or (k.ndim == 4 and (k.shape[0], *k.shape[2:], k.dtype) == (b, s, d, q.dtype)),
        lambda: f"{op}: k must be {(b, 'H', s, d)} {q.dtype}, got {tuple(k.shape)} {k.dtype}",
    )
    for name, t in (("cos", cos), ("sin", sin)):
        _check(
            t.ndim == 3 and t.shape[0] in (1, b) and tuple(t.shape[1:]) == (s, d) and t.dtype == q.dtype,
            lambda: f"{op}: {name} must be (1 or {b}, {s}, {d}) {q.dtype}, got {tuple(t.shape)} {t.dtype}",
        )


def _rotary_embedding_reference(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool):
    q, k = fused_reference.rotary_embedding(q, k, cos, sin, backward)
    return q, q.new_empty(0) if k is None else k


def _rotary_embedding_fake(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool):
    output = fused_reference.rotary_output
    return output(q, backward), q.new_empty(0) if k is None else output(k, backward)


_rotary_embedding = _operator(
    "rotary_embedding",
    "(Tensor q, Tensor? k, Tensor cos, Tensor sin, bool backward) -> (Tensor, Tensor)",
    _check_rotary_embedding,
    _rotary_embedding_reference,
    _rotary_embedding_fake,
)


def rotary_embedding(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor | None]:
    """Rotary embedding of q and k (B, H, S, D), or the gradients of its inputs; see :func:`fused_reference.rotary_embedding`."""
    q, out = _rotary_embedding(q, k, cos, sin, backward)
    return q, None if k is None else out
