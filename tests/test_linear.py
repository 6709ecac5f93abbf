"""The autograd Functions of peft_nvfp4.linear: values and gradients against the formulas written out in FP64, and what is kept.

Tolerances are bounds, not guesses. Every result here is a polynomial with sums of products, so two ways of computing it differ by
no more than (roundings on the way) x (unit roundoff) x (the same polynomial on absolute values); see Higham, "Accuracy and
Stability of Numerical Algorithms", chapter 3. The same code evaluates the polynomial on absolute values, gradients included.
"""

import itertools
import re

import pytest
import torch
from _assertions import assert_same_bits, assert_same_matrix, unit
from torch import nn
from torch.utils.checkpoint import checkpoint

from peft_nvfp4 import linear, ops
from peft_nvfp4.backends import BACKENDS, FrozenOptions
from peft_nvfp4.formats import ACTIVATION, GRADIENT, GRADIENT_STOCHASTIC, WEIGHT_BACKWARD, QuantizedMatrix, packed_bytes
from peft_nvfp4.linear import Branch, dequantize_input, draw_seed, fake_quantize, lora_branch, quantize_input

M = 6
SEED = 1234
RANKS, SCALINGS = (4, 3), (2.0, 0.5)
SHAPES = ((10, 7), (576, 64), (1000, 7))  # K, N: padded to 32 (10, 7, 1000), and not (576, 64)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"K{s[0]}-N{s[1]}")
by_terms = pytest.mark.parametrize("terms", (1, 2), ids=lambda t: f"{t}term")
by_gradients = pytest.mark.parametrize("gradients", ("nvfp4", "nvfp4_sr", "bf16"))


def make_layer(shape, terms=1, gradients="nvfp4", layouts="cached", centre=False, bias=True, dtype=torch.float32):
    k, n = shape
    layer = BACKENDS["nvfp4"].quantize(nn.Linear(k, n, bias=bias).to(dtype), FrozenOptions(layouts, gradients, terms))
    if centre:
        layer.set_centre(3 * torch.randn(k))
    if bias:
        layer.bias.requires_grad_()
    return layer


def make_branches(shape, adapters, dropout=0.0):
    """Leaf tensors, FP32 masters as PEFT makes them, B not zero."""
    k, n = shape
    return [
        Branch((torch.randn(r, k) / 8).requires_grad_(), (torch.randn(n, r) / 4).requires_grad_(), s, dropout)
        for r, s in zip(RANKS[:adapters], SCALINGS)
    ]


def make_input(k, dtype=torch.float32, requires_grad=True):
    return (torch.randn(M, k) + 1).to(dtype).requires_grad_(requires_grad)


def forward(layer, x, branches, seed=SEED):
    torch.manual_seed(seed)
    return layer.lora_forward(x, branches)


def masks_and_seed(layer, x, branches, seed=SEED):
    """The dropout masks (FP64) and the seed of stochastic rounding that :func:`forward` has drawn."""
    torch.manual_seed(seed)
    seeds = [draw_seed() if b.dropout else None for b in branches]
    like = torch.empty(x.numel() // x.shape[-1], x.shape[-1])
    masks = [torch.ones_like(like) if s is None else ops.dropout_mask(like, b.dropout, s) for s, b in zip(seeds, branches)]
    return [m.double() for m in masks], draw_seed()


def lora_linear(x, w, bias, adapters, masks):
    """The dequantised function in plain torch; adapters is a list of (A, B, s)."""
    y = x @ w.T if bias is None else x @ w.T + bias
    for (a, b, s), m in zip(adapters, masks):
        y = y + s * ((m * x) @ a.T) @ b.T
    return y


def value_and_gradients(x, w, bias, adapters, masks, dy):
    """y, and autograd's gradients of sum(dy * y) in x, the bias, and every A and B, all in FP64."""
    x, dy, w = x.double().requires_grad_(), dy.double(), w.double()
    bias = None if bias is None else bias.detach().double().requires_grad_()
    adapters = [(a.detach().double().requires_grad_(), b.detach().double().requires_grad_(), s) for a, b, s in adapters]
    y = lora_linear(x, w, bias, adapters, masks)
    leaves = {"dx": x}
    if bias is not None:
        leaves["dbias"] = bias
    for i, (a, b, _) in enumerate(adapters):
        leaves |= {f"dA{i}": a, f"dB{i}": b}
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy)))}


