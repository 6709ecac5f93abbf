"""An adapter refers to a calibration by folder and digest. Its side-car alone opens no folder but one inside the adapter's."""

import copy
import dataclasses
import json
import pickle
import shutil

import pytest
import torch
from conftest import tiny_llama
from peft import PeftModel, get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, calibrate
from peft_nvfp4.calibration.run import apply_calibration
from peft_nvfp4.calibration.store import read_manifest, write_manifest
from peft_nvfp4.lora.config import SIDE_CAR
from peft_nvfp4.quantization.freeze import frozen_layers

IDS = torch.arange(24).view(2, 12)


@pytest.fixture
def saved(tmp_path):
    """(calibration, adapter, logits): an adapter in a folder beside that of the calibration."""
    calibrate(tiny_llama(), IDS, output_dir=tmp_path / "calibration", device="cpu")
    config = NVFP4LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, calibration=tmp_path / "calibration")
    model = get_peft_model(tiny_llama(), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "calibration", tmp_path / "adapter", model(IDS).logits


def loaded(adapter, base=None, **settings):
    config = NVFP4LoraConfig.from_pretrained(adapter, **settings)
    return PeftModel.from_pretrained(base or tiny_llama(), adapter, config=config).eval()


def test_a_folder_elsewhere_is_named_by_the_caller(saved):
    calibration, adapter, logits = saved
    base = tiny_llama()
    with pytest.raises(ValueError, match="calibration.*not in the adapter's folder.*calibration=folder"):
        loaded(adapter, base)
    assert not frozen_layers(base)
    assert torch.equal(loaded(adapter, calibration=calibration)(IDS).logits, logits)
    apply_calibration(base, calibration)  # the caller has opened it
    assert torch.equal(loaded(adapter, base)(IDS).logits, logits)
    config = NVFP4LoraConfig.from_pretrained(adapter)
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config, r=2)):
        with pytest.raises(ValueError, match="not in the adapter's folder"):
            get_peft_model(tiny_llama(), copied)
    config.save_pretrained(adapter.parent / "again")
    assert json.loads((adapter.parent / "again" / SIDE_CAR).read_text()) == json.loads((adapter / SIDE_CAR).read_text())


def test_a_folder_in_the_adapters_is_found_wherever_that_goes(saved):
    calibration, adapter, logits = saved
    config = NVFP4LoraConfig.from_pretrained(adapter, calibration=shutil.copytree(calibration, adapter / "base"))
    config.save_pretrained(adapter)
    assert json.loads((adapter / SIDE_CAR).read_text())["calibration"] == "base"
    moved = adapter.rename(adapter.parent / "moved")
    assert torch.equal(loaded(moved)(IDS).logits, logits)


@pytest.mark.parametrize("folder", ["../calibration", "/", "link"])
def test_a_side_car_does_not_lead_out_of_its_folder(saved, folder):
    calibration, adapter, _ = saved
    (adapter / "link").symlink_to(calibration, target_is_directory=True)
    side_car = json.loads((adapter / SIDE_CAR).read_text())
    (adapter / SIDE_CAR).write_text(json.dumps(side_car | {"calibration": folder}))
    with pytest.raises(ValueError, match="not in the adapter's folder"):
        loaded(adapter)


def test_another_calibration_is_refused(saved):
    calibration, adapter, _ = saved
    manifest = read_manifest(calibration)
    manifest["settings"] = {**manifest["settings"], "note": "another"}
    write_manifest(calibration, manifest)
    base = tiny_llama()
    with pytest.raises(ValueError, match="another calibration than the adapter was trained with.*SHA-256"):
        loaded(adapter, base, calibration=calibration)
    assert not frozen_layers(base)


def test_an_adapter_without_a_calibration_takes_none(tmp_path):
    NVFP4LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="trained without a calibration"):
        NVFP4LoraConfig.from_pretrained(tmp_path, calibration=tmp_path)
