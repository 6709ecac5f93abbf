"""Padding is not computed: a packed batch gives what its rows give one by one, for every backend, recorded or not."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import transformers as hf
from _rehearsal import Rehearsal
from low_level import adapted_model
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_with_sinks

from peft_nvfp4 import disable_cuda_graphs, enable_cuda_graphs, graph_status
from peft_nvfp4.autograd.activation_cache import kept_by_attention
from peft_nvfp4.training import recorded_sizes
from peft_nvfp4.training.packed_attention import WITH_SINKS, attention, gradient_of_sinks, sunk
from peft_nvfp4.training.packing import (
    disable_packing,
    enable_packing,
    pack,
    packed_forward,
    packing_status,
)
from peft_nvfp4.training.steps import slow_down_steps

SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
    max_position_embeddings=64,
)  # fmt: skip
LENGTHS = (9, 7, 12)  # of 12


def tuned(packed=True, **settings):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, pad_token_id=0))
    model = adapted_model(model, **dict(r=4, target_modules="all-linear", init_lora_weights=False) | settings).train()
    slow_down_steps(model)
    if packed:
        enable_packing(model)
    return model


def batch(left=False, seed=0):
    ids = torch.randint(1, 128, (3, 12), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(12)[None] < torch.tensor(LENGTHS)[:, None]).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def row_by_row(model, inputs):
    """Every row by itself, without its padding."""
    kept = [mask.bool() for mask in inputs["attention_mask"]]
    supervised = sum(int(m.sum()) - 1 for m in kept)
    model.zero_grad()
    total = 0
    for r, m in enumerate(kept):
        columns = {"input_ids": inputs["input_ids"], "labels": inputs["labels"], "position_ids": torch.arange(12).expand(3, -1)}
        loss = model(**{name: t[r][m][None] for name, t in columns.items()}, num_items_in_batch=supervised).loss
        loss.backward()
        total += loss.detach()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
def test_a_batch_is_the_sum_of_its_rows(backend, left):
    """FP32 sums over 28 tokens in another order: 28 * 2^-24 = 2e-6 of the sum of magnitudes; codes are those of each token."""
    model, inputs = tuned(backend=backend), batch(left)
    loss, gradient = step(model, **inputs)
    assert packing_status(model).tokens == 28 and packing_status(model).places == 36
    expected_loss, expected = row_by_row(tuned(False, backend=backend), inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert (gradient - expected).norm() < 2e-6 * expected.norm()


def test_full_rows_on_a_cpu_are_left_as_they_are():
    model, inputs = tuned(), {"input_ids": batch()["input_ids"], "labels": batch()["input_ids"]}
    assert all(map(torch.equal, step(model, **inputs), step(tuned(False), **inputs)))
    assert packing_status(model).calls == 0 and not packing_status(model).reasons


def test_labels_of_rows():
    """A classifier's labels are of rows, not of tokens, and its head reads the last real token."""
    torch.manual_seed(0)
    model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**SIZES, pad_token_id=0, num_labels=2)).train()
    inputs = batch() | {"labels": torch.tensor([0, 1, 0])}
    padded = step(model, **inputs)
    enable_packing(model)
    packed = step(model, **inputs)
    assert packing_status(model).calls == 1 and not packing_status(model).reasons
    assert (packed[1] - padded[1]).norm() < 2e-6 * padded[1].norm()


def test_padding_has_no_influence():
    model, inputs = tuned(), batch()
    other = inputs | {"input_ids": inputs["input_ids"] + 77 * (inputs["attention_mask"] == 0)}
    assert all(map(torch.equal, step(model, **inputs), step(model, **other)))


