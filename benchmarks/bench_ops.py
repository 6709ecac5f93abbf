"""How close do the Triton kernels run to the speed of memory?

    python benchmarks/bench_ops.py             # every kernel, beside a copy and its reference: ops.csv and ops.json
    python benchmarks/bench_ops.py --sweep     # the row kernels with other numbers of threads per row (kernels/triton/launch.py)

A kernel of this package moves bytes; what it can reach is the speed of a device-to-device copy. So each one is reported as
compulsory bytes (every input read once, every output written once) over time, next to a copy that moves as many bytes, measured
in the same way: CUDA events around one call, the L2 cache overwritten before each, median of the repetitions. Overwriting 1 GB
also gives the CPU time to have the kernel queued before the GPU is ready for it. (Whether the kernels give the bits of their
references is asked by tests/kernels.)
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import common
import torch

from peft_nvfp4 import kernels
from peft_nvfp4.kernels import dispatch
from peft_nvfp4.kernels.triton import launch
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, WEIGHT, NVFP4Format
from peft_nvfp4.ops.core import OPERATORS

BF16 = torch.bfloat16
SHAPES = ((4096, 2048), (4096, 8192))
WEIGHTS = ((8192, 2048),)
FLUSH_BYTES = 1 << 30


def normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(BF16).cuda()


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


def timed_cases() -> list[tuple[str, str, tuple]]:
    """(operator, label, arguments) of everything that is timed."""
    found: list[tuple[str, str, tuple]] = []
    seed = torch.tensor(1)
    for m, k in SHAPES:
        x, other = (normal(m, k, seed=s) for s in (1, 2))
        gamma, offset = torch.ones(k, dtype=BF16, device="cuda"), torch.zeros(k, device="cuda")
        one, two = (reference.quantize_terms(x, None, t) for t in (1, 2))
        gate, up = (reference.quantize(t, ACTIVATION)[:3] for t in (x, other))
        rstd = torch.ones(m, device="cuda")
        where = f"{m}x{k}"
        found += [
            ("quantize", f"row max6 {where}", (x, None, None, "max6", True, False)),
            ("quantize", f"row stochastic {where}", (x, None, seed, "max6", True, True)),
            ("quantize_terms", f"2 terms {where}", (x, None, 2)),
            ("quantize_terms", f"1 term centred {where}", (x, offset, 1)),
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
    for n, k in WEIGHTS:
        w = normal(n, k, seed=3, scale=0.02)
        q = reference.quantize(w, NVFP4Format())
        found += [
            ("quantize", f"tensor four_over_six {n}x{k}", (w, q.gscale, None, "four_over_six", False, False)),
            ("quantize", f"tensor {WEIGHT.rule} {n}x{k}", (w, q.gscale, None, WEIGHT.rule, False, False)),
            ("dequantize", f"weight {n}x{k}", (*q, BF16)),
            ("transpose_requantize", f"{n}x{k}", (*q, 1.0)),
        ]
    return found


def measure(timer: Timer, operator: str, arguments: tuple, copies: dict[int, float]) -> dict:
    """One row: time, bytes and the copy of as many bytes. ``copies`` remembers the copies."""
    run = OPERATORS[operator].flat(dispatch.triton_kernel(operator))
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


def bench(args: argparse.Namespace) -> None:
    timer, copies, rows = Timer(), {}, []
    with torch.no_grad():
        for operator, label, arguments in timed_cases():
            row = {"operator": operator, "case": label}

            def fill() -> None:
                row.update(measure(timer, operator, arguments, copies))
                reference_of = OPERATORS[operator].flat(OPERATORS[operator].reference)
                row["reference_us"] = round(timer(lambda: reference_of(*arguments), 3)[0])

            common.guarded(row, fill)
            rows.append(row)
            shown = {key: row[key] for key in ("median_us", "gb_per_s", "of_copy", "reference_us", "error") if key in row}
            print(f"{operator:21} {label:36} {shown}", flush=True)
    common.write(args, "ops", rows)


SWEPT = {  # operator -> (table or module attribute, key, values)
    "quantize": ("BLOCKS_PER_THREAD", "terms", (1, 2, 4)),
    "quantize_terms": ("BLOCKS_PER_THREAD", "terms", (1, 2, 4)),
    "rmsnorm_quantize": ("BLOCKS_PER_THREAD", "norm", (1, 2, 4)),
    "rmsnorm_backward": ("BLOCKS_PER_THREAD", "norm_backward", (1, 2, 4)),
    "silu_mul_quantize": ("BLOCKS_PER_THREAD", "mlp", (1, 2)),
    "silu_mul_backward": ("BLOCKS_PER_THREAD", "mlp_backward", (1, 2)),
    "dequantize": ("DEQUANTIZE", "words", (128, 256, 512, 1024)),
}


def sweep(args: argparse.Namespace) -> None:
    """The launch constants of launch.py, one at a time; 1-term and plain cases only."""
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
    common.write(args, "ops_sweep", rows)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time the launch constants instead")
    args = parser.parse_args()
    if args.device.type != "cuda":
        raise SystemExit("the kernels that are timed here need a CUDA GPU")
    kernels.load()
    print(kernels.status())
    sweep(args) if args.sweep else bench(args)


if __name__ == "__main__":
    main()
