"""The product with few rows (kernels/triton_matmul.py) and the cache of dequantised weights (kernels/weight_cache.py).

The kernels run in Triton's interpreter, in a process of its own as in test_triton.py, and on CUDA where marked ``gpu``.
The interpreter knows no inline PTX and multiplies BF16 wrongly, so there the kernels decode with ordinary arithmetic, and
the tile kernel to FP32: it checks everything but the PTX. What the PTX decodes is checked on the GPU, for every code and scale.
"""

from __future__ import annotations

import copy
import gc
import json

import pytest
import torch
from _assertions import gaussian, generator, to, unit
from _interpreter import run_interpreted
from test_ops_matmul import exact_matrix, float64_product, whole_bias
from torch import nn
from triton_cases import BF16, FP16, FP32, ON_GPU, cases, run_case

from peft_nvfp4 import kernels, ops
from peft_nvfp4.kernels import weight_cache
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, WEIGHT, QuantizedMatrix

# ---------------------------------------------------------------------------------------------- the kernels

RANDOM = [  # M, N, K, terms, result, bias; the first of every pair of lines goes to the vector kernel
    *((1, 9, 300, 1, BF16, FP32), (16, 70, 300, 1, BF16, FP32)),
    *((3, 5, 1040, 2, FP32, BF16), (33, 70, 1040, 2, FP32, BF16)),
    *((2, 9, 32, 2, FP16, None), (17, 66, 32, 2, FP16, None)),
]


def product(xs: list[QuantizedMatrix], w: QuantizedMatrix, bias, dtype: torch.dtype, values=None) -> torch.Tensor:
    lists = ([x[i] for x in xs] for i in range(3))
    return kernels.implementation("matmul")(*lists, *w[:3], bias, values, w.k, dtype)


