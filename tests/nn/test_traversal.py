"""The package's walks over a model against PyTorch's, and what Trainer asks of a model through them in every step."""

import copy

import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from peft_nvfp4 import NVFP4LoraConfig, PactConfig
from peft_nvfp4.nn.traversal import modules_of, parameters_of, set_mode


class HidesItsChild(nn.Module):
    """Walked by a method of its own."""

    def __init__(self):
        super().__init__()
        self.hidden, self.shown = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self
        yield f"{prefix}.shown", self.shown


class Frozen(nn.Dropout):
    """Always in evaluation mode."""

    def train(self, mode=True):
        return super().train(False)


class SeesItsMode(nn.Module):
    """With a mode that is a property."""

    def __init__(self):
        vars(self)["mode"] = None
        super().__init__()

    @property
    def training(self):
        return self.mode

    @training.setter
    def training(self, mode):
        vars(self)["mode"] = mode


def tree():
    """Modules and parameters in several places, absent ones, and classes with methods of their own."""
    shared, root = nn.Linear(2, 2), nn.Module()
    root.absent, root.first, root.again = None, nn.Sequential(shared, nn.Dropout(), Frozen()), shared
    root.register_parameter("nothing", None)
    root.weight, root.own, root.property = shared.weight, HidesItsChild(), SeesItsMode()
    root.add_module("none", None)
    root.patched = nn.Dropout()
    root.patched.train = lambda mode=True: root.patched
    return root


def ids(things):
    return [id(thing) for thing in things]


def modes(model):
    return [module.training for module in model.modules()]


def test_walks_are_those_of_pytorch():
    for root in (tree(), HidesItsChild(), nn.ModuleList([tree(), HidesItsChild()])):
        assert ids(modules_of(root)) == ids(root.modules())
        assert ids(parameters_of(root)) == ids(root.parameters())


@pytest.mark.parametrize("mode", [True, False])
def test_mode_is_set_as_pytorch_does(mode):
    ours, theirs = tree().train(not mode), tree().train(not mode)
    set_mode(ours, mode)
    theirs.train(mode)
    assert modes(ours) == modes(theirs) and len(set(modes(ours))) == 2
    assert ours.property.training is mode


def adapted(config=NVFP4LoraConfig, base=None, **settings):
    return get_peft_model(base or tiny_llama(), config(r=4, target_modules="all-linear", lora_dropout=0.1, **settings))


@pytest.mark.parametrize("settings", [{}, dict(backend="nf4"), dict(use_dora=True)], ids=["nvfp4", "nf4", "dora"])
def test_of_a_model_with_adapters(settings):
    model = adapted(**settings)
    assert ids(model.parameters()) == [id(p) for _, p in model.named_parameters()]
    assert ids(model.parameters(recurse=False)) == []
    for mode in (True, False):
        assert model.train(mode) is model and set(modes(model)) == {mode}
    with pytest.raises(ValueError, match="training mode"):
        model.train(1)
    model.train()
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    assert any(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for _, p in model.named_parameters())


def test_number_of_parameters_is_the_dense_model_s(tmp_path):
    plain = adapted(LoraConfig)
    tiny_llama().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=PactConfig())
    for model in (adapted(base=loaded), adapted(backend="nf4"), adapted()):
        for settings in ({}, dict(only_trainable=True), dict(exclude_embeddings=True)):
            assert model.num_parameters(**settings) == plain.num_parameters(**settings)
    assert copy.deepcopy(model).num_parameters.model() is not model.get_base_model()
    merged = model.merge_and_unload()
    assert "num_parameters" not in vars(merged) and merged.num_parameters() == tiny_llama().num_parameters()
