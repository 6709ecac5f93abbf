"""The fused producers in plain PyTorch: what the kernels in :mod:`peft_nvfp4.kernels` must reproduce bit for bit.

A *producer* makes the input of frozen linears and quantises it on the way: an RMSNorm or the product ``act(gate) * up`` of a
gated MLP. Quantisation itself is :mod:`peft_nvfp4.numerics.reference`; this file adds what lies around it and settles, once, the
order of every floating-point operation:

* All arithmetic is FP32, each operation rounded on its own (no fused multiply-add). Results that leave in BF16 are rounded
  once, and what is quantised is the rounded value: the codes are those of the un-fused module followed by ``quantize``.
* A mean over a row is independent of the order of its terms (:func:`row_sum`): blocks of 16 are summed by halving in FP32,
  the block sums then as 64-bit integers on a scale set by the largest. That is exact addition, so threads may share the work
  as they like, and it is more accurate than any FP32 order.
* The square root and the divisions are IEEE-rounded (:func:`reciprocal` says why it clears a bit). The exponential is a
  polynomial of its own (:func:`sigmoid`): ``exp`` of a CPU, of CUDA and of Triton differ in the last bits, then codes would too.

Compared with transformers: the norms differ only by the last bits of the FP32 mean and root, so that about one y in 10^5 is the
other BF16 neighbour. ``act(gate) * up`` is rounded once here and twice there, which every fourth value shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .formats import ACTIVATION, BLOCK, QuantizedMatrix, padded_k
from .philox import dropout_mask
from .reference import dequantize_terms, fold_blocks, quantize_dequantize_terms, quantize_terms

GAMMA_RANGE = (2.0**-14, 2.0**64)
"""Outside this range of a norm's |weight|, the channel's share of the backward's correction term is dropped: D(y) / weight would
be noise."""

# ---------------------------------------------------------------------------------------------- order-free sums

FIXED_POINT_BITS = 46
"""Fraction bits below the leading bit of the largest block sum: 2**14 blocks (K up to 262,144) fit in 63 bits."""

_EXPONENT_RANGE = (48, 254)  # biased; below 2**-79 the resolution stays at 2**-125 so that both factors are normal numbers


def row_sum(values: Tensor) -> Tensor:
    """Sum of every row of (M, K) float32, the same for any order of adding. A row with Inf or NaN gives the larger of them."""
    rows, k = values.shape
    padded = values if k == padded_k(k) else F.pad(values, (0, padded_k(k) - k))
    partial = fold_blocks(padded.view(rows, padded_k(k) // BLOCK, BLOCK), torch.add)
    largest = (partial.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)  # magnitudes compare like their bits, NaN last
    finite = largest < 0x7F800000
    exponent = (largest >> 23).clamp(*_EXPONENT_RANGE)
    up = ((254 + FIXED_POINT_BITS - exponent) << 23).view(torch.float32)
    down = ((exponent - FIXED_POINT_BITS) << 23).view(torch.float32)
    fixed = (torch.where(finite, partial, 0.0) * up).to(torch.int64).sum(-1, keepdim=True)
    return torch.where(finite, fixed.float() * down, largest.view(torch.float32))[:, 0]


def reciprocal(d: Tensor, cleared: int = 1) -> Tensor:
    """1 / d, IEEE-rounded, of d with its last bits cleared. A kernel gets that from an approximate reciprocal (off by an ulp) and
    Newton steps, 7 instructions instead of 20: with one bit cleared two steps, correct for every mantissa except the one of 24
    ones; with three bits one step, correct for every mantissa. Both checked over all of them."""
    return (d.view(torch.int32) & -(1 << cleared)).view(torch.float32).reciprocal()


# ---------------------------------------------------------------------------------------------- RMSNorm


class NormOutput(NamedTuple):
    parts: list[QuantizedMatrix]  # one or two terms of y - offset, each (M, d)
    y: Tensor  # (M, d), D(y~) in x's dtype: the sum of the terms and the offset, rounded once
    rstd: Tensor  # (M,) float32


def norm_weight(gamma: Tensor, plus_one: bool) -> Tensor:
    """The factor per channel, FP32: gamma, or 1 + gamma (Gemma)."""
    return 1.0 + gamma.float() if plus_one else gamma.float()


def rmsnorm(x: Tensor, gamma: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """(y in x's dtype, rstd (M,)). Rounding as in transformers: Llama rounds x * rstd to x's dtype before multiplying by gamma,
    Gemma (``plus_one``) multiplies by 1 + gamma in FP32."""
    xf = x.float()
    variance = row_sum(xf * xf) * (1.0 / x.shape[1])
    rstd = reciprocal((variance + eps).double().sqrt().float())  # torch's FP32 root on a CPU is off by an ulp in 16 % of cases
    normed = xf * rstd[:, None]
    if not plus_one:
        normed = normed.to(x.dtype).float()
    return (norm_weight(gamma, plus_one) * normed).to(x.dtype), rstd


def rmsnorm_quantize(x: Tensor, gamma: Tensor, offset: Tensor | None, eps: float, plus_one: bool, terms: int) -> NormOutput:
    """RMSNorm of x, quantised: x (M, d), gamma (d,), offset (d,) float32."""
    y, rstd = rmsnorm(x, gamma, eps, plus_one)
    return NormOutput(*quantize_dequantize_terms(y, offset, terms, x.dtype), rstd)


def rmsnorm_backward(
    dy: Tensor, parts: Sequence[QuantizedMatrix], offset: Tensor | None, gamma: Tensor, rstd: Tensor, plus_one: bool
) -> Tensor:
    """Gradient of the norm's input from the codes of its output.

    With x^ = x * rstd and y = w * x^ (w the weight): dx = rstd * (w * dy - x^ * mean(w * dy * x^)). Only y is kept, as
    D = D(y~), so x^ = D / w, and w cancels in the mean: c = mean(dy * D), dx = rstd * (w * dy - (D / w) * c). The correction
    is about 1/sqrt(d) of dx, so the 4-bit error in it hardly matters.
    """
    w = norm_weight(gamma, plus_one)
    usable = (w.abs() >= GAMMA_RANGE[0]) & (w.abs() <= GAMMA_RANGE[1])
    inverse = torch.where(usable, reciprocal(w), 0.0)
    d = dequantize_terms(parts, offset, torch.float32)
    g = dy.float()
    c = row_sum(g * d) * (1.0 / dy.shape[1])
    return (rstd[:, None] * (w * g - (d * inverse) * c[:, None])).to(dy.dtype)


# ---------------------------------------------------------------------------------------------- act(gate) * up

EXP2_COEFFICIENTS = (0.00957588478922844, 0.05591270327568054, 0.24024459719657898, 0.6931231617927551)
"""2**f on [-1/2, 1/2] as 1 + f * (...), highest power first: minimax but for a shift of 4e-7, which makes up for the bits that
:func:`reciprocal` clears; relative error 3e-6 (BF16's is 4e-3)."""
EXP2_SPAN, EXP2_TOP = 64.0, 44.0
"""The exponent t of 2 is clamped to -20 .. 44, as v = (44 - t) / 64: a clamp to 0 .. 1 costs a GPU nothing."""
EXP2_SCALE, EXP2_START = 1.4426950408889634 / EXP2_SPAN, EXP2_TOP / EXP2_SPAN
EXP2_MAGIC = 12582912.0 + EXP2_TOP  # 1.5 * 2**23: adding it rounds to an integer, which then stands in the low bits

SIGMOID_CHUNK = 1 << 17
"""Elements at a time on a CPU, whose caches then hold the FP64 temporaries: half the time."""

GELU_C0 = 1.5957691216057308  # 2 * sqrt(2 / pi)
GELU_C1 = 0.07135481282553446  # GELU_C0 * 0.044715


def sigmoid(z: Tensor) -> Tensor:
    """1 / (1 + exp(-z)), FP32, from additions, multiplications and one division alone; relative error below 5e-6 for |z| < 30.

    The polynomial's steps are fused multiply-adds, taken here in FP64. That is exact: v is a multiple of 2**-26, so f is one of
    2**-20, and no sum has more than 53 bits.
    """
    if z.is_cpu and z.numel() > SIGMOID_CHUNK:
        return torch.cat([sigmoid(part) for part in z.reshape(-1).split(SIGMOID_CHUNK)]).view(z.shape)
    v = (z * EXP2_SCALE).add_(EXP2_START).clamp_(0.0, 1.0)
    magic = (v * -EXP2_SPAN).add_(EXP2_MAGIC)
    minus_f = (magic - EXP2_MAGIC).add_(v, alpha=EXP2_SPAN).double()
    p, wide = minus_f * -EXP2_COEFFICIENTS[0], None
    for c in (*EXP2_COEFFICIENTS[1:], 1.0):
        p = p.add_(c) if wide is None else torch.addcmul(_double(c, z.device), wide, minus_f, value=-1.0, out=p)
        rounded = p.float()
        wide = rounded.double() if wide is None else wide.copy_(rounded)
    exponent = magic.view(torch.int32).bitwise_left_shift_(23)  # the integer; the bits of 1.5 * 2**23 itself leave at the top
    return reciprocal(rounded.view(torch.int32).add_(exponent).view(torch.float32).add_(1.0), 3)


@functools.lru_cache
def _double(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float64, device=device)


def _gate(g: Tensor, act: str) -> tuple[Tensor, Tensor | None]:
    """(sigma, slope) with act(g) = g * sigma(k(g)) and slope = k'(g), None for 1. silu: k = g; gelu_tanh: k = 2 sqrt(2/pi) (g +
    .044715 g^3), since (1 + tanh(k / 2)) / 2 = sigma(k)."""
    if act == "silu":
        return sigmoid(g), None
    square = g * g
    return sigmoid(g * (square * GELU_C1 + GELU_C0)), square * (3.0 * GELU_C1) + GELU_C0


def gated_product(gate: Tensor, up: Tensor, act: str, dtype: torch.dtype) -> Tensor:
    """act(gate) * up in FP32, rounded once to ``dtype``."""
    g = gate.float()
    sigma, _ = _gate(g, act)
    return sigma.mul_(g).mul_(up.float()).to(dtype)


class GatedOutput(NamedTuple):
    parts: list[QuantizedMatrix]  # terms of h - offset, each (M, f)
    h: Tensor  # (M, f), D(h~) in gate's dtype; (0,) if it was not to be kept
    gate: QuantizedMatrix  # kept for backward, one term
    up: QuantizedMatrix


def silu_mul_quantize(gate: Tensor, up: Tensor, offset: Tensor | None, act: str, terms: int, keep_h: bool = True) -> GatedOutput:
    """h = act(gate) * up, rounded once to gate's dtype and quantised, with the copies of gate and up that backward needs."""
    product = gated_product(gate, up, act, gate.dtype)
    if keep_h:
        parts, h = quantize_dequantize_terms(product, offset, terms, gate.dtype)
    else:
        parts, h = quantize_terms(product, offset, terms), gate.new_empty(0)
    return GatedOutput(parts, h, reference.quantize(gate, ACTIVATION), reference.quantize(up, ACTIVATION))


class GatedGrads(NamedTuple):
    dgate: Tensor  # (M, f) in dh's dtype
    dup: Tensor


def silu_mul_backward(dh: Tensor, gate: QuantizedMatrix, up: QuantizedMatrix, act: str) -> GatedGrads:
    """Gradients of gate and up from their codes.

    With a = act(g) = g * s, s = sigma(k(g)): da/dg = s + g * s * (1 - s) * k'(g) = s * (1 + g * (1 - s) * k'(g)), so
    dup = dh * a and dgate = dh * u * da/dg.
    """
    g, u, d = reference.dequantize(gate), reference.dequantize(up), dh.float()
    sigma, slope = _gate(g, act)
    a = g * sigma
    factor = (1.0 - sigma).mul_(g)
    if slope is not None:
        factor = factor.mul_(slope)
    dgate = factor.add_(1.0).mul_(sigma).mul_(u.mul_(d))
    return GatedGrads(dgate.to(dh.dtype), a.mul_(d).to(dh.dtype))


def gated_values(
    gate: QuantizedMatrix, up: QuantizedMatrix, offset: Tensor | None, act: str, terms: int, dtype: torch.dtype
) -> Tensor:
    """D(h~) (M, f) of h = act(D(gate)) * D(up): the input of the MLP's last linear as backward can recompute it from the codes of
    gate and up. Not quite the forward's h~, whose gate and up had not been quantised."""
    h = gated_product(reference.dequantize(gate), reference.dequantize(up), act, dtype)
    return quantize_dequantize_terms(h, offset, terms, dtype)[1]


def dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """x / (1 - p) where :func:`peft_nvfp4.numerics.philox.dropout_mask` keeps it, else 0: a product in FP32, rounded once to x's
    dtype. (A mask in BF16 would hold a rounded 1 / (1 - p): a bias of up to 0.4 %.)"""
    return (x.float() * dropout_mask(tuple(x.shape), p, seed, x.device, torch.float32)).to(x.dtype)


def rotary_output(x: Tensor, backward: bool) -> Tensor:
    """Uninitialised result for x (B, H, S, D). Forward: strides in the order of x's, as an elementwise operation of PyTorch gives
    them. Backward: dense as (B, S, H, D), since the projection that made x wants its gradient as a matrix (B * S, H * D)."""
    if not backward:
        return torch.empty_like(x)
    b, h, s, d = x.shape
    return x.new_empty_strided((b, h, s, d), (s * h * d, d, h * d, 1))


def rotary_embedding(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding of q (B, Hq, S, D) and k (B, Hk, S, D), or its gradients from theirs, with the roundings of
    transformers' ``apply_rotary_pos_emb``; cos, sin (1 or B, S, D), everything in one dtype.

    With x = (x1, x2) the halves of D, likewise cos and sin, and r() rounding to the dtype:

        forward    y1  = r(r(x1 cos1) - r(x2 sin1))     y2  = r(r(x2 cos2) + r(x1 sin2))
        backward   dx1 = r(r(g1 cos1) + r(g2 sin2)) + 0  dx2 = r(r(g2 cos2) - r(g1 sin1)) + 0

    Backward is what autograd does: it rounds g * cos and g * sin, splits and negates the latter, pads each half with zeros to D
    values (the gradient of a slice) and adds up the three parts. Padding rounds nothing but turns -0 into +0: the "+ 0".
    """
    rotate = _rotate_gradient if backward else _rotate
    q, k = (None if x is None else rotary_output(x, backward).copy_(rotate(x, cos[:, None], sin[:, None])) for x in (q, k))
    return q, k


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


def _rotate_gradient(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h1, h2 = (g * sin).chunk(2, dim=-1)
    return (g * cos + torch.cat((h2, -h1), dim=-1)) + 0.0


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}
