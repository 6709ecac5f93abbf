"""What goes wrong around a run: numbers that are not finite, a full disk, folders that are damaged or not what they should be."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _tiny_models import save_tiny, tiny_tokenizer
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_cli_data import CHAT, write
from typer.testing import CliRunner

from peft_nvfp4 import cli
from peft_nvfp4.training.callbacks import NonFiniteError, StopOnNonFinite
from peft_nvfp4.training.distributed.resume import last_checkpoint

pytest.importorskip("trl", reason="not run: trl is not installed")
pytest.importorskip("torchmetrics", reason="not run: torchmetrics is not installed")
from peft_nvfp4.cli._run import folders, options, training

NO_EPSILON = {"optimizer": "adamw_torch", "trainer": {"adam_epsilon": 0.0}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, data, and an adapter trained for four steps, with a checkpoint of each of the last two."""
    folder = tmp_path_factory.mktemp("world")
    save_tiny(folder / "model")
    write(folder / "data.jsonl", [{"text": f"the film is {word}"} for word in ("good", "bad", "fine", "dull")])
    command("train", folder / "model", folder / "data.jsonl", "-o", folder / "out", "--save-every", 1, "--batch", 2, "--steps", 4)
    return folder


def command(*args, code: int = 0) -> str:
    """What a command says, in one line."""
    result = CliRunner().invoke(cli.application(), [*map(str, args)])
    assert result.exit_code == code and "Traceback" not in result.output, f"{result.output}\n{result.exception!r}"
    if code == 1:
        assert result.stderr.count("Error: ") == 1
    return " ".join(result.output.split())


def train(world, output, **settings) -> list[str]:
    """Trained in this process: the lines said."""
    given = {"model": str(world / "model"), "dataset": str(world / "data.jsonl"), "output": str(output), "batch": 2, "rank": 2}
    lines = []
    resume = settings.pop("resume", False)
    training.run(options.TrainOptions(**given | settings), resume, lines.append)
    return lines


# ---------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("save_every", [0, 1])
def test_parameters_that_are_not_finite_are_not_saved(world, tmp_path, save_every):
    """The last step of Adam without its epsilon divides 0 by 0: after the gradients were looked at."""
    with pytest.raises(
        NonFiniteError, match="lora_A.* is not finite .*after step 1. Nothing of it was saved; there is no checkpoint"
    ):
        train(world, tmp_path / "out", steps=1 + save_every, save_every=save_every, **NO_EPSILON)
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_a_loss_of_an_evaluation_that_is_not_finite_ends_the_run(world, tmp_path, monkeypatch):
    """As it comes of rows that overflow."""
    before = training.Trainer.prediction_step
    loss = lambda *args, **kwargs: (before(*args, **kwargs)[0] * math.nan, None, None)
    monkeypatch.setattr(training.Trainer, "prediction_step", loss)
    with pytest.raises(NonFiniteError, match="eval_loss is nan after step 1"):
        train(world, tmp_path / "out", steps=1, eval_rows=1)
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def damaged_adapter(folder: Path, how) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    how(next(iter(tensors.values())))
    save_file(tensors, path, {"format": "pt"})


def test_a_checkpoint_that_is_not_finite_or_cut_off_is_not_offered(world, tmp_path):
    out = shutil.copytree(world / "out", tmp_path / "out")
    assert last_checkpoint(out) == str(out / "checkpoint-4")
    damaged_adapter(out / "checkpoint-4", lambda t: t.view(-1)[:1].fill_(math.nan))
    assert last_checkpoint(out) == str(out / "checkpoint-3")
    path = out / "checkpoint-3" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert last_checkpoint(out) is None


def test_scoring_a_model_with_nan_fails(world, tmp_path):
    out = shutil.copytree(world / "out", tmp_path / "out")
    damaged_adapter(out, lambda t: t.fill_(math.nan))
    words = command("eval", world / "data.jsonl", "--adapter", out, "--json", tmp_path / "scores.json", code=1)
    assert "loss is not finite on 4 of 4 rows, the first of them" in words and "data.jsonl, line 1" in words
    assert not (tmp_path / "scores.json").exists()


