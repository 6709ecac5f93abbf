"""CUDA graphs of the decoder: what is replayed, what is not and why, and that the numbers are those of eager code.

On a CPU a recording is played by :class:`Rehearsal`, which runs the recorded function again on the recording's own inputs and
seeds, as a graph would: all of the bookkeeping around a graph is the same.
"""

import copy
import pickle

import pytest
import torch
import transformers as hf
from _dataflow_models import SIZES
from _rehearsal import Rehearsal
from conftest import tiny_llama
from low_level import adapted_model
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, detach, disable_cuda_graphs, enable_cuda_graphs, graph_status
from peft_nvfp4.training import recorded_sizes
from peft_nvfp4.training.steps import slow_down_steps

cuda = pytest.param("cuda", marks=pytest.mark.gpu)
on_devices = pytest.mark.parametrize("device", ["cpu", cuda])


def tuned(device="cpu", graphed=True, **settings):
    model = tiny_llama(pad_token_id=0).to(device)
    settings = dict(r=4, target_modules="all-linear", init_lora_weights=False) | settings
    model = adapted_model(model, **settings).train()
    slow_down_steps(model)  # batches as they are: packed ones are tested in test_packing.py
    if graphed:
        enable_cuda_graphs(model)
        if device == "cpu":
            model.get_base_model().model.forward.recorder = Rehearsal
    return model


def batch(device="cpu", rows=2, length=12, seed=0):
    ids = torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)
    return {"input_ids": ids, "labels": ids}


def losses_and_gradients(model, batches, accumulate=2, seed=7):
    """Losses of every batch; gradients accumulated over ``accumulate`` of them at a time."""
    torch.manual_seed(seed)
    found = []
    for i, inputs in enumerate(batches):
        loss = model(**inputs).loss
        loss.backward()
        found.append(loss.detach().clone())
        if i % accumulate == accumulate - 1:
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
    return found


@on_devices
@pytest.mark.parametrize("settings", [{}, dict(lora_dropout=0.2, gradients="nvfp4_sr")], ids=["plain", "dropout-sr"])
def test_replays_are_bit_equal_to_eager_steps(device, settings):
    """Losses and accumulated gradients of six steps, with dropout and stochastic rounding from the same generator."""
    batches = [batch(device, seed=i) for i in range(6)]
    eager = losses_and_gradients(tuned(device, False, **settings), batches)
    model = tuned(device, **settings)
    replayed = losses_and_gradients(model, batches)
    assert len(eager) == len(replayed)
    assert all(map(torch.equal, eager, replayed))
    status = graph_status(model)
    assert sum(status.graphs.values()) == 6 and not status.reasons, str(status)


@on_devices
def test_the_shapes_that_are_met_most_often_are_recorded(device, monkeypatch):
    monkeypatch.setattr(recorded_sizes, "MAX_GRAPHS", 2)
    model, eager = tuned(device), tuned(device, False)
    batches = [batch(device, length=n) for n in (16, 12, 16, 8, 8, 12)]  # 12 gives way to 8, and 8 does not to 12
    with pytest.warns(UserWarning, match="2 combinations of input shapes are recorded"):
        replayed = losses_and_gradients(model, batches, 1)
    assert all(map(torch.equal, replayed, losses_and_gradients(eager, batches, 1)))
    assert graph_status(model).graphs == {"input_ids (2, 16)": 2, "input_ids (2, 12)": 1, "input_ids (2, 8)": 1}
    assert list(graph_status(model).reasons.values()) == [2]


def test_longer_batches_than_any_before_are_recorded_once_they_pay():
    model = tuned()
    losses_and_gradients(model, [batch(length=n) for n in (12, 8)], 1)
    forward = model.get_base_model().model.forward
    with pytest.warns(UserWarning, match="more tokens than all batches"):
        losses_and_gradients(model, [batch(length=n) for n in (14, 16, 14, 14, 14, 14, 14)], 1)
    assert [entry.tokens for entry in forward.entries.values()] == [24, 16]
    losses_and_gradients(model, [batch(length=n) for n in (14, 12)], 1)  # the eighth: four for each recording
    assert forward.sizes.largest == 32 and [entry.tokens for entry in forward.entries.values()] == [28, 24]


