"""Weights of published checkpoints whose global scale is no power of two: rounded once; requantised under one that is."""

import pytest
import torch
from _pact_models import load, logits
from conftest import tiny_llama
from published_checkpoints import as_loaded, dense_model, quantised, write

from peft_nvfp4 import freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers


@pytest.fixture
def checkpoint(tmp_path):
    model = tiny_llama(torch.bfloat16)
    weights = quantised(model, power_of_two=False)
    write(tmp_path / "a", "modelopt", model, weights)
    return tmp_path / "a", as_loaded(model, tmp_path / "dense"), weights


def test_values_are_rounded_once(checkpoint):
    folder, model, weights = checkpoint
    loaded = load(folder)
    for name, layer in frozen_layers(loaded):
        assert torch.equal(layer.dequantize(torch.bfloat16), weights[name].values().bfloat16())
    assert torch.equal(logits(loaded.dequantize()), logits(dense_model(model, weights)))


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_requantised_under_a_power_of_two(checkpoint, factor):
    layer = load(checkpoint[0]).model.layers[0].mlp.up_proj
    before, weight = layer.weight_gscale.view(torch.float32).clone(), layer.dequantize(torch.float32) * factor
    assert torch.frexp(before).mantissa != 0.5
    layer.requantize_(weight)
    after = layer.weight_gscale.view(torch.float32)
    assert torch.frexp(after).mantissa == 0.5 and before <= after
    assert (layer.dequantize(torch.float32) - weight).norm() < 0.1 * weight.norm(), "half a step of 4-bit codes is 1/12 at most"


def test_a_model_loaded_for_inference_says_how_to_load_it():
    model = tiny_llama(torch.bfloat16)
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    with pytest.raises(ValueError, match="PactConfig"):
        freeze_model(model, "nvfp4")