def expected(layer, x, branches, dy):
    """(values, the same polynomial on absolute values) of the straight-through function of D(x~)."""
    x, centre = x.detach().reshape(-1, x.shape[-1]), layer._centre
    parts = quantize_input(x, layer.options.terms, centre)
    xd, w = dequantize_input(parts, centre, torch.float32), layer.dequantize(torch.float32)
    magnitude = sum(ops.dequantize(p).abs() for p in parts) + (0 if centre is None else centre.abs())
    masks, _ = masks_and_seed(layer, x, branches)
    adapters = [(b.a, b.b, b.scaling) for b in branches]
    bias = layer.bias
    bound = value_and_gradients(
        magnitude, w.abs(), None if bias is None else bias.abs(), [(a.abs(), b.abs(), s) for a, b, s in adapters], masks, dy.abs()
    )
    return value_and_gradients(xd, w, bias, adapters, masks, dy), bound


def actual(y, x, bias, branches, dy):
    """What the layer computed, with the names of :func:`expected`."""
    y.backward(dy)
    got = {"y": y.detach(), "dx": x.grad}
    if bias is not None:
        got["dbias"] = bias.grad
    for i, b in enumerate(branches):
        got |= {f"dA{i}": b.a.grad, f"dB{i}": b.b.grad}
    return got


def assert_within(got, want, magnitude, roundings, what, low=torch.float32, low_roundings=0):
    """|got - want| <= (roundings of FP32 + roundings of ``low``) x magnitude."""
    tolerance = (roundings * unit(torch.float32) + low_roundings * unit(low)) * magnitude
    excess = (got.double() - want).abs() - tolerance
    assert got.shape == want.shape and not got.isnan().any(), what
    assert excess.max() <= 0, f"{what}: off by up to {(got.double() - want).abs().max():.3g}, allowed {tolerance.max():.3g}"


def roundings(shape):
    """An upper bound on the FP32 roundings of any one entry: the longest chain adds K, then r, N or M terms, plus a product each
    and a handful of scalings, casts and outer sums."""
    return shape[0] + shape[1] + M + sum(RANKS) + 16


# ---------------------------------------------------------------------------------------------- values and gradients

CASES = [c for c in itertools.product((False, True), (0, 1, 2), (0.0, 0.3)) if c[1] or not c[2]]


@by_shape
@by_terms
@pytest.mark.parametrize(
    "centre, adapters, dropout", CASES, ids=[f"{'centred' if c else 'plain'}-{n}adapters-p{p}" for c, n, p in CASES]
)
def test_value_and_gradients_are_those_of_the_dequantised_function(shape, terms, centre, adapters, dropout):
    """With gradients="bf16" nothing of the backward is quantised, so all of it is autograd's on the function of D(x~)."""
    layer = make_layer(shape, terms, "bf16", centre=centre)
    branches, x, dy = make_branches(shape, adapters, dropout), make_input(shape[0]), torch.randn(M, shape[1])
    got = actual(forward(layer, x, branches), x, layer.bias, branches, dy)
    want, bound = expected(layer, x, branches, dy)
    assert got.keys() == want.keys()
    for name in want:
        assert_within(got[name], want[name], bound[name], roundings(shape), name)


@by_shape
@by_gradients
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
def test_adapter_gradients_do_not_depend_on_the_gradient_format(shape, gradients, bias):
    """dA, dB and dbias use the incoming gradient as it is; only the frozen weight's part of dx sees the quantised one."""
    layer = make_layer(shape, 2, gradients, centre=True, bias=bias)
    branches, x, dy = make_branches(shape, 2, 0.3), make_input(shape[0]), torch.randn(M, shape[1])
    got = actual(forward(layer, x, branches), x, layer.bias, branches, dy)
    want, bound = expected(layer, x, branches, dy)
    assert got.keys() == want.keys()
    for name in want.keys() - {"dx"}:
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
        g, w = ops.dequantize(q), ops.dequantize(ops.transpose_requantize(layer.forward_layout, WEIGHT_BACKWARD))
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
    results = {}
    for layouts, layer in layers.items():
        x.grad = branches[0].a.grad = branches[0].b.grad = None
        results[layouts] = actual(forward(layer, x, branches), x, layer.bias, branches, dy)
    for name, value in results["cached"].items():
        assert_same_bits(results["transient"][name], value, name)


