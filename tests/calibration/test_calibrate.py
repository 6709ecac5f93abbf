"""Calibration of a model, layer by layer: what it leaves behind (better weights than rounding to nearest, the same bits from the
same call), the number of terms under a budget, and backward layouts from GPTQ."""

from dataclasses import replace

import pytest
import torch
from _calibrations import FAST, IDS, Words, assert_same_model, bits
from conftest import tiny_llama
from torch import nn

from peft_nvfp4.calibration.gptq import GPTQOptions, gptq, gptq_backward
from peft_nvfp4.calibration.layer import Survey, choose_terms, rounded_input
from peft_nvfp4.calibration.moments import Moments
from peft_nvfp4.calibration.run import CalibrationOptions, apply_calibration, calibrate
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.ops.linear import dequantize_input, quantize_input
from peft_nvfp4.quantization.freeze import frozen_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")


def test_moments_come_from_quantised_predecessors():
    """The codes of layer 1, again, from the input that the calibrated layer 0 gives it."""
    dense, model = tiny_llama(), tiny_llama()
    report = calibrate(model, IDS, options=CalibrationOptions(report_tokens=0), **FAST)
    assert all(
        isinstance(m, NVFP4FrozenLinear) for m in (model.model.layers[1].mlp.down_proj, model.model.layers[0].self_attn.q_proj)
    )
    assert type(model.lm_head) is nn.Linear and report.dense == []
    seen = []
    hook = model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    with torch.no_grad():
        for row in IDS[:-1]:  # the last sequence is held out
            model(row[None])
    hook.remove()
    moments = Moments(64)
    for x in seen:
        moments.add(rounded_input(x, 2, None))
    attention = dense.model.layers[1].self_attn
    expected = gptq([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight], moments)
    for name, solution in zip(("q_proj", "k_proj", "v_proj"), expected):
        layer = getattr(model.model.layers[1].self_attn, name)
        assert torch.equal(layer.weight, solution.codes) and torch.equal(layer.weight_scales, solution.scales), name
        assert layer.shares_input and layer.options.terms == 2


def test_later_linears_see_rounded_inputs():
    """The MLP's inner product is collected behind linears that are dense and read D(Q(x))."""
    dense, model = tiny_llama(), tiny_llama()
    calibrate(model, IDS, options=CalibrationOptions(report_tokens=0), **FAST)
    moments = Moments(176)
    layer = dense.model.layers[0]
    for linear in (m for m in layer.modules() if isinstance(m, nn.Linear)):
        linear.register_forward_pre_hook(lambda m, args: (rounded_input(args[0], 2, None),))
    layer.mlp.down_proj.register_forward_pre_hook(lambda m, args: moments.add(args[0]))  # after the first hook: rounded
    with torch.no_grad():
        for row in IDS[:-1]:
            dense.model(row[None])
    expected = gptq([layer.mlp.down_proj.weight], moments)[0]
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, expected.codes)


def test_asymmetric_target_needs_the_input_before_rounding():
    model = tiny_llama()
    calibrate(model, IDS, options=CalibrationOptions(gptq=GPTQOptions(asymmetric=True), report_tokens=0), **FAST)
    dense = tiny_llama()
    with torch.no_grad():
        x = torch.stack([dense.model.layers[0].input_layernorm(dense.model.embed_tokens(row)) for row in IDS[:-1]])
    moments = Moments(64, cross=True)
    for row in x:
        moments.add(rounded_input(row, 2, None), row)
    own = dense.model.layers[0].self_attn
    expected = gptq([m.weight for m in (own.q_proj, own.k_proj, own.v_proj)], moments, GPTQOptions(asymmetric=True))[0]
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, expected.codes)


def logit_error(model: nn.Module, dense: nn.Module) -> float:
    with torch.no_grad():
        a, b = model(IDS).logits, dense(IDS).logits
    return ((a - b).norm() / b.norm()).item()


