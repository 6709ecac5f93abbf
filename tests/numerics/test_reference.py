"""Properties of NVFP4 as a whole: idempotence, independence of tokens, error levels, unbiased stochastic rounding.

Which code and which scale exactly: test_reference_rounding.py. Bytes and their order: test_reference_layout.py.
"""

import weakref

import numpy as np
import pytest
import scalar_nvfp4 as scalar
import torch
from _assertions import DISTRIBUTIONS, FORMATS, SEED, assert_same_bits, assert_same_matrix, sample

from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, GRADIENT_STOCHASTIC, SCALE_RULES, NVFP4Format, QuantizedMatrix

by_rule = pytest.mark.parametrize("rule", SCALE_RULES)
by_distribution = pytest.mark.parametrize("name", DISTRIBUTIONS)
ROUND_TO_NEAREST = {key: fmt for key, fmt in FORMATS.items() if not fmt.stochastic}
UNIT = torch.tensor([1.0])


def blocks(x: torch.Tensor) -> torch.Tensor:
    """(R, K) -> (R, nb, 16), K padded with zeros to the storage's multiple."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 16)


def again(q: QuantizedMatrix, fmt: NVFP4Format) -> QuantizedMatrix:
    """Quantise the dequantised matrix with the global scale it had."""
    return reference.quantize(reference.dequantize(q), fmt, q.gscale)


# Let s be a block's scale, q = amax / (6 g) what it was rounded from, and c the largest magnitude in the block after rounding, so
# that requantising sees amax = c s g. A subnormal s is n * 2**-9 with n < 8.
# * max6. c = 6 gives s back exactly. A normal s has |q / s - 1| <= 1/16, so amax / (s g) > 5 and c = 6. A subnormal one has
#   q / s >= 1 - 1 / 2n, so amax / (s g) >= 6 - 3 / n, which is 5 from n = 3 on (and that tie goes to n = 2). With n = 1 or 2, c
#   may be 3 or 4, and c s / 6 rounds to another scale. So codes and scales come back unless s <= 2**-8.
# * four_over_six. s from amax / 6 with c = 6 as above: error 0, and the first candidate wins. s from amax / 4 has amax / (s g) >=
#   3.75, or 4 - 2 / n if subnormal, which is 3.5 from n = 4 on, and that tie goes to 4. So c = 4 (or 6 at s = 448), and s, again
#   a candidate, has error 0. If the other candidate has error 0 too, it wins: scale and codes change, the values do not.
# * mse. s is at most 1.75 times the scale nearest to q, so for s >= 2**-5 (byte 16; the nine scales are normal), amax / (s g) >=
#   3.3 and c is 3, 4 or 6. With 6 the nearest scale is s; with 4, s is 4 or 5 codes above it; with 3 it is s / 2, which holds
#   every value (twice a code up to 3 is a code). Some candidate has error 0, so the values come back.
SMALLEST_STABLE_SCALE = {"max6": 3, "four_over_six": 4, "mse": 16}  # bytes


@pytest.mark.parametrize("key", ROUND_TO_NEAREST)
@by_distribution
def test_requantising_with_the_same_global_scale(name, key):
    fmt = ROUND_TO_NEAREST[key]
    q = reference.quantize(sample(name), fmt)
    q2 = again(q, fmt)
    stable = (q.scales >= SMALLEST_STABLE_SCALE[fmt.rule]) | (q.scales == 0)
    values, values2 = blocks(reference.dequantize(q)), blocks(reference.dequantize(q2))
    assert_same_bits(values2.nan_to_num(1)[stable], values.nan_to_num(1)[stable], "values")
    if fmt.rule == "max6":
        assert_same_bits(q2.scales[stable], q.scales[stable], "scales")
        codes, codes2 = (reference.unpack(m.codes).view(values.shape) for m in (q, q2))
        assert_same_bits(codes2[stable], codes[stable], "codes")
        # n = 2 becomes n = 1 with c = 6; n = 1 stays or becomes a zero block: nothing moves twice.
        assert_same_matrix(again(q2, fmt), q2, "third time")


@by_rule
def test_a_token_does_not_depend_on_its_batchmates(rule):
    """Rows of all distributions, NaN and Inf among them: permuted, in part and alone, they get the same bits."""
    fmt = NVFP4Format(rule=rule, global_scale="row")
    x = torch.cat([sample(name, 6, 72).float() for name in DISTRIBUTIONS])
    q = reference.quantize(x, fmt)

    def rows(index) -> QuantizedMatrix:
        return QuantizedMatrix(q.codes[index], q.scales[index], q.gscale[index], q.k)

    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert_same_matrix(reference.quantize(x[order], fmt), rows(order), "permuted")
    assert_same_matrix(reference.quantize(x[::3], fmt), rows(slice(None, None, 3)), "every third")
    for r in range(len(x)):
        assert_same_matrix(reference.quantize(x[r : r + 1], fmt), rows(slice(r, r + 1)), f"row {r} alone")


# Relative Frobenius error of a 1024 x 1024 Gaussian matrix: mean over 16 matrices quantised by scalar_nvfp4 (not the reference),
# and 7 times their standard deviation (8.4e-5, 6.1e-5, 4.8e-5). Row and tensor scales agree to 3e-6.
GAUSSIAN_ERROR = {"max6": (0.09513, 5.9e-4), "four_over_six": (0.08697, 4.2e-4), "mse": (0.08122, 3.4e-4)}


@by_rule
@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_error_level_of_a_gaussian(rule, scale):
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    d = reference.dequantize(reference.quantize(x, NVFP4Format(rule=rule, global_scale=scale)))
    expected, margin = GAUSSIAN_ERROR[rule]
    assert ((d - x).norm() / x.norm()).item() == pytest.approx(expected, abs=margin)


def test_second_term_gives_a_second_digit():
    """D(Q(x)) + D(Q(x - D(Q(x)))), the two terms of an input: 0.008672 by scalar_nvfp4 (16 matrices, standard deviation 1.7e-5,
    times 7)."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(2))
    rest = x - reference.dequantize(reference.quantize(x, ACTIVATION))
    rest = rest - reference.dequantize(reference.quantize(rest, ACTIVATION))
    assert (rest.norm() / x.norm()).item() == pytest.approx(0.008672, abs=1.2e-4)


