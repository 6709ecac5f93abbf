"""The product with few rows (kernels/triton_matmul.py).

The kernels run in Triton's interpreter, in a process of its own as in test_triton.py, and on CUDA where marked ``gpu``.
The interpreter knows no inline PTX and multiplies BF16 wrongly, so there the kernels decode with ordinary arithmetic, and
the tile kernel to FP32: it checks everything but the PTX. What the PTX decodes is checked on the GPU, for every code and scale.
"""

import pytest
import torch
from _assertions import gaussian, generator, to
from _exact import exact_matrix, float64_product, off_bound, whole_bias
from _interpreter import interpreted_results
from triton_cases import BF16, FP16, FP32, ON_GPU, cases, run_case

from peft_nvfp4 import ops
from peft_nvfp4.kernels import dispatch
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, WEIGHT, QuantizedMatrix

RANDOM = [  # M, N, K, terms, result, bias; the first of every pair of lines goes to the vector kernel
    *((1, 9, 300, 1, BF16, FP32), (16, 70, 300, 1, BF16, FP32)),
    *((3, 5, 1040, 2, FP32, BF16), (33, 70, 1040, 2, FP32, BF16)),
    *((2, 9, 32, 2, FP16, None), (17, 66, 32, 2, FP16, None)),
]


def product(xs: list[QuantizedMatrix], w: QuantizedMatrix, bias, dtype: torch.dtype, values=None) -> torch.Tensor:
    from peft_nvfp4.kernels.triton import matmul

    return matmul.matmul(xs, w, bias, dtype, values)


def outside_bound(m: int, n: int, k: int, terms: int, dtype, bias, device: str) -> int:
    """Of :func:`off_bound`. (The sum of a block may be exact, which only makes the error smaller.)"""
    xs, w = [gaussian(m, k, ACTIVATION, seed) for seed in range(terms)], gaussian(n, k, WEIGHT)
    b = torch.zeros(n) if bias is None else torch.randn(n, generator=generator(n)).to(bias)
    got = product([to(x, device) for x in xs], to(w, device), None if bias is None else b.to(device), dtype)
    assert got.dtype == dtype and got.shape == (m, n)
    return off_bound(got, xs, w, b)


def every_scale(rows: torch.Tensor) -> QuantizedMatrix:
    """One block a row: all 16 codes under the E4M3 scale ``rows`` (bytes)."""
    codes = torch.cat([torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)]).repeat(len(rows), 1)
    scales = torch.stack([rows, torch.zeros_like(rows)], 1).to(torch.uint8)
    return QuantizedMatrix(reference.pack(codes), scales, torch.tensor([2.0**-3]), 16)


def one_hot() -> QuantizedMatrix:
    """The unit matrix, 16 x 16: code 2 (1.0) under the scale 1."""
    codes = torch.cat([2 * torch.eye(16, dtype=torch.uint8), torch.zeros(16, 16, dtype=torch.uint8)], 1)
    return QuantizedMatrix(reference.pack(codes), torch.full((16, 2), 0x38, dtype=torch.uint8), torch.ones(16), 16)


def wrong_decodes(rows: torch.Tensor, step: int, device: str) -> int:
    """Products of every code under the scales ``rows`` with the unit matrix, ``step`` rows at a time, either way round: each is
    one value, so it must be that value."""
    q, unit_matrix = to(every_scale(rows), device), to(one_hot(), device)
    expected, wrong = reference.dequantize(q), 0
    for i in range(0, 16, step):
        x = QuantizedMatrix(*(t[i : i + step] for t in unit_matrix[:3]), 16)
        wrong += int((product([x], q, None, FP32) != expected.T[i : i + step]).sum())
    for i in range(0, len(rows), step):
        x = QuantizedMatrix(q.codes[i : i + step], q.scales[i : i + step], q.gscale, 16)
        wrong += int((product([x], unit_matrix, None, FP32) != expected[i : i + step]).sum())
    return wrong


