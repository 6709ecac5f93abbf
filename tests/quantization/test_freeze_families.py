"""Freezing models of many families: each linear is quantised as its place in the model asks (its *site*: global scale and
number of terms), the share that stays dense is said, and the frozen model computes what the definition of the format says."""

import copy
import re
import warnings

import pytest
import torch
import transformers as hf
from _families import IDS, causal, gpt2, opt, t5, text
from _frozen_models import ALL, by_backend, names
from _loss_models import distance
from _mixtures import llama4
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig, dense_share, dequantize_model, detach, freeze_model
from peft_nvfp4.autograd.frozen_linear import fake_quantize
from peft_nvfp4.numerics.reference import power_of_two_scale
from peft_nvfp4.quantization.freeze import frozen_layers
from peft_nvfp4.quantization.groups import fused_siblings, input_terms


@by_backend
@pytest.mark.parametrize("make, kind", [(llama4, "Llama4TextExperts"), (gpt2, "Conv1D")])
def test_the_share_that_stays_dense_is_said(backend, make, kind):
    """Experts that are called in a way of their own and Conv1D are not packed. The warning gives their share of all matrix
    weights without embeddings and heads, as test_moe.py counts it."""
    with pytest.warns(UserWarning, match=kind) as caught:
        model = freeze_model(make(), backend)
    (message,) = [str(w.message) for w in caught if kind in str(w.message)]
    assert int(re.search(r"(\d+)%", message)[1]) == round(100 * sum(dense_share(model).values()))


