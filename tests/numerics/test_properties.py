"""Properties that hold for any input, tried on inputs that hypothesis thinks of: quantiser, packing, scale layout, padding, GEMM,
the side table, settings.

Every run draws the same examples (``derandomize``), about 30 s in all. To search further:

    HYPOTHESIS_EXAMPLES=5000 python -m pytest tests/numerics/test_properties.py
"""

import json
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _assertions import FORMATS, SEED, assert_same_bits, assert_same_matrix

pytest.importorskip("hypothesis")

import scalar_nvfp4 as scalar
from _hypothesis import json_values, tried
from _products import multiplied
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from peft_nvfp4 import BACKENDS, NVFP4LoraConfig, PactConfig, ops
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.autograd.activation_cache import QuantizedInput
from peft_nvfp4.lora import side_files
from peft_nvfp4.lora.config import SIDE_CAR
from peft_nvfp4.numerics import layout, reference
from peft_nvfp4.numerics.formats import BLOCK, GSCALE_EXPONENTS, NVFP4Format, QuantizedMatrix, packed_bytes, padded_k
from peft_nvfp4.ops import linear
from peft_nvfp4.quantization.options import NAMES


def from_bits(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


# every bit pattern of FP32 (so NaN with any payload, Inf, subnormals), ordinary numbers, numbers on or next to rounding points
bits32 = st.integers(0, 2**32 - 1).map(from_bits)
ordinary = st.floats(-100, 100, width=32)
grid = st.sampled_from([0.0, -0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, -6.0, 448.0, 2688.0])
near = st.builds(lambda v, up: float(np.nextafter(np.float32(v), np.float32(np.inf if up else -np.inf))), grid, st.booleans())
finite = st.one_of(ordinary, grid, near)
anything = st.one_of(bits32, finite)
formats = st.sampled_from(list(FORMATS.values()))
nearest = st.sampled_from([f for f in FORMATS.values() if not f.stochastic])


@st.composite
def matrices(draw, values=finite, rows=(0, 4), k=(0, 70)):
    """(R, K) FP32. Each row has few distinct values and a power of two of its own: small examples stay readable."""
    r, width = draw(st.integers(*rows)), draw(st.integers(*k))
    pool = draw(st.lists(values, min_size=1, max_size=12))
    seed = draw(st.integers(0, 2**16))
    exponents = draw(st.lists(st.integers(-20, 20), min_size=r, max_size=r))
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.array(pool, np.float32)[rng.integers(0, len(pool), (r, width))]
        x = x * np.exp2(np.array(exponents, np.float32))[:, None] if r else x
    return torch.from_numpy(x.reshape(r, width).astype(np.float32))


def quantize(x, fmt, gscale=None):
    return reference.quantize(x, fmt, gscale, torch.tensor(SEED) if fmt.stochastic else None)


def blockwise(q, values):
    """Values (R, K) as (R, blocks, 16), padded."""
    return F.pad(values, (0, padded_k(q.k) - q.k)).view(values.shape[0], padded_k(q.k) // BLOCK, BLOCK)


# ---------------------------------------------------------------------------------------------- quantiser


@tried(150)
@given(matrices(anything, rows=(1, 4), k=(1, 70)), formats)
def test_bits_are_those_of_the_definition(x, fmt):
    codes, scales, exponents = scalar.quantize(
        x.numpy(), fmt.rule, fmt.global_scale == "row", seed=SEED if fmt.stochastic else None
    )
    q = quantize(x, fmt)
    assert_same_bits(q.scales, scales.astype(np.uint8), "scales")
    assert_same_bits(q.codes, codes.astype(np.uint8), "codes")
    assert_same_bits(q.gscale, np.ldexp(np.float32(1), exponents).astype(np.float32), "global scale")


@tried(100)
@given(matrices(anything), formats)
def test_the_operator_is_the_reference(x, fmt):
    assert_same_matrix(ops.quantize(x, fmt, seed=torch.tensor(SEED) if fmt.stochastic else None), quantize(x, fmt))


@tried(100)
@given(matrices(anything), formats)
def test_storage_is_as_announced(x, fmt):
    """Shapes, scales without a sign, NaN exactly where a block is not finite, nothing in the padding or under a zero scale."""
    q, (rows, k) = quantize(x, fmt), x.shape
    assert q.codes.shape == (rows, padded_k(k) // 2) and q.scales.shape == (rows, padded_k(k) // BLOCK)
    assert q.codes.numel() + q.scales.numel() == packed_bytes(rows, k)
    assert q.gscale.shape == ((rows,) if fmt.global_scale == "row" else (1,))
    mantissa, _ = torch.frexp(q.gscale)
    assert (mantissa == 0.5).all()
    bad = ~blockwise(q, x).isfinite().all(-1)
    assert_same_bits(q.scales == 0x7F, bad, "NaN scales")
    assert (q.scales <= 0x7F).all()
    codes = reference.unpack(q.codes)
    assert not codes[:, k:].any()
    assert not blockwise(q, codes[:, :k])[(q.scales == 0) | bad].any()
    assert_same_bits(reference.dequantize(q).isfinite(), ~bad.repeat_interleave(BLOCK, 1)[:, :k], "finite values")


@tried(150)
@given(matrices(), nearest)
def test_error_of_a_value(x, fmt):
    """Half the widest gap of the grid (4 to 6) times the scale, or, beyond the largest magnitude, the rest. Exact in FP64: all
    terms are FP32 numbers of nearby exponents."""
    q = quantize(x, fmt)
    step = (reference.e4m3_decode(q.scales).double() * q.gscale[:, None].double()).repeat_interleave(BLOCK, 1)[:, : q.k]
    error = (x.double() - reference.dequantize(q).double()).abs()
    assert (error <= torch.maximum(step, x.double().abs() - 6 * step)).all()
    if fmt.rule == "max6":  # the scale is amax / 6 rounded to 4 bits (or the smallest, 2**-9): 1/16 of 6 lies beyond at most
        assert (error <= torch.maximum(step, torch.full_like(step, 2.0**-9) * q.gscale[:, None].double() * 3)).all()


@tried(100)
@given(matrices(), formats, st.integers(-60, 60))
def test_powers_of_two_change_the_global_scale_only(x, fmt, e):
    q = quantize(x, fmt)
    zero = q.gscale == 1 if not x.any() else torch.zeros_like(q.gscale, dtype=torch.bool)
    moved = quantize(torch.ldexp(x, torch.tensor(e)), fmt)
    assume(bool(((q.gscale.log2() + e - 1 > GSCALE_EXPONENTS[0]) & (q.gscale.log2() + e + 1 < GSCALE_EXPONENTS[1])).all()))
    assert_same_bits(moved.codes, q.codes, "codes")
    assert_same_bits(moved.scales, q.scales, "scales")
    rows_of_zeros = ~x.any(1) if fmt.global_scale == "row" else torch.tensor([not x.any()])
    expected = torch.where(rows_of_zeros | zero, torch.ones_like(q.gscale), torch.ldexp(q.gscale, torch.tensor(e)))
    assert_same_bits(moved.gscale, expected, "global scale")


@tried(100)
@given(matrices(), nearest)
def test_a_sign_changes_signs_only(x, fmt):
    q, mirrored = quantize(x, fmt), quantize(-x, fmt)
    assert_same_bits(mirrored.scales, q.scales, "scales")
    assert_same_bits(mirrored.gscale, q.gscale, "global scale")
    assert torch.equal(reference.dequantize(mirrored), -reference.dequantize(q))


@tried(100)
@given(matrices(anything, rows=(1, 4), k=(96, 96)), nearest, st.randoms(use_true_random=False))
def test_order_of_rows_and_blocks_does_not_matter(x, fmt, random):
    """Nor does the order within a block, but for the searching rules, whose error is a rounded sum."""
    rows, k = x.shape
    r, b = random.sample(range(rows), rows), random.sample(range(k // BLOCK), k // BLOCK)
    moved = x.view(rows, -1, BLOCK)[r][:, b]
    q = quantize(x, fmt)
    got = quantize(moved.reshape(rows, k), fmt)
    kept = slice(0, k // BLOCK)
    assert_same_bits(got.scales[:, kept], q.scales[r][:, kept][:, b], "scales")
    codes = reference.unpack(q.codes)[:, :k].view(rows, -1, BLOCK)[r][:, b]
    assert_same_bits(reference.unpack(got.codes)[:, :k], codes.reshape(rows, k), "codes")
    assert_same_bits(got.gscale, q.gscale[r] if fmt.global_scale == "row" else q.gscale, "global scale")
    if fmt.rule == "max6":
        turned = quantize(moved.flip(-1).reshape(rows, k), fmt)
        assert_same_bits(turned.scales, got.scales, "scales of turned blocks")


@tried(100)
@given(matrices(anything, rows=(1, 3)), nearest, st.integers(0, 40))
def test_zeros_behind_a_row_change_nothing(x, fmt, more):
    q, longer = quantize(x, fmt), quantize(F.pad(x, (0, more)), fmt)
    assert_same_bits(longer.codes[:, : q.codes.shape[1]], q.codes, "codes")
    assert_same_bits(longer.scales[:, : q.scales.shape[1]], q.scales, "scales")
    assert not longer.codes[:, q.codes.shape[1] :].any() and not longer.scales[:, q.scales.shape[1] :].any()
    assert_same_bits(longer.gscale, q.gscale, "global scale")


@tried(60)
@given(matrices(), nearest)
def test_dequantised_values_are_bf16(x, fmt):
    q = quantize(x, fmt)
    values = reference.dequantize(q)
    assert_same_bits(reference.dequantize(q, torch.bfloat16).float(), values, "BF16")
    assert_same_bits(values.bfloat16().float(), values, "rounded to BF16")


@tried(60)
@given(matrices(rows=(1, 4), k=(1, 70)), st.floats(1, 2, width=32, exclude_max=True))
def test_global_scales_of_other_tools_are_rounded_once(x, factor):
    """Another tool's scale may be any number: BF16 values are then those of FP32, rounded once."""
    q = quantize(x, NVFP4Format())
    q = q._replace(gscale=q.gscale * factor)
    exact = reference.dequantize(q)
    assert_same_bits(reference.dequantize(q, torch.bfloat16), exact.to(torch.bfloat16), "BF16")
    assert_same_bits(ops.dequantize(q, torch.bfloat16), exact.to(torch.bfloat16), "operator")


@tried(60)
@given(matrices(), formats)
def test_stochastic_or_not_a_value_that_is_in_the_format_stays(x, fmt):
    """Requantising with the same global scale, where the block's scale is normal and (for stochastic rounding) was kept."""
    q = quantize(x, NVFP4Format(global_scale=fmt.global_scale))
    values = reference.dequantize(q)
    again = quantize(values, fmt, q.gscale)
    stable = (q.scales >= 16) | (q.scales == 0)
    if fmt.stochastic:
        stable &= again.scales == q.scales
    got, expected = blockwise(q, reference.dequantize(again)), blockwise(q, values)
    assert torch.equal(got[stable], expected[stable])


# ---------------------------------------------------------------------------------------------- packing, scale layout, padding

bytes_of = st.integers(0, 2**16).map(lambda s: np.random.default_rng(s))


@tried(60)
@given(st.integers(0, 5), st.integers(0, 40), bytes_of)
def test_packing_is_a_bijection(rows, half, rng):
    codes = torch.from_numpy(rng.integers(0, 16, (rows, 2 * half), dtype=np.uint8))
    packed = torch.from_numpy(rng.integers(0, 256, (rows, half), dtype=np.uint8))
    assert_same_bits(reference.unpack(reference.pack(codes)), codes, "codes")
    assert_same_bits(reference.pack(reference.unpack(packed)), packed, "bytes")


@tried(60)
@given(st.integers(1, 300), st.integers(1, 21), bytes_of)
def test_swizzling_is_a_bijection_with_zeros_for_padding(rows, cols, rng):
    scales = torch.from_numpy(rng.integers(1, 256, (rows, cols), dtype=np.uint8))
    flat = layout.swizzle_scales(scales)
    tiles = -(-cols // 4)
    assert flat.numel() == -(-rows // 128) * 128 * tiles * 4
    assert_same_bits(layout.unswizzle_scales(flat, rows, cols), scales, "scales")
    assert int((flat != 0).sum()) == rows * cols  # every scale once, the padding zero
    for r, c in zip(rng.integers(0, rows, 8), rng.integers(0, cols, 8)):
        offset = (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        assert flat[offset] == scales[r, c]


@tried(60)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(1, 70), nearest, bytes_of)
def test_transposing_requantises_the_dequantised_weight(rows, k, seed, fmt, rng):
    q = quantize(torch.from_numpy(rng.standard_normal((rows, k), dtype=np.float32)), fmt)
    t = ops.transpose_requantize(q, NVFP4Format(rule=fmt.rule))
    assert t.k == rows
    assert_same_matrix(t, quantize(reference.dequantize(q).T.contiguous(), NVFP4Format(rule=fmt.rule)))


# ---------------------------------------------------------------------------------------------- GEMM


def small_integers(rng, rows, k):
    """A matrix that is its own NVFP4 form: magnitudes of the grid, with a 6 in every block."""
    x = rng.choice([0, 1, 2, 3, 4, 6], (rows, k)) * rng.choice([-1, 1], (rows, k))
    x[:, ::BLOCK] = 6
    return torch.from_numpy(x.astype(np.float32))


@tried(80)
@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 200), st.booleans(), st.sampled_from([1, 2]), bytes_of)
def test_products_of_integers_are_exact(m, n, k, biased, terms, rng):
    """Sums of at most 200 * 36 * 2 are exact in FP32 in any order, and any K, M, N may need padding somewhere."""
    x, w = small_integers(rng, m, k), small_integers(rng, n, k)
    unit = torch.ones(1)
    qx, qw = (reference.quantize(v, NVFP4Format(), unit) for v in (x, w))
    qx = QuantizedMatrix(qx.codes, qx.scales, unit.expand(m).contiguous(), k)
    assert_same_bits(reference.dequantize(qx), x, "x")
    bias = torch.from_numpy(rng.integers(-50, 50, n).astype(np.float32)) if biased else None
    y = multiplied([qx] * terms, qw, bias, torch.float32)
    expected = terms * (x.double() @ w.double().T) + (0 if bias is None else bias.double())
    assert torch.equal(y.double(), expected)  # of zeros, whatever sign


@tried(60)
@given(matrices(rows=(1, 5), k=(48, 48)), matrices(rows=(1, 5), k=(48, 48)), st.sampled_from([1, 2]))
def test_products_of_any_values(x, w, terms):
    """48 products, exact in FP32, and 47 sums in any order: 48 * 2**-24 of the sum of absolute values, one more for two terms."""
    qx = linear.quantize_input(x, None, terms)
    qw = quantize(w, NVFP4Format(rule="mse"))
    y = multiplied(list(qx), qw, None, torch.float32).double()
    dx, dw = sum(reference.dequantize(t).double() for t in qx), reference.dequantize(qw).double()
    assert ((y - dx @ dw.T).abs() <= 50 * 2.0**-24 * (dx.abs() @ dw.abs().T)).all()


@tried(40)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 60), bytes_of)
def test_a_row_of_a_product_is_its_own(m, n, k, rng):
    """What is in other rows, NaN included, does not matter to a row."""
    x, w = small_integers(rng, m, k), small_integers(rng, n, k)
    spoiled = x.clone()
    victim = int(rng.integers(0, m))
    spoiled[victim, int(rng.integers(0, k))] = float("nan")
    fmt, qw = NVFP4Format(global_scale="row"), quantize(w, NVFP4Format())
    clean, got = (multiplied([quantize(v, fmt)], qw, None, torch.float32) for v in (x, spoiled))
    others = [r for r in range(m) if r != victim]
    assert torch.equal(got[others], clean[others])
    assert got[victim].isnan().all()


# ---------------------------------------------------------------------------------------------- the side table


class SideTable(RuleBasedStateMachine):
    """Tensors are made, entered, changed and dropped in any order; an entry is found exactly while its tensor is what it was."""

    tensors = Bundle("tensors")

    def __init__(self):
        super().__init__()
        self.start = activation_cache.live()
        self.alive = {}  # name -> [tensor, entry or None, whether it still counts]
        self.names = 0

    def entry(self, terms, dtype):
        q = QuantizedMatrix(torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.uint8), torch.ones(1), 32)
        return QuantizedInput((q,) * terms, None, dtype)

    @rule(target=tensors)
    def make(self):
        self.names += 1
        self.alive[self.names] = [torch.zeros(4), None, False]
        return self.names

    @rule(name=tensors, terms=st.sampled_from([1, 2]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def put(self, name, terms, dtype):
        if name in self.alive:
            state = self.alive[name]
            state[1], state[2] = self.entry(terms, dtype), True
            activation_cache.put(state[0], state[1])

    @rule(name=tensors, how=st.sampled_from(["add_", "index", "through a view", "resize"]))
    def change(self, name, how):
        if name in self.alive:
            x = self.alive[name][0]
            if how == "add_":
                x.add_(1)
            elif how == "index":
                x[0] = 2
            elif how == "through a view":
                x.view(2, 2)[1].mul_(2)
            else:
                x.data = torch.zeros(4) + 1
            self.alive[name][2] = False

    @rule(name=tensors)
    def drop(self, name):
        self.alive.pop(name, None)

    @rule(name=tensors, terms=st.sampled_from([1, 2]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def look(self, name, terms, dtype):
        if name in self.alive:
            x, entry, counts = self.alive[name]
            fits = entry is not None and counts and len(entry.terms) == terms and entry.dtype == dtype
            assert activation_cache.get(x, terms, None, dtype) is (entry if fits else None)
            assert activation_cache.get(x, terms, torch.zeros(4), dtype) is None  # another offset
            assert activation_cache.get(x.view(4), terms, None, dtype) is None  # another tensor over the same memory

    @invariant()
    def nothing_is_left_of_dropped_tensors(self):
        assert activation_cache.live() - self.start == sum(entry is not None for _, entry, _ in self.alive.values())

    def teardown(self):
        self.alive.clear()
        assert activation_cache.live() == self.start


TestSideTable = SideTable.TestCase
TestSideTable.settings = settings(tried(60), stateful_step_count=25)


# ---------------------------------------------------------------------------------------------- settings

words = {
    "backend": sorted(BACKENDS),
    "accuracy": ["paper", "balanced", "high"],
    "memory": ["fast", "small", "smallest"],
}
own_settings = st.fixed_dictionaries(
    {name: st.sampled_from(known) for name, known in words.items()}
    | {"skip_modules": st.none() | st.lists(st.from_regex(r"[a-z_.]{1,12}", fullmatch=True), max_size=3)}
)
plain_settings = st.fixed_dictionaries(
    {
        "r": st.integers(1, 64),
        "lora_alpha": st.integers(1, 128),
        "lora_dropout": st.sampled_from([0.0, 0.1]),
        "bias": st.sampled_from(["none", "all", "lora_only"]),
        "use_rslora": st.booleans(),
    }
)


@tried(25)
@given(own_settings, plain_settings)
def test_settings_survive_a_folder(tmp_path_factory, own, plain):
    folder = tmp_path_factory.mktemp("adapter")
    config = NVFP4LoraConfig(**own, **plain)
    config.save_pretrained(str(folder))
    read = NVFP4LoraConfig.from_pretrained(str(folder))
    assert read.options == config.options
    assert {name: getattr(read, name) for name in plain} == plain
    assert not set(NAMES) & json.loads((folder / "adapter_config.json").read_text()).keys()


@tried(120)
@given(st.sampled_from(sorted(words)), st.text(max_size=12))
def test_unknown_words_are_refused_by_name(field, word):
    assume(word not in words[field])
    with pytest.raises(ValueError) as error:
        NVFP4LoraConfig(**{field: word})
    assert repr(word) in str(error.value)


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    NVFP4LoraConfig().save_pretrained(str(folder))
    return folder


@tried(120)
@given(
    st.one_of(
        json_values,
        st.builds(
            lambda own, name, value: {"format_version": side_files.VERSION, **own, name: value},
            own_settings,
            st.sampled_from([*NAMES, "format_version", "x"]),
            json_values,
        ),
    ),
    st.integers(0, 2**16),
)
def test_side_cars_are_read_or_refused(adapter_folder, content, damage):
    """Any JSON, and JSON with a byte changed: a configuration comes out of it, or a ValueError that names the file."""
    data = bytearray(json.dumps(content).encode())
    if damage % 3 == 0:
        data[damage % len(data)] = damage // 7 % 256
    (adapter_folder / SIDE_CAR).write_bytes(data)
    try:
        config = NVFP4LoraConfig.from_pretrained(str(adapter_folder))
    except ValueError as error:
        assert SIDE_CAR in str(error)
    else:
        for name, known in words.items():
            assert getattr(config, name) in known
        assert isinstance(config.merge_aware, bool)
        assert isinstance(config.skip_modules, list) and all(isinstance(module, str) for module in config.skip_modules)


@tried(120)
@given(st.dictionaries(st.sampled_from([*PactConfig.__dataclass_fields__, "x"]), json_values, max_size=4))
def test_quantization_configs_are_read_or_refused(content):
    try:
        config = PactConfig.from_dict(content)
    except (ValueError, TypeError):
        return
    assert config.accuracy in words["accuracy"] and config.memory in words["memory"]
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert PactConfig.from_dict(config.to_dict()) == config
