"""merge(): the merged weights bit for bit, the retention report against its definitions, warnings, and what is refused."""

import copy
import json
import warnings
from dataclasses import asdict

import pytest
import torch
from _assertions import assert_same_bits, unit
from _frozen_experts import adapted as with_experts
from _frozen_experts import experts_of
from _lora_layers import LAYERS, TOKENS, D, Mlp, assert_same_packed, delta, layer_of
from _mixtures import mixtral
from conftest import tiny_llama
from low_level import adapted_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from peft_nvfp4 import NVFP4LoraConfig, PactConfig, attach, freeze_model, merge, ops
from peft_nvfp4.fusion.attach import attached
from peft_nvfp4.lora.merge import share_scales
from peft_nvfp4.lora.report import measure_layer
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.numerics.formats import WEIGHT
from peft_nvfp4.quantization.freeze import frozen_layers

IDS = torch.arange(24).reshape(2, 12) * 7 % 128
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
quiet = pytest.mark.filterwarnings("ignore:near no-op", "ignore:rounding to nvfp4")


def config(backend="nvfp4", **settings):
    defaults = dict(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return NVFP4LoraConfig(backend=backend, **{**defaults, **settings})


def adapted(size=1.0, dtype=torch.float32, backend="nvfp4", **settings):
    """An adapted Llama; ``size`` scales B."""
    model = adapted_model(tiny_llama(dtype), make=config, backend=backend, **settings)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data *= size
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


# ---------------------------------------------------------------------------------------------- merged weights
@pytest.mark.parametrize("to", ("bf16", "fp16", "fp32"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_dense(backend, to, dtype):
    """round(D(W) + s B A), with one rounding; everything around is in that dtype as well, but no buffer is rounded."""
    model = get_peft_model(Mlp().to(dtype), config(backend, target_modules=list(LAYERS)))
    model.base_model.model.norm.register_buffer("frequencies", torch.tensor([1 / 3]))
    want = {}
    for name in LAYERS:
        layer = layer_of(model, name)
        want[name] = (layer.get_base_layer().dequantize(torch.float32) + delta(layer, "default")).to(DTYPES[to])
    merged, report = merge(model, to)
    for name in LAYERS:
        linear = getattr(merged, name)
        assert type(linear) is nn.Linear
        assert_same_bits(linear.weight.detach(), want[name], name)
        assert linear.bias.dtype == merged.norm.weight.dtype == DTYPES[to]
    assert merged.norm.frequencies.dtype == torch.float32
    assert report.to == to and not report.warnings and {layer.name for layer in report.layers} == set(LAYERS)
    # rounding to 2^-8 (BF16's unit) of weights that are a few times larger than the delta
    assert abs(report.retained - 1) < 0.01 and report.error < 0.02


def test_dense_fp32_does_not_pass_through_16_bits():
    """Merging a BF16 model to FP32 gives the FP32 sum; the config says FP32."""
    model = adapted(dtype=torch.bfloat16)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    want = layer.get_base_layer().dequantize(torch.float32) + delta(layer, "default")
    merged, _ = merge(model, "fp32")
    assert_same_bits(merged.model.layers[0].mlp.up_proj.weight.detach(), want, "weight")
    assert not torch.equal(want, want.bfloat16().float())
    assert merged.config.dtype == torch.float32 and {p.dtype for p in merged.parameters()} == {torch.float32}
    logits(merged)


@quiet
@pytest.mark.parametrize("fused", (True, False))
def test_nvfp4(fused):
    """Q(D(W_f) + s B A) in frozen layers; what was fused stays so; the model computes as with the adapter merged in place."""
    model = adapted(fused=fused)
    in_place = copy.deepcopy(model)
    in_place.merge_adapter()
    want = logits(in_place.eval())
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    stored = {}
    for name, layer in layers.items():
        base = layer.get_base_layer()
        dense = base.dequantize(torch.float32) + delta(layer, "default")
        gscale = torch.maximum(ops.weight_gscale(dense), base.forward_layout.gscale)
        stored[name.removeprefix("base_model.model.")] = ops.dequantize(ops.quantize_weight(dense, WEIGHT, gscale))
    merged, report = merge(model, "nvfp4")
    found = dict(frozen_layers(merged))
    assert found.keys() == stored.keys() == {layer.name for layer in report.layers}
    for name, layer in found.items():
        assert type(layer) is NVFP4FrozenLinear
        assert_same_bits(layer.dequantize(torch.float32), stored[name], name)
    assert attached(merged) == fused
    assert_same_bits(logits(merged.eval()), want, "logits")
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]


@pytest.mark.parametrize("fused", (True, False))
@pytest.mark.parametrize("to", ("nvfp4", "bf16"))
def test_merge_aware(to, fused):
    """In NVFP4: the trained logits, bit for bit. Dense: the same weights, which BF16 holds exactly."""
    model = adapted(dtype=torch.bfloat16, merge_aware=True, fused=fused)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    trained = logits(model.eval())
    copied, _ = merge(copy.deepcopy(model), "nvfp4")
    merged, report = merge(model, to, probe=IDS)
    assert report.merge_aware and not report.warnings
    if to == "nvfp4":
        assert_same_bits(logits(merged), trained, "logits")
        assert report.probe.error == 0 and report.probe.same_choice == 1 and report.probe.retained == pytest.approx(1, abs=1e-9)
    for name, layer in frozen_layers(copied):
        if to == "bf16":
            assert_same_bits(merged.get_submodule(name).weight.detach(), layer.dequantize(torch.bfloat16), name)


@quiet
@pytest.mark.parametrize("adapters", (["second"], "second"))
def test_chosen_adapters_only(adapters):
    model = adapted()
    model.add_adapter("second", config(r=2))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    want = layer.get_base_layer().dequantize(torch.float32) + delta(layer, "second")
    merged, report = merge(model, "fp32", adapters=adapters, probe=IDS)
    assert_same_bits(merged.model.layers[0].mlp.up_proj.weight.detach(), want, "weight")
    assert report.adapters == ["second"] and report.probe.error < 1e-3 + report.probe.effect


@quiet
def test_dense_targets_are_merged_and_reported():
    """A layer that was left dense stays dense in its own dtype."""
    model = get_peft_model(Mlp(), config(target_modules=list(LAYERS), skip_modules=["up_proj"]))
    layer = layer_of(model, "up_proj")
    want = layer.get_base_layer().weight.detach() + delta(layer, "default")
    merged, report = merge(model, "nvfp4")
    assert_same_bits(merged.up_proj.weight.detach(), want, "up_proj")
    assert {layer.name: layer.stored for layer in report.layers} == {"up_proj": "fp32", "down_proj": "nvfp4"}


@pytest.mark.parametrize("to", ("fp32", "nvfp4"))
def test_an_adapter_of_the_embedding_is_merged_and_reported(to):
    """PEFT keeps it apart from those of linears; alone it is all that there is to report."""
    base = freeze_model(tiny_llama(), progress=False)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False))
    layer = model.base_model.model.model.embed_tokens
    before = layer.get_base_layer().weight.detach().clone()
    want = before + layer.get_delta_weight("default").detach()
    merged, report = merge(model, to)
    assert_same_bits(merged.model.embed_tokens.weight.detach(), want, "embedding")
    (found,) = report.layers
    assert (found.name, found.stored, found.retained) == ("model.embed_tokens", "fp32", 1) and not report.warnings
    assert found.effect == pytest.approx(((want - before).norm() / before.norm()).item(), rel=1e-5)
    assert "100.0% of the adapter retained" in str(report)


