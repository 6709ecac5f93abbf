"""What the Triton kernels are checked on: operators with arguments, and the comparison of a kernel with its reference.

A *case* is an operator with arguments. Its kernel and its plain-PyTorch reference get the same ones on the same device, and all
outputs must agree in every bit (any NaN equals any NaN). Used by test_triton.py.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from _assertions import DISTRIBUTIONS, SEED, sample
from _exact import exact_matrix, whole_bias
from torch import Tensor
from torch.utils._pytree import tree_map_only

from peft_nvfp4.kernels import dispatch
from peft_nvfp4.numerics import fused_reference, reference
from peft_nvfp4.numerics.formats import ACTIVATION, NVFP4Format
from peft_nvfp4.numerics.grouped import route
from peft_nvfp4.ops.core import OPERATORS

GROUPS = ("quantize", "terms", "dequantize", "transpose", "norm", "mlp", "random", "rope", "experts")
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


class Case(NamedTuple):
    group: str
    operator: str
    label: str
    make: Callable[[], tuple]  # arguments of the operator, on the CPU


# ---------------------------------------------------------------------------------------------- inputs
def awkward(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """One row or more of every distribution of tests/_assertions.py, and rows that the fast paths could get wrong: blocks whose
    scale rounds to zero and holds -0.0, saturating and barely scaled blocks, all ties of all scales in BF16."""
    names = list(DISTRIBUTIONS)
    each = max(1, -(-rows // (len(names) + 2)))  # some distributions need a row to put their outlier in
    x = [sample(name, each, k).float() for name in names]
    generator = torch.Generator().manual_seed(rows * 1000 + k)
    tiny = torch.randn(each, k, generator=generator) * 2e-4
    tiny[:, ::3] = -0.0
    tiny[:, : k // 2 : 16] = 900.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 9.0])
    ties = (
        ties[torch.randint(0, 10, (each, k), generator=generator)]
        * torch.tensor([1.0, 1.125, 1.25, 1.875]).repeat(each, k)[:, :k]
    )
    x = torch.cat([*x, tiny, ties * torch.randint(-1, 2, (each, k), generator=generator)])
    return x[torch.randperm(len(x), generator=generator)[:rows]].to(dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def weight_of_norm(k: int, dtype: torch.dtype) -> Tensor:
    """Includes zero, tiny, negative and large channels."""
    gamma = normal(k, seed=5)
    gamma[:: max(k // 7, 1)] = 0.0
    gamma[1 :: max(k // 5, 1)] = 1e-6
    gamma[2 :: max(k // 3, 1)] = 300.0
    return gamma.to(dtype)


def quantized(x: Tensor, terms: int = 1) -> list:
    return list(reference.quantize_terms(x, None, terms))


# ---------------------------------------------------------------------------------------------- cases
def _quantize_cases(rows: int, widths: tuple[int, ...]) -> Iterator[Case]:
    def make(k, dtype, rule, per_row, stochastic=False, given=None):
        seed = torch.tensor(SEED) if stochastic else None
        return awkward(rows, k, dtype), given, seed, rule, per_row, stochastic

    one = torch.tensor([2.0**-9])
    for k in widths:
        for dtype in (BF16, FP32, FP16):
            if k == widths[-1] or dtype == BF16:
                name = f"{str(dtype)[6:]} K={k}"
                yield Case("quantize", "quantize", f"max6 row {name}", lambda k=k, d=dtype: make(k, d, "max6", True))
                yield Case(
                    "quantize", "quantize", f"max6 given {name}", lambda k=k, d=dtype: make(k, d, "max6", False, False, one)
                )
    k = widths[-1]
    for dtype in (BF16, FP32):
        for rule, per_row in (("four_over_six", False), ("four_over_six", True), ("max6", False), ("mse", False)):
            label = f"{rule} {'row' if per_row else 'tensor'} {str(dtype)[6:]} K={k}"
            yield Case("quantize", "quantize", label, lambda r=rule, p=per_row, d=dtype: make(k, d, r, p))
        for per_row in (True, False):
            label = f"stochastic {'row' if per_row else 'tensor'} {str(dtype)[6:]} K={k}"
            yield Case("quantize", "quantize", label, lambda p=per_row, d=dtype: make(k, d, "max6", p, True))
    rows_given = lambda: torch.exp2(torch.arange(rows).float() % 7 - 9)  # noqa: E731
    yield Case("quantize", "quantize", f"max6 given per row K={k}", lambda: make(k, BF16, "max6", True, False, rows_given()))


def _terms_cases(rows: int, widths: tuple[int, ...]) -> Iterator[Case]:
    def make(k, dtype, terms, centred):
        return awkward(rows, k, dtype), normal(k, seed=3) if centred else None, terms

    for k in widths:
        for dtype, terms, centred in ((BF16, 1, False), (BF16, 2, False), (BF16, 2, True), (FP32, 2, False)):
            if k == widths[-1] or dtype == BF16 and not centred:
                label = f"{terms} term(s){' centred' if centred else ''} {str(dtype)[6:]} K={k}"
                yield Case("terms", "quantize_terms", label, lambda a=(k, dtype, terms, centred): make(*a))


def _dequantize_cases(rows: int, widths: tuple[int, ...]) -> Iterator[Case]:
    def one(k, dtype, rule="max6", scale="row"):
        q = reference.quantize(awkward(rows, k, FP32), NVFP4Format(rule, scale))
        return *q, dtype

    def two(k, dtype, terms, centred):
        parts = quantized(awkward(rows, k, FP32), terms)
        lists = ([p[i] for p in parts] for i in range(3))
        return *lists, normal(k, seed=3) if centred else None, k, dtype

    for k in widths:
        for dtype in (BF16, FP32, FP16):
            if k == widths[-1] or dtype == BF16:
                yield Case("dequantize", "dequantize", f"{str(dtype)[6:]} K={k}", lambda a=(k, dtype): one(*a))
        yield Case("dequantize", "dequantize_terms", f"2 terms centred K={k}", lambda k=k: two(k, BF16, 2, True))
    yield Case("dequantize", "dequantize", f"tensor scale K={k}", lambda: one(k, BF16, "mse", "tensor"))
    yield Case("dequantize", "dequantize_terms", f"2 terms K={k}", lambda: two(k, BF16, 2, False))


def _transpose_cases(shapes: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    for n, k in shapes:
        make = lambda n=n, k=k: (*reference.quantize(awkward(n, k, FP32), NVFP4Format()), 1.0)  # noqa: E731
        yield Case("transpose", "transpose_requantize", f"{n}x{k}", make)
    n, k = shapes[0]
    each = lambda: [reference.quantize(awkward(n, k, FP32) * 2.0**e, NVFP4Format()) for e in (0, -3)]  # noqa: E731
    stack = lambda: (*(torch.stack(t) for t in list(zip(*each()))[:2]), torch.cat([q.gscale for q in each()]))  # noqa: E731
    yield Case("transpose", "grouped_transpose", f"two of {n}x{k}", lambda: (*stack(), k, None))


def _norm_cases(rows: int, widths: tuple[int, ...]) -> Iterator[Case]:
    def forward(k, dtype, plus_one, terms, centred):
        x = awkward(rows, k, dtype)
        gamma = weight_of_norm(k, FP32 if plus_one else dtype)
        return x, gamma, normal(k, seed=3) if centred else None, 1e-5, plus_one, terms

    def backward(k, dtype, plus_one, terms, centred):
        x, gamma, offset, *rest = forward(k, dtype, plus_one, terms, centred)
        x = torch.where(x.isfinite(), x, 1.0).clamp(-1e4, 1e4)  # statistics as they are in training; dy stays awkward
        out = fused_reference.rmsnorm_quantize(x, gamma, offset, *rest)
        lists = ([p[i] for p in out.parts] for i in range(3))
        return awkward(rows, k, dtype), *lists, offset, gamma, out.rstd, plus_one

    for k in widths:
        variants = ((k, BF16, False, 1, False), (k, BF16, False, 2, False), (k, BF16, True, 2, True), (k, FP32, False, 1, False))
        for a in variants:
            if k == widths[-1] or a[1] == BF16 and not a[4]:
                label = f"{str(a[1])[6:]}{' plus_one' if a[2] else ''} {a[3]} term(s){' centred' if a[4] else ''} K={k}"
                yield Case("norm", "rmsnorm_quantize", label, lambda a=a: forward(*a))
                yield Case("norm", "rmsnorm_backward", label, lambda a=a: backward(*a))


def _mlp_cases(rows: int, widths: tuple[int, ...]) -> Iterator[Case]:
    def forward(k, dtype, act, terms, centred):
        keep_h = terms == 1 or centred  # False once, with two terms
        offset = normal(k, seed=3) if centred else None
        return awkward(rows, k, dtype), normal(rows, k, seed=2, dtype=dtype), offset, act, terms, keep_h

    def backward(k, dtype, act):
        gate, up = (reference.quantize(t, ACTIVATION) for t in forward(k, FP32, act, 1, False)[:2])
        return awkward(rows, k, dtype), *gate[:3], *up[:3], act

    def values(k, dtype, act, terms, centred):
        gate, up, offset, *_ = forward(k, dtype, act, terms, centred)
        gate, up = (reference.quantize(t, ACTIVATION) for t in (gate, up))
        return *gate[:3], *up[:3], offset, act, terms, k, dtype

    for k in widths:
        variants = (
            (k, BF16, "silu", 1, False),
            (k, BF16, "gelu_tanh", 2, False),
            (k, BF16, "silu", 2, True),
            (k, FP32, "silu", 1, False),
        )
        for a in variants:
            if k == widths[-1] or a[1:] == (BF16, "silu", 1, False):
                label = f"{a[2]} {str(a[1])[6:]} {a[3]} term(s){' centred' if a[4] else ''} K={k}"
                yield Case("mlp", "silu_mul_quantize", label, lambda a=a: forward(*a))
                yield Case("mlp", "gated_values", label, lambda a=a: values(*a))
        for a in ((k, BF16, "silu"), (k, BF16, "gelu_tanh"), (k, FP32, "silu")):
            if k == widths[-1] or a[1:] == (BF16, "silu"):
                label = f"{a[2]} {str(a[1])[6:]} K={k}"
                yield Case("mlp", "silu_mul_backward", label, lambda a=a: backward(*a))


def _random_cases(rows: int, widths: tuple[int, ...]) -> Iterator[Case]:
    for k in widths:
        for dtype in (BF16, FP32):
            make = lambda k=k, dtype=dtype: (awkward(rows, k, dtype), 0.1, torch.tensor(SEED))  # noqa: E731
            yield Case("random", "dropout", f"{str(dtype)[6:]} {rows}x{k}", make)


def _rope_cases(rows: int, widths: tuple[int, ...]) -> Iterator[Case]:
    """``rows`` tokens of ``widths`` values per head. ``order``: of q's storage, slowest dimension first; k has the reverse.
    ``part`` = 2: rows of q and k are half of wider ones."""

    def values(heads, order, d, dtype, part=1):
        x = awkward(2 * heads * rows, part * d, dtype)
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(heads))]
        x[::5] = (x[::5].float() * 2.0**-120).to(dtype)  # products and sums below the normal numbers
        sizes = {"B": 2, "H": heads, "S": rows}
        return x[:, :d].unflatten(0, [sizes[axis] for axis in order]).permute(*(order.index(axis) for axis in "BHS"), 3)

    def make(d, dtype, order, batch, backward, with_k=True, part=1):
        angles = normal(batch, rows, d, seed=4, scale=20.0)  # both halves differ, unlike in most models
        cos, sin = (f(angles).to(dtype) for f in (torch.cos, torch.sin))
        q, k = values(3, order, d, dtype, part), values(2, order[::-1], d, dtype, part)
        return q, k if with_k else None, cos, sin, backward

    for d in widths:
        for backward in (False, True):
            name = "backward" if backward else "forward"
            yield Case("rope", "rotary_embedding", f"{name} BF16 D={d}", lambda a=(d, BF16, "BSH", 1, backward): make(*a))
            if d == widths[-1]:
                for dtype in (FP32, FP16):
                    label = f"{name} {str(dtype)[6:]} D={d}"
                    yield Case("rope", "rotary_embedding", label, lambda a=(d, dtype, "BSH", 2, backward): make(*a))
                label = f"{name} heads before tokens D={d}"
                yield Case("rope", "rotary_embedding", label, lambda a=(d, BF16, "BHS", 2, backward): make(*a))
                label = f"{name} q alone, rows apart D={d}"
                yield Case("rope", "rotary_embedding", label, lambda a=(d, BF16, "BSH", 1, backward, False, 2): make(*a))


def _experts_cases(rows: int, widths: tuple[int, ...]) -> Iterator[Case]:
    """``rows`` tokens with two of five experts each, the last one of another process. Odd numbers, and weights that are powers
    of two: every partial sum is exact, so that its order does not show."""

    def whole(*shape, dtype, seed):
        return (2 * torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed)) + 1).to(dtype)

    def routed(dtype):
        generator = torch.Generator().manual_seed(rows)
        index = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(rows)])
        weights = torch.exp2(torch.randint(-3, 1, index.shape, generator=generator).float()).to(dtype)
        return route(index, 4), weights

    def combine(n, dtype, weighted, to):
        (_, places, _), weights = routed(weighted or FP32)
        return whole(2 * rows, n, dtype=dtype, seed=1), places, weights if weighted else None, to

    def spread(n, dtype, weighted, with_rows):
        (order, places, _), weights = routed(weighted)
        x = whole(2 * rows, n, dtype=dtype, seed=1) if with_rows else None
        return whole(rows, n, dtype=dtype, seed=2), weights, places, order, x, dtype

    def outer(m, n, gathers, dtype):
        (order, _, ends), _ = routed(FP32)
        y = whole(rows if gathers else 2 * rows, n, dtype=BF16, seed=2)
        return whole(2 * rows, m, dtype=BF16, seed=1), y, order // 2 if gathers else None, ends, dtype

    for n in widths:
        for dtype, weighted, to in ((BF16, BF16, BF16), (BF16, FP32, BF16), (BF16, None, BF16), (FP32, FP32, FP32)):
            label = f"{str(dtype)[6:]} weights {weighted} N={n}"
            yield Case("experts", "combine", label, lambda a=(n, dtype, weighted, to): combine(*a))
            if weighted:
                for with_rows in (False, True):
                    yield Case("experts", "spread", label, lambda a=(n, dtype, weighted, with_rows): spread(*a))
        for m, k, gathers, dtype in ((3, n, True, FP32), (n, 16, False, FP32), (n, 24, False, BF16)):
            label = f"{m}x{k} {str(dtype)[6:]}"
            yield Case("experts", "grouped_outer", label, lambda a=(m, k, gathers, dtype): outer(*a))


def _matmul_cases(rows: int, weights: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """Products whose every partial sum is exact (see _exact.py), so that their order does not show: up to ``rows`` rows,
    for each of the kernels."""

    def make(m, n, k, dtype, terms, with_values, bias):
        xs, w = [exact_matrix(m, k, True, seed) for seed in range(terms)], exact_matrix(n, k, False, 9)
        values = reference.dequantize(xs[0]).to(dtype) if with_values else None
        return xs, w, whole_bias(n, bias), dtype, values

    for n, k in weights:
        for m in [*(m for m in (1, 3, 16, 33) if m < rows), rows]:
            for dtype, terms, with_values, bias in ((BF16, 1, True, None), (BF16, 2, False, BF16), (FP32, 1, False, FP32)):
                label = f"{terms} term(s){' values' if with_values else ''}{' bias' if bias else ''} {str(dtype)[6:]} {m}x{n}x{k}"
                a = (m, n, k, dtype, terms, with_values, bias)
                yield Case("matmul", "matmul", label, lambda a=a: make(*a))


def cases(group: str, rows: int, widths: tuple[int, ...], weights: tuple[tuple[int, int], ...]) -> list[Case]:
    """All cases of a group. The last width gets every variant, the others the common ones."""
    if group == "transpose":
        return list(_transpose_cases(weights))
    if group == "matmul":
        return list(_matmul_cases(rows, weights or ((50, widths[-1]),)))
    make = {"quantize": _quantize_cases, "terms": _terms_cases, "dequantize": _dequantize_cases, "norm": _norm_cases}
    make |= {"mlp": _mlp_cases, "random": _random_cases, "rope": _rope_cases, "experts": _experts_cases}
    return list(make[group](rows, widths))


# ---------------------------------------------------------------------------------------------- comparison
def difference(got: Tensor, expected: Tensor) -> tuple[int, str]:
    """(elements that differ, the first of them); -1 where dtype or shape do."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return -1, f"{got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    got, expected = got.contiguous(), expected.to(got.device).contiguous()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    wrong = got.view(integer) != expected.view(integer)
    if got.dtype.is_floating_point:
        wrong &= ~(got.isnan() & expected.isnan())
    count = int(wrong.sum())
    at = tuple(wrong.nonzero()[0].tolist()) if count else ()
    return count, f"{at}: {got[at].item()}, expected {expected[at].item()}" if count else ""


def kernel_and_reference(operator: str) -> tuple[Callable, Callable]:
    """The Triton implementation of an operator, or of one product, and the reference, both with the schema's arguments."""
    if operator == "matmul":
        from peft_nvfp4.kernels.triton import matmul

        return matmul.matmul, reference.matmul
    operator = OPERATORS[operator]
    return operator.flat(dispatch.triton_kernel(operator.name)), operator.flat(operator.reference)


def run_case(case: Case, device: str) -> list[str]:
    """Descriptions of the outputs in which kernel and reference differ."""
    arguments = tree_map_only(Tensor, lambda t: t.to(device), case.make())
    with torch.no_grad():
        got, expected = (function(*arguments) for function in kernel_and_reference(case.operator))
    if isinstance(got, Tensor):
        got, expected = (got,), (expected,)
    assert len(got) == len(expected)
    found = [(i, *difference(g, e)) for i, (g, e) in enumerate(zip(got, expected))]
    return [f"{case.operator} {case.label}: output {i}: {n} of {got[i].numel()} differ, {text}" for i, n, text in found if n]


ON_GPU = {  # group -> rows, widths, weights; rows of 33 BF16 values are no pairs: they take the way of FP32 rows
    "quantize": (200, (10, 33, 576, 1000, 2048, 8192), ()),
    "terms": (200, (10, 33, 576, 1000, 2048, 8192), ()),
    "dequantize": (200, (10, 33, 576, 1000, 2048, 8192), ()),
    "transpose": (0, (), ((1000, 576), (8192, 2048), (2048, 8192), (10, 40))),
    "norm": (200, (10, 33, 576, 1000, 2048, 8192), ()),
    "mlp": (200, (10, 33, 576, 1000, 2048, 8192), ()),
    "random": (200, (1000, 2048), ()),
    "rope": (200, (10, 80, 96, 128, 256, 64), ()),
    "experts": (300, (10, 200, 1000, 2048), ()),
    "matmul": (64, (), ((1000, 576), (2048, 1008), (130, 10), (50, 4096))),
}
