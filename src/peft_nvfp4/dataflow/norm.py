"""RMSNorm that emits NVFP4.

The module returns y = D(y~), the dequantised form of its quantised output, and hands the codes of y~ to the frozen linears
that read y (:mod:`peft_nvfp4.handoff`). For backward it keeps y~, which its readers keep anyway, and 1/rms (4 bytes a token):
the input of the norm, the residual stream, is not kept at all. With w the weight, D = D(y~), c = mean over the row of dy * D:

    dx = rstd * (w * dy - (D / w) * c)

Source: PACT, Table 7, row RMSNorm; the formula is RMSNorm's gradient with x^ = D / w.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import fused_ops as fused
from .. import handoff
from ..formats import QuantizedMatrix
from ..handoff import QuantizedInput


class RMSNormQuantize(torch.autograd.Function):
    """(D(y~) (M, d), codes, scales and gscale of every term) of x (M, d)."""

    @staticmethod
    def forward(ctx, x, gamma, centre, eps: float, plus_one: bool, terms: int):
        out = fused.rmsnorm_quantize(x, None, gamma, centre, eps, plus_one, terms)
        flat = [t for part in out.parts for t in part[:3]]
        ctx.save_for_backward(gamma, centre, out.rstd, *flat)
        ctx.plus_one = plus_one
        ctx.mark_non_differentiable(*flat)
        return out.y, *flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, *unused):
        gamma, centre, rstd, *flat = ctx.saved_tensors
        parts = as_parts(flat, gamma.shape[0])
        return fused.rmsnorm_backward(dy, parts, centre, gamma, rstd, None, ctx.plus_one), None, None, None, None, None


def as_parts(flat, k: int) -> tuple[QuantizedMatrix, ...]:
    """(codes, scales, gscale) * terms -> terms."""
    return tuple(QuantizedMatrix(*flat[i : i + 3], k) for i in range(0, len(flat), 3))


class NVFP4RMSNorm(nn.Module):
    """Takes the place of an RMSNorm whose output only frozen NVFP4 linears read. Its ``weight`` is the original's parameter, so
    state-dict keys do not change.

    Falls back to the original where the fused formula does not apply: while ``torch.compile`` traces (there, the linears quantise
    and the compiler merges their work), with a trainable weight, or with a weight of another dtype than x.
    """

    def __init__(self, original: nn.Module, eps: float, plus_one: bool, terms: int, centre: nn.Parameter | None):
        super().__init__()
        self.weight = original.weight
        self.eps, self.plus_one, self.terms = eps, plus_one, terms
        self._outside = (original, centre)  # in a tuple: neither is a submodule or parameter of this module

    @property
    def original(self) -> nn.Module:
        """The module this one replaced, with the weight as it is now."""
        module = self._outside[0]
        module.weight = self.weight
        return module

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if torch.compiler.is_compiling() or weight.requires_grad or (weight.dtype != x.dtype and not self.plus_one):
            return self.original(x)
        centre = self._outside[1]
        mu = None if centre is None else centre.view(torch.float32)
        y, *flat = RMSNormQuantize.apply(x.reshape(-1, x.shape[-1]), weight, mu, self.eps, self.plus_one, self.terms)
        y = y.view(x.shape)
        handoff.put(y, QuantizedInput(as_parts(flat, x.shape[-1]), centre, y.dtype, exact=True))
        return y

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, plus_one={self.plus_one}, terms={self.terms}"
