"""Every operator on every device: contract of torch.library, values, messages, and the same bits on CPU and CUDA.

What the numbers should be is settled in test_reference*.py; here the operators are held to it.
"""

import itertools

import pytest
import torch
from _assertions import (
    DISTRIBUTIONS,
    DTYPES,
    FORMATS,
    SEED,
    assert_same_bits,
    assert_same_matrix,
    assert_same_values,
    by_device,
    by_dtype,
    gaussian,
    generator,
    sample,
    seed_for,
    to,
)
from _products import multiplied, one_product
from torch._subclasses.fake_tensor import FakeTensorMode

from peft_nvfp4 import ops
from peft_nvfp4.autograd import frozen_linear
from peft_nvfp4.numerics import philox, reference
from peft_nvfp4.numerics.formats import (
    ACTIVATION,
    GRADIENT_STOCHASTIC,
    SCALE_RULES,
    WEIGHT,
    WEIGHT_BACKWARD,
    NVFP4Format,
    QuantizedMatrix,
)
from peft_nvfp4.numerics.products import BackwardLinear, Dgrad, ForwardLinear, Fprop, LowRank
from peft_nvfp4.ops import fused, linear, matrix
from peft_nvfp4.ops.core import Operator

by_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


# ---------------------------------------------------------------------------------------------- the contract of torch.library
def opcheck_cases():
    """(id, operator, arguments on the CPU)."""
    op = torch.ops.peft_nvfp4
    x = sample("student_t", 5, 40)
    seed, g = torch.tensor(SEED), torch.tensor([0.25])
    for key, fmt in FORMATS.items():
        args = (fmt.rule, fmt.global_scale == "row", fmt.stochastic)
        yield f"quantize-{key}", op.quantize, (x, None, seed if fmt.stochastic else None, *args)
    yield "quantize-given-scale", op.quantize, (x, g, None, "max6", False, False)
    yield "quantize-given-row-scales", op.quantize, (x.bfloat16(), g.repeat(5), None, "mse", False, False)
    yield "quantize-fp32-transposed", op.quantize, (sample("normal", 64, 6).T, None, None, "four_over_six", False, False)
    yield "quantize-fp16-transposed", op.quantize, (sample("fp16", 64, 6).T, None, None, "max6", True, False)
    for dtype in DTYPES:
        yield f"dequantize-{dtype}", op.dequantize, (*gaussian(5, 40, ACTIVATION), dtype)
    yield "dequantize-tensor-scale", op.dequantize, (*gaussian(3, 64, WEIGHT), torch.bfloat16)
    yield "transpose_requantize", op.transpose_requantize, (*gaussian(40, 33, WEIGHT), 1.0)
    x1, x2, w = gaussian(3, 40, ACTIVATION), gaussian(3, 40, ACTIVATION, 1), gaussian(6, 40, WEIGHT)
    for xs, bias, dtype in itertools.product(([x1], [x1, x2]), (None, torch.ones(6)), (torch.float32, torch.bfloat16)):
        name = f"fprop-{len(xs)}-{'no' if bias is None else 'with'}-constant-{dtype}"
        yield name, op.fprop, linear.fprop.flatten(one_product(xs, w, bias, dtype))
    given = one_product([x1], w, None, torch.float32, reference.dequantize(x1))
    yield "fprop-given-values", op.fprop, linear.fprop.flatten(given)
    a, up, h = torch.ones(3, 40), torch.ones(6, 3), torch.ones(3, 3)
    linears = [ForwardLinear(w, None, 1.0, [LowRank(None, up)]), ForwardLinear(w, torch.ones(6), 1.0, [LowRank(h, up)])]
    yield "fprop-adapters", op.fprop, linear.fprop.flatten(Fprop([x1], linears, torch.float32, None, a))
    backward = BackwardLinear(torch.ones(5, 33), gaussian(40, 33, WEIGHT), seed)
    yield "dgrad", op.dgrad, linear.dgrad.flatten(Dgrad([backward, backward._replace(seed=None)], torch.ones(5, 3), a))
    yield "quantize_terms", op.quantize_terms, (x, torch.ones(40), 2)
    yield "dequantize_terms", op.dequantize_terms, linear.dequantize_input.flatten([x1, x2], torch.ones(40), torch.float16)


