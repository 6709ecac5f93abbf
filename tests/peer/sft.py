"""What TRL's smoke tests ask of ``SFTTrainer`` with an adapter (``tests/test_sft_trainer.py`` in its repository), on our bases.

Run by ``run.py``. A row trains a few steps and asks what they ask: the loss is a number, every adapter weight has moved, and no
other weight has, byte by byte. The row ``stock`` is plain LoRA on the dense model.
"""

from __future__ import annotations

import math
import tempfile

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sources import tokenizer
from transformers import AutoModelForCausalLM

from peft_nvfp4 import NVFP4LoraConfig

MODELS = {"llama": "trl-internal-testing/tiny-random-LlamaForCausalLM", "qwen2": "peft-internal-testing/tiny-dummy-qwen2"}
TURNS = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in (("who", "me"), ("what", "that"))]
DATA = {
    "text": {"text": ["hello world", "the quick brown fox", "jumps", "over the lazy dog"]},
    "completion": {"prompt": ["the quick", "over the"] * 2, "completion": [" brown fox", " lazy dog"] * 2},
    "chat": {"messages": TURNS * 2},
    "tokens": {"input_ids": [[5, 6, 7, 8], [9, 10, 11], [12, 13], [14, 15, 16, 17]]},
}
VARIANTS = {
    "peft_config": {},
    "peft_model": {"made": "before"},
    "peft_config_and_model_by_name": {"made": "by name"},
    "completion": {"data": "completion"},
    "completion_whole_loss": {"data": "completion", "completion_only_loss": False},
    "chat": {"data": "chat"},
    "chat_assistant_only": {"data": "chat", "assistant_only_loss": True},
    "tokens": {"data": "tokens"},
    "packing": {"packing": True, "max_length": 16, "packing_strategy": "wrapped"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "accumulation": {"gradient_accumulation_steps": 2},
    "no_checkpointing": {"gradient_checkpointing": False},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "not_reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True},
    "bf16_model": {"bf16": True, "dtype": torch.bfloat16},
    "neftune": {"neftune_noise_alpha": 5.0},
    "rslora": {"lora": {"use_rslora": True}},
    "dora": {"lora": {"use_dora": True}},
    "dropout": {"lora": {"lora_dropout": 0.1}},
    "bias": {"lora": {"bias": "lora_only"}},
    "modules_to_save": {"lora": {"modules_to_save": ["lm_head"]}},
}


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("base", ["nvfp4", "nf4", "bf16", "stock"])
def test_sft(base, model, variant):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    torch.manual_seed(0)
    settings = dict(VARIANTS[variant])
    made, kind = settings.pop("made", "after"), settings.pop("data", "text")
    dtype, lora = settings.pop("dtype", torch.float32), settings.pop("lora", {})
    own = {} if base == "stock" else {"backend": base}
    adapter = (LoraConfig if base == "stock" else NVFP4LoraConfig)(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", **own, **lora
    )
    given = MODELS[model] if made == "by name" else AutoModelForCausalLM.from_pretrained(MODELS[model], dtype=dtype)
    if made == "before":
        given, adapter = get_peft_model(given, adapter), None
    rows = datasets.Dataset.from_dict(DATA[kind])
    with tempfile.TemporaryDirectory() as folder:
        usual = dict(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        steps = dict(max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1)
        arguments = trl.SFTConfig(**{**usual, **steps, **settings})
        trainer = trl.SFTTrainer(
            given, args=arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer(), peft_config=adapter
        )
        before = snapshot(trainer.model)
        trainer.train()
        after = snapshot(trainer.model)
    history = trainer.state.log_history
    assert math.isfinite(history[-1]["train_loss"]) and history[-1]["train_loss"] > 0
    assert ("eval_loss" in history[-2]) is (variant == "evaluation")
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert sum("lora_" in n for n in trained) >= 28 and all(("lora_" in n) or lora for n in trained)
    assert before.keys() == after.keys()
    assert {n for n in before if not torch.equal(before[n], after[n])} == trained
