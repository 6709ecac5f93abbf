"""Unsloth in the place of ``bench_dropin.py``'s methods: the same shapes, rows, labels, adapters and optimizer.

    python benchmarks/bench_unsloth.py 1b:unsloth:fixed 1b:unsloth-ckpt:fixed 1b:unsloth-bf16:varied:140

A case is SHAPE:unsloth[-bf16][-ckpt]:LENGTHS[:STEPS]. ``unsloth`` is its QLoRA (NF4 through bitsandbytes), ``bf16`` its LoRA on
BF16, ``ckpt`` its own gradient checkpointing (``use_gradient_checkpointing="unsloth"``). Unsloth changes transformers when it is
imported, so it has a process of its own, and comes first of all imports. It reads models from folders: the random weights are
saved to a temporary one, with a tokenizer of as many words.

Writes ``unsloth_<gpu>.json`` with the columns of ``dropin_<gpu>.json``.
"""

from __future__ import annotations

import os

os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import unsloth  # noqa: I001  before transformers, trl and peft

import importlib.metadata
import json
import tempfile
from pathlib import Path

import bench_dropin
import common
import torch
from environment import environment
from llama_cases import dense_model, llama_config
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from unsloth import FastLanguageModel

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SCRATCH = next((folder for folder in ("/dev/shm", None) if folder is None or os.path.isdir(folder)), None)


def saved(shape: str, folder: Path, device: torch.device) -> Path:
    """The random model of ``bench_dropin.build`` as a folder, with a tokenizer."""
    path = folder / shape
    if not path.exists():
        torch.manual_seed(0)
        model = dense_model(llama_config(shape), "sdpa", device)
        model.save_pretrained(path)
        words = {f"w{i}": i for i in range(model.config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        special = dict(unk_token="w0", pad_token="w1", bos_token="w2", eos_token="w3")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
        del model
        common.release(device)
    return path


def build(folder: Path, shape: str, words: list[str], device: torch.device) -> torch.nn.Module:
    model, _ = FastLanguageModel.from_pretrained(
        str(saved(shape, folder, device)), max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit="bf16" not in words
    )
    return FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, bias="none", target_modules=TARGETS, random_state=0, max_seq_length=2048,
        use_gradient_checkpointing="unsloth" if "ckpt" in words else False,
    )  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("cases", nargs="+")
    args, results = parser.parse_args(), []
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        for case in args.cases:
            shape, what, lengths, *steps = case.split(":")
            words = what.split("-")[1:]
            row = {"shape": shape, "method": what, "lengths": lengths}
            # its checkpointing is chosen where the adapter is made; the Trainer's word would switch on the plain one
            bench_dropin.build = lambda shape, method, _, device: build(Path(folder), shape, words, device)  # noqa: B023
            count = int(steps[0]) if steps else 40
            common.guarded(row, lambda: bench_dropin.measure(row, shape, "unsloth", [], lengths, count, args.device))  # noqa: B023
            common.release(args.device)
            results.append(row)
            print(json.dumps(row), flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("unsloth", "unsloth_zoo", "bitsandbytes", "trl")}
    path = args.out / f"unsloth_{'h200' if args.device.type == 'cuda' else 'cpu'}.json"
    path.write_text(json.dumps({"environment": environment() | versions, "rows": results}, indent=1) + "\n")
    print(path, unsloth.__name__)


if __name__ == "__main__":
    main()