CASES = list(opcheck_cases())


@pytest.mark.parametrize(("op", "args"), [c[1:] for c in CASES], ids=[c[0].replace("torch.", "") for c in CASES])
@by_device
def test_opcheck(op, args, device):
    """Schema (nothing mutated or aliased), registration of autograd, fake against real, and AOT with dynamic shapes."""
    args = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), args)
    torch.library.opcheck(op.default, args)


def test_every_operator_is_checked():
    """An operator of one matrix or of linears that is added without a case above is noticed."""
    operators = {value for module in (matrix, linear) for value in vars(module).values() if isinstance(value, Operator)}
    assert {operator.library_operator for operator in operators} == {case[1] for case in CASES}


# ---------------------------------------------------------------------------------------------- messages
def blank(rows: int, k: int, **replaced) -> QuantizedMatrix:
    kp = -(-k // 32) * 32
    codes, scales = torch.zeros(rows, kp // 2, dtype=torch.uint8), torch.zeros(rows, kp // 16, dtype=torch.uint8)
    return QuantizedMatrix(codes, scales, torch.ones(rows), k)._replace(**replaced)


def _quantize(*gscale, fmt=WEIGHT, seed=None):
    return ops.quantize(torch.ones(4, 4), fmt, *gscale, seed=seed)


def _dequantize(**replaced):
    return ops.dequantize(blank(2, 40, **replaced))


def _matmul(*terms: QuantizedMatrix, w=None, bias=None, dtype=torch.float32, values=None):
    return multiplied(terms, w or blank(6, 40), bias, dtype, values)


SR, f32 = GRADIENT_STOCHASTIC, torch.ones
ERRORS = {  # what is wrong: the call, and words that the message must have: operator, argument, expected and got
    "quantize-vector": (lambda: ops.quantize(f32(4), WEIGHT), r"quantize: x must be a matrix .*\(4,\)"),
    "quantize-int": (lambda: ops.quantize(f32(4, 4).int(), WEIGHT), "quantize: x must be float32.*int32"),
    "quantize-fp64": (lambda: ops.quantize(f32(4, 4).double(), WEIGHT), "quantize: x must be float32.*float64"),
    "quantize-no-seed": (lambda: _quantize(fmt=SR), "quantize: .*needs a seed"),
    "quantize-seed-dtype": (lambda: _quantize(fmt=SR, seed=f32(())), "quantize: seed must be int64.*float32"),
    "quantize-seed-shape": (lambda: _quantize(fmt=SR, seed=f32(3).long()), r"quantize: seed must .*\(3,\)"),
    "quantize-gscale-dtype": (lambda: _quantize(f32(1).half()), "quantize: gscale must be .*float16"),
    "quantize-gscale-shape": (lambda: _quantize(f32(3)), r"quantize: gscale must be .*\(4,\).*\(3,\)"),
    "dequantize-codes-dtype": (lambda: _dequantize(codes=f32(2, 32)), "dequantize: codes must be .*uint8.*float32"),
    "dequantize-codes-ndim": (lambda: _dequantize(codes=f32(64).byte()), r"dequantize: codes must have 2.*\(64,\)"),
    "dequantize-codes-shape": (lambda: ops.dequantize(blank(2, 40)._replace(k=65)), "dequantize: codes .*K=65 have 48 .*got 32"),
    "dequantize-scales-shape": (
        lambda: _dequantize(scales=f32(2, 3).byte()),
        r"dequantize: scales must be \(2, 4\), got \(2, 3\)",
    ),
    "dequantize-gscale-length": (lambda: _dequantize(gscale=f32(3)), "dequantize: gscale must hold 1 or 2.*got 3"),
    "dequantize-gscale-dtype": (lambda: _dequantize(gscale=f32(1).double()), "dequantize: gscale must be .*float32.*float64"),
    "transpose_requantize-scales": (
        lambda: ops.transpose_requantize(blank(2, 40, scales=f32(2, 4)), 1.0),
        "transpose_requantize: scales must be .*uint8.*float32",
    ),
    "transpose_requantize-gscale": (
        lambda: ops.transpose_requantize(blank(40, 33, gscale=f32(40)), 1.0),
        "transpose_requantize: a weight has one global scale, got 40",
    ),
    "fprop-no-terms": (lambda: _matmul(), r"fprop \(input\): .*one or two terms, got 0"),
    "fprop-three-terms": (lambda: _matmul(*[blank(3, 40)] * 3), r"fprop \(input\): .*one or two terms, got 3"),
    "fprop-k": (lambda: _matmul(blank(3, 72)), "fprop: .*K=72.*K=40"),
    "fprop-k-within-padding": (lambda: _matmul(blank(3, 41)), "fprop: .*K=41.*K=40"),
    "fprop-input": (lambda: _matmul(blank(3, 40, gscale=f32(3).half())), r"fprop \(input\): gscale must be .*float32.*float16"),
    "fprop-rows-of-terms": (lambda: _matmul(blank(3, 40), blank(4, 40)), r"fprop \(input\): the terms must have 3 rows, got 4"),
    "fprop-weight": (
        lambda: _matmul(blank(3, 40), w=blank(6, 40, scales=f32(6, 4))),
        r"fprop \(weight\): scales must be .*uint8.*float32",
    ),
    "fprop-bias": (lambda: _matmul(blank(3, 40), bias=f32(5)), r"fprop: a constant must be \(6,\), got \(5,\)"),
    "fprop-values": (lambda: _matmul(blank(3, 40), values=f32(3, 64)), r"fprop: values must be \(3, 40\), got \(3, 64\)"),
    "fprop-hidden": (
        lambda: linear.fprop(
            Fprop(
                [blank(3, 40)],
                [ForwardLinear(blank(6, 40, gscale=f32(1)), None, 1.0, [LowRank(f32(2, 4), f32(6, 4))])],
                f32(1).dtype,
            )
        ),
        r"fprop: h must be \(3, 4\), got \(2, 4\)",
    ),
    "fprop-dtype": (lambda: _matmul(blank(3, 40), dtype=torch.float64), "fprop: dtype must be .*got torch.float64"),
    "dequantize-dtype": (lambda: ops.dequantize(blank(3, 40), torch.int32), "dequantize: dtype must be .*got torch.int32"),
    "dropout-dtype": (lambda: fused.dropout(f32(2).int(), 0.5, f32(()).long()), "dropout: x must be .*int32"),
    "dropout-p": (lambda: fused.dropout(f32(2), 1.0, f32(()).long()), r"dropout: p must be in \[0, 1\), got 1"),
    "dropout-seed-shape": (lambda: fused.dropout(f32(2), 0.5, f32(2).long()), r"dropout: seed must .*\(2,\)"),
    "dropout-seed": (lambda: fused.dropout(f32(2), 0.5, f32(())), "dropout: seed must be int64.*float32"),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, FakeTensorMode], ids=["operator", "direct", "fake"])
@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_messages(call, message, mode):
    """The same message through the dispatcher, past it (as eager code without autograd calls) and while a compiler traces
    shapes."""
    with mode(), pytest.raises(RuntimeError, match=message):
        call()


def test_a_third_term_reaches_no_implementation(monkeypatch):
    """Kernels assume one or two. It is refused before one is called, and by the operator where that is called itself."""
    x, w = blank(3, 40), blank(6, 40)
    reached = []
    monkeypatch.setitem(linear.fprop.direct, "cpu", lambda p: [reached.append(len(p.terms))])
    with torch.no_grad():
        _matmul(x)
        _matmul(x, x)
        with pytest.raises(RuntimeError, match="one or two terms, got 3"):
            _matmul(x, x, x)
    assert reached == [1, 2]
    with pytest.raises(RuntimeError, match="one or two terms, got 3"):
        torch.ops.peft_nvfp4.fprop(*linear.fprop.flatten(one_product([x] * 3, w, None, torch.float32)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("median", "row", False), "unknown block-scale rule 'median'; choose one of max6, four_over_six, mse"),
        (("max6", "column", False), "global_scale is 'tensor' or 'row', got 'column'"),
        (("mse", "row", True), "stochastic rounding is defined with rule='max6' only, got 'mse'"),
    ],
    ids=["rule", "global_scale", "stochastic"],
)
def test_formats_that_do_not_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        NVFP4Format(*arguments)


