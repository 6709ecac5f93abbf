"""The product ``sum_t D(x_t) @ D(w).T + bias`` by PyTorch's BF16 GEMM, on dequantised operands.

BF16 holds every dequantised value exactly, and its tensor cores accumulate in FP32: the function is that of an FP4 tensor core,
at the price of writing and reading D(w). It serves FP32 results too: FP32 operands would be slower, and the TF32 switch would
round them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import ops
from ..numerics.formats import QuantizedMatrix
from ..numerics.reference import without_scale_factor


def matmul(
    terms: Sequence[QuantizedMatrix],
    w: QuantizedMatrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    values: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """y (M, N) in ``dtype`` of terms (M, K) and w (N, K), on a GPU; for the arguments see
    :func:`peft_nvfp4.numerics.reference.matmul`.

    ``factor``, the significand of a global scale of w that is no power of two, stays out of the BF16 operand and multiplies the
    FP32 sum before the bias joins.
    """
    wd = ops.dequantize(without_scale_factor(w, factor), torch.bfloat16).T
    with full_precision_sums():
        if len(terms) == 1:
            x = ops.dequantize(terms[0], torch.bfloat16) if values is None else values.to(torch.bfloat16)
            if bias is None and dtype == torch.bfloat16:
                return x @ wd if factor == 1.0 else x.new_empty(len(x), wd.shape[1]).addmm_(x, wd, beta=0, alpha=factor)
            y = torch.mm(x, wd, out_dtype=torch.float32)
        else:
            y = torch.mm(ops.dequantize(terms[0], torch.bfloat16), wd, out_dtype=torch.float32)
            y += torch.mm(ops.dequantize(terms[1], torch.bfloat16), wd, out_dtype=torch.float32)
    if factor != 1.0:
        y *= factor
    return (y if bias is None else y.add_(bias)).to(dtype)


@contextmanager
def full_precision_sums() -> Iterator[None]:
    """cuBLAS may split K and add the parts in BF16 (seen on an H200 at M=3, K=1000: rounded twice). Not within this context."""
    backend = torch.backends.cuda.matmul
    before = backend.allow_bf16_reduced_precision_reduction
    backend.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        backend.allow_bf16_reduced_precision_reduction = before
