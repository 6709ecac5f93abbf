"""Whether an FP4 GEMM computes what it should: small products with known answers, and names for the ways to be wrong.

A capability number does not tell whether FP4 works (a binary without code for the GPU, a driver or a library too old, scales in
another layout). So a GEMM is tried: every case is a product whose exact value is known (in FP64, on the CPU). Most are chosen so
that every partial sum is exact in :data:`EXACT_BITS` bits, in whatever order it is taken: a code times a code is a multiple of
1/4 and at most 36, and block scales of .5, 1 and 2 add two bits below and two above. The only right answer is then the correctly
rounded one, bit for bit. A wrong answer is compared with the answers of :data:`MISTAKES`, and the one that fits is named.

:func:`failures` chooses an implementation (:mod:`implementations`), and is part of ``peft-nvfp4 doctor``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...numerics import layout, reference
from ...numerics.formats import E4M3_NAN, WEIGHT, QuantizedMatrix, padded_k
from ...numerics.products import LowRank

EXACT_BITS = 20
MIN_BITS = 16
"""Significant bits that sums must have. Tensor cores need not have FP32's 24 (SM120's FP8 instruction was seen to have about
21, the last ones cut off); BF16 has 8, FP16 11, and with them sums would be no better than the inputs."""
TOLERATED = 0.02
"""Share of the outputs of an inexact case that may differ by their rounding, which depends on the order of the sum."""

Change = Callable[[QuantizedMatrix], QuantizedMatrix]


@dataclass(frozen=True)
class Case:
    """One product: ``sum of terms @ weight.T + hidden @ up.T + constant + add``, on the CPU."""

    name: str
    terms: tuple[QuantizedMatrix, ...]
    weight: QuantizedMatrix
    constant: Tensor | None = None  # (N,) float32
    add: Tensor | None = None  # (M, N) bfloat16
    exact: bool = True  # all partial sums are exact in EXACT_BITS bits
    low_rank: LowRank | None = None  # hidden (M, r), up (N, r) bfloat16


# ---------------------------------------------------------------------------------------------- operands


def _rng(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def matrix(codes: Tensor, scales: Tensor | None = None, gscale: Tensor | None = None) -> QuantizedMatrix:
    """From codes (R, K) 0..15, E4M3 bytes (R, padded K / 16) and a global scale, each 1 if not given."""
    rows, k = codes.shape
    padded = torch.zeros(rows, padded_k(k), dtype=torch.uint8, device="cpu")
    padded[:, :k] = codes
    if scales is None:
        scales = torch.full((rows, padded_k(k) // 16), 0x38, dtype=torch.uint8, device="cpu")  # 1.0
    gscale = torch.ones(1, dtype=torch.float32, device="cpu") if gscale is None else gscale
    return QuantizedMatrix(reference.pack(padded), scales, gscale, k)


def codes(rows: int, k: int, seed: int, choices: Sequence[int] = range(16)) -> Tensor:
    """At random, any of the 16 if no others are given."""
    index = torch.randint(0, len(choices), (rows, k), generator=_rng(seed), device="cpu")
    return torch.tensor(choices, dtype=torch.uint8, device="cpu")[index]


SMALL = (0, 1, 2, 9, 10)
"""0, +-.5, +-1: their sums here are below 64 in steps of 1/4, so that in a sum rounded to BF16 nothing added is lost."""


def powers(rows: int, k: int, seed: int, choices: Sequence[int] = (0x30, 0x38, 0x40)) -> Tensor:
    """Block scales at random: .5, 1 and 2 if no others are given."""
    return codes(rows, padded_k(k) // 16, seed, choices)


def row_scales(rows: int, seed: int) -> Tensor:
    """Powers of two from 2**-8 to 2**8, one a row."""
    return torch.randint(-8, 9, (rows,), generator=_rng(seed), device="cpu").float().exp2()


def integers(*shape: int, seed: int) -> Tensor:
    """-64 .. 64: exact in BF16, too."""
    return torch.randint(-64, 65, shape, generator=_rng(seed), device="cpu").float()


def low_rank(case: Case, rank: int, seed: int) -> Case:
    """With a low-rank product of whole numbers times the global scales, so that h divided by them is whole, too."""
    m, n = len(case.terms[0].codes), len(case.weight.codes)
    small = lambda rows, s: torch.randint(-4, 5, (rows, rank), generator=_rng(s), device="cpu").float()
    scale = case.terms[0].gscale.expand(m)[:, None] * case.weight.gscale
    return replace(case, low_rank=LowRank((small(m, seed) * scale).bfloat16(), small(n, seed + 1).bfloat16()))


def gaussian(name: str, m: int, n: int, k: int, seed: int, terms: int = 1) -> Case:
    """What training multiplies: everything quantised as it is there, with scales of all sizes."""
    x = torch.randn(m, k, generator=_rng(seed), dtype=torch.float32, device="cpu") * row_scales(m, seed + 1)[:, None]
    if terms == 2:  # blocks of all sizes: so that the second term, under the first one's global scale, has subnormal scales, too
        x *= torch.randint(-12, 1, (1, k // 16), generator=_rng(seed + 3), device="cpu").float().exp2().repeat_interleave(16, 1)
    w = reference.quantize(torch.randn(n, k, generator=_rng(seed + 2), dtype=torch.float32, device="cpu") * 0.02, WEIGHT)
    return Case(name, reference.quantize_terms(x, None, terms), w, exact=False)


def _with_scale(q: QuantizedMatrix, row, block, byte: int) -> QuantizedMatrix:
    scales = q.scales.clone()
    scales[row, block] = byte
    return q._replace(scales=scales)


def cases() -> list[Case]:
    """The products that a GEMM must get right before it is used. |x @ w| <= 144 K with unit scales, in steps of 1/4."""
    every = torch.zeros(16, 32, dtype=torch.uint8, device="cpu")
    every[:, 0] = torch.arange(16, dtype=torch.uint8, device="cpu")
    identity = 2 * torch.eye(160, dtype=torch.uint8, device="cpu")
    m, n, k = 133, 80, 288
    x, w = codes(m, k, 1), codes(n, k, 2)
    x_scaled, w_scaled = matrix(x, powers(m, k, 3)), matrix(w, powers(n, k, 4))
    x_rows = x_scaled._replace(gscale=row_scales(m, 10))
    w_global = w_scaled._replace(gscale=torch.full((1,), 2.0**-5, dtype=torch.float32, device="cpu"))
    second = matrix(codes(m, k, 5), powers(m, k, 6))
    x_zero = _with_scale(x_scaled, slice(3, 9), slice(2, 7), 0)
    x_small, w_small = matrix(codes(7, 96, 21, SMALL)), matrix(codes(33, 96, 22, SMALL))
    x_small_rows = x_small._replace(gscale=row_scales(7, 19))
    x_subnormal = matrix(codes(9, 64, 15), powers(9, 64, 16, range(1, 8)))
    w_subnormal = matrix(codes(24, 64, 17), powers(24, 64, 18, range(1, 8)))
    x_full, w_full = (matrix(codes(r, 128, 0, [c]), powers(r, 128, 0, [0x7E])) for r, c in ((3, 7), (16, 15)))
    constant, add = integers(33, seed=13), integers(7, 33, seed=14).bfloat16()
    return [
        Case("products of all 16 x 16 codes", (matrix(every),), matrix(every)),
        Case("every k by itself", (matrix(identity),), matrix(codes(20, 160, 9))),
        Case("sums, unit scales", (matrix(x),), matrix(w)),
        Case("block scales", (x_scaled,), w_scaled),
        Case("a global scale per row", (x_rows,), w_scaled),
        Case("a global scale of the weight", (x_scaled,), w_global),
        Case("few rows", (matrix(codes(7, 96, 7)),), matrix(codes(33, 96, 8))),
        Case("one row, K = 32", (matrix(codes(1, 32, 11)),), matrix(codes(17, 32, 12))),
        Case("a constant", (x_small,), w_small, constant=constant),
        Case("accumulating", (x_small,), w_small, add=add),
        Case("a constant and a matrix added to scaled rows", (x_small_rows,), w_small, constant, add),
        low_rank(Case("a low-rank product", (x_small_rows,), w_small._replace(gscale=w_global.gscale), constant), 120, 30),
        Case("two terms", (x_scaled, second), w_scaled),
        Case("NaN scales", (_with_scale(x_scaled, 5, 3, E4M3_NAN),), _with_scale(w_scaled, 70, 16, E4M3_NAN)),
        Case("zero scales", (x_zero,), _with_scale(w_scaled, 40, slice(9, 12), 0)),
        Case("subnormal scales", (x_subnormal,), w_subnormal),
        Case("the largest codes and scales", (x_full,), w_full),
        gaussian("random values", 133, 48, 416, 20),
    ]


# ---------------------------------------------------------------------------------------------- answers


def values(q: QuantizedMatrix) -> Tensor:
    return reference.dequantize(q).double()


def expected(case: Case) -> Tensor:
    """The exact value, FP64 (M, N)."""
    w = values(case.weight)
    added = [t.double() for t in (case.constant, case.add) if t is not None]
    added += [] if case.low_rank is None else [case.low_rank.hidden.double() @ case.low_rank.up.double().T]
    return sum([values(t) @ w.T for t in case.terms] + added)


def magnitude(case: Case) -> Tensor:
    """The sum of the summands' magnitudes, (M, N): what errors of a sum are measured in."""
    w, low = values(case.weight).abs(), case.low_rank
    more = [] if low is None else [low.hidden.double().abs() @ low.up.double().abs().T]
    return sum([values(t).abs() @ w.T for t in case.terms] + more)


