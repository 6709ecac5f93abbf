"""Generation and evaluation as somebody gets them who changes one line of an ordinary script, and switches nothing else on.

    python benchmarks/bench_generate.py 1b:nvfp4 1b:nf4 1b:bf16 1b:peft 1b:qlora 1b:nvfp4-eager

A case is SHAPE:METHOD[-eager]. METHOD: ``peft`` (LoraConfig on BF16), ``qlora`` (bitsandbytes NF4 with double quantisation,
LoraConfig), ``nvfp4``, ``nf4``, ``bf16`` (NVFP4LoraConfig with that backend and no field but LoRA's own). ``eager``: without
recordings. Random weights, LoRA r=16 on all linears.

Generation: ``model.generate`` greedily, prompts of 64 to 200 tokens padded on the left, no end of text. ``first_call_s`` is the
whole first call: kernels are compiled and steps recorded in it. ``ms_a_token`` is of the second: its time without that of a call
for one token, by the number of the other tokens.

Evaluation: ``Trainer.evaluate`` of rows with lengths as in instruction data, padded to the longest of a batch, labels at every
token, ``prediction_loss_only``: seconds of the first and of the second time.

Writes ``generation_<gpu>.json``. Products in FP4 are emulated by BF16 ones where a GPU has none.
"""

from __future__ import annotations

import json
import random
import tempfile
import time

import common
import torch
from bench_dropin import BACKENDS, collate, rows
from environment import environment
from llama_cases import dense_model, llama_config, to_bnb
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Trainer, TrainingArguments

from peft_nvfp4 import NVFP4LoraConfig, disable_cuda_graphs

LENGTHS = (64, 200)
"""Of the shortest and the longest prompt."""


def build(shape: str, method: str, words: list[str], device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    model = dense_model(llama_config(shape), "sdpa", device)
    lora = dict(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    if method in BACKENDS:
        model = get_peft_model(model, NVFP4LoraConfig(**lora, backend=method))
        if "eager" in words:
            disable_cuda_graphs(model)
    elif method in ("peft", "qlora"):
        if method == "qlora":
            to_bnb(model)
        model = get_peft_model(model, LoraConfig(**lora))
    else:
        raise ValueError(f"unknown method {method!r}; choose peft, qlora or {', '.join(BACKENDS)}")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(count: int, vocabulary: int, device: torch.device) -> dict[str, Tensor]:
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    lengths = [LENGTHS[1], LENGTHS[0], *(draw.randint(*LENGTHS) for _ in range(count))][:count]
    ids, mask = (torch.zeros(count, LENGTHS[1], dtype=torch.long) for _ in range(2))
    for i, n in enumerate(lengths):
        ids[i, -n:], mask[i, -n:] = torch.randint(5, vocabulary, (n,), generator=generator), 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def timed(device: torch.device, call) -> float:
    common.synchronize(device)
    start = time.perf_counter()
    call()
    common.synchronize(device)
    return time.perf_counter() - start


def generation(row: dict, model: torch.nn.Module, args) -> None:
    model.eval()
    inputs = prompts(args.prompts, model.config.vocab_size, args.device)
    generate = lambda new: model.generate(**inputs, max_new_tokens=new, do_sample=False)
    row["first_call_s"] = round(timed(args.device, lambda: generate(args.new)), 2)
    row["second_call_s"] = round(second := timed(args.device, lambda: generate(args.new)), 2)
    row["prompt_s"] = round(prompt := timed(args.device, lambda: generate(1)), 3)
    row["ms_a_token"] = round((second - prompt) / (args.new - 1) * 1e3, 2)


def evaluation(row: dict, model: torch.nn.Module, args) -> None:
    cuda = args.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_eval_batch_size=args.prompts, bf16_full_eval=False, bf16=cuda, use_cpu=not cuda, report_to=[],
            prediction_loss_only=True, remove_unused_columns=False, disable_tqdm=True,
        )  # fmt: skip
        data = rows("varied", args.rows, model.config.vocab_size)
        trainer = Trainer(model=model, args=arguments, eval_dataset=data, data_collator=collate)
        found: list[dict] = []
        row["evaluate_s"] = [round(timed(args.device, lambda: found.append(trainer.evaluate())), 2) for _ in range(3)]
    row["eval_loss"] = [round(metrics["eval_loss"], 4) for metrics in found]


def measure(row: dict, shape: str, method: str, words: list[str], args) -> None:
    model = build(shape, method, words, args.device)
    cuda = args.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(args.device)
    try:
        generation(row, model, args)
        evaluation(row, model, args)
    finally:
        if method in BACKENDS:
            row["steps"] = str(model.base_model.nvfp4_steps).splitlines()
    row["peak_gb"] = round(torch.cuda.max_memory_allocated(args.device) / common.GB, 2) if cuda else None


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--prompts", type=int, default=8, help="prompts at a time, and rows of an evaluation batch")
    parser.add_argument("--new", type=int, default=128, help="new tokens")
    parser.add_argument("--rows", type=int, default=200, help="rows of the evaluation")
    args, results = parser.parse_args(), []
    for case in args.cases:
        shape, what = case.split(":")
        method, *words = what.split("-")
        row = {"shape": shape, "method": what, "prompts": args.prompts, "new_tokens": args.new, "eval_rows": args.rows}
        common.guarded(row, lambda: measure(row, shape, method, words, args))  # noqa: B023  called at once
        common.release(args.device)
        results.append(row)
        print(json.dumps(row), flush=True)
    name = "h200" if args.device.type == "cuda" else "cpu"
    path = args.out / f"generation_{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": results}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
