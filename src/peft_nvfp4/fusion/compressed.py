"""NVFP4 activations for backends that do not compute with them: ``activations="nvfp4"`` (of ``memory="small"``) with
``nf4`` and ``bf16``.

The forward pass is the backend's own, bit for bit. Only what is kept for backward changes: the norms keep the codes of their
output and 1/rms instead of their input, gated MLPs the codes of gate and up, LoRA branches the codes of what they read: 0.56
bytes a value instead of 2. The gradients are those at the 4-bit values, as with ``backend="nvfp4"``.

Source: PACT's data flow (Table 7) without its arithmetic; the idea of compressing only what is kept is older (ActNN, 2021).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import activation_cache
from ..autograd.activation_cache import QuantizedInput
from ..nn.frozen_linear import unsafe_view
from ..numerics.formats import QuantizedMatrix
from ..ops import fused
from ..ops.linear import quantize_input
from .mlp import FusedGatedMLP
from .norm import NVFP4RMSNorm


def _with_codes(ctx, y: Tensor) -> tuple[Tensor, ...]:
    """(y, codes, scales and gscale of y), as outputs of a Function; the codes have no gradient."""
    (q,) = quantize_input(y, None, 1)
    ctx.mark_non_differentiable(*q[:3])
    ctx.set_materialize_grads(False)  # zeros as large as the codes would be made otherwise
    return y, *q[:3]


class CompressedNorm(torch.autograd.Function):
    """(y, codes, scales and gscale of y) of x (M, d); y is what the original norm computes."""

    @staticmethod
    def forward(ctx, x, gamma, compute, eps: float, plus_one: bool):
        outputs = _with_codes(ctx, compute(x))
        norm = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
        rstd = torch.rsqrt(norm * norm / x.shape[1] + eps)
        ctx.save_for_backward(gamma, rstd, *outputs[1:])
        ctx.plus_one = plus_one
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, *unused):
        if dy is None:
            return (None,) * 5
        gamma, rstd, *codes = ctx.saved_tensors
        parts = [QuantizedMatrix(*codes, gamma.shape[0])]
        return fused.rmsnorm_backward(dy, parts, None, gamma, rstd, ctx.plus_one), None, None, None, None


class CompressedRMSNorm(NVFP4RMSNorm):
    """Takes the place of an RMSNorm that only frozen linears with compressed activations read."""

    def forward(self, x: Tensor) -> Tensor:
        foreign = self.weight.requires_grad or (self.weight.dtype != x.dtype and not self.plus_one)
        if not torch.is_grad_enabled() or foreign or self.was_edited() or self.is_watched():
            return self.call_original(x)
        x2 = x.reshape(-1, x.shape[-1])
        y, *codes = CompressedNorm.apply(x2, self.weight, self.call_original, self._eps, self.plus_one)
        y = unsafe_view(y, x.shape)
        activation_cache.put(y, QuantizedInput((QuantizedMatrix(*codes, x.shape[-1]),), None, y.dtype))
        return y


class CompressedGate(torch.autograd.Function):
    """(h = act(gate) * up, codes, scales and gscale of h) of gate and up (M, f); h rounded as PyTorch does."""

    @staticmethod
    def forward(ctx, gate, up, act: str):
        (g,), (u,) = (quantize_input(t, None, 1) for t in (gate, up))
        ctx.save_for_backward(*g[:3], *u[:3])
        ctx.act, ctx.k = act, gate.shape[1]
        return _with_codes(ctx, (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh, *unused):
        if dh is None:
            return (None,) * 3
        saved = ctx.saved_tensors
        gate, up = QuantizedMatrix(*saved[:3], ctx.k), QuantizedMatrix(*saved[3:], ctx.k)
        grads = fused.silu_mul_backward(dh, gate, up, ctx.act)
        return grads.dgate, grads.dup, None


class CompressedGatedMLP(FusedGatedMLP):
    """Takes the place of a gated MLP whose ``down`` has compressed activations. Without autograd it runs the original."""

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        if args or kwargs or not torch.is_grad_enabled() or self.was_edited():
            return self.call_original(x, *args, **kwargs)
        gate, up = self._gate_and_up(x)
        shape, f = gate.shape, gate.shape[-1]
        h, *codes = CompressedGate.apply(gate.reshape(-1, f), up.reshape(-1, f), self.parts.act)
        del gate, up  # the largest activations of a layer: nothing needs them any more
        h = h.view(shape)
        activation_cache.put(h, QuantizedInput((QuantizedMatrix(*codes, f),), None, h.dtype))
        return self._modules[self.parts.down](h)
