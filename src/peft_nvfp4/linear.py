"""The differentiable core: a frozen NVFP4 matrix product with LoRA branches, as one autograd Function.

Notation: x (M, K) input, W (N, K) frozen weight, A (r, K), B (N, r) adapter, s its scaling, Q quantise, D dequantise,
m a dropout mask (0 or 1/(1-p)), mu an optional constant vector per channel.

    x~   = Q(x - mu)  [and Q of what that left over, with two terms]        D(x~) = mu + D(term 1) [+ D(term 2)]
    y    = D(x~) @ D(W_f).T + bias + sum_i s_i * h_i @ B_i.T                h_i = (m_i * D(x~)) @ A_i.T
    dx   = D(Q(dy)) @ D(W_b).T + sum_i m_i * (g_i @ A_i)                    g_i = s_i * dy @ B_i
    dA_i = g_i.T @ (m_i * D(x~)),   dB_i = s_i * dy.T @ h_i,   dbias = sum over M of dy

The adapter gradients are the exact ones of the function that was computed (they use D(x~), not x). The input gradient is the
quantised one of the paper (Table 7): x -> D(x~) counts as the identity, dy is quantised along N and multiplied by the
backward layout W_b (K, N). With ``gradients="bf16"`` it is dy @ D(W_f), not quantised at all.

Kept for backward: the codes of x~ (0.56 bytes a value and term instead of 2), h_i, and a seed instead of each mask.

Rejected: building the same from separate operators. Autograd would then save D(x~) in BF16 once per branch, which is most of
what NVFP4 activations are meant to avoid.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import fused_ops, ops
from .formats import GRADIENT, GRADIENT_STOCHASTIC, WEIGHT_BACKWARD, QuantizedMatrix
from .reference import cpu_operand

GRADIENTS = ("nvfp4", "nvfp4_sr", "bf16")


class Branch(NamedTuple):
    """One plain LoRA branch as the Functions see it."""

    a: Tensor  # (r, K)
    b: Tensor  # (N, r)
    scaling: float
    dropout: float  # probability; 0 outside training


@dataclass(frozen=True)
class LinearSpec:
    """Everything about one call of :class:`NVFP4LoraLinear` that is not a tensor.

    Attributes:
        k, n: logical shape (n, k) of the weight.
        terms: 1 or 2 NVFP4 terms of the input.
        gradients: ``"nvfp4"`` (to nearest), ``"nvfp4_sr"`` (stochastic) or ``"bf16"`` (not quantised).
        scalings, dropouts: per branch.
    """

    k: int
    n: int
    terms: int
    gradients: str
    scalings: tuple[float, ...]
    dropouts: tuple[float, ...]


def draw_seed() -> Tensor:
    """A seed from PyTorch's CPU generator: follows ``torch.manual_seed``, is restored by activation checkpointing, and needs
    no synchronisation with a GPU."""
    return torch.randint(-(2**62), 2**62, (), dtype=torch.int64)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in a's dtype; on a CPU that is slow in 16 bits, through FP32."""
    operand = a.dtype if a.is_cuda else cpu_operand(a.dtype)
    return a @ b if operand == a.dtype else (a.to(operand) @ b.to(operand)).to(a.dtype)


