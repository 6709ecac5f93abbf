"""PactConfig while it loads: how much memory it takes, and that a broken dense file gives a clear error and no model. Broken
packed files, of this package and of other tools: checkpoints/test_layouts_hostile.py."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from _broken_checkpoints import assert_refused, change, truncate
from conftest import tiny_llama
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from peft_nvfp4 import PactConfig
from peft_nvfp4.quantization.freeze import frozen_layers
from peft_nvfp4.transformers import checkpoint
from peft_nvfp4.transformers.quantizer import RELEASE_BYTES, PactQuantizer

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(dense, packed): the same tiny Llama in BF16 and as saved by PactConfig, each in several files."""
    root = tmp_path_factory.mktemp("saved")
    tiny_llama(torch.bfloat16).save_pretrained(root / "dense", max_shard_size="60kB")
    load(root / "dense").save_pretrained(root / "packed", max_shard_size="40kB")
    return root / "dense", root / "packed"


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=PactConfig(), dtype=torch.bfloat16, **kwargs)


def reload(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def write_checkpoint(folder, kind="Llama", shard_bytes=50 << 20, **shape):
    """A random Llama or Qwen3Moe in BF16, written shard by shard, experts one by one as they are published. Returns its bytes."""
    folder.mkdir()
    config = getattr(transformers, f"{kind}Config")(**shape, dtype="bfloat16", architectures=[f"{kind}ForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = getattr(transformers, f"{kind}ForCausalLM")(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name in [name for name in state if ".experts." in name]:
        weight, (stem, projection) = state.pop(name), name.rsplit(".", 1)
        parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(projection, (projection,))
        matrices = {p: rows for p, rows in zip(parts, weight.chunk(len(parts), 1))}
        state |= {f"{stem}.{e}.{p}.weight": w for p, rows in matrices.items() for e, w in enumerate(rows)}
    files, shard = {}, {}

    def flush():
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, p in state.items():
        shard[name] = (torch.randn(p.shape) * 0.02 if p.ndim > 1 else torch.ones(p.shape)).to(torch.bfloat16)
        if sum(t.nbytes for t in shard.values()) > shard_bytes:
            flush()
    flush()
    size = sum(p.numel() * 2 for p in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


MEASURE = """
import json, sys, threading, time
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
import transformers.models.llama.modeling_llama, transformers.models.qwen3_moe.modeling_qwen3_moe
from peft_nvfp4 import PactConfig, freeze_model
from peft_nvfp4.transformers import quantizer

quantizer.RELEASE_BYTES = int(sys.argv[3])

def now(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

freeze_model(torch.nn.Sequential(torch.nn.Linear(32, 32)), progress=False)  # what the first call loads is not the model's
open("/proc/self/clear_refs", "w").write("5")  # the kernel's own peak starts anew here
before, start = now("VmRSS"), time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], **eval(sys.argv[2]))
seconds, peak = time.perf_counter() - start, now("VmHWM")
if len(sys.argv) > 4:
    model.save_pretrained(sys.argv[4], max_shard_size="30MB")
print(json.dumps({"peak": peak - before, "seconds": seconds}))
"""


def measure(folder, kwargs, save_to=None, release=RELEASE_BYTES):
    """Growth of the peak of resident memory (all of it: heap, and pages of mapped files) by loading, and the seconds it took."""
    arguments = [str(folder), kwargs, str(release), *([str(save_to)] if save_to else [])]
    # Large blocks that are freed leave the process at once. Otherwise glibc keeps 10 to 40 MB for later, by the order of threads.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="not run: resident memory is read from /proc")
def test_peak_memory_stays_below_60_percent(tmp_path):
    """282 MB in BF16, of which 57 % are held at most (49 % were seen)."""
    size = write_checkpoint(
        tmp_path / "dense",
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=2048,
    )
    first = measure(tmp_path / "dense", "dict(quantization_config=PactConfig(memory='small'))", tmp_path / "packed")
    largest, dense = 2 * 4096 * 1024, 2 * 2 * 2048 * 1024  # bytes of an MLP's weight; of the embedding and the head
    parts = {
        "all weights in one packed layout, 4.5 of 16 bits, and what stays dense": (size - dense) * 4.5 / 16 + dense,
        "pages of the file that are packed already and not given back yet": RELEASE_BYTES,
        "a group of two that is packed together, and the weight read after it": 3 * largest,
        "what packs one weight: as much as its FP32 copy (14 MB seen)": 2 * largest,
    }
    assert first["peak"] < sum(parts.values()) < 0.6 * size, (f"{first['peak'] / size:.0%}", parts)
    again = measure(tmp_path / "packed", "{}")
    assert again["peak"] < 0.4 * size and again["seconds"] < first["seconds"] / 4, (first, again)
    plain = measure(tmp_path / "dense", "dict(dtype=torch.bfloat16)")
    assert plain["peak"] < 1.2 * size, "the measure counts what it should not"


@pytest.mark.skipif(sys.platform != "linux", reason="not run: resident memory is read from /proc")
def test_a_mixture_takes_its_packed_bytes_and_a_layer(tmp_path):
    """68 MB in BF16, experts one by one in the files. Qwen3-30B-A3B so takes 17.2 GB packed, 1.2 that stay dense, and three times
    0.8 of a layer: less than 24 GB of the host."""
    size = write_checkpoint(
        tmp_path / "dense",
        "Qwen3Moe",
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=1024,
    )
    release = 1 << 22
    found = measure(tmp_path / "dense", "dict(quantization_config=PactConfig(memory='small'))", release=release)
    gate_up, dense = 2 * 8 * 1024 * 256, 2 * 2 * 1024 * 256  # bytes of a layer's; of the embedding and the head
    parts = {
        "all weights in one packed layout, 4.5 of 16 bits, and what stays dense": (size - dense) * 4.5 / 16 + dense,
        "pages of the file that are packed already and not given back yet": release,
        "gate and up of a layer: as read, every one in one tensor, both in one": 3 * gate_up,
        "what the first load brings into a process, of a model of any size (5 MB seen)": 8e6,
    }
    assert found["peak"] < sum(parts.values()) < 0.7 * size, (f"{found['peak'] / size:.0%}", parts)


def test_at_most_one_group_is_dense(saved, monkeypatch):
    held, original = [], PactQuantizer.collect

    def collect(self, model, name, weight):
        original(self, model, name, weight)
        held.append(sorted(n.rsplit(".", 1)[1] for n in self._held))

    monkeypatch.setattr(PactQuantizer, "collect", collect)
    model = load(saved[0])
    assert len(held) == 14 and max(map(len, held)) == 2 and held[-1] == [], held
    assert not model.hf_quantizer._held and not model.hf_quantizer.state.stored


@pytest.mark.skipif(sys.platform != "linux", reason="not run: pages are counted in /proc")
def test_release_gives_pages_back_and_keeps_what_was_written(tmp_path):
    """The pages of a mapped file leave memory; bytes that somebody wrote into a private mapping of it stay."""
    save_file({"a": torch.arange(4 << 20, dtype=torch.int32), "b": torch.zeros(8)}, tmp_path / "x.safetensors")

    def resident():
        lines = open("/proc/self/smaps").read().split("\n")
        at = [i for i, line in enumerate(lines) if line.endswith("x.safetensors")]
        return sum(int(next(x for x in lines[i:] if x.startswith("Rss:")).split()[1]) for i in at)

    with safe_open(tmp_path / "x.safetensors", framework="pt") as f:
        a, b = f.get_slice("a")[...], f.get_slice("b")[...]
        expected = a.sum()  # touches every page
        b += 1
        if resident() < 15_000:
            pytest.skip("not run: this safetensors does not map files")
        checkpoint.release([str(tmp_path / "x.safetensors")])
        assert resident() < 1_000
        assert torch.equal(b, torch.ones(8)) and torch.equal(a.sum(), expected)
    checkpoint.release([str(tmp_path / "absent")])


@pytest.mark.parametrize("keep", [0.9, 0.01, 0])
def test_truncated_dense_shard(saved, tmp_path, keep):
    file = truncate(saved[0], tmp_path / "copy", f"{DOWN}.weight", keep)
    assert_refused(load, tmp_path / "copy", file, "truncated or damaged")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_dense_weight_that_is_not_finite(saved, tmp_path, value):
    def one(t):
        t[3, 5] = value
        return t

    file = change(saved[0], tmp_path / "copy", "model.layers.0.self_attn.k_proj.weight", one)
    assert_refused(load, tmp_path / "copy", "model.layers.0.self_attn.k_proj.weight", file, "NaN or Inf")


def test_after_an_error_nothing_is_quantised_any_more(saved, tmp_path, monkeypatch):
    change(saved[0], tmp_path / "copy", "model.layers.0.self_attn.k_proj.weight", lambda t: t * float("nan"))
    frozen, original = [], PactQuantizer._freeze_group
    monkeypatch.setattr(PactQuantizer, "_freeze_group", lambda self, model, names: frozen.append(original(self, model, names)))
    assert_refused(load, tmp_path / "copy", "k_proj")
    assert len(frozen) <= 2, "the MLP of layer 0 comes before it"


def test_dense_weight_of_another_shape(saved, tmp_path):
    file = change(saved[0], tmp_path / "copy", f"{DOWN}.weight", lambda t: t[:, :160].contiguous())
    assert_refused(load, tmp_path / "copy", f"{DOWN}.weight", file, (64, 160), (64, 176))


def edit_config(folder, copy, **changes):
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"].update(changes)
    (copy / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change, words", [(dict(format_version=2), ("format_version 2", "upgrade peft_nvfp4")), (dict(swizzled=True), ("swizzled",))]
)
def test_unknown_settings(saved, tmp_path, change, words):
    edit_config(saved[1], tmp_path / "copy", **change)
    assert_refused(reload, tmp_path / "copy", *words)


def test_files_and_settings_that_disagree(saved, tmp_path):
    edit_config(saved[1], tmp_path / "packed", skip_modules=["down_proj"])
    assert_refused(reload, tmp_path / "packed", "down_proj", "stays dense")
    shutil.copytree(saved[0], tmp_path / "dense")
    shutil.copy(saved[1] / "config.json", tmp_path / "dense")
    assert_refused(reload, tmp_path / "dense", "weight_scales", "missing in")


def test_state_dict_in_place_of_files(saved):
    """Without files there are no headers; what is missing or wrong is found after loading."""
    model = reload(saved[1])
    state = model.hf_quantizer.get_state_dict_and_metadata(model)[0]

    def from_state(state):
        return LlamaForCausalLM.from_pretrained(None, config=LlamaConfig.from_pretrained(saved[1]), state_dict=state)

    same = from_state(dict(state)).state_dict()
    assert all(torch.equal(same[key], t) for key, t in model.state_dict().items())
    assert_refused(
        from_state, {k: t for k, t in state.items() if k != f"{DOWN}.weight_scales"}, f"{DOWN}.weight_scales", "missing"
    )
    assert_refused(
        from_state, {**state, f"{DOWN}.weight_gscale": torch.full((4,), 255, dtype=torch.uint8)}, f"{DOWN}.weight_gscale"
    )


def test_names_that_transformers_takes_for_a_weight_norm(saved):
    """transformers renames ".weight_g" on loading, and means a weight norm's. A decoder without its head has no second chance at
    the name of a ".weight_gscale"."""
    from transformers import AutoModel

    model, info = AutoModel.from_pretrained(saved[1], output_loading_info=True)
    assert not info["missing_keys"] and info["unexpected_keys"] == {"lm_head.weight"}
    assert len(frozen_layers(model)) == 14
