"""Frozen experts in files: quantised while a dense checkpoint loads, saved and loaded packed, and read from and written as other
tools' checkpoints."""

import copy

import numpy as np
import published_checkpoints as published
import pytest
import torch
from _frozen_experts import adapted, assert_equal, experts_of, logits
from _mixtures import IDS, by_family, mixtral, qwen3_moe
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from peft_nvfp4 import PactConfig, dequantize_model, export_checkpoint, freeze_model
from peft_nvfp4.nn.experts.frozen_experts import frozen_experts


def loaded(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", **settings)


def stored(folder):
    return {key for file in folder.glob("*.safetensors") for key in safe_open(file, "pt").keys()}


@pytest.mark.parametrize("memory", ("fast", "small"))
@by_family
def test_streaming_load_save_and_reload(make, memory, tmp_path):
    """Quantised while loading from shards that split experts: the bytes of freezing in place; saved, reloaded, made dense."""
    make().to(torch.bfloat16).save_pretrained(tmp_path / "dense", max_shard_size="30KB")
    config = PactConfig(memory=memory)
    streamed = loaded(tmp_path / "dense", quantization_config=config)
    in_place = freeze_model(loaded(tmp_path / "dense"), weight_layouts=config.options.frozen.weight_layouts, progress=False)
    assert len(frozen_experts(streamed)) == 2
    assert_equal(streamed.state_dict(), in_place.state_dict())
    assert torch.equal(logits(streamed), logits(in_place))
    assert streamed.num_parameters() == loaded(tmp_path / "dense").num_parameters()
    streamed.save_pretrained(tmp_path / "packed", max_shard_size="20KB")
    names = [key for key in stored(tmp_path / "packed") if ".layers.0." in key and ".experts." in key]
    assert len(names) == 6 and not [key for key in names if "backward" in key]
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values())
    assert_equal(streamed.state_dict(), again.state_dict())
    dense = again.dequantize()
    dense.save_pretrained(tmp_path / "back")
    assert any(".experts.0." in key for key in stored(tmp_path / "back"))
    assert torch.equal(logits(loaded(tmp_path / "back")), logits(dense))


def test_skipped_experts_stay_dense_through_files(tmp_path):
    mixtral().to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = loaded(tmp_path / "dense", quantization_config=PactConfig(skip_modules=["experts"]))
    assert not frozen_experts(model)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_equal(model.state_dict(), again.state_dict())


@pytest.mark.parametrize(
    "spoil, message",
    (
        (lambda s, n: s.pop(f"{n}.down_proj_scales"), "down_proj_scales missing"),
        (lambda s, n: s.update({f"{n}.down_proj": s[f"{n}.down_proj"][:, :-1]}), "has the shape"),
        (lambda s, n: s[f"{n}.gate_up_proj_scales"].view(-1)[5:6].fill_(0x7F), "gate_up_proj_scales.*NaN or negative"),
        (lambda s, n: s[f"{n}.gate_up_proj_gscale"].fill_(0xFF), "gate_up_proj_gscale.*not finite and positive"),
        (lambda s, n: s.update({f"{n}.down_proj": s[f"{n}.down_proj"].to(torch.int32)}), "expected U8"),
    ),
)
def test_corrupt_files_are_refused(spoil, message, tmp_path):
    qwen3_moe().to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    loaded(tmp_path / "dense", quantization_config=PactConfig()).save_pretrained(tmp_path / "packed")
    (file,) = (tmp_path / "packed").glob("*.safetensors")
    state = {key: t.clone() for key, t in load_file(file).items()}
    spoil(state, "model.layers.1.mlp.experts")
    save_file({key: t.contiguous() for key, t in state.items()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


FILE_NAMES = {"MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"), None: ("mlp", "gate_proj", "up_proj", "down_proj")}


def write_published(folder, make, layout, g=2.0**-13, up_g=None, attention=True):
    """A checkpoint with single packed experts, written in NumPy; the dense model that it stands for."""
    torch.manual_seed(0)
    model, rng = make().to(torch.bfloat16), np.random.default_rng(0)
    block, *names = FILE_NAMES.get(type(model).__name__, FILE_NAMES[None])
    packed = published.quantised(model) if attention else {}
    for name, linear in model.named_modules():
        if name in packed:
            linear.weight.data = packed[name].values().to(torch.bfloat16)
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for e in range(4):
            gate, up, down = (
                published.Packed(rng, n, k, scale) for n, k, scale in ((48, 32, g), (48, 32, up_g or g), (32, 48, g))
            )
            experts.gate_up_proj.data[e] = torch.cat((gate.values(), up.values())).to(torch.bfloat16)
            experts.down_proj.data[e] = down.values().to(torch.bfloat16)
            packed |= {f"model.layers.{i}.{block}.experts.{e}.{n}": p for n, p in zip(names, (gate, up, down))}
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    state = {key: t for key, t in load_file(file).items() if key.removesuffix(".weight") not in packed}
    for name, each in packed.items():
        state |= {f"{name}.{leaf}": t.contiguous() for leaf, t in published.tensors(each, layout).items()}
    save_file(state, file, metadata={"format": "pt"})
    published.edit_config(folder, published.SETTINGS[layout])
    return model, packed, state


LAYOUT = pytest.mark.parametrize("layout", ("compressed-tensors", "modelopt"))


@LAYOUT
@by_family
@pytest.mark.parametrize("attention", (True, False), ids=("all packed", "experts alone"))
def test_published_experts_load_bit_for_bit(make, layout, attention, tmp_path):
    """Codes, scales and values; then trained, and saved in this package's own layout."""
    reference, packed, _ = write_published(tmp_path / "published", make, layout, attention=attention)
    assert attention or all(".experts." in name for name in packed)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "published", quantization_config=PactConfig(), dtype="bfloat16", output_loading_info=True
    )
    assert not any(info.values())
    for i in (0, 1):
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(experts_of(model, i).dequantize(name), getattr(experts_of(reference, i), name))
    again = dequantize_model(copy.deepcopy(model))
    assert torch.equal(logits(again), logits(loaded_dense(reference, tmp_path / "reference")))
    model.save_pretrained(tmp_path / "own")
    assert_equal(model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "own").state_dict())
    trained = adapted(make, dense=model, config=LoraConfig)
    trained(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for n, p in trained.named_parameters() if "lora_" in n)