def test_a_stock_trainer_is_guarded_as_well(tmp_path):
    """The callback alone, before an epoch's checkpoint."""
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules="all-linear"))
    ending = StopOnNonFinite()
    arguments = type("Arguments", (), {"output_dir": str(tmp_path)})
    state, saving = type("State", (), {"global_step": 3}), type("Control", (), {"should_save": True})
    ending.on_epoch_end(arguments, state, saving, model=model)
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).view(-1)[0] = math.inf
    with pytest.raises(NonFiniteError, match="after step 3"):
        ending.on_epoch_end(arguments, state, saving, model=model)


# ---------------------------------------------------------------------------------------------- resuming


def test_resuming_with_another_learning_rate(world, tmp_path):
    """Is applied from the first step on, as are the steps between lines; with the same options the run is bit for bit itself."""
    log = lambda out: json.loads((out / "trainer_state.json").read_text())["log_history"]
    for name, settings in (("same", {}), ("other", {"lr": 1e-3, "log_every": 2, "scheduler": "constant"})):
        out = shutil.copytree(world / "out", tmp_path / name)
        shutil.rmtree(out / "checkpoint-4")
        before = options.TrainOptions(**options.read_yaml(out / "train.yaml"))
        training.run(replace(before, **settings, output=str(out)), True, lambda text: None)
    rates = [line["learning_rate"] for line in log(tmp_path / "other") if "learning_rate" in line]
    assert rates[-1] == 1e-3 and log(tmp_path / "same")[-2]["learning_rate"] == log(world / "out")[-2]["learning_rate"]
    done = options.TrainOptions(**options.read_yaml(tmp_path / "same" / "train.yaml"))
    assert training.run(done, True, lambda text: None).loss is None  # no step is left
    whole, again = (load_file(folder / "adapter_model.safetensors") for folder in (world / "out", tmp_path / "same"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[k], again[k]) for k in whole)


@pytest.mark.parametrize("flags", [("--rank", 5), ("--backend", "bf16"), ("--optimizer", "adamw_torch"), ("--targets", "q_proj")])
def test_resuming_with_what_a_checkpoint_cannot_take(world, tmp_path, flags):
    out = shutil.copytree(world / "out", tmp_path / "out")
    words = command("train", "--resume", "-o", out, *flags, code=1)
    assert f"{flags[0][2:]} was " in words and "resume without it" in words
    assert (out / "train.yaml").read_bytes() == (world / "out" / "train.yaml").read_bytes()


# ---------------------------------------------------------------------------------------------- disks and folders


