"""Losses that are not finite, and memory that is not enough: what is said, and what is left untouched."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.memory import Settings, estimate
from peft_nvfp4.training import callbacks
from peft_nvfp4.training.callbacks import NonFiniteError, OutOfMemory, StopOnNonFinite, cheaper, explain, memory_advice


def trainer_of(folder, backend: str = "nvfp4", accumulate: int = 1, **settings) -> Trainer:
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), NVFP4LoraConfig(backend=backend, r=4, target_modules="all-linear"))
    rows = torch.randint(0, 128, (16, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        **{
            **{"output_dir": str(folder), "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True},
            **{"report_to": "none", "logging_steps": 1, "disable_tqdm": True, "gradient_accumulation_steps": accumulate},
            **{"learning_rate": 1e-3, **settings},
        }
    )
    return Trainer(model=model, args=args, train_dataset=data, callbacks=[StopOnNonFinite()])


def break_at(trainer: Trainer, step: int, what: str) -> None:
    """From this step on, one module's output (or one parameter's gradient) is NaN."""
    base = trainer.model.get_base_model()
    now = lambda: trainer.state.global_step + 1 >= step
    if what == "gradient":
        p = base.model.layers[1].mlp.up_proj.lora_B["default"].weight
        p.register_hook(lambda grad: torch.full_like(grad, float("inf")) if now() else grad)
    else:
        module = base.get_submodule(what)
        module.register_forward_hook(lambda m, args, y: y * float("nan") if now() else y)


def state(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("backend", ["nvfp4", "nf4"])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, backend, accumulate):
    trainer = trainer_of(tmp_path, backend, accumulate)
    name = "model.layers.1.self_attn.q_proj"
    break_at(trainer, 5, name)
    seen = {}
    trainer.add_callback(Note(lambda: seen.update(weights=state(trainer.model), files=files(tmp_path))))
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    text = str(caught.value)
    assert "the loss of step 5" in text and "debug='underflow_overflow'" in text
    assert f"the last checkpoint is {tmp_path / 'checkpoint-4'}." in text
    rate = float(re.search(r"learning rate ([\d.e+-]+)", text)[1])
    assert rate == pytest.approx(1e-3 * (1 - 4 / 6), rel=1e-2), "linear decay, 4 of 6 steps taken"
    after = state(trainer.model)
    assert all(torch.equal(after[n], p) for n, p in seen["weights"].items()), "the step was not applied"
    assert files(tmp_path) == seen["files"], "nothing was written after it"


class Note(callbacks.TrainerCallback):
    """Calls a function at the end of every step, after what was saved."""

    def __init__(self, run):
        self.run = run

    def on_step_begin(self, args, state, control, **kwargs):
        self.run()


UP = "base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"


@pytest.mark.parametrize("limit, named", [(1.0, f" of {UP}"), (0.0, "")], ids=["named", "spread by a norm"])
def test_a_gradient_that_is_not_finite_is_named(tmp_path, limit, named):
    """Without a limit Trainer divides by the norm all the same: every gradient is NaN then, and nothing is named."""
    trainer = trainer_of(tmp_path, max_grad_norm=limit)
    break_at(trainer, 2, "gradient")
    with pytest.raises(NonFiniteError, match=f"the gradient{named} of step 2 is") as caught:
        trainer.train()
    assert "there is no checkpoint yet" in str(caught.value)


def test_a_run_without_trouble_is_left_alone(tmp_path):
    with_, without = trainer_of(tmp_path / "a"), trainer_of(tmp_path / "b")
    without.remove_callback(StopOnNonFinite)
    with_.train(), without.train()
    assert [r["loss"] for r in with_.state.log_history if "loss" in r] == [
        r["loss"] for r in without.state.log_history if "loss" in r
    ]
    assert not with_.model._forward_hooks and not with_.model._forward_pre_hooks


@pytest.mark.parametrize("backend", ["nvfp4", "nf4"])
def test_going_on_as_the_error_says_names_the_module(tmp_path, capsys, backend):
    """transformers' DebugUnderflowOverflow takes packed weights and fused modules."""
    trainer = trainer_of(tmp_path, backend, debug="underflow_overflow")
    break_at(trainer, 3, "model.layers.1.self_attn.q_proj")
    with pytest.raises(ValueError, match="inf/nan detected"):
        trainer.train()
    *_, last = re.findall(r"^ +(\S+) \w+$", capsys.readouterr().out, re.MULTILINE)
    assert last.startswith("base_model.model.model.layers.1.self_attn.q_proj")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_without_labels_is_told_as_such(tmp_path, accumulate):
    """Its loss is 0/0, which no module's output shows, and no learning rate helps."""
    trainer = trainer_of(tmp_path, accumulate=accumulate)
    for row in trainer.train_dataset:
        row["labels"] = torch.full_like(row["labels"], callbacks.IGNORED)
    with pytest.raises(NonFiniteError, match=r"step 1 .* no label that counts \(all are -100\)") as caught:
        trainer.train()
    assert "learning rate" not in str(caught.value)


