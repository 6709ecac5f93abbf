"""Initialisations and LoRA variants over a frozen base: each works as in stock PEFT on the dequantised weights, or raises by
name.

The reference is stock PEFT itself on a dense model whose weights are D(W). For NVFP4 it gets D(x~) as its input, which is what a
branch of that base sees.
"""

import copy
import warnings

import peft
import pytest
import torch
from _assertions import assert_same_bits, unit
from _frozen_linears import sqnr
from _lora_layers import LAYERS, REQUANTISED_SQNR, D, Mlp, assert_close, assert_same_packed, formula, inputs, layer_of, packed
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from peft_nvfp4.lora.layer import FrozenLoraLinear

REWRITING = ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga")
R, SCALING = 4, 2.0


def lora_config(backend, **settings):
    return NVFP4LoraConfig(backend=backend, **{"r": R, "lora_alpha": SCALING * R, "target_modules": list(LAYERS), **settings})


def preprocess(model, init):
    """What PEFT wants to have run on the dense model before; returns the settings that belong to ``init``."""
    x = torch.randn(64, D).to(model.norm.weight.dtype)
    if init == "corda":
        pytest.importorskip("attr")
        from peft.tuners.lora.config import CordaConfig
        from peft.tuners.lora.corda import preprocess_corda

        settings = {"init_lora_weights": init, "corda_config": CordaConfig(corda_method="ipm")}
        preprocess_corda(model, peft.LoraConfig(r=R, target_modules=list(LAYERS), **settings), run_model=lambda: model(x))
    elif init == "lora_ga":
        from peft.tuners.lora.loraga import preprocess_loraga

        settings = {"init_lora_weights": init, "lora_ga_config": peft.LoraGAConfig(scale="weight_svd")}
        loss = lambda: model(x).square().mean().backward()
        preprocess_loraga(model, peft.LoraConfig(r=R, target_modules=list(LAYERS), **settings), loss)
    else:
        settings = {"init_lora_weights": init}
    return settings


def before_and_after(backend, init, dtype=torch.float32):
    """(frozen base without adapter, adapted model) from one dense model."""
    dense = Mlp().to(dtype)
    settings = preprocess(dense, init)
    base = freeze_model(copy.deepcopy(dense), backend, progress=False)
    return base, peft.get_peft_model(dense, lora_config(backend, **settings))


def factors(layer, name="default"):
    return layer.lora_A[name].weight.detach().double(), layer.lora_B[name].weight.detach().double()


@pytest.mark.parametrize("init", (True, False, "gaussian", "orthogonal", "mica", "eva"), ids=str)
def test_base_keeps_its_bytes(backend, init):
    """And where B A = 0, the function is the base's."""
    settings = {"eva_config": peft.EvaConfig()} if init == "eva" else {}
    dense = Mlp()
    base = freeze_model(copy.deepcopy(dense), backend, progress=False)
    model = peft.get_peft_model(dense, lora_config(backend, init_lora_weights=init, **settings))
    for name in LAYERS:
        layer = layer_of(model, name)
        assert_same_packed(packed(layer), packed(getattr(base, name)))
        a, b = factors(layer)
        assert {a.dtype, layer.lora_A["default"].weight.dtype} == {torch.float64, torch.float32}
        if init is False:
            assert (b @ a).norm() > 0.1
        else:
            x = inputs(layer)
            y, magnitude = formula(layer, x, ["default"])
            want, _ = formula(layer, x, [])
            assert_close(layer(x), want, magnitude, what=f"{name} with init {init!r}")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("init", REWRITING)
def test_rewriting_inits_keep_the_sum(backend, init, dtype):
    """D(base after) + s B A is D(base before), up to one requantisation of the rewritten base: exactly for a dense FP32 base."""
    base, model = before_and_after(backend, init, dtype)
    for name in LAYERS:
        layer = layer_of(model, name)
        before = getattr(base, name).dequantize(torch.float32).double()
        after = layer.get_base_layer().dequantize(torch.float32).double()
        a, b = factors(layer)
        assert (layer.lora_A["default"].weight.dtype, layer.lora_B["default"].weight.dtype) == (torch.float32,) * 2
        update = SCALING * b @ a
        assert update.norm() > 0.1 * before.norm()
        if backend == "bf16":
            # PEFT rounds A, B and the base to the model's dtype after computing them in FP32
            roundings = (R + 4) * unit(torch.float32) + (3.1 * unit(dtype) if dtype != torch.float32 else 0)
            excess = (after + update - before).abs() - roundings * (before.abs() + SCALING * b.abs() @ a.abs())
            assert excess.max() <= 0
        else:
            assert sqnr(after, before - update) >= REQUANTISED_SQNR[backend]
        x = inputs(layer, dtype)
        assert_close(layer(x), *formula(layer, x, ["default"]), dtype, name)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "lora_" not in n)


