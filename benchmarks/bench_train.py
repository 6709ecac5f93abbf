"""Training steps of LoRA on Llama shapes: time, memory, launches, categories, largest batch, for this package and its baselines.

    python benchmarks/bench_train.py --shapes 1b --cases baselines,ours,graphs
    python benchmarks/bench_train.py --shapes 1b --cases bf16-liger,nvfp4-paper --largest-batch
    python benchmarks/bench_train.py --shapes tiny --device cpu --seq 32 --cases all        # does it run?

Cases: ``llama_cases.py``. Protocol: PROTOCOL.md.
"""

from __future__ import annotations

import argparse
import time
import warnings

import common
from llama_cases import GROUPS, SHAPES, Case, Trainer, largest_batch
from torch._dynamo.utils import counters

from peft_nvfp4 import graph_status
from peft_nvfp4.cli._run import profiling


def measure(trainer: Trainer, args: argparse.Namespace, before: dict[str, int]) -> dict:
    """Everything but the step time, which :func:`run_shape` takes with all cases in turn."""
    breaks = counters["graph_break"].total()

    def warm_up() -> None:
        trainer.prepare(args.batch, args.seq, args.warmup)

    def two_steps() -> None:
        trainer.step()
        trainer.step()

    row = common.peak_memory(warm_up, args.device, before)
    if "graphs" not in trainer.case:  # a replay allocates nothing: the peak of a recorded step is that of its recording
        row = common.peak_memory(two_steps, args.device, before)
    row["host_ms"] = common.host_ms(trainer.step, args.device)
    times = profiling.breakdown(trainer.step, args.device)
    row |= {"device_ms": times.pop("times_ms"), "device_total_ms": times.pop("total_ms"), **times}
    if "compile" in trainer.case:
        row["graph_breaks"] = counters["graph_break"].total() - breaks
    elif "graphs" in trainer.case:
        row["graphs"] = str(graph_status(trainer.model))
    common.release(args.device)
    return row


def run_case(case: Case, shape: str, args: argparse.Namespace, row: dict, residents: dict[str, Trainer]) -> None:
    """Fill a case's row; keep its model for the timing at the end, or take the time at once where memory is short."""
    before = common.memory_now(args.device)
    start = time.perf_counter()
    trainer = Trainer(case, shape, args.device)
    common.synchronize(args.device)
    row["build_s"] = time.perf_counter() - start
    if args.largest_batch:
        row |= largest_batch(trainer, args.seq, args.cap_gib, args.max_batch)
    else:
        row |= measure(trainer, args, before)
        if common.allocated(args.device) <= common.total_memory(args.device) // 2:
            residents[case.name] = trainer
        else:
            timed = common.interleaved({case.name: trainer.step}, args.rounds, args.burst, args.device)[case.name]
            row |= common.speed(timed, args.batch * args.seq) | {"timed": "alone"}


def run_shape(shape: str, cases: list[Case], args: argparse.Namespace, rows: list[dict], save) -> None:
    """All cases of one shape: first each by itself, then the timing of those that fit into memory together, interleaved."""
    residents: dict[str, Trainer] = {}
    by_case = {}
    for case in cases:
        row = by_case[case.name] = {"shape": shape, "case": case.name, "batch": args.batch, "seq": args.seq}
        rows.append(row)
        common.guarded(row, lambda: run_case(case, shape, args, row, residents))
        common.release(args.device)
        print(f"  {shape} {case.name}: {row.get('error', 'ok')}", flush=True)
        save()
    steps = {name: trainer.step for name, trainer in residents.items()}
    for name, timed in common.interleaved(steps, args.rounds, args.burst, args.device).items():
        by_case[name] |= common.speed(timed, args.batch * args.seq) | {"timed": "interleaved"}
    save()


COLUMNS = {
    "case": lambda r: f"{r['shape']} {r['case']}",
    "step ms": lambda r: r["step_ms"],
    "min": lambda r: r["step_min_ms"],
    "spread": lambda r: r["spread_ms"],
    "tokens/s": lambda r: r["tokens_per_s"],
    "host ms": lambda r: r["host_ms"],
    "launches": lambda r: r["launches"],
    "peak GB": lambda r: r["peak_allocated"] / common.GB,
    "reserved": lambda r: r["peak_reserved"] / common.GB,
    "batch": lambda r: r["largest_batch"],
    "breaks": lambda r: r["graph_breaks"],
}
BREAKDOWN = {"case": COLUMNS["case"]} | {c: (lambda r, c=c: r["device_ms"][c]) for c in profiling.CATEGORIES}
BREAKDOWN |= {"device ms": lambda r: r["device_total_ms"], "profiled host ms": lambda r: r["profiled_host_ms"]}


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--shapes", default="1b", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--cases", default="all", help=f"comma-separated cases and groups ({', '.join(GROUPS)})")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="times each case's turn comes; each: 1 + burst steps")
    parser.add_argument("--burst", type=int, default=5)
    parser.add_argument("--largest-batch", action="store_true", help="search it under --cap-gib instead of measuring --batch")
    parser.add_argument("--cap-gib", type=float, default=16.0)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--label", help="name of the files written (default: train-SHAPES)")
    args = parser.parse_args()
    args.label = args.label or f"train-{args.shapes.replace(',', '-')}" + "-largest" * args.largest_batch
    args.shapes = args.shapes.split(",")
    names = " ".join(GROUPS.get(name, name) for name in args.cases.split(",")).split()
    try:
        args.cases = [Case(name) for name in dict.fromkeys(names)]
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)
    rows: list[dict] = []
    for shape in args.shapes:
        run_shape(shape, args.cases, args, rows, lambda: common.write(args, args.label, rows))
    for columns in (COLUMNS, BREAKDOWN):
        print(common.table(rows, columns))
    print("\n".join(f"FAILED {row['shape']} {row['case']}: {row['error']}" for row in rows if "error" in row))


if __name__ == "__main__":
    main()
