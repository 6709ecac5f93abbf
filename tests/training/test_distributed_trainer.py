"""accelerate and Trainer on two gloo processes: DDP and FSDP2, the same adapters as one process, checkpoints that go on exactly,
and the scripts of examples/multi_gpu."""

import itertools
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from _fsdp_on_cpu import allow_fsdp_on_cpu
from _tiny_models import WORDS, save_tiny
from _two_processes import Failed, both
from accelerate.state import AcceleratorState, GradientState, PartialState
from conftest import tiny_llama
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainingArguments

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.training.distributed import last_checkpoint, make_resumable, resume

ddp = pytest.param(
    "ddp",
    marks=pytest.mark.skipif(torch.__version__ < (2, 13), reason="not run: transformers loads to 'cpu:0', unknown to PyTorch"),
)
EXAMPLES = Path(__file__).parents[2] / "examples" / "multi_gpu"
ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 128, (32, 12), generator=torch.Generator().manual_seed(3))]


@contextmanager
def fresh(**environment: str):
    """accelerate's state is one per process: a test must not find that of the test before."""
    before, init = dict(os.environ), AcceleratorState.__init__
    os.environ.update(environment)
    try:
        yield
    finally:
        AcceleratorState.__init__ = init
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()
        os.environ.clear()
        os.environ.update(before)


FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}


def trainer_of(folder, backend: str, strategy: str, batch: int, seed: int = 0, dropout: float = 0.0, **settings) -> Trainer:
    word, _, layouts = backend.partition(" ")
    torch.manual_seed(seed)
    memory = "small" if layouts == "transient" else "fast"
    config = NVFP4LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear", backend=word, memory=memory)
    if strategy.startswith("fsdp2"):
        allow_fsdp_on_cpu()
        kind = "SHARDED_STATE_DICT" if "sharded" in strategy else "FULL_STATE_DICT"
        settings.update(fsdp=True, fsdp_config={**FSDP, "state_dict_type": kind, "cpu_ram_efficient_loading": "ram" in strategy})
    settings = dict(max_steps=4, save_steps=2, learning_rate=1e-2, lr_scheduler_type="linear", weight_decay=0.0) | settings
    settings |= dict(per_device_train_batch_size=batch, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
    return Trainer(get_peft_model(tiny_llama(), config), TrainingArguments(folder, **settings), train_dataset=ROWS)


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def adapters(model) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for name, p in found.items()}


def units(model) -> list[str]:
    return sorted(type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule))


class Run(NamedTuple):
    losses: list[float]
    adapters: dict[str, torch.Tensor]
    units: list[str]  # of FSDP
    shares: set[float]  # of the packed tensors, in this process


def train(rank: int, folder, backend: str, strategy: str, batch: int, settings: dict, resume: str = "", spoil=None) -> Run:
    """``resume``: "as it is", or "converted" for another number of processes. ``spoil(rank, model)`` comes before step 1."""
    with fresh():
        trainer = trainer_of(str(folder), backend, strategy, batch, **settings)
        if spoil is not None:
            spoil(rank, trainer.model)
        checkpoint = make_resumable(trainer) if resume == "converted" else bool(resume)
        trainer.train(resume_from_checkpoint=checkpoint)
        packed = [p for p in trainer.model.parameters() if p.dtype == torch.uint8 and hasattr(p, "to_local")]
        shares = {p.to_local().numel() / p.numel() for p in packed}
        return Run(losses(trainer), adapters(trainer.model), units(trainer.model), shares)


