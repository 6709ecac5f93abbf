"""Everything that is read from files or typed, damaged at random: checkpoints in every layout, side-cars and records,
calibrations, YAML, data files, arguments.

The rule: it works, or it is a ``ValueError`` (or another error that is meant for the user) that names the file. No other
exception, no hang, no model that is half changed, no code run. What an earlier search found is kept as an example.

Every run draws the same few damages. To search (a seed, so that parts of a long search differ):

    HYPOTHESIS_EXAMPLES=2000 python -m pytest tests/test_fuzz.py --hypothesis-seed=1
"""

import ast
import copy
import dataclasses
import json
import re
import shutil
import signal
import struct
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from _assertions import assert_same_bits
from conftest import tiny_llama
from published_checkpoints import CT_SETTINGS, IDS, MODELOPT_SETTINGS, OLD_MODELOPT, write
from test_properties import json_values, tried

pytest.importorskip("hypothesis")
pytest.importorskip("typer")

import typer.testing
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import peft_nvfp4
from peft_nvfp4 import NVFP4LoraConfig, PactConfig, cli, fingerprint
from peft_nvfp4.calibration.run import CalibrationOptions, apply_calibration, calibrate
from peft_nvfp4.checkpoints.files import check_files, check_indices, stored_in
from peft_nvfp4.checkpoints.settings import read_settings
from peft_nvfp4.config import SIDE_CAR
from peft_nvfp4.freeze import frozen_layers
from peft_nvfp4.inspection import inspect_adapter
from peft_nvfp4.kernels import library
from peft_nvfp4.tools import options, texts

PACKAGE = str(Path(peft_nvfp4.__file__).parent)
SECONDS = 30  # of one example: hundreds of times what it takes

# ---------------------------------------------------------------------------------------------- damage


@st.composite
def edits(draw):
    """A function that damages bytes: some changed, cut out, put in, doubled, the rest cut off."""
    found = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["set", "cut", "insert", "double", "end"]), st.floats(0, 1), st.binary(min_size=1, max_size=6)
            ),
            min_size=1,
            max_size=4,
        )
    )

    def damage(data):
        for how, place, content in found:
            at = int(place * len(data))
            if how == "set":
                data = data[:at] + content + data[at + len(content) :]
            elif how == "cut":
                data = data[:at] + data[at + len(content) ** 2 :]
            elif how == "insert":
                data = data[:at] + content + data[at:]
            elif how == "double":
                data = data[:at] + data[at : at + 16] + data[at:]
            else:
                data = data[:at]
        return data

    return "bytes", damage


@st.composite
def changes(draw, values=json_values, kind="json"):
    """A function that changes one or two places of a JSON value: another value there, the key gone or called something else."""
    found = draw(
        st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=6), st.sampled_from("vvvdk"), values), min_size=1, max_size=2)
    )

    def change(content):
        content = copy.deepcopy(content)
        for path, how, value in found:
            place, parent, key = content, None, None
            for step in path:
                if not isinstance(place, dict | list) or not place:
                    break
                parent, key = place, (list(place)[step % len(place)] if isinstance(place, dict) else step % len(place))
                place = place[key]
            if parent is None:
                content = value if how == "v" and not path else content
            elif how == "v":
                parent[key] = value
            elif how == "d":
                del parent[key]
            elif isinstance(parent, dict):
                parent[str(value)] = parent.pop(key)
        return content

    return kind, change


