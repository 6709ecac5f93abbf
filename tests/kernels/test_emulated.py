"""Emulated fprop and dgrad: operands bit for bit, products against exact ones.

The kernels that lay out the operands run in Triton's interpreter on a CPU (in a process of its own, ``python test_emulated.py``,
if Triton is installed) and on CUDA; the GEMM is PyTorch's in both.
"""

import sys

import pytest
import torch
from _interpreter import run_interpreted

from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, GRADIENT, WEIGHT, WEIGHT_BACKWARD
from peft_nvfp4.numerics.products import BackwardLinear, Dgrad, ForwardLinear, Fprop, LowRank
from peft_nvfp4.ops import linear

BF16 = torch.bfloat16
GROUPS = {  # outputs and ranks of every linear; K
    "one": ([(48, (4,))], 64),
    "qkv": ([(64, (4,)), (32, (4, 3)), (32, ())], 80),
    "odd": ([(7, (3,)), (21, (2,))], 10),
    "no-adapter": ([(32, ())], 64),
}


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def group(name, terms, constant, m, device) -> tuple[Fprop, Dgrad]:
    """The products of one shared-input group."""
    linears, k = GROUPS[name]
    x = random(m, k, seed=1).to(BF16).to(device)
    forward, backward = [], []
    for i, (n, ranks) in enumerate(linears):
        w = reference.quantize(random(n, k, seed=2 + i, scale=0.1).to(device), WEIGHT)
        c = None if constant is None or i == 1 else random(n, seed=9).to(device, constant)
        adapters = [
            LowRank(random(m, r, seed=20 + i).to(BF16).to(device), random(n, r, seed=30 + i, scale=0.1).to(BF16).to(device))
            for r in ranks
        ]
        forward.append(ForwardLinear(w, c, 1.0, adapters))
        dy = random(m, 2 * n, seed=40 + i).to(BF16).to(device)[:, ::2]
        backward.append(BackwardLinear(dy, reference.quantize(reference.dequantize(w).T.contiguous(), WEIGHT_BACKWARD)))
    rank = sum(sum(ranks) for _, ranks in linears)
    g = random(m, rank, seed=50).to(BF16).to(device) if rank else None
    a = random(rank, k, seed=51).to(BF16).to(device) if rank else None
    return Fprop(reference.quantize_terms(x, None, terms), forward, BF16), Dgrad(backward, g, a)


def without_hidden(p: Fprop, a) -> Fprop:
    """The same product, which is to compute h itself."""
    linears = [item._replace(adapters=[adapter._replace(hidden=None) for adapter in item.adapters]) for item in p.linears]
    return p._replace(linears=linears, a=a)


def with_seeds(p: Dgrad) -> Dgrad:
    return p._replace(linears=[item._replace(seed=torch.tensor(i)) for i, item in enumerate(p.linears)])


def exact_fprop(p: Fprop):
    """y in FP64, and the sum of the magnitudes of what it is made of."""
    results = []
    for w, constant, _, adapters in p.linears:
        pairs = [(reference.dequantize(t).double(), reference.dequantize(w).double()) for t in p.terms]
        pairs += [(h.double(), up.double()) for h, up in adapters]
        c = 0.0 if constant is None else constant.double()
        results.append((sum(a @ b.T for a, b in pairs) + c, sum(a.abs() @ b.abs().T for a, b in pairs) + abs(c)))
    return results


def exact_dgrad(p: Dgrad):
    pairs = [
        (reference.dequantize(reference.quantize(dy, GRADIENT)).double(), reference.dequantize(w).double().T)
        for dy, w, _ in p.linears
    ]
    pairs += [] if p.g is None else [(p.g.double(), p.a.double())]
    return sum(x @ y for x, y in pairs), sum(x.abs() @ y.abs() for x, y in pairs)


def close(got, exact, magnitude, roundings):
    """BF16 (8 significant bits) rounds by at most 2**-8 of the value each time, partial sums by that of the magnitude; FP32
    accumulation of at most 400 summands by less than 2**-15 of their sum."""
    error = (got.double() - exact).abs()
    return bool((error <= 2.0**-8 * (exact.abs() + (roundings - 1) * magnitude) + 2.0**-15 * magnitude).all())


