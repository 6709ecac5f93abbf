"""Cross-entropy of rows of logits, and its gradient over the logits' own memory, in Triton.

    losses_i = logsumexp(y_i) - y_i[label_i],    dy_i = factor_i * (softmax(y_i) - onehot(label_i))

A program holds one row of V logits, a piece at a time, and reads it twice: first for the greatest logit and the sum of
exponentials relative to it (both at once: what was summed is scaled down where a greater logit appears), then for the
gradient, which is written where the logit was read. The second reading finds most of the row in the L2 cache. PyTorch's own
operators make an FP32 copy, log-probabilities and a gradient beside the logits, four times their bytes in BF16.

Everything is FP32 between the logits and the one rounding of the gradient. Exponentials and sums differ from PyTorch's in their
last places: unlike what is quantised elsewhere in this folder, a loss has no bits to be kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import EXACT_MATH, launch, power_of_two

PIECE = 4096
"""Logits of a row at a time: 16 a thread, two 16-byte loads of BF16."""
WARPS = 8


@triton.jit(do_not_specialize=["stride"])
def cross_entropy_kernel(
    logits_ptr,  # (n, V) rows ``stride`` apart; GRADIENT: overwritten
    labels_ptr,  # (n,) int64
    factors_ptr,  # (n,) or, ONE_FACTOR, (1,) FP32
    losses_ptr,  # (n,) FP32
    stride,
    V: tl.constexpr, PIECE: tl.constexpr, GRADIENT: tl.constexpr, ONE_FACTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    chosen = tl.load(logits_ptr + label).to(tl.float32)
    greatest, total = float("-inf"), 0.0
    for start in range(0, V, PIECE):
        k = start + tl.arange(0, PIECE)
        y = tl.load(logits_ptr + k, mask=k < V, other=float("-inf")).to(tl.float32)
        above = tl.maximum(greatest, tl.max(y, axis=0))
        shift = tl.where(above == float("-inf"), 0.0, above)  # nothing but -inf so far: exp(-inf - -inf) would be NaN
        total = total * tl.exp(greatest - shift) + tl.sum(tl.exp(y - shift), axis=0)
        greatest = above
    tl.store(losses_ptr + row, tl.log(total) + greatest - chosen)
    if GRADIENT:
        factor = tl.load(factors_ptr + (0 if ONE_FACTOR else row))
        tl.debug_barrier()  # every thread has read ``chosen``
        for start in range(0, V, PIECE):
            k = start + tl.arange(0, PIECE)
            y = tl.load(logits_ptr + k, mask=k < V, other=0.0).to(tl.float32)
            p = tl.exp(y - greatest) / total
            dy = (p - tl.where(k == label, 1.0, 0.0)) * factor
            tl.store(logits_ptr + k, dy.to(logits_ptr.dtype.element_ty), mask=k < V)


def cross_entropy(logits: Tensor, labels: Tensor, factors: Tensor | None) -> Tensor:
    """FP32 loss of each row, (n,).

    Args:
        logits: (n, V) BF16, FP16 or FP32; a row is contiguous. With ``factors`` they are overwritten by their gradient.
        labels: (n,) int64, in range.
        factors: (n,) or (1,) FP32, that of each row's gradient or of all; None: no gradient.
    """
    n, v = logits.shape
    losses = logits.new_empty(n, dtype=torch.float32)
    if n:
        constants = {
            "V": v,
            "PIECE": min(PIECE, max(power_of_two(v), 32)),
            "GRADIENT": factors is not None,
            "ONE_FACTOR": factors is not None and factors.numel() == 1,
        }
        tensors = (logits, labels, losses if factors is None else factors, losses)
        launch(cross_entropy_kernel, (n,), tensors, (logits.stride(0),), constants, num_warps=WARPS, **EXACT_MATH)
    return losses
