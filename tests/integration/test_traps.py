"""Situations that broke other people's 4-bit training: each of them once, on whole models, for every backend.

Comparisons are bitwise wherever both sides compute the same function. The tests of the parts (a zero block, a token with NaN, a
strided gradient, ...) are with the parts; here the question is whether something in between loses the property.
"""

import copy
import threading

import pytest
import torch
from _assertions import assert_same_bits
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers

IDS = torch.arange(24).view(2, 12) * 5 % 128
HIDDEN = 64


def tuned(backend, base=None, *, dtype=torch.float32, autocast_adapter_dtype=True, **settings):
    """A tiny Llama of one layer with an adapter that does something from the start."""
    base = tiny_llama(dtype, num_hidden_layers=1) if base is None else base
    torch.manual_seed(1)
    settings = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "backend": backend, **settings}
    if gradients := settings.pop("gradients", None):
        freeze_model(base, backend, gradients=gradients, progress=False)
    return get_peft_model(base, NVFP4LoraConfig(**settings), autocast_adapter_dtype=autocast_adapter_dtype)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train_step(model, ids=IDS, **inputs):
    """Loss and gradients, from none."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_gradients(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_same_bits(got[name], gradient, name)


def assert_same_step(got, expected):
    assert_same_bits(got[0], expected[0], "loss")
    assert_same_gradients(got[1], expected[1])


def packed_bytes(model):
    return {f"{n}.{k}": t.clone() for n, layer in frozen_layers(model) for k, t in layer.packed_tensors().items()}


def assert_same_bytes(model, before):
    after = packed_bytes(model)
    assert after.keys() == before.keys()
    for name in before:
        assert_same_bits(after[name], before[name], name)


# ---------------------------------------------------------------------------------------------- zeros, NaN, unwritten memory


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


# ---------------------------------------------------------------------------------------------- shapes and strides of inputs


class Lone(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 44), nn.Linear(44, 64)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)], ids=str)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_empty_batches(backend, shape, dora):
    """A rank without samples (last batch of a shard) computes, and its adapters get gradients of zero, so that an all-reduce
    finds them. (transformers' attention itself refuses a batch of none.)"""
    model = tuned(backend, Lone(), target_modules=["up_proj", "down_proj"], use_dora=dora)
    x = torch.zeros(shape, requires_grad=True)
    y = model(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    for name, p in trainable:
        assert p.grad is not None and not p.grad.any(), name


def test_a_sequence_of_one_token(backend):
    """Decoding's first step. One row takes another GEMM than twelve, which may sum in another order: a few units of FP32
    roundoff, and no code of this input lies on a threshold that they could move."""
    model = tuned(backend)
    whole, first = model(input_ids=IDS).logits[:, :1], model(input_ids=IDS[:, :1]).logits
    torch.testing.assert_close(first, whole, rtol=0, atol=64 * 2**-24 * whole.abs().max().item())
    _, grads = train_step(model, IDS[:, :3])  # two targets: a single one reads one token, where attention has no choice
    assert all(g.isfinite().all() and g.any() for g in grads.values())


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


# ---------------------------------------------------------------------------------------------- dtypes


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


@pytest.mark.parametrize("cast", ["to bf16 and back", "half and float", "to device", "type"])
def test_casting_a_model_leaves_the_packed_bytes(backend, cast):
    """PEFT, TRL and accelerate cast whole models; scales must not be rounded on the way. (A bf16 base is dense, and in BF16.)"""
    model = tuned(backend, tiny_llama(torch.bfloat16, num_hidden_layers=1).float())
    before = packed_bytes(model)
    weights = {n: layer.dequantize(torch.float32) for n, layer in frozen_layers(model)}
    if cast == "to bf16 and back":
        model = model.to(torch.bfloat16).to(torch.float32)
    elif cast == "half and float":
        model = model.half().float() if backend != "bf16" else model
    elif cast == "to device":
        model = model.to("cpu")
    else:  # converts integers as well
        model = model.type(torch.bfloat16).type(torch.float32)
    if backend == "nvfp4":
        assert_same_bytes(model, before)
    for name, layer in frozen_layers(model):
        assert_same_bits(layer.dequantize(torch.float32), weights[name], name)
    loss, grads = train_step(model)
    assert loss.isfinite() and all(g.any() for g in grads.values())


def test_fp64_computes_or_raises(backend):
    """bitsandbytes 0.50 takes FP64 for bytes of another kind and returns garbage without a word."""
    expected, _ = train_step(tuned(backend))
    try:
        loss, _ = train_step(tuned(backend).double())
    except (ValueError, RuntimeError, TypeError) as error:
        assert "float64" in str(error)
    else:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


# ---------------------------------------------------------------------------------------------- what changes while training


def test_gradient_reaches_the_embedding_through_every_base_layer(backend):
    """transformers#46736: a base without an autograd path dropped upstream gradients without a word; TE#3281: stochastic
    rounding returned zeros. Adapters are off, so the only way is through the frozen weights. Against the dense model: weights,
    inputs and gradients of 4 bits (about 10 % error each) leave the direction of one layer's gradient well above 0.9."""
    dense = tiny_llama(num_hidden_layers=1)
    embeds = dense.get_input_embeddings()(IDS).detach()
    grads = {}
    for name, model in (("dense", dense), ("to nearest", tuned(backend)), ("stochastic", tuned(backend, gradients="nvfp4_sr"))):
        x = embeds.clone().requires_grad_()
        with model.disable_adapter() if name != "dense" else torch.enable_grad():
            model(inputs_embeds=x, labels=IDS).loss.backward()
        grads[name] = x.grad.flatten()
    for name in ("to nearest", "stochastic"):
        assert torch.cosine_similarity(grads[name], grads["dense"], dim=0) > 0.9, name


def test_changing_an_adapter_between_forward_and_backward_raises(backend):
    """Gradients at values that are gone would be wrong without a word."""
    model = tuned(backend)
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "down_proj.lora_A" in n).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice(backend):
    model = tuned(backend)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward()
    assert_same_gradients(gradients(model), first)


@pytest.mark.parametrize("when", ["before the adapter", "after the adapter"])
def test_reentrant_checkpointing_with_frozen_inputs(backend, when):
    """transformers#42489, peft#1142: no input needs a gradient, so reentrant checkpointing computed none at all."""
    expected = train_step(tuned(backend, tiny_llama()).train())
    base = tiny_llama()
    if when == "before the adapter":
        base.gradient_checkpointing_enable({"use_reentrant": True})
    model = tuned(backend, base).train()
    if when == "after the adapter":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    assert model.is_gradient_checkpointing
    assert len(expected[1]) == 28
    assert_same_step(train_step(model), expected)


def test_evaluating_in_between_changes_no_training_step(backend):
    """Forward and generation in inference mode, without gradients and in eval mode must leave nothing that training finds."""
    expected = train_step(tuned(backend).train())
    model = tuned(backend).train()
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        model.eval()
        with mode():
            model(input_ids=IDS)
            model.generate(IDS, max_new_tokens=2, do_sample=False)
        model.train()
        assert_same_step(train_step(model), expected)


def test_tensors_of_inference_mode_do_not_enter_training_silently(backend):
    """A model frozen within ``torch.inference_mode()`` consists of tensors that autograd may not keep: PyTorch says so."""
    with torch.inference_mode():
        model = tuned(backend)
        inside = model(input_ids=IDS).logits
    with torch.no_grad():
        assert_same_bits(model(input_ids=IDS).logits, inside.clone(), "logits")
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        train_step(model)


def test_merging_in_between_changes_no_training_step(backend):
    """peft#2501: reinforcement learning merges for generation and unmerges for the next step."""
    model, other = tuned(backend), tuned(backend)
    for step in range(3):
        optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, other)]
        other.merge_adapter(safe_merge=bool(step % 2))
        other.generate(IDS, max_new_tokens=2, do_sample=False)
        other.unmerge_adapter()
        assert_same_step(train_step(other), train_step(model))
        for optimizer in optimizers:
            optimizer.step()


