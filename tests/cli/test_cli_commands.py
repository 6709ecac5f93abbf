"""The command line on a tiny model: every command, its errors, its JSON."""

import importlib
import io
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from _tiny_models import save_tiny
from rich.console import Console
from typer.testing import CliRunner

from peft_nvfp4 import cli, memory
from peft_nvfp4.cli._run import profiling
from peft_nvfp4.cli.common import table
from peft_nvfp4.memory import Settings

ROWS = [{"text": f"the film is {word}", "label": label} for word, label in (("good", "positive"), ("bad", "negative"))] * 4


@pytest.fixture(scope="module")
def app():
    return cli.application()


@pytest.fixture(scope="module")
def world(tmp_path_factory, app):
    """A model, data, and a trained adapter."""
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    save_tiny(folder / "model")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "qa.jsonl").write_text(json.dumps({"prompt": "question red ?", "completion": " blue"}))
    (folder / "notes.txt").write_text("the film is good\n\nthe story was dull and bad")
    args = ["train", str(folder / "model"), str(folder / "data.jsonl"), "-o", str(folder / "adapter"), "--steps", "6"]
    result = CliRunner().invoke(app, [*args, "--batch", "4", "--rank", "4", "--lr", "0.02", "--log-every", "1"])
    assert result.exit_code == 0, result.output
    return folder


