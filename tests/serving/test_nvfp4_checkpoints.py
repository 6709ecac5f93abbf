"""Frozen NVFP4 models, as :func:`peft_nvfp4.export_checkpoint` writes them, in vLLM.

vLLM multiplies NVFP4 weights on a GPU only. What it does before that runs here: it reads the settings, chooses the layers, makes
their parameters, and loads and fuses the tensors of the files. For the product itself a test puts plain PyTorch in the place of
the GPU kernel (``marlin``). With NVFP4 inputs vLLM has an emulation of its own, which it takes on a CPU as well (``emulation``).
"""

import pytest
import torch
import torch.nn.functional as F
from _engines import (
    SIZES,
    ask,
    assert_same_model,
    compare,
    drift,
    engine,
    lora_engine,
    prompts,
    record,
    request,
    save_base,
    train_adapter,
)
from _pact_models import load
from conftest import tiny_llama
from peft import PeftModel
from published_checkpoints import write
from transformers import AutoModelForCausalLM
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, MarlinNvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype, ref_nvfp4_quant_dequant
from vllm.platforms import current_platform

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


@pytest.fixture
def emulation(monkeypatch):
    monkeypatch.setitem(linear._POSSIBLE_NVFP4_KERNELS, current_platform._enum, [EmulationNvFp4LinearKernel])


def frozen(base: str):
    return freeze_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), "nvfp4", progress=False)


def dense(base: str, dtype: torch.dtype, adapter=None):
    """The frozen model's weights, unquantised inputs."""
    model = dequantize_model(frozen(base)).to(dtype)
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_alone(base, tmp_path, marlin, layout, record_property):
    report = export_checkpoint(frozen(base), tmp_path, layout)
    assert report.scheme == "W4A16"
    with engine(tmp_path) as llm:
        answers = ask(llm, prompts(20))
    found = compare(answers, dense(base, torch.bfloat16), dense(base, torch.float32))
    assert_same_model(found)
    record(record_property, layout, found)


def test_an_adapter_beside_the_exported_base_that_it_was_trained_on(base, tmp_path, marlin, record_property):
    trained = train_adapter(base, tmp_path / "adapter", 3, backend="nvfp4")
    export_checkpoint(frozen(base), tmp_path / "base")
    with lora_engine(tmp_path / "base") as llm:
        answers = ask(llm, prompts(20), request("nvfp4", 1, tmp_path / "adapter"))
    adapted = (dense(base, dtype, tmp_path / "adapter") for dtype in (torch.bfloat16, torch.float32))
    assert_same_model(compare(answers, *adapted))
    found = drift(answers, trained)  # training quantises inputs, with two terms
    record(record_property, "on_nvfp4", found)
    assert found.mean < 0.02 and found.agree > 0.99


INPUT_SCALE = 0.01  # largest input / (6 * 448)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_inputs(tmp_path, emulation, layout, record_property):
    """Scales of the inputs come from a published checkpoint, and are written again."""
    write(tmp_path / "published", layout, tiny_llama(torch.bfloat16, **SIZES), input_scale=INPUT_SCALE)
    report = export_checkpoint(load(tmp_path / "published"), tmp_path / "out", layout)
    assert report.scheme == "W4A4"
    with engine(tmp_path / "out") as llm:
        answers, (product,) = ask(llm, prompts(20)), llm.apply_model(first_product)
    attention = load(tmp_path / "out").dequantize().float().model.layers[0].self_attn
    weight = torch.cat([getattr(attention, f"{leaf}_proj").weight for leaf in "qkv"])
    exact = quantised(some_inputs()).float() @ weight.T  # of one layer, where a code that rounds otherwise moves nothing after it
    torch.testing.assert_close(product.float(), exact, rtol=2**-8, atol=2**-12 * exact.abs().max().item())  # rounded to BF16 once
    expected = [with_quantised_inputs(load(tmp_path / "out").dequantize().to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    found = compare(answers, *expected)
    assert_same_model(found)
    record(record_property, layout, found)


def some_inputs() -> torch.Tensor:
    return torch.randn(7, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).bfloat16()


def first_product(model) -> torch.Tensor:
    return model.model.layers[0].self_attn.qkv_proj(some_inputs())[0]


def quantised(x: torch.Tensor) -> torch.Tensor:
    return ref_nvfp4_quant_dequant(x.flatten(0, -2), torch.tensor(1 / INPUT_SCALE), 16).view_as(x)


def with_quantised_inputs(model):
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args: (quantised(args[0]),))
    return model.eval()