def test_stochastic_gradients_follow_the_seed():
    """The same seed gives the same bits, another seed others; the adapter gradients do not change with it."""
    layer, x, dy = make_layer((64, 64), 1, "nvfp4_sr"), make_input(64), torch.randn(M, 64)
    (branch,) = make_branches((64, 64), 1)
    runs = []
    for seed in (1, 1, 2):
        x.grad = branch.a.grad = None
        forward(layer, x, [branch], seed).backward(dy)
        runs.append((x.grad, branch.a.grad))
    assert_same_bits(runs[1][0], runs[0][0], "dx with the same seed")
    assert (runs[2][0] != runs[0][0]).any()
    assert_same_bits(runs[2][1], runs[0][1], "dA with another seed")


@pytest.mark.parametrize("gradients", ("nvfp4", "bf16"))
@pytest.mark.parametrize("centre", (False, True), ids=("plain", "centred"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
def test_16_bit_value_and_gradients(gradients, centre, dtype):
    """On the way to one entry at most eleven results are rounded to 16 bits: D(x~), A, B, m * x, h, its product, the scaled
    product, the base product, the constant (twice with a centre), the sum; backward has no more."""
    shape = (576, 64)
    layer = make_layer(shape, 2, gradients, centre=centre, dtype=dtype)
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


@pytest.mark.parametrize("which", ("A", "B"))
def test_adapter_gradient_matches_a_finite_difference_of_the_forward(which):
    """The forward is linear in A and in B, so a central difference is exact for any step but for rounding. Its two values, and
    the gradient, are sums whose magnitudes ``bound`` gives; the step's rows are the parameter's own in another order, so a moved
    forward has about twice that magnitude at most, and the factor 4 covers both values."""
    shape = (576, 64)
    layer, x, dy = make_layer(shape, 2), make_input(shape[0]), torch.randn(M, shape[1])
    (branch,) = make_branches(shape, 1, 0.3)
    parameter = branch.a if which == "A" else branch.b
    forward(layer, x, [branch]).backward(dy)
    _, bound = expected(layer, x, [branch], dy)
    step = parameter.detach()[torch.randperm(len(parameter))]
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            moved = parameter + sign * step
            b = branch._replace(a=moved) if which == "A" else branch._replace(b=moved)
            values.append((forward(layer, x, [b]).double() * dy.double()).sum())
    derivative = (parameter.grad.double() * step.double()).sum()
    difference = (values[0] - values[1]) / 2
    assert derivative.abs() > 1  # not a comparison of zeros
    tolerance = 4 * roundings(shape) * unit(torch.float32) * (bound["y"] * dy.abs().double()).sum()
    assert (derivative - difference).abs() <= tolerance


def test_second_derivative_raises():
    layer, x = make_layer((64, 64)), make_input(64)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# ---------------------------------------------------------------------------------------------- the input x~


def test_quantize_input_terms():
    """The first term is Q(x - mu), the second Q of the FP32 remainder under the same global scale; their sum is D(x~)."""
    x, mu = torch.randn(M, 100) + 1, torch.randn(100)
    one, two, centred = quantize_input(x, 1, None), quantize_input(x, 2, None), quantize_input(x, 2, mu)
    assert [len(one), len(two), len(centred)] == [1, 2, 2]
    assert_same_matrix(one[0], ops.quantize(x, ACTIVATION))
    assert_same_matrix(two[0], one[0])
    rest = ops.quantize(x - ops.dequantize(one[0]), ACTIVATION, gscale=one[0].gscale)
    assert_same_matrix(two[1], rest, "second term: the first one's global scale")
    assert_same_matrix(centred[0], ops.quantize(x - mu, ACTIVATION), "centred first term")
    total = ops.dequantize(centred[0]) + ops.dequantize(centred[1]) + mu
    assert_same_bits(dequantize_input(centred, mu, torch.float32), total, "D(x~)")
    assert_same_bits(dequantize_input(centred, mu, torch.bfloat16), total.bfloat16(), "D(x~) rounded once")
    assert_same_bits(dequantize_input(one, None, torch.bfloat16).float(), ops.dequantize(one[0]), "one term is exact in BF16")


def test_second_term_and_centre_reduce_the_error():
    """A second term leaves about a tenth of the error (the error of E2M1 is 9 %), a centre removes the mean's share."""
    mu = 5 * torch.randn(512)
    x = torch.randn(64, 512) + mu

    def error(terms, centre):
        return (dequantize_input(quantize_input(x, terms, centre), centre, torch.float32) - x).norm() / x.norm()

    assert error(2, None) < 0.2 * error(1, None)
    assert error(1, mu) < 0.5 * error(1, None)  # |x - mu| is a fifth of |x|


@by_terms
def test_fake_quantize_is_straight_through(terms):
    x, mu, dy = torch.randn(2, 3, 40, requires_grad=True), torch.randn(40), torch.randn(2, 3, 40)
    y = fake_quantize(x, terms, mu)
    y.backward(dy)
    flat = x.detach().view(-1, 40)
    assert_same_bits(y.detach().view(-1, 40), dequantize_input(quantize_input(flat, terms, mu), mu, torch.float32), "D(x~)")
    assert (y != x).any()
    assert_same_bits(x.grad, dy, "dx")


# ---------------------------------------------------------------------------------------------- one branch over any input


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


@pytest.mark.parametrize("call", ("layer", "branch"))
def test_dropout_drops_and_rescales(call):
    """A mask entry is 0 with probability 0.3 and else 1/0.7, seen through A = identity and B = identity. Of 64 x 256 draws the
    share of zeros is within five standard deviations, sqrt(.3 * .7 / 16384) = 0.0036 each."""
    eye = torch.eye(256)
    branch = Branch(eye, eye, 1.0, 0.3)
    x = torch.full((64, 256), 6 * 448 * 2.0**-11)  # exact in NVFP4: code 6, block scale 448
    torch.manual_seed(SEED)
    if call == "branch":
        mask = lora_branch(x, branch)
    else:
        base = nn.Linear(256, 256, bias=False)
        base.weight.data.zero_()
        mask = BACKENDS["nvfp4"].quantize(base).lora_forward(x, [branch])
    values = mask.unique()
    assert_same_bits(values, torch.stack([torch.tensor(0.0), x[0, 0] * (torch.tensor(1.0) / (1 - 0.3))]), "mask values")
    assert abs((mask == 0).float().mean() - 0.3) < 5 * 0.0036


# ---------------------------------------------------------------------------------------------- what is kept


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


# ---------------------------------------------------------------------------------------------- ways of calling


def test_layer_used_twice_before_backward():
    """Gradients of two uses add up; a sum of two FP32 numbers has the same bits in either order."""
    shape = (64, 64)
    layer, (branch,) = make_layer(shape, 2), make_branches(shape, 1, 0.3)
    xs, dys = [make_input(64), make_input(64)], [torch.randn(M, 64), torch.randn(M, 64)]
    separate = []
    for seed, x, dy in zip((1, 2), xs, dys):
        x.grad = branch.a.grad = branch.b.grad = layer.bias.grad = None
        forward(layer, x, [branch], seed).backward(dy)
        separate.append([x.grad, branch.a.grad, branch.b.grad, layer.bias.grad])
        x.grad = None
    branch.a.grad = branch.b.grad = layer.bias.grad = None
    first, second = forward(layer, xs[0], [branch], 1), forward(layer, xs[1], [branch], 2)
    torch.autograd.backward([first, second], dys)
    assert_same_bits(xs[0].grad, separate[0][0], "dx of the first use")
    assert_same_bits(xs[1].grad, separate[1][0], "dx of the second use")
    for i, (name, parameter) in enumerate({"dA": branch.a, "dB": branch.b, "dbias": layer.bias}.items(), 1):
        assert_same_bits(parameter.grad, separate[0][i] + separate[1][i], name)


def test_layer_applied_to_its_own_output():
    """dx of a chain is the chain of the two input gradients."""
    layer, (branch,) = make_layer((64, 64)), make_branches((64, 64), 1)
    x, dy = make_input(64), torch.randn(M, 64)
    middle = layer.lora_forward(x, [branch])
    layer.lora_forward(middle, [branch]).backward(dy)
    leaf = middle.detach().requires_grad_()
    layer.lora_forward(leaf, [branch]).backward(dy)
    again = x.detach().requires_grad_()
    layer.lora_forward(again, [branch]).backward(leaf.grad)
    assert_same_bits(x.grad, again.grad, "dx")


def test_forward_without_gradient():
    layer, x, branches = make_layer((64, 64), 2), make_input(64), make_branches((64, 64), 1, 0.3)
    with torch.no_grad():
        y = forward(layer, x, branches)
    assert not y.requires_grad
    assert_same_bits(y, forward(layer, x, branches).detach(), "y")


@by_gradients
def test_eval_mode_changes_no_gradient(gradients):
    """Gradients in eval mode (from_pretrained's; a loop may train in it to switch dropout off) are those of training."""
    layer, (branch,) = make_layer((64, 64), 1, gradients), make_branches((64, 64), 1)
    x, dy = make_input(64), torch.randn(M, 64)
    results = []
    for training in (True, False):
        x.grad = branch.a.grad = None
        forward(layer.train(training), x, [branch]).backward(dy)
        results.append((x.grad, branch.a.grad))
    assert_same_bits(results[1][0], results[0][0], "dx")
    assert_same_bits(results[1][1], results[0][1], "dA")


@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad, torch.inference_mode), ids=lambda m: m.__name__)
def test_an_input_edited_in_place_is_quantised_again(mode):
    """A static buffer that is refilled between two calls must not find the codes of its old content."""
    layer, branches = make_layer((64, 7), 2), make_branches((64, 7), 1)
    with mode():
        x = torch.randn(M, 64)
        old = layer.lora_forward(x, branches)
        x.copy_(torch.randn(M, 64))
        new, fresh = layer.lora_forward(x, branches), layer.lora_forward(x.clone(), branches)
    assert (new != old).any()
    assert_same_bits(new.detach(), fresh.detach(), "y")


