"""inspect_adapter(): what binds, what does not, and what the adapter was trained on."""

import copy
import json
import re
import warnings
from dataclasses import asdict

import pytest
import torch
from _assertions import assert_same_bits
from _lora_layers import assert_same_packed
from conftest import tiny_llama
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from peft_nvfp4 import NVFP4LoraConfig, attach, detach, freeze_model, inspect_adapter
from peft_nvfp4.fusion.attach import attached
from peft_nvfp4.lora.fingerprint import BASE_FILE, base_record
from peft_nvfp4.quantization.freeze import frozen_layers

IDS = torch.arange(24).reshape(2, 12) * 7 % 128


def config(**settings):
    return NVFP4LoraConfig(**{**dict(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False), **settings})


def saved(folder, base=None, **settings):
    model = get_peft_model(base or tiny_llama(), config(**settings))
    model.save_pretrained(folder)
    return model


def frozen(backend="nvfp4", seed=0, **settings):
    model = tiny_llama()
    if seed:
        for p in model.parameters():
            p.data += 0.02 * torch.randn_like(p)
    return freeze_model(model, backend, progress=False, **settings)


@pytest.mark.parametrize("backend", ("nvfp4", "nf4", "bf16"))
def test_binds_to_its_own_base(tmp_path, backend):
    """No warning; the logits' change is the adapter's own."""
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    model = detach(saved(tmp_path, backend=backend)).eval()
    with torch.no_grad():
        adapter = model(input_ids=IDS).logits
        with model.disable_adapter():
            base = model(input_ids=IDS).logits
    report = inspect_adapter(frozen(backend), tmp_path, probe=IDS)
    assert report.binds and report.layers == 14 and report.ranks == [4] and report.warnings == []
    assert report.logit_change == pytest.approx(((adapter - base).norm() / base.norm()).item(), rel=1e-5)
    assert report.changed_choice == pytest.approx((adapter.argmax(-1) != base.argmax(-1)).float().mean().item())
    assert report.trained_on["fingerprint"] == report.base["fingerprint"]
    assert report.trained_on["source"] == base_record(tiny_llama())["source"]
    assert "binds (14 layers" in str(report) and json.loads(json.dumps(asdict(report)))["binds"]


@pytest.mark.parametrize("init", (False, "pissa"))
def test_base_is_given_back_as_it_was(tmp_path, init):
    saved(tmp_path, init_lora_weights=init)
    base = frozen()
    attach(base)
    base.train()
    base.model.norm.weight.requires_grad_(True)
    stored = {n: {k: t.clone() for k, t in m.packed_tensors().items()} for n, m in frozen_layers(base)}
    flags = {n: p.requires_grad for n, p in base.named_parameters()}
    with torch.no_grad():
        before = base(input_ids=IDS).logits
        assert inspect_adapter(base, tmp_path, probe=IDS).logit_change > 0
        assert_same_bits(base(input_ids=IDS).logits, before, "logits")
    assert base.training and attached(base) and flags == {n: p.requires_grad for n, p in base.named_parameters()}
    for name, layer in frozen_layers(base):
        assert_same_packed(dict(layer.packed_tensors()), stored[name])
    get_peft_model(base, config())  # nothing is left of the adapter


def test_stock_adapter_on_a_dense_base(tmp_path):
    """Not trained here: nothing is known of its base, but keys, shapes and logits are."""
    get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(tmp_path)
    assert not (tmp_path / BASE_FILE).exists()
    report = inspect_adapter(tiny_llama(), tmp_path)
    assert report.binds and report.layers == 2 and report.logit_change > 0 and report.base["format"] == "bf16"
    assert report.warnings == [f"nothing says which base it was trained on ({BASE_FILE} is missing)"]


UP = "base_model.model.model.layers.0.mlp.up_proj"


