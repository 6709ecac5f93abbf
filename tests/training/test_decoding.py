"""Generation from recordings: the same tokens as ordinary steps, in every way that generate is called, and caches that stay true.

On a CPU a recording is played by :class:`ForwardRehearsal`, which runs the recorded function again on the recording's own inputs.
"""

import copy
import threading

import pytest
import torch
import transformers as hf
from _rehearsal import ForwardRehearsal
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, decoding_status, release_forward_recordings
from peft_nvfp4.training import decoding
from peft_nvfp4.training.decode_step import mask_of
from peft_nvfp4.training.grouped_attention import grouped_attention

cuda = pytest.param("cuda", marks=pytest.mark.gpu)
on_devices = pytest.mark.parametrize("device", ["cpu", cuda])


def qwen3(**settings):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, head_dim=16, vocab_size=128, pad_token_id=0, **settings))


def capped():
    """Gemma 2 without windows: its attention caps the scores, which only transformers' eager attention does."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = hf.Gemma2Config(
        **sizes, head_dim=16, vocab_size=128, pad_token_id=0, layer_types=["full_attention"] * 2, attn_logit_softcapping=5.0,
        attn_implementation="eager",
    )  # fmt: skip
    return hf.Gemma2ForCausalLM(config)


MODELS = {"llama": lambda: tiny_llama(pad_token_id=0, eos_token_id=None), "qwen3": qwen3, "capped": capped}


def tuned(make=MODELS["llama"], device="cpu", recorded=True, backend="bf16", **settings):
    settings = dict(r=4, target_modules="all-linear", init_lora_weights=False) | settings
    model = make().to(device)
    torch.manual_seed(1)
    model = get_peft_model(model, NVFP4LoraConfig(**settings, backend=backend)).eval()
    model.generation_config.eos_token_id = None
    if not recorded:
        model.base_model.nvfp4_steps.decoding.replayed.clear()
        decoder(model).forward.inner.decoding = lambda ordinary, args, kwargs, named: ordinary(*args, **kwargs)
    elif device == "cpu":
        decoder(model).forward.inner.decoding.recorder = ForwardRehearsal
    return model


def decoder(model):
    return model.get_base_model().model


def pair(make=MODELS["llama"], **settings):
    """A model and its like without recordings."""
    return tuned(make, **settings), tuned(make, recorded=False, **settings)


def prompts(rows=3, length=9, seed=0, device="cpu"):
    """Padded on the left."""
    ids = torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0).to(device), "attention_mask": mask.to(device)}


def same_tokens(models, inputs, **settings):
    outputs = []
    for model in models:
        torch.manual_seed(3)
        outputs.append(model.generate(**{k: v.to(model.device) for k, v in inputs.items()}, **settings))
    assert torch.equal(*outputs), str(decoding_status(models[0]))
    return outputs[0]


def replayed(model):
    return sum(decoding_status(model).replayed.values())


WAYS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, top_p=0.9, temperature=1.3),
    "beams": dict(num_beams=3, do_sample=False),
    "sequences": dict(num_return_sequences=2, do_sample=True),
    "penalty": dict(repetition_penalty=1.3, do_sample=False),
}


@on_devices
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_same_tokens_as_ordinary_steps(make, way, device):
    models = pair(make, device=device)
    for length, new in ((9, 12), (5, 7)):
        tokens = same_tokens(models, prompts(length=length), max_new_tokens=new, **WAYS[way])
        assert tokens.shape[1] == length + new
    # the first and the second step of their kind run without
    assert replayed(models[0]) == 11 - 2 + 6, str(decoding_status(models[0]))


@on_devices
def test_every_backend(backend, device):
    models = pair(backend=backend, device=device)
    same_tokens(models, prompts(), max_new_tokens=8, do_sample=False)
    assert replayed(models[0]) == 5 and decoding_status(models[0]).recorded == 1
    assert "replayed 5 steps of generation: 3 rows" in str(models[0].base_model.nvfp4_steps)


@on_devices
def test_sequences_that_outgrow_a_bucket(monkeypatch, device):
    monkeypatch.setattr(decoding, "SHORTEST", 16)
    monkeypatch.setattr(decoding, "AHEAD", 2)
    models = pair(device=device)
    for length, new in ((9, 40), (5, 8), (3, 30)):
        same_tokens(models, prompts(length=length, rows=2), max_new_tokens=new, do_sample=False)
    status = decoding_status(models[0])
    assert set(status.replayed) == {"2 rows, up to 16 tokens", "2 rows, up to 32 tokens", "2 rows, up to 64 tokens"}
    assert sum(status.reasons.values()) == 3
    assert status.key_value_bytes == 2 * 2 * 2 * 2 * 64 * 16 * 4  # layers, keys and values, rows, heads, tokens, columns, bytes


@on_devices
def test_batches_of_other_sizes_share_the_buffers(device):
    models = pair(device=device)
    for rows in (3, 1, 4, 3, 1):
        same_tokens(models, prompts(rows=rows, length=10), max_new_tokens=6, do_sample=False)
    status = decoding_status(models[0])
    assert {kind: n > 4 for kind, n in status.replayed.items()} == {f"{n} rows, up to 256 tokens": n != 4 for n in (1, 3, 4)}
    assert status.discarded == 2  # four rows need other buffers


def test_a_chat_goes_on_with_the_cache_it_was_given_back():
    models, caches = pair(), [None, None]
    turns = [prompts(rows=1, length=6, seed=i)["input_ids"] for i in range(3)]
    texts = [turns[0], turns[0]]
    for i, turn in enumerate(turns):
        for j, model in enumerate(models):
            output = model.generate(
                texts[j], past_key_values=caches[j], max_new_tokens=5, do_sample=False, return_dict_in_generate=True
            )
            caches[j] = output.past_key_values
            following = turns[i + 1] if i + 1 < len(turns) else turn[:, :0]
            texts[j] = torch.cat([output.sequences, following], 1)
        assert torch.equal(*texts)
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == 11 * i + 10
        for a, b in zip(caches[0].layers, caches[1].layers):
            torch.testing.assert_close((a.keys, a.values), (b.keys, b.values))
    assert replayed(models[0]) == 3 * 4 - 2


@on_devices
def test_a_cache_outlives_the_generations_after_it(device):
    model = tuned(device=device)
    generate = lambda seed: model.generate(
        **prompts(seed=seed, device=device), max_new_tokens=6, do_sample=False, return_dict_in_generate=True
    ).past_key_values
    first = generate(0)
    expected = copy.deepcopy(first)
    bare = generate(1).layers[1].keys  # a tensor whose cache is gone
    copied = bare.clone()
    third = generate(2)
    assert first.layers[0].keys.shape[2] == 14
    for a, b in zip(first.layers, expected.layers):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    assert torch.equal(bare, copied) and not torch.equal(third.layers[1].keys, copied)
    assert decoding_status(model).reasons["keys and values of an earlier step are held elsewhere"] == 1
    assert replayed(model) == 3 + 5 + 3  # the third in new buffers


def test_two_generations_take_turns():
    models, found = pair(), []
    for model in models:
        with torch.no_grad():
            caches = [hf.DynamicCache(config=model.config) for _ in range(2)]
            tokens = [prompts(rows=1, seed=i)["input_ids"] for i in range(2)]
            for _ in range(5):
                for i, cache in enumerate(caches):
                    new = tokens[i][:, cache.get_seq_length() :]
                    logits = model(input_ids=new, past_key_values=cache, use_cache=True).logits
                    tokens[i] = torch.cat([tokens[i], logits[:, -1:].argmax(-1)], 1)
        found.append(torch.cat(tokens))
    assert torch.equal(*found)
    assert replayed(models[0]) == 2 * 4 - 2


def test_a_cropped_cache_and_a_step_that_is_taken_back():
    models, found = pair(), []
    for model in models:
        cache = model.generate(**prompts(rows=1), max_new_tokens=8, do_sample=False, return_dict_in_generate=True).past_key_values
        cache.crop(-3)
        with torch.no_grad():
            for token in (7, 8):
                output = model(input_ids=torch.tensor([[token]]), past_key_values=cache)
        found.append(output.logits)
        assert cache.get_seq_length() == 9 + 7 - 3 + 2 and output.past_key_values is cache
    torch.testing.assert_close(*found)


def other_adapter(model):
    model.add_adapter("other", NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, backend="bf16"))
    model.set_adapter("other")


def train(model):
    model.train()
    inputs = prompts(device=model.device)
    model(**inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5).step()
    model.zero_grad()
    model.eval()


CHANGES = {
    "trained": (train, 0),
    "other": (other_adapter, 0),
    "merged": (lambda m: m.merge_adapter(), 0),
    "scaled": (lambda m: [layer.scale_layer(0.5) for layer in m.modules() if hasattr(layer, "scale_layer")], 0),
    "moved": (lambda m: [setattr(p, "data", p.data.clone()) for n, p in m.named_parameters() if "lora" in n], 1),
    "attention": (lambda m: m.get_base_model().set_attn_implementation("eager"), 0),
}


@on_devices
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed(change, device):
    models = pair(device=device)
    before = same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
    for model in models:
        torch.manual_seed(2)
        CHANGES[change][0](model)
    after = same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
    assert change in ("merged", "moved", "attention") or not torch.equal(before, after)
    status = decoding_status(models[0])
    assert status.discarded == CHANGES[change][1]
    assert status.recorded == 1 + (change != "trained") and replayed(models[0]) == (8 if change == "trained" else 7)


@on_devices
def test_a_policy_and_its_reference_keep_their_recordings(device):
    models = pair(device=device)
    for _ in range(3):
        policy = same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
        with models[0].disable_adapter(), models[1].disable_adapter():
            reference = same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
        assert not torch.equal(policy, reference)
        for model in models:
            train(model)
    status = decoding_status(models[0])
    assert (status.recorded, status.discarded) == (2, 0)


def test_an_adapter_that_is_trained_leaves_the_recordings_of_a_frozen_one():
    models = pair()
    for model in models:
        torch.manual_seed(2)
        other_adapter(model)
        model.eval()
    for _ in range(2):
        for name in ("default", "other"):
            for model in models:
                model.set_adapter(name)
            same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
        for model in models:
            train(model)
    status = decoding_status(models[0])
    assert (status.recorded, status.discarded) == (2, 0)


@on_devices
def test_dropout_in_training_mode_draws_what_ordinary_steps_draw(device):
    models = pair(lora_dropout=0.3, device=device)
    for model in models:
        model.train()
    same_tokens(models, prompts(), max_new_tokens=8, do_sample=True)
    assert replayed(models[0]) == 5


def test_a_loop_of_ones_own_in_inference_mode():
    """No mask, no positions; recorded in inference mode, replayed out of it."""
    models, found = pair(), []
    for model in models:
        ids, cache = prompts(rows=1)["input_ids"], None
        for i in range(8):
            with torch.inference_mode() if i < 5 else torch.no_grad():
                output = model(input_ids=ids[:, -1:] if cache else ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], 1)
        found.append(ids)
    assert torch.equal(*found)
    assert replayed(models[0]) == 5


def test_streamers_and_stopping_criteria_see_every_token():
    class Streamer:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, tokens):
            self.tokens.append(tokens)

        def end(self):
            self.ended = True

    class Stop(hf.StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return torch.full((len(ids),), ids.shape[1] >= 16)

    model, streamer = tuned(), Streamer()
    ids = prompts(rows=1)["input_ids"]
    tokens = model.generate(input_ids=ids, streamer=streamer, stopping_criteria=[Stop()], max_new_tokens=50, do_sample=False)
    assert tokens.shape[1] == 16 and streamer.ended
    assert torch.equal(torch.cat([streamer.tokens[0].view(-1), *streamer.tokens[1:]]), tokens[0])
    assert replayed(model) == 4


def windowed():
    return qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)


RUN_AS_BEFORE = {
    "window": (windowed, {}, "DynamicSlidingWindowLayer"),
    "window without its layers": (windowed, dict(past_key_values=lambda: hf.DynamicCache()), "has windows"),
    "static": (MODELS["llama"], dict(cache_implementation="static"), "StaticCache"),
    "hidden states": (MODELS["llama"], dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states"),
    "attentions": (MODELS["capped"], dict(output_attentions=True, return_dict_in_generate=True), "output_attentions"),
    "lookup": (MODELS["llama"], dict(prompt_lookup_num_tokens=2, eos_token_id=2), "several tokens at once"),
    "no cache": (MODELS["llama"], dict(use_cache=False), None),
}


@pytest.mark.parametrize("case", RUN_AS_BEFORE)
def test_what_has_no_recording_runs_as_before_and_says_why(case):
    make, settings, reason = RUN_AS_BEFORE[case]
    models, found = pair(make), []
    for model in models:
        settings = {name: value() if callable(value) else value for name, value in settings.items()}
        inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]]).repeat(1, 2)}
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False, **settings)
        found.append(output if isinstance(output, torch.Tensor) else output.sequences)
        settings = RUN_AS_BEFORE[case][1]
    assert torch.equal(*found)
    reasons = decoding_status(models[0]).reasons
    assert any(reason in found for found in reasons) if reason else not reasons, reasons
    assert case == "lookup" or replayed(models[0]) == 0


@on_devices
def test_hooks_run_in_every_step(device):
    model, calls = tuned(device=device), []
    model.generate(**prompts(device=device), max_new_tokens=6, do_sample=False)
    handle = decoder(model).layers[0].register_forward_hook(lambda *args: calls.append(args))
    model.generate(**prompts(device=device), max_new_tokens=6, do_sample=False)
    handle.remove()
    assert len(calls) >= 6 and any("has hooks" in reason for reason in decoding_status(model).reasons)
    assert replayed(model) == 3
    model.generate(**prompts(device=device), max_new_tokens=6, do_sample=False)
    assert replayed(model) == 8 and decoding_status(model).recorded == 1


def test_a_recording_that_is_wrong_is_not_used():
    class Wrong(ForwardRehearsal):
        def forward(self, inputs):
            return super().forward({name: t.roll(1, 0) for name, t in inputs.items()})

    models = pair()
    decoder(models[0]).forward.inner.decoding.recorder = Wrong
    same_tokens(models, prompts(), max_new_tokens=12, do_sample=False)
    assert replayed(models[0]) == 0 and any("differ by" in reason for reason in decoding_status(models[0]).reasons)


def test_a_recording_that_failed_is_not_tried_again():
    tries = []

    def recorder(*args):
        tries.append(1)
        raise RuntimeError("not today")

    models = pair()
    decoder(models[0]).forward.inner.decoding.recorder = recorder
    same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
    assert len(tries) == 1 and decoding_status(models[0]).reasons["recording failed: RuntimeError: not today"] == 4


def test_a_model_that_is_another_one_in_every_step_is_not_recorded_for_ever():
    models, found = pair(), []
    for model in models:
        weight = decoder(model).norm.weight.requires_grad_(False)
        edit = lambda ids, scores, weight=weight: (weight.mul_(1), scores)[1]
        found.append(model.generate(**prompts(), max_new_tokens=14, do_sample=False, logits_processor=[edit]))
    assert torch.equal(*found)
    status = decoding_status(models[0])
    assert (status.recorded, replayed(models[0])) == (8, 0) and status.reasons["the model is another one in every call"] == 4


def test_recordings_and_buffers_can_be_freed():
    models = pair()
    same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
    size = decoding_status(models[0]).key_value_bytes
    assert release_forward_recordings(models[0]) == size > 0 and decoding_status(models[0]).key_value_bytes == 0
    same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
    assert decoding_status(models[0]).recorded == 2


def test_copies_begin_without_recordings_and_an_unloaded_model_has_none():
    models = pair()
    tokens = same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
    other = copy.deepcopy(models[0])
    assert decoding_status(other).recorded == 0 and decoder(other).forward.inner.decoding.decoder is decoder(other)
    assert torch.equal(other.generate(**prompts(), max_new_tokens=6, do_sample=False), tokens)
    merged = models[0].merge_and_unload()
    assert "forward" not in vars(merged.model)


def test_without_cuda_steps_run_and_the_status_says_why():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    model = tuned()
    decoder(model).forward.inner.decoding.recorder = decoding.ForwardRecording
    model.generate(**prompts(), max_new_tokens=4, do_sample=False)
    assert decoding_status(model).reasons == {"input_ids is on the cpu": 3}


def test_where_there_is_no_memory_for_buffers_steps_run_as_before(monkeypatch):
    tries = []

    class Large(decoding.KeyValues):
        def __init__(self, *args):
            tries.append(1)
            raise torch.OutOfMemoryError("not today")

    models = pair()
    monkeypatch.setattr(decoding, "KeyValues", Large)
    same_tokens(models, prompts(), max_new_tokens=6, do_sample=False)
    status = decoding_status(models[0])
    assert len(tries) == 1 and sum(n for reason, n in status.reasons.items() if "no memory" in reason) == 4
    assert status.key_value_bytes == 0


def test_two_threads():
    """Their steps take turns."""
    model, found = tuned(), {}
    expected = [model.generate(**prompts(seed=seed), max_new_tokens=12, do_sample=False) for seed in range(2)]

    def generate(seed):
        found[seed] = model.generate(**prompts(seed=seed), max_new_tokens=12, do_sample=False)

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], expected[seed]) for seed in range(2))


def test_grouped_attention_is_attention():
    q, k, v = torch.randn(3, 6, 1, 8), torch.randn(3, 2, 20, 8), torch.randn(3, 2, 20, 8)
    visible = torch.rand(3, 20) > 0.3
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    got, _ = grouped_attention(module, q, k, v, mask_of(visible, "sdpa", q.dtype), scaling=0.3, dropout=0.0)
    scores = torch.einsum("bhd,bhsd->bhs", q[:, :, 0], k.repeat_interleave(3, 1)) * 0.3
    shares = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    torch.testing.assert_close(got, torch.einsum("bhs,bhsd->bhd", shares, v.repeat_interleave(3, 1))[:, None])
    added = mask_of(visible, "eager", q.dtype)
    torch.testing.assert_close((scores + added[:, 0]).softmax(-1), shares)


def test_the_bucket_has_room_to_spare():
    assert [decoding.bucket_of(n) for n in (1, 179, 180, 384, 385, 3000)] == [256, 256, 512, 512, 1024, 4096]
