"""Calibration of a model, layer by layer: what it collects from, what it leaves behind, that an interruption changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from peft import get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.backends.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.calibration import terms as terms_module
from peft_nvfp4.calibration.data import batches, token_mask
from peft_nvfp4.calibration.gptq import GPTQOptions, gptq, gptq_backward
from peft_nvfp4.calibration.hessian import Moments
from peft_nvfp4.calibration.layer import rounded_input
from peft_nvfp4.calibration.run import CalibrationOptions, apply_calibration, calibrate
from peft_nvfp4.calibration.structure import capture, find_stack, sites
from peft_nvfp4.freeze import frozen_layers, plan
from peft_nvfp4.linear import dequantize_input, quantize_input

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")
CPU = torch.device("cpu")
IDS = torch.randint(1, 128, (8, 24), generator=torch.Generator().manual_seed(3))
FAST = dict(device="cpu", progress=False)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{n}.{k}": t for n, layer in frozen_layers(model) for k, t in layer.packed_tensors().items()}


def assert_same_model(a: nn.Module, b: nn.Module) -> None:
    first, second = bits(a), bits(b)
    assert first.keys() == second.keys() and first
    for name in first:
        assert torch.equal(first[name], second[name]), name
    for (name, x), (_, y) in zip(frozen_layers(a), frozen_layers(b)):
        assert (x.options, x.shares_input) == (y.options, y.shares_input), name


# ---------------------------------------------------------------------------------------------- data


class Words:
    """A tokenizer: a token is a word's length."""

    eos_token_id = 0

    def __call__(self, text):
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=[len(word) for word in text.split()])


def test_texts_become_sequences_of_one_length():
    texts = [f"{'a' * (i % 9 + 1)} " * 7 for i in range(20)]
    found = batches(texts, Words(), samples=3, seq_len=10, batch_size=2, seed=1)
    assert [b["input_ids"].shape for b in found] == [(2, 10), (1, 10)]
    joined = torch.cat([b["input_ids"].flatten() for b in found]).tolist()
    assert joined[7] == 0 == joined[15] and len(set(joined[:7])) == 1  # a text, its end, the next text
    again = batches(texts, Words(), samples=3, seq_len=10, batch_size=2, seed=1)
    other = batches(texts, Words(), samples=3, seq_len=10, batch_size=2, seed=2)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(found, again))
    assert not torch.equal(found[0]["input_ids"], other[0]["input_ids"])
    assert batches(["a bb"], Words(), seq_len=10)[0]["input_ids"].tolist() == [[1, 2, 0]]  # less than one sequence


def test_other_kinds_of_data():
    datasets = pytest.importorskip("datasets")
    ids = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6, 7]]})
    assert batches(ids, seq_len=3)[1]["input_ids"].tolist() == [[4, 5, 6]]
    text = datasets.Dataset.from_dict({"text": ["a bb", "ccc"]})
    assert sum(b["input_ids"].numel() for b in batches(text, Words(), seq_len=10)) == 5
    assert [b["input_ids"].shape for b in batches(IDS, samples=5, seq_len=8, batch_size=2)] == [(2, 8), (2, 8), (1, 8)]
    dicts = [{"input_ids": IDS, "pixel_values": torch.zeros(1)}]
    assert batches(dicts)[0]["input_ids"] is IDS
    for wrong, message in (([], "no calibration data"), (["text"], "tokenizer"), ("a text", "tokenizer"), ([3.5], "float")):
        with pytest.raises(ValueError, match=message):
            batches(wrong)
    with pytest.raises(ValueError, match="column.*'text'; this one has label"):
        batches(datasets.Dataset.from_dict({"label": [1]}))
    assert token_mask({"attention_mask": torch.ones(2, 3)}) is None
    assert token_mask({"attention_mask": torch.tensor([[1, 0]])}).tolist() == [[True, False]]


# ---------------------------------------------------------------------------------------------- structure


