"""Peak memory of training steps, measured beside what the estimator says.

    python benchmarks/measure_peaks.py --out results                                  # on a GPU: 1B, 3B, 8B, some three minutes
    python benchmarks/measure_peaks.py --shapes tiny --device cpu --grid 1x32,2x64    # does it run?

Llama shapes with random weights, LoRA r=16 on all linears, loss on the last 32 tokens of each row, as in ``bench_train.py``,
whose builders are used: each model is built once and stepped at every batch and length. One warm-up step of that shape, then the
peak of ``torch.cuda.max_memory_allocated`` over two steps. What does not fit is noted and passed over. Writes ``peaks.csv`` and
``peaks.json``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace
from pathlib import Path

import bench_train
import common
import torch
from bench_train import Case, Trainer
from environment import environment

from peft_nvfp4.memory import Settings, estimate, model_shape

CASES = {
    "bf16-ours": Settings(backend="bf16"),
    "qlora-ours": Settings(backend="nf4"),
    "bf16-liger": Settings(backend="bf16-liger", adapter_bytes=2, loss="liger"),
    "nvfp4": Settings(accuracy="balanced"),
    "nvfp4-ckpt": Settings(accuracy="balanced", checkpointing=True),
    "nvfp4-transient": Settings(accuracy="balanced", weight_layouts="transient"),
    "nvfp4-paper": Settings(accuracy="paper"),
    "nvfp4-high": Settings(accuracy="high"),
}
"""Case of ``bench_train.py`` -> the same for the estimator. ``-ckpt`` goes on with the model of the case before it."""
DEFAULT = "bf16-ours,qlora-ours,bf16-liger,nvfp4,nvfp4-ckpt,nvfp4-transient"
GRID = "1x512,4x1024,8x2048"
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


def expected(trainer: Trainer, settings: Settings, batch: int, seq: int, workspace: int) -> dict:
    """What the estimator says of a step of this batch."""
    loss = settings.loss if settings.loss == "liger" else "full"
    positions = min(bench_train.LABELS, seq // 2) + 1
    shape = model_shape(trainer.model.get_base_model().config)
    settings = replace(
        settings, batch=batch, sequence=seq, rank=bench_train.R, loss=loss, positions=positions, workspace=workspace
    )
    found = estimate(shape, settings)
    return {"estimate": found.peak, "estimate_at": found.at, "groups": found.groups()}


def measure(trainer: Trainer, batch: int, seq: int, before: dict[str, int], device: torch.device) -> dict:
    trainer.optimizer.zero_grad(set_to_none=True)
    common.release(device)

    def steps() -> None:
        for _ in range(STEPS):
            trainer.step()

    trainer.prepare(batch, seq, 1)
    return common.peak_memory(steps, device, before)


def run_case(trainer: Trainer, case: str, shape: str, before: dict[str, int], args: argparse.Namespace, rows: list[dict]) -> None:
    for batch, seq in args.grid:
        row = {"shape": shape, "case": case, "batch": batch, "seq": seq}
        rows.append(row | expected(trainer, CASES[case], batch, seq, args.workspace))
        row = rows[-1]
        held: dict = {}

        def attempt() -> None:
            held.update(measure(trainer, batch, seq, before, args.device))

        start = time.perf_counter()
        if common.fits(attempt, args.device):
            row |= held
        else:
            row["skipped"] = "out of memory"
        row["seconds"] = time.perf_counter() - start
        if row.get("peak_allocated"):
            row["ratio"] = row["estimate"] / row["peak_allocated"]
        print(f"  {shape} {case} {batch}x{seq}: {row.get('ratio', row.get('skipped', 'ran'))}", flush=True)


def run_shape(shape: str, args: argparse.Namespace, rows: list[dict], save) -> None:
    trainer, built, before = None, "", {}
    for case in args.cases:
        name = case.removesuffix("-ckpt")
        row: dict = {}

        def run() -> None:
            nonlocal trainer, built, before
            if trainer is None or built != name:
                trainer = None
                common.release(args.device)
                before = common.memory_now(args.device)
                trainer, built = Trainer(Case(name), shape, args), name
            if case.endswith("-ckpt"):
                trainer.model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
            run_case(trainer, case, shape, before, args, rows)

        common.guarded(row, run)
        if "error" in row:
            rows.append({"shape": shape, "case": case, "skipped": row["error"]})
            print(f"  {shape} {case}: {row['error']}", flush=True)
            trainer = None
        save()
    del trainer
    common.release(args.device)


COLUMNS = {
    "case": lambda r: f"{r['shape']} {r['case']}",
    "batch": lambda r: f"{r['batch']}x{r['seq']}",
    "measured GB": lambda r: r["peak_allocated"] / common.GB,
    "estimate GB": lambda r: r["estimate"] / common.GB,
    "ratio": lambda r: f"{r['ratio']:.3f}",
    "at": lambda r: r["estimate_at"],
    "skipped": lambda r: r["skipped"],
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1b,3b,8b", help=f"comma-separated: {', '.join(bench_train.SHAPES)}")
    parser.add_argument("--cases", default=DEFAULT, help=f"comma-separated: {', '.join(CASES)}")
    parser.add_argument("--grid", default=GRID, help="comma-separated batch x sequence length")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--attention", default="causal", choices=("causal", "sdpa"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--label", default="peaks")
    args = parser.parse_args()
    args.shapes, args.cases = args.shapes.split(","), args.cases.split(",")
    if unknown := [case for case in args.cases if case not in CASES]:
        parser.error(f"unknown cases {', '.join(unknown)}; known: {', '.join(CASES)}")
    args.grid = [tuple(int(n) for n in pair.split("x")) for pair in args.grid.split(",")]
    if args.device.type == "cuda" and args.device.index is None:
        args.device = torch.device("cuda", torch.cuda.current_device())
    args.workspace = workspace(args.device)
    return args


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)
    head = {"environment": environment() | common.liger_version(), "settings": {k: str(v) for k, v in vars(args).items()}}
    rows: list[dict] = []
    for shape in args.shapes:
        run_shape(shape, args, rows, lambda: common.write(args.out, args.label, head, rows))
    print(common.table(rows, COLUMNS))
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        worst = max(ratios, key=lambda r: abs(r - 1))
        print(f"\n{len(ratios)} rows, {sum(abs(r - 1) <= 0.07 for r in ratios)} within 7 %, worst {worst:.3f}")


if __name__ == "__main__":
    main()