def add_mm(y: Tensor | None, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """``y + alpha * a @ b`` with FP32 accumulation and one rounding, into y; without y, ``alpha * a @ b``."""
    if y is None:
        return mm(a, b) * alpha
    operand = a.dtype if a.is_cuda else cpu_operand(a.dtype)
    if operand == a.dtype == y.dtype:
        return y.addmm_(a, b, alpha=alpha)
    return torch.addmm(y.to(operand), a.to(operand), b.to(operand), alpha=alpha).to(y.dtype)


def no_autocast(x: Tensor):
    """Context in which autocast is off, so that FP32 arithmetic stays FP32. Free when autocast is not on."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


# ---------------------------------------------------------------------------------------------- the input x~


def quantize_input(x: Tensor, terms: int, centre: Tensor | None) -> list[QuantizedMatrix]:
    """x (M, K) as one or two NVFP4 terms; the second quantises what the first left over (FP32 difference)."""
    return fused_ops.quantize_terms(x, centre, terms)


def dequantize_input(parts: list[QuantizedMatrix], centre: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D(x~) (M, K), summed in FP32 and rounded once to ``dtype``."""
    if dtype != torch.float16:
        return fused_ops.dequantize_terms(parts, centre, dtype)
    # a rounding up of the largest value may pass FP16's end where x itself did not
    return fused_ops.dequantize_terms(parts, centre, torch.float32).clamp(-65504.0, 65504.0).to(dtype)


class StraightThrough(torch.autograd.Function):
    """``values`` in the forward, x's gradient in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, values: Tensor) -> Tensor:
        return values.view(x.shape).clone()  # an output must not be the caller's tensor

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


def fake_quantize(x: Tensor, terms: int = 1, centre: Tensor | None = None) -> Tensor:
    """D(x~) for x (..., K), with the straight-through gradient."""
    with torch.no_grad():
        parts = quantize_input(x.detach().reshape(-1, x.shape[-1]), terms, centre)
        values = dequantize_input(parts, centre, x.dtype)
    return StraightThrough.apply(x, values)


# ---------------------------------------------------------------------------------------------- LoRA arithmetic


def _mask(x: Tensor, p: float, seed: Tensor | None) -> Tensor | None:
    """Which elements of x dropout keeps; None without dropout."""
    return None if p == 0.0 else ops.dropout_mask(x, p, seed) != 0


def _masked(x: Tensor, keep: Tensor | None, p: float) -> Tensor:
    """Dropout of x. The factor is a number, not a tensor in x's dtype: 1/(1-p) rounded to BF16 would be biased."""
    return x if keep is None else (x * keep) * (1.0 / (1.0 - p))


def _lora_forward(
    y: Tensor | None, x: Tensor, a: Tensor, b: Tensor, scaling: float, p: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(y plus the contribution of one branch (M, N), h (M, r)), in x's dtype. y is changed in place where that saves a pass."""
    h = mm(_masked(x, _mask(x, p, seed), p), a.to(x.dtype).T)
    return add_mm(y, h, b.to(x.dtype).T, scaling), h


def _lora_backward(
    dx: Tensor | None,
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    branch: tuple[Tensor, Tensor, float, float, Tensor | None],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, if given, plus the branch's contribution; dA; dB), None where ``needs`` (of x, A, B) says so. dA and dB in the dtype
    of A and B; branch = (A, B, scaling, dropout, seed)."""
    a, b, scaling, p, seed = branch
    needs_dx, needs_da, needs_db = needs
    db = (mm(dy.T, h.to(dy.dtype)) * scaling).to(b.dtype) if needs_db else None
    if not (needs_dx or needs_da):
        return None, None, db
    keep = _mask(x, p, seed)
    g = mm(dy, b.to(dy.dtype)) * scaling
    da = mm(g.T, _masked(x, keep, p)).to(a.dtype) if needs_da else None
    if not needs_dx:
        return None, da, db
    if keep is None:
        return add_mm(dx, g, a.to(dy.dtype)), da, db
    extra = _masked(mm(g, a.to(dy.dtype)), keep, p)
    return extra if dx is None else dx + extra, da, db


class LoraBranch(torch.autograd.Function):
    """One LoRA branch over a BF16 input, for backends that do not quantise activations: saves x and h, draws the dropout
    mask again in backward."""

    @staticmethod
    def forward(ctx, x, a, b, seed, scaling: float, p: float):
        y, h = _lora_forward(None, x, a, b, scaling, p, seed)
        ctx.save_for_backward(x, h, a, b, seed)
        ctx.scaling, ctx.p = scaling, p
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, h, a, b, seed = ctx.saved_tensors
        with no_autocast(dy):
            branch = (a, b, ctx.scaling, ctx.p, seed)
            dx, da, db = _lora_backward(None, dy.to(x.dtype), x, h, branch, ctx.needs_input_grad[:3])
        return dx, da, db, None, None, None


def lora_branch(x: Tensor, branch: Branch) -> Tensor:
    """``s * dropout(x) @ A.T @ B.T`` for x (..., K), in x's dtype."""
    seed = draw_seed() if branch.dropout else None
    with no_autocast(x):
        y = LoraBranch.apply(x.reshape(-1, x.shape[-1]), branch.a, branch.b, seed, branch.scaling, branch.dropout)
    return y.view(*x.shape[:-1], y.shape[-1])


# ---------------------------------------------------------------------------------------------- the Function


FIXED_INPUTS = 13
"""Inputs of :class:`NVFP4LoraLinear` before the variable ones: x, xd, bias, two of the centre, six of W, a seed, the spec."""


class NVFP4LoraLinear(torch.autograd.Function):
    """Frozen NVFP4 linear with any number of plain LoRA branches; see the module's docstring for the formulas.

    The input is quantised by the caller (once for all linears that share it): x is here for its gradient and dtype only.
    """

    @staticmethod
    def forward(
        ctx, x, xd, bias, centre, centre_out, w_codes, w_scales, w_gscale, b_codes, b_scales, b_gscale, sr_seed, spec, *flat
    ):
        # x (M, K); xd D(x~) (M, K) in x's dtype, None if there is no branch and nobody has computed it; centre (K,) and
        # centre_out (N,) float32 or None; w_* W_f (N, K); b_* W_b (K, N) or None (made when needed);
        # flat = (codes, scales, gscale) of every term of x~, then (A, B, dropout seed or None) of every branch
        w = QuantizedMatrix(w_codes, w_scales, w_gscale, spec.k)
        parts, branches = _terms(flat[: 3 * spec.terms], spec.k), _triples(flat[3 * spec.terms :])
        constant = bias if centre_out is None else centre_out if bias is None else bias.float() + centre_out
        unrounded = centre is None and (x.dtype == torch.float32 or x.dtype == torch.bfloat16 and spec.terms == 1)
        y = ops.matmul(parts, w, constant, x.dtype, xd if unrounded else None)
        hidden = []
        for (a, b, seed), scaling, p in zip(branches, spec.scalings, spec.dropouts):
            y, h = _lora_forward(y, xd, a, b, scaling, p, seed)
            hidden.append(h)
        ctx.spec, ctx.branches = spec, len(hidden)
        ctx.has_bias = bias is not None
        if not branches:
            flat = ()  # no adapter: nothing of x is needed
        ctx.save_for_backward(centre, w_codes, w_scales, w_gscale, b_codes, b_scales, b_gscale, sr_seed, *hidden, *flat)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        spec, n = ctx.spec, ctx.branches
        saved = ctx.saved_tensors  # read once: under checkpointing every reading recomputes
        centre, *w6, sr_seed = saved[:8]
        hidden, flat = saved[8 : 8 + n], saved[8 + n :]
        needs_dx = ctx.needs_input_grad[0]
        with no_autocast(dy):
            dx = _input_gradient(dy, w6, spec, sr_seed) if needs_dx else None
            grads: list[Tensor | None] = []
            if n:
                xd = dequantize_input(_terms(flat[: 3 * spec.terms], spec.k), centre, dy.dtype)
            first = FIXED_INPUTS + 3 * spec.terms  # of the branches, among the inputs
            for i, ((a, b, seed), h) in enumerate(zip(_triples(flat[3 * spec.terms :]), hidden)):
                needs = (needs_dx, *ctx.needs_input_grad[first + 3 * i : first + 3 * i + 2])
                dx, da, db = _lora_backward(dx, dy, xd, h, (a, b, spec.scalings[i], spec.dropouts[i], seed), needs)
                grads += [da, db, None]
            dbias = dy.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, None, dbias, *([None] * (FIXED_INPUTS - 3 + 3 * spec.terms)), *grads


def _triples(flat):
    return [tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)]


def _terms(flat, k: int) -> list[QuantizedMatrix]:
    return [QuantizedMatrix(*part, k) for part in _triples(flat)]


def _input_gradient(dy: Tensor, w6: list[Tensor | None], spec: LinearSpec, sr_seed: Tensor | None) -> Tensor:
    """The frozen weight's part of dx (M, K)."""
    w = QuantizedMatrix(w6[0], w6[1], w6[2], spec.k)
    if spec.gradients == "bf16":
        return mm(dy, ops.dequantize(w, dy.dtype))
    w_b = ops.transpose_requantize(w, WEIGHT_BACKWARD) if w6[3] is None else QuantizedMatrix(w6[3], w6[4], w6[5], spec.n)
    q = ops.quantize(dy, GRADIENT) if spec.gradients == "nvfp4" else ops.quantize(dy, GRADIENT_STOCHASTIC, seed=sr_seed)
    return ops.matmul([q], w_b, None, dy.dtype)
