"""Attaching the fused producers to models: hooks, modes and reports are as without. (What they compute: test_families.py.)"""

import copy

import torch
import transformers as hf
from _dataflow_models import IDS, loss_and_gradients, tuned
from torch import nn

from peft_nvfp4 import attach, dequantize_model, detach, freeze_model
from peft_nvfp4.fusion import rope
from peft_nvfp4.fusion.attach import attached
from peft_nvfp4.fusion.norm import NVFP4RMSNorm


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
    for patch in list(rope._PATCHES):  # models of other tests that somebody holds
        for other in list(patch.models):
            rope.detach_rope(other)
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