def test_it_is_better_than_rounding_to_nearest():
    data = torch.randint(1, 128, (24, 64), generator=torch.Generator().manual_seed(5))
    found = {}
    for method in ("gptq", "nearest"):
        model = tiny_llama()
        report = calibrate(model, data, options=CalibrationOptions(method=method, accuracy="high"), **FAST)
        found[method] = logit_error(model, tiny_llama()), report.means()
    assert found["gptq"][0] < 0.9 * found["nearest"][0]
    means = found["gptq"][1]
    assert means["w4a4"] < 0.9 * means["w4a4_nearest"] and means["w4a16"] < 0.9 * means["w4a16_nearest"]
    assert found["nearest"][1]["w4a4"] == pytest.approx(found["nearest"][1]["w4a4_nearest"])
    assert means["a4"] < 1.5 < means["w4a4"]  # two terms: under 1 % of noise, plus the weight's


def test_padding_does_not_count():
    results = []
    for filler in (5, 99):
        ids = IDS.clone()
        mask = torch.arange(24) < torch.tensor([24, 20, 15, 10, 24, 24, 24, 24])[:, None]
        ids[~mask] = filler
        model = tiny_llama()
        calibrate(model, [{"input_ids": ids, "attention_mask": mask.long()}], **FAST)
        results.append(bits(model))
    for name, t in results[0].items():
        assert torch.equal(t, results[1][name]), name


def test_the_same_call_gives_the_same_bits():
    texts = [" ".join("x" * (i * j % 11 + 1) for j in range(30)) for i in range(9)]
    options = CalibrationOptions(seq_len=24, samples=6, report_tokens=16)
    models = [tiny_llama() for _ in range(2)]
    for model in models:
        calibrate(model, texts, Words(), options, **FAST)
    assert_same_model(*models)
    other = tiny_llama()
    calibrate(other, texts, Words(), CalibrationOptions(seq_len=24, samples=6, seed=1), **FAST)
    assert any(not torch.equal(t, bits(other)[name]) for name, t in bits(models[0]).items())


@pytest.mark.gpu
def test_on_a_gpu():
    """The model stays on the CPU; the result is that of the CPU but for the order of sums."""
    here, there = tiny_llama(torch.bfloat16), tiny_llama(torch.bfloat16)
    options = CalibrationOptions(backward="gptq", offset=True, accuracy="paper")
    calibrate(here, IDS, options=options, **FAST)
    calibrate(there, IDS, options=options, device="cuda", progress=False)
    assert {p.device.type for p in there.parameters()} == {"cpu"}
    dense = tiny_llama(torch.bfloat16)
    assert abs(logit_error(here, dense) - logit_error(there, dense)) < 0.1 * logit_error(here, dense)


def test_offsets():
    model, dense = tiny_llama(), tiny_llama()
    calibrate(model, IDS, options=CalibrationOptions(accuracy="balanced", offset=True), **FAST)
    for name, layer in frozen_layers(model):
        assert (layer.input_offset is not None) == (layer.options.terms == 1), name
    paper = tiny_llama()
    calibrate(paper, IDS, options=CalibrationOptions(accuracy="paper", offset=True), **FAST)
    attention = paper.model.layers[0].self_attn
    assert attention.q_proj.input_offset is attention.k_proj.input_offset is attention.v_proj.input_offset
    with torch.no_grad():
        x = torch.cat([dense.model.layers[0].input_layernorm(dense.model.embed_tokens(row)) for row in IDS[:-1]])
    # FP32 values, summed in FP64
    torch.testing.assert_close(attention.q_proj.input_offset.view(torch.float32), x.mean(0), rtol=1e-6, atol=1e-7)
    moments = Moments(64)
    for row in x.view(7, 24, 64):  # moments of the whole D(x~): the layer adds D(W) mu, not W mu
        offset = attention.q_proj.input_offset.view(torch.float32)
        moments.add(dequantize_input(quantize_input(row, offset, 1), offset, row.dtype))
    own = dense.model.layers[0].self_attn
    expected = gptq([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight], moments)[0]
    assert torch.equal(attention.q_proj.weight, expected.codes)


def test_a_linear_that_no_token_reaches_is_rounded_to_nearest():
    model = tiny_llama()
    model.model.layers[1].mlp.spare = nn.Linear(64, 32)
    with torch.no_grad():
        report = calibrate(model, IDS, **FAST)
    assert report.layers["model.layers.1"]["not_reached"] == ["mlp.spare"]
    spare = model.model.layers[1].mlp.spare
    assert isinstance(spare, NVFP4FrozenLinear)
    row = report.layers["model.layers.1"]["linears"]["mlp.spare"]
    assert row["weight"] == row["weight_nearest"] and "w4a4" not in row


