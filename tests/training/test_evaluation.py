"""Evaluation: the numbers of ordinary calls, from recordings of packed rows, with logits for those who read them alone."""

import numpy as np
import pytest
import torch
import transformers as hf
from _rehearsal import ForwardRehearsal, Rehearsal
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, evaluation_status, graph_status, packing_status, release_forward_recordings
from peft_nvfp4.training import evaluation
from peft_nvfp4.training.steps import slow_down_steps

cuda = pytest.param("cuda", marks=pytest.mark.gpu)
on_devices = pytest.mark.parametrize("device", ["cpu", cuda])


def tuned(device="cpu", fast=True, **settings):
    model = tiny_llama(pad_token_id=0, dtype=torch.bfloat16 if device == "cuda" else torch.float32).to(device)
    settings = dict(r=4, target_modules="all-linear", init_lora_weights=False, backend="bf16") | settings
    torch.manual_seed(1)
    model = get_peft_model(model, NVFP4LoraConfig(**settings)).eval()
    if not fast:
        slow_down_steps(model)
    elif device == "cpu":
        forward(model).recorder, forward(model).evaluation.recorder = Rehearsal, ForwardRehearsal
    return model


def forward(model):
    return model.get_base_model().model.forward.inner


def rows(count=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (int(n),), generator=generator) for n in torch.randint(5, 40, (count,), generator=generator)]


def collate(texts):
    width = max(map(len, texts))
    ids, mask, labels = (torch.full((len(texts), width), value) for value in (0, 0, -100))
    for i, text in enumerate(texts):
        ids[i, : len(text)], mask[i, : len(text)], labels[i, : len(text)] = text, 1, text
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batch(device="cpu", count=4, seed=0):
    return {name: tensor.to(device) for name, tensor in collate(rows(count, seed)).items()}


def trainer(model, folder, data, metrics=None, **settings):
    settings = dict(prediction_loss_only=metrics is None) | settings
    arguments = hf.TrainingArguments(
        folder, per_device_eval_batch_size=4, per_device_train_batch_size=4, use_cpu=model.device.type == "cpu", report_to=[],
        save_strategy="no", remove_unused_columns=False, disable_tqdm=True, seed=0, **settings,
    )  # fmt: skip
    return hf.Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collate, compute_metrics=metrics)


def close(device):
    # two attention kernels round differently: 1e-6 in FP32; in BF16 a last place, 2^-8, of which a mean of losses keeps little
    return dict(rtol=1e-5, atol=0) if device == "cpu" else dict(rtol=3e-3, atol=0)


@on_devices
def test_the_loss_is_that_of_ordinary_calls(device, tmp_path):
    fast, plain = (trainer(tuned(device, fast), tmp_path, rows()) for fast in (True, False))
    expected = plain.evaluate()["eval_loss"]
    for _ in range(2):
        torch.testing.assert_close(fast.evaluate()["eval_loss"], expected, **close(device))
    assert sum(evaluation_status(fast.model).replayed.values()) > 6


def test_no_logits_are_made_where_nobody_reads_them(tmp_path, monkeypatch):
    model, seen = tuned(), []
    head = model.get_base_model().lm_head
    with torch.no_grad():
        model(**batch())  # the trial of the loss calls the head
    evaluated = trainer(model, tmp_path, rows())
    original = torch.nn.functional.linear

    def linear(x, weight, *args):
        if weight is head.weight:
            seen.append(x.shape)
        return original(x, weight, *args)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    evaluated.evaluate()
    assert not seen


@on_devices
def test_metrics_get_logits(device, tmp_path):
    def metrics(prediction):
        real = prediction.label_ids != -100
        assert isinstance(prediction.predictions, np.ndarray) and prediction.predictions.shape == (*real.shape, 128)
        return {"sum": float(np.abs(prediction.predictions[real]).sum())}

    found = [trainer(tuned(device, fast), tmp_path, rows(), metrics).evaluate() for fast in (True, False)]
    for name in ("eval_loss", "eval_sum"):
        torch.testing.assert_close(found[0][name], found[1][name], **close(device))