def test_the_probe_compares_with_the_adapters_that_are_merged():
    """Whichever was active before. Merged into a dense FP32 base they are the same function, but for the order of FP32 sums
    (measured: an error of 5e-7 of the effect)."""
    settings = dict(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_llama(), LoraConfig(**settings))
    model.add_adapter("second", LoraConfig(**settings))
    model.add_adapter("third", LoraConfig(**settings))
    for names in (["second"], ["second", "third"]):
        _, report = merge(copy.deepcopy(model), "fp32", adapters=names, probe=IDS)
        assert report.probe.retained == pytest.approx(1, abs=1e-4) and report.probe.error < 1e-4 < report.probe.effect
    _, report = merge(model, "fp32", probe=IDS)
    assert report.adapters == ["default"] and report.probe.error < 1e-4


def test_an_adapter_that_is_not_merged_may_be_broken():
    model = adapted()
    model.add_adapter("broken", config(r=2))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.lora_A["broken"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="broken holds NaN or Inf in model.layers.0.mlp.up_proj.lora_A.broken.weight"):
        merge(model, "fp32", adapters=["default", "broken"])
    merged, _ = merge(model, "fp32", adapters=["default"])
    assert logits(merged).isfinite().all()


def test_a_merge_that_fails_half_way_is_undone(monkeypatch):
    model = adapted()
    before = {name: {n: p.clone() for n, p in layer.packed_tensors().items()} for name, layer in frozen_layers(model)}
    want, last = logits(model.eval()), model.base_model.model.model.layers[1].mlp.down_proj

    def fails(*_, **__):
        assert model.base_model.model.model.layers[0].self_attn.q_proj.merged  # what came before it
        raise MemoryError

    monkeypatch.setattr(last, "merge", fails)
    with pytest.raises(MemoryError):
        merge(model, "nvfp4")
    for name, layer in frozen_layers(model):
        assert_same_packed(layer.packed_tensors(), before[name], name)
    assert not any(m.merged for m in model.modules() if hasattr(m, "merged_adapters"))
    assert_same_bits(logits(model), want, "logits")


