"""What takes minutes on a real model shows tqdm's bar, with a rate and the time left; transformers' switch silences it."""

import pytest
import torch
import transformers
from conftest import tiny_llama
from peft import get_peft_model
from peft.tuners import tuners_utils
from transformers.utils import logging

import peft_nvfp4
from peft_nvfp4 import CalibrationOptions, GPTQOptions, NVFP4LoraConfig, PactConfig, calibrate


@pytest.fixture
def bars(monkeypatch):
    """(name, number of steps, unit) of every bar that is shown."""
    shown, real = [], logging.tqdm_lib.tqdm

    class Bar(real):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, mininterval=0)
            if not self.disable:
                shown.append((self.desc.removesuffix(": "), self.total, self.unit))

    monkeypatch.setattr(logging.tqdm_lib, "tqdm", lambda *a, **kw: Bar(*a, **{k: v for k, v in kw.items() if k != "mininterval"}))
    monkeypatch.setattr(tuners_utils, "tqdm", logging.tqdm_lib.tqdm)
    return shown


def work(folder):
    """Calibrate, load in 4 bits, freeze, merge."""
    model = tiny_llama()
    model.save_pretrained(folder / "model")
    ids = torch.arange(64).view(4, 16)
    calibrate(tiny_llama(), list(ids), None, CalibrationOptions(gptq=GPTQOptions(), samples=2, seq_len=16), device="cpu")
    transformers.AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=PactConfig())
    peft_model = get_peft_model(model, NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    peft_nvfp4.merge(peft_model)


def test_long_work_has_a_bar(tmp_path, bars):
    work(tmp_path)
    names = [name for name, total, unit in bars if total]
    assert [name.partition(" model")[0] for name in names if not name.startswith("Writing")] == [
        "Calibrating", "Loading weights", "Freezing in nvfp4", "Measuring what a merge keeps", "Unloading and merging"
    ], bars  # fmt: skip
    assert ("Freezing in nvfp4", 14, "layer") in bars


def test_transformers_switch_silences_it(tmp_path, bars):
    logging.disable_progress_bar()
    try:
        work(tmp_path)
    finally:
        logging.enable_progress_bar()
    assert not bars
