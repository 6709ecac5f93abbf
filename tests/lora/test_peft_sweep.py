"""The sweep of ``benchmarks/peft_sweep.py`` over a few classes: stock PEFT is the same with this package imported, and our config
does what stock PEFT can do. (All classes: docs/peft_sweep.md.)"""

import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, dequantize_model, freeze_model, prepare_model_for_nvfp4_training
from peft_nvfp4.nn.wrapping import WRAPPED

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import peft_sweep

CLASSES = (
    *("ViTForImageClassification", "SegformerForSemanticSegmentation"),
    *("ASTForAudioClassification", "WhisperForConditionalGeneration"),
    *("CLIPModel", "ViltForQuestionAnswering"),
    *("BertForMaskedLM", "DebertaForSequenceClassification", "LlamaForCausalLM"),
)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_does_what_it_does_in_stock_peft(name):
    make = peft_sweep.tiny(getattr(hf, name))
    table = peft_sweep.compare(make, peft_sweep.first_batch(make))
    assert table["stock"] == dict.fromkeys(peft_sweep.STEPS, "same")
    assert [table[backend] for backend in peft_sweep.BACKENDS] == [dict.fromkeys(peft_sweep.STEPS, "ok")] * 3
    assert WRAPPED  # the hooks are back


def test_the_sweep_sees_differences(monkeypatch):
    """A step that fails, gives other bits or NaN, and only then."""
    stock = torch.ones(3)
    cases = {"same": stock.clone(), "DIFFERS": stock + 1, "DIFFERS: ValueError: no": "ValueError: no"}
    for text, hooked in cases.items():
        assert peft_sweep._same(stock, hooked) == text
    assert peft_sweep._works(stock, stock + 1) == "ok" and peft_sweep._works(stock, stock * torch.nan) == "NOT FINITE"
    assert peft_sweep._works(stock, "TypeError: x") == "FAILS: TypeError: x"
    row = {"class": "X", "modality": "text", "steps": {"stock": {"wrap": "same", "train": "DIFFERS"}, "nvfp4": {"wrap": "ok"}}}
    assert peft_sweep.differences(row) == ["stock train: DIFFERS"]


def test_a_linear_that_takes_another_shape_is_left_out(backend):
    """LoRA on DeepSeek V4's grouped linears fails in stock PEFT."""
    make = peft_sweep.tiny(hf.DeepseekV4ForCausalLM)
    with pytest.warns(UserWarning, match="leaves out .*DeepseekV4GroupedLinear is more than a linear"):
        model = get_peft_model(make(), NVFP4LoraConfig(r=4, target_modules="all-linear", backend=backend))
    model(**peft_sweep.first_batch(make)).logits.square().mean().backward()


@pytest.mark.parametrize("saved", (None, ["classifier"]))
def test_a_vision_model_without_embeddings_of_tokens(backend, saved):
    """Its input embeddings are a convolution, and have no weight of their own."""
    make = peft_sweep.tiny(hf.ViTForImageClassification)
    pixels = torch.randn(2, 3, 32, 32)
    stock = get_peft_model(make(), LoraConfig(r=8, target_modules="all-linear", modules_to_save=saved))
    assert stock.merge_and_unload()(pixels).logits.isfinite().all()
    frozen = prepare_model_for_nvfp4_training(freeze_model(make(), backend, progress=False))
    model = get_peft_model(frozen, NVFP4LoraConfig(r=8, target_modules="all-linear", modules_to_save=saved, backend=backend))
    model.train()(pixel_values=pixels, labels=torch.tensor([0, 1])).loss.backward()
    merged = model.merge_and_unload()
    assert merged(pixels).logits.isfinite().all()
    assert dequantize_model(freeze_model(merged, backend, progress=False))(pixels).logits.isfinite().all()