# ---------------------------------------------------------------------------------------------- the report
@pytest.mark.filterwarnings("ignore:near no-op")
@pytest.mark.parametrize("sign, retained", ((1, 0), (-1, 1)))
def test_a_dense_layer_is_measured_with_the_sum_that_it_will_store(sign, retained):
    """BF16 numbers are 2^-7 apart above 1 and 2^-8 below: 1 + 2^-8 is a tie and goes to the even 1, 1 - 2^-8 is one of them."""
    model = get_peft_model(Mlp().bfloat16(), LoraConfig(r=1, lora_alpha=1, target_modules=["up_proj"]))
    layer = layer_of(model)
    layer.get_base_layer().weight.data.fill_(1)
    layer.lora_A["default"].weight.data.fill_(1)
    layer.lora_B["default"].weight.data.fill_(sign * 2.0**-8)
    merged, report = merge(model, "bf16")
    (found,) = report.layers
    assert (found.retained, found.changed, found.error) == (retained, retained, 1 - retained)
    assert (merged.up_proj.weight == (1 if sign > 0 else 1 - 2.0**-8)).all()


@quiet
@pytest.mark.parametrize("to", ("nvfp4", "bf16"))
def test_experts_are_measured_all_together(to):
    """One entry for a projection: the definitions, over all its experts, with what the merged model stores."""
    model = with_experts(mixtral)
    wrapper = experts_of(model.base_model.model)
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    before, dense = experts.dequantize(name, torch.float32), wrapper.dense_with(["default"])
    merged, report = merge(model, to)
    now = experts_of(merged)
    after = now.dequantize(name, torch.float32) if to == "nvfp4" else getattr(now, name).detach().float()
    want = measure_layer(f"model.layers.0.mlp.experts.{name}", to, before, dense, after)
    (got,) = (layer for layer in report.layers if layer.name == want.name)
    for figure in ("effect", "retained", "error", "changed"):
        assert getattr(got, figure) == pytest.approx(getattr(want, figure), rel=1e-5), figure
    assert got.stored == to
    assert len(report.layers) == 2 * 3  # both projections and q_proj of two layers


