"""From the headers of a published checkpoint to frozen layers, step by step: what the headers say of each linear, what of the
loaded tensors is checked, and what a packed linear becomes. Whole checkpoints: test_layouts and test_layouts_hostile."""

import numpy as np
import pytest
import torch
from _assertions import assert_same_bits
from conftest import tiny_llama
from published_checkpoints import Packed, tensors, write
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from peft_nvfp4 import PactConfig
from peft_nvfp4.checkpoints.layouts import COMPRESSED_TENSORS, MODELOPT
from peft_nvfp4.checkpoints.load import PackedLinear, Stored, check_loaded, dense_linear, frozen_layer, packed_linears
from peft_nvfp4.checkpoints.settings import Published
from peft_nvfp4.nn.frozen_linear import FrozenOptions
from peft_nvfp4.numerics.formats import GSCALE_EXPONENTS

N, K = 8, 48
LAYOUTS = pytest.mark.parametrize("layout", (COMPRESSED_TENSORS, MODELOPT), ids=lambda layout: layout.name)
WORDS = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16", torch.bool: "BOOL"}


def model(bias=False):
    return nn.ModuleDict({"a": nn.Linear(K, N, bias=bias), "b": nn.Linear(K, N), "table": nn.Embedding(N, K)})


def values(layout, g=2.0**-12, seed=0, input_scale=0.25):
    """Leaf -> tensor of one packed linear."""
    return tensors(Packed(np.random.default_rng(seed), N, K, g), layout.name, input_scale)


def headers(tensors, **more):
    """Name -> what a file's header says of it; ``more`` are settings of every entry."""
    return {name: Stored(name, "x.safetensors", WORDS[t.dtype], tuple(t.shape), **more) for name, t in tensors.items()}


def named(stem, tensors):
    return {f"{stem}.{leaf}": t for leaf, t in tensors.items()}


def published(layout):
    return Published(layout, "config.json")


def refused(layout, stored, match, planned=(), of=None):
    with pytest.raises(ValueError, match=match):
        packed_linears(of or model(), published(layout), stored, planned)


DENSE = {"b.weight": torch.zeros(N, K, dtype=torch.bfloat16)}


@LAYOUTS
def test_the_packed_linears_are_found_with_all_their_tensors(layout):
    """Dense tensors, and bytes that are no codes (a mask), are left alone."""
    own = values(layout)
    others = {**DENSE, "a.bias": torch.zeros(N), "table.weight": torch.zeros(N, K), "b.mask": torch.zeros(4, dtype=torch.uint8)}
    stored = headers({**named("a", own), **others})
    found = packed_linears(model(), published(layout), stored, ["a", "b"])
    assert found == {"a": {leaf: stored[f"a.{leaf}"] for leaf in own}}


def test_codes_without_any_scale_are_a_packed_linear_that_lacks_them():
    """In ModelOpt's layout codes have the name of a dense weight, and only their type tells."""
    own = values(MODELOPT)
    stored = headers({**DENSE, **named("b", own), "a.weight": own["weight"]})
    refused(MODELOPT, stored, r"a.weight_scale, a.weight_scale_2 missing in x.safetensors; download", ["a", "b"])


@LAYOUTS
def test_a_dense_weight_beside_the_parts_of_a_packed_one(layout):
    """It is named, whichever of the two is the mistake."""
    own = values(layout) | {"weight": torch.zeros(N, K, dtype=torch.bfloat16)}
    wrong = "is BF16, expected U8" if layout is MODELOPT else "is of another layout than compressed-tensors"
    refused(layout, headers(named("a", own)), f"^a.weight in x.safetensors {wrong}", ["a"])


@LAYOUTS
def test_only_plain_linears_are_read_packed(layout):
    """Not what is no linear, nor what is none of the model's, nor a linear that transformers makes from other tensors."""
    for stem, converted, why in (
        ("table", False, "but ModuleDict has Embedding there"),
        ("gone.away", False, "but ModuleDict has nothing there"),
        ("a", True, "but transformers rearranges this weight on loading"),
        ("table", True, "but transformers rearranges this weight on loading"),
    ):
        refused(layout, headers(named(stem, values(layout)), converted=converted), f"^{stem}.* in x.safetensors .*{why}")


def test_inputs_that_do_not_fill_blocks():
    of = nn.ModuleDict({"a": nn.Linear(K + 8, N)})
    refused(MODELOPT, headers(named("a", values(MODELOPT))), "has 56 inputs, which is not a multiple of 16", of=of)


def loaded(layout, bias=False, **settings):
    """A packed linear whose tensors are there, as transformers leaves them."""
    own = values(layout, **settings)
    linear = nn.Linear(K, N, bias=bias)
    packed = PackedLinear(linear, layout, headers(own))
    for name, t in own.items():
        setattr(packed, name, nn.Parameter(t, requires_grad=False))
    for p in packed.parameters():
        p._is_hf_initialized = True
    return packed


def check(**layers):
    parameters = {f"{name}.{leaf}": p for name, layer in layers.items() for leaf, p in layer.named_parameters()}
    check_loaded(parameters, lambda name: f"{name} in x.safetensors")


