"""One LoRA branch over an input that is not quantised, for backends that compute with the activations as they are.

    y = s * dropout(x) @ A.T @ B.T

Kept for backward: x (or its NVFP4 codes; dA is then taken from D(x~)), h = dropout(x) @ A.T, and a seed instead of the mask. The
formulas, and their order, are those of :mod:`peft_nvfp4.autograd.frozen_linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.formats import QuantizedMatrix
from ..numerics.reference import mm
from .activation_cache import dequantized
from .frozen_linear import Adapters, Branch, add_dropped, cast_adapters, gradients_of_a, gradients_of_b, hidden_of, no_autocast
from .seeds import draw_seed
from .trees import flatten, unflatten


class LoraBranch(torch.autograd.Function):
    """y (M, N) in x's dtype; gradients of x, A and B."""

    @staticmethod
    def forward(ctx, structure, *leaves):
        x, branch, kept = unflatten(structure, leaves)
        adapters = cast_adapters([branch], x.dtype)
        (h,) = hidden_of(x, adapters)
        saved, ctx.saved_structure = flatten((x if kept is None else None, kept, h, adapters))
        ctx.save_for_backward(*saved)
        ctx.structure, ctx.dtypes = structure, (branch.a.dtype, branch.b.dtype)
        return mm(h, adapters.items[0].up.T)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, kept, h, adapters = unflatten(ctx.saved_structure, ctx.saved_tensors)
        adapters: Adapters
        needs_x, needs, _ = unflatten(ctx.structure, ctx.needs_input_grad[1:])
        empty_x, gradients, none = unflatten(ctx.structure, [None] * (len(ctx.needs_input_grad) - 1))
        dtype_a, dtype_b = (dtype if need else None for dtype, need in zip(ctx.dtypes, (needs.a, needs.b)))
        if kept is not None:
            x = dequantized([kept], None, h.dtype) if dtype_a else None
        dx = empty_x
        with no_autocast(dy):
            dy = dy.to(h.dtype)
            (db,) = gradients_of_b([dy], [h], adapters, [dtype_b])
            (da,), gs = gradients_of_a([dy], x, adapters, [dtype_a], needs_x)
            if needs_x:
                dx = None if gs.stacked is None else mm(gs.stacked, adapters.stack)
                dx = add_dropped(dx, adapters, gs.dropped)
        return None, *flatten((dx, gradients._replace(a=da, b=db), none))[0]


def lora_branch(x: Tensor, branch: Branch, kept: QuantizedMatrix | None = None) -> Tensor:
    """``s * dropout(x) @ A.T @ B.T`` for x (..., K), in x's dtype. ``kept``: Q(x), to be kept for backward instead of x."""
    if branch.dropout:
        branch = branch._replace(seed=draw_seed())
    with no_autocast(x):
        leaves, structure = flatten((x.reshape(-1, x.shape[-1]), branch, kept))
        y = LoraBranch.apply(structure, *leaves)
    return y.view(*x.shape[:-1], y.shape[-1])
