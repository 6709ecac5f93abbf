"""Causal attention of sequences that lie one after another in one row, in the place of transformers' ``sdpa``.

The first token of each sequence travels to the attention function in the place of a mask: a tensor of four dimensions, which
transformers hands on as it is. On a GPU one kernel of FlashAttention computes all sequences; on a CPU SDPA one after the other.
What the kernel does not know (caps, sinks, dropout, heads that it has no kernel for) raises :class:`NotPackable`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd.long_attention import FlashAttnByHeadsFunc, can_be_grouped
from ..autograd.tiles import wanted
from .grouped_attention import attention_forward


class NotPackable(Exception):
    """This call, or this decoder, is not packed; the message is the reason."""


TRIED: ContextVar[list | None] = ContextVar("tried", default=None)
"""During a trial: sliding windows that its attention calls were given."""


class VarlenAttention(torch.autograd.Function):
    """Causal attention of sequences that lie one after another: q (N, Hq, D), k and v (N, Hk, D) in BF16 or FP16 on a GPU,
    first_tokens (S + 1,) int32, the last ones repeat N. PyTorch's FlashAttention; the lengths stay on the device, so that one
    recording in a CUDA graph serves every packing of N tokens. (``torch.nn.attention.varlen`` has grouped heads from 2.13 on.)"""

    @staticmethod
    def forward(ctx, q, k, v, first_tokens, scale, window):
        ctx.longest, ctx.options = len(q), dict(scale=scale) | _window_sides(window)
        output, logsumexp, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, first_tokens, first_tokens, len(q), len(q), 0.0, True, False, **ctx.options
        )
        ctx.save_for_backward(q, k, v, output, logsumexp, first_tokens, seed, offset)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        q, k, v, output, logsumexp, first_tokens, seed, offset = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), q, k, v, output, logsumexp, first_tokens, first_tokens, ctx.longest, ctx.longest, 0.0, True,
            seed, offset, **ctx.options,
        )  # fmt: skip
        return dq, dk, dv, None, None, None


def _window_sides(window: int | None) -> dict[str, int]:
    return {} if window is None else dict(window_size_left=window - 1, window_size_right=0)


def _attention_by_sequence(
    q: Tensor, k: Tensor, v: Tensor, first_tokens: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """The same with SDPA, a sequence at a time, in any dtype; reads the lengths on the host."""
    bounds, outputs = first_tokens.tolist(), []
    for start, end in zip(bounds, bounds[1:]):
        if start == end:
            continue
        mask = None
        if window is not None and window < end - start:
            mask = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        rows = [t[start:end].transpose(0, 1)[None] for t in (q, k, v)]
        y = F.scaled_dot_product_attention(*rows, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        outputs.append(y[0].transpose(0, 1))
    return torch.cat(outputs)


def _by_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The same for a long sequence, which is one row; None where it is not a plain causal attention for FlashAttention."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout or not causal or position_bias is not None or any(kwargs.get(name) is not None for name in ("softcap", "s_aux")):
        return None
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    return FlashAttnByHeadsFunc.apply(q, k, v, scaling) if can_be_grouped(q, k, v) else None


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """In the place of transformers' ``sdpa`` function, which it calls, unless ``attention_mask`` holds the first tokens of packed
    sequences: (1, 1, 1, S + 1) int32. Queries (1, Hq, N, D), result (1, N, Hq, D)."""
    if attention_mask is None and wanted():
        output = _by_heads(module, query, key, value, *args, **kwargs)
        if output is not None:
            return output, None
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    options = dict(zip(("dropout", "scaling", "is_causal", "position_bias"), args)) | kwargs
    if (windows := TRIED.get()) is not None:
        windows.append(options.get("sliding_window"))
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if options.get("dropout"):
        unknown.append("dropout")
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        unknown.append("is_causal=False")
    if unknown:
        raise NotPackable(f"its attention has {', '.join(unknown)}")
    settings = attention_mask.view(-1), options.get("scaling"), options.get("sliding_window")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if not q.is_cuda:
        return _attention_by_sequence(q, k, v, *settings)[None], None
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (t.to(torch.get_autocast_dtype("cuda")) for t in (q, k, v))
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > 256:
        raise NotPackable(f"FlashAttention has no kernel for heads of {q.shape[-1]} and {v.shape[-1]} in {q.dtype}")
    return VarlenAttention.apply(q, k, v, *settings)[None], None
