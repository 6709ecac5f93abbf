"""``memory="small"`` on backends that compute in BF16: the forward's bits, the gradients' direction, and what is kept."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from _dataflow_models import IDS, bytes_for_backward, loss_and_gradients
from _dataflow_models import tuned as random_adapter
from torch.utils.checkpoint import checkpoint

from peft_nvfp4 import NVFP4LoraConfig, detach
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.autograd.frozen_linear import Branch
from peft_nvfp4.autograd.lora import lora_branch
from peft_nvfp4.fusion.attach import Report
from peft_nvfp4.fusion.compressed import CompressedGate, CompressedNorm
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION

by_backend = pytest.mark.parametrize("backend", ["bf16", "nf4"])


def tuned(backend, memory="small", family="Llama", **settings):
    return random_adapter(family, fused=True, backend=backend, memory=memory, **settings).train()


def step(model, seed=1):
    torch.manual_seed(seed)
    return loss_and_gradients(model)


def kept_bytes(model):
    base = model.get_base_model().model
    return bytes_for_backward(model, lambda: base(input_ids=IDS, use_cache=False).last_hidden_state)[1]


@by_backend
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_the_forward_keeps_its_bits_and_the_gradients_their_direction(backend, dropout, family):
    """Codes differ from values by 9.5 % (one term, Gaussian); a gradient passes two norms and one MLP per layer: over two layers
    the cosine stays above 1 - 5 * 0.1**2."""
    loss, gradients = step(tuned(backend, "fast", family, lora_dropout=dropout))
    model = tuned(backend, family=family, lora_dropout=dropout)
    fused = set(model.base_model.nvfp4_report.fused.values())
    assert fused - {"rotary embedding"} == {"RMSNorm, codes kept", "gated MLP, codes kept"}
    compressed_loss, compressed = step(model)
    assert loss == compressed_loss
    assert not torch.equal(gradients, compressed)
    assert F.cosine_similarity(gradients, compressed, 0) > 0.95
    assert activation_cache.live() == 0


@by_backend
def test_a_fraction_of_the_bytes_is_kept(backend):
    """In FP32: codes are 4.5 of 32 bits; attention's own state (q, k, v and its output) stays."""
    assert kept_bytes(tuned(backend)) < 0.45 * kept_bytes(tuned(backend, "fast"))


def test_without_fusing_only_the_branches_compress():
    assert tuned("bf16", "fast").base_model.nvfp4_report == Report()
    model = detach(tuned("bf16"))
    assert step(model)[0] == step(tuned("bf16", "fast"))[0]
    assert kept_bytes(tuned("bf16")) < kept_bytes(model) < kept_bytes(tuned("bf16", "fast"))


def test_branch_gradients_are_those_at_the_kept_codes():
    x = torch.randn(5, 96)
    a, b, dy = torch.randn(4, 96, requires_grad=True), torch.randn(8, 4, requires_grad=True), torch.randn(5, 8)
    q = reference.quantize(x, ACTIVATION)
    leaf = x.clone().requires_grad_()
    y = lora_branch(leaf, Branch(a, b, 2.0, 0.0), q)
    y.backward(dy)
    g = dy.double() @ (2.0 * b.detach().double())
    # FP32 sums of at most 96 products of values up to about 10: 1e-4
    torch.testing.assert_close(
        y.detach().double(), 2.0 * x.double() @ a.detach().double().T @ b.detach().double().T, atol=1e-3, rtol=0
    )
    torch.testing.assert_close(a.grad.double(), g.T @ reference.dequantize(q).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(leaf.grad.double(), g @ a.detach().double(), atol=1e-4, rtol=0)
    h = x.double() @ a.detach().double().T
    torch.testing.assert_close(b.grad.double(), 2.0 * dy.double().T @ h, atol=1e-3, rtol=0)


def test_norm_and_gate_take_their_gradients_at_the_codes():
    x, gamma, dy = torch.randn(5, 96, requires_grad=True), torch.rand(96) + 0.5, torch.randn(5, 96)
    norm = torch.nn.RMSNorm(96, eps=1e-6)
    norm.weight.data.copy_(gamma)
    y, *codes = CompressedNorm.apply(x, gamma, norm.forward, 1e-6, False)
    assert torch.equal(y, norm(x.detach()))
    y.backward(dy)
    d, g = reference.dequantize(reference.quantize(y.detach(), ACTIVATION)).double(), dy.double()
    rstd = 1 / (x.detach().double().square().mean(1, keepdim=True) + 1e-6).sqrt()
    expected = rstd * (gamma.double() * g - d / gamma.double() * (g * d).mean(1, keepdim=True))
    torch.testing.assert_close(x.grad.double(), expected, atol=1e-5, rtol=0)  # about ten FP32 operations on values up to 10
    gate, up, dh = (torch.randn(5, 96) for _ in range(3))
    a, b = gate.clone().requires_grad_(), up.clone().requires_grad_()
    h, *_ = CompressedGate.apply(a, b, "silu")
    assert torch.equal(h, F.silu(gate) * up)
    h.backward(dh)
    kept = [reference.dequantize(reference.quantize(t, ACTIVATION)).double().requires_grad_() for t in (gate, up)]
    (F.silu(kept[0]) * kept[1]).backward(dh.double())
    torch.testing.assert_close(a.grad.double(), kept[0].grad, atol=2e-5, rtol=0)  # the sigmoid's relative error is 2e-6
    torch.testing.assert_close(b.grad.double(), kept[1].grad, atol=2e-5, rtol=0)


@by_backend
def test_checkpointing_changes_no_bit_and_evaluation_no_logit(backend):
    model = tuned(backend, lora_dropout=0.1)
    plain = step(model)
    for layer in model.get_base_model().model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kw: checkpoint(forward, *args, use_reentrant=False, **kw)
    again = step(model)
    assert plain[0] == again[0] and torch.equal(plain[1], again[1])
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS).logits, tuned(backend, "fast").eval()(IDS).logits)


def test_merging_and_a_second_adapter():
    model = tuned("bf16")
    model.add_adapter("other", NVFP4LoraConfig(r=4, target_modules="all-linear", backend="bf16"))  # the base stays as it is
    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].mlp) is hf.models.llama.modeling_llama.LlamaMLP