def split(data):
    """(header, rest) of a safetensors file."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header, rest):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


words = st.sampled_from(["F32", "U8", "F8_E4M3", "BF16", "I64", "F4", "", "weight", "../x", "re:[", "NVFP4", "dense"])
numbers = st.sampled_from([0, 1, -1, 16, 2**31, 2**63, 2**70, 1e308, float("nan"), float("inf")])
header_values = st.one_of(words, numbers, st.lists(st.integers(-1, 200), max_size=3), json_values)
headers = changes(header_values, "header")


def spoil(damage, data):
    """Bytes of a file, damaged: as bytes, as JSON, or in the header of a safetensors file."""
    kind, function = damage
    if kind == "bytes":
        return function(data)
    if kind == "json":
        return json.dumps(function(json.loads(data))).encode()
    header, rest = split(data)
    return joined(function(header), rest)


@contextmanager
def spoiled(path, damage):
    """A file is damaged for a while."""
    data = path.read_bytes()
    try:
        path.write_bytes(spoil(damage, data))
        yield path
    finally:
        path.write_bytes(data)


# ---------------------------------------------------------------------------------------------- what is allowed


class TooLong(BaseException):
    """Not an Exception: nothing may take it for a bad file."""


@contextmanager
def in_time():
    def late(*_):
        raise TooLong(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ours(error):
    """Whether the package had a hand in it; transformers reads some of these files first, and says what it likes. (A function of
    its own that we only pass calls on to is its own.)"""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.startswith(PACKAGE) and frame.name != "get_hf_quantizer" for frame in frames)


class Outcome:
    """``done``: it worked. Else it was refused in words for the user."""

    done = False


@contextmanager
def done_or_refused(*names, kinds=(ValueError,), foreign=False):
    """Works, or raises one of ``kinds`` that names one of ``names``. ``foreign``: errors that never touched the package pass."""
    outcome = Outcome()
    with in_time():
        try:
            yield outcome
        except AssertionError:  # of the test
            raise
        except Exception as error:
            if foreign and not ours(error):
                return
            text = "".join(traceback.format_exception(error))
            assert type(error) in kinds, text
            assert any(str(name) in str(error) for name in names), text
            assert len(str(error)) < 3000
        else:
            outcome.done = True


@pytest.fixture(autouse=True)
def nothing_is_run(tmp_path, monkeypatch):
    """Unpickling, ``eval`` and processes are what damaged files could start."""
    import os
    import pickle
    import subprocess

    def forbidden(*args, **kwargs):
        raise TooLong("code from a file was about to run")

    for module, name in ((pickle, "load"), (pickle, "loads"), (os, "system"), (subprocess, "Popen")):
        monkeypatch.setattr(module, name, forbidden)


# ---------------------------------------------------------------------------------------------- settings of checkpoints

SETTINGS = {"compressed-tensors": CT_SETTINGS, "modelopt": MODELOPT_SETTINGS, "old": OLD_MODELOPT}


@tried(120)
@given(st.sampled_from(sorted(SETTINGS)), changes(header_values))
def test_settings_of_published_checkpoints(name, damage):
    content = damage[1](SETTINGS[name])
    if isinstance(content, dict):  # as its callers have made sure
        with done_or_refused("origin.json"):
            read_settings(content, "origin.json").ignores("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("compressed-tensors", "ignore", 5),
        ("compressed-tensors", "ignore", ["re:["]),
        ("compressed-tensors", "sparsity_config", "dense"),
        ("compressed-tensors", "format", ["x"]),
        ("compressed-tensors", "quant_method", ["x"]),
        ("modelopt", "quant_algo", ["NVFP4"]),
        ("modelopt", "quantized_layers", ["x"]),
        ("modelopt", "quantized_layers", {"a": "NVFP4"}),
        ("modelopt", "ignore", {"a": 1}),
    ],
)
def test_settings_of_a_wrong_type(name, key, value):
    with pytest.raises(ValueError, match="origin.json"):
        read_settings({**SETTINGS[name], key: value}, "origin.json").ignores("model.layers.0.mlp.up_proj")


# ---------------------------------------------------------------------------------------------- safetensors, indices


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Bytes of a safetensors file of a few tensors, and a folder for damaged ones."""
    folder = tmp_path_factory.mktemp("small")
    tensors = {"a.weight": torch.arange(6, dtype=torch.uint8).view(2, 3), "a.weight_scale": torch.ones(4), "b": torch.ones(0)}
    save_file(tensors, folder / "sound.safetensors", metadata={"format": "pt"})
    return folder, (folder / "sound.safetensors").read_bytes()


