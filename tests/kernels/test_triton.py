"""Every Triton kernel against its reference, bit for bit, on the cases of :mod:`triton_cases`.

They run on a CPU through Triton's interpreter, in a process of its own (``TRITON_INTERPRET`` must be set before Triton is
imported, and the interpreter needs the repairs of :mod:`triton_interpreter`), with few rows, since its cost is per row; and on
CUDA with real shapes, marked ``gpu``.
"""

import pytest
import torch
from _assertions import SEED
from _interpreter import interpreted_results
from triton_cases import BF16, GROUPS, ON_GPU, awkward, cases, difference, normal, run_case

from peft_nvfp4 import kernels
from peft_nvfp4.kernels import dispatch
from peft_nvfp4.numerics import fused_reference, layout, reference
from peft_nvfp4.numerics.formats import GRADIENT, GRADIENT_STOCHASTIC, QuantizedMatrix
from peft_nvfp4.ops import fused
from peft_nvfp4.ops.core import Operator

INTERPRETED = {  # group -> rows, widths, weights
    "quantize": (21, (10, 300), ()),
    "terms": (21, (10, 576), ()),
    "dequantize": (21, (10, 300), ()),
    "transpose": (0, (), ((200, 24), (24, 300))),
    "norm": (21, (10, 300), ()),
    "mlp": (10, (10, 300), ()),
    "random": (3, (300, 1000), ()),
    "rope": (5, (64, 10), ()),
    "experts": (5, (10, 40), ()),
}


def interpret() -> dict[str, dict]:
    """The number of cases and the mismatches of every group."""
    found = {group: cases(group, *INTERPRETED[group]) for group in GROUPS}
    in_tiles = scales_in_tiles("cpu", [(131, 64), (3, 640), (3, 96)])
    return {
        group: {"cases": len(each), "mismatches": [text for case in each for text in run_case(case, "cpu")]}
        for group, each in found.items()
    } | {"tiles": {"mismatches": in_tiles}}


