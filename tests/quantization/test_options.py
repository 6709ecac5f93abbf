"""``Options``: each word of ``memory`` with each backend, what the layers of a model have of it, and what is refused."""

import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, PactConfig
from peft_nvfp4.cli._run.options import TrainOptions
from peft_nvfp4.fusion.compressed import CompressedGatedMLP
from peft_nvfp4.fusion.mlp import FusedGatedMLP
from peft_nvfp4.memory import Settings
from peft_nvfp4.quantization import options
from peft_nvfp4.quantization.freeze import frozen_layers
from peft_nvfp4.quantization.options import NAMES, Options, help_of
from peft_nvfp4.training.offload.enable import offloaded

IDS = torch.arange(24).view(2, 12) * 5 % 128
PLAIN = (False, False)  # no fused MLP of either kind
TABLE = {  # backend, memory -> weight_layouts, activations, (fused MLPs, with codes), recompute_mlp, offload
    ("nvfp4", "fast"): ("cached", "bf16", (True, False), False, False),
    ("nvfp4", "small"): ("transient", "bf16", (True, False), True, False),
    ("nvfp4", "smallest"): ("transient", "bf16", (True, False), True, True),
    ("nf4", "fast"): ("cached", "bf16", PLAIN, False, False),
    ("nf4", "small"): ("cached", "nvfp4", (True, True), False, False),
    ("nf4", "smallest"): ("cached", "nvfp4", (True, True), False, True),
    ("bf16", "fast"): ("cached", "bf16", PLAIN, False, False),
    ("bf16", "small"): ("cached", "nvfp4", (True, True), False, False),
    ("bf16", "smallest"): ("cached", "nvfp4", (True, True), False, True),
}


@pytest.mark.parametrize("backend, memory", TABLE)
def test_what_a_model_has(backend, memory):
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    layouts, activations, (fused, codes), recompute, offload = TABLE[backend, memory]
    chosen = Options(backend, memory=memory)
    assert (chosen.frozen.weight_layouts, chosen.frozen.activations) == (layouts, activations)
    assert (chosen.recompute_mlp, chosen.offload) == (recompute, offload)

    def adapted(word):
        torch.manual_seed(0)
        config = NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, backend=backend, memory=word)
        return get_peft_model(tiny_llama(), config)

    model = adapted(memory)
    for name, layer in frozen_layers(model):
        assert layer.options == chosen.frozen_at(name.removesuffix(".base_layer")) and layer.options.gradients == "nvfp4"
    mlps = [m for m in model.modules() if isinstance(m, FusedGatedMLP)]
    assert len(mlps) == 2 * fused and all(isinstance(m, CompressedGatedMLP) == codes and m.recompute == recompute for m in mlps)
    assert offloaded(model) == offload
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, adapted("fast")(IDS).logits)


def test_auto_begins_with_what_the_machine_is_for(monkeypatch):
    """Without a GPU with everything; with one, with one layout, but for what could not be made again."""
    for gpu, settings, level in (
        (False, {}, "fast"),
        (True, {}, "small"),
        (True, dict(backend="bf16"), "fast"),
        (True, dict(calibration="folder"), "fast"),
        (True, dict(memory="fast"), "fast"),
        (False, dict(memory="smallest"), "smallest"),
    ):
        monkeypatch.setattr(options, "gpu_is_here", lambda gpu=gpu: gpu)
        found = Options(**settings)
        assert found.level == level and found.frozen == replace(found, memory=level).frozen
        assert (found.recompute_mlp, found.offload) == (level != "fast", level == "smallest")
        assert found.as_json()["memory"] == settings.get("memory", "auto")


@pytest.mark.parametrize("accuracy, terms", [("paper", (1, 1)), ("balanced", (2, 1)), ("high", (2, 2))])
def test_terms_depend_on_what_feeds_a_linear(accuracy, terms):
    options = Options(accuracy=accuracy)
    assert (options.frozen_at("layers.0.self_attn.q_proj").terms, options.frozen_at("layers.0.mlp.down_proj").terms) == terms


@pytest.mark.parametrize("holder", [NVFP4LoraConfig, PactConfig, TrainOptions, Settings])
def test_every_holder_has_the_same_defaults_and_help(holder):
    originals, shared = {f.name: f for f in fields(Options)}, [f for f in fields(holder) if f.name in NAMES]
    assert len(shared) >= 3
    for f in shared:
        assert (f.default, f.metadata["help"]) == (originals[f.name].default, help_of(f.name))


def test_options_do_not_change():
    options = Options(skip_modules=["lm_head"])
    assert options == Options(skip_modules=("lm_head",)) and hash(options) and list(options.as_json()) == list(NAMES)
    assert options.as_json()["skip_modules"] == ["lm_head"] == NVFP4LoraConfig(skip_modules=("lm_head",)).skip_modules
    assert NVFP4LoraConfig(skip_modules=None).skip_modules == PactConfig().skip_modules == []
    with pytest.raises(FrozenInstanceError):
        options.memory = "small"


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (dict(backend="int4"), ValueError, "unknown backend 'int4'; choose one of bf16, nf4, nvfp4"),
        (dict(accuracy="best"), ValueError, "accuracy must be one of paper, balanced, high, got 'best'"),
        (dict(memory="none"), ValueError, "memory must be one of auto, fast, small, smallest, got 'none'"),
        (dict(merge_aware="yes"), TypeError, "merge_aware is True or False"),
        (dict(skip_modules="lm_head"), TypeError, "list of module names"),
        (dict(skip_modules={"lm_head": 1}), TypeError, "list of module names"),
        (dict(skip_modules=[1]), TypeError, "list of module names"),
        (dict(skip_modules=["a"] * 10_001), ValueError, "10001 names"),
        (dict(calibration="folder", backend="nf4"), ValueError, "a calibration is for backend='nvfp4'"),
        (dict(merge_aware=True, backend="bf16"), ValueError, "merge_aware=True .* does not go with 'bf16'"),
    ],
)
def test_what_is_refused(wrong, error, message):
    for holder in (Options, NVFP4LoraConfig):
        with pytest.raises(error, match=message):
            holder(**wrong)


@pytest.mark.parametrize("value", [["x"], {}, 1.5, None], ids=str)
@pytest.mark.parametrize("name", ["backend", "accuracy", "memory"])
def test_words_that_are_none(name, value):
    for holder in (NVFP4LoraConfig, PactConfig, Settings):
        if name in {f.name for f in fields(holder)}:
            with pytest.raises((ValueError, TypeError), match=f"{name}.*{re.escape(repr(value))}"):
                holder(**{name: value})
