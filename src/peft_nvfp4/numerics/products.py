"""The two products of a training step, as data: what an implementation of ``fprop`` and ``dgrad`` is given.

    fprop:  y_i = D(x~) @ D(W_i).T + constant_i + sum over the adapters j of linear i of h_j @ up_j.T
    dgrad:  dx  = sum_i D(Q(dy_i)) @ D(W_b,i).T + g @ A

Products are exact, sums are FP32, and the result is rounded once to the activations' dtype. (A kernel may round the low-rank
part by itself, and dgrad once more for every linear after the first.) They are defined in :mod:`peft_nvfp4.numerics.reference`,
and operators in :mod:`peft_nvfp4.ops.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .formats import QuantizedMatrix


class LowRank(NamedTuple):
    """One adapter of a forward product."""

    hidden: Tensor | None  # h (M, r) in the activations' dtype; None: fprop computes it, from rows of ``Fprop.a``
    up: Tensor  # (N, r) in the activations' dtype: scaling * B


class ForwardLinear(NamedTuple):
    """One frozen linear of a forward product."""

    weight: QuantizedMatrix  # W_f (N, K)
    constant: Tensor | None = None  # (N,), added to every row of y
    scale_factor: float = 1.0  # of the weight's global scale, see :func:`peft_nvfp4.numerics.reference.scale_factor`
    adapters: Sequence[LowRank] = ()


class Fprop(NamedTuple):
    """y (M, N) in ``dtype`` of every linear that reads one input x~ (M, K)."""

    terms: Sequence[QuantizedMatrix]  # of x~, one or two, each (M, K)
    linears: Sequence[ForwardLinear]
    dtype: torch.dtype
    values: Tensor | None = None  # (M, K) in ``dtype``: the sum of the dequantized terms, if the caller has it unrounded
    a: Tensor | None = None  # (sum of r, K) in ``dtype``: A of the adapters without h, in their order


class BackwardLinear(NamedTuple):
    """One frozen linear of a backward product."""

    dy: Tensor  # (M, N), quantized by dgrad
    weight: QuantizedMatrix  # W_b (K, N)
    seed: Tensor | None = None  # int64 scalar: round dy stochastically; None: to nearest


class Dgrad(NamedTuple):
    """dx (M, K) in the gradients' dtype, summed over the linears that read one input."""

    linears: Sequence[BackwardLinear]
    g: Tensor | None = None  # (M, r): the gradients of h of all adapters without dropout
    a: Tensor | None = None  # (r, K): their A
