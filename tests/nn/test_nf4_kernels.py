"""NF4 on CPUs whose bitsandbytes kernel takes wrong block scales: it is noticed by known answers, and results are right.

Two kernels stand in for bitsandbytes' own, whatever CPU runs the tests: ``flat`` numbers the blocks of 64 through the flattened
weight, as they are stored; ``by_rows`` begins anew in every row, as the AVX-512 kernel of bitsandbytes 0.50 does.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from _assertions import assert_same_bits
from torch import nn

bnb = pytest.importorskip("bitsandbytes")

from peft_nvfp4.nn import nf4  # noqa: E402  needs bitsandbytes

OUT, TOKENS = 12, 5
WIDTHS = (64, 192, 176, 48, 16, 30, 21)  # multiples of the block; of 16, where by_rows is wrong; of 2; odd
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(packed, absmax, blocks, shape, dtype):
    """D(codes) in ``dtype``; ``blocks``: the block of every value. The product is FP32's, rounded once."""
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], 1).flatten()[: shape[0] * shape[1]].int()
    return (bnb.functional.get_4bit_type("nf4", device="cpu")[codes] * absmax.float()[blocks]).view(*shape).to(dtype)


def flat(packed, absmax, blocksize, quant_type, shape, dtype):
    return values(packed, absmax, torch.arange(shape[0] * shape[1]) // blocksize, shape, dtype)


def by_rows(packed, absmax, blocksize, quant_type, shape, dtype):
    if shape[1] % 16:  # takes another branch
        return flat(packed, absmax, blocksize, quant_type, shape, dtype)
    rows, columns = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    return values(packed, absmax, (rows * (shape[1] // blocksize) + columns // blocksize).flatten(), shape, dtype)


def broken(*arguments):
    return 2 * flat(*arguments)


@pytest.fixture
def put(monkeypatch):
    """Puts a kernel in the place of bitsandbytes'; what was found out about the CPU is forgotten before and after."""

    def put(kernel):
        monkeypatch.setattr(torch.ops.bitsandbytes.dequantize_4bit, "default", kernel)
        nf4._rows_are_right.cache_clear()

    nf4._rows_are_right.cache_clear()
    yield put
    nf4._rows_are_right.cache_clear()


def linear_of(k, dtype):
    linear = nn.Linear(k, OUT).to(dtype)
    linear.weight.data *= torch.logspace(-2, 2, OUT).to(dtype)[:, None]  # rows, and with them blocks, of very different scale
    return linear


def expected_weight(layer, dtype):
    state = layer.weight.quant_state
    absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return flat(layer.weight.data, absmax, 64, "nf4", state.shape, dtype)


def check(layer, dtype):
    """Weight, output and input gradient are those of the stored codes, bit for bit; the bias gets its gradient."""
    layer.bias.requires_grad_()
    weight = expected_weight(layer, dtype)
    assert_same_bits(layer.dequantize(dtype), weight, "weight")
    x = torch.randn(2, TOKENS, layer.in_features, dtype=dtype, requires_grad=True)
    y = layer(x)
    assert_same_bits(y.detach(), F.linear(x.detach(), weight, layer.bias.detach()), "output")
    with torch.no_grad():
        assert_same_bits(layer(x), y.detach(), "output without gradients")
    dy = torch.randn_like(y)
    dx, dbias = torch.autograd.grad(y, (x, layer.bias), dy)
    assert_same_bits(dx, dy @ weight, "input gradient")
    if dtype == torch.float32:  # sums in 16 bits depend on their order
        torch.testing.assert_close(dbias, dy.sum((0, 1)))
    return y.detach()


@pytest.mark.filterwarnings("ignore:bitsandbytes .* dequantises NF4 wrongly")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", WIDTHS)
def test_right_whatever_the_kernel(put, k, dtype):
    layer = nf4.NF4FrozenLinear.quantize(linear_of(k, dtype))
    check(layer, dtype)  # the CPU at hand
    for kernel in (flat, by_rows):
        put(kernel)
        check(layer, dtype)


def test_a_wrong_kernel_is_said_once(put):
    put(by_rows)
    layers = [nf4.NF4FrozenLinear.quantize(linear_of(k, torch.float32)) for k in (64, 176, 48)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for layer in layers:
            layer(torch.randn(TOKENS, layer.in_features))
            layer.dequantize()
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1 and "in_features is no multiple of 64" in messages[0] and bnb.__version__ in messages[0]


def test_a_right_kernel_keeps_bitsandbytes_path(put, monkeypatch):
    put(flat)
    monkeypatch.setattr(nf4._MatmulInBlocks, "apply", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in WIDTHS:
            nf4.NF4FrozenLinear.quantize(linear_of(k, torch.float32))(torch.randn(TOKENS, k))


def test_nothing_is_computed_where_no_shape_is_right(put):
    put(broken)
    layer = nf4.NF4FrozenLinear.quantize(linear_of(176, torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"rows of 176.*another version of bitsandbytes"):
        layer(torch.randn(TOKENS, 176).bfloat16())


@pytest.mark.filterwarnings("ignore:bitsandbytes .* dequantises NF4 wrongly")
def test_the_dense_weight_is_not_kept_for_backward(put):
    put(by_rows)
    layer, kept = nf4.NF4FrozenLinear.quantize(linear_of(176, torch.float32)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        layer(torch.randn(TOKENS, 176, requires_grad=True))
    assert (OUT, 176) not in kept


@pytest.mark.filterwarnings("ignore:bitsandbytes .* dequantises NF4 wrongly")
def test_the_output_takes_additions_in_place(put):
    """As some LoRA variants do with what the base returns."""
    put(by_rows)
    layer, x = nf4.NF4FrozenLinear.quantize(linear_of(176, torch.float32)), torch.randn(2, TOKENS, 176, requires_grad=True)
    y, more = layer(x), torch.randn(2, TOKENS, OUT, requires_grad=True)
    y += more
    y.sum().backward()
    assert_same_bits(x.grad, torch.ones(2, TOKENS, OUT) @ layer.dequantize(), "input gradient")
    assert_same_bits(more.grad, torch.ones(2, TOKENS, OUT), "gradient of what was added")
