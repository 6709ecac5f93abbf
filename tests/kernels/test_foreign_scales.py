"""Weights of other tools, whose global scale is no power of two: the significand stays out of the BF16 operands and multiplies
the FP32 sum, and backward layouts have the same bytes wherever they are made.

The kernels run in Triton's interpreter, in a process of its own (``python test_foreign_scales.py``), and on CUDA where marked.
"""

import copy
import math

import pytest
import torch
from _assertions import assert_same_bits, assert_same_matrix, by_device, by_dtype, gaussian, generator, to, unit
from _interpreter import interpreted_results
from _products import multiplied
from torch import nn
from torch.utils._pytree import tree_map_only

from peft_nvfp4 import ops
from peft_nvfp4.autograd.activation_cache import quantized_input
from peft_nvfp4.autograd.frozen_linear import Branch, frozen_linear
from peft_nvfp4.kernels import dispatch
from peft_nvfp4.nn.experts.frozen_experts import FrozenExperts
from peft_nvfp4.nn.experts.packing import FROM_PACKED, scale_factors
from peft_nvfp4.nn.frozen_linear import FrozenOptions
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, GRADIENT, WEIGHT, WEIGHT_BACKWARD, QuantizedMatrix
from peft_nvfp4.numerics.products import ForwardLinear, Fprop, LowRank
from peft_nvfp4.ops import linear
from peft_nvfp4.ops.core import OPERATORS

BF16, FP32 = torch.bfloat16, torch.float32
SCALES = (0.1 / 2688, 1.9999998807907104 * 2.0**-13, 1.0000001192092896 * 2.0**-12)
"""About the middle, the last and the first significand after 1: what a BF16 operand rounds, all bits set, one bit set."""
by_scale = pytest.mark.parametrize("g", SCALES, ids=["middle", "last", "first"])


def foreign(n: int, k: int, g: float = SCALES[0], seed: int = 0) -> QuantizedMatrix:
    """Codes and block scales of random values under a global scale of another tool's. Every eighth block scale is a subnormal."""
    q = gaussian(n, k, WEIGHT, seed)
    small = torch.randint(1, 8, q.scales.shape, generator=generator(n, k, seed), dtype=torch.uint8)
    scales = torch.where(torch.arange(q.scales.numel()).view_as(q.scales) % 8 == 0, small, q.scales)
    return QuantizedMatrix(q.codes, scales, torch.tensor([g]), k)


def exact_values(q: QuantizedMatrix) -> torch.Tensor:
    """code * block scale * global scale, unrounded: 6 + 24 bits, in FP64."""
    return reference.dequantize(q._replace(gscale=torch.ones_like(q.gscale))).double() * q.gscale.double()[:, None]


def outside(y: torch.Tensor, pairs: list[tuple], bias: torch.Tensor | None, roundings: int = 1, inner=0.0) -> int:
    """Elements of y further from ``sum of a @ b.T + bias`` than FP32 sums and roundings to y's dtype allow.

    With u = 2**-24 and K summands in all, their FP32 sum in any order is off by at most K u S, S the sum of magnitudes (see
    _exact.py); the multiplication by the significand, the addition of the bias, the division of what stands beside it in the same
    sum and its three columns (24 bits) add one u S each, and 1 - K u in the denominator is covered by 2. y is then rounded to its
    dtype: by unit(dtype) |y|, 2**-25 where FP16 is subnormal; a low-rank part that is rounded by itself adds unit(dtype) S.
    ``inner``: S of the low-rank part with its first product written out, whose FP32 sum of at most 96 summands is off, too."""
    exact = sum(a @ b.T for a, b in pairs) + (0 if bias is None else bias.double())
    total = sum(a.abs() @ b.abs().T for a, b in pairs) + (0 if bias is None else bias.double().abs())
    bound = (sum(a.shape[1] for a, _ in pairs) + 6) * 2.0**-24 * total + 96 * 2.0**-24 * inner
    if y.dtype != FP32:
        bound = bound + unit(y.dtype) * (exact.abs() + bound + (roundings - 1) * total)
        bound += 2.0**-25 if y.dtype == torch.float16 else 0.0
    return int((~((y.cpu().double() - exact).abs() <= bound)).sum())


