"""GGUF files in llama.cpp itself (``make test-llama``): logits and tokens are those of transformers.

Bounds. Let ``u`` be the largest relative rounding error of an operand of a product: 2^-24 in FP32. llama.cpp rounds the input of a
BF16 matrix to BF16, ``u = 2^-9``, and that of a Q8_0 matrix to Q8_0, whose error is at most half a step of 1/127 of a block's
largest value; relative to the norm of Gaussian values, the largest of 32 of which is about 2.1 of their deviations,
``u = 2.1 / 254``. A layer rounds four inputs (of q/k/v, o, gate/up and down), the head one, so to first order an error of
``(4 L + 1) u g`` is left relative to the logits' norm, with ``g`` for what norms and attention amplify. FP32 sums of K = 64 to 176
products add at most K roundings each. ``g = 4`` is a choice; that the bound notices mistakes is tested on its own
(:func:`test_the_bound_notices`): they move logits by a tenth of their norm and more.
"""

import contextlib

import numpy as np
import pytest
import torch
from _gguf_models import MODELS, SIZES, VOCABULARY, sentencepiece, tokenizer
from peft import LoraConfig, get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, merge
from peft_nvfp4.checkpoints.gguf import export_gguf, export_gguf_adapter

pytest.importorskip("llama_cpp.llama", reason="not run: llama_cpp is not installed (make test-llama)")
import llama_cpp

ROUNDING = {"f32": 176 * 2.0**-24, "bf16": 2.0**-9, "q8_0": 2.1 / 254}
IDS = [int(i) for i in torch.arange(40) * 37 % VOCABULARY]
F32 = 0  # ggml's number of the type


def bound(model, dtype):
    return 4 * (4 * model.config.num_hidden_layers + 1) * ROUNDING[dtype]


@contextlib.contextmanager
def engine(path, **settings):
    """llama.cpp on a CPU, one thread, keys and values in FP32."""
    how = dict(n_ctx=64, n_threads=1, n_threads_batch=1, logits_all=True, type_k=F32, type_v=F32, verbose=False, use_mmap=False)
    model = llama_cpp.Llama(str(path), **{**how, **settings})
    try:
        yield model
    finally:
        model.close()


def theirs(path, ids=IDS, **settings):
    with engine(path, **settings) as model:
        model.eval(ids)
        return torch.tensor(np.array(model.scores[: len(ids)]))


@torch.no_grad()
def ours(model, ids=IDS):
    return model(torch.tensor([ids])).logits[0].float()


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def rounded(model, dtype):
    """The model whose weights are those that the file holds."""
    import gguf

    if dtype == "q8_0":
        kind = gguf.GGMLQuantizationType.Q8_0
        for p in model.parameters():
            if p.ndim > 1 and p.shape[-1] % 32 == 0:
                p.data = torch.tensor(gguf.quants.dequantize(gguf.quants.quantize(p.detach().numpy(), kind), kind))
    elif dtype == "bf16":
        for p in model.parameters():
            if p.ndim > 1:
                p.data = p.data.bfloat16().float()
    return model


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, dtype, tmp_path, record_property):
    model = MODELS[name]()
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", dtype)
    found = distance(theirs(tmp_path / "model.gguf"), ours(rounded(model, dtype)))
    print(f"{name} {dtype}: {found:.2e}, bound {bound(model, dtype):.2e}")
    assert found < bound(model, dtype)
