"""Shared test set-up: one thread, a fixed seed for every test, and tiers that report themselves as not run.

Tests marked ``gpu`` need CUDA, ``sm120`` an RTX 50xx, ``slow`` the fetched real model. Where the requirement is missing they are
skipped with that reason, never passed.
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir() and folder.name[0] not in "._"]
"""Test files share helpers, whichever of them are run."""
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # last: its modules hide none of the helpers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import _narrow_cpu  # before PyTorch, which looks at the CPU when it is imported

# isort: split
import pytest
import torch

if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 10:
    os.environ.setdefault("PEFT_NVFP4_KERNELS", "emulated")  # what the reference computes; "bf16" has tests of its own

from peft_nvfp4 import BACKENDS

torch.set_num_threads(1)
pytest_plugins = ["_skips"]


def pytest_report_header():
    narrowed = f", narrowed to {_narrow_cpu.CPU}" if _narrow_cpu.CPU else ""
    return f"CPU kernels: {torch.backends.cpu.get_cpu_capability()}{narrowed}"


LENGTHY = ("test_the_whole_way_on_the_real_model", "test_one_instance_compiles")
"""Tests of minutes go first: with several processes (-n 2) the last one would otherwise run alone at the end."""


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.name.partition("[")[0] not in LENGTHY)
    has_cuda = torch.cuda.is_available()
    has_sm120 = has_cuda and torch.cuda.get_device_capability()[0] == 12
    for item in items:
        if item.get_closest_marker("gpu") and not has_cuda:  # keywords would hold names of folders, too
            item.add_marker(pytest.mark.skip(reason="not run: no CUDA GPU"))
        if item.get_closest_marker("sm120") and not has_sm120:
            item.add_marker(pytest.mark.skip(reason="not run: no SM120 GPU"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    """Every backend; bitsandbytes' where it is installed."""
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return request.param


def tiny_llama(dtype=torch.float32, **overrides):
    """A random two-layer Llama of the real class, small enough for every test."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = dict(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
    )
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).to(dtype)


@pytest.fixture
def llama():
    return tiny_llama
