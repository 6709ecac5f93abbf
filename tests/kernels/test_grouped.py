"""The grouped products of a mixture's experts against the definition: operands are the same, so results differ by the order of
FP32 sums and by roundings to BF16 that are counted.

As in test_emulated.py the kernels run in Triton's interpreter on a CPU, in a process of its own, and on CUDA; the GEMM is
PyTorch's in both."""

import pytest
import torch
from _interpreter import interpreted_results
from _product_groups import BF16, close, random

from peft_nvfp4.numerics import grouped as definition
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import GRADIENT, WEIGHT, WEIGHT_BACKWARD, QuantizedMatrix
from peft_nvfp4.numerics.grouped import GroupedDgrad, GroupedFprop, route
from peft_nvfp4.ops import grouped
from peft_nvfp4.ops.core import Operator

EXPERTS = 3
SIZES = {"cpu": (8, 16), "cuda": (48, 128)}  # N, K; the interpreter's cost is per row
ROUTINGS = {  # (T, k) experts; the number 3 is one of another process
    "some": [[0, 2], [2, 0], [2, 0]],
    "one": [[1, 1]] * 2,
    "others": [[3, 1], [3, 3], [0, 3]],
    "fewer tokens than experts": [[2, 1]],
}
VARIANTS = ((2, 3, True, "bf16"), (2, 8, True, "emulated"), (1, 8, False, "bf16"), (1, 0, False, "bf16"))


def stacked(matrices) -> QuantizedMatrix:
    codes, scales, gscale = (torch.stack(t) for t in list(zip(*matrices))[:3])
    return QuantizedMatrix(codes, scales, gscale.view(-1), matrices[0].k)


def products(name, terms, rank, gathers, device, repeat=1):
    """Arguments of fprop and dgrad."""
    index = torch.tensor(ROUTINGS[name] * repeat)
    order, places, ends = (t.to(device) for t in route(index, EXPERTS))
    rows, (n, k) = len(order), SIZES[device]
    x = random(len(index) if gathers else rows, k, seed=1).to(device, BF16)
    weights = [reference.quantize(random(n, k, seed=e, scale=0.1).to(device), WEIGHT) for e in range(EXPERTS)]
    backward = stacked([reference.transpose_requantize(w, WEIGHT_BACKWARD) for w in weights])
    a = random(EXPERTS, rank, k, seed=20).to(device, BF16) if rank else None
    up = random(EXPERTS, n, rank, seed=21, scale=0.1).to(device, BF16) if rank else None
    sources = order // 2 if gathers else None
    constant = {3: BF16, 8: torch.float32}.get(rank)
    constant = None if constant is None else random(EXPERTS, n, seed=22).to(device, constant)
    forward = GroupedFprop(reference.quantize_terms(x, None, terms), sources, ends, stacked(weights), BF16, None, a, up, constant)
    dy = random(rows, n, seed=30).to(device, BF16)
    g = random(rows, rank, seed=31).to(device, BF16) if rank else None
    return forward, GroupedDgrad(dy, ends, backward, True, None, None, g, a)


def exact(p: GroupedFprop, h, rounded: bool):
    """y and the sum of magnitudes, in FP64; x~ as the sum of its terms, or that rounded to BF16."""
    x = reference.dequantize_terms(p.terms, None, BF16 if rounded else torch.float32).double()
    x = x if p.sources is None else x[p.sources]
    y, magnitude = (torch.zeros(len(x), p.weight.codes.shape[1], dtype=torch.double, device=x.device) for _ in range(2))
    for e, here in definition.segments(p.ends):
        pairs = [(x[here], reference.dequantize(definition.one(p.weight, e)).double())]
        pairs += [] if p.up is None else [(h[here].double(), p.up[e].double())]
        c = torch.zeros(1) if p.constant is None else p.constant[e].double()
        y[here] = sum(a @ b.T for a, b in pairs) + c.to(y.device)
        magnitude[here] = sum(a.abs() @ b.abs().T for a, b in pairs) + c.abs().to(y.device)
    return y, magnitude


def exact_dgrad(p: GroupedDgrad):
    dy = reference.dequantize(reference.quantize(p.dy, GRADIENT)).double() if p.quantized else p.dy.double()
    size = p.weight.codes.shape[1] if p.quantized else p.weight.k
    dx, magnitude = (torch.zeros(len(dy), size, dtype=torch.double, device=dy.device) for _ in range(2))
    for e, here in definition.segments(p.ends):
        w = reference.dequantize(definition.one(p.weight, e)).double()
        pairs = [(dy[here], w.T if p.quantized else w)]
        pairs += [] if p.g is None else [(p.g[here].double(), p.a[e].double())]
        dx[here] = sum(a @ b for a, b in pairs)
        magnitude[here] = sum(a.abs() @ b.abs() for a, b in pairs)
    return dx, magnitude