def run(app, *args, code: int = 0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def json_of(app, *args, code: int = 0) -> dict:
    return json.loads(run(app, *args, "--json", "-", code=code).stdout)


def losses_of(output) -> list[float]:
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [line["loss"] for line in log if "loss" in line]


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", [name for name, _, _ in cli.COMMANDS])
def test_help_fits_80_columns(app, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    text = run(app, name, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80 and "Usage" in text
    assert not re.search(r"\w…", text), "an option's name or help is cut off"


def test_the_modules_of_commands_say_what_they_are():
    for name, module, function in cli.COMMANDS:
        found = importlib.import_module(f"peft_nvfp4.cli.{module}")
        assert f"peft-nvfp4 {name}" in found.__doc__ and callable(getattr(found, function))


def test_errors_are_one_paragraph(app, tmp_path):
    for args in (
        ("estimate", "nothing"),
        ("eval", "nothing.jsonl", "-m", "nothing"),
        ("train", "nothing", "nothing.jsonl", "-o", tmp_path / "o"),
        ("inspect", tmp_path),
        ("merge", tmp_path, "-o", tmp_path / "o"),
    ):
        result = run(app, *args, code=1)
        assert result.stderr.startswith("Error: ") and "Traceback" not in result.output


def test_debug_shows_the_traceback(app):
    from peft_nvfp4.cli import common

    try:
        assert "Traceback" in run(app, "--debug", "estimate", "nothing", code=1).stderr
    finally:
        common.DEBUG["on"] = False


def test_estimate(app, tmp_path):
    text = plain(run(app, "estimate", "llama-1b", "--card", "RTX 5080", "--png", tmp_path / "e.png").stdout)
    assert "it fits. Largest batch at this length: 23" in text and "33,672 bytes per token and layer" in text
    assert (tmp_path / "e.png").stat().st_size > 10_000
    found = json_of(app, "estimate", "llama-1b", "--batch", "64", "--max-memory", "16GiB")
    assert not found["fits"] and found["plan"]["batch"] * found["plan"]["accumulation"] == 64
    assert found["peak_bytes"] == sum(found["categories"].values())


@pytest.mark.parametrize("name", ["m[bold]", "m[link=x]y", "[red]:cat:", "m[b]\\\\"])
def test_texts_of_a_user_are_no_markup(app, world, name):
    shutil.copytree(world / "model", world / name, dirs_exist_ok=True)
    assert name in run(app, "estimate", world / name).stdout.replace("\n", "")
    shown = Console(file=io.StringIO(), width=200)
    shown.print(table(f"{name}[/b]", (f"{name}[/b]", "n"), [(f"{name}[/b]", "1")]), markup=False)
    assert shown.file.getvalue().count(f"{name}[/b]") == 3


def test_estimate_reads_a_config_and_says_what_is_wrong(app, world):
    assert json_of(app, "estimate", world / "model")["parameters"] > 0
    assert "unknown backend" in run(app, "estimate", "llama-1b", "--backend", "int8", code=1).stderr
    assert "unknown card" in run(app, "estimate", "llama-1b", "--card", "GTX", code=1).stderr
    assert "no amount of memory" in run(app, "estimate", "llama-1b", "--max-memory", "much", code=1).stderr


def test_longest_context(app):
    card, options = "RTX 5080", ("estimate", "llama-8b", "--longest-context")
    found = json_of(app, *options, "--card", card, "--rank", 32)["longest_context"]
    settings = Settings(rank=32, native_fp4=memory.card(card).fp4, workspace=memory.card(card).workspace)
    assert list(found) == ["fast", "small", "smallest"]
    for level, entry in found.items():
        expected = memory.longest_context("llama-8b", replace(settings, memory=level), memory.card(card).memory)
        assert (entry["tokens"], entry["host_bytes"]) == (expected.settings.sequence, expected.checkpoints + expected.offloaded)
    text = plain(run(app, *options, "--card", card, "--rank", 32).stdout)
    assert f"{found['small']['tokens']:,}" in text and "15.92 GiB" in text
    assert json_of(app, *options, "--max-memory", "6GiB")["longest_context"]["fast"] is None
    assert "name one (--card)" in run(app, *options, code=1).stderr


def test_estimate_of_one_of_several_gpus(app, tmp_path):
    large = ("--memory", "small", "--checkpointing", "--batch", "2", "--gpus", "4", "--max-memory", "16GiB")
    found = json_of(app, "estimate", "llama-8b", *large, "--strategy", "fsdp2", "--png", tmp_path / "e.png")
    assert found["settings"]["cards"] == 4 and found["settings"]["strategy"] == "fsdp2"
    assert found["peak_bytes"] == sum(found["categories"].values()) and "layers gathered" in found["categories"]
    everything = json_of(app, "estimate", "llama-8b", *large)  # ddp
    assert found["peak_bytes"] < everything["peak_bytes"] and "buckets of DDP" in everything["categories"]
    assert found["usable_bytes"] < json_of(app, "estimate", "llama-8b", "--max-memory", "16GiB")["usable_bytes"]
    text = plain(run(app, "estimate", "llama-8b", *large, "--strategy", "fsdp2").stdout)
    assert "each of 4 GPUs (fsdp2)" in text and "Each of 4 GPUs takes 2 rows: 8 at a time" in text
    assert "strategy must be one of ddp, fsdp2" in run(app, "estimate", "llama-8b", "--strategy", "tp", code=1).stderr


def test_estimate_of_a_mixture(app, tmp_path):
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "tie_word_embeddings": False, **sizes}))
    found = json_of(app, "estimate", tmp_path, "--max-memory", "80GiB", "--targets", "q_proj,w1,w3,w2")
    assert found["fits"] and found["largest_batch"] >= 4 and found["saved_besides_per_layer"] > 0
    # rank 16: q, and of 8 experts gate and up with an adapter of rank 32, down
    assert found["trained_parameters"] == 32 * (16 * 2 * 4096 + 8 * (32 * (4096 + 2 * 14336) + 16 * (14336 + 4096)))
    text = plain(run(app, "estimate", tmp_path, "--memory", "small").stdout)
    assert "Note: what experts keep does not depend on the routing" in text
    assert "MiB a layer besides" in text and "Note: memory='small' recomputes nothing of experts." in text
    words = plain(run(app, "estimate", tmp_path, "--targets", "w1", code=1).stderr)
    assert "w1 and w3 are one parameter, gate_up_proj" in words


def test_training_learns_and_leaves_what_it_should(app, world):
    losses = losses_of(world / "adapter")
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    assert {"adapter_model.safetensors", "nvfp4_adapter.json", "train.yaml"} <= {f.name for f in (world / "adapter").iterdir()}
    found = json_of(app, "eval", world / "data.jsonl", "--adapter", world / "adapter", "--base")
    assert found["adapter"]["scores"]["nll"] < found["base"]["scores"]["nll"] - 0.5
    assert found["adapter"]["rows"] == 8 and set(found["adapter"]["scores"]) == {"accuracy", "macro_f1", "nll", "perplexity"}


def test_perplexity_is_that_of_the_model(app, world):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = json_of(app, "eval", world / "notes.txt", "-m", world / "model", "--batch", "2")["model"]["scores"]
    model = AutoModelForCausalLM.from_pretrained(world / "model").eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    total = count = 0
    for text in ("the film is good", "the story was dull and bad"):
        ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
        total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert found["nll"] == pytest.approx(total / count, rel=1e-5)  # FP32; padding changes only the order of sums


