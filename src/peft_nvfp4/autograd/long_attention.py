"""Causal FlashAttention whose backward takes some heads at a time.

What the backward of FlashAttention makes besides its results is wide: a sum for dq in FP32, and gradients of keys and values
for every head of the queries, which are added up for the heads that share them. With Llama-8B's heads that is 32 kB a token,
next to 28 kB of what goes in and comes out. Heads do not know of each other, so they are taken in groups: the same numbers (up
to the order in which FlashAttention itself adds), an eighth of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUPS = 8
"""At most. An eighth of 32 heads, of 16,000 tokens or more, still has work for every multiprocessor several times over."""
FLASH_CAPABILITY = (8, 0)


def can_be_grouped(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch's FlashAttention takes these (B, S, H, D), and its causal mask is that of one sequence a row."""
    width, shape = q.shape[-1], k.shape
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_cuda or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(q.device) < FLASH_CAPABILITY or not torch.backends.cuda.flash_sdp_enabled():
        return False
    return v.shape == shape and shape[:2] == q.shape[:2] and width == shape[-1] <= 256 and width % 8 == 0 and q.shape[1] > 1


class FlashAttnByHeadsFunc(torch.autograd.Function):
    """Output (B, S, Hq, D) for q (B, S, Hq, D), k and v (B, S, Hk, D). Kept: these, and a log-sum-exp for each head. (The name is
    one by which :func:`~peft_nvfp4.autograd.activation_cache.kept_by_attention` knows that the output is.)"""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        output, logsumexp, *state = flash_forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, output, logsumexp, *state)
        ctx.scale = scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        q, k, v, output, logsumexp, *state = ctx.saved_tensors
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        pieces = groups(k.shape[2])
        for queries, keys in zip(_parts(q.shape[2], pieces), _parts(k.shape[2], pieces)):
            of = lambda t, heads: t[:, :, heads]  # noqa: B023  of this round
            inputs = of(q, queries), of(k, keys), of(v, keys), of(output, queries), logsumexp[:, queries].contiguous()
            parts = flash_backward(of(gradient, queries), *inputs, *state, ctx.scale)
            for whole, part, heads in zip((dq, dk, dv), parts, (queries, keys, keys)):
                whole[:, :, heads] = part
            del inputs, parts, part  # before the next round's
        return dq, dk, dv, None


def groups(heads: int) -> int:
    """Of so many heads of keys, with equally many in each."""
    return max(n for n in range(1, GROUPS + 1) if heads % n == 0)


def _parts(heads: int, pieces: int) -> list[slice]:
    return [slice(heads * i // pieces, heads * (i + 1) // pieces) for i in range(pieces)]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    """(output, log-sum-exp (B, Hq, S), two tensors of a random state that nobody draws from)."""
    length = q.shape[1]
    return torch.ops.aten._flash_attention_forward(q, k, v, None, None, length, length, 0.0, True, False, scale=scale)[:4]


def flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logsumexp: Tensor, seed: Tensor, offset: Tensor, scale
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    length = q.shape[1]
    return torch.ops.aten._flash_attention_backward(
        gradient, q, k, v, output, logsumexp, None, None, length, length, 0.0, True, seed, offset, scale=scale
    )
