"""One test for every bug that an independent review found (each fails on commit 4930bc1 where nothing else is said)."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _assertions import assert_same_bits
from _lora_layers import Mlp, assert_same_packed, delta, lora_config, packed
from _peft_models import IDS, config, frozen_lora, logits, snapshot, train
from peft import get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.flash_attention import get_target_dtype

from peft_nvfp4 import BACKENDS, FrozenLinear, detach, freeze_model
from peft_nvfp4.autograd import frozen_linear
from peft_nvfp4.autograd.frozen_linear import Branch
from peft_nvfp4.autograd.lora import lora_branch
from peft_nvfp4.fusion.attach import attached
from peft_nvfp4.lora.layer import FrozenLoraLinear
from peft_nvfp4.nn.frozen_linear import FrozenOptions
from peft_nvfp4.numerics.matmul import full_precision_sums
from peft_nvfp4.ops import linear
from peft_nvfp4.quantization.freeze import dequantize_model, frozen_layers
from peft_nvfp4.training.steps import slow_down_steps

RANDOM = dict(init_lora_weights=False)  # A and B both random: the adapter matters


@pytest.fixture
def saved(llama, tmp_path):
    llama(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def load(folder, **settings):
    """The saved Llama in BF16 or, given settings, as bitsandbytes loads it."""
    if settings:
        pytest.importorskip("bitsandbytes")
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)
        settings = dict(quantization_config=quantization, device_map={"": "cpu"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **settings)


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def unchanged(model, before):
    ids, flags, tensors = snapshot(model)
    assert ids == before[0] and flags == before[1] and tensors.keys() == before[2].keys()
    for name, t in before[2].items():
        assert_same_bits(tensors[name], t, name)


@pytest.mark.parametrize("init", (False, "pissa"))
def test_fan_in_fan_out_is_dropped_for_linears(backend, llama, init):
    """On square layers nothing else notices that the update is transposed."""
    settings = dict(backend=backend, target_modules=["q_proj", "o_proj"], init_lora_weights=init)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        torch.manual_seed(1)
        model = get_peft_model(llama(), config(fan_in_fan_out=True, **settings))
    torch.manual_seed(1)
    plain, want = frozen_lora(get_peft_model(llama(), config(**settings))), {}
    for name, layer in frozen_lora(model).items():
        want[name] = layer.get_base_layer().dequantize(torch.float32) + delta(layer, "default")
        assert_same_packed(packed(layer), packed(plain[name]), name)  # PiSSA: the same residual and the same factors
        assert_same_bits(delta(layer, "default"), delta(plain[name], "default"), name)
    merged = model.merge_and_unload().model.layers
    assert len(want) == 4
    for name, weight in want.items():
        got = merged.get_submodule(name).weight
        assert relative(got, weight) < 1e-6 and relative(got, weight.T) > 0.5


@pytest.mark.parametrize("kind", ("shared", "replicated"))
def test_merging_leaves_a_layer_with_the_same_weight_alone(backend, llama, kind):
    if kind == "shared":
        twins = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
        twins["b"].weight = twins["a"].weight
        model = get_peft_model(twins, lora_config(backend, target_modules=["a", "b"])).eval()
        a, b = model.base_model.model.values()
    else:
        model = get_peft_model(llama(), config(backend=backend, layer_replication=[[0, 2], [0, 2]], **RANDOM)).eval()
        a, b = (model.base_model.model.model.layers[i].self_attn.q_proj for i in (0, 2))
    assert a is not b and a.base_layer.weight.data_ptr() == b.base_layer.weight.data_ptr()
    layers, x = [m for m in model.modules() if isinstance(m, FrozenLoraLinear)], torch.randn(3, 64)
    before, outputs = [packed(m) for m in layers], {m: m(x).detach() for m in (a, b)}
    for one, other in ((a, b), (b, a)):
        one.merge()
        assert relative(one.base_layer.dequantize(torch.float32), other.base_layer.dequantize(torch.float32)) > 0.1
        assert_same_bits(other(x).detach(), outputs[other], "the other layer's output while one is merged")
        one.unmerge()
        assert_same_bits(other(x).detach(), outputs[other], "the other layer's output")
        assert_same_bits(one(x).detach(), outputs[one], "the unmerged layer's output")
    model.merge_adapter()
    model.unmerge_adapter()
    assert len(layers) == {"shared": 2, "replicated": 28}[kind]
    for layer, tensors in zip(layers, before):
        assert_same_packed(packed(layer), tensors)


def test_a_module_with_two_names_becomes_one_dense_module():
    linear = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": linear, "again": linear})
    weight = freeze_model(model)["a"].dequantize(torch.float32)
    dequantize_model(model)
    assert type(model["a"]) is nn.Linear and model["again"] is model["a"]
    assert_same_bits(model["a"].weight.detach(), weight, "weight")


@pytest.mark.parametrize("compute", (None, torch.bfloat16), ids=("default", "bf16_prepared"))
def test_an_adopted_model_merges_into_the_dtype_around_it(saved, compute):
    model = load(saved, bnb_4bit_compute_dtype=compute)  # None: FP32, bitsandbytes' default
    if compute:
        model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, config(backend="nf4", **RANDOM))
    assert len(frozen_lora(model)) == 14
    train(model, steps=1)
    want, merged = logits(model), model.merge_and_unload()
    dtype = merged.get_input_embeddings().weight.dtype
    assert {type(m) for n, m in merged.named_modules() if n.endswith("_proj")} == {nn.Linear}
    assert {m.weight.dtype for m in merged.modules() if isinstance(m, nn.Linear)} == {dtype}
    assert relative(logits(merged), want) < 0.02  # some BF16 roundings


def test_packed_storage_in_bf16(saved):
    model = load(saved, bnb_4bit_quant_storage=torch.bfloat16, bnb_4bit_compute_dtype=torch.bfloat16)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"already quantised \(nf4\).*backend='nf4', which adopts"):
        get_peft_model(model, config(backend="nvfp4"))
    unchanged(model, before)
    model = get_peft_model(model, config(backend="nf4"))
    assert len(frozen_lora(model)) == 14
    plain = get_peft_model(load(saved, bnb_4bit_compute_dtype=torch.bfloat16), config(backend="nf4"))
    assert_same_bits(logits(model), logits(plain), "logits")


def test_other_quantisations_are_refused(backend, llama):
    model = llama()
    before = snapshot(model)
    for method, words in (("gptq", "already quantised by 'gptq'"), ("compressed-tensors", "PactConfig")):
        model.config.quantization_config = {"quant_method": method}
        with pytest.raises(ValueError, match=words):
            get_peft_model(model, config(backend=backend))
        unchanged(model, before)
    model = Mlp()
    model.up_proj.weight = nn.Parameter(model.up_proj.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"up_proj.*already quantised \(torch.float8_e4m3fn\).*dense"):
        freeze_model(model, backend)
    assert not frozen_layers(model)


def test_likely_mistakes_warn(saved, backend):
    with pytest.warns(UserWarning, match="no linear layer"):
        freeze_model(nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8)), backend)
    with pytest.warns(UserWarning, match="loaded in torch.bfloat16 and is float32 now.*prepare_model_for_kbit_training"):
        get_peft_model(prepare_model_for_kbit_training(load(saved)), config(backend=backend))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        freeze_model(load(saved), backend)
    assert not [w for w in caught if "float32 now" in str(w.message) or "no linear" in str(w.message)]


@pytest.mark.parametrize("backend", ("nvfp4", "nf4"))  # a bf16 layer shows its dtype
def test_flash_attention_finds_a_dtype(saved, backend):
    model = freeze_model(load(saved), backend)
    assert {get_target_dtype(torch.zeros(1), layer.self_attn) for layer in model.model.layers} == {torch.bfloat16}


def test_hooks_survive_freezing(backend):
    model, calls, x = Mlp(), [], torch.randn(2, 64)
    with model.up_proj.register_forward_pre_hook(lambda *_: calls.append("before")):
        with model.up_proj.register_forward_hook(lambda *_: calls.append("after")):  # leaving the context removes it
            freeze_model(model, backend)(x)
    assert isinstance(model.up_proj, FrozenLinear) and calls == ["before", "after"]
    model(x)
    assert len(calls) == 2


FIRST = dict(target_modules=["v_proj"], accuracy="paper", skip_modules=["q_proj"], **RANDOM)


def test_a_further_config_must_ask_for_the_same_base(llama):
    """(Another backend: test_freeze.py.)"""
    model = get_peft_model(llama(), config(**FIRST))
    before, y = snapshot(model), logits(model)
    with pytest.raises(ValueError, match="terms=1.*terms=2"):
        model.add_adapter("b", config(**FIRST | {"accuracy": "high"}))
    assert list(model.peft_config) == ["default"] == model.active_adapters
    unchanged(model, before)
    assert_same_bits(logits(model), y, "logits")


@pytest.mark.parametrize("field, value", [("memory", "small"), ("memory", "fast")])
@pytest.mark.parametrize("layer", [{}, {"gradients": "bf16"}, {"weight_layouts": "transient"}], ids=str)
@pytest.mark.filterwarnings("ignore:.*keeps more than")
def test_how_backward_computes_is_the_bases(llama, layer, field, value):
    model = freeze_model(llama(), accuracy="paper", skip_modules=["q_proj"], **layer)
    before = {name: frozen.options for name, frozen in frozen_layers(model)}
    model = get_peft_model(model, config(**FIRST | {field: value})).get_base_model()
    after = {name.replace(".base_layer", ""): frozen.options for name, frozen in frozen_layers(model)}
    assert after == before and attached(model)


def test_a_further_config_freezes_nothing_more(llama):
    model = get_peft_model(llama(), config(**FIRST))
    y, frozen = logits(model), [name for name, _ in frozen_layers(model)]
    model.add_adapter("b", config(**FIRST | {"skip_modules": None}))
    assert [name for name, _ in frozen_layers(model)] == frozen and len(frozen) == 12  # of 14: not q_proj
    assert_same_bits(logits(model), y, "logits")


@pytest.mark.parametrize("typo", (dict(target_modules=["q_prj"]), dict(init_lora_weights="pisa")), ids=("target", "init"))
def test_a_typo_leaves_the_model_dense(backend, llama, typo):
    model = llama()
    before = snapshot(model)
    with pytest.raises(ValueError, match="q_prj|unknown init_lora_weights='pisa'"):
        get_peft_model(model, config(backend=backend, **typo))
    unchanged(model, before)


@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad, torch.inference_mode), ids=lambda m: m.__name__)
@pytest.mark.parametrize("edit", ("numpy", "data", "in place"))
@pytest.mark.parametrize("adapted", (False, True), ids=("base", "lora"))
def test_a_buffer_that_is_filled_again_is_quantised_again(edit, adapted, mode):
    """A linear with no siblings, fed from one buffer over and over; PyTorch sees an edit in place, and no other."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh())
    model = get_peft_model(model, lora_config("nvfp4", target_modules=["0"])) if adapted else freeze_model(model)
    buffer = np.zeros((4, 64), np.float32)
    x, outputs = torch.from_numpy(buffer), []
    for values in np.random.default_rng(0).standard_normal((3, 4, 64)).astype(np.float32):
        new = torch.from_numpy(values)
        {"numpy": lambda: np.copyto(buffer, values), "data": lambda: x.data.copy_(new), "in place": lambda: x.copy_(new)}[edit]()
        with mode():
            outputs.append(model(x).detach().clone())
            assert_same_bits(outputs[-1], model(new).detach(), f"output {len(outputs)}")
    assert relative(outputs[1], outputs[0]) > 0.1