def test_eager_code_without_autograd_goes_past_the_dispatcher(monkeypatch):
    monkeypatch.setitem(fused.dropout.direct, "cpu", lambda *args: "straight")
    x, seed = torch.ones(2, 4), torch.tensor(SEED)
    with torch.no_grad():
        assert fused.dropout(x, 0.5, seed) == "straight"
        assert fused.dropout(torch.nn.Parameter(x, requires_grad=False), 0.5, seed) == "straight"
    assert_same_bits(fused.dropout(x, 0.5, seed), fused.dropout.reference(x, 0.5, seed), "through the dispatcher")
    with FakeTensorMode() as mode, torch.no_grad():
        assert fused.dropout(mode.from_tensor(x), 0.5, mode.from_tensor(seed)).shape == (2, 4)


# ---------------------------------------------------------------------------------------------- autograd
def _graph_cases():
    x, q, w = torch.randn(4, 32), gaussian(4, 32, ACTIVATION), gaussian(6, 32, WEIGHT)
    g = torch.ones(1, requires_grad=True)
    yield "quantize", lambda: ops.quantize(x.requires_grad_(), ACTIVATION).gscale
    yield "dequantize", lambda: ops.dequantize(ops.quantize(x.requires_grad_(), ACTIVATION), torch.bfloat16)
    yield "dequantize", lambda: ops.dequantize(w._replace(gscale=g))
    yield "transpose_requantize", lambda: ops.transpose_requantize(w._replace(gscale=g), 1.0).gscale
    yield "fprop", lambda: multiplied([q], w, torch.ones(6, requires_grad=True), torch.float32)
    yield "fprop", lambda: multiplied([q], w._replace(gscale=g), None, torch.bfloat16)


