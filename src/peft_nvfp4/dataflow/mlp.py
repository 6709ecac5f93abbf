"""Gated MLP that keeps its gate and up activations in NVFP4.

    h = act(gate(x)) * up(x);  y = down(h)

The product is computed from BF16 gate and up in FP32 and quantised in the same pass; what backward needs are the codes of gate,
up and h (0.56 bytes a value each instead of 2). Gradients come from D(gate~) and D(up~), in FP32.

Source: PACT, Table 7, row SiLU-multiply.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import fused_ops as fused
from .. import handoff
from ..backends.nvfp4 import NVFP4FrozenLinear
from ..handoff import QuantizedInput
from .norm import as_parts
from .probe import base_of


class GatedQuantize(torch.autograd.Function):
    """(D(h~) (M, f), codes, scales and gscale of every term of h~) of gate and up (M, f)."""

    @staticmethod
    def forward(ctx, gate, up, centre, act: str, terms: int):
        out = fused.silu_mul_quantize(gate, up, centre, act, terms)
        flat = [t for part in out.parts for t in part[:3]]
        ctx.save_for_backward(*out.gate[:3], *out.up[:3])
        ctx.act, ctx.k = act, gate.shape[1]
        ctx.mark_non_differentiable(*flat)
        return out.h, *flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh, *unused):
        gate, up = as_parts(ctx.saved_tensors, ctx.k)
        grads = fused.silu_mul_backward(dh, gate, up, None, ctx.act, False, 0)
        return grads.dgate, grads.dup, None, None, None


class FusedGatedMLP(nn.Module):
    """Takes the place of a gated MLP. It owns the original's children under their names, so state-dict keys and adapter targets
    do not change, and computes what the original did where fusing does not apply (while compiling; ``down`` not in NVFP4)."""

    def __init__(self, original: nn.Module, act_name: str, act: str):
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        self.act_name, self.act = act_name, act
        self._outside = (original,)
        self.training = original.training

    @property
    def original(self) -> nn.Module:
        """The module this one replaced, with the children as they are now."""
        module = self._outside[0]
        module._modules.update(self._modules)
        return module

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "gate_up_proj"):
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        down = base_of(self.down_proj)
        if torch.compiler.is_compiling() or not isinstance(down, NVFP4FrozenLinear):
            return self.down_proj(getattr(self, self.act_name)(gate) * up)
        centre, terms, f = down.input_centre, down.options.terms, gate.shape[-1]
        mu = None if centre is None else centre.view(torch.float32)
        h, *flat = GatedQuantize.apply(gate.reshape(-1, f), up.reshape(-1, f), mu, self.act, terms)
        h = h.view(gate.shape)
        handoff.put(h, QuantizedInput(as_parts(flat, f), centre, h.dtype, exact=True))
        return self.down_proj(h)
