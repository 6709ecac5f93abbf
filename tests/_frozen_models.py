"""What the tests of freezing share: a tiny Llama's linears by name, a configuration, and the check that a call
left a model as it was."""

import pytest
import torch
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.quantization.freeze import frozen_layers

by_backend = pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
by_packed_backend = pytest.mark.parametrize("backend", ["nvfp4", "nf4"])
PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
ALL = {f"model.layers.{i}.{parent}.{p}" for i in range(2) for parent, names in PROJECTIONS.items() for p in names}
IDS = torch.arange(32).reshape(2, 16) * 7 % 128


def config(**settings) -> NVFP4LoraConfig:
    return NVFP4LoraConfig(**{**dict(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), **settings})


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in frozen_layers(model)}


def packed(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{n}.{k}": t for n, layer in frozen_layers(model) for k, t in layer.packed_tensors().items()}


class Unchanged:
    """with Unchanged(model): ... checks that module objects, parameter objects, values and trainability are as before."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state(self):
        modules = dict(self.model.named_modules())
        parameters = {n: (id(p), p.data_ptr(), p.requires_grad) for n, p in self.model.named_parameters()}
        return modules, parameters, {n: t.clone() for n, t in self.model.state_dict().items()}

    def __enter__(self):
        self.before = self.state()

    def __exit__(self, error, *_):
        if error:
            return
        modules, parameters, tensors = self.state()
        assert modules.keys() == self.before[0].keys() and all(m is self.before[0][n] for n, m in modules.items())
        assert parameters == self.before[1]
        assert tensors.keys() == self.before[2].keys()
        assert all(torch.equal(t.nan_to_num(), self.before[2][n].nan_to_num()) for n, t in tensors.items())
