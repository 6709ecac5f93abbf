"""Situations that broke other people's 4-bit training while it ran: what changes between steps, heads and ties. (The others, and
what is compared: test_traps.py.)"""

import copy
import threading

import pytest
import torch
from _assertions import assert_same_bits
from _traps import IDS, Lone, assert_same_gradients, assert_same_step, gradients, packed_bytes, train_step, tuned
from conftest import tiny_llama
from peft import LoraConfig

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers


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
    assert_same_gradients(packed_bytes(model), before)  # the same bits by name


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
            with (torch.inference_mode, torch.no_grad, torch.enable_grad)[turn % 3]():
                got[i].append(model(input_ids=inputs[i]).logits.detach())

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