def stochastic(x: torch.Tensor, seed: int) -> QuantizedMatrix:
    return reference.quantize(x, GRADIENT_STOCHASTIC, seed=torch.tensor(seed))


def test_stochastic_rounding_is_unbiased():
    """n seeds. A value is rounded to one of its two neighbours, ``gap`` apart, with mean x and variance v = (x - below)(above -
    x). Bernstein: |mean - x| > sqrt(2 L v / n) + 2 L gap / (3 n) with probability < 2 exp(-L); L = 24.5 makes the first term 7
    sigma. The 20 random bits round a probability up, by at most 2**-20: a bias of gap 2**-20 away from zero."""
    n = 1500
    x = torch.cat([sample(name, 4, 64).float() for name in ("normal", "student_t", "ties", "small_blocks")]).double()
    sums, low, high = torch.zeros_like(x), torch.full_like(x, torch.inf), torch.full_like(x, -torch.inf)
    for seed in range(n):
        q = stochastic(x.float(), seed)
        d = reference.dequantize(q).double()
        sums, low, high = sums + d, torch.minimum(low, d), torch.maximum(high, d)
    sg = (reference.e4m3_decode(q.scales) * q.gscale[:, None]).double().repeat_interleave(16, 1)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64) * sg[..., None]
    mag = x.abs()
    below = torch.where(grid <= mag[..., None], grid, 0).amax(-1)
    above = torch.where(grid >= mag[..., None], grid, torch.inf).amin(-1)
    assert above.isfinite().all()  # nothing saturates
    gap, variance = above - below, (mag - below) * (above - mag)
    assert (torch.minimum(low.abs(), high.abs()) >= below).all() and (torch.maximum(low.abs(), high.abs()) <= above).all()
    bias = gap * 2.0**-20
    assert ((sums / n - x).abs() <= 7 * (variance / n).sqrt() + 49 / 3 * gap / n + bias).all()
    unit = torch.where(sg > 0, sg, 1)  # all values together, in units of their scale: 16 times sharper
    pooled = ((sums / n - x) * x.sign() / unit).sum().abs()
    assert pooled <= 7 * (variance / unit**2 / n).sum().sqrt() + (bias / unit).sum()
    assert (low < high)[variance > 0.1 * gap**2].all()  # both neighbours were drawn


