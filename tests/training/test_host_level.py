"""``memory="auto"`` without a GPU: values of NVFP4 weights that a CPU keeps between steps."""

import copy

import pytest
import torch
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.lora import hooks
from peft_nvfp4.numerics.reference import kept_values
from peft_nvfp4.quantization import options
from peft_nvfp4.quantization.layouts import layouts
from peft_nvfp4.training import host_level

IDS = torch.arange(24).view(2, 12)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    for module in (options, hooks):
        monkeypatch.setattr(module, "gpu_is_here", lambda: False)


def adapted(llama, **settings):
    torch.manual_seed(0)
    settings = {"backend": "nvfp4", **settings}
    model = get_peft_model(llama(), NVFP4LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02, generator=generator)
    return model


def step(model) -> list[torch.Tensor]:
    loss = model.train()(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def kept(model) -> list[bool]:
    return [kept_values(w) is not None for w in layouts(model)]


def test_the_first_training_step_keeps_the_values(llama, monkeypatch):
    model = adapted(llama)
    with torch.no_grad():
        model.eval()(input_ids=IDS)
    assert not any(kept(model)) and "until the first training step" in str(model.base_model.nvfp4_steps)
    with_values = step(model)
    assert len(kept(model)) == 2 * 14 and all(kept(model)) and "are kept" in str(model.base_model.nvfp4_steps)
    monkeypatch.setattr(host_level, "free_host_bytes", lambda: 1 << 10)
    without = adapted(llama)
    for a, b in zip(with_values, step(without), strict=True):
        assert torch.equal(a, b)
    assert not any(kept(without)) and "made anew at each use" in without.base_model.nvfp4_steps.values.line


def test_a_copy_keeps_values_of_its_own(llama):
    model = adapted(llama)
    step(model)
    copied = copy.deepcopy(model)
    assert not any(kept(copied))
    step(copied)
    assert all(kept(copied)) and all(kept(model))


def test_half_of_the_free_memory_is_left(llama, monkeypatch):
    needed = sum(4 * w.codes.shape[0] * w.k for w in layouts(adapted(llama)))
    for free, fits in ((2 * needed, True), (2 * needed - 2, False)):
        monkeypatch.setattr(host_level, "free_host_bytes", lambda free=free: free)
        model = adapted(llama)
        step(model)
        assert all(kept(model)) if fits else not any(kept(model))


@pytest.mark.parametrize("settings", [{"memory": "fast"}, {"memory": "small"}, {"backend": "bf16"}])
def test_what_somebody_asked_for_is_left_alone(llama, settings):
    model = adapted(llama, **settings)
    step(model)
    assert model.base_model.nvfp4_steps.values is None and not any(kept(model))
