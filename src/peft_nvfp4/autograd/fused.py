"""Autograd Functions of the producers that emit NVFP4: RMSNorm and the product of a gated MLP.

Both return the dequantised form of what they quantised, with its codes as further outputs that are not differentiable. What they
keep for backward are codes. With w a norm's weight, D = D(y~), c the mean over a row of dy * D:

    RMSNorm     dx = rstd * (w * dy - (D / w) * c)
    gated MLP   h = act(gate) * up; the gradients are those of D(gate~) and D(up~), in FP32

Source: PACT, Table 7, rows RMSNorm and SiLU-multiply.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics.formats import QuantizedMatrix
from ..ops import fused


class RMSNormQuantize(torch.autograd.Function):
    """(D(y~) (M, d), codes, scales and gscale of every term) of x (M, d)."""

    @staticmethod
    def forward(ctx, x, gamma, offset, eps: float, plus_one: bool, terms: int):
        out = fused.rmsnorm_quantize(x, gamma, offset, eps, plus_one, terms)
        y, *flat = _outputs(out.y, out.parts)
        ctx.save_for_backward(gamma, offset, out.rstd, *flat)
        ctx.plus_one = plus_one
        ctx.mark_non_differentiable(*flat)
        ctx.set_materialize_grads(False)  # of the codes: there are none, and zeros as large as they would be made otherwise
        return y, *flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, *unused):
        if dy is None:
            return (None,) * 6
        gamma, offset, rstd, *flat = ctx.saved_tensors
        parts = as_parts(flat, gamma.shape[0])
        return fused.rmsnorm_backward.run(dy, parts, offset, gamma, rstd, ctx.plus_one), None, None, None, None, None


def _outputs(values: Tensor | None, parts: Sequence[QuantizedMatrix]) -> list[Tensor | None]:
    """``values``, then codes, scales and gscale of every part, as a Function returns them: copies of what must be no view.

    The values of one term are one of what a CPU looked up, and autograd forbids edits of a view that a Function returns. A
    compiled graph has the operator's output there, which is none, and cannot ask. Global scales of two terms are views of one
    tensor: where one is an output of a compiled graph (of a norm that is compiled by itself), PyTorch 2.11 asks for its gradient,
    though it is marked as not differentiable.
    """
    outputs = [values, *[t for part in parts for t in part[:3]]]
    if torch.compiler.is_compiling():
        outputs[3::3] = [gscale.clone() for gscale in outputs[3::3]]
    elif values is not None and values._is_view():
        outputs[0] = values.clone()
    return outputs


def as_parts(flat, k: int) -> tuple[QuantizedMatrix, ...]:
    """(codes, scales, gscale) * terms -> terms."""
    return tuple(QuantizedMatrix(*flat[i : i + 3], k) for i in range(0, len(flat), 3))


class GatedQuantize(torch.autograd.Function):
    """(D(h~) (M, f), codes, scales and gscale of every term of h~, then of gate and of up) of gate and up (M, f).
    ``placeholder``: of D(h~) only the shape, the dtype and the gradient (one number in memory)."""

    @staticmethod
    def forward(ctx, gate, up, offset, act: str, terms: int, placeholder: bool = False):
        out = fused.silu_mul_quantize(gate, up, offset, act, terms, not placeholder)
        h, *flat = _outputs(None if placeholder else out.h, (*out.parts, out.gate, out.up))
        ctx.save_for_backward(*flat[-6:])
        ctx.act, ctx.k = act, gate.shape[1]
        ctx.mark_non_differentiable(*flat)
        ctx.set_materialize_grads(False)  # of the codes: there are none, and zeros as large as they would be made otherwise
        if placeholder:  # whoever reads it after all is loud
            h = gate.new_full((1,), torch.nan).expand(gate.shape)
        return h, *flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh, *unused):
        if dh is None:
            return (None,) * 6
        gate, up = as_parts(ctx.saved_tensors, ctx.k)
        grads = fused.silu_mul_backward.run(dh, gate, up, ctx.act)
        return grads.dgate, grads.dup, None, None, None, None
