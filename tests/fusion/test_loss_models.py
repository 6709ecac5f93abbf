"""The loss at supervised positions, attached to models of transformers: that they train as with their own loss, which models
cannot have it, what attaching leaves as it was, and the logits of a training output, computed when somebody reads them."""

import re
import threading

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from _assertions import unit
from _loss_models import EXACT, FAMILIES, SIZES, VOCABULARY, assert_same_step, batch, build, distance, step
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from peft_nvfp4.fusion import loss_attach
from peft_nvfp4.fusion.lazy_logits import LazyLogits
from peft_nvfp4.fusion.loss_attach import attach_loss, attach_loss_at_first_call, detach_loss, loss_report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_with_its_own_loss(family, dtype):
    """Every gradient. In BF16 the roundings are the same, except those of the trained head's gradient: FP32 sums of another order
    flip one bit here and there, of 2**-8 each."""
    model = build(family, dtype)
    expected = step(model)
    report = attach_loss(model)
    assert report.attached, report
    got = step(model)
    assert_same_step(got, expected, EXACT if dtype == torch.float32 else 2 * unit(dtype))
    assert type(got[0]) is type(expected[0]) and got[0].keys() == expected[0].keys()
    if family == "Mixtral":
        assert torch.equal(got[0].aux_loss, expected[0].aux_loss)
    for num_items in (5, torch.tensor(29)):
        inputs = {**batch(), "num_items_in_batch": num_items}
        assert_same_step(
            step(model, **inputs), step(detach_loss(model), **inputs), EXACT if dtype == torch.float32 else 2 * unit(dtype)
        )
        attach_loss(model)


def test_it_is_used(monkeypatch):
    """The comparisons above would also hold if nothing were attached."""
    calls, loss = [], loss_attach._head_loss
    monkeypatch.setattr(loss_attach, "_head_loss", lambda *args: calls.append(args) or loss(*args))
    model = build()
    step(model)
    attach_loss(model)
    tried = len(calls)
    step(model)
    assert len(calls) == tried + 1
    model.eval()(**batch())
    with torch.no_grad():
        model(**batch())
        assert len(calls) == tried + 2  # evaluation, where no gradient is asked for
        model.train()(**{**batch(), "labels": None})
        model(**batch(), return_dict=False)
        model(**batch(2, 8), logits_to_keep=8)
    assert len(calls) == tried + 2
    step(detach_loss(model))
    assert len(calls) == tried + 2 and type(model) is hf.LlamaForCausalLM and "_supervised_loss" not in model.__dict__


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_logits_of_evaluation_and_generation_are_bit_equal(family):
    model = build(family).eval()
    with torch.no_grad():
        expected, tokens = model(**batch()), model.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False)
        attach_loss(model)
        got = model(**batch())
        torch.testing.assert_close(got.loss, expected.loss)  # another order of the same sum
        assert torch.equal(got.logits, expected.logits) and isinstance(got.logits, torch.Tensor)
        assert torch.equal(model.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False), tokens)
    assert not model.training and "forward" not in model.lm_head.__dict__ and "_loss_function" not in model.__dict__


def test_labels_that_are_shifted_already_count_instead():
    """As context parallelism passes them: the last position has a label too."""
    model, inputs = build(), batch()
    inputs["shift_labels"] = inputs["labels"].roll(2, 0).roll(3, 1)
    attach_loss(model)
    assert_same_step(step(model, **inputs), step(detach_loss(model), **inputs))


class Biased(hf.LlamaForCausalLM):
    """Something between head and loss that no scale or cap is."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = logits + torch.arange(logits.shape[-1]) / 100
        return hf.modeling_outputs.CausalLMOutput(self.loss_function(logits, labels, self.config.vocab_size), logits)


class Regularised(hf.LlamaForCausalLM):
    """A second loss of all logits, past model.loss_function."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = self.loss_function(logits, labels, self.config.vocab_size) + 1e-3 * logits.logsumexp(-1).square().sum()
        return hf.modeling_outputs.CausalLMOutput(loss, logits)


