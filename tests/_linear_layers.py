"""What the tests of the autograd Functions share: layers, branches and inputs, and the formulas written out in FP64, with bounds.

Tolerances are bounds, not guesses. Every result here is a polynomial with sums of products, so two ways of computing it differ by
no more than (roundings on the way) x (unit roundoff) x (the same polynomial on absolute values); see Higham, "Accuracy and
Stability of Numerical Algorithms", chapter 3. The same code evaluates the polynomial on absolute values, gradients included."""

import pytest
import torch
from _assertions import assert_same_bits, unit
from torch import nn

from peft_nvfp4 import ops
from peft_nvfp4.autograd.activation_cache import dequantized
from peft_nvfp4.autograd.frozen_linear import Branch
from peft_nvfp4.autograd.seeds import draw_seed
from peft_nvfp4.nn.frozen_linear import FrozenOptions
from peft_nvfp4.nn.registry import BACKENDS
from peft_nvfp4.numerics import philox
from peft_nvfp4.ops import linear

M = 6
SEED = 1234
RANKS, SCALINGS = (4, 3), (2.0, 0.5)
by_terms = pytest.mark.parametrize("terms", (1, 2), ids=lambda t: f"{t}term")
by_gradients = pytest.mark.parametrize("gradients", ("nvfp4", "nvfp4_sr", "bf16"))


def make_layer(shape, terms=1, gradients="nvfp4", layouts="cached", offset=False, bias=True, dtype=torch.float32):
    k, n = shape
    layer = BACKENDS["nvfp4"].quantize(nn.Linear(k, n, bias=bias).to(dtype), FrozenOptions(layouts, gradients, terms))
    if offset:
        layer.set_offset(3 * torch.randn(k))
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
    masks = [
        torch.ones_like(like) if s is None else philox.dropout_mask(like.shape, b.dropout, s, like.device, like.dtype)
        for s, b in zip(seeds, branches)
    ]
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
    x, offset = x.detach().reshape(-1, x.shape[-1]), layer._offset
    parts = linear.quantize_input(x, offset, layer.options.terms)
    xd, w = dequantized(parts, offset, torch.float32), layer.dequantize(torch.float32)
    magnitude = sum(ops.dequantize(p).abs() for p in parts) + (0 if offset is None else offset.abs())
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


def outcome(run, x, branches, dy, seed=SEED):
    """Output of ``run()`` and, after one backward, the gradients of x and the branches, by name. Earlier ones are dropped."""
    leaves = {"dx": x, **{f"d{which}{i}": t for i, b in enumerate(branches) for which, t in (("A", b.a), ("B", b.b))}}
    for t in leaves.values():
        t.grad = None
    torch.manual_seed(seed)
    y = run()
    y.backward(dy)
    return {"y": y.detach(), **{name: t.grad for name, t in leaves.items()}}


def assert_same_outcome(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_same_bits(got[name], value, name)


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
