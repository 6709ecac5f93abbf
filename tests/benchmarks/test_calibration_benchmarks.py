"""The benchmarks of calibration on a tiny random model: what they change of a model is what they say, and they run to the end."""

import copy
import json
from types import SimpleNamespace

import calibrate_vlm
import gradient_cosine
import input_specs
import perplexity
import pytest
import rotation
import texts
import torch
from conftest import tiny_llama

from peft_nvfp4 import freeze_model
from peft_nvfp4.autograd.frozen_linear import rounded_input
from peft_nvfp4.calibration.run import CalibrationOptions, calibrate
from peft_nvfp4.quantization.freeze import dequantize_model, frozen_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")
IDS = torch.randint(1, 128, (4, 24), generator=torch.Generator().manual_seed(3))


class Letters:
    """A tokenizer: a token is a letter's number."""

    eos_token_id, pad_token_id = 0, 0

    def __init__(self):
        self.added = []

    def __call__(self, text):
        return SimpleNamespace(input_ids=[1 + ord(c) % 120 for c in text])

    def __len__(self):
        return 128 + len(self.added)

    def add_tokens(self, tokens, special_tokens):
        self.added += tokens

    def convert_tokens_to_ids(self, token):
        return 128 + self.added.index(token)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def with_gains(**k):
    """Norm gains that differ between channels and norms, as trained ones do."""
    model = tiny_llama(**k)
    g = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data = torch.exp(torch.randn(p.shape, generator=g))
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
def test_a_rotation_leaves_the_function(tied):
    model = with_gains(tie_word_embeddings=tied)
    original, before, weight = copy.deepcopy(model), logits(model), model.model.layers[1].mlp.up_proj.weight.detach().clone()
    rotation.rotate_(model, 0)
    assert not torch.allclose(model.model.layers[1].mlp.up_proj.weight, weight, atol=0.01)
    # FP32, sums of up to 176 terms in another order
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    assert rotation.check(original, model, IDS) < 1e-4
    assert model.model.layers[0].input_layernorm.weight.unique().tolist() == [1]
    model.model.norm.weight.data *= 2
    with pytest.raises(RuntimeError, match="the rotation changed the function"):
        rotation.check(original, model, IDS)


def test_inputs_change_and_weights_stay():
    model = tiny_llama().eval()
    calibrate(model, IDS, options=CalibrationOptions(accuracy="paper", offset=True), device="cpu", progress=False)
    own, offsets = logits(model), input_specs.offsets_of(model)
    assert len(offsets) == 14 and input_specs.added_work(model) == 0
    input_specs.set_inputs(model, perplexity.PRESETS["high"])
    assert input_specs.added_work(model) == 1 and not input_specs.offsets_of(model) and not torch.equal(logits(model), own)
    input_specs.set_inputs(model, input_specs.Inputs(("gate/up",), ("gate/up", "o")), offsets)
    terms = {n.rpartition(".")[2]: (m.options.terms, m.input_offset is not None) for n, m in frozen_layers(model)}
    assert terms["up_proj"] == (2, False) and terms["o_proj"] == (1, True) and terms["down_proj"] == (1, False)
    input_specs.set_inputs(model, input_specs.Inputs(input_specs.ALL, input_specs.ALL, last=True), offsets)
    assert [m.options.terms for _, m in frozen_layers(model)] == [1] * 7 + [2] * 7
    assert [m.input_offset is not None for _, m in frozen_layers(model)] == [True] * 7 + [False] * 7
    input_specs.set_inputs(model, perplexity.PER_SITE["paper, centred at all sites"], offsets)
    assert torch.equal(logits(model), own)  # back to what was calibrated


def test_exact_and_rounded_inputs():
    dense = tiny_llama().eval()
    model = freeze_model(copy.deepcopy(dense), accuracy="paper", progress=False)
    with input_specs.exact_inputs(model):
        weights_only = logits(model)
    w4a4 = logits(model)
    assert not torch.equal(weights_only, w4a4)
    dequantized = dequantize_model(model)
    assert torch.equal(logits(dequantized), weights_only)
    with input_specs.rounded_inputs(dequantized, perplexity.PRESETS["paper"]):
        # the same products: D(x~) D(W) in FP32
        torch.testing.assert_close(logits(dequantized), w4a4, rtol=1e-4, atol=1e-5)
    seen = []
    offsets = {n: torch.full((m.in_features,), 0.5) for n, m in dense.named_modules() if isinstance(m, torch.nn.Linear)}
    with input_specs.rounded_inputs(dense, input_specs.Inputs(("q/k/v",), ("o",)), offsets):
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
        attention = dense.model.layers[0].self_attn
        seen = [attention.q_proj(x), attention.o_proj(x)]
    assert torch.equal(seen[0], torch.nn.functional.linear(rounded_input(x, 2), attention.q_proj.weight))
    assert torch.equal(seen[1], torch.nn.functional.linear(rounded_input(x, 1, offsets["lm_head"]), attention.o_proj.weight))


@pytest.fixture
def files(tmp_path):
    """Two files of text, and a stand-in for the real model."""
    words = [f"{chr(97 + i % 26) * (3 + i % 5)} text number {i} " * 30 for i in range(30)]
    (tmp_path / "a.txt").write_text("short\n" + "\n".join(words[:15]))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in words[15:]))
    return [tmp_path / "a.txt", tmp_path / "b.jsonl"]