class Inline(hf.LlamaForCausalLM):
    """As older code: its own cross_entropy."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return hf.modeling_outputs.CausalLMOutput(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


def custom_loss(logits, labels, vocab_size, **kwargs):
    return logits.square().mean()


def test_what_cannot_have_it_says_why_and_stays_as_it_was():
    reasons = {
        Biased(hf.LlamaConfig(**SIZES)): "more than a scale and a cap",
        Regularised(hf.LlamaConfig(**SIZES)): "its loss on random tokens differs",
        Inline(hf.LlamaConfig(**SIZES)): "random tokens failed|does not take its loss",
        hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16)
        ): "not a causal LM",
        hf.LlamaModel(hf.LlamaConfig(**SIZES)): "not a causal LM",
        nn.Linear(4, 4): "not a model of transformers",
    }
    custom, replaced = build(), build()
    custom.loss_function = custom_loss
    replaced.forward = lambda **kwargs: None
    for model, reason in {**reasons, custom: "its loss is custom_loss", replaced: "replaced its forward"}.items():
        before, attributes = type(model), set(model.__dict__)
        report = attach_loss(model)
        assert not report.attached and re.search(reason, str(report)), report
        assert type(model) is before and set(model.__dict__) == attributes


def test_attaching_draws_no_random_number():
    model = build()
    handle = model.model.register_forward_hook(lambda *_: torch.rand(1) and None)
    state = torch.get_rng_state()
    assert attach_loss(model).attached and torch.equal(torch.get_rng_state(), state)
    handle.remove()


def test_an_error_leaves_nothing_behind():
    model = build()
    attach_loss(model)
    with pytest.raises(IndexError):
        model(**{**batch(), "input_ids": torch.full((3, 11), VOCABULARY)})
    assert "forward" not in model.lm_head.__dict__ and "_loss_function" not in model.__dict__
    assert torch.is_tensor(model.eval()(**batch()).logits)


def test_a_hook_on_the_head_gets_logits():
    model, seen = build(), []
    attach_loss(model)
    handle = model.lm_head.register_forward_hook(lambda m, args, out: seen.append(out))
    output = model(**batch())
    assert torch.equal(seen[0], output.logits) and output.logits.shape == (3, 11, VOCABULARY)
    handle.remove()
    assert isinstance(model(**batch()).logits, LazyLogits)


class Moves(AlignDevicesHook):
    calls = 0

    def pre_forward(self, *args, **kwargs):
        self.calls += 1
        return super().pre_forward(*args, **kwargs)


def test_a_model_spread_over_devices_by_accelerate():
    """Its instances have forwards of their own, which move tensors: the head's must still be called, once a chunk."""
    model, inputs = build(), batch()
    expected = step(model, **inputs)
    moves = Moves(execution_device="cpu")
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    add_hook_to_module(model.lm_head, moves)
    report = attach_loss(model)
    assert report.attached and "own forward" in report.reason
    moves.calls = 0
    got = step(model, **inputs)
    assert moves.calls == 1 and isinstance(got[0].logits, LazyLogits)
    assert_same_step(got, expected)
    assert torch.equal(step(detach_loss(model), **inputs)[0].logits, expected[0].logits)


def test_lazy_logits_are_the_logits():
    model, inputs = build("Gemma2"), batch()
    expected = step(model, **inputs)[0].logits
    attach_loss(model)
    output = model(**inputs)
    lazy = output.logits
    assert isinstance(lazy, LazyLogits) and lazy.shape == expected.shape and lazy.dtype == expected.dtype
    assert torch.equal(lazy[..., :-1, :], expected[..., :-1, :]) and torch.equal(output["logits"].tensor(), expected)
    assert torch.equal(lazy.argmax(-1), expected.argmax(-1)) and torch.equal(torch.argmax(lazy, dim=-1), expected.argmax(-1))
    assert torch.equal(F.log_softmax(lazy.float(), -1), F.log_softmax(expected.float(), -1)) and torch.equal(
        2 * lazy, 2 * expected
    )
    assert lazy.to(torch.bfloat16).dtype == torch.bfloat16 and not hasattr(lazy, "no_such_thing")
    with torch.no_grad():
        assert not (lazy + 1).requires_grad


def test_gradients_flow_through_lazy_logits():
    """A loss of one's own (distillation, say) that reads the logits of a training output."""
    model, inputs = build(), batch()
    gradients = []
    for attached in (False, True):
        if attached:
            attach_loss(model)
        model.zero_grad()
        output = model(**inputs)
        (output.loss + output.logits.float().square().mean()).backward()
        gradients.append(model.model.embed_tokens.weight.grad.clone())
    assert distance(*gradients) <= EXACT


def test_asking_about_lazy_logits_computes_nothing():
    def compute():
        raise AssertionError("computed")

    lazy = LazyLogits(compute, (2, 3, 4), torch.bfloat16, torch.device("cpu"))
    assert lazy.float().dtype == torch.float32 and lazy.to("cpu", torch.float16).dtype == torch.float16
    assert hasattr(lazy, "argmax") and callable(lazy.view) and lazy.shape[-1] == 4
    with pytest.raises(AssertionError, match="computed"):
        lazy[0]


