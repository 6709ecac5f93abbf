"""Packed checkpoints, published ones and this package's own, that are broken, hostile or beyond what a frozen layer can
represent: one error that names the tensor or the file and says why, no model, no code run."""

import copy
import functools
import json
import operator
import shutil

import pytest
import torch
from _broken_checkpoints import Bomb, assert_refused, change, shard_of, truncate
from conftest import tiny_llama
from published_checkpoints import CT_SETTINGS, MODELOPT_SETTINGS, OLD_MODELOPT, edit_config, write
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from peft_nvfp4 import PactConfig
from peft_nvfp4.checkpoints.settings import Published, read_settings

DOWN = "model.layers.1.mlp.down_proj"
LAYOUTS = ["compressed-tensors", "modelopt"]
LEAVES = {  # codes, block scales, global scale
    "compressed-tensors": ["weight_packed", "weight_scale", "weight_global_scale"],
    "modelopt": ["weight", "weight_scale", "weight_scale_2"],
    "own": ["weight", "weight_scales", "weight_gscale"],
}
by_layout, or_own = (pytest.mark.parametrize("layout", names) for names in (LAYOUTS, LEAVES))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> a sound checkpoint in several files."""
    root = tmp_path_factory.mktemp("published")
    for layout in LAYOUTS:
        write(root / layout, layout)
    tiny_llama(torch.bfloat16).save_pretrained(root / "dense")
    load(root / "dense").save_pretrained(root / "own", max_shard_size="40kB")
    return {layout: root / layout for layout in LEAVES}


def load(folder):
    """As a script does. (What a model of this package's own layout was quantised with, its files say.)"""
    settings = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    own = settings.get("quant_method") == "peft_nvfp4"
    config = {} if own else {"quantization_config": PactConfig()}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **config)


def raises(folder, *parts):
    assert_refused(load, folder, *parts)


@or_own
def test_untouched_copies_load(saved, tmp_path, layout):
    """What the tests below do to a file is what makes it fail."""
    change(saved[layout], tmp_path / "copy", f"{DOWN}.{LEAVES[layout][1]}", lambda t: t)
    loaded, sound = (load(folder).state_dict() for folder in (tmp_path / "copy", saved[layout]))
    assert loaded.keys() == sound.keys() and all(torch.equal(t, sound[name]) for name, t in loaded.items())


# ---------------------------------------------------------------------------------------------- files
@or_own
@pytest.mark.parametrize("keep", [0.9, 0.01, 0])
def test_truncated_shard(saved, tmp_path, layout, keep):
    file = truncate(saved[layout], tmp_path / "copy", f"{DOWN}.{LEAVES[layout][1]}", keep)
    raises(tmp_path / "copy", file, "truncated or damaged", "Download")


@or_own
def test_pickles_are_refused_unread(saved, tmp_path, layout):
    (tmp_path / "bin").mkdir()
    shutil.copy(saved[layout] / "config.json", tmp_path / "bin")
    torch.save({"model.embed_tokens.weight": Bomb(tmp_path / "boom")}, tmp_path / "bin" / "pytorch_model.bin")
    raises(tmp_path / "bin", "pytorch_model.bin", "not a safetensors file", "pickle")
    shutil.copytree(saved[layout], tmp_path / "renamed")
    tensor = f"{DOWN}.{LEAVES[layout][1]}"
    file = shard_of(tmp_path / "renamed", tensor)
    torch.save({tensor: Bomb(tmp_path / "boom")}, file)
    raises(tmp_path / "renamed", file, "damaged")
    assert not (tmp_path / "boom").exists()


@by_layout
@pytest.mark.parametrize("all_of_them", [False, True])
@pytest.mark.parametrize("absolute", [False, True])
def test_index_that_leads_out_of_its_folder(saved, tmp_path, layout, all_of_them, absolute):
    shutil.copytree(saved[layout], tmp_path / "copy")
    shutil.copytree(saved[layout], tmp_path / "elsewhere")
    path = tmp_path / "copy" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    prefix = f"{tmp_path}/elsewhere/" if absolute else "../elsewhere/"
    names = index["weight_map"]
    outside = set(names.values()) if all_of_them else {names[f"{DOWN}.weight_scale"]}
    (tmp_path / "elsewhere" / "model.safetensors.index.json").unlink()
    index["weight_map"] = {k: prefix + name if name in outside else name for k, name in names.items()}
    path.write_text(json.dumps(index))
    raises(tmp_path / "copy", path, prefix, "outside its folder")


