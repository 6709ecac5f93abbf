"""Rotary embedding as a function: the bits of transformers' forward and backward, what it keeps, and that it compiles."""

import shutil

import pytest
import torch
from _assertions import assert_same_bits
from _rope import BF16, FP32, LAYOUTS, B, D, S, by_dtype, eager, inputs

from peft_nvfp4.fusion.rope import rotary_embedding
from peft_nvfp4.ops import fused

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gradients_of(outputs, order):
    """One gradient per output: random, with zeros, in storage of that order."""
    made = [LAYOUTS[order](*t.shape).to(t.device, t.dtype) for t in outputs]
    for g in made:
        g[:, :, 1], g[:, :, 2, ::2] = -0.0, 0.0
    return made


def meaningful_strides(t):
    return [stride for size, stride in zip(t.shape, t.stride()) if size > 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, B], ids=["one cos", "cos per sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
@by_dtype
def test_forward_and_backward_give_the_bits_and_the_layout_of_transformers(dtype, layout, batch, device):
    q, k, cos, sin = inputs(dtype, layout, batch, device=device)
    q.requires_grad_(), k.requires_grad_()
    got, expected = rotary_embedding(q, k, cos, sin), eager(q, k, cos, sin)
    for a, b, name in zip(got, expected, "qk"):
        assert_same_bits(a.cpu(), b.cpu(), name)
        assert meaningful_strides(a) == meaningful_strides(b)
    for order in ("tokens first", "heads first", "values apart"):
        grads = gradients_of(got, order)
        ours, theirs = (torch.autograd.grad(out, (q, k), grads, retain_graph=True) for out in (got, expected))
        for a, b, name in zip(ours, theirs, ("dq", "dk")):
            assert_same_bits(a.cpu(), b.cpu(), f"{name}, gradients with {order}")
            a.transpose(1, 2).view(B * S, -1)  # the gradient of a projection's output: no copy


@pytest.mark.parametrize("s", [1, 3])
def test_one_token_one_head_and_an_expanded_gradient(s):
    """The sum's gradient has no strides; sizes of 1 leave strides open."""
    q, k = (torch.randn(B, s, 1, D, dtype=BF16).transpose(1, 2).requires_grad_() for _ in range(2))
    cos, sin = torch.randn(2, 1, s, D, dtype=BF16)
    got, expected = rotary_embedding(q, k, cos, sin), eager(q, k, cos, sin)
    gradients = [torch.autograd.grad(out[0].sum() + out[1].sum(), (q, k)) for out in (got, expected)]
    for a, b in zip((*got, *gradients[0]), (*expected, *gradients[1])):
        assert_same_bits(a.detach(), b.detach(), "outputs and gradients")


def test_only_what_needs_a_gradient_gets_one():
    q, k, cos, sin = inputs(BF16)
    rotated_q, rotated_k = rotary_embedding(q.requires_grad_(), k, cos, sin)
    assert rotated_q.requires_grad and not rotated_k.requires_grad
    dq = gradients_of([rotated_q], "heads first")[0]
    expected = eager(q, k, cos, sin)[0]
    assert_same_bits(*(torch.autograd.grad(t, q, dq)[0] for t in (rotated_q, expected)), "dq")
    outputs = rotary_embedding(q, k.requires_grad_(), cos, sin)
    outputs[1].sum().backward()
    assert q.grad is None and k.grad is not None  # nothing depends on q
    with torch.no_grad():
        assert not rotary_embedding(q, k, cos, sin)[0].requires_grad


def test_second_derivatives_are_those_of_transformers():
    q, k, cos, sin = inputs(FP32)
    q.requires_grad_(), k.requires_grad_()
    results = []
    for function in (rotary_embedding, eager):
        a, b = function(q, k, cos, sin)
        first = torch.autograd.grad((a**3).sum() + (a.sum(1) * b.sum(1)).sum(), (q, k), create_graph=True)
        results.append(torch.autograd.grad(sum(f.square().sum() for f in first), (q, k)))
    for got, expected in zip(*results):
        # the same operations; only the order in which autograd adds up to 4 + 2 partial gradients may differ
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_nothing_but_cos_and_sin_is_kept():
    q, k, cos, sin = inputs(BF16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotary_embedding(q.requires_grad_(), k.requires_grad_(), cos, sin)
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()} and len(kept) == 2


def test_results_may_be_changed_in_place():
    """As those of the original: they are not views."""
    q, k, cos, sin = inputs(FP32)
    results = []
    for function in (rotary_embedding, eager):
        x = q.clone().requires_grad_()
        out = function(x, k, cos, sin)[0]
        out.mul_(3.0)
        out.sum().backward()
        results.append((out.detach(), x.grad))
    for got, expected in zip(*results):
        assert_same_bits(got, expected, "after mul_")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=torch.zeros(2, 3, 4)), r"q must be \(B, H, S, D\)"),
        (dict(q=torch.zeros(2, 3, 5, 7)), "D must be even, got 7"),
        (dict(k=torch.zeros(2, 3, 4, 8)), "k must be"),
        (dict(cos=torch.zeros(3, 5, 8)), "cos must be"),
        (dict(sin=torch.zeros(1, 5, 8, dtype=BF16)), "sin must be"),
    ],
)
def test_bad_arguments_name_themselves(change, message):
    arguments = dict(q=torch.zeros(2, 4, 5, 8), k=torch.zeros(2, 1, 5, 8), cos=torch.zeros(1, 5, 8), sin=torch.zeros(1, 5, 8))
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        fused.rotary_embedding(*(arguments | change).values(), False)


# ---------------------------------------------------------------------------------------------- torch.compile

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="not run: inductor needs a C++ compiler (g++)")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize("trained", ["qk", "q"])
def test_the_function_is_captured_whole(backend, trained):
    torch._dynamo.reset()
    q, k, cos, sin = inputs(BF16)
    q.requires_grad_(), k.requires_grad_("k" in trained)
    leaves = [t for t in (q, k) if t.requires_grad]
    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(rotary_embedding, backend=backend, fullgraph=True)
        got, expected = compiled(q, k, cos, sin), rotary_embedding(q, k, cos, sin)
        grads = gradients_of(expected, "tokens first")[: len(leaves)]
        ours, theirs = (torch.autograd.grad(out[: len(leaves)], leaves, grads) for out in (got, expected))
    for a, b in zip((*got, *ours), (*expected, *theirs)):
        assert_same_bits(a.detach(), b.detach(), "compiled")
        assert meaningful_strides(a) == meaningful_strides(b)