def scales_in_tiles(device: str, shapes: list[tuple[int, int]]) -> list[str]:
    """``quantize_for_gemm``: the reference's codes, and its scales put into tiles where K is a multiple of 64."""
    from peft_nvfp4.kernels.triton.quantize import quantize_for_gemm

    found = []
    for m, k in shapes:
        for fmt, seed in ((GRADIENT, None), (GRADIENT_STOCHASTIC, torch.tensor(SEED))):
            x = awkward(m, k, BF16)
            got, right = quantize_for_gemm(x.to(device), fmt, seed), reference.quantize(x, fmt, seed=seed)
            scales = got.scales.cpu() if k % 64 else layout.unswizzle_scales(got.scales.cpu(), m, k // 16)
            same = torch.equal(got.codes.cpu(), right.codes) and torch.equal(got.gscale.cpu(), right.gscale)
            found += [] if same and torch.equal(scales, right.scales) else [f"{m} x {k}, {fmt}"]
    return found


def test_interpreted_scales_in_tiles(interpreted):
    assert interpreted["tiles"]["mismatches"] == []


@pytest.mark.gpu
def test_scales_in_tiles():
    assert scales_in_tiles("cuda", [(1, 64), (131, 64), (300, 2048), (129, 96), (70, 8192), (9, 65536)]) == []


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_results(__file__)


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted_kernels_give_the_bits_of_the_reference(group, interpreted):
    assert interpreted[group]["cases"] > 0
    assert interpreted[group]["mismatches"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_give_the_bits_of_the_reference(group):
    found = [text for case in cases(group, *ON_GPU[group]) for text in run_case(case, "cuda")]
    assert found == []


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_few_rows(rows):
    found = []
    for group in ("quantize", "terms", "dequantize", "norm", "mlp", "random", "rope"):
        for case in cases(group, rows, (1000,), ()):
            found += run_case(case, "cuda")
    assert found == []


@pytest.mark.gpu
def test_strided_rows_and_seeds_on_the_device():
    """gate and up as the two halves of one matrix; a seed that lives on the GPU."""
    both = awkward(64, 2048, BF16).cuda()
    gate, up = both.chunk(2, dim=1)
    assert gate.stride() == (2048, 1)
    kernel = dispatch.triton_kernel("silu_mul_quantize")
    got = flattened(kernel(gate, up, None, "silu", 1, True))
    expected = flattened(kernel(gate.contiguous(), up.contiguous(), None, "silu", 1, True))
    assert len(got) == len(expected) == 10 and all(difference(a, b)[0] == 0 for a, b in zip(got, expected))
    x, seed = normal(64, 2048, dtype=BF16).cuda(), torch.tensor(SEED)
    drop = dispatch.triton_kernel("dropout")
    assert difference(drop(x, 0.1, seed), drop(x, 0.1, seed.cuda()))[0] == 0
    sr = dispatch.triton_kernel("quantize")
    a, b = (sr(x, GRADIENT_STOCHASTIC, None, s) for s in (seed, seed.cuda()))
    assert all(difference(p, q)[0] == 0 for p, q in zip(flattened(a), flattened(b)))


@pytest.mark.gpu
def test_operators_call_the_kernels_and_say_so():
    kernels.load()
    triton = {o.operator for o in kernels.status().operators if o.implementation == "triton"}
    assert triton == set(dispatch.KERNELS) | set(dispatch.GROUPED)


FUSED = [value.name for value in vars(fused).values() if isinstance(value, Operator)] + ["quantize_terms", "dequantize_terms"]


@pytest.mark.parametrize("operator", FUSED)
def test_fused_operators_pass_opcheck(operator):
    """Schema, fake and the derivative that is refused, on the first case of every operator."""
    found = [c for group in GROUPS if group != "transpose" for c in cases(group, 2, (48,), ()) if c.operator == operator]
    for case in found[:2]:
        torch.library.opcheck(
            getattr(torch.ops.peft_nvfp4, operator).default,
            case.make(),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


@pytest.mark.parametrize("operator", [name for name in FUSED if hasattr(fused, name)])
def test_public_functions_return_what_the_reference_returns(operator):
    """Through ``torch.library`` and past it (without autograd): flat outputs are unpacked in the right order."""
    case = next(c for group in GROUPS for c in cases(group, 3, (80,), ((24, 80),)) if c.operator == operator)
    arguments = list(case.make())
    if operator == "rmsnorm_backward":
        parts = [QuantizedMatrix(c, s, g, 80) for c, s, g in zip(*arguments[1:4])]
        arguments = [arguments[0], parts, *arguments[4:]]
    elif operator == "silu_mul_backward":
        arguments[1:7] = QuantizedMatrix(*arguments[1:4], 80), QuantizedMatrix(*arguments[4:7], 80)
    elif operator == "gated_values":
        *codes, offset, act, terms, k, dtype = arguments
        arguments = [QuantizedMatrix(*codes[:3], k), QuantizedMatrix(*codes[3:], k), offset, act, terms, dtype]
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            got = flattened(getattr(fused, operator)(*arguments))
            expected = flattened(getattr(fused_reference, operator)(*arguments))
        assert got and len(got) == len(expected)
        assert all(difference(a, b)[0] == 0 for a, b in zip(got, expected))


def flattened(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in flattened(v)] if isinstance(value, (list, tuple)) else []


def test_status_names_every_operator_and_a_reason():
    status = kernels.status()
    names = {o.operator for o in status.operators}
    assert names == set(dispatch.KERNELS) | set(dispatch.PRODUCTS) | set(dispatch.GROUPED)
    assert all(o.note for o in status.operators if o.implementation == "reference")
    assert str(status).splitlines()[0].split() == ["operator", "implementation", "device", "note"]


def test_the_reference_can_be_forced(monkeypatch):
    monkeypatch.setattr(dispatch, "_loaded", None)
    monkeypatch.setattr(dispatch, "_forced", "")  # put back after load() has set it
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    monkeypatch.setattr(Operator, "register", lambda *args: pytest.fail("a kernel was registered"))
    kernels.load()
    assert dispatch._loaded == f"{dispatch.VARIABLE}=reference"


if __name__ == "__main__":
    import triton_interpreter

    triton_interpreter.report(interpret)
