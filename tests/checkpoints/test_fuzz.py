"""What comes with models, damaged at random: checkpoints in every layout, side-cars and records of adapters, calibrations.
It works, or it is refused with an error that names the file (the whole rule, and how to search longer: _fuzz.py)."""

import contextlib
import copy
import json
import shutil

import pytest
import torch
from _assertions import assert_same_bits
from _fuzz import (
    changes,
    done_or_refused,
    edits,
    header_values,
    headers,
    nothing_is_run,  # noqa: F401  a fixture of every test here
    spoil,
    spoiled,
    words,
)
from _hypothesis import json_values, tried
from conftest import tiny_llama
from published_checkpoints import CT_SETTINGS, IDS, MODELOPT_SETTINGS, OLD_MODELOPT, write

pytest.importorskip("hypothesis")
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from peft_nvfp4 import NVFP4LoraConfig, PactConfig
from peft_nvfp4.calibration.run import CalibrationOptions, apply_calibration, calibrate
from peft_nvfp4.checkpoints.load import check_files, check_indices, stored_in
from peft_nvfp4.checkpoints.settings import read_settings
from peft_nvfp4.lora import fingerprint
from peft_nvfp4.lora.config import SIDE_CAR
from peft_nvfp4.lora.inspection import inspect_adapter
from peft_nvfp4.quantization.freeze import frozen_layers

SETTINGS = {"compressed-tensors": CT_SETTINGS, "modelopt": MODELOPT_SETTINGS, "old": OLD_MODELOPT}


@tried(120)
@given(st.sampled_from(sorted(SETTINGS)), changes(header_values))
def test_settings_of_published_checkpoints(name, damage):
    content = damage[1](SETTINGS[name])
    if isinstance(content, dict):  # as its callers have made sure
        with done_or_refused("origin.json"):
            read_settings(content, "origin.json")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Bytes of a safetensors file of a few tensors, and a folder for damaged ones."""
    folder = tmp_path_factory.mktemp("small")
    tensors = {"a.weight": torch.arange(6, dtype=torch.uint8).view(2, 3), "a.weight_scale": torch.ones(4), "b": torch.ones(0)}
    save_file(tensors, folder / "sound.safetensors", metadata={"format": "pt"})
    return folder, (folder / "sound.safetensors").read_bytes()


@tried(150)
@given(st.one_of(edits(), headers))
def test_headers(small, damage):
    folder, data = small
    file = folder / "model.safetensors"
    file.write_bytes(spoil(damage, data))
    with done_or_refused(file):
        check_files([str(file)], packed=True)
        for stored in stored_in([str(file)]):
            assert isinstance(stored.dtype, str) and all(n >= 0 for n in stored.shape)


def index(content):
    return json.dumps(content).encode()


maps = st.dictionaries(st.text(max_size=4), st.one_of(st.text(), words), max_size=4).map(lambda m: {"weight_map": m})
SOUND_INDEX = index({"weight_map": {"a": "model-1.safetensors"}})


@tried(200)
@given(st.one_of(json_values.map(index), maps.map(index), edits().map(lambda damage: spoil(damage, SOUND_INDEX))))
@example(index({"weight_map": {"a": "../x"}}))
@example(index({"weight_map": {"a": "C:\\x"}}))
@example(index({"weight_map": {"a": "\x00"}}))
def test_indices(tmp_path_factory, data):
    """What is let through lies in the folder."""
    folder = tmp_path_factory.mktemp("index")
    path = folder / "model.safetensors.index.json"
    path.write_bytes(data)
    with done_or_refused(path) as outcome:
        check_indices([str(folder / "x.safetensors")], str(folder))
    content = None
    with contextlib.suppress(ValueError):
        content = json.loads(data)
    if outcome.done and isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
        for name in content["weight_map"].values():
            if isinstance(name, str) and "\x00" not in name:
                assert (folder / name).resolve().is_relative_to(folder.resolve())
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> folder of a sound one-layer checkpoint in one file (and an index)."""
    root, model = tmp_path_factory.mktemp("saved"), tiny_llama(torch.bfloat16, num_hidden_layers=1)
    for layout in ("compressed-tensors", "modelopt"):
        write(root / layout, layout, model=copy.deepcopy(model), shards=1)
    write(root / "old", "modelopt", model=copy.deepcopy(model), shards=1, settings=None)
    config = json.loads((root / "old" / "config.json").read_text())
    config.pop("quantization_config")
    (root / "old" / "config.json").write_text(json.dumps(config))
    (root / "old" / "hf_quant_config.json").write_text(json.dumps(OLD_MODELOPT))
    model.save_pretrained(root / "dense")
    loaded = AutoModelForCausalLM.from_pretrained(root / "dense", quantization_config=PactConfig(), dtype=torch.bfloat16)
    loaded.save_pretrained(root / "own")
    shutil.rmtree(root / "dense")
    return root


