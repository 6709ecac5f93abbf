"""Whether an FP4 GEMM computes what it should: small products with known answers, and names for the ways to be wrong.

A capability number does not tell whether FP4 works (a binary without code for the GPU, a driver or a library too old, scales in
another layout). So a GEMM is tried: every case (:mod:`known_products`) is a product whose exact value is known (in FP64, on the
CPU), most of them chosen so that every partial sum is exact in 20 bits; then the only right answer is the correctly rounded one,
bit for bit. A wrong answer is compared with the answers of :data:`MISTAKES`, and the one that fits is named.

:func:`failures` is what chooses a tier (:mod:`tiers`), and is part of ``peft-nvfp4 doctor``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...numerics import layout, reference
from ...numerics.formats import E4M3_NAN, QuantizedMatrix
from .known_products import Case, cases, expected, magnitude, matrix

MIN_BITS = 16
"""Significant bits that sums must have. Tensor cores need not have FP32's 24 (SM120's FP8 instruction was seen to have about
21, the last ones cut off); BF16 has 8, FP16 11, and with them sums would be no better than the inputs."""

# ---------------------------------------------------------------------------------------------- answers


def run(gemm: Callable, case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The GEMM's answer, on the CPU."""

    def there(q: QuantizedMatrix, rows: bool) -> QuantizedMatrix:
        g = q.gscale.expand(q.codes.shape[0]).contiguous() if rows else q.gscale
        return QuantizedMatrix(q.codes.to(device), q.scales.to(device), g.to(device), q.k)

    constant, add = (None if t is None else t.to(device) for t in (case.constant, case.add))
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        terms = [there(t, rows=True) for t in case.terms]
        return gemm(terms, there(case.weight, rows=False), constant=constant, add=add, dtype=dtype).cpu()


def compare(case: Case, got: Tensor) -> str:
    """What is wrong with an answer; empty if nothing is."""
    exact = expected(case)
    if got.shape != exact.shape:
        return f"{case.name}: the result is {tuple(got.shape)}, expected {tuple(exact.shape)}"
    right = exact.to(got.dtype)
    wrong = _differ(got, right)
    if not case.exact:
        # rounding once: 2**-p of the value; adding up in no fewer bits than MIN_BITS: below 2**-13 of the summands' magnitudes
        error = (got.double() - exact).abs()
        wrong &= ~(error <= torch.finfo(got.dtype).eps / 2 * exact.abs() + 2.0 ** (3 - MIN_BITS) * magnitude(case))
    return f"{case.name}: {_where(got, right, wrong)}" if bool(wrong.any()) else ""


def _where(got: Tensor, right: Tensor, wrong: Tensor) -> str:
    """Which outputs are wrong: if they are those of a tile's tail, the rows or columns say so."""
    at = wrong.nonzero()
    (r0, c0), (r1, c1) = at.amin(0).tolist(), at.amax(0).tolist()
    first = tuple(at[0].tolist())
    return (
        f"{len(at)} of {wrong.numel()} outputs wrong, in rows {r0}..{r1} of {len(got)} and columns {c0}..{c1} of {got.shape[1]}; "
        f"at {first}: {got[first].item()}, expected {right[first].item()}"
    )


# ---------------------------------------------------------------------------------------------- known mistakes


def _swapped(q: QuantizedMatrix) -> QuantizedMatrix:
    return q._replace(codes=(q.codes << 4) | (q.codes >> 4))


def _taken_for_swizzled(q: QuantizedMatrix) -> QuantizedMatrix:
    rows, blocks = q.scales.shape
    size = layout.swizzle_scales(q.scales).numel()
    flat = torch.cat([q.scales.flatten(), q.scales.new_zeros(size - q.scales.numel())])
    return q._replace(scales=layout.unswizzle_scales(flat, rows, blocks))


def _taken_for_linear(q: QuantizedMatrix) -> QuantizedMatrix:
    return q._replace(scales=layout.swizzle_scales(q.scales)[: q.scales.numel()].view(q.scales.shape))


def _scales(change: Callable[[Tensor], Tensor]) -> Callable[[QuantizedMatrix], QuantizedMatrix]:
    return lambda q: q._replace(scales=change(q.scales))


