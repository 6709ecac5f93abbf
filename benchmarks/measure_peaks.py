"""Peak memory of training steps, measured beside what the estimator says.

    python benchmarks/measure_peaks.py                                                # on a GPU: 1B, 3B, 8B, some three minutes
    python benchmarks/measure_peaks.py --shapes tiny --device cpu --grid 1x32,2x64    # does it run?

Llama shapes with random weights, LoRA r=16 on all linears, loss on the last 32 tokens of each row (``llama_cases.py``). A model
is built once and stepped at every batch and length: one warm-up step of that shape, then the peak of
``torch.cuda.max_memory_allocated`` over two steps. What does not fit is noted and passed over.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace

import common
import torch
from llama_cases import LABELS, SHAPES, Case, R, Trainer

from peft_nvfp4.memory import Settings, estimate, model_shape

CASES = "bf16-ours,qlora-ours,bf16-liger,nvfp4,nvfp4-ckpt,nvfp4-transient"
STEPS = 2


def workspace(device: torch.device) -> int:
    """Bytes of a cuBLAS workspace as PyTorch chooses them for this GPU: what a first product adds to the allocator's count."""
    if device.type != "cuda":
        return Settings().workspace
    common.release(device)
    before = common.allocated(device)
    a = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    c = a @ a
    found = common.allocated(device) - before - a.untyped_storage().nbytes() - c.untyped_storage().nbytes()
    del a, c
    common.release(device)
    return max(found, 0)


def expected(trainer: Trainer, batch: int, seq: int, workspace: int) -> dict:
    """What the estimator says of a step of this batch."""
    settings = trainer.case.settings()
    loss = settings.loss if settings.loss == "liger" else "full"
    positions = min(LABELS, seq // 2) + 1
    shape = model_shape(trainer.model.get_base_model().config)
    settings = replace(settings, batch=batch, sequence=seq, rank=R, loss=loss, positions=positions, workspace=workspace)
    found = estimate(shape, settings)
    return {"estimate": found.peak, "estimate_at": found.at, "groups": found.groups()}


def peak(trainer: Trainer, batch: int, seq: int, before: dict[str, int], workspace: int) -> dict:
    """A row: the estimate, and the measured peak or why there is none. A recording's peak is that of its warm-up and recording,
    because replays allocate nothing."""
    row = expected(trainer, batch, seq, workspace)
    recorded = "graphs" in trainer.case

    def steps() -> None:
        if recorded:
            trainer.prepare(batch, seq, 2)
        for _ in range(STEPS):
            trainer.step()

    def measure() -> None:
        trainer.clear()
        if not recorded:
            trainer.prepare(batch, seq, 1)
        row.update(common.peak_memory(steps, trainer.device, before))

    if not common.fits(measure, trainer.device):
        row["skipped"] = "out of memory"
    elif row["peak_allocated"]:
        row["ratio"] = row["estimate"] / row["peak_allocated"]
    return row


def run_case(name: str, shape: str, args: argparse.Namespace, rows: list[dict]) -> None:
    before = common.memory_now(args.device)
    trainer = Trainer(Case(name), shape, args.device)
    for batch, seq in args.grid:
        row = {"shape": shape, "case": name, "batch": batch, "seq": seq}
        rows.append(row | peak(trainer, batch, seq, before, args.workspace))
        print(f"  {shape} {name} {batch}x{seq}: {rows[-1].get('ratio', rows[-1].get('skipped', 'ran'))}", flush=True)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--shapes", default="1b,3b,8b", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--cases", default=CASES, help="comma-separated cases of llama_cases.py")
    parser.add_argument("--grid", default="1x512,4x1024,8x2048", help="comma-separated batch x sequence length")
    parser.add_argument("--label", default="peaks")
    args = parser.parse_args()
    args.grid = [tuple(int(n) for n in pair.split("x")) for pair in args.grid.split(",")]
    args.workspace = workspace(args.device)
    warnings.filterwarnings("ignore", category=FutureWarning)
    rows: list[dict] = []
    for shape in args.shapes.split(","):
        for name in args.cases.split(","):
            failed = {"shape": shape, "case": name}
            common.guarded(failed, lambda: run_case(name, shape, args, rows))  # noqa: B023  (runs at once)
            rows += [failed] if "error" in failed else []
            common.release(args.device)
            common.write(args, args.label, rows)


if __name__ == "__main__":
    main()
