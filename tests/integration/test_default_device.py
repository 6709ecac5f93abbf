"""A default device that is not the CPU: random numbers of CPU generators, seeds and small tables name their device, so a model is
fused, calibrated and trained as without. The device is "meta": what lands there by mistake has no values."""

from contextlib import nullcontext

import pytest
import torch
from _mixtures import mixtral
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, attach, attach_loss, freeze_model
from peft_nvfp4.calibration.data import _ids, _pack
from peft_nvfp4.numerics import reference


@pytest.mark.parametrize("make", [tiny_llama, mixtral])
def test_a_model_is_fused_and_trained(make):
    found, ids = [], torch.arange(24).view(2, 12)
    for device in (nullcontext(), torch.device("meta")):
        reference._pair_table.cache_clear()
        torch.manual_seed(0)
        model = make()
        with device:
            freeze_model(model, gradients="nvfp4_sr", progress=False)
            fused = attach(model)
        model = get_peft_model(
            model, NVFP4LoraConfig(r=4, lora_dropout=0.1, init_lora_weights=False, target_modules=["q_proj"])
        ).train()
        with device:
            loss_report = attach_loss(model)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((str(fused), fused.fused, str(loss_report), loss_report.attached, loss.item(), gradients))
    (*expected, gradients), (*got, others) = found
    assert got == expected and expected[1] and expected[3]
    assert gradients and all(torch.equal(others[name], g) for name, g in gradients.items())


def test_token_ids_of_a_calibration_are_on_the_cpu():
    with torch.device("meta"):
        ids = _ids([5, 6, 7, 8])
        (part, *_) = _pack([ids], 1, 3, first=1)
    assert part.tolist() == [1, 5, 6] and _ids(ids) is ids