def rows_with_nan(m: int, n: int, device: str) -> list[int]:
    """Rows of the result that hold a NaN (all of them or none), of an input with a NaN in row 1 and an infinity in the last. They
    are at the beginning of a row of values of 112 columns, 128 in the storage: who reads on finds the next row's."""
    x = torch.ones(m, 112)
    x[1, 7], x[-1, 5] = torch.nan, -torch.inf
    q, w = to(reference.quantize(x, ACTIVATION), device), to(gaussian(n, 112, WEIGHT), device)
    results = [product([q], w, None, BF16, values).isnan() for values in (None, ops.dequantize(q, BF16))]
    assert all(nan.any(1).equal(nan.all(1)) for nan in results) and results[0].equal(results[1])
    return results[0].any(1).nonzero()[:, 0].tolist()


def wrong_with_adapters(m: int, n: int, k: int, rank: int, device: str) -> int:
    """Elements of a linear with two adapters that are not what exact sums give. The product is exact (see _exact.py), the
    adapters hold small whole numbers (A times 1 + 2**-12, which rounding it to BF16 removes), so h and all that is added stay
    below 2**24 / 16: left are the roundings of h, of y, and of the second adapter's sum."""
    from peft_nvfp4.kernels.triton.matmul import linear

    q, w, bias = exact_matrix(m, k, True, 0), exact_matrix(n, k, False, 9), whole_bias(n, FP32)
    x = torch.randint(-3, 4, (m, k), generator=generator(m, k)).to(BF16)  # need not be D(q) for this
    small = lambda rows, columns: torch.randint(-2, 3, (rows, columns), generator=generator(rows, columns)).float()  # noqa: E731
    branches = [(small(r, k) * (1 + 2.0**-12), small(n, r), s) for r, s in ((rank, 3.0), (2, 1.0))]
    y = float64_product([q], w) + bias.double()
    for a, b, s in branches:
        h = (x.double() @ a.to(BF16).double().T).to(FP32).to(BF16)
        y = (y.double() + h.double() @ (b * s).double().T).to(FP32).to(BF16)
    branches = [(a.to(device), b.to(device), s) for a, b, s in branches]
    got = linear([to(q, device)], to(w, device), bias.to(device), branches, x.to(device), None)
    return int((got.cpu() != y).sum())


ADAPTERS = [(3, 9, 96, 5), (16, 70, 300, 3), (33, 66, 1040, 20)]


def interpret() -> dict[str, list]:
    from peft_nvfp4.kernels.triton import matmul

    matmul.VECTOR["rows_of_w"] = 16, 16  # fewer programs: the interpreter's cost is per operation
    exact = [text for w in ((5, 10), (9, 1000), (66, 80)) for c in cases("matmul", 33, (), (w,)) for text in run_case(c, "cpu")]
    scales = torch.tensor([0, 1, 7, 8, 9, 0x38, 0x7D, 0x7E])
    decoded = [wrong_decodes(scales, step, "cpu") for step in (4, 16)]
    bounds = [outside_bound(*case, "cpu") for case in RANDOM]
    nan = [rows_with_nan(m, 5, "cpu") for m in (3, 9)]
    adapters = [wrong_with_adapters(*case, "cpu") for case in ADAPTERS]
    return {"exact": exact, "decoded": decoded, "bounds": bounds, "nan": nan, "adapters": adapters}


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_results(__file__)


RIGHT = {"exact": [], "decoded": [0, 0], "bounds": [0] * len(RANDOM), "nan": [[1, 2], [1, 8]], "adapters": [0] * len(ADAPTERS)}


@pytest.mark.parametrize("what", RIGHT)
def test_interpreted_kernels(what, interpreted):
    assert interpreted[what] == RIGHT[what]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*ADAPTERS, (1, 2048, 2048, 16), (16, 2048, 2048, 16)], ids=str)
def test_linears_with_adapters(case):
    assert wrong_with_adapters(*case, "cuda") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases("matmul", *ON_GPU["matmul"]), ids=lambda c: c.label)
def test_products_of_exact_sums_are_bit_equal(case):
    assert run_case(case, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("step", [1, 2, 4, 5, 16, 64])
def test_every_code_under_every_scale(step):
    assert wrong_decodes(torch.arange(0x7F), step, "cuda") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*RANDOM, (1, 2048, 8192, 2, BF16, None), (40, 2048, 8192, 2, BF16, None)], ids=str)