def load(folder, *names, frozen=None):
    """A model whose every packed linear is frozen and finite, or a refusal."""
    with done_or_refused(*names, kinds=(ValueError, TypeError), foreign=True) as outcome:
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=PactConfig(), dtype=torch.bfloat16)
        layers = list(frozen_layers(model))
        assert not any(p.is_meta for p in model.parameters())
        assert all(layer.dequantize(torch.float32).isfinite().all() for _, layer in layers)
        if frozen is not None:
            assert len(layers) == frozen
    return outcome.done


def test_undamaged_models_load(saved):
    for layout in ("compressed-tensors", "modelopt", "old", "own"):
        assert load(saved / layout, frozen=7)


@tried(20)
@given(st.sampled_from(["compressed-tensors", "modelopt", "old", "own"]), st.one_of(edits(), headers, headers))
def test_damaged_weights(saved, layout, damage):
    """Values may have changed without notice; names, types, shapes and what a packed weight cannot hold may not."""
    (file,) = (saved / layout).glob("*.safetensors")
    with spoiled(file, damage):
        load(saved / layout, file, "lm_head", "embed_tokens", "norm", "layers.0")


@tried(20)
@given(st.sampled_from(["compressed-tensors", "modelopt", "own"]), changes(header_values))
def test_damaged_settings(saved, layout, damage):
    def inside(config):
        return {**config, "quantization_config": damage[1](config["quantization_config"])}

    with spoiled(saved / layout / "config.json", ("json", inside)):
        load(saved / layout, "quantization_config", saved / layout, "format_version", *LOADED_WORDS)


LOADED_WORDS = tuple(PactConfig.__dataclass_fields__)


@tried(20)
@given(st.one_of(edits(), changes(header_values)))
def test_damaged_hf_quant_config(saved, damage):
    with spoiled(saved / "old" / "hf_quant_config.json", damage) as path:
        load(saved / "old", path)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A saved adapter, and its base model."""
    from peft import get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    base = tiny_llama(num_hidden_layers=1)
    model = get_peft_model(copy.deepcopy(base), NVFP4LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    model.save_pretrained(folder)
    return folder, base


@tried(40)
@given(st.sampled_from([SIDE_CAR, fingerprint.BASE_FILE]), st.one_of(edits(), changes()))
def test_files_beside_an_adapter(adapter, name, damage):
    folder, base = adapter
    with spoiled(folder / name, damage), done_or_refused(name):
        NVFP4LoraConfig.from_pretrained(str(folder))
        fingerprint.read(folder)
        inspect_adapter(base, folder, probe=False)


@tried(30)
@given(st.one_of(edits(), headers))
def test_damaged_adapter_weights_are_inspected(adapter, damage):
    folder, base = adapter
    with spoiled(folder / "adapter_model.safetensors", damage) as path, done_or_refused(path):
        inspect_adapter(base, folder, probe=False)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """(folder of a calibration, its model)."""
    folder = tmp_path_factory.mktemp("calibration")
    model = tiny_llama(num_hidden_layers=2)
    settings = CalibrationOptions(method="nearest", samples=2, seq_len=16, report_tokens=0)
    calibrate(copy.deepcopy(model), IDS, options=settings, output_dir=folder, device="cpu", progress=False)
    return folder, model


def freeze_calibrated(folder, model, *names):
    """Either every layer is replaced, or none."""
    model = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with done_or_refused(*names) as outcome:
        apply_calibration(model, folder)
    if not outcome.done:
        assert {name for name, _ in model.named_parameters()} == before.keys(), "half of the model was changed"
        for name, p in model.named_parameters():
            assert_same_bits(p.detach(), before[name], name)
    return outcome.done


@tried(30)
@given(st.one_of(edits(), changes(header_values)))
def test_damaged_manifests(calibrated, damage):
    folder, model = calibrated
    with spoiled(folder / "manifest.json", damage):
        freeze_calibrated(folder, model, folder)


@tried(30)
@given(st.one_of(edits(), headers))
def test_damaged_calibrated_layers(calibrated, damage):
    folder, model = calibrated
    with spoiled(folder / "layers_00001.safetensors", damage):
        freeze_calibrated(folder, model, folder)