TORCH = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
"""As PyTorch and safetensors say it."""
SAFETENSORS = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("part", ["_save_optimizer_and_scheduler", "_save", "_save_rng_state"])
@pytest.mark.parametrize("error", [TORCH, SAFETENSORS], ids=["torch", "safetensors"])
def test_a_disk_that_is_full_while_a_checkpoint_is_written(world, tmp_path, part, error, monkeypatch):
    """What was saved is kept, and the run goes on from there to the same adapter."""
    out, before = tmp_path / "out", getattr(training.Trainer, part)
    settings = {"steps": 4, "save_every": 1, "rank": 16, "resume": True}

    def full_at_three(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise error
        return before(self, *args, **kwargs)

    monkeypatch.setattr(training.Trainer, part, full_at_three)
    with pytest.raises(ValueError, match="writing to .*out failed .*its disk, mounted at /.*has .* MB left. What was saved"):
        train(world, out, **settings)
    assert last_checkpoint(out) == str(out / "checkpoint-2")
    monkeypatch.undo()
    train(world, out, **settings)
    whole, again = (load_file(folder / "adapter_model.safetensors") for folder in (world / "out", out))
    assert all(torch.equal(whole[k], again[k]) for k in whole)


def full(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["quantize", "merge", "export", "calibrate"])
def test_a_disk_that_is_full_at_the_end(world, tmp_path, name, monkeypatch):
    """Nothing half is left, and the same command works afterwards. Of a calibration what is finished is kept."""
    first = world / ("out" if name == "merge" else "model")
    args = [name, first, *[world / "data.jsonl"] * (name == "calibrate"), "-o", tmp_path / "new"]
    args += ["--samples", 2, "--seq", 8] * (name == "calibrate")
    target = "calibration.store.write_manifest" if name == "calibrate" else "cli.conversion._written"
    monkeypatch.setattr(f"peft_nvfp4.{target}", full)
    words = command(*args, code=1)
    assert f"writing to {tmp_path / 'new'} failed (No space left on device); its disk, mounted at /" in words
    assert "give the same command again" in words and (name == "calibrate" or not (tmp_path / "new").exists())
    monkeypatch.undo()
    command(*args)


def test_folders_and_files_that_cannot_be_written_are_found_first(world, tmp_path):
    """Before a model is even looked for."""
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "out"
    for args in (
        ("train", world / "model", world / "data.jsonl", "-o", inside),
        ("quantize", "nothing", "-o", inside),
        ("merge", "nothing", "-o", inside),
        ("export", "nothing", "-o", inside),
        ("eval", "nothing.jsonl", "-m", "nothing", "--json", inside / "scores.json"),
        ("statistics", "nothing.jsonl", "-m", "nothing", "--png", inside / "drawn.png"),
    ):
        assert f"cannot write to {inside}" in command(*args, code=1), args


def test_disk_errors_of_libraries_are_known(tmp_path):
    try:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    except RuntimeError as error:
        assert "mounted at" in folders.write_failure(error, tmp_path / "not" / "there")
    assert folders.write_failure(ValueError("other"), tmp_path) is None


@pytest.mark.parametrize(
    ("file", "keep", "words"),
    [
        ("model.safetensors", 0, "model.safetensors is damaged or cut off, 0 bytes"),
        ("model.safetensors", 0.5, "model.safetensors is damaged or cut off"),
        ("config.json", 0.5, "config.json is damaged, it is no JSON"),
        ("tokenizer.json", 0.5, "tokenizer.json is damaged, it is no JSON"),
        ("tokenizer.json", None, "tokenizer of .* cannot be read"),
    ],
)
def test_damaged_models(world, tmp_path, file, keep, words):
    model = shutil.copytree(world / "model", tmp_path / "model")
    (model / file).write_bytes(
        b'{"a": []}' if keep is None else (model / file).read_bytes()[: int(keep * (model / file).stat().st_size)]
    )
    for args in (
        ("eval", world / "data.jsonl", "-m", model),
        ("train", model, world / "data.jsonl", "-o", tmp_path / "out"),
        ("export", model, "-o", tmp_path / "x"),
        ("calibrate", model, world / "data.jsonl", "-o", tmp_path / "c"),
    ):
        said = command(*args, code=1)
        assert all(part in said for part in words.split(".*")), said


def test_damaged_adapters_and_folders_of_another_kind(world, tmp_path):
    out = shutil.copytree(world / "out", tmp_path / "out")
    (out / "adapter_model.safetensors").write_bytes(b"")
    for args in (("eval", world / "data.jsonl", "-a", out), ("merge", out, "-o", tmp_path / "m"), ("inspect", out)):
        assert "adapter_model.safetensors is damaged or cut off, 0 bytes" in command(*args, code=1)
    adapter = world / "out"
    for args in (
        ("export", adapter, "-o", tmp_path / "x"),
        ("quantize", adapter, "-o", tmp_path / "x"),
        ("train", adapter, world / "data.jsonl", "-o", tmp_path / "x"),
        ("eval", world / "data.jsonl", "-m", adapter),
        ("calibrate", adapter, world / "data.jsonl", "-o", tmp_path / "x"),
    ):
        words = "is the folder of an adapter, not of a model: give the adapter's base, or merge them first: peft-nvfp4 merge"
        assert f"{words} {adapter}" in command(*args, code=1)
    for args in (("eval", world / "data.jsonl", "-a", world / "model"), ("inspect", world / "model")):
        assert "there is no adapter_config.json" in command(*args, code=1)


def test_a_vision_language_folder(world, tmp_path):
    config = {"model_type": "idefics3", "architectures": ["Idefics3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = command("train", tmp_path, world / "data.jsonl", "-o", tmp_path / "out", code=1)
    assert "is of the kind idefics3, which is no causal language model (it reads images or sound as well)" in words
    assert "examples/finetune_vlm.py" in words and len(words) < 800


def test_relative_bases(world, tmp_path, monkeypatch):
    """An adapter finds its base from every folder; one that another tool saved with a relative path says where it was sought."""
    monkeypatch.chdir(world)
    command("train", "model", "data.jsonl", "-o", tmp_path / "out", "--steps", 1)
    monkeypatch.chdir(tmp_path)
    command("inspect", "out")
    command("train", "--resume", "-o", "out", "--steps", 2)
    path = tmp_path / "out" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "./model"}))
    words = command("eval", world / "data.jsonl", "-a", "out", code=1)
    assert (
        f"the base of out, ./model, is not there ('./model' was looked for in {tmp_path}, and on the Hub): give it with --model"
        in words
    )
    command("eval", world / "data.jsonl", "-a", "out", "-m", world / "model")


