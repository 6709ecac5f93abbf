"""Attention of a recorded decode step: one query a row, under a mask, without copies of the keys for every head of a group.

It is chosen by a variable of the context, not in the model's configuration: another thread may be computing an ordinary step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_GROUPED: ContextVar[bool] = ContextVar("grouped", default=False)


@contextmanager
def grouped_queries() -> Iterator[None]:
    """Within the context :func:`attention_forward` is :func:`grouped_attention`."""
    token = _GROUPED.set(True)
    try:
        yield
    finally:
        _GROUPED.reset(token)


def attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """transformers' ``sdpa`` function, or :func:`grouped_attention` in the context of :func:`grouped_queries`."""
    grouped = not torch.compiler.is_compiling() and _GROUPED.get()  # which a compiler cannot trace
    return (grouped_attention if grouped else sdpa_attention_forward)(*args, **kwargs)


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one query a row: q (B, Hq, 1, D), k and v (B, Hk, S, D), mask (B, 1, 1, S), result (B, 1, Hq, D). The query
    heads of a group are computed as queries of one head, so that its keys are read once. (transformers does so from 5.24 on.)"""
    special = any(kwargs.get(name) is not None for name in ("position_bias", "s_aux", "softcap"))
    if args or special or query.shape[1] == key.shape[1] or query.shape[2] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    rows, heads, _, width = query.shape
    queries = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    options = dict(dropout_p=kwargs.get("dropout") or 0.0, scale=kwargs.get("scaling"))
    y = F.scaled_dot_product_attention(queries, key, value, attn_mask=attention_mask, **options)
    return y.reshape(rows, 1, heads, -1), None