def test_stochastic_rounding_compares_twenty_bits():
    """u = the 20 leading bits of the value's random word; up where u < (x - below) / (above - below). With s g = 1 and x between
    4 and 6, x = 4 + 2 u / 2**20 must stay and the next multiple of half a step must go up; both are FP32 numbers."""
    u = torch.from_numpy((scalar.random_words(SEED, 64 * 64) >> np.uint64(12)).astype(np.int64)).view(64, 64)
    for add, code in ((0, 6), (1, 7)):
        x = 4 + (2 * u + add).float() * 2.0**-20
        x[:, ::16] = 6.0
        q = reference.quantize(x, GRADIENT_STOCHASTIC, UNIT, torch.tensor(SEED))
        assert q.scales.eq(0x38).all()
        expected = torch.full((64, 64), code, dtype=torch.uint8)
        expected[:, ::16] = 7
        assert_same_bits(reference.unpack(q.codes), expected, "codes")


def test_round_to_nearest_ignores_the_seed():
    x = sample("student_t", 5, 40)
    assert_same_matrix(reference.quantize(x, ACTIVATION, seed=torch.tensor(3)), reference.quantize(x, ACTIVATION))


def test_tables_made_in_inference_mode_serve_outside_of_it():
    """They are kept; an inference tensor could not enter a graph of autograd later."""
    for table in (reference._grid, reference._pair_table):
        table.cache_clear()
    device = torch.device("cpu")
    with torch.inference_mode():
        assert not reference._grid(device).is_inference()
        assert not reference._pair_table(torch.bfloat16, device).is_inference()


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_product_of_a_gpu(monkeypatch, terms, dtype, biased, given):
    """With a ``torch.mm`` that knows ``out_dtype`` on a CPU. Small integers: sums are exact, in BF16 up to 256."""
    matmul = pytest.importorskip("peft_nvfp4.kernels.triton.matmul", exc_type=ImportError)
    used = []

    def mm(a, b, out_dtype):
        assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
        used.append(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)
        return a.float() @ b.float()

    monkeypatch.setattr(torch, "mm", mm)
    rng = np.random.default_rng(0)
    *x, w = (rng.choice([-1.0, 0.0, 1.0], (rows, 32)).astype(np.float32) for rows in [3] * terms + [5])
    for matrix in (*x, w):
        matrix[:, ::16] = 6  # every block scale is 1, and the matrix its own NVFP4 form
    *x, w = map(torch.from_numpy, (*x, w))
    *qx, qw = (reference.quantize(matrix, NVFP4Format(), UNIT) for matrix in (*x, w))
    bias = torch.arange(5.0) if biased else None
    values = sum(x).to(dtype) if given else None
    y = matmul.many_rows(qx, qw, bias, dtype, values)
    expected = sum(x) @ w.T + (0 if bias is None else bias)
    assert y.dtype == dtype and torch.equal(y.float(), expected)
    assert not any(used) and len(used) == (terms if biased or terms == 2 or dtype != torch.bfloat16 else 0)


@pytest.mark.parametrize("has_bf16", [False, True])
def test_a_cpu_with_bf16_instructions_adds_two_terms_in_fp32(monkeypatch, has_bf16):
    """6 + 1/16 is no BF16 number; one term is, and so are its products with 1, of which one is not zero."""
    monkeypatch.setitem(reference.CPU_OPERAND, torch.bfloat16, torch.bfloat16 if has_bf16 else torch.float32)
    large, small = (torch.zeros(1, 32) for _ in range(2))
    large[0, 0], small[0, 0] = 6.0, 0.0625
    q = [reference.quantize(x, ACTIVATION) for x in (large, small)]
    w = reference.quantize(torch.nn.functional.one_hot(torch.tensor([0, 1]), 32).float() * 6, NVFP4Format())
    for dtype in (torch.float32, torch.bfloat16):
        exact = (reference.dequantize(q[0]) + reference.dequantize(q[1])) @ reference.dequantize(w).T
        assert_same_bits(reference.matmul(q, w, None, dtype), exact.to(dtype), "two terms")
        y = reference.matmul(q[:1], w, torch.tensor([0.0625, 0.0]), dtype)
        assert_same_bits(y, torch.tensor([[36.0625, 0.0]]).to(dtype), "one term and a bias")
        assert_same_bits(reference.matmul(q[:1], w, None, dtype), torch.tensor([[36.0, 0.0]]).to(dtype), "one term")
    assert reference.CPU_OPERAND[torch.float32] == reference.CPU_OPERAND[torch.float16] == torch.float32


