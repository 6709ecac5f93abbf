"""Situations that broke other people's 4-bit training: each of them once, on whole models, for every backend.

Comparisons are bitwise wherever both sides compute the same function. The tests of the parts (a zero block, a token with NaN, a
strided gradient, ...) are with the parts; here the question is whether something in between loses the property.
"""

import pytest
import torch
from _assertions import assert_same_bits
from _traps import HIDDEN, IDS, Lone, assert_same_step, gradients, train_step, tuned
from conftest import tiny_llama

from peft_nvfp4.quantization.freeze import frozen_layers


def test_weights_that_are_zero(backend):
    """ModelOpt#1633: scales of zero blocks became NaN. A matrix of zeros, one zero row of blocks, one zero block."""
    base = tiny_llama(num_hidden_layers=1)
    attention, mlp = base.model.layers[0].self_attn, base.model.layers[0].mlp
    with torch.no_grad():
        attention.o_proj.weight.zero_()
        mlp.up_proj.weight[3] = 0
        mlp.gate_proj.weight[5, 16:32] = 0
    model = tuned(backend, base)
    loss, grads = train_step(model)
    assert loss.isfinite() and all(g.isfinite().all() for g in grads.values())
    layers = {name.rsplit(".", 2)[-2]: layer for name, layer in frozen_layers(model)}  # without ".base_layer"
    assert not layers["o_proj"].dequantize().any()
    assert not layers["up_proj"].dequantize()[3].any() and layers["up_proj"].dequantize()[4].any()
    assert not layers["gate_proj"].dequantize()[5, 16:32].any() and layers["gate_proj"].dequantize()[5, :16].any()


def test_activations_that_are_zero(backend):
    """compressed-tensors#595: an amax of zero gave an infinite scale. Every input of every linear is zero here."""
    model = tuned(backend)
    zeros = torch.zeros(2, 5, HIDDEN, requires_grad=True)
    logits = model(inputs_embeds=zeros).logits
    assert not logits.any()
    logits.sum().backward()
    assert zeros.grad.isfinite().all() and zeros.grad.any()  # 1 / rms is 1 / sqrt(eps): large, and a number


def test_a_token_that_is_not_finite_is_seen_in_the_loss_and_spoils_no_other_sequence(backend):
    """accelerate#3983: a loss of 0 hid NaN. What is not finite must come out as NaN, in its own sequence only."""
    model = tuned(backend).eval()
    embeds = model.get_input_embeddings()(IDS).detach()
    clean = model(inputs_embeds=embeds).logits
    embeds[0, 3, 7] = float("nan")
    logits = model(inputs_embeds=embeds).logits
    assert logits[0, 3:].isnan().all()
    assert_same_bits(logits[1], clean[1], "the other sequence")
    assert model(inputs_embeds=embeds, labels=IDS).loss.isnan()


def test_memory_that_is_not_written_is_not_read(backend):
    """vllm#37564: padding that was allocated and not written contaminated rows. ``torch.empty`` gives NaN (255 in bytes) here,
    and the size 44 needs padding along K, forward and backward."""
    sizes = dict(num_hidden_layers=1, intermediate_size=44)
    expected = train_step(tuned(backend, tiny_llama(**sizes)))
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(8).isnan().all()
        got = train_step(tuned(backend, tiny_llama(**sizes)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_step(got, expected)


def test_channels_that_a_norm_switches_off(backend):
    """D / gamma of the norm's backward with gamma = 0 and with a subnormal one."""
    base = tiny_llama(num_hidden_layers=1)
    with torch.no_grad():
        for name, p in base.named_parameters():
            if "norm" in name:
                p[::3], p[1] = 0, 1e-42
    model = tuned(backend, base)
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeds, labels=IDS).loss.backward()
    assert all(g.isfinite().all() for g in gradients(model).values())
    assert embeds.grad.isfinite().all() and embeds.grad.any()


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)], ids=str)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_empty_batches(backend, shape, dora, dtype):
    """A rank without samples (last batch of a shard) computes, and its adapters get gradients of zero, so that an all-reduce
    finds them. (transformers' attention itself refuses a batch of none.)"""
    model = tuned(backend, Lone().to(dtype), target_modules=["up_proj", "down_proj"], use_dora=dora)
    x = torch.zeros(shape, dtype=dtype, requires_grad=True)
    y = model(x)
    assert y.shape == shape and y.dtype == dtype
    y.sum().backward()
    assert x.grad.shape == shape
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    for name, p in trainable:
        assert p.grad is not None and not p.grad.any(), name


def strided(kind, x):
    """x (2, 12, d) with other strides."""
    if kind == "every second of a longer sequence":
        longer = x.repeat_interleave(2, dim=1)
        return longer[:, ::2]
    if kind == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "channels first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "slice of wider rows":
        return torch.cat([x, torch.full_like(x, 7.0)], dim=-1)[..., : x.shape[-1]]
    return x[:1].expand_as(x)


@pytest.mark.parametrize(
    "kind", ["every second of a longer sequence", "transposed", "channels first", "slice of wider rows", "expanded"]
)
def test_inputs_that_are_views(backend, kind):
    model = tuned(backend)
    embeds = model.get_input_embeddings()(IDS).detach()
    view = strided(kind, embeds)
    assert not view.is_contiguous()
    steps = []
    for x in (view.contiguous(), view):
        model.zero_grad()
        loss = model(inputs_embeds=x, labels=IDS).loss
        loss.backward()
        steps.append((loss.detach(), gradients(model)))
    if kind != "channels first":
        return assert_same_step(steps[1], steps[0])
    # the residual stream keeps these strides, and PyTorch sums a strided row in another order: a few units of FP32 roundoff
    for name, gradient in steps[0][1].items():
        torch.testing.assert_close(steps[1][1][name], gradient, rtol=0, atol=64 * 2**-24 * gradient.abs().max().item(), msg=name)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("adapter", ["fp32 adapters", "adapters as the model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_dtypes_of_model_adapters_and_autocast(backend, dtype, adapter, autocast):
    """peft#2889, unsloth#4005: mixtures of dtypes failed in backward or gave adapters gradients of another dtype."""
    model = tuned(backend, dtype=dtype, autocast_adapter_dtype=adapter == "fp32 adapters")
    expected = torch.float32 if adapter == "fp32 adapters" else dtype
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    adapters = [(n, p) for n, p in model.named_parameters() if "lora_" in n]
    assert len(adapters) == 14
    for name, p in adapters:
        assert p.dtype == expected and p.grad.dtype == expected, name
        assert p.grad.isfinite().all() and p.grad.any(), name
    reference, _ = train_step(tuned(backend))
    # 16 bits in a few dozen layers' worth of roundings: well below a percent of a loss near log(128)
    assert out.loss.item() == pytest.approx(reference.item(), rel=1e-2)


def test_fp64_computes_or_raises(backend):
    """bitsandbytes 0.50 takes FP64 for bytes of another kind and returns garbage without a word."""
    expected, _ = train_step(tuned(backend))
    try:
        loss, _ = train_step(tuned(backend).double())
    except (ValueError, RuntimeError, TypeError) as error:
        assert "float64" in str(error)
    else:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
