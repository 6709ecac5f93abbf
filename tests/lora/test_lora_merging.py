"""Merging LoRA into a frozen base, for the three backends: in place, where the stored tensors come back bit for bit when it is
undone, and for good, into dense linears."""

import copy

import pytest
import torch
from _assertions import assert_same_bits
from _lora_layers import (
    HIDDEN,
    LAYERS,
    REQUANTISED_SQNR,
    TOKENS,
    D,
    Mlp,
    adapt,
    assert_close,
    assert_same_packed,
    by_dtype,
    delta,
    formula,
    inputs,
    layer_of,
    lora_config,
    packed,
    sqnr,
)
from peft import get_peft_model
from torch import nn

from peft_nvfp4.lora.layer import FrozenLoraLinear
from peft_nvfp4.quantization.freeze import frozen_layers


@by_dtype
@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
def test_merge_and_unmerge(backend, dtype, safe_merge):
    """The merged weight is D(W) + s B A after one requantisation; unmerging puts back every byte."""
    model = adapt(backend, dtype=dtype)
    before = {n: packed(layer_of(model, n)) for n in LAYERS}
    layers = {n: layer_of(model, n) for n in LAYERS}
    want = {n: m.get_base_layer().dequantize(torch.float32) + delta(m, "default") for n, m in layers.items()}
    x = torch.randn(TOKENS, D).to(dtype)
    unmerged = model(x)
    model.merge_adapter(safe_merge=safe_merge)
    floor = min(REQUANTISED_SQNR[backend], 45.0 if dtype == torch.bfloat16 else 200.0)  # 8 bits of BF16: 9 x 6 dB on average
    for name in LAYERS:
        layer = layer_of(model, name)
        base = layer.get_base_layer()
        assert layer.merged_adapters == ["default"]
        assert sqnr(base.dequantize(torch.float32), want[name]) >= floor
        assert not any(p.requires_grad for p in base.parameters())
        if backend != "bf16":
            assert base.weight.dtype == torch.uint8 and not torch.equal(base.weight, before[name]["weight"])
        y = inputs(layer, dtype)
        assert_close(layer(y), *formula(layer, y, []), dtype, "merged forward")
    # Measured over eight seeds, relative to the output's norm: nvfp4 up to 0.096, nf4 0.070, bf16 2**-8.
    assert (model(x) - unmerged).norm() <= {"nvfp4": 0.2, "nf4": 0.2, "bf16": 2.0**-6}[backend] * unmerged.norm()
    model.unmerge_adapter()
    for name in LAYERS:
        assert layer_of(model, name).merged_adapters == []
        assert_same_packed(packed(layer_of(model, name)), before[name])
    assert_same_bits(model(x), unmerged, "output after unmerging")


def test_merging_one_after_the_other_equals_merging_at_once(backend):
    """Every merge starts from the original weight, so requantisation errors do not add up."""
    settings = dict(r=2, lora_alpha=6, lora_bias=True)
    model = adapt(backend, settings)
    before = packed(layer_of(model))
    model.merge_adapter(["default", "a1"])
    at_once = packed(layer_of(model))
    model.unmerge_adapter()
    assert_same_packed(packed(layer_of(model)), before)
    model.merge_adapter(["default"])
    with pytest.warns(UserWarning, match="Already following adapters were merged default"):
        model.merge_adapter(["a1"])
    assert layer_of(model).merged_adapters == ["default", "a1"]
    assert_same_packed(packed(layer_of(model)), at_once)
    assert (at_once["bias"] != before["bias"]).any()
    model.unmerge_adapter()
    assert_same_packed(packed(layer_of(model)), before)


def test_merging_what_is_merged_or_unknown_does_nothing(backend):
    model = adapt(backend)
    layer = layer_of(model)
    layer.merge(adapter_names=["nope"])
    assert layer.merged_adapters == []
    model.merge_adapter()
    merged = packed(layer)
    with pytest.warns(UserWarning, match="All adapters are already merged"):
        model.merge_adapter()
    assert_same_packed(packed(layer), merged)
    assert layer.merged_adapters == ["default"]
    model.unmerge_adapter()
    with pytest.warns(UserWarning, match="Already unmerged"):
        layer.unmerge()


