"""The package's operators: schema, argument checks, fake (shape) function and autograd of each, in one place.

Every operator lives in the ``torch.library`` namespace ``peft_nvfp4``; its default implementation is the plain-PyTorch
reference, so it works on every device. Kernels only *add* implementations for a device (:func:`register_kernel`); they never
bring semantics of their own.
All operators are functional (they neither change nor alias their inputs), which lets compilers share and reorder them.

Derivatives. None of these operators has a useful one: rounding is flat almost everywhere. Their backward therefore raises, and
the message names the differentiable way: the autograd Functions in :mod:`peft_nvfp4.autograd.frozen_linear`, which call the operators inside
and state their own gradients (:func:`~peft_nvfp4.autograd.frozen_linear.fake_quantize` a straight-through one). An operator without autograd
would instead return zero gradients with no more than a warning.

The public functions take and return :class:`~peft_nvfp4.numerics.formats.QuantizedMatrix`; the operators themselves speak tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..numerics import reference
from ..numerics.formats import BLOCK, SWIZZLE_COLS, SWIZZLE_ROWS, NVFP4Format, QuantizedMatrix, padded_k

_LIB = torch.library.Library("peft_nvfp4", "DEF")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


_DIRECT: dict[tuple[str, str], Callable] = {}
"""(operator, device type) -> implementation, for eager code: a call through the dispatcher costs tens of microseconds."""


def _define(name: str, schema: str, impl: Callable, fake: Callable) -> Callable:
    """Register one operator with its reference implementation, its fake and a backward that explains itself.

    Returns a function that calls the implementation straight where nothing would be lost by it (see :func:`_plain`) and the
    operator otherwise.
    """
    _LIB.define(f"{name}{schema}")
    torch.library.impl(f"peft_nvfp4::{name}", "default", impl)
    torch.library.register_fake(f"peft_nvfp4::{name}", fake)

    def backward(ctx, *grads):
        raise RuntimeError(
            f"peft_nvfp4::{name} has no derivative (rounding is flat). Differentiate through a layer "
            "(NVFP4FrozenLinear) or through peft_nvfp4.autograd.frozen_linear.fake_quantize, which is straight-through."
        )

    torch.library.register_autograd(f"peft_nvfp4::{name}", backward)
    op = getattr(torch.ops.peft_nvfp4, name)

    def call(first: Tensor | Sequence[Tensor], *rest):
        tensor = first if isinstance(first, Tensor) else first[0]
        if _plain(tensor):
            return _DIRECT.get((name, tensor.device.type), impl)(first, *rest)
        return op(first, *rest)

    call.op = op
    return call


def _plain(tensor: Tensor) -> bool:
    """Whether an implementation may be called directly: no compiler or fake tensor is watching, and autograd is off (with
    autograd on, the operator is needed so that a derivative is refused instead of being zero)."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling() and type(tensor) in (Tensor, torch.nn.Parameter)


def register_kernel(name: str, device_type: str, implementation: Callable) -> None:
    """Add a device's implementation of an operator: same arguments, same bits as the reference."""
    torch.library.impl(f"peft_nvfp4::{name}", device_type, implementation)
    _DIRECT[(name, device_type)] = implementation


def _check(condition: bool, message: Callable[[], str]) -> None:
    """``torch._check``, which takes microseconds, for a condition that does not hold or is symbolic."""
    if condition is not True:
        torch._check(condition, message)


