"""What is particular to one backend: NF4's layout and its adoption of bitsandbytes layers; NVFP4's two layouts, shared global
scales and offsets."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from _assertions import assert_same_bits, assert_same_matrix, unit
from _frozen_linears import IN, OUT, TOKENS, assert_same_packed, dense, freeze, packed, sqnr
from torch import nn

from peft_nvfp4 import BACKENDS, ops
from peft_nvfp4.numerics.formats import WEIGHT, QuantizedMatrix


@pytest.fixture
def bnb():
    return pytest.importorskip("bitsandbytes")


def linear4bit(bnb, compute_dtype=torch.bfloat16, **kwargs):
    """A layer as BitsAndBytesConfig makes it."""
    linear = dense(torch.bfloat16)
    layer = bnb.nn.Linear4bit(IN, OUT, compute_dtype=compute_dtype, quant_type="nf4", **kwargs)
    layer.load_state_dict(linear.state_dict())
    return layer.to("cpu")


def test_nf4_has_double_quantisation_in_blocks_of_64(bnb):
    linear = dense()
    layer = freeze("nf4", linear)
    state = layer.weight.quant_state
    assert isinstance(layer, bnb.nn.Linear4bit)
    assert (state.quant_type, state.blocksize, state.nested, state.state2.blocksize) == ("nf4", 64, True, 256)
    codes, theirs = bnb.functional.quantize_4bit(linear.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert_same_bits(layer.weight.data, codes, "codes")
    assert_same_bits(state.absmax, theirs.absmax, "absmax")


@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
def test_nf4_adopts_a_bitsandbytes_layer(bnb, training):
    """Same Params4bit object, nothing copied, and the same outputs."""
    theirs, x = linear4bit(bnb).train(training), torch.randn(TOKENS, IN).bfloat16()
    theirs.support_avx512bf16_for_cpu = False
    y = theirs(x)
    ours = freeze("nf4", theirs)
    assert ours.weight is theirs.weight and ours.weight.data_ptr() == theirs.weight.data_ptr()
    assert_same_bits(ours.bias.detach(), theirs.bias.detach(), "bias")
    assert (ours.compute_dtype, ours.training) == (torch.bfloat16, training)
    assert_same_bits(ours(x), y, "output")
    assert not ours.bias.requires_grad


def test_nf4_refuses_a_repacked_layer(bnb):
    theirs = linear4bit(bnb)
    theirs.weight.quant_state.packing_format_for_cpu = True  # what bitsandbytes sets on CPUs with AVX512-BF16
    with pytest.raises(ValueError, match="support_avx512bf16_for_cpu = False"):
        freeze("nf4", theirs)


@pytest.mark.parametrize("adopt", (False, True), ids=("quantised", "adopted"))
def test_nf4_evaluating_first_does_not_repack(bnb, adopt, monkeypatch):
    """The trap: on CPUs with AVX512-BF16 the first forward in eval mode repacks the weight in place, after which dequantising,
    training and merging are wrong. Here such a CPU is pretended, and repacking destroys the weight for certain."""
    modules = bnb.nn.modules

    def repack(weight, state):
        state.packing_format_for_cpu = True
        return torch.zeros_like(weight), state

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(modules, "_convert_weight_packed_for_cpu", repack)
    source = linear4bit(bnb) if adopt else dense(torch.bfloat16)
    assert not adopt or source.support_avx512bf16_for_cpu
    layer = freeze("nf4", source).eval()
    assert layer.support_avx512bf16_for_cpu is False
    before, value = packed(layer), layer.dequantize(torch.float32)
    x = torch.randn(TOKENS, IN).bfloat16()
    with torch.no_grad():
        y = layer(x)
    assert_same_packed(layer, before)
    x.requires_grad_()
    assert_same_bits(layer.train()(x).detach(), y, "output in training")
    dy = torch.randn(TOKENS, OUT).bfloat16()
    layer(x).backward(dy)
    # D(W) and dx are rounded to BF16, and OUT products summed in FP32
    bound = (OUT * unit(torch.float32) + 2 * unit(torch.bfloat16)) * (dy.double().abs() @ value.double().abs())
    assert ((x.grad.double() - dy.double() @ value.double()).abs() <= bound).all()
    with layer.dense_weight() as weight:
        assert_same_bits(weight.detach(), value, "weight to merge into")
    copied = copy.deepcopy(layer).eval()
    with torch.no_grad():
        assert_same_bits(copied(x), y, "output of a copy")


@pytest.mark.gpu
def test_nf4_is_packed_alike_on_any_stream():
    """bitsandbytes packs on the default stream. Here the weight is still being made on another one when packing is asked for,
    and is large: what that stream does between the two kernels of double quantisation could overtake the first."""
    pytest.importorskip("bitsandbytes")
    linear = nn.Linear(16384, 8192, bias=False, device="cuda", dtype=torch.bfloat16)
    expected = {name: t.clone() for name, t in BACKENDS["nf4"].quantize(linear).packed_tensors().items()}
    late = nn.Linear(16384, 8192, bias=False, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        late.weight.zero_()
        torch.cuda._sleep(50_000_000)  # some 30 ms
        late.weight.copy_(linear.weight)
        found = BACKENDS["nf4"].quantize(late).packed_tensors()
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
    torch.cuda.synchronize()
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor, name)


def test_nvfp4_layouts_are_those_of_the_operators():
    """W_f is Q(W) along K with the searching rule; W_b is the transpose of D(W_f), not of W, quantised along N."""
    linear = dense(shape=(100, 40))
    layer = freeze("nvfp4", linear)
    w = ops.quantize(linear.weight.detach(), WEIGHT)
    assert_same_matrix(QuantizedMatrix(*(t.detach() for t in layer.forward_layout[:3]), layer.forward_layout.k), w, "W_f")
    back = ops.transpose_requantize(w, 1.0)
    assert_same_matrix(QuantizedMatrix(*(t.detach() for t in layer.backward_layout[:3]), layer.backward_layout.k), back, "W_b")
    assert layer.weight.shape == (40, 64) and layer.backward_weight.shape == (100, 32)  # padded to 128 and 64


@pytest.mark.parametrize(
    "options", (dict(weight_layouts="transient"), dict(gradients="bf16")), ids=("transient", "gradients=bf16")
)
def test_nvfp4_keeps_no_backward_layout_it_does_not_need(options):
    layer = freeze("nvfp4", dense(), **options)
    assert layer.backward_layout is None
    assert layer.packed_tensors().keys() == {"weight", "weight_scales", "weight_gscale"}
    layer.requantize_(torch.randn(OUT, IN))
    assert layer.backward_layout is None


def centred():
    layer, mu = freeze("nvfp4", dense()), torch.randn(IN)
    layer.set_offset(mu)
    return layer, mu


def output_offset(layer):
    return None if layer.output_offset is None else layer.output_offset.view(torch.float32)


def test_nvfp4_offset_is_kept_as_frozen_bytes():
    layer, mu = centred()
    assert layer.input_offset.dtype == layer.output_offset.dtype == torch.uint8
    assert not layer.input_offset.requires_grad and not layer.output_offset.requires_grad
    assert_same_bits(layer.input_offset.view(torch.float32), mu, "mu")
    assert_same_bits(output_offset(layer), layer.dequantize(torch.float32) @ mu, "D(W) mu")
    before, x = packed(layer), torch.randn(TOKENS, IN) + mu
    y = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).to(torch.bfloat16)):
        assert_same_packed(twin, before)
    fresh = freeze("nvfp4", dense())
    fresh.set_offset(torch.zeros(IN))  # creates the parameters that a state dict fills
    fresh.load_state_dict(layer.state_dict())
    assert_same_bits(fresh(x), y, "output after loading")
    layer.set_offset(None)
    assert layer.packed_tensors().keys().isdisjoint({"input_offset", "output_offset"})
    assert sqnr(y, dense_of(layer)(x)) > sqnr(layer(x), dense_of(layer)(x))  # centring helped


def dense_of(layer):
    return lambda x: F.linear(x, layer.dequantize(torch.float32), layer.bias)


@pytest.mark.parametrize("mu", (torch.zeros(OUT), torch.full((IN,), float("nan"))), ids=("wrong_size", "nan"))
def test_nvfp4_offset_is_checked(mu):
    layer = freeze("nvfp4", dense())
    with pytest.raises(ValueError, match=rf"{IN} finite values, got shape \({len(mu)},\)"):
        layer.set_offset(mu)
    assert layer.input_offset is None and layer.output_offset is None


def test_nvfp4_offset_follows_the_weight():
    layer, mu = centred()
    before, snapshot = packed(layer), layer.snapshot()
    layer.requantize_(torch.randn(OUT, IN))
    assert_same_bits(output_offset(layer), layer.dequantize(torch.float32) @ mu, "D(W) mu of the new weight")
    layer.restore(snapshot)
    assert_same_packed(layer, before)


@pytest.mark.parametrize("change", ("added", "removed"))
def test_nvfp4_restoring_after_the_offset_changed_leaves_no_stale_constant(change):
    """Calibrating while an adapter is merged, then unmerging: D(W) mu must be that of the weight that is there."""
    layer, mu = centred()
    if change == "added":
        layer.set_offset(None)
    snapshot = layer.snapshot()
    layer.requantize_(torch.randn(OUT, IN))
    layer.set_offset(mu if change == "added" else None)
    layer.restore(snapshot)
    if layer.input_offset is None:
        assert layer.output_offset is None
    else:
        assert_same_bits(output_offset(layer), layer.dequantize(torch.float32) @ layer._offset, "D(W) mu")
