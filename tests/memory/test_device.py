"""How PyTorch's allocator is set up: a process of its own each, since a setting stays."""

import os
import subprocess
import sys

import pytest
import torch

from peft_nvfp4.memory import device

STEP = """
import torch
from conftest import tiny_llama
from peft import get_peft_model
from peft_nvfp4 import NVFP4LoraConfig, graph_status
config = NVFP4LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(tiny_llama(torch.bfloat16).cuda(), config)
ids = torch.randint(1, 128, (4, 512), device="cuda")
for _ in range(4):  # with and without a recording
    model(input_ids=ids, labels=ids).loss.backward()
more = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
print(any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()), bool(graph_status(model).graphs))
"""


@pytest.mark.parametrize("variable", [None, *device.ALLOCATOR_VARIABLES])
def test_the_environment_comes_first(variable, monkeypatch):
    asked = []
    for name in device.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "expandable_segments:False")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    device.grow_segments()
    assert asked == ([] if variable or sys.platform != "linux" else ["expandable_segments:True"])


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["", "expandable_segments:False"])
def test_segments_grow_once_a_model_is_there(asked):
    environment = os.environ | {"PYTORCH_ALLOC_CONF": asked, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", STEP], env=environment, capture_output=True, text=True)
    assert run.stdout.split()[-2:] == [str(not asked), "True"], run.stdout + run.stderr[-2000:]