@tried(150)
@given(st.one_of(edits(), headers))
def test_headers(small, damage):
    folder, data = small
    file = folder / "model.safetensors"
    file.write_bytes(spoil(damage, data))
    with done_or_refused(file):
        check_files([str(file)], packed=True)
        for stored in stored_in(str(file)):
            assert isinstance(stored.dtype, str) and all(n >= 0 for n in stored.shape)


@tried(150)
@given(
    st.one_of(
        json_values,
        st.dictionaries(st.text(max_size=4), st.one_of(st.text(), words), max_size=4).map(lambda m: {"weight_map": m}),
    )
)
@example({"weight_map": {"a": "../x"}})
@example({"weight_map": {"a": "C:\\x"}})
@example({"weight_map": {"a": "\x00"}})
def test_indices(tmp_path_factory, content):
    """What is let through lies in the folder."""
    folder = tmp_path_factory.mktemp("index")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    with done_or_refused(path) as outcome:
        check_indices([str(folder / "x.safetensors")], str(folder))
    if outcome.done and isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
        for name in content["weight_map"].values():
            if isinstance(name, str) and "\x00" not in name:
                assert (folder / name).resolve().is_relative_to(folder.resolve())
    shutil.rmtree(folder)


@tried(60)
@given(edits())
def test_damaged_indices(tmp_path_factory, damage):
    folder = tmp_path_factory.mktemp("index")
    path = folder / "model.safetensors.index.json"
    path.write_bytes(spoil(damage, json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()))
    with done_or_refused(path):
        check_indices([str(folder / "x.safetensors")], None)
    shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------- whole models


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> folder of a sound one-layer checkpoint in one file (and an index)."""
    root, model = tmp_path_factory.mktemp("saved"), tiny_llama(torch.bfloat16, num_hidden_layers=1)
    for layout in ("compressed-tensors", "modelopt"):
        write(root / layout, layout, model=copy.deepcopy(model), shards=1)
    write(root / "old", "modelopt", model=copy.deepcopy(model), shards=1, settings=None)
    config = json.loads((root / "old" / "config.json").read_text())
    config.pop("quantization_config")
    (root / "old" / "config.json").write_text(json.dumps(config))
    (root / "old" / "hf_quant_config.json").write_text(json.dumps(OLD_MODELOPT))
    model.save_pretrained(root / "dense")
    loaded = AutoModelForCausalLM.from_pretrained(root / "dense", quantization_config=PactConfig(), dtype=torch.bfloat16)
    loaded.save_pretrained(root / "own")
    shutil.rmtree(root / "dense")
    return root


def load(folder, *names, frozen=None):
    """A model whose every packed linear is frozen and finite, or a refusal."""
    with done_or_refused(*names, kinds=(ValueError, TypeError), foreign=True) as outcome:
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=PactConfig(), dtype=torch.bfloat16)
        layers = list(frozen_layers(model))
        assert not any(p.is_meta for p in model.parameters())
        assert all(layer.dequantize(torch.float32).isfinite().all() for _, layer in layers)
        if frozen is not None:
            assert len(layers) == frozen
    return outcome.done


def test_undamaged_models_load(saved):
    for layout in ("compressed-tensors", "modelopt", "old", "own"):
        assert load(saved / layout, frozen=7)


@tried(20)
@given(st.sampled_from(["compressed-tensors", "modelopt", "old", "own"]), st.one_of(edits(), headers, headers))
def test_damaged_weights(saved, layout, damage):
    """Values may have changed without notice; names, types, shapes and what a packed weight cannot hold may not."""
    (file,) = (saved / layout).glob("*.safetensors")
    with spoiled(file, damage):
        load(saved / layout, file, "lm_head", "embed_tokens", "norm", "layers.0")


@tried(20)
@given(st.sampled_from(["compressed-tensors", "modelopt", "own"]), changes(header_values))
def test_damaged_settings(saved, layout, damage):
    def inside(config):
        return {**config, "quantization_config": damage[1](config["quantization_config"])}

    with spoiled(saved / layout / "config.json", ("json", inside)):
        load(saved / layout, "quantization_config", saved / layout, "format_version", *LOADED_WORDS)


LOADED_WORDS = tuple(PactConfig.__dataclass_fields__)


@tried(20)
@given(st.one_of(edits(), changes(header_values)))
def test_damaged_hf_quant_config(saved, damage):
    with spoiled(saved / "old" / "hf_quant_config.json", damage) as path:
        load(saved / "old", path)


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, '"\ud800"', "[]", "null", '{"quantization": []}', "\x00"])
def test_extremes_in_hf_quant_config(saved, content):
    damage = "bytes", lambda data: content.encode("utf-8", "surrogatepass")
    with spoiled(saved / "old" / "hf_quant_config.json", damage) as path:
        assert not load(saved / "old", path)


@pytest.mark.parametrize("value", [["x"], {}, 1.5, None])
@pytest.mark.parametrize("name", ["backend", "accuracy", "weight_layouts", "gradients", "activations"])
def test_words_that_are_none(name, value):
    for config in (NVFP4LoraConfig, PactConfig):
        if name in {field.name for field in dataclasses.fields(config)}:
            with pytest.raises((ValueError, TypeError), match=f"{name}.*{re.escape(repr(value))}"):
                config(**{name: value})


# ---------------------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A saved adapter, and its base model."""
    from peft import get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    base = tiny_llama(num_hidden_layers=1)
    model = get_peft_model(copy.deepcopy(base), NVFP4LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    model.save_pretrained(folder)
    return folder, base


@tried(40)
@given(st.sampled_from([SIDE_CAR, fingerprint.BASE_FILE]), st.one_of(edits(), changes()))
def test_files_beside_an_adapter(adapter, name, damage):
    folder, base = adapter
    with spoiled(folder / name, damage), done_or_refused(name):
        NVFP4LoraConfig.from_pretrained(str(folder))
        fingerprint.read(folder)
        inspect_adapter(base, folder, probe=False)


@tried(30)
@given(st.one_of(edits(), headers))
def test_damaged_adapter_weights_are_inspected(adapter, damage):
    folder, base = adapter
    with spoiled(folder / "adapter_model.safetensors", damage) as path, done_or_refused(path):
        inspect_adapter(base, folder, probe=False)


# ---------------------------------------------------------------------------------------------- calibrations


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """(folder of a calibration, its model)."""
    folder = tmp_path_factory.mktemp("calibration")
    model = tiny_llama(num_hidden_layers=2)
    settings = CalibrationOptions(method="nearest", samples=2, seq_len=16, report_tokens=0)
    calibrate(copy.deepcopy(model), IDS, options=settings, output_dir=folder, device="cpu", progress=False)
    return folder, model


def freeze_calibrated(folder, model, *names):
    """Either every layer is replaced, or none."""
    model = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with done_or_refused(*names) as outcome:
        apply_calibration(model, folder)
    if not outcome.done:
        assert {name for name, _ in model.named_parameters()} == before.keys(), "half of the model was changed"
        for name, p in model.named_parameters():
            assert_same_bits(p.detach(), before[name], name)
    return outcome.done


@tried(30)
@given(st.one_of(edits(), changes(header_values)))
def test_damaged_manifests(calibrated, damage):
    folder, model = calibrated
    with spoiled(folder / "manifest.json", damage):
        freeze_calibrated(folder, model, folder)


@tried(30)
@given(st.one_of(edits(), headers))
def test_damaged_calibrated_layers(calibrated, damage):
    folder, model = calibrated
    with spoiled(folder / "layers_00001.safetensors", damage):
        freeze_calibrated(folder, model, folder)


def test_a_manifest_that_leads_out_of_its_folder(calibrated, tmp_path):
    folder, model = calibrated
    shutil.copytree(folder, tmp_path / "copy")
    shutil.copy(folder / "layers_00001.safetensors", tmp_path / "elsewhere.safetensors")
    path = tmp_path / "copy" / "manifest.json"
    manifest = json.loads(path.read_text())
    name = next(name for name, entry in manifest["layers"].items() if entry["file"] == "layers_00001.safetensors")
    for file in ("../elsewhere.safetensors", str(tmp_path / "elsewhere.safetensors")):
        manifest["layers"][name]["file"] = file
        path.write_text(json.dumps(manifest))
        assert not freeze_calibrated(tmp_path / "copy", model, path)


# ---------------------------------------------------------------------------------------------- YAML

YAML = """model: base  # a folder
dataset: data.jsonl
output: out
rank: 8
lr: 1e-4
columns: {prompt: question, completion: answer}
lora:
  use_rslora: true
trainer: {warmup_steps: 3}
"""
syntax = ["\n", "  ", "- ", "{", "}", "[", "&a ", "*a", "<<: ", "? ", ": ", "'", '"', "|", "%", "\t", "\x00", "\ufeff", "é", "~"]
scalars = ["1e999", "0x1f", "2001-01-01", "!!binary x", "!!python/object/apply:os.system ", "model: ", "rank: ", "layers: "]
pieces = st.lists(st.sampled_from(syntax + scalars), max_size=12).map("".join)


def read_options(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("yaml") / "train.yaml"
    path.write_bytes(content)
    with done_or_refused(path, *options.TrainOptions.__dataclass_fields__):
        given = options.read_yaml(path)
        assert all(isinstance(name, str) for name in given)
        made = options.TrainOptions(**given)
        made.lora_settings()
        made.save(path.parent / "again")
    shutil.rmtree(path.parent)


@tried(120)
@given(edits())
def test_damaged_yaml(tmp_path_factory, damage):
    read_options(tmp_path_factory, spoil(damage, YAML.encode()))


@tried(120)
@given(pieces)
@example("!!python/object/apply:os.system ['touch x']")
@example("a: &a [" + "*a, " * 3 + "]")
@example("? [1]\n: 2")
@example("? {}\n: 2")
@example("[" * 3000)
@example("rank: .inf")
@example("rank: 2001-13-45")
@example("\x00")
@example("lr: " + "9" * 5000)
@example("steps: " + "9" * 5000)
@example("lora: {1: 2, r: !!set {a, b}}")
@example("epochs: .nan")
def test_yaml_of_pieces(tmp_path_factory, text):
    read_options(tmp_path_factory, text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\xe9", b"model: \x80"])
def test_yaml_in_another_encoding(tmp_path_factory, content):
    read_options(tmp_path_factory, content)


# ---------------------------------------------------------------------------------------------- data files

DATA = {
    "d.jsonl": '{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n',
    "d.json": '[{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}]',
    "d.csv": 'text,label\n"a, b",1\nc,2\n',
    "d.tsv": "text\tlabel\na\t1\n",
    "d.txt": "one\n\ntwo\n",
}


@tried(150)
@given(st.sampled_from(sorted(DATA)), edits())
def test_damaged_data(tmp_path_factory, name, damage):
    path = tmp_path_factory.mktemp("data") / name
    path.write_bytes(spoil(damage, DATA[name].encode()))
    with done_or_refused(path):
        rows = texts.read(str(path))
        assert rows.format in texts.FORMATS and all(isinstance(row, dict) for row in rows.rows)
    shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", b"[" * 50_000),
        ("d.json", b"[" * 50_000),
        ("d.json", b"[" + b"9" * 5000 + b"]"),
        ("d.jsonl", b"5"),
        ("d.json", b"[1]"),
        ("d.json", b'[{"messages": [{"role": [], "content": 1}]}]'),
        ("d.csv", b'text,label\n"' + b"x" * 200_000),
        ("d.csv", b"text,label\na\x00b,1"),
        ("d.csv", b"\n\n"),
    ],
)
def test_extremes_in_data(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with done_or_refused(name):
        texts.read(str(tmp_path / name))


# ---------------------------------------------------------------------------------------------- arguments


@pytest.fixture(scope="module")
def app():
    return cli.application()


def flags_of(app):
    import click

    found = {}
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        options_ = [
            o for p in command.params if isinstance(p, click.Option) or hasattr(p, "opts") for o in p.opts if o.startswith("-")
        ]
        found[name] = sorted(set(options_) - {"--help", "-h"})
    return found


FLAGS = flags_of(cli.application())
values = st.one_of(
    st.sampled_from(
        ["0", "-1", "1e400", "nan", "nvfp4", "9" * 400, "a=b", "=", ",", "", "../x", "~", "smollm", "-", "16GiB", "{text}"]
    ),
    st.text(max_size=8),
)
QUIET = ("doctor", "tune", "demo")  # they need no file, and work for minutes


@st.composite
def command_lines(draw):
    name = draw(st.sampled_from(sorted(set(FLAGS) - set(QUIET))))
    parts = draw(st.lists(values, max_size=3))
    for flag in draw(st.lists(st.sampled_from(FLAGS[name]), max_size=4)):
        parts += [flag, draw(values)] if draw(st.booleans()) else [flag]
    return [name, *parts]


@tried(60)
@given(command_lines())
def test_arguments(app, tmp_path_factory, line):
    """An exit code and a sentence, in an empty folder, in which nothing is left lying about."""
    folder = tmp_path_factory.mktemp("arguments")
    with pytest.MonkeyPatch.context() as patch, in_time():
        patch.chdir(folder)
        result = typer.testing.CliRunner().invoke(app, line)
    allowed = result.exception is None or isinstance(result.exception, SystemExit)
    assert allowed, "".join(traceback.format_exception(result.exception))
    assert result.exit_code in (0, 1, 2) and "Traceback" not in result.output
    if result.exit_code == 1:
        assert result.stderr.startswith("Error: "), result.output
        assert "Error: KeyError" not in result.output and "Error: AttributeError" not in result.output, result.output
    shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------- no way in

SOURCES = sorted(Path(PACKAGE).rglob("*.py"))
PICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}


def ways_in(source):
    """Calls and imports by which a file could make Python run something."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in names if name.split(".")[0] in PICKLES]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called == "torch.load" and given.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if called.startswith("yaml.") and called not in ("yaml.safe_load", "yaml.safe_dump"):
            found.append(called)
        if called in ("eval", "exec", "__import__", "os.system", "os.popen") or given.get("shell", "False") != "False":
            found.append(called)
        found += [
            f"{word}={given[word]}" for word in ("allow_pickle", "trust_remote_code") if given.get(word, "False") != "False"
        ]
    return found


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from joblib import load", "torch.load(f)", "torch.load(f, weights_only=False)", "yaml.load(t, Loader=L)"]
    + ["np.load(f, allow_pickle=True)", "eval(t)", "subprocess.run(c, shell=True)", "f(n, trust_remote_code=True)"],
)
def test_ways_in_are_seen(source):
    assert ways_in(source)


def test_no_file_can_run_code():
    assert {str(path.relative_to(PACKAGE)): ways for path in SOURCES if (ways := ways_in(path.read_text()))} == {}


@pytest.mark.parametrize("told", [False, True])
def test_the_extension_is_loaded_from_the_package_or_where_one_is_told(tmp_path, monkeypatch, told):
    """Not from the current folder, nor by a name for which the dynamic loader would search."""
    (tmp_path / library.FILE).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    if told:
        monkeypatch.setenv(library.VARIABLE, str(tmp_path / "elsewhere.so"))
    path = library._path()
    assert path == (tmp_path / "elsewhere.so" if told else Path(PACKAGE) / library.FILE) and path.is_absolute()
