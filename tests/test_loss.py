"""The loss at supervised positions: its numbers against transformers', what it does not allocate, and who can train with it."""

import copy
import pickle
import re
import threading

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from _assertions import by_device, by_dtype, unit
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.dataflow import loss, loss_attach
from peft_nvfp4.dataflow.loss import Transform, linear_cross_entropy
from peft_nvfp4.dataflow.loss_attach import LazyLogits, attach_loss, detach_loss

VOCABULARY = 331  # prime: no other size of these tests
SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY
)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Gemma2": dict(head_dim=16, final_logit_softcapping=5.0),
    "Gemma3": dict(head_dim=16),
    "Granite": dict(logits_scaling=13.0),
    "Cohere": dict(logit_scale=0.3),
    "Mixtral": dict(num_local_experts=4, output_router_logits=True),
    "GPT2": dict(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
}
# FP32 sums of a few hundred terms in another order: relative to the norm of the result, about sqrt(300) * 2**-24 = 1e-6.
EXACT = 2e-6


def build(family: str = "Llama", dtype: torch.dtype = torch.float32, **settings) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(hf, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    usual = {**TOKENS, **({} if family == "GPT2" else SIZES), **FAMILIES.get(family, {}), **settings}
    model = getattr(hf, f"{family}{head}")(config(**usual)).to(dtype).train()
    with torch.no_grad():  # logits of a trained model's size, where a cap bends them
        for parameter in model.get_output_embeddings().parameters():
            parameter.mul_(20)
    return model


def batch(rows: int = 3, length: int = 11) -> dict[str, torch.Tensor]:
    """A quarter of the positions is supervised; a row is not at all."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(rows, length, generator=generator) < 0.75, -100)
    labels[0] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: nn.Module, **inputs):
    """(output, gradients by name) of one training step."""
    model.zero_grad()
    output = model(**(inputs or batch()), use_cache=False)
    output.loss.backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).float().norm() / b.float().norm().clamp_min(1e-6)).item()


def assert_same_step(got, expected, bound: float = EXACT) -> None:
    """Loss and gradients of two steps. A gradient that is nothing but rounding (of a key's bias) is compared with the largest."""
    assert distance(got[0].loss.detach(), expected[0].loss.detach()) <= bound
    assert got[1].keys() == expected[1].keys()
    largest = max(g.float().norm().item() for g in expected[1].values())
    for name, g in expected[1].items():
        assert (got[1][name] - g).float().norm().item() <= bound * max(g.float().norm().item(), 0.01 * largest), name


# ---------------------------------------------------------------------------------------------- the function


def ordinary(hidden, weight, labels, bias=None, transform=None, num_items=None, **kwargs):
    """As transformers: all logits, FP32 from there on."""
    z = F.linear(hidden, weight, bias)
    y = (transform.forward(z)[0] if transform else z).float()
    if num_items is not None:
        return F.cross_entropy(y.flatten(0, -2), labels.flatten(), reduction="sum", **kwargs) / num_items
    return F.cross_entropy(y.flatten(0, -2), labels.flatten(), **kwargs)


def case(dtype: torch.dtype = torch.float32, supervised: float = 0.3, device: str = "cpu", seed: int = 2):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()
    hidden, weight, bias = draw(3, 17, 32), draw(VOCABULARY, 32), draw(VOCABULARY)
    labels = torch.randint(VOCABULARY, (3, 17), generator=generator)
    return hidden, weight, labels.masked_fill(torch.rand(3, 17, generator=generator) > supervised, -100).to(device), bias


TRANSFORMS = {"none": Transform(), "scale": Transform(scale=0.3), "divisor-cap": Transform(divisor=13.0, softcap=2.0)}


@by_dtype
@by_device
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("max_supervised", [None, 30], ids=["counted", "static"])
def test_value_and_gradients_are_the_ordinary_ones(dtype, device, transform, max_supervised):
    """In 16 bits dh passes the same roundings in the same order, dW is rounded once instead of in its GEMM, and FP16 has a second
    rounding (the loss scale): four units cover it. A GEMM of fewer rows may sum in another order and so flip the last bit of a
    logit: less than a unit of the mean loss. A loss scale of 2**10 keeps FP16's ordinary gradients from vanishing."""
    hidden, weight, labels, bias = case(dtype, device=device)
    bound = EXACT if dtype == torch.float32 else 4 * unit(dtype)
    expected = ordinary(hidden, weight, labels, bias, transform)
    got = linear_cross_entropy(hidden, weight, labels, bias=bias, **transform._asdict(), chunk=4, max_supervised=max_supervised)
    assert got.dtype == torch.float32
    assert distance(got.detach(), expected.detach()) <= (EXACT if dtype == torch.float32 else unit(dtype))
    leaves = (hidden, weight, bias)
    for g, e in zip(torch.autograd.grad(1024 * got, leaves), torch.autograd.grad(1024 * expected, leaves)):
        assert g.dtype == dtype and distance(g, e) <= bound


def test_fp16_gradients_do_not_vanish_over_many_items():
    """p / n is about 1 / (331 * 1e6), below FP16's smallest number, when the loss scale has not come yet."""
    hidden, weight, labels, _ = case(torch.float16)
    got = linear_cross_entropy(hidden, 0.01 * weight, labels, num_items_in_batch=10**6)
    expected = ordinary(hidden, 0.01 * weight, labels, num_items=10**6)
    g, e = (torch.autograd.grad(2.0**20 * t, hidden)[0] for t in (got, expected))
    assert distance(g, e) <= 4 * unit(torch.float16)


@pytest.mark.parametrize("num_items", [7, torch.tensor(9), torch.tensor([9])], ids=["int", "tensor", "replica"])
def test_num_items_in_batch(num_items):
    hidden, weight, labels, _ = case()
    got = linear_cross_entropy(hidden, weight, labels, num_items_in_batch=num_items, chunk=5)
    expected = ordinary(hidden, weight, labels, num_items=num_items)
    assert got.shape == expected.shape and distance(got.detach(), expected.detach()) <= EXACT
    assert distance(*(torch.autograd.grad(t.sum(), hidden)[0] for t in (got, expected))) <= EXACT


def test_label_smoothing_sum_shift_and_another_ignored_index():
    hidden, weight, labels, _ = case()
    got = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, reduction="sum", chunk=5)
    expected = ordinary(hidden, weight, labels, label_smoothing=0.1, reduction="sum")
    assert distance(got.detach(), expected.detach()) <= EXACT
    for g, e in zip(*(torch.autograd.grad(t, (hidden, weight)) for t in (got, expected))):
        assert distance(g, e) <= EXACT
    shifted = linear_cross_entropy(hidden[:, :-1], weight, labels[:, 1:])
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, shift=True), shifted, rtol=0, atol=0)
    other = labels.masked_fill(labels == -100, 5)
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, other, ignore_index=5), ordinary(hidden, weight, other, ignore_index=5)
    )


