"""The LoRA layer over a frozen base, through PEFT's own entry points, for the three backends: forward, gradients and training.

Most tests call one layer of a small MLP and compare with the formula in FP64, with the layer's own D(x~) and D(W)
(see _lora_layers.py)."""

import math

import pytest
import torch
from _lora_layers import HIDDEN, LAYERS, TOKENS, Mlp, adapt, assert_close, by_dtype, formula, inputs, layer_of, lora_config
from peft import get_peft_model

from peft_nvfp4 import FrozenLinear
from peft_nvfp4.autograd.seeds import draw_seed
from peft_nvfp4.lora.layer import FrozenLoraLinear
from peft_nvfp4.numerics import philox


@by_dtype
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rslora", (False, True), ids=("lora", "rslora"))
def test_forward_and_scaling(backend, dtype, name, rslora):
    model = adapt(backend, dtype=dtype, r=9, lora_alpha=6, use_rslora=rslora)
    layer = layer_of(model, name)
    assert type(layer) is FrozenLoraLinear and isinstance(layer.get_base_layer(), FrozenLinear)
    assert layer.scaling["default"] == (6 / math.sqrt(9) if rslora else 6 / 9)
    x = inputs(layer, dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert_close(y, *formula(layer, x, ["default"]), dtype)
    without, _ = formula(layer, x, [])
    assert (y.double() - without).norm() > 0.1 * without.norm()  # the adapter is seen


@by_dtype
def test_dropout_in_training_and_its_gradient(backend, dtype):
    """Training uses a mask, drawn again for the gradient: dA = s (dy B)^T (m * D(x~)), dB = s dy^T ((m * D(x~)) A^T). Evaluating
    uses none."""
    model = adapt(backend, dtype=dtype, lora_dropout=0.5)
    layer = layer_of(model)
    x, dy = inputs(layer, dtype), torch.randn(TOKENS, HIDDEN).to(dtype)
    model.eval()
    assert_close(layer(x), *formula(layer, x, ["default"]), dtype, "eval")
    model.train()
    torch.manual_seed(7)
    y = layer(x)
    y.backward(dy)
    torch.manual_seed(7)
    mask = philox.dropout_mask(x.shape, 0.5, draw_seed(), x.device, torch.float64)
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert_close(y, *formula(layer, x, ["default"], {"default": mask}), dtype, "train")
    xm, g, s = layer.get_base_layer().lora_input(x).double() * mask, dy.double(), layer.scaling["default"]
    a, b = (m["default"].weight.detach().double() for m in (layer.lora_A, layer.lora_B))
    for got, want, magnitude, what in (
        (layer.lora_A, s * (g @ b).T @ xm, s * (g.abs() @ b.abs()).T @ xm.abs(), "dA"),
        (layer.lora_B, s * g.T @ (xm @ a.T), s * g.abs().T @ (xm.abs() @ a.abs().T), "dB"),
    ):
        assert_close(got["default"].weight.grad, want, magnitude, dtype, what)
    torch.manual_seed(8)
    assert (layer(x) != y).any()  # another seed, another mask


def test_lora_bias(backend):
    """The branch's own bias is scaled with it, and gets the gradient s * sum of dy."""
    model = adapt(backend, lora_bias=True)
    layer = layer_of(model)
    bias = layer.lora_B["default"].bias
    assert bias.abs().sum() > 0
    x, dy = inputs(layer), torch.randn(TOKENS, HIDDEN)
    y = layer(x)
    assert_close(y, *formula(layer, x, ["default"]))
    y.backward(dy)
    s = layer.scaling["default"]
    assert_close(bias.grad, s * dy.double().sum(0), s * dy.double().abs().sum(0), what="dbias")


@pytest.mark.parametrize("mode", ("none", "all", "lora_only"))
def test_trainable_biases(backend, mode):
    """Mode "all" trains every bias of the model, "lora_only" those of adapted layers; the gradient of one is the sum of dy."""
    config = lora_config(backend, target_modules=["up_proj"], bias=mode)
    model = get_peft_model(Mlp(), config)
    trainable = {name.removeprefix("base_model.model.") for name, p in model.named_parameters() if p.requires_grad}
    biases = {
        "none": set(),
        "lora_only": {"up_proj.base_layer.bias"},
        "all": {"up_proj.base_layer.bias", "down_proj.bias", "norm.bias"},
    }
    assert trainable == {"up_proj.lora_A.default.weight", "up_proj.lora_B.default.weight"} | biases[mode]
    layer, dy = layer_of(model), torch.randn(TOKENS, HIDDEN)
    layer(inputs(layer)).backward(dy)
    grad = layer.get_base_layer().bias.grad
    assert (grad is None) == (mode == "none")
    if mode != "none":
        assert_close(grad, dy.double().sum(0), dy.double().abs().sum(0), what="dbias")


def test_plain_branches(backend):
    """What modules that compute several linears at once ask a layer for."""
    model = adapt(backend, None)
    layer = layer_of(model, LAYERS[0])
    (branch,) = layer.plain_branches()
    assert branch.a is layer.lora_A["default"].weight and branch.b is layer.lora_B["default"].weight
    model.base_model.set_adapter(["default", "a1"])
    assert [branch.a is layer.lora_A[name].weight for name, branch in zip(("default", "a1"), layer.plain_branches())] == [
        True
    ] * 2
    layer.merge_aware_adapters = frozenset({"a1"})
    assert layer.plain_branches() is None
    layer.merge_aware_adapters = frozenset()
    with model.disable_adapter():
        assert layer.plain_branches() == []
    model.merge_adapter()
    assert layer.plain_branches() == []
    model.unmerge_adapter()
    layer.set_adapter(["elsewhere"])
    assert layer.plain_branches() == []