def test_large_fp16_input_with_an_adapter():
    """65000 in a block may be rounded up past FP16's end; only what a branch sees is in FP16."""
    dense = nn.Linear(64, 32, bias=False).half()
    dense.weight.data *= 0.02
    layer = BACKENDS["nvfp4"].quantize(dense, FrozenOptions(terms=1))
    x = torch.randn(64, 64).half()
    x[:, 0] = torch.linspace(60000, 65504, 64)
    with torch.no_grad():
        y = layer.lora_forward(x, [Branch(torch.zeros(4, 64), torch.zeros(32, 4), 1.0, 0.0)])
        assert y.isfinite().all() and relative(layer.lora_input(x), x) < 0.1
        assert_same_bits(y, layer(x), "output with an adapter of zeros")


@pytest.mark.parametrize("flag", (True, (True, False)), ids=str)
def test_full_precision_sums_puts_the_flag_back(monkeypatch, flag):
    settings = SimpleNamespace(allow_bf16_reduced_precision_reduction=flag)
    monkeypatch.setattr(torch.backends.cuda, "matmul", settings)
    with pytest.raises(KeyError), full_precision_sums():
        assert settings.allow_bf16_reduced_precision_reduction in (False, (False, False))
        raise KeyError
    assert settings.allow_bf16_reduced_precision_reduction == flag


