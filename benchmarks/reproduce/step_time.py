"""Time of training steps, as the paper's Figure 4 and Tables 9 and 11 have it: over batch and sequence length, and by category.

    python benchmarks/reproduce/step_time.py --out OUT  # one GPU, some two minutes; again: goes on where it stopped
    python benchmarks/reproduce/step_time.py --small    # a tiny model, on a CPU: does it run?

The cases live in one process. At each batch and length they are warmed up and then take turns, ROUNDS times BURST steps each,
so that drift hits all of them alike (PROTOCOL.md). The first point also has the profiler's breakdown. The host is the limit of an
eager step of a small model. ``-graphs`` is the same step without that limit; in the breakdown both have the same milliseconds.
On a GPU without FP4 tensor cores the products of ``nvfp4`` are emulated by BF16 ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

import common
import torch
from llama_cases import Case, Trainer

from peft_nvfp4.cli._run import profiling
from reproduce.memory import arguments, fill, log_of

FIRST = (4, 1024)
GRID = (FIRST, (16, 1024), (4, 2048), (1, 1024), (4, 512))
_EVERYWHERE = ("bf16", "bf16-liger", "qlora-liger", "bf16-codes", "bf16-ours-graphs", "nvfp4-paper-graphs", "nvfp4-graphs")
_EVERYWHERE += ("nvfp4-high-graphs", "nvfp4-paper-recompute-once-transient-graphs")
_ONCE = ("qlora", "qlora-ours-graphs", "nvfp4-paper", "nvfp4", "qlora-codes", "bf16-ckpt", "bf16-liger-ckpt", "nvfp4-paper-ckpt")
CASES = {**dict.fromkeys(_EVERYWHERE, GRID), "bf16-ours": (FIRST, (4, 512)), **dict.fromkeys(_ONCE, (FIRST,))}
WARMUP, ROUNDS, BURST = 2, 3, 2
SMALL = {"bf16": ((1, 32), (2, 32)), "bf16-codes": ((1, 32),), "nvfp4-paper": ((1, 32), (2, 32))}


def ready(trainer: Trainer, batch: int, seq: int, warmup: int, profile: bool) -> dict:
    """Warm a case up at this batch and length; with ``profile``, its breakdown."""
    row: dict = {}

    def prepare() -> None:
        trainer.clear()
        trainer.prepare(batch, seq, warmup)
        if profile:
            found = profiling.breakdown(trainer.step, trainer.device, steps=warmup)
            kept = ("times_ms", "total_ms", "launches", "profiled_host_ms")
            row.update({"host_ms": common.host_ms(trainer.step, trainer.device, 2), **{key: found[key] for key in kept}})

    return row if common.fits(prepare, trainer.device) else {"skipped": "out of memory"}


def built(names: Iterable[str], shape: str, device: torch.device) -> tuple[dict[str, Trainer], dict[str, dict]]:
    """The cases that could be built; for the others a row with their error."""
    trainers: dict[str, Trainer] = {}
    failures: dict[str, dict] = {}
    for name in names:
        row: dict = {}
        common.guarded(row, lambda: trainers.update({name: Trainer(Case(name), shape, device)}))  # noqa: B023  (runs at once)
        failures |= {name: row} if row else {}
    return trainers, failures


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__, argv)
    log, cases = log_of(args, "step_time"), SMALL if args.small else CASES
    warmup, rounds, burst = (1, 1, 1) if args.small else (WARMUP, ROUNDS, BURST)
    points = dict.fromkeys(point for grid in cases.values() for point in grid)
    keys = {
        point: {c: {"table": "times", "case": c, "batch": point[0], "seq": point[1]} for c in cases if point in cases[c]}
        for point in points
    }
    left = {point: {c: key for c, key in own.items() if log.find(key) is None} for point, own in keys.items()}
    trainers, failures = built(dict.fromkeys(c for own in left.values() for c in own), args.shape, args.device)
    for first, (point, own) in zip((True, *[False] * len(points)), left.items()):
        rows = {c: dict(failures.get(c, {})) for c in own}
        for c in rows.keys() & trainers.keys():
            common.guarded(rows[c], lambda: rows[c].update(ready(trainers[c], *point, warmup, first)))  # noqa: B023
        steps = {c: trainers[c].step for c, row in rows.items() if not {"error", "skipped"} & row.keys()}
        for c, timed in common.interleaved(steps, rounds, burst, args.device).items():
            rows[c] |= common.speed(timed, point[0] * point[1])
        for c, row in rows.items():
            fill(log, own[c], lambda: row)  # noqa: B023


if __name__ == "__main__":
    main()
