"""What the tests of the package inside PEFT share: a configuration, a short training of a tiny Llama, and the logits and
tensors that are compared."""

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.lora.layer import FrozenLoraLinear

BACKENDS = ("nvfp4", "nf4", "bf16")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = {f"{i}.{'mlp' if p in PROJECTIONS[4:] else 'self_attn'}.{p}" for i in range(2) for p in PROJECTIONS}
IDS = torch.arange(32).reshape(2, 16) * 7 % 128
DEFAULTS = dict(backend="nvfp4", accuracy="high", memory="auto", calibration=None, skip_modules=[], merge_aware=False)
"""Of the fields that are ours, as a side-car has them, written out: a default that changes is a change for users."""
U = 2.0**-8  # largest relative error of rounding to BF16


def config(**settings) -> NVFP4LoraConfig:
    return NVFP4LoraConfig(**{**dict(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"), **settings})


def frozen_lora(model: nn.Module) -> dict[str, FrozenLoraLinear]:
    """Short name ("0.self_attn.q_proj") -> layer, of every LoRA layer over a frozen linear."""
    return {n.split("layers.")[-1]: m for n, m in model.named_modules() if isinstance(m, FrozenLoraLinear)}


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


def train(model: nn.Module, steps: int = 2, lr: float = 2e-2) -> nn.Module:
    """A few steps that make every trainable tensor differ from its start, B from zero in particular."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def trained(model: nn.Module, **settings) -> PeftModel:
    torch.manual_seed(1)
    return train(get_peft_model(model, config(**settings)))


def adapter_tensors(model: nn.Module, name: str = "default") -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in get_peft_model_state_dict(model, adapter_name=name).items()}


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def snapshot(model: nn.Module):
    """Everything a failed call must leave alone: module objects, parameter values and who is trainable."""
    return (
        {n: id(m) for n, m in model.named_modules()},
        {n: p.requires_grad for n, p in model.named_parameters()},
        {n: t.clone() for n, t in model.state_dict().items()},
    )
