"""What a frozen model holds: the bytes of a bitsandbytes model, adopted as they are; dense weights when it is made dense again;
and how much memory, while it is frozen and after."""

import os
import subprocess
import sys
import weakref

import pytest
import torch
import transformers as hf
from _frozen_models import ALL, IDS, Unchanged, by_backend, by_packed_backend, config, names
from _peft_models import same_tensors
from conftest import tiny_llama
from peft import get_peft_model
from torch import nn

from peft_nvfp4 import BACKENDS, dequantize_model, freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    # widths that are multiples of 64: of others bitsandbytes' own forward is wrong on some CPUs
    tiny_llama(torch.bfloat16, intermediate_size=192).save_pretrained(path)
    return path


def load_bnb(folder, **settings):
    return hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=hf.BitsAndBytesConfig(**settings))


NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("double", [True, False], ids=["double-quantised", "single"])
def test_nf4_adopts_a_model_in_4_bits(folder, double):
    """Nothing is copied, and the logits are bitsandbytes' own."""
    model = load_bnb(folder, **NF4, bnb_4bit_use_double_quant=double)
    for layer in model.modules():
        if type(layer).__name__ == "Linear4bit":
            layer.support_avx512bf16_for_cpu = False  # or this forward may repack the weights, see backends/nf4.py
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS).logits
    weights = {
        n: (m.weight, m.weight.data_ptr(), m.weight.quant_state.absmax.data_ptr()) for n, m in model.named_modules() if n in ALL
    }
    freeze_model(model, "nf4")
    assert names(model) == ALL == weights.keys()
    for name, layer in frozen_layers(model):
        assert layer.weight is weights[name][0] and layer.weight.data_ptr() == weights[name][1]
        assert layer.packed_tensors()["absmax"].data_ptr() == weights[name][2]
        assert layer.weight.quant_state.nested is double and layer.support_avx512bf16_for_cpu is False
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, expected)


def test_qlora_on_an_adopted_model_is_qlora_on_a_dense_one(folder):
    """Loaded in 4 bits or frozen from dense weights: the same codes, so the same gradients."""
    grads = []
    dense = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for base in (load_bnb(folder, **NF4, bnb_4bit_use_double_quant=True), dense):
        torch.manual_seed(3)
        model = get_peft_model(base, config(backend="nf4", init_lora_weights=False))
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert len(grads[0]) == 28 and same_tensors(*grads)


FP4, EIGHT = dict(load_in_4bit=True, bnb_4bit_quant_type="fp4"), dict(load_in_8bit=True)
REFUSED = [(NF4, b, r"q_proj.*Linear4bit.*without quantization_config.*backend='nf4'", "8bit") for b in ("nvfp4", "bf16")]
REFUSED += [(FP4, "nf4", "(?i)(?=.*(?<!nv)fp4).*q_proj.*without quantization_config", "use backend='nf4'")]
REFUSED += [(EIGHT, b, r"q_proj.*Linear8bitLt.*without quantization_config", "use backend") for b in ("nvfp4", "nf4", "bf16")]


@pytest.mark.parametrize("settings, backend, message, absent", REFUSED)
def test_what_cannot_be_adopted_is_refused(folder, settings, backend, message, absent):
    """The way out must not be the backend that was just asked for."""
    model = load_bnb(folder, **settings)
    with Unchanged(model), pytest.raises(ValueError, match=message) as error:
        get_peft_model(model, config(backend=backend))
    assert absent not in str(error.value)


@by_backend
def test_dequantize_model_is_the_inverse(llama, backend):
    """The same tree, names and dtypes, the weights that the frozen layers computed with; nothing frozen is left."""
    model = llama(torch.bfloat16)
    shapes = {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
    original = {n: m.weight.detach().clone() for n, m in model.named_modules() if n in ALL}
    freeze_model(model, backend)
    computed = {n: m.dequantize() for n, m in frozen_layers(model)}
    assert dequantize_model(model) is model
    assert names(model) == set()
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == shapes
    for name in ALL:
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear and torch.equal(layer.weight, computed[name])
        if backend == "bf16":
            assert torch.equal(layer.weight, original[name])


def test_dequantize_model_leaves_adapters_alone(llama):
    model = get_peft_model(llama(), config(target_modules=["q_proj"]))
    dequantize_model(model)
    assert len(names(model)) == 2 and all(n.endswith("q_proj.base_layer") for n in names(model))
    assert type(model.base_model.model.model.layers[0].mlp.up_proj) is nn.Linear


@by_packed_backend
def test_each_dense_weight_is_gone_before_the_next(backend, monkeypatch):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    alive = [weakref.ref(m.weight) for m in model]
    seen = []
    quantize = BACKENDS[backend].quantize.__func__

    def watched(cls, linear, *args, **kwargs):
        seen.append(sum(ref() is not None for ref in alive))
        return quantize(cls, linear, *args, **kwargs)

    monkeypatch.setattr(BACKENDS[backend], "quantize", classmethod(watched))
    freeze_model(model, backend)
    assert seen == [6, 5, 4, 3, 2, 1] and not any(ref() is not None for ref in alive)


PEAK = """
import sys, torch
from torch import nn
from peft_nvfp4 import freeze_model, frozen_bytes
torch.set_num_threads(1)

def kib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

for backend in ("nvfp4", "nf4", "bf16"):
    freeze_model(nn.Sequential(nn.Linear(384, 384)), backend)  # code and tables are loaded before the measurement
    model = nn.Sequential(*[nn.Linear(384, 384, bias=False) for _ in range(24)])
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts here
    start = kib("VmRSS")
    freeze_model(model, backend, progress=False)
    print(backend, kib("VmHWM") - start, kib("VmRSS") - start, frozen_bytes(model) // 1024)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="not run: needs /proc/self/clear_refs (Linux)")
def test_peak_memory_is_near_one_layer():
    """24 layers of 576 KiB (FP32). NVFP4's search holds some ten FP32 arrays of the layer's size (magnitudes, their quotient by
    the global scale, thresholds, indices, differences, squares, the transpose); bitsandbytes one copy; "bf16" copies nothing. One
    MiB and a half of slack for the interpreter. Were dense weights kept until the end, the packed ones would come on top, 3.8 MiB
    in NVFP4. At the end the dense weights are gone."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}  # freed arrays go back to the system at once
    done = subprocess.run([sys.executable, "-c", PEAK], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = {line.split()[0]: [int(v) for v in line.split()[1:]] for line in done.stdout.splitlines()}
    layer, slack = 576, 1536
    for backend, temporaries in (("nvfp4", 10), ("nf4", 1), ("bf16", 0)):
        peak, end, kept = measured[backend]
        print(f"{backend}: peak +{peak} KiB, end {end:+} KiB, packed {kept} KiB")
        assert peak <= temporaries * layer + slack, backend
        assert end <= kept - 24 * layer + slack, backend