def run(gemm: Callable, case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The GEMM's answer, on the CPU."""
    terms = [t._replace(gscale=t.gscale.expand(t.codes.shape[0]).contiguous()) for t in case.terms]
    more = {"constant": case.constant, "add": case.add}
    operands = (terms, case.weight, more if case.low_rank is None else {**more, "low_rank": case.low_rank})
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        terms, weight, added = tree_map_only(Tensor, lambda t: t.to(device), operands)
        return gemm(terms, weight, **added, dtype=dtype).cpu()


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


def compare(case: Case, got: Tensor) -> str:
    """What is wrong with an answer, and where: the rows or columns of a tile's tail say so. Empty if nothing is."""
    exact = expected(case)
    if got.shape != exact.shape:
        return f"{case.name}: the result is {tuple(got.shape)}, expected {tuple(exact.shape)}"
    right = exact.to(got.dtype)
    wrong = _differ(got, right)
    if not case.exact:
        # rounding once: 2**-p of the value; adding up in no fewer bits than MIN_BITS: below 2**-13 of the summands' magnitudes
        error = (got.double() - exact).abs()
        wrong &= ~(error <= torch.finfo(got.dtype).eps / 2 * exact.abs() + 2.0 ** (3 - MIN_BITS) * magnitude(case))
    at = wrong.nonzero()
    if not len(at):
        return ""
    (r0, c0), (r1, c1) = at.amin(0).tolist(), at.amax(0).tolist()
    first = tuple(at[0].tolist())
    return (
        f"{case.name}: {len(at)} of {wrong.numel()} outputs wrong, in rows {r0}..{r1} of {len(got)} and columns {c0}..{c1} of "
        f"{got.shape[1]}; at {first}: {got[first].item()}, expected {right[first].item()}"
    )


# ---------------------------------------------------------------------------------------------- known mistakes


def _taken_for_swizzled(q: QuantizedMatrix) -> QuantizedMatrix:
    rows, blocks = q.scales.shape
    size = layout.swizzle_scales(q.scales).numel()
    flat = torch.cat([q.scales.flatten(), q.scales.new_zeros(size - q.scales.numel())])
    return q._replace(scales=layout.unswizzle_scales(flat, rows, blocks))


def _taken_for_linear(q: QuantizedMatrix) -> QuantizedMatrix:
    return q._replace(scales=layout.swizzle_scales(q.scales)[: q.scales.numel()].view(q.scales.shape))


def _part(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda q: q._replace(**{name: change(getattr(q, name))})


def _cut(multiple: int) -> Change:
    """Only the k below a multiple."""
    return lambda q: _with_scale(q, slice(None), slice(q.k // multiple * multiple // 16, None), 0)


def _input(change: Change) -> Callable[[Case], Case]:
    return lambda case: replace(case, terms=tuple(change(t) for t in case.terms))


def _weight(change: Change) -> Callable[[Case], Case]:
    return lambda case: replace(case, weight=change(case.weight))


def _scaled_addends(constant: bool, add: bool) -> Callable[[Case], Case]:
    """The constant, or the matrix that is added, multiplied with the rows' global scales as if it were part of the product."""

    def change(case: Case) -> Case:
        rows = case.terms[0].gscale[:, None]
        total = torch.zeros(len(case.terms[0].codes), len(case.weight.codes), device="cpu")
        for t, scaled in ((case.constant, constant), (case.add, add)):
            total = total if t is None else total + t.float() * (rows if scaled else 1.0)
        return replace(case, constant=None, add=total)

    return change


def _scales_of_another_lane(q: QuantizedMatrix) -> QuantizedMatrix:
    """A lane of a warp holds the scale of row g, another one that of row g + 8; past the last row they are zero."""
    rows, blocks = q.scales.shape
    groups = torch.cat([q.scales, q.scales.new_zeros(-rows % 16, blocks)]).view(-1, 2, 8, blocks)
    return q._replace(scales=groups[:, [1, 1]].reshape(-1, blocks)[:rows])


def _scales_of_the_first_tile(columns: int) -> Change:
    """Block scales are loaded for 128 rows of the weight at a time, of which narrower tiles use their part."""

    def change(q: QuantizedMatrix) -> QuantizedMatrix:
        row = torch.arange(len(q.scales), device="cpu")
        return q._replace(scales=q.scales[row // 128 * 128 + row % columns])

    return change


def _other_chunks(tile_k: int) -> Change:
    """The codes of a tile of ``tile_k`` lie in shared memory in chunks of 16 bytes, in each row in an order of its own, so that
    reads of a column meet no bank twice. Written without that order, and read with it."""

    def change(q: QuantizedMatrix) -> QuantizedMatrix:
        rows, width = q.codes.shape
        padded = torch.cat([q.codes, q.codes.new_zeros(rows, -width % (tile_k // 2))], dim=1).view(rows, -1, tile_k // 32, 16)
        row, chunk = torch.arange(rows, device="cpu")[:, None], torch.arange(tile_k // 32, device="cpu")
        read = chunk ^ (row // 2 % 4 if tile_k == 128 else row % 8)
        moved = padded.gather(2, read[:, None, :, None].expand_as(padded))
        return q._replace(codes=moved.reshape(rows, -1)[:, :width].contiguous())

    return change


def _of_rank(multiple: int) -> Callable[[Case], Case]:
    """Only ranks below a multiple."""

    def change(case: Case) -> Case:
        if case.low_rank is None:
            return case
        hidden, up = case.low_rank
        kept = hidden.shape[1] // multiple * multiple
        return replace(case, low_rank=LowRank(hidden[:, :kept], up[:, :kept]))

    return change


def _scaled_low_rank(case: Case) -> Case:
    if case.low_rank is None:
        return case
    hidden, scale = case.low_rank.hidden, case.terms[0].gscale[:, None] * case.weight.gscale
    return replace(case, low_rank=case.low_rank._replace(hidden=hidden.double() * scale))


_EITHER: dict[str, Change] = {
    "the two codes of a byte are swapped": lambda q: q._replace(codes=(q.codes << 4) | (q.codes >> 4)),
    "linear block scales are read as swizzled ones": _taken_for_swizzled,
    "swizzled block scales are read as linear ones": _taken_for_linear,
    "block scales are ignored": _part("scales", lambda s: torch.full_like(s, 0x38)),
    "a NaN scale counts as 0": _part("scales", lambda s: torch.where(s == E4M3_NAN, 0, s)),
    "a NaN scale counts as 448": _part("scales", lambda s: torch.where(s == E4M3_NAN, 0x7E, s)),
    "subnormal scales count as 0": _part("scales", lambda s: torch.where(s < 8, 0, s)),
    "a zero scale counts as 1": _part("scales", lambda s: torch.where(s == 0, 0x38, s)),
    "signs are ignored": lambda q: q._replace(codes=q.codes & 0x77),
    "rows g take the block scales of rows g + 8 (of another lane)": _scales_of_another_lane,
    "shared memory is read in another order than it was written (swizzle of 64 bytes)": _other_chunks(128),
    "shared memory is read in another order than it was written (swizzle of 128 bytes)": _other_chunks(256),
}
"""Of the input, of the weight, or of both."""

MISTAKES: dict[str, Callable[[Case], Case]] = {
    **{f"{name} (input)": _input(change) for name, change in _EITHER.items()},
    **{f"{name} (weight)": _weight(change) for name, change in _EITHER.items()},
    **{f"{name} (input and weight)": lambda case, c=c: _input(c)(_weight(c)(case)) for name, c in _EITHER.items()},
    **{f"what lies beyond a multiple of {m} in K is ignored": _input(_cut(m)) for m in (64, 128, 256)},
    "the rows' global scales are ignored": _input(_part("gscale", torch.ones_like)),
    "the first row's global scale is used for all rows": _input(_part("gscale", lambda g: g[:1].expand_as(g))),
    "the rows' global scales are divided by, not multiplied with": _input(_part("gscale", torch.reciprocal)),
    "the weight's global scale is ignored": _weight(_part("gscale", torch.ones_like)),
    "the weight's global scale is divided by, not multiplied with": _weight(_part("gscale", torch.reciprocal)),
    **{
        f"tiles of {n} columns take the block scales of the first one of 128 columns": _weight(_scales_of_the_first_tile(n))
        for n in (32, 64)
    },
    "the constant is ignored": lambda case: replace(case, constant=None),
    "what should be added to is ignored": lambda case: replace(case, add=None),
    "the constant and what should be added to are ignored": lambda case: replace(case, constant=None, add=None),
    "the constant is multiplied with the rows' global scales": _scaled_addends(True, False),
    "what is added to is multiplied with the rows' global scales": _scaled_addends(False, True),
    "constant and what is added to are multiplied with the rows' global scales": _scaled_addends(True, True),
    "the low-rank product is ignored": lambda case: replace(case, low_rank=None),
    "the low-rank product is multiplied with the global scales": _scaled_low_rank,
    **{f"what lies beyond a multiple of {m} in the rank is ignored": _of_rank(m) for m in (16, 32, 64)},
    "the second term is ignored": lambda case: replace(case, terms=case.terms[:1]),
    "the first term is ignored": lambda case: replace(case, terms=case.terms[1:] or case.terms),
}
"""Name -> the case whose right answer a GEMM with this mistake gives."""


def diagnose(answers: Sequence[tuple[Case, Tensor]]) -> str:
    """The known mistake that explains most of the wrong answers and contradicts none of the right ones; empty if none explains
    half. Of mistakes that explain the same (in a symmetric product, one of the input and one of the weight), the first."""
    rights = [expected(case).to(got.dtype) for case, got in answers]
    answers = [(case, got, right) for (case, got), right in zip(answers, rights) if got.shape == right.shape]
    wrong = [bool(compare(case, got)) for case, got, _ in answers]
    best, most = "", sum(wrong) / 2
    for name, change in MISTAKES.items():
        explained = 0
        for (case, got, right), bad in zip(answers, wrong):
            answer = expected(change(case)).to(got.dtype)
            concerned = _differ(got, right) | _differ(answer, right) if bad else torch.ones_like(got, dtype=torch.bool)
            fits = bool((_differ(got, answer) & concerned).sum() <= (0 if case.exact else TOLERATED) * concerned.sum())
            if not fits and not bad:
                break
            explained += fits and bad
        else:
            if explained >= most and explained > 0:
                best, most = name, explained + 1
    return best


# ---------------------------------------------------------------------------------------------- width of the sums


def sum_bits(gemm: Callable, device: torch.device) -> tuple[int, int]:
    """Significant bits of a sum: (of 64 products, which one instruction adds; of several instructions), at most 24.

    Row i adds 2**n, 1 and -2**n, n = 8 .. 27, all times a common factor, at k = 0, 16, 32 or at k = 0, 64, 128. If the 1 comes
    out, the sum had n + 1 bits or more, unless it took 2**n and -2**n first, for both places at once an odd order."""
    exponents = torch.arange(8, 28, device="cpu")
    rows, k, bits = len(exponents), 192, []
    for step in (16, 64):
        x, w = (torch.zeros(r, k, dtype=torch.uint8, device="cpu") for r in (rows, 16))
        x[:, 0], x[:, step], x[:, 2 * step] = 2, 2, 10  # 1, 1, -1
        w[:, 0], w[:, step], w[:, 2 * step] = 6, 2, 6  # 4, 1, 4
        xs, ws = powers(rows, k, 0, [0]), powers(16, k, 0, [0x38])
        for scales in (xs, ws):
            scales[:, 0] = scales[:, 2 * step // 16] = 0x78  # 256
        ones = (18 - exponents).float().exp2()  # 2**10 .. 2**-9; those above 256 need the code 4
        x[ones > 256, step] = 6
        xs[:, step // 16] = reference.e4m3_encode(torch.where(ones > 256, ones / 4, ones))
        case = Case("bits of sums", (matrix(x, xs),), matrix(w, ws))
        kept = (run(gemm, case, device) == expected(case).bfloat16()).all(dim=1)
        lost = (~kept).nonzero()
        bits.append(min(24, 1 + int(exponents[lost[0, 0]] - 1 if len(lost) else exponents[-1])))
    return tuple(bits)


def narrow_sums(bits: tuple[int, int]) -> list[str]:
    """What is wrong with sums of so many bits (of :func:`sum_bits`): one message or none."""
    if min(bits) >= MIN_BITS:
        return []
    kind = ": accumulated in BF16" if min(bits) <= 9 else ": accumulated in FP16" if min(bits) <= 12 else ""
    width = "{} significant bits within an instruction and {} across".format(*bits)
    return [f"sums have {width}, at least {MIN_BITS} are needed{kind}"]


def failures(gemm: Callable, device: torch.device) -> list[str]:
    """What is wrong with a GEMM ``gemm(terms, weight, *, constant, add, dtype) -> y`` on a device, the most telling first; empty
    if nothing is. What the GEMM raises is not caught."""
    answers = [(case, run(gemm, case, device)) for case in cases()]
    messages = [compare(*answer) for answer in answers]
    wrong = [message for message in messages if message]
    if wrong and (name := diagnose(answers)):
        return [f"{name} (seen in {len(wrong)} of {len(answers)} products)", *wrong]
    single_products_are_right = not any(messages[:2])
    return (narrow_sums(sum_bits(gemm, device)) if single_products_are_right else []) + wrong
