"""Training models that PactConfig loaded: adapters of stock PEFT and of this package, and TRL's script."""

import copy
import difflib
import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _pact_models import IDS, LORA, assert_same_state, backward, dense, dense_files, load, logits, with_adapter
from _steps import steps
from _tiny_models import WORDS, tiny_tokenizer
from conftest import tiny_llama
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM

from peft_nvfp4 import NVFP4LoraConfig, PactConfig, prepare_model_for_nvfp4_training
from peft_nvfp4.fusion.mlp import FusedGatedMLP
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.quantization.freeze import frozen_layers
from peft_nvfp4.training.offload.enable import offloaded

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path):
    return dense_files(tmp_path)


def test_stock_and_own_adapters_give_the_model_frozen_by_an_adapter(folder):
    """A plain LoraConfig on a PactConfig base, NVFP4LoraConfig on it, and NVFP4LoraConfig on the dense model: one model."""
    expected = with_adapter(dense(folder), NVFP4LoraConfig)
    loss, grads = backward(expected)
    assert "RMSNorm+quantise" in str(expected.base_model.nvfp4_report)
    for config in (LoraConfig, NVFP4LoraConfig):
        model = with_adapter(load(folder), config)
        assert str(model.base_model.nvfp4_report) == str(expected.base_model.nvfp4_report)
        assert_same_state(model, expected)
        its_loss, its_grads = backward(model)
        assert torch.equal(its_loss, loss) and its_grads.keys() == grads.keys() and len(grads) == 28
        assert all(torch.equal(its_grads[name], grads[name]) for name in grads)
    with pytest.raises(ValueError, match=r"frozen already.*accuracy='high'"):
        with_adapter(load(folder, accuracy="paper"), NVFP4LoraConfig)


@pytest.mark.parametrize("config", [LoraConfig, NVFP4LoraConfig])
@pytest.mark.parametrize("memory", ["fast", "small", "smallest"])
def test_memory_of_a_loaded_model(folder, config, memory):
    """The word with which a model was loaded holds for its adapters, whether their config has no such word or the default."""
    model = with_adapter(load(folder, memory=memory), config)
    assert {layer.options for _, layer in frozen_layers(model)} <= {
        replace(PactConfig(memory=memory).options.frozen, terms=terms) for terms in (1, 2)
    }
    assert {m.recompute for m in model.modules() if isinstance(m, FusedGatedMLP)} == {memory != "fast"}
    assert offloaded(model) == (memory == "smallest")


@pytest.mark.parametrize("prepare", [prepare_model_for_kbit_training, prepare_model_for_nvfp4_training])
def test_prepared_model_learns(folder, prepare):
    model = prepare(load(folder))
    assert model.is_gradient_checkpointing and not any(p.requires_grad for p in model.parameters())
    dtype = torch.float32 if prepare is prepare_model_for_kbit_training else torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == model.model.norm.weight.dtype == model.lm_head.weight.dtype == dtype
    assert {p.dtype for _, layer in frozen_layers(model) for p in layer.parameters()} == {torch.uint8}
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(**LORA))
    model.train()
    losses = steps(model, IDS, 5, lr=2e-2)
    assert losses[-1] < losses[0] - 0.5, losses


def test_adapter_saves_and_reloads(folder, tmp_path):
    model = with_adapter(load(folder))
    model.save_pretrained(tmp_path / "adapter")
    load(folder).save_pretrained(tmp_path / "packed")
    for base in (load(folder), AutoModelForCausalLM.from_pretrained(tmp_path / "packed")):
        again = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert torch.equal(logits(model), logits(again))
    auto = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", quantization_config=PactConfig(), dtype=torch.bfloat16)
    assert torch.equal(logits(model), logits(auto))


