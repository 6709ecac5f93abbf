"""How many functions of this package an activation passes through on its way through one frozen LoRA linear and back.

An eager step is bound by Python, and a path of few stations can be read. Counted with ``sys.setprofile``: calls of functions that
are defined in the package (comprehensions and generators are not counted), and the files they are in. The layer is one by itself,
like o_proj, with the defaults of :class:`NVFP4LoraConfig`, on the reference path of a CPU; the numbers are those of FP32 (BF16).

    before the path was one file    forward 152 (156) calls in 13 files    backward 103 (103) calls in 8 files
    when this test was written      forward  55  (57) calls in  6 files    backward  32  (32) calls in 4 files
    it looks at the modules below   forward  57  (59) calls in  7 files    backward  34  (34) calls in 4 files
    the look is taken by the layer  forward  56  (59) calls in  6 files    backward  35  (35) calls in 4 files
    it quantises in smaller steps   forward  66  (71) calls in  6 files: ten (twelve) more inside of numerics/reference.py

A GPU does not run that file; its calls are not counted any more, and of the others there may be as many as before.
"""

import os
import sys

import pytest
import torch
from peft import get_peft_model
from torch import nn

import peft_nvfp4
from peft_nvfp4 import NVFP4LoraConfig

PACKAGE = os.path.dirname(peft_nvfp4.__file__) + os.sep
FRAMES = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
FORWARD_CALLS, BACKWARD_CALLS, FORWARD_FILES = 35, 50, 6
REFERENCE = os.path.join("numerics", "reference.py")


class Calls:
    """Context: the functions of the package that are called, in their order, as (file, name)."""

    def __enter__(self):
        self.functions = []
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        self.files = sorted({file for file, _ in self.functions})

    def _seen(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in FRAMES:
            self.functions.append((code.co_filename.removeprefix(PACKAGE), code.co_name))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.o_proj = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.o_proj(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_calls_of_one_linear(dtype):
    model = get_peft_model(Block().to(dtype), NVFP4LoraConfig(r=4, target_modules=["o_proj"])).train()
    layer = model.base_model.model.o_proj
    assert layer.get_base_layer().options.terms == 2 and layer.get_base_layer().backend == "nvfp4"
    for _ in range(2):  # the first call fills tables
        x = torch.randn(2, 5, 64).to(dtype).requires_grad_() * 1.0
        with Calls() as forward:
            y = layer(x)
        with Calls() as backward:
            y.float().sum().backward()
    assert layer.lora_B["default"].weight.grad.abs().sum() > 0
    for calls, most in ((forward, FORWARD_CALLS), (backward, BACKWARD_CALLS)):
        path = [(file, name) for file, name in calls.functions if file != REFERENCE]
        listed = "\n".join(f"{file}: {name}" for file, name in path)
        assert 10 < len(path) <= most, f"{len(path)} calls, at most {most}:\n{listed}"
    assert len(forward.files) <= FORWARD_FILES, forward.files
