"""Checks every instance of the extension's GEMM on the GPU at hand against FP64.

    PEFT_NVFP4_EXTENSION=libnvfp4_emulated.so python benchmarks/check_extension.py

On an RTX 50xx it checks the library that is installed. On a Hopper GPU it checks the library built with ``csrc/build.py
--emulated``: the same kernels, tiles, pipelines, layouts and epilogues, with the one FP4 instruction replaced by integer
arithmetic of the same bits, as far as they are known (which is slow: nothing here is timed).

What must hold: no output is further from its FP64 value than the last rounding and the sums allow (an instruction cuts a sum off
to FP32 after every 64 values of k: one FP32 step of what was added up so far); operands that make every sum exact give the exact
bits; and, emulated, outputs have the bits of the instruction's model (:mod:`peft_nvfp4.diagnostics.doctor.instruction`). What is
reported beside it: the share of correctly rounded outputs and the share that the model predicts for the same operands. Sums that
are cut off are a little too small, the more so the longer they are, so that share falls with K on a card that is right. The
workspace and the outputs are filled with NaN bytes first, and operands lie between NaN bytes, so padding that is read shows.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import common
import torch
from torch import Tensor

from peft_nvfp4.diagnostics.doctor import instruction
from peft_nvfp4.kernels.fp4 import cutlass
from peft_nvfp4.kernels.fp4.native import Unavailable
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import QuantizedMatrix, padded_k
from peft_nvfp4.numerics.products import LowRank

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
    (65, (2048, 512, 512), 2048), (96, (512,), 2048), (128, (3072,), 3072), (160, (2048,), 8192), (192, (1024, 1024), 4096),
    (256, (512,), 2048), (66, (33, 65, 97, 31), 256), (90, (63, 64, 65), 512), (72, (1, 2, 3, 4), 96), (128, (31,), 288),
    (129, (95,), 544), (200, (96, 160, 224), 768), (80, (4096,), 512), (255, (257, 255), 1024), (400, (192,), 2080),
    (1024, (64,), 4096), (2048, (32,), 2048), (70, (1000, 24), 3104), (512, (320,), 1312), (300, (2560,), 640),
)  # fmt: skip
RANKS = (0, 16, 0, 64, 0, 40, 200)  # of low-rank products, shape after shape, where nothing is added
MODELLED_ROWS = 16


@dataclass
class Case:
    terms: list[QuantizedMatrix]
    weights: list[QuantizedMatrix]
    constants: list[Tensor | None]
    adds: list[Tensor | None]
    low_ranks: list[LowRank | None]

    @property
    def roundings(self) -> int:
        """FP32 roundings of a sum at most: one an instruction, three in the epilogue."""
        ranks = [p.up.shape[1] for p in self.low_ranks if p is not None]
        return len(self.terms) * -(-self.terms[0].k // instruction.STEP) + -(-max(ranks, default=0) // 16) + 3


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
    m: int,
    ns: tuple[int, ...],
    k: int,
    terms: int,
    c: str,
    d: torch.dtype,
    bias: str,
    per_row: bool,
    exact: bool,
    rank: int,
    seed: int,
) -> Case:
    generator = torch.Generator("cuda").manual_seed(seed)
    first = matrix(m, k, per_row, exact, generator)
    xs = [first]
    if terms == 2:
        xs.append(matrix(m, k, per_row, exact, generator)._replace(gscale=first.gscale))
    weights = [matrix(n, k, False, exact, generator) for n in ns]
    spread = 1.0 if exact else float(k) ** 0.5

    def values(*shape: int, dtype: torch.dtype, spread: float = spread) -> Tensor:
        return guarded((torch.randint(-8, 9, shape, generator=generator, device="cuda") * spread).to(dtype))

    def low_rank(w: QuantizedMatrix) -> LowRank:
        """h is a whole number times the global scales."""
        h = values(m, rank, dtype=torch.bfloat16, spread=1.0) * (first.gscale[:, None] * w.gscale).bfloat16()
        return LowRank(guarded(h), values(len(w.codes), rank, dtype=torch.bfloat16, spread=1.0))

    kinds = {"none": None, "f32": torch.float32, "bf16": torch.bfloat16}
    constants = [None if kinds[bias] is None else values(n, dtype=kinds[bias]) for n in ns]
    adds = [None if c == "none" else values(m, n, dtype=d) for n in ns]
    # one part in four of a launch has none
    return Case(xs, weights, constants, adds, [low_rank(w) if rank and i != 2 else None for i, w in enumerate(weights)])


def decoded(q: QuantizedMatrix) -> Tensor:
    """FP64 values without the global scale."""
    return reference.dequantize(q._replace(gscale=torch.ones_like(q.gscale[:1]))).double()


def expected(case: Case, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """(M, N) in FP64, and the sum of magnitudes, for the bound of an FP32 sum."""
    w, row = decoded(case.weights[i]), case.terms[0].gscale.double()[:, None] * case.weights[i].gscale.double()
    y = (x @ w.T) * row
    size = (sum(decoded(t).abs() for t in case.terms) @ w.abs().T) * row
    if (pair := case.low_ranks[i]) is not None:
        y, size = y + pair.hidden.double() @ pair.up.double().T, size + pair.hidden.double().abs() @ pair.up.double().abs().T
    for more in (case.constants[i], case.adds[i]):
        if more is not None:
            y, size = y + more.double(), size + more.double().abs()
    return y, size


def judge(y: Tensor, want: Tensor, size: Tensor, roundings: int, exact: bool = False) -> dict:
    """How far an output is from the FP64 value; ``exact``: it must have the same bits."""
    rounded = want.to(y.dtype)
    share = float((y == rounded).double().mean())
    if exact:
        return {"finite": True, "exact": share, "wrong": int((y != rounded).sum())}
    if not bool(torch.isfinite(y).all()):
        return {"finite": False, "exact": 0.0, "wrong": int((~torch.isfinite(y)).sum())}
    excess = (y.double() - want).abs() - torch.finfo(y.dtype).eps / 2 * want.abs()
    steps = (excess / (size * 2.0**-23).clamp(min=1e-300)).clamp(min=0)
    return {"finite": True, "exact": share, "wrong": int((steps > roundings).sum()), "worst_steps": float(steps.max())}


def modelled_rows(m: int) -> Tensor:
    return torch.arange(0, m, -(-m // MODELLED_ROWS), device="cuda")


def model(case: Case, i: int, tile_k: int, dtype: torch.dtype) -> Tensor:
    """Some rows of an output, by the instruction's model."""
    m = len(case.terms[0].codes)
    rows = modelled_rows(m)
    pick = lambda q: q._replace(codes=q.codes[rows], scales=q.scales[rows], gscale=q.gscale.expand(m)[rows])
    add = None if case.adds[i] is None else case.adds[i][rows]
    return instruction.modelled([pick(t) for t in case.terms], case.weights[i], tile_k, case.constants[i], add, dtype)


