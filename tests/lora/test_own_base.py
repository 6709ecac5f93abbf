"""An adapter finds its own base again: its files say how the base was frozen, and a base of another format gets a warning."""

import json
import warnings

import pytest
import torch
from _peft_models import IDS, by_backend, config, logits
from conftest import tiny_llama
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, detach, freeze_model
from peft_nvfp4.lora.config import SIDE_CAR
from peft_nvfp4.lora.fingerprint import BASE_FILE

PLAIN = dict(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
OTHER = "was trained on a base in"


def saved(folder, backend="nf4", **settings):
    """An adapter of a plain LoraConfig on a frozen base, and its logits."""
    torch.manual_seed(1)
    model = get_peft_model(freeze_model(tiny_llama(), backend, progress=False, **settings), LoraConfig(**PLAIN))
    model.save_pretrained(folder)
    assert not (folder / SIDE_CAR).exists()
    return logits(detach(model))


@by_backend
@pytest.mark.parametrize(
    "accuracy, skip", (("high", ()), ("paper", ("mlp",)), ("balanced", ("0.self_attn.v_proj", "1.mlp.up_proj")))
)
def test_a_plain_adapter_reloads_on_its_own_base(tmp_path, backend, accuracy, skip):
    """Format, terms and what stayed dense: the logits are the same, to the bit."""
    wanted = saved(tmp_path, backend, accuracy=accuracy, skip_modules=skip)
    read = NVFP4LoraConfig.from_pretrained(str(tmp_path))
    assert read.backend == backend and read.accuracy == (accuracy if backend == "nvfp4" else read.accuracy)
    assert torch.equal(logits(detach(PeftModel.from_pretrained(tiny_llama(), str(tmp_path), config=read))), wanted)


def test_a_record_of_another_base_is_no_default(tmp_path):
    """Terms of no preset cannot be asked for again: that is said."""
    base = freeze_model(tiny_llama(), progress=False)
    base.model.layers[0].self_attn.q_proj.options = type(base.model.layers[0].self_attn.q_proj.options)(terms=1)
    get_peft_model(base, LoraConfig(**PLAIN)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="terms of its own"):
        assert NVFP4LoraConfig.from_pretrained(str(tmp_path)).backend == "nvfp4"


@pytest.mark.parametrize("base, warned", (("dense", True), ("nvfp4", True), ("nf4", False)))
def test_another_base_than_its_own_gets_a_warning(tmp_path, base, warned):
    """Stock PEFT puts the adapter on whatever it is given; on its own format nothing is said."""
    saved(tmp_path)
    model = tiny_llama() if base == "dense" else freeze_model(tiny_llama(), base, progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PeftModel.from_pretrained(model, str(tmp_path))
    assert any(OTHER in str(w.message) for w in caught) == warned


def test_automatic_loading_gets_the_warning(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    model = get_peft_model(tiny_llama(), config())
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match=f"{OTHER} nvfp4 and is put on one that is dense.*NVFP4LoraConfig.from_pretrained"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("record", (None, "{", json.dumps({"format_version": 1, "format": "bf16", "fingerprint": ""})), ids=str)
def test_stock_adapters_load_as_ever(tmp_path, record):
    """Without a record, with one of a dense base, or with a damaged one, which is worth a warning of its own."""
    get_peft_model(tiny_llama(), LoraConfig(**PLAIN)).save_pretrained(tmp_path)
    if record is not None:
        (tmp_path / BASE_FILE).write_text(record)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PeftModel.from_pretrained(tiny_llama(), str(tmp_path))(IDS)
    assert [str(w.message) for w in caught if OTHER in str(w.message)] == []
    assert any("is damaged" in str(w.message) for w in caught) == (record == "{")