# ---------------------------------------------------------------------------------------------- without looking up codes
def values_of_every_kind(dtype) -> torch.Tensor:
    """Ordinary blocks, ties, zeros of both signs, blocks that the row's largest makes vanish, NaN and Inf."""
    x = torch.randn(8, 72, generator=torch.Generator().manual_seed(0))
    x[1] = torch.arange(72) % 49 / 4.0 - 6.0
    x[2], x[3, ::2], x[4, :16], x[5, 16:32] = 0.0, -0.0, 1e-30, 1e30
    x[6, 3], x[7, 40] = float("nan"), -float("inf")
    return x.to(dtype)


def assert_same_values(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, the sign of zeros included; any NaN is a NaN."""
    assert actual.dtype == expected.dtype and torch.equal(actual.isnan(), expected.isnan())
    assert_same_bits(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0), "values")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_were_never_codes_are_those_of_the_codes(dtype):
    x, seed = values_of_every_kind(dtype), torch.tensor(3)
    for fmt in (ACTIVATION, GRADIENT_STOCHASTIC):
        q = reference.quantize(x, fmt, seed=seed)
        assert_same_values(reference.rounded(x, fmt, seed), reference.dequantize(q))
    for terms, offset in ((1, None), (2, None), (1, x[0].float()), (2, x[0].float())):
        parts, values = reference.quantize_dequantize_terms(x, offset, terms, dtype)
        expected = reference.quantize_terms(x, offset, terms)
        for part, other in zip(parts, expected, strict=True):
            assert_same_matrix(part, other)
        assert_same_values(values, reference.dequantize_terms(expected, offset, dtype))


# ---------------------------------------------------------------------------------------------- weights that stay dequantised
def test_values_of_a_weight_are_kept_until_it_changes():
    x, weight = sample("normal", 4, 64), sample("normal", 32, 64)
    w = reference.quantize(weight, NVFP4Format())
    before = reference.matmul(reference.quantize_terms(x, None, 2), w, None, torch.float32)
    assert reference.kept_values(w) is None
    reference.keep_values(w)
    kept = reference.kept_values(w)
    assert_same_bits(kept, reference.dequantize(w), "kept values")
    assert_same_bits(reference.matmul(reference.quantize_terms(x, None, 2), w, None, torch.float32), before, "product")
    assert reference.kept_values(w._replace(gscale=w.gscale.clone())) is None  # another tensor
    for edited in w[:3]:
        reference.keep_values(w)
        assert reference.kept_values(w) is not None
        edited.add_(0)
        assert reference.kept_values(w) is None


def test_values_in_inference_mode():
    """Its views count no edits, so they do not match."""
    w = reference.quantize(sample("normal", 32, 64), NVFP4Format())
    reference.keep_values(w)
    with torch.inference_mode():
        view = w._replace(gscale=w.gscale.view(torch.int32).view(torch.float32))
        assert reference.kept_values(view) is None and reference.kept_values(w) is not None
        reference.keep_values(view)  # refused
    assert reference.kept_values(w) is not None


def test_values_go_with_their_weight():
    w = reference.quantize(sample("normal", 32, 64), NVFP4Format())
    reference.keep_values(w)
    values = weakref.ref(reference.kept_values(w))
    del w
    assert values() is None


def test_values_are_not_kept_of_a_scale_that_is_no_power_of_two():
    """Its significand multiplies the sum, not the operand."""
    w = reference.quantize(sample("normal", 32, 64), NVFP4Format())
    w = w._replace(gscale=w.gscale * 1.5)
    reference.keep_values(w)
    assert reference.kept_values(w) is None
