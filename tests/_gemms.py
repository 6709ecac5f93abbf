"""Tiers of the FP4 products for tests, from functions of one weight."""

from collections.abc import Callable

import torch
from torch import Tensor

from peft_nvfp4.kernels.fp4.native import Gemms


def one_by_one(gemm: Callable[..., Tensor]) -> Gemms:
    """``gemms`` over a function of one weight: ``gemm(terms, weight, *, constant, add, out, dtype) -> y``."""

    def gemms(terms, weights, *, constants, adds, outs=None, dtype=torch.bfloat16):
        outs = outs or [None] * len(weights)
        return [
            gemm(terms, w, constant=constant, add=add, out=out, dtype=dtype)
            for w, constant, add, out in zip(weights, constants, adds, outs)
        ]

    return gemms
