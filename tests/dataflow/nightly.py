"""Many cases of the conformance machine, in several processes: ``python tests/dataflow/nightly.py --cases 10000 --processes 2``.

A process goes from seed to seed. What fails is made as simple as can be and printed as Python that runs; from then on cases that
contain all that the simplest failing one needs are set aside, so that one fault does not hide the next."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from _search import Search

REGRESSIONS = Path(__file__).parent / "regressions.json"


def work(args: tuple) -> dict:
    first_seed, count, until, without = args
    torch.set_num_threads(1)
    search = Search(without)
    search.go(first_seed, count, until=until)
    return dict(failures=search.failures, tried=search.tried, rejected=search.rejected, shown=search.shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6, help="of the first batch; printed")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--without", nargs="*", default=[], help="leave out cases with such a word, lora_A or no_grad, say")
    parser.add_argument("--record", action="store_true", help=f"add failures to {REGRESSIONS.name}")
    args = parser.parse_args()
    print(f"--seed {args.seed}", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes below: with more, threads add in other orders
    share, until = -(-args.cases // args.processes), time.time() + 60 * args.minutes
    jobs = [(args.seed + 10**6 * i, share, until, args.without) for i in range(args.processes)]
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(work, jobs))
    failures = [failure for result in results for failure in result["failures"]]
    total = {name: sum(result[name] for result in results) for name in ("tried", "rejected")}
    shown = sum((result["shown"] for result in results), Counter())
    print(f"{total['tried']} cases, of which PyTorch refuses {total['rejected']}; {len(failures)} failures")
    print(f"a lost intervention would show in {shown[True]} of {sum(shown.values())}")
    if args.record and failures:
        recorded = [{"why": failure["why"], "case": failure["case"]} for failure in failures]
        before = json.loads(REGRESSIONS.read_text())
        REGRESSIONS.write_text(json.dumps(before + recorded, indent=1) + "\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
