"""The tool that changes the arithmetic (tests/mutation): what it changes, and what it leaves alone.

Below, tests that mutants of modules without a test file of their own once survived.
"""

import ast
import json
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from _assertions import assert_same_bits
from conftest import tiny_llama
from peft import IA3Config, get_peft_model
from safetensors.torch import save_file

from peft_nvfp4 import merge
from peft_nvfp4.checkpoints.layouts import MODELOPT, reciprocal
from peft_nvfp4.checkpoints.load import Stored, check_files, check_indices, stored_in

sys.path.insert(0, str(Path(__file__).parent / "mutation"))

from mutants import mutants

MODULE = '''
"""2 + 2."""
LIMIT: int = 3

def f(x: list[1], y=True):
    if x < LIMIT and not y:
        raise ValueError(f"{x + 1}")
    warnings.warn(str(1 + 1))
    check(lambda: f"{x} must be {1 + 1}")
    return x @ y if x is not None else -x
'''

CHANGES = {
    ("3", "4"),
    ("True", "False"),
    ("x < LIMIT and (not y)", "not (x < LIMIT and (not y))"),
    ("x < LIMIT and (not y)", "x < LIMIT or not y"),
    ("x < LIMIT", "x <= LIMIT"),
    ("not y", "y"),
    ("return x @ y if x is not None else -x", "return None"),
    ("x @ y if x is not None else -x", "-x if x is not None else x @ y"),
    ("x @ y", "x * y"),
    ("x is not None", "x is None"),
    ("-x", "x"),
}


def test_what_is_changed():
    found = mutants(MODULE)
    assert {(m.old, m.new) for m in found} == CHANGES and len(found) == len(CHANGES)
    assert [m.index for m in found] == list(range(len(found)))


def test_each_mutant_is_a_module_that_differs_in_its_line_only():
    plain = ast.unparse(ast.parse(MODULE)).splitlines()
    for mutant in mutants(MODULE):
        changed = mutant.source.splitlines()
        assert len(changed) == len(plain)
        assert sum(a != b for a, b in zip(plain, changed)) == 1, (mutant.old, mutant.new)
        assert mutant.lines.start in (3, 5, 6, 10)


@pytest.mark.parametrize("operator", ["+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "@"])
def test_every_operator_is_exchanged(operator):
    (binary,) = mutants(f"a {operator} b")
    (augmented,) = mutants(f"a {operator}= b")
    assert operator not in binary.new.split() and f"{operator}=" not in augmented.new.split()


def test_layouts_are_constants():
    with pytest.raises(FrozenInstanceError):
        MODELOPT.reciprocal = True


def test_reciprocals_of_all_significands():
    """``reciprocal`` gives a number whose own reciprocal is g wherever there is one: if 1 / g is none, its neighbours are none,
    and farther numbers have reciprocals farther from g."""
    for part in torch.arange(1 << 23, dtype=torch.int32).split(1 << 20):
        g = (part | 0x3F800000).view(torch.float32)  # [1, 2): the exponent changes nothing
        found = reciprocal(g)
        zero = torch.zeros_like(g)
        neighbours = torch.nextafter(found, zero), torch.nextafter(found, zero + torch.inf)
        missed = (1.0 / found != g) & ((1.0 / neighbours[0] == g) | (1.0 / neighbours[1] == g))
        assert not missed.any()
        assert_same_bits(found, (1.0 / g.double()).float(), "rounded once")


def index(folder, name):
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "inside.safetensors", "b": name}}))


@pytest.mark.parametrize("name", ["../x.safetensors", "a/../../x", "/x", "C:\\x", "C:x", "..\\x", "\\\\host\\x"])
def test_the_index_beside_files_and_in_the_folder(tmp_path, monkeypatch, name):
    """transformers hands over the paths that an index led it to; the index is where they go up."""
    monkeypatch.chdir(tmp_path)
    for folder, file in (("good", "inside"), ("bad", name)):
        index(tmp_path / folder, file)
    (tmp_path / "other").mkdir()
    refused = [
        ([str(tmp_path / "bad" / "inside.safetensors")], None),
        ([str(tmp_path / "bad" / ".." / "other" / "x.safetensors")], None),
        (["bad/../other/x.safetensors"], None),
        ([], str(tmp_path / "bad")),
        ([], "bad"),
        (["good/inside.safetensors"], "bad"),
    ]
    for files, folder in refused:
        with pytest.raises(ValueError, match=r"bad/model.safetensors.index.json names .* which is outside its folder"):
            check_indices(files, folder)
    for files, folder in [(["good/inside.safetensors"], None), ([], None), ([], ""), (["good/x"], "good"), ([], "bad/no")]:
        check_indices(files, folder)
    check_indices(["../other/x.safetensors"], None)  # the caller's own way up


def test_files_of_a_packed_model_are_safetensors(tmp_path):
    save_file({"a": torch.ones(2, 3, dtype=torch.uint8), "b": torch.ones(())}, tmp_path / "a.safetensors")
    check_files([str(tmp_path / "a.safetensors")], packed=True)
    check_files(["b.bin"], packed=False)
    with pytest.raises(ValueError, match="b.bin is not a safetensors file"):
        check_files(["b.bin"], packed=True)
    found = {stored.key: stored for stored in stored_in([str(tmp_path / "a.safetensors")])}
    assert found["a"] == Stored("a", str(tmp_path / "a.safetensors"), "U8", (2, 3), False)
    assert (found["b"].dtype, found["b"].shape, str(found["b"])) == ("F32", (), f"b in {tmp_path}/a.safetensors")
    with pytest.raises(FrozenInstanceError):
        found["a"].dtype = "F32"


def test_what_has_no_lora_adapter_is_not_merged():
    base = tiny_llama(num_hidden_layers=1)
    other = get_peft_model(base, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    for model in (tiny_llama(num_hidden_layers=1), other):
        with pytest.raises(TypeError, match=f"a PEFT model with LoRA adapters, got {type(model).__name__}"):
            merge(model, to="fp32")