def gemma3(**overrides):
    """Sliding and full attention in turn, each with its own mask and rotary embedding."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    settings = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=128, sliding_window=6, layer_types=types, **{**settings, **overrides}))


PADDED = [
    {"input_ids": IDS[:2], "attention_mask": (torch.arange(24) < torch.tensor([[24], [15]])).long()},
    {"input_ids": IDS[2:4]},
]


@pytest.mark.parametrize("make", [tiny_llama, gemma3])
def test_layers_alone_compute_what_the_model_does(make):
    model = make().eval()
    name = find_stack(model, plan(model, "nvfp4", ()))
    assert name == "model.layers"
    stack = capture(model, name, PADDED, CPU)
    with torch.no_grad():
        for i, batch in enumerate(PADDED):
            expected = model(**batch, output_hidden_states=True).hidden_states
            hidden = stack.hidden[i]
            for index in range(len(stack.layers)):  # the last layer's output is not there without the final norm
                assert torch.equal(hidden, expected[index]), index
                hidden = stack.run(index, i, hidden)


def test_sites_are_linears_of_one_input():
    model = tiny_llama()
    stack = capture(model, "model.layers", [{"input_ids": IDS}], CPU)
    linears = [n for n, m in model.model.layers[0].named_modules() if isinstance(m, nn.Linear)]
    assert sites(stack, 0, stack.hidden[0], linears) == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]


def test_structure_refusals():
    model = tiny_llama()
    with pytest.raises(ValueError, match="'encoder' names 0.*model.layers"):
        find_stack(model, [], "encoder")
    with pytest.raises(ValueError, match="no list of layers"):
        find_stack(nn.Sequential(nn.Linear(4, 4)), [])

    class Between(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.layers = inner, inner.model.layers
            inner.model.forward = self.body

        def body(self, input_ids, **kwargs):
            hidden = self.inner.model.embed_tokens(input_ids)
            rotary = self.inner.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=rotary) * 2.0
            return hidden

        def forward(self, input_ids):
            return self.body(input_ids)

    with pytest.raises(ValueError, match="before layer 1 of layers"):
        capture(Between(tiny_llama()), "layers", [{"input_ids": IDS}], CPU)


# ---------------------------------------------------------------------------------------------- what it leaves behind


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
        assert torch.equal(layer.weight, solution.q.codes) and torch.equal(layer.weight_scales, solution.q.scales), name
        assert layer.shares_input and layer.options.terms == 2


def test_later_sites_see_rounded_inputs():
    """The MLP's input is collected behind an attention whose linears read D(Q(x)); with true_sequential, behind frozen ones."""
    dense, one, two = tiny_llama(), tiny_llama(), tiny_llama()
    calibrate(one, IDS, options=CalibrationOptions(report_tokens=0), **FAST)
    calibrate(two, IDS, options=CalibrationOptions(report_tokens=0, true_sequential=True), **FAST)
    first, second = bits(one), bits(two)
    for name in first:
        if "layers.0.self_attn" in name and "o_proj" not in name:
            assert torch.equal(first[name], second[name]), name
    assert not torch.equal(first["model.layers.0.mlp.down_proj.weight"], second["model.layers.0.mlp.down_proj.weight"])
    seen = []
    two.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    with torch.no_grad():
        for row in IDS[:-1]:
            two(row[None])
    moments = Moments(176)
    for x in seen:
        moments.add(rounded_input(x, 2, None))
    expected = gptq([dense.model.layers[0].mlp.down_proj.weight], moments)[0].q
    assert torch.equal(two.model.layers[0].mlp.down_proj.weight, expected.codes)


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


def test_the_same_call_gives_the_same_bits_wherever_activations_wait():
    texts = [" ".join("x" * (i * j % 11 + 1) for j in range(30)) for i in range(9)]
    options = CalibrationOptions(seq_len=24, samples=6, report_tokens=16)
    models = [tiny_llama() for _ in range(3)]
    for model, offload in zip(models, ("cpu", "cpu", "disk")):
        calibrate(model, texts, Words(), options, offload=offload, **FAST)
    assert_same_model(models[0], models[1])
    assert_same_model(models[0], models[2])
    other = tiny_llama()
    calibrate(other, texts, Words(), CalibrationOptions(seq_len=24, samples=6, seed=1), **FAST)
    assert any(not torch.equal(t, bits(other)[name]) for name, t in bits(models[0]).items())


