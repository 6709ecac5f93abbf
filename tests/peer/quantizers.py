"""What transformers asks of its 4-bit quantiser (``tests/quantization/bnb/test_4bit.py`` of its repository), of ``PactConfig``.

Run by ``run.py``. transformers' own file is in no distribution and loads models of gigabytes, whose sentences it compares, so its
questions are put here, in our words, to small models. The row ``stock`` is ``BitsAndBytesConfig``: what fails there is nothing of
ours. Questions for several GPUs and about ``torch.compile`` are left out (``tests/training/test_distributed.py``, ``test_compile.py``).
"""

from __future__ import annotations

import json
import tempfile

import pytest
import torch
from sources import tokenizer
from tests.test_quantization import check_outputs_similar
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    T5PreTrainedModel,
    pipeline,
)

from peft_nvfp4 import PactConfig

MODELS = {
    "llama": "trl-internal-testing/tiny-random-LlamaForCausalLM",
    "qwen2": "peft-internal-testing/tiny-dummy-qwen2",
    "opt": "peer/tiny-opt",
    "bloom": "peft-internal-testing/tiny-random-BloomForCausalLM",
    "t5": "peft-internal-testing/tiny-random-T5ForConditionalGeneration",
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
HEADS = ("lm_head", "score")


def config_of(base: str) -> BitsAndBytesConfig | PactConfig:
    settings = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return PactConfig() if base == "nvfp4" else BitsAndBytesConfig(**settings, bnb_4bit_compute_dtype=torch.bfloat16)


def load(base: str, name: str, cls: type | None = None, dtype: torch.dtype = torch.bfloat16, **kwargs: object):
    """``base`` "dense": not quantised. A folder is read as it was saved."""
    cls = cls or (AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM)
    if base != "dense":
        kwargs["quantization_config"] = config_of(base)
    torch.manual_seed(0)  # heads that the checkpoint lacks
    return cls.from_pretrained(MODELS.get(name, name), dtype=dtype, **kwargs).eval()


def inputs(model, name: str) -> dict[str, torch.Tensor]:
    ids = IDS.to(model.device)  # bitsandbytes moves a model to the GPU where there is one
    return {"input_ids": ids, **({"decoder_input_ids": ids} if name == "t5" else {})}


def logits(model, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(model, name)).logits.float().cpu()


def generate(model, ids: torch.Tensor = IDS) -> torch.Tensor:
    ids = ids.to(model.device)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)


def packed(model) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and a
    assert [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n].cpu(), b[n].cpu())] == []


# ---------------------------------------------------------------------------------------------- what is asked


def num_parameters(base, name):
    assert load(base, name).num_parameters() == load("dense", name).num_parameters()


def config_json(base, name):
    model = load(base, name)
    for text in (json.dumps(model.config.to_dict(), default=str), json.dumps(model.config.to_diff_dict(), default=str)):
        assert "quantization_config" in text
    stored = json.loads(model.config.to_json_string())["quantization_config"]
    again = type(config_of(base)).from_dict(stored)
    assert again.to_dict() == config_of(base).to_dict()


def memory_footprint(base, name):
    assert load(base, name).get_memory_footprint() < load("dense", name).get_memory_footprint()


def linears_are_packed(base, name):
    model = load(base, name)
    dense_names = (*HEADS, *T5PreTrainedModel._keep_in_fp32_modules)
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) > 5
    for path, module in linears:
        assert (module.weight.dtype == torch.uint8) is (path.rpartition(".")[2] not in dense_names), path


def generate_twice_loaded(base, name):
    first = generate(load(base, name))
    assert first.shape[1] > 1 and torch.equal(first, generate(load(base, name)))


def close_to_dense(base, name):
    check_outputs_similar(logits(load("dense", name), name), logits(load(base, name), name))


def dequantize(base, name):
    model = load(base, name)
    before = logits(model, name)
    model.dequantize()
    check_outputs_similar(before, logits(model, name))
    generate(model)
    assert not packed(model) and not model.is_quantized
    for owner, word in (
        (model, "hf_quantizer"),
        (model.config, "quantization_config"),
        (model.config, "_pre_quantization_dtype"),
        (model, "quantization_method"),
    ):
        assert not hasattr(owner, word), word
    assert model.to(dtype=torch.float16).dtype == torch.float16


def to_a_device(base, name):
    model = load(base, name)
    before, bits = model.get_memory_footprint(), packed(model)
    model.to("cpu")
    assert model.device.type == "cpu" and model.get_memory_footprint() == before
    assert_same(packed(model), bits)


