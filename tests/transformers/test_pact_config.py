"""PactConfig in from_pretrained: the same bits as freezing a loaded model, classes of models, saving, reloading, and back to
dense. How it streams, and what it does with broken files: test_streaming_load.py; training: test_pact_training.py."""

import copy
import json

import pytest
import torch
import transformers as hf
from _dataflow_models import SIZES
from _pact_models import IDS, assert_same_state, dense, dense_files, load, logits, tiny_llava, with_adapter
from conftest import tiny_llama
from safetensors.torch import load_file
from transformers import conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from peft_nvfp4 import PactConfig, dequantize_model, freeze_model, ops
from peft_nvfp4.numerics.formats import WEIGHT
from peft_nvfp4.quantization.freeze import frozen_layers


@pytest.fixture
def folder(tmp_path):
    return dense_files(tmp_path)


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (dict(accuracy="best"), ValueError, "paper, balanced, high"),
        (dict(quant_method="nvfp4"), ValueError, "'peft_nvfp4' here"),
        (dict(format_version=2), ValueError, "newer than this package.*upgrade"),
        (dict(format_version="1"), ValueError, "not a version"),
        (dict(format_version=True), ValueError, "not a version"),
        (dict(load_in_4bit=True), TypeError, "load_in_4bit"),
    ],
)
def test_wrong_settings_raise(settings, error, message):
    with pytest.raises(error, match=message):
        PactConfig(**settings)


def test_settings_survive_json():
    config = PactConfig(accuracy="high", skip_modules=["mlp"], memory="small")
    assert PactConfig.from_dict(json.loads(config.to_json_string())) == config
    with pytest.raises(ValueError, match="unknown settings.*: flavour; known: .*accuracy, memory, .*Leave the others out"):
        PactConfig.from_dict({**config.to_dict(), "flavour": 1})
    with pytest.raises(ValueError, match="format_version 9.*newer"):
        PactConfig.from_dict({**config.to_dict(), "format_version": 9, "flavour": 1})


OTHERS = dict(memory="small", accuracy="paper")


@pytest.mark.parametrize(
    "settings, tied, dtype",
    [({}, False, torch.bfloat16), (OTHERS, True, torch.bfloat16), ({}, True, torch.float32), (OTHERS, False, torch.float16)],
)
def test_bits_are_those_of_a_model_frozen_in_memory(tmp_path, settings, tied, dtype):
    tiny_llama(torch.bfloat16, tie_word_embeddings=tied).save_pretrained(tmp_path, max_shard_size="60kB")
    streamed, options = load(tmp_path, dtype=dtype, **settings), PactConfig(**settings).options
    layouts = options.frozen.weight_layouts
    frozen = freeze_model(dense(tmp_path, dtype=dtype), "nvfp4", accuracy=options.accuracy, weight_layouts=layouts)
    assert_same_state(streamed, frozen)
    assert streamed.dtype == dtype and {layer.compute_dtype for _, layer in frozen_layers(streamed)} == {dtype}
    assert len(frozen_layers(streamed)) == 14 and type(streamed.lm_head) is torch.nn.Linear
    assert (streamed.lm_head.weight is streamed.model.embed_tokens.weight) == tied
    for (name, a), (_, b) in zip(frozen_layers(streamed), frozen_layers(frozen), strict=True):
        assert (a.options, a.shares_input, a.compute_dtype) == (b.options, b.shares_input, b.compute_dtype), name
    assert torch.equal(logits(streamed), logits(frozen))
    attention = streamed.model.layers[0].self_attn
    assert torch.equal(attention.q_proj.weight_gscale, attention.v_proj.weight_gscale)


def test_skipped_modules_stay_dense(folder):
    model = load(folder, skip_modules=["mlp", "0.self_attn.q_proj"])
    assert sorted(name for name, _ in frozen_layers(model)) == [
        f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "koqv" if (i, p) != (0, "q")
    ]
    assert_same_state(model, freeze_model(dense(folder), "nvfp4", skip_modules=["mlp", "0.self_attn.q_proj"]))
    with pytest.warns(UserWarning, match="matches no module: typo"):
        load(folder, skip_modules=["typo"])


def test_biases(tmp_path):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.Qwen2Config(**SIZES, dtype="bfloat16"))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    model.save_pretrained(tmp_path, max_shard_size="30kB")
    streamed = load(tmp_path)
    assert_same_state(streamed, freeze_model(dense(tmp_path), "nvfp4"))
    assert streamed.model.layers[0].self_attn.q_proj.bias.abs().max() > 0.5
    streamed.save_pretrained(tmp_path / "packed")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_state(streamed, again)
    for model in (streamed, again):
        assert not any(p.requires_grad for _, layer in frozen_layers(model) for p in layer.parameters())


def test_fused_projection_that_is_split_on_loading(tmp_path, monkeypatch):
    """q/k/v in one tensor of the file: split, packed under one global scale, and saved as they are in the model."""
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # fills the cache
    names = [f"self_attn.{p}_proj.weight" for p in "qkv"]
    split = WeightConverter("self_attn.qkv.weight", names, operations=[Chunk(dim=0)])
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", [split])
    model = tiny_llama(torch.bfloat16, num_key_value_heads=4)
    model.save_pretrained(tmp_path / "dense")
    keys = load_file(tmp_path / "dense" / "model.safetensors").keys()
    assert "model.layers.0.self_attn.qkv.weight" in keys and f"model.layers.0.{names[0]}" not in keys
    streamed = load(tmp_path / "dense")
    assert_same_state(streamed, freeze_model(model, "nvfp4"))
    streamed.save_pretrained(tmp_path / "packed")
    again, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values())
    assert_same_state(streamed, again)


