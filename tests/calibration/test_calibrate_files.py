"""Calibrations in a folder: an interrupted one goes on to the same bytes, one is applied to another copy of its model and refused
by other models, and PEFT takes the calibrated base as it is."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from _calibrations import FAST, IDS, OPTIONS, assert_same_model, bits
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.calibration.run import CalibrationOptions, apply_calibration, calibrate
from peft_nvfp4.calibration.store import digest, read_manifest, write_manifest
from peft_nvfp4.quantization.freeze import freeze_model, frozen_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
from conftest import tiny_llama
from _calibrations import FAST, IDS, OPTIONS
from peft_nvfp4.calibration import store
from peft_nvfp4.calibration.run import calibrate
folder, count, when = sys.argv[2], int(sys.argv[3]), sys.argv[4]
replace = os.replace
def dying(source, target):
    global count
    count -= 1
    if count == 0 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
store.os.replace = dying
calibrate(tiny_llama(num_hidden_layers=3), IDS, options=OPTIONS, output_dir=folder, **FAST)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    model = tiny_llama(num_hidden_layers=3)
    calibrate(model, IDS, options=OPTIONS, output_dir=folder, **FAST)
    return model, folder


@pytest.mark.parametrize("kill_at, when", [(3, "before"), (9, "after")])
def test_killed_and_resumed_is_uninterrupted(whole, tmp_path, kill_at, when):
    """Files are renamed into place in this order: the manifest with the survey; then each layer, and the manifest; then each
    backward layout, and the manifest."""
    whole, folder = whole
    resumed = tiny_llama(num_hidden_layers=3)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "-c", KILLED, str(Path(__file__).parents[1]), str(tmp_path / "killed"), str(kill_at), when]
    assert subprocess.run(script, env=env, capture_output=True).returncode == -signal.SIGKILL
    manifest = json.loads((tmp_path / "killed" / "manifest.json").read_text())
    done = {part: len(manifest[part]) for part in ("layers", "backward")}
    assert done == {3: {"layers": 0, "backward": 0}, 9: {"layers": 3, "backward": 1}}[kill_at]
    report = calibrate(resumed, IDS, options=OPTIONS, output_dir=tmp_path / "killed", **FAST)
    assert_same_model(whole, resumed)
    assert list(report.layers) == ["model.layers.0", "model.layers.1", "model.layers.2"]
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(names) == 6
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


def test_a_folder_of_another_calibration_is_refused(tmp_path):
    calibrate(tiny_llama(), IDS, output_dir=tmp_path, **FAST)
    before = bits_of_folder(tmp_path)
    with pytest.raises(ValueError, match="other settings;"):
        calibrate(tiny_llama(), IDS, options=CalibrationOptions(accuracy="paper"), output_dir=tmp_path, **FAST)
    with pytest.raises(ValueError, match="other data;"):
        calibrate(tiny_llama(), IDS.roll(1, 0), output_dir=tmp_path, **FAST)
    changed = tiny_llama()
    changed.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="other model;"):
        calibrate(changed, IDS, output_dir=tmp_path, **FAST)
    assert bits_of_folder(tmp_path) == before
    again = tiny_llama()
    calibrate(again, IDS, output_dir=tmp_path, **FAST)  # finished: loads


def bits_of_folder(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_applied_to_another_copy(tmp_path):
    model, other = tiny_llama(), tiny_llama()
    calibrate(model, IDS, options=CalibrationOptions(accuracy="paper", offset=True), output_dir=tmp_path, **FAST)
    names = apply_calibration(other, tmp_path)
    assert len(names) == 14
    assert_same_model(model, other)
    attention = other.model.layers[0].self_attn
    assert attention.q_proj.input_offset is attention.v_proj.input_offset
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, other(IDS).logits)
    transient = tiny_llama()
    apply_calibration(transient, tmp_path, weight_layouts="transient")
    assert transient.model.layers[0].mlp.up_proj.backward_weight is None

    wrong = tiny_llama(hidden_size=32)
    with pytest.raises(ValueError, match="other weights"):
        apply_calibration(wrong, tmp_path)
    assert not frozen_layers(wrong)
    with pytest.raises(ValueError, match="manifest.json is missing"):
        apply_calibration(tiny_llama(), tmp_path / "nothing")
    manifest = read_manifest(tmp_path)
    del manifest["layers"]["model.layers.1"]
    write_manifest(tmp_path, manifest)
    with pytest.raises(ValueError, match="not finished.*model.layers.1"):
        apply_calibration(tiny_llama(), tmp_path)
    for version in (float("nan"), True, -1, 2.0):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format_version": version}))
        with pytest.raises(ValueError, match="manifest.json is not a valid manifest.*format_version"):
            apply_calibration(tiny_llama(), tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(ValueError, match="upgrade"):
        apply_calibration(tiny_llama(), tmp_path)


def test_report(tmp_path):
    report = calibrate(tiny_llama(), IDS, output_dir=tmp_path, **FAST)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["means"] == pytest.approx(report.means()) and saved["layers"].keys() == report.layers.keys()
    row = saved["layers"]["model.layers.0"]
    assert row["seconds"] > 0 and "peak_gib" in row and len(row["linears"]) == 7
    assert "W4A4 error" in str(report) and "2 layers" in str(report)


def test_config_takes_a_calibration(tmp_path):
    """The model gets the calibrated linears bit for bit, whatever the preset says; a further adapter takes them as they are."""
    calibrated = tiny_llama()
    calibrate(calibrated, IDS, options=CalibrationOptions(budget=0.4), output_dir=tmp_path / "c", **FAST)
    config = lambda **k: NVFP4LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **k)
    peft = get_peft_model(tiny_llama(), config(calibration=str(tmp_path / "c")))
    got = {k.replace("base_model.model.", "").replace(".base_layer", ""): t for k, t in bits(peft).items()}
    expected = {k: t.clone() for k, t in bits(calibrated).items()}
    assert got.keys() == expected.keys() and all(torch.equal(t, got[k]) for k, t in expected.items())
    peft.add_adapter("second", config())  # its preset does not fit the terms, which are the calibration's
    again = get_peft_model(calibrated, config())  # a calibrated base stays as it is
    got = {k.replace("base_model.model.", "").replace(".base_layer", ""): t for k, t in bits(again).items()}
    assert got.keys() == expected.keys() and all(torch.equal(t, got[k]) for k, t in expected.items())
    peft.save_pretrained(tmp_path / "adapter")
    assert NVFP4LoraConfig.from_pretrained(tmp_path / "adapter").calibration == str(tmp_path / "c")
    with pytest.raises(ValueError, match="holds no calibration"):
        get_peft_model(tiny_llama(), config(calibration=str(tmp_path / "nothing")))


# ---------------------------------------------------------------------------------------------- errors


def unchanged(model) -> bool:
    """Whether a model is the dense one that it was made as."""
    dense = tiny_llama().state_dict()
    state = model.state_dict()
    return not frozen_layers(model) and state.keys() == dense.keys() and all(torch.equal(t, dense[k]) for k, t in state.items())


def test_a_resumed_calibration_of_a_damaged_folder_leaves_the_model_alone(tmp_path):
    calibrate(tiny_llama(), IDS, output_dir=tmp_path, **FAST)
    path = tmp_path / "layers_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    model = tiny_llama()
    with pytest.raises(ValueError, match="layers_00001.safetensors is missing, truncated or damaged"):
        calibrate(model, IDS, output_dir=tmp_path, **FAST)
    assert unchanged(model)


def test_an_error_in_the_second_layer_leaves_the_model_dense(tmp_path):
    """While it is calibrated, while a calibration is applied, and without one."""
    model = tiny_llama()
    second = model.model.layers[1].mlp.down_proj
    second.register_forward_pre_hook(lambda *args: 1 / 0 if frozen_layers(model) else None)
    with pytest.raises(ZeroDivisionError):
        calibrate(model, IDS, **FAST)
    assert unchanged(model) and model.model.layers[1].mlp.down_proj is second

    calibrate(tiny_llama(), IDS, output_dir=tmp_path, **FAST)

    def refuse(name, dense, frozen):
        assert "layers.1" not in name

    for freeze in (partial(apply_calibration, folder=tmp_path), freeze_model):
        model = tiny_llama()
        with pytest.raises(AssertionError):
            freeze(model, on_frozen=refuse)
        assert unchanged(model), freeze


def test_fingerprints_are_those_of_other_versions():
    """They go into files: pinned, whatever PyTorch prints for a tree or a type."""
    tree = {"text": ["a", 1, 2.5, None, True], "ids": (torch.arange(6).view(2, 3), torch.ones(2, dtype=torch.bfloat16))}
    assert digest(tree) == digest(dict(reversed(tree.items())))
    assert digest(tree) == "d25517678ac4e1a117151942a5fa89f4cb86e175fe1e38adcab010d82c3f416b"
    for other in ({**tree, "text": ["a", 1, 2.5, None, 1]}, {**tree, "ids": (torch.arange(6), tree["ids"][1])}):
        assert digest(other) != digest(tree)
