"""What is saved with an adapter and read again: the configuration with its own fields (in the side-car, a file beside PEFT's),
and the adapter, in every way that PEFT and transformers have: onto a dense model or a frozen one, as a second adapter, on the
meta device, swapped in place, and injected without a PeftModel."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from _peft_models import U, adapter_tensors, by_backend, config, frozen_lora, logits, same_tensors, train, trained
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model

from peft_nvfp4 import NVFP4LoraConfig, attach, detach, freeze_model
from peft_nvfp4.fusion.attach import attached
from peft_nvfp4.fusion.mlp import FusedGatedMLP
from peft_nvfp4.lora.config import SIDE_CAR
from peft_nvfp4.quantization.options import NAMES

VALUES = {
    "backend": ["nvfp4", "nf4", "bf16"],
    "accuracy": ["paper", "balanced", "high"],
    "memory": ["auto", "fast", "small", "smallest"],
    "skip_modules": [[], ["lm_head", "layers.0.mlp"]],
    "calibration": [None, "a/folder"],
    "merge_aware": [False, True],
}
by_own_field = pytest.mark.parametrize(
    "field, value", [(f, v) for f, values in VALUES.items() for v in values], ids=lambda v: str(v).replace("'", "")
)


def test_every_own_field_is_tested():
    stock_fields = {f.name for f in dataclasses.fields(LoraConfig)}
    own = {f.name for f in dataclasses.fields(NVFP4LoraConfig)} - stock_fields
    assert own == set(VALUES) == set(NAMES)


@by_own_field
@pytest.mark.parametrize("way", ["save", "replace", "deepcopy", "pickle"])
def test_configuration_round_trip(tmp_path, field, value, way):
    dropout = 0.0 if field == "merge_aware" else 0.25  # the two do not go together
    before = config(**{field: value}, lora_dropout=dropout, rank_pattern={"q_proj": 2}, modules_to_save=["norm"])
    if way == "save":
        before.save_pretrained(str(tmp_path))
        after = NVFP4LoraConfig.from_pretrained(str(tmp_path))
    elif way == "replace":
        after = dataclasses.replace(before, r=16)
        assert after.r == 16
        after.r = before.r
    else:
        after = copy.deepcopy(before) if way == "deepcopy" else pickle.loads(pickle.dumps(before))
    assert type(after) is NVFP4LoraConfig and getattr(after, field) == value
    assert dataclasses.asdict(after) == dataclasses.asdict(before)


def test_configuration_in_a_subfolder(tmp_path):
    config(backend="nf4").save_pretrained(str(tmp_path / "best"))
    assert NVFP4LoraConfig.from_pretrained(str(tmp_path), subfolder="best").backend == "nf4"


@pytest.mark.parametrize("field", VALUES)
def test_a_side_car_from_before_a_field_existed(tmp_path, field):
    """The field gets its default."""
    defaults = NVFP4LoraConfig().options
    config(**{field: next(v for v in VALUES[field] if v != getattr(defaults, field))}).save_pretrained(str(tmp_path))
    side_car = json.loads((tmp_path / SIDE_CAR).read_text())
    del side_car[field]
    (tmp_path / SIDE_CAR).write_text(json.dumps(side_car))
    assert NVFP4LoraConfig.from_pretrained(str(tmp_path)).options == defaults


def test_configuration_from_the_hub(tmp_path, monkeypatch):
    """A repository in the Hub's cache layout, read offline: the side-car is found there like adapter_config.json. That there is
    none can only be known online."""
    repo, revision = tmp_path / "models--someone--adapter", "0" * 40
    config(backend="nf4", memory="small").save_pretrained(str(repo / "snapshots" / revision))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    read = lambda: NVFP4LoraConfig.from_pretrained("someone/adapter", cache_dir=str(tmp_path))
    assert read().r == 4 and (read().backend, read().memory) == ("nf4", "small")
    (repo / "snapshots" / revision / SIDE_CAR).unlink()
    answers = [LocalEntryNotFoundError("offline"), EntryNotFoundError("404")]

    def download(_, name, **kwargs):
        raise answers.pop(0) if name == SIDE_CAR else EntryNotFoundError("404")

    monkeypatch.setattr("peft_nvfp4.lora.side_files.hf_hub_download", download)
    with pytest.raises(ValueError, match=f"someone/adapter.*{SIDE_CAR}"):
        read()
    assert read().options == NVFP4LoraConfig().options and not answers


@pytest.mark.parametrize(
    "content, reason",
    [
        pytest.param("{", "is damaged", id="truncated"),
        pytest.param("", "is damaged", id="empty"),
        pytest.param("{}", "format_version", id="no-version"),
        pytest.param("[1, 2]", "is damaged", id="a-list"),
        pytest.param("null", "is damaged", id="null"),
        pytest.param(b"\xff\xfe\x00", "is damaged", id="not-text"),
        pytest.param('{"format_version": "one"}', "", id="version-is-a-word"),
        *(pytest.param(f'{{"format_version": {v}}}', "format_version", id=v) for v in ("NaN", "true", "-1", "1.0")),
        pytest.param('{"format_version": 1, "calibration": 7}', "calibration.*strings", id="calibration-is-a-number"),
        pytest.param('{"format_version": 2, "backend": "nvfp4"}', "version 2.*upgrade", id="newer-version"),
        pytest.param('{"format_version": 1, "backend": "nvfp4", "flavour": "sweet"}', "unknown.*flavour", id="unknown-field"),
        pytest.param(
            '{"format_version": 1, "weight_layouts": "cached", "memory": "fast"}',
            "unknown settings: weight_layouts; known: .*memory.*Leave the others out",
            id="a-field-of-another-version",
        ),
        pytest.param('{"format_version": 1, "backend": "mxfp4"}', "mxfp4", id="unknown-backend"),
        pytest.param('{"format_version": 1, "skip_modules": "lm_head"}', "skip_modules", id="wrong-type"),
    ],
)
def test_a_bad_side_car_is_refused_by_name(tmp_path, content, reason):
    config().save_pretrained(str(tmp_path))
    (tmp_path / SIDE_CAR).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"(?s){SIDE_CAR}.*{reason}"):
        NVFP4LoraConfig.from_pretrained(str(tmp_path))


def test_a_configuration_of_another_method_is_refused(tmp_path):
    IA3Config(target_modules=["q_proj"], feedforward_modules=[]).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="IA3.*not LoRA"):
        NVFP4LoraConfig.from_pretrained(str(tmp_path))


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["config", "plain-on-frozen", "load_adapter"])
def test_reload_is_bit_equal(llama, tmp_path, backend, dtype, way):
    """config: a dense model is frozen again from the side-car. plain-on-frozen: a base frozen before, PEFT makes the plain
    LoraConfig of adapter_config.json; nobody asked for fusing, so the model computes what ours does when detached, and what ours
    does once it is attached. load_adapter: the same as a second adapter."""
    model = trained(llama(dtype), backend=backend)
    expected, weights = logits(model), adapter_tensors(model)
    model.save_pretrained(str(tmp_path))
    name = "default"
    if way == "config":
        read = NVFP4LoraConfig.from_pretrained(str(tmp_path))
        again = PeftModel.from_pretrained(llama(dtype), str(tmp_path), config=read)
    elif way == "plain-on-frozen":
        again = PeftModel.from_pretrained(freeze_model(llama(dtype), backend), str(tmp_path))
        assert type(again.peft_config["default"]) is LoraConfig and not attached(again)
        assert torch.equal(logits(again), logits(detach(model)))
        attach(again)
    else:
        again, name = get_peft_model(llama(dtype), config(backend=backend, r=2)), "second"
        first = logits(again)
        again.load_adapter(str(tmp_path), adapter_name=name)
        assert torch.equal(logits(again), first), "loading must not activate the second adapter"
        again.set_adapter(name)
    layers = frozen_lora(again)
    assert len(layers) == 14 and all(type(m.get_base_layer()).backend == backend for m in layers.values())
    assert same_tensors(adapter_tensors(again, name), weights)
    assert attached(again) == (backend == "nvfp4")
    assert torch.equal(logits(again), expected)
    if way == "load_adapter":
        again.set_adapter("default")
        assert torch.equal(logits(again), first)


def test_fusing_is_decided_once_for_all_adapters(llama):
    """Of a model, not of an adapter."""
    model = get_peft_model(llama(), config())
    report = model.base_model.nvfp4_report
    assert attached(model) and len(report.groups) == 4
    with pytest.warns(UserWarning, match="keeps more than memory='small' asks for"):
        model.add_adapter("b", config(memory="small"))
    assert model.base_model.nvfp4_report is report
    assert not any(m.recompute for m in model.modules() if isinstance(m, FusedGatedMLP))
    detach(model).add_adapter("c", config())
    assert attached(model) and not attached(get_peft_model(llama(), config(backend="bf16")))


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["config", "plain-on-frozen"])
def test_low_cpu_mem_usage(llama, tmp_path, backend, dtype, way):
    """PEFT makes new modules on the meta device here, which must not reach the base, nor what a fused module holds of it. It may
    round the adapter to the base's compute dtype on this path (it does so for any BF16 LoRA): exact for FP32, within U for
    BF16."""
    model = trained(llama(dtype), backend=backend)
    model.save_pretrained(str(tmp_path))
    read = NVFP4LoraConfig.from_pretrained(str(tmp_path)) if way == "config" else None
    base = llama(dtype) if way == "config" else freeze_model(llama(dtype), backend)
    again = PeftModel.from_pretrained(base, str(tmp_path), config=read, low_cpu_mem_usage=True)
    assert [n for n, p in again.named_parameters() if p.is_meta] == []
    assert attached(again) == (way == "config" and backend == "nvfp4")
    if way == "config" and backend == "nvfp4":
        assert again.base_model.nvfp4_report == model.base_model.nvfp4_report
    saved, loaded = adapter_tensors(model), adapter_tensors(again)
    assert saved.keys() == loaded.keys() and len(saved) == 28
    for key, value in saved.items():
        assert loaded[key].dtype == torch.float32
        slack = 0.0 if dtype == torch.float32 else U
        assert ((loaded[key] - value).abs() <= slack * value.abs()).all(), key
    if dtype == torch.float32:
        assert torch.equal(logits(again), logits(model))


def test_mixed_model_freezes_a_dense_base(llama):
    model = get_peft_model(llama(), config(), mixed=True)
    assert len(frozen_lora(model)) == 14, "backend='nvfp4' was asked for"


@by_backend
def test_inject_adapter_in_model(llama, backend):
    """The model itself stays the outermost module, and computes what get_peft_model's does."""
    torch.manual_seed(3)
    model = inject_adapter_in_model(config(backend=backend, init_lora_weights=False), llama())
    torch.manual_seed(3)
    usual = get_peft_model(llama(), config(backend=backend, init_lora_weights=False))
    assert not isinstance(model, PeftModel) and len(frozen_lora(model)) == 14
    assert torch.equal(logits(model), logits(usual))
    train(model)
    assert not torch.equal(logits(model), logits(usual))
