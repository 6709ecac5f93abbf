"""Merging where weights are tied: an adapter on one of the layers changes that layer alone. And a report that says what the
logits say: a merge that is another model, and NaN in what was trained beside the adapter, do not pass."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from _peft_models import IDS, config, logits
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from peft_nvfp4 import detach, freeze_model, merge
from peft_nvfp4.lora import merge as merge_module

ADAPTERS = {
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "embedding": dict(target_modules=["q_proj", "embed_tokens"]),
    "both": dict(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "tied": dict(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
    "saved-head": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "saved-embedding": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "tokens": dict(target_modules=["q_proj"], trainable_token_indices=[3, 5]),
}


def adapted(**settings):
    """A model with tied embeddings and an adapter that is far from its start; unfused, so that only the merge makes a
    difference."""
    torch.manual_seed(1)
    base = freeze_model(tiny_llama(tie_word_embeddings=True), settings.pop("backend", "bf16"), progress=False)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **settings))
    for name, p in model.named_parameters():
        if "modules_to_save" in name or "trainable_tokens" in name:
            p.data += 0.3 * torch.randn_like(p)
    return detach(model).eval()


@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=ADAPTERS)
def test_a_merge_of_tied_weights_is_the_model_with_its_adapter(tmp_path, settings):
    """And the same again after it was saved and loaded."""
    model = adapted(**settings)
    wanted = logits(model)
    merged, report = merge(model, to="fp32", probe=IDS)
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())
    assert report.warnings == [] and report.probe.error < 1e-3
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(merged))


@pytest.mark.parametrize("way", ("merge", "merge_and_unload", "merge_adapter"))
def test_every_way_to_merge_unties(tmp_path, way):
    """Into NVFP4, too, where the rest of the model stays packed."""
    model = adapted(**ADAPTERS["head"], backend="nvfp4")
    embedding = model.get_input_embeddings().weight.clone()
    if way == "merge_adapter":
        model.merge_adapter()
        merged = model.unload()
    else:
        merged = merge(model, to="nvfp4")[0] if way == "merge" else model.merge_and_unload()
    assert torch.equal(merged.get_input_embeddings().weight, embedding)
    assert not torch.equal(merged.lm_head.weight, embedding) and not merged.config.tie_word_embeddings
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(merged))


def test_a_model_that_is_merged_elsewhere_stays_tied():
    model = adapted(target_modules=["q_proj"])
    merged, _ = merge(model, to="fp32")
    assert merged.lm_head.weight is merged.model.embed_tokens.weight and merged.config.tie_word_embeddings


# ---------------------------------------------------------------------------------------------- what the report says


@pytest.mark.parametrize("to", ("bf16", "fp16", "fp32", "nvfp4"))
@pytest.mark.parametrize("figure", ({"retained": 0.2}, {"error": 1.5}, {"retained": math.nan, "error": math.nan}), ids=str)
def test_the_probe_decides(monkeypatch, to, figure):
    """Weights that round well do not make a merge right."""
    compare = merge_module.compare_logits
    monkeypatch.setattr(merge_module, "compare_logits", lambda *args: replace(compare(*args), **figure))
    model = adapted(target_modules=["q_proj"], backend="nvfp4")
    with pytest.warns(UserWarning, match="is not the model with its adapter"):
        merged, report = merge(model, to=to, probe=IDS)
    assert len(report.warnings) == 1 and report.retained > 0.9


BIASES = dict(target_modules=["q_proj"], bias="all")


@pytest.mark.parametrize("settings", (ADAPTERS["saved-head"], ADAPTERS["tokens"], BIASES), ids=str)
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_nan_in_what_was_trained_beside_the_adapter_is_refused(settings, value):
    biased = settings is BIASES
    model = get_peft_model(tiny_llama(attention_bias=True), LoraConfig(**settings)) if biased else adapted(**settings)
    before = copy.deepcopy(model)
    others = [p for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    others[0].data.view(-1)[0] = value
    with pytest.raises(ValueError, match="default holds NaN or Inf in .*(lm_head|embed_tokens|bias)"):
        merge(model, to="fp32")
    assert {n for n, _ in model.named_modules()} == {n for n, _ in before.named_modules()}


def test_nan_on_the_probe_is_refused():
    model = get_peft_model(tiny_llama(), config(init_lora_weights=False))
    model.base_model.model.model.norm.weight.data[0] = math.nan
    with pytest.raises(ValueError, match="NaN on the probe"):
        merge(model, to="fp32", probe=IDS)
