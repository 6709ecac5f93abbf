"""Operands whose products are exact in FP32, products in FP64, and how far a product of FP32 sums may be from them."""

import torch
from _assertions import generator, unit

from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import QuantizedMatrix


def exact_matrix(rows: int, k: int, per_row: bool, seed: int) -> QuantizedMatrix:
    """Random codes under block scales .5, 1, 1.5, 2 and global scales 1, 2, 4. Every value is g times a multiple of 1/4, at most
    12."""
    rng = generator(seed, rows, k)
    kp = -(-k // 32) * 32
    codes = torch.randint(0, 16, (rows, kp), generator=rng, dtype=torch.uint8)
    codes[:, k:] = 0
    scales = torch.tensor([0x30, 0x38, 0x3C, 0x40], dtype=torch.uint8)[torch.randint(0, 4, (rows, kp // 16), generator=rng)]
    gscale = 2.0 ** torch.randint(0, 3, (rows if per_row else 1,), generator=rng)
    return QuantizedMatrix(reference.pack(codes), scales, gscale, k)


def whole_bias(n: int, dtype: torch.dtype | None) -> torch.Tensor | None:
    """Whole numbers up to 250, exact in BF16 too; None for no dtype."""
    return None if dtype is None else torch.randint(-250, 251, (n,), generator=generator(n)).to(dtype)


def float64_product(xs: list[QuantizedMatrix], w: QuantizedMatrix) -> torch.Tensor:
    return sum(reference.dequantize(x).double() for x in xs) @ reference.dequantize(w).double().T


def off_bound(y: torch.Tensor, xs: list[QuantizedMatrix], w: QuantizedMatrix, bias: torch.Tensor) -> int:
    """Elements of y further from the exact product than gamma(n) S + u |y|.

    The n = terms * K products are exact (6 + 6 bits), their n - 1 additions and that of the bias are FP32 in some order: error at
    most gamma(n) S with S the sum of absolute values, gamma(n) = n u / (1 - n u), u = 2**-24 (Higham, 4.2). Where the two terms
    are added before they are multiplied, 2 roundings of x and of the product replace K additions: less. The rounding to BF16
    (FP16) adds half an ulp of the result: at most 2**-8 (2**-11) of it, or 2**-25 where FP16 is subnormal."""
    exact = float64_product(xs, w) + bias.double()
    magnitudes = sum(reference.dequantize(x).double().abs() for x in xs) @ reference.dequantize(w).double().abs().T
    nu = len(xs) * w.k * 2.0**-24
    bound = nu / (1 - nu) * (magnitudes + bias.double().abs())
    if y.dtype != torch.float32:
        bound = bound + unit(y.dtype) * (exact.abs() + bound) + 2.0**-25
    return int((~((y.cpu().double() - exact).abs() <= bound)).sum())
