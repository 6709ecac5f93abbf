"""Several adapters on one frozen base, for the three backends: together, on different layers, mixed in one batch, combined with
weights; and DoRA, alone and beside plain LoRA."""

import inspect

import pytest
import torch
from _assertions import unit
from _lora_layers import (
    HIDDEN,
    LAYERS,
    D,
    Mlp,
    adapt,
    assert_close,
    assert_same_packed,
    by_dtype,
    delta,
    formula,
    inputs,
    layer_of,
    lora_config,
    packed,
)
from peft import LoraConfig, get_layer_status, get_model_status, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLoraLinear

from peft_nvfp4.lora.layer import FrozenLoraLinear


@by_dtype
def test_several_adapters(backend, dtype):
    """Add, switch, both at once, none, delete."""
    model = adapt(backend, dict(r=2, lora_alpha=6), dtype=dtype)
    layer = layer_of(model)
    x = inputs(layer, dtype)
    assert layer.scaling == {"default": 2.0, "a1": 3.0}
    assert_close(layer(x), *formula(layer, x, ["default"]), dtype, "first")
    model.set_adapter("a1")
    assert_close(layer(x), *formula(layer, x, ["a1"]), dtype, "second")
    assert not layer.lora_A["default"].weight.requires_grad and layer.lora_A["a1"].weight.requires_grad
    model.base_model.set_adapter(["default", "a1"])
    assert_close(layer(x), *formula(layer, x, ["default", "a1"]), dtype, "both")
    with model.disable_adapter():
        assert_close(layer(x), *formula(layer, x, []), dtype, "none")
    model.delete_adapter("default")
    assert list(layer.lora_A) == ["a1"]
    assert_close(layer(x), *formula(layer, x, ["a1"]), dtype, "after deletion")


@by_dtype
@pytest.mark.parametrize("leading", ((5,), (5, 3)), ids=("2d", "3d"))
def test_mixed_batch_equals_single_adapters(backend, dtype, leading):
    """Row by row the same as switching adapters; rows of one adapter need not be neighbours."""
    model = adapt(backend, dict(r=2, lora_alpha=6, lora_bias=True), dtype=dtype).eval()
    layer = layer_of(model)
    x, names = inputs(layer, dtype, leading), ["a1", "__base__", "default", "a1", "default"]
    y = layer(x, adapter_names=names)
    assert y.dtype == dtype
    for i, name in enumerate(names):
        want = formula(layer, x[i : i + 1], [] if name == "__base__" else [name])
        assert_close(y[i : i + 1], *want, dtype, f"row {i}, {name}")
    whole = model(torch.randn(5, D).to(dtype), adapter_names=names)
    assert whole.isfinite().all() and whole.dtype == dtype


def test_mixed_batch_over_adapters_on_different_layers(backend):
    """A row of an adapter that a layer has not is the base's there."""
    model = adapt(backend, dict(target_modules=["down_proj"]), target_modules=["up_proj"]).eval()
    names = ["a1", "default", "__base__"]
    for name, own in (("up_proj", "default"), ("down_proj", "a1")):
        layer = layer_of(model, name)
        x = inputs(layer, leading=(3,))
        y = layer(x, adapter_names=names)
        for i, adapter in enumerate(names):
            want = formula(layer, x[i : i + 1], [adapter] if adapter == own else [])
            assert_close(y[i : i + 1], *want, what=f"{name}, row {i}, {adapter}")


