"""Emulated fprop and dgrad: operands bit for bit, products against exact ones.

The kernels that lay out the operands run in Triton's interpreter on a CPU (in a process of its own, ``python test_emulated.py``,
if Triton is installed) and on CUDA; the GEMM is PyTorch's in both.
"""

import sys

import pytest
import torch
from _interpreter import run_interpreted

from peft_nvfp4.numerics import fused_reference, reference
from peft_nvfp4.numerics.formats import ACTIVATION, GRADIENT, WEIGHT, WEIGHT_BACKWARD, QuantizedMatrix
from peft_nvfp4.ops import linear

BF16 = torch.bfloat16
SITES = {  # outputs and ranks of every linear; K
    "one": ([(48, (4,))], 64),
    "qkv": ([(64, (4,)), (32, (4, 3)), (32, ())], 80),
    "odd": ([(7, (3,)), (21, (2,))], 10),
    "no-adapter": ([(32, ())], 64),
}


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def site(name, terms, constant, m, device):
    """Operands of one site: (fprop's arguments, dgrad's arguments)."""
    linears, k = SITES[name]
    x = random(m, k, seed=1).to(BF16).to(device)
    parts = fused_reference.quantize_terms(x, None, terms)
    weights, backward, constants, hidden, ups, owner = [], [], [], [], [], []
    for i, (n, ranks) in enumerate(linears):
        weights.append(reference.quantize(random(n, k, seed=2 + i, scale=0.1).to(device), WEIGHT))
        backward.append(reference.quantize(reference.dequantize(weights[-1]).T.contiguous(), WEIGHT_BACKWARD))
        constants.append(None if constant is None or i == 1 else random(n, seed=9).to(device, constant))
        for r in ranks:
            hidden.append(random(m, r, seed=20 + i).to(BF16).to(device))
            ups.append(random(n, r, seed=30 + i, scale=0.1).to(BF16).to(device))
            owner.append(i)
    rank = sum(h.shape[1] for h in hidden)
    dys = [random(m, 2 * n, seed=40 + i).to(BF16).to(device)[:, ::2] for i, (n, _) in enumerate(linears)]
    g = random(m, rank, seed=50).to(BF16).to(device) if rank else None
    a = random(rank, k, seed=51).to(BF16).to(device) if rank else None
    return (parts, None, weights, constants, hidden, ups, owner, None, BF16), (dys, backward, g, a)


def exact_fprop(parts, values, weights, constants, hidden, ups, owner, a, dtype):
    """y in FP64, and the sum of the magnitudes of what it is made of."""
    results = []
    for i, (w, constant) in enumerate(zip(weights, constants)):
        pairs = [(reference.dequantize(p).double(), reference.dequantize(w).double()) for p in parts]
        pairs += [(h.double(), up.double()) for h, up, of in zip(hidden, ups, owner) if of == i]
        c = 0.0 if constant is None else constant.double()
        results.append((sum(a @ b.T for a, b in pairs) + c, sum(a.abs() @ b.abs().T for a, b in pairs) + abs(c)))
    return results


def exact_dgrad(dys, weights, g, a):
    pairs = [
        (reference.dequantize(reference.quantize(dy, GRADIENT)).double(), reference.dequantize(w).double().T)
        for dy, w in zip(dys, weights)
    ]
    pairs += [] if g is None else [(g.double(), a.double())]
    return sum(x @ y for x, y in pairs), sum(x.abs() @ y.abs() for x, y in pairs)


def close(got, exact, magnitude, roundings):
    """BF16 (8 significant bits) rounds by at most 2**-8 of the value each time, partial sums by that of the magnitude; FP32
    accumulation of at most 400 summands by less than 2**-15 of their sum."""
    error = (got.double() - exact).abs()
    return bool((error <= 2.0**-8 * (exact.abs() + (roundings - 1) * magnitude) + 2.0**-15 * magnitude).all())


