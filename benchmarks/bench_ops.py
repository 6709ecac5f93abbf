"""Do the Triton kernels give the bits of their references, and how close to the memory's speed do they run?

    PYTHONPATH=src python benchmarks/bench_ops.py --check --bench --out DIR

``--check`` runs every case of tests/triton_cases.py on the GPU (in several processes, since compiling takes longer than running)
and prints the number of elements that differ, per kernel; it exits with 1 if any does. ``--bench`` times every kernel and writes
``ops.csv`` and ``ops.json``. ``--sweep`` times the row kernels with other numbers of threads per row (kernels/triton_launch.py).

A kernel of this package moves bytes; what it can reach is the speed of a device-to-device copy. So each one is reported as
compulsory bytes (every input read once, every output written once) over time, next to a copy that moves as many bytes, measured
in the same way: CUDA events around one call, the L2 cache overwritten before each, median of the repetitions. Overwriting 1 GB
also gives the CPU time to have the kernel queued before the GPU is ready for it.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "src")]

from environment import environment  # noqa: E402
from triton_cases import BF16, GROUPS, ON_GPU, cases, normal, run_case  # noqa: E402

from peft_nvfp4 import kernels
from peft_nvfp4.numerics import fused_reference, reference  # noqa: E402
from peft_nvfp4.numerics.formats import ACTIVATION, WEIGHT, NVFP4Format  # noqa: E402

SHAPES = ((4096, 2048), (4096, 8192))
WEIGHTS = ((8192, 2048),)
FLUSH_BYTES = 1 << 30
TARGET = 0.75

# ---------------------------------------------------------------------------------------------- check


def check_worker(index: int, workers: int) -> None:
    """This worker's share of the cases, one JSON line each. Cases of one label share a worker: they share compiled kernels."""
    torch.set_num_threads(1)
    todo = [case for group in GROUPS for case in cases(group, *ON_GPU[group])]
    todo += [case for rows in (0, 1, 3) for g in GROUPS if g != "transpose" for case in cases(g, rows, (1000,), ())]
    for case in todo:
        if zlib.crc32(f"{case.operator} {case.label}".encode()) % workers != index:
            continue
        started = time.perf_counter()
        try:
            found = run_case(case, "cuda")
        except Exception as error:  # one kernel that fails to compile should not hide the others
            found = [f"{case.operator} {case.label}: {type(error).__name__}: {' '.join(str(error).split())[-600:]}"]
        seconds = round(time.perf_counter() - started, 2)
        print(json.dumps({"operator": case.operator, "found": found, "s": seconds}), flush=True)


def check(out: Path, workers: int) -> int:
    """Run the workers, print a table; the number of cases with a mismatch or an error."""
    command = [sys.executable, __file__, "--worker"]
    running = [subprocess.Popen([*command, str(i), str(workers)], stdout=subprocess.PIPE, text=True) for i in range(workers)]
    lines = [json.loads(line) for process in running for line in process.communicate()[0].splitlines() if line.startswith("{")]
    (out / "check.json").write_text(json.dumps(lines, indent=1))
    counts: dict[str, list[int]] = {}
    for line in lines:
        count = counts.setdefault(line["operator"], [0, 0])
        count[0] += 1
        count[1] += bool(line["found"])
    for operator, (n, wrong) in counts.items():
        print(f"{operator:22} {n:3} cases, {wrong:3} with differences")
    failures = [text for line in lines for text in line["found"]]
    print(*failures[:60], sep="\n")
    died = sum(process.returncode != 0 for process in running)
    if died:
        print(f"{died} worker(s) ended early: their cases are missing above")
    return sum(bool(line["found"]) for line in lines) + died


# ---------------------------------------------------------------------------------------------- timing


class Timer:
    """Median time of a call with a cold L2 cache."""

    def __init__(self):
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def __call__(self, run: Callable[[], object], repetitions: int = 30) -> tuple[float, float]:
        """(median, fastest) in microseconds."""
        for _ in range(3):
            run()
        pairs = []
        for i in range(repetitions):
            self.flush.fill_(i)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) * 1e3 for start, end in pairs]
        return statistics.median(times), min(times)


def tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def nbytes(value: object) -> int:
    """Bytes of all tensors in arguments or results; those on the CPU (seeds) do not count."""
    return sum(t.numel() * t.element_size() for t in tensors(value) if t.is_cuda)


def lists(parts) -> tuple[list, list, list]:
    return tuple([p[i] for p in parts] for i in range(3))


def rope_inputs(b: int, s: int, q_heads: int, k_heads: int, d: int) -> tuple[torch.Tensor, ...]:
    """q, k (B, H, S, D) as the projections leave them, tokens before heads; cos, sin (1, S, D)."""
    q, k = (normal(b, s, h, d, seed=h, dtype=BF16).cuda().transpose(1, 2) for h in (q_heads, k_heads))
    angles = normal(1, s, d, seed=4, scale=20.0).cuda()
    return q, k, angles.cos().to(BF16), angles.sin().to(BF16)


def timed_cases() -> list[tuple[str, str, tuple]]:
    """(operator, label, arguments) of everything that is timed."""
    found: list[tuple[str, str, tuple]] = []
    seed = torch.tensor(1)
    for m, k in SHAPES:
        x, other = (normal(m, k, seed=s, dtype=BF16).cuda() for s in (1, 2))
        gamma, centre = torch.ones(k, dtype=BF16, device="cuda"), torch.zeros(k, device="cuda")
        one, two = (fused_reference.quantize_terms(x, None, t) for t in (1, 2))
        gate, up = (reference.quantize(t, ACTIVATION)[:3] for t in (x, other))
        rstd = torch.ones(m, device="cuda")
        where = f"{m}x{k}"
        found += [
            ("quantize", f"row max6 {where}", (x, None, None, "max6", True, False)),
            ("quantize", f"row stochastic {where}", (x, None, seed, "max6", True, True)),
            ("quantize_terms", f"2 terms {where}", (x, None, 2)),
            ("quantize_terms", f"1 term centred {where}", (x, centre, 1)),
            ("dequantize", where, (*one[0], BF16)),
            ("dequantize_terms", f"2 terms {where}", (*lists(two), None, k, BF16)),
            ("rmsnorm_quantize", f"1 term {where}", (x, gamma, None, 1e-5, False, 1)),
            ("rmsnorm_quantize", f"2 terms {where}", (x, gamma, None, 1e-5, False, 2)),
            ("rmsnorm_backward", f"1 term {where}", (other, *lists(one), None, gamma, rstd, False)),
            ("rmsnorm_backward", f"2 terms {where}", (other, *lists(two), None, gamma, rstd, False)),
            ("silu_mul_quantize", f"1 term {where}", (x, other, None, "silu", 1, True)),
            ("silu_mul_quantize", f"2 terms {where}", (x, other, None, "silu", 2, True)),
            ("silu_mul_backward", where, (x, *gate, *up, "silu")),
            ("gated_values", where, (*gate, *up, None, "silu", 1, k, BF16)),
            ("dropout", where, (x, 0.1, seed)),
        ]
    q, k, cos, sin = rope_inputs(4, 1024, 32, 8, 64)
    found += [("rotary_embedding", f"{w} 4x1024x32+8x64", (q, k, cos, sin, w == "backward")) for w in ("forward", "backward")]
    for n, k in WEIGHTS:
        w = normal(n, k, seed=3, dtype=BF16, scale=0.02).cuda()
        q = reference.quantize(w, NVFP4Format())
        found += [
            ("quantize", f"tensor four_over_six {n}x{k}", (w, q.gscale, None, "four_over_six", False, False)),
            ("quantize", f"tensor {WEIGHT.rule} {n}x{k}", (w, q.gscale, None, WEIGHT.rule, False, False)),
            ("dequantize", f"weight {n}x{k}", (*q, BF16)),
            ("transpose_requantize", f"four_over_six {n}x{k}", (*q, "four_over_six")),
        ]
    return found


