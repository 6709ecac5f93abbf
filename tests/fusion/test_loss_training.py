"""The loss at supervised positions where models are trained: inside PEFT's models, with heads that are adapted, sharded or
quantised, in copies and replicas, and under the trainers of transformers and TRL."""

import copy
import pickle
import threading

import pytest
import torch
import transformers as hf
from _assertions import unit
from _loss_models import EXACT, VOCABULARY, assert_same_step, batch, build, distance, step
from _tiny_models import tiny_tokenizer
from peft import LoraConfig, get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.fusion.lazy_logits import LazyLogits
from peft_nvfp4.fusion.loss_attach import attach_loss, detach_loss

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
        assert torch.is_tensor(got[0].logits) == (kind != "frozen_head")  # a frozen base has it attached
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


def test_a_head_of_several_ranks_is_called_once(tmp_path):
    """Ranks have different numbers of labels; a sharded head that one of them called once more would wait for ever."""
    model = get_peft_model(build(), copy.deepcopy(KINDS["lora_on_head"])).train()
    expected, calls = step(model), []
    attach_loss(model, chunk=2)
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
        with monkeypatch.context() as patched:
            patched.setattr(LazyLogits, "tensor", None)  # not even accelerate's cast of outputs computes them
            trainer.train()
        trainer.evaluate()
        logs.append(logged(trainer, "loss", "grad_norm", "eval_loss", "eval_accuracy"))
    assert_same_logs(*logs[::-1], bound=4 * unit(torch.bfloat16) if "bf16" in settings else 1e-5)
    assert len(set(logs[0]["loss"])) == 3


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_sft_trainer(tmp_path):
    """Prompts masked out; loss, accuracy and entropy of training and evaluation as without."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    pairs = {
        "prompt": ["the film was ", "question ", "a b c "] * 2,
        "completion": ["good and fine", "answer red blue", "dull"] * 2,
    }
    data, logs = datasets.Dataset.from_dict(pairs), []
    for attached in (False, True):
        torch.manual_seed(5)
        model = get_peft_model(build(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        assert not attached or attach_loss(model).attached
        arguments = trl.SFTConfig(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            use_cpu=True, learning_rate=0.05, optim="sgd", report_to=[], disable_tqdm=True, save_strategy="no", bf16=False,
        )  # fmt: skip
        trainer = trl.SFTTrainer(model, arguments, train_dataset=data, eval_dataset=data, processing_class=tiny_tokenizer())
        trainer.train()
        trainer.evaluate()
        logs.append(logged(trainer, "loss", "mean_token_accuracy", "entropy", "eval_loss", "eval_mean_token_accuracy"))
    assert_same_logs(*logs[::-1], bound=1e-5)
