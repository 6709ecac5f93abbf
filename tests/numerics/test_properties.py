"""What holds for any input, tried on inputs that hypothesis thinks of: the quantiser's bits, the side table, settings.

The bits are those of the definition in scalar_nvfp4.py, so what follows from the definition is not asked again.
Every run draws the same examples (``derandomize``). To search further:

    HYPOTHESIS_EXAMPLES=5000 python -m pytest tests/numerics/test_properties.py
"""

import json
import struct

import numpy as np
import pytest
import torch
from _assertions import FORMATS, SEED, assert_same_bits

pytest.importorskip("hypothesis")

import scalar_nvfp4 as scalar
from _hypothesis import json_values, tried
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from peft_nvfp4 import PactConfig, ops
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.autograd.activation_cache import QuantizedInput
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import NVFP4Format, QuantizedMatrix
from peft_nvfp4.quantization.groups import ACCURACY
from peft_nvfp4.quantization.options import MEMORY


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


@tried(60)
@given(matrices(rows=(1, 4), k=(1, 70)), st.floats(1, 2, width=32, exclude_max=True))
def test_global_scales_of_other_tools_are_rounded_once(x, factor):
    """Another tool's scale may be any number: BF16 values are then those of FP32, rounded once."""
    q = quantize(x, NVFP4Format())
    q = q._replace(gscale=q.gscale * factor)
    exact = reference.dequantize(q)
    assert_same_bits(reference.dequantize(q, torch.bfloat16), exact.to(torch.bfloat16), "BF16")
    assert_same_bits(ops.dequantize(q, torch.bfloat16), exact.to(torch.bfloat16), "operator")


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


@tried(120)
@given(st.dictionaries(st.sampled_from([*PactConfig.__dataclass_fields__, "x"]), json_values, max_size=4))
def test_quantization_configs_are_read_or_refused(content):
    try:
        config = PactConfig.from_dict(content)
    except (ValueError, TypeError):
        return
    assert config.accuracy in ACCURACY and config.memory in MEMORY
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert PactConfig.from_dict(config.to_dict()) == config