def assert_close(got: dict, wanted: dict, tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, p in wanted.items():
        assert (got[name] - p).abs().max() <= tolerance * max(p.abs().max(), 1e-3), name


# Two ways to the same adapters: gradients differ by the noise of test_distributed (2e-5 of the largest), adapters that differ
# move a code of an activation now and then (1e-3 of a gradient). SGD adds that up in proportion. (Adam does not: in its first
# steps it takes the sign of a gradient, and where a gradient is next to zero, noise decides. Resuming, its second moments are
# there.)
PROPORTION = 1e-3
SGD = dict(optim="sgd", learning_rate=0.1)
DROPOUT = dict(dropout=0.1)


def assert_same_run(got: Run, wanted: Run) -> None:
    assert got.losses == pytest.approx(wanted.losses, abs=2e-4)  # logged in 4 digits
    assert_close(got.adapters, wanted.adapters, PROPORTION)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2 sharded"])
def test_two_processes_train_what_one_does(tmp_path, strategy):
    one = train(0, tmp_path / "one", "nvfp4 transient", "none", 4, SGD)
    for here in both(train, tmp_path / "two", "nvfp4 transient", strategy, 2, SGD):
        assert_same_run(here, one)
        assert here.units.count("FSDPLlamaDecoderLayer") == (0 if strategy == "ddp" else 2), "one unit per decoder layer"


@pytest.mark.parametrize("strategy", [ddp, "fsdp2", "fsdp2 sharded"])
def test_resuming_on_two_processes_is_exact(tmp_path, strategy):
    """With dropout, from another seed: everything comes from the checkpoint."""
    whole = both(train, tmp_path, "nvfp4 cached", strategy, 2, DROPOUT)
    (tmp_path / "checkpoint-4").rename(tmp_path / "put-aside")
    resumed = both(train, tmp_path, "nvfp4 cached", strategy, 2, DROPOUT | {"seed": 1}, "as it is")
    for wanted, got in zip(whole, resumed):
        assert got.losses == wanted.losses  # the log of the first half is part of the checkpoint
        assert all(torch.equal(got.adapters[name], p) for name, p in wanted.adapters.items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("first", ["one", "two"])
def test_going_on_with_another_number_of_processes(tmp_path, strategy, first):
    """Batches of 2 on two processes are the batches of 4 of one."""
    arguments = {"one": (tmp_path, "nvfp4 cached", "none", 4), "two": (tmp_path, "nvfp4 cached", strategy, 2)}
    run = {"one": lambda *more: [train(0, *more)], "two": lambda *more: both(train, *more)}
    wanted = run[first](*arguments[first], {})[0]
    (tmp_path / "checkpoint-4").rename(tmp_path / "put-aside")
    second = "two" if first == "one" else "one"
    for got in run[second](*arguments[second], {"seed": 1}, "converted"):
        assert_same_run(got, wanted)


def test_sharded_checkpoints_are_for_fsdp(tmp_path):
    both(train, tmp_path, "nvfp4 cached", "fsdp2 sharded", 2, {"max_steps": 2})
    with pytest.raises(ValueError, match="SHARDED_STATE_DICT: go on with FSDP"):
        train(0, tmp_path, "nvfp4 cached", "none", 4, {"seed": 1}, "converted")


def test_names_and_numbers_are_inverse():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW([{"params": [model[0].weight, model[1].weight]}, {"params": [model[1].bias], "lr": 1.0}])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = [["a", "b"], ["c"]]
    named = resume.by_name(optimizer.state_dict(), names)
    assert list(named["state"]) == ["a", "b", "c"] and [group["params"] for group in named["param_groups"]] == names
    assert torch.equal(named["state"]["c"]["exp_avg"], optimizer.state[model[1].bias]["exp_avg"])
    assert str(resume.by_number(named)) == str(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[2, 1\] parameters, this run of \[1, 1\]"):
        resume.by_name(optimizer.state_dict(), [["a"], ["c"]])


def test_checkpoints_that_were_not_finished_are_passed_over(tmp_path):
    both = ("trainer_state.json", "optimizer.pt")
    for step, files in {2: both, 10: ("trainer_state.json",), 12: ("optimizer.bin",), 14: both}.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in files:
            (tmp_path / f"checkpoint-{step}" / name).write_text("{}")
    (tmp_path / "checkpoint-14" / "trainer_state.json").write_text('{"global_st')  # died while it wrote the last file
    (tmp_path / "checkpoint-best").mkdir()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2") and last_checkpoint(tmp_path / "none") is None


def test_a_converted_optimizer_is_whole_or_not_there(tmp_path, monkeypatch):
    def dies(state, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        resume._save({}, tmp_path / resume.BY_NAME)
    assert not (tmp_path / resume.BY_NAME).exists()


ONE_STEP = {"max_steps": 1, "save_strategy": "no"}


def test_nf4_is_sharded_through_accelerate(tmp_path):
    """accelerate by itself leaves every process the whole of it."""
    assert all(run.shares == {0.5} for run in both(train, tmp_path, "nf4", "fsdp2", 2, ONE_STEP))


def zeros_in_rank_1(rank: int, model) -> None:
    """Other weights, as placeholders are."""
    if rank == 1:
        packed = [m.packed_tensors().values() for m in model.modules() if hasattr(m, "packed_tensors")]
        with torch.no_grad():
            for t in (*model.parameters(), *itertools.chain(*packed)):
                t.zero_()


@pytest.mark.parametrize("backend", ["nvfp4 cached", "nf4"])
def test_cpu_ram_efficient_loading_takes_all_of_rank_0(tmp_path, backend):
    expected = train(0, tmp_path, backend, "none", 4, ONE_STEP).losses
    first, second = both(train, tmp_path, backend, "fsdp2 ram", 2, ONE_STEP, "", zeros_in_rank_1)
    assert first.losses == second.losses == pytest.approx(expected, abs=2e-4)


def one_bit_in_rank_1(rank: int, model) -> None:
    if rank == 1:
        model.get_base_model().model.layers[0].self_attn.v_proj.base_layer.weight[3, 3] ^= 16


def test_trainer_names_a_base_that_differs(tmp_path):
    with pytest.raises(Failed) as error:
        both(train, tmp_path, "nvfp4 cached", "fsdp2", 2, {}, "", one_bit_in_rank_1)
    ranks = str(error.value).split("rank 1: ")
    assert len(ranks) == 2 and all("ValueError" in text and "layers.0.self_attn.v_proj.base_layer" in text for text in ranks)


def settings_of(yaml: Path) -> dict[str, str]:
    """The environment that ``accelerate launch --config_file yaml`` gives the script."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    before = dict(os.environ)
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(yaml), "train.py"]))
    found = prepare_multi_gpu_env(args)
    os.environ.clear()
    os.environ.update(before)
    return {key: value for key, value in found.items() if key.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))}


def model_and_data(folder: Path) -> list[str]:
    model, draw = save_tiny(folder / "model"), random.Random(0)
    words = [word for word in WORDS.split() if word.isalpha()]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"text": " ".join(draw.choices(words, k=20))}) + "\n" for _ in range(32)))
    return ["--model", str(model), "--data", str(data)]


def run_example(rank: int, arguments: list[str], environment: dict[str, str]):
    argv = sys.argv
    with fresh(**environment):
        allow_fsdp_on_cpu()
        sys.argv = ["train.py", *arguments]
        try:
            found = runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
        finally:
            sys.argv = argv
        return losses(found["trainer"]), units(found["trainer"].model)


@pytest.mark.parametrize("backend", ["nvfp4", pytest.param("nf4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", [ddp, "fsdp2"])
def test_examples_train_and_resume(tmp_path, strategy, backend):
    output = tmp_path / "out"
    arguments = [*model_and_data(tmp_path), "--output", str(output), "--backend", backend, "--accumulate", "2"]
    environment = settings_of(EXAMPLES / f"{strategy}.yaml")
    assert (environment.get("FSDP_VERSION") == "2") == (strategy == "fsdp2")
    before = both(run_example, [*arguments, "--max_steps", "2", "--save_steps", "2"], environment)
    after = both(run_example, [*arguments, "--max_steps", "3", "--resume"], environment)
    for (first, parts), (rest, _) in zip(before, after):
        assert len(first) == 2 and rest[:2] == first and len(rest) == 3
        assert ("FSDPLlamaDecoderLayer" in parts) == (strategy == "fsdp2")
    saved = load_file(output / "adapter_model.safetensors")
    assert (
        len(saved) == 28
        and all(p.isfinite().all() for p in saved.values())
        and any(p.any() for n, p in saved.items() if "lora_B" in n)
    )
    reloaded = PeftModel.from_pretrained(tiny_llama(vocab_size=64), output)  # a plain model takes the adapter
    name, p = next(iter(saved.items()))
    assert torch.equal(reloaded.state_dict()[name.replace(".weight", ".default.weight")], p)


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_the_run_resumes(tmp_path):
    output = tmp_path / "out"
    arguments = [*model_and_data(tmp_path), "--output", str(output)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "train.py")]
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen([*launch, *arguments, "--max_steps", "100000", "--save_steps", "5"], stdout=log, stderr=log)
        try:
            while not (output / "checkpoint-5" / "trainer_state.json").exists():
                assert run.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
            workers = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            os.kill(int(workers[1]), signal.SIGKILL)
            assert run.wait(60) != 0
        finally:
            run.kill()
    text = (tmp_path / "log").read_text()
    assert "Signal 9 (SIGKILL)" in text and "local_rank: 1" in text
    found = max(int(path.name.partition("-")[2]) for path in output.glob("checkpoint-*") if (path / "rng_state_1.pth").exists())
    for path in output.glob("checkpoint-*"):  # one that was being written when the process died
        if int(path.name.partition("-")[2]) > found:
            shutil.rmtree(path)
    done = both(run_example, [*arguments, "--max_steps", str(found + 1), "--resume"], {})
    assert all(len(losses) == found + 1 for losses, _ in done)