def test_linears_of_one_input_share_its_codes_and_no_more():
    """Two layers with the same input spec keep the codes once; one with another number of terms, or a centre, makes its own."""
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


def test_input_that_needs_no_gradient(monkeypatch):
    """The first layer of a model: adapter gradients have the same bits, and dx, the dearest product of backward, is not made."""
    layer, (branch,) = make_layer((64, 64), 2), make_branches((64, 64), 1, 0.3)
    x, dy = make_input(64), torch.randn(M, 64)
    forward(layer, x, [branch]).backward(dy)
    da, db = branch.a.grad, branch.b.grad
    branch.a.grad = branch.b.grad = None
    detached = x.detach()
    monkeypatch.setattr(linear, "_input_gradient", lambda *args: pytest.fail("dx was computed"))
    forward(layer, detached, [branch]).backward(dy)
    assert_same_bits(branch.a.grad, da, "dA")
    assert_same_bits(branch.b.grad, db, "dB")
    assert detached.grad is None


@pytest.mark.parametrize("which", ("a", "b"))
def test_one_factor_frozen(which):
    layer, (branch,) = make_layer((64, 64)), make_branches((64, 64), 1)
    other = branch.b if which == "a" else branch.a
    getattr(branch, which).requires_grad_(False)
    layer.lora_forward(make_input(64), [branch]).sum().backward()
    assert getattr(branch, which).grad is None
    assert other.grad.abs().sum() > 0


