"""Ways of calling the autograd Functions of a frozen linear: a layer used twice, without gradients, with factors frozen, inputs
of any shape and memory layout, bad input, autocast and activation checkpointing. Two ways of one computation are compared bit for
bit."""

import re

import pytest
import torch
from _assertions import assert_same_bits
from _linear_layers import M, assert_same_outcome, by_gradients, by_terms, forward, make_branches, make_input, make_layer, outcome
from torch.utils.checkpoint import checkpoint

from peft_nvfp4.autograd import frozen_linear
from peft_nvfp4.autograd.lora import lora_branch


@by_gradients
def test_eval_mode_changes_no_gradient(gradients):
    """Gradients in eval mode (from_pretrained's; a loop may train in it to switch dropout off) are those of training, and draw no
    random numbers: stochastic rounding is to nearest there."""
    torch.manual_seed(0)
    layer, branches = make_layer((64, 64), 1, gradients), make_branches((64, 64), 1)
    torch.manual_seed(0)
    same = make_layer((64, 64), 1, "nvfp4") if gradients == "nvfp4_sr" else layer
    x, dy = make_input(64), torch.randn(M, 64)
    train = outcome(lambda: same.train().lora_forward(x, branches), x, branches, dy)
    evaluate = outcome(lambda: layer.eval().lora_forward(x, branches), x, branches, dy)
    assert_same_outcome(evaluate, train)


def test_input_that_needs_no_gradient(monkeypatch):
    """The first layer of a model: adapter gradients have the same bits, and dx, the dearest product of backward, is not made."""
    layer, branches = make_layer((64, 64), 2), make_branches((64, 64), 1, 0.3)
    x, dy = make_input(64), torch.randn(M, 64)
    want = outcome(lambda: layer.lora_forward(x, branches), x, branches, dy)
    monkeypatch.setattr(frozen_linear, "_input_gradient", lambda *args: pytest.fail("dx was computed"))
    detached = x.detach()
    got = outcome(lambda: layer.lora_forward(detached, branches), detached, branches, dy)
    assert got.pop("dx") is None and want.pop("dx") is not None
    assert_same_outcome(got, want)


@pytest.mark.parametrize("leading", ((2, 3), (1, 2, 3)), ids=("3d", "4d"))
def test_leading_dimensions_are_flattened(leading):
    layer, branches = make_layer((64, 7), 2), make_branches((64, 7), 1, 0.3)
    flat, dy = make_input(64), torch.randn(M, 7)
    want = outcome(lambda: layer.lora_forward(flat, branches), flat, branches, dy)
    x = flat.detach().view(*leading, 64).requires_grad_()
    got = outcome(lambda: layer.lora_forward(x, branches), x, branches, dy.view(*leading, 7))
    assert got["y"].shape == (*leading, 7)
    assert_same_outcome({**got, "y": got["y"].view(M, 7), "dx": got["dx"].view(M, 64)}, want)


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
    x, dy = make_input(64), torch.ones(M, 7)
    assert not view(x).is_contiguous()
    got, want = (outcome(lambda: layer.lora_forward(t(x), branches), x, branches, dy) for t in (view, lambda x: x))
    assert_same_outcome(got, want)


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
@pytest.mark.parametrize("offset", (False, True), ids=("plain", "centred"))
@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")), ids=str)
def test_a_token_that_is_not_finite_spoils_only_itself(terms, offset, value):
    layer, branches = make_layer((576, 64), terms, offset=offset), make_branches((576, 64), 1)
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
    layer, branches = make_layer((64, 64), 1, gradients), make_branches((64, 64), 1)
    x, dy = make_input(64), torch.randn(M, 64)
    clean = outcome(lambda: layer.lora_forward(x, branches), x, branches, dy)["dx"]
    dy[2, 5] = float("inf")
    got = outcome(lambda: layer.lora_forward(x, branches), x, branches, dy)
    others = torch.arange(M) != 2
    assert_same_bits(got["dx"][others], clean[others], "the other tokens")
    assert not got["dx"][2].isfinite().any()
    assert not got["dA0"].isfinite().any() and not got["dB0"][5].isfinite().any()


def test_autocast_equals_casting_the_input_first():
    """FP32 in, BF16 out, and the same bits as with a BF16 input; the gradient comes back in FP32."""
    layer, branches = make_layer((64, 7), 2, offset=True), make_branches((64, 7), 1, 0.3)
    x, dy = make_input(64), torch.randn(M, 7).bfloat16()
    cast = x.detach().bfloat16().requires_grad_()

    def under_autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer.lora_forward(x, branches)

    want = outcome(lambda: layer.lora_forward(cast, branches), cast, branches, dy)
    got = outcome(under_autocast, x, branches, dy)
    assert got["dx"].dtype == torch.float32 and got["y"].dtype == torch.bfloat16
    assert_same_outcome({**got, "dx": got["dx"].bfloat16()}, want)


@by_gradients
@pytest.mark.parametrize("kind", ("layer", "branch"))
def test_backward_under_autocast_is_not_cast(gradients, kind):
    """loss.backward() inside the autocast block must not turn the FP32 products of the backward into BF16 ones."""
    layer, (branch,) = make_layer((64, 7), 1, gradients), make_branches((64, 7), 1)
    x, dy = make_input(64), torch.randn(M, 7)
    results = []
    for autocast in (False, True):
        x.grad = branch.a.grad = branch.b.grad = None
        torch.manual_seed(1)
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

    plain = outcome(lambda: block(x), x, branches, dy)
    recomputed = outcome(lambda: checkpoint(block, x, use_reentrant=reentrant), x, branches, dy)
    assert_same_outcome(recomputed, plain)


def test_adapters_are_rounded_once_in_two_launches(monkeypatch):
    """FP32 masters for BF16 activations: s * B in FP32, then one rounding; A without dropout as rows of one matrix. Where A or B
    have the activations' dtype, they are taken as they are."""
    torch.manual_seed(0)
    branch = lambda r, n, scaling, dropout: frozen_linear.Branch(torch.randn(r, 8), torch.randn(n, r), scaling, dropout)
    branches = [branch(2, 5, 1.3, 0.0), branch(3, 6, 1.0, 0.1), branch(4, 7, 0.7, 0.0)]
    launches = []
    for name in ("_foreach_mul", "_foreach_copy_"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, f=original, name=name: launches.append(name) or f(*args))
    stack, items = frozen_linear.cast_adapters(branches, torch.bfloat16)
    assert launches == ["_foreach_mul", "_foreach_copy_"]
    assert_same_bits(stack, torch.cat([branches[0].a, branches[2].a]).bfloat16(), "stack")
    assert items[0].a is None and items[2].a is None
    assert_same_bits(items[1].a, branches[1].a.bfloat16(), "A")
    for item, (a, b, scaling, dropout, _) in zip(items, branches):
        assert_same_bits(item.up, (b * scaling).bfloat16(), "B")
        assert (item.rank, item.scaling, item.dropout) == (a.shape[0], scaling, dropout)
    frozen_linear.cast_adapters([branches[1]._replace(dropout=0.0)], torch.bfloat16)
    assert launches[2:] == ["_foreach_copy_"]
    stack, (item,) = frozen_linear.cast_adapters([branches[1]._replace(dropout=0.0)], torch.float32)
    assert stack is branches[1].a and item.up is branches[1].b and len(launches) == 3