@pytest.mark.parametrize("max_supervised", [None, 8], ids=["counted", "static"])
def test_without_a_supervised_position(max_supervised):
    """As cross_entropy: NaN of the mean, zero of a sum over items, zero gradients of both."""
    hidden, weight, labels, _ = case()
    labels = torch.full_like(labels, -100)
    for num_items in (None, 3):
        got = linear_cross_entropy(hidden, weight, labels, num_items_in_batch=num_items, max_supervised=max_supervised)
        expected = ordinary(hidden, weight, labels, num_items=num_items)
        torch.testing.assert_close(got, expected, equal_nan=True)
        for g, e in zip(*(torch.autograd.grad(t, (hidden, weight)) for t in (got, expected))):
            assert torch.equal(g, e) and not g.any()


def test_too_many_for_a_static_count_is_nan():
    hidden, weight, labels, _ = case(supervised=0.5)
    count = int((labels != -100).sum())
    assert linear_cross_entropy(hidden, weight, labels, max_supervised=count).isfinite()
    assert linear_cross_entropy(hidden, weight, labels, max_supervised=count - 1).isnan()


def test_arguments_are_checked():
    hidden, weight, labels, _ = case()
    with pytest.raises(ValueError, match="one label a position"):
        linear_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match="none"):
        linear_cross_entropy(hidden, weight, labels, reduction="none")