def rounded_operand_is_noticed(dtype: torch.dtype, m: int = 3, n: int = 48, k: int = 320) -> bool:
    """Whether :func:`outside` tells a product of BF16-rounded weights from an exact one."""
    x, w = gaussian(m, k, ACTIVATION), foreign(n, k)
    rounded = (reference.dequantize(x).double() @ reference.dequantize(w).bfloat16().double().T).float().to(dtype)
    return outside(rounded, [(reference.dequantize(x).double(), exact_values(w))], None) > 0


# ---------------------------------------------------------------------------------------------- arithmetic
def test_what_is_left_without_the_scale_factor_is_exact_in_bf16():
    """Every code under every E4M3 scale, subnormal ones included: code * scale has 2 + 4 bits, from 2**-10 to 2688."""
    scales = torch.arange(0x7F, dtype=torch.uint8)
    codes = torch.cat([torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)]).repeat(len(scales), 1)
    q = QuantizedMatrix(reference.pack(codes), scales[:, None].repeat(1, 2), torch.ones(1), 16)
    values = reference.dequantize(q)
    assert values.unique().abs()[values.unique() != 0].min() == 2.0**-10 and values.max() == 2688
    for g in (*SCALES, 2.0**-115, 1.5 * 2.0**116):
        q = q._replace(gscale=torch.tensor([g]))
        part = reference.without_scale_factor(q, reference.scale_factor(q.gscale))
        assert_same_bits(reference.dequantize(part, BF16).float(), reference.dequantize(part), "rounded to BF16")
        assert exact_values(part).mul(reference.scale_factor(q.gscale)).equal(exact_values(q))


def test_scale_factors():
    values = [2.0**-115, 2.0**116, 1.0, *SCALES, 1.75, 0.0, math.inf, 2.0**-140, 3 * 2.0**-130]
    g = torch.tensor(values)
    power, scale_factor = reference.split_scale(g)
    assert_same_bits(power * scale_factor, g, "product")
    assert scale_factor.tolist() == [reference.scale_factor(v) for v in g]
    assert scale_factor.tolist()[:3] == [1.0] * 3 and scale_factor[6] == 1.75 and scale_factor.tolist()[7:] == [1.0] * 4
    assert all(1 < s < 2 for s in scale_factor[3:6]) and reference.powers_of_two(power[:7])
    assert reference.split_scale(torch.tensor([math.nan]))[0].isnan().all()
    assert scale_factors({"weight_gscale": g.view(-1, 1).view(torch.uint8)}, len(g)) == scale_factor.tolist()
    assert scale_factors({"absmax": g}, 3) == [1.0] * 3


@by_device
@by_dtype
@by_scale
@pytest.mark.parametrize("m", [1, 3, 17, 70])
@pytest.mark.parametrize("terms, bias", [(1, None), (1, FP32), (2, None), (2, BF16)])
def test_matmul_is_exact_but_for_its_sums(m, terms, bias, dtype, g, device):
    xs, w = [gaussian(m, 320, ACTIVATION, seed) for seed in range(terms)], foreign(48, 320, g)
    b = None if bias is None else torch.randn(48, generator=generator(7)).to(bias)
    factor = reference.scale_factor(w.gscale)
    y = multiplied([to(x, device) for x in xs], to(w, device), None if b is None else b.to(device), dtype, None, factor)
    assert y.dtype == dtype
    assert outside(y, [(reference.dequantize(x).double(), exact_values(w)) for x in xs], b) == 0
    assert dtype == torch.float16 or rounded_operand_is_noticed(dtype)