@quiet
def test_probe_is_what_the_models_say():
    """Modes and training state are untouched; padding does not count; the same report from a batch, ids or a list."""
    model = adapted()
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    adapter, merged_ids = logits(model.eval()), copy.deepcopy(model)
    with model.disable_adapter():
        base = logits(model)
    model.train()
    merged, report = merge(model, "nvfp4", probe=[IDS[:1], IDS[1:]])
    assert merged.training
    after = logits(merged.eval())
    effect = (adapter - base).double()
    assert report.probe.positions == IDS.numel()
    assert report.probe.retained == pytest.approx((((after - base).double() * effect).sum() / effect.square().sum()).item())
    assert report.probe.error == pytest.approx(((after - adapter).double().norm() / effect.norm()).item())
    _, report = merge(merged_ids, "nvfp4", probe={"input_ids": IDS, "attention_mask": mask, "labels": IDS})
    assert report.probe.positions == int(mask.sum())


def test_report_is_json_and_text():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = merge(adapted(0.01), "nvfp4", probe=IDS)
    told = json.loads(json.dumps(asdict(report)))
    assert told["retained"] == report.retained and len(told["layers"]) == 14
    assert told["probe"]["positions"] == 24 and told["probe"]["retained"] == report.probe.retained
    assert told["warnings"] == report.warnings and told["layers"][0].keys() >= {"name", "effect", "retained", "error"}
    text = str(report)
    assert "near no-op" in text and "of the adapter retained" in text and "logits (24 positions)" in text


# ---------------------------------------------------------------------------------------------- warnings
def test_near_no_op_is_warned_of():
    """A delta of a few hundredths of a rounding step is gone after an NVFP4 merge, and said to be; an FP32 merge keeps it."""
    model = adapted(0.002)
    with pytest.warns(UserWarning, match="near no-op: rounding to nvfp4 leaves") as caught:
        _, report = merge(copy.deepcopy(model), "nvfp4")
    assert len([w for w in caught if "no-op" in str(w.message)]) == 1 and caught[0].filename == __file__
    assert report.retained < 0.3 and report.error > 0.7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, report = merge(model, "fp32")
    assert report.retained == pytest.approx(1, abs=1e-3)


def test_an_adapter_that_adds_nothing():
    model = adapted(0.0)
    with pytest.warns(UserWarning, match="the adapter adds nothing"):
        merged, report = merge(model, "nvfp4", probe=IDS)
    assert report.probe.effect == 0 and report.retained == 1


# ---------------------------------------------------------------------------------------------- shared global scales
@quiet
def test_linears_of_one_input_share_their_global_scale():
    """v grows by the merge, q and k do not: their block scales take the difference, no value changes."""
    model = adapted(0.1)
    attention = model.base_model.model.model.layers[0].self_attn
    attention.v_proj.lora_B["default"].weight.data *= 1000
    in_place = copy.deepcopy(model)
    in_place.merge_adapter()
    merged, report = merge(model, "nvfp4")
    names = ("q_proj", "k_proj", "v_proj")
    before = [getattr(in_place.base_model.model.model.layers[0].self_attn, n).get_base_layer() for n in names]
    after = [getattr(merged.model.layers[0].self_attn, n) for n in names]
    assert len({layer.forward_layout.gscale.item() for layer in before}) > 1
    assert len({layer.forward_layout.gscale.item() for layer in after}) == 1 and not report.unequal_scales
    assert len({layer.weight_gscale.data_ptr() for layer in after}) == 3
    for one, other in zip(before, after):
        assert_same_bits(other.dequantize(torch.float32), one.dequantize(torch.float32), "values")