def test_autocast():
    """The head's product in BF16, the loss in FP32, gradients in the dtype of their tensors."""
    hidden, weight, labels, bias = case()
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, labels, bias=bias)
        expected = ordinary(hidden, weight, labels, bias)
    assert got.dtype == torch.float32 and distance(got.detach(), expected.detach()) <= unit(torch.bfloat16)
    for g, e in zip(*(torch.autograd.grad(t, (hidden, weight, bias)) for t in (got, expected))):
        assert g.dtype == torch.float32 and distance(g, e) <= 4 * unit(torch.bfloat16)


# ---------------------------------------------------------------------------------------------- what is allocated


class Widest(TorchDispatchMode):
    """The most rows that any tensor with a vocabulary-sized last dimension has had, other than weights (of ``width`` rows)."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.ndim and t.shape[-1] == VOCABULARY and t.untyped_storage().nbytes():
                self.rows = max(self.rows, t.numel() // VOCABULARY)
        return out


def test_no_tensor_of_positions_by_vocabulary():
    """hidden.T has 32 rows: that many would be a transposed weight, so there are more positions."""
    hidden, labels = torch.randn(2, 100, 32, requires_grad=True), torch.randint(VOCABULARY, (2, 100))
    weight, kept = torch.randn(VOCABULARY, 32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for static in (None, 200):
            with Widest() as seen:
                linear_cross_entropy(hidden, weight, labels, chunk=40, max_supervised=static).backward()
            assert seen.rows == 40
        assert all(VOCABULARY not in t.shape for t in kept)
        with Widest() as seen:
            ordinary(hidden, weight, labels).backward()
    assert seen.rows == 200 and any(VOCABULARY in t.shape for t in kept)


def test_an_attached_model_computes_supervised_logits_only():
    model, inputs = build(), batch(4, 40)
    supervised = int((inputs["labels"][:, 1:] != -100).sum())
    assert 10 < supervised < 50
    attach_loss(model)
    model.get_output_embeddings().requires_grad_(False)
    with Widest() as seen:
        model(**inputs).loss.backward()
    assert seen.rows == max(supervised, SIZES["hidden_size"])  # W.T has as many rows as h has columns
    attach_loss(model, chunk=7)
    with Widest() as seen:
        model(**inputs).loss.backward()
    assert seen.rows == SIZES["hidden_size"]
    detach_loss(model)
    with Widest() as seen:
        model(**inputs).loss.backward()
    assert seen.rows == inputs["labels"].numel()


def test_without_gradients_none_is_computed(monkeypatch):
    monkeypatch.setattr(loss, "_dlogits", None)
    hidden, weight, labels, _ = case()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, labels).isfinite()


# ---------------------------------------------------------------------------------------------- models


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
    with torch.no_grad():
        model.eval()(**batch())
        model.train()(**{**batch(), "labels": None})
        model(**batch(), return_dict=False)
        model(**batch(2, 8), logits_to_keep=8)
    assert len(calls) == tried + 1
    step(detach_loss(model))
    assert len(calls) == tried + 1 and type(model) is hf.LlamaForCausalLM and "_supervised_loss" not in model.__dict__


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_evaluation_and_generation_are_bit_equal(family):
    model = build(family).eval()
    with torch.no_grad():
        expected, tokens = model(**batch()), model.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False)
        attach_loss(model)
        got = model(**batch())
        assert torch.equal(got.loss, expected.loss) and torch.equal(got.logits, expected.logits)
        assert torch.equal(model.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False), tokens)
    assert not model.training and "forward" not in model.lm_head.__dict__ and "_loss_function" not in model.__dict__


def test_without_labels_that_count_the_loss_is_nan_as_before():
    model = build()
    inputs = {**batch(), "labels": torch.full_like(batch()["labels"], -100)}
    attach_loss(model)
    output, gradients = step(model, **inputs)
    assert output.loss.isnan() and not any(g.any() for g in gradients.values())
    assert step(model, **inputs, num_items_in_batch=5)[0].loss == 0


def test_labels_that_are_shifted_already_count_instead():
    """As context parallelism passes them: the last position has a label too."""
    model, inputs = build(), batch()
    inputs["shift_labels"] = inputs["labels"].roll(2, 0).roll(3, 1)
    attach_loss(model)
    assert_same_step(step(model, **inputs), step(detach_loss(model), **inputs))


def test_checkpointing_and_autocast():
    model, inputs = build(), batch()
    attach_loss(model)
    plain = step(model, **inputs)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    again = step(model, **inputs)
    assert plain[0].loss == again[0].loss and all(torch.equal(g, again[1][n]) for n, g in plain[1].items())
    with torch.autocast("cpu", torch.bfloat16):
        got = step(model, **inputs)
        expected = step(detach_loss(model), **inputs)
    assert got[0].loss.dtype == torch.float32
    assert_same_step(got, expected, 4 * unit(torch.bfloat16))


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


# ---------------------------------------------------------------------------------------------- lazy logits


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
        assert not lazy[0].requires_grad


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


# ---------------------------------------------------------------------------------------------- PEFT


KINDS = {
    "frozen_head": NVFP4LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"),
    "modules_to_save": LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "lora_on_head": LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "lm_head"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_inside_a_peft_model(kind, before):
    """Attached before PEFT, which then wraps the head, or after it."""
    base = build()
    if before:
        assert attach_loss(base).attached
    torch.manual_seed(3)
    model = get_peft_model(base, copy.deepcopy(KINDS[kind])).train()
    if kind == "modules_to_save":  # a trained one, so that another weight counts when adapters are disabled
        model.get_output_embeddings().modules_to_save["default"].weight.data.mul_(1.5)
    got = step(model)
    if not before:
        assert torch.is_tensor(got[0].logits)
        report = attach_loss(model, chunk=3)
        assert report.attached and ("own forward" in report.reason) == (kind == "lora_on_head")
        got = step(model)
    with model.disable_adapter(), torch.no_grad():
        disabled = model(**batch())
    detach_loss(model)
    expected = step(model)
    assert isinstance(got[0].logits, LazyLogits) and torch.equal(got[0].logits.tensor(), expected[0].logits)
    assert any("lm_head" in name for name in got[1]) == (kind != "frozen_head")
    assert_same_step(got, expected)
    with model.disable_adapter(), torch.no_grad():
        assert distance(disabled.loss, model(**batch()).loss) <= EXACT < distance(disabled.loss, expected[0].loss.detach())


@pytest.mark.parametrize("max_supervised", [None, 20])
def test_a_head_of_several_ranks_is_called_once(tmp_path, max_supervised):
    """Ranks have different numbers of labels; a sharded head that one of them called once more would wait for ever."""
    model = get_peft_model(build(), copy.deepcopy(KINDS["lora_on_head"])).train()
    expected, calls = step(model), []
    attach_loss(model, chunk=2, max_supervised=max_supervised)
    head = model.get_output_embeddings()
    forward = type(head).forward
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(head), "forward", lambda self, h: calls.append(self is head) or forward(self, h))
            got = step(model)
    finally:
        torch.distributed.destroy_process_group()
    assert sum(calls) == 1
    assert_same_step(got, expected)
    assert_same_step(step(model), expected)


def test_a_quantised_head_computes_its_own_logits():
    """NF4 from bitsandbytes; in FP32 its product is W dequantised times h."""
    bnb = pytest.importorskip("bitsandbytes")
    model = build()
    head = bnb.nn.Linear4bit(64, VOCABULARY, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    head.weight = bnb.nn.Params4bit(model.lm_head.weight.detach().clone(), requires_grad=False, quant_type="nf4")
    model.set_output_embeddings(head.to("cpu"))
    expected = step(model)
    report = attach_loss(model, chunk=3)
    assert report.attached and "own forward" in report.reason
    assert_same_step(step(model), expected)


# ---------------------------------------------------------------------------------------------- copies and replicas


def test_copies_pickles_and_saves(tmp_path):
    model = build()
    attach_loss(model)
    loss = model(**batch()).loss
    assert type(model).__name__ == "LlamaForCausalLM" and isinstance(model, hf.LlamaForCausalLM)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        output = other(**batch())
        assert torch.equal(output.loss, loss) and isinstance(output.logits, LazyLogits) and type(other) is type(model)
        assert type(detach_loss(other)) is hf.LlamaForCausalLM
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is hf.LlamaForCausalLM and torch.equal(again.train()(**batch()).logits, model.eval()(**batch()).logits)
    assert model.config.architectures == ["LlamaForCausalLM"]


def replicate(network: nn.Module) -> nn.Module:
    """torch.nn.parallel.replicate, on the CPU: shallow copies that share parameters and hooks."""
    replicas = {m: m._replicate_for_data_parallel() for m in network.modules()}
    for m, replica in replicas.items():
        for name, child in m._modules.items():
            replica._modules[name] = child and replicas[child]
        for name, parameter in m._parameters.items():
            setattr(replica, name, parameter)  # a plain attribute, as there
    return replicas[network]


def test_replicas_of_data_parallel_do_not_meet():
    """Two threads, each with its replica and its half of the batch; their outputs hold nothing that would be gathered in vain."""
    model, inputs = build(), batch(8, 40)
    inputs["labels"][0] = inputs["input_ids"][0]
    attach_loss(model)
    halves = [{k: v[i : i + 4] for k, v in inputs.items()} for i in (0, 4)]
    expected = [model(**half).loss.item() for half in halves]
    replicas, losses = [replicate(model), replicate(model)], [[], []]

    def run(i: int) -> None:
        for _ in range(20):
            output = replicas[i](**halves[i])
            assert output.logits is None
            losses[i].append(output.loss.item())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses == [[expected[0]] * 20, [expected[1]] * 20]


# ---------------------------------------------------------------------------------------------- trainers


def rows(count: int = 12) -> list[dict]:
    """Of one length, with very different numbers of labels."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCABULARY, (count, 12), generator=generator)
    start = torch.randint(0, 11, (count,), generator=generator)
    return [{"input_ids": i, "labels": i.masked_fill(torch.arange(12) < s, -100)} for i, s in zip(ids, start)]


