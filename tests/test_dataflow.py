"""The fused producers and their attaching: what is found, that nothing of the function changes, and what is kept for backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from peft import get_peft_model
from torch.utils.checkpoint import checkpoint

from peft_nvfp4 import NVFP4LoraConfig, attach, detach, fused_reference, handoff, reference
from peft_nvfp4.dataflow.mlp import FusedGatedMLP, GatedQuantize
from peft_nvfp4.dataflow.norm import NVFP4RMSNorm, RMSNormQuantize
from peft_nvfp4.formats import ACTIVATION

SIZES = dict(
    hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
)
FAMILIES = {"Llama": {}, "Mistral": {}, "Qwen2": {}, "Qwen3": dict(head_dim=16), "Gemma2": dict(head_dim=16), "Phi3": {}}
IDS = torch.arange(24).view(2, 12) * 5 % 128


def tuned(family: str, **settings):
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**SIZES, **FAMILIES[family], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = getattr(hf, f"{family}ForCausalLM")(config)
    return get_peft_model(model, NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **settings))


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("accuracy", ["paper", "balanced"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fusing_changes_no_output_and_detaching_puts_everything_back(family, accuracy):
    """Codes come from the same rounded norm output, so logits agree but for the last bit of the norm's mean (one y in 10^4
    rounds differently in BF16; in FP32, as here, by 2**-23, which may flip a code on a threshold: 1e-4 of the loss is far more).
    Gradients pass the norm and the MLP through 4-bit activations (10 % error in part of them), so their direction agrees to
    about 1 - 0.1**2 / 2 per layer; measured 0.985 to 0.997 with two layers."""
    model = tuned(family, accuracy=accuracy)
    keys, (loss, gradients) = list(model.state_dict()), loss_and_gradients(model)
    originals = dict(model.named_modules())
    report = attach(model)
    assert sorted(report.fused.values()) == ["RMSNorm+quantise"] * 4 + ["gated MLP"] * 2
    assert any("norm" in name and "read by" in why for name, why in report.skipped.items())
    fused_loss, fused_gradients = loss_and_gradients(model)
    assert list(model.state_dict()) == keys
    assert fused_loss == pytest.approx(loss, rel=1e-4)
    assert F.cosine_similarity(fused_gradients, gradients, 0) > 0.97
    assert handoff.live() == 0
    detach(model)
    assert all(originals[name] is module for name, module in model.named_modules())
    assert torch.equal(loss_and_gradients(model)[1], gradients)


def test_gemma_norms_that_feed_the_residual_stream_stay():
    report = attach(tuned("Gemma2"))
    assert report.skipped["base_model.model.model.layers.0.post_attention_layernorm"] == "its output is read by add"


def test_models_without_such_parts_are_left_alone():
    torch.manual_seed(0)
    model = hf.OPTForCausalLM(hf.OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64))
    model = get_peft_model(model, NVFP4LoraConfig(target_modules="all-linear"))
    assert attach(model).fused == {}
    bf16 = get_peft_model(
        hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), NVFP4LoraConfig(target_modules="all-linear", backend="bf16")
    )
    assert attach(bf16).skipped == {"(model)": "no linear is frozen in nvfp4"}


def test_a_run_that_fails_is_reported_and_nothing_breaks():
    model = tuned("Llama")

    def broken():
        raise RuntimeError("no such input")

    report = attach(model, run=broken)
    assert "no such input" in report.skipped["base_model.model.model.layers.0.input_layernorm"]
    assert not any(isinstance(m, NVFP4RMSNorm) for m in model.modules())
    assert torch.isfinite(model(input_ids=IDS, labels=IDS).loss)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("terms", [1, 2])
def test_norm_gradient_is_the_documented_formula(terms, plus_one):
    x, gamma, dy = torch.randn(5, 96, requires_grad=True), torch.rand(96) + 0.5, torch.randn(5, 96)
    y, *_ = RMSNormQuantize.apply(x, gamma, None, 1e-6, plus_one, terms)
    y.backward(dy)
    w, rstd = (gamma + plus_one).double(), 1 / (x.detach().double().square().mean(1, keepdim=True) + 1e-6).sqrt()
    d, g = y.detach().double(), dy.double()
    expected = rstd * (w * g - d / w * (g * d).mean(1, keepdim=True))
    # FP32 arithmetic of about ten operations on values up to 10: 1e-5
    torch.testing.assert_close(x.grad.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gated_gradients_are_those_at_the_kept_codes(act):
    gate, up, dh = (torch.randn(5, 96) for _ in range(3))
    a, b = gate.clone().requires_grad_(), up.clone().requires_grad_()
    h, *_ = GatedQuantize.apply(a, b, None, act, 1)
    h.backward(dh)
    g, u = (reference.dequantize(reference.quantize(t, ACTIVATION)).double().requires_grad_() for t in (gate, up))
    function = F.silu if act == "silu" else lambda z: F.gelu(z, approximate="tanh")
    (function(g) * u).backward(dh.double())
    # sigmoid's relative error is 2e-6 at most, values up to 10
    torch.testing.assert_close(a.grad.double(), g.grad, atol=2e-5, rtol=0)
    torch.testing.assert_close(b.grad.double(), u.grad, atol=2e-5, rtol=0)
    exact = (function(gate) * up).double()
    assert ((h.detach().double() - exact).norm() / exact.norm()).item() < 0.12  # one NVFP4 term: 9.5 % on Gaussian data


def test_checkpointing_changes_no_bit():
    model = tuned("Llama", lora_dropout=0.1).train()
    attach(model)
    torch.manual_seed(1)
    plain = loss_and_gradients(model)
    for layer in model.base_model.model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kw: checkpoint(forward, *args, use_reentrant=False, **kw)
    torch.manual_seed(1)
    again = loss_and_gradients(model)
    assert plain[0] == again[0] and torch.equal(plain[1], again[1])
    assert handoff.live() == 0


def test_the_residual_stream_and_gate_up_are_not_kept():
    """Per token and layer in FP32: without fusing, norm inputs, gate, up and their product are saved dense."""
    sizes = {}
    for fuse in (False, True):
        model = tuned("Llama", accuracy="paper")
        if fuse:
            attach(model)
        own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, own=own, kept=kept: (
                kept.setdefault(t.untyped_storage().data_ptr(), t) if t.untyped_storage().data_ptr() not in own else t
            ),
            lambda t: t,
        ):
            model.base_model.model.model(input_ids=IDS)
        sizes[fuse] = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert sizes[True] < 0.5 * sizes[False], sizes


def test_copies_pickles_and_merges(tmp_path):
    model = tuned("Llama")
    attach(model)
    model.eval()
    with torch.no_grad():
        logits = model(IDS).logits
        assert torch.equal(copy.deepcopy(model)(IDS).logits, logits)
        torch.save(model, tmp_path / "model.pt")
        assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(IDS).logits, logits)
    merged = model.merge_and_unload()
    assert not any(isinstance(m, NVFP4RMSNorm | FusedGatedMLP) for m in merged.modules())
    assert type(merged.model.layers[0].mlp) is hf.models.llama.modeling_llama.LlamaMLP


def test_row_sum_does_not_depend_on_the_order():
    x = torch.randn(64, 1000) * torch.logspace(-6, 6, 1000)
    whole = x[:, :992]
    moved = whole.view(64, 62, 16)[:, torch.randperm(62)].reshape(64, 992)
    assert torch.equal(fused_reference.row_sum(whole), fused_reference.row_sum(moved))
    exact = x.double().sum(1)
    assert ((fused_reference.row_sum(x).double() - exact).abs() <= 2**-20 * x.double().abs().sum(1)).all()