@on_devices
def test_padding_is_masked(device):
    inputs = batch(device, length=16)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 9:] = 0
    inputs |= {"attention_mask": mask, "labels": inputs["input_ids"].masked_fill(mask == 0, -100)}
    model = tuned(device)
    full, padded = dict(inputs, attention_mask=torch.ones_like(mask)), inputs
    eager = losses_and_gradients(tuned(device, False), [full, padded, full], 1)
    replayed = losses_and_gradients(model, [full, padded, full], 1)
    assert len(graph_status(model).graphs) == 2
    # two attention kernels (with and without a mask) round differently in FP32: 1e-6 of values around 1
    for a, b in zip(eager, replayed):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def change_adapter(model):
    model.add_adapter("other", NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.set_adapter("other")


def replace(module, name):
    setattr(module, name, torch.nn.Parameter(getattr(module, name).data))


CHANGES = {
    "adapter": change_adapter,
    "scaling": lambda m: [layer.scale_layer(0.5) for layer in m.modules() if hasattr(layer, "scale_layer")],
    "frozen": lambda m: [p.requires_grad_(False) for n, p in m.named_parameters() if "q_proj.lora_A" in n],
    "replaced": lambda m: [replace(layer, "weight") for n, layer in m.named_modules() if n.endswith("lora_A.default")],
    "epsilon": lambda m: setattr(m.get_base_model().model.layers[0].input_layernorm, "variance_epsilon", 5.0),
    "forward": lambda m: setattr(m.get_base_model().model.layers[0].mlp.act_fn, "forward", torch.relu),
    "submodule": lambda m: m.get_base_model().model.layers[0].mlp.eval(),
    "attention": lambda m: m.get_base_model().set_attn_implementation("eager"),
    "detached": detach,
    "moved": lambda m: [setattr(p, "data", p.data.clone()) for n, p in m.named_parameters() if "lora" in n],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_is_recorded_anew(change):
    results = []
    for graphed in (True, False):
        model = tuned(graphed=graphed)
        losses_and_gradients(model, [batch()], 1)
        torch.manual_seed(1)
        CHANGES[change](model)
        results.append(losses_and_gradients(model, [batch()], 1))
        if graphed:
            assert graph_status(model).discarded == 1
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))


@pytest.mark.gpu
def test_the_last_loss_may_be_held_when_a_model_that_has_changed_is_recorded_anew():
    """It holds memory of the recording that is discarded."""
    results = []
    for graphed in (True, False):
        model = tuned("cuda", graphed)
        held = model(**batch("cuda")).loss
        held.backward()
        model.zero_grad()
        CHANGES["scaling"](model)
        results.append(losses_and_gradients(model, [batch("cuda")], 1))
        if graphed:
            status = graph_status(model)
            assert (status.discarded, sum(status.graphs.values()), dict(status.reasons)) == (1, 2, {})
        assert torch.randn(3, device="cuda").isfinite().all()  # a capture that fails leaves the generator unusable
        del held
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_evaluation_and_generation_run_without_and_do_not_disturb():
    model = tuned()
    first = losses_and_gradients(model, [batch()], 1)
    with torch.no_grad():
        model.eval()
        logits = model(batch()["input_ids"]).logits
        model.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False)
        model.train()
    assert logits.shape == (2, 12, 128)
    assert all(map(torch.equal, first, losses_and_gradients(model, [batch()], 1)))
    assert sum(graph_status(model).graphs.values()) == 2


def test_two_forwards_before_a_backward():
    model, eager = tuned(), tuned(graphed=False)
    results = []
    for m in (model, eager):
        (m(**batch(seed=1)).loss + m(**batch(seed=2)).loss).backward()
        results.append([p.grad for p in m.parameters() if p.grad is not None])
    assert all(map(torch.equal, *results))
    assert graph_status(model).reasons == {"the backward of an earlier forward is still to come": 1}
    losses_and_gradients(model, [batch()], 1)
    assert sum(graph_status(model).graphs.values()) == 2


def test_a_forward_whose_backward_never_comes():
    model = tuned()
    model(**batch())
    losses_and_gradients(model, [batch()], 1)
    assert not graph_status(model).reasons


def test_backward_twice_is_refused():
    loss = tuned()(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="disable_cuda_graphs"):
        loss.backward()


@pytest.mark.parametrize(
    "extra, reason",
    [
        (dict(output_hidden_states=True), "more than the last hidden state"),
        (dict(position_ids=torch.arange(12)[None]), "packed sequences"),
        (dict(past_key_values=hf.DynamicCache()), "DynamicCache"),
    ],
    ids=["hidden-states", "packed", "cache"],
)
def test_what_a_recording_cannot_do_runs_without_and_says_why(extra, reason):
    model = tuned()
    with pytest.warns(UserWarning, match=reason):
        loss = model(**batch(), **extra).loss
    loss.backward()
    (found,) = graph_status(model).reasons
    assert reason in found