@pytest.mark.parametrize("fused", (False, True), ids=("plain", "fused"))
@pytest.mark.parametrize("kind", (torch.bfloat16, torch.float16, "dora"), ids=str)
def test_inputs_are_quantised_once(llama, monkeypatch, kind, fused):
    """Two layers, sites q/k/v, o, gate/up, down. Fused norms and MLPs emit what they produce quantised, which leaves o."""
    model = get_peft_model(llama(), config(accuracy="paper", use_dora=kind == "dora", target_modules="all-linear"))
    model = model if fused else detach(model)
    slow_down_steps(model)  # whose trials compute, too
    calls, quantize = [], linear.quantize_input.run
    monkeypatch.setattr(linear.quantize_input, "run", lambda x, *args: calls.append(x.dtype) or quantize(x, *args))
    with nullcontext() if kind == "dora" else torch.autocast("cpu", dtype=kind):
        model(IDS)
    assert calls == [torch.float32 if kind == "dora" else kind] * (2 if fused else 8)


def test_dropout_is_unbiased_in_bf16():
    """The sum of every row over K, summed again over rows of different sizes, against the same without dropout: 1/(1 - p) rounded
    to BF16 is 0.19 % too large, 15 sigma here."""
    m, k, p = 2000, 2000, 0.05
    x = (torch.exp2(torch.rand(m, 1)) * (0.5 + torch.rand(m, k))).bfloat16()
    y = lora_branch(x, Branch(torch.ones(1, k), torch.ones(1, 1), 1.0, p)).double().sum()
    bias = float(y / x.double().sum()) - 1
    sigma = float(x.double().norm() * (p / (1 - p)) ** 0.5 / x.double().sum())
    assert abs(bias) < 7 * sigma < 0.45 * 0.0019, bias / sigma


