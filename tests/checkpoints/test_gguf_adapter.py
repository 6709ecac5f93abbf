"""A LoRA adapter as GGUF: names, values, scale; and what cannot be one. (llama.cpp reads them in tests/llama_cpp.)"""

import pytest
import torch
from _gguf_models import MODELS, tokenizer
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from peft_nvfp4 import NVFP4LoraConfig, cli
from peft_nvfp4.checkpoints.gguf import export_gguf_adapter
from peft_nvfp4.checkpoints.gguf.families import neighbours

gguf = pytest.importorskip("gguf", reason="not run: gguf is not installed")
ALL = dict(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


def read(path):
    """(fields, name -> tensor)."""
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, {t.name: torch.tensor(t.data) for t in reader.tensors}


def test_names_values_and_scale(tmp_path):
    """llama.cpp computes alpha / r * B A x: B is PEFT's where that is its scale, with Llama's rows of q and k in pairs."""
    model = get_peft_model(MODELS["llama"](), NVFP4LoraConfig(r=4, lora_alpha=12, **ALL))
    fields, tensors = read(export_gguf_adapter(model, tmp_path / "adapter.gguf"))
    assert fields["general.type"] == "adapter" and fields["general.architecture"] == "llama"
    assert fields["adapter.type"] == "lora" and fields["adapter.lora.alpha"] == 12.0
    assert len(tensors) == 2 * 7 * 2  # A and B of the linears of two layers; llama.cpp's head is not among "all-linear"
    attention = model.base_model.model.model.layers[1].self_attn
    assert torch.equal(tensors["blk.1.attn_v.weight.lora_a"], attention.v_proj.lora_A["default"].weight.detach())
    assert torch.equal(tensors["blk.1.attn_v.weight.lora_b"], attention.v_proj.lora_B["default"].weight.detach())
    k = attention.k_proj.lora_B["default"].weight.detach()
    assert torch.equal(tensors["blk.1.attn_k.weight.lora_b"], neighbours(k, 2)) and not torch.equal(neighbours(k, 2), k)


def test_another_scale_goes_into_b(tmp_path):
    """rsLoRA scales by alpha / sqrt(r), here twice as much as llama.cpp."""
    model = get_peft_model(MODELS["qwen2"](), NVFP4LoraConfig(r=4, lora_alpha=8, use_rslora=True, **ALL))
    _, tensors = read(export_gguf_adapter(model, tmp_path / "adapter.gguf"))
    b = model.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"].weight.detach()
    assert torch.equal(tensors["blk.0.ffn_up.weight.lora_b"], 2 * b)


@pytest.mark.parametrize(
    "name, settings, message",
    (
        ("llama", dict(use_dora=True), "plain LoRA, not DoRA.*merge --gguf"),
        ("llama", dict(modules_to_save=["lm_head"]), "modules_to_save=.'lm_head'.*merge --gguf"),
        ("llama", dict(trainable_token_indices=[1]), "trainable tokens.*merge --gguf"),
        ("llama", dict(target_modules=["q_proj", "embed_tokens"]), "adapter of an embedding.*merge --gguf"),
        ("llama-tied", dict(target_modules=["q_proj", "lm_head"]), "lm_head is the embedding.*merge --gguf"),
    ),
)
def test_what_an_adapter_file_cannot_hold(name, settings, message, tmp_path):
    model = get_peft_model(MODELS[name](), LoraConfig(**{**ALL, "r": 2, **settings}))
    with pytest.raises(ValueError, match=message):
        export_gguf_adapter(model, tmp_path / "adapter.gguf")
    assert not list(tmp_path.iterdir())


def test_from_the_command_line(tmp_path, monkeypatch):
    """export ADAPTER --layout gguf: the file and a Modelfile for a base beside it. A model is written in NVFP4."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    base = MODELS["llama"]()
    base.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    get_peft_model(base, NVFP4LoraConfig(r=2, **ALL)).save_pretrained(tmp_path / "adapter")
    app, run = cli.application(), CliRunner()
    result = run.invoke(app, ["export", str(tmp_path / "adapter"), "-o", str(tmp_path / "out"), "--layout", "gguf"])
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["Modelfile", "adapter.gguf"]
    assert (tmp_path / "out" / "Modelfile").read_text().startswith("FROM ./base.gguf\nADAPTER ./adapter.gguf\n")
    result = run.invoke(app, ["export", str(tmp_path / "base"), "-o", str(tmp_path / "model"), "--layout", "gguf"])
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["Modelfile", "model.gguf"]
    reader = gguf.GGUFReader(tmp_path / "model" / "model.gguf")
    assert {t.tensor_type.name for t in reader.tensors if "attn_q.weight" in t.name} == {"NVFP4"}