@pytest.mark.parametrize("bias", [None, FP32])
@pytest.mark.parametrize("has_bf16", [False, True])
def test_a_cpu_looks_for_itself(bias, has_bf16, monkeypatch):
    """Also with BF16 instructions, and with a scale for every row of the weight."""
    monkeypatch.setitem(reference.CPU_OPERAND, BF16, BF16 if has_bf16 else FP32)
    x, w = gaussian(5, 320, ACTIVATION), foreign(48, 320)
    b = None if bias is None else torch.randn(48, generator=generator(7))
    for scales in (w.gscale, w.gscale * torch.linspace(0.5, 3, 48)):
        w = w._replace(gscale=scales)
        for dtype in (BF16, FP32):
            assert outside(multiplied([x], w, b, dtype), [(reference.dequantize(x).double(), exact_values(w))], b) == 0


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("bias", [None, FP32])
def test_the_product_of_a_gpu(terms, dtype, bias, monkeypatch):
    """With a ``torch.mm`` that knows ``out_dtype`` on a CPU."""
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None: plain(a.float(), b.float()).to(out_dtype or a.dtype))
    xs, w = [gaussian(9, 320, ACTIVATION, seed) for seed in range(terms)], foreign(48, 320)
    b = None if bias is None else torch.randn(48, generator=generator(7))
    factor = reference.scale_factor(w.gscale)
    matmul = pytest.importorskip("peft_nvfp4.kernels.triton.matmul", exc_type=ImportError)
    y = matmul.many_rows(xs, w, b, dtype, None, factor)
    assert outside(y, [(reference.dequantize(x).double(), exact_values(w)) for x in xs], b) == 0


# ---------------------------------------------------------------------------------------------- backward layouts
@by_device
@by_scale
def test_backward_layouts_of_all_makers_are_the_same(g, device):
    w = foreign(70, 96, g)
    exact = reference.quantize(reference.dequantize(w).T, WEIGHT_BACKWARD)
    factor = reference.scale_factor(w.gscale)
    assert_same_matrix(ops.transpose_requantize(to(w, device), factor), exact, "transient")
    layer = NVFP4FrozenLinear(96, 70, None, BF16, FrozenOptions("cached"), to(w, device), None)
    assert_same_matrix(layer.backward_layout, exact, "cached")
    rounded = reference.quantize(reference.dequantize(w, BF16).T, WEIGHT_BACKWARD)
    assert g == SCALES[2] or not rounded.codes.equal(exact.codes), "the test would notice nothing"


# ---------------------------------------------------------------------------------------------- layers
def make(options: FrozenOptions, dtype: torch.dtype, device: str, g: float = SCALES[0]) -> NVFP4FrozenLinear:
    return NVFP4FrozenLinear(96, 70, None, dtype, options, to(foreign(70, 96, g), device), None)


@by_device
@by_scale
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("gradients", ["nvfp4", "bf16"])
@pytest.mark.parametrize("m", [3, 80])
def test_a_layer(m, gradients, dtype, g, device):
    """y and dx, with an adapter, against FP64; cached and transient layouts in every bit."""
    random = lambda *shape: torch.randn(*shape, generator=generator(*shape))  # noqa: E731
    x, dy, a, b = random(m, 96).to(dtype), random(m, 70).to(dtype), random(4, 96) / 8, random(70, 4) / 4
    results = []
    for layouts in ("cached", "transient"):
        layer = make(FrozenOptions(layouts, gradients), dtype, device, g)
        leaf, *adapter = (t.clone().to(device).requires_grad_() for t in (x, a, b))
        y = layer.lora_forward(leaf, [Branch(*adapter, 2.0, 0.0)])
        y.backward(dy.to(device))
        results.append((y.detach(), leaf.grad))
    for name, one, two in zip(("y", "dx"), *results):
        assert_same_bits(one, two, name)
    y, dx = results[0]
    w, xd = foreign(70, 96, g), reference.dequantize(reference.quantize(x, ACTIVATION)).double()
    a, sb = a.to(dtype).double(), (2 * b).to(dtype).double()
    h = (xd @ a.T).to(dtype).double()  # its own rounding may fall the other way: one more of the low-rank part
    inner = xd.abs() @ a.abs().T @ sb.abs().T
    assert outside(y, [(xd, exact_values(w)), (h, sb)], None, 2, inner) == 0
    if gradients == "bf16":
        pairs = [(dy.double(), exact_values(w).T)]
    else:
        back = reference.quantize(reference.dequantize(w).T, WEIGHT_BACKWARD)
        pairs = [(reference.dequantize(reference.quantize(dy, GRADIENT)).double(), reference.dequantize(back).double())]
    pairs.append(((dy.double() @ sb).to(dtype).double(), a.T))
    assert outside(dx, pairs, None, 3, dy.double().abs() @ sb.abs() @ a.abs()) == 0