@LAYOUTS
@pytest.mark.parametrize("missing", ("codes", "scales", "gscale", "bias"))
def test_what_was_not_loaded_is_named(layout, missing):
    """Whether it has no memory yet or memory that nothing was written to."""
    leaf = getattr(layout, missing, missing)
    for empty in (lambda p: p.to("meta"), torch.empty_like):
        packed = loaded(layout, bias=True)
        check(a=packed)
        setattr(packed, leaf, nn.Parameter(empty(getattr(packed, leaf).detach()), requires_grad=False))
        with pytest.raises(ValueError, match=f"^a.{leaf} in x.safetensors was not loaded"):
            check(a=packed)
    packed = loaded(layout, bias=True)
    marked_only = nn.Parameter(getattr(packed, leaf).detach().to("meta"), requires_grad=False)
    marked_only._is_hf_initialized = True
    setattr(packed, leaf, marked_only)
    with pytest.raises(ValueError, match=f"^a.{leaf} in x.safetensors was not loaded"):
        check(a=packed)


@LAYOUTS
def test_biases_of_packed_linears_come_from_the_files(tmp_path, layout):
    """Nothing would initialise a missing one: in its place there would be what the memory held before."""
    model = tiny_llama(torch.bfloat16, attention_bias=True)
    biases = {name: p.data.normal_() for name, p in model.named_parameters() if name.endswith("bias")}
    write(tmp_path / "whole", layout.name, model)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=PactConfig(), dtype=torch.bfloat16
    ).state_dict()
    assert len(biases) == 8 and all(torch.equal(loaded[name], bias) for name, bias in biases.items())
    missing = "model.layers.0.self_attn.q_proj.bias"
    write(tmp_path / "spoiled", layout.name, model, change=lambda state: state.pop(missing))
    with pytest.raises(ValueError, match=f"{missing} was not loaded"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "spoiled", quantization_config=PactConfig(), dtype=torch.bfloat16)


@LAYOUTS
def test_the_range_of_global_scales_includes_its_ends(layout):
    low, high = (2.0**e for e in GSCALE_EXPONENTS)
    for g in (low, high):
        check(a=loaded(layout, g=g))
    for g in (low / 2, high * 2):
        with pytest.raises(ValueError, match=f"^a.{layout.gscale} in x.safetensors is corrupt: it holds a global scale"):
            check(sound=loaded(layout), a=loaded(layout, g=g))


@LAYOUTS
@pytest.mark.parametrize("bias", (False, True), ids=("no-bias", "bias"))
@pytest.mark.parametrize("training", (False, True), ids=("eval", "train"))
def test_a_packed_linear_becomes_frozen_or_dense(layout, bias, training):
    """Either way with the bias, the mode and the values that it had."""
    packed = loaded(layout, bias=bias).train(training)
    layer, linear = frozen_layer(packed, FrozenOptions()), dense_linear(packed)
    assert layer.backward_layout is not None and type(linear) is nn.Linear
    assert layer.training == linear.training == training
    assert_same_bits(linear.weight.detach(), layer.dequantize(torch.float32), "values")
    for got in (layer, linear):
        assert (got.in_features, got.out_features) == (K, N)
        assert (got.bias is not None) == bias and not (bias and got.bias.is_meta)
        if bias:
            assert_same_bits(got.bias.detach(), packed.bias.detach(), "bias")
    state = nn.Linear(K, N, bias=bias).state_dict()
    assert linear.state_dict().keys() == state.keys()


@LAYOUTS
@pytest.mark.parametrize(
    "stored, kept",
    ((None, None), (0.25, 0.25), (0.75, 0.75), (2.0, 2.0), (0.0, None), (-1.0, None), (float("inf"), None), (float("nan"), None)),
    ids=str,
)
def test_an_input_scale_is_kept_where_it_is_one(layout, stored, kept):
    """Nothing computes with it, so a wrong one is dropped, not refused."""
    packed = loaded(layout)
    if stored is None:
        delattr(packed, layout.input_scale)
    else:
        value = torch.tensor([stored])
        setattr(packed, layout.input_scale, nn.Parameter(1 / value if layout.reciprocal else value, requires_grad=False))
    layer = frozen_layer(packed, FrozenOptions())
    assert layer.published_input_scale == (kept if kept is None else pytest.approx(kept, rel=2.0**-23))


@LAYOUTS
def test_a_models_own_initialisation_never_sees_a_packed_linear(tmp_path, layout, monkeypatch):
    """One that fills whatever has a weight would fail on codes, before it is said what is missing."""
    seen = []
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: seen.append(type(module)))
    spoil = lambda state: [state.pop(f"model.{name}") for name in ("norm.weight", "layers.1.self_attn.k_proj.bias")]
    write(tmp_path, layout.name, tiny_llama(torch.bfloat16, attention_bias=True), change=spoil)
    with pytest.raises(ValueError, match="model.layers.1.self_attn.k_proj.bias was not loaded"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=PactConfig(), dtype=torch.bfloat16)
    assert seen and PackedLinear not in seen
