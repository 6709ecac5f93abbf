"""The estimator for memory="smallest": against the bytes that a real model moves, and what follows from them."""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.memory import Settings, estimate, fit
from peft_nvfp4.training.callbacks import explain, settings_of
from peft_nvfp4.training.offload.enable import _owner

SETTINGS = Settings(batch=1, sequence=512, memory="small", checkpointing=True)
WEIGHTS = ("frozen linears, forward layout", "frozen linears, backward layout")


@pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
def test_bytes_on_the_host_are_those_of_a_model(backend):
    base = tiny_llama(torch.bfloat16, num_hidden_layers=5)
    shape = base.config.to_dict() | {"torch_dtype": "bfloat16"}
    model = get_peft_model(base, NVFP4LoraConfig(backend=backend, memory="smallest", target_modules="all-linear"))
    settings = settings_of(model, sequence=16)
    assert settings.offload
    found, without = estimate(shape, settings), estimate(shape, replace(settings, memory="small"))
    assert found.offloaded == sum(p.nbytes for layer in _owner(model).layers for p in layer.parameters())
    here, there = (sum(e.static[name] for name in WEIGHTS) for e in (found, without))
    assert there - here == found.offloaded * 3 // 5 and without.offloaded == 0
    assert found.as_dict()["offloaded_bytes"] == found.offloaded


def test_a_plan_for_a_card_that_holds_two_layers():
    """8B: 3.9 GB of weights, embedding and head of 2.1 GB. Under 6 GiB it fits with offload only."""
    plan = fit("llama-8b", SETTINGS, 6 * 2**30, 1)
    assert plan.estimate.peak < 5 * 2**30 and plan.settings.memory == "smallest" and plan.changed == ("memory='smallest'",)


def test_what_excludes_it_and_what_is_advised():
    for other in ({"cuda_graphs": True}, {"cards": 2, "strategy": "fsdp2"}):
        with pytest.raises(ValueError, match="memory='smallest' excludes"):
            replace(SETTINGS, memory="smallest", **other)
        assert "memory='smallest'" not in explain("llama-8b", replace(SETTINGS, **other))
    smallest = replace(SETTINGS, memory="smallest")
    assert "memory='smallest'" in explain("llama-8b", SETTINGS) and "memory=" not in explain("llama-8b", smallest)
    mamba = {"model_type": "mamba"}
    assert "memory='smallest'" in explain(mamba, SETTINGS) and "memory=" not in explain(mamba, smallest)
