"""EVA: adapters that start at the leading directions of a layer's inputs, found by PEFT's hooks on a frozen, fused model."""

import peft
import pytest
import torch
from conftest import tiny_llama

from peft_nvfp4 import NVFP4LoraConfig

R = 4
NAME = "base_model.model.model.layers.0.self_attn.q_proj"
IDS = torch.arange(96).reshape(4, 24) * 7 % 128


@pytest.mark.parametrize("rho", [1.0, 2.0])
def test_eva_takes_the_leading_directions_of_the_inputs(backend, rho):
    """One batch, so PEFT's incremental PCA is the PCA of its tokens: the span of A holds as much of the centred inputs' variance
    as that of an SVD. PEFT's SVD is a randomised one, so a few percent may be missing; a random span holds far less. With
    rho > 1 ranks move between layers, some lose their adapter, and the sum stays."""
    config = peft.EvaConfig(rho=rho, use_label_mask=False)
    lora = NVFP4LoraConfig(backend=backend, r=R, target_modules="all-linear", init_lora_weights="eva", eva_config=config)
    model = peft.get_peft_model(tiny_llama(), lora)
    with torch.no_grad(), model.disable_adapter():
        before = model(input_ids=IDS).logits
    peft.initialize_lora_eva_weights(model, [{"input_ids": IDS}], show_progress_bar=False)
    ranks = {name: module.r["default"] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert sum(ranks.values()) == 14 * R and (len(set(ranks.values())) > 1) == (rho > 1)

    layer, seen = model.get_submodule(NAME), []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, -2)))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-5, atol=1e-5)  # B is zero
    handle.remove()
    a, centred = layer.lora_A["default"].weight.detach(), seen[0].float() - seen[0].float().mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False).Vh[: len(a)]
    assert len(a) == ranks[NAME]
    assert (centred @ torch.linalg.qr(a.T).Q).norm() ** 2 > 0.95 * (centred @ directions.T).norm() ** 2
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert layer.lora_B["default"].weight.grad.norm() > 0