def logged(trainer, *names: str) -> dict[str, list[float]]:
    return {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in names}


def assert_same_logs(got: dict, expected: dict, bound: float) -> None:
    assert got.keys() == expected.keys() and all(expected.values())
    for name, values in expected.items():
        assert got[name] == pytest.approx(values, rel=bound), name


def accuracy(prediction) -> dict[str, float]:
    labels, chosen = prediction.label_ids[:, 1:], prediction.predictions[:, :-1].argmax(-1)
    return {"accuracy": float((chosen == labels)[labels != -100].mean())}


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"label_smoothing_factor": 0.1}], ids=["fp32", "bf16", "smoothing"])
def test_trainer(tmp_path, monkeypatch, settings):
    """Accumulation over micro-batches of unequal label counts, then evaluation with metrics. SGD keeps the difference of two runs
    as small as that of their gradients: 2e-6 a step in FP32, a unit of BF16 under autocast. Trainer takes the labels away for
    label smoothing, so there the model's own logits serve."""
    monkeypatch.setattr(LazyLogits, "tensor", None)  # not even accelerate's cast of outputs computes them
    logs = []
    for attached in (False, True):
        model = build()
        assert not attached or attach_loss(model).attached
        arguments = hf.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            use_cpu=True, learning_rate=0.05, optim="sgd", report_to=[], disable_tqdm=True, save_strategy="no", **settings,
        )  # fmt: skip
        trainer = hf.Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows(4), compute_metrics=accuracy)
        assert trainer.model_accepts_loss_kwargs
        trainer.train()
        trainer.evaluate()
        logs.append(logged(trainer, "loss", "grad_norm", "eval_loss", "eval_accuracy"))
    assert_same_logs(*logs[::-1], bound=4 * unit(torch.bfloat16) if "bf16" in settings else 1e-5)
    assert len(set(logs[0]["loss"])) == 3


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_sft_trainer(tmp_path):
    """Prompts masked out; loss, accuracy and entropy of training and evaluation as without."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{c: i + 3 for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ")}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    pairs = {"prompt": ["the quick ", "over ", "a b c "] * 2, "completion": ["brown fox", "the lazy dog", "d"] * 2}
    data, logs = datasets.Dataset.from_dict(pairs), []
    for attached in (False, True):
        torch.manual_seed(5)
        model = get_peft_model(build(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        assert not attached or attach_loss(model).attached
        arguments = trl.SFTConfig(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            use_cpu=True, learning_rate=0.05, optim="sgd", report_to=[], disable_tqdm=True, save_strategy="no", bf16=False,
        )  # fmt: skip
        trainer = trl.SFTTrainer(model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
        trainer.train()
        trainer.evaluate()
        logs.append(logged(trainer, "loss", "mean_token_accuracy", "entropy", "eval_loss", "eval_mean_token_accuracy"))
    assert_same_logs(*logs[::-1], bound=1e-5)


# ---------------------------------------------------------------------------------------------- compilers


@pytest.mark.gpu
@pytest.mark.parametrize("max_supervised", [None, 40], ids=["all", "static"])
def test_recorded_in_a_cuda_graph(max_supervised):
    """Replayed with other labels, more of them, than it was recorded with; no call may wait for the device."""
    (hidden, weight, labels, _), (*_, others, _) = case(device="cuda"), case(supervised=0.6, device="cuda", seed=6)
    run = lambda: torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, max_supervised=max_supervised), (hidden, weight)
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    labels.copy_(others)
    graph.replay()
    for g, e in zip(got, torch.autograd.grad(ordinary(hidden, weight, labels), (hidden, weight))):
        assert distance(g, e) <= EXACT


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("max_supervised", [None, 30], ids=["all", "static"])
def test_the_function_compiles_whole(fresh_compiler, max_supervised):
    hidden, weight, labels, bias = case()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    got = compiled(hidden, weight, labels, bias=bias, softcap=2.0, max_supervised=max_supervised)
    expected = ordinary(hidden, weight, labels, bias, Transform(softcap=2.0))
    assert distance(got.detach(), expected.detach()) <= EXACT
    for g, e in zip(*(torch.autograd.grad(t, (hidden, weight, bias)) for t in (got, expected))):
        assert distance(g, e) <= EXACT


@pytest.mark.parametrize("kind", ["frozen_head", "lora_on_head"])
def test_an_attached_model_compiles_whole(fresh_compiler, kind):
    """Once for all lengths but the first. A head with a forward of its own keeps the ordinary loss, as do old compilers."""
    targets = ["q_proj"] if kind == "frozen_head" else ["q_proj", "lm_head"]
    model = get_peft_model(build(num_hidden_layers=1), LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()
    attach_loss(model, chunk=5)
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)
    for length in (11, 14, 40):
        inputs = batch(3, length)
        output = compiled(**inputs, use_cache=False)
        assert distance(output.loss.detach(), model(**inputs, use_cache=False).loss.detach()) <= EXACT
        assert isinstance(output.logits, LazyLogits) == (loss_attach.TRACEABLE and kind == "frozen_head")
    assert len(graphs) == 2
    base = model.get_base_model()
    assert "forward" not in base.get_output_embeddings().__dict__ and "_loss_function" not in base.__dict__