def _cut(multiple: int) -> Callable[[QuantizedMatrix], QuantizedMatrix]:
    """Only the k below a multiple."""

    def cut(q: QuantizedMatrix) -> QuantizedMatrix:
        scales = q.scales.clone()
        scales[:, q.k // multiple * multiple // 16 :] = 0
        return q._replace(scales=scales)

    return cut


_EITHER: dict[str, Callable[[QuantizedMatrix], QuantizedMatrix]] = {
    "the two codes of a byte are swapped": _swapped,
    "linear block scales are read as swizzled ones": _taken_for_swizzled,
    "swizzled block scales are read as linear ones": _taken_for_linear,
    "block scales are ignored": _scales(lambda s: torch.full_like(s, 0x38)),
    "a NaN scale counts as 0": _scales(lambda s: torch.where(s == E4M3_NAN, 0, s)),
    "a NaN scale counts as 448": _scales(lambda s: torch.where(s == E4M3_NAN, 0x7E, s)),
    "subnormal scales count as 0": _scales(lambda s: torch.where(s < 8, 0, s)),
    "a zero scale counts as 1": _scales(lambda s: torch.where(s == 0, 0x38, s)),
    "signs are ignored": lambda q: q._replace(codes=q.codes & 0x77),
}
"""Of the input, of the weight, or of both."""


def _terms(change: Callable[[QuantizedMatrix], QuantizedMatrix]) -> Callable[[Case], Case]:
    return lambda case: replace(case, terms=tuple(change(t) for t in case.terms))


def _weight(change: Callable[[QuantizedMatrix], QuantizedMatrix]) -> Callable[[Case], Case]:
    return lambda case: replace(case, weight=change(case.weight))


def _both(change: Callable[[QuantizedMatrix], QuantizedMatrix]) -> Callable[[Case], Case]:
    return lambda case: _terms(change)(_weight(change)(case))


def _gscale(change: Callable[[Tensor], Tensor]) -> Callable[[QuantizedMatrix], QuantizedMatrix]:
    return lambda q: q._replace(gscale=change(q.gscale))


def _scaled_addends(constant: bool, add: bool) -> Callable[[Case], Case]:
    """The constant, or the matrix that is added, multiplied with the rows' global scales as if it were part of the product."""

    def change(case: Case) -> Case:
        rows = case.terms[0].gscale[:, None]
        other = torch.zeros(len(case.terms[0].codes), len(case.weight.codes), device="cpu")
        other = other if case.constant is None else other + case.constant * (rows if constant else 1.0)
        other = other if case.add is None else other + case.add.float() * (rows if add else 1.0)
        return replace(case, constant=None, add=other)

    return change


MISTAKES: dict[str, Callable[[Case], Case]] = {
    **{f"{name} (input)": _terms(change) for name, change in _EITHER.items()},
    **{f"{name} (weight)": _weight(change) for name, change in _EITHER.items()},
    **{f"{name} (input and weight)": _both(change) for name, change in _EITHER.items()},
    **{f"what lies beyond a multiple of {m} in K is ignored": _terms(_cut(m)) for m in (64, 128, 256)},
    "the rows' global scales are ignored": _terms(_gscale(torch.ones_like)),
    "the first row's global scale is used for all rows": _terms(_gscale(lambda g: g[:1].expand_as(g))),
    "the rows' global scales are divided by, not multiplied with": _terms(_gscale(torch.reciprocal)),
    "the weight's global scale is ignored": _weight(_gscale(torch.ones_like)),
    "the weight's global scale is divided by, not multiplied with": _weight(_gscale(torch.reciprocal)),
    "the constant is ignored": lambda case: replace(case, constant=None),
    "what should be added to is ignored": lambda case: replace(case, add=None),
    "the constant and what should be added to are ignored": lambda case: replace(case, constant=None, add=None),
    "the constant is multiplied with the rows' global scales": _scaled_addends(True, False),
    "what is added to is multiplied with the rows' global scales": _scaled_addends(False, True),
    "constant and what is added to are multiplied with the rows' global scales": _scaled_addends(True, True),
    "the second term is ignored": lambda case: replace(case, terms=case.terms[:1]),
    "the first term is ignored": lambda case: replace(case, terms=case.terms[1:] or case.terms),
}
"""Name -> the case whose right answer a GEMM with this mistake gives."""


TOLERATED = 0.02
"""Share of the outputs of an inexact case that may differ by their rounding, which depends on the order of the sum."""


def diagnose(answers: Sequence[tuple[Case, Tensor]]) -> str:
    """The known mistake that explains most of the wrong answers and contradicts none of the right ones; empty if none explains
    half.

    Of mistakes that explain the same (in a symmetric product, one of the input and one of the weight), the first.
    """
    answers = [(case, got) for case, got in answers if got.shape == expected(case).shape]
    wrong = [bool(compare(*answer)) for answer in answers]
    best, most = "", sum(wrong) / 2
    for name, change in MISTAKES.items():
        explained = 0
        for (case, got), bad in zip(answers, wrong):
            right, answer = (expected(c).to(got.dtype) for c in (case, change(case)))
            concerned = _differ(got, right) | _differ(answer, right) if bad else torch.ones_like(got, dtype=torch.bool)
            fits = bool((_differ(got, answer) & concerned).sum() <= (0 if case.exact else TOLERATED) * concerned.sum())
            if not fits and not bad:
                break
            explained += fits and bad
        else:
            if explained >= most and explained > 0:
                best, most = name, explained + 1
    return best


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


# ---------------------------------------------------------------------------------------------- width of the sums


def sum_bits(gemm: Callable, device: torch.device) -> tuple[int, int]:
    """Significant bits of a sum: (of 64 products, which one instruction adds; of several instructions), at most 24.

    Row i adds 2**n, 1 and -2**n, n = 8 .. 27, all times a common factor, at k = 0, 16, 32 or at k = 0, 64, 128. If the 1 comes
    out, the sum had n + 1 bits or more. (A sum of fewer bits that takes 2**n and -2**n first would be seen as wide; for both
    places at once that takes an odd order.)"""
    return _sum_bits(gemm, device, 16), _sum_bits(gemm, device, 64)


def _sum_bits(gemm: Callable, device: torch.device, step: int) -> int:
    exponents = torch.arange(8, 28, device="cpu")
    rows, k = len(exponents), 192
    x = torch.zeros(rows, k, dtype=torch.uint8, device="cpu")
    x[:, 0], x[:, step], x[:, 2 * step] = 2, 2, 10  # 1, 1, -1
    xs = torch.zeros(rows, k // 16, dtype=torch.uint8, device="cpu")
    xs[:, 0] = xs[:, 2 * step // 16] = 0x78  # 256
    ones = (18 - exponents).float().exp2()  # 2**10 .. 2**-9; those above 256 need the code 4
    x[ones > 256, step] = 6
    xs[:, step // 16] = reference.e4m3_encode(torch.where(ones > 256, ones / 4, ones))
    w = torch.zeros(16, k, dtype=torch.uint8, device="cpu")
    w[:, 0] = w[:, 2 * step] = 6  # 4 * 256
    w[:, step] = 2
    ws = torch.full((16, k // 16), 0x38, dtype=torch.uint8, device="cpu")
    ws[:, 0] = ws[:, 2 * step // 16] = 0x78
    case = Case("bits of sums", (matrix(x, xs),), matrix(w, ws))
    kept = (run(gemm, case, device) == expected(case).bfloat16()).all(dim=1)
    lost = (~kept).nonzero()
    return min(24, 1 + int(exponents[lost[0, 0]] - 1 if len(lost) else exponents[-1]))


# ---------------------------------------------------------------------------------------------- all of it


def failures(gemm: Callable, device: torch.device) -> list[str]:
    """What is wrong with a GEMM ``gemm(terms, weight, *, constant, add, dtype) -> y`` on a device, the most telling first; empty
    if nothing is.

    Raises:
        Exception: what the GEMM raises.
    """
    answers = [(case, run(gemm, case, device)) for case in cases()]
    messages = [compare(*answer) for answer in answers]
    found = [message for message in messages if message]
    if found and (name := diagnose(answers)):
        return [f"{name} (seen in {len(found)} of {len(answers)} products)", *found]
    single_products_are_right = not any(messages[:2])
    return (narrow_sums(sum_bits(gemm, device)) if single_products_are_right else []) + found


def narrow_sums(bits: tuple[int, int]) -> list[str]:
    """What is wrong with sums of so many bits (of :func:`sum_bits`): one message or none."""
    if min(bits) >= MIN_BITS:
        return []
    kind = "BF16" if min(bits) <= 9 else "FP16" if min(bits) <= 12 else ""
    return [
        f"sums have {bits[0]} significant bits within an instruction and {bits[1]} across, at least {MIN_BITS} are needed"
        + (f": accumulated in {kind}" if kind else "")
    ]
