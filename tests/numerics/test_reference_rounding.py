"""Which code and which scale: the reference against hand-computed blocks, exhaustive ties and the independent scalar_nvfp4."""

import numpy as np
import pytest
import scalar_nvfp4 as scalar
import torch
from _assertions import DISTRIBUTIONS, FORMATS, SEED, assert_same_bits, assert_same_matrix, assert_same_values, sample, seed_for

from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, SCALE_RULES, WEIGHT, NVFP4Format, QuantizedMatrix

MAX6 = NVFP4Format()
EXPONENTS = (-115, -60, 0, 7, 116)  # of the global scale; the first and the last are the clamp's
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Midpoint between codes i and i + 1, and the code it must get: the even one.
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
TIE_CODES = (0, 2, 2, 4, 4, 6, 6)
ALL_SCALES = torch.arange(1, 0x7F, dtype=torch.uint8)  # every finite positive E4M3 value, by its bits

by_exponent = pytest.mark.parametrize("exponent", EXPONENTS, ids=lambda e: f"g=2^{e}")
by_rule = pytest.mark.parametrize("rule", SCALE_RULES)
by_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
by_distribution = pytest.mark.parametrize("name", DISTRIBUTIONS)


def scale_values(exponent: int) -> torch.Tensor:
    """s * g for every scale, (126, 1) float32, exact: 4 significant bits."""
    return torch.from_numpy(np.ldexp(scalar.E4M3[1:], exponent).astype(np.float32))[:, None]


def power(exponent: int) -> torch.Tensor:
    return torch.tensor([2.0**exponent])


def codes(q: QuantizedMatrix) -> torch.Tensor:
    return reference.unpack(q.codes)