def test_texts_are_split(files):
    calibration, held_out = texts.split(files)
    assert len(calibration) == 20 and len(held_out) == 10 and not set(calibration) & set(held_out)
    assert [len(p) for p in texts.pieces(["x" * 9000])] == [4000, 4000, 1000]
    assert texts.token_ids(held_out, Letters(), 3, 50, 0).shape == (3, 50)
    with pytest.raises(ValueError, match="--text more"):
        texts.token_ids(held_out, Letters(), 3000, 50, 0)


def arguments(files, tmp_path, **k):
    shared = dict(calib=6, eval=3, length=32, batch=2, dtype="fp32", layers=None, text=files, seed=0, out=tmp_path)
    return SimpleNamespace(**{"device": torch.device("cpu"), **shared, **k})


def test_perplexity_to_the_end(files, tmp_path, monkeypatch):
    monkeypatch.setattr(perplexity.data, "load_smollm2", lambda dtype, layers: (with_gains(), Letters()))
    some = ["paper, centred", "paper", "balanced"]
    run = perplexity.Run(arguments(files, tmp_path, rotate=0, recipes=some))
    run.run()
    saved = json.loads((tmp_path / "perplexity_rotated_full_cpu.json").read_text())
    rows = {(r["weights"], r["inputs"]): r for r in saved["rows"]}
    assert len(rows) == len(saved["rows"]) == 1 + 1 + 4 + 3 + 3 * 2 + len(perplexity.PER_SITE) - 1 + 2
    assert rows["BF16", "exact"]["dnll"] == 0 and saved["rotated"]["fp32_logits_difference"] < 1e-4
    work = rows["to nearest", "balanced"]["added_work"]
    # q, k, v (64 x 128) and gate, up (2 x 64 x 176) of those and o (64 x 64), down (176 x 64)
    assert work == pytest.approx(64 * (128 + 352) / (64 * (128 + 352 + 64 + 176)))
    gptq, nearest = rows["GPTQ for paper", "as calibrated"]["dnll"], rows["to nearest", "paper"]["dnll"]
    assert saved["findings"]["share of the loss of W4A4 to nearest that GPTQ gives back"] == pytest.approx(1 - gptq / nearest)
    assert "high minus W4A16, nats" not in saved["findings"]


def test_gradient_cosine_to_the_end(files, tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_cosine.data, "load_smollm2", lambda dtype, layers: (with_gains(), Letters()))
    gradient_cosine.run(arguments(files, tmp_path, accuracy="balanced", batches=2))
    rows = json.loads((tmp_path / "gradient_cosine_balanced_cpu.json").read_text())["rows"]
    cosines = {name: row["cosine"] for name, row in rows.items()}
    assert cosines[gradient_cosine.EXACT] == pytest.approx(1)
    # Over 24 models like this one, with weights from other seeds: "dy rounded" minus the default, which has the error of W_b on
    # top, is 0.0055 +- 0.0026 (0.0025 or more); the default minus W_b from the BF16 weight, which misses D(W_f) by the whole
    # error of the forward layout, 0.0071 +- 0.0041 (0.0002 or more). This model's 0.0042 and 0.0107 are several times the
    # 0.0008 that the kernels of another CPU make. GPTQ lowers the error for the dy that it has seen, which one model of this
    # size need not show on others: 0.0023 +- 0.0027 above the default, and below it for 4 of the 24. Three deviations below the
    # mean is its bound.
    assert 1 > cosines[gradient_cosine.ROUNDED] > cosines[gradient_cosine.DEFAULT] > cosines[gradient_cosine.DENSE]
    assert 0 != cosines[gradient_cosine.SOLVED] - cosines[gradient_cosine.DEFAULT] > 0.0023 - 3 * 0.0027
    assert cosines[gradient_cosine.SOLVED] > cosines[gradient_cosine.DENSE]
    assert len(rows[gradient_cosine.DEFAULT]["layers"]) == 2


def test_a_language_model_becomes_the_text_tower():
    lm, tokenizer = tiny_llama().eval(), Letters()
    embedding, before = lm.model.embed_tokens.weight.detach().clone(), logits(lm)
    model = calibrate_vlm.build(lm, tokenizer)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits[..., :128], before)
    pixels = torch.rand(1, 2, 3, calibrate_vlm.TILE, calibrate_vlm.TILE, generator=torch.Generator().manual_seed(1)) * 2 - 1
    ids = torch.full((1, 2 * calibrate_vlm.TOKENS), tokenizer.convert_tokens_to_ids("<image>"))
    batch = {"input_ids": torch.cat([IDS[:1], ids, IDS[1:2]], 1), "pixel_values": pixels}
    seen = []
    model.model.text_model.layers[0].register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    with torch.no_grad():
        model(**batch)
    image = seen[0][0, 24 : 24 + ids.numel()]
    assert image.std() == pytest.approx(embedding.std(), rel=0.5)  # scaled on one image, measured on another
    other = freeze_model(copy.deepcopy(model), progress=False)
    found = calibrate_vlm.measure(model, {"same": copy.deepcopy(model), "frozen": other}, [batch], "cpu")
    assert all(v == pytest.approx(0, abs=1e-6) for row in found["same"].values() for v in row.values())
    assert all(v > 0 for row in found["frozen"].values() for v in row.values()) and len(found["frozen"]) == 3