def outside_bound(m: int, n: int, k: int, terms: int, dtype, bias, device: str) -> int:
    """Elements further from the exact product than gamma(terms K) S plus the rounding: the bound derived in test_ops_matmul. (The
    sum of a block may be exact, which only makes it smaller.)"""
    xs, w = [gaussian(m, k, ACTIVATION, seed) for seed in range(terms)], gaussian(n, k, WEIGHT)
    b = torch.zeros(n) if bias is None else torch.randn(n, generator=generator(n)).to(bias)
    exact = float64_product(xs, w) + b.double()
    absolute = (
        sum(reference.dequantize(x).double().abs() for x in xs) @ reference.dequantize(w).double().abs().T + b.abs().double()
    )
    nu = terms * k * 2.0**-24
    bound = nu / (1 - nu) * absolute
    if dtype != FP32:
        bound = bound + unit(dtype) * (exact.abs() + bound) + 2.0**-25
    got = product([to(x, device) for x in xs], to(w, device), None if bias is None else b.to(device), dtype)
    assert got.dtype == dtype and got.shape == (m, n)
    return int((~((got.cpu().double() - exact).abs() <= bound)).sum())


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
    """Elements of a linear with two adapters that are not what exact sums give. The product is exact (see test_ops_matmul), the
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


def interpret() -> None:
    import triton_interpreter

    triton_interpreter.install()
    torch.set_num_threads(1)
    from peft_nvfp4.kernels.triton import matmul

    matmul.VECTOR["rows_of_w"] = 16, 16  # fewer programs: the interpreter's cost is per operation
    exact = [text for w in ((5, 10), (9, 1000), (66, 80)) for c in cases("matmul", 33, (), (w,)) for text in run_case(c, "cpu")]
    scales = torch.tensor([0, 1, 7, 8, 9, 0x38, 0x7D, 0x7E])
    decoded = [wrong_decodes(scales, step, "cpu") for step in (4, 16)]
    bounds = [outside_bound(*case, "cpu") for case in RANDOM]
    nan = [rows_with_nan(m, 5, "cpu") for m in (3, 9)]
    adapters = [wrong_with_adapters(*case, "cpu") for case in ADAPTERS]
    print(json.dumps({"exact": exact, "decoded": decoded, "bounds": bounds, "nan": nan, "adapters": adapters}))


@pytest.fixture(scope="module")
def interpreted():
    """What :func:`interpret` prints, from a process of its own."""
    run = run_interpreted(__file__)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def test_interpreted_products_of_exact_sums_are_bit_equal(interpreted):
    assert interpreted["exact"] == []


def test_interpreted_kernels_decode_codes_and_scales(interpreted):
    assert interpreted["decoded"] == [0, 0]


def test_interpreted_products_of_random_values(interpreted):
    assert interpreted["bounds"] == [0] * len(RANDOM)


def test_interpreted_products_show_what_is_not_finite(interpreted):
    assert interpreted["nan"] == [[1, 2], [1, 8]]


def test_interpreted_linears_with_adapters(interpreted):
    assert interpreted["adapters"] == [0] * len(ADAPTERS)


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
    arguments = [to(x, device)], to(w, device), None, BF16, None, h.to(BF16).to(device), up.to(device), 3.0
    assert matmul.product(*arguments).cpu().equal(expected)


@pytest.mark.gpu
def test_products_show_what_is_not_finite():
    assert [rows_with_nan(m, 300, "cuda") for m in (3, 9, 64)] == [[1, 2], [1, 8], [1, 63]]


def test_launches_pass_what_the_kernels_declare(monkeypatch):
    """Order of the constants, and that no kernel is specialised on a number: :func:`triton_launch.launch` relies on both."""
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
        matmul.linear(
            [gaussian(m, k, ACTIVATION)], gaussian(n, k, WEIGHT), None, adapter, torch.ones(m, k, dtype=BF16), None
        )
    assert seen == {"lora_down_kernel": 2, "matmul_vector_kernel": 1, "matmul_tile_kernel": 1, "matmul_sum_kernel": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("direct", [False, True], ids=["triton", "direct"])
def test_a_compiled_kernel_serves_other_shapes_and_addresses(direct, monkeypatch):
    """Of equal K and kind; unaligned tensors take another way."""
    monkeypatch.setattr("peft_nvfp4.kernels.triton.launch.DIRECT", direct)
    for m, n in ((3, 50), (4, 130), (3, 1), (33, 130), (64, 50)):
        x, w = exact_matrix(m, 576, True, m), exact_matrix(n, 576, False, n)
        expected = float64_product([x], w).float()
        x, w = to(x, "cuda"), to(w, "cuda")
        assert product([x], w, None, FP32).cpu().equal(expected)
        scales = torch.empty(w.scales.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view_as(w.scales).copy_(w.scales)
        assert product([x], w._replace(scales=scales), None, FP32).cpu().equal(expected)


def test_generation_needs_few_bf16_rows_on_a_gpu_without_autograd():
    with torch.no_grad():
        assert kernels.generation(torch.ones(1, 32, dtype=BF16)) is None


@pytest.mark.gpu
def test_generation_on_a_gpu():
    x = torch.ones(1, 32, dtype=BF16, device="cuda")
    assert kernels.generation(x) is None  # autograd is on
    with torch.no_grad():
        module = kernels.generation(x)
        assert module.__name__.endswith("triton_matmul")
        assert kernels.generation(x.expand(module.ROWS + 1, -1)) is None and kernels.generation(x.float()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 4, 16, 64])
def test_a_product_is_the_same_bits_again(m):
    x, w = to(gaussian(m, 8192, ACTIVATION), "cuda"), to(gaussian(512, 8192, WEIGHT), "cuda")
    first = product([x], w, None, FP32)
    assert all(product([x], w, None, FP32).equal(first) for _ in range(20))


@pytest.mark.gpu
def test_codes_at_odd_addresses():
    x, w = to(gaussian(2, 64, ACTIVATION), "cuda"), to(gaussian(40, 64, WEIGHT), "cuda")
    storage = torch.zeros(40 * 32 + 3, dtype=torch.uint8, device="cuda")
    moved = storage[3:].view(40, 32).copy_(w.codes)
    assert product([x], w._replace(codes=moved), None, FP32).equal(product([x], w, None, FP32))


# ---------------------------------------------------------------------------------------------- the cache


@pytest.fixture
def cache():
    """The cache, without a limit worth mentioning, and off again afterwards."""
    kernels.cache_weights(1 << 30)
    yield weight_cache
    kernels.cache_weights(0)


CPU = torch.device("cpu")


def matrix(seed: int = 0, device: str = "cpu") -> QuantizedMatrix:
    return to(gaussian(24, 40, WEIGHT, seed), device)


def layer(seed: int = 0) -> NVFP4FrozenLinear:
    torch.manual_seed(seed)
    return NVFP4FrozenLinear.quantize(nn.Linear(40, 24, bias=False).to(BF16))


def fresh(q: QuantizedMatrix) -> torch.Tensor:
    return ops.dequantize(q, BF16)


def test_the_cache_is_off_by_default():
    q = matrix()
    assert weight_cache._limit == 0
    assert weight_cache.dequantize(q, BF16).data_ptr() != weight_cache.dequantize(q, BF16).data_ptr()
    assert weight_cache.held(CPU) == 0


def test_a_copy_is_found_again_and_is_what_dequantize_gives(cache):
    q = matrix()
    first = cache.dequantize(q, BF16)
    assert cache.dequantize(q, BF16) is first and first.equal(fresh(q))
    assert cache.dequantize(q._replace(gscale=q.gscale.view(torch.uint8).view(FP32)), BF16) is first  # views of the same bytes
    assert cache.held(CPU) == 24 * 40 * 2
    other = cache.dequantize(q, FP32)  # another entry
    assert other.dtype == FP32 and cache.dequantize(q, BF16) is first


def test_the_cache_fills_to_its_limit_and_no_further():
    kernels.cache_weights(2 * 24 * 40 * 2 + 100)
    qs = [matrix(seed) for seed in range(3)]
    copies = [weight_cache.dequantize(q, BF16) for q in qs]
    assert all(copy.equal(fresh(q)) for copy, q in zip(copies, qs))
    assert [weight_cache.dequantize(q, BF16) is copy for q, copy in zip(qs, copies)] == [True, True, False]
    small = to(gaussian(1, 40, WEIGHT), "cpu")
    assert weight_cache.dequantize(small, BF16) is weight_cache.dequantize(small, BF16)  # it still fits
    kernels.cache_weights(0)
    assert weight_cache.held(CPU) == 0


def test_every_device_has_its_own_limit():
    kernels.cache_weights(24 * 40 * 2)
    here, there = matrix(), matrix(device="meta")
    copies = [weight_cache.dequantize(q, BF16) for q in (here, there)]
    assert [weight_cache.dequantize(q, BF16) is c for q, c in zip((here, there), copies)] == [True, True]
    assert copies[1].is_meta
    kernels.cache_weights(0)


@pytest.mark.parametrize("part", ["codes", "scales", "gscale"])
def test_an_edit_in_place_is_seen(part, cache):
    q = matrix()
    before = cache.dequantize(q, BF16)
    getattr(q, part).copy_(getattr(matrix(1), part) * (2 if part == "gscale" else 1))
    after = cache.dequantize(q, BF16)
    assert after.equal(fresh(q)) and not after.equal(before)
    assert cache.held(CPU) == 24 * 40 * 2


def test_other_shapes_at_the_same_address_are_other_entries(cache):
    q = matrix()
    cache.dequantize(q, BF16)
    for part in (q._replace(k=33), QuantizedMatrix(q.codes[:7], q.scales[:7], q.gscale, 40)):
        assert cache.dequantize(part, BF16).equal(fresh(part))
    for part in (q._replace(scales=torch.full_like(q.scales, 0x38)), q._replace(gscale=2 * q.gscale)):  # the same codes
        assert cache.dequantize(part, BF16).equal(fresh(part)) and not fresh(part).equal(fresh(q))


def test_a_copy_goes_with_its_weight(cache):
    linear = layer()
    cache.dequantize(linear.forward_layout, BF16)
    assert cache.held(CPU) > 0
    linear.requantize_(torch.ones(24, 40))  # binds new parameters
    gc.collect()
    assert cache.held(CPU) == 0
    copy_now = cache.dequantize(linear.forward_layout, BF16)
    assert copy_now.equal(fresh(linear.forward_layout))
    linear._apply(torch.clone)  # what .to(device) does: the same parameters with other data
    gc.collect()
    assert cache.held(CPU) == 0
    cache.dequantize(linear.forward_layout, BF16)
    del linear
    gc.collect()
    assert cache.held(CPU) == 0 and not weight_cache._entries


def test_merging_and_back(cache):
    """A snapshot keeps the old bytes alive, and with them their copy."""
    linear = layer()
    first = cache.dequantize(linear.forward_layout, BF16)
    snapshot = linear.snapshot()
    linear.requantize_(linear.dequantize(FP32) + 0.1)
    merged = cache.dequantize(linear.forward_layout, BF16)
    assert merged.equal(fresh(linear.forward_layout)) and not merged.equal(first)
    linear.restore(snapshot)
    assert cache.dequantize(linear.forward_layout, BF16) is first
    del merged
    gc.collect()
    assert cache.held(CPU) == first.nbytes


def test_a_copied_layer_has_its_own_entry(cache):
    linear = layer()
    names = set(linear.state_dict())
    first = cache.dequantize(linear.forward_layout, BF16)
    twin = copy.deepcopy(linear)
    second = cache.dequantize(twin.forward_layout, BF16)
    assert second is not first and second.equal(first) and set(twin.state_dict()) == names
    twin.weight.zero_()
    assert cache.dequantize(linear.forward_layout, BF16) is first and cache.dequantize(twin.forward_layout, BF16).eq(0).all()


def test_inference_mode(cache):
    """Tensors without a version get no copy; a copy made there serves training."""
    with torch.inference_mode():
        q = matrix()
        assert cache.dequantize(q, BF16).equal(fresh(q)) and cache.held(CPU) == 0
    linear = layer()
    with torch.inference_mode():
        values = cache.dequantize(linear.forward_layout, BF16)
    assert not values.is_inference() and cache.dequantize(linear.forward_layout, BF16) is values


def test_nothing_is_added_in_a_capture_and_what_it_reads_stays(cache, monkeypatch):
    capturing = True
    monkeypatch.setattr(cache, "_capturing", lambda device: capturing)
    q = matrix()
    assert cache.dequantize(q, BF16).equal(fresh(q)) and cache.held(CPU) == 0
    capturing = False
    values = cache.dequantize(q, BF16)
    capturing = True
    assert cache.dequantize(q, BF16) is values
    q.codes.zero_()
    assert cache.dequantize(q, BF16).eq(0).all() and cache.held(CPU) == values.nbytes
    del q
    gc.collect()
    assert not cache._entries and cache.held(CPU) == values.nbytes
    kernels.cache_weights(1 << 30)
    assert cache.held(CPU) == 0


@pytest.mark.gpu
def test_a_real_capture(cache):
    """A graph replays right with a copy made before its capture and with none; and another stream waits for a copy."""
    with torch.no_grad():
        x = to(gaussian(200, 40, ACTIVATION), "cuda")
        for warm in (False, True):
            q = matrix(device="cuda")
            expected = ops.matmul([x], q, None, BF16)
            kernels.cache_weights(1 << 30)  # empty again
            if warm:
                ops.matmul([x], q, None, BF16)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = ops.matmul([x], q, None, BF16)
            y.zero_()
            graph.replay()
            assert y.equal(expected) and (cache.held(q.codes.device) > 0) == warm
        side = torch.cuda.Stream()
        first = cache.dequantize(q, BF16)
        with torch.cuda.stream(side):
            assert cache.dequantize(q, BF16) is first and first.equal(fresh(q))


def test_the_emulated_product_uses_the_cache_for_the_weight_only(cache):
    matmul = pytest.importorskip("peft_nvfp4.kernels.triton.matmul", exc_type=ImportError)
    x, w = gaussian(70, 40, ACTIVATION), matrix()
    arguments = [x], w, None, BF16, None
    first = matmul.emulated(*arguments)
    assert cache.held(CPU) == 24 * 40 * 2
    cache.dequantize(w, BF16).mul_(2.0)  # visible: it is this copy that is used
    assert matmul.emulated(*arguments).equal(2 * first)


def test_a_copy_that_is_there_is_preferred_except_for_very_few_rows(cache):
    matmul = pytest.importorskip("peft_nvfp4.kernels.triton.matmul", exc_type=ImportError)
    w = matrix()
    few, more, many = ([gaussian(m, 40, ACTIVATION)] for m in (4, 16, 65))
    choices = lambda: [matmul._in_registers(terms, w) for terms in (few, more, many)]  # noqa: E731
    assert choices() == [True, True, False]
    cache.dequantize(w, BF16)
    assert cache.holds(w) and choices() == [True, False, False]
    w.codes.zero_()
    assert not cache.holds(w) and choices() == [True, True, False]


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("500M", 500 << 20), ("1.5 GiB", 3 << 29), ("8gb", 8 << 30), ("12345", 12345)]
)
def test_sizes_in_words(text, size):
    assert weight_cache.parse(text) == size


def test_wrong_sizes_raise(monkeypatch):
    with pytest.raises(ValueError, match="write a number of bytes"):
        weight_cache.parse("much")
    with pytest.raises(ValueError, match="0 or more"):
        kernels.cache_weights(-1)
    monkeypatch.setattr(kernels, "_loaded", None)
    monkeypatch.setenv(weight_cache.VARIABLE, "a lot")
    with pytest.raises(ValueError, match="write a number of bytes"):
        kernels.load()


def test_the_environment_sets_the_limit(monkeypatch):
    monkeypatch.setattr(kernels, "_loaded", None)
    monkeypatch.setenv(weight_cache.VARIABLE, "2G")
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    kernels.load()
    assert weight_cache._limit == 2 << 30
    kernels.cache_weights(0)


if __name__ == "__main__":
    interpret()
