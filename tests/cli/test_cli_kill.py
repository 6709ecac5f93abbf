"""Runs that end in the middle, in processes of their own: Ctrl-C and kill -9, resumed; and the whole way of the real model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import smollm2_reviews as data
import torch
from _tiny_models import save_tiny
from safetensors.torch import load_file

TIMEOUT = 600


def start(*args) -> subprocess.Popen:
    command = [sys.executable, "-m", "peft_nvfp4.cli", *map(str, args)]
    return subprocess.Popen(
        command, env={**os.environ, "COLUMNS": "120"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(*args, code: int = 0) -> str:
    process = start(*args)
    text, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code, text
    return text


def wait_for(process: subprocess.Popen, path: Path) -> None:
    end = time.monotonic() + TIMEOUT
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.02)


@pytest.fixture
def tiny(tmp_path):
    torch.manual_seed(0)
    save_tiny(tmp_path / "model")
    rows = [{"text": f"the film is {w}", "label": label} for w, label in (("good", "positive"), ("bad", "negative"))] * 8
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["train", tmp_path / "model", tmp_path / "data.jsonl", "--batch", "2", "--rank", "4", "--dropout", "0.1"]


@pytest.mark.slow
def test_kill_and_resume(tiny, tmp_path):
    """The adapter is that of a run which nobody killed, bit for bit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    steps = ["--steps", "30", "--save-every", "5", "--log-every", "1"]
    run(*tiny, *steps, "-o", whole)
    process = start(*tiny, *steps, "-o", killed)
    wait_for(process, killed / "checkpoint-10" / "trainer_state.json")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (killed / "adapter_model.safetensors").exists()
    text = run("train", "--resume", "-o", killed)
    assert "going on from" in text and "30 steps" in text
    assert "no whole checkpoint yet" not in text
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (whole, killed))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.slow
def test_control_c_leaves_a_checkpoint(tiny, tmp_path):
    out = tmp_path / "out"
    process = start(*tiny, "--steps", "100000", "--save-every", "100000", "-o", out, "--log-every", "1")
    read = ""
    while "'loss'" not in read:
        assert (line := process.stdout.readline()), read
        read += line
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130 and "Traceback" not in text, text
    assert "Go on with: peft-nvfp4 train --resume" in text
    (checkpoint,) = out.glob("checkpoint-*")
    done = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    assert f"Stopped after step {done}" in text and (checkpoint / "optimizer.pt").exists()
    assert f"{done + 2} steps" in run("train", "--resume", "-o", out, "--steps", done + 2)


@pytest.mark.slow
def test_the_whole_way_on_the_real_model(tmp_path):
    """train, kill -9, --resume, eval, merge, export: the first layers of SmolLM2-135M, and film reviews."""
    try:
        model, reviews = data.model_folder(), data.movie_reviews()
    except FileNotFoundError as error:
        pytest.skip(f"not run: {error}")
    files = [tmp_path / f"{name}.jsonl" for name in ("train", "test")]
    for path, part in zip(files, reviews):
        rows = [{"text": row.text, "label": data.LABELS[row.label].strip()} for row in part]
        path.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    small = ["--dtype", "fp32", "--layers", "2"]
    args = ["train", model, files[0], "-o", out, "--steps", "8", "--save-every", "2", "--batch", "4", "--limit", "64"]
    process = start(*args, "--lr", "2e-3", "--max-length", "64", *small)  # less is lost in a merge into NVFP4
    wait_for(process, out / "checkpoint-4" / "trainer_state.json")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "8 steps" in run("train", "--resume", "-o", out)
    run("eval", files[1], "--adapter", out, "--base", "--limit", "24", *small, "--json", tmp_path / "eval.json")
    scores = json.loads((tmp_path / "eval.json").read_text())
    assert scores["adapter"]["scores"]["nll"] < scores["base"]["scores"]["nll"]
    assert "binds" in run("inspect", out, *small)
    run("merge", out, "-o", tmp_path / "merged", "--to", "nvfp4", *small)
    run("export", tmp_path / "merged", "-o", tmp_path / "exported", "--layout", "modelopt")
    run("eval", files[1], "-m", tmp_path / "exported", "--limit", "24", "--dtype", "fp32", "--json", tmp_path / "merged.json")
    merged = json.loads((tmp_path / "merged.json").read_text())["model"]["scores"]["nll"]
    assert merged < scores["base"]["scores"]["nll"]
