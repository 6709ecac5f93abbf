"""The matrix product: bit-equal where every partial sum is exact in FP32, within a derived bound elsewhere, on every device."""

import pytest
import torch
from _assertions import assert_same_bits, by_device, by_dtype, gaussian, generator, to
from _exact import exact_matrix, float64_product, off_bound, whole_bias
from _products import multiplied

from peft_nvfp4 import ops
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, WEIGHT

SHAPES_NK = [(48, 32), (33, 10), (96, 576), (50, 1000)]

by_rows = pytest.mark.parametrize("m", [1, 3, 17, 200], ids=lambda m: f"M{m}")
by_shape = pytest.mark.parametrize(("n", "k"), SHAPES_NK, ids=[f"N{n}-K{k}" for n, k in SHAPES_NK])
by_terms = pytest.mark.parametrize("terms", [1, 2], ids=["one-term", "two-terms"])
by_bias = pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16], ids=["no-bias", "fp32-bias", "bf16-bias"])


@by_device
@by_bias
@by_terms
@by_dtype
@by_rows
@by_shape
def test_matmul_of_exact_sums_is_bit_equal(n, k, m, dtype, terms, bias, device):
    """Values are multiples of g/4 up to 12 g, so a product is a multiple of 1/16 up to 144, times the global scales of its row
    and of the weight. In those units, with 1 and 4 the most unequal global scales of two terms, K <= 1000 and a whole bias up to
    250, every partial sum is a multiple of 1/16 below 1000 * 144 * (1 + 4) + 250 < 2**24 / 16: exact in FP32, whatever the
    order. So is the expectation in FP64. What is left is the one rounding to ``dtype``."""
    xs = [exact_matrix(m, k, True, seed) for seed in range(terms)]
    w = exact_matrix(n, k, False, 9)
    b = whole_bias(n, bias)
    expected = float64_product(xs, w) + (b.double() if bias else 0)
    assert expected.float().double().equal(expected)
    xs, w, b = [to(x, device) for x in xs], to(w, device), b.to(device) if bias else None
    assert_same_bits(multiplied(xs, w, b, dtype), expected.float().to(dtype), "y")
    values = sum(reference.dequantize(x) for x in xs).to(dtype)
    if values.double().equal(sum(reference.dequantize(x).double() for x in xs)):  # unrounded, as the argument asks
        assert_same_bits(multiplied(xs, w, b, dtype, values), expected.float().to(dtype), "y from values")
    else:
        assert terms == 2 and dtype != torch.float32


@by_device
@by_dtype
@pytest.mark.parametrize("m", [1, 16])
def test_matmul_of_a_long_exact_sum(m, dtype, device):
    """K = 4096, where GPU libraries split the sum: 4096 * 144 < 2**24 / 16 keeps it exact, and partial sums in BF16 would not
    be."""
    x, w = exact_matrix(m, 4096, True, 3), exact_matrix(64, 4096, False, 4)
    got = multiplied([to(x, device)], to(w, device), None, dtype)
    assert_same_bits(got, float64_product([x], w).float().to(dtype), "y")


@by_bias
@by_terms
@by_dtype
@pytest.mark.parametrize("m", [1, 17])
def test_matmul_rounds_once_with_bf16_operands(m, dtype, terms, bias, monkeypatch):
    """The same where the CPU (as every GPU) multiplies BF16 natively: operands are exact, and the bias joins before the one
    rounding."""
    monkeypatch.setitem(reference.CPU_OPERAND, torch.bfloat16, torch.bfloat16)
    xs, w = [exact_matrix(m, 576, True, seed) for seed in range(terms)], exact_matrix(50, 576, False, 9)
    b = whole_bias(50, bias)
    expected = float64_product(xs, w) + (b.double() if bias else 0)
    assert_same_bits(multiplied(xs, w, b, dtype), expected.float().to(dtype), "y")


@by_device
@by_terms
@by_dtype
@by_rows
@by_shape
def test_matmul_of_random_values(n, k, m, dtype, terms, device):
    xs = [gaussian(m, k, ACTIVATION, seed) for seed in range(terms)]
    w, b = gaussian(n, k, WEIGHT), torch.randn(n, generator=generator(n))
    got = multiplied([to(x, device) for x in xs], to(w, device), b.to(device), dtype)
    assert got.dtype == dtype and got.shape == (m, n)
    assert off_bound(got, xs, w, b) == 0


@by_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_matmul_shows_what_is_not_finite(bad, device):
    """All outputs of that row are NaN; those of the others are what they are without it."""
    x, w = torch.ones(3, 64, device=device), to(gaussian(8, 64, WEIGHT), device)
    clean = multiplied([ops.quantize(x, ACTIVATION)], w, None, torch.bfloat16)
    x[1, 5] = bad
    y = multiplied([ops.quantize(x, ACTIVATION)], w, None, torch.bfloat16)
    assert y[1].isnan().all()
    assert_same_bits(y[::2], clean[::2], "the other rows")