def test_one_micro_batch_without_labels_is_no_trouble(tmp_path):
    """Trainer divides by the labels of all micro-batches of a step. What is wrong with another one is looked for."""
    trainer = trainer_of(tmp_path, accumulate=8, max_steps=2)
    for row in trainer.train_dataset[:4]:
        row["labels"] = torch.full_like(row["labels"], callbacks.IGNORED)
    break_at(trainer, 2, "model.layers.0.mlp.down_proj")
    with pytest.raises(NonFiniteError, match="the loss of step 2 .*learning rate"):
        trainer.train()
    empty, full = torch.tensor(True), torch.tensor(False)
    guard = StopOnNonFinite()
    for micro_batches, expected in (
        ([(empty, True), (full, True)], True),  # each with a mean of its own
        ([(empty, False), (full, False)], False),
        ([(empty, False), (empty, False)], True),
        ([], False),
    ):
        guard.unsupervised = micro_batches
        assert guard._no_label_counts() == expected


def test_gradients_are_left_to_a_loss_scaler(tmp_path):
    """Also to one that accelerate's configuration asked for, which Trainer's arguments do not show."""
    trainer = trainer_of(tmp_path)
    (name, p), (_, q), *_ = ((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad)
    p.grad, q.grad = torch.full_like(p, float("inf")), torch.zeros_like(q)
    guard = StopOnNonFinite()
    optimizer = torch.optim.SGD([p], lr=1.0)
    call = lambda: guard.on_pre_optimizer_step(trainer.args, trainer.state, None, model=trainer.model, optimizer=optimizer)
    optimizer.scaler = object()
    call()
    optimizer.scaler = None  # what accelerate's optimizer has without one
    with pytest.raises(NonFiniteError, match=f"the gradient of {name} of step 1"):
        call()


def test_an_interrupted_run_leaves_no_hooks_to_the_next(tmp_path):
    trainer = trainer_of(tmp_path)
    module = trainer.model.get_base_model().lm_head
    hook = module.register_forward_hook(lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    hook.remove()
    assert trainer.model._forward_hooks
    again = Trainer(model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset, callbacks=[StopOnNonFinite()])
    again.train()
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


SETTINGS = Settings(batch=4, sequence=1024)


def test_cheaper_settings_are_the_estimators():
    changes = dict(cheaper("llama-1b", SETTINGS))
    now = estimate("llama-1b", SETTINGS).peak
    from dataclasses import replace

    expected = {
        "batch 2 (and 2 times the accumulation)": {"batch": 2},
        "memory='small'": {"memory": "small"},
        "checkpointing": {"checkpointing": True},
        "memory='smallest'": {"memory": "smallest"},
        "optimizer paged_adamw_8bit": {"optimizer": "paged_adamw_8bit"},
    }
    for words, change in expected.items():
        assert changes[words] == estimate("llama-1b", replace(SETTINGS, **change)).peak < now
    everything = {k: v for change in expected.values() for k, v in change.items()}
    assert changes["all of these"] == estimate("llama-1b", replace(SETTINGS, **everything)).peak


def test_what_does_not_apply_is_not_advised():
    words = [w for w, _ in cheaper("llama-1b", Settings(backend="bf16-liger", batch=1))]
    assert words == ["checkpointing", "optimizer paged_adamw_8bit", "all of these"]
    done = Settings(batch=1, memory="smallest", checkpointing=True, optimizer="paged_adamw")
    assert not cheaper("llama-1b", done) and "none of the estimated settings" in explain("llama-1b", done)


def test_the_message_has_figures():
    text = explain("llama-1b", SETTINGS, 6 * 2**30)
    peak = estimate("llama-1b", SETTINGS).peak / 2**30
    assert f"estimated to take {peak:.2f} GiB" in text and "the GPU has 6.00 GiB" in text and "4 x 1024 tokens" in text
    assert "checkpointing: " in text and "memory='smallest': " in text
    text = explain({"model_type": "mamba"}, SETTINGS)
    assert "does not know this model" in text and "memory='smallest'" in text


def test_trainer_explains_itself(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, per_device_train_batch_size=4)
    trainer.model.get_base_model().model.layers[1].register_forward_pre_hook(out_of_memory)
    with pytest.raises(OutOfMemory, match=r"4 x 16 tokens with backend nvfp4.*batch 2") as caught, memory_advice(trainer):
        trainer.train()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    asked = []
    monkeypatch.setattr(callbacks, "explain", lambda model, settings, memory: asked.append(settings) or "")
    trainer.args.set_optimizer("paged_adamw_8bit")
    with pytest.raises(OutOfMemory), memory_advice(trainer):
        trainer.train()
    assert asked[0].optimizer == "paged_adamw_8bit" and asked[0].batch == 4
    assert not any("note" in str(hook) for hook in trainer.model._forward_pre_hooks.values())
    with pytest.raises(KeyError), memory_advice(trainer):
        raise KeyError("something else")


def test_settings_of_models():
    model = get_peft_model(tiny_llama(), NVFP4LoraConfig(backend="nf4", r=2, target_modules="all-linear"))
    assert callbacks.settings_of(model, batch=3) == Settings(backend="nf4", rank=2, batch=3)
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear"))
    assert callbacks.settings_of(model).backend == "bf16"


@pytest.mark.gpu
def test_a_gpu_that_is_too_small(tmp_path):
    trainer = trainer_of(tmp_path, use_cpu=False)
    trainer.model.get_base_model().model.layers[1].register_forward_pre_hook(
        lambda *args: torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    )
    with pytest.raises(OutOfMemory, match="the GPU has"), memory_advice(trainer):
        trainer.train()


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_the_script_of_the_page_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "long-runs.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    tiny_llama().save_pretrained("model")
    row = torch.arange(16)
    found = []
    for _ in range(2):
        names = {"MODEL": "model", "data": [{"input_ids": row, "labels": row}] * 8}
        exec(compile(code, "long-runs.md", "exec"), names)  # noqa: S102
        found.append(state(names["model"]))
        assert names["trainer"].state.global_step == 4 and "GB moved" in capsys.readouterr().out
        shutil.rmtree("run/checkpoint-4", ignore_errors=True)
    assert all(torch.equal(found[0][name], p) for name, p in found[1].items()), "the second run went on from step 2"


def command(tmp_path, *options: str):
    """The result of ``peft-nvfp4 train`` on a tiny model and 16 rows of text."""
    from _tiny_models import WORDS, save_tiny
    from typer.testing import CliRunner

    from peft_nvfp4.cli import application

    if not (tmp_path / "model").exists():
        save_tiny(tmp_path / "model")
        rows = "".join(json.dumps({"text": WORDS}) + "\n" for _ in range(16))
        (tmp_path / "rows.jsonl").write_text(rows)
    numbers = "--steps 3 --batch 2 --rank 2".split()
    words = ["train", str(tmp_path / "model"), str(tmp_path / "rows.jsonl"), *numbers, *options]
    return CliRunner().invoke(application(), words, env={"COLUMNS": "1000"})


def test_the_command_explains_memory_and_losses(tmp_path, monkeypatch):
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda m, x: out_of_memory() if m.training else forward(m, x))
    result = command(tmp_path, "--output", str(tmp_path / "a"))
    assert result.exit_code == 1 and "the GPU's memory is not enough for 2 x" in result.output and "batch 1" in result.output
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda m, x: forward(m, x) * (float("nan") if m.training else 1))
    result = command(tmp_path, "--output", str(tmp_path / "b"))
    assert result.exit_code == 1 and "the loss of step 1 is not finite" in result.output


def test_the_command_repeats_itself_and_offloads(tmp_path):
    small = ["--memory", "small"]
    runs = {"a": [*small, "--deterministic"], "b": [*small, "--deterministic"], "c": ["--memory", "smallest"]}
    found = []
    for name, options in runs.items():
        result = command(tmp_path, "--output", str(tmp_path / name), "--dropout", "0.1", *options)
        assert result.exit_code == 0, result.output
        found.append((tmp_path / name / "adapter_model.safetensors").read_bytes())
    assert found[0] == found[1] == found[2] and not torch.are_deterministic_algorithms_enabled()
    assert json.loads((tmp_path / "c" / "nvfp4_adapter.json").read_text())["memory"] == "smallest"
