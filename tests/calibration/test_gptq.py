"""The GPTQ solver: against a dense-inverse implementation of its own, option by option, and what it is for: smaller errors."""

import warnings

import numpy as np
import pytest
import torch
from _assertions import sample

from peft_nvfp4 import FrozenOptions, ops
from peft_nvfp4.calibration import gptq as solver
from peft_nvfp4.calibration.gptq import GPTQOptions, NVFP4Levels, factorize, gptq, gptq_backward, output_error
from peft_nvfp4.calibration.moments import Moments
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, BLOCK, E2M1_GRID, WEIGHT, WEIGHT_BACKWARD, NVFP4Format, QuantizedMatrix


def inputs(tokens: int, k: int, seed: int = 0) -> torch.Tensor:
    """Correlated inputs whose channels differ in size. The mixing is the same for every seed."""
    g = torch.Generator().manual_seed(1000 + k)
    basis = torch.linalg.qr(torch.randn(k, k, generator=g))[0]
    mix = (torch.arange(1, k + 1) ** -0.6)[:, None] * basis * torch.exp(0.5 * torch.randn(k, generator=g))
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)) @ mix


def dq(x: torch.Tensor) -> torch.Tensor:
    return reference.dequantize(reference.quantize(x, ACTIVATION))


def layer(n: int, k: int, tokens: int = 512, cross: bool = False) -> tuple[torch.Tensor, Moments]:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(7)) * 0.02
    moments, x = Moments(k, cross=cross), inputs(tokens, k)
    moments.add(dq(x), x)
    return w, moments


def nearest(v: float, scale: float) -> tuple[int, float]:
    """Code and value of the level of this scale next to v, ties to the even code; nothing shared with the package."""
    if scale == 0:
        return 0, 0.0
    distances = [abs(abs(v) - level * scale) for level in E2M1_GRID]
    best = min(range(8), key=lambda i: (distances[i], i % 2))
    return best + 8 * bool(np.signbit(v)), float(np.copysign(E2M1_GRID[best] * scale, v))


