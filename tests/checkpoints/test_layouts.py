"""Published NVFP4 layouts: what other code wrote is loaded bit for bit and trained on; what is exported loads again, here and,
where it is installed, through compressed-tensors. Broken and hostile files: test_layouts_hostile.py."""

import copy
import json
import warnings

import numpy as np
import pytest
import torch
from _pact_models import IDS, LORA, assert_same_state, load, logits, tiny_llava
from _steps import steps
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from published_checkpoints import OLD_MODELOPT, SETTINGS, as_loaded, dense_model, edit_config, quantised, tensors, write
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from peft_nvfp4 import NVFP4LoraConfig, PactConfig, attach, freeze_model, ops, prepare_model_for_nvfp4_training
from peft_nvfp4.checkpoints import export_checkpoint
from peft_nvfp4.checkpoints.layouts import COMPRESSED_TENSORS, MODELOPT
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.numerics.formats import WEIGHT_BACKWARD
from peft_nvfp4.quantization.freeze import frozen_layers

LAYOUTS = ["compressed-tensors", "modelopt"]


def assert_holds(model, weights, reciprocal_of=None):
    """Codes, scales and global scale of every layer are those that were written."""
    layers = dict(frozen_layers(model))
    assert layers.keys() == weights.keys()
    for name, layer in layers.items():
        w, k = weights[name], layer.in_features
        assert torch.equal(layer.weight[:, : k // 2], w.bytes()), name
        assert torch.equal(layer.weight_scales[:, : k // 16], torch.from_numpy(w.scales)), name
        assert not layer.weight[:, k // 2 :].any() and not layer.weight_scales[:, k // 16 :].any(), name
        assert layer.weight_gscale.view(torch.float32).item() == (w.g if reciprocal_of is None else reciprocal_of(w)), name
        assert {p.dtype for p in layer.parameters()} == {torch.uint8}


# ---------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_and_logits_are_those_that_were_written(tmp_path, layout):
    model = tiny_llama(torch.bfloat16)
    weights = write(tmp_path, layout, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded, info = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=PactConfig(), dtype=torch.bfloat16, output_loading_info=True
        )
    assert not any(info.values())
    assert_holds(loaded, weights)
    by_hand = as_loaded(model, tmp_path / "dense")
    for name, w in weights.items():  # what freeze_model makes, with other bytes
        layer = NVFP4FrozenLinear.quantize(by_hand.get_submodule(name), loaded.get_submodule(name).options)
        values = w.values()
        codes, scales = _pad(w.bytes(), layer.weight), _pad(torch.from_numpy(w.scales), layer.weight_scales)
        layer._store(layer.forward_layout._replace(codes=codes, scales=scales, gscale=torch.tensor([w.g])))
        assert torch.equal(layer.dequantize(torch.float32), values), name
        layer.shares_input = loaded.get_submodule(name).shares_input
        by_hand.set_submodule(name, layer)
    assert_same_state(loaded, by_hand)
    assert torch.equal(logits(loaded), logits(by_hand))
    assert torch.equal(logits(loaded.dequantize()), logits(dense_model(as_loaded(model, tmp_path / "dense"), weights)))


def _pad(t, like):
    return torch.nn.functional.pad(t, (0, like.shape[1] - t.shape[1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_scale_that_is_no_power_of_two(tmp_path, layout):
    """It is kept; compressed-tensors' is the FP32 reciprocal of what is stored. The backward layout comes from the unrounded
    weight, cached or not, here or after saving."""
    weights = quantised(tiny_llama(torch.bfloat16), power_of_two=False)
    write(tmp_path / "a", layout, weights=weights)
    one = np.float32(1)
    expected = (lambda w: w.g) if layout == "modelopt" else lambda w: one / (one / w.g)
    model = load(tmp_path / "a")
    assert_holds(model, weights, expected)
    for name, layer in frozen_layers(model):
        values = weights[name].values(expected(weights[name]))
        assert torch.equal(layer.dequantize(torch.float32), values)
        w_b = ops.quantize(values.T, WEIGHT_BACKWARD)
        assert torch.equal(layer.backward_weight, w_b.codes) and torch.equal(layer.backward_scales, w_b.scales)
    grads = []
    for each in (model, load(tmp_path / "a", memory="small")):
        torch.manual_seed(1)
        peft = get_peft_model(each, LoraConfig(**LORA, init_lora_weights=False)).train()
        attach(peft)  # without recomputing, which is no matter of layouts
        peft(input_ids=IDS, labels=IDS).loss.backward()
        grads.append([p.grad for p in peft.parameters() if p.grad is not None])
    assert len(grads[0]) == 28 and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    load(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "b"), load(tmp_path / "a"))


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_requantised_under_a_power_of_two(tmp_path, factor):
    write(tmp_path, "modelopt", weights=quantised(tiny_llama(torch.bfloat16), power_of_two=False))
    layer = load(tmp_path).model.layers[0].mlp.up_proj
    before, weight = layer.weight_gscale.view(torch.float32).clone(), layer.dequantize(torch.float32) * factor
    assert torch.frexp(before).mantissa != 0.5
    layer.requantize_(weight)
    after = layer.weight_gscale.view(torch.float32)
    assert torch.frexp(after).mantissa == 0.5 and before <= after
    assert (layer.dequantize(torch.float32) - weight).norm() < 0.1 * weight.norm(), "half a step of 4-bit codes is 1/12 at most"


@pytest.mark.parametrize("place", ["beside", "config", "both"])
def test_older_modelopt_settings(tmp_path, place):
    weights = write(tmp_path, "modelopt")
    edit_config(tmp_path, None if place == "beside" else SETTINGS["modelopt"])
    if place != "config":
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(OLD_MODELOPT))
    assert_holds(load(tmp_path), weights)


def test_scalars_of_either_shape_and_no_input_scales(tmp_path):
    def change(state):
        for key in [key for key in state if key.endswith("weight_scale_2")]:
            state[key] = state[key].reshape(1)

    settings = {**SETTINGS["modelopt"], "quant_algo": "W4A16_NVFP4"}
    weights = write(tmp_path, "modelopt", input_scale=None, change=change, settings=settings)
    assert_holds(load(tmp_path), weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_dense_in_the_files_stays_dense_and_survives_saving(tmp_path, layout):
    model = tiny_llama(torch.bfloat16)
    weights = quantised(model, keep_dense=("lm_head", "o_proj", "0.mlp.up_proj"))
    settings = copy.deepcopy(SETTINGS[layout])
    write(tmp_path / "a", layout, model, weights, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*matrix weights stay dense.*")
        loaded = load(tmp_path / "a")
    assert_holds(loaded, weights)
    for name in ("model.layers.1.self_attn.o_proj", "model.layers.0.mlp.up_proj"):
        assert torch.equal(loaded.get_submodule(name).weight, model.get_submodule(name).weight)
    assert not loaded.model.layers[0].mlp.gate_proj.shares_input and loaded.model.layers[1].mlp.gate_proj.shares_input
    loaded.save_pretrained(tmp_path / "b")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "b"), loaded)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_head_and_skipped_modules_become_dense(tmp_path, layout):
    """Some tools pack the head, though their settings list it as dense."""
    model = tiny_llama(torch.bfloat16)
    weights = write(tmp_path, layout, model, quantised(model, keep_dense=()))
    loaded = load(tmp_path, skip_modules=["down_proj"])
    dense = {name for name in weights if "down_proj" in name or name == "lm_head"}
    assert len(dense) == 3
    assert_holds(loaded, {name: w for name, w in weights.items() if name not in dense})
    for name in dense:
        assert type(loaded.get_submodule(name)) is torch.nn.Linear
        assert torch.equal(loaded.get_submodule(name).weight, weights[name].values().bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_other_classes_and_dtypes(tmp_path, layout, tied):
    model = tiny_llama(torch.float32, tie_word_embeddings=tied)
    weights = write(tmp_path, layout, model)
    causal = load(tmp_path, dtype=torch.float32)
    assert_holds(causal, weights)
    assert (causal.lm_head.weight is causal.model.embed_tokens.weight) == tied
    assert {layer.compute_dtype for _, layer in frozen_layers(causal)} == {torch.float32}
    bare = load(tmp_path, AutoModel)  # names in the files have a prefix that those in the model have not
    assert_holds(bare, {name.removeprefix("model."): w for name, w in weights.items()})
    classifier = load(tmp_path, AutoModelForSequenceClassification)
    assert_holds(classifier, weights)
    assert classifier.score.weight.isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vision_language(tmp_path, layout):
    """Other names in the model than in the files, settings in the text config, a dense vision tower."""
    model = tiny_llava(1)
    weights = quantised(model, keep_dense=("lm_head", "vision", "projector"))
    on_disk = {name.replace("model.language_model.", "language_model.model."): w for name, w in weights.items()}
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(f"{name}.weight" in stored for name in on_disk), "transformers writes these names"

    def change(state):
        state.clear()
        state |= {key: t for key, t in stored.items() if key.removesuffix(".weight") not in on_disk}
        for name, w in on_disk.items():
            state |= {f"{name}.{leaf}": t for leaf, t in tensors(w, layout).items()}

    settings = SETTINGS[layout]
    settings = {**settings, "ignore": [*settings["ignore"], "multi_modal_projector"]}
    write(tmp_path, layout, model, weights, settings, change=change)
    loaded = load(tmp_path, AutoModelForImageTextToText)
    assert_holds(loaded, weights)
    model = as_loaded(model, tmp_path / "dense")
    assert torch.equal(logits(loaded.dequantize()), logits(dense_model(model, weights)))


# ---------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("config", [LoraConfig, NVFP4LoraConfig])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_train(tmp_path, layout, config):
    write(tmp_path, layout, weights=quantised(tiny_llama(), power_of_two=False))
    model = prepare_model_for_nvfp4_training(load(tmp_path))
    assert model.is_loaded_in_4bit and model.hf_quantizer.is_trainable
    before = {name: p.clone() for name, p in model.state_dict().items()}
    torch.manual_seed(1)
    model = get_peft_model(model, config(**LORA)).train()
    assert "RMSNorm+quantise" in str(model.base_model.nvfp4_report)
    losses = steps(model, IDS, 5, lr=2e-2)
    assert losses[-1] < losses[0] - 0.3, losses
    base = model.unload()
    assert all(torch.equal(p, before[name]) for name, p in base.state_dict().items())


def test_without_a_pact_config_nothing_is_hooked(tmp_path):
    write(tmp_path, "modelopt")
    with pytest.raises(Exception):  # noqa: B017 (transformers', which does not know the method)
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path / "dense")
    assert not frozen_layers(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"))


# ---------------------------------------------------------------------------------------------- export
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_loads_bit_equal(tmp_path, layout):
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense")
    report = export_checkpoint(model, tmp_path / "out", layout, max_shard_size="40kB")
    assert (report.packed, report.dense, report.scheme, report.inexact) == (14, ("lm_head",), "W4A16", ())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    stored = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        stored |= load_file(file)
    names = LAYOUT_OF[layout]
    q = stored["model.layers.0.self_attn.q_proj." + names.gscale]
    assert q == stored["model.layers.0.self_attn.v_proj." + names.gscale], "engines fuse q/k/v"
    down = model.model.layers[1].mlp.down_proj
    kept = "model.layers.1.mlp.down_proj."
    assert torch.equal(stored[kept + names.codes], down.weight[:, :88]) and stored[kept + names.codes].dtype == torch.uint8
    assert torch.equal(stored[kept + names.scales].view(torch.uint8), down.weight_scales[:, :11])
    g = down.weight_gscale.view(torch.float32)
    assert torch.equal(stored[kept + names.gscale].reshape(1), 1 / g if layout == "compressed-tensors" else g)
    assert stored[kept + names.gscale].shape == ((1,) if layout == "compressed-tensors" else ())
    assert len(stored) == 3 * 14 + 7 and not any(".weight_gscale" in key or "backward" in key for key in stored)
    again = load(tmp_path / "out")
    assert_same_state(again, model)
    assert torch.equal(logits(again), logits(model))
    assert model.config.quantization_config.quant_method == "peft_nvfp4", "the model is as it was"
    model.save_pretrained(tmp_path / "native")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "native"), model)


LAYOUT_OF = {"compressed-tensors": COMPRESSED_TENSORS, "modelopt": MODELOPT}


def test_export_of_settings(tmp_path):
    model = freeze_model(tiny_llama(torch.bfloat16), "nvfp4", skip_modules=["o_proj"])
    export_checkpoint(model, tmp_path / "ct")
    export_checkpoint(model, tmp_path / "mo", "modelopt")
    ct, mo = (json.loads((tmp_path / f / "config.json").read_text())["quantization_config"] for f in ("ct", "mo"))
    dense = [f"model.layers.{i}.self_attn.o_proj" for i in range(2)] + ["lm_head"]
    assert ct["ignore"] == mo["ignore"] == dense
    assert ct["quant_method"] == "compressed-tensors" and ct["format"] == "nvfp4-pack-quantized"
    assert ct["config_groups"]["group_0"]["weights"]["strategy"] == "tensor_group"
    assert ct["config_groups"]["group_0"]["input_activations"] is None
    assert mo["quant_method"] == "modelopt" and mo["quant_algo"] == "W4A16_NVFP4"
    old = json.loads((tmp_path / "mo" / "hf_quant_config.json").read_text())
    assert old["quantization"]["exclude_modules"] == dense and old["quantization"]["group_size"] == 16
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_what_was_loaded_is_exported_with_its_scales(tmp_path, source, target):
    """Also those of the inputs. A reader multiplies with the same numbers; a reciprocal may be missing for ModelOpt's only."""
    weights = write(tmp_path / "a", source, weights=quantised(tiny_llama(), power_of_two=False))
    model = load(tmp_path / "a")
    report = export_checkpoint(model, tmp_path / "b", target)
    assert report.scheme == "W4A4"
    if (source, target) != ("modelopt", "compressed-tensors"):
        assert report.inexact == ()
    again = load(tmp_path / "b")
    for (name, a), (_, b) in zip(frozen_layers(model), frozen_layers(again), strict=True):
        assert torch.equal(a.weight, b.weight) and torch.equal(a.weight_scales, b.weight_scales)
        ulps = (a.weight_gscale.view(torch.int32) - b.weight_gscale.view(torch.int32)).item()
        assert ulps == 0 if name not in report.inexact else abs(ulps) == 1
        assert a.published_input_scale == pytest.approx(0.01, rel=1e-6) and b.published_input_scale == pytest.approx(
            0.01, rel=1e-6
        )
    assert len(weights) == report.packed


def test_layers_whose_width_no_layout_takes_are_written_dense(tmp_path):
    model = freeze_model(tiny_llama(torch.bfloat16, intermediate_size=168), "nvfp4")  # down_proj: 168 = 10.5 blocks
    with pytest.warns(UserWarning, match="down_proj .and 1 more. is written dense.*168"):
        report = export_checkpoint(model, tmp_path)
    assert report.packed == 12 and "model.layers.0.mlp.down_proj" in report.dense
    loaded = load(tmp_path)
    assert torch.equal(loaded.model.layers[0].mlp.down_proj.weight, model.model.layers[0].mlp.down_proj.dequantize())
    assert_same_state(loaded.model.layers[0].self_attn, model.model.layers[0].self_attn)


def test_what_cannot_be_exported_is_refused_and_nothing_written(tmp_path):
    def refused(model, match, layout="compressed-tensors"):
        with pytest.raises(ValueError, match=match):
            export_checkpoint(model, tmp_path / "out", layout)
        assert not (tmp_path / "out").exists()

    frozen = freeze_model(tiny_llama(torch.bfloat16), "nvfp4")
    refused(frozen, "unknown layout 'gguf'; choose one of compressed-tensors, modelopt", "gguf")
    refused(tiny_llama(), "no linear of the model is frozen")
    refused(freeze_model(tiny_llama(torch.bfloat16), "bf16"), "frozen in 'bf16', which is not NVFP4")
    refused(freeze_model(tiny_llama(torch.bfloat16), "nf4"), "frozen in 'nf4', which is not NVFP4")
    refused(freeze_model(torch.nn.Sequential(torch.nn.Linear(32, 32)), "nvfp4"), "is no transformers model")
    adapted = get_peft_model(frozen, LoraConfig(**LORA))
    refused(adapted, "carries an adapter")
    export_checkpoint(adapted.unload(), tmp_path / "out")
    assert_same_state(load(tmp_path / "out"), freeze_model(tiny_llama(torch.bfloat16), "nvfp4"))


def test_centred_layers_export_their_weights(tmp_path):
    """An offset is how an input is quantised; a reader with unquantised inputs has no use for it."""
    model = freeze_model(tiny_llama(torch.bfloat16), "nvfp4")
    expected = copy.deepcopy(model)
    model.model.layers[0].mlp.up_proj.set_offset(torch.ones(64))
    export_checkpoint(model, tmp_path)
    assert_same_state(load(tmp_path), expected)


# ---------------------------------------------------------------------------------------------- with compressed-tensors
def through_compressed_tensors(folder):
    pytest.importorskip("compressed_tensors", reason="not run: compressed-tensors is not installed")
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    return model


def test_export_loads_in_plain_transformers(tmp_path):
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense")
    export_checkpoint(model, tmp_path / "out", max_shard_size="40kB")
    reader = through_compressed_tensors(tmp_path / "out")
    assert torch.equal(logits(reader), logits(model.dequantize()))


def test_files_of_compressed_tensors_itself(tmp_path):
    """Packed by that library from a dense model: the same values, up to the rounding of its global scale's reciprocal."""
    pytest.importorskip("compressed_tensors", reason="not run: compressed-tensors is not installed")
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    model = tiny_llama(torch.bfloat16)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    theirs, state_of = {}, {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            w = module.weight.detach().float()
            g = 448 * 6 / w.abs().amax().reshape(1)
            scale = (w.view(w.shape[0], -1, 16).abs().amax(-1) / 6 * g).to(torch.float8_e4m3fn)
            state = {"weight": w.bfloat16(), "weight_scale": scale.float(), "weight_global_scale": g}
            state_of[name] = NVFP4PackedCompressor.compress(state, scheme)
            theirs[name] = NVFP4PackedCompressor.decompress(state_of[name], scheme)["weight"]

    def change(state):
        for name, own in state_of.items():
            for leaf in tensors(WEIGHTS[name], "compressed-tensors"):
                del state[f"{name}.{leaf}"]
            state |= {f"{name}.{leaf}": own[leaf] for leaf in ("weight_packed", "weight_scale", "weight_global_scale")}

    WEIGHTS = quantised(model)
    write(tmp_path, "compressed-tensors", model, WEIGHTS, change=change)
    ours = load(tmp_path)
    for name, layer in frozen_layers(ours):
        own = state_of[name]
        assert torch.equal(layer.weight[:, : layer.in_features // 2], own["weight_packed"])
        assert torch.equal(layer.weight_scales[:, : layer.in_features // 16], own["weight_scale"].view(torch.uint8))
        a, b = layer.dequantize(torch.float32).bfloat16(), theirs[name].bfloat16()
        # s / G and s * (1 / G) differ in the last two bits of FP32, which moves a value over a boundary of BF16 now and then
        assert (a.view(torch.int16).int() - b.view(torch.int16).int()).abs().max() <= 1
        assert (a != b).float().mean() < 1e-3
