"""Frozen weights that are on the device only while they are computed with: how forward and backward get hold of them.

A frozen layer whose ``hosted`` is None has its bytes with it, always. Otherwise they live elsewhere
(:mod:`peft_nvfp4.training.offload`), and every use begins with :meth:`Hosted.fetch`. Backward does not rely on the order in which
autograd comes to the layers, which nothing promises: each product fetches the bytes that it is about to read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from .frozen_linear import no_autocast


class Hosted(Protocol):
    """Packed tensors that live elsewhere."""

    def fetch(self) -> AbstractContextManager:
        """Have them on the device, where they stay until others are fetched. The context is for the backward of what is computed
        with them now: within it they are there, too."""


def version(t: Tensor) -> int:
    """Counts what was written into a tensor in place."""
    return 0 if t.is_inference() else t._version


class FrozenProduct(torch.autograd.Function):
    """y (..., N) = ``product(x, bias)`` of x (..., K), with the dense weight W (N, K) computed anew in backward: dx = dy @ W.

    Args:
        weight: the parameter that both are made of.
        product: x and the bias (N,) -> x @ W.T + bias.
        dense: a dtype -> W in it.
        there: the context within which backward reads ``weight``.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        product: Callable[[Tensor, Tensor | None], Tensor],
        dense: Callable[[torch.dtype], Tensor],
        there: AbstractContextManager,
    ) -> Tensor:
        ctx.weight, ctx.version, ctx.dense, ctx.there = weight, version(weight), dense, there
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return product(x, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        if version(ctx.weight) != ctx.version:
            raise RuntimeError("a frozen weight was changed in place between forward and backward: run the forward again")
        needs_x, needs_bias = ctx.needs_input_grad[:2]
        dx = dbias = None
        with no_autocast(dy):
            if needs_x:
                with ctx.there:
                    dx = (dy @ ctx.dense(dy.dtype)).to(ctx.dtypes[0])
            if needs_bias:
                dbias = dy.flatten(0, -2).sum(0).to(ctx.dtypes[1])
        return dx, dbias, None, None, None, None
