"""One frozen product without adapters, by the operator ``fprop``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peft_nvfp4.numerics.formats import QuantizedMatrix
from peft_nvfp4.numerics.products import ForwardLinear, Fprop
from peft_nvfp4.ops import linear


def one_product(
    terms: Sequence[QuantizedMatrix],
    w: QuantizedMatrix,
    constant: Tensor | None,
    dtype: torch.dtype,
    values: Tensor | None = None,
    factor: float = 1.0,
) -> Fprop:
    return Fprop(terms, [ForwardLinear(w, constant, factor)], dtype, values)


def multiplied(*arguments) -> Tensor:
    """``sum_t D(x_t) @ D(w).T + constant`` (M, N) in ``dtype``; arguments of :func:`one_product`."""
    (y,) = linear.fprop(one_product(*arguments))
    return y
