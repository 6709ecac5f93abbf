"""The scripts in examples/, each in a process of its own: a tiny random model in a folder, rows in a file, no network."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _tiny_models import images_or_skip, save_tiny
from safetensors.torch import load_file

from peft_nvfp4.quantization.freeze import frozen_layers

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 2
WORDS = ["the film was good", "a dull story", "great great film", "an awful bad film", "the story is fine"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a model, film reviews, and pictures."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder / "model")
    rows = [f"{i}\t{(-2, 2)[i % 2]}\t{WORDS[i % 5]} {WORDS[i // 5 % 5]} {'fine ' * (i // 25)}\n" for i in range(40)]
    (folder / "movies.txt").write_text("".join(rows))
    return folder


def run(script, tiny, out, *options):
    """What the script printed. The packaged model and data are the tiny ones."""
    places = {"PEFT_NVFP4_MODEL": str(tiny / "model"), "PEFT_NVFP4_MOVIES": str(tiny / "movies.txt")}
    places["HF_DATASETS_CACHE"] = str(out / "cache")
    command = [sys.executable, EXAMPLES / script, "--steps", str(STEPS), "--out", out, *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **places})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check(printed, out, backend, layers):
    """The run took its steps, the reloaded adapter is the trained model, and what is on disk is an adapter of that backend."""
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert len(losses) == STEPS and all(0 < loss < 20 for loss in losses), printed
    assert f"reloaded from {out}: largest difference of the logits 0.0\n" in printed
    assert json.loads((out / "nvfp4_adapter.json").read_text())["backend"] == backend
    assert json.loads((out / "adapter_config.json").read_text())["peft_type"] == "LORA"
    saved = load_file(out / "adapter_model.safetensors")
    second = [name for name in saved if "lora_B" in name]
    assert len(second) == layers and all(saved[name].abs().max() > 0 for name in second), "B starts at zero"
    return saved


@pytest.mark.parametrize(
    "script, backend, options",
    [
        ("finetune_trainer.py", "nvfp4", []),
        ("finetune_trainer.py", "nf4", ["--gradient_checkpointing", "--optim", "paged_adamw_8bit"]),
        ("finetune_sft.py", "nvfp4", ["--gradient_checkpointing"]),
        ("finetune_classification.py", "nvfp4", ["--held_out", "8"]),
    ],
)
def test_text(script, backend, options, tiny, tmp_path):
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    if "sft" in script:
        pytest.importorskip("trl")
    printed = run(script, tiny, tmp_path, "--backend", backend, *options)
    saved = check(printed, tmp_path, backend, layers=14)
    if "classification" in script:
        assert re.search(r"accuracy on 8 held-out reviews: [\d.]+%\n", printed)
        assert [name for name in saved if "score" in name]


@pytest.mark.parametrize(
    "script, method, backend",
    [
        ("dpo", "dpo", "nvfp4"), ("dpo", "orpo", "bf16"), ("reward_model", None, "nvfp4"), ("kto", None, "nf4"),
        ("grpo", "grpo", "nvfp4"), ("grpo", "rloo", "bf16"),
    ],
)  # fmt: skip
def test_preferences_and_rewards(script, method, backend, tiny, tmp_path, monkeypatch):
    """In this process, which has imported TRL already: the import takes longer than the steps."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("trl")
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("PEFT_NVFP4_MODEL", str(tiny / "model"))
    monkeypatch.setenv("PEFT_NVFP4_MOVIES", str(tiny / "movies.txt"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    options = ["--backend", backend, "--steps", str(STEPS), "--out", str(tmp_path / "out")]
    options += ["--method", method] if method else []
    if script == "grpo":
        questions = [{"prompt": f"{word} film ?", "answer": "1"} for word in ("the", "a")]
        (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
        options += ["--data", str(tmp_path / "questions.jsonl")]
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
    trainer = runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")["trainer"]
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == STEPS and all(abs(entry["loss"]) < 20 for entry in log)
    assert json.loads((tmp_path / "out" / "nvfp4_adapter.json").read_text())["backend"] == backend
    second = {k: v for k, v in load_file(tmp_path / "out" / "adapter_model.safetensors").items() if "lora_B" in k}
    assert len(second) == 14
    if script != "grpo":  # random weights get no reward
        assert all(v.abs().max() > 0 for v in second.values())


def test_reward_of_checkable_answers():
    source = (EXAMPLES / "grpo.py").read_text()
    names = {}
    exec(source[source.index("def correct") : source.index("Trainer, Config = ")], names)
    chat = [{"role": "assistant", "content": "12"}]
    found = names["correct"]([" 12", "12\n3", chat, "12 3", "123", "12,", "it is 12", "\n12", ""], ["12"] * 9)
    assert found == [1.0] * 3 + [0.0] * 6


image = pytest.fixture(images_or_skip)


def test_images(tiny, tmp_path, image):
    """Pictures in a folder; the text model becomes the text tower, 14 linears, below 12 of the vision tower and a connector."""
    (tmp_path / "pictures").mkdir()
    for name in ("red_film", "blue"):
        image.new("RGB", (80, 50), name.split("_")[0]).save(tmp_path / "pictures" / f"{name}.jpg")
    printed = run("finetune_vlm.py", tiny, tmp_path, "--images", tmp_path / "pictures", "--gradient_checkpointing")
    saved = check(printed, tmp_path, "nvfp4", layers=27)
    assert sum("vision_model" in name for name in saved) == 2 * 12


def test_images_are_drawn_and_answers_learned(tiny, tmp_path, monkeypatch, image):
    """In this process, to look at what the model gets: an image for every row, and labels on the answers alone. The folder that
    the first run built is a vision-language model, so naming it builds nothing."""
    pytest.importorskip("bitsandbytes")

    def script(*options):
        monkeypatch.setattr(sys, "argv", ["finetune_vlm.py", "--backend", "nf4", "--steps", "1", *map(str, options)])
        return runpy.run_path(str(EXAMPLES / "finetune_vlm.py"), run_name="__main__")

    first = script("--model", tiny / "model", "--out", tmp_path / "first")
    batch = first["collate"](first["rows"])
    decode = first["processor"].tokenizer.decode
    assert [decode(ids[labels != -100]) for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)] == [
        f"{colour} </s>" for colour in ("red", "green", "blue", "<unk>", "<unk>")
    ]
    assert (batch["labels"] == -100).sum() == sum(len(ids) - 2 for ids in batch["input_ids"])
    image_token = first["model"].config.image_token_id
    assert ((batch["input_ids"] == image_token).sum(1) == 16).all() and batch["pixel_values"].shape == (5, 1, 3, 64, 64)
    assert {layer.backend for _, layer in frozen_layers(first["model"])} == {"nf4"}
    script("--model", tmp_path / "first" / "base", "--out", tmp_path / "second")
    assert not (tmp_path / "second" / "base").exists()
    a, b = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_every_example_is_listed():
    listed = (EXAMPLES / "README.md").read_text()
    files = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.yaml")]
    assert [p.name for p in files if f"[{p.name}]({p.name})" not in listed] == []
