"""What serving engines ask of an exported checkpoint: dense where they take nothing else, one global scale for what they compute
as one matrix. That vLLM loads such files: tests/serving/test_nvfp4_loading.py."""

import json

import pytest
import torch
import transformers as hf
from _families import SIZES
from _pact_models import assert_same_state, load, tiny_llava
from conftest import tiny_llama
from safetensors.torch import load_file

from peft_nvfp4 import export_checkpoint, freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers

LAYOUTS = ("compressed-tensors", "modelopt")


def qwen2_moe():
    """With a shared expert, and a gate (1, 64) that weighs it."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64)
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**SIZES, **experts, dtype="bfloat16")).bfloat16()


def deepseek_v3():
    ranks = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1)
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**SIZES, **ranks, **experts, first_k_dense_replace=1)).bfloat16()


def exported(model, folder, layout="compressed-tensors"):
    """(report, tensors of the files, settings)."""
    report = export_checkpoint(freeze_model(model, "nvfp4", progress=False), folder, layout)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    return report, load_file(folder / "model.safetensors"), settings


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gate_is_dense(tmp_path, layout):
    report, stored, settings = exported(model := qwen2_moe(), tmp_path, layout)
    for name in (f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2)):
        assert name in report.dense and name in settings["ignore"]
        assert torch.equal(stored[f"{name}.weight"], model.get_submodule(name).dequantize()), "the weight that training saw"
        assert f"{name}.weight_scale" not in stored


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stands_before_the_decoder_is_dense(tmp_path, layout):
    report, stored, settings = exported(model := tiny_llava(1), tmp_path, layout)
    decoder = [name for name, _ in frozen_layers(model) if name.startswith("model.language_model.")]
    assert report.packed == len(decoder) == 7
    outside = [name for name, _ in frozen_layers(model) if name not in decoder]
    assert any("vision_tower" in name for name in outside) and any("projector" in name for name in outside)
    assert {*outside} <= {*settings["ignore"]} and {*report.dense} == {*outside, "lm_head"}
    packed = {key.rpartition(".")[0] for key in stored if key.endswith("weight_scale")}
    assert len(packed) == 7 and all(name.startswith("language_model.") for name in packed)
    again = load(tmp_path, hf.AutoModelForImageTextToText)
    assert_same_state(again.model.language_model, model.model.language_model)
    for name in outside:
        assert torch.equal(again.get_submodule(name).weight, model.get_submodule(name).dequantize()), name


def test_latent_attention_has_one_global_scale(tmp_path):
    """vLLM makes one matrix of q_a_proj and kv_a_proj_with_mqa."""
    model = deepseek_v3()
    for layer in model.model.layers:
        layer.self_attn.q_a_proj.weight.data *= 8
    _, stored, _ = exported(model, tmp_path)
    for i in range(2):
        names = (f"model.layers.{i}.self_attn.{leaf}.weight_global_scale" for leaf in ("q_a_proj", "kv_a_proj_with_mqa"))
        first, second = (stored[name] for name in names)
        assert torch.equal(first, second)


def test_a_group_that_is_packed_in_part_is_warned_of(tmp_path):
    model = freeze_model(tiny_llama(torch.bfloat16), "nvfp4", skip_modules=["k_proj"])
    with pytest.warns(UserWarning, match=r"layers.0.self_attn.k_proj \(of 2 such groups\) is dense.*skip_modules"):
        export_checkpoint(model, tmp_path)


def test_a_group_of_different_scales_is_warned_of(tmp_path):
    model = tiny_llama(torch.bfloat16)
    model.model.layers[0].mlp.up_proj.weight.data *= 16
    model = freeze_model(model, "nvfp4", skip_modules=["up_proj"])
    freeze_model(model, "nvfp4")
    layer = model.model.layers[0].mlp
    assert not torch.equal(layer.up_proj.weight_gscale, layer.gate_proj.weight_gscale)
    with pytest.warns(UserWarning, match=r"gate_proj, model.layers.0.mlp.up_proj \(of 1 such groups\).*one call"):
        export_checkpoint(model, tmp_path)
