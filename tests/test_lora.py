"""The LoRA layer over a frozen base, through PEFT's own entry points, for the three backends.

Most tests call one layer of a small MLP and compare with the formula in FP64, with the layer's own D(x~) and D(W). The bound on
the difference is (roundings on the way) x (unit roundoff) x (the formula on absolute values), as in test_linear.
"""

import copy
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from _assertions import assert_same_bits, unit
from peft import LoraConfig, LoraModel, get_layer_status, get_model_status, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLoraLinear
from torch import nn

from peft_nvfp4 import BACKENDS, FrozenLinear, NVFP4LoraConfig, freeze_model, ops
from peft_nvfp4.freeze import frozen_layers
from peft_nvfp4.linear import draw_seed
from peft_nvfp4.lora import FrozenLoraLinear

D, HIDDEN, TOKENS = 64, 96, 6
LAYERS = ("up_proj", "down_proj")  # two NVFP4 terms and one, with the default accuracy
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


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return request.param


def lora_config(backend, **settings):
    """A and B both random: an adapter that does something before training."""
    return NVFP4LoraConfig(
        backend=backend, **{"r": 4, "lora_alpha": 8, "target_modules": list(LAYERS), "init_lora_weights": False, **settings}
    )


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


def sqnr(got, want):
    error = (got.double() - want.double()).square().sum()
    return float("inf") if error == 0 else float(10 * torch.log10(want.double().square().sum() / error))


# ---------------------------------------------------------------------------------------------- forward


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


def test_rank_and_alpha_patterns(backend):
    model = adapt(backend, rank_pattern={"up_proj": 6}, alpha_pattern={"down_proj": 20})
    up, down = layer_of(model, "up_proj"), layer_of(model, "down_proj")
    assert (up.r["default"], up.scaling["default"]) == (6, 8 / 6)
    assert (down.r["default"], down.scaling["default"]) == (4, 20 / 4)
    assert up.lora_A["default"].weight.shape == (6, D) and down.lora_A["default"].weight.shape == (4, HIDDEN)
    for layer in (up, down):
        x = inputs(layer)
        assert_close(layer(x), *formula(layer, x, ["default"]))


def test_fresh_adapter_changes_nothing(backend):
    """B is zero, so adding it adds exact zeros."""
    model = adapt(backend, init_lora_weights=True)
    x = torch.randn(TOKENS, D)
    y = model(x)
    with model.disable_adapter():
        assert_same_bits(y, model(x), "y")


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
    mask = ops.dropout_mask(x.float(), 0.5, draw_seed()).double()
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
    model = adapt(backend, bias=True)
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


def test_scale_setters(backend):
    model = adapt(backend)
    layer = layer_of(model)
    x = inputs(layer)
    for change, scaling in (
        (lambda: layer.set_scale("default", 3), 3 * 2.0),
        (lambda: layer.scale_layer(0.5), 3.0),
        (lambda: layer.unscale_layer(0.5), 6.0),
        (layer.unscale_layer, 2.0),
        (lambda: layer.set_scale("default", 0), 0.0),
    ):
        change()
        assert layer.scaling["default"] == scaling
        assert_close(layer(x), *formula(layer, x, ["default"]))