@or_own
@pytest.mark.parametrize("leaf", [0, 1, 2])
def test_missing_tensor(saved, tmp_path, layout, leaf):
    tensor = f"{DOWN}.{LEAVES[layout][leaf]}"
    change(saved[layout], tmp_path / "copy", tensor, lambda t: None)
    raises(tmp_path / "copy", tensor, "missing in", tmp_path / "copy", "download")


def test_linear_that_is_wholly_missing(tmp_path):
    def spoil(state):
        for key in [key for key in state if key.startswith(DOWN)]:
            del state[key]

    write(tmp_path, "compressed-tensors", change=spoil)
    raises(tmp_path, DOWN, "missing in", "model-00001-of-00003.safetensors")


SHAPES = [
    (0, lambda t: t[:-1], (64, 88)),
    (0, lambda t: t[:, :80], (64, 88)),
    (1, lambda t: t[:, :10], (64, 11)),  # groups of 17.6
    (1, lambda t: t.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn), (64, 11)),  # transposed
    (1, lambda t: torch.zeros(128, 12, dtype=torch.uint8).view(torch.float8_e4m3fn), (64, 11)),  # swizzled and padded
    (2, lambda t: t.reshape(1).repeat(64), (1,)),  # one for each row
]
OWN_SHAPES = [
    (0, lambda t: t[:-1], (64, 96)),
    (0, lambda t: t[:, :88], (64, 96)),  # not padded to 32 columns
    (1, lambda t: t[:, ::2], (64, 12)),  # groups of 32
    (2, lambda t: t.repeat(2), (4,)),
]


@pytest.mark.parametrize(
    "layout, leaf, wrong, expected",
    [(layout, *case) for layout in LEAVES for case in (OWN_SHAPES if layout == "own" else SHAPES)],
)
def test_wrong_shape(saved, tmp_path, layout, leaf, wrong, expected):
    tensor = f"{DOWN}.{LEAVES[layout][leaf]}"
    file = change(saved[layout], tmp_path / "copy", tensor, lambda t: wrong(t).contiguous())
    raises(tmp_path / "copy", tensor, file, expected)


TYPES = [
    (1, lambda t: t.view(torch.uint8), ("U8", "F8_E4M3")),  # e8m0 or other bytes
    (1, lambda t: t.view(torch.uint8).view(torch.float8_e5m2), ("F8_E5M2", "F8_E4M3")),
    (2, lambda t: t.bfloat16(), ("BF16", "F32")),
]


@pytest.mark.parametrize(
    "layout, leaf, wrong, words",
    [*((layout, *case) for layout in LAYOUTS for case in TYPES), ("own", 2, lambda t: t.view(torch.float32), ("F32", "U8"))],
)
def test_wrong_type(saved, tmp_path, layout, leaf, wrong, words):
    tensor = f"{DOWN}.{LEAVES[layout][leaf]}"
    file = change(saved[layout], tmp_path / "copy", tensor, wrong)
    raises(tmp_path / "copy", tensor, file, *words)


@or_own
@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80])
def test_nan_or_negative_block_scale(saved, tmp_path, layout, byte):
    def one(t):
        t.view(torch.uint8)[3, 5] = byte
        return t

    tensor = f"{DOWN}.{LEAVES[layout][1]}"
    file = change(saved[layout], tmp_path / "copy", tensor, one)
    raises(tmp_path / "copy", tensor, file, "NaN or negative scales")


@or_own
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1e-44, 1e38])
def test_bad_global_scale(saved, tmp_path, layout, value):
    tensor = f"{DOWN}.{LEAVES[layout][2]}"
    bad = torch.tensor([value])  # bytes in this package's own layout
    file = change(saved[layout], tmp_path / "copy", tensor, lambda t: (bad.view(t.dtype) if t.dim() else bad[0]).contiguous())
    raises(tmp_path / "copy", tensor, file, "not finite and positive")