def test_mixed_batch_with_a_variant(backend):
    """aLoRA: every row keeps its own offset, whatever the rows between them use; without offsets it is the base."""
    model = adapt(backend, dict(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")).eval()
    layer = layer_of(model)
    x, names, offsets = inputs(layer, leading=(4, 3)), ["a1", "default", "a1", "__base__"], [2, None, 1, 3]
    for given, active in ((offsets, [2, 3, 1, 0]), (None, [0, 3, 0, 0])):  # last tokens of a row that see its adapter
        y = layer(x, adapter_names=names, alora_offsets=given)
        for i, (name, n) in enumerate(zip(names, active)):
            for t in range(3):
                want = formula(layer, x[i, t : t + 1], [name] if t >= 3 - n else [])
                assert_close(y[i, t : t + 1], *want, what=f"row {i}, token {t}")


def test_adding_an_adapter_while_another_is_merged(backend):
    """PEFT unmerges then. One that does not look at the base weight may come at any time."""
    model = adapt(backend)
    layer = layer_of(model)
    before, x = packed(layer), inputs(layer)
    for name, init in (("a1", True), ("a2", False), ("a3", "gaussian")):
        model.merge_adapter(["default"])
        with pytest.warns(UserWarning, match="Unmerging the model first"):
            model.add_adapter(name, lora_config(backend, init_lora_weights=init))
        assert_same_packed(packed(layer), before)
        model.set_adapter(name)
        assert_close(layer(x), *formula(layer, x, [name]))


def test_a_variant_and_a_plain_adapter_together(backend):
    """aLoRA adds to the last tokens only, the plain adapter and its bias to all."""
    model = adapt(backend, dict(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"), lora_bias=True)
    model.base_model.set_adapter(["default", "a1"])
    layer = layer_of(model)
    x = inputs(layer, leading=(1, 4))
    y = layer(x, alora_offsets=[1])
    assert_close(y[:, :3], *formula(layer, x[:, :3], ["default"]), what="before the invocation")
    assert_close(y[:, 3:], *formula(layer, x[:, 3:], ["default", "a1"]), what="after it")


@pytest.mark.parametrize("method", ("merge", "unmerge", "train", "delete_adapter"))
def test_methods_are_called_as_pefts_own(method):
    """The same arguments by the same names, with the same defaults."""
    ours, theirs = (inspect.signature(getattr(cls, method)).parameters for cls in (FrozenLoraLinear, PeftLoraLinear))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_status_helpers(backend):
    model = adapt(backend, None)
    status = get_model_status(model)
    assert (status.adapter_model_type, status.num_adapter_layers, status.enabled) == ("LoraModel", 2, True)
    assert status.trainable_params == 2 * 4 * (D + HIDDEN)
    assert status.active_adapters == ["default"] and status.merged_adapters == []
    assert sorted(status.available_adapters) == ["a1", "default"]
    assert status.requires_grad == {"default": True, "a1": False} and status.devices == {"default": ["cpu"], "a1": ["cpu"]}
    model.merge_adapter(["a1"])
    layers = get_layer_status(model)
    assert [s.name for s in layers] == ["model.up_proj", "model.down_proj"]
    assert {s.module_type for s in layers} == {"lora.frozen.FrozenLoraLinear"}
    assert all(s.merged_adapters == ["a1"] for s in layers)
    assert repr(layer_of(adapt(backend, use_dora=True))).count("lora.frozen.") == 1  # parts that are PEFT's keep their names


def dora(backend, **settings):
    """A DoRA model whose magnitudes are not the norms they start as."""
    model = adapt(backend, use_dora=True, **settings)
    for name in LAYERS:
        magnitude = layer_of(model, name).lora_magnitude_vector["default"].weight
        magnitude.data *= torch.rand_like(magnitude) + 0.5
    return model


def dora_weight(layer):
    """(m / ||W + s B A||) (W + s B A), row by row, in FP64; W = D(W)."""
    w = layer.get_base_layer().dequantize(torch.float32).double() + delta(layer, "default").double()
    m = layer.lora_magnitude_vector["default"].weight.detach().double()
    return (m / w.norm(dim=1))[:, None] * w


@by_dtype
def test_dora_forward(backend, dtype):
    """The whole weight is rescaled, the bias is not."""
    model = dora(backend, dtype=dtype)
    layer = layer_of(model)
    x = inputs(layer, dtype)
    base, w = layer.get_base_layer(), dora_weight(layer)
    xd = base.lora_input(x).double()
    m = layer.lora_magnitude_vector["default"].weight.detach().double()
    rows = m / (base.dequantize(torch.float32).double() + delta(layer, "default").double()).norm(dim=1)
    _, magnitude = formula(layer, x, ["default"])
    # the base product is computed once, then multiplied by (m / norm - 1) and added
    assert_close(layer(x), xd @ w.T + base.bias.detach().double(), (2 + rows) * magnitude, dtype)
    layer(x).sum().backward()
    assert layer.lora_magnitude_vector["default"].weight.grad.abs().sum() > 0


def test_dora_and_lora_together(backend):
    """Merging a plain adapter and then a DoRA one equals PEFT's own merge on a dense model of the same weights."""
    model = adapt(backend, dict(use_dora=True))
    model.base_model.set_adapter(["default", "a1"])
    stock = Mlp()
    stock.load_state_dict(
        {k.replace(".base_layer", ""): v for k, v in dense_state(model).items() if "lora_" not in k}, strict=True
    )
    stock = get_peft_model(stock, LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYERS)))
    stock.add_adapter("a1", LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYERS), use_dora=True))
    stock.base_model.set_adapter(["default", "a1"])
    adapters = {k: v for k, v in model.state_dict().items() if "lora_" in k}
    assert not stock.load_state_dict(adapters, strict=False).unexpected_keys
    ours, theirs = model.merge_and_unload(), stock.merge_and_unload()
    for name in LAYERS:
        want = getattr(theirs, name).weight.detach()
        error = (getattr(ours, name).weight - want).abs()
        assert (error <= 64 * unit(torch.float32) * want.abs().amax()).all()


def dense_state(model):
    """State dict of the adapted MLP with dequantised weights."""
    state = {k.removeprefix("base_model.model."): v for k, v in model.state_dict().items()}
    state = {k: v for k, v in state.items() if k.startswith("norm.") or k.endswith("base_layer.bias")}
    for name in LAYERS:
        state[f"{name}.weight"] = layer_of(model, name).get_base_layer().dequantize(torch.float32)
    return state