def _is_packed(codes: Tensor, scales: Tensor, gscale: Tensor, kp: int) -> bool:
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or gscale.dtype != torch.float32:
        return False
    if codes.ndim != 2 or gscale.ndim != 1:
        return False
    rows = codes.shape[0]
    return codes.shape[1] * 2 == kp and scales.shape == (rows, kp // BLOCK) and gscale.shape[0] in (1, rows)


def _check_packed(op: str, codes: Tensor, scales: Tensor, gscale: Tensor, k: int) -> None:
    """Dtypes and shapes of one packed operand, with messages that name operator, argument, expected and got."""
    if _is_packed(codes, scales, gscale, padded_k(k)):
        return
    for name, t, dtype, ndim in (
        ("codes", codes, torch.uint8, 2),
        ("scales", scales, torch.uint8, 2),
        ("gscale", gscale, torch.float32, 1),
    ):
        _check(t.dtype == dtype, lambda: f"{op}: {name} must be {dtype}, got {t.dtype}")
        _check(t.ndim == ndim, lambda: f"{op}: {name} must have {ndim} dimension(s), got shape {tuple(t.shape)}")
    rows, kp = codes.shape[0], padded_k(k)
    _check(
        codes.shape[1] * 2 == kp,
        lambda: f"{op}: codes of a matrix with K={k} have {kp // 2} bytes a row, got {codes.shape[1]}",
    )
    _check(
        tuple(scales.shape) == (rows, kp // BLOCK),
        lambda: f"{op}: scales must be {(rows, kp // BLOCK)}, got {tuple(scales.shape)}",
    )
    _check(gscale.shape[0] in (1, rows), lambda: f"{op}: gscale must hold 1 or {rows} values, got {gscale.shape[0]}")


# ---------------------------------------------------------------------------------------------- quantize


def _quantize(x: Tensor, gscale: Tensor | None, seed: Tensor | None, rule: str, per_row: bool, stochastic: bool):
    _check_quantize(x, gscale, seed, rule, per_row, stochastic)
    fmt = NVFP4Format(rule, "row" if per_row else "tensor", stochastic)
    q = reference.quantize(x, fmt, gscale, seed)
    return q.codes, q.scales, q.gscale.clone() if gscale is not None else q.gscale  # an output may not alias an input


def _check_seed(op: str, seed: Tensor | None) -> None:
    if seed is not None:
        _check(seed.dtype == torch.int64, lambda: f"{op}: seed must be int64, got {seed.dtype}")
        _check(seed.ndim == 0, lambda: f"{op}: seed must be a scalar tensor, got shape {tuple(seed.shape)}")


def _check_quantize(x: Tensor, gscale: Tensor | None, seed: Tensor | None, rule: str, per_row: bool, stochastic: bool) -> None:
    _check(x.ndim == 2, lambda: f"quantize: x must be a matrix (R, K), got shape {tuple(x.shape)}")
    _check(x.dtype in FLOATS, lambda: f"quantize: x must be float32, bfloat16 or float16, got {x.dtype}")
    _check(not stochastic or seed is not None, lambda: "quantize: stochastic rounding needs a seed (an int64 scalar tensor)")
    _check_seed("quantize", seed)
    if gscale is not None:
        _check(gscale.dtype == torch.float32, lambda: f"quantize: gscale must be float32, got {gscale.dtype}")
        _check(
            gscale.ndim == 1 and gscale.shape[0] in (1, x.shape[0]),
            lambda: f"quantize: gscale must be (1,) or ({x.shape[0]},), got {tuple(gscale.shape)}",
        )


def _fake_quantize_shapes(x: Tensor, gscale: Tensor | None, seed: Tensor | None, rule: str, per_row: bool, stochastic: bool):
    _check_quantize(x, gscale, seed, rule, per_row, stochastic)
    rows, kp = x.shape[0], padded_k(x.shape[1])
    n = gscale.shape[0] if gscale is not None else (rows if per_row else 1)
    byte = torch.uint8
    return x.new_empty(rows, kp // 2, dtype=byte), x.new_empty(rows, kp // BLOCK, dtype=byte), x.new_empty(n, dtype=torch.float32)


_quantize_op = _define(
    "quantize",
    "(Tensor x, Tensor? gscale, Tensor? seed, str rule, bool per_row, bool stochastic) -> (Tensor, Tensor, Tensor)",
    _quantize,
    _fake_quantize_shapes,
)


def quantize(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None = None, seed: Tensor | None = None) -> QuantizedMatrix:
    """Quantise x (R, K) along K to NVFP4; see :func:`peft_nvfp4.numerics.reference.quantize`.

    Raises:
        RuntimeError: x is no matrix or not of a floating dtype; gscale has a wrong shape; a stochastic format without seed.
    """
    return QuantizedMatrix(*_quantize_op(x, gscale, seed, fmt.rule, fmt.global_scale == "row", fmt.stochastic), x.shape[1])


CHUNK = 1 << 22
"""Elements quantised at a time by :func:`quantize_weight`: the FP32 temporaries of a chunk take some 100 MB."""
CHUNK_CPU = 1 << 18
"""The same on a CPU, where temporaries that fit into its caches take two thirds of the time, and 10 MB."""


def _amax(w: Tensor) -> Tensor:
    """(1,) FP32: the largest magnitude of a finite weight, without a copy of it."""
    low, high = w.detach().aminmax() if w.numel() else (w.new_zeros(()), w.new_zeros(()))
    return torch.maximum(-low, high).float().reshape(1)


def weight_gscale(w: Tensor) -> Tensor:
    """(1,) FP32: the global scale that a finite weight needs."""
    return reference.power_of_two_scale(_amax(w))


def shared_gscale(weights: Sequence[Tensor]) -> Tensor:
    """The global scale (1,) that fits all of some weights, on the first one's device: linears that read one input share it. (Not
    the largest of their scales: that of a weight of zeros is 1.)"""
    return reference.power_of_two_scale(torch.stack([_amax(w).to(weights[0].device) for w in weights]).amax(0))


def quantize_weight(w: Tensor, fmt: NVFP4Format, gscale: Tensor | None = None) -> QuantizedMatrix:
    """``quantize`` for large finite matrices with one global scale: same bits, by chunks of rows, so that the temporaries stay
    small."""
    gscale = weight_gscale(w) if gscale is None else gscale
    step = max(1, (CHUNK_CPU if w.device.type == "cpu" else CHUNK) // max(1, w.shape[1]))
    parts = [quantize(w[i : i + step], fmt, gscale) for i in range(0, max(1, w.shape[0]), step)]
    if len(parts) == 1:
        return parts[0]
    return QuantizedMatrix(torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), gscale, w.shape[1])


# ---------------------------------------------------------------------------------------------- dequantize


def _check_dequantize(codes: Tensor, scales: Tensor, gscale: Tensor, k: int, dtype: torch.dtype) -> None:
    _check_packed("dequantize", codes, scales, gscale, k)
    _check(dtype.is_floating_point, lambda: f"dequantize: dtype must be a floating one, got {dtype}")


def _dequantize(codes: Tensor, scales: Tensor, gscale: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    _check_dequantize(codes, scales, gscale, k, dtype)
    return reference.dequantize(QuantizedMatrix(codes, scales, gscale, k), dtype).contiguous()


def _dequantize_fake(codes: Tensor, scales: Tensor, gscale: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    _check_dequantize(codes, scales, gscale, k, dtype)
    return codes.new_empty(codes.shape[0], k, dtype=dtype)


_dequantize_op = _define(
    "dequantize", "(Tensor codes, Tensor scales, Tensor gscale, int k, ScalarType dtype) -> Tensor", _dequantize, _dequantize_fake
)


def dequantize(q: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values (R, K) of a quantised matrix; exact in FP32 and BF16."""
    return _dequantize_op(*q, dtype)


# ---------------------------------------------------------------------------------------------- transpose_requantize


def _transpose_requantize(codes: Tensor, scales: Tensor, gscale: Tensor, k: int, rule: str, significand: float = 1.0):
    _check_packed("transpose_requantize", codes, scales, gscale, k)
    return reference.transpose_requantize(QuantizedMatrix(codes, scales, gscale, k), NVFP4Format(rule))[:3]


def _transpose_requantize_fake(codes: Tensor, scales: Tensor, gscale: Tensor, k: int, rule: str, significand: float = 1.0):
    _check_packed("transpose_requantize", codes, scales, gscale, k)
    np_ = padded_k(codes.shape[0])
    return codes.new_empty(k, np_ // 2), codes.new_empty(k, np_ // BLOCK), gscale.new_empty(1)


_transpose_requantize_op = _define(
    "transpose_requantize",
    "(Tensor codes, Tensor scales, Tensor gscale, int k, str rule, float significand=1.) -> (Tensor, Tensor, Tensor)",
    _transpose_requantize,
    _transpose_requantize_fake,
)


def transpose_requantize(q: QuantizedMatrix, fmt: NVFP4Format, significand: float = 1.0) -> QuantizedMatrix:
    """Backward layout (K, N) of a forward weight (N, K): D(q) transposed, quantised along N with one global scale, which is a
    power of two whatever q's is.

    Args:
        significand: of q's global scale. Kernels quantise BF16 values where it is 1, and FP32 values where D(q) needs them.

    Raises:
        ValueError: a format with row scales or stochastic rounding (a weight has neither).
    """
    if fmt.stochastic or fmt.global_scale != "tensor":
        raise ValueError(f"transpose_requantize: a weight has one global scale and is rounded to nearest, got {fmt}")
    return QuantizedMatrix(*_transpose_requantize_op(*q, fmt.rule, significand), q.codes.shape[0])


# ---------------------------------------------------------------------------------------------- matmul


def _check_matmul(
    x_codes: Sequence[Tensor], x_scales, x_gscale, w_codes, w_scales, w_gscale, bias, values, k, dtype, factor=1.0
) -> None:
    _check(len(x_codes) in (1, 2), lambda: f"matmul: an input has one or two terms, got {len(x_codes)}")
    for c, s, g in zip(x_codes, x_scales, x_gscale):
        _check_packed("matmul (input)", c, s, g, k)
    _check_packed("matmul (weight)", w_codes, w_scales, w_gscale, k)
    _check(dtype in FLOATS, lambda: f"matmul: dtype must be float32, bfloat16 or float16, got {dtype}")
    _check(
        bias is None or tuple(bias.shape) == (w_codes.shape[0],),
        lambda: f"matmul: bias must be ({w_codes.shape[0]},), got {tuple(bias.shape)}",
    )
    m = x_codes[0].shape[0]
    for c in x_codes:
        _check(c.shape[0] == m, lambda: f"matmul: both terms of an input have the same rows, got {m} and {c.shape[0]}")
    _check(
        values is None or tuple(values.shape) == (m, k),
        lambda: f"matmul: values must be {(m, k)}, got {tuple(values.shape)}",
    )


def _matmul(
    x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, bias, values, k: int, dtype: torch.dtype, factor: float = 1.0
) -> Tensor:
    _check_matmul(x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, bias, values, k, dtype)
    terms = [QuantizedMatrix(c, s, g, k) for c, s, g in zip(x_codes, x_scales, x_gscale)]
    return reference.matmul(terms, QuantizedMatrix(w_codes, w_scales, w_gscale, k), bias, dtype, values, factor)


def _matmul_fake(
    x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, bias, values, k: int, dtype: torch.dtype, factor: float = 1.0
) -> Tensor:
    _check_matmul(x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, bias, values, k, dtype)
    return w_codes.new_empty(x_codes[0].shape[0], w_codes.shape[0], dtype=dtype)


_matmul_op = _define(
    "matmul",
    "(Tensor[] x_codes, Tensor[] x_scales, Tensor[] x_gscale, Tensor w_codes, Tensor w_scales, Tensor w_gscale, "
    "Tensor? bias, Tensor? values, int k, ScalarType dtype, float factor=1.) -> Tensor",
    _matmul,
    _matmul_fake,
)


def matmul(
    terms: Sequence[QuantizedMatrix],
    w: QuantizedMatrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    values: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """``sum_t D(x_t) @ D(w).T + bias``: x_t (M, K), w (N, K) -> (M, N) in ``dtype``, accumulated in FP32.

    Args:
        values: (M, K), the sum of the dequantised terms in ``dtype``, unrounded, if the caller has it: an emulating
            implementation then need not dequantise again; an FP4 kernel ignores it.
        factor: significand of w's global scale (:func:`peft_nvfp4.numerics.reference.significand`): an emulating implementation keeps it
            out of the BF16 operand and multiplies the FP32 sum. Left out for a scale that is no power of two, a GPU computes
            with D(w) rounded to BF16 or, for few rows, with cut-off block scales.
    """
    if not 1 <= len(terms) <= 2:
        raise RuntimeError(f"matmul: an input has one or two terms, got {len(terms)}")
    for t in terms:
        if t.k != w.k:
            raise RuntimeError(f"matmul: the input has K={t.k}, the weight K={w.k}")
    codes, scales, gscale = [t.codes for t in terms], [t.scales for t in terms], [t.gscale for t in terms]
    return _matmul_op(codes, scales, gscale, w.codes, w.scales, w.gscale, bias, values, w.k, dtype, factor)


# ---------------------------------------------------------------------------------------------- layouts


def _checked(check: Callable, body: Callable) -> Callable:
    """body preceded by its argument check, for implementation and fake alike."""

    def run(*args):
        check(*args)
        return body(*args)

    return run


def _check_swizzle(scales: Tensor) -> None:
    _check(scales.dtype == torch.uint8, lambda: f"swizzle_scales: scales must be uint8, got {scales.dtype}")
    _check(scales.ndim == 2, lambda: f"swizzle_scales: scales must have 2 dimension(s), got shape {tuple(scales.shape)}")


def _swizzled_size(rows: int, cols: int) -> int:
    return -(-rows // SWIZZLE_ROWS) * SWIZZLE_ROWS * (-(-cols // SWIZZLE_COLS) * SWIZZLE_COLS)


swizzle_scales = _define(
    "swizzle_scales",
    "(Tensor scales) -> Tensor",
    _checked(_check_swizzle, reference.swizzle_scales),
    _checked(_check_swizzle, lambda s: s.new_empty(_swizzled_size(*s.shape))),
)
