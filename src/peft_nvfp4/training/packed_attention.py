"""Causal attention of sequences that lie one after another in one row, in the place of transformers' ``sdpa``.

The first token of each sequence travels to the attention function in the place of a mask: a tensor of four dimensions, which
transformers hands on as it is. On a GPU one kernel of FlashAttention computes all sequences; on a CPU SDPA one after the other.
What the kernel does not know (caps, dropout, heads that it has no kernel for) raises :class:`NotPackable`.

**Sinks** (gpt-oss): a head has one more score, s, which takes part in the softmax and stands for no token:

    p_ij = exp(x_ij - L'_i),   L'_i = log(exp(L_i) + exp(s)),   o'_i = o_i exp(L_i - L'_i)

with o and L the output and the log-sum-exp of FlashAttention. Its backward computes p from the log-sum-exp that it is given, and
dx_ij = p_ij (dp_ij - sum_d do_id o_id) from the output: given L' and o', the gradients are those of attention with sinks.
transformers has no SDPA for such models and computes them "eagerly", writing the matrix of scores several times. So they get a
function of their own, :data:`WITH_SINKS`, which does as transformers where rows are not packed.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..autograd.long_attention import FlashAttnByHeadsFunc, can_be_grouped
from ..autograd.tiles import wanted
from .grouped_attention import attention_forward


class NotPackable(Exception):
    """This call, or this decoder, is not packed; the message is the reason."""


TRIED: ContextVar[list | None] = ContextVar("tried", default=None)
"""During a trial: sliding windows that its attention calls were given."""


class FlashAttnVarlenFunc(torch.autograd.Function):
    """Causal attention of sequences that lie one after another: q (N, Hq, D), k and v (N, Hk, D) in BF16 or FP16 on a GPU,
    first_tokens (S + 1,) int32, the last ones repeat N. PyTorch's FlashAttention; the lengths stay on the device, so that one
    recording in a CUDA graph serves every packing of N tokens. (``torch.nn.attention.varlen`` has grouped heads from 2.13 on.)
    ``sinks``: (Hq,), or None. By the class's name :func:`~peft_nvfp4.autograd.activation_cache.kept_by_attention` knows that the
    output is kept."""

    @staticmethod
    def forward(ctx, q, k, v, first_tokens, scale, window, sinks):
        ctx.longest, ctx.options = len(q), dict(scale=scale) | _window_sides(window)
        output, logsumexp, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, first_tokens, first_tokens, len(q), len(q), 0.0, True, False, **ctx.options
        )
        if sinks is not None:
            if logsumexp.shape != (q.shape[1], len(q)):
                raise NotPackable(f"FlashAttention's log-sum-exp has the shape {tuple(logsumexp.shape)}, which sinks do not fit")
            output, logsumexp = sunk(output.transpose(0, 1), logsumexp, sinks)
            output = output.transpose(0, 1)
        ctx.save_for_backward(q, k, v, output, logsumexp, first_tokens, seed, offset, sinks)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        q, k, v, output, logsumexp, first_tokens, seed, offset, sinks = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), q, k, v, output, logsumexp, first_tokens, first_tokens, ctx.longest, ctx.longest, 0.0, True,
            seed, offset, **ctx.options,
        )  # fmt: skip
        dsinks = None
        if ctx.needs_input_grad[6]:
            dsinks = gradient_of_sinks(gradient.transpose(0, 1), output.transpose(0, 1), logsumexp, sinks)
        return dq, dk, dv, None, None, None, dsinks


def sunk(output: Tensor, logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output (..., H, N, D) and log-sum-exp (..., H, N) of attention without sinks -> with these, (H,)."""
    total = torch.logaddexp(logsumexp, sinks.float()[:, None])
    return (output * torch.exp(logsumexp - total)[..., None]).to(output.dtype), total


def gradient_of_sinks(gradient: Tensor, output: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """(H,) from what :func:`sunk` returned and the output's gradient: a sink is a score whose value is zero, p (0 - do o)."""
    along = (gradient.float() * output.float()).sum(-1)
    share = torch.exp(sinks.float()[:, None] - logsumexp)
    return -(share * along).sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)


