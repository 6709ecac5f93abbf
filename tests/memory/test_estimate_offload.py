"""The estimator for offload="cpu": against the bytes that a real model moves, and what follows from them."""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.memory import Settings, estimate, fit
from peft_nvfp4.training.callbacks import explain, settings_of
from peft_nvfp4.training.offload.enable import _owner

SETTINGS = Settings(batch=1, sequence=512, weight_layouts="transient", checkpointing=True)
WEIGHTS = ("frozen linears, forward layout", "frozen linears, backward layout")


@pytest.mark.parametrize("backend, layouts", [("nvfp4", "cached"), ("nvfp4", "transient"), ("nf4", "cached"), ("bf16", "cached")])
def test_bytes_on_the_host_are_those_of_a_model(backend, layouts):
    base = tiny_llama(torch.bfloat16, num_hidden_layers=5)
    shape = base.config.to_dict() | {"torch_dtype": "bfloat16"}
    model = get_peft_model(
        base, NVFP4LoraConfig(backend=backend, weight_layouts=layouts, offload="cpu", target_modules="all-linear")
    )
    settings = settings_of(model, sequence=16)
    assert settings.offload == "cpu"
    found, without = estimate(shape, settings), estimate(shape, replace(settings, offload=None))
    assert found.offloaded == sum(p.nbytes for layer in _owner(model).layers for p in layer.parameters())
    here, there = (sum(e.static[name] for name in WEIGHTS) for e in (found, without))
    assert there - here == found.offloaded * 3 // 5 and without.offloaded == 0
    assert found.as_dict()["offloaded_bytes"] == found.offloaded


def test_a_plan_for_a_card_that_holds_two_layers():
    """8B: 7 GB of weights in two layouts, embedding and head of 2.1 GB. Under 6 GiB it fits with offload only."""
    memory = 6 * 2**30
    with pytest.raises(ValueError, match="leave"):
        fit("llama-8b", SETTINGS, memory, 1)
    plan = fit("llama-8b", replace(SETTINGS, offload="cpu"), memory, 1)
    assert plan.estimate.peak < 5 * 2**30 and plan.settings.offload == "cpu"


def test_what_excludes_it_and_what_is_advised():
    for other in ({"cuda_graphs": True}, {"cards": 2, "strategy": "fsdp2"}):
        with pytest.raises(ValueError, match="excludes"):
            replace(SETTINGS, offload="cpu", **other)
    with pytest.raises(ValueError, match="offload must be one of None, cpu"):
        replace(SETTINGS, offload="disk")
    assert "offload='cpu'" in explain("llama-8b", SETTINGS)
    assert "offload='cpu'" not in explain("llama-8b", replace(SETTINGS, offload="cpu"))
    assert "offload='cpu'" not in explain({"model_type": "mamba"}, replace(SETTINGS, offload="cpu"))