def test_answers_are_scored(app, world):
    found = json_of(app, "eval", world / "qa.jsonl", "-m", world / "model", "--max-new-tokens", "4")["model"]
    assert set(found["scores"]) == {"exact_match", "f1", "rouge_l", "nll", "perplexity"}
    assert found["samples"][0]["expected"] == "blue"


@pytest.mark.parametrize("backend", ["bf16", "nf4"])
def test_other_backends_and_a_yaml_file(app, world, tmp_path, backend):
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    (tmp_path / "c.yaml").write_text(
        f"model: {world / 'model'}\ndataset: {world / 'data.jsonl'}\noutput: {tmp_path / 'out'}\nbackend: {backend}\nsteps: 2\n"
        "batch: 2\nlora:\n  use_rslora: true\ntrainer:\n  label_smoothing_factor: 0.0\n"
    )
    found = json_of(app, "train", "--config", tmp_path / "c.yaml", "--eval-rows", "2")
    assert found["finished"] and found["steps"] == 2 and found["eval_loss"] > 0
    side_car = json.loads((tmp_path / "out" / "nvfp4_adapter.json").read_text())
    assert side_car["backend"] == backend
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["use_rslora"] is True


def test_memory_by_a_flag_and_by_a_file(app, world, tmp_path):
    """A flag leaves alone what else a file says of the adapter."""
    (tmp_path / "c.yaml").write_text("memory: smallest\nlora:\n  use_rslora: true\n")
    args = ("train", world / "model", world / "data.jsonl", "--steps", "1", "--batch", "2", "--config", tmp_path / "c.yaml")
    for name, extra, expected in (("file", (), "smallest"), ("both", ("--memory", "small"), "small")):
        run(app, *args, "-o", tmp_path / name, *extra)
        assert json.loads((tmp_path / name / "nvfp4_adapter.json").read_text())["memory"] == expected, name
        assert f"memory: {expected}" in (tmp_path / name / "train.yaml").read_text()  # what --resume reads
    assert json.loads((tmp_path / "both" / "adapter_config.json").read_text())["use_rslora"] is True


def test_max_memory_chooses_what_fits(app, world, tmp_path):
    args = ("train", world / "model", world / "data.jsonl", "-o", tmp_path / "o", "--steps", "1", "--max-memory", "1GiB")
    assert "1 x 8 rows a step; nothing given up" in plain(run(app, *args).output)
    text = (tmp_path / "o" / "train.yaml").read_text()
    assert "max_memory: 1GiB" in text and "batch: 8" in text


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--backend", "int8"), "unknown backend 'int8'"),
        (("--columns", "prompt"), "write columns as"),
        (("--optimizer", "lion2"), "lion2"),
        (("--max-memory", "100MiB"), "one row of 8 tokens takes"),
        (("--eval-rows", "100"), "test_size=100"),
        (("--dtype", "int4"), "dtype must be auto"),
        (("--targets", "query"), "query"),
        (("--calibration", "nowhere"), "nowhere"),
    ],
)
def test_wrong_options(app, world, tmp_path, extra, words):
    args = ("train", world / "model", world / "data.jsonl", "-o", tmp_path / "o", "--steps", "1", *extra)
    assert words in plain(run(app, *args, code=1).stderr)


def test_an_output_folder_with_checkpoints_is_not_overwritten(app, world):
    args = ("train", world / "model", world / "data.jsonl", "-o", world / "adapter", "--steps", "1")
    assert "go on with --resume" in plain(run(app, *args, code=1).stderr)


def test_resuming_a_run_from_its_last_checkpoint(app, world, tmp_path, monkeypatch):
    """Six steps at once and three, stopped, then three more: the same adapter. On a CPU sums have one order."""
    from safetensors.torch import load_file

    import peft_nvfp4.cli._run.training as training

    args = ["train", world / "model", world / "data.jsonl", "--steps", "6", "--batch", "2", "--rank", "4", "--dropout", "0.1"]
    args += ["--log-every", "1"]
    run(app, *args, "-o", tmp_path / "whole")
    before = training.StopWhenAsked.on_step_end

    def stop_at_three(self, args, state, control, **kwargs):
        self.asked = state.global_step == 3  # as a signal does
        return before(self, args, state, control, **kwargs)

    monkeypatch.setattr(training.StopWhenAsked, "on_step_end", stop_at_three)
    text = run(app, *args, "-o", tmp_path / "parts", code=130).output
    monkeypatch.undo()
    assert "Stopped after step 3" in text and not (tmp_path / "parts" / "adapter_model.safetensors").exists()
    text = run(app, "train", "--resume", "-o", tmp_path / "parts").output
    assert "checkpoint-3" in text
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole") and len(losses_of(tmp_path / "whole")) == 6
    whole, parts = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[k], parts[k]) for k in whole)