def against_the_model(y: Tensor, want: Tensor, model: Tensor) -> dict:
    """How many outputs were modelled, the share with the model's bits, and the shares of correctly rounded ones, expected and
    seen."""
    rows = modelled_rows(len(y))
    y, right = y[rows], want[rows].to(y.dtype)
    share = lambda a, b: float((a == b).double().mean())
    shares = {"as_modelled": share(y, model), "expected": share(model, right), "seen": share(y, right)}
    return {"modelled": y.numel(), **shares}


def poison(numel: int) -> None:
    """Makes the allocator hand out memory full of NaN bytes next: workspaces and outputs come from torch.empty."""
    torch.full((numel,), 0xFF, dtype=torch.uint8, device="cuda")


def run_case(case: Case, names: list[tuple], tiles: dict, exact: bool) -> list[tuple[tuple, dict]]:
    """Every instance of ``names`` on a case (same c and d)."""
    x = sum(decoded(t) for t in case.terms)
    wanted = [expected(case, x, i) for i in range(len(case.weights))]
    found, models = [], {}
    for name in names:
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[name[2]]
        poison(64 << 20)
        more = {"constants": case.constants, "adds": case.adds, "low_ranks": case.low_ranks}
        ys = cutlass.gemms(case.terms, case.weights, **more, dtype=dtype, tile=tiles[name[0]])
        for i, (y, (want, size)) in enumerate(zip(ys, wanted)):
            verdict = judge(y, want, size, case.roundings, exact)
            if not exact and case.low_ranks[i] is None:
                at = (i, tiles[name[0]].k)
                if at not in models:
                    models[at] = model(case, *at, dtype)
                verdict |= against_the_model(y, want, models[at])
            found.append((name, verdict))
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
                rank = RANKS[at % len(RANKS)] if c == "none" else 0
                case = make(m, ns, k, terms, c, dtype, bias, per_row, exact, rank, seed=1000 * at + 10 * number + exact)
                for name, verdict in run_case(case, names, tiles, exact):
                    inputs = {"m": m, "n": ns, "k": k, "terms": terms, "bias": bias, "per_row": per_row, "rank": rank}
                    inputs["exact_inputs"] = exact
                    results.append({"instance": "_".join(name), **inputs, **verdict})
                count += 1
        print(
            f"{time.time() - start:5.0f} s  {m} {ns} {k}: {len(results)} outputs, {sum(r['wrong'] > 0 for r in results)} wrong",
            flush=True,
        )
    return {"shapes": len(shapes), "cases": count, "seconds": time.time() - start, "results": results}


