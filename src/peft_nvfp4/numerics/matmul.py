"""Matrix products with one rounding: FP32 accumulation on every device, in the dtype in which the device multiplies fast."""

from __future__ import annotations

import torch
from torch import Tensor


def cpu_operand(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a CPU multiplies matrices of ``dtype`` fast: FP32 for 16-bit ones, unless it has BF16 instructions. (Without
    AVX512-BF16 a BF16 product takes five times as long: measured 44 ms against 8 ms for 240x576x1536.)"""
    return torch.bfloat16 if dtype == torch.bfloat16 and _CPU_HAS_BF16 else torch.float32


_CPU_HAS_BF16 = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def mm(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``a @ b`` in ``dtype`` (default: a's), accumulated in FP32, rounded once. Where a CPU is slow in 16 bits: through FP32."""
    dtype = dtype or a.dtype
    if a.is_cuda:
        if dtype == a.dtype:
            return a @ b
        return torch.mm(a, b, out_dtype=dtype) if dtype == torch.float32 else (a @ b).to(dtype)
    # a CPU has no product of 16-bit operands with an FP32 result: it would be rounded to 16 bits first
    operand = cpu_operand(a.dtype) if dtype == a.dtype else torch.float32
    return a @ b if operand == a.dtype else (a.to(operand) @ b.to(operand)).to(dtype)


def add_mm(y: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``y + a @ b`` with FP32 accumulation and one rounding, into y; without y, ``a @ b``."""
    if y is None:
        return mm(a, b)
    operand = a.dtype if a.is_cuda else cpu_operand(a.dtype) if y.dtype == a.dtype else torch.float32
    if operand == a.dtype == y.dtype:
        return y.addmm_(a, b)
    return torch.addmm(y.to(operand), a.to(operand), b.to(operand)).to(y.dtype)


class exact_matmul:
    """Within the context FP32 products on a GPU are FP32 products, whatever the user allows elsewhere (TF32 has 10 bits)."""

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        if self._before != "highest":
            torch.set_float32_matmul_precision("highest")

    def __exit__(self, *exc) -> None:
        if self._before != "highest":
            torch.set_float32_matmul_precision(self._before)