# ---------------------------------------------------------------------------------------------- what cannot be represented
@by_layout
@pytest.mark.parametrize(
    "leaf, t, reason",
    [
        ("pre_quant_scale", torch.ones(176), "AWQ"),
        ("svdquant_lora_a", torch.ones(4, 176), "low-rank"),
        ("weight_zero_point", torch.zeros(64, 11), "not symmetric"),
        ("weight_g_idx", torch.zeros(176), "another order"),
    ],
)
def test_tensors_that_change_what_a_linear_computes(saved, tmp_path, layout, leaf, t, reason):
    file = change(saved[layout], tmp_path / "copy", f"{DOWN}.{leaf}", lambda _: t)
    raises(tmp_path / "copy", f"{DOWN}.{leaf}", file, reason, "PactConfig")


@by_layout
def test_fp8_layers_among_the_others(tmp_path, layout):
    name = "model.layers.0.self_attn.o_proj"

    def spoil(state):
        for key in [key for key in state if key.startswith(name)]:
            del state[key]
        state[f"{name}.weight"] = torch.zeros(64, 64).to(torch.float8_e4m3fn)
        state[f"{name}.weight_scale"] = torch.ones(1)

    write(tmp_path, layout, change=spoil)
    raises(tmp_path, f"{name}.weight", "FP8", "PactConfig")


def test_experts_in_one_tensor(tmp_path):
    """transformers keeps these experts in one parameter, the files one by one."""
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, vocab_size=128, dtype="bfloat16",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)

    def spoil(state):
        state["model.layers.0.mlp.experts.1.up_proj.weight_packed"] = torch.zeros(32, 32, dtype=torch.uint8)

    write(tmp_path, "compressed-tensors", model, change=spoil)
    raises(tmp_path, "model.layers.0.mlp.experts.1.up_proj.weight_packed", "experts", "PactConfig")


@by_layout
def test_settings_and_files_of_different_layouts(saved, tmp_path, layout):
    shutil.copytree(saved[layout], tmp_path / "copy")
    edit_config(tmp_path / "copy", CT_SETTINGS if layout == "modelopt" else MODELOPT_SETTINGS)
    raises(
        tmp_path / "copy", "model.layers.0.", LEAVES["modelopt" if layout == "compressed-tensors" else "compressed-tensors"][2]
    )


@by_layout
def test_packed_files_without_settings(saved, tmp_path, layout):
    shutil.copytree(saved[layout], tmp_path / "copy")
    edit_config(tmp_path / "copy", None)
    raises(tmp_path / "copy", "_scale", "hf_quant_config.json", "Download all files")


DAMAGED = ["{", "[]", '"modelopt"', "[" * 100_000, "9" * 5000, '"\ud800"', "null", '{"quantization": []}', "\x00"]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: repr(text[:9]))
def test_damaged_settings_beside_the_files(saved, tmp_path, text):
    shutil.copytree(saved["modelopt"], tmp_path / "copy")
    edit_config(tmp_path / "copy", None)
    (tmp_path / "copy" / "hf_quant_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    said = ("in no layout",) if "quantization" in text else ("damaged", "Download")
    raises(tmp_path / "copy", tmp_path / "copy" / "hf_quant_config.json", *said)


def test_settings_of_dense_files(saved, tmp_path):
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path)
    edit_config(tmp_path, CT_SETTINGS)
    raises(tmp_path, "no linear in the files is packed")


# ---------------------------------------------------------------------------------------------- settings
def edited(settings, path, value):
    settings = copy.deepcopy(settings)
    *way, last = path.split(".")
    functools.reduce(operator.getitem, way, settings)[last] = value
    return settings