def packed(matrices):
    return tuple([m[i] for m in matrices] for i in range(3))


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
        for name in SITES:
            for terms, constant in ((1, None), (2, BF16), (2, torch.float32)):
                forward, (dys, weights, g, a) = site(name, terms, constant, m, device)
                parts, values, ws, constants, hidden, ups, owner, _, dtype = forward
                ys = emulated.fprop(*packed(parts), *packed(ws), constants, None, hidden, ups, owner, None, ws[0].k, dtype)
                label = f"{name} terms={terms} constant={constant} chunks={chunks}"
                if a is not None:  # h made inside
                    made = [None] * len(hidden)
                    *others, h = emulated.fprop(*packed(parts), *packed(ws), constants, None, made, ups, owner, a, ws[0].k, dtype)
                    d = sum(reference.dequantize(p).double() for p in parts)
                    wrong += [] if close(h, d @ a.double().T, d.abs() @ a.double().abs().T, 2) else [f"h {label}"]
                    split = list(h.split([up.shape[1] for up in ups], 1))
                    exact = exact_fprop(parts, None, ws, constants, split, ups, owner, None, dtype)
                    wrong += [
                        f"fprop with a {label}: y {i}" for i, (y, e) in enumerate(zip(others, exact)) if not close(y, *e, 1)
                    ]
                    back = (ups[::-1], owner[::-1], a, ws[0].k, dtype)  # branches in another order than their linears
                    turned = emulated.fprop(*packed(parts), *packed(ws), constants, None, made, *back)
                    same = linear.reference_fprop(*packed(parts), *packed(ws), constants, None, made, *back)
                    limit = [8 * y.double().abs().max() for y in same]
                    wrong += [f"turned {label}" for y, z, m8 in zip(turned, same, limit) if not close(y, z.double(), m8, 2)]
                wrong += [
                    f"fprop {label}: y {i}" for i, (y, e) in enumerate(zip(ys, exact_fprop(*forward))) if not close(y, *e, 1)
                ]
                dx = emulated.dgrad(dys, *packed(weights), [None] * len(dys), g, a, ws[0].k)
                wrong += [] if close(dx, *exact_dgrad(dys, weights, g, a), len(dys)) else [f"dgrad {label}"]
                seeds = [torch.tensor(i) for i in range(len(dys))]
                dx = emulated.dgrad(dys, *packed(weights), seeds, g, a, ws[0].k)
                other = linear.reference_dgrad(dys, *packed(weights), seeds, g, a, ws[0].k)
                if not close(dx, other.double(), exact_dgrad(dys, weights, g, a)[1], len(dys) + 1):
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


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("terms, constant", [(1, None), (2, BF16), (2, torch.float32)])
def test_the_reference_is_the_exact_product(name, terms, constant):
    with torch.no_grad():
        forward, (dys, weights, g, a) = site(name, terms, constant, 9, "cpu")
        for y, exact in zip(linear.fprop(*forward), exact_fprop(*forward)):
            assert close(y, *exact, 1)
        assert close(linear.dgrad(dys, weights, [None] * len(dys), g, a), *exact_dgrad(dys, weights, g, a), 1)


def test_operators_are_registered_properly():
    forward, (dys, weights, g, a) = site("qkv", 2, BF16, 9, "cpu")
    parts, values, ws, constants, hidden, ups, owner, _, dtype = forward
    arguments = (*packed(parts), *packed(ws), constants, values, [None] * len(hidden), ups, owner, a, ws[0].k, dtype)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.peft_nvfp4.fprop.default, arguments, test_utils=checks)
    arguments = (dys, *packed(weights), [None] * len(dys), g, a, ws[0].k)
    torch.library.opcheck(torch.ops.peft_nvfp4.dgrad.default, arguments, test_utils=checks)


BAD = {
    "rows": (lambda f: f[4].__setitem__(0, f[4][0][:5]), r"h must be \(9, 4\)"),
    "constant": (lambda f: f[3].__setitem__(0, torch.zeros(5)), r"a constant must be \(64,\)"),
    "weight": (lambda f: f[2].__setitem__(0, QuantizedMatrix(*f[2][0][:3], 70)), "codes of a matrix|K="),
}


@pytest.mark.parametrize("change, message", [pytest.param(*v, id=k) for k, v in BAD.items()])
def test_wrong_arguments_are_named(change, message):
    forward, _ = site("qkv", 1, None, 9, "cpu")
    forward = tuple(list(x) if isinstance(x, (list, tuple)) else x for x in forward)
    change(forward)
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match=message):
        linear.fprop(*forward)


if __name__ == "__main__":
    import triton_interpreter

    triton_interpreter.install()
    torch.set_num_threads(1)
    with torch.no_grad():
        found = check("cpu")
    print(*found, sep="\n")
    sys.exit(bool(found))
