"""Measures the tiles of the FP4 extension on the GPU at hand."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.utils import benchmark

from ...kernels.fp4 import cutlass, tiles
from ...kernels.fp4.tiles import Problem, Tile
from ...numerics.formats import BLOCK, QuantizedMatrix
from ...numerics.products import LowRank

LLAMA_1B = ((2048, 512, 512), (2048,), (8192, 8192), (2048,)), (2048, 2048, 2048, 8192)
LLAMA_8B = ((4096, 1024, 1024), (4096,), (14336, 14336), (4096,)), (4096, 4096, 4096, 14336)
ROWS = (128, 256, 512, 1024, 2048, 4096)


def usual_problems() -> list[Problem]:
    """Launches of a training step of Llama-3.2-1B and Llama-3.1-8B: fprop with LoRA of rank 16, as one and as two terms."""
    shapes = [(ns, k) for weights, ks in (LLAMA_1B, LLAMA_8B) for ns, k in zip(weights, ks)]
    return [Problem(m, ns, k, terms, rank=16) for m in ROWS for ns, k in shapes for terms in (1, 2)]


def _random(rows: int, k: int, per_row: bool, device: str) -> QuantizedMatrix:
    """Codes and scales as real data has them: speed depends on the bits that flip."""
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(0x40, 0x78, (rows, k // BLOCK), dtype=torch.uint8, device=device)
    return QuantizedMatrix(codes, scales, torch.full((rows if per_row else 1,), 2.0**-20, device=device), k)


def launch_of(problem: Problem, tile: Tile, device: str = "cuda") -> Callable:
    """The launch of a problem, on random operands."""
    dtype = {name: dtype for dtype, name in cutlass.DTYPES.items()}[problem.d]
    terms = [_random(problem.m, problem.k, True, device) for _ in range(problem.terms)]
    weights = [_random(n, problem.k, False, device) for n in problem.ns]
    random = lambda rows, columns, dtype: torch.randn(rows, columns, dtype=dtype, device=device)
    adds = [random(problem.m, n, dtype) if problem.c else None for n in problem.ns]
    pair = lambda n: LowRank(random(problem.m, problem.rank, torch.bfloat16), random(n, problem.rank, torch.bfloat16))
    low_ranks = [pair(n) if problem.rank else None for n in problem.ns]
    more = {"constants": [None] * len(weights), "adds": adds, "low_ranks": low_ranks}
    return partial(cutlass.gemms, terms, weights, **more, dtype=dtype, tile=tile)


def measure_us(problem: Problem, tile: Tile) -> float:
    """Microseconds of one launch: the median of blocks of calls queued back to back, so that the host's part is hidden."""
    launch = launch_of(problem, tile)
    return benchmark.Timer("launch()", globals={"launch": launch}).blocked_autorange(min_run_time=0.02).median * 1e6


def measure(
    gpu: str, library: cutlass.Library, problems: Iterable[Problem], measure_us: Callable[[Problem, Tile], float] = measure_us
) -> dict[str, str]:
    """Measures every tile of a library on every problem and stores the fastest ones for a GPU model; ``{problem key: tile name}``
    of all that is stored now."""
    times, file = {}, tiles.cache_file(gpu, library.info["source"])
    for problem in problems:
        times[problem.key] = us = {tile.name: round(measure_us(problem, tile), 2) for tile in library.tiles}
        best = min(us, key=us.get)
        print(f"{problem.key}: {best} {us[best]:.1f} us")
    winners = tiles.store(file, times)
    print(f"stored in {file}")
    return winners
