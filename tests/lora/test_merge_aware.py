"""Merge-aware training: the forward pass is that of the merged NVFP4 model, bit for bit; A and B get its plain LoRA gradients."""

import copy

import pytest
import torch
from _assertions import assert_same_bits, unit
from _lora_layers import LAYERS, TOKENS, D, Mlp, assert_same_packed, inputs, layer_of, packed
from _steps import steps
from conftest import tiny_llama
from low_level import adapted_model
from peft import LoraConfig, PeftModel, get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, enable_cuda_graphs
from peft_nvfp4.lora.layer import FrozenLoraLinear
from peft_nvfp4.lora.merge_aware import dense_merged, requantized
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear

IDS = torch.arange(24).reshape(2, 12) * 7 % 128


def config(**settings):
    defaults = dict(r=4, lora_alpha=8, target_modules="all-linear", merge_aware=True, init_lora_weights=False)
    return NVFP4LoraConfig(**{**defaults, **settings})


def mlp(dtype=torch.float32, **settings):
    return adapted_model(Mlp().to(dtype), make=config, target_modules=list(LAYERS), **settings)


def lora_layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, FrozenLoraLinear)}


def adam_steps(model, n=3):
    return steps(model, IDS, n, optimizer=torch.optim.Adam)


@pytest.mark.parametrize("fused", (True, False), ids=("fused", "plain"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("accuracy", ("paper", "high"))
def test_merged_logits_are_the_trained_functions(fused, dtype, accuracy):
    """After a few steps: logits with and without autograd, then merged in place, are the same bits; a plain adapter's are not."""
    model = adapted_model(tiny_llama(dtype), make=config, fused=fused, accuracy=accuracy)
    adam_steps(model)
    trained = model(input_ids=IDS).logits.detach()  # in training mode, with autograd
    model.eval()
    with torch.no_grad():
        assert_same_bits(model(input_ids=IDS).logits, trained, "evaluated")
        with model.disable_adapter():
            base = model(input_ids=IDS).logits
        model.merge_adapter()
        assert_same_bits(model(input_ids=IDS).logits, trained, "merged")
        model.unmerge_adapter()
        for layer in lora_layers(model).values():
            layer.merge_aware_adapters = frozenset()
        plain = model(input_ids=IDS).logits
    assert (trained - base).norm() > 0.1 * base.norm()
    assert not torch.equal(plain, trained)


def test_stored_bits_are_those_of_merging():
    """Layer by layer, with an adapter that needs a larger global scale in one layer; and nothing changes where B A = 0."""
    model = mlp()
    layer_of(model, "up_proj").lora_B["default"].weight.data *= 0.01
    layer_of(model, "down_proj").lora_B["default"].weight.data *= 50
    for name in LAYERS:
        layer = layer_of(model, name)
        before, base = packed(layer), layer.get_base_layer()
        foreseen = requantized(base, dense_merged(layer, ["default"]))
        layer.merge()
        for got, want in zip(foreseen, base.forward_layout):
            assert got == want if isinstance(want, int) else torch.equal(got, want), name
        assert (base.weight_gscale.equal(before["weight_gscale"])) == (name == "up_proj")
        layer.unmerge()
        layer.lora_B["default"].weight.data.zero_()
        for got, want in zip(requantized(base, dense_merged(layer, ["default"]))[:3], base.forward_layout[:3]):
            assert torch.equal(got, want)
        assert_same_packed(packed(layer), before)


def test_no_change_keeps_codes_that_a_search_would_not_find():
    """GPTQ leaves blocks whose codes stop short of 6; rounding their values anew may give other codes of the same values."""
    model = mlp()
    layer = layer_of(model)
    base = layer.get_base_layer()
    base.weight.data &= 0x22  # codes 0 and +-1 (magnitudes of 1 at most), in blocks with scales made for 6
    layer.lora_B["default"].weight.data.zero_()
    kept = requantized(base, dense_merged(layer, ["default"]))
    assert torch.equal(kept.codes, base.weight) and torch.equal(kept.scales, base.weight_scales)


def test_centred_inputs():
    """The constant that the epilogue adds is that of the merged weight."""
    model = mlp()
    layer = layer_of(model)
    base = layer.get_base_layer()
    base.set_offset(torch.linspace(-1, 1, D))
    x = inputs(layer)
    trained = layer(x).detach()
    layer.merge()
    assert_same_bits(layer(x).detach(), trained, "y")


def test_two_merge_aware_adapters_are_one_merged_weight():
    model = get_peft_model(Mlp(), config(target_modules=list(LAYERS)))
    model.add_adapter("second", config(target_modules=list(LAYERS), r=3))
    model.base_model.set_adapter(["default", "second"])
    layer = layer_of(model)
    x = inputs(layer)
    y = layer(x)
    y.square().sum().backward()
    assert all(layer.lora_B[name].weight.grad.norm() > 0 for name in ("default", "second"))
    layer.merge()
    assert_same_bits(layer(x), y, "y")


@pytest.mark.parametrize("accuracy", ("paper", "balanced", "high"))
def test_gradients(accuracy):
    """dx is the merged layer's own, bit for bit. dA and dB are s B^T dV and s dV A^T with dV = dy^T D(x~) formed in FP64: chains
    of at most M + K + N + r < 256 FP32 roundings."""
    model = mlp(accuracy=accuracy)
    for name in LAYERS:
        layer = layer_of(model, name)
        base = layer.get_base_layer()
        x = inputs(layer).requires_grad_()
        y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        merged = NVFP4FrozenLinear(
            base.in_features,
            base.out_features,
            base.bias,
            base.compute_dtype,
            base.options,
            requantized(base, dense_merged(layer, ["default"])),
        )
        x2 = x.detach().clone().requires_grad_()
        z = merged(x2)
        z.backward(dy)
        assert_same_bits(y, z, "y")
        assert_same_bits(x.grad, x2.grad, "dx")
        xd, s = base.lora_input(x).detach().double(), layer.scaling["default"]
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        dv, bound = dy.double().T @ xd, dy.double().abs().T @ xd.abs()
        for parameter, want, magnitude in (
            (a, s * b.double().T @ dv, s * b.double().abs().T @ bound),
            (b, s * dv @ a.double().T, s * bound @ a.double().abs().T),
        ):
            assert ((parameter.grad.double() - want).abs() <= 256 * unit(torch.float32) * magnitude).all()


def test_no_gradient_where_none_is_wanted():
    model = mlp()
    layer = layer_of(model)
    layer.lora_A["default"].weight.requires_grad_(False)
    layer(inputs(layer)).sum().backward()  # the input needs none either
    assert layer.lora_A["default"].weight.grad is None and layer.lora_B["default"].weight.grad.norm() > 0
    layer.lora_B["default"].weight.requires_grad_(False)
    assert not layer(inputs(layer)).requires_grad


@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointing_gives_the_same_gradients(reentrant):
    grads = []
    for checkpointing in (False, True):
        model = get_peft_model(tiny_llama(), config())
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and grads[0]
    for name, grad in grads[0].items():
        assert_same_bits(grads[1][name], grad, name)


def test_training_learns_and_16_bit_autocast_runs():
    model = get_peft_model(tiny_llama(), config(init_lora_weights=True))
    losses = adam_steps(model, 6)
    assert losses[-1] < losses[0] - 0.1
    with torch.autocast("cpu", torch.bfloat16):
        losses = adam_steps(model, 2)
        y = model(input_ids=IDS).logits.detach()
        model.merge_adapter()
        assert_same_bits(model(input_ids=IDS).logits.detach(), y, "logits under autocast")
    assert all(torch.isfinite(torch.tensor(losses)))


def test_merged_weight_is_kept_while_nothing_changes():
    layer = layer_of(mlp().eval())
    x = inputs(layer)
    with torch.no_grad():
        y = layer(x)
        kept = layer._merged_layer[1]
        assert_same_bits(layer(x), y, "y")
        assert layer._merged_layer[1] is kept
        for change in (
            lambda: layer.lora_A["default"].weight.mul_(1.5),
            lambda: layer.scale_layer(2.0),
            lambda: layer.get_base_layer().requantize_(torch.randn(96, D)),
        ):
            change()
            z = layer(x)
            assert not torch.equal(z, y) and layer._merged_layer[1] is not kept
            y, kept = z, layer._merged_layer[1]
    layer.train()
    assert layer._merged_layer is None
    layer(x)
    assert layer._merged_layer is None
    assert not [n for n in layer.state_dict() if "merged" in n]


@pytest.mark.gpu
def test_a_recorded_forward_pass_follows_the_adapter():
    """Replayed optimizer steps write to A and B without a new version: a merged weight that was kept from before the recording
    would be used for ever, or be gone (its memory given to others) after the next ``train()``."""
    layer = layer_of(mlp(torch.bfloat16).cuda().eval())
    x = inputs(layer).to("cuda", torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        before = layer(x).clone()  # the warm-up that every recording has; keeps its merged weight
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            recorded = layer(x)
        layer.train().eval()
        for p in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
            p.data.mul_(1.5)
        graph.replay()
        assert not torch.equal(recorded, before)
        assert_same_bits(recorded, layer(x), "replayed")
    side.synchronize()


@pytest.mark.parametrize(
    "settings, named",
    (
        (dict(backend="bf16"), "'bf16'"),
        (dict(backend="nf4"), "'nf4'"),
        (dict(lora_dropout=0.1), "lora_dropout=0.1"),
        (dict(lora_bias=True), "lora_bias=True"),
        (dict(use_dora=True), "use_dora"),
        (dict(init_lora_weights="mica"), "init_lora_weights='mica'"),
    ),
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_refused(settings, named):
    if settings.get("backend") == "nf4":
        pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match=f"merge_aware=True .*does not go with {named}"):
        config(**settings)


def test_recording_is_refused():
    with pytest.raises(ValueError, match="merge_aware=True"):
        enable_cuda_graphs(get_peft_model(tiny_llama(), config()))


def test_dense_targets_are_refused():
    with pytest.raises(ValueError, match="merge_aware=True: lm_head is no frozen NVFP4 linear"):
        get_peft_model(tiny_llama(), config(target_modules=["lm_head", "q_proj"]))


def test_company_of_other_adapters_is_refused():
    model = get_peft_model(Mlp(), config(target_modules=list(LAYERS)))
    model.add_adapter("plain", LoraConfig(r=2, target_modules=list(LAYERS), init_lora_weights=False))
    x = torch.randn(TOKENS, D)
    model(x)
    model.base_model.set_adapter(["default", "plain"])
    with pytest.raises(ValueError, match="default was trained merge-aware"):
        model(x)
    layer = layer_of(model)
    with pytest.raises(ValueError, match="default was trained merge-aware"):
        layer(x, adapter_names=["default", "plain"] * (TOKENS // 2))
    model.delete_adapter("default")
    model.base_model.set_adapter(["plain"])
    assert layer.merge_aware_adapters == frozenset()
    model(x)


def test_saved_and_loaded(tmp_path):
    """The setting travels in the side-car; loaded as plain LoRA, the adapter computes the unrounded sum."""
    model = get_peft_model(tiny_llama(), config())
    adam_steps(model)
    model.eval()
    trained = model(input_ids=IDS).logits.detach()
    model.save_pretrained(tmp_path)
    again = NVFP4LoraConfig.from_pretrained(tmp_path)
    assert again.merge_aware
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path, config=again).eval()
    assert_same_bits(loaded(input_ids=IDS).logits.detach(), trained, "logits")
    again = copy.deepcopy(loaded)
    assert_same_bits(again(input_ids=IDS).logits.detach(), trained, "logits of a copy")