PROBLEMS = {  # case -> ({tensor: its new shape, None: it is left out}, what is said)
    "module": (
        {UP.replace("0", "9") + ".lora_A.weight": (4, 64)},
        "layers.9.mlp.up_proj: the base has no place for lora_A.weight",
    ),
    "parameter": ({"base_model.model.extra.weight": (4,)}, "extra.weight: the base has no place for it"),
    "half": ({f"{UP}.lora_B.weight": None}, "mlp.up_proj: the adapter holds no lora_B.weight"),
    "missing": (
        {f"{UP}.lora_A.weight": None, f"{UP}.lora_B.weight": None},
        "no lora_A.weight, though its config names this target, the adapter holds no lora_B.weight",
    ),
    "shape": ({f"{UP}.lora_A.weight": (4, 32)}, "lora_A.weight has the shape .4, 32., and the base takes .4, 64."),
    "rank": ({f"{UP}.lora_A.weight": (3, 64)}, "lora_A.weight has the shape .3, 64., and the base takes .4, 64."),
    "norm": ({"base_model.model.model.norm.weight": (63,)}, "norm.weight: it has the shape .63,., and the base takes .64,."),
    "packed": ({f"{UP}.weight": (176, 64)}, "up_proj.weight: the base has no place for it"),
}


@pytest.mark.parametrize("changes, problem", PROBLEMS.values(), ids=PROBLEMS)
def test_does_not_bind(tmp_path, changes, problem):
    saved(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file) | {name: None if shape is None else torch.zeros(shape) for name, shape in changes.items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, file)
    report = inspect_adapter(frozen(), tmp_path)
    assert not report.binds and report.logit_change is None
    assert len(report.problems) == 1 and re.search(problem, report.problems[0])
    assert "DOES NOT BIND" in str(report)


@pytest.mark.parametrize(
    "settings",
    (
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"trainable_token_indices": [3, 5]},
        {},
    ),
    ids=str,
)
@pytest.mark.parametrize("tied", (False, True))
def test_saved_embeddings_have_their_place(tmp_path, settings, tied):
    """PEFT saves them beside the adapter, in its own form or in the base's."""
    model = get_peft_model(tiny_llama(tie_word_embeddings=tied), config(**settings))
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    report = inspect_adapter(freeze_model(tiny_llama(tie_word_embeddings=tied), progress=False), tmp_path)
    assert report.binds and report.problems == [] and report.logit_change > 0


def test_another_models_adapter_does_not_bind(tmp_path):
    saved(tmp_path, tiny_llama(hidden_size=32, intermediate_size=96))
    report = inspect_adapter(frozen(), tmp_path)
    assert not report.binds and len(report.problems) == 14 and "and 9 more" in str(report)


@pytest.mark.parametrize(
    "settings",
    (
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"lora_bias": True},
        {"rank_pattern": {"up_proj": 2}},
        {"target_modules": ["embed_tokens", "q_proj", "up_proj", "down_proj"]},
        {"target_modules": ["up_proj"], "layers_to_transform": [1]},
    ),
    ids=lambda settings: " ".join(settings),
)
def test_every_kind_of_adapter_binds(tmp_path, settings):
    saved(tmp_path, **settings)
    report = inspect_adapter(frozen(), tmp_path)
    assert report.binds and report.logit_change > 0, report.problems
    targets = settings.get("target_modules", "all-linear")
    assert report.layers == (14 if targets == "all-linear" else 1 if len(targets) == 1 else 7)
    assert report.ranks == ([2, 4] if "rank_pattern" in settings else [4])


def test_a_base_without_the_targets_is_a_problem(tmp_path):
    saved(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["c_attn"]}))
    report = inspect_adapter(frozen(), tmp_path)
    assert not report.binds and "c_attn" in report.problems[0]


def test_what_is_no_adapter_is_refused(tmp_path):
    base = frozen()
    with pytest.raises(ValueError, match="holds no adapter: adapter_config.json is missing"):
        inspect_adapter(base, tmp_path)
    model = saved(tmp_path)
    with pytest.raises(ValueError, match="base carries an adapter"):
        inspect_adapter(model, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match="cannot be read"):
        inspect_adapter(base, tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match="a pickle, adapter_model.bin, is not read"):
        inspect_adapter(base, tmp_path)
    get_peft_model(tiny_llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[])).save_pretrained(tmp_path / "ia3")
    with pytest.raises((ValueError, TypeError)):
        inspect_adapter(base, tmp_path / "ia3")


