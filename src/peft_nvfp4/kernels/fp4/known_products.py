"""Products with known answers, for :mod:`probe` and ``peft-nvfp4 doctor``: operands on the CPU, exact values in FP64.

Most are chosen so that every partial sum is exact in :data:`EXACT_BITS` bits, in whatever order it is taken: a code times a code
is a multiple of 1/4 and at most 36, and block scales of .5, 1 and 2 add two bits below and two above. The only right answer is
then the correctly rounded one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics import reference
from ...numerics.formats import ACTIVATION, E4M3_NAN, WEIGHT, QuantizedMatrix, padded_k

EXACT_BITS = 20


@dataclass(frozen=True)
class Case:
    """One product: ``sum of terms @ weight.T + constant + add``.

    Attributes:
        exact: all partial sums are exact in :data:`EXACT_BITS` bits.
    """

    name: str
    terms: tuple[QuantizedMatrix, ...]
    weight: QuantizedMatrix
    constant: Tensor | None = None  # (N,) float32
    add: Tensor | None = None  # (M, N) bfloat16
    exact: bool = True


# ---------------------------------------------------------------------------------------------- operands


def _rng(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def matrix(codes: Tensor, scales: Tensor | None = None, gscale: Tensor | None = None) -> QuantizedMatrix:
    """From codes (R, K) 0..15, E4M3 bytes (R, padded K / 16) and a global scale, each 1 if not given."""
    rows, k = codes.shape
    padded = torch.zeros(rows, padded_k(k), dtype=torch.uint8, device="cpu")
    padded[:, :k] = codes
    if scales is None:
        scales = torch.full((rows, padded_k(k) // 16), 0x38, dtype=torch.uint8, device="cpu")  # 1.0
    gscale = torch.ones(1, dtype=torch.float32, device="cpu") if gscale is None else gscale
    return QuantizedMatrix(reference.pack(padded), scales, gscale, k)


def codes(rows: int, k: int, seed: int, choices: Sequence[int] = range(16)) -> Tensor:
    """At random, any of the 16 if no others are given."""
    index = torch.randint(0, len(choices), (rows, k), generator=_rng(seed), device="cpu")
    return torch.tensor(choices, dtype=torch.uint8, device="cpu")[index]


SMALL = (0, 1, 2, 9, 10)
"""0, +-.5, +-1: their sums here are below 64 in steps of 1/4, so exact in BF16. Then a tier that rounds a product to BF16 before
it adds something (see :mod:`scaled_mm`) is right as well."""


def powers(rows: int, k: int, seed: int, choices: Sequence[int] = (0x30, 0x38, 0x40)) -> Tensor:
    """Block scales at random: .5, 1 and 2 if no others are given."""
    index = torch.randint(0, len(choices), (rows, padded_k(k) // 16), generator=_rng(seed), device="cpu")
    return torch.tensor(choices, dtype=torch.uint8, device="cpu")[index]


def row_scales(rows: int, seed: int) -> Tensor:
    """Powers of two from 2**-8 to 2**8, one a row."""
    return torch.randint(-8, 9, (rows,), generator=_rng(seed), device="cpu").float().exp2()


def integers(*shape: int, seed: int) -> Tensor:
    """-64 .. 64: exact in BF16, too."""
    return torch.randint(-64, 65, shape, generator=_rng(seed), device="cpu").float()


# ---------------------------------------------------------------------------------------------- cases


def cases() -> list[Case]:
    """The products that a GEMM must get right before it is used. |x @ w| <= 144 K with unit scales, in steps of 1/4."""
    every = torch.zeros(16, 32, dtype=torch.uint8, device="cpu")
    every[:, 0] = torch.arange(16, dtype=torch.uint8, device="cpu")
    identity = 2 * torch.eye(160, dtype=torch.uint8, device="cpu")
    m, n, k = 133, 80, 288
    x, w = codes(m, k, 1), codes(n, k, 2)
    scaled = matrix(x, powers(m, k, 3)), matrix(w, powers(n, k, 4))
    second = matrix(codes(m, k, 5), powers(m, k, 6))
    small = matrix(codes(7, 96, 7)), matrix(codes(33, 96, 8))
    addable = matrix(codes(7, 96, 21, SMALL)), matrix(codes(33, 96, 22, SMALL))
    return [
        Case("products of all 16 x 16 codes", (matrix(every),), matrix(every)),
        Case("every k by itself", (matrix(identity),), matrix(codes(20, 160, 9))),
        Case("sums, unit scales", (matrix(x),), matrix(w)),
        Case("block scales", scaled[:1], scaled[1]),
        Case("a global scale per row", (scaled[0]._replace(gscale=row_scales(m, 10)),), scaled[1]),
        Case(
            "a global scale of the weight",
            scaled[:1],
            scaled[1]._replace(gscale=torch.full((1,), 2.0**-5, dtype=torch.float32, device="cpu")),
        ),
        Case("few rows", small[:1], small[1]),
        Case("one row, K = 32", (matrix(codes(1, 32, 11)),), matrix(codes(17, 32, 12))),
        Case("a constant", addable[:1], addable[1], constant=integers(33, seed=13)),
        Case("accumulating", addable[:1], addable[1], add=integers(7, 33, seed=14).bfloat16()),
        Case(
            "a constant and a matrix added to scaled rows",
            (addable[0]._replace(gscale=row_scales(7, 19)),),
            addable[1],
            integers(33, seed=13),
            integers(7, 33, seed=14).bfloat16(),
        ),
        Case("two terms", (scaled[0], second), scaled[1]),
        Case("NaN scales", (_with_scale(scaled[0], 5, 3, E4M3_NAN),), _with_scale(scaled[1], 70, 16, E4M3_NAN)),
        Case("zero scales", (_with_scale(scaled[0], slice(3, 9), slice(2, 7), 0),), _with_scale(scaled[1], 40, slice(9, 12), 0)),
        Case(
            "subnormal scales",
            (matrix(codes(9, 64, 15), powers(9, 64, 16, range(1, 8))),),
            matrix(codes(24, 64, 17), powers(24, 64, 18, range(1, 8))),
        ),
        Case("the largest codes and scales", (_full(3, 128, 7),), _full(16, 128, 15)),
        gaussian("random values", 133, 48, 416, 20),
    ]


def _with_scale(q: QuantizedMatrix, row, block, byte: int) -> QuantizedMatrix:
    scales = q.scales.clone()
    scales[row, block] = byte
    return q._replace(scales=scales)


def _full(rows: int, k: int, code: int) -> QuantizedMatrix:
    full = torch.full((rows, k), code, dtype=torch.uint8, device="cpu")
    return matrix(full, torch.full((rows, k // 16), 0x7E, dtype=torch.uint8, device="cpu"))


def gaussian(name: str, m: int, n: int, k: int, seed: int, terms: int = 1) -> Case:
    """What training multiplies: everything quantised as it is there, with scales of all sizes."""
    x = torch.randn(m, k, generator=_rng(seed), dtype=torch.float32, device="cpu") * row_scales(m, seed + 1)[:, None]
    if terms == 2:  # blocks of all sizes: so that the second term, under the first one's global scale, has subnormal scales, too
        x *= torch.randint(-12, 1, (1, k // 16), generator=_rng(seed + 3), device="cpu").float().exp2().repeat_interleave(16, 1)
    parts = [reference.quantize(x, ACTIVATION)]
    if terms == 2:
        parts.append(reference.quantize(x - reference.dequantize(parts[0]), ACTIVATION, gscale=parts[0].gscale))
    w = reference.quantize(torch.randn(n, k, generator=_rng(seed + 2), dtype=torch.float32, device="cpu") * 0.02, WEIGHT)
    return Case(name, tuple(parts), w, exact=False)


# ---------------------------------------------------------------------------------------------- answers


def values(q: QuantizedMatrix) -> Tensor:
    """FP64."""
    return reference.dequantize(q).double()


def expected(case: Case) -> Tensor:
    """The exact value, FP64 (M, N)."""
    w = values(case.weight)
    y = sum(values(t) @ w.T for t in case.terms)
    y = y if case.constant is None else y + case.constant.double()
    return y if case.add is None else y + case.add.double()


def magnitude(case: Case) -> Tensor:
    """The sum of the summands' magnitudes, (M, N): what errors of a sum are measured in."""
    w = values(case.weight).abs()
    return sum(values(t).abs() @ w.T for t in case.terms)