@by_dtype
@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
def test_a_merged_bias_keeps_its_dtype(backend, dtype, safe_merge):
    """One rounding of b + s b_B; the merged layer runs, and unmerging puts back every byte, also after a merge that failed
    half-way. (PEFT's safe merge leaves the bias in the dtype that the weight is merged in, FP32 here.)"""
    model = adapt(backend, dict(lora_bias=True), dtype=dtype, lora_bias=True)
    layer = layer_of(model)
    before, update = packed(layer), layer.lora_B["default"].bias.detach() * layer.scaling["default"]
    model.merge_adapter(safe_merge=safe_merge)
    assert_same_bits(layer.get_base_layer().bias.detach(), (before["bias"] + update).to(dtype), "merged bias")
    assert layer(inputs(layer, dtype)).dtype == dtype
    model.unmerge_adapter()
    assert_same_packed(packed(layer), before)
    layer.lora_A["a1"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        layer.merge(safe_merge=safe_merge, adapter_names=["default", "a1"])
    assert_same_packed(packed(layer), before, "after the failure")


@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
def test_lora_bias_without_a_bias_to_merge_into(backend, safe_merge):
    with pytest.warns(UserWarning, match="has no bias"):
        model = adapt(backend, lora_bias=True, bias=False)
    layer = layer_of(model)
    before = packed(layer)
    with pytest.raises(RuntimeError, match="no bias"):
        model.merge_adapter(safe_merge=safe_merge)
    assert_same_packed(packed(layer), before)
    assert layer.merged_adapters == []


@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
@pytest.mark.parametrize("where", ("A", "B", "bias"))
@pytest.mark.parametrize("value", (float("nan"), float("inf")), ids=str)
def test_adapter_that_is_not_finite_is_not_merged(backend, safe_merge, where, value):
    """Neither into a clean layer nor on top of a merged adapter; bytes and state stay as they were."""
    model = adapt(backend, dict(lora_bias=True), lora_bias=True)
    layer = layer_of(model)
    broken = {"A": layer.lora_A["a1"].weight, "B": layer.lora_B["a1"].weight, "bias": layer.lora_B["a1"].bias}[where]
    broken.data.view(-1)[3] = value
    clean = packed(layer)
    with pytest.raises(ValueError, match="NaN"):
        layer.merge(safe_merge=safe_merge, adapter_names=["a1"])
    assert_same_packed(packed(layer), clean, "clean layer")
    assert not layer.merged
    layer.merge(adapter_names=["default"])
    merged = packed(layer)
    with pytest.raises(ValueError, match="NaN"), pytest.warns(UserWarning, match="additionally merging a1"):
        layer.merge(safe_merge=safe_merge, adapter_names=["a1"])
    assert_same_packed(packed(layer), merged, "layer with a merged adapter")
    assert layer.merged_adapters == ["default"]
    layer.unmerge()
    assert_same_packed(packed(layer), clean, "after unmerging")


def test_a_failed_merge_leaves_nothing_to_unmerge(backend):
    """What is stored afterwards (here a new weight) is what a later merge starts from, and what unmerging puts back."""
    model = adapt(backend, None)
    layer = layer_of(model)
    layer.lora_A["a1"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        layer.merge(adapter_names=["a1"])
    layer.get_base_layer().requantize_(torch.randn(HIDDEN, D))
    before = packed(layer)
    layer.merge(adapter_names=["default"])
    layer.unmerge()
    assert_same_packed(packed(layer), before)


def test_disabling_adapters_unmerges(backend):
    model = adapt(backend)
    layer = layer_of(model)
    before, x = packed(layer), torch.randn(TOKENS, D)
    with model.disable_adapter():
        base = model(x)
    model.merge_adapter()
    with model.disable_adapter():
        assert_same_bits(model(x), base, "output without adapters")
    assert_same_packed(packed(layer), before)
    assert not layer.merged


def test_a_copy_of_a_merged_model_unmerges_by_itself(backend):
    model = adapt(backend)
    before = packed(layer_of(model))
    model.merge_adapter()
    merged = packed(layer_of(model))
    twin = copy.deepcopy(model)
    twin.unmerge_adapter()
    assert_same_packed(packed(layer_of(twin)), before, "the copy, unmerged")
    assert_same_packed(packed(layer_of(model)), merged, "the original, still merged")
    model.unmerge_adapter()
    assert_same_packed(packed(layer_of(model)), before, "the original, unmerged")


@by_dtype
@pytest.mark.parametrize("target", ("all-linear", ["q_proj"]), ids=("all", "q_proj"))
@pytest.mark.parametrize("first", (False, True), ids=("unmerged", "merged_in_place"))
def test_merge_and_unload(backend, llama, dtype, target, first):
    """Plain nn.Linear everywhere, also where there was no adapter; every weight is D(W) + s B A in FP32, rounded once to the
    model's dtype, with the same bits as written out here. So the model is exactly the dense one of these weights. A merge in
    place before leaves no trace of requantisation."""
    model = get_peft_model(llama(dtype), lora_config(backend, target_modules=target))
    reference = llama(dtype)
    for name, frozen in frozen_layers(model):
        name = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        layer, weight = model.base_model.model.get_submodule(name), frozen.dequantize(torch.float32)
        if isinstance(layer, FrozenLoraLinear):
            weight = weight + delta(layer, "default")
        reference.get_submodule(name).weight.data = weight.to(dtype)
    if first:
        model.merge_adapter()
    dense = model.merge_and_unload()
    assert type(dense) is type(reference)
    assert {n: type(m) for n, m in dense.named_modules()} == {n: type(m) for n, m in reference.named_modules()}
    expected = reference.state_dict()
    assert dense.state_dict().keys() == expected.keys()
    for name, t in dense.state_dict().items():
        assert_same_bits(t, expected[name], name)
    ids = torch.randint(0, 128, (2, 8))
    with torch.no_grad():
        assert_same_bits(dense(input_ids=ids).logits, reference(input_ids=ids).logits, "logits")


def test_merge_and_unload_of_chosen_adapters(backend):
    model = adapt(backend, dict(r=2, lora_bias=True), lora_bias=True)
    layer = layer_of(model)
    base = layer.get_base_layer()
    want = base.dequantize(torch.float32) + delta(layer, "default") + delta(layer, "a1")
    bias = sum((layer.lora_B[n].bias.detach() * layer.scaling[n] for n in ("default", "a1")), base.bias.detach())
    dense = model.merge_and_unload(adapter_names=["default", "a1"])
    assert type(dense) is Mlp and type(dense.up_proj) is nn.Linear
    assert_same_bits(dense.up_proj.weight.detach(), want, "weight")
    # (b + s1 b1) + s2 b2 in FP32, in this order
    assert_same_bits(dense.up_proj.bias.detach(), bias, "bias")


def test_a_dense_sum_is_not_quantised_on_the_way(backend, monkeypatch):
    """Neither for a report nor for a dense model: a search for every weight, of which nothing would be used."""
    model = adapt(backend)
    layer = layer_of(model)
    before, want = packed(layer), layer.get_base_layer().dequantize(torch.float32) + delta(layer, "default")
    monkeypatch.setattr(type(layer.get_base_layer()), "requantize_", lambda *_: pytest.fail("quantised"))
    assert_same_bits(layer.dense_with(["default"]), want, "dense_with")
    assert_same_packed(packed(layer), before)
    assert not layer.merged
    base = layer.get_base_layer()
    assert_same_bits(model.merge_and_unload().up_proj.weight.detach(), want, "merge_and_unload")
    assert_same_packed(packed(base), before, "the frozen layer that was replaced")


@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
def test_merge_and_unload_refuses_nan(backend, safe_merge):
    model = adapt(backend)
    layer_of(model).lora_A["default"].weight.data[0, 0] = float("nan")
    before = packed(layer_of(model))
    with pytest.raises(ValueError, match="NaN"):
        model.merge_and_unload(safe_merge=safe_merge)
    assert_same_packed(packed(layer_of(model)), before)


def test_unload_gives_the_frozen_layers_back(backend):
    model = adapt(backend)
    before, bases = {n: packed(layer_of(model, n)) for n in LAYERS}, [layer_of(model, n).get_base_layer() for n in LAYERS]
    base = model.unload()
    assert type(base) is Mlp
    for name, expected in zip(LAYERS, bases):
        assert getattr(base, name) is expected
        assert_same_packed(packed(expected), before[name])
    assert not [n for n, _ in base.named_parameters() if "lora_" in n]
    again = get_peft_model(base, lora_config(backend))  # and takes a new adapter
    assert layer_of(again).get_base_layer() is bases[0]
