"""Every instance of the extension's GEMM, as training runs it: each tile and schedule by itself, with more than one tile a
multiprocessor, several weights a launch, addends in place, low-rank products, recorded, beside other work, and on every GPU.

:mod:`conformance_gemm` lets the extension choose its tile, which for its small products is always the same one. Here the tile is
given, and the number of multiprocessors: with one to three of them, each computes a dozen tiles of a product that a CPU can
check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...kernels.fp4 import check, native
from ...kernels.fp4.check import Case
from ...kernels.fp4.tiles import Tile
from ...numerics import layout
from ...numerics.formats import QuantizedMatrix
from . import instruction
from .results import Noticed, Result, checked, require

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
LONG_K = 8224
RANKS = (8, 16, 40, 64, 200, 256)


@dataclass(frozen=True)
class Launch:
    """Products of one input in one launch."""

    what: str
    parts: tuple[Case, ...]  # of the same terms
    sm_count: int = 0
    in_place: bool = False  # outs are the adds
    swizzled: bool = False  # block scales come in tiles


# ---------------------------------------------------------------------------------------------- launches


def _exact(m: int, n: int, k: int, seed: int, choices: Sequence[int] = range(16), terms: int = 1) -> Case:
    """All partial sums are exact in FP32: at most 144 k, or with ``SMALL`` 4 k, steps of a quarter."""
    xs = tuple(check.matrix(check.codes(m, k, seed + i, choices), gscale=check.row_scales(m, seed)) for i in range(terms))
    return Case("", xs, check.matrix(check.codes(n, k, seed + 7, choices), check.powers(n, k, seed) if k < 1024 else None))


def _beside(case: Case, ns: Sequence[int], seed: int) -> tuple[Case, ...]:
    """The same input and other weights, of ``ns`` outputs."""
    k = case.terms[0].k
    weights = [check.matrix(check.codes(n, k, seed + i), gscale=torch.tensor([2.0 ** (i - 2)])) for i, n in enumerate(ns)]
    constants = [check.integers(n, seed=seed + i) if i % 2 else None for i, n in enumerate(ns)]
    return tuple(replace(case, weight=w, constant=c) for w, c in zip(weights, constants))


def _with_add(case: Case, seed: int, dtype: torch.dtype) -> Case:
    return replace(case, add=check.integers(len(case.terms[0].codes), len(case.weight.codes), seed=seed).to(dtype))


def launches(tile: Tile, c: str, d: str) -> Iterator[Launch]:
    """What an instance must get right."""
    add = partial(_with_add, dtype=DTYPES[d]) if c != "none" else lambda case, seed: case
    for sms in (1, 2, 3):
        whole = add(_exact(400, 400, 288, sms), 50)
        yield Launch(f"{sms} multiprocessors for all tiles", (whole,), sms)
    for tiles in (1, 2, 3, 4, 5, 7):
        k = tiles * tile.k - 32 * (tiles % 2)
        terms = 1 + tiles % 2
        yield Launch(f"{tiles} tiles of k, {terms} terms", (add(_exact(130, 136, k, 10 + tiles, terms=terms), 51),))
    yield Launch(f"K={LONG_K}", (add(_exact(130, 136, LONG_K, 20, check.SMALL, 2), 52),), 1)
    parts = _beside(_exact(261, 8, 160, 30), (33, 7, 129, 255), 40)
    yield Launch("four weights of odd N", tuple(add(part, 53 + i) for i, part in enumerate(parts)))
    yield Launch("four weights, scales in tiles", tuple(add(part, 53 + i) for i, part in enumerate(parts)), swizzled=True)
    two_terms = add(_exact(300, 136, 416, 34, terms=2), 57)
    yield Launch("two terms, scales in tiles", (two_terms,), 1, swizzled=True)
    yield Launch("four weights of odd N, 1 multiprocessor", tuple(add(part, 53 + i) for i, part in enumerate(parts)), 1)
    if c != "none":
        parts = _beside(_exact(300, 8, 288, 60), (400, 264), 61)
        yield Launch("added in place", tuple(add(part, 62 + i) for i, part in enumerate(parts)), 2, in_place=True)
        return
    for rank in RANKS:
        case = check.low_rank(_exact(200, 264, 160, 70 + rank, check.SMALL), rank, 71)
        yield Launch(f"a low-rank product of rank {rank}", (case,), 1)
    plain = _beside(_exact(261, 8, 416, 80, check.SMALL), (136, 40, 129, 400), 81)
    ranks = (16, 0, 72, 8)
    mixed = tuple(check.low_rank(part, rank, 82) if rank else part for part, rank in zip(plain, ranks))
    yield Launch("low-rank products of ranks 16, none, 72 and 8", mixed, 2)


# ---------------------------------------------------------------------------------------------- running


def moved(launch: Launch, device: torch.device) -> tuple[list[QuantizedMatrix], list[Case]]:
    """(terms with a global scale for each row, parts) on the device."""
    move = partial(tree_map_only, Tensor, lambda t: t.to(device))
    terms = [t._replace(gscale=t.gscale.expand(len(t.codes)).contiguous()) for t in launch.parts[0].terms]
    parts = [
        replace(p, **move({name: getattr(p, name) for name in ("weight", "constant", "add", "low_rank")})) for p in launch.parts
    ]
    if not launch.swizzled:
        return move(terms), parts
    return in_tiles(move(terms)), [replace(p, weight=in_tiles([p.weight])[0]) for p in parts]


def in_tiles(matrices: Sequence[QuantizedMatrix]) -> list[QuantizedMatrix]:
    """With swizzled scales, one matrix's right after the other's."""
    scales = torch.stack([layout.swizzle_scales(q.scales) for q in matrices])
    return [q._replace(scales=s) for q, s in zip(matrices, scales)]


def multiply(gemms: native.Gemms, launch: Launch, device: torch.device, tile: Tile, dtype: torch.dtype) -> list[Tensor]:
    """Answers on the CPU. Outputs are NaN before: what is not written shows."""
    terms, parts = moved(launch, device)
    if launch.in_place:  # the launch keeps its addends
        parts = [replace(p, add=p.add.clone()) for p in parts]
    shape = lambda p: (len(terms[0].codes), len(p.weight.codes))
    outs = [p.add if launch.in_place else torch.full(shape(p), torch.nan, dtype=dtype, device=device) for p in parts]
    constants, adds, low_ranks = ([getattr(p, name) for p in parts] for name in ("constant", "add", "low_rank"))
    more = {"outs": outs, "dtype": dtype, "tile": tile, "sm_count": launch.sm_count}
    with torch.no_grad():
        ys = gemms(terms, [p.weight for p in parts], constants=constants, adds=adds, low_ranks=low_ranks, **more)
    return [y.cpu() for y in ys]


def not_written(case: Case, got: Tensor) -> str:
    """Whether outputs kept the NaN that they had, and which; empty if not."""
    at = (got.isnan() & ~check.expected(case).isnan()).nonzero()
    if not len(at):
        return ""
    if len(at) == got.numel():
        return "nothing is written to the output; "
    (r0, c0), (r1, c1) = at.amin(0).tolist(), at.amax(0).tolist()
    return f"rows {r0}..{r1}, columns {c0}..{c1} of the output are not written (a tile is skipped); "


def compare(launch: Launch, answers: Sequence[Tensor]) -> None:
    """Raises AssertionError with what is wrong: a name if there is one."""
    for i, (part, got) in enumerate(zip(launch.parts, answers)):
        if not (wrong := check.compare(part, got)):
            continue
        name = not_written(part, got) or f"{check.diagnose([(part, got)])}; ".removeprefix("; ")
        where = f"{launch.what}, weight {i}" if len(answers) > 1 else launch.what
        require(False, f"{where}: {name}{wrong.removeprefix(f'{part.name}: ')}")


def one_instance(gemms: native.Gemms, tile: Tile, c: str, d: str, device: torch.device) -> str:
    """All launches of an instance, and how it rounds long sums."""
    count = 0
    for launch in launches(tile, c, d):
        compare(launch, multiply(gemms, launch, device, tile, DTYPES[d]))
        count += 1
    share = rounding_of_sums(gemms, tile, c, d, device)
    return f"{count} launches exact; {100 * share:.2f} % of long sums have the bits of the instruction's model"


def rounding_of_sums(gemms: native.Gemms, tile: Tile, c: str, d: str, device: torch.device) -> float:
    """Products of values as training has them, K=2048, two terms. Judged by :func:`check.compare`; returns the share of outputs
    with the bits that :mod:`instruction` says."""
    case = check.gaussian("long sums", 150, 136, 2048, 90, terms=2)
    case = _with_add(case, 91, DTYPES[d]) if c != "none" else case
    launch = Launch("long sums", (case,), 2)
    (got,) = answers = multiply(gemms, launch, device, tile, DTYPES[d])
    compare(launch, answers)
    model = instruction.modelled(case.terms, case.weight, tile.k, None, case.add, DTYPES[d])
    return (got == model).double().mean().item()


# ---------------------------------------------------------------------------------------------- around a launch


def addresses_of_its_own(gemms: native.Gemms, tile: Tile, device: torch.device) -> str:
    """Two products of one shape, whose operands and outputs are all alive: the second must not read or write the first one's."""
    first, second = (Launch("", (_exact(260, 264, 160, seed),)) for seed in (100, 101))
    dtype, outs, alive = torch.bfloat16, [], []
    for launch in (first, second):
        terms, (part,) = moved(launch, device)
        alive.append((terms, part))
        outs = [torch.full((260, 264), torch.nan, dtype=dtype, device=device), *(t.fill_(torch.nan) for t in outs)]
        with torch.no_grad():
            gemms(terms, [part.weight], constants=[None], adds=[None], outs=outs[:1], dtype=dtype, tile=tile)
    untouched = bool(outs[1].isnan().all())
    require(untouched, "a product wrote to the output of the one before it: addresses (tensor maps) of an earlier call are used")
    got, earlier = outs[0].cpu(), check.expected(first.parts[0]).to(dtype)
    require(
        not torch.equal(got, earlier),
        "a product is that of the operands of the call before: its addresses (tensor maps) are used",
    )
    compare(second, [got])
    return "operands and outputs of the call before are left alone"


