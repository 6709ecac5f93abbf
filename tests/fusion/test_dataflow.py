"""Attaching the fused producers to models: nothing of the function changes, detaching puts everything back, and hooks, modes,
checkpointing and copies work as without."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from _dataflow_models import FAMILIES, IDS, loss_and_gradients, tuned
from torch import nn

from peft_nvfp4 import attach, dequantize_model, detach, freeze_model
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.fusion.attach import attached
from peft_nvfp4.fusion.norm import NVFP4RMSNorm


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
    assert sorted(report.fused.values()) == ["RMSNorm+quantise"] * 4 + ["gated MLP"] * 2 + ["rotary embedding"]
    assert any("norm" in name and "read by" in why for name, why in report.skipped.items())
    fused_loss, fused_gradients = loss_and_gradients(model)
    assert list(model.state_dict()) == keys
    assert fused_loss == pytest.approx(loss, rel=1e-4)
    assert F.cosine_similarity(fused_gradients, gradients, 0) > 0.97
    assert activation_cache.live() == 0
    detach(model)
    assert all(originals[name] is module for name, module in model.named_modules())
    assert torch.equal(loss_and_gradients(model)[1], gradients)


def test_hooks_and_patched_forwards_survive():
    """Hooks of norms and MLPs fire once, whether they were there before or come later; accelerate's patched forwards stay."""
    model, calls = tuned("Llama"), []
    layer = model.base_model.model.model.layers[0]
    patched, forward = layer.self_attn.q_proj, layer.self_attn.q_proj.forward
    patched.forward = lambda *args, **kwargs: calls.append("q") or forward(*args, **kwargs)
    before = vars(patched)["forward"]
    for name in ("input_layernorm", "mlp"):
        getattr(layer, name).register_forward_hook(lambda *args, name=name: calls.append(name))
    attach(model)
    assert calls == ["input_layernorm", "mlp"], "the two-token run, which linears take no part in"
    assert vars(patched)["forward"] is before
    late = layer.mlp.register_forward_pre_hook(lambda *args: calls.append("late"))
    for state in ("attached", "detached"):
        calls.clear()
        model(IDS)
        assert calls == ["input_layernorm", "q", "late", "mlp"], state
        detach(model)
    late.remove()
    attach(model)
    calls.clear()
    model(IDS)
    assert calls == ["input_layernorm", "q", "mlp"]


def test_training_modes_are_kept():
    model = tuned("Llama").train()
    model.base_model.model.model.layers[1].eval()
    model.base_model.model.model.layers[0].mlp.down_proj.eval()
    before = {name: m.training for name, m in model.named_modules()}
    attach(model)
    assert {name: m.training for name, m in model.named_modules()} == before
    detach(model)
    assert {name: m.training for name, m in model.named_modules()} == before
    attach(model)
    model.train()
    detach(model)
    assert all(m.training for m in model.modules())


def test_attaching_twice_is_attaching_once():
    model = tuned("Llama")
    first, expected = attach(model), loss_and_gradients(model)
    assert attach(model) == first and sum(isinstance(m, NVFP4RMSNorm) for m in model.modules()) == 4
    again = loss_and_gradients(model)
    assert again[0] == expected[0] and torch.equal(again[1], expected[1])


def test_linears_that_read_an_edited_tensor_are_no_site():
    class Edits(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 32) for _ in range(3))

        def forward(self, x):
            x = x * 1.0
            q = self.q_proj(x)
            x.add_(1)
            return q, self.k_proj(x), self.v_proj(x)

    model, x = freeze_model(Edits()), torch.randn(3, 64)
    assert attach(model, run=lambda: model(x)).groups == [["k_proj", "v_proj"]]


def test_rotary_embeddings_come_and_go():
    gc.collect()  # models of other tests,
    detach(nn.Identity())  # and what they left
    model, modeling = tuned("Llama"), hf.models.llama.modeling_llama
    original = modeling.apply_rotary_pos_emb
    attach(model)
    assert modeling.apply_rotary_pos_emb is not original
    model.merge_and_unload()  # of the model inside, which detaches what was attached from outside
    assert modeling.apply_rotary_pos_emb is original


def test_a_run_that_fails_is_reported_and_nothing_breaks():
    model = tuned("Llama")

    def broken():
        raise RuntimeError("no such input")

    report = attach(model, run=broken)
    assert "no such input" in report.skipped["base_model.model.model.layers.0.input_layernorm"]
    assert "no such input" in report.skipped["(model)"] and report.groups == []
    assert not any(isinstance(m, NVFP4RMSNorm) for m in model.modules())
    assert torch.isfinite(model(input_ids=IDS, labels=IDS).loss)


def test_dequantising_detaches():
    """A norm must not quantise for linears that are dense again."""
    model = freeze_model(tuned("Llama").unload()).requires_grad_(False)
    with torch.no_grad():
        expected = dequantize_model(copy.deepcopy(model))(IDS).logits
        attach(model)
        assert torch.equal(dequantize_model(model)(IDS).logits, expected)
    assert not attached(model)
