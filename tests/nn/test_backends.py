"""One contract for every frozen linear of the registry: its function, what it stores, and rewriting its weight.

A test that takes ``backend`` runs for each word of BACKENDS (nf4 where bitsandbytes is installed) and speaks to the base class
only."""

import contextlib
import copy
import re
import types

import pytest
import torch
from _assertions import COPIES, assert_same_bits, unit
from _frozen_linears import IN, OUT, TOKENS, assert_same_packed, dense, freeze, packed, require, sqnr
from torch import nn

from peft_nvfp4 import BACKENDS, FrozenLinear, FrozenOptions, frozen_bytes

QUANTISED = ("nvfp4", "nf4")
# dB on Gaussian data and weights. Measured for weights: nvfp4 21.6 to 22, nf4 20.4 to 20.9. Of outputs: nf4 the same, nvfp4 18,
# its activations being quantised (one term) as well. bf16 is exact.
WEIGHT_SQNR = {"nvfp4": 20.0, "nf4": 20.0, "bf16": float("inf")}
SQNR_FLOOR = {"nvfp4": 15.0, "nf4": 20.0, "bf16": float("inf")}
by_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    return require(request.param)


# ---------------------------------------------------------------------------------------------- the registry
def test_registry_lists_the_three_words_and_their_classes(backend):
    assert list(BACKENDS) == ["nvfp4", "nf4", "bf16"] and len(BACKENDS) == 3
    assert issubclass(BACKENDS[backend], FrozenLinear) and BACKENDS[backend].backend == backend


def test_unknown_backend_names_the_known_ones():
    with pytest.raises(KeyError, match="unknown backend 'int4'; choose one of bf16, nf4, nvfp4"):
        BACKENDS["int4"]


def test_more_terms_than_two_are_refused():
    with pytest.raises(ValueError, match="1 or 2"):
        FrozenOptions(terms=3)


# ---------------------------------------------------------------------------------------------- the function
@by_dtype
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
@pytest.mark.parametrize("shape", ((IN, OUT), (10, 7)), ids=("K128-N64", "K10-N7"))
def test_forward_is_the_function_of_the_dequantised_weight(backend, dtype, bias, shape):
    """y = lora_input(x) @ D(W).T + bias, for every backend. Summing K products takes K roundings of FP32 in any order; in BF16
    the product, the bias and the sum are rounded, and D(W) where the format does not hold it exactly (NF4)."""
    linear, x = dense(dtype, bias, shape), torch.randn(TOKENS, shape[0]).to(dtype)
    layer = freeze(backend, linear)
    xd, w = layer.lora_input(x).double(), layer.dequantize(torch.float32).double()
    offset = torch.zeros(1) if linear.bias is None else linear.bias.detach().double()
    magnitude = xd.abs() @ w.abs().T + offset.abs()
    roundings = (shape[0] + 2) * unit(torch.float32) + (4 * unit(dtype) if dtype != torch.float32 else 0)
    assert ((layer(x).double() - (xd @ w.T + offset)).abs() <= roundings * magnitude).all()
    if backend != "nvfp4":
        assert_same_bits(layer.lora_input(x), x, "lora_input")


@by_dtype
def test_gradients_of_input_and_bias(backend, dtype):
    """With an unquantised incoming gradient, dx = dy @ D(W) and dbias is its sum over tokens; the weight gets none."""
    layer = freeze(backend, dense(dtype), gradients="bf16")
    layer.bias.requires_grad_()
    x, dy = torch.randn(TOKENS, IN).to(dtype).requires_grad_(), torch.randn(TOKENS, OUT).to(dtype)
    layer(x).backward(dy)
    w, low = layer.dequantize(torch.float32).double(), 2 * unit(dtype) if dtype != torch.float32 else 0
    bound = (OUT * unit(torch.float32) + low) * (dy.double().abs() @ w.abs())  # OUT products; D(W) and dx rounded to BF16
    assert ((x.grad.double() - dy.double() @ w).abs() <= bound).all()
    bound = (TOKENS * unit(torch.float32) + low) * dy.double().abs().sum(0)
    assert ((layer.bias.grad.double() - dy.double().sum(0)).abs() <= bound).all()
    assert [name for name, p in layer.named_parameters() if p.grad is not None] == ["bias"]