FAMILIES = {
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, dict(sliding_window=4)),
    "gemma3": (
        hf.Gemma3ForCausalLM, hf.Gemma3TextConfig,
        dict(head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    ),
    "qwen3-moe": (
        hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig,
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
    ),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, dict(n_inner=96, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)),
    "lfm2": (hf.Lfm2ForCausalLM, hf.Lfm2Config, dict(layer_types=["conv", "full_attention"])),
    "gpt-oss": (
        hf.GptOssForCausalLM, hf.GptOssConfig,
        dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, pad_token_id=0, sliding_window=4),
    ),
}  # fmt: skip
REFUSED = {"lfm2": "notices the one before it"}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_packed_or_say_why_not(name):
    """Dense models in FP32: another order of sums only. Windows are shorter than the rows."""
    cls, config, more = FAMILIES[name]
    torch.manual_seed(0)
    model = cls(config(**SIZES | more)).train()
    padded = step(model, **batch())
    enable_packing(model)
    packed = step(model, **batch())
    status = packing_status(model)
    if name in REFUSED:
        assert status.calls == 0 and REFUSED[name] in str(status)
        assert all(map(torch.equal, packed, padded))
    else:
        assert status.calls == 1 and not status.reasons
        assert (packed[1] - padded[1]).norm() < 2e-6 * padded[1].norm()
    assert (model.config._attn_implementation == WITH_SINKS) == (name == "gpt-oss")
    disable_packing(model)
    assert model.config._attn_implementation == ("eager" if name == "gpt-oss" else "sdpa")
    assert all(map(torch.equal, step(model, **batch()), padded))


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_are_those_of_the_modeling_file(window):
    """Attention of two packed sequences and its gradients, in FP32, against what transformers computes of each "eagerly"; and
    FlashAttention's backward given the log-sum-exp and the output with sinks, by PyTorch's kernel for CPUs: sums in another
    order, of fewer than 16 terms."""
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, torch.nn.Parameter(torch.tensor([-2.0, 0.0, 1.0, 4.0]))
    leaves = [torch.randn(1, h, 13, 8, requires_grad=True) for h in (4, 2, 2)] + [module.sinks]
    weight, first = torch.randn(1, 13, 4, 8), torch.tensor([0, 5, 13], dtype=torch.int32).view(1, 1, 1, -1)
    packed, _ = attention(module, *leaves[:3], first, scaling=0.3, sliding_window=window, s_aux=module.sinks)
    alone = []
    for start, end in ((0, 5), (5, 13)):
        visible = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        visible &= True if window is None else visible.triu(1 - window)
        mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
        alone.append(eager_with_sinks(module, *(t[:, :, start:end] for t in leaves[:3]), mask, scaling=0.3)[0])
    results = [(y, *torch.autograd.grad((y * weight).sum(), leaves)) for y in (packed, torch.cat(alone, 1))]
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_without_sinks_computes_them():
    """Its output and log-sum-exp, corrected, and its backward given both."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 13, 8) for _ in range(3))
    sinks, gradient = torch.tensor([-2.0, 0.0, 1.0, 4.0], requires_grad=True), torch.randn(1, 4, 13, 8)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 1, sinks
    mask = torch.full((13, 13), float("-inf")).triu(1)[None, None]
    expected = eager_with_sinks(module, *leaves, mask, scaling=8**-0.5)[0].transpose(1, 2)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, logsumexp = flash(q, k, v, 0.0, True)
    output, logsumexp = sunk(output, logsumexp, sinks.detach())
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = [*backward(gradient, q, k, v, output, logsumexp, 0.0, True)]
    found.append(gradient_of_sinks(gradient, output, logsumexp, sinks.detach()))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(found, torch.autograd.grad(expected, (*leaves, sinks), gradient)):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("setting", ["output_hidden_states", "return_dict"])
def test_settings_of_a_model_that_change_what_it_returns(setting):
    model, plain, inputs = tuned(), tuned(False), batch()
    step(model, **inputs)
    with torch.no_grad():
        for m in (model, plain):
            setattr(m.get_base_model().config, setting, setting != "return_dict")
        a, b = (m.get_base_model().model(inputs["input_ids"], inputs["attention_mask"]) for m in (model, plain))
        asked = model.get_base_model().model(inputs["input_ids"], inputs["attention_mask"], return_dict=False)
    assert isinstance(asked, tuple)
    if setting == "return_dict":
        assert isinstance(b, tuple) == isinstance(a, tuple) and torch.equal(a[0], b[0])
    else:
        assert [h.shape for h in a.hidden_states] == [h.shape for h in b.hidden_states]
    assert packing_status(model).calls == 1 and "returns more" in str(packing_status(model))


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda i: i | {"labels": i["input_ids"]}, "labels at padding"),
        (lambda i: i | {"output_hidden_states": True}, "output_hidden_states"),
        (lambda i: i | {"attention_mask": torch.ones(3, 1, 12, 12).tril().bool()}, "attention_mask has shape"),
        (lambda i: i | {"attention_mask": 0 * i["attention_mask"], "labels": 0 * i["labels"] - 100}, "all tokens are padding"),
    ],
    ids=["labels", "hidden-states", "4-D", "empty"],
)
def test_what_is_not_packed_runs_as_before_and_says_why(change, reason):
    inputs = change(batch())
    model = tuned()
    with torch.no_grad():
        outputs = [m(**inputs).logits for m in (model, tuned(False))]
    assert torch.equal(*outputs)
    assert reason in str(packing_status(model)) and packing_status(model).calls == 0


def test_batches_that_are_packed_already():
    """A collator's one row with positions that restart, with lengths beside them, and the rows that it was made of."""
    model, inputs = tuned(), batch()
    kept = inputs["attention_mask"].bool()
    positions = torch.arange(12).expand(3, -1)[kept][None]
    labels = inputs["labels"].clone()
    labels[:, 0] = -100  # as collators do: the last token of a row does not predict the first of the next
    row = {"input_ids": inputs["input_ids"][kept][None], "labels": labels[kept][None]}
    bounds = torch.tensor([0, 9, 16, 28], dtype=torch.int32)
    expected = step(model, **inputs)
    for given in ({"position_ids": positions}, {"position_ids": positions, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}):
        assert all(map(torch.equal, expected, step(model, **row, **given)))
    assert packing_status(model).calls == 3


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["kept", "reentrant", "not-reentrant"])
def test_one_recording_serves_every_packing(checkpointing):
    """Bit for bit the eager step of the same packed row; 28 and 28 tokens in rows of other lengths share a recording of 64."""
    model, eager = tuned(), tuned()
    enable_cuda_graphs(model)
    forward = packed_forward(model).inner
    forward.recorder = Rehearsal
    packed_forward(eager).inner = type("Sizes", (), {"can_record": True, "recorded_size": staticmethod(lambda n: 64)})()
    packed_forward(eager).original = lambda **inputs: type(forward.decoder).forward(packed_forward(eager).decoder, **inputs)
    for m in (model, eager):
        if checkpointing is not None:
            m.gradient_checkpointing_enable(dict(use_reentrant=checkpointing))
            m.enable_input_require_grads()
    for inputs in (batch(), batch(seed=1), batch(left=True, seed=2)):
        assert all(map(torch.equal, step(model, **inputs), step(eager, **inputs)))
    status = graph_status(model)
    assert list(status.graphs.values()) == [3] and not status.reasons, str(status)
    disable_cuda_graphs(model)
    assert all(map(torch.equal, step(model, **batch()), step(tuned(), **batch())))