def to_a_dtype(base, name):
    """bitsandbytes refuses; otherwise the packed weights have to come through it."""
    for cast in (lambda m: m.to(torch.float16), lambda m: m.float(), lambda m: m.half()):
        model = load(base, name)
        bits = packed(model)
        try:
            cast(model)
        except ValueError:
            continue
        assert_same(packed(model), bits)
        assert torch.isfinite(logits(model, name)).all()


def device_map(base, name):
    model = load(base, name, device_map={"": "cpu"})
    assert_same(packed(model), packed(load(base, name)))


def serialization(base, name):
    first = load(base, name)
    with tempfile.TemporaryDirectory() as folder:
        first.save_pretrained(folder)
        assert hasattr(AutoConfig.from_pretrained(folder), "quantization_config")
        second = type(first).from_pretrained(folder).eval()
    assert first.get_memory_footprint() == second.get_memory_footprint()
    assert_same(dict(first.named_parameters()), dict(second.named_parameters()))
    assert torch.equal(logits(first, name), logits(second, name))
    assert torch.equal(generate(first), generate(second))


class HandMade(torch.nn.Module):
    """An adapter around a linear by somebody who has not heard of PEFT."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)
        self.to(base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def training_by_hand(base, name):
    model = load(base, name)
    for p in model.parameters():
        p.requires_grad_(False)
        if p.ndim == 1 and p.is_floating_point():
            p.data = p.data.float()
    owners = [
        m for m in model.modules() if isinstance(getattr(m, "q_proj", getattr(m, "query_key_value", None)), torch.nn.Linear)
    ]
    for owner in owners:
        for word in ("q_proj", "v_proj", "query_key_value"):
            if hasattr(owner, word):
                setattr(owner, word, HandMade(getattr(owner, word), rank=4))
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        model(**inputs(model, name)).logits.norm().backward()
    made = [m for m in model.modules() if isinstance(m, HandMade)]
    assert len(made) >= 2 and all(m.up.weight.grad.norm() > 0 for m in made)
    assert all(p.grad is None for n, p in model.named_parameters() if ".up." not in n and ".down." not in n)


def text_pipeline(base, name):
    words = tokenizer()
    made = pipeline(
        "text-generation",
        model=MODELS[name],
        tokenizer=words,
        model_kwargs={"quantization_config": config_of(base), "dtype": torch.bfloat16},
        max_new_tokens=5,
        do_sample=False,
    )
    assert packed(made.model)
    ids = torch.tensor([words("hello")["input_ids"]])
    expected = generate(load(base, name), ids)
    assert made("hello", return_tensors=True)[0]["generated_token_ids"] == expected[0].tolist() and expected.shape[1] > 5


def head_classes(base, name):
    classes = [AutoModel] if name == "t5" else [AutoModel, AutoModelForSequenceClassification]
    for cls in (*classes, None):
        model = load(base, name, cls)
        assert packed(model)
        heads = [m.weight for n, m in model.named_modules() if n in HEADS]
        assert len(heads) == (cls is not AutoModel)
        assert all(type(w) is torch.nn.Parameter and w.is_floating_point() for w in heads)


def kept_in_fp32(base, name):
    """T5 asks for FP32 in "wo" where it is loaded in FP16; with and without that list it generates."""
    model = load(base, name, dtype=torch.float16)
    assert model.decoder.block[0].layer[2].DenseReluDense.wo.weight.dtype == torch.float32
    assert model.decoder.block[0].layer[0].SelfAttention.q.weight.dtype == torch.uint8
    generate(load(base, name))
    kept = type(model)._keep_in_fp32_modules
    try:
        type(model)._keep_in_fp32_modules = None
        generate(load(base, name))
    finally:
        type(model)._keep_in_fp32_modules = kept


QUESTIONS = {f.__name__: f for f in (
    num_parameters, config_json, memory_footprint, linears_are_packed, generate_twice_loaded, close_to_dense,
    dequantize, to_a_device, to_a_dtype, device_map, serialization, training_by_hand, text_pipeline, head_classes, kept_in_fp32,
)}  # fmt: skip
ONLY = {
    "kept_in_fp32": ("t5",),
    "training_by_hand": ("llama", "qwen2", "opt", "bloom"),
    "text_pipeline": ("llama", "opt", "bloom"),
}


@pytest.mark.parametrize(
    "base, name, question",
    [
        pytest.param(base, name, question, id=f"{base}-{name}-{question}")
        for base in ("nvfp4", "stock")
        for name in MODELS
        for question in QUESTIONS
        if name in ONLY.get(question, MODELS)
    ],
)
def test_quantizer(base, name, question):
    torch.manual_seed(0)
    QUESTIONS[question](base, name)