def test_centres():
    model, dense = tiny_llama(), tiny_llama()
    calibrate(model, IDS, options=CalibrationOptions(accuracy="balanced", centre=True), **FAST)
    for name, layer in frozen_layers(model):
        assert (layer.input_centre is not None) == (layer.options.terms == 1), name
    paper = tiny_llama()
    calibrate(paper, IDS, options=CalibrationOptions(accuracy="paper", centre=True), **FAST)
    attention = paper.model.layers[0].self_attn
    assert attention.q_proj.input_centre is attention.k_proj.input_centre is attention.v_proj.input_centre
    with torch.no_grad():
        x = torch.cat([dense.model.layers[0].input_layernorm(dense.model.embed_tokens(row)) for row in IDS[:-1]])
    # FP32 values, summed in FP64
    torch.testing.assert_close(attention.q_proj.input_centre.view(torch.float32), x.mean(0), rtol=1e-6, atol=1e-7)
    moments = Moments(64)
    for row in x.view(7, 24, 64):  # moments of the whole D(x~): the layer adds D(W) mu, not W mu
        centre = attention.q_proj.input_centre.view(torch.float32)
        moments.add(dequantize_input(quantize_input(row, 1, centre), centre, row.dtype))
    own = dense.model.layers[0].self_attn
    expected = gptq([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight], moments)[0].q
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