def test_operators_are_told(monkeypatch):
    """A CPU looks for itself; kernels rely on what the layer says: fprop, the transpose of its backward, and generation."""
    from types import SimpleNamespace

    said = []
    fprop, transpose = linear.fprop.run, ops.transpose_requantize
    monkeypatch.setattr(linear.fprop, "run", lambda p: said.append([item.scale_factor for item in p.linears]) or fprop(p))
    monkeypatch.setattr(ops, "transpose_requantize", lambda *args: said.append(args[-1]) or transpose(*args))
    layers = [make(FrozenOptions("transient"), BF16, "cpu"), NVFP4FrozenLinear.quantize(nn.Linear(96, 8).bfloat16())]
    x = torch.randn(5, 96).bfloat16().requires_grad_()
    quantized = quantized_input(x, x, 1, None, False)
    sum(y.sum() for y in frozen_linear(x, quantized, [layer.operands(()) for layer in layers])).backward()
    known = layers[0].scale_factor
    assert said == [[known, 1.0], known] and known != 1.0
    few_rows = lambda x: SimpleNamespace(linear=lambda *args: said.append(args[-1]) or x[:, :70])
    monkeypatch.setattr(dispatch, "few_rows_module", few_rows)
    with torch.no_grad():
        layers[0](x)
    assert said.pop() == known


def test_a_layer_looks_at_its_scale_factor_when_a_scale_is_bound():
    """Through everything that binds or writes another global scale, and not in a forward: a compiler cannot look, nor can the
    recording of a CUDA graph. What brings no scale (an adapter) forgets none."""
    layer, w = make(FrozenOptions("transient"), FP32, "cpu"), foreign(70, 96)
    known = reference.scale_factor(torch.tensor(SCALES[0]))
    assert layer._scale_factor == copy.deepcopy(layer).scale_factor == known > 1
    layer.load_state_dict({}, strict=False)
    assert layer._scale_factor == known
    before, state = layer.snapshot(), copy.deepcopy(layer.state_dict())
    layer.requantize_(layer.dequantize(FP32))
    assert layer._scale_factor == 1.0
    own = copy.deepcopy(layer.state_dict())
    for bind, factor in (
        (lambda: layer.restore(before), known),
        (lambda: layer.load_state_dict(own), 1.0),
        (lambda: layer.load_state_dict(state), known),
        (lambda: layer._put("weight", "weight_scales", "weight_gscale", gaussian(70, 96, WEIGHT)), 1.0),
        (lambda: layer._put("weight", "weight_scales", "weight_gscale", w._replace(gscale=w.gscale * 2)), known),  # share_scales
    ):
        bind()
        assert layer._scale_factor == factor
    tensors = {name: p.detach() for name, p in layer.packed_tensors().items()}
    expert = FROM_PACKED["nvfp4"](tensors, 70, 96, FP32, FrozenOptions("transient"), 1.25)
    assert expert._scale_factor == 1.25, "not looked at: a model has thousands"
    with torch.device("meta"):
        nowhere = make(FrozenOptions("transient"), FP32, "meta")
    assert nowhere.scale_factor == 1.0 and nowhere._scale_factor is None