def test_an_adapter_with_more_tokens_than_the_base(world, tmp_path):
    """It says the sizes; with the base it was trained on it works, with the adapter's own tokenizer."""
    model = tiny_llama(vocab_size=64)
    model.resize_token_embeddings(66)
    model.save_pretrained(tmp_path / "resized")
    tiny_tokenizer().save_pretrained(tmp_path / "resized")
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]))
    tuned.peft_config["default"].base_model_name_or_path = str(world / "model")
    tuned.save_pretrained(tmp_path / "adapter")
    for args in (("eval", world / "data.jsonl", "-a"), ("merge", "-o", tmp_path / "m")):
        words = command(*args, tmp_path / "adapter", code=1)
        assert "is [66, 64] in the adapter and [64, 64] in the model. Give the base it was trained on with --model" in words
    command("eval", world / "data.jsonl", "-a", tmp_path / "adapter", "-m", tmp_path / "resized")


def test_the_adapters_tokenizer_and_template_are_used(world, tmp_path):
    """By eval, and merge writes them."""
    out = shutil.copytree(world / "out", tmp_path / "out")
    tokenizer = tiny_tokenizer("{% for m in messages %}{{ m['content'] + ' was ' }}{% endfor %}")
    tokenizer.add_tokens("new")
    tokenizer.save_pretrained(out)
    tiny_tokenizer(None).save_pretrained(shutil.copytree(world / "model", tmp_path / "base"))
    command("eval", write(tmp_path / "chat.jsonl", [{"messages": CHAT}]), "-a", out, "-m", tmp_path / "base")
    command("merge", out, "-o", tmp_path / "merged", "-m", tmp_path / "base", "--probe", tmp_path / "chat.jsonl")
    merged = type(tokenizer).from_pretrained(tmp_path / "merged")
    assert merged.chat_template == tokenizer.chat_template and "new" in merged.get_vocab()


def test_a_calibration_of_a_short_model(world, tmp_path):
    """As long as its positions; more is refused by the flag's name. Longer probes are cut."""
    save_tiny(tmp_path / "model", max_position_embeddings=16)
    args = ("calibrate", tmp_path / "model", world / "data.jsonl", "-o", tmp_path / "cal", "--samples", 2)
    assert "--seq 17: " in (words := command(*args, "--seq", 17, code=1)) and "give --seq 16 or less" in words
    command(*args)
    assert json.loads((tmp_path / "cal" / "report.json").read_text())["settings"]["seq_len"] == 16