def loaded_dense(model, folder):
    model.save_pretrained(folder)
    return loaded(folder)


@LAYOUT
@by_family
def test_experts_are_exported_as_other_tools_have_them(make, layout, tmp_path):
    """Published, loaded, exported: the tensors of the published file, byte for byte, and the router listed as dense."""
    _, packed, state = write_published(tmp_path / "published", make, layout)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published", quantization_config=PactConfig(), dtype="bfloat16")
    report = export_checkpoint(model, tmp_path / "export", layout)
    assert report.packed == len(packed) and not report.inexact
    assert {"model.layers.0.mlp.gate", "lm_head"} <= set(report.dense)
    (file,) = (tmp_path / "export").glob("*.safetensors")
    written = load_file(file)
    own = {key: t for key, t in state.items() if not key.endswith(("input_scale", "input_global_scale"))}
    assert written.keys() == own.keys()
    for key in own:
        assert written[key].dtype == own[key].dtype
        assert torch.equal(written[key].reshape(-1).view(torch.uint8), own[key].reshape(-1).view(torch.uint8)), key
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", quantization_config=PactConfig(), dtype="bfloat16")
    assert_equal(model.state_dict(), again.state_dict())


def test_published_experts_that_cannot_be_represented(tmp_path):
    write_published(tmp_path / "scales", qwen3_moe, "compressed-tensors", up_g=2.0**-14)
    with pytest.raises(ValueError, match=r"gate_proj and up_proj of model\.layers\.0\.mlp\.experts\.0 have different global"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "scales", quantization_config=PactConfig())
    _, _, state = write_published(tmp_path / "missing", qwen3_moe, "modelopt")
    (file,) = (tmp_path / "missing").glob("*.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj"
    save_file({key: t for key, t in state.items() if not key.startswith(name)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name):
        AutoModelForCausalLM.from_pretrained(tmp_path / "missing", quantization_config=PactConfig())


def test_a_scale_that_is_no_power_of_two(tmp_path):
    """Kept as it is; the backward layout is made from the exact values."""
    reference, _, _ = write_published(tmp_path, qwen3_moe, "modelopt", g=0.1 / 2688)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=PactConfig(), dtype="bfloat16")
    experts = experts_of(model)
    assert torch.equal(experts.dequantize("down_proj"), experts_of(reference).down_proj)
    assert float(experts.layers("down_proj")[0].forward_layout.gscale) == float(np.float32(0.1 / 2688))
