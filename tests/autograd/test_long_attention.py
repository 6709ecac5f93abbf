"""Attention whose backward takes some heads at a time: the numbers of PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from peft_nvfp4.autograd import long_attention
from peft_nvfp4.autograd.activation_cache import kept_by_attention
from peft_nvfp4.autograd.long_attention import FlashAttnByHeadsFunc, can_be_grouped
from peft_nvfp4.autograd.tiles import tiling
from peft_nvfp4.training.packed_attention import attention

SHAPES = [(1, 24, 8, 4), (2, 16, 6, 2), (1, 16, 3, 3)]
"""B, S, heads of queries, heads of keys."""


@pytest.fixture
def on_a_cpu(monkeypatch):
    """PyTorch's kernels for CPUs, with the calls of those for GPUs; they want a head of keys for every one of the queries."""
    turned = lambda *tensors: [t.transpose(1, 2) for t in tensors]
    calls = []

    def forward(q, k, v, scale):
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*turned(q, k, v), 0.0, True, scale=scale)
        return out.transpose(1, 2).contiguous(), logsumexp, torch.empty(0), torch.empty(0)

    def backward(gradient, q, k, v, out, logsumexp, seed, offset, scale):
        calls.append(q.shape[2])
        heads = k.shape[2]
        k, v = (t.repeat_interleave(q.shape[2] // heads, 2) for t in (k, v))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *turned(gradient, q, k, v, out), logsumexp, 0.0, True, scale=scale
        )
        dk, dv = (t.unflatten(1, (heads, -1)).sum(2) for t in (dk, dv))
        return tuple(turned(dq, dk, dv))

    monkeypatch.setattr(long_attention, "flash_forward", forward)
    monkeypatch.setattr(long_attention, "flash_backward", backward)
    monkeypatch.setattr("peft_nvfp4.training.packed_attention.can_be_grouped", lambda *args: True)
    return calls


def inputs(b, s, hq, hk, d=16, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(0)
    shapes = ((b, hq, s, d), (b, hk, s, d), (b, hk, s, d), (b, s, hq, d))
    *qkv, dy = (torch.randn(shape, generator=g).to(device, dtype) for shape in shapes)
    return [t.requires_grad_() for t in qkv], dy


def stock(q, k, v, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_heads_in_groups_give_the_same_numbers(on_a_cpu, shape, scale):
    """A head's numbers come from its own inputs: what differs is how the heads of a group are added, two FP32 roundings."""
    (q, k, v), dy = inputs(*shape)
    y = FlashAttnByHeadsFunc.apply(*(t.transpose(1, 2) for t in (q, k, v)), scale)
    assert torch.allclose(y, stock(q, k, v, scale), rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(y, [q, k, v], dy)
    expected = torch.autograd.grad(stock(q, k, v, scale), [q, k, v], dy)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, expected))
    assert len(on_a_cpu) == {4: 4, 2: 2, 3: 3}[shape[3]] and sum(on_a_cpu) == shape[2]


def test_its_output_counts_as_kept(on_a_cpu):
    (q, k, v), _ = inputs(*SHAPES[0])
    y = FlashAttnByHeadsFunc.apply(*(t.transpose(1, 2) for t in (q, k, v)), None)
    assert kept_by_attention(y.flatten(2))


def test_only_plain_causal_attention_of_long_sequences_takes_that_way(on_a_cpu):
    (q, k, v), _ = inputs(*SHAPES[0])
    module = torch.nn.Module()
    module.num_key_value_groups = 2

    def name(**options):
        y, _ = attention(module, q, k, v, options.pop("mask", None), **options)
        return type(y.grad_fn).__name__

    assert "ByHeads" not in name()
    with tiling():
        assert "ByHeads" in name() and "ByHeads" in name(scaling=0.5, sliding_window=None)
        for other in (dict(dropout=0.1), dict(is_causal=False), dict(mask=torch.ones(1, 1, 24, 24).bool())):
            assert "ByHeads" not in name(**other), other
        module.is_causal = False
        assert "ByHeads" not in name()


def test_what_flash_attention_does_not_take():
    (q, k, v), _ = inputs(*SHAPES[0])
    assert not can_be_grouped(q, k, v)  # FP32, on a CPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1000, 32, 8), (2, 512, 8, 8)])
def test_on_a_gpu(shape):
    """BF16 against PyTorch's own, which is the same kernel: dq is summed by atomic additions in FP32, and rounded once."""
    (q, k, v), dy = inputs(*shape, 64, torch.bfloat16, "cuda")
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    assert can_be_grouped(*turned)
    y = FlashAttnByHeadsFunc.apply(*turned, None)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        expected = stock(q, k, v)
        assert torch.equal(y, expected)
        gradients = torch.autograd.grad(expected, [q, k, v], dy)
    for a, b in zip(torch.autograd.grad(y, [q, k, v], dy), gradients):
        assert (a.float() - b.float()).norm() <= 2**-8 * b.float().norm()
