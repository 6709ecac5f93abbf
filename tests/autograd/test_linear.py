"""The autograd Functions of a frozen linear: values and gradients against the formulas written out in FP64, the quantised
input, one branch over any input, and what is kept for backward. Tolerances are those of _linear_layers.py."""

import itertools

import pytest
import torch
from _assertions import assert_same_bits, assert_same_matrix
from _linear_layers import (
    RANKS,
    SEED,
    M,
    actual,
    assert_same_outcome,
    assert_within,
    by_gradients,
    by_terms,
    expected,
    forward,
    make_branches,
    make_input,
    make_layer,
    masks_and_seed,
    outcome,
    roundings,
    value_and_gradients,
)
from torch import nn

from peft_nvfp4 import ops
from peft_nvfp4.autograd.activation_cache import dequantized
from peft_nvfp4.autograd.frozen_linear import fake_quantize
from peft_nvfp4.autograd.lora import lora_branch
from peft_nvfp4.nn.registry import BACKENDS
from peft_nvfp4.numerics.formats import ACTIVATION, GRADIENT, GRADIENT_STOCHASTIC, QuantizedMatrix, packed_bytes
from peft_nvfp4.ops.linear import quantize_input

SHAPES = ((10, 7), (576, 64), (1000, 7))  # K, N: padded to 32 (10, 7, 1000), and not (576, 64)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"K{s[0]}-N{s[1]}")


CASES = [c for c in itertools.product((False, True), (0, 1, 2), (0.0, 0.3)) if c[1] or not c[2]]


@by_shape
@by_terms
@by_gradients
@pytest.mark.parametrize(
    "offset, adapters, dropout", CASES, ids=[f"{'centred' if c else 'plain'}-{n}adapters-p{p}" for c, n, p in CASES]
)
def test_value_and_gradients_are_those_of_the_dequantised_function(shape, terms, gradients, offset, adapters, dropout):
    """Autograd's on the function of D(x~), with and without a bias. dA, dB and dbias use the incoming gradient as it is; only the
    frozen weight's part of dx sees the quantised one (gradients="bf16": nothing of the backward is quantised)."""
    layer = make_layer(shape, terms, gradients, offset=offset, bias=adapters < 2 or not offset)
    branches, x, dy = make_branches(shape, adapters, dropout), make_input(shape[0]), torch.randn(M, shape[1])
    got = actual(forward(layer, x, branches), x, layer.bias, branches, dy)
    want, bound = expected(layer, x, branches, dy)
    assert got.keys() == want.keys()
    for name in want.keys() - (set() if gradients == "bf16" else {"dx"}):
        assert_within(got[name], want[name], bound[name], roundings(shape), name)


@by_shape
@by_gradients
@pytest.mark.parametrize("adapters, dropout", ((0, 0.0), (1, 0.0), (2, 0.3)), ids=("0adapters", "1adapter", "2adapters-p0.3"))
def test_input_gradient_formula(shape, gradients, adapters, dropout):
    """dx = D(Q(dy)) @ D(W_b).T + sum m * (s * dy @ B @ A), or dy @ D(W_f) instead of the first product."""
    layer = make_layer(shape, 1, gradients)
    branches, x, dy = make_branches(shape, adapters, dropout), make_input(shape[0]), torch.randn(M, shape[1])
    forward(layer, x, branches).backward(dy)
    masks, sr_seed = masks_and_seed(layer, x, branches)
    if gradients == "bf16":
        g, w = dy, layer.dequantize(torch.float32).T
    else:
        q = ops.quantize(dy, GRADIENT) if gradients == "nvfp4" else ops.quantize(dy, GRADIENT_STOCHASTIC, seed=sr_seed)
        g, w = ops.dequantize(q), ops.dequantize(ops.transpose_requantize(layer.forward_layout, 1.0))
        assert (g != dy).any()  # otherwise this case would say nothing about quantisation

    def formula(g, w, dy, factors):
        dx = g.double() @ w.double().T
        for (a, b, s), m in zip(factors, masks):
            dx = dx + m * (s * dy.double() @ b.double() @ a.double())
        return dx

    factors = [(b.a.detach(), b.b.detach(), b.scaling) for b in branches]
    magnitude = formula(g.abs(), w.abs(), dy.abs(), [(a.abs(), b.abs(), s) for a, b, s in factors])
    assert_within(x.grad, formula(g, w, dy, factors), magnitude, roundings(shape), "dx")


