"""accelerate and Trainer on two gloo processes: DDP and FSDP2, the same adapters as one process, checkpoints that go on exactly,
and the scripts of examples/multi_gpu."""

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

import pytest
import torch
from _fsdp_on_cpu import allow_fsdp_on_cpu
from _tiny_models import WORDS, save_tiny
from _two_processes import both
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from conftest import tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model
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


def trainer_of(folder, backend: str, strategy: str, batch: int, seed: int = 0, **settings) -> Trainer:
    word, _, layouts = backend.partition(" ")
    torch.manual_seed(seed)
    memory = "small" if layouts == "transient" else "fast"
    config = NVFP4LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", backend=word, memory=memory)
    if strategy.startswith("fsdp2"):
        allow_fsdp_on_cpu()
        kind = "SHARDED_STATE_DICT" if "sharded" in strategy else "FULL_STATE_DICT"
        settings.update(fsdp=True, fsdp_config={**FSDP, "state_dict_type": kind, "cpu_ram_efficient_loading": "ram" in strategy})
    if "plain" in strategy:
        config = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
    settings = dict(max_steps=4, save_steps=2, learning_rate=1e-2, lr_scheduler_type="linear", weight_decay=0.0) | settings
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    return Trainer(get_peft_model(tiny_llama(), config), args, train_dataset=ROWS)


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def adapters(model) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for name, p in found.items()}


def units(model) -> list[str]:
    return sorted(type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule))


def train(rank: int, folder: str, backend: str, strategy: str, resume: bool = False, seed: int = 0):
    with fresh():
        trainer = trainer_of(folder, backend, strategy, 2, seed)
        trainer.train(resume_from_checkpoint=resume)
        return losses(trainer), adapters(trainer.model), units(trainer.model)


def alone(folder: str, backend: str, resume: bool = False):
    with fresh():
        trainer = trainer_of(folder, backend, "none", 4)
        trainer.train(resume_from_checkpoint=resume)
        return losses(trainer), adapters(trainer.model)


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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2 sharded"])
def test_two_processes_train_what_one_does(tmp_path, strategy):
    first, second = both(train_without_dropout, str(tmp_path / "two"), "nvfp4 transient", strategy, SGD)
    one = without_dropout(alone_trainer, str(tmp_path / "one"), "nvfp4 transient")
    for here in (first, second):
        assert here[0] == pytest.approx(one[0], abs=2e-4)  # logged in 4 digits
        assert_close(here[1], one[1], PROPORTION)
    if strategy != "ddp":
        assert first[2].count("FSDPLlamaDecoderLayer") == 2, "one unit per decoder layer"


def train_without_dropout(rank: int, folder: str, backend: str, strategy: str, settings: dict):
    with fresh():
        trainer = trainer_of(folder, backend, strategy, 2, **settings)
        silence(trainer.model)
        trainer.train()
        return losses(trainer), adapters(trainer.model), units(trainer.model)


def alone_trainer(folder: str, backend: str) -> Trainer:
    return trainer_of(folder, backend, "none", 4, **SGD)


def silence(model) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def without_dropout(make, *arguments):
    with fresh():
        trainer = make(*arguments)
        silence(trainer.model)
        trainer.train()
        return losses(trainer), adapters(trainer.model)


@pytest.mark.parametrize("strategy", [ddp, "fsdp2", "fsdp2 sharded"])
def test_resuming_on_two_processes_is_exact(tmp_path, strategy):
    """With dropout, from another seed: everything comes from the checkpoint."""
    whole = both(train, str(tmp_path), "nvfp4 cached", strategy)
    last = tmp_path / "checkpoint-4"
    last.rename(tmp_path / "put-aside")
    resumed = both(train, str(tmp_path), "nvfp4 cached", strategy, True, 1)
    for (all_losses, wanted, _), (rest, got, _) in zip(whole, resumed):
        assert rest == all_losses  # the log of the first half is part of the checkpoint
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_resuming_alone_is_exact(tmp_path):
    whole = alone(str(tmp_path), "nvfp4 cached")
    (tmp_path / "checkpoint-4").rename(tmp_path / "put-aside")
    resumed = alone(str(tmp_path), "nvfp4 cached", True)
    assert resumed[0] == whole[0] and all(torch.equal(resumed[1][name], p) for name, p in whole[1].items())