def test_layer_and_bias_frozen_without_adapter_has_only_an_input_gradient():
    layer, x = make_layer((64, 64)), make_input(64)
    layer.bias.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("leading", ((M,), (2, 3), (1, 2, 3)), ids=("2d", "3d", "4d"))
def test_leading_dimensions_are_flattened(leading):
    layer, branches = make_layer((64, 7), 2), make_branches((64, 7), 1, 0.3)
    flat, dy = make_input(64), torch.randn(M, 7)
    forward(layer, flat, branches).backward(dy)
    x = flat.detach().view(*leading, 64).requires_grad_()
    y = forward(layer, x, branches)
    assert y.shape == (*leading, 7)
    y.backward(dy.view(*leading, 7))
    assert_same_bits(x.grad.view(M, 64), flat.grad, "dx")
    assert_same_bits(y.detach().view(M, 7), forward(layer, flat, branches).detach(), "y")


def test_single_vector():
    layer, (branch,) = make_layer((64, 7)), make_branches((64, 7), 1)
    x = torch.randn(64, requires_grad=True)
    y = layer.lora_forward(x, [branch])
    y.backward(torch.ones(7))
    row = x.detach().view(1, 64).requires_grad_()
    as_row = layer.lora_forward(row, [branch])
    as_row.backward(torch.ones(1, 7))
    assert_same_bits(y.detach(), as_row.detach()[0], "y")
    assert_same_bits(x.grad, row.grad[0], "dx")