@on_devices
def test_similar_numbers_of_tokens_share_a_recording(device):
    model, plain = tuned(device), tuned(device, False)
    for seed in range(8):
        inputs = batch(device, seed=seed)
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss, **close(device))
    status = evaluation_status(model)
    assert status.recorded <= 2 and sum(status.replayed.values()) >= 3, str(status)
    assert packing_status(model).tokens < packing_status(model).places


@on_devices
def test_recordings_of_training_are_left_alone(device, tmp_path):
    histories = []
    for fast in (True, False):
        model = tuned(device, fast, lora_dropout=0.0)
        trained = trainer(
            model, tmp_path, rows(), max_steps=4, eval_strategy="steps", eval_steps=1, logging_steps=1, learning_rate=1e-2
        )
        trained.train()
        names = ("loss", "eval_loss")
        histories.append([entry[name] for entry in trained.state.log_history for name in names if name in entry])
        if fast:
            assert graph_status(model).discarded == 0 and sum(graph_status(model).graphs.values()) == 4
            assert evaluation_status(model).discarded == 0 and sum(evaluation_status(model).replayed.values()) > 10
    torch.testing.assert_close(*histories, **(close(device) | dict(rtol=1e-3 if device == "cpu" else 2e-2)))


def test_a_reference_is_scored_without_its_policy():
    model, plain = tuned(), tuned(fast=False)
    inputs = {name: tensor for name, tensor in batch().items() if name != "labels"}
    real = inputs["attention_mask"] != 0
    for mode in (True, False, True, False):
        scores = []
        for m in (model.train(mode), plain.train(mode)):
            with torch.no_grad():
                policy = m(**inputs, use_cache=False).logits
                with m.disable_adapter():
                    scores.append(m(**inputs, use_cache=False).logits)
            assert not torch.allclose(policy[real], scores[-1][real])
        torch.testing.assert_close(*(score[real] for score in scores))
    status = evaluation_status(model)
    assert (status.recorded, status.discarded, sum(status.replayed.values())) == (4, 0, 7)


def test_who_asks_for_a_cache_gets_one():
    model = tuned()
    with torch.no_grad():
        assert model(**batch()).past_key_values is None
        assert model(**batch(), use_cache=True).past_key_values.get_seq_length() == batch()["input_ids"].shape[1]
        inputs = {name: tensor for name, tensor in batch().items() if name != "labels"}
        assert model(**inputs).past_key_values is not None
    assert model(**batch()).past_key_values is not None  # with a gradient all is as before


def test_in_inference_mode():
    model, plain = tuned(), tuned(fast=False)
    for seed in (0, 0, 0):
        with torch.inference_mode():
            torch.testing.assert_close(model(**batch(seed=seed)).loss, plain(**batch(seed=seed)).loss, **close("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss, **close("cpu"))
    assert sum(evaluation_status(model).replayed.values()) == 3


def test_a_recording_that_is_wrong_is_not_used():
    class Wrong(ForwardRehearsal):
        def forward(self, inputs):
            return super().forward(inputs) * 1.1

    model, plain = tuned(), tuned(fast=False)
    forward(model).evaluation.recorder = Wrong
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss, **close("cpu"))
    assert evaluation_status(model).reasons["a recorded call and an ordinary one differ by 10%"] == 3
    assert not evaluation_status(model).replayed


def test_recordings_can_be_freed():
    model = tuned()
    with torch.no_grad():
        for _ in range(3):
            model(**batch())
        release_forward_recordings(model)
        model(**batch())
    assert evaluation_status(model).recorded == 2 and evaluation_status(model).discarded == 1


def test_logits_that_were_not_read_yet_can_be_saved(tmp_path):
    with torch.no_grad():
        logits = tuned()(**batch()).logits
        assert isinstance(logits, torch.Tensor) and torch.is_tensor(logits)
        torch.save(logits, tmp_path / "logits.pt")
        loaded = torch.load(tmp_path / "logits.pt")
        assert type(loaded) is torch.Tensor and torch.equal(loaded, tuned()(**batch()).logits)
        assert np.asarray(tuned()(**batch()).logits).shape == loaded.shape


def test_rows_of_too_many_tokens_are_not_filled_and_not_recorded(monkeypatch):
    monkeypatch.setattr(evaluation, "LARGEST", 64)
    model, plain = tuned(), tuned(fast=False)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss, **close("cpu"))
    assert evaluation_status(model).reasons == {"more than 64 tokens": 3}
