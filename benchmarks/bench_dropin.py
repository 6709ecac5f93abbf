"""What somebody gets who changes one line of an ordinary Trainer script, and switches nothing else on.

    python benchmarks/bench_dropin.py 1b:peft:fixed 1b:nvfp4:fixed 1b:nvfp4-ckpt:fixed 1b:nvfp4:varied:140

A case is SHAPE:METHOD[-ckpt][-eager]:LENGTHS[:STEPS]. METHOD: ``peft`` (LoraConfig on BF16), ``qlora`` (bitsandbytes NF4 with
double quantisation, prepare_model_for_kbit_training, LoraConfig), ``nvfp4``, ``nf4``, ``bf16`` (NVFP4LoraConfig with that backend
and no field but LoRA's own). ``ckpt``: gradient_checkpointing. ``eager``: without recordings. LENGTHS: ``fixed``
(1024), ``varied`` (log-normal around 270, padded to the longest row of the batch, a multiple of 8). Labels at every token, LoRA
r=16 on all linears, batch 4, AdamW, bf16=True, random weights.

Writes ``dropin_<gpu>.json``: seconds until half of the steps were done, median and mean milliseconds of the second half (each
step ends with a synchronisation), real tokens a second, peak memory of tensors, after 50 steps and at the end,
loss. Products in FP4 are emulated by BF16 ones where a GPU has none.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import statistics
import tempfile
import time

import common
import torch
from environment import environment
from llama_cases import dense_model, llama_config, to_bnb
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from peft_nvfp4 import NVFP4LoraConfig, disable_cuda_graphs

BACKENDS = ("nvfp4", "nf4", "bf16")


def build(shape: str, method: str, words: list[str], device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    model = dense_model(llama_config(shape), "sdpa", device)
    model.config.use_cache = False
    lora = dict(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    if method in BACKENDS:
        model = get_peft_model(model, NVFP4LoraConfig(**lora, backend=method))
        if "eager" in words:
            disable_cuda_graphs(model)
        return model
    if method == "qlora":
        to_bnb(model)
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing="ckpt" in words)
    elif method != "peft":
        raise ValueError(f"unknown method {method!r}; choose peft, qlora or {', '.join(BACKENDS)}")
    return get_peft_model(model, LoraConfig(**lora))


def rows(lengths: str, count: int, vocabulary: int) -> list[dict[str, Tensor]]:
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    varied = [max(32, min(1024, int(draw.lognormvariate(5.6, 0.7)))) for _ in range(count)]
    sizes = {"fixed": [1024] * count, "varied": varied}[lengths]
    return [{"ids": torch.randint(5, vocabulary, (n,), generator=generator)} for n in sizes]


def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    texts = [row["ids"] for row in batch]
    width = -(-max(map(len, texts)) // 8) * 8
    ids, mask = (torch.zeros(len(texts), width, dtype=torch.long) for _ in range(2))
    labels = torch.full((len(texts), width), -100)
    for i, text in enumerate(texts):
        ids[i, : len(text)], mask[i, : len(text)], labels[i, : len(text)] = text, 1, text
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Clock(TrainerCallback):
    SETTLED = 50

    def __init__(self, device: torch.device):
        self.device, self.times, self.settled_gb = device, [], None

    def on_step_end(self, *args, **kwargs) -> None:
        common.synchronize(self.device)
        self.times.append(time.perf_counter())
        if len(self.times) == self.SETTLED:
            self.settled_gb = peaks(self.device)


def peaks(device: torch.device) -> list[float] | None:
    """Largest bytes in tensors so far, and reserved by PyTorch, in GB."""
    if device.type != "cuda":
        return None
    return [round(f(device) / common.GB, 2) for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)]


def measure(row: dict, shape: str, method: str, words: list[str], lengths: str, steps: int, device: torch.device) -> None:
    cuda = device.type == "cuda"
    model = build(shape, method, words, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    clock, checkpointing = Clock(device), "ckpt" in words
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=steps, learning_rate=2e-4, bf16=cuda, use_cpu=not cuda,
            logging_steps=min(10, steps), save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
            dataloader_num_workers=2 if cuda else 0, gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        )  # fmt: skip
        data = rows(lengths, 4 * steps, model.config.vocab_size)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[clock])
        start = time.perf_counter()
        trainer.train()
    half = steps // 2
    late = [(b - a) * 1e3 for a, b in zip(clock.times[half - 1 :], clock.times[half:])]
    row |= {"first_half_s": round(clock.times[half - 1] - start, 1), "median_ms": round(statistics.median(late), 1)}
    row |= {"mean_ms": round(statistics.mean(late), 1), "least_ms": round(min(late), 1), "each_ms": [round(t) for t in late]}
    row["loss"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    row["useful_tokens_per_s"] = round(1e3 * sum(len(r["ids"]) for r in data) / steps / row["mean_ms"])
    row["peak_gb"], row["reserved_gb"] = peaks(device) or (None, None)
    row["peak_and_reserved_gb_after_50_steps"] = clock.settled_gb
    if method in BACKENDS:
        row["steps"] = str(model.base_model.nvfp4_steps).splitlines()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("cases", nargs="+")
    args, results = parser.parse_args(), []
    for case in args.cases:
        shape, what, lengths, *steps = case.split(":")
        method, *words = what.split("-")
        row = {"shape": shape, "method": what, "lengths": lengths}
        count = int(steps[0]) if steps else 40
        common.guarded(row, lambda: measure(row, shape, method, words, lengths, count, args.device))  # noqa: B023  called at once
        common.release(args.device)
        results.append(row)
        print(json.dumps(row), flush=True)
    name = "h200" if args.device.type == "cuda" else "cpu"
    path = args.out / f"dropin_{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": results}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
