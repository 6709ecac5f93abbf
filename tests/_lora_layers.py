"""What the tests of LoRA layers over a frozen base share: a small MLP with adapters, the formula in FP64, and its bounds.

The bound on the difference is (roundings on the way) x (unit roundoff) x (the formula on absolute values), see _linear_layers."""

import pytest
import torch
import torch.nn.functional as F
from _assertions import assert_same_bits, unit
from _frozen_linears import sqnr as sqnr
from peft import get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.lora.layer import FrozenLoraLinear

D, HIDDEN, TOKENS = 64, 96, 6
LAYERS = ("up_proj", "down_proj")  # two NVFP4 terms and one, with accuracy="balanced"
# dB of a weight after one requantisation, on sums of Gaussian-like weights and low-rank updates: measured 21.5 (nvfp4) and 20.8
# (nf4).
REQUANTISED_SQNR = {"nvfp4": 20.0, "nf4": 20.0, "bf16": 120.0}  # bf16 holds FP32 here: 24 bits are 144 dB
by_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))


class Mlp(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up_proj = nn.Linear(D, HIDDEN, bias=bias)
        self.down_proj = nn.Linear(HIDDEN, D, bias=bias)

    def forward(self, x):
        return x + self.down_proj(F.relu(self.up_proj(self.norm(x))))


def lora_config(backend, **settings):
    """A and B both random: an adapter that does something before training."""
    own = {"r": 4, "lora_alpha": 8, "target_modules": list(LAYERS), "init_lora_weights": False, "accuracy": "balanced"}
    return NVFP4LoraConfig(backend=backend, **{**own, **settings})


def adapt(backend, *more, dtype=torch.float32, bias=True, autocast_adapter_dtype=True, **settings):
    """An adapted MLP; ``more`` are settings of further adapters "a1", "a2", ... (None: the same as the first)."""
    model = get_peft_model(Mlp(bias).to(dtype), lora_config(backend, **settings), autocast_adapter_dtype=autocast_adapter_dtype)
    for i, other in enumerate(more, 1):
        model.add_adapter(f"a{i}", lora_config(backend, **(settings if other is None else other)))
    return model


def layer_of(model, name="up_proj"):
    return getattr(model.base_model.model, name)


def inputs(layer, dtype=torch.float32, leading=(TOKENS,)):
    return torch.randn(*leading, layer.in_features).to(dtype)


def packed(layer):
    """Every stored tensor of the frozen layer, bias included."""
    base = layer.get_base_layer() if isinstance(layer, FrozenLoraLinear) else layer
    tensors = {name: t.detach().clone() for name, t in base.packed_tensors().items()}
    return tensors | ({} if base.bias is None else {"bias": base.bias.detach().clone()})


def assert_same_packed(got, expected, what="stored tensors"):
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert_same_bits(got[name], t, f"{what}: {name}")


def formula(layer, x, names, masks=None):
    """(y, the same on absolute values) in FP64 of a layer with plain LoRA branches."""
    base = layer.get_base_layer()
    xd, w = base.lora_input(x).detach().double(), base.dequantize(torch.float32).double()
    y, magnitude = xd @ w.T, xd.abs() @ w.abs().T
    if base.bias is not None:
        y, magnitude = y + base.bias.detach().double(), magnitude + base.bias.detach().double().abs()
    for name in names:
        a, b, s = layer.lora_A[name].weight.detach().double(), layer.lora_B[name].weight.detach().double(), layer.scaling[name]
        xm = xd if masks is None else xd * masks[name]
        y, magnitude = y + s * xm @ a.T @ b.T, magnitude + abs(s) * xm.abs() @ a.abs().T @ b.abs().T
        if layer.lora_B[name].bias is not None:
            y = y + s * layer.lora_B[name].bias.detach().double()
            magnitude = magnitude + abs(s) * layer.lora_B[name].bias.detach().double().abs()
    return y, magnitude


def assert_close(got, want, magnitude, dtype=torch.float32, what="y"):
    """A chain has at most K + r + N + 16 FP32 roundings (< 256 here), and in BF16 eleven BF16 roundings for each of two
    adapters."""
    tolerance = (256 * unit(torch.float32) + (22 * unit(dtype) if dtype != torch.float32 else 0)) * magnitude
    error = (got.detach().double() - want).abs()
    assert got.shape == want.shape and not got.isnan().any(), what
    assert (error <= tolerance).all(), f"{what}: off by up to {error.max():.3g}, allowed {tolerance.max():.3g}"


def delta(layer, name):
    """s B A in FP32, computed as PEFT does."""
    return (layer.lora_B[name].weight @ layer.lora_A[name].weight).detach().float() * layer.scaling[name]
