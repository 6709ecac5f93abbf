"""Products of BF16 operands with FP32 results, on CPUs with and without BF16 instructions: they never pass through BF16."""

import pytest
import torch

from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.matmul import add_mm, mm

M, K, N = 24, 80, 40


@pytest.fixture(params=[False, True], ids=["without", "with AVX512-BF16"])
def operands(request, monkeypatch):
    """a, b, their exact product, and how far an FP32 sum in any order may be from it: K u S, S the sum of magnitudes."""
    monkeypatch.setattr(reference, "_CPU_HAS_BF16", request.param)
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    return a, b, a.double() @ b.double(), (K + 1) * 2.0**-24 * (a.double().abs() @ b.double().abs())


def test_mm(operands):
    a, b, exact, bound = operands
    y = mm(a, b, torch.float32)
    assert y.dtype == torch.float32 and ((y.double() - exact).abs() <= bound).all()
    y = mm(a, b)
    assert y.dtype == torch.bfloat16 and ((y.double() - exact).abs() <= bound + 2.0**-8 * (exact.abs() + bound)).all()


def test_add_mm(operands):
    a, b, exact, bound = operands
    y = torch.randn(M, N)
    total = add_mm(y.clone(), a, b)
    assert total.dtype == torch.float32
    assert ((total.double() - y.double() - exact).abs() <= bound + 2.0**-24 * (y.abs() + exact.abs() + bound)).all()