def test_only_adapters_get_gradients(backend, llama):
    model = get_peft_model(llama(), lora_config(backend, target_modules="all-linear"))
    ids = torch.randint(0, 128, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == ("lora_" in name) == (p.grad is not None), name
        assert p.grad is None or (p.grad.isfinite().all() and p.grad.abs().sum() > 0), name


@pytest.mark.parametrize("autocast_adapter_dtype, expected", ((True, torch.float32), (False, torch.bfloat16)), ids=str)
def test_adapter_dtype_over_a_bf16_model(backend, autocast_adapter_dtype, expected):
    """FP32 masters by default; on request the model's dtype, whatever the base is stored in."""
    model = adapt(backend, None, dtype=torch.bfloat16, autocast_adapter_dtype=autocast_adapter_dtype)
    layer = layer_of(model)
    factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    assert [t.dtype for t in factors] == [expected] * 2
    x = inputs(layer, torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert [t.grad.dtype for t in factors] == [expected] * 2
    model.to(torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16


def test_forward_under_autocast(backend):
    """An FP32 model under BF16 autocast: a BF16 result within BF16's error of the FP32 formula, and FP32 gradients."""
    model = adapt(backend)
    layer = layer_of(model)
    x = inputs(layer).bfloat16().float()  # autocast rounds the input; here that loses nothing
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, *formula(layer, x, ["default"]), torch.bfloat16)
    y.sum().backward()
    assert layer.lora_A["default"].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", (True, False), ids=("reentrant", "non_reentrant"))
def test_gradient_checkpointing_changes_no_gradient(backend, llama, reentrant):
    """Recomputing draws the same dropout masks, so losses and gradients have the same bits."""
    model = get_peft_model(llama(), lora_config(backend, target_modules="all-linear", lora_dropout=0.3))
    ids = torch.randint(0, 128, (2, 8))
    model.enable_input_require_grads()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        torch.manual_seed(3)
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append({"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    assert results[0].keys() == results[1].keys() and len(results[0]) == 1 + 2 * 14
    for name, value in results[0].items():
        assert_same_bits(results[1][name], value, name)


def test_training_learns(backend):
    """Fifty steps of Adam towards a rank-2 change of the function: the loss falls to a tenth (measured: 0.015 to 0.025)."""
    model = adapt(backend, init_lora_weights=True, lora_dropout=0.0)
    x = torch.randn(64, D)
    with torch.no_grad():
        target = model(x) + 0.5 * x @ torch.randn(D, 2) @ torch.randn(2, D) / math.sqrt(D)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(50):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


# ---------------------------------------------------------------------------------------------- several adapters


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


def test_adapters_on_different_layers(backend):
    """A layer without the active adapter is its base."""
    model = adapt(backend, dict(target_modules=["down_proj"]), target_modules=["up_proj"])
    model.set_adapter("a1")
    for name, active in (("up_proj", []), ("down_proj", ["a1"])):
        layer = layer_of(model, name)
        x = inputs(layer)
        assert_close(layer(x), *formula(layer, x, active), what=name)


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


def test_mixed_batch_refusals(backend):
    model = adapt(backend, None).eval()
    x = torch.randn(3, D)
    with pytest.raises(ValueError, match="non-existing adapter.*nope"):
        model(x, adapter_names=["default", "nope", "a1"])
    with pytest.raises(ValueError, match="same as the number of inputs"):
        model(x, adapter_names=["default"])
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged adapters"):
        model(x, adapter_names=["default"] * 3)


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


def test_modes_are_those_of_any_module(backend):
    layer = layer_of(adapt(backend))
    assert layer.eval() is layer and not layer.training and not layer.lora_A.training
    assert layer.train() is layer and layer.training and layer.lora_A.training


@pytest.mark.parametrize("method", ("merge", "unmerge", "train", "delete_adapter"))
def test_methods_are_called_as_pefts_own(method):
    """The same arguments by the same names, with the same defaults."""
    ours, theirs = (inspect.signature(getattr(cls, method)).parameters for cls in (FrozenLoraLinear, PeftLoraLinear))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_description_names_the_layer(backend):
    """As PEFT's does, from which tools take the type of a layer; parts that are PEFT's keep their names."""
    layer = layer_of(adapt(backend, use_dora=True))
    text = repr(layer)
    assert text.startswith("lora.frozen.FrozenLoraLinear(") and text.count("lora.frozen.") == 1
    assert "lora.dora.DoraLinearLayer(" in text


@pytest.mark.parametrize("combination, rank", (("cat", 6), ("svd", 6), ("linear", 4)))
def test_weighted_adapters(backend, combination, rank):
    """Combining by "cat" adds the updates exactly; so does "svd" with a rank that can hold the sum (the SVD in FP32 is backward
    stable: errors of a modest multiple of the unit roundoff times the norm); "linear" adds A and B before multiplying. PEFT 0.20
    multiplies with the scaling twice for "svd", on any base."""
    source = inspect.getsource(LoraModel._svd_generalized_task_arithmetic_weighted_adapter)
    twice = combination == "svd" and "weight * target.scaling[adapter]" in source
    model = adapt(backend, dict(r=rank - 4 if combination != "linear" else 4, lora_alpha=6))
    weights = [0.7, -0.4]
    kwargs = {"svd_rank": rank} if combination == "svd" else {}
    model.add_weighted_adapter(["default", "a1"], weights, "mix", combination_type=combination, **kwargs)
    model.set_adapter("mix")
    for name in LAYERS:
        layer = layer_of(model, name)
        assert (layer.r["mix"], layer.scaling["mix"]) == (rank, 1.0)
        if combination == "linear":
            roots = [math.sqrt(abs(w) * layer.scaling[n]) for w, n in zip(weights, ("default", "a1"))]
            a = roots[0] * layer.lora_A["default"].weight - roots[1] * layer.lora_A["a1"].weight
            b = roots[0] * layer.lora_B["default"].weight + roots[1] * layer.lora_B["a1"].weight
            want = (b @ a).detach()
        else:
            own = [w * (layer.scaling[n] if twice else 1.0) for w, n in zip(weights, ("default", "a1"))]
            want = own[0] * delta(layer, "default") + own[1] * delta(layer, "a1")
        assert (delta(layer, "mix") - want).abs().max() <= 256 * unit(torch.float32) * want.norm()
        x = inputs(layer)
        assert_close(layer(x), *formula(layer, x, ["mix"]), what=name)


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


# ---------------------------------------------------------------------------------------------- DoRA


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


def test_dora_starts_as_lora(backend):
    """The magnitude starts as the norm of D(W) + s B A, so the factor is 1 but for the rounding of that norm."""
    model = adapt(backend, use_dora=True)
    layer = layer_of(model)
    x = inputs(layer)
    y, magnitude = formula(layer, x, ["default"])
    assert_close(layer(x), y, 3 * magnitude)


@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
def test_dora_merge(backend, safe_merge):
    model = dora(backend)
    want, before = {n: dora_weight(layer_of(model, n)) for n in LAYERS}, {n: packed(layer_of(model, n)) for n in LAYERS}
    model.merge_adapter(safe_merge=safe_merge)
    for name in LAYERS:
        merged = layer_of(model, name).get_base_layer().dequantize(torch.float32)
        assert sqnr(merged, want[name]) >= REQUANTISED_SQNR[backend]
    model.unmerge_adapter()
    for name in LAYERS:
        assert_same_packed(packed(layer_of(model, name)), before[name])
    model.merge_adapter(safe_merge=safe_merge)  # merging again after unmerging
    dense = model.merge_and_unload(safe_merge=safe_merge)
    for name in LAYERS:
        weight = getattr(dense, name).weight.detach()
        # W + delta, the norm and the product: a handful of roundings, and those of the FP32 norm
        assert ((weight.double() - want[name]).abs() <= 64 * unit(torch.float32) * want[name].abs().amax()).all()


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


# ---------------------------------------------------------------------------------------------- merging in place


@by_dtype
@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
def test_merge_and_unmerge(backend, dtype, safe_merge):
    """The merged weight is D(W) + s B A after one requantisation; unmerging puts back every byte."""
    model = adapt(backend, dtype=dtype)
    before = {n: packed(layer_of(model, n)) for n in LAYERS}
    layers = {n: layer_of(model, n) for n in LAYERS}
    want = {n: m.get_base_layer().dequantize(torch.float32) + delta(m, "default") for n, m in layers.items()}
    x = torch.randn(TOKENS, D).to(dtype)
    unmerged = model(x)
    model.merge_adapter(safe_merge=safe_merge)
    floor = min(REQUANTISED_SQNR[backend], 45.0 if dtype == torch.bfloat16 else 200.0)  # 8 bits of BF16: 9 x 6 dB on average
    for name in LAYERS:
        layer = layer_of(model, name)
        base = layer.get_base_layer()
        assert layer.merged_adapters == ["default"]
        assert sqnr(base.dequantize(torch.float32), want[name]) >= floor
        assert not any(p.requires_grad for p in base.parameters())
        if backend != "bf16":
            assert base.weight.dtype == torch.uint8 and not torch.equal(base.weight, before[name]["weight"])
        y = inputs(layer, dtype)
        assert_close(layer(y), *formula(layer, y, []), dtype, "merged forward")
    # Measured over eight seeds, relative to the output's norm: nvfp4 up to 0.096, nf4 0.070, bf16 2**-8.
    assert (model(x) - unmerged).norm() <= {"nvfp4": 0.2, "nf4": 0.2, "bf16": 2.0**-6}[backend] * unmerged.norm()
    model.unmerge_adapter()
    for name in LAYERS:
        assert layer_of(model, name).merged_adapters == []
        assert_same_packed(packed(layer_of(model, name)), before[name])
    assert_same_bits(model(x), unmerged, "output after unmerging")


def test_merging_one_after_the_other_equals_merging_at_once(backend):
    """Every merge starts from the original weight, so requantisation errors do not add up."""
    settings = dict(r=2, lora_alpha=6, lora_bias=True)
    model = adapt(backend, settings)
    before = packed(layer_of(model))
    model.merge_adapter(["default", "a1"])
    at_once = packed(layer_of(model))
    model.unmerge_adapter()
    assert_same_packed(packed(layer_of(model)), before)
    model.merge_adapter(["default"])
    with pytest.warns(UserWarning, match="Already following adapters were merged default"):
        model.merge_adapter(["a1"])
    assert layer_of(model).merged_adapters == ["default", "a1"]
    assert_same_packed(packed(layer_of(model)), at_once)
    assert (at_once["bias"] != before["bias"]).any()
    model.unmerge_adapter()
    assert_same_packed(packed(layer_of(model)), before)


def test_merging_what_is_merged_or_unknown_does_nothing(backend):
    model = adapt(backend)
    layer = layer_of(model)
    layer.merge(adapter_names=["nope"])
    assert layer.merged_adapters == []
    model.merge_adapter()
    merged = packed(layer)
    with pytest.warns(UserWarning, match="All adapters are already merged"):
        model.merge_adapter()
    assert_same_packed(packed(layer), merged)
    assert layer.merged_adapters == ["default"]
    model.unmerge_adapter()
    with pytest.warns(UserWarning, match="Already unmerged"):
        layer.unmerge()


def test_lora_bias_is_merged_into_the_bias(backend):
    model = adapt(backend, lora_bias=True)
    layer = layer_of(model)
    before, update = packed(layer), layer.lora_B["default"].bias.detach() * layer.scaling["default"]
    model.merge_adapter()
    assert_same_bits(layer.get_base_layer().bias.detach(), before["bias"] + update, "merged bias")
    model.unmerge_adapter()
    assert_same_packed(packed(layer), before)


@by_dtype
@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
def test_a_merged_bias_keeps_its_dtype(backend, dtype, safe_merge):
    """One rounding of b + s b_B; the merged layer runs, and unmerging puts back every byte, also after a merge that failed
    half-way. (PEFT's safe merge leaves the bias in the dtype that the weight is merged in, FP32 here.)"""
    model = adapt(backend, dict(lora_bias=True), dtype=dtype, lora_bias=True)
    layer = layer_of(model)
    before, update = packed(layer), layer.lora_B["default"].bias.detach() * layer.scaling["default"]
    model.merge_adapter(safe_merge=safe_merge)
    assert_same_bits(layer.get_base_layer().bias.detach(), (before["bias"] + update).to(dtype), "merged bias")
    assert layer(inputs(layer, dtype)).dtype == dtype
    model.unmerge_adapter()
    assert_same_packed(packed(layer), before)
    layer.lora_A["a1"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        layer.merge(safe_merge=safe_merge, adapter_names=["default", "a1"])
    assert_same_packed(packed(layer), before, "after the failure")


@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
def test_lora_bias_without_a_bias_to_merge_into(backend, safe_merge):
    with pytest.warns(UserWarning, match="has no bias"):
        model = adapt(backend, lora_bias=True, bias=False)
    layer = layer_of(model)
    before = packed(layer)
    with pytest.raises(RuntimeError, match="no bias"):
        model.merge_adapter(safe_merge=safe_merge)
    assert_same_packed(packed(layer), before)
    assert layer.merged_adapters == []


@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
@pytest.mark.parametrize("where", ("A", "B", "bias"))
@pytest.mark.parametrize("value", (float("nan"), float("inf")), ids=str)
def test_adapter_that_is_not_finite_is_not_merged(backend, safe_merge, where, value):
    """Neither into a clean layer nor on top of a merged adapter; bytes and state stay as they were."""
    model = adapt(backend, dict(lora_bias=True), lora_bias=True)
    layer = layer_of(model)
    broken = {"A": layer.lora_A["a1"].weight, "B": layer.lora_B["a1"].weight, "bias": layer.lora_B["a1"].bias}[where]
    broken.data.view(-1)[3] = value
    clean = packed(layer)
    with pytest.raises(ValueError, match="NaN"):
        layer.merge(safe_merge=safe_merge, adapter_names=["a1"])
    assert_same_packed(packed(layer), clean, "clean layer")
    assert not layer.merged
    layer.merge(adapter_names=["default"])
    merged = packed(layer)
    with pytest.raises(ValueError, match="NaN"), pytest.warns(UserWarning, match="additionally merging a1"):
        layer.merge(safe_merge=safe_merge, adapter_names=["a1"])
    assert_same_packed(packed(layer), merged, "layer with a merged adapter")
    assert layer.merged_adapters == ["default"]
    layer.unmerge()
    assert_same_packed(packed(layer), clean, "after unmerging")


def test_a_failed_merge_leaves_nothing_to_unmerge(backend):
    """What is stored afterwards (here a new weight) is what a later merge starts from, and what unmerging puts back."""
    model = adapt(backend, None)
    layer = layer_of(model)
    layer.lora_A["a1"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        layer.merge(adapter_names=["a1"])
    layer.get_base_layer().requantize_(torch.randn(HIDDEN, D))
    before = packed(layer)
    layer.merge(adapter_names=["default"])
    layer.unmerge()
    assert_same_packed(packed(layer), before)


def test_disabling_adapters_unmerges(backend):
    model = adapt(backend)
    layer = layer_of(model)
    before, x = packed(layer), torch.randn(TOKENS, D)
    with model.disable_adapter():
        base = model(x)
    model.merge_adapter()
    with model.disable_adapter():
        assert_same_bits(model(x), base, "output without adapters")
    assert_same_packed(packed(layer), before)
    assert not layer.merged


def test_a_copy_of_a_merged_model_unmerges_by_itself(backend):
    model = adapt(backend)
    before = packed(layer_of(model))
    model.merge_adapter()
    merged = packed(layer_of(model))
    twin = copy.deepcopy(model)
    twin.unmerge_adapter()
    assert_same_packed(packed(layer_of(twin)), before, "the copy, unmerged")
    assert_same_packed(packed(layer_of(model)), merged, "the original, still merged")
    model.unmerge_adapter()
    assert_same_packed(packed(layer_of(model)), before, "the original, unmerged")


def test_casting_a_merged_model_and_unmerging(backend):
    """Packed bytes come back as they were, dense ones in the new dtype, and the model runs in it."""
    model = adapt(backend)
    layer = layer_of(model)
    before = packed(layer)
    model.merge_adapter()
    model.to(torch.bfloat16)
    model.unmerge_adapter()
    for name, t in packed(layer).items():
        cast = name == "bias" or backend == "bf16"
        assert_same_bits(t, before[name].bfloat16() if cast else before[name], name)
    assert model(torch.randn(TOKENS, D).bfloat16()).dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------- merging for good


@by_dtype
@pytest.mark.parametrize("target", ("all-linear", ["q_proj"]), ids=("all", "q_proj"))
@pytest.mark.parametrize("first", (False, True), ids=("unmerged", "merged_in_place"))
def test_merge_and_unload(backend, llama, dtype, target, first):
    """Plain nn.Linear everywhere, also where there was no adapter; every weight is D(W) + s B A in FP32, rounded once to the
    model's dtype, with the same bits as written out here. So the model is exactly the dense one of these weights. A merge in
    place before leaves no trace of requantisation."""
    model = get_peft_model(llama(dtype), lora_config(backend, target_modules=target))
    reference = llama(dtype)
    for name, frozen in frozen_layers(model):
        name = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        layer, weight = model.base_model.model.get_submodule(name), frozen.dequantize(torch.float32)
        if isinstance(layer, FrozenLoraLinear):
            weight = weight + delta(layer, "default")
        reference.get_submodule(name).weight.data = weight.to(dtype)
    if first:
        model.merge_adapter()
    dense = model.merge_and_unload()
    assert type(dense) is type(reference)
    assert {n: type(m) for n, m in dense.named_modules()} == {n: type(m) for n, m in reference.named_modules()}
    expected = reference.state_dict()
    assert dense.state_dict().keys() == expected.keys()
    for name, t in dense.state_dict().items():
        assert_same_bits(t, expected[name], name)
    ids = torch.randint(0, 128, (2, 8))
    with torch.no_grad():
        assert_same_bits(dense(input_ids=ids).logits, reference(input_ids=ids).logits, "logits")


def test_merge_and_unload_of_chosen_adapters(backend):
    model = adapt(backend, dict(r=2, lora_bias=True), lora_bias=True)
    layer = layer_of(model)
    base = layer.get_base_layer()
    want = base.dequantize(torch.float32) + delta(layer, "default") + delta(layer, "a1")
    bias = sum((layer.lora_B[n].bias.detach() * layer.scaling[n] for n in ("default", "a1")), base.bias.detach())
    dense = model.merge_and_unload(adapter_names=["default", "a1"])
    assert type(dense) is Mlp and type(dense.up_proj) is nn.Linear
    assert_same_bits(dense.up_proj.weight.detach(), want, "weight")
    # (b + s1 b1) + s2 b2 in FP32, in this order
    assert_same_bits(dense.up_proj.bias.detach(), bias, "bias")


def test_a_dense_sum_is_not_quantised_on_the_way(backend, monkeypatch):
    """Neither for a report nor for a dense model: a search for every weight, of which nothing would be used."""
    model = adapt(backend)
    layer = layer_of(model)
    before, want = packed(layer), layer.get_base_layer().dequantize(torch.float32) + delta(layer, "default")
    monkeypatch.setattr(type(layer.get_base_layer()), "requantize_", lambda *_: pytest.fail("quantised"))
    assert_same_bits(layer.dense_with(["default"]), want, "dense_with")
    assert_same_packed(packed(layer), before)
    assert not layer.merged
    base = layer.get_base_layer()
    assert_same_bits(model.merge_and_unload().up_proj.weight.detach(), want, "merge_and_unload")
    assert_same_packed(packed(base), before, "the frozen layer that was replaced")


@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
def test_merge_and_unload_refuses_nan(backend, safe_merge):
    model = adapt(backend)
    layer_of(model).lora_A["default"].weight.data[0, 0] = float("nan")
    before = packed(layer_of(model))
    with pytest.raises(ValueError, match="NaN"):
        model.merge_and_unload(safe_merge=safe_merge)
    assert_same_packed(packed(layer_of(model)), before)


def test_unload_gives_the_frozen_layers_back(backend):
    model = adapt(backend)
    before, bases = {n: packed(layer_of(model, n)) for n in LAYERS}, [layer_of(model, n).get_base_layer() for n in LAYERS]
    base = model.unload()
    assert type(base) is Mlp
    for name, expected in zip(LAYERS, bases):
        assert getattr(base, name) is expected
        assert_same_packed(packed(expected), before[name])
    assert not [n for n, _ in base.named_parameters() if "lora_" in n]
    again = get_peft_model(base, lora_config(backend))  # and takes a new adapter
    assert layer_of(again).get_base_layer() is bases[0]


def test_frozen_model_takes_plain_lora(backend):
    """A frozen model and stock PEFT's LoraConfig: the same layer, the same merge."""
    frozen = freeze_model(Mlp(), backend, progress=False)
    model = get_peft_model(frozen, LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    layer = layer_of(model)
    assert type(layer) is FrozenLoraLinear
    x = inputs(layer)
    assert_close(layer(x), *formula(layer, x, ["default"]))
    dense = model.merge_and_unload()
    assert {type(dense.up_proj), type(dense.down_proj)} == {nn.Linear}


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