def test_sizes_of_recordings():
    model = tuned()
    enable_cuda_graphs(model)
    forward = packed_forward(model).inner
    assert not forward.can_record and packed_forward(model)._size(1000) == 1000  # nothing is recorded on a CPU
    forward.recorder = Rehearsal
    assert [forward.recorded_size(n) for n in (1, 64, 65, 1000, 1025, 4000, 4097)] == [64, 64, 128, 1024, 1152, 4096, 4608]
    step(model, **batch())
    assert forward.recorded_size(52) == 64 and forward.recorded_size(40) == 64


def test_rows_are_filled_up_to_recordings_that_are_there_and_leave_room_for_longer_ones(monkeypatch):
    """Tokens of batches, and of the recordings that served them."""
    monkeypatch.setattr(recorded_sizes, "FILLING", 150)
    model, eager = tuned(), tuned()
    enable_cuda_graphs(model)
    forward = packed_forward(model).inner
    forward.recorder = Rehearsal
    found = []
    for rows in (5, 6, 9, 6, 3, 9, 8, 8, 8):
        ids = torch.randint(1, 128, (rows, 30), generator=torch.Generator().manual_seed(rows))
        got, expected = (step(m, input_ids=ids, labels=ids) for m in (model, eager))
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        found.append((30 * rows, sorted(entry.tokens for entry in forward.entries.values())))
    four = [128, 192, 320, 512]
    assert found == [
        (150, [192]), (180, [192]),
        (270, [512]),  # half as long again as 320: the pool is made anew
        (180, [192, 512]),  # 512 would be more than half as long again
        (90, [128, 192, 512]), (270, four),
        (240, four), (240, four), (240, [128, 192, 256, 320, 512]),  # after 64 and 128 tokens for nothing
    ]  # fmt: skip
    assert not graph_status(model).reasons


def test_evaluation_generation_copies_and_switching_off():
    model = tuned()
    expected = step(model, **batch())
    clone = copy.deepcopy(model)
    assert packed_forward(clone).decoder is clone.get_base_model().model
    assert all(map(torch.equal, expected, step(clone, **batch())))
    calls = packing_status(model).calls
    with torch.no_grad():
        model.eval()
        ids = batch()["input_ids"][2:]
        generated = model.generate(ids, max_new_tokens=3, do_sample=False)
        assert packing_status(model).calls == calls
        assert torch.equal(generated, tuned(False).eval().generate(ids, max_new_tokens=3, do_sample=False))
        packed = model(**batch(), use_cache=False).loss
        torch.testing.assert_close(packed, model(**batch()).loss, rtol=1e-5, atol=0)
    disable_packing(model.train())
    assert not vars(model.get_base_model().model).keys() & {"forward", "_replicate_for_data_parallel"}
    assert not model.get_base_model()._forward_pre_hooks and packed_forward(model) is None
    assert packing_status(model).reasons == {"not enabled": 1}
    with pytest.raises(ValueError, match="has no decoder"):
        enable_packing(torch.nn.Linear(2, 2))