@pytest.mark.parametrize("init", ("pissa", "pissa_niter_4"))
def test_pissa_takes_the_leading_singular_part(backend, init):
    """s B A is the best rank-r approximation of D(W): what it leaves is the norm of the other singular values. The randomised SVD
    is measured to leave up to 1.3 % more, of a random matrix, whose spectrum is flat and hardest."""
    base, model = before_and_after(backend, init)
    for name in LAYERS:
        a, b = factors(layer_of(model, name))
        weight = getattr(base, name).dequantize(torch.float32).double()
        best = torch.linalg.svdvals(weight)[R:].norm()
        assert (weight - SCALING * b @ a).norm() <= (1 + 1e-5 if init == "pissa" else 1.03) * best


@pytest.mark.parametrize("init", ("pissa", "olora"))
def test_rewriting_inits_keep_the_shared_global_scale(llama, init):
    """q, k and v must still share one scale afterwards, or serving engines cannot fuse them. k is made larger than the others."""
    dense = llama()
    dense.model.layers[0].self_attn.k_proj.weight.data *= 16
    model = peft.get_peft_model(dense, lora_config("nvfp4", init_lora_weights=init, target_modules="all-linear"))
    attention = model.base_model.model.model.layers[0].self_attn
    scales = [
        getattr(attention, n).get_base_layer().weight_gscale.view(torch.float32).item() for n in ("q_proj", "k_proj", "v_proj")
    ]
    assert scales == [scales[1]] * 3


@pytest.mark.parametrize("init", ("pissa", "olora", "mica", "orthogonal"))
def test_dense_init_of_a_second_adapter_while_one_is_merged_raises(backend, init):
    """It would take the merged weight for the base's. Nothing changes; after unmerging it works."""
    model = peft.get_peft_model(Mlp(), lora_config(backend, init_lora_weights=False))
    model.merge_adapter()
    merged = packed(layer_of(model))
    layer = layer_of(model)
    with pytest.raises(ValueError, match=f"unmerge default before adding an adapter with init_lora_weights='{init}'"):
        layer.update_layer("second", R, lora_alpha=R, config=lora_config(backend, init_lora_weights=init))
    assert_same_packed(packed(layer), merged)
    assert list(layer.lora_A) == ["default"] and "second" not in layer.scaling
    model.unmerge_adapter()
    model.add_adapter("second", lora_config(backend, init_lora_weights=init))
    assert list(layer.lora_A) == ["default", "second"]


@pytest.mark.parametrize(
    "option, make",
    (
        ("use_qalora", lambda backend: lora_config(backend, use_qalora=True)),
        ("kasa_config", lambda backend: lora_config(backend, kasa_config=peft.KasaConfig())),
    ),
    ids=("qalora", "kasa"),
)
def test_options_that_cannot_work_raise_and_are_named(backend, option, make):
    with pytest.raises(ValueError, match=rf"{option}.* {backend} "):
        peft.get_peft_model(Mlp(), make(backend))


VARIANTS = {
    "dora": dict(use_dora=True),
    "velora": dict(velora_config=peft.VeloraConfig(num_groups=8)),
    "velora_random": dict(velora_config=peft.VeloraConfig(num_groups=8, init_type="random")),
    "bdlora": dict(use_bdlora=peft.BdLoraConfig(target_modules_bd_a=["up_proj"], target_modules_bd_b=["down_proj"], nblocks=2)),
    "monteclora": dict(monteclora_config=peft.MontecloraConfig(num_samples=3)),
    "mica": dict(init_lora_weights="mica"),
}


