"""A host that has not enough memory for what leaves the GPU, or refuses to lock it. A run with checkpoints and weights on the
host that is killed within a step, or meets a full disk. Errors are clear, nothing is lost, the run goes on with the same bits.

Run as a script: ``test_host_faults.py FOLDER`` trains into a folder until it kills itself."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _offloaded import batch, same, steps, tuned
from conftest import tiny_llama
from peft import get_peft_model
from test_host_checkpoints import checkpointed, gradients
from transformers import Trainer, TrainingArguments

from peft_nvfp4 import NVFP4LoraConfig, enable_host_checkpoints, enable_offload, host_checkpoint_status, offload_status
from peft_nvfp4.memory import device
from peft_nvfp4.training import checkpoint_transfers, host_checkpoints, resting_weights
from peft_nvfp4.training.distributed import make_resumable
from peft_nvfp4.training.host_checkpoints import _watching
from peft_nvfp4.training.offload import host_memory
from peft_nvfp4.training.offload.enable import offloaded
from peft_nvfp4.training.offload.host_memory import HostBuffer, HostMemoryShort

# ---------------------------------------------------------------------------------------------- memory that is not there


@pytest.fixture
def refusing(monkeypatch):
    """The system gives so many buffers and no more; whatever it says is free."""
    left, pages = [0], host_memory._Pages

    def refused(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return pages(*args, **kwargs)

    monkeypatch.setattr(host_memory, "_Pages", refused)
    return left


@pytest.mark.parametrize("given", [0, 2])
def test_checkpoints_that_the_system_gives_no_memory_for(refusing, given):
    """Before anything is computed. With the memory there, the step is the one that it would have been."""
    model, refusing[0] = checkpointed(), given
    with pytest.raises(HostMemoryShort, match=r"refused .* GB of the host's memory \(Cannot allocate memory\).*ulimit -v"):
        gradients(model)
    assert not any(p.grad is not None for p in model.parameters()) and host_checkpoint_status(model).passes == 0
    refusing[0] = 3
    loss, exact = gradients(checkpointed(host=False))
    got_loss, got = gradients(model)
    assert got_loss == loss and same(got, exact)


def test_checkpoints_that_nobody_asked_to_move_stay_then(refusing, monkeypatch):
    monkeypatch.setattr(host_checkpoints, "_device_memory", lambda device: 1000)
    model = checkpointed(host=False)
    enable_host_checkpoints(model, automatic=True)
    assert same(gradients(model)[1], gradients(checkpointed(host=False))[1])
    assert host_checkpoint_status(model).passes == 0 and "refused" in str(host_checkpoint_status(model))


def test_embedding_and_head_stay_then(refusing, monkeypatch):
    monkeypatch.setattr(resting_weights, "free_bytes", lambda device: 0)
    model, refusing[0] = checkpointed(), 3
    assert same(gradients(model)[1], gradients(checkpointed(host=False))[1])
    assert host_checkpoint_status(model).passes == 1 and not _watching(model).resting.homes


@pytest.mark.parametrize("given", [0, 2])
def test_weights_that_the_system_gives_no_memory_for(refusing, given):
    """The model computes as before, and is offloaded when there is memory."""
    model, refusing[0] = tuned("nvfp4 cached", None), given
    with pytest.raises(HostMemoryShort, match="refused"):
        enable_offload(model)
    assert not offloaded(model) and offload_status(model).layers == 0
    (losses, adapters), (exact, wanted) = steps(model, 1), steps(tuned("nvfp4 cached", None), 1)
    assert losses == exact and same(adapters, wanted)
    refusing[0] = 3
    enable_offload(model)
    assert offload_status(model).layers == 3


def test_memory_that_is_not_locked(monkeypatch):
    """The status says so, results are the same, and the system is asked once for a buffer."""
    asked = []
    refuse = SimpleNamespace(cudaHostRegister=lambda address, size, flags: asked.append(size) or 2)  # cudaErrorMemoryAllocation
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refuse)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **where: zeros(*size, **where) if where.get("device") != "cuda" else late())
    monkeypatch.setattr(checkpoint_transfers, "HostBuffer", lambda size: _locking(HostBuffer(size)))
    model = checkpointed()
    loss, exact = gradients(checkpointed(host=False))
    for _ in range(2):
        got_loss, got = gradients(model)
        assert got_loss == loss and same(got, exact)
    assert len(asked) == 3 and not host_checkpoint_status(model).pinned and "pageable" in str(host_checkpoint_status(model))


def late():
    raise RuntimeError("CUDA error: out of memory")  # which CUDA keeps until somebody asks


def _locking(buffer: HostBuffer) -> HostBuffer:
    """A buffer that a GPU is going to read."""
    assert not buffer.pin(torch.device("cuda", 0)) and not buffer.pin(torch.device("cuda", 0))
    return buffer


@pytest.mark.parametrize(
    "limit, used, stat, left",
    [("4000000", "3000000", "anon 1\ninactive_file 500000\n", 1_500_000), ("max", "3000000", "", None), ("10", "30", "", 0)],
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, limit, used, stat, left):
    for name, text in (("memory.max", limit), ("memory.current", used), ("memory.stat", stat)):
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(device, "CONTROL_GROUPS", [(tmp_path, "memory.max", "memory.current", "inactive_file")])
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    assert device.free_host_bytes() == (1 << 40 if left is None else left)
    (tmp_path / "memory.max").unlink()
    assert device.free_host_bytes() == 1 << 40


# ---------------------------------------------------------------------------------------------- runs that end early

STEPS = 6


def trainer_of(folder) -> Trainer:
    """Six steps with checkpoints and weights on the host, saved every second step."""
    torch.manual_seed(0)
    lora = dict(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), NVFP4LoraConfig(**lora, memory="smallest"))
    enable_host_checkpoints(model)
    rows = torch.randint(0, 128, (16, 16), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        **dict(output_dir=str(folder), max_steps=STEPS, save_steps=2, per_device_train_batch_size=2, use_cpu=True),
        **dict(report_to="none", logging_steps=1, disable_tqdm=True, learning_rate=1e-2, gradient_checkpointing=True),
    )
    return Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])


def result(trainer: Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the adapter."""
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def goes_on(folder, at: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = trainer_of(folder)
    checkpoint = make_resumable(trainer)
    assert checkpoint == str(Path(folder, f"checkpoint-{at}"))
    trainer.train(resume_from_checkpoint=checkpoint)
    assert host_checkpoint_status(trainer.model).passes == STEPS - at and offload_status(trainer.model).copies > 0
    return result(trainer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Of a run that nobody stopped."""
    trainer = trainer_of(tmp_path_factory.mktemp("whole"))
    trainer.train()
    return result(trainer)


def test_killed_in_the_middle_of_a_step(tmp_path, whole):
    """By the system, in the backward pass of the fourth step, while a layer's weights and its input are on their way."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    losses, adapter = goes_on(tmp_path, 2)
    assert len(losses) == STEPS and losses == whole[0] and same(adapter, whole[1])


@pytest.mark.parametrize("part", ["_save", "_save_optimizer_and_scheduler"])
def test_a_disk_that_is_full(tmp_path, whole, monkeypatch, part):
    """While the second checkpoint is written. It is passed over; the weights are where they were."""
    before = getattr(Trainer, part)

    def full_at_four(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return before(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, part, full_at_four)
    trainer = trainer_of(tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        trainer.train()
    with torch.no_grad():
        assert torch.isfinite(trainer.model.eval()(input_ids=batch()).logits).all()
    monkeypatch.undo()
    losses, adapter = goes_on(tmp_path, 2)
    assert losses == whole[0] and same(adapter, whole[1])


def die(folder: str) -> None:
    trainer = trainer_of(folder)
    parameter = trainer.model.get_base_model().model.layers[1].self_attn.q_proj.lora_B["default"].weight
    parameter.register_hook(lambda gradient: trainer.state.global_step == 3 and os.kill(os.getpid(), signal.SIGKILL) or gradient)
    trainer.train()


if __name__ == "__main__":
    die(sys.argv[1])