@pytest.mark.parametrize("adapters", (0, 1), ids=("plain", "adapter"))
@by_gradients
@pytest.mark.parametrize("leading", ((0,), (2, 0)), ids=("2d", "3d"))
def test_empty_batch(adapters, gradients, leading):
    """No token: an empty output, and zero gradients of everything trainable, as nn.Linear gives."""
    layer, branches = make_layer((64, 7), 2, gradients), make_branches((64, 7), adapters, 0.3)
    x = torch.randn(*leading, 64, requires_grad=True)
    y = layer.lora_forward(x, branches)
    assert y.shape == (*leading, 7)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.bias.grad.abs().sum() == 0
    assert all(t.grad.abs().sum() == 0 for b in branches for t in (b.a, b.b))


@pytest.mark.parametrize(
    "view",
    (lambda x: x.T.contiguous().T, lambda x: torch.stack([x, x], -1)[..., 0], lambda x: x.repeat(1, 2)[:, :64]),
    ids=("transposed", "strided", "slice"),
)
def test_non_contiguous_input(view):
    layer, branches = make_layer((64, 7), 2), make_branches((64, 7), 1, 0.3)
    x = make_input(64)
    y = forward(layer, view(x), branches)
    assert not view(x).is_contiguous()
    y.backward(torch.ones_like(y))
    plain = x.detach().requires_grad_()
    want = forward(layer, plain, branches)
    want.backward(torch.ones_like(want))
    assert_same_bits(y.detach(), want.detach(), "y")
    assert_same_bits(x.grad, plain.grad, "dx")


def test_non_contiguous_gradient():
    """y.sum() hands back an expanded gradient (stride 0); a transposed one has the wrong order in memory."""
    layer, branches = make_layer((64, 7), 2, "nvfp4_sr"), make_branches((64, 7), 1, 0.3)
    dy = torch.randn(7, M).T
    for strange in (dy, torch.randn(1, 1).expand(M, 7)):
        results = []
        for g in (strange, strange.contiguous()):
            x = torch.ones(M, 64).requires_grad_()
            forward(layer, x, branches).backward(g)
            results.append(x.grad)
        assert_same_bits(results[0], results[1], "dx")


# ---------------------------------------------------------------------------------------------- bad input


def test_wrong_last_dimension_names_both_sizes():
    layer = make_layer((64, 7))
    for shape in ((M, 60), (2, 3, 128), (60,)):
        with pytest.raises(ValueError, match=re.escape(f"must be 64, got shape {shape}")):
            layer(torch.randn(*shape))


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int64, torch.float64), ids=str)
def test_input_of_another_dtype_raises_and_names_it(dtype):
    """As nn.Linear does for an input whose dtype is not its weight's. A byte tensor must not pass for packed codes."""
    with pytest.raises(RuntimeError, match=str(dtype)):
        make_layer((64, 7))(torch.zeros(M, 64).to(dtype))


@by_terms
@pytest.mark.parametrize("centre", (False, True), ids=("plain", "centred"))
@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")), ids=str)
def test_a_token_that_is_not_finite_spoils_only_itself(terms, centre, value):
    layer, branches = make_layer((576, 64), terms, centre=centre), make_branches((576, 64), 1)
    with torch.no_grad():
        x = make_input(576, requires_grad=False)
        clean = layer.lora_forward(x, branches)
        x[2, 100] = value
        y = layer.lora_forward(x, branches)
    others = torch.arange(M) != 2
    assert y[2].isnan().all()
    assert_same_bits(y[others], clean[others], "the other tokens")