def check_in_place() -> list[dict]:
    """An out that is the add, an out with longer rows, and unaligned operands that the Python side must copy."""
    case = make(200, (264,), 256, 1, "bf16", torch.bfloat16, "none", True, False, 0, seed=7)
    want, size = expected(case, decoded(case.terms[0]), 0)
    wide = torch.full((200, 300), float("nan"), dtype=torch.bfloat16, device="cuda")
    outs = {"in place": case.adds[0].clone(), "longer rows": wide[:, :264], "unaligned": wide[:, 3:267]}
    found = []
    for what, out in outs.items():
        add = out if what == "in place" else case.adds[0]
        y = cutlass.gemms(case.terms, case.weights, constants=[None], adds=[add], outs=[out])[0]
        same = y.data_ptr() == out.data_ptr()
        found.append({"what": what, "same_memory": same, **judge(y, want, size, case.roundings)})
    found.append({"what": "beside longer rows", "wrong": int((~wide[:, 267:].isnan()).sum()), "exact": 1.0})
    return found


def summary(report: dict) -> dict:
    """Per instance: outputs, wrong ones, the largest error in FP32 steps of the summands' magnitudes, how many values the model
    was asked for and the smallest share of them in an output that has its bits. And per K: the share of values that are correctly
    rounded, and the share that the model predicts for them."""
    groups, lengths = defaultdict(list), defaultdict(list)
    for r in report["results"]:
        groups[r["instance"], r["exact_inputs"]].append(r)
        if "as_modelled" in r and r["instance"].endswith("bf16"):
            lengths[r["k"] * r["terms"]].append(r)
    instances = {
        f"{name}{' (exact inputs)' if exact else ''}": {
            "outputs": len(rs),
            "wrong": sum(r["wrong"] for r in rs),
            "worst_steps": max((r.get("worst_steps", 0.0) for r in rs), default=0.0),
            "modelled": sum(r.get("modelled", 0) for r in rs),
            "as_modelled": min((r["as_modelled"] for r in rs if "as_modelled" in r), default=1.0),
        }
        for (name, exact), rs in sorted(groups.items())
    }
    mean = lambda rs, key: sum(r[key] for r in rs) / len(rs)
    rounded = {k: {"correctly_rounded": mean(rs, "seen"), "expected": mean(rs, "expected")} for k, rs in sorted(lengths.items())}
    return {"instances": instances, "terms_times_k": rounded}


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
    modelled = {name: s["as_modelled"] for name, s in report["summary"]["instances"].items()}
    unlike = [name for name, share in modelled.items() if share < 1 - 2**-40]  # a mean of ones may round
    report["passed"] = not bad and not (unlike and library.info["emulated"] == "1")
    rows = [{**row, "n": "+".join(map(str, row["n"]))} for row in report.pop("results")]
    common.write_json(args.out / "extension_check.json", report)
    common.write_csv(args.out / "extension_check.csv", rows)
    for name, s in report["summary"]["instances"].items():
        share = f"of {s['modelled']} values {100 * s['as_modelled']:.2f} % or more as modelled"
        print(f"{name:60} {s['outputs']:4} outputs  {s['wrong']} wrong  {s['worst_steps']:.1f} steps at most  {share}")
    for k, s in report["summary"]["terms_times_k"].items():
        print(f"K x terms {k:6}: {100 * s['correctly_rounded']:.4f} % correctly rounded, {100 * s['expected']:.4f} % expected")
    for r in report["in_place"]:
        print(r)
    print("first wrong:", *bad[:10], sep="\n  ")
    print("passed" if report["passed"] else "FAILED")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