def test_few_tokens_warn():
    with pytest.warns(UserWarning, match="40 tokens of calibration for linears with up to 176 inputs"):
        calibrate(tiny_llama(), IDS[:2, :20], **FAST)


def test_terms_are_bought_by_gain_per_work():
    def site(name, work, one):
        return Survey([name], work, one, 0.01 * one)

    surveys = [site("a", 10, 1.0), site("b", 40, 8.0), site("c", 30, 2.9), site("d", 20, 0.1)]
    chosen = {b: [n for n, t in choose_terms(surveys, b).items() if t == 2] for b in (0.0, 0.1, 0.5, 0.7, 0.8, 1.0)}
    assert chosen == {
        0.0: [],
        0.1: ["a"],  # b gains more, but does not fit
        0.5: ["a", "b"],
        0.7: ["a", "b", "d"],  # c gains more than d and a, but not for its work
        0.8: ["a", "b", "c"],
        1.0: ["a", "b", "c", "d"],
    }


def test_a_budget_is_kept_and_used():
    model = tiny_llama()
    report = calibrate(model, IDS, options=CalibrationOptions(budget=0.4), **FAST)
    work = {n: m.in_features * m.out_features for n, m in frozen_layers(model)}
    extra = sum(work[n] for n, m in frozen_layers(model) if m.options.terms == 2)
    assert 0 < extra <= 0.4 * sum(work.values())
    rows = report.survey["model.layers"]
    assert len(rows) == 8 and all(row["two"] < 0.1 * row["one"] for row in rows)
    for _, layer in frozen_layers(model):
        assert layer.options.terms in (1, 2)
    first = model.model.layers[0].self_attn
    assert len({first.q_proj.options.terms, first.k_proj.options.terms, first.v_proj.options.terms}) == 1


def test_backward_layouts_from_gptq(tmp_path):
    options = CalibrationOptions(backward="gptq", samples=8)
    model, plain = tiny_llama(), tiny_llama()
    report = calibrate(model, IDS, options=options, output_dir=tmp_path / "c", **FAST)
    calibrate(plain, IDS, **FAST)
    changed = 0
    for (name, a), (_, b) in zip(frozen_layers(model), frozen_layers(plain)):
        assert torch.equal(a.weight, b.weight), name
        changed += not torch.equal(a.backward_weight, b.backward_weight)
        row = report.layers[".".join(name.split(".")[:3])]["linears"][".".join(name.split(".")[3:])]
        assert row["dx"] < row["dx_requantized"], name
    assert changed == 14
    assert all(p.grad is None for p in model.parameters())
    other = tiny_llama()
    apply_calibration(other, tmp_path / "c")
    assert_same_model(model, other)

    def gradient(m):
        x = m.model.embed_tokens(IDS).detach().requires_grad_()
        m(inputs_embeds=x, labels=IDS).loss.backward()
        return x.grad

    exact = tiny_llama()
    calibrate(exact, IDS, **FAST)
    for _, layer in frozen_layers(exact):
        layer.options = replace(layer.options, gradients="bf16")
    true, ours, base = gradient(exact), gradient(model), gradient(plain)
    cosine = lambda a: torch.cosine_similarity(a.flatten(), true.flatten(), dim=0).item()
    assert cosine(ours) > cosine(base)


def test_gradients_come_through_the_layers_above():
    """W_b of the first layer's last linear, again, from the gradient that the calibrated model gives it."""
    model = tiny_llama()
    calibrate(model, IDS, options=CalibrationOptions(backward="gptq", report_tokens=0), **FAST)
    down, moments = model.model.layers[0].mlp.down_proj, Moments(64)

    def note(dy):
        moments.add(rounded_input(dy * 2.0**5, 1, None))  # 24 tokens a sequence: the next power of two

    hook = down.register_forward_hook(lambda module, args, output: output.register_hook(note) and None)
    for row in IDS:
        model(row[None], labels=row[None]).loss.backward()
    hook.remove()
    expected = gptq_backward(down.forward_layout, moments)
    # sums in another order than the layer by itself may move a value over a threshold
    assert (down.backward_weight != expected.codes).float().mean() < 0.02