def mismatches(grouped, outer, label, forward, backward, implementation):
    """Messages about what is wrong; rows that are no expert's are not looked at."""
    wrong, count = [], int(forward.ends[-1])
    y, h = grouped.grouped_fprop(forward)
    wrong += [] if close(y[:count], *(t[:count] for t in exact(forward, h, implementation == "bf16")), 1) else [f"y {label}"]
    if forward.a is not None:
        x = reference.dequantize_terms(forward.terms, None, BF16)
        x = x if forward.sources is None else x[forward.sources]
        expected = definition.grouped_mm(x, forward.a, forward.ends)
        magnitude = definition.grouped_mm(x.abs(), forward.a.abs(), forward.ends).double()
        wrong += [] if close(h[:count], expected[:count].double(), magnitude[:count], 2) else [f"h {label}"]
    for p in (backward, backward._replace(weight=forward.weight, quantized=False, factors=forward.factors)):
        roundings = 1 if p.quantized else 3  # of dy @ D(W_f), of g @ A, and of their sum
        near = close(grouped.grouped_dgrad(p)[:count], *(t[:count] for t in exact_dgrad(p)), roundings)
        wrong += [] if near else [f"dgrad {label} {p.quantized}"]
    if forward.a is None:
        return wrong
    for x, z, sources in ((backward.dy, h, None), (backward.g, reference.dequantize(forward.terms[0], BF16), forward.sources)):
        found = outer(x, z, sources, forward.ends, torch.float32)
        arguments = x.double(), z.double(), sources, forward.ends, torch.double
        magnitude = definition.grouped_outer(x.double().abs(), z.double().abs(), *arguments[2:])
        wrong += [] if close(found, definition.grouped_outer(*arguments), magnitude, 1) else [f"outer {label}"]
    found = grouped.grouped_mm(backward.dy, forward.up.transpose(1, 2), forward.ends)
    expected = [
        definition.grouped_mm(t(backward.dy.double()), t(forward.up.double()).transpose(1, 2), forward.ends)
        for t in (lambda t: t, torch.abs)
    ]
    return wrong + ([] if close(found[:count], *(t[:count] for t in expected), 1) else [f"g {label}"])


def check(device):
    """Messages about what is wrong."""
    from types import SimpleNamespace

    from peft_nvfp4.kernels import grouped as kernels
    from peft_nvfp4.kernels.triton.grouped import grouped_outer

    names, wrong = ("choice", "has_grouped_gemm", "ROWS_OF_AN_EXPERT", "OPERAND_BYTES"), []
    before = [getattr(kernels, name) for name in names]
    by_gemm = [True] if device == "cpu" or kernels.has_grouped_gemm(torch.device("cuda", 0)) else []
    few = {"some": VARIANTS[:1], "others": VARIANTS[1:2]}  # the interpreter's cost
    for gemm in (*by_gemm, False):
        kernels.has_grouped_gemm, kernels.ROWS_OF_AN_EXPERT = lambda device: gemm, 0
        for name, variants in few.items() if device == "cpu" else dict.fromkeys(ROUTINGS, VARIANTS).items():
            for terms, rank, gathers, implementation in variants:
                kernels.choice = lambda device: SimpleNamespace(implementation=implementation, dgrad=reference.dgrad)
                kernels.OPERAND_BYTES = before[3] if rank == 3 else 1  # chunks of eight rows of every matrix
                for repeat in (1,) if device == "cpu" else (3, 60):  # few rows of an expert, and many
                    case = products(name, terms, rank, gathers, device, repeat)
                    label = f"{name} terms={terms} rank={rank} {implementation} gemm={gemm} repeat={repeat}"
                    wrong += mismatches(kernels, grouped_outer, label, *case, implementation)
    forward, backward = products("some", 1, 3, True, device)
    foreign = forward._replace(weight=forward.weight._replace(gscale=1.25 * forward.weight.gscale), factors=(1.25,) * EXPERTS)
    wrong += mismatches(kernels, grouped_outer, "foreign", foreign, backward, "emulated")
    for name, value in zip(names, before):
        setattr(kernels, name, value)
    return wrong


@pytest.mark.gpu
def test_on_cuda():
    with torch.no_grad():
        assert check("cuda") == []


def test_in_the_interpreter():
    assert interpreted_results(__file__) == []


@pytest.mark.parametrize("terms, rank, gathers", [(1, 0, False), (2, 3, True)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_definition_is_the_exact_product(name, terms, rank, gathers):
    with torch.no_grad():
        case = products(name, terms, rank, gathers, "cpu")
        assert mismatches(definition, definition.grouped_outer, name, *case, "exact") == []


def arguments(operator: str) -> tuple:
    """Of a call with every optional argument."""
    forward, backward = products("others", 2, 3, True, "cpu")
    order, places, _ = route(torch.tensor(ROUTINGS["others"]), EXPERTS)
    rows, weights = backward.dy, random(3, 2, seed=7)
    return {
        "grouped_fprop": (forward._replace(factors=(1.0,) * EXPERTS),),
        "grouped_dgrad": (backward,),
        "grouped_mm": (rows, forward.up.transpose(1, 2), forward.ends),
        "grouped_outer": (rows, random(3, 16, seed=8).to(BF16), forward.sources, forward.ends, torch.float32),
        "grouped_transpose": (forward.weight, None),
        "combine": (rows, places, weights, torch.float32),
        "spread": (random(3, 8, seed=9), weights, places, order, rows, BF16),
    }[operator]


@pytest.mark.parametrize("operator", [o for o in vars(grouped).values() if isinstance(o, Operator)], ids=lambda o: o.name)
def test_operators_pass_opcheck(operator):
    """Schema and fake shapes, and the definition's results."""
    given = arguments(operator.name)
    flat = given if operator.flatten is None else operator.flatten(*given)
    torch.library.opcheck(operator.library_operator, flat, test_utils=("test_schema", "test_faketensor"))
    with torch.no_grad():
        compiled, expected = (f(*flat) for f in (operator.library_operator, operator.flat(operator.reference)))
    pairs = zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (compiled, expected)))
    assert all(torch.equal(a, b) for a, b in pairs)


if __name__ == "__main__":
    import triton_interpreter

    triton_interpreter.report(lambda: check("cpu"))