def test_option_refusals():
    for wrong in (dict(method="best"), dict(accuracy="best"), dict(budget=2.0), dict(backward="best"), dict(gradients="best")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CalibrationOptions(**wrong)
    with pytest.raises(ValueError, match="offload"):
        calibrate(tiny_llama(), IDS, offload="tape", **FAST)
    with pytest.raises(ValueError, match="cached"):
        CalibrationOptions(backward="gptq", weight_layouts="transient")


# ---------------------------------------------------------------------------------------------- terms under a budget


def test_terms_are_bought_by_gain_per_work():
    def site(name, work, one):
        return terms_module.Survey([name], work, one, 0.01 * one)

    surveys = [site("a", 10, 1.0), site("b", 40, 8.0), site("c", 30, 2.9), site("d", 20, 0.1)]
    chosen = {b: [n for n, t in terms_module.choose(surveys, b).items() if t == 2] for b in (0.0, 0.1, 0.5, 0.7, 0.8, 1.0)}
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


# ---------------------------------------------------------------------------------------------- the backward layout


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
    calibrate(exact, IDS, options=CalibrationOptions(gradients="bf16"), **FAST)
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
    expected = gptq_backward(down.forward_layout, moments).q
    # sums in another order than the layer by itself may move a value over a threshold
    assert (down.backward_weight != expected.codes).float().mean() < 0.02


# ---------------------------------------------------------------------------------------------- on disk


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
from conftest import tiny_llama
from test_calibrate import FAST, IDS, OPTIONS
from peft_nvfp4.calibration import store
from peft_nvfp4.calibration.run import calibrate
folder, count, when = sys.argv[2], int(sys.argv[3]), sys.argv[4]
replace = os.replace
def dying(source, target):
    global count
    count -= 1
    if count == 0 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
store.os.replace = dying
calibrate(tiny_llama(num_hidden_layers=3), IDS, options=OPTIONS, output_dir=folder, **FAST)
"""

OPTIONS = CalibrationOptions(budget=0.3, centre=True, backward="gptq", report_tokens=8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    model = tiny_llama(num_hidden_layers=3)
    calibrate(model, IDS, options=OPTIONS, output_dir=folder, **FAST)
    return model, folder


@pytest.mark.parametrize("kill_at, when", [(3, "before"), (9, "after")])
def test_killed_and_resumed_is_uninterrupted(whole, tmp_path, kill_at, when):
    """Files are renamed into place in this order: the manifest with the survey; then each layer, and the manifest; then each
    backward layout, and the manifest."""
    whole, folder = whole
    resumed = tiny_llama(num_hidden_layers=3)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path / "killed"), str(kill_at), when]
    assert subprocess.run(script, env=env, capture_output=True).returncode == -signal.SIGKILL
    manifest = json.loads((tmp_path / "killed" / "manifest.json").read_text())
    done = {part: len(manifest[part]) for part in ("layers", "backward")}
    assert done == {3: {"layers": 0, "backward": 0}, 9: {"layers": 3, "backward": 1}}[kill_at]
    report = calibrate(resumed, IDS, options=OPTIONS, output_dir=tmp_path / "killed", **FAST)
    assert_same_model(whole, resumed)
    assert list(report.layers) == ["model.layers.0", "model.layers.1", "model.layers.2"]
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(names) == 6
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


def test_a_folder_of_another_calibration_is_refused(tmp_path):
    calibrate(tiny_llama(), IDS, output_dir=tmp_path, **FAST)
    before = bits_of_folder(tmp_path)
    with pytest.raises(ValueError, match="other settings;"):
        calibrate(tiny_llama(), IDS, options=CalibrationOptions(accuracy="paper"), output_dir=tmp_path, **FAST)
    with pytest.raises(ValueError, match="other data;"):
        calibrate(tiny_llama(), IDS.roll(1, 0), output_dir=tmp_path, **FAST)
    changed = tiny_llama()
    changed.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="other model;"):
        calibrate(changed, IDS, output_dir=tmp_path, **FAST)
    assert bits_of_folder(tmp_path) == before
    again = tiny_llama()
    calibrate(again, IDS, output_dir=tmp_path, **FAST)  # finished: loads


def bits_of_folder(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "report.png"}


def test_applied_to_another_copy(tmp_path):
    model, other = tiny_llama(), tiny_llama()
    calibrate(model, IDS, options=CalibrationOptions(accuracy="paper", centre=True), output_dir=tmp_path, **FAST)
    names = apply_calibration(other, tmp_path)
    assert len(names) == 14
    assert_same_model(model, other)
    attention = other.model.layers[0].self_attn
    assert attention.q_proj.input_centre is attention.v_proj.input_centre
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, other(IDS).logits)
    transient = tiny_llama()
    apply_calibration(transient, tmp_path, weight_layouts="transient")
    assert transient.model.layers[0].mlp.up_proj.backward_weight is None

    wrong = tiny_llama(hidden_size=32)
    with pytest.raises(ValueError, match="other weights"):
        apply_calibration(wrong, tmp_path)
    assert not frozen_layers(wrong)
    with pytest.raises(ValueError, match="manifest.json is missing"):
        apply_calibration(tiny_llama(), tmp_path / "nothing")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["layers"]["model.layers.1"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="not finished.*model.layers.1"):
        apply_calibration(tiny_llama(), tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(ValueError, match="upgrade"):
        apply_calibration(tiny_llama(), tmp_path)


def test_report(tmp_path):
    report = calibrate(tiny_llama(), IDS, output_dir=tmp_path, **FAST)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["means"] == pytest.approx(report.means()) and saved["layers"].keys() == report.layers.keys()
    row = saved["layers"]["model.layers.0"]
    assert row["seconds"] > 0 and row["peak_gib"] > 0 and len(row["linears"]) == 7
    assert "W4A4 error" in report.summary(row) and "2 layers" in str(report)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


# ---------------------------------------------------------------------------------------------- with the rest of the package


def test_peft_takes_the_calibrated_base_as_it_is():
    model = tiny_llama()
    calibrate(model, IDS, **FAST)
    before = {k: t.clone() for k, t in bits(model).items()}
    config = NVFP4LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    loss = peft(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert all(p.grad is not None for n, p in peft.named_parameters() if "lora_B" in n)
    after = {k.replace("base_model.model.", "").replace(".base_layer", ""): t for k, t in bits(peft).items()}
    assert before.keys() == after.keys() and all(torch.equal(t, after[k]) for k, t in before.items())


def vision_model():
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(0)
    text = dict(
        model_type="llama",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
    config = Idefics3Config(text_config=text, vision_config=vision, scale_factor=2, image_token_id=127, pad_token_id=0)
    return Idefics3ForConditionalGeneration(config)


def image_batches(count: int = 4):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 120, (count, 1, 12), generator=g)
    ids[:, :, 2:6] = 127  # 32 / 8 = 4 x 4 patches, of which 2 x 2 make a token
    return [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "pixel_values": torch.randn(1, 1, 3, 32, 32, generator=g)}
        for i in ids
    ]


def test_image_prompts():
    model = vision_model()
    report = calibrate(model, image_batches(), **FAST)
    assert list(report.layers) == ["model.text_model.layers.0", "model.text_model.layers.1"]
    assert any("vision_model" in n for n in report.dense) and not any("vision" in n for n, _ in frozen_layers(model))
    other = vision_model()
    text = [{"input_ids": b["input_ids"].clamp(max=120), "attention_mask": b["attention_mask"]} for b in image_batches()]
    calibrate(other, text, **FAST)
    a, b = bits(model), bits(other)
    assert any(not torch.equal(a[name], b[name]) for name in a)  # the images mattered
    both = vision_model()
    report = calibrate(both, image_batches(), layers=["vision_model.encoder.layers", "text_model.layers"], **FAST)
    assert list(report.layers) == [
        f"model.{kind}_model.{rest}.{i}" for kind, rest in (("vision", "encoder.layers"), ("text", "layers")) for i in (0, 1)
    ]
    with torch.no_grad():
        assert torch.isfinite(both(**image_batches(1)[0]).logits).all()


@pytest.mark.gpu
def test_on_a_gpu():
    """The model stays on the CPU; the result is that of the CPU but for the order of sums."""
    here, there = tiny_llama(torch.bfloat16), tiny_llama(torch.bfloat16)
    options = CalibrationOptions(backward="gptq", centre=True, accuracy="paper")
    calibrate(here, IDS, options=options, **FAST)
    calibrate(there, IDS, options=options, device="cuda", progress=False)
    assert {p.device.type for p in there.parameters()} == {"cpu"}
    dense = tiny_llama(torch.bfloat16)
    assert abs(logit_error(here, dense) - logit_error(there, dense)) < 0.1 * logit_error(here, dense)


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
    expected = gptq([m.weight for m in (own.q_proj, own.k_proj, own.v_proj)], moments, GPTQOptions(asymmetric=True))[0].q
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, expected.codes)


def test_config_takes_a_calibration(tmp_path):
    """The model gets the calibrated linears bit for bit, whatever the preset says; a further adapter takes them as they are."""
    calibrated = tiny_llama()
    calibrate(calibrated, IDS, options=CalibrationOptions(budget=0.4), output_dir=tmp_path / "c", **FAST)
    config = lambda **k: NVFP4LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **k)
    peft = get_peft_model(tiny_llama(), config(calibration=str(tmp_path / "c")))
    got = {k.replace("base_model.model.", "").replace(".base_layer", ""): t for k, t in bits(peft).items()}
    expected = bits(calibrated)
    assert got.keys() == expected.keys() and all(torch.equal(t, got[k]) for k, t in expected.items())
    peft.add_adapter("second", config())  # its preset does not fit the terms, which are the calibration's
    get_peft_model(calibrated, config())
    peft.save_pretrained(tmp_path / "adapter")
    assert NVFP4LoraConfig.from_pretrained(tmp_path / "adapter").calibration == str(tmp_path / "c")
    with pytest.raises(ValueError, match="nvfp4"):
        config(backend="bf16", calibration="c")
    with pytest.raises(ValueError, match="holds no calibration"):
        get_peft_model(tiny_llama(), config(calibration=str(tmp_path / "nothing")))