def test_quantize_train_on_it(app, world, tmp_path):
    written = json_of(app, "quantize", world / "model", "-o", tmp_path / "packed")
    assert written["packed"] == 14 and 0 < written["bytes"] < written["dense_bytes"]
    args = ("train", tmp_path / "packed", world / "data.jsonl", "-o", tmp_path / "o", "--steps", "2", "--accuracy", "paper")
    assert json_of(app, *args)["finished"]
    assert "not empty" in plain(run(app, "quantize", world / "model", "-o", tmp_path / "packed", code=1).stderr)
    assert "quantised already" in plain(run(app, "quantize", tmp_path / "packed", "-o", tmp_path / "q", code=1).stderr)


def test_calibrate_and_train_on_it(app, world, tmp_path):
    args = ("calibrate", world / "model", world / "data.jsonl", "-o", tmp_path / "cal", "--samples", "4", "--seq", "16")
    assert len(json_of(app, *args)["layers"]) == 2
    args = ("train", world / "model", world / "data.jsonl", "-o", tmp_path / "o", "--steps", "2")
    assert json_of(app, *args, "--calibration", tmp_path / "cal")["finished"]
    assert "--calibration" in plain(run(app, "inspect", tmp_path / "o", code=1).stderr)
    found = json_of(app, "inspect", tmp_path / "o", "--calibration", tmp_path / "cal")
    assert found["binds"] and not found["warnings"]


def test_merge_keeps_the_adapter(app, world, tmp_path):
    found = json_of(app, "merge", world / "adapter", "-o", tmp_path / "m", "--to", "fp32", "--probe", world / "data.jsonl")
    assert found["report"]["retained"] > 0.999 and found["packed"] == 0
    adapter = json_of(app, "eval", world / "data.jsonl", "--adapter", world / "adapter")["adapter"]["scores"]["nll"]
    merged = json_of(app, "eval", world / "data.jsonl", "-m", tmp_path / "m")["model"]["scores"]["nll"]
    assert merged == pytest.approx(adapter, abs=0.05)  # activations are not rounded to NVFP4 any more


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_merge_into_nvfp4_and_export(app, world, tmp_path, layout):
    """Both layouts hold the same weights: the models say the same, bit for bit."""
    json_of(app, "merge", world / "adapter", "-o", tmp_path / "m", "--to", "nvfp4")
    found = json_of(app, "export", tmp_path / "m", "-o", tmp_path / "x", "--layout", layout)
    assert found["packed"] == 14 and found["report"]["scheme"] == "W4A16"
    scores = [json_of(app, "eval", world / "data.jsonl", "-m", tmp_path / f)["model"]["scores"]["nll"] for f in "mx"]
    assert scores[0] == scores[1]


def test_profile(app, world, tmp_path):
    args = ("profile", world / "model", "--batch", "1", "--seq", "16", "--dtype", "fp32", "--rank", "4")
    found = json_of(app, *args, "--trace", tmp_path / "t.json", "--png", tmp_path / "p.png")
    assert set(found["times_ms"]) == set(profiling.CATEGORIES)
    assert all(found["times_ms"][name] > 0 for name in ("BF16 GEMMs", "attention", "elementwise/other"))
    assert found["total_ms"] == pytest.approx(sum(found["times_ms"].values()))
    assert found["kernels"] and "traceEvents" in json.loads((tmp_path / "t.json").read_text())
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_tst_128x128_64x4", "BF16 GEMMs"),
        ("cutlass3x_sm120_bstensorop_s16864gemm_block_scaled_ue4m3xe2m1", "NVFP4 GEMMs"),
        ("_quantize_kernel", "quantise/fused"),
        ("own_thing", "quantise/fused"),
        ("pytorch_flash::flash_bwd_kernel", "attention"),
        ("_dequantize_operand", "dequantise"),
        ("triton_poi_fused_attention_0", "elementwise/other"),
        ("vectorized_elementwise_kernel", "elementwise/other"),
        ("aten::addmm", "BF16 GEMMs"),
        ("aten::mul", "elementwise/other"),
    ],
)
def test_categories_of_kernels(kernel, expected):
    assert profiling.category(kernel, frozenset({"own_thing"})) == expected