def edited(logits):
    logits.mul_(0.5)
    logits[..., 0] = 7.0
    logits -= 1
    torch.relu_(logits)
    return logits


def with_a_cast(logits):
    """A cast is of what there was, whenever it is computed."""
    double = logits.to(torch.float64)
    logits.mul_(3.0)
    return double + logits


def watched(logits):
    logits.register_hook(lambda g: 2 * g)
    logits.retain_grad()
    (logits.float().square().mean()).backward(retain_graph=True)
    return logits.grad


def first_used_without_gradients(logits):
    with torch.no_grad():
        assert logits.argmax() >= 0
    logits.backward(torch.ones(logits.shape))
    return logits


@pytest.mark.parametrize("use", [edited, with_a_cast, watched, first_used_without_gradients])
def test_what_is_done_to_lazy_logits_is_done_to_a_tensor(use):
    found = []
    for attached in (False, True):
        model = build()
        if attached:
            attach_loss(model)
        output = model(**batch())
        assert isinstance(output.logits, LazyLogits) == attached
        used = use(output.logits)
        found.append((used + 0, output.logits + 0, model.model.embed_tokens.weight.grad))
    for expected, got in zip(*found):
        assert (expected is None) == (got is None) and (got is None or distance(got, expected) <= EXACT)


def test_attributes_of_lazy_logits_are_the_tensors():
    lazy = LazyLogits(lambda: torch.ones(2, 2), (2, 2), torch.float32, torch.device("cpu"))
    lazy.requires_grad = True
    lazy.sum().backward()
    assert torch.equal(lazy.grad, torch.ones(2, 2)) and lazy.requires_grad_(False) is lazy.tensor()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(lazy)


# ---------------------------------------------------------------------------------------------- calls within and beside calls


@pytest.mark.parametrize("labels", [False, True], ids=["without labels", "with labels"])
@pytest.mark.parametrize("way", ["nested", "thread"])
def test_a_call_inside_another_call(way, labels):
    """A hook in the middle of a training forward calls the model, in the same thread or in another one."""
    model = build()
    x, y = batch(), {"input_ids": batch()["input_ids"].flip(0)}
    y |= {"labels": y["input_ids"]} if labels else {}
    expected, wanted = step(model, **x), step(model, **y)[0] if labels else model(**y)
    inner, left = [], [1]

    def call():
        inner.append(model(**y))

    def between(*args):
        if left and left.pop():
            if way == "nested":
                return call()
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    attach_loss(model)
    model.model.register_forward_hook(between)
    got = step(model, **x)
    assert_same_step(got, expected)
    assert distance(inner[0].logits.float(), wanted.logits.float()) <= EXACT
    assert isinstance(inner[0].logits, LazyLogits) == labels
    assert not labels or distance(inner[0].loss.detach(), wanted.loss.detach()) <= EXACT
    assert "forward" not in model.lm_head.__dict__ and "_loss_function" not in model.__dict__


def test_threads_train_one_model():
    model, batches = build(), [batch(rows, 11) for rows in range(2, 6)]
    expected = [model(**b).loss.item() for b in batches]
    attach_loss(model)
    losses = [[] for _ in batches]

    def run(i):
        for _ in range(10):
            losses[i].append(model(**batches[i]).loss.item())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, value in zip(losses, expected):
        assert len(found) == 10 and max(abs(loss - value) for loss in found) <= EXACT * value


def test_lazy_logits_that_are_read_within_another_call():
    model = build()
    expected = step(model)
    attach_loss(model)
    lazy = model(**batch()).logits
    model.model.register_forward_hook(lambda *args: (lazy.sum(), None)[1])
    assert_same_step(step(model), expected)
    assert torch.equal(lazy.tensor(), expected[0].logits)


def test_a_trial_in_the_first_call_leaves_router_losses_in_place():
    """transformers collects router logits by hooks, which the trial needs."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    config = hf.MixtralConfig(**sizes, vocab_size=128, num_local_experts=4, output_router_logits=True)
    model = hf.MixtralForCausalLM(config).train()
    ids = torch.arange(18).view(2, 9)
    expected = model(input_ids=ids, labels=ids).loss
    attach_loss_at_first_call(model)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected, rtol=1e-5, atol=0)
    assert loss_report(model).attached and "from the head" in loss_report(model).reason
