"""What is left of an adapter after merging it, and on bases it was not trained on: SmolLM2-135M on film reviews.

A LoRA of rank 16 is trained on the packaged data (as in examples/demo.py), then scored on held-out sentences:

* on the NVFP4 base it was trained on, merged into a dense BF16 model, and merged into NVFP4, which rounds again ("naive"),
* trained once more with merge_aware=True, as trained, merged into NVFP4 and merged into BF16 (with --loftq also from an adapter
  that starts at the base's rounding error),
* the first adapter, from disk, on bases in NVFP4, NF4 and BF16, and on stock PEFT's dense model. --trained-on adds adapters that
  were trained on other bases.

The dense models compute with BF16 activations, the NVFP4 ones with 4-bit activations. With 500 rows the standard error of an
accuracy is about 1.5 points; the retention of weights and logits, and the NLL, show more.

    python benchmarks/retention.py                                     CPU, some minutes a run
    python benchmarks/retention.py --device cuda --steps 300 --seeds 0 1 2 --trained-on nvfp4 nf4 bf16
    python benchmarks/retention.py --layers 2 --steps 2 --rows 16      mechanics only
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path

import common
import torch
from common import smollm2_reviews as data
from peft import PeftModel, get_peft_model
from torch import nn

from peft_nvfp4 import BACKENDS, NVFP4LoraConfig, freeze_model, inspect_adapter, merge

PROBE_ROWS = 64
BASES = ("nvfp4", "nf4", "bf16", "stock")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sentences per step (%(default)s)")
    parser.add_argument("--lr", type=float, default=4e-4, help="peak learning rate (%(default)s)")
    parser.add_argument("--rows", type=int, default=500, help="held-out sentences to score, an even number (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of split, initialisation and order (%(default)s)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, help="keep only the first layers of the model: mechanics")
    parser.add_argument("--accuracy", default="balanced", help="terms of the activations (%(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=tuple(common.DTYPES), help="of activations (%(default)s)")
    parser.add_argument("--aware-lr", type=float, help="peak learning rate of merge-aware training (default: --lr)")
    parser.add_argument("--loftq", action="store_true", help="merge-aware training from init_lora_weights='loftq', too")
    parser.add_argument("--trained-on", nargs="+", default=["nvfp4"], choices=sorted(BACKENDS), help="rows of the second table")
    parser.add_argument("--bases", nargs="+", default=list(BASES), choices=BASES, help="its columns (%(default)s)")
    return parser.parse_args(argv)


def load(args: argparse.Namespace) -> tuple[nn.Module, object]:
    model, tokenizer = data.load_smollm2(common.DTYPES[args.dtype], args.layers)
    return model.to(args.device), tokenizer


def train(args: argparse.Namespace, seed: int, rows: list, backend: str, **settings) -> tuple[PeftModel, object]:
    model, tokenizer = load(args)
    torch.manual_seed(seed)  # the same initial adapter for all
    lora = {"r": args.rank, "lora_alpha": 2 * args.rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(model, NVFP4LoraConfig(**lora, backend=backend, accuracy=args.accuracy, **settings))
    warmup, lr = max(args.steps // 10, 1), (settings.get("merge_aware") and args.aware_lr) or args.lr
    data.fine_tune(model, tokenizer, rows, steps=args.steps, batch_size=args.batch_size, lr=lr, warmup=warmup, seed=seed)
    return model.eval(), tokenizer


def score(model: nn.Module, tokenizer, test: list) -> dict[str, float]:
    found = data.evaluate(model, tokenizer, test)
    return {"accuracy": found.accuracy, "nll": found.nll}


def probe_batch(tokenizer, test: list, device: str) -> dict[str, torch.Tensor]:
    ids, last, _ = data.collate(data.encode(tokenizer, test[:PROBE_ROWS]), tokenizer.pad_token_id, device)
    mask = torch.arange(ids.shape[1], device=device)[None] <= last[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def base_model(args: argparse.Namespace, kind: str) -> nn.Module:
    model, _ = load(args)
    return model if kind == "stock" else freeze_model(model, kind, accuracy=args.accuracy, progress=False)


def merged_and_scored(model: PeftModel, tokenizer, test: list, to: str, probe: dict) -> dict:
    """Of a copy of the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report has them
        merged, report = merge(copy.deepcopy(model), to, probe=probe)
    told = asdict(report)
    told["total"] = {key: told[key] for key in ("retained", "error")}
    worst = min(told["layers"], key=lambda layer: layer["retained"])
    kept = {key: told[key] for key in ("total", "probe", "unequal_scales", "warnings")}
    return {**score(merged, tokenizer, test), **kept, "worst_layer": worst}


