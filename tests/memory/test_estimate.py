"""The memory estimator: against what was measured on an H200, against the paper's numbers, and its limits."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from _estimates import llama

from peft_nvfp4.memory import CARDS, Settings, card, estimate, fit, largest_batch, model_shape, parse_bytes, usable
from peft_nvfp4.memory.kept import codes
from peft_nvfp4.quantization.groups import ACCURACY
from peft_nvfp4.training.callbacks import explain

# of benchmarks/bench_train.py
BENCH = Settings(accuracy="balanced", batch=4, sequence=1024, rank=16, loss="full", positions=33)
PAPER = replace(BENCH, accuracy="paper")
STOCK = replace(BENCH, adapter_bytes=2)
LIGER = replace(STOCK, loss="liger")
GRAPHS = replace(PAPER, cuda_graphs=True)
MEASURED = {  # benchmarks/results/train_h200.json, _once.json and _largest.json, Llama-3.2-1B: peak_allocated
    "bf16": (replace(STOCK, backend="bf16"), 9_411_268_096),
    "bf16-liger": (replace(LIGER, backend="bf16-liger"), 7_731_895_808),
    "qlora": (replace(STOCK, backend="nf4"), 7_967_330_816),
    "qlora-liger": (replace(LIGER, backend="nf4-liger"), 6_287_957_504),
    "paper, codes recomputed": (GRAPHS, 3_901_184_512),
    "paper": (GRAPHS, 3_978_927_616),
    "small": (replace(GRAPHS, memory="small"), 3_147_545_088),
    "balanced": (replace(GRAPHS, accuracy="balanced"), 4_132_100_608),
    "high": (replace(GRAPHS, accuracy="high"), 4_508_637_696),
    "ckpt": (replace(PAPER, memory="small", checkpointing=True), 1_917_002_240),
    "largest": (replace(PAPER, batch=28), 16_541_258_752),
}


def codes_of_attention(shape, settings):
    """Bytes of the codes of attention's output, which backward makes anew since most rows of nvfp4 were measured."""
    terms = ACCURACY[settings.accuracy]["interior"]
    return settings.tokens * codes(shape.q, terms) * (1 if settings.checkpointing else shape.layers)


@pytest.mark.parametrize("case", MEASURED)
def test_measured_peaks(case):
    settings, measured = MEASURED[case]
    expected = estimate("llama-1b", settings).peak
    if settings.backend == "nvfp4" and "recomputed" not in case:
        expected += codes_of_attention(model_shape("llama-1b"), settings)
    # 7 % is what was asked for; 2 % is where the formulas are, and a wrong one of them moves most of these by more
    assert abs(expected / measured - 1) < 0.02


class OneLayout(Settings):
    """One of the two savings of ``memory="small"``, as it was measured."""

    recompute_mlp = False


BALANCED = Settings(accuracy="balanced")
PEAKS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "peaks_h200.csv"
CASES_OF_PEAKS = {
    "bf16-ours": Settings(backend="bf16"),
    "qlora-ours": Settings(backend="nf4"),
    "bf16-liger": Settings(backend="bf16-liger", adapter_bytes=2, loss="liger"),
    "nvfp4": BALANCED,
    "nvfp4-ckpt": replace(BALANCED, checkpointing=True),
    "nvfp4-transient": OneLayout(accuracy="balanced", memory="small"),
}


def test_peaks_of_three_shapes():
    """Llama 1B, 3B and 8B, six cases, three sizes. Other backends within 2 %: each formula that was missing cost as much of some
    row. The rows of nvfp4 were measured with the codes of attention's output, and before backward stopped making zero gradients
    for codes, up to 4.4 % of a peak."""
    rows = list(csv.DictReader(PEAKS.read_text().splitlines()))
    assert len(rows) >= 54
    off = {}
    for row in rows:
        settings = CASES_OF_PEAKS[row["case"]]
        settings = replace(settings, loss="liger" if settings.loss == "liger" else "full", positions=33)
        settings = replace(settings, batch=int(row["batch"]), sequence=int(row["seq"]))
        shape = model_shape(f"llama-{row['shape']}")
        expected = estimate(shape, settings).peak
        if "nvfp4" in row["case"]:
            expected += codes_of_attention(shape, settings)
        off[row["shape"], row["case"], row["batch"]] = expected / int(row["peak_allocated"]) - 1
    for key, ratio in off.items():
        assert (-0.045 if "nvfp4" in key[1] else -0.02) < ratio < 0.02, (key, ratio)


