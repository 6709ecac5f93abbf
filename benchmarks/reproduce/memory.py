"""Memory of training steps, as the paper's Figures 1 and 4 and Tables 5, 9 and 10 have it: what it is made of, the peak over
batch and sequence length, the largest batch under a cap, checkpointing, and saved activations in 4 bits.

    python benchmarks/reproduce/memory.py --out OUT  # one GPU, some minutes; again: goes on where it stopped
    python benchmarks/reproduce/memory.py --small    # a tiny model, on a CPU: does it run?

Llama shapes with random weights; models, loss and protocol are those of ``bench_train.py`` (PROTOCOL.md). Each model is built
once and stepped at each batch and length: a warm-up step, then the peak of ``max_memory_allocated`` over two more, beside what
the estimator says. What a step keeps for backward is the allocator's growth over a forward pass. Then caps on PyTorch's
allocator, and the largest batch of 1024 tokens a row below them.

``-codes`` stands for HyC-LoRA: it compresses what autograd saves and leaves the forward pass as it is, and so does this package's
``activations="nvfp4"`` over BF16 or NF4 weights. It is not HyC-LoRA's code (which keeps 2 or 4 bits and outlier channels).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # in place of this folder, whose modules are a package's

import common
import torch
from llama_cases import SHAPES, Case, Trainer, largest_batch
from measure_peaks import peak, workspace

from reproduce.run_log import FOLDER, RunLog

CROSS = ((4, 1024), (4, 512), (8, 512), (4, 256), (4, 2048), (1, 1024), (16, 1024))
"""Batch x length: batch 4 over lengths, length 1024 over batches, and the two shapes of the paper's Table 10."""
SHORT, FIRST = CROSS[:3], CROSS[:1]
CASES = {
    **dict.fromkeys(("bf16", "nvfp4-paper", "nvfp4", "nvfp4-high", "bf16-liger", "qlora-liger", "bf16-codes"), CROSS),
    "bf16-ours": SHORT,
    **dict.fromkeys(("qlora", "qlora-ours", "qlora-codes", "nvfp4-paper-transient", "nvfp4-paper-recompute"), FIRST),
    **dict.fromkeys(("nvfp4-paper-recompute-once-graphs", "nvfp4-recompute-once-transient", "nvfp4-graphs"), FIRST),
    **dict.fromkeys(("bf16-ckpt", "bf16-liger-ckpt", "nvfp4-paper-ckpt", "nvfp4-ckpt"), FIRST),
}
CAPS = (8.0, 12.0, 16.0, 24.0)
CAPPED = {
    **dict.fromkeys(("bf16-liger", "nvfp4-paper", "nvfp4", "nvfp4-high", "qlora-liger", "bf16", "bf16-codes"), CAPS),
    "nvfp4-paper-recompute-once-transient": CAPS,
    "nvfp4-paper-graphs": (16.0,),
}
SEQ, MOST = 1024, 96
SMALL = {"bf16": ((1, 32), (2, 32)), "bf16-codes": ((1, 32),), "nvfp4-paper": ((1, 32),), "nvfp4-ckpt": ((1, 32),)}
SMALL_CAPPED, SMALL_SEQ, SMALL_MOST = {"nvfp4-paper": (16.0,)}, 32, 2


def arguments(doc: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """What this script and ``step_time.py`` take."""
    parser = common.parser(doc)
    parser.set_defaults(out=FOLDER)
    parser.add_argument("--shape", default="1b", choices=tuple(SHAPES))
    parser.add_argument("--small", action="store_true", help="a tiny model, a few steps, on the CPU")
    args = parser.parse_args(argv)
    if args.small:
        args.device, args.shape = torch.device("cpu"), "tiny"
        args.out = args.out if args.out != FOLDER else Path(tempfile.gettempdir()) / "peft_nvfp4_small"
    warnings.filterwarnings("ignore", category=FutureWarning)
    return args


def log_of(args: argparse.Namespace, name: str) -> RunLog:
    return RunLog(args.out, name, {"shape": args.shape, "device": args.device.type, "small": args.small})


def fill(log: RunLog, key: dict, measure: Callable[[], dict]) -> None:
    """Append the row with this key, filled by ``measure`` or with the error that it ended in."""
    row = dict(key)
    common.guarded(row, lambda: row.update(measure()))
    row.pop("traceback", None)
    log.add(row)
    print(f"  {row}" if "error" in row else f"  {key}", flush=True)


def bytes_of(tensors) -> int:
    """Of unique storages."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}.values())


def composition(trainer: Trainer) -> dict[str, int | None]:
    """What a step holds: frozen weights and buffers; adapters and the optimizer's state; and, but for recorded steps,
    what a forward pass keeps for backward: counted inside and outside of the decoder's layers, and by the allocator."""
    model, states = trainer.model, trainer.optimizer.state.values()
    found = {
        "weights": bytes_of([*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]),
        "adapters": bytes_of([*trainer.parameters, *(t for s in states for t in s.values() if isinstance(t, torch.Tensor))]),
    }
    if "graphs" not in trainer.case:
        kept, growth = common.LayerWatch(model, trainer.layers, trainer.device).run(trainer.loss)
        found["kept_outside"] = kept.pop(-1, 0)
        found["kept_in_layers"] = sum(kept.values())
        found["kept"] = growth if trainer.device.type == "cuda" else None
    return found


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__, argv)
    log, device = log_of(args, "memory"), args.device
    cases, capped = (SMALL, SMALL_CAPPED) if args.small else (CASES, CAPPED)
    seq, most = (SMALL_SEQ, SMALL_MOST) if args.small else (SEQ, MOST)
    for name in dict.fromkeys((*cases, *capped)):
        points = [{"table": "peaks", "case": name, "batch": b, "seq": s} for b, s in cases.get(name, ())]
        caps = [{"table": "largest", "case": name, "cap_gib": cap, "seq": seq} for cap in capped.get(name, ())]
        run_case(name, [key for key in (*points, *caps) if log.find(key) is None], most, args, log)
        common.release(device)


def run_case(name: str, keys: Sequence[dict], most: int, args: argparse.Namespace, log: RunLog) -> None:
    """The rows with these keys, of one model."""
    bytes_of_workspace, before = workspace(args.device), common.memory_now(args.device)
    trainer = cache(lambda: Trainer(Case(name), args.shape, args.device))  # built for the first row

    def measure(key: dict) -> dict:
        if "cap_gib" in key:
            return largest_batch(trainer(), key["seq"], key["cap_gib"], most)
        row = peak(trainer(), key["batch"], key["seq"], before, bytes_of_workspace)
        return row if "skipped" in row else row | composition(trainer())

    for key in keys:
        fill(log, key, lambda: measure(key))  # noqa: B023  (runs at once)


if __name__ == "__main__":
    main()