WEIGHTS = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    "settings, path, value, parts",
    [
        (CT_SETTINGS, f"{WEIGHTS}.group_size", 32, ["group_size", "32", "16"]),
        (CT_SETTINGS, f"{WEIGHTS}.num_bits", 8, ["num_bits", "8"]),
        (CT_SETTINGS, f"{WEIGHTS}.type", "int", ["type", "int"]),
        (CT_SETTINGS, f"{WEIGHTS}.symmetric", False, ["symmetric"]),
        (CT_SETTINGS, f"{WEIGHTS}.dynamic", True, ["dynamic"]),
        (CT_SETTINGS, f"{WEIGHTS}.strategy", "channel", ["strategy", "channel"]),
        (CT_SETTINGS, f"{WEIGHTS}.actorder", "group", ["actorder"]),
        (CT_SETTINGS, f"{WEIGHTS}.scale_dtype", "torch.uint8", ["scale_dtype", "uint8"]),
        (CT_SETTINGS, f"{WEIGHTS}.high_nibble_first", True, ["high_nibble_first", "not known here"]),
        (CT_SETTINGS, "high_nibble_first", True, ["high_nibble_first", "not known here"]),
        (CT_SETTINGS, "config_groups.group_0.swizzled", True, ["swizzled", "not known here"]),
        (CT_SETTINGS, "format_version", 2, ["format_version", "not known here", "Upgrade"]),
        (CT_SETTINGS, "format", "mxfp4-pack-quantized", ["mxfp4-pack-quantized", "nvfp4-pack-quantized"]),
        (CT_SETTINGS, "config_groups.group_0.format", "float-quantized", ["float-quantized"]),
        (CT_SETTINGS, "quantization_status", "frozen", ["quantization_status", "frozen"]),
        (CT_SETTINGS, "transform_config", {"config_groups": {"u": {}}}, ["transform_config", "rotates"]),
        (CT_SETTINGS, "sparsity_config", {"format": "sparse-24-bitmask"}, ["sparsity_config", "sparse"]),
        (CT_SETTINGS, "config_groups", {}, ["config_groups"]),
        (CT_SETTINGS, "config_groups.group_0.weights", None, ["config_groups.group_0"]),
        (MODELOPT_SETTINGS, "quant_algo", "NVFP4_AWQ", ["NVFP4_AWQ", "pre_quant_scale"]),
        (MODELOPT_SETTINGS, "quant_algo", "NVFP4_SVD", ["NVFP4_SVD", "low-rank"]),
        (MODELOPT_SETTINGS, "quant_algo", "FP8", ["FP8"]),
        (MODELOPT_SETTINGS, "quant_algo", None, ["None"]),
        (MODELOPT_SETTINGS, f"{WEIGHTS}.group_size", 32, ["group_size", "32"]),
        (MODELOPT_SETTINGS, "layout_version", 7, ["layout_version", "Upgrade"]),
        (CT_SETTINGS, "sparsity_config", "dense", []),
        (CT_SETTINGS, "format", ["x"], []),
        (CT_SETTINGS, "quant_method", ["x"], []),
        (MODELOPT_SETTINGS, "quant_algo", ["NVFP4"], []),
        (MODELOPT_SETTINGS, "quantized_layers", ["x"], []),
        (MODELOPT_SETTINGS, "quantized_layers", {"a": "NVFP4"}, []),
        (OLD_MODELOPT, "quantization.group_size", 32, ["group_size", "32"]),
        (OLD_MODELOPT, "quantization.quant_algo", "W4A8_AWQ", ["W4A8_AWQ"]),
    ],
)  # fmt: skip
def test_settings_that_are_refused(settings, path, value, parts):
    assert isinstance(read_settings(settings, "x"), Published)
    with pytest.raises(ValueError) as error:
        read_settings(edited(settings, path, value), "some/config.json")
    assert [part for part in ["some/config.json", *parts] if part not in str(error.value)] == [], error.value


def test_mixed_precision():
    layers = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert read_settings(settings, "x").layout.name == "modelopt"
    layers["c"] = {"quant_algo": "FP8"}
    with pytest.raises(ValueError, match=r"c \(and 0 more\) is in FP8"):
        read_settings(settings, "x")


def test_refused_settings_reach_the_user(saved, tmp_path):
    for layout, path, value in (("compressed-tensors", f"{WEIGHTS}.group_size", 32), ("modelopt", "quant_algo", "NVFP4_SVD")):
        shutil.copytree(saved[layout], tmp_path / layout)
        edit_config(tmp_path / layout, edited(CT_SETTINGS if layout != "modelopt" else MODELOPT_SETTINGS, path, value))
        raises(tmp_path / layout, tmp_path / layout, value, "PactConfig")
