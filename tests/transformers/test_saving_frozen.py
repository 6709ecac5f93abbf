"""Models that were frozen, or merged, after loading: ``save_pretrained`` writes a folder that ``from_pretrained`` loads."""

import json

import pytest
import torch
import transformers as hf
from _families import causal
from _peft_models import IDS, by_backend, config, logits, train
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import PactConfig, detach, freeze_model, frozen_bytes, merge
from peft_nvfp4.quantization.freeze import frozen_layers


def reloaded(model, folder):
    model.save_pretrained(folder)
    return hf.AutoModelForCausalLM.from_pretrained(folder)


SETTINGS = {
    "defaults": {},
    "words": dict(accuracy="paper", weight_layouts="transient", skip_modules=["0.mlp", "1.self_attn.v_proj"]),
}


@by_backend
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_frozen_model_is_saved_and_loaded(tmp_path, backend, settings):
    model = freeze_model(tiny_llama(), backend, progress=False, **settings)
    names = [name for name, _ in frozen_layers(model)]
    again = reloaded(model, tmp_path)
    if backend == "nf4":  # bitsandbytes' own layers, which are adopted
        assert [n for n, m in again.named_modules() if type(m).__name__ == "Linear4bit"] == names
        skip = settings.get("skip_modules", ())
        assert [n for n, _ in frozen_layers(freeze_model(again, "nf4", skip_modules=skip, progress=False))] == names
    assert torch.equal(logits(again), logits(model))
    assert not hasattr(model.config, "quantization_config") and getattr(model, "hf_quantizer", None) is None
    if backend == "nvfp4":
        assert [name for name, _ in frozen_layers(again)] == names and frozen_bytes(again) == frozen_bytes(model)
        read = again.config.quantization_config
        assert isinstance(read, PactConfig) and read.accuracy == settings.get("accuracy", "high")
    if backend == "bf16":
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_a_merge_into_nvfp4_is_saved_and_loaded(tmp_path):
    model = train(get_peft_model(tiny_llama(), config()))
    merged, _ = merge(model, to="nvfp4")
    again = reloaded(merged, tmp_path)
    assert torch.equal(logits(again), logits(detach(merged)))


def test_experts_are_saved_and_loaded(tmp_path):
    make = causal("Mixtral", num_local_experts=4)
    torch.manual_seed(0)
    model = freeze_model(make(), progress=False)
    assert torch.equal(logits(reloaded(model, tmp_path)), logits(model))
    with pytest.raises(ValueError, match="holds experts in NF4.*dequantize_model"):
        freeze_model(make(), "nf4", progress=False).save_pretrained(tmp_path)


def test_a_model_with_an_adapter_is_refused(tmp_path):
    model = get_peft_model(freeze_model(tiny_llama(), progress=False), config())
    with pytest.raises(ValueError, match="carries an adapter. Save the adapter"):
        model.base_model.model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)  # the adapter


@pytest.mark.parametrize("stored", (False, True), ids=("quantised-on-loading", "stored"))
def test_a_merged_bitsandbytes_base_is_saved(tmp_path, stored):
    """What was read packed is dense now: nothing of how it was read is undone on saving."""
    pytest.importorskip("bitsandbytes")
    tiny_llama().save_pretrained(tmp_path / "dense")
    settings = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=settings)
    if stored:
        base = reloaded(base, tmp_path / "nf4")
    merged, _ = merge(train(get_peft_model(base, config(backend="nf4"))), to="fp32")
    again = reloaded(merged, tmp_path / "merged")
    assert torch.equal(logits(again), logits(merged)) and not frozen_layers(again)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    again.train()(IDS, labels=IDS).loss.backward()