@by_backend
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("skipped", [[], ["mlp"]], ids=["all", "skipped on purpose"])
def test_no_warning_where_all_is_frozen(llama, backend, tied, skipped):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        freeze_model(llama(tie_word_embeddings=tied), backend, skip_modules=skipped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_siblings_share_a_global_scale(llama, dtype):
    """q/k/v and gate/up have one, made from the largest weight of the group; o and down have their own."""
    model = llama(dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            for i, p in enumerate(
                p for parent in (layer.self_attn, layer.mlp) for p in parent.children() if isinstance(p, nn.Linear)
            ):
                p.weight.mul_(8.0**i)  # so that no two of them agree by themselves
    amax = {n: m.weight.detach().float().abs().max() for n, m in model.named_modules() if n in ALL}
    freeze_model(model)
    scale = {n: m.weight_gscale.view(torch.float32).item() for n, m in frozen_layers(model)}
    for i in range(2):
        base = f"model.layers.{i}."
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            expected = power_of_two_scale(torch.stack([amax[base + p] for p in group]).max().reshape(1)).item()
            assert [scale[base + p] for p in group] == [expected] * len(group)
        for alone in ("self_attn.o_proj", "mlp.down_proj"):
            assert scale[base + alone] == power_of_two_scale(amax[base + alone].reshape(1)).item()
    assert len(set(scale.values())) > 2


def test_a_skipped_sibling_has_no_say_in_the_global_scale(llama):
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(4096)
    own = [getattr(model.model.layers[0].self_attn, p).weight.detach().abs().max() for p in ("q_proj", "k_proj")]
    freeze_model(model, skip_modules=["v_proj"])
    expected = power_of_two_scale(torch.stack(own).max().reshape(1))
    for p in ("q_proj", "k_proj"):
        assert torch.equal(getattr(model.model.layers[0].self_attn, p).weight_gscale.view(torch.float32), expected)


NORM_FED = """
model.layers.0.self_attn.q_proj model.layers.0.mlp.gate_proj model.layers.0.mlp.gate_up_proj model.layers.0.self_attn.qkv_proj
model.decoder.layers.0.fc1 encoder.block.0.layer.0.SelfAttention.q encoder.block.0.layer.1.DenseReluDense.wi_0
transformer.h.0.self_attention.query_key_value transformer.h.0.mlp.dense_h_to_4h bert.encoder.layer.0.attention.self.query
bert.encoder.layer.0.intermediate.dense some.unknown_linear
""".split()
INTERIOR = """
model.layers.0.self_attn.o_proj model.layers.0.mlp.down_proj model.decoder.layers.0.self_attn.out_proj
model.decoder.layers.0.fc2 encoder.block.0.layer.0.SelfAttention.o transformer.h.0.mlp.dense_4h_to_h
transformer.h.0.self_attention.dense bert.encoder.layer.0.attention.output.dense bert.encoder.layer.0.output.dense
""".split()


@pytest.mark.parametrize("accuracy, norm, interior", [("paper", 1, 1), ("balanced", 2, 1), ("high", 2, 2)])
@pytest.mark.parametrize("name", NORM_FED + INTERIOR)
def test_terms_of_a_site(name, accuracy, norm, interior):
    """What a norm feeds gets the preset's first number of terms, what attention or the MLP's product feeds the second."""
    assert input_terms(name, accuracy) == (norm if name in NORM_FED else interior)


def test_fused_siblings():
    assert fused_siblings("model.layers.3.self_attn.k_proj") == tuple(f"model.layers.3.self_attn.{p}_proj" for p in "qkv")
    assert fused_siblings("up_proj") == ("gate_proj", "up_proj")
    assert fused_siblings("a.o_proj") == ("a.o_proj",)


ONE = dict(num_hidden_layers=1)
ENCODER = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
PIXELS = lambda: dict(pixel_values=torch.randn(2, 3, 32, 32))


def bert():
    return hf.BertForSequenceClassification(hf.BertConfig(**ENCODER, vocab_size=128))


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(**ENCODER, image_size=32, patch_size=8))


# (model, inputs, number of frozen linears, last components of the linears that stay dense)
FAMILIES = {
    "mistral": (causal("Mistral", **ONE), text, 7, {"lm_head"}),
    "qwen2-bias": (causal("Qwen2", **ONE), text, 7, {"lm_head"}),
    "qwen3": (causal("Qwen3", head_dim=16, **ONE), text, 7, {"lm_head"}),
    "gemma2": (causal("Gemma2", head_dim=16, **ONE), text, 7, {"lm_head"}),
    "phi3-fused-qkv": (causal("Phi3", **ONE), text, 4, {"lm_head"}),
    "opt": (lambda: opt(1, 32), text, 8, {"lm_head"}),
    "t5": (t5, text, 16, {"lm_head", "wo"}),
    "bert": (bert, lambda: dict(input_ids=IDS, labels=torch.tensor([0, 1])), 7, {"classifier"}),
    "vit": (vit, lambda: dict(**PIXELS(), labels=torch.tensor([0, 1])), 6, {"classifier"}),
}
by_family = pytest.mark.parametrize("make, inputs, count, dense", FAMILIES.values(), ids=FAMILIES.keys())


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def emulate(frozen: nn.Module) -> nn.Module:
    """The same model in plain PyTorch and stock PEFT: dense linears with the dequantised weights, whose inputs (also the
    adapter's) are quantised and dequantised by a hook with the straight-through gradient."""
    terms = {n: m.options.terms for n, m in frozen_layers(frozen)}
    model = dequantize_model(copy.deepcopy(frozen))
    torch.manual_seed(5)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    for name, t in terms.items():
        layer = model.base_model.model.get_submodule(name)
        assert isinstance(layer, BaseTunerLayer)
        layer.register_forward_pre_hook(lambda module, args, t=t: (fake_quantize(args[0], t),))
    return model


def run(model: nn.Module, inputs: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = model.eval()(**inputs)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@by_family
def test_families_compute_the_definition(make, inputs, count, dense):
    """Logits and all adapter gradients against the emulation, with gradients="bf16" (exact input gradients) and norms and MLPs
    that are not fused (test_families.py has those). FP32 sums in another order move a value across a rounding threshold now and
    then, which shifts one value of thousands by a tenth: hence 1 %, a tenth of what quantisation itself does to the logits."""
    torch.manual_seed(0)
    original, batch = make(), inputs()
    linears = {n for n, m in original.named_modules() if type(m) is nn.Linear}
    with torch.no_grad():
        unquantised = original.eval()(**batch).logits
    frozen = quietly(freeze_model, copy.deepcopy(original), accuracy="balanced", gradients="bf16")
    assert len(names(frozen)) == count
    assert {n.rpartition(".")[2] for n in linears - names(frozen)} == dense
    with torch.no_grad():
        assert 0.01 < distance(frozen.eval()(**batch).logits, unquantised) < 1, "quantisation must be visible, not destructive"
    expected, wanted = run(quietly(emulate, frozen), batch)
    torch.manual_seed(5)
    settings = dict(r=4, target_modules="all-linear", init_lora_weights=False, accuracy="balanced")
    logits, grads = run(detach(quietly(get_peft_model, frozen, NVFP4LoraConfig(**settings))), batch)
    assert distance(logits, expected) < 0.01
    assert grads.keys() == wanted.keys() and len(grads) >= 2 * count
    for name, grad in grads.items():
        assert grad is not None and grad.isfinite().all() and grad.abs().max() > 0, name
        assert distance(grad, wanted[name]) < 0.05, name
