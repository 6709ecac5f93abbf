"""Emulated fprop and dgrad: operands bit for bit, products against exact ones.

The kernels that lay out the operands run in Triton's interpreter on a CPU (in a process of its own, ``python test_emulated.py``,
if Triton is installed) and on CUDA; the GEMM is PyTorch's in both.
"""

import pytest
import torch
from _interpreter import interpreted_results
from _product_groups import BF16, GROUPS, close, exact_dgrad, exact_fprop, group, random, with_seeds, without_hidden

from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, GRADIENT
from peft_nvfp4.ops import linear


def check(device):
    """Messages about what is wrong."""
    from peft_nvfp4.kernels import emulated
    from peft_nvfp4.kernels.triton import dequantize

    wrong = []
    q = reference.quantize(random(7, 40).to(device), ACTIVATION)
    extra = random(7, 3, seed=3).to(BF16).to(device)
    out = torch.full((7, 90), 7.0, dtype=BF16, device=device)
    dequantize.write_operand(out, q, 2, extra, 4, 8)
    expected = torch.cat(
        [reference.dequantize(q, BF16)] * 2 + [torch.zeros_like(extra[:, :1])] * 4 + [extra, 0 * extra[:, :1]], 1
    )
    if not torch.equal(out[:, :88], expected) or not bool((out[:, 88:] == 7.0).all()):
        wrong.append("write_operand")
    residual = reference.quantize(random(7, 40, seed=5).to(device) / 16, ACTIVATION)
    both = reference.dequantize_terms([q, residual], None, BF16)
    dequantize.write_operand(out, q, residual=residual)
    if not torch.equal(out[:, :40], both):
        wrong.append("write_operand of two terms")
    out.fill_(7.0)
    dequantize.write_operand(out, q, 1, extra, 0, 5, residual)
    if not torch.equal(out[:, :46], torch.cat([both, extra, 0 * extra[:, :2], 0 * extra[:, :1] + 7.0], 1)):
        wrong.append("write_operand of two terms, with extra columns")
    dy = random(7, 40, seed=4).to(BF16).to(device)
    dy[3, 5] = float("nan")
    out = torch.full((7, 48), 7.0, dtype=BF16, device=device)
    dequantize.write_rounded(out, dy)
    rounded = reference.dequantize(reference.quantize(dy, GRADIENT), BF16)
    if not torch.equal(out[:, :40].view(torch.int16), rounded.view(torch.int16)) and not torch.allclose(
        out[:, :40].float(), rounded.float(), rtol=0, atol=0, equal_nan=True
    ):
        wrong.append("write_rounded")
    dequantize.write_rounded(out, dy, extra.T.contiguous().T, 5)
    if not torch.equal(out[:, 40:46], torch.cat([extra, 0 * extra[:, :2], 0 * extra[:, :1] + 7.0], 1)):
        wrong.append("write_rounded, with extra columns")
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
                expected = exact_fprop(forward, rounded=True)
                wrong += [
                    f"rounded fprop {label}: y {i}"
                    for i, (y, e) in enumerate(zip(emulated.fprop_of_rounded_inputs(forward), expected))
                    if not close(y, *e, 1)
                ]
                if a is not None:  # h computed inside
                    *others, h = emulated.fprop(without_hidden(forward, a))
                    if not torch.equal(h, emulated.fprop_of_rounded_inputs(without_hidden(forward, a))[-1]):
                        wrong.append(f"h of a rounded input {label}")
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
    assert interpreted_results(__file__) == []


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("terms, constant", [(1, None), (2, BF16), (2, torch.float32)])
def test_the_reference_is_the_exact_product(name, terms, constant):
    with torch.no_grad():
        forward, backward = group(name, terms, constant, 9, "cpu")
        for y, exact in zip(linear.fprop(forward), exact_fprop(forward)):
            assert close(y, *exact, 1)
        assert close(linear.dgrad(backward), *exact_dgrad(backward), 1)


if __name__ == "__main__":
    import triton_interpreter

    triton_interpreter.report(lambda: check("cpu"))