def variant_pair(backend, settings):
    """Our adapted model, and stock PEFT's on a dense model with the weights D(W), with the same random adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = peft.get_peft_model(Mlp(), lora_config(backend, **{"init_lora_weights": False, **settings}))
        dense = Mlp()
        for name in LAYERS:
            base = layer_of(ours, name).get_base_layer()
            getattr(dense, name).weight.data = base.dequantize(torch.float32).clone()
            getattr(dense, name).bias.data = base.bias.detach().clone()
        config = {"r": R, "lora_alpha": SCALING * R, "target_modules": list(LAYERS), "init_lora_weights": False}
        stock = peft.get_peft_model(dense, peft.LoraConfig(**{**config, **settings}))
    for name, p in ours.named_parameters():
        if "lora_" in name and p.numel():
            p.data += 0.05 * torch.randn_like(p)  # magnitudes that are no norms, MiCA's zero A, BD-LoRA's zero B
    adapters = {k: v for k, v in ours.state_dict().items() if "lora_" in k}
    assert not stock.load_state_dict(adapters, strict=False).unexpected_keys
    return ours, stock


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", ("eval", "train"))
def test_variants_equal_stock_peft_on_the_dequantised_layer(backend, variant, mode):
    """Outputs and adapter gradients, layer by layer. Both run the same FP32 operations on the same D(x~), but for the base
    product, of which only the order of summing differs: sums of at most 256 terms, so 256 roundings, times 8 for sums of absolute
    values larger than the largest result."""
    ours, stock = (model.train(mode == "train") for model in variant_pair(backend, VARIANTS[variant]))
    for name in LAYERS:
        layer, theirs = layer_of(ours, name), layer_of(stock, name)
        assert type(layer) is FrozenLoraLinear and type(theirs) is not FrozenLoraLinear
        if variant == "monteclora":  # its samples are drawn in advance
            theirs.lora_monteclora_sampler = copy.deepcopy(layer.lora_monteclora_sampler)
        x = inputs(layer, leading=(2, 3))
        y = layer(x)
        want = theirs(layer.get_base_layer().lora_input(x))
        dy = torch.randn_like(want)
        y.backward(dy)
        want.backward(dy)
        results = {"y": (y.detach(), want.detach())}
        gradients = dict(theirs.named_parameters())
        for n, p in layer.named_parameters():
            assert (p.grad is None) == (not p.requires_grad or gradients[n].grad is None), n
            if p.grad is not None:
                assert "lora_" in n
                results[n] = (p.grad, gradients[n].grad)
        assert len(results) >= 2 and results["y"][0].isfinite().all()
        for what, (got, expected) in results.items():
            error = (got - expected).abs().max()
            assert error <= 2048 * unit(torch.float32) * expected.abs().max(), f"{name} {what}: {error:.3g}"
        plain = layer.get_base_layer()(x)
        assert (y - plain).norm() > 0.01 * plain.norm()  # the variant is seen


@pytest.mark.parametrize("safe_merge", (False, True), ids=("unsafe", "safe"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_merge_like_stock_peft(backend, variant, safe_merge):
    """merge_and_unload in FP32 equals stock PEFT's merge into D(W), merging in place that up to one requantisation (bf16: 100 dB,
    the order of FP32 sums); unmerging restores the bytes."""
    ours, stock = variant_pair(backend, VARIANTS[variant])
    before = {name: packed(layer_of(ours, name)) for name in LAYERS}
    stock = stock.merge_and_unload()
    ours.merge_adapter(safe_merge=safe_merge)
    for name in LAYERS:
        layer, want = layer_of(ours, name), getattr(stock, name).weight.detach()
        assert layer.merged_adapters == ["default"]
        assert sqnr(layer.get_base_layer().dequantize(torch.float32), want) >= min(REQUANTISED_SQNR[backend], 100.0)
    ours.unmerge_adapter()
    for name in LAYERS:
        assert_same_packed(packed(layer_of(ours, name)), before[name])
    ours = ours.merge_and_unload(safe_merge=safe_merge)
    for name in LAYERS:
        got, want = getattr(ours, name), getattr(stock, name)
        assert type(got) is nn.Linear
        # the same FP32 operations in the same order, but for the sum with D(W) and DoRA's norm and product
        assert ((got.weight - want.weight).abs() <= 64 * unit(torch.float32) * want.weight.abs().max()).all()


def test_alora_activates_from_its_invocation_on(backend):
    """The last ``offset`` tokens of a row see the adapter, the others and rows without invocation are the base's. It cannot be
    merged."""
    settings = dict(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.LoraModel(Mlp(), lora_config(backend, **settings), "default")
    layer = model.model.up_proj
    x = inputs(layer, leading=(3, 4))
    y = layer(x, alora_offsets=[2, None, 4])
    with_adapter, magnitude = formula(layer, x, ["default"])
    base, _ = formula(layer, x, [])
    active = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)[..., None]
    assert_close(y, torch.where(active, with_adapter, base), magnitude)
    assert ((y - base).abs().amax(-1, keepdim=True) > 1e-3).equal(active)
    y.sum().backward()
    assert layer.lora_A["default"].weight.grad.abs().sum() > 0 and layer.lora_A["default"].weight.grad.isfinite().all()
    before = packed(layer)
    for safe_merge in (False, True):
        with pytest.raises(NotImplementedError, match="aLoRA does not support"):
            model.merge_adapter(safe_merge=safe_merge)
        assert_same_packed(packed(layer), before)
        assert not layer.merged


def test_alora_through_a_causal_model(backend, llama):
    """Tokens before the invocation get the base model's logits, bit for bit; tokens from it on do not."""
    settings = dict(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(llama(), lora_config(backend, target_modules="all-linear", **settings)).eval()
    ids = torch.randint(10, 128, (1, 8))
    ids[0, 4:6] = torch.tensor([5, 6])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        with model.disable_adapter():
            base = model(input_ids=ids).logits
    assert_same_bits(logits[:, :4], base[:, :4], "before the invocation")
    assert ((logits - base)[0, 4:].abs().amax(-1) > 1e-3).all()