def _window_sides(window: int | None) -> dict[str, int]:
    return {} if window is None else dict(window_size_left=window - 1, window_size_right=0)


def _attention_by_sequence(
    q: Tensor, k: Tensor, v: Tensor, first_tokens: Tensor, scale: float | None, window: int | None, sinks: Tensor | None
) -> Tensor:
    """The same with SDPA, a sequence at a time, in any dtype; reads the lengths on the host. A sink is the score of a key of
    zeros, whose value is zero."""
    bounds, outputs = first_tokens.tolist(), []
    for start, end in zip(bounds, bounds[1:]):
        if start == end:
            continue
        mask = None
        if window is not None and window < end - start:
            mask = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        rows = [t[start:end].transpose(0, 1)[None] for t in (q, k, v)]
        if sinks is not None:
            mask, rows = _with_sink_column(mask, rows, sinks)
        y = F.scaled_dot_product_attention(*rows, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        outputs.append(y[0].transpose(0, 1))
    return torch.cat(outputs)


def _with_sink_column(mask: Tensor | None, rows: list[Tensor], sinks: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(mask (Hq, n, n + 1) of scores, q, k and v (1, H, n or n + 1, D))."""
    q, *others = rows
    n = q.shape[2]
    visible = torch.ones(n, n, dtype=torch.bool, device=q.device).tril() if mask is None else mask
    scores = torch.zeros(n, n, dtype=q.dtype, device=q.device).masked_fill(~visible, float("-inf"))
    column = sinks.to(q.dtype)[:, None, None].expand(-1, n, 1)
    return torch.cat([scores.expand(len(sinks), n, n), column], 2), [q, *(F.pad(t, (0, 0, 0, 1)) for t in others)]


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
    unknown = [name for name in ("softcap", "position_bias") if options.get(name) is not None]
    sinks = options.get("s_aux")
    if options.get("dropout"):
        unknown.append("dropout")
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        unknown.append("is_causal=False")
    if unknown:
        raise NotPackable(f"its attention has {', '.join(unknown)}")
    settings = attention_mask.view(-1), options.get("scaling"), options.get("sliding_window"), sinks
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if not q.is_cuda:
        return _attention_by_sequence(q, k, v, *settings)[None], None
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (t.to(torch.get_autocast_dtype("cuda")) for t in (q, k, v))
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > 256:
        raise NotPackable(f"FlashAttention has no kernel for heads of {q.shape[-1]} and {v.shape[-1]} in {q.dtype}")
    return FlashAttnVarlenFunc.apply(q, k, v, *settings)[None], None


# ---------------------------------------------------------------------------------------------- sinks

WITH_SINKS = "peft_nvfp4_sinks"
"""Name of :func:`attention_with_sinks` in transformers' table, and of "eager" masks in that of masks."""


def _eager_function(module: nn.Module) -> Any:
    """That of a modeling file, which transformers calls where none is chosen."""
    return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)


def attention_with_sinks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """:func:`attention` of packed rows, the modeling file's own of others."""
    packed = attention_mask is not None and attention_mask.dtype == torch.int32
    function = attention if packed else _eager_function(module)
    return function(module, query, key, value, attention_mask, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(WITH_SINKS, attention_with_sinks)
ALL_MASK_ATTENTION_FUNCTIONS.register(WITH_SINKS, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def choose_sinks(decoder: nn.Module) -> None:
    """Have a decoder whose attention has sinks compute it by :func:`attention_with_sinks`, if it computes it "eagerly"."""
    with_sinks = [m for m in decoder.modules() if isinstance(getattr(m, "sinks", None), Tensor)]
    if with_sinks and decoder.config._attn_implementation == "eager" and all(map(_eager_function, with_sinks)):
        decoder.config._attn_implementation = WITH_SINKS


def unchoose_sinks(decoder: nn.Module) -> None:
    """Inverse of :func:`choose_sinks`."""
    if decoder.config._attn_implementation == WITH_SINKS:
        decoder.config._attn_implementation = "eager"
