"""Time of training steps, as the paper's Figure 4 and Tables 9 and 11 have it: over batch and sequence length, and by category.

    python benchmarks/reproduce/step_time.py            # one GPU, some two minutes; --seconds 100: no row is begun later
    python benchmarks/reproduce/step_time.py --small    # a tiny model, on a CPU: does it run?

The methods of ``memory.py``, built by ``bench_train.py``, live in one process. At each batch and length they are warmed up and
then take turns, ROUNDS times BURST steps each, so that drift hits all of them alike (PROTOCOL.md). The first point also has the
profiler's breakdown. An eager step of a small model is bound by the host: ``-graphs`` is the same without it, and the device's
milliseconds in the breakdown are the same for both. On a GPU without FP4 tensor cores the products of ``nvfp4`` are emulated by
BF16 ones.

Writes ``results/reproduce/step_time.json`` after every point.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

import common
from bench_train import Case, Trainer

from peft_nvfp4.cli._run import profiling
from reproduce.memory import Run, arguments, check_cases, chosen

FIRST = (4, 1024)
GRID = (FIRST, (16, 1024), (4, 2048), (1, 1024), (4, 512))
ALL, ONE = GRID, (FIRST,)
CASES = {
    "bf16": ALL,
    "bf16-liger": ALL,
    "qlora-liger": ALL,
    "bf16-codes": ALL,
    "bf16-ours-graphs": ALL,
    "nvfp4-paper-graphs": ALL,
    "nvfp4-graphs": ALL,
    "nvfp4-high-graphs": ALL,
    "nvfp4-paper-recompute-once-transient-graphs": ALL,
    "bf16-ours": (FIRST, (4, 512)),
    "qlora": ONE,
    "qlora-ours-graphs": ONE,
    "nvfp4-paper": ONE,
    "nvfp4": ONE,
    "qlora-codes": ONE,
    "bf16-ckpt": ONE,
    "bf16-liger-ckpt": ONE,
    "nvfp4-paper-ckpt": ONE,
}
WARMUP, ROUNDS, BURST = 2, 3, 2
BUILDING = 0.5
"""Of the time there is; methods that are not built by then are left out."""
SMALL_GRID = ((1, 32), (2, 32))
SMALL = {"bf16": SMALL_GRID, "bf16-codes": SMALL_GRID[:1], "nvfp4-paper": SMALL_GRID}


def built(run: Run, cases: dict[str, tuple]) -> dict[str, Trainer]:
    """The methods that could be built; the others go into the file with their error."""
    trainers = {}
    for name in cases:
        if run.over(f"step time of {name}", BUILDING):
            continue
        row = {"case": name}
        common.guarded(row, lambda: trainers.update({name: Trainer(Case(name), run.shape, run.args)}))
        if "error" in row:
            row.pop("traceback")
            run.data["times"].append(row)
    return trainers


def ready(run: Run, trainer: Trainer, row: dict, batch: int, seq: int, profile: bool) -> bool:
    """Warm a method up at this batch and length; with ``profile``, its breakdown goes into the row. False: it cannot run here."""

    def prepare() -> None:
        trainer.clear()
        trainer.prepare(batch, seq, 1 if run.args.small else WARMUP)
        if profile:
            found = profiling.breakdown(trainer.step, run.device, steps=1 if run.args.small else 2)
            kept = ("times_ms", "total_ms", "launches", "profiled_host_ms")
            row.update({"host_ms": common.host_ms(trainer.step, run.device, 2), **{key: found[key] for key in kept}})

    fitted: list[bool] = []
    common.guarded(row, lambda: fitted.append(common.fits(prepare, run.device)))
    row.pop("traceback", None)
    if fitted == [False]:
        row["skipped"] = "out of memory"
    return fitted == [True]


def point(run: Run, trainers: dict[str, Trainer], cases: dict[str, tuple], batch: int, seq: int, first: bool) -> None:
    """Every method's step time at one batch and length, taken in turns."""
    rows, steps = {}, {}
    for name, trainer in trainers.items():
        if (batch, seq) in cases[name]:
            rows[name] = {"case": name, "batch": batch, "seq": seq}
            if ready(run, trainer, rows[name], batch, seq, first):
                steps[name] = trainer.step
    rounds, burst = (1, 1) if run.args.small else (ROUNDS, BURST)
    for name, timed in common.interleaved(steps, rounds, burst, run.device).items():
        rows[name] |= common.speed(timed, batch * seq)
        print(f"  {name} {batch} x {seq}: {rows[name].get('step_ms', rows[name].get('error'))}", flush=True)
    run.data["times"] += rows.values()
    run.save()


def main(argv: list[str] | None = None) -> None:
    args = arguments(__doc__, argv)
    check_cases(args, SMALL if args.small else CASES)
    run = Run(args, "step_time", ("times",))
    run.keep_others("times")
    cases, grid = chosen(SMALL if args.small else CASES, args), SMALL_GRID if args.small else GRID
    run.data["settings"] |= {"warmup": WARMUP, "rounds": ROUNDS, "burst": BURST}
    trainers = built(run, cases)
    for batch, seq in grid:
        if not run.over(f"step times at {batch} x {seq}"):
            point(run, trainers, cases, batch, seq, (batch, seq) == grid[0])
    run.save()


if __name__ == "__main__":
    main()