def test_leading_dimensions(backend):
    """(2, 3, K) and (K,) give what their rows give; bitsandbytes and F.linear may sum a matrix of another height in another
    order."""
    layer, x = freeze(backend, dense()), torch.randn(2, 3, IN)
    rows = layer(x.view(6, IN))
    bound = 2 * IN * unit(torch.float32) * (layer.lora_input(x).abs() @ layer.dequantize(torch.float32).abs().T)
    bound = bound + 2 * IN * unit(torch.float32) * layer.bias.abs()
    assert layer(x).shape == (2, 3, OUT) and layer(x[0, 0]).shape == (OUT,)
    assert ((layer(x) - rows.view(2, 3, OUT)).abs() <= bound).all()
    assert ((layer(x[0, 0]) - rows[0]).abs() <= bound[0, 0]).all()


def test_forward_under_autocast(backend):
    """An FP32 layer under BF16 autocast gives what it gives of a BF16 input. Neither its dtype nor its bias follows that input:
    a merge later would put BF16 layers into an FP32 model."""
    layer, x = freeze(backend, dense()), torch.randn(TOKENS, IN)
    bias = layer.bias.detach().clone()
    twin = copy.deepcopy(layer).bfloat16() if backend == "bf16" else copy.deepcopy(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert_same_bits(y, twin(x.bfloat16()), "y")
    assert y.dtype == torch.bfloat16
    assert_same_bits(layer.bias.detach(), bias, "bias")
    assert layer.compute_dtype == layer.to_linear().weight.dtype == torch.float32


# ---------------------------------------------------------------------------------------------- storage
@by_dtype
def test_parameters_are_frozen_bytes(backend, dtype):
    """Only the bias, and the dense weight of bf16, are floating; nothing has a gradient."""
    layer = freeze(backend, dense(dtype))
    assert not any(p.requires_grad for p in layer.parameters())
    floating = {name for name, p in layer.named_parameters() if p.dtype != torch.uint8}
    assert floating == ({"bias", "weight"} if backend == "bf16" else {"bias"})
    assert not list(layer.buffers())


@by_dtype
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
def test_bias_and_flags_are_kept(backend, dtype, bias):
    linear = dense(dtype, bias)
    for training in (True, False):
        layer = freeze(backend, linear.train(training))
        assert layer.training is training
        assert (layer.in_features, layer.out_features, layer.compute_dtype) == (IN, OUT, dtype)
        if bias:
            assert_same_bits(layer.bias.detach(), linear.bias.detach(), "bias")
        else:
            assert layer.bias is None


def test_bytes_without_the_bias(backend):
    """nvfp4: half a byte a code and a byte a block of 16, K padded to 32, and one FP32 scale; twice, for the transpose. nf4: half
    a byte a code, a byte of absmax a block of 64, an FP32 absmax for 256 of these, two code books (16 and 256 FP32), an FP32
    offset."""
    shape = (100, OUT)
    layer = freeze(backend, dense(torch.bfloat16, shape=shape))
    blocks = 100 * OUT // 64
    expected = {
        "nvfp4": (OUT * (128 // 2 + 128 // 16) + 4) + (100 * (64 // 2 + 64 // 16) + 4),
        "nf4": 100 * OUT // 2 + blocks + 4 * -(-blocks // 256) + 16 * 4 + 256 * 4 + 4,
        "bf16": 100 * OUT * 2,
    }
    assert layer.frozen_bytes() == expected[backend]
    assert frozen_bytes(nn.Sequential(layer, nn.ReLU(), layer)) == expected[backend]  # one storage counts once
    if backend == "nvfp4":
        transient = freeze(backend, dense(torch.bfloat16, shape=shape), weight_layouts="transient")
        assert transient.frozen_bytes() == OUT * (128 // 2 + 128 // 16) + 4


@by_dtype
def test_dequantize(backend, dtype):
    linear = dense(dtype)
    layer, weight = freeze(backend, linear), linear.weight.detach()
    assert layer.dequantize().dtype == dtype
    full = layer.dequantize(torch.float32)
    assert full.dtype == torch.float32 and full.shape == weight.shape
    assert_same_bits(layer.dequantize(torch.bfloat16), full.bfloat16(), "in BF16")
    assert sqnr(full, weight) >= WEIGHT_SQNR[backend]
    assert (backend == "bf16") == torch.equal(full, weight.float())


@pytest.mark.parametrize("convert", ("to_bf16", "type", "half", "float", "double"))
def test_casts_leave_packed_bytes_alone(backend, convert):
    """Whatever a trainer does to a model's dtype, the packed bytes stay; compute dtype and bias follow the cast."""
    layer, x = freeze(backend, dense()), torch.randn(TOKENS, IN)
    layer.bias.data = torch.arange(OUT) / 8.0  # exact in every dtype, so that casting back loses nothing of it
    before, value, y = packed(layer), layer.dequantize(torch.float32), layer(x)
    dtype = {"half": torch.float16, "float": torch.float32, "double": torch.float64}.get(convert, torch.bfloat16)
    ways = {"to_bf16": lambda: layer.to(dtype), "type": lambda: layer.type(dtype)}  # the latter converts integers as well
    converted = ways.get(convert, lambda: getattr(layer, convert)())()
    assert converted is layer
    assert layer.compute_dtype == layer.bias.dtype == layer.dequantize().dtype == dtype
    if backend in QUANTISED:
        assert_same_packed(layer, before)
        assert_same_bits(layer.float()(x), y, "output after casting back")
    else:
        assert_same_bits(layer.weight.detach(), value.to(dtype), "weight")


@by_dtype
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_independent_and_equal(backend, dtype, how):
    layer, x = freeze(backend, dense(dtype)).eval(), torch.randn(TOKENS, IN).to(dtype)
    before, y = packed(layer), layer(x)
    twin = COPIES[how](layer)
    assert type(twin) is type(layer) and twin.options == layer.options and not twin.training
    assert_same_packed(twin, before)
    assert_same_bits(twin(x), y, "output of the copy")
    own = {t.data_ptr() for t in layer.packed_tensors().values()}
    assert not own & {t.data_ptr() for t in twin.packed_tensors().values()}
    twin.requantize_(torch.randn(OUT, IN))
    assert_same_packed(layer, before, "the original after the copy was rewritten")
    assert_same_bits(layer(x), y, "output of the original")


@by_dtype
def test_state_dict_round_trip(backend, dtype):
    layer, fresh, x = freeze(backend, dense(dtype)), freeze(backend, dense(dtype)), torch.randn(TOKENS, IN).to(dtype)
    assert not torch.equal(fresh.dequantize(), layer.dequantize())
    fresh.load_state_dict({name: t.clone() for name, t in layer.state_dict().items()})
    assert_same_packed(fresh, packed(layer))
    assert_same_bits(fresh(x), layer(x), "output")


# ---------------------------------------------------------------------------------------------- rewriting the weight
@by_dtype
def test_requantize(backend, dtype):
    layer, weight = freeze(backend, dense(dtype)), torch.randn(OUT, IN)
    layer.requantize_(weight)
    fresh = nn.Linear(IN, OUT)
    fresh.weight.data = weight if backend == "nvfp4" else weight.to(dtype)  # nf4 and bf16 hold values of the layer's dtype
    assert_same_bits(layer.dequantize(torch.float32), freeze(backend, fresh).dequantize(torch.float32), "D(W)")
    assert not any(p.requires_grad for p in layer.parameters())
    assert layer.compute_dtype == dtype
    x = torch.randn(TOKENS, IN).to(dtype)
    assert sqnr(layer(x) - layer.bias, x.float() @ weight.T) >= min(SQNR_FLOOR[backend], 40)  # 40 dB: BF16 itself has 50


@pytest.mark.parametrize("name", ("nvfp4", "bf16"))
def test_requantizing_its_own_weight_changes_nothing(name):
    """D(W) is representable, so a rule that minimises the error finds it again. (NF4 is not idempotent: it quantises absmax,
    too.)"""
    layer = freeze(name, dense())
    value = layer.dequantize(torch.float32)
    layer.requantize_(value)
    assert_same_bits(layer.dequantize(torch.float32), value, "D(W)")


@pytest.mark.parametrize("weight", (torch.randn(IN, OUT), torch.randn(OUT)), ids=("transposed", "1d"))
def test_requantize_checks_the_shape(backend, weight):
    layer = freeze(backend, dense())
    before = packed(layer)
    with pytest.raises(ValueError, match=re.escape(f"({OUT}, {IN}), got {tuple(weight.shape)}")):
        layer.requantize_(weight)
    assert_same_packed(layer, before)


@pytest.mark.parametrize("value", (float("nan"), float("inf")), ids=str)
def test_weight_that_is_not_finite_raises(backend, value):
    """A packed weight cannot hold it; rewriting refuses it for the dense backend, too, since it would be lost unseen in a
    merge."""
    linear = dense()
    layer = freeze(backend, linear)
    before, bad = packed(layer), linear.weight.detach().clone()
    bad[3, 5] = value
    with pytest.raises(ValueError, match="NaN or Inf"):
        layer.requantize_(bad)
    assert_same_packed(layer, before)
    linear.weight.data = bad
    if backend != "bf16":
        with pytest.raises(ValueError, match="NaN or Inf"):
            freeze(backend, linear)


@pytest.mark.parametrize("cast", (None, torch.bfloat16), ids=("same_dtype", "cast_between"))
def test_snapshot_and_restore(backend, cast):
    """Bytes come back as they were, however often the weight was rewritten. What is floating (the bias, and the weight of bf16)
    comes back in the dtype that the layer has now: a model cast while adapters were merged must stay of one dtype."""
    layer, x = freeze(backend, dense()), torch.randn(TOKENS, IN)
    before, bias = packed(layer), layer.bias.detach().clone()
    snapshot = layer.snapshot()
    for _ in range(2):
        layer.requantize_(torch.randn(OUT, IN))
        layer.bias.data += 1
        assert any(not torch.equal(t, before[name]) for name, t in layer.packed_tensors().items())
    if cast:
        layer.to(cast)
    layer.restore(snapshot)
    dtype = cast or torch.float32
    assert_same_packed(layer, {k: t.to(dtype) if backend == "bf16" else t for k, t in before.items()})
    assert_same_bits(layer.bias.detach(), bias.to(dtype), "bias")
    assert layer(x.to(dtype)).dtype == dtype
    layer.bias.data += 1
    assert_same_bits(snapshot["bias"], bias, "the snapshot's bias")  # restoring twice works
    layer.restore(snapshot)
    assert_same_bits(layer.bias.detach(), bias.to(dtype), "bias after the second restore")


def test_dense_weight_context(backend):
    layer = freeze(backend, dense())
    before, value = packed(layer), layer.dequantize(torch.float32)
    with layer.dense_weight() as weight:
        assert weight is layer.weight and weight.dtype == torch.float32 and not weight.requires_grad
        assert_same_bits(weight.detach(), value, "dense weight")
        assert not hasattr(layer, "W_q")  # PEFT takes .weight then
    assert_same_packed(layer, before, "after reading")
    with layer.dense_weight(requantize=False) as weight:
        weight.data += 1
    assert_same_packed(layer, before, "after a change that was not to be kept")
    with pytest.raises(KeyError), layer.dense_weight() as weight:
        weight.data += 1
        raise KeyError
    assert_same_packed(layer, before, "after an exception")
    with layer.dense_weight() as weight:
        weight.data = weight.data + 1  # PEFT's initialisations rebind .data
    direct = freeze(backend, dense())
    direct.requantize_(value + 1)
    assert_same_packed(layer, packed(direct), "after a change")


@by_dtype
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
def test_to_linear(backend, dtype, bias):
    layer = freeze(backend, dense(dtype, bias).eval())
    linear = layer.to_linear()
    assert type(linear) is nn.Linear and not linear.training and (linear.in_features, linear.out_features) == (IN, OUT)
    assert_same_bits(linear.weight.detach(), layer.dequantize(), "weight")
    assert linear.weight.data_ptr() not in {t.data_ptr() for t in layer.packed_tensors().values()}
    if bias:
        assert_same_bits(linear.bias.detach(), layer.bias.detach(), "bias")
        assert linear.bias.data_ptr() != layer.bias.data_ptr()
    else:
        assert linear.bias is None
    given, given_bias = torch.randn(OUT, IN), torch.randn(OUT)
    linear = layer.to_linear(given, given_bias)
    assert_same_bits(linear.weight.detach(), given.to(dtype), "given weight")
    assert_same_bits(linear.bias.detach(), given_bias.to(dtype), "given bias")


def test_repr_names_backend_and_sizes(backend):
    text = repr(freeze(backend, dense()))
    assert f"in_features={IN}, out_features={OUT}, bias=True, backend={backend}" in text
    assert ("terms=1, weight_layouts=cached, gradients=nvfp4" in text) == (backend == "nvfp4")


@pytest.mark.parametrize("hosted", (False, True), ids=("here", "hosted"))
def test_what_a_layer_returns_can_be_edited_in_place(backend, hosted):
    """As Falcon does with the output of its MLP: autograd forbids it of a view that a Function returns."""
    layer = freeze(backend, dense(torch.float32, True))
    if hosted:
        layer.hosted = types.SimpleNamespace(fetch=contextlib.nullcontext)
    x = torch.randn(2, 3, IN, requires_grad=True)
    (expected,) = torch.autograd.grad((layer(x) + 1.0).square().sum(), x)
    (found,) = torch.autograd.grad(layer(x).add_(1.0).square().sum(), x)
    assert torch.equal(found, expected)