def test_missing_weight_is_initialised_as_by_transformers(folder):
    state = dense(folder).state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model, info = hf.LlamaForCausalLM.from_pretrained(
        None,
        config=hf.LlamaConfig.from_pretrained(folder),
        state_dict=state,
        quantization_config=PactConfig(),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    assert info["missing_keys"] == {"model.layers.1.mlp.up_proj.weight"}
    assert len(frozen_layers(model)) == 14
    up = model.model.layers[1].mlp.up_proj.dequantize()
    assert 0.5 < up.std() / 0.02 < 2, "initializer_range of Llama is 0.02"
    assert logits(model).isfinite().all()


def test_device_maps(folder):
    reference = load(folder)
    for device_map in ("auto", "cpu", {"": "cpu"}, torch.device("cpu")):
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=PactConfig(), dtype=torch.bfloat16, device_map=device_map
        )
        assert_same_state(model, reference)
    for device_map in ({"model": 0, "lm_head": "cpu"}, {"model": "cpu", "lm_head": "disk"}):
        with pytest.raises(ValueError, match="device_map puts parts of the model on (cpu|cpu and disk)"):
            hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=PactConfig(), device_map=device_map)


def test_sizes_for_device_maps(folder):
    """What device_map="auto" plans with is what the weights take."""
    for settings in ({}, dict(memory="small")):
        model = load(folder, **settings)
        quantizer, planned = model.hf_quantizer, dense(folder)
        estimate = sum(
            p.numel() * quantizer.param_element_size(planned, name, p)
            for name, p in planned.named_parameters()
            if name.removesuffix(".weight") in quantizer.state.planned
        )
        actual = sum(layer.frozen_bytes() for _, layer in frozen_layers(model))
        assert 0.95 * actual <= estimate <= actual, "padding of 176 columns and global scales are not in the estimate"


def test_sequence_classification(folder, tmp_path):
    model = load(folder, hf.AutoModelForSequenceClassification)
    assert len(frozen_layers(model)) == 14 and type(model.score) is torch.nn.Linear
    assert model.score.weight.isfinite().all()
    load(folder).save_pretrained(tmp_path / "packed")
    again, info = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"} and info["unexpected_keys"] == {"lm_head.weight"}
    again.score = model.score
    again.config.pad_token_id = model.config.pad_token_id = 0
    assert torch.equal(logits(model), logits(again))


def test_vision_language(tmp_path):
    tiny_llava(2).save_pretrained(tmp_path / "dense", max_shard_size="60kB")
    streamed = load(tmp_path / "dense", hf.AutoModelForImageTextToText)
    frozen = freeze_model(dense(tmp_path / "dense", hf.AutoModelForImageTextToText), "nvfp4")
    assert_same_state(streamed, frozen)
    assert any("vision_tower" in name for name, _ in frozen_layers(streamed))
    streamed.save_pretrained(tmp_path / "packed", max_shard_size="40kB")
    again, info = hf.AutoModelForImageTextToText.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values())
    assert_same_state(streamed, again)
    assert torch.equal(logits(streamed), logits(again))
    model = with_adapter(again)
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "language_model" in n and "lora_" in n)


def test_model_without_linears_raises(tmp_path):
    hf.AutoModelForCausalLM.from_config(hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no linear layer of GPT2LMHeadModel can be frozen"):
        load(tmp_path)


@pytest.mark.parametrize("settings", [{}, dict(memory="small"), dict(skip_modules=["down_proj"])])
def test_reloads_bit_equal_without_quantising_again(folder, tmp_path, monkeypatch, settings):
    model = load(folder, **settings)
    model.save_pretrained(tmp_path / "packed", max_shard_size="40kB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "peft_nvfp4" and stored["format_version"] == 1

    def no_search(w, fmt, *args, **kwargs):
        assert fmt != WEIGHT, "a forward layout was quantised"
        return quantize(w, fmt, *args, **kwargs)

    quantize = ops.quantize_weight
    monkeypatch.setattr(ops, "quantize_weight", no_search)
    again, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values())
    assert_same_state(model, again)
    assert again.dtype == torch.bfloat16 and again.hf_quantizer.quantization_config == model.hf_quantizer.quantization_config
    assert torch.equal(logits(model), logits(again))
    monkeypatch.undo()
    again.save_pretrained(tmp_path / "twice", max_shard_size="40kB")
    for file in (tmp_path / "packed").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()


def test_files_hold_one_layout(folder, tmp_path):
    for memory in ("fast", "small"):
        load(folder, memory=memory).save_pretrained(tmp_path / memory)
    read = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("fast", "small")]
    assert read[0] == read[1]


def test_saved_model_takes_other_words(folder, tmp_path):
    load(folder).save_pretrained(tmp_path / "packed")
    other = dict(accuracy="high", memory="small")
    with pytest.warns(UserWarning, match="loading attributes"):
        model = load(tmp_path / "packed", **other)
    assert_same_state(model, load(folder, **other))
    assert {(o.terms, o.weight_layouts) for o in (layer.options for _, layer in frozen_layers(model))} == {(2, "transient")}


def test_dequantize(folder, tmp_path):
    model = load(folder)
    by_hand = dequantize_model(copy.deepcopy(model))
    model.save_pretrained(tmp_path / "packed")  # leaves a word in place of config.dtype
    back = model.dequantize()
    assert_same_state(back, by_hand)
    assert not frozen_layers(back) and back.dtype == torch.bfloat16 and all(p.requires_grad for p in back.parameters())
    assert not back.is_loaded_in_4bit and not hasattr(back, "hf_quantizer") and not hasattr(back.config, "quantization_config")
    back.save_pretrained(tmp_path / "back")
    assert_same_state(back, dense(tmp_path / "back"))
    back(input_ids=IDS, labels=IDS).loss.backward()
    assert back.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0
