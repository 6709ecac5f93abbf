"""Checks of an FP4 matrix product and of fprop and dgrad over it, for :mod:`conformance`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ...kernels.fp4 import check, native
from ...kernels.fp4.check import Case
from ...numerics import reference
from ...numerics.formats import ACTIVATION, GRADIENT, GRADIENT_STOCHASTIC, WEIGHT, WEIGHT_BACKWARD, QuantizedMatrix
from ...numerics.products import BackwardLinear, Dgrad, ForwardLinear, Fprop, LowRank
from .results import FAILED, Noticed, Result, checked, require

LAYER = (40, 48), (512, 2048)
"""Rows and outputs of a product of the size of a layer: on a CPU, on a GPU."""
TAILS = [(m, n, k) for m in (1, 127, 129, 260) for n in (8, 33, 136) for k in (32, 96, 160, 416)]


def tails_of_tiles(gemm: Callable, device: torch.device) -> str:
    """In M, N and K; exact."""
    for i, (m, n, k) in enumerate(TAILS):
        x = check.matrix(check.codes(m, k, i), check.powers(m, k, i + 1))
        w = check.matrix(check.codes(n, k, i + 2), check.powers(n, k, i + 3))
        case = Case(f"M={m} N={n} K={k}", (x,), w)
        wrong = check.compare(case, check.run(gemm, case, device))
        require(not wrong, wrong)
    return f"{len(TAILS)} shapes"


def the_same_bits_again(gemm: Callable, device: torch.device) -> str:
    case = check.gaussian("", *LAYER[device.type == "cuda"], 2048, 7)
    first = check.run(gemm, case, device)
    for _ in range(4):
        require(torch.equal(first, check.run(gemm, case, device)), "the same product gave other bits when it was computed again")
    return "5 runs"


def poisoned(t: Tensor, before: int = 512) -> tuple[Tensor, Tensor]:
    """(a copy of t, the memory that it lies in): around it are bytes that are NaN as scales and as floats."""
    size = t.numel() * t.element_size()
    memory = torch.full((before + size + 4096,), 0x7F, dtype=torch.uint8, device=t.device)
    inside = memory[before : before + size].view(t.dtype).view(t.shape)
    inside.copy_(t)
    return inside, memory


def bounds_and_padding(gemm: Callable, device: torch.device) -> str:
    """Operands and output lie among NaN, and memory that was freed is full of NaN: what a kernel reads or writes outside
    shows."""
    x, w = check.matrix(check.codes(131, 96, 1)), check.matrix(check.codes(40, 96, 2))
    x = x._replace(gscale=check.row_scales(131, 3))
    right = check.expected(Case("", (x,), w)).bfloat16()
    inside = [QuantizedMatrix(*(poisoned(t.to(device))[0] for t in q[:3]), q.k) for q in (x, w)]
    out, memory = poisoned(torch.zeros(131, 40, dtype=torch.bfloat16, device=device))
    freed = [torch.full((1 << p,), 0x7F, dtype=torch.uint8, device=device) for p in range(9, 24)]
    del freed
    with torch.no_grad():
        got = gemm([inside[0]], inside[1], out=out)
    require(torch.equal(got.cpu(), right), "the result depends on memory outside of the operands (padding that is not zero?)")
    require(torch.equal(out.cpu(), right), "the result was not written where it was asked for")
    around = torch.cat([memory[:512], memory[512 + out.nbytes :]])
    require(bool((around == 0x7F).all()), "memory outside of the output was written to")
    return "nothing outside of operands and output was used"


def width_of_sums(gemm: Callable, device: torch.device) -> str:
    bits = check.sum_bits(gemm, device)
    detail = f"{bits[0]} significant bits among the products of one instruction, {bits[1]} across (FP32: 24)"
    require(not check.narrow_sums(bits), "".join(check.narrow_sums(bits)))
    if min(bits) < check.EXACT_BITS:
        raise Noticed(detail + ": fewer than the exact checks count on")
    return detail


def gemm_checks(group: str, gemms: native.Gemms, device: torch.device) -> Iterator[Result]:
    """Everything about an FP4 matrix product, without and with what surrounds it."""
    gemm = native.single(gemms)
    answers: list[tuple[Case, Tensor]] = []

    def known(case: Case) -> str:
        answers.append((case, check.run(gemm, case, device)))
        wrong = check.compare(*answers[-1])
        require(not wrong, wrong.removeprefix(f"{case.name}: "))
        return "the correctly rounded value, bit for bit" if case.exact else "within one rounding"

    for case in check.cases():
        yield checked(group, known, case, name=case.name)
    if name := check.diagnose(answers):
        yield Result(group, "what is wrong", FAILED, name)
    # beyond those by which an implementation is chosen; the second term's scales are far smaller, and subnormal in part
    for case in (
        check.gaussian("two terms of random values", 133, 48, 416, 5, terms=2),
        check.gaussian("the size of a layer", *LAYER[device.type == "cuda"], 2048, 6),
    ):
        yield checked(group, known, case, name=case.name)
    for further in (width_of_sums, tails_of_tiles, the_same_bits_again, bounds_and_padding):
        yield checked(group, further, gemm, device)
    yield from product_checks(group, partial(native.fprop, gemms), partial(native.dgrad, gemms), device)


M, K, OUTPUTS, RANK = 131, 160, (96, 40, 40), 8


def _random(*shape: int, seed: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu") * scale).bfloat16().to(device)


def _within(got: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], roundings: int, what: str) -> None:
    """got is the sum of a @ b.T over the pairs. BF16 rounds by at most 2**-8 of the value each time; 2**-13 of
    the magnitudes: the order, and the width, of sums."""
    pairs = [(a.cpu().double(), b.cpu().double()) for a, b in pairs]
    right, magnitude = sum(a @ b.T for a, b in pairs), sum(a.abs() @ b.abs().T for a, b in pairs)
    got = got.cpu().double()
    excess = (got - right).abs() - (2.0**-8 * (right.abs() + (roundings - 1) * magnitude) + 2.0**-13 * magnitude)
    at = tuple((excess == excess.nan_to_num(torch.inf).max()).nonzero()[0].tolist())
    message = f"{what}: off by more than its roundings, at {at}: {got[at]:.6g}, expected {right[at]:.6g}"
    require(bool((excess <= 0).all()), message)


def fprop_with_lora(fprop: Callable, device: torch.device) -> str:
    x = _random(M, K, seed=1, device=device).float()
    first = reference.quantize(x, ACTIVATION)
    terms = [first, reference.quantize(x - reference.dequantize(first), ACTIVATION, gscale=first.gscale)]
    weights = [reference.quantize(_random(n, K, seed=2 + i, device=device, scale=0.1), WEIGHT) for i, n in enumerate(OUTPUTS)]
    constants = [_random(OUTPUTS[0], seed=7, device=device).float(), None, _random(OUTPUTS[2], seed=8, device=device)]
    ups = [_random(n, RANK, seed=10 + i, device=device, scale=0.1) for i, n in enumerate(OUTPUTS[:2])]
    hidden = [_random(M, RANK, seed=20 + i, device=device) for i in range(2)]
    adapters = [[LowRank(hidden[0], ups[0])], [LowRank(hidden[1], ups[1])], []]
    linears = [ForwardLinear(w, c, 1.0, low_rank) for w, c, low_rank in zip(weights, constants, adapters)]
    for parts in (terms[:1], terms):
        with torch.no_grad():
            ys = fprop(Fprop(parts, linears, torch.bfloat16))
        for i, (y, w, constant) in enumerate(zip(ys, weights, constants)):
            pairs = [(reference.dequantize(p), reference.dequantize(w)) for p in parts]
            pairs += [(hidden[i], ups[i])] if i < 2 else []
            pairs += [] if constant is None else [(torch.ones(M, 1, device=constant.device), constant[:, None])]
            _within(y, pairs, 2, f"{len(parts)} terms, linear {i}")
    return "one and two terms, constants"


def dgrad_with_lora(dgrad: Callable, device: torch.device) -> str:
    dys = [_random(M, n, seed=30 + i, device=device, scale=2.0**-6) for i, n in enumerate(OUTPUTS)]
    dense = [_random(K, n, seed=40 + i, device=device, scale=0.1) for i, n in enumerate(OUTPUTS)]
    weights = [reference.quantize(w, WEIGHT_BACKWARD) for w in dense]
    g, a = _random(M, RANK, seed=50, device=device, scale=2.0**-6), _random(RANK, K, seed=51, device=device)
    for seeds in ([None] * 3, [torch.tensor(i, device=device) for i in range(3)]):
        with torch.no_grad():
            dx = dgrad(Dgrad([BackwardLinear(*linear) for linear in zip(dys, weights, seeds)], g, a))
        rounding, fmt = ("to nearest", GRADIENT) if seeds[0] is None else ("stochastically", GRADIENT_STOCHASTIC)
        rounded = [reference.dequantize(reference.quantize(dy, fmt, seed=seed)) for dy, seed in zip(dys, seeds)]
        _within(dx, [*zip(rounded, map(reference.dequantize, weights)), (g, a.T)], 4, rounding)
    return "to nearest and stochastically"


def product_checks(group: str, fprop: Callable, dgrad: Callable, device: torch.device) -> Iterator[Result]:
    """The operators ``fprop`` and ``dgrad`` of an implementation."""
    yield checked(group, fprop_with_lora, fprop, device)
    yield checked(group, dgrad_with_lora, dgrad, device)