def test_products_of_random_values(case):
    assert outside_bound(*case, "cuda") == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_adapter_of_many_rows_is_added_to_the_rounded_product(device):
    matmul = pytest.importorskip("peft_nvfp4.kernels.triton.matmul", exc_type=ImportError)
    x, w = exact_matrix(matmul.ROWS + 1, 96, True, 0), exact_matrix(24, 96, False, 9)
    h, up = (torch.randint(-8, 9, (rows, 3), generator=generator(rows)).float() for rows in (matmul.ROWS + 1, 24))
    expected = (float64_product([x], w).float().to(BF16).double() + h.double() @ (up * 3.0).double().T).float().to(BF16)
    arguments = [to(x, device)], to(w, device), None, BF16, None, 1.0, h.to(BF16).to(device), up.to(device), 3.0
    assert matmul.matmul(*arguments).cpu().equal(expected)


@pytest.mark.gpu
def test_products_show_what_is_not_finite():
    assert [rows_with_nan(m, 300, "cuda") for m in (3, 9, 64)] == [[1, 2], [1, 8], [1, 63]]


def test_launches_pass_what_the_kernels_declare(monkeypatch):
    """Order of the constants, on which :func:`peft_nvfp4.kernels.triton.launch.launch` relies; and that no kernel is compiled
    anew for a number."""
    matmul = pytest.importorskip("peft_nvfp4.kernels.triton.matmul", exc_type=ImportError)
    seen = {}

    def launch(kernel, grid, tensors, numbers, constants, **options):
        names = kernel.arg_names
        first, last = len(tensors), len(tensors) + len(numbers)
        assert names[last:] == list(constants) and set(names[first:last]) <= set(kernel.do_not_specialize)
        seen[kernel.__name__] = seen.get(kernel.__name__, 0) + 1

    monkeypatch.setattr(matmul, "launch", launch)
    for m, n, k in ((1, 5, 96), (20, 70, 1040)):
        adapter = [(torch.ones(3, k), torch.ones(n, 3), 2.0)]
        matmul.linear([gaussian(m, k, ACTIVATION)], gaussian(n, k, WEIGHT), None, adapter, torch.ones(m, k, dtype=BF16), None)
    assert seen == {"lora_down_kernel": 2, "matmul_vector_kernel": 1, "matmul_tile_kernel": 1, "matmul_sum_kernel": 1}


@pytest.mark.gpu
def test_a_compiled_kernel_serves_other_shapes_and_addresses():
    """Of equal K and kind; unaligned tensors have a kernel of their own."""
    for m, n in ((3, 50), (4, 130), (3, 1), (33, 130), (64, 50)):
        x, w = exact_matrix(m, 576, True, m), exact_matrix(n, 576, False, n)
        expected = float64_product([x], w).float()
        x, w = to(x, "cuda"), to(w, "cuda")
        assert product([x], w, None, FP32).cpu().equal(expected)
        for name, offset in (("scales", 1), ("codes", 3)):
            t = getattr(w, name)
            moved = torch.empty(t.numel() + offset, dtype=torch.uint8, device="cuda")[offset:].view_as(t).copy_(t)
            assert product([x], w._replace(**{name: moved}), None, FP32).cpu().equal(expected)


def test_generation_needs_few_bf16_rows_on_a_gpu_without_autograd():
    with torch.no_grad():
        assert dispatch.few_rows_module(torch.ones(1, 32, dtype=BF16)) is None


@pytest.mark.gpu
def test_generation_on_a_gpu():
    x = torch.ones(1, 32, dtype=BF16, device="cuda")
    assert dispatch.few_rows_module(x) is None  # autograd is on
    with torch.no_grad():
        module = dispatch.few_rows_module(x)
        assert module.__name__.endswith("triton.matmul")
        assert dispatch.few_rows_module(x.expand(module.ROWS + 1, -1)) is None and dispatch.few_rows_module(x.float()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 4, 16, 64])
def test_a_product_is_the_same_bits_again(m):
    x, w = to(gaussian(m, 8192, ACTIVATION), "cuda"), to(gaussian(512, 8192, WEIGHT), "cuda")
    first = product([x], w, None, FP32)
    assert all(product([x], w, None, FP32).equal(first) for _ in range(20))


if __name__ == "__main__":
    import triton_interpreter

    triton_interpreter.report(interpret)
