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

import torch

DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "peft_nvfp4" / "peer"

SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=1024, max_position_embeddings=128)
LLAMA = dict(SMALL, intermediate_size=96, num_key_value_heads=2)
OPT = dict(SMALL, ffn_dim=96, word_embed_proj_dim=64)
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
    "peft-internal-testing/tiny-random-t5": ("T5ForConditionalGeneration", T5),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": ("T5ForConditionalGeneration", T5),
}
"""Name on the Hub -> (class, settings). Weights are random: these tests compare a model with itself. ("peer" is ours.)"""

SPECIAL_TOKENS = dict(
    bos_token_id=0, eos_token_id=2, pad_token_id=3
)  # the tests feed 1: its embedding must not be the zeros of padding


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
    """A Hub cache (the folder for HF_HUB_CACHE) with every model of :data:`HUB`."""
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
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
    return hub
