"""PEFT's own tests, unpacked from the source distribution of the installed version, and the Hub models they ask for, made here.

Nothing of PEFT is copied into this repository. ``unpack`` leaves a folder whose ``tests`` package is PEFT's; ``make_hub`` fills a
local Hub cache with small random models under the names that these tests load, so that they run without a network.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "peft_nvfp4" / "peer"

SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=1024, max_position_embeddings=128)
LLAMA = dict(SMALL, intermediate_size=96, num_key_value_heads=2)
OPT = dict(SMALL, ffn_dim=96, word_embed_proj_dim=64)
MOE = dict(LLAMA, num_experts_per_tok=2, head_dim=16)
GEMMA3 = dict(LLAMA, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
BART = dict(
    d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=96, decoder_ffn_dim=96, encoder_attention_heads=4,
    decoder_attention_heads=4, vocab_size=1024, max_position_embeddings=128,
)  # fmt: skip
BERT = dict(SMALL, intermediate_size=96)
T5 = dict(d_model=64, d_ff=96, d_kv=16, num_layers=2, num_heads=4, vocab_size=1024)
HUB = {
    "peer/tiny-opt": ("OPTForCausalLM", OPT),
    "peft-internal-testing/tiny-random-OPTForCausalLM": ("OPTForCausalLM", dict(OPT, num_hidden_layers=5)),
    "peft-internal-testing/opt-125m": ("OPTForCausalLM", dict(OPT, num_hidden_layers=12)),
    "peft-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", LLAMA),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", LLAMA),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", LLAMA),
    "hf-internal-testing/tiny-random-MistralForCausalLM": ("MistralForCausalLM", LLAMA),
    "peft-internal-testing/tiny-dummy-qwen2": ("Qwen2ForCausalLM", LLAMA),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", dict(LLAMA, head_dim=16)),
    "peft-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", SMALL),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", SMALL),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", SMALL),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", dict(SMALL, rotary_dim=4)),
    "peft-internal-testing/tiny-random-BloomForCausalLM": ("BloomForCausalLM", dict(SMALL, num_hidden_layers=5)),
    "peft-internal-testing/tiny-random-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", dict(SMALL, intermediate_size=96)),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", dict(SMALL, intermediate_size=96, num_hidden_layers=5)),
    "hf-internal-testing/tiny-random-BertModel": ("BertModel", dict(SMALL, intermediate_size=96, num_hidden_layers=5)),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("Gemma3ForCausalLM", GEMMA3),
    "trl-internal-testing/tiny-Llama4ForCausalLM": (
        "Llama4ForCausalLM",
        dict(MOE, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=64),
    ),
    "trl-internal-testing/tiny-GptOssForCausalLM": ("GptOssForCausalLM", dict(MOE, num_local_experts=4)),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", dict(MOE, moe_intermediate_size=96, num_experts=4)),
    "hf-internal-testing/Mixtral-tiny": ("MixtralForCausalLM", dict(MOE, num_local_experts=4)),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": ("BartForConditionalGeneration", BART),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": ("T5ForConditionalGeneration", T5),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", BERT),
    "peft-internal-testing/tiny-random-DebertaModel": ("DebertaModel", BERT),
    "peft-internal-testing/tiny-random-DebertaV2Model": ("DebertaV2Model", BERT),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": ("RobertaForSequenceClassification", BERT),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": ("BertForSequenceClassification", BERT),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", LLAMA),
    "peft-internal-testing/tiny-random-t5": ("T5ForConditionalGeneration", T5),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": ("T5ForConditionalGeneration", T5),
}
"""Name on the Hub -> (class, settings). Weights are random: these tests compare a model with itself. ("peer" is ours.)"""

SPECIAL_TOKENS = dict(bos_token_id=0, eos_token_id=2, pad_token_id=3)
"""The tests feed 1: its embedding must not be the zeros of padding."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = dict(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    words = {w: i for i, w in enumerate(("<bos>", "<unk>", "<eos>", "<pad>", *"abcdefghijklmnopqrstuvwxyz "))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def unpack(cache: Path) -> Path:
    """Folder of the installed PEFT's source distribution, downloaded by pip on first use."""
    from importlib.metadata import version

    release = version("peft")
    folder = cache / f"peft-{release}"
    if (folder / "tests" / "__init__.py").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "peft", "--no-build-isolation"]
    subprocess.run([*pip, "-d", str(cache), f"peft=={release}"], check=True)
    with tarfile.open(cache / f"peft-{release}.tar.gz") as archive:
        archive.extractall(cache, filter="data")
    (folder / "tests" / "__init__.py").touch()  # its modules import each other as a package; the archive has no such file
    return folder


def make_hub(cache: Path) -> Path:
    """A Hub cache (the folder for HF_HUB_CACHE) with every model of :data:`HUB`, and one tokenizer for all of them."""
    import transformers

    hub = cache / "hub"
    for name, (kind, settings) in HUB.items():
        settings = {**settings, **SPECIAL_TOKENS}
        revision = hashlib.sha1(f"{kind}{settings}".encode()).hexdigest()
        folder = hub / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / revision
        if not (snapshot / "model.safetensors").exists():
            torch.manual_seed(0)
            cls = getattr(transformers, kind)
            model = cls(cls.config_class(**settings))
            if model.can_generate():
                model.generation_config.max_length = 8  # 20 by default; the tests feed 3 tokens
            model.save_pretrained(snapshot)
        if not (snapshot / "tokenizer.json").exists():
            tokenizer().save_pretrained(snapshot)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
    return hub