def test_gate_and_up_share_as_well_and_others_do_not():
    """The smaller scale follows the larger one, values stay; linears of different inputs are none of each other's business."""
    model = freeze_model(tiny_llama(), progress=False)
    before = {name: (layer.dequantize(torch.float32), layer.weight_gscale.clone()) for name, layer in frozen_layers(model)}
    mlp = model.model.layers[1].mlp
    scale = 4 * mlp.up_proj.forward_layout.gscale
    mlp.up_proj = NVFP4FrozenLinear.quantize(nn.Linear(64, 176, bias=False), gscale=scale)
    before["model.layers.1.mlp.up_proj"] = mlp.up_proj.dequantize(torch.float32), mlp.up_proj.weight_gscale.clone()
    assert share_scales(model) == []
    for name, layer in frozen_layers(model):
        values, gscale = before[name]
        assert_same_bits(layer.dequantize(torch.float32), values, name)
        assert torch.equal(layer.weight_gscale, gscale) == (layer is not mlp.gate_proj), name
    assert_same_bits(mlp.gate_proj.forward_layout.gscale, scale, "gate's scale")


def test_scales_that_cannot_be_shared_exactly_are_left_and_reported():
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight.data[:, :16] *= 1e-4  # block scales near the end of E4M3
    freeze_model(model, progress=False)
    layer = attention.v_proj = NVFP4FrozenLinear.quantize(nn.Linear(64, 32))
    layer.weight_gscale.data = (layer.forward_layout.gscale * 64).view(torch.uint8)
    before = {n: m.weight_scales.clone() for n, m in frozen_layers(model)}
    assert share_scales(model) == [[f"model.layers.0.self_attn.{n}_proj" for n in "qkv"]]
    assert all(torch.equal(m.weight_scales, before[n]) for n, m in frozen_layers(model))


# ---------------------------------------------------------------------------------------------- refusals
def test_refused_and_unchanged():
    model = adapted()
    before = logits(model.eval())
    bad = model.base_model.model.model.layers[1].mlp.down_proj.lora_B["default"].weight
    for kwargs, message in (
        (dict(to="int4"), "to must be one of bf16, fp16, fp32, nvfp4"),
        (dict(adapters=["other"]), "no adapter named other; there are default"),
        (dict(probe=[]), "probe is a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(model, **{"to": "nvfp4", **kwargs})
    kept = bad.data.clone()
    bad.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="default holds NaN or Inf in model.layers.1.mlp.down_proj.lora_B.default.weight"):
        merge(model, "nvfp4")
    bad.data.copy_(kept)
    assert_same_bits(logits(model), before, "logits")
    model.merge_adapter()
    with pytest.raises(ValueError, match="default is merged already"):
        merge(model)
    with pytest.raises(TypeError, match="merge takes a PEFT model with LoRA adapters, got LlamaForCausalLM"):
        merge(tiny_llama())


@pytest.mark.parametrize("other", ("bf16", "nf4"))
def test_nvfp4_of_another_base_is_refused(other):
    if other == "nf4":
        pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match=f"is frozen in {other}: merge to 'bf16', then freeze"):
        merge(adapted(backend=other), "nvfp4")
    with pytest.raises(ValueError, match="no layer of this model is frozen"):
        merge(get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"])), "nvfp4")


def test_stock_model_merges_too():
    """A plain LoRA model without any frozen layer, to a dense format."""
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    want = copy.deepcopy(model).merge_and_unload()
    merged, report = merge(model, "fp32", probe=IDS)
    assert_same_bits(logits(merged), logits(want), "logits")
    assert len(report.layers) == 2 and report.error < 8 * unit(torch.float32) / report.layers[0].effect * D * TOKENS


@quiet
@pytest.mark.parametrize("to", ("nvfp4", "bf16"))
def test_model_loaded_in_nvfp4_saves_its_merge(tmp_path, to):
    """Loaded with PactConfig and adapted by a plain LoraConfig: what is merged is saved and comes back with the same logits (the
    fused norms of training round otherwise in BF16 than those of the modeling file, so they are attached again)."""
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16, quantization_config=PactConfig())
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    merged, _ = merge(model, to)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    assert len(frozen_layers(loaded)) == (14 if to == "nvfp4" else 0)
    if to == "nvfp4":
        attach(loaded)
    assert_same_bits(logits(loaded.eval()), logits(merged.eval()), "logits")
