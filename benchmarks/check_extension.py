"""Checks every instance of the extension's GEMM on the GPU at hand against FP64.

    PEFT_NVFP4_EXTENSION=libnvfp4_emulated.so python benchmarks/check_extension.py

On an RTX 50xx it checks the library that is installed. On a Hopper GPU it checks the library built with ``csrc/build.py
--emulated``: the same kernels, tiles, pipelines, layouts and epilogues, with the one FP4 instruction replaced by arithmetic
(which is slow: nothing here is timed).

Per case: the fraction of outputs that are the correctly rounded value of an FP64 reference (at least 99.99 % over all cases of an
instance; FP32 outputs: error within the bound of an FP32 sum), no output off by more than one unit in the last place. Operands
that make every sum exact in FP32 must give equal bits. The workspace and the outputs are filled with NaN bytes first, and
operands lie between NaN bytes, so padding that is read shows.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import common
import torch
from torch import Tensor

from peft_nvfp4.kernels.fp4 import cutlass
from peft_nvfp4.kernels.fp4.native import Unavailable
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import QuantizedMatrix, padded_k

# (M, (N, ...), K): linears of Llama-3.2-1B, 3B, Llama-3.1-8B, Qwen2.5/3, then tails. Several N: one launch.
SHAPES = (
    (1, (2048,), 2048), (7, (512,), 2048), (64, (2048, 512, 512), 2048), (127, (8192,), 2048), (128, (2048,), 8192),
    (333, (2048, 512, 512), 2048), (1000, (8192, 8192), 2048), (2048, (512,), 2048), (5000, (512,), 2048), (4096, (2048,), 2048),
    (1, (3072, 1024, 1024), 3072), (255, (8192,), 3072), (257, (3072,), 8192), (513, (1024,), 3072),
    (16, (4096, 1024, 1024), 4096), (300, (14336,), 4096), (200, (4096,), 14336), (1111, (1024,), 4096),
    (100, (896, 128, 128), 896), (500, (4864, 4864), 896), (700, (896,), 4864), (129, (1536, 256, 256), 1536),
    (96, (8960,), 1536), (150, (1536,), 8960), (1025, (2560, 512), 2560), (33, (1024, 1024, 2048), 1024),
    (640, (3584, 512, 512), 3584), (1, (8,), 32), (1, (1,), 32), (3, (5,), 96), (17, (24,), 160), (130, (136,), 32),
    (131, (132,), 96), (257, (264,), 160), (128, (128,), 128), (128, (128, 128, 128, 128), 128), (129, (127, 129), 256),
    (511, (1000,), 544), (1000, (1001,), 1056),
    (65, (40, 8, 16, 24), 64), (2, (2048,), 40), (77, (300,), 1000), (384, (640,), 4128),
)  # fmt: skip


@dataclass
class Case:
    terms: list[QuantizedMatrix]
    weights: list[QuantizedMatrix]
    constants: list[Tensor | None]
    adds: list[Tensor | None]


def guarded(t: Tensor) -> Tensor:
    """A copy between bytes that are NaN as an E4M3 scale, BF16 and FP32 (0x7f, 0xff); the address stays a multiple of 256."""
    size = t.numel() * t.element_size()
    room = torch.full((size + 4096 + 256,), 0xFF, dtype=torch.uint8, device="cuda")
    inside = room[2048 : 2048 + size].view(t.dtype).view(t.shape)
    inside.copy_(t)
    return inside


def matrix(rows: int, k: int, per_row: bool, exact: bool, generator: torch.Generator) -> QuantizedMatrix:
    """Random codes. Scales: the part of E4M3 that data uses, or 1 where sums are to be exact. Zeros pad K, as stored."""
    kp = padded_k(k)
    codes = torch.randint(0, 16, (rows, kp), generator=generator, device="cuda", dtype=torch.uint8)
    codes[:, k:] = 0
    low, high = (0x38, 0x39) if exact else (0x28, 0x60)
    scales = torch.randint(low, high, (rows, kp // 16), generator=generator, device="cuda", dtype=torch.uint8)
    scales[:, -(-k // 16) :] = 0
    exponents = torch.randint(-2, 3, (rows if per_row else 1,), generator=generator, device="cuda")
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return QuantizedMatrix(guarded(packed), guarded(scales), guarded(torch.exp2(exponents.float())), k)


def make(
    m: int, ns: tuple[int, ...], k: int, terms: int, c: str, d: torch.dtype, bias: str, per_row: bool, exact: bool, seed: int
) -> Case:
    generator = torch.Generator("cuda").manual_seed(seed)
    first = matrix(m, k, per_row, exact, generator)
    xs = [first]
    if terms == 2:
        xs.append(matrix(m, k, per_row, exact, generator)._replace(gscale=first.gscale))
    weights = [matrix(n, k, False, exact, generator) for n in ns]
    spread = 1.0 if exact else float(k) ** 0.5

    def values(*shape: int, dtype: torch.dtype) -> Tensor:
        return guarded((torch.randint(-8, 9, shape, generator=generator, device="cuda") * spread).to(dtype))

    kinds = {"none": None, "f32": torch.float32, "bf16": torch.bfloat16}
    constants = [None if kinds[bias] is None else values(n, dtype=kinds[bias]) for n in ns]
    return Case(xs, weights, constants, [None if c == "none" else values(m, n, dtype=d) for n in ns])


def decoded(q: QuantizedMatrix) -> Tensor:
    """FP64 values without the global scale."""
    return reference.dequantize(q._replace(gscale=torch.ones_like(q.gscale[:1]))).double()


def expected(case: Case, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """(M, N) in FP64, and the sum of magnitudes, for the bound of an FP32 sum."""
    w, row = decoded(case.weights[i]), case.terms[0].gscale.double()[:, None] * case.weights[i].gscale.double()
    y = (x @ w.T) * row
    size = (x.abs() @ w.abs().T) * row
    for more in (case.constants[i], case.adds[i]):
        if more is not None:
            y, size = y + more.double(), size + more.double().abs()
    return y, size


def judge(y: Tensor, want: Tensor, size: Tensor, exact: bool = False) -> dict:
    """How far an output is from the FP64 value; ``exact``: it must have the same bits."""
    if exact:
        wrong = int((y != want.to(y.dtype)).sum())
        return {"finite": True, "exact": float(wrong == 0), "wrong": wrong}
    if not bool(torch.isfinite(y).all()):
        return {"finite": False, "exact": 0.0, "wrong": int((~torch.isfinite(y)).sum())}
    error = (y.double() - want).abs()
    if y.dtype == torch.float32:
        # each of the FP32 additions is off by at most 2**-24 of a partial sum; sequences of K/64 partial products: 2**-24 * K/16
        bound = size * 2.0**-18
        return {"finite": True, "exact": float((error <= bound).double().mean()), "wrong": int((error > bound).sum())}
    rounded = want.to(torch.bfloat16)
    # neighbours, as integers: sign-magnitude made monotonic. Where terms cancel, an FP32 sum's error is more than a BF16 step.
    order = lambda t: (b := t.view(torch.int16).int()) ^ ((b >> 15) & 0x7FFF)  # noqa: E731
    steps = (order(y.contiguous()) - order(rounded)).abs()
    wrong = (steps > 1) & (error > size * 2.0**-18)
    return {
        "finite": True,
        "exact": float((steps == 0).double().mean()),
        "wrong": int(wrong.sum()),
        "off_by_more": int((steps > 1).sum()),
    }


def poison(numel: int) -> None:
    """Makes the allocator hand out memory full of NaN bytes next: workspaces and outputs come from torch.empty."""
    torch.full((numel,), 0xFF, dtype=torch.uint8, device="cuda")


def run_case(case: Case, names: list[tuple], tiles: dict, exact: bool) -> list[tuple[tuple, dict]]:
    """Every instance of ``names`` on a case (same c and d)."""
    x = sum(decoded(t) for t in case.terms)
    wanted = [expected(case, x, i) for i in range(len(case.weights))]
    found = []
    for name in names:
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[name[2]]
        poison(64 << 20)
        ys = cutlass.gemms(case.terms, case.weights, constants=case.constants, adds=case.adds, dtype=dtype, tile=tiles[name[0]])
        found += [(name, judge(y, want, size, exact)) for y, (want, size) in zip(ys, wanted)]
    return found


def check(library, shapes) -> dict:
    tiles = {tile.name: tile for tile in library.tiles}
    by_type = defaultdict(list)
    for name in library.instances:
        by_type[name[1:]].append(name)
    results, count, start = [], 0, time.time()
    for at, (m, ns, k) in enumerate(shapes):
        torch.cuda.empty_cache()
        for number, ((c, d), names) in enumerate(sorted(by_type.items())):
            for exact in (False, True):
                if exact and k > 4096:  # 144 K must stay below 2**20 steps of a quarter: sums in any order are then exact
                    continue
                terms = 1 + (at + number + exact) % 2
                bias = ("f32", "none", "bf16")[(at + number) % 3]
                per_row = (at + number) % 4 != 3
                dtype = torch.float32 if d == "f32" else torch.bfloat16
                case = make(m, ns, k, terms, c, dtype, bias, per_row, exact, seed=1000 * at + 10 * number + exact)
                for name, verdict in run_case(case, names, tiles, exact):
                    inputs = {"m": m, "n": ns, "k": k, "terms": terms, "bias": bias, "per_row": per_row, "exact_inputs": exact}
                    results.append({"instance": "_".join(name), **inputs, **verdict})
                count += 1
        print(
            f"{time.time() - start:5.0f} s  {m} {ns} {k}: {len(results)} outputs, {sum(r['wrong'] > 0 for r in results)} wrong",
            flush=True,
        )
    return {"shapes": len(shapes), "cases": count, "seconds": time.time() - start, "results": results}


def check_in_place() -> list[dict]:
    """An out that is the add, an out with longer rows, and unaligned operands that the Python side must copy."""
    case = make(200, (264,), 256, 1, "bf16", torch.bfloat16, "none", True, False, seed=7)
    want, size = expected(case, decoded(case.terms[0]), 0)
    wide = torch.full((200, 300), float("nan"), dtype=torch.bfloat16, device="cuda")
    outs = {"in place": case.adds[0].clone(), "longer rows": wide[:, :264], "unaligned": wide[:, 3:267]}
    found = []
    for what, out in outs.items():
        add = out if what == "in place" else case.adds[0]
        y = cutlass.gemms(case.terms, case.weights, constants=[None], adds=[add], outs=[out])[0]
        same = y.data_ptr() == out.data_ptr()
        found.append({"what": what, "same_memory": same, **judge(y, want, size)})
    found.append({"what": "beside longer rows", "wrong": int((~wide[:, 267:].isnan()).sum()), "exact": 1.0})
    return found


def summary(report: dict) -> dict:
    """Per instance: outputs, fraction correctly rounded, wrong ones."""
    groups = defaultdict(list)
    for r in report["results"]:
        groups[r["instance"], r["exact_inputs"]].append(r)
    return {
        f"{name}{' (exact inputs)' if exact else ''}": {
            "outputs": len(rs),
            "correctly_rounded": sum(r["exact"] * r["m"] for r in rs) / sum(r["m"] for r in rs),
            "worst": min(r["exact"] for r in rs),
            "wrong": sum(r["wrong"] for r in rs),
        }
        for (name, exact), rs in sorted(groups.items())
    }


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--small", action="store_true", help="only shapes that a memory checker gets through")
    args = parser.parse_args()
    try:
        library = cutlass.load()
    except Unavailable as reason:
        print(reason)
        return 1
    shapes = [shape for shape in SHAPES if shape[0] * sum(shape[1]) * shape[2] < 1 << 25] if args.small else SHAPES
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "library": library.info,
        **check(library, shapes),
    }
    with_c = any(name[1:] == ("bf16", "bf16") for name in library.instances)
    report["in_place"] = check_in_place() if with_c else []
    report["summary"] = summary(report)
    bad = [r for r in report["results"] + report["in_place"] if r["wrong"]]
    low = [name for name, s in report["summary"].items() if s["correctly_rounded"] < 0.9999]
    report["passed"] = not bad and not low
    rows = [{**row, "n": "+".join(map(str, row["n"]))} for row in report.pop("results")]
    common.write_json(args.out / "extension_check.json", report)
    common.write_csv(args.out / "extension_check.csv", rows)
    for name, s in report["summary"].items():
        print(f"{name:60} {s['outputs']:4} outputs  {100 * s['correctly_rounded']:.4f} % correctly rounded  {s['wrong']} wrong")
    for r in report["in_place"]:
        print(r)
    print("first wrong:", *bad[:10], sep="\n  ")
    print("passed" if report["passed"] else "FAILED")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