def dense_inverse(w: np.ndarray, h: np.ndarray, scale: np.ndarray, order: list[int], damping: float) -> np.ndarray:
    """Codes (N, K) by Optimal Brain Quantisation in float64: an explicit inverse, of which the rounded column is eliminated."""
    w, dead = w.astype(np.float64), np.diag(h) == 0
    h = h.astype(np.float64)
    mean = np.diag(h)[~dead].mean()
    h += np.diag(np.where(dead, mean, 0.0) + damping * mean)
    inverse, codes = np.linalg.inv(h), np.zeros(w.shape, dtype=np.uint8)
    for j in order:
        pairs = [nearest(v, scale[i, j // BLOCK]) for i, v in enumerate(w[:, j])]
        codes[:, j] = [c for c, _ in pairs]
        error = (w[:, j] - [v for _, v in pairs]) / inverse[j, j]
        w -= error[:, None] * inverse[j]
        inverse -= inverse[:, [j]] * inverse[[j]] / inverse[j, j]
        inverse[j], inverse[:, j] = 0, 0
    return codes


def codes_of(q: QuantizedMatrix) -> torch.Tensor:
    return reference.unpack(q.codes)[:, : q.k]


def factors_of(q: QuantizedMatrix) -> torch.Tensor:
    return reference.e4m3_decode(q.scales) * q.gscale


@pytest.mark.parametrize(
    "options",
    [
        GPTQOptions("max6", act_order=False),
        GPTQOptions("max6"),
        GPTQOptions("four_over_six"),
        GPTQOptions("mse"),
    ],
    ids=str,
)
@pytest.mark.parametrize("k, columns, damping", [(64, 128, 0.01), (50, 128, 0.01), (64, 16, 0.01), (64, 7, 0.01), (64, 128, 0.1)])
def test_codes_are_those_of_a_dense_inverse(options, k, columns, damping, monkeypatch):
    monkeypatch.setattr(solver, "COLUMNS", columns)
    monkeypatch.setattr(solver, "DAMPING", (damping,))
    w, moments = layer(24, k)
    h = moments.h
    q = gptq([w], moments, options)[0]
    diagonal = h.diagonal().numpy()
    order = sorted(range(k), key=lambda j: -diagonal[j]) if options.act_order else list(range(k))
    expected = dense_inverse(w.numpy(), h.numpy(), factors_of(q).numpy(), order, damping)
    assert torch.equal(codes_of(q), torch.from_numpy(expected))
    assert not torch.equal(codes_of(q), codes_of(ops.quantize_weight(w, NVFP4Format(options.rule))))  # H mattered
    assert not reference.unpack(q.codes)[:, k:].any()  # padding


@pytest.mark.parametrize("rule", ["max6", "four_over_six", "mse"])
def test_scales_are_fixed_before_the_first_column(rule):
    w, moments = layer(24, 50)
    moments.h /= (moments.h.diagonal()[:, None] * moments.h.diagonal()).sqrt()
    moments.h.fill_diagonal_(1.0)  # correlated columns, all of the same importance
    q = gptq([w], moments, GPTQOptions(rule))[0]
    expected = ops.quantize_weight(w, NVFP4Format(rule))
    assert torch.equal(q.scales, expected.scales) and torch.equal(q.gscale, expected.gscale)


@pytest.mark.parametrize("rule", ["four_over_six", "mse"])
def test_the_weighted_search_finds_the_best_candidate(rule):
    w, moments = layer(12, 64)
    g = ops.weight_gscale(w)
    importance = moments.h.diagonal() / moments.h.diagonal().mean()
    bits = NVFP4Levels(rule, g).scales(w, importance)
    around = reference.e4m3_encode(w.view(12, 4, 16).abs().amax(-1) / (g * 6)).int()
    four = reference.e4m3_encode(w.view(12, 4, 16).abs().amax(-1) / (g * 4)).int()
    offsets = [0] if rule == "four_over_six" else range(-2, 7)
    for row in range(12):
        for block in range(4):
            candidates = [int(around[row, block]) + o for o in offsets] + [int(four[row, block])] * (rule == "four_over_six")

            def error(c, row=row, block=block):
                s = float(reference.e4m3_decode(torch.tensor([c], dtype=torch.uint8)) * g)
                span = slice(16 * block, 16 * block + 16)
                pairs = zip(w[row, span].tolist(), importance[span].tolist())
                return sum(i * (v - nearest(v, s)[1]) ** 2 for v, i in pairs)

            chosen, best = error(int(bits[row, block])), min(map(error, candidates))
            assert chosen <= best * (1 + 1e-5)  # FP32 sums of 16 terms: equal errors may be told apart by their last bits
    plain = NVFP4Levels(rule, g).scales(w, torch.ones(64))
    assert (bits != plain).any()


@pytest.mark.parametrize("kind", ["ties", "normal", "lattice", "negative_zeros", "small_blocks"])
def test_columns_round_as_quantize_does(kind):
    x = sample(kind, 16, 64)
    x[3, 5], x[4, 16:32] = -0.0, 0.0
    q = reference.quantize(x, NVFP4Format())
    levels = NVFP4Levels("max6", q.gscale)
    scales = levels.scales(x, torch.ones(64))
    assert torch.equal(scales, q.scales)
    for k in range(64):
        factor = levels.factors(scales)[:, k // 16].contiguous()
        codes, values = levels.round(x[:, k], levels.thresholds(factor), factor)
        assert torch.equal(codes, codes_of(q)[:, k]), k
        assert torch.equal(values, reference.dequantize(q)[:, k]), k


def test_without_correlation_it_is_rounding_to_nearest():
    w, _ = layer(24, 64)
    moments = Moments(64)
    moments.h = torch.eye(64)
    for order in (False, True):
        q = gptq([w], moments, GPTQOptions(act_order=order))[0]
        for got, expected in zip(q[:3], ops.quantize_weight(w, WEIGHT)[:3]):
            assert torch.equal(got, expected)


def test_a_weight_on_the_grid_stays():
    w, moments = layer(24, 64)
    q = ops.quantize_weight(w, NVFP4Format())
    again = gptq([reference.dequantize(q)], moments, GPTQOptions("max6"))[0]
    assert torch.equal(again.scales, q.scales)
    assert torch.equal(reference.dequantize(again), reference.dequantize(q))  # a zero may have lost its sign


def test_linears_of_one_input_share_the_global_scale():
    w, moments = layer(24, 64)
    large = w * 40
    one, two = gptq([w, large], moments)
    assert torch.equal(one.gscale, ops.weight_gscale(large)) and torch.equal(two.gscale, one.gscale)
    assert one.gscale.data_ptr() != two.gscale.data_ptr()
    assert not torch.equal(one.gscale, ops.weight_gscale(w))
    other, _ = gptq([w, large.flip(0)], moments)  # rows are independent
    assert torch.equal(other.codes, one.codes) and torch.equal(other.scales, one.scales)


# ---------------------------------------------------------------------------------------------- what may go wrong


@pytest.mark.parametrize("rule", ["max6", "mse"])
def test_dead_columns(rule):
    w, _ = layer(24, 96)
    x = inputs(512, 96)
    dead = [3, 40, 41, *range(64, 80)]  # one, two, and a whole block
    x[:, dead] = 0
    w[:, 3] *= 100
    moments = Moments(96)
    moments.add(dq(x))
    without = w.clone()
    without[:, 3] = 0
    q, other = gptq([w, without], moments, GPTQOptions(rule))
    assert torch.equal(q.scales, other.scales)  # the large value did not count
    alive = [k for k in range(96) if k not in dead]
    assert torch.equal(codes_of(q)[:, alive], codes_of(other)[:, alive])
    factor = factors_of(q)
    for k in dead:
        expected = [nearest(v, s)[0] for v, s in zip(w[:, k].tolist(), factor[:, k // 16].tolist())]
        assert codes_of(q)[:, k].tolist() == expected
    assert (factor[:, 4] > 0).all()  # of the block without input, from its own values


def test_a_failed_cholesky_raises_the_damping():
    w, moments = layer(24, 64)
    vectors = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))[0]
    values = torch.ones(64)
    values[0] = -0.05  # between 1 % and 10 % of the mean of about 1
    moments.h = (vectors * values) @ vectors.T
    with pytest.warns(UserWarning, match="model.layers.3.mlp: its Hessian needed a damping of 0.1, not 0.01"):
        gptq([w], moments, name="model.layers.3.mlp")


@pytest.mark.parametrize("case", ["nan", "inf", "zero", "negative"])
def test_without_a_usable_hessian_it_does_nothing(case):
    w, moments = layer(24, 50)
    if case == "zero":
        moments.h.zero_()
    elif case == "negative":
        moments.h = torch.full((50, 50), -3.0).fill_diagonal_(1e-3)
    else:
        moments.h[3, 3] = float(case)
    with pytest.warns(UserWarning, match="some.layer: GPTQ is not possible.*rounded to nearest"):
        assert gptq([w], moments, name="some.layer") is None


def test_a_cholesky_that_ends_in_nan_without_a_word(monkeypatch):
    """As on a GPU, whose solver may give no sign: the last row has met everything."""
    real = torch.linalg.cholesky_ex

    def silent(a):
        lower, info = real(a)
        lower[-1, -1] = float("nan")
        return lower, torch.zeros_like(info)

    h = torch.eye(4) + 0.1
    assert factorize(h) is not None
    monkeypatch.setattr(torch.linalg, "cholesky_ex", silent)
    assert factorize(h) is None


@pytest.mark.parametrize("act_order", [True, False])
def test_factor(act_order, monkeypatch):
    """U^T U is the inverse of what was asked for, in solving order; columns without input do not count for the mean."""
    x = inputs(64, 24) * (torch.arange(24) % 3 != 0)
    h = x.T @ x / 64
    monkeypatch.setattr(solver, "DAMPING", (0.05,))
    factor = factorize(h, act_order)
    diagonal = h.diagonal()
    mean = diagonal[diagonal > 0].mean()
    damped = (h + mean * 0.05 * torch.eye(24))[factor.order][:, factor.order]
    assert torch.equal(factor.u, factor.u.triu())
    # FP32 inverse of a matrix with a condition number of some hundreds (the damping's share), 24 terms
    assert torch.allclose(factor.u.T @ factor.u @ damped, torch.eye(24), atol=1e-3)
    assert torch.allclose(factor.importance, diagonal / mean) and factor.damping == 0.05
    assert sorted(factor.order.tolist()) == list(range(24))
    expected = torch.sort(diagonal, descending=True, stable=True).indices if act_order else torch.arange(24)
    assert torch.equal(factor.order, expected)


def test_one_column():
    factor = factorize(torch.tensor([[4.0]]))
    assert factor.u.item() == pytest.approx(4.04**-0.5) and factor.order.tolist() == [0] and factor.importance.tolist() == [1.0]


def test_a_sound_layer_warns_of_nothing():
    w, moments = layer(24, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gptq([w], moments) is not None


def test_refusals():
    w, moments = layer(8, 64)
    with pytest.raises(ValueError, match="mlp.up.*NaN"):
        gptq([torch.full_like(w, float("nan"))], moments, name="mlp.up")
    with pytest.raises(ValueError, match=r"weights must be \(N, 64\)"):
        gptq([w[:, :32]], moments)
    with pytest.raises(ValueError, match="cross"):
        gptq([w], moments, GPTQOptions(asymmetric=True))
    with pytest.raises(ValueError, match="rule 'best'"):
        GPTQOptions("best")


# ---------------------------------------------------------------------------------------------- what it is for
def errors(w: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> tuple[float, float]:
    """Relative output error on x: W4A4, W4A16."""
    y = x @ w.T
    return ((dq(x) @ v.T - y).norm() / y.norm()).item(), ((x @ v.T - y).norm() / y.norm()).item()


def test_output_errors():
    """On a correlated Gaussian layer. Measured here, W4A4: to nearest 13.4 %, plain GPTQ 11.2, default 10.3, asymmetric 10.2;
    W4A16: 9.5, 5.9, 4.1, 4.6. The bounds leave a good third of each gap."""
    w, moments = layer(96, 192, tokens=8192, cross=True)
    x = inputs(2048, 192, seed=1)

    def measured(q):
        return errors(w, reference.dequantize(q), x)

    nearest_, plain, best = (
        measured(ops.quantize_weight(w, NVFP4Format())),
        measured(gptq([w], moments, GPTQOptions("max6", act_order=False))[0]),
        measured(gptq([w], moments)[0]),
    )
    assert plain[0] < 0.88 * nearest_[0] and plain[1] < 0.75 * nearest_[1]
    assert best[0] < 0.95 * plain[0] and best[1] < 0.80 * plain[1]
    asymmetric = measured(gptq([w], moments, GPTQOptions(asymmetric=True))[0])
    assert asymmetric[0] < best[0] and asymmetric[1] > best[1]  # better for W4A4, worse for W4A16


def test_every_option_pays():
    """W4A16 error of the layer with one option after the other switched on."""
    w, moments = layer(96, 192, tokens=8192)
    x = inputs(2048, 192, seed=1)
    measured = []
    for rule, order in (("max6", False), ("max6", True), ("mse", True)):
        q = gptq([w], moments, GPTQOptions(rule, act_order=order))[0]
        measured.append(errors(w, reference.dequantize(q), x)[1])
    assert measured == sorted(measured, reverse=True) and len(set(measured)) == 3


def test_asymmetric_target_is_the_least_squares_solution(monkeypatch):
    w, _ = layer(8, 32)
    x = inputs(4096, 32)
    moments = Moments(32, cross=True)
    moments.add(dq(x), x)
    monkeypatch.setattr(solver, "DAMPING", (1e-6,))
    target = solver.asymmetric_target(w, moments, factorize(moments.h))
    expected = torch.linalg.lstsq(dq(x).double(), x.double() @ w.double().T).solution.T
    # FP32 H of condition 1e3: relative error 1e3 * 2**-24 * sqrt(tokens) at worst
    assert (target - expected).norm() < 5e-3 * (expected - w).norm()
    monkeypatch.setattr(solver, "DAMPING", (1e4,))
    damped = solver.asymmetric_target(w, moments, factorize(moments.h))
    assert (damped - w).norm() < 1e-2 * (target - w).norm()  # damping pulls towards W, not towards 0


def test_output_error_is_the_one_on_the_data():
    w, moments = layer(24, 64)
    v = reference.dequantize(ops.quantize_weight(w, WEIGHT))
    x = dq(inputs(512, 64))
    assert output_error(w, v, moments.h) == pytest.approx(((x @ (v - w).T).norm() / (x @ w.T).norm()).item(), rel=1e-4)


# ---------------------------------------------------------------------------------------------- the backward layout
def test_backward_layout():
    """W_b from GPTQ: smaller error of dx than W_b from requantising, for the gradients it was made for."""
    w, moments = layer(128, 64)
    q = gptq([w], moments)[0]
    wf = reference.dequantize(q)
    gradients, dy = Moments(128), inputs(4096, 128, seed=5)
    gradients.add(dq(dy))
    w_b = gptq_backward(q, gradients, name="w")
    assert w_b.codes.shape == (64, 64) and w_b.k == 128
    test = dq(inputs(1024, 128, seed=6))
    true = test @ wf

    def error(layout):
        return ((test @ reference.dequantize(layout).T - true).norm() / true.norm()).item()

    assert error(w_b) < 0.6 * error(reference.transpose_requantize(q, WEIGHT_BACKWARD))  # measured: 0.36
    frozen = NVFP4FrozenLinear(64, 128, None, torch.float32, FrozenOptions(), q)
    frozen._put("backward_weight", "backward_scales", "backward_gscale", w_b)
    x = torch.randn(5, 64, requires_grad=True)
    grad = inputs(5, 128, seed=8)
    frozen(x).backward(grad)
    torch.testing.assert_close(x.grad, dq(grad) @ reference.dequantize(w_b).T, rtol=1e-5, atol=1e-5)  # order of FP32 sums


# ---------------------------------------------------------------------------------------------- storage
def test_a_frozen_linear_keeps_the_bits():
    w, moments = layer(48, 50)
    q = gptq([w.bfloat16()], moments)[0]
    frozen = NVFP4FrozenLinear(50, 48, None, torch.float32, FrozenOptions(gradients="bf16"), q)
    for got, expected in zip(frozen.forward_layout[:3], q[:3]):
        assert torch.equal(got, expected)
    x = inputs(3, 50)
    torch.testing.assert_close(frozen(x), dq(x) @ reference.dequantize(q).T, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- moments
def test_moments_are_the_means_over_all_tokens():
    x = inputs(300, 32) + 2.0
    values = dq(x)
    moments = Moments(32, cross=True)
    for start, stop in ((0, 7), (7, 100), (100, 100), (100, 260), (260, 300)):  # one of them empty
        moments.add(values[start:stop].view(1, -1, 32), x[start:stop].view(1, -1, 32))
    assert moments.count == 300
    # FP32 sums of 300 products
    for got, a, b in ((moments.h, values, values), (moments.c, x, values)):
        torch.testing.assert_close(got.double(), a.double().T @ b.double() / 300, rtol=1e-5, atol=1e-5)


def test_moments_leave_masked_tokens_out():
    x = inputs(64, 32).view(4, 16, 32)
    mask = torch.rand(4, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    masked, rows = Moments(32), Moments(32)
    masked.add(x, mask=mask)
    rows.add(x[mask])
    assert masked.count == int(mask.sum()) and torch.equal(masked.h, rows.h)
    before = masked.h.clone()
    masked.add(x, mask=torch.zeros(4, 16))
    assert torch.equal(masked.h, before)


def test_moments_do_not_grow_with_the_tokens():
    """One batch a thousand times: a running sum would have lost ten bits to the first ones; the mean stays what it is."""
    x = inputs(16, 16)
    moments = Moments(16)
    for _ in range(1000):
        moments.add(x)
    torch.testing.assert_close(moments.h, x.T @ x / 16, rtol=2e-5, atol=2e-6)


def test_moments_refuse():
    with pytest.raises(ValueError, match="expected inputs"):
        Moments(32).add(torch.zeros(3, 16))
    with pytest.raises(ValueError, match="needs x"):
        Moments(32, cross=True).add(torch.zeros(3, 32))


@pytest.mark.gpu
def test_on_a_gpu():
    """Sums in another order move values over thresholds now and then; the error of the result is the same."""
    w, moments = layer(256, 512, tokens=4096)
    x = inputs(1024, 512, seed=1)
    there = Moments(512, "cuda")
    there.add(dq(inputs(4096, 512)).bfloat16().cuda())
    torch.testing.assert_close(there.h.cpu(), moments.h, rtol=1e-4, atol=1e-4 * moments.h.abs().max().item())
    here, there = gptq([w], moments)[0], gptq([w.cuda()], there)[0]
    assert there.codes.is_cuda
    there = QuantizedMatrix(*(t.cpu() for t in there[:3]), there.k)
    assert (there.codes != here.codes).float().mean() < 0.1
    a, b = (errors(w, reference.dequantize(q), x)[1] for q in (here, there))
    assert abs(a - b) < 0.02 * a
