"""A step as long sequences get it, with everything that they get at once: checkpoints on the host, MLPs and the last norm in
tiles, attention's backward by heads, embedding and head at rest, weights on the host. Its gradients against a step with none of
that: the same bits where sums keep their order, within the bound of another order elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from _offloaded import tuned
from test_host_checkpoints import gradients

from peft_nvfp4 import enable_host_checkpoints, enable_offload, host_checkpoint_status, offload_status
from peft_nvfp4.autograd import long_attention
from peft_nvfp4.fusion import mlp as fused_mlp
from peft_nvfp4.fusion.attach import attach
from peft_nvfp4.training import host_checkpoints, packed_attention, resting_weights

TOKENS, TILE, LAYERS = 20, 8, 2
U = 2.0**-24
IDS = torch.randint(0, 128, (1, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def long_sequences(monkeypatch):
    """Twenty tokens are many, the device is short of memory, and attention has PyTorch's kernel for a CPU."""
    calls = {"tiles": 0, "heads": 0}

    def rows(width):
        calls["tiles"] += 1
        return TILE

    def forward(q, k, v, scale):
        with torch.no_grad():
            return _attention(q, k, v, scale), q.new_zeros(q.shape[0], q.shape[2], q.shape[1]), torch.empty(0), torch.empty(0)

    def backward(gradient, q, k, v, output, logsumexp, seed, offset, scale):
        calls["heads"] += 1
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(_attention(*inputs, scale), inputs, gradient)

    monkeypatch.setattr(fused_mlp, "tile_rows", rows)
    monkeypatch.setattr(host_checkpoints, "norm_rows", rows)
    monkeypatch.setattr(resting_weights, "free_bytes", lambda device: 0)
    monkeypatch.setattr(packed_attention, "can_be_grouped", lambda *args: True)
    monkeypatch.setattr(long_attention, "flash_forward", forward)
    monkeypatch.setattr(long_attention, "flash_backward", backward)
    return calls


def _attention(q, k, v, scale):
    """Causal, of (B, S, H, D), as transformers calls it."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def checkpointed(**settings):
    model = tuned("nvfp4 transient", None, LAYERS, **settings)
    attach(model, recompute_mlp=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def magnitudes(model, layer: int) -> dict[str, torch.Tensor]:
    """Sum over the tokens of |gradient of the token|, of the adapters of a layer's MLP: a token's is a single outer product, so
    this is the sum of the magnitudes of the products that a gradient adds. Each token by itself: the gradient of the layer's
    output is zero at the others."""
    decoder, token = model.get_base_model().model, 0
    after = decoder.layers[layer + 1] if layer + 1 < LAYERS else decoder.norm

    def alone(module, args):
        kept = F.one_hot(torch.tensor(token), TOKENS)[None, :, None]
        args[0].register_hook(lambda gradient: gradient * kept)

    handle, sums = after.register_forward_pre_hook(alone), {}
    for token in range(TOKENS):  # noqa: B007  read by alone
        for name, gradient in gradients(model, IDS)[1].items():
            if f"layers.{layer}.mlp." in name:
                sums[name] = sums.get(name, 0) + gradient.abs()
    handle.remove()
    return sums


@pytest.mark.parametrize("accuracy", ["paper", "high"])
@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_gradients_are_those_of_a_step_without(long_sequences, accuracy, offload):
    """A gradient of an MLP's adapter adds M = TOKENS products. In any order, and over tiles in FP32, the sum is off by (M - 1) u
    times the sum of their magnitudes at most (to first order in u = 2^-24): two orders differ by twice that. All other numbers
    are computed row by row, or head by head, from the same numbers: the loss and the gradients of attention's adapters, which dx
    of the MLPs and of the norms goes into, are the same bits."""
    plain, model = checkpointed(accuracy=accuracy), checkpointed(accuracy=accuracy)
    if offload:
        enable_offload(model)
    enable_host_checkpoints(model)
    (loss, exact), (got_loss, got) = gradients(plain, IDS), gradients(model, IDS)
    status = host_checkpoint_status(model)
    assert (status.passes, status.rested) == (1, 2) and all(long_sequences.values())
    assert offload_status(model).copies > 0 or not offload
    assert got_loss == loss and got.keys() == exact.keys()
    sums = {name: n for layer in range(LAYERS) for name, n in magnitudes(plain, layer).items()}
    assert len(sums) == LAYERS * 3 * 2
    for name, gradient in exact.items():
        if name in sums:
            bound = 2 * (TOKENS - 1) * U * sums[name]
            assert ((got[name] - gradient).abs() <= bound).all(), name
            assert gradient.norm() > 1e4 * bound.norm(), "the bound is far below the gradient"
        else:
            assert torch.equal(got[name], gradient), name
