"""What the tests of models loaded with PactConfig share: a dense Llama in files, loading it either way, and comparing."""

from pathlib import Path

import torch
import transformers as hf
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model

from peft_nvfp4 import PactConfig

IDS = torch.arange(32).reshape(2, 16) * 7 % 128
LORA = dict(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def dense_files(folder: Path) -> Path:
    """A dense Llama in BF16, in several files."""
    tiny_llama(torch.bfloat16).save_pretrained(folder / "dense", max_shard_size="60kB")
    assert len(list((folder / "dense").glob("*.safetensors"))) > 2
    return folder / "dense"


def tiny_llava(layers: int) -> hf.PreTrainedModel:
    """A Llama with images, in BF16."""
    text = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4, vocab_size=128)
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16)
    torch.manual_seed(0)
    parts = dict(text_config=hf.LlamaConfig(**text), vision_config=hf.PixtralVisionConfig(**vision))
    return hf.AutoModelForImageTextToText.from_config(hf.LlavaConfig(**parts, image_token_index=127, dtype="bfloat16"))


def load(folder, cls=hf.AutoModelForCausalLM, dtype=torch.bfloat16, **settings):
    return cls.from_pretrained(folder, quantization_config=PactConfig(**settings), dtype=dtype)


def dense(folder, cls=hf.AutoModelForCausalLM, dtype=torch.bfloat16):
    return cls.from_pretrained(folder, dtype=dtype)


def assert_same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    assert [key for key in a if a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])] == []


def logits(model, ids=IDS):
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


def backward(model):
    """Loss and gradients of one step."""
    model.train()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def with_adapter(model, config=LoraConfig, **settings):
    torch.manual_seed(1)
    return get_peft_model(model, config(**LORA, init_lora_weights=False, **settings))