def test_adapters_that_come_and_go_between_steps(backend):
    model, alone = tuned(backend), tuned(backend)
    expected = train_step(alone)
    before = packed_bytes(model)
    torch.manual_seed(2)
    other = dict(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model.add_adapter("other", NVFP4LoraConfig(backend=backend, **other))
    model.set_adapter("other")
    loss, grads = train_step(model)
    assert loss != expected[0] and len(grads) == 4 and all(".other." in name for name in grads)
    model.delete_adapter("other")
    model.set_adapter("default")
    assert_same_step(train_step(model), expected)
    model.add_adapter("plain", LoraConfig(**other))
    model.set_adapter("plain")
    assert len(train_step(model)[1]) == 4
    model.set_adapter("default")
    model.delete_adapter("plain")
    assert_same_step(train_step(model), expected)
    assert_same_bytes(model, before)


def test_an_adapter_deleted_between_forward_and_backward(backend):
    model = tuned(backend)
    _, expected = train_step(model)
    model.zero_grad()
    kept = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    model.add_adapter("other", NVFP4LoraConfig(backend=backend, r=2, target_modules="all-linear"))
    model.delete_adapter("default")
    loss.backward()
    assert_same_gradients({n: p.grad for n, p in kept.items()}, expected)


def test_requires_grad_that_flips(backend):
    """Norms that start and stop training (unfreezing schedules), one factor of an adapter that is frozen for a while."""
    model = tuned(backend)
    expected = train_step(model)
    norms = {n: p for n, p in model.named_parameters() if "norm" in n}
    for p in norms.values():
        p.requires_grad_(True)
    loss, grads = train_step(model)
    assert_same_bits(loss, expected[0], "loss")
    assert norms.keys() <= grads.keys() and all(grads[n].any() for n in norms)
    for p in norms.values():
        p.requires_grad_(False)
        p.grad = None
    factors = [p for n, p in model.named_parameters() if "lora_A" in n]
    for p in factors:
        p.requires_grad_(False)
        p.grad = None
    loss, grads = train_step(model)
    assert_same_bits(loss, expected[0], "loss")
    assert_same_gradients(grads, {n: g for n, g in expected[1].items() if "lora_B" in n})
    for p in factors:
        p.requires_grad_(True)
    assert_same_step(train_step(model), expected)


def test_threads_share_a_model(backend):
    """A server's threads: what one hands from a norm to its linears, the other must not find."""
    model = tuned(backend).eval()
    inputs = [IDS, IDS.flip(1), IDS.roll(3, 1)]
    expected = [model(input_ids=ids).logits.detach() for ids in inputs]
    got = [[] for _ in inputs]

    def run(i):
        for turn in range(6):
            with torch.inference_mode() if turn % 2 else torch.no_grad():
                got[i].append(model(input_ids=inputs[i]).logits)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, outputs in enumerate(got):
        assert len(outputs) == 6
        for logits in outputs:
            assert_same_bits(logits.clone(), expected[i], f"thread {i}")


def test_parameters_handed_in_from_outside(backend):
    """``functional_call``: adapters that are no attributes of the model (meta-learning, ensembles)."""
    model = tuned(backend).eval()
    doubled = {n: p.detach() * 2 for n, p in model.named_parameters() if "lora_" in n}
    got = torch.func.functional_call(model, doubled, kwargs={"input_ids": IDS}).logits
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in changed.named_parameters():
            if "lora_" in name:
                p.mul_(2)
    assert_same_bits(got, changed(input_ids=IDS).logits, "logits")
    assert not torch.equal(got, model(input_ids=IDS).logits)


# ---------------------------------------------------------------------------------------------- heads and ties


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_all_linear_leaves_the_head_alone(backend, tie):
    """vllm#45102 and others: a head quantised, or adapted, by "all-linear"."""
    base = tiny_llama(num_hidden_layers=1, tie_word_embeddings=tie)
    head = base.lm_head.weight.detach().clone()
    model = tuned(backend, base)
    assert type(model.base_model.model.lm_head) is nn.Linear
    assert_same_bits(model.base_model.model.lm_head.weight, head, "lm_head")
    assert len(frozen_layers(model)) == 7
    tied = model.base_model.model.lm_head.weight is model.base_model.model.model.embed_tokens.weight
    assert tied == tie
    merged = model.merge_and_unload()
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tie


def test_ties_after_modules_to_save(backend):
    """peft#2777: embedding and head drifted apart once one was trained in full. With ``ensure_weight_tying`` they stay one."""
    base = tiny_llama(num_hidden_layers=1, tie_word_embeddings=True)
    model = tuned(backend, base, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    inner = model.base_model.model
    pair = [m.modules_to_save["default"].weight for m in (inner.model.embed_tokens, inner.lm_head)]
    assert pair[0] is pair[1] and pair[0].requires_grad
    before = pair[0].detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train_step(model)
    optimizer.step()
    assert not torch.equal(before, pair[0])
    assert inner.model.embed_tokens.modules_to_save["default"].weight is inner.lm_head.modules_to_save["default"].weight
    merged = model.merge_and_unload()
    assert_same_bits(merged.lm_head.weight, merged.model.embed_tokens.weight, "tied weights after merging")
    assert_same_bits(merged.lm_head.weight, pair[0].detach(), "what was trained")


def test_a_head_trained_in_full_beside_a_frozen_base(backend):
    """Untied on purpose: the embedding stays, the copy of the head moves."""
    base = tiny_llama(num_hidden_layers=1, tie_word_embeddings=True)
    model = tuned(backend, base, modules_to_save=["lm_head"])
    inner = model.base_model.model
    _, grads = train_step(model)
    trained = [n for n in grads if "lora_" not in n]
    assert trained == ["base_model.model.lm_head.modules_to_save.default.weight"]
    assert not inner.model.embed_tokens.weight.requires_grad
    assert len(frozen_layers(model)) == 7


def test_one_linear_called_twice_in_a_forward(backend):
    """Shared modules (recurrent depth): two calls, one set of packed weights, gradients of both."""

    class Twice(Lone):
        def forward(self, x):
            return super().forward(super().forward(x))

    model = tuned(backend, Twice(), target_modules=["up_proj", "down_proj"])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    model(x).sum().backward()
    both = gradients(model)
    inner = copy.deepcopy(model)
    inner.zero_grad()
    y = Lone.forward(inner.base_model.model, x.detach().requires_grad_())
    middle = y.detach().requires_grad_()
    Lone.forward(inner.base_model.model, middle).sum().backward()
    y.backward(middle.grad)
    # the same two contributions, added in the same order
    assert_same_gradients(gradients(inner), both)


def test_a_frozen_model_without_an_adapter_says_what_it_is(backend):
    """Full training of a packed model cannot work, and must not look as if it did."""
    model = freeze_model(tiny_llama(num_hidden_layers=1), backend, progress=False)
    for name, p in model.named_parameters():
        if p.is_floating_point() and "proj" not in name:
            p.requires_grad_(True)
    packed = [p for _, layer in frozen_layers(model) for p in layer.packed_tensors().values() if not p.is_floating_point()]
    for p in packed:
        with pytest.raises(RuntimeError, match="floating point"):
            p.requires_grad_(True)
    _, grads = train_step(model)
    assert "model.embed_tokens.weight" in grads and grads["model.embed_tokens.weight"].any()