def test_base_of_an_adapter_is_saved_only_without_it(folder, tmp_path):
    expected = logits(load(folder))
    model = with_adapter(load(folder))
    for call in (lambda: model.get_base_model().save_pretrained(tmp_path / "no"), model.get_base_model().dequantize):
        with pytest.raises(ValueError, match="carries an adapter"):
            call()
    base = model.unload()
    base.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), expected)
    merged = with_adapter(load(folder)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(dense(tmp_path / "merged")), logits(merged))
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_parameter_count_is_the_dense_model_s(folder, tmp_path):
    plain, model = dense(folder), load(folder)
    for settings in ({}, dict(exclude_embeddings=True)):
        assert model.num_parameters(**settings) == plain.num_parameters(**settings)
    assert with_adapter(model).get_base_model().num_parameters(only_trainable=True) == 2 * 4 * (
        64 * 4 + 64 + 32 + 32 + 64 + 3 * (64 + 176)
    )
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    for settings in ({}, dict(exclude_embeddings=True)):
        assert load(tmp_path / "tied").num_parameters(**settings) == dense(tmp_path / "tied").num_parameters(**settings)
    assert copy.deepcopy(model).num_parameters.model() is not model


def test_works_without_bitsandbytes(folder, tmp_path):
    """In a process that cannot import it: load, prepare with stock PEFT, count, train, save."""
    code = f"""
import sys
sys.modules["bitsandbytes"] = None
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM
from peft_nvfp4 import PactConfig
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, quantization_config=PactConfig(), dtype=torch.bfloat16)
model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=4, target_modules="all-linear"))
ids = torch.arange(32).reshape(2, 16)
model.train()
assert model.is_gradient_checkpointing
model(input_ids=ids, labels=ids).loss.backward()
assert model.get_base_model().num_parameters() > 100_000
model.save_pretrained({str(tmp_path / "adapter")!r})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


def run_script(name, monkeypatch, model, data, output, steps):
    monkeypatch.setattr(
        sys, "argv", [name, "--model", str(model), "--data", str(data), "--output", str(output), "--max_steps", str(steps)]
    )
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def body(name):
    return (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()


def check_scripts(monkeypatch, model, data, out, steps):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("trl")
    for script in ("qlora_script.py", "qlora_script_nvfp4.py"):
        globals_ = run_script(script, monkeypatch, model, data, out / script, steps)
        trainer = globals_["trainer"]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == steps and all(torch.isfinite(torch.tensor(losses)))
        trained = {n: p for n, p in trainer.model.named_parameters() if "lora_B" in n}
        assert len(trained) == 7 * trainer.model.config.num_hidden_layers
        assert all(p.abs().max() > 0 for p in trained.values()), "B starts at zero"
        assert (out / script / "adapter_model.safetensors").is_file()
        if script == "qlora_script_nvfp4.py":
            assert len(frozen_layers(trainer.model)) > 0
            assert all(isinstance(layer, NVFP4FrozenLinear) for _, layer in frozen_layers(trainer.model))
            assert trainer.model.is_gradient_checkpointing
            again = PeftModel.from_pretrained(load(model), out / script)
            assert all(torch.equal(p.float(), trained[n].float()) for n, p in again.named_parameters() if "lora_B" in n)


def test_the_public_script_differs_in_the_config_only():
    changed = [
        line
        for line in difflib.unified_diff(body("qlora_script.py"), body("qlora_script_nvfp4.py"), lineterm="", n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip()
    ]
    assert [line for line in changed if line[0] == "+"] == [
        "+from transformers import AutoModelForCausalLM, AutoTokenizer",
        "+from peft_nvfp4 import PactConfig",
        "+quantization_config = PactConfig()",
    ]
    assert "peft_nvfp4" not in "\n".join(body("qlora_script.py"))


def test_both_scripts_run(tmp_path, monkeypatch):
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": " ".join(WORDS.split()[i : i + 12])} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    check_scripts(monkeypatch, tmp_path / "model", tmp_path / "train.jsonl", tmp_path, steps=2)


@pytest.mark.slow
def test_both_scripts_run_on_the_packaged_model(tmp_path, monkeypatch):
    import smollm2_reviews as data

    try:
        data.model_folder(), data.movie_reviews()
    except FileNotFoundError as error:
        pytest.skip(f"not run: {error}")
    monkeypatch.setattr(sys, "argv", ["qlora_data.py", str(tmp_path), "--rows", "16", "--layers", "2"])
    runpy.run_path(str(EXAMPLES / "qlora_data.py"), run_name="__main__")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    check_scripts(monkeypatch, tmp_path / "model", tmp_path / "train.jsonl", tmp_path, steps=2)