@by_shape
@pytest.mark.parametrize("gradients", ("nvfp4", "nvfp4_sr"))
def test_cached_and_transient_layouts_give_the_same_bits(shape, gradients):
    torch.manual_seed(0)
    layers = {}
    for layouts in ("cached", "transient"):
        torch.manual_seed(0)
        layers[layouts] = make_layer(shape, 2, gradients, layouts)
    assert layers["cached"].backward_layout is not None and layers["transient"].backward_layout is None
    x, dy, branches = make_input(shape[0]), torch.randn(M, shape[1]), make_branches(shape, 1, 0.3)
    cached, transient = (outcome(lambda: layer.lora_forward(x, branches), x, branches, dy) for layer in layers.values())
    assert_same_outcome(transient, cached)


@pytest.mark.parametrize("gradients", ("nvfp4", "bf16"))
@pytest.mark.parametrize("offset", (False, True), ids=("plain", "centred"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
def test_16_bit_value_and_gradients(gradients, offset, dtype):
    """On the way to one entry at most eleven results are rounded to 16 bits: D(x~), A, B, m * x, h, its product, the scaled
    product, the base product, the constant (twice with an offset), the sum; backward has no more."""
    shape = (576, 64)
    layer = make_layer(shape, 2, gradients, offset=offset, dtype=dtype)
    branches, x, dy = make_branches(shape, 1, 0.3), make_input(shape[0], dtype), torch.randn(M, shape[1]).to(dtype)
    got = actual(forward(layer, x, branches), x, layer.bias, branches, dy)
    want, bound = expected(layer, x, branches, dy)
    assert {name: g.dtype for name, g in got.items()} == {
        "y": dtype,
        "dx": dtype,
        "dbias": dtype,
        "dA0": torch.float32,  # FP32 masters keep FP32 gradients
        "dB0": torch.float32,
    }
    for name in want.keys() - ({"dx"} if gradients == "nvfp4" else set()):
        assert_within(got[name], want[name], bound[name], roundings(shape), name, dtype, 11)


def test_second_derivative_raises():
    layer, x = make_layer((64, 64)), make_input(64)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_quantize_input_terms():
    """The first term is Q(x - mu), the second Q of the FP32 remainder under the same global scale; their sum is D(x~)."""
    x, mu = torch.randn(M, 100) + 1, torch.randn(100)
    one, two, centred = quantize_input(x, None, 1), quantize_input(x, None, 2), quantize_input(x, mu, 2)
    assert [len(one), len(two), len(centred)] == [1, 2, 2]
    assert_same_matrix(one[0], ops.quantize(x, ACTIVATION))
    assert_same_matrix(two[0], one[0])
    rest = ops.quantize(x - ops.dequantize(one[0]), ACTIVATION, gscale=one[0].gscale)
    assert_same_matrix(two[1], rest, "second term: the first one's global scale")
    assert_same_matrix(centred[0], ops.quantize(x - mu, ACTIVATION), "centred first term")
    total = ops.dequantize(centred[0]) + ops.dequantize(centred[1]) + mu
    assert_same_bits(dequantized(centred, mu, torch.float32), total, "D(x~)")
    assert_same_bits(dequantized(centred, mu, torch.bfloat16), total.bfloat16(), "D(x~) rounded once")
    assert_same_bits(dequantized(one, None, torch.bfloat16).float(), ops.dequantize(one[0]), "one term is exact in BF16")


@by_terms
def test_fake_quantize_is_straight_through(terms):
    x, mu, dy = torch.randn(2, 3, 40, requires_grad=True), torch.randn(40), torch.randn(2, 3, 40)
    y = fake_quantize(x, terms, mu)
    y.backward(dy)
    flat = x.detach().view(-1, 40)
    assert_same_bits(y.detach().view(-1, 40), dequantized(quantize_input(flat, mu, terms), mu, torch.float32), "D(x~)")
    assert (y != x).any()
    assert_same_bits(x.grad, dy, "dx")


@pytest.mark.parametrize("dropout", (0.0, 0.3))
@pytest.mark.parametrize("leading", ((M,), (2, 3)), ids=("2d", "3d"))
def test_lora_branch_against_autograd(dropout, leading):
    shape = (100, 7)
    (branch,) = make_branches(shape, 1, dropout)
    x, dy = torch.randn(*leading, 100, requires_grad=True), torch.randn(*leading, 7)
    torch.manual_seed(SEED)
    y = lora_branch(x, branch)
    assert y.shape == dy.shape
    y.backward(dy)
    flat, dy = x.detach().reshape(M, 100), dy.reshape(M, 7)
    masks, _ = masks_and_seed(None, flat, [branch])
    zero, adapters = torch.zeros(7, 100), [(branch.a, branch.b, branch.scaling)]
    want = value_and_gradients(flat, zero, None, adapters, masks, dy)
    bound = value_and_gradients(flat.abs(), zero, None, [(a.abs(), b.abs(), s) for a, b, s in adapters], masks, dy.abs())
    got = {"y": y.detach().view(M, 7), "dx": x.grad.view(M, 100), "dA0": branch.a.grad, "dB0": branch.b.grad}
    assert got.keys() == want.keys()
    for name in want:
        assert_within(got[name], want[name], bound[name], roundings(shape), name)


def kept_for_backward(layer, x, branches):
    """Tensors that autograd keeps, each storage once, without the layer's and the adapters' parameters."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    own |= {t.untyped_storage().data_ptr() for b in branches for t in (b.a, b.b)}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer.lora_forward(x, branches)
    return list(kept.values()), y


def stored(t):
    return t.untyped_storage().nbytes()


def copies(branches, dtype=torch.float32):
    """Bytes of the adapters as the products use them: s * B, and A where it is cast or stacked with others."""
    stacked = sum(b.dropout == 0 for b in branches) > 1
    a = sum(b.a.numel() for b in branches if dtype != b.a.dtype or stacked and b.dropout == 0)
    return dtype.itemsize * (a + sum(b.b.numel() for b in branches))


@by_terms
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("adapters, dropout", ((1, 0.0), (1, 0.3), (2, 0.3)), ids=("1adapter", "1adapter-p0.3", "2adapters-p0.3"))
def test_bytes_kept_for_backward(terms, dtype, adapters, dropout):
    """Codes, block scales and one FP32 scale a token for every term, r values a token and a seed for every branch, and the
    adapters in the activations' dtype, no more."""
    shape = (576, 64)
    layer, branches = make_layer(shape, terms, dtype=dtype), make_branches(shape, adapters, dropout)
    x = make_input(shape[0], dtype)
    kept, y = kept_for_backward(layer, x, branches)
    formula = terms * (packed_bytes(M, shape[0]) + 4 * M) + sum(M * r * dtype.itemsize for r in RANKS[:adapters])
    formula += 8 * adapters * bool(dropout) + copies(branches, dtype)
    assert sum(map(stored, kept)) == formula
    assert not [t.shape for t in kept if t.is_floating_point() and t.numel() >= x.numel()]
    assert y.requires_grad  # the hooks saw a graph


@by_gradients
def test_nothing_of_the_input_is_kept_without_an_adapter(gradients):
    kept, y = kept_for_backward(make_layer((576, 64), 2, gradients), make_input(576), [])
    assert y.requires_grad
    assert sum(map(stored, kept)) == (8 if gradients == "nvfp4_sr" else 0)  # the seed of stochastic rounding


def test_branches_over_an_unquantised_input_share_it():
    """Two branches of the other backends keep the input once, and h each; never a mask."""
    shape = (576, 64)
    branches, x = make_branches(shape, 2, 0.3), make_input(shape[0])
    layer = BACKENDS["bf16"].quantize(nn.Linear(*shape))
    kept, _ = kept_for_backward(layer, x, branches)
    assert sum(map(stored, kept)) == stored(x) + sum(M * r * 4 for r in RANKS) + 2 * 8 + copies(branches)


def test_linears_of_one_input_share_its_codes_and_no_more():
    """Two layers with the same input spec keep the codes once; one with another number of terms, or an offset, makes its own."""
    shape = (576, 64)
    x, branches = make_input(shape[0]), [make_branches(shape, 1)[0] for _ in range(3)]
    layers = [make_layer(shape, 1), make_layer(shape, 1), make_layer(shape, 2)]
    for layer in layers:
        layer.shares_input = True  # as freeze_model finds for q/k/v and gate/up
    kept, outputs = {}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
        for layer, branch in zip(layers, branches):
            outputs.append(layer.lora_forward(x, [branch]))
    own = {p.untyped_storage().data_ptr() for layer in layers for p in layer.parameters()}
    own |= {t.untyped_storage().data_ptr() for b in branches for t in b[:2]}
    formula = (1 + 2) * (packed_bytes(M, shape[0]) + 4 * M) + 3 * M * RANKS[0] * 4 + sum(copies([b]) for b in branches)
    assert sum(stored(t) for pointer, t in kept.items() if pointer not in own) == formula
    for layer, branch, y in zip(layers, branches, outputs):
        assert_same_bits(y.detach(), layer.lora_forward(x.detach().clone(), [branch]).detach(), "y")


def test_layouts_with_and_without_padding_are_views_of_the_parameters():
    """The layer hands its own bytes to the operators; a copy per call would double the weight memory."""
    layer = make_layer((100, 7))
    for q, names in (
        (layer.forward_layout, ("weight", "weight_scales", "weight_gscale")),
        (layer.backward_layout, ("backward_weight", "backward_scales", "backward_gscale")),
    ):
        assert isinstance(q, QuantizedMatrix)
        assert [t.data_ptr() for t in q[:3]] == [getattr(layer, name).data_ptr() for name in names]
    assert (layer.forward_layout.k, layer.backward_layout.k) == (100, 7)