def check(device):
    """Messages about what is wrong."""
    from peft_nvfp4.kernels import emulated
    from peft_nvfp4.kernels.triton import operands

    wrong = []
    q = reference.quantize(random(7, 40).to(device), ACTIVATION)
    extra = random(7, 3, seed=3).to(BF16).to(device)
    out = torch.full((7, 90), 7.0, dtype=BF16, device=device)
    operands.write_operand(out, q, 2, extra, 4, 8)
    expected = torch.cat(
        [reference.dequantize(q, BF16)] * 2 + [torch.zeros_like(extra[:, :1])] * 4 + [extra, 0 * extra[:, :1]], 1
    )
    if not torch.equal(out[:, :88], expected) or not bool((out[:, 88:] == 7.0).all()):
        wrong.append("write_operand")
    dy = random(7, 40, seed=4).to(BF16).to(device)
    dy[3, 5] = float("nan")
    out = torch.full((7, 48), 7.0, dtype=BF16, device=device)
    operands.write_rounded(out, dy)
    rounded = reference.dequantize(reference.quantize(dy, GRADIENT), BF16)
    if not torch.equal(out[:, :40].view(torch.int16), rounded.view(torch.int16)) and not torch.allclose(
        out[:, :40].float(), rounded.float(), rtol=0, atol=0, equal_nan=True
    ):
        wrong.append("write_rounded")
    limits = emulated.ROWS, emulated.OPERAND_BYTES, emulated.SMALL_ROWS
    m = 9 if device == "cpu" else 300  # the interpreter's cost is per row
    for chunks in (False, True):
        emulated.ROWS, emulated.OPERAND_BYTES, emulated.SMALL_ROWS = (m // 2, 64, 4) if chunks else (*limits[:2], 4)
        for name in GROUPS:
            for terms, constant in ((1, None), (2, BF16), (2, torch.float32)):
                forward, backward = group(name, terms, constant, m, device)
                a, count = backward.a, len(backward.linears)
                ys = emulated.fprop(forward)
                label = f"{name} terms={terms} constant={constant} chunks={chunks}"
                if a is not None:  # h computed inside
                    *others, h = emulated.fprop(without_hidden(forward, a))
                    d = sum(reference.dequantize(t).double() for t in forward.terms)
                    wrong += [] if close(h, d @ a.double().T, d.abs() @ a.double().abs().T, 2) else [f"h {label}"]
                    split = iter(h.split([up.shape[1] for item in forward.linears for _, up in item.adapters], 1))
                    linears = [
                        item._replace(adapters=[adapter._replace(hidden=next(split)) for adapter in item.adapters])
                        for item in forward.linears
                    ]
                    exact = exact_fprop(forward._replace(linears=linears))
                    wrong += [
                        f"fprop with a {label}: y {i}" for i, (y, e) in enumerate(zip(others, exact)) if not close(y, *e, 1)
                    ]
                wrong += [
                    f"fprop {label}: y {i}" for i, (y, e) in enumerate(zip(ys, exact_fprop(forward))) if not close(y, *e, 1)
                ]
                wrong += [] if close(emulated.dgrad(backward), *exact_dgrad(backward), count) else [f"dgrad {label}"]
                stochastic = with_seeds(backward)
                dx, other = emulated.dgrad(stochastic), reference.dgrad(stochastic)
                if not close(dx, other.double(), exact_dgrad(backward)[1], count + 1):
                    wrong.append(f"stochastic dgrad {label}")
    emulated.ROWS, emulated.OPERAND_BYTES, emulated.SMALL_ROWS = limits
    return wrong


@pytest.mark.gpu
def test_on_cuda():
    with torch.no_grad():
        assert check("cuda") == []


def test_in_the_interpreter():
    run = run_interpreted(__file__)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("terms, constant", [(1, None), (2, BF16), (2, torch.float32)])
def test_the_reference_is_the_exact_product(name, terms, constant):
    with torch.no_grad():
        forward, backward = group(name, terms, constant, 9, "cpu")
        for y, exact in zip(linear.fprop(forward), exact_fprop(forward)):
            assert close(y, *exact, 1)
        assert close(linear.dgrad(backward), *exact_dgrad(backward), 1)


def test_operators_are_registered_properly():
    forward, backward = group("qkv", 2, BF16, 9, "cpu")
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = linear.fprop.flatten(without_hidden(forward, backward.a))
    torch.library.opcheck(torch.ops.peft_nvfp4.fprop.default, arguments, test_utils=checks)
    torch.library.opcheck(torch.ops.peft_nvfp4.dgrad.default, linear.dgrad.flatten(backward), test_utils=checks)


def with_first(p: Fprop, change) -> Fprop:
    return p._replace(linears=[change(p.linears[0]), *p.linears[1:]])


BAD = {
    "rows": (
        lambda item: item._replace(adapters=[LowRank(item.adapters[0].hidden[:5], item.adapters[0].up)]),
        r"h must be \(9, 4\)",
    ),
    "constant": (lambda item: item._replace(constant=torch.zeros(5)), r"a constant must be \(64,\)"),
    "weight": (lambda item: item._replace(weight=item.weight._replace(k=70)), "codes of a matrix|K="),
}


@pytest.mark.parametrize("change, message", [pytest.param(*v, id=k) for k, v in BAD.items()])
def test_wrong_arguments_are_named(change, message):
    forward, _ = group("qkv", 1, None, 9, "cpu")
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match=message):
        linear.fprop(with_first(forward, change))


if __name__ == "__main__":
    import triton_interpreter

    triton_interpreter.install()
    torch.set_num_threads(1)
    with torch.no_grad():
        found = check("cpu")
    print(*found, sep="\n")
    sys.exit(bool(found))
