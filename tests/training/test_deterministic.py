"""deterministic(): what it sets, what it puts back, and two runs that are equal bit for bit."""

import os
import random

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from low_level import adapted_model

from peft_nvfp4.training.callbacks import CUBLAS, deterministic


def flags() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )


def test_settings_are_put_back(monkeypatch):
    monkeypatch.delenv(CUBLAS, raising=False)
    before = flags()
    with pytest.raises(KeyError), deterministic(1):
        assert flags() == (True, False, False, True, False) and os.environ[CUBLAS] == ":4096:8"
        raise KeyError
    assert flags() == before
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_seed_reaches_every_generator():
    def numbers():
        return random.random(), np.random.rand(), torch.rand(1).item()

    with deterministic(3):
        first = numbers()
    with deterministic(3):
        again = numbers()
        more = numbers()
    with deterministic(4):
        other = numbers()
    with deterministic():
        going_on = numbers()
    assert first == again != more and first != other and going_on not in (first, other)


def run(model: torch.nn.Module, device: str, backend: str, gradients: str) -> tuple[list[float], list[torch.Tensor]]:
    settings = dict(r=4, target_modules="all-linear", lora_dropout=0.1, gradients=gradients, backend=backend)
    model = adapted_model(model, **settings).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids, losses = torch.randint(0, 128, (4, 64), device=device), []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters() if p.requires_grad]


def twice(device: str, backend: str, gradients: str) -> None:
    found = []
    for seed in (0, 0, 1):
        model = tiny_llama(torch.bfloat16 if device == "cuda" else torch.float32).to(device)  # seeds the generators
        torch.manual_seed(99 + len(found))  # whatever was there before
        with deterministic(seed):
            found.append(run(model, device, backend, gradients))
    (losses, adapters), (again, same), (other, _) = found
    assert losses == again and all(map(torch.equal, adapters, same)) and other != losses


@pytest.mark.parametrize("backend, gradients", [("nvfp4", "nvfp4_sr"), ("nf4", "nvfp4"), ("bf16", "nvfp4")])
def test_two_runs_are_bit_equal(backend, gradients):
    twice("cpu", backend, gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("backend, gradients", [("nvfp4", "nvfp4_sr"), ("nvfp4", "nvfp4"), ("nf4", "nvfp4"), ("bf16", "nvfp4")])
def test_two_runs_on_a_gpu_are_bit_equal(backend, gradients):
    """(Multiplying before, without the variable, would make PyTorch refuse: another process.)"""
    import subprocess
    import sys

    code = f"import torch, test_deterministic as t; t.twice('cuda', {backend!r}, {gradients!r})"
    environment = {**os.environ, CUBLAS: ":4096:8", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=os.path.dirname(__file__))
