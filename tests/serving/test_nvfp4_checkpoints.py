"""Frozen NVFP4 models, as :func:`peft_nvfp4.export_checkpoint` writes them, in vLLM.

vLLM multiplies NVFP4 weights on a GPU only. What it does before that runs here: it reads the settings, chooses the layers, makes
their parameters, and loads and fuses the tensors of the files. For the product itself a test puts plain PyTorch in the place of
the GPU kernel (``marlin``).
"""

import pytest
import torch
import torch.nn.functional as F
from _engines import ask, assert_same_model, compare, engine, prompts, save_base
from transformers import AutoModelForCausalLM
from vllm.model_executor.kernels.linear import MarlinNvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

from peft_nvfp4 import dequantize_model, export_checkpoint, freeze_model

LAYOUTS = ("compressed-tensors", "modelopt")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("nvfp4") / "base")


@pytest.fixture
def marlin(monkeypatch):
    """vLLM's kernel for NVFP4 weights and unquantised inputs, in PyTorch: called with what the GPU kernel would repack."""

    def multiply(self, layer, x, bias=None):
        weight = dequantize_to_dtype(layer.weight, layer.weight_scale, layer.weight_global_scale, x.dtype, swizzle=False)
        return F.linear(x, weight, bias)

    monkeypatch.setattr(MarlinNvFp4LinearKernel, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
    monkeypatch.setattr(MarlinNvFp4LinearKernel, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(MarlinNvFp4LinearKernel, "apply_weights", multiply)


def frozen(base: str):
    return freeze_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), "nvfp4")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_alone(base, tmp_path, marlin, layout):
    report = export_checkpoint(frozen(base), tmp_path, layout)
    assert report.scheme == "W4A16"
    with engine(tmp_path) as llm:
        answers = ask(llm, prompts(20))
    assert_same_model(compare(answers, *(dequantize_model(frozen(base)).to(dtype) for dtype in (torch.bfloat16, torch.float32))))