def test_compiled_whole_after_a_checkpoint_and_after_unmerging():
    layer, x = make(FrozenOptions("transient"), FP32, "cpu"), torch.randn(5, 96, generator=generator(5))
    expected, before, state = layer(x), layer.snapshot(), copy.deepcopy(layer.state_dict())
    for change in (lambda: layer.load_state_dict(state), lambda: layer.restore(before)):
        layer.requantize_(layer.dequantize(FP32))
        change()
        torch._dynamo.reset()
        assert_same_bits(torch.compile(layer, backend="eager", fullgraph=True)(x), expected, "compiled")
    torch._dynamo.reset()


def test_bytes_that_were_written_in_place_are_looked_at_again():
    """A broadcast of the base writes into parameters."""
    layer, own = make(FrozenOptions("transient"), FP32, "cpu"), gaussian(70, 96, WEIGHT)
    layer.weight_gscale.data.copy_(own.gscale.view(torch.uint8))
    layer.rewritten()
    assert layer.scale_factor == 1.0


def test_experts_know_their_scale_factors():
    """As a layer does: looked at again where scales are loaded or written, nowhere else; not made up where there are none yet."""
    from _frozen_experts import OPTIONS, experts_of
    from _mixtures import mixtral

    experts = FrozenExperts.quantize(experts_of(mixtral()), "nvfp4", OPTIONS)
    state, empty = copy.deepcopy(experts.state_dict()), copy.deepcopy(experts).to("meta")
    kept = experts.layers("down_proj", keep=True)
    foreign_state = copy.deepcopy(state)
    for scales in (foreign_state["down_proj_gscale"].view(FP32), foreign_state["gate_up_proj_gscale"].view(FP32)):
        scales *= 1.25
    experts.load_state_dict({}, strict=False)  # an adapter's
    assert experts.layers("down_proj") is kept and kept[0].scale_factor == 1.0
    experts.load_state_dict(foreign_state)
    assert [layer.scale_factor for layer in experts.layers("down_proj", keep=True)] == [1.25] * experts.experts
    for name, t in state.items():
        getattr(experts, name).data.copy_(t)
    experts.rewritten()
    assert [layer.scale_factor for layer in experts.layers("down_proj", keep=True)] == [1.0] * experts.experts
    empty.layers("down_proj")
    for name, t in foreign_state.items():  # as transformers puts what it has read
        setattr(empty, name, nn.Parameter(t, requires_grad=False))
    assert [layer.scale_factor for layer in empty.layers("down_proj")] == [1.25] * experts.experts


def test_quantising_beside_a_foreign_layer_takes_the_next_power_of_two():
    """Kernels that quantise take a global scale for a power of two."""
    linear, g = nn.Linear(96, 70), torch.tensor([0.1 / 16])
    layer = NVFP4FrozenLinear.quantize(linear, FrozenOptions("cached"), gscale=g)
    assert layer.forward_layout.gscale.item() == 2.0**-7 and layer.scale_factor == 1.0
    same = NVFP4FrozenLinear.quantize(linear, FrozenOptions("cached"), gscale=torch.tensor([2.0**-7]))
    assert_same_matrix(layer.forward_layout, same.forward_layout, "W_f")
    assert_same_matrix(layer.backward_layout, same.backward_layout, "W_b")


def test_a_merged_weight_that_nothing_changes_keeps_scale_and_scale_factor():
    """Merge-aware training begins with B = 0."""
    from peft_nvfp4.lora import merge_aware

    base = make(FrozenOptions("cached"), FP32, "cpu")
    for delta, expected in ((0.0, base.scale_factor), (1e-3, 1.0)):
        weight = base.dequantize(FP32) + delta
        twin = merge_aware.with_weight(base, merge_aware.requantized(base, weight))
        assert twin.scale_factor == expected == reference.scale_factor(twin.forward_layout.gscale)