@pytest.mark.parametrize("backend", ("nvfp4", "bf16"))
@pytest.mark.parametrize("trained", ("A", "B"))
@pytest.mark.parametrize("p", (0.1, 0.0), ids=("dropout", "stacked"))
def test_a_frozen_factor_costs_no_gradient(monkeypatch, backend, trained, p):
    """Products in backward: g = dy B and dA = g.T x for A, dB = dy.T h for B (x needs no gradient here)."""
    layer = BACKENDS[backend].quantize(nn.Linear(64, 32), FrozenOptions())
    a, b, x = torch.randn(4, 64), torch.randn(32, 4), torch.randn(5, 64)
    calls, mm = [], frozen_linear.mm
    monkeypatch.setattr(frozen_linear, "mm", lambda *args: calls.append(1) or mm(*args))

    def gradients(needed):
        torch.manual_seed(1)  # the same dropout
        factors = [t.clone().requires_grad_(name in needed) for name, t in zip("AB", (a, b))]
        y = layer.lora_forward(x, [Branch(*factors, 2.0, p)])
        calls.clear()
        y.square().sum().backward()
        return {name: t.grad for name, t in zip("AB", factors)}, len(calls)

    (both, three), (got, fewer) = gradients("AB"), gradients(trained)
    assert three == 3 and fewer == {"A": 2, "B": 1}[trained]
    assert_same_bits(got[trained], both[trained], f"gradient of {trained}")