GRAPHS = list(_graph_cases())


@pytest.mark.parametrize(("name", "build"), GRAPHS, ids=[f"{i}-{case[0]}" for i, case in enumerate(GRAPHS)])
def test_backward_raises_and_names_the_way(name, build):
    message = f"peft_nvfp4::{name} has no derivative.*NVFP4FrozenLinear.*peft_nvfp4.autograd.frozen_linear.fake_quantize"
    with pytest.raises(RuntimeError, match=message):
        build().sum().backward()
    assert callable(frozen_linear.fake_quantize)


# ---------------------------------------------------------------------------------------------- the same bits everywhere
@by_device
@by_format
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_same_bits_on_every_device(name, fmt, device):
    """The operators on ``device`` against the plain reference on the CPU, through the dispatcher and past it (without
    autograd)."""
    x, given = sample(name, 37), torch.tensor([2.0**-6])
    want = reference.quantize(x, fmt, seed=seed_for(fmt))
    want_given = reference.quantize(x, fmt, given, seed_for(fmt))
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            q = ops.quantize(x.to(device), fmt, seed=seed_for(fmt, device))
            assert_same_matrix(q, want)
            assert all(t.is_contiguous() and t.device.type == device for t in q[:3])
            assert_same_matrix(ops.quantize(x.to(device), fmt, given.to(device), seed_for(fmt)), want_given, "given scale")
            for dtype in DTYPES:
                assert_same_values(ops.dequantize(q, dtype), reference.dequantize(want, dtype), f"dequantize({dtype})")
            if fmt.global_scale == "tensor":
                wb = ops.transpose_requantize(q, 1.0)
                assert_same_matrix(wb, reference.transpose_requantize(want, WEIGHT_BACKWARD), "transpose_requantize")