def test_another_format_is_warned_of(tmp_path):
    saved(tmp_path)
    report = inspect_adapter(tiny_llama(), tmp_path)
    assert report.binds and report.logit_change > 0
    assert len(report.warnings) == 1 and "trained on a nvfp4 base and this one is bf16" in report.warnings[0]
    other = tiny_llama()
    other.model.layers[0].mlp.up_proj.weight.data += 1
    report = inspect_adapter(other, tmp_path)
    assert len(report.warnings) == 2 and "another model: the dense weights differ" in report.warnings[1]


def test_another_base_of_the_same_format_is_warned_of(tmp_path):
    saved(tmp_path)
    for base in (frozen(seed=1), frozen(skip_modules=["o_proj"]), frozen(accuracy="paper")):
        assert "trained on another nvfp4 base" in inspect_adapter(base, tmp_path, probe=False).warnings[0]
    assert inspect_adapter(frozen(weight_layouts="transient"), tmp_path, probe=False).warnings == []


def test_merge_aware_and_residual_inits_are_warned_of(tmp_path):
    saved(tmp_path, merge_aware=True)
    report = inspect_adapter(tiny_llama(), tmp_path)
    assert "trained merge-aware" in report.warnings[0]
    model = saved(tmp_path, merge_aware=True).eval()
    with torch.no_grad():
        adapter = model(input_ids=IDS).logits
        with model.disable_adapter():
            base = model(input_ids=IDS).logits
    report = inspect_adapter(frozen(), tmp_path, probe=IDS)
    assert report.warnings == []
    assert report.logit_change == pytest.approx(((adapter - base).norm() / base.norm()).item(), rel=1e-5)


def test_an_adapter_without_effect_is_warned_of(tmp_path):
    saved(tmp_path, init_lora_weights=True)
    report = inspect_adapter(frozen(), tmp_path)
    assert report.logit_change == 0 and report.warnings == ["the adapter changes no logit on the probe"]


def test_record_is_written_for_plain_lora_on_a_frozen_base(tmp_path):
    model = get_peft_model(frozen(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / BASE_FILE).read_text())
    assert record["format"] == "nvfp4" and record["source"] is None
    assert record["fingerprint"] == base_record(frozen())["fingerprint"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LoraConfig.from_pretrained(str(tmp_path))  # stock PEFT does not mind


def test_record_of_pissa_is_of_the_base_before_it(tmp_path):
    """Loading such an adapter makes the residual base anew, from the original one."""
    saved(tmp_path, init_lora_weights="pissa")
    report = inspect_adapter(frozen(), tmp_path)
    assert report.warnings == [] and report.trained_on["init"] == "pissa" and report.logit_change > 0


def test_fingerprint_sees_single_changes():
    base = base_record(frozen())
    for change in ("weight", "weight_scales", "weight_gscale"):
        model = frozen()
        getattr(model.model.layers[1].mlp.down_proj, change).data[0] ^= 1
        assert base_record(model)["fingerprint"] != base["fingerprint"], change
    model = copy.deepcopy(frozen())
    model.to(torch.bfloat16)
    assert base_record(model) == base
    half = tiny_llama(torch.bfloat16)
    record = base_record(half)
    assert record == base_record(freeze_model(copy.deepcopy(half), "bf16", progress=False)) == base_record(half.float())


@pytest.mark.parametrize(
    "content", ("{", "[]", '{"format_version": 1}', '{"format_version": "x", "format": 1, "fingerprint": 2}')
)
def test_damaged_record_raises(tmp_path, content):
    saved(tmp_path)
    (tmp_path / BASE_FILE).write_text(content)
    with pytest.raises(ValueError, match="is damaged"):
        inspect_adapter(frozen(), tmp_path)
    (tmp_path / BASE_FILE).write_text('{"format_version": 2, "format": "nvfp4", "fingerprint": ""}')
    with pytest.raises(ValueError, match="upgrade peft_nvfp4"):
        inspect_adapter(frozen(), tmp_path)
