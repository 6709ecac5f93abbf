"""What the tests of traps share: a tiny adapted model, one step of it, and comparing steps bit for bit."""

import torch
from _assertions import assert_same_bits
from conftest import tiny_llama
from peft import get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers

IDS = torch.arange(24).view(2, 12) * 5 % 128
HIDDEN = 64


def tuned(backend, base=None, *, dtype=torch.float32, autocast_adapter_dtype=True, **settings):
    """A tiny Llama of one layer with an adapter that does something from the start."""
    base = tiny_llama(dtype, num_hidden_layers=1) if base is None else base
    torch.manual_seed(1)
    settings = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "backend": backend, **settings}
    if gradients := settings.pop("gradients", None):
        freeze_model(base, backend, gradients=gradients, progress=False)
    return get_peft_model(base, NVFP4LoraConfig(**settings), autocast_adapter_dtype=autocast_adapter_dtype)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train_step(model, ids=IDS, **inputs):
    """Loss and gradients, from none."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_gradients(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_same_bits(got[name], gradient, name)


def assert_same_step(got, expected):
    assert_same_bits(got[0], expected[0], "loss")
    assert_same_gradients(got[1], expected[1])


def packed_bytes(model):
    return {f"{n}.{k}": t.clone() for n, layer in frozen_layers(model) for k, t in layer.packed_tensors().items()}


def assert_same_bytes(model, before):
    after = packed_bytes(model)
    assert after.keys() == before.keys()
    for name in before:
        assert_same_bits(after[name], before[name], name)


class Lone(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 44), nn.Linear(44, 64)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))