def retention(args: argparse.Namespace, seed: int, rows: list, test: list, folder: Path) -> dict[str, dict]:
    """Adapter on its base and merged, trained plainly and merge-aware. Leaves the plain adapter in ``folder``."""
    found = {}
    aware = {"merge_aware": True}
    variants = {"plain": {}, "merge_aware": aware}
    if args.loftq:
        variants["merge_aware, loftq"] = {**aware, "init_lora_weights": "loftq"}
    for name, settings in variants.items():
        model, tokenizer = train(args, seed, rows, "nvfp4", **settings)
        probe = probe_batch(tokenizer, test, args.device)
        found[f"{name}: as trained"] = score(model, tokenizer, test)
        with model.disable_adapter():
            found["base, NVFP4"] = score(model, tokenizer, test)
        for to in ("bf16", "nvfp4"):
            found[f"{name}: merged into {to}"] = merged_and_scored(model, tokenizer, test, to, probe)
        if name == "plain":
            model.save_pretrained(folder)
        del model
    dense, tokenizer = load(args)
    found["base, dense"] = score(dense, tokenizer, test)
    return found


def transfer(args: argparse.Namespace, folders: dict[str, Path], test: list) -> dict[str, dict[str, dict]]:
    """Adapters from disk, by the base they were trained on, on every base."""
    _, tokenizer = load(args)
    found: dict[str, dict[str, dict]] = {}
    for trained, folder in folders.items():
        found[trained] = {}
        for kind in args.bases:
            base = base_model(args, kind)
            report = inspect_adapter(base, folder, probe=probe_batch(tokenizer, test, args.device))
            model = PeftModel.from_pretrained(base, str(folder)).eval()
            told = {"binds": report.binds, "logit_change": report.logit_change, "warnings": report.warnings}
            found[trained][kind] = {**score(model, tokenizer, test), **told}
    return found


def mean(runs: list[dict], *path: str) -> float:
    """Over seeds."""
    return statistics.fmean(reduce(getitem, path, run) for run in runs)


def show(runs: list[dict]) -> str:
    names, bases = runs[0]["retention"], next(iter(runs[0]["transfer"].values()))
    columns = {
        "": lambda name: name,
        "accuracy": lambda name: f"{mean(runs, 'retention', name, 'accuracy'):.1%}",
        "NLL": lambda name: f"{mean(runs, 'retention', name, 'nll'):.4f}",
        "weights retained": lambda name: f"{mean(runs, 'retention', name, 'total', 'retained'):.3f}",
        "logit effect retained": lambda name: f"{mean(runs, 'retention', name, 'probe', 'retained'):.3f}",
        "logit error / effect": lambda name: f"{mean(runs, 'retention', name, 'probe', 'error'):.3f}",
    }
    on = {base: (lambda trained, b=base: f"{mean(runs, 'transfer', trained, b, 'accuracy'):.1%}") for base in bases}
    transferred = common.table(list(runs[0]["transfer"]), {"accuracy, trained on": lambda trained: trained, **on})
    return f"{common.table(list(names), columns)}\n{transferred}"


def main(argv: Sequence[str] | None = None) -> dict:
    args = parse(argv)
    runs = []
    for seed in args.seeds:
        rows, test = data.movie_reviews(seed, args.rows)
        with tempfile.TemporaryDirectory() as scratch:
            folders = {backend: Path(scratch, backend) for backend in args.trained_on}
            table = retention(args, seed, rows, test, folders.get("nvfp4", Path(scratch, "unused")))
            for backend in [b for b in folders if b != "nvfp4"]:
                model, _ = train(args, seed, rows, backend)
                model.save_pretrained(folders[backend])
                del model
            runs.append({"seed": seed, "retention": table, "transfer": transfer(args, folders, test)})
    result = common.head(args) | {"runs": runs}
    common.write_json(args.out / f"retention_{args.device.type}.json", result)
    print(show(runs))
    return result


if __name__ == "__main__":
    main()