@by_device
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_quantize_weight_by_chunks(rule, device, monkeypatch):
    """Chunks of 5 rows, the last one of a single row, give the bits of the whole; so does one chunk. One largest value is
    negative."""
    fmt = NVFP4Format(rule=rule)
    for w in (sample("student_t", 36, 100), -sample("outlier_per_row", 36, 100), sample("bf16", 36, 100)):
        want, want_given = reference.quantize(w, fmt), reference.quantize(w, fmt, torch.ones(1))
        for chunk in (599, 1 << 22):
            monkeypatch.setattr(matrix, "CHUNK", chunk)
            monkeypatch.setattr(matrix, "CHUNK_CPU", chunk)
            assert_same_matrix(ops.quantize_weight(w.to(device), fmt), want)
            assert_same_matrix(ops.quantize_weight(w.to(device), fmt, torch.ones(1, device=device)), want_given)


@pytest.mark.parametrize("sizes", [(3,), (3, 1), (1, 4, 2)])
def test_shared_global_scale(sizes):
    """The one that the weights would have as rows of one matrix; a weight may be empty, its largest value negative."""
    weights = [sample("student_t", rows, 40) * 2.0**-i for i, rows in enumerate(sizes)]
    weights[-1] = -weights[-1].abs() * 64
    for given in (weights, [*weights, torch.zeros(0, 40)]):
        found = ops.shared_gscale(given)
        assert_same_bits(found, ops.weight_gscale(torch.cat(weights)), "scale")
        assert found.shape == (1,)


@by_device
@by_dtype
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
def test_dropout_on_every_device(p, dtype, device):
    """The mask of the reference, wherever the seed lives; a strided x gets the mask of its shape."""
    x = torch.randn(1001, 5, generator=generator(5)).to(dtype)
    mask = philox.dropout_mask((5, 1001), p, torch.tensor(SEED), torch.device("cpu"), torch.float32)
    expected = (x.T.float() * mask).to(dtype)
    with torch.no_grad():
        for seed in (torch.tensor(SEED), torch.tensor(SEED, device=device)):
            for like in (x.T.to(device), x.T.contiguous().to(device)):
                assert_same_bits(fused.dropout(like, p, seed), expected, "dropout")


@by_device
def test_no_rows(device):
    """An empty batch (a rank or an expert without tokens) passes through every operator."""
    for fmt in FORMATS.values():
        q = ops.quantize(torch.empty(0, 40, device=device), fmt, seed=seed_for(fmt, device))
        assert [tuple(t.shape) for t in q[:3]] == [(0, 32), (0, 4), (0 if fmt.global_scale == "row" else 1,)] and q.k == 40
        assert ops.dequantize(q).shape == (0, 40)
        y = multiplied([q, q], to(gaussian(6, 40, WEIGHT), device), torch.ones(6, device=device), torch.bfloat16)
        assert y.shape == (0, 6) and y.dtype == torch.bfloat16
    assert fused.dropout(torch.empty(0, 8, device=device), 0.1, torch.tensor(1)).shape == (0, 8)


# ---------------------------------------------------------------------------------------------- compile
@by_device
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic, device):
    w, bias, seed = to(gaussian(24, 72, WEIGHT), device), torch.ones(24, device=device), torch.tensor(SEED, device=device)

    def step(x):
        q = ops.quantize(x, ACTIVATION)
        rest = ops.quantize(x - ops.dequantize(q, x.dtype), GRADIENT_STOCHASTIC, seed=seed)
        y = multiplied([q, rest], w, bias, torch.bfloat16)
        wb = ops.transpose_requantize(w, 1.0)
        return fused.dropout(y, 0.1, seed), q.scales, rest.codes, *wb[:3]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (3, 17):
        x = torch.randn(m, 72, generator=generator(m)).to(device)
        for i, (got, expected) in enumerate(zip(compiled(x), step(x), strict=True)):
            assert_same_bits(got, expected, f"M={m}, output {i}")