def in_a_cuda_graph(gemms: native.Gemms, tile: Tile, device: torch.device) -> str:
    """Recorded once, replayed with other operands in the same memory."""
    launch = Launch("recorded", (check.low_rank(_exact(200, 264, 160, 110, check.SMALL), 16, 111),))
    (x,), (part,) = moved(launch, device)
    run = lambda: gemms([x], [part.weight], constants=[None], adds=[None], low_ranks=[part.low_rank], tile=tile)[0]
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.device(device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            y = run()
        for seed in (112, 113, 114):
            case = launch.parts[0]
            other = replace(case, terms=(check.matrix(check.codes(200, 160, seed, check.SMALL), gscale=case.terms[0].gscale),))
            x.codes.copy_(other.terms[0].codes)
            y.fill_(torch.nan)
            graph.replay()
            compare(replace(launch, parts=(other,)), [y.cpu()])
    return "3 replays"


def beside_other_streams(gemms: native.Gemms, tile: Tile, device: torch.device) -> str:
    """Products on four streams at once, each queued ten times."""
    work = [Launch(f"stream {i}", (_exact(260, 264, 416, 120 + i),)) for i in range(4)]
    streams, ready = [torch.cuda.Stream(device) for _ in work], [moved(launch, device) for launch in work]
    torch.cuda.synchronize(device)
    answers = [[] for _ in work]
    with torch.no_grad():
        for _ in range(10):
            for stream, (terms, (part,)), found in zip(streams, ready, answers):
                with torch.cuda.stream(stream):
                    found += gemms(terms, [part.weight], constants=[None], adds=[None], tile=tile)
    torch.cuda.synchronize(device)
    for launch, found in zip(work, answers):
        for y in found:
            compare(launch, [y.cpu()])
    return "40 products on 4 streams"


def under_load(gemms: native.Gemms, tile: Tile, device: torch.device, size: int, times: int) -> str:
    """Two products of many tiles in turn, again and again, with the GPU full: races between stages, tiles and the epilogue show
    as other bits. So do block scales that are read before they are rearranged: in their place are those of the product before.
    What is right is the product with scales in tiles, of which none are rearranged."""
    random = lambda seed: check.matrix(check.codes(size, 512, seed), check.powers(size, 512, seed, range(0x28, 0x60)))
    x, other, w = map(random, (130, 131, 132))
    inputs = [moved(Launch("", (Case("", (q, q), w),)), device) for q in (x, other)]
    weight = inputs[0][1][0].weight
    add = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    different = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for adds in ([None], [add]):
            run = lambda terms, w: gemms(terms, [w], constants=[None], adds=adds, tile=tile)[0]  # noqa: B023
            right = [run(in_tiles(terms), *in_tiles([weight])) for terms, _ in inputs]
            for i in range(times // 2):
                different += (run(inputs[i % 2][0], weight) != right[i % 2]).sum()
    require(not int(different), f"{int(different)} outputs changed when two products were computed {times} times in turn")
    tiles = -(-size // tile.m) * -(-size // tile.n)
    return f"{times} times {tiles} tiles, the same bits"


def _milliseconds(run: Callable) -> float:
    """Of one call, the median of 20 after warming up."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    for _ in range(3):
        run()
    for event in events:
        event.record()
        run()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(events, events[1:]))[10]


def plausible_speed(gemms: native.Gemms, tile: Tile, device: torch.device, size: int = 4096) -> str:
    """A large product beside PyTorch's in BF16, whose rate with FP32 sums is an eighth of FP4's on an RTX 50xx."""
    x, w = (check.matrix(check.codes(size, size, s), check.powers(size, size, s, range(0x28, 0x60))) for s in (140, 141))
    terms, (part,) = moved(Launch("", (Case("", (x,), w),)), device)
    dense = torch.randn(size, size, device=device).bfloat16()
    with torch.no_grad(), torch.cuda.device(device):
        fp4 = _milliseconds(lambda: gemms(terms, [part.weight], constants=[None], adds=[None], tile=tile))
        bf16 = _milliseconds(lambda: dense @ dense)
    return judged_speed(*(2 * size**3 / ms / 1e9 for ms in (fp4, bf16)))


def judged_speed(fp4: float, bf16: float) -> str:
    """Of TFLOP/s. Raises :class:`Noticed` where FP4 is not even twice as fast."""
    detail = f"{fp4:.0f} TFLOP/s, {fp4 / bf16:.1f} times those of BF16"
    if fp4 < 2 * bf16:
        raise Noticed(f"{detail}: slower than FP4 tensor cores should be (another process on the GPU, a power limit, or 'tune')")
    return detail


def around_checks(
    group: str, gemms: native.Gemms, tiles: Sequence[Tile], device: torch.device, size: int, times: int
) -> Iterator[Result]:
    """For each tile: what surrounds a launch."""
    recorded = (in_a_cuda_graph, beside_other_streams) if device.type == "cuda" else ()
    for tile in tiles:
        for function in recorded:
            yield checked(group, function, gemms, tile, device, name=f"{function.__name__.replace('_', ' ')}, {tile.name}")
        yield checked(group, under_load, gemms, tile, device, size, times, name=f"under load, {tile.name}")


LOAD, EMULATED_LOAD = (5760, 200), (5760, 20)
"""Size of the square products under load (2025 tiles of 128 x 128) and how often they are computed."""


def instance_checks(group: str, library, gemms: Callable, device: torch.device, load: tuple[int, int] = LOAD) -> Iterator[Result]:
    """Everything here, for a :class:`~peft_nvfp4.kernels.fp4.cutlass.Library`."""
    tiles = {tile.name: tile for tile in library.tiles}
    for tile in library.tiles:
        yield checked(group, addresses_of_its_own, gemms, tile, device, name=f"addresses of its own, {tile.name}")
    for name, c, d in library.instances:
        yield checked(group, one_instance, gemms, tiles[name], c, d, device, name=f"instance {name}, c {c}, d {d}")
    with_bf16 = [tile for tile in library.tiles if {(tile.name, c, "bf16") for c in ("none", "bf16")} <= set(library.instances)]
    yield from around_checks(group, gemms, with_bf16, device, *load)
    if device.type != "cuda":
        return
    if library.info["emulated"] == "0":
        for tile in with_bf16:
            yield checked(group, plausible_speed, gemms, tile, device, name=f"speed, {tile.name}")
    for index in range(torch.cuda.device_count()):
        other = torch.device("cuda", index)
        if other != device and torch.cuda.get_device_capability(other) == torch.cuda.get_device_capability(device):
            yield checked(group, on_another_gpu, gemms, other, name=f"on GPU {index}")


def on_another_gpu(gemms: native.Gemms, device: torch.device) -> str:
    failures = check.failures(native.single(gemms), device)
    require(not failures, "; ".join(failures[:3]))
    return torch.cuda.get_device_name(device)