def measure(timer: Timer, operator: str, arguments: tuple, copies: dict[int, float]) -> dict:
    """One row: time, bytes and the copy of as many bytes. ``copies`` remembers the copies."""
    run = kernels.implementation(operator)
    moved = nbytes(arguments) + nbytes(run(*arguments))
    median, fastest = timer(lambda: run(*arguments))
    if moved not in copies:
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda").random_(0, 256)
        target = torch.empty_like(source)
        copies[moved] = timer(lambda: target.copy_(source))[0]
    return {
        "bytes": moved,
        "median_us": round(median, 2),
        "min_us": round(fastest, 2),
        "gb_per_s": round(moved / median / 1e3),
        "copy_us": round(copies[moved], 2),
        "copy_gb_per_s": round(moved / copies[moved] / 1e3),
        "of_copy": round(copies[moved] / median, 3),
    }


def bench(out: Path) -> None:
    timer, copies, rows = Timer(), {}, []
    with torch.no_grad():
        for operator, label, arguments in timed_cases():
            row = {"operator": operator, "case": label}
            try:
                row |= measure(timer, operator, arguments, copies)
                row["reference_us"] = round(timer(lambda: kernels.KERNELS[operator].reference(*arguments), 3)[0])
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
            rows.append(row)
            mark = "" if row.get("of_copy", 0) >= TARGET else "  <-- below target"
            print(
                f"{operator:21} {label:36} {row.get('median_us', 0):8.1f} us  {row.get('gb_per_s', 0):5} GB/s  "
                f"{100 * row.get('of_copy', 0):5.1f} % of copy ({row.get('copy_gb_per_s', 0)} GB/s)  reference "
                f"{row.get('reference_us', 0):6} us{mark} {row.get('error', '')}",
                flush=True,
            )
    save(out, "ops", rows)


SWEPT = {  # operator -> (table or module attribute, key, values)
    "quantize": ("BLOCKS_PER_THREAD", "terms", (1, 2, 4)),
    "quantize_terms": ("BLOCKS_PER_THREAD", "terms", (1, 2, 4)),
    "rmsnorm_quantize": ("BLOCKS_PER_THREAD", "norm", (1, 2, 4)),
    "rmsnorm_backward": ("BLOCKS_PER_THREAD", "norm_backward", (1, 2, 4)),
    "silu_mul_quantize": ("BLOCKS_PER_THREAD", "mlp", (1, 2)),
    "silu_mul_backward": ("BLOCKS_PER_THREAD", "mlp_backward", (1, 2)),
    "dequantize": ("DEQUANTIZE", "words", (128, 256, 512, 1024)),
}


def sweep(out: Path) -> None:
    """The launch constants of launch, one at a time; 1-term and plain cases only."""
    from peft_nvfp4.kernels.triton import launch

    timer, copies, rows = Timer(), {}, []
    with torch.no_grad():
        for operator, label, arguments in timed_cases():
            if operator not in SWEPT or "stochastic" in label or "tensor" in label:
                continue
            name, key, values = SWEPT[operator]
            table = getattr(launch, name)
            before = table[key]
            for value in values:
                table[key] = value
                row = {"operator": operator, "case": label, "constant": f"{name}[{key}]", "value": value}
                row |= measure(timer, operator, arguments, copies)
                rows.append(row)
                print(f"{operator:21} {label:36} {key}={value:<5} {row['median_us']:8.1f} us  {row['of_copy']:.3f}", flush=True)
            table[key] = before
    save(out, "ops_sweep", rows)


def save(out: Path, name: str, rows: list[dict]) -> None:
    stamp = environment()
    (out / f"{name}.json").write_text(json.dumps({"environment": stamp, "rows": rows}, indent=1))
    fields = list(dict.fromkeys(field for row in rows for field in row)) + list(stamp)
    with open(out / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows({**row, **stamp} for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare every kernel with its reference")
    parser.add_argument("--bench", action="store_true", help="time every kernel")
    parser.add_argument("--sweep", action="store_true", help="time the launch constants")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--workers", type=int, default=14, help="processes of --check")
    parser.add_argument("--worker", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        check_worker(*arguments.worker)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    kernels.load()
    print(kernels.status())
    started, wrong = time.perf_counter(), 0
    if arguments.check:
        wrong = check(arguments.out, arguments.workers)
        print(f"check: {wrong} cases with differences, {time.perf_counter() - started:.0f} s")
    if arguments.bench:
        bench(arguments.out)
        print(f"bench: done after {time.perf_counter() - started:.0f} s")
    if arguments.sweep:
        sweep(arguments.out)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