def go_on(rank: int, folder: str, strategy: str, batch: int):
    with fresh():
        trainer = trainer_of(folder, "nvfp4 cached", strategy, batch, seed=1)
        silence(trainer.model)
        trainer.train(resume_from_checkpoint=make_resumable(trainer))
        return losses(trainer), adapters(trainer.model)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_process_goes_on_where_two_stopped(tmp_path, strategy):
    """Batches of 2 on two processes are the batches of 4 of one."""
    (wanted_losses, wanted, _), _ = both(train_without_dropout, str(tmp_path), "nvfp4 cached", strategy, {})
    (tmp_path / "checkpoint-4").rename(tmp_path / "put-aside")
    found, got = go_on(0, str(tmp_path), "none", 4)
    assert found == pytest.approx(wanted_losses, abs=2e-4)
    assert_close(got, wanted, PROPORTION)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_go_on_where_one_stopped(tmp_path, strategy):
    wanted_losses, wanted = without_dropout(trainer_of, str(tmp_path), "nvfp4 cached", "none", 4)
    (tmp_path / "checkpoint-4").rename(tmp_path / "put-aside")
    for found, got in both(go_on, str(tmp_path), strategy, 2):
        assert found == pytest.approx(wanted_losses, abs=2e-4)
        assert_close(got, wanted, PROPORTION)


def test_sharded_checkpoints_are_for_fsdp(tmp_path):
    both(train_without_dropout, str(tmp_path), "nvfp4 cached", "fsdp2 sharded", {"max_steps": 2})
    with pytest.raises(ValueError, match="SHARDED_STATE_DICT: go on with FSDP"):
        go_on(0, str(tmp_path), "none", 4)


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


def nf4_shares(rank: int, folder: str, strategy: str):
    with fresh():
        trainer = trainer_of(folder, "nf4", strategy, 2, max_steps=1, save_strategy="no")
        silence(trainer.model)
        trainer.train()
        sizes = {p.to_local().numel() / p.numel() for name, p in trainer.model.named_parameters() if p.dtype == torch.uint8}
        return losses(trainer), sizes


def test_nf4_is_sharded_through_accelerate(tmp_path):
    """accelerate by itself leaves every process the whole of it."""
    for _, sizes in both(nf4_shares, str(tmp_path), "fsdp2"):
        assert sizes == {0.5}


def ram_efficient(rank: int, folder: str, backend: str):
    """Rank 1 starts from other weights, as placeholders are; rank 0's count."""
    with fresh():
        trainer = trainer_of(folder, backend, "fsdp2 ram", 2, max_steps=1, save_strategy="no")
        silence(trainer.model)
        if rank == 1:
            with torch.no_grad():
                for p in trainer.model.parameters():
                    p.zero_()
            for module in trainer.model.modules():
                if hasattr(module, "packed_tensors"):
                    [t.zero_() for t in module.packed_tensors().values()]
        trainer.train()
        return losses(trainer)


@pytest.mark.parametrize("backend", ["nvfp4 cached", "nf4"])
def test_cpu_ram_efficient_loading_takes_all_of_rank_0(tmp_path, backend):
    first, second = both(ram_efficient, str(tmp_path), backend)
    expected = both(nf4_shares, str(tmp_path), "fsdp2")[0][0] if backend == "nf4" else None
    if expected is None:
        with fresh():
            trainer = trainer_of(str(tmp_path), backend, "none", 4, max_steps=1, save_strategy="no")
            silence(trainer.model)
            trainer.train()
            expected = losses(trainer)
    assert first == second == pytest.approx(expected, abs=2e-4)


def different_bases(rank: int, folder: str):
    with fresh():
        trainer = trainer_of(folder, "nvfp4 cached", "fsdp2", 2)
        if rank == 1:
            trainer.model.get_base_model().model.layers[0].self_attn.v_proj.base_layer.weight[3, 3] ^= 16
        try:
            trainer.train()
        except ValueError as error:
            return str(error)


def test_trainer_names_a_base_that_differs(tmp_path):
    assert all("layers.0.self_attn.v_proj.base_layer" in message for message in both(different_bases, str(tmp_path)))


def fsdp1(rank: int):
    with fresh():
        allow_fsdp_on_cpu()
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
        model = get_peft_model(tiny_llama(), NVFP4LoraConfig(r=4, target_modules="all-linear"))
        try:
            accelerator.prepare(model)
        except ValueError as error:
            return str(error)


def test_accelerate_with_fsdp1_is_refused():
    assert all("fsdp_version: 2" in message for message in both(fsdp1))


# ---------------------------------------------------------------------------------------------- the examples


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
