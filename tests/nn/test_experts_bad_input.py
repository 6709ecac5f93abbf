"""Mixtures that are given something wrong: a frozen one answers as the dense one does, or by an error that names what it is."""

import pytest
import torch
from _frozen_experts import adapted
from _mixtures import gpt_oss, mixtral, qwen3_moe
from peft import PeftModel

from peft_nvfp4 import freeze_model

FAMILIES = pytest.mark.parametrize("make", (mixtral, qwen3_moe, gpt_oss))


def both(make):
    """A dense model, and the same one frozen."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return models[0], freeze_model(models[1], progress=False)


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def spoil_token(module, args):
    """NaN in what a router reads of the fourth token."""
    hidden = args[0].clone()
    hidden.view(-1, hidden.shape[-1])[3] = float("nan")
    return hidden, *args[1:]


@FAMILIES
def test_nan_in_a_router(make):
    """Where the last router reads one: NaN for that token. In a router's weights: for all tokens."""
    ids = torch.arange(6)[None] * 5
    for model in both(make):
        routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        handle = routers[-1].register_forward_pre_hook(spoil_token)
        assert logits(model, ids).isnan().all(-1).tolist() == [[False] * 3 + [True] + [False] * 2]
        handle.remove()
        assert logits(model, ids).isfinite().all()
        with torch.no_grad():
            routers[0].weight[1, 3] = float("nan")
        assert logits(model, ids).isnan().all()


@FAMILIES
def test_more_experts_than_tokens(make):
    """One token, two of four experts."""
    dense, frozen = (logits(model, torch.tensor([[7]])) for model in both(make))
    assert frozen.shape == dense.shape and frozen.isfinite().all()
    assert (frozen - dense).norm() < 0.3 * dense.norm()  # of 4-bit weights and inputs, through two layers


def test_more_experts_a_token_than_there_are():
    """The router says so."""
    for model in both(lambda: with_experts(4, chosen=5)):
        with pytest.raises(RuntimeError, match="selected index k out of range"):
            model(input_ids=torch.arange(6)[None])


def with_experts(experts: int, chosen: int = 2):
    model = qwen3_moe()
    config = model.config
    config.num_experts, config.num_experts_per_tok = experts, chosen
    torch.manual_seed(0)
    return type(model)(config)


@pytest.mark.parametrize("there", (8, 2))
def test_an_adapter_of_other_experts(there, tmp_path):
    """For an expert that the model has not, or with none for one that it has: PEFT names the parameter and both sizes."""
    adapted(lambda: with_experts(there)).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=rf"size mismatch for .*experts.*lora_A.*\[{2 * there}, .*current model.*\[8, "):
        PeftModel.from_pretrained(freeze_model(with_experts(4), progress=False), tmp_path)
