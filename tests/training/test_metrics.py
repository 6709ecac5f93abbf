"""Numbers that a Trainer logs for us: which, when, and that they are those of the run."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from _rehearsal import Rehearsal
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from peft_nvfp4 import NVFP4LoraConfig, frozen_bytes
from peft_nvfp4.training import metrics
from peft_nvfp4.training.metrics import StepMetrics

LENGTHS = (12, 5, 9, 9)
"""Tokens of rows: a step has two micro-batches of two rows, of 17 in 24 places and of 18 in 18."""
NAMES = {
    *("tokens_per_second", "padding_share", "replayed_share", "recordings"),
    *(f"memory_{kind}_gib" for kind in ("frozen", "dense", "trained", "optimizer", "recordings")),
}


class Reporter(TrainerCallback):
    """What TensorBoard's callback is given."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs))


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    filled = lambda name, value: torch.stack(
        [torch.nn.functional.pad(r[name], (0, longest - len(r[name])), value=value) for r in rows]
    )
    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100), "attention_mask": filled("attention_mask", 0)}


def trained(folder, report_to=("tensorboard",), config=NVFP4LoraConfig, callbacks=(), prepare=lambda model: None):
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(pad_token_id=0), config(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    prepare(model)
    rows = [torch.arange(1, 1 + length) for length in LENGTHS * 3]
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]
    args = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential", optim="adamw_torch",
    )  # fmt: skip
    reporter = Reporter()
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate, callbacks=[*callbacks, reporter])
    args.report_to = list(report_to)  # without its packages
    trainer.train()
    return trainer, reporter.lines


def ours(line):
    return {name.removeprefix("nvfp4/"): value for name, value in line.items() if name.startswith("nvfp4/")}


def rehearsed(model):
    model.get_base_model().model.forward.inner.recorder = Rehearsal


@pytest.fixture
def a_second_a_line(monkeypatch):
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=count(1.0).__next__))


def test_a_reporter_gets_the_numbers_of_the_run(tmp_path, a_second_a_line):
    trainer, lines = trained(tmp_path, prepare=rehearsed)
    losses = [line for line in lines if "loss" in line]
    assert len(losses) == 3 and not any(ours(line) for line in lines if "loss" not in line)
    for line in losses:
        assert ours(line).keys() == NAMES | ({"memory_peak_gib"} if torch.cuda.is_available() else set())
    last, model = ours(losses[-1]), trainer.model
    assert last["tokens_per_second"] == 35 and last["padding_share"] == pytest.approx(7 / 42)
    assert last["replayed_share"] == 1.0 and last["recordings"] == len(model.base_model.nvfp4_steps.recordings.graphs) > 0
    assert last["memory_frozen_gib"] * 2**30 == frozen_bytes(model) and last["memory_recordings_gib"] == 0  # not on a CPU
    trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert last["memory_trained_gib"] * 2**30 == trained_bytes
    assert last["memory_optimizer_gib"] * 2**30 == pytest.approx(2 * trained_bytes, rel=0.05)  # and a step count for each
    kept = [p for name, p in model.named_parameters() if "embed_tokens" in name or "norm" in name or "lm_head" in name]
    assert last["memory_dense_gib"] * 2**30 == sum(p.nbytes for p in kept)
    assert [ours(line) for line in trainer.state.log_history if "loss" in line] == [ours(line) for line in losses]


def test_weights_are_counted_again_where_they_have_changed(tmp_path, monkeypatch):
    """By memory="auto", which says so; not for each line, since that takes milliseconds."""
    counted = []
    monkeypatch.setattr(metrics, "_held_bytes", lambda *a: counted.append(1) or {})
    trained(tmp_path)
    assert len(counted) == 1
    level = SimpleNamespace(lines=[])
    monkeypatch.setattr(metrics.StepReport, "memory", property(lambda self: level))
    trained(tmp_path, callbacks=[StepMetrics(), Say(level.lines)])
    assert len(counted) == 1 + 2


class Say(TrainerCallback):
    def __init__(self, lines):
        self.lines = lines

    def on_step_end(self, args, state, control, **kwargs):
        self.lines += ["'small' from now on"] if state.global_step == 2 else []


def test_what_was_not_used_has_no_number(tmp_path):
    def hook(model):  # it would see one row: such a call is not packed
        model.get_base_model().model.layers[0].register_forward_hook(lambda *a: None)

    _, lines = trained(tmp_path, prepare=hook)
    last = ours(lines[2])
    assert NAMES - last.keys() == {"tokens_per_second", "padding_share"} and last["replayed_share"] == last["recordings"] == 0


def test_nothing_is_added_where_nobody_is_told(tmp_path):
    trainer, lines = trained(tmp_path / "silent", report_to=())
    assert not any(map(ours, lines)) and not any(isinstance(c, StepMetrics) for c in trainer.callback_handler.callbacks)
    trainer, lines = trained(tmp_path / "plain", config=LoraConfig)
    assert not any(map(ours, lines)) and not any(isinstance(c, StepMetrics) for c in trainer.callback_handler.callbacks)


def test_it_completes_the_history_where_it_is_given(tmp_path):
    trainer, _ = trained(tmp_path, report_to=(), callbacks=[StepMetrics()])
    assert [NAMES <= ours(line).keys() for line in trainer.state.log_history] == [True] * 3 + [False]


def test_training_is_the_same(tmp_path):
    weights = lambda trainer: [p for p in trainer.model.parameters() if p.requires_grad]
    told, _ = trained(tmp_path / "a")
    silent, _ = trained(tmp_path / "b", report_to=())
    assert all(torch.equal(a, b) for a, b in zip(weights(told), weights(silent)))
    told.args.max_steps = 5
    told.train()  # again: one callback, and rates begin anew
    assert sum(isinstance(c, StepMetrics) for c in told.callback_handler.callbacks) == 1