@by_gradients
def test_a_gradient_that_is_not_finite_is_seen_and_spoils_only_its_token(gradients):
    layer, (branch,) = make_layer((64, 64), 1, gradients), make_branches((64, 64), 1)
    x, dy = make_input(64), torch.randn(M, 64)
    forward(layer, x, [branch]).backward(dy)
    clean = x.grad
    x.grad = branch.a.grad = branch.b.grad = None
    dy[2, 5] = float("inf")
    forward(layer, x, [branch]).backward(dy)
    others = torch.arange(M) != 2
    assert_same_bits(x.grad[others], clean[others], "the other tokens")
    assert not x.grad[2].isfinite().any()
    assert not branch.a.grad.isfinite().any() and not branch.b.grad[5].isfinite().any()


# ---------------------------------------------------------------------------------------------- autocast, checkpointing


def test_autocast_equals_casting_the_input_first():
    """FP32 in, BF16 out, and the same bits as with a BF16 input; the gradient comes back in FP32."""
    layer, branches = make_layer((64, 7), 2, centre=True), make_branches((64, 7), 1, 0.3)
    x = make_input(64)
    cast = x.detach().bfloat16().requires_grad_()
    want = forward(layer, cast, branches)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = forward(layer, x, branches)
    assert_same_bits(y.detach(), want.detach(), "y")
    assert y.dtype == torch.bfloat16
    dy = torch.randn(M, 7).bfloat16()
    y.backward(dy)
    got = [x.grad.bfloat16(), *(t.grad for t in branches[0][:2])]
    branches[0].a.grad = branches[0].b.grad = None
    want.backward(dy)
    for name, a, b in zip(("dx", "dA", "dB"), got, [cast.grad, *(t.grad for t in branches[0][:2])]):
        assert_same_bits(a, b, name)


@by_gradients
@pytest.mark.parametrize("kind", ("layer", "branch"))
def test_backward_under_autocast_is_not_cast(gradients, kind):
    """loss.backward() inside the autocast block must not turn the FP32 products of the backward into BF16 ones."""
    layer, (branch,) = make_layer((64, 7), 1, gradients), make_branches((64, 7), 1)
    x, dy = make_input(64), torch.randn(M, 7)
    results = []
    for autocast in (False, True):
        x.grad = branch.a.grad = branch.b.grad = None
        torch.manual_seed(SEED)
        y = layer.lora_forward(x, [branch]) if kind == "layer" else lora_branch(x, branch)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y.backward(dy)
        results.append([x.grad, branch.a.grad, branch.b.grad])
    for name, plain, inside in zip(("dx", "dA", "dB"), *results):
        assert_same_bits(inside, plain, name)


@by_gradients
@pytest.mark.parametrize("reentrant", (True, False), ids=("reentrant", "non_reentrant"))
def test_activation_checkpointing_changes_no_bit(gradients, reentrant):
    """The recomputed forward draws the seeds of the first one. Two layers, so that a seed too many or too few in the first of
    them shifts those of the second; reentrant checkpointing runs its first pass without gradient."""
    layers = [make_layer((64, 64), 1, gradients) for _ in range(2)]
    branches = [make_branches((64, 64), 1, 0.3)[0] for _ in range(2)]
    x, dy = make_input(64), torch.randn(M, 64)

    def block(x):
        for layer, branch in zip(layers, branches):
            x = layer.lora_forward(x, [branch])
        return x

    results = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        for t in (x, *(t for b in branches for t in (b.a, b.b))):
            t.grad = None
        torch.manual_seed(SEED)
        y = run(x)
        y.backward(dy)
        results.append([y.detach(), x.grad, *(t.grad for b in branches for t in (b.a, b.b))])
    for name, plain, recomputed in zip(("y", "dx", "dA of layer 0", "dB of 0", "dA of layer 1", "dB of 1"), *results):
        assert_same_bits(recomputed, plain, name)


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