def test_hooks_run_in_every_step():
    model, calls = tuned(), []
    losses_and_gradients(model, [batch()], 1)
    model.get_base_model().model.layers[0].register_forward_hook(lambda *args: calls.append(args))
    with pytest.warns(UserWarning, match="would run only while a step is recorded"):
        losses_and_gradients(model, [batch(), batch()], 1)
    assert len(calls) == 3  # once more in the rehearsal that is thrown away; a replay on a GPU calls nothing


def test_a_recording_that_failed_is_not_tried_again():
    """And leaves nothing: of a mixture with adapters on its experts, the gradients of a recording are gigabytes."""
    model, tries = tuned(), []

    def recorder(run, inputs, parameters, shared):
        tries.append(1)
        shared.gradients = [torch.empty_like(p) for p in parameters]
        raise RuntimeError("not today")

    model.get_base_model().model.forward.recorder = recorder
    with pytest.warns(UserWarning, match="recording failed: RuntimeError: not today"):
        for _ in range(3):
            model(**batch()).loss.backward()
    assert model.get_base_model().model.forward.shared.gradients is None
    assert len(tries) == 1 and list(graph_status(model).reasons.values()) == [3]
    model.get_base_model().model.forward.recorder = Rehearsal
    model.base_model.set_scale("default", 0.5) if hasattr(model.base_model, "set_scale") else CHANGES["scaling"](model)
    model(**batch()).loss.backward()
    assert sum(graph_status(model).graphs.values()) == 1


def test_a_window_in_a_sub_config_keeps_its_mask():
    """Gemma 3 with images: the decoder's config is a composite, the sliding window stands in its text_config."""
    text = SIZES | dict(head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention"], pad_token_id=0)
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    tokens = dict(mm_tokens_per_image=4, image_token_index=127, boi_token_index=125, eoi_token_index=126)
    losses = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(text_config=text, vision_config=vision, **tokens))
        targets = r".*language_model.*(q|k|v|o|gate|up|down)_proj"
        model = get_peft_model(model, NVFP4LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()
        if graphed:
            enable_cuda_graphs(model)
            model.get_base_model().model.forward.recorder = Rehearsal
        ids = batch()["input_ids"].clamp(max=120)
        losses.append(model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), token_type_ids=0 * ids).loss)
    assert torch.equal(*losses)


def test_replicas_of_data_parallel_compute_with_their_own_forward():
    decoder = tuned().get_base_model().model
    replica = decoder._replicate_for_data_parallel()
    assert "forward" not in vars(replica) and "forward" in vars(decoder)


def test_without_cuda_steps_run_and_the_status_says_why():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    model = tuned(graphed=False)
    enable_cuda_graphs(model)
    with pytest.warns(UserWarning, match="is on the cpu"):
        model(**batch()).loss.backward()
    assert graph_status(model).graphs == {}


def test_copies_pickles_and_switching_off():
    model = tuned()
    expected = losses_and_gradients(model, [batch()], 1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, expected, losses_and_gradients(other, [batch()], 1)))
        assert other.get_base_model().model.forward.decoder is other.get_base_model().model
    disable_cuda_graphs(model)
    assert "forward" not in vars(model.get_base_model().model)
    assert all(map(torch.equal, expected, losses_and_gradients(model, [batch()], 1)))
    merged = tuned().merge_and_unload()
    assert "forward" not in vars(merged.model)


def test_models_without_a_decoder_raise():
    with pytest.raises(ValueError, match="has no decoder"):
        enable_cuda_graphs(torch.nn.Linear(2, 2))


@on_devices
def test_trainer_with_accumulation_gives_the_same_losses(device, tmp_path):
    """Trainer passes num_items_in_batch, moves batches, accumulates and clips; nothing of that may show in the numbers."""
    data = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(1, 128, (16, 12), generator=torch.Generator().manual_seed(3))
    ]
    histories = []
    for graphed in (False, True):
        model = tuned(device, graphed, lora_dropout=0.1)
        arguments = hf.TrainingArguments(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=device == "cpu", seed=0, learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        trainer = hf.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        histories.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(histories[0]) == 4 and histories[0] == histories[1]
    assert sum(graph_status(model).graphs.values()) == 8, str(graph_status(model))
