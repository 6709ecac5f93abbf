"""The facts of NVFP4, in one place.

NVFP4 stores a matrix ``x (R, K)`` in blocks of 16 consecutive values along K. Every value is

    x[r, k]  ~  e2m1(code[r, k]) * e4m3(scale[r, k // 16]) * gscale[r or 0]

* *codes*: 4-bit E2M1, magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 with the sign in bit 3. Two codes share a byte, the even k in
  the low nibble.
* *block scales*: one E4M3 byte (4-bit exponent, 3-bit mantissa, no sign used, at most 448) for 16 codes.
* *global scale*: one FP32 number for the whole matrix ("tensor") or for each row ("row"). Here it is a power of two. That
  costs no accuracy and makes every dequantised value exact in BF16: E2M1 has 2 significant bits and E4M3 has 4, so their
  product needs 6 of BF16's 8, and a power of two only moves the exponent. Any BF16 tensor core therefore multiplies exactly
  the numbers that an FP4 tensor core multiplies.

That is 4.5 bits a value plus the global scale. Nothing else in the package writes the numbers 6, 448 or 16.

Sources: NVIDIA, "Pretraining Large Language Models with NVFP4" (2025) for the two-level scheme; OCP Microscaling Formats
v1.0 for E2M1; "FP8 Formats for Deep Learning" (2022) for E4M3; the 128x4 layout of block scales from the cuBLAS manual,
"Scaling factors layouts".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # the estimator needs these facts and no PyTorch
    from torch import Tensor

BLOCK = 16
"""Values that share one block scale."""

E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of the codes 0..7; codes 8..15 are the same with a minus sign."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E4M3_MAX_BITS = 0x7E

E2M1_THRESHOLDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Midpoints between neighbouring magnitudes, and whether a value on the midpoint goes up (ties go to the even code)."""

GSCALE_EXPONENTS = (-115, 116)
"""Range of log2(global scale). From -115 up, the smallest product that decides a rounding to nearest, 2**-9 * 0.25 * gscale, is
a normal FP32 number, so flushing of subnormals changes nothing; up to 116, the largest value 6 * 448 * gscale is finite. Rows
smaller than about 6e-32 lose precision gracefully, values beyond 2.2e38 saturate."""

K_ALIGN = 32
"""K is padded with zeros to this multiple inside the storage: 32 codes are the 16 bytes that tensor-core loads ask for."""

SWIZZLE_ROWS, SWIZZLE_COLS = 128, 4
"""Tile of block scales in the layout that FP4 tensor cores read."""

ScaleRule = Literal["max6", "four_over_six", "mse"]
SCALE_RULES: tuple[str, ...] = ("max6", "four_over_six", "mse")

MSE_OFFSETS = (-2, -1, 1, 2, 3, 4, 5, 6)
"""E4M3 codes tried around that of amax/6 by the rule "mse" (8 codes are a factor of two): from 0.84x to 1.7x. Of 262,144
Gaussian, Student-t and uniform blocks searched from -8 to +12, nine chose a code outside this range."""


@dataclass(frozen=True)
class NVFP4Format:
    """How one kind of matrix is quantised.

    Attributes:
        rule: choice of the block scale. ``"max6"``: amax/6. ``"four_over_six"``: the better of amax/6 and amax/4 by squared
            error (Cook et al., "Four Over Six", 2025). ``"mse"``: the best of nine E4M3 values around amax/6.
        global_scale: ``"tensor"`` (one) or ``"row"`` (one per row, so that a token's codes do not depend on its batchmates).
        stochastic: round codes stochastically (needs a seed); the block scale is then rounded up so that nothing saturates
            and the result is unbiased.
    """

    rule: ScaleRule = "max6"
    global_scale: Literal["tensor", "row"] = "tensor"
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.rule not in SCALE_RULES:
            raise ValueError(f"unknown block-scale rule {self.rule!r}; choose one of {', '.join(SCALE_RULES)}")
        if self.global_scale not in ("tensor", "row"):
            raise ValueError(f"global_scale is 'tensor' or 'row', got {self.global_scale!r}")
        if self.stochastic and self.rule != "max6":
            raise ValueError(f"stochastic rounding is defined with rule='max6' only, got {self.rule!r}")


WEIGHT = NVFP4Format(rule="mse")
"""Forward layout of a frozen weight: searched once, offline."""
WEIGHT_BACKWARD = NVFP4Format(rule="four_over_six")
"""Backward layout (the transpose): one pass, so that making it anew at each use gives the same bits as keeping it."""
ACTIVATION = NVFP4Format(global_scale="row")
GRADIENT = NVFP4Format(global_scale="row")
GRADIENT_STOCHASTIC = NVFP4Format(global_scale="row", stochastic=True)


class QuantizedMatrix(NamedTuple):
    """A matrix in NVFP4. A plain tuple, not a Tensor subclass: it goes through operators, ``torch.compile`` and
    ``save_for_backward`` unharmed. ``Kp`` is K rounded up to :data:`K_ALIGN`.
    """

    codes: Tensor  # (R, Kp/2) uint8, low nibble = even k
    scales: Tensor  # (R, Kp/16) uint8, E4M3 bits, row-major ("linear")
    gscale: Tensor  # (R,) or (1,) float32
    k: int  # logical K


def padded_k(k: int) -> int:
    """K rounded up to the storage's multiple."""
    return -(-k // K_ALIGN) * K_ALIGN


def packed_bytes(rows: int, k: int) -> int:
    """Bytes of the codes and block scales of a (rows, k) matrix."""
    kp = padded_k(k)
    return rows * (kp // 2 + kp // BLOCK)