@pytest.mark.parametrize("terms", [1, 2])
def test_an_fp4_kernel_applies_the_whole_scale(terms):
    """:mod:`peft_nvfp4.kernels.fp4.native` gives its GEMM codes and scales as they are stored, and has no use for factors."""
    from peft_nvfp4.kernels.fp4 import native

    xs, w = [gaussian(5, 96, ACTIVATION, seed) for seed in range(terms)], foreign(70, 96)
    h, up = (torch.randn(rows, 4, generator=generator(rows)).to(BF16) / 8 for rows in (5, 70))

    def gemms(terms, weights, *, constants, adds, low_ranks, outs=None, dtype=BF16):  # terms as one matrix: scales are equal
        (weight,), (add,) = weights, adds
        assert low_ranks == [None]  # h / 1.7 is inexact: its product is made before
        product = sum(exact_values(t) for t in terms) @ exact_values(weight._replace(gscale=torch.ones(1))).T
        return [(product.float() * weight.gscale + add.float()).to(dtype)]

    p = Fprop(xs, [ForwardLinear(w, None, reference.scale_factor(w.gscale), [LowRank(h, up)])], BF16)
    assert native.takes_fprop(p)
    (y,) = native.fprop(gemms, p)
    pairs = [(reference.dequantize(x).double(), exact_values(w)) for x in xs] + [(h.double(), up.double())]
    assert outside(y, pairs, None, 2) == 0  # the low-rank part by itself


def test_merging_requantises_under_a_power_of_two_and_dequantising_rounds_once():
    layer, w = make(FrozenOptions("cached"), BF16, "cpu"), foreign(70, 96)
    assert_same_bits(layer.dequantize(FP32), reference.dequantize(w), "D(W)")
    assert_same_bits(layer.dequantize(), reference.dequantize(w).bfloat16(), "D(W) in BF16")
    layer.requantize_(layer.dequantize(FP32))
    assert reference.powers_of_two(layer.forward_layout.gscale)
    assert_same_matrix(layer.backward_layout, ops.transpose_requantize(layer.forward_layout, 1.0), "W_b")


# ---------------------------------------------------------------------------------------------- kernels
def wrong_transposes(n: int, k: int, device: str, scales: tuple[float, ...] = SCALES) -> list[str]:
    """Kernel against reference, bit for bit, of block scales of all sizes."""
    wrong = []
    for g in scales:
        arguments = (q := to(foreign(n, k, g), device)), reference.scale_factor(q.gscale)
        got = dispatch.triton_kernel("transpose_requantize")(*arguments)
        expected = OPERATORS["transpose_requantize"].reference(*arguments)
        wrong += [f"{n}x{k} {g} output {i}" for i, (a, b) in enumerate(zip(got[:3], expected)) if not a.equal(b)]
    return wrong


def wrong_products(m: int, n: int, k: int, device: str, scales: tuple[float, ...] = SCALES) -> list[str]:
    """``matmul`` of few rows, by either kernel. (The interpreter's operands are FP32: it does not notice what BF16 rounds.)"""
    from peft_nvfp4.kernels.triton import matmul

    found = []
    for g in scales:
        for terms, dtype, bias in ((1, FP32, None), (2, BF16, FP32)):
            xs, w = [gaussian(m, k, ACTIVATION, seed) for seed in range(terms)], foreign(n, k, g)
            b = None if bias is None else torch.randn(n, generator=generator(n))
            factor = reference.scale_factor(w.gscale)
            y = matmul.matmul(
                [to(x, device) for x in xs], to(w, device), None if b is None else b.to(device), dtype, None, factor
            )
            bad = outside(y, [(reference.dequantize(x).double(), exact_values(w)) for x in xs], b)
            found += [f"{m}x{n}x{k} {g} terms={terms}: {bad} outside"] if bad else []
    return found