def to_matrix(result, k: int) -> QuantizedMatrix:
    packed, scales, exponent = result
    return QuantizedMatrix(
        torch.from_numpy(packed), torch.from_numpy(scales), torch.from_numpy(np.ldexp(1.0, exponent).astype(np.float32)), k
    )


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP32 numbers just below and just above."""
    return torch.nextafter(x, torch.tensor(-torch.inf)), torch.nextafter(x, torch.tensor(torch.inf))


def test_one_block_by_hand():
    """amax 12 alone in the matrix: g = 2**-7 is the smallest power of two with 12 <= 2688 g, so s = 12 / (6 / 128) = 256
    (E4M3 exponent 15, byte 0x78) and s * g = 2. x / 2 = 6 -5 5.1 .25 -.25 .26 .75 0 -0 1.25 -1.75 2.5 -3.5 ..., ties to even."""
    x = [12.0, -10.0, 10.2, 0.5, -0.5, 0.52, 1.5, 0.0, -0.0, 2.5, -3.5, 5.0, -7.0, 1.0, -1e-20, 3.0]
    expected = [7, 8 + 6, 7, 0, 8, 1, 2, 0, 8, 2, 8 + 4, 4, 8 + 6, 1, 8, 3]
    q = reference.quantize(torch.tensor([x]), MAX6)
    assert q.gscale.tolist() == [2.0**-7]
    assert q.scales.tolist() == [[0x78, 0]]  # K = 16 is padded to 32 with a zero block
    assert q.codes[0, :8].tolist() == [lo + 16 * hi for lo, hi in zip(expected[0::2], expected[1::2])]  # even k in the low nibble
    assert q.codes[0, 8:].tolist() == [0] * 8
    assert reference.dequantize(q).tolist() == [[12, -8, 12, 0, 0, 1, 2, 0, 0, 2, -4, 4, -8, 1, 0, 3]]
    assert torch.signbit(reference.dequantize(q)).tolist() == [[c >= 8 for c in expected]]


@pytest.mark.parametrize(
    ("block", "byte", "values"),
    [
        # Nearest 13, error 263.5. 11 (offset -2): 11**2 from 77 that saturates at 66, 3 * 3**2 from 47 to 44. 12 (offset -1):
        # 5**2 + 6 * 2**2 + 6 * 4**2 + 3 * 1. 22 (offset +6): as 11. All three 148.
        pytest.param([77] + [22] * 6 + [44] * 6 + [47] * 3, 11, [66] + [22] * 6 + [44] * 9, id="-2-before--1-and-6"),
        # Nearest 4, error 16. 6 (offset +2): 2**2 from 22 to 24. 7 (offset +3): 1 from 22 to 21 and 12 * .5**2. Both 4.
        pytest.param([22] + [3] * 12 + [0] * 3, 6, [24] + [3] * 12 + [0] * 3, id="2-before-3"),
    ],
)
def test_equal_errors_keep_the_first_candidate(block, byte, values):
    """In units of 2**-9, with g = 1, where scale n is byte n: no scale has a smaller error than those that tie."""
    q = reference.quantize(torch.tensor([block]) / 512, WEIGHT, power(0))
    assert q.scales[0, 0] == byte
    assert (reference.dequantize(q) * 512).tolist() == [values]


@by_exponent
@pytest.mark.parametrize(
    "fmt", [FORMATS[f"{name}-tensor"] for name in (*SCALE_RULES, "stochastic")], ids=(*SCALE_RULES, "stochastic")
)
def test_every_scale_and_code_comes_back(exponent, fmt):
    """A block that holds all 16 codes has amax 6 s g: its scale is s under each rule (no error, and ties keep amax / 6), and
    every value is on the grid."""
    x = scale_values(exponent) * torch.cat([GRID, -GRID])
    q = reference.quantize(x, fmt, power(exponent), seed_for(fmt))
    assert q.scales[:, 0].equal(ALL_SCALES)
    assert codes(q)[:, :16].equal(torch.arange(16, dtype=torch.uint8).expand(126, 16))
    assert_same_bits(reference.dequantize(q), x, "values")


@by_exponent
@by_rule
def test_every_scale_and_single_code(exponent, rule):
    """A block of one repeated code c under scale s has no 6 to recall s by. It comes back as the same *value* wherever some
    E4M3 scale makes that value a 6 (s c / 6 is one), and as the scalar implementation says everywhere."""
    x = (scale_values(exponent) * GRID[1:]).reshape(-1, 1).expand(-1, 16)
    q = reference.quantize(x, NVFP4Format(rule=rule), power(exponent))
    assert_same_matrix(q, to_matrix(scalar.quantize(x.numpy(), rule, False, exponent), 16))
    six = {6 * s for s in scalar.E4M3_EXACT[1:]}
    exact = torch.tensor([s * c in six for s in scalar.E4M3_EXACT[1:] for c in scalar.E2M1_EXACT[1:]])
    assert exact.sum() > 126  # code 6 always, and others
    assert_same_bits(reference.dequantize(q)[exact], x[exact], "values")


@by_exponent
def test_every_tie_and_its_neighbours(exponent):
    """All 126 scales x 7 midpoints x (below, on, above) x both signs. The neighbours are one FP32 ulp away; at the lower clamp
    the one below 2**-9 * .25 * 2**-115 is subnormal."""
    ties = scale_values(exponent) * MIDPOINTS
    below, above = neighbours(ties)
    for values, expected in ((ties, TIE_CODES), (below, range(7)), (above, range(1, 8))):
        x = torch.cat([values, -values, 6 * scale_values(exponent)], dim=1)  # the 6 fixes the scale
        q = reference.quantize(x, MAX6, power(exponent))
        assert q.scales[:, 0].equal(ALL_SCALES)
        row = torch.tensor([*expected, *(8 + c for c in expected), 7], dtype=torch.uint8)
        assert_same_bits(codes(q)[:, :15], row.expand(126, 15), "codes")


@by_exponent
@pytest.mark.parametrize(("rule", "divisor"), [("max6", 6), ("four_over_six", 4)])
def test_every_scale_tie_and_its_neighbours(exponent, rule, divisor):
    """amax / divisor on each of the 126 midpoints of E4M3 (the first between 0 and 2**-9) and one FP32 ulp beside it."""
    middle = torch.from_numpy(np.ldexp(divisor * scalar.E4M3_MID, exponent).astype(np.float32))
    index = torch.arange(126, dtype=torch.uint8)
    even = index + index % 2
    below, above = neighbours(middle)
    for amax, expected in ((middle, even), (below, index), (above, index + 1)):
        if rule == "max6":
            assert_same_bits(reference.quantize(amax[:, None], MAX6, power(exponent)).scales[:, 0], expected, "scales")
        else:
            assert_same_bits(reference.e4m3_encode(amax / (divisor * power(exponent))), expected, "scales")


def test_global_scale_at_every_power_of_two():
    """2688 * 2**e belongs to e, its successor to e + 1; over all FP32 exponents, with the documented clamp."""
    e = torch.arange(-137, 117)
    amax = torch.from_numpy(np.ldexp(np.float32(2688), e.numpy()).astype(np.float32))
    below, above = neighbours(amax)
    for values, exponent in ((amax, e), (below, e), (above, e + 1)):
        expected = 2.0 ** exponent.clamp(-115, 116).float()
        assert_same_bits(reference.power_of_two_scale(values), expected, "power_of_two_scale")
        assert_same_bits(reference.quantize(-values[:, None], ACTIVATION).gscale, expected, "row scales")
    ends = torch.tensor([0.0, 2.0**-149, torch.finfo(torch.float32).max])
    assert reference.power_of_two_scale(ends).tolist() == [1.0, 2.0**-115, 2.0**116]


@by_rule
def test_beyond_448_saturates(rule):
    """With a given global scale that is too small, or above the upper clamp: scale 448, values clipped at 6 * 448 * g."""
    x = torch.tensor([[2688.0, 2689.0, 1e5, 3e38], [-2688.0, -3e38, 1.0, 672.0]])
    q = reference.quantize(x, NVFP4Format(rule=rule), torch.ones(1))
    assert q.scales[:, 0].tolist() == [0x7E, 0x7E]
    assert reference.dequantize(q).tolist() == [[2688.0] * 4, [-2688.0, -2688.0, 0.0, 672.0]]
    top = torch.tensor([[3.4e38, 2.0**116]])
    assert reference.dequantize(reference.quantize(top, ACTIVATION)).tolist() == [[2688 * 2.0**116, 0.0]]


@by_format
@by_distribution
def test_vectorised_scalar_equals_fractions(name, fmt):
    """The oracle of the next test is itself checked: 19 distributions x 8 formats x 111 values in exact rational arithmetic."""
    x = sample(name, 3, 37).float().numpy()
    seed = SEED if fmt.stochastic else None
    per_row = fmt.global_scale == "row"
    for got, expected in zip(scalar.quantize(x, fmt.rule, per_row, seed=seed), scalar.quantize_exact(x, fmt.rule, per_row, seed)):
        assert np.array_equal(got, expected)


@by_format
@by_distribution
def test_codes_and_scales_equal_scalar(name, fmt):
    """19 distributions x 62 rows x about 1000 columns, 1.2 million values, in each of 8 formats."""
    x = sample(name)
    result = scalar.quantize(x.float().numpy(), fmt.rule, fmt.global_scale == "row", seed=SEED if fmt.stochastic else None)
    q = reference.quantize(x, fmt, seed=seed_for(fmt))
    assert_same_matrix(q, to_matrix(result, x.shape[1]))
    values = scalar.dequantize(*result, x.shape[1])
    single = reference.dequantize(q)
    assert_same_values(single, torch.from_numpy(values.astype(np.float32)), "dequantised")
    assert np.array_equal(single.double().numpy(), values, equal_nan=True)  # in FP64, so it is exact in FP32
    assert_same_values(single.bfloat16().float(), single, "exact in BF16")
    assert_same_values(reference.dequantize(q, torch.bfloat16), single.bfloat16(), "dequantize(bfloat16)")
    assert_same_values(reference.dequantize(q, torch.float16), single.half(), "dequantize(float16)")


def test_every_dequantised_value_is_exact_in_bf16():
    """All 232 global scales x 127 block scales x 16 codes: 471,424 values."""
    scales = torch.arange(0x7F, dtype=torch.uint8)[:, None].repeat(1, 2)
    packed = reference.pack(torch.arange(32, dtype=torch.uint8).remainder(16).expand(127, 32))
    for exponent in range(-115, 117):
        q = QuantizedMatrix(packed, scales, power(exponent), 32)
        expected = torch.from_numpy(scalar.dequantize(packed.numpy(), scales.numpy(), np.array([exponent]), 32))
        single, brain = reference.dequantize(q), reference.dequantize(q, torch.bfloat16)
        assert single.double().equal(expected) and brain.double().equal(expected)
        assert torch.signbit(single).equal(torch.signbit(expected)) and torch.signbit(brain).equal(torch.signbit(expected))


def test_seeds_shared_scale_and_half_precision_inputs():
    """A given global scale is used as it is, (1,) or one per row; BF16 and FP16 inputs are quantised as their FP32 values."""
    x = sample("student_t", 9, 200)
    for exponents in (np.array([-3]), np.arange(-9, 0)):
        g = torch.from_numpy(np.ldexp(np.float32(1), exponents))
        q = reference.quantize(x, WEIGHT, g)
        assert_same_matrix(q, to_matrix(scalar.quantize(x.numpy(), "mse", False, exponents), 200))
    for dtype in (torch.bfloat16, torch.float16):
        assert_same_matrix(reference.quantize(x.to(dtype), WEIGHT), reference.quantize(x.to(dtype).float(), WEIGHT))
