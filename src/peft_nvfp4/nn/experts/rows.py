"""Tokens on their way to their experts and back.

A token with k experts is k rows. Rows are sorted by expert, so that each expert computes once, on neighbouring rows, and are put
back in the order of the tokens afterwards. Both ways are gathers: in backward, too, no row is added to another in memory, as
PyTorch's own gradient of ``x[index]`` does (in 16 bits it rounds after each of a token's k rows). A token's gradient is one sum
over its rows, accumulated in FP32 and rounded once, in an order that does not change.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_expert(index: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Where the rows of every expert come from, and how many each has.

    Args:
        index: (T, k) experts of every token; those of ``experts`` or more are left out.

    Returns:
        (R,) places in the flattened ``index``, sorted by expert, and R split by expert. The counts are on the host: the one
        synchronisation of a mixture (``bincount`` would add two, for the largest and the smallest value).
    """
    ordered, order = index.reshape(-1).sort(stable=True)
    each = torch.arange(experts, device=index.device, dtype=index.dtype)
    ends = torch.searchsorted(ordered, each, right=True).tolist()
    return order[: ends[-1]], [end - start for start, end in zip([0, *ends], ends)]


class SortedRows(torch.autograd.Function):
    """Rows of x (T, H) in the order of their experts: (R, H)."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape, ctx.k = x.shape, k
        return x[order // k]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        tokens, width = ctx.shape
        (order,) = ctx.saved_tensors
        return _placed(dy, order, tokens * ctx.k).view(tokens, ctx.k, width).sum(1), None, None


class TokenRows(torch.autograd.Function):
    """Rows (R, H) in the order of their experts, put back to their places among ``size`` rows; zeros where there is none."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(order)
        return _placed(rows, order, size)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        (order,) = ctx.saved_tensors
        return dy[order], None, None


def _placed(rows: Tensor, order: Tensor, size: int) -> Tensor:
    make = rows.new_empty if len(order) == size else rows.new_zeros
    return make(size, rows.shape[1]).index_copy_(0, order, rows)