def wrong_sites(m: int, device: str) -> list[str]:
    """``emulated.fprop`` of three linears, of which two are foreign, with adapters and constants."""
    from peft_nvfp4.kernels import emulated

    random = lambda *shape: torch.randn(*shape, generator=generator(*shape))  # noqa: E731
    found, k = [], 96
    weights = [foreign(64, k, SCALES[0], 1), gaussian(40, k, WEIGHT, 2), foreign(33, k, SCALES[1], 3)]
    factors = [reference.scale_factor(w.gscale) for w in weights]
    ups = [random(n, r).to(BF16) / 8 for n, r in ((64, 4), (40, 3), (33, 5))]
    a = random(12, k).to(BF16) / 8
    for terms, constant in ((1, None), (2, BF16), (2, FP32)):
        x = [gaussian(m, k, ACTIVATION, seed) for seed in range(terms)]
        constants = [None if constant is None or i == 1 else random(w.codes.shape[0]).to(constant) for i, w in enumerate(weights)]
        linears = [ForwardLinear(*item, [LowRank(None, up)]) for *item, up in zip(weights, constants, factors, ups)]
        p = tree_map_only(torch.Tensor, lambda t: t.to(device), Fprop(x, linears, BF16, None, a))
        *ys, h = emulated.fprop(p)
        hidden = h.cpu().double().split([4, 3, 5], dim=1)
        for i, (y, w) in enumerate(zip(ys, weights)):
            pairs = [(reference.dequantize(q).double(), exact_values(w)) for q in x] + [(hidden[i], ups[i].double())]
            bad = outside(y, pairs, constants[i])
            found += [f"M={m} terms={terms} constant={constant} linear {i}: {bad} outside"] if bad else []
        (y,) = emulated.fprop(p._replace(linears=[p.linears[0]._replace(adapters=[])], a=None))
        bad = outside(y, [(reference.dequantize(q).double(), exact_values(weights[0])) for q in x], constants[0])
        found += [f"M={m} terms={terms} constant={constant} alone: {bad} outside"] if bad else []
    return found


def interpret() -> dict[str, list]:
    from peft_nvfp4.kernels import emulated
    from peft_nvfp4.kernels.triton import matmul

    plain = torch.mm  # on a CPU without out_dtype
    torch.mm = lambda a, b, out_dtype=None, out=None: (
        plain(a.float(), b.float()) if out_dtype is FP32 else plain(a, b) if out is None else plain(a, b, out=out)
    )
    matmul.VECTOR["rows_of_w"] = 16, 16  # fewer programs: the interpreter's cost is per operation
    emulated.SMALL_ROWS = 4
    transposes = wrong_transposes(40, 24, "cpu", SCALES[:2])
    products = [text for m, n, k in ((3, 9, 80), (16, 66, 80)) for text in wrong_products(m, n, k, "cpu", SCALES[:2])]
    return {"transposes": transposes, "products": products, "sites": wrong_sites(9, "cpu")}


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_results(__file__)


@pytest.mark.parametrize("kind", ["transposes", "products", "sites"])
def test_interpreted_kernels(kind, interpreted):
    assert interpreted[kind] == []


@pytest.mark.gpu
def test_kernels_on_cuda():
    with torch.no_grad():
        assert [text for n, k in ((1024, 576), (1000, 200), (40, 24)) for text in wrong_transposes(n, k, "cuda")] == []
        assert [text for m in (1, 8, 16, 64) for text in wrong_products(m, 130, 1008, "cuda")] == []
        assert [text for m in (9, 65, 300) for text in wrong_sites(m, "cuda")] == []


if __name__ == "__main__":
    import triton_interpreter

    triton_interpreter.report(interpret)