ONCE = 1_156
"""Bytes of one term's codes of attention's output, with which these were measured (but for the second: 23,292 - 22,136)."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (PAPER, 27_904 - ONCE),
        (replace(PAPER, memory="small"), 22_136),
        (BENCH, 30_216 - ONCE),
        (replace(BENCH, accuracy="high"), 35_984 - 2 * ONCE),
        (replace(STOCK, backend="bf16"), 100_712),
        (replace(STOCK, backend="nf4"), 100_712),
        (replace(LIGER, backend="bf16-liger"), 76_136),
        (replace(PAPER, checkpointing=True), 4_096),
    ],
)
def test_measured_bytes_per_token_and_layer(settings, expected):
    assert estimate("llama-1b", settings).saved_per_token_and_layer == expected


ON_5080 = {"native_fp4": True, "workspace": card("RTX 5080").workspace}
PAPERS_BF16 = replace(LIGER, backend="bf16-liger", adapter_bytes=4, **ON_5080)
PAPERS_PACT = replace(PAPER, **ON_5080)


@pytest.mark.parametrize(
    ("settings", "gigabytes"),
    [
        (PAPERS_BF16, 7.06),
        (replace(PAPERS_BF16, checkpointing=True), 3.14),
        (PAPERS_PACT, 3.72),
        (replace(PAPERS_PACT, checkpointing=True), 2.27),
    ],
)
def test_peaks_of_the_paper(settings, gigabytes):
    """Table 9. Its GB are taken for 2**30 bytes: so all four agree, and with 10**9 all four are 3 to 10 % too small. BF16 LoRA is
    that of fused kernels: stock modules would take 9.4 GB."""
    assert abs(estimate("llama-1b", settings).peak / 2**30 / gigabytes - 1) < 0.08


@pytest.mark.parametrize(
    ("settings", "batch"),
    [(PAPERS_BF16, 10), (replace(PAPERS_BF16, backend="nf4-liger"), 12), (PAPERS_PACT, 26 * 27_904 / (27_904 - ONCE))],
)
def test_largest_batches_of_the_paper(settings, batch):
    """Table 5, Llama-1B at 1024 tokens on a 16 GB card. PACT's 26 rows are with the codes of attention's output: 27,904 bytes per
    token and layer, so as many more without as those bytes are fewer."""
    assert abs(largest_batch("llama-1b", settings, card("RTX 5080").memory) - batch) <= 1


def test_categories_add_up_to_the_peak():
    for settings, _ in MEASURED.values():
        found = estimate("llama-1b", settings)
        assert found.peak == sum(found.categories().values()) == sum(found.groups().values())
        assert found.peak == found.as_dict()["moments"][found.at] == max(found.as_dict()["moments"].values())


def test_paged_optimizers_keep_their_state_on_the_host():
    found = estimate("llama-1b", replace(BENCH, optimizer="paged_adamw_8bit"))
    assert found.static["optimizer"] == 0 and found.host == 2 * 11_272_192
    assert estimate("llama-1b", BENCH).static["optimizer"] == 8 * 11_272_192


def test_largest_batch_is_the_largest():
    memory = card("RTX 4090").memory
    n = largest_batch("llama-3b", BENCH, memory)
    assert n > 1
    assert estimate("llama-3b", replace(BENCH, batch=n)).peak <= usable(memory)
    assert estimate("llama-3b", replace(BENCH, batch=n + 1)).peak > usable(memory)
    assert largest_batch("llama-8b", replace(BENCH, backend="bf16"), 8 << 30) == 0


def test_fit_gives_up_what_costs_least_first():
    roomy = fit("llama-1b", BENCH, 80 << 30, 16)
    assert (roomy.changed, roomy.settings.batch, roomy.settings.accumulation) == ((), 16, 1)
    split = fit("llama-1b", BENCH, 8 << 30, 32)
    assert split.changed == () and split.settings.batch * split.settings.accumulation == 32
    assert split.estimate.peak <= usable(8 << 30)
    tight = fit("llama-8b", replace(BENCH, sequence=4096), 12 << 30, 4)
    assert any("checkpointed" in text for text in tight.changed) and tight.estimate.peak <= usable(12 << 30)
    with pytest.raises(ValueError, match="one row of 1024 tokens takes .* GiB"):
        fit("llama-8b", BENCH, 4 << 30, 4)
    other = fit("llama-3b", replace(BENCH, backend="nf4"), 8 << 30, 4)
    assert other.changed and other.settings.memory != "fast"
    baseline = fit("llama-3b", replace(BENCH, backend="nf4-liger"), 8 << 30, 4)
    assert set(baseline.changed) <= {"decoder layers are checkpointed"}  # stock modules keep no codes


@pytest.mark.parametrize(
    ("given_up", "words"),
    [
        ({"memory": "small"}, ("memory='small'",)),
        ({"memory": "small", "checkpointing": True}, ("memory='small'", "decoder layers are checkpointed")),
        ({"memory": "smallest", "checkpointing": True}, ("memory='smallest'", "decoder layers are checkpointed")),
    ],
)
def test_no_more_is_given_up_than_is_needed(given_up, words):
    least = estimate("llama-1b", replace(BENCH, batch=2, **given_up)).peak  # 2048 tokens, which keep a GPU busy
    memory = next(n << 20 for n in range(1 << 10, 1 << 14, 4) if usable(n << 20) >= least)
    plan = fit("llama-1b", BENCH, memory, 2)
    assert plan.changed == words and plan.settings.batch == 2
    assert plan.settings == replace(BENCH, batch=2, **given_up)


def test_fit_of_batches_that_do_not_divide():
    plan = fit("llama-1b", BENCH, 8 << 30, 17)
    assert plan.settings.batch * plan.settings.accumulation == 17


OFFLOADED = Settings(batch=1, sequence=512, memory="small", checkpointing=True)


def test_a_plan_for_a_card_that_holds_two_layers():
    """8B: 3.9 GB of weights, embedding and head of 2.1 GB. Under 6 GiB it fits with offload only."""
    plan = fit("llama-8b", OFFLOADED, 6 * 2**30, 1)
    assert plan.estimate.peak < 5 * 2**30 and plan.settings.memory == "smallest" and plan.changed == ("memory='smallest'",)


def test_what_excludes_offload_and_what_is_advised():
    for other in ({"cuda_graphs": True}, {"cards": 2, "strategy": "fsdp2"}):
        with pytest.raises(ValueError, match="memory='smallest' excludes"):
            replace(OFFLOADED, memory="smallest", **other)
        assert "memory='smallest'" not in explain("llama-8b", replace(OFFLOADED, **other))
        with pytest.raises(ValueError, match="everything given up that can be"):
            fit("llama-8b", replace(BENCH, **other), 3 << 30, 1)
    smallest = replace(OFFLOADED, memory="smallest")
    assert "memory='smallest'" in explain("llama-8b", OFFLOADED) and "memory=" not in explain("llama-8b", smallest)
    mamba = {"model_type": "mamba"}
    assert "memory='smallest'" in explain(mamba, OFFLOADED) and "memory=" not in explain(mamba, smallest)


def test_from_config_json_alone(tmp_path):
    config = llama(2).config
    config.save_pretrained(tmp_path)
    shapes = [model_shape(m) for m in (tmp_path, str(tmp_path / "config.json"), config, config.to_dict())]
    assert all(replace(s, name="") == replace(shapes[0], name="") for s in shapes)
    assert replace(model_shape(tmp_path), name="").hidden == 64


def test_phi3_has_fused_projections():
    config = {"model_type": "phi3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64}
    shape = model_shape({**config, "num_hidden_layers": 2, "tie_word_embeddings": False})
    assert [p.name for p in shape.projections] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert estimate(shape, BENCH).peak > 0


def test_multimodal_counts_the_text_decoder_and_says_so():
    text = llama(2).config.to_dict()
    shape = model_shape({"model_type": "llava", "text_config": text, "vision_config": {}})
    assert shape.hidden == 64 and "other towers" in shape.notes[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2", "n_embd": 64}, "no hidden_size"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, "mixtures of experts"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_other_kinds_of_models_are_refused(config, words):
    with pytest.raises(ValueError, match=words):
        model_shape(config)


def test_a_name_that_is_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither one of llama-1b"):
        model_shape("no-such-model")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a valid JSON"):
        model_shape(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [{"backend": "int8"}, {"optimizer": "lion"}, {"loss": "none"}, {"batch": 0}, {"rank": 1.5}, {"positions": 5000}]
    + [{"strategy": "fsdp1"}, {"cards": 0}],
)
def test_wrong_settings(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(BENCH, **wrong)


def test_targets_that_do_not_exist():
    with pytest.raises(ValueError, match="query.*; it has q_proj"):
        estimate("llama-1b", replace(BENCH, targets=("query",)))
    with pytest.raises(ValueError, match="match none"):
        estimate("llama-1b", replace(BENCH, targets="nothing"))


@pytest.mark.parametrize(
    ("text", "expected"), [("16GiB", 16 << 30), ("16 GB", 16 * 10**9), ("1.5gib", 3 << 29), ("500MiB", 500 << 20)]
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "16 apples", "GiB", "-3GiB", "1TiB"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="no amount of memory"):
        parse_bytes(text)


def test_cards():
    assert card("nvidia geforce rtx 5080") is card("rtx5080") is CARDS["RTX 5080"]
    assert card("RTX 5070").name == "RTX 5070" and card("h200").workspace == 32 << 20
    with pytest.raises(ValueError, match="unknown card"):
        card("RTX 1080")
    with pytest.raises(ValueError, match="unknown card"):
        card("RTX")  # many