def test_hooks_inside_see_rows_as_they_are():
    model, shapes = tuned(), []
    layer = model.get_base_model().model.layers[0]
    expected = step(tuned(False), **batch())
    step(model, **batch())
    handle = layer.register_forward_hook(lambda module, args, y: shapes.append((y[0] if isinstance(y, tuple) else y).shape))
    assert all(map(torch.equal, expected, step(model, **batch())))
    assert shapes == [(3, 12, 64)] and "hooks inside" in str(packing_status(model))
    handle.remove()
    step(model, **batch())
    assert len(shapes) == 1 and packing_status(model).calls == 2


def test_hidden_states_that_were_asked_for_once_do_not_stay_in_the_way():
    """transformers leaves its hooks on the layers."""
    model = tuned()
    with torch.no_grad():
        model(**batch(), output_hidden_states=True)
    assert all(map(torch.equal, step(model, **batch()), step(tuned(), **batch())))
    assert packing_status(model).calls == 1 and "hooks inside" not in str(packing_status(model))


def test_a_deleted_model_is_gone():
    model = tuned()
    enable_cuda_graphs(model)
    step(model, **batch())
    gc.collect()
    gone = weakref.ref(model.get_base_model().model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_of_packed_rows_on_a_gpu(window, with_sinks):
    """Against SDPA of each sequence in FP32. BF16 rounds P and the output: 2^-8 of values below 4, gradients the same of their
    largest; a sink's is a sum over 384 tokens of products of such."""
    lengths, generator = (300, 1, 83), torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, h, 384, 64, device="cuda", generator=generator).bfloat16().requires_grad_() for h in (8, 2, 2))
    inputs = {"input_ids": torch.zeros(3, 300, dtype=torch.long, device="cuda")}
    inputs["attention_mask"] = torch.arange(300, device="cuda")[None] < torch.tensor(lengths, device="cuda")[:, None]
    first = pack(inputs).inputs["attention_mask"]
    sinks = [torch.linspace(-2, 3, 8, device="cuda").bfloat16().requires_grad_()] if with_sinks else []
    settings = dict(scaling=0.125, sliding_window=window)
    y, _ = attention(torch.nn.Module(), q, k, v, first, **settings, s_aux=sinks[0] if with_sinks else None)
    assert kept_by_attention(y.flatten(2))
    weight = torch.randn(y.shape, device="cuda", generator=generator)
    gradients = torch.autograd.grad((y * weight).sum(), (q, k, v, *sinks))
    wide = [t.detach().float().cpu().requires_grad_() for t in (q, k, v, *sinks)]
    expected, _ = attention(torch.nn.Module(), *wide[:3], first.cpu(), **settings, s_aux=wide[3] if with_sinks else None)
    expected_gradients = torch.autograd.grad((expected * weight.cpu()).sum(), wide)
    torch.testing.assert_close(y.float().cpu(), expected, rtol=0, atol=2**-6)
    for a, b in zip(gradients, expected_gradients):
        torch.testing.assert_close(a.float().cpu(), b, rtol=0, atol=2**-6 * b.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, dict(lora_dropout=0.2, gradients="nvfp4_sr"), dict(backend="bf16")], ids=str)
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["kept", "reentrant", "not-reentrant"])
def test_recorded_steps_on_a_gpu(checkpointing, settings):
    """Bit for bit the eager packed steps of the same generator, in BF16."""
    results = []
    for recorded in (True, False):
        model = tuned(**settings).to("cuda", torch.bfloat16)
        enable_cuda_graphs(model)
        forward = packed_forward(model).inner
        if not recorded:
            forward._replay = lambda args, kwargs, forward=forward: forward.original(*args, **kwargs)
        if checkpointing is not None:
            model.gradient_checkpointing_enable(dict(use_reentrant=checkpointing))
            model.enable_input_require_grads()
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            batches = [{k: t.cuda() for k, t in batch(seed=s).items()} for s in range(3)]
            results.append([t for inputs in batches for t in step(model, **inputs)])
        assert sum(graph_status(model).graphs.values()) == (3 if recorded else 0)
        assert packing_status(model).calls == 3
    assert all(map(torch.equal, *results))
