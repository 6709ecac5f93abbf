"""The reference against the formats as they are published: tables, layouts and examples in plain Python, from the definitions.

Everything else is compared with :mod:`peft_nvfp4.numerics.reference`, so that comes first on every machine: a PyTorch build may
be broken, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics import layout, philox, reference
from ...numerics.formats import ACTIVATION, QuantizedMatrix
from .results import require

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGNED = (*GRID, *(-v for v in GRID))
"""Values of the codes 0 to 15."""


def _equal(what: str, got, expected) -> None:
    require(got == expected, f"{what}: {got}, expected {expected}")


def e4m3(byte: int) -> float:
    """Value of an E4M3 byte without sign: 4 bits of exponent, bias 7, 3 of mantissa; exponent 0 is subnormal."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _cpu(values, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def e4m3_scales() -> str:
    table = [e4m3(byte) for byte in range(127)]
    _equal("values of the E4M3 bytes", reference.e4m3_decode(_cpu(list(range(127)), torch.uint8)).tolist(), table)
    _equal("bytes of the E4M3 values", reference.e4m3_encode(_cpu(table)).tolist(), list(range(127)))
    middles = [(a + b) / 2 for a, b in zip(table, table[1:])]
    to_even = [byte + byte % 2 for byte in range(126)]
    _equal("ties between E4M3 values", reference.e4m3_encode(_cpu(middles)).tolist(), to_even)
    _equal("values beyond 448", reference.e4m3_encode(_cpu([449.0, 464.0, 1e9, float("inf")])).tolist(), [126] * 4)
    require(bool(reference.e4m3_decode(_cpu([127], torch.uint8)).isnan().all()), "byte 0x7F is not NaN")
    return "127 bytes, 126 ties"


def e2m1_codes() -> str:
    """A row whose largest value is 6 * 448: global scale 1, block scale 448, and the codes as in the table."""
    values = [0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.2501, 5.001, -0.25, -0.75, -3.5, -6.0, -0.0]
    expected = [0, 0, 2, 2, 4, 4, 6, 6, 7, 1, 7, 8, 10, 14, 15, 8]
    q = reference.quantize(_cpu([[448 * v for v in values]]), ACTIVATION)
    _equal("global scale", q.gscale.tolist(), [1.0])
    _equal("block scales", q.scales.tolist(), [[0x7E, 0]])
    packed = [low | high << 4 for low, high in zip(expected[::2], expected[1::2])] + [0] * 8
    _equal("codes of ties and neighbours", q.codes.tolist(), [packed])
    _equal("values of the codes", reference.dequantize(q)[0].tolist(), [448 * SIGNED[c] for c in expected])
    return "ties to even, signs, packing"


def blocks_that_are_not_ordinary() -> str:
    x = torch.zeros(4, 32, device="cpu")
    x[1, 3], x[2, 17], x[3, :16], x[3, 16] = float("nan"), float("inf"), 1e-6, 2688.0
    q = reference.quantize(x, ACTIVATION)
    _equal("scales of zeros, NaN, Inf, a block too small", q.scales.tolist(), [[0, 0], [0x7F, 0], [0, 0x7F], [0, 0x7E]])
    _equal("global scales", q.gscale.tolist(), [1.0] * 4)
    nan = reference.dequantize(q).isnan()
    _equal("NaN values", [nan[i].tolist() for i in range(4)], [[i == 1] * 16 + [i == 2] * 16 for i in range(4)])
    return "zeros, NaN, Inf, underflow"


def global_scales() -> str:
    rows = [2688.0, 2689.0, 1344.0, 1.0, 2.0**100]
    q = reference.quantize(_cpu([[v] for v in rows]), ACTIVATION)
    _equal("global scales", q.gscale.tolist(), [1.0, 2.0, 0.5, 2.0**-11, 2.0**89])
    return "powers of two, rounded up"


def swizzled_layout_of_scales() -> str:
    rows, cols = 133, 7
    scales = _cpu([[(r * 31 + c * 7) % 251 + 1 for c in range(cols)] for r in range(rows)], torch.uint8)
    expected = [0] * (256 * 8)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * 2 + c // 4
            expected[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scales[r, c].item()
    swizzled = layout.swizzle_scales(scales)
    _equal("bytes of swizzled scales", swizzled.tolist(), expected)
    _equal("and back", layout.unswizzle_scales(swizzled, rows, cols).tolist(), scales.tolist())
    return "133 x 7, padding included"


def random_bits() -> str:
    """The known answer of Random123 for a key and a counter of zeros."""
    words = [f"{word:08x}" for word in philox.philox(_cpu(0, torch.int64), 4).tolist()]
    _equal("Philox-4x32-10", words, ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"])
    return "the published vector"


def matrix_product() -> str:
    """y = x @ W.T of whole numbers, by hand."""
    codes = torch.arange(64, dtype=torch.uint8, device="cpu").view(2, 32)
    x_codes, w_codes = codes * 5 % 16, codes * 3 % 16
    x, w = (
        QuantizedMatrix(reference.pack(c), torch.full((2, 2), 0x40, dtype=torch.uint8, device="cpu"), _cpu([2.0**e]), 32)
        for c, e in ((x_codes, 3), (w_codes, -1))
    )
    by_hand = [[sum(SIGNED[a] * SIGNED[b] for a, b in zip(r, c)) * 4.0 * 4.0 for c in w_codes.tolist()] for r in x_codes.tolist()]
    _equal("a product", reference.matmul([x], w, None, torch.float32).tolist(), by_hand)
    return "2 x 2 x 32"


CHECKS = (
    *(e4m3_scales, e2m1_codes, blocks_that_are_not_ordinary, global_scales),
    *(swizzled_layout_of_scales, random_bits, matrix_product),
)
"""Each returns what it compared."""
