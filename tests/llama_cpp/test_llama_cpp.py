"""GGUF files in llama.cpp itself (``make test-llama``): logits, tokens and answers are those of transformers.

Bounds. Every operand of a product is rounded to within ``u`` of its size, by uniform errors of ``u / sqrt(3)`` that are
independent of each other: their squares add. llama.cpp rounds the input of a BF16 matrix to BF16, ``u = 2^-9``, and that of a
Q8_0 matrix to Q8_0: half a step of 1/127 of a block's largest value, which of 32 Gaussian values is about 2.1 deviations,
``u = 2.1 / 254``. In FP32 it is the sums: up to 192 products, ``u = sqrt(192) 2^-24``. A layer rounds four inputs (of q/k/v, o,
gate/up and down), the head one. Gemma's GELU is a table in FP16, one more rounding of 2^-11 a layer. So the logits' norm is off
by ``g sqrt((4 L + 1) / 3) u``, where ``g = 4`` stands for what norms and attention amplify; about half of that is found. That
the bounds notice mistakes is tested on its own (:func:`test_the_bound_notices`).
"""

import contextlib

import numpy as np
import pytest
import torch
from _gguf_models import MODELS, PIECES, VOCABULARY, lively, sentencepiece, tokenizer
from conftest import tiny_llama
from peft import get_peft_model
from tokenizers import AddedToken

from peft_nvfp4 import NVFP4LoraConfig, dequantize_model, freeze_model, merge
from peft_nvfp4.checkpoints.gguf import export_gguf, export_gguf_adapter, families
from peft_nvfp4.checkpoints.gguf.tokenizer import SPLITS

pytest.importorskip("llama_cpp.llama", reason="not run: llama_cpp is not installed (make test-llama)")
import llama_cpp

ROUNDING = {"f32": 192**0.5 * 2.0**-24, "bf16": 2.0**-9, "q8_0": 2.1 / 254}
IDS = [int(i) for i in torch.arange(40) * 37 % VOCABULARY]
F32 = 0  # ggml's number of the type


def bound(model, dtype):
    layers = model.config.num_hidden_layers
    table = layers * 2.0**-22 if "gemma" in model.config.model_type else 0.0
    return 4 * (((4 * layers + 1) * ROUNDING[dtype] ** 2 + table) / 3) ** 0.5


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
    """Logits, (positions, vocabulary)."""
    with engine(path, **settings) as model:
        model.eval(ids)
        return torch.tensor(np.array(model.scores[: len(ids)]))


@torch.no_grad()
def ours(model, ids=IDS):
    return model(torch.tensor([ids])).logits[0].float()


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def rounded(model, dtype):
    """The model with the weights that the file holds."""
    import gguf

    kind = gguf.GGMLQuantizationType[dtype.upper()]
    for p in model.parameters() if dtype != "f32" else ():
        if p.ndim > 1 and (dtype != "q8_0" or p.shape[-1] % 32 == 0):
            p.data = torch.tensor(gguf.quants.dequantize(gguf.quants.quantize(p.detach().numpy(), kind), kind)).view(p.shape)
    return model


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, dtype, tmp_path):
    model = MODELS[name]()
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", dtype)
    found = distance(theirs(tmp_path / "model.gguf"), ours(rounded(model, dtype)))
    print(f"{name} {dtype}: {found:.2e}, bound {bound(model, dtype):.2e}")
    assert found < bound(model, dtype)


@pytest.mark.parametrize("name", ("llama", "llama-biases", "mistral", "qwen3"))
def test_logits_of_nvfp4(name, tmp_path):
    """A frozen model's own codes and scales, against the dequantised model: llama.cpp rounds the inputs of packed matrices to
    Q8_0 on a CPU."""
    model = freeze_model(MODELS[name](intermediate_size=128), progress=False)
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", "nvfp4")
    dense = rounded(dequantize_model(model), "bf16")
    found, limit = distance(theirs(tmp_path / "model.gguf"), ours(dense)), bound(dense, "q8_0")
    print(f"{name} nvfp4: {found:.2e}, bound {limit:.2e}")
    assert found < limit


def test_logits_of_long_factors(tmp_path):
    """Beyond the original context of 256 tokens, transformers takes longrope's other factors for all positions; llama.cpp takes
    them whenever its context is longer."""
    model, ids = MODELS["phi3-longrope"](), IDS * 7
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", "f32")
    assert distance(theirs(tmp_path / "model.gguf", ids, n_ctx=512), ours(model, ids)) < bound(model, "f32")
    assert distance(theirs(tmp_path / "model.gguf", n_ctx=512), ours(model)) > 0.1


def test_phi3_by_its_name(tmp_path):
    """llama.cpp knows by the name of the model that Phi-3's special tokens take the spaces after them away."""
    own = sentencepiece("gemma", user="<|user|>", end="<|endoftext|>")
    strips = {"<unk>": False, "<s>": False, "<|endoftext|>": False, "</s>": True, "<|user|>": True}
    own.add_tokens([AddedToken(name, rstrip=strip, special=True, normalized=False) for name, strip in strips.items()])
    export_gguf(MODELS["phi3"](vocab_size=len(own)), own, tmp_path / "model.gguf")
    for text in ("<|user|>  the hello</s> he", "<s>  the<|user|>\n hello <|endoftext|> he"):
        assert tokens_of(tmp_path / "model.gguf", text) == own(text, add_special_tokens=False).input_ids, text


MISTAKES = {
    "rows of q and k as they are": ("llama", dict(pairs=False)),
    "norms without Gemma's one": ("gemma3", dict(shift=0.0)),
    "attention without its window": ("gemma3", dict(windows=False)),
}


@pytest.mark.parametrize("name, settings", MISTAKES.values(), ids=MISTAKES)
def test_the_bound_notices(name, settings, tmp_path, monkeypatch):
    """Mistakes of the export move logits by more than the widest bound, that of Q8_0."""
    model = MODELS[name]()
    kind = model.config.model_type
    wrong = families.Family(**{**vars(families.FAMILIES[kind]), **settings})
    monkeypatch.setitem(families.FAMILIES, kind, wrong)
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", "f32")
    assert distance(theirs(tmp_path / "model.gguf"), ours(model)) > 1.5 * bound(model, "q8_0")


@pytest.mark.parametrize("name", ("llama", "qwen3", "qwen3-moe", "gemma3", "phi3", "glm4"))
def test_an_adapter_on_a_base_and_the_merged_model_agree(name, tmp_path):
    """``base.gguf`` with ``adapter.gguf``, ``merged.gguf``, and the merged model in transformers. The base is not quantised, all
    files are FP32; experts have adapters, too."""
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if name == "qwen3-moe" else None
    model = MODELS[name]()
    export_gguf(model, tokenizer(), tmp_path / "base.gguf", "f32")
    config = NVFP4LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", target_parameters=experts, backend="bf16")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for key, p in adapted.named_parameters():
            if "lora_" in key:
                p.normal_(std=p.shape[-1] ** -0.5)
    export_gguf_adapter(adapted, tmp_path / "adapter.gguf")
    merged, _ = merge(adapted, to="fp32")
    export_gguf(merged, tokenizer(), tmp_path / "merged.gguf", "f32")
    expected = ours(merged)
    base = theirs(tmp_path / "base.gguf")
    one = theirs(tmp_path / "merged.gguf")
    two = theirs(tmp_path / "base.gguf", lora_path=str(tmp_path / "adapter.gguf"))
    limit = bound(merged, "f32")
    found = distance(one, expected), distance(two, expected), distance(two, one)
    print(f"{name}: {max(found):.2e}, bound {limit:.2e}")
    assert distance(base, expected) > 0.1, "the adapter does nothing"
    assert max(found) < limit


@pytest.mark.parametrize("dtype", ("bf16", "q8_0"))
def test_greedy_answers_are_the_same(dtype, tmp_path):
    """Of a model whose next token is never a close call: tied, with logits far apart."""
    model = rounded(MODELS["llama"](), dtype)
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", dtype)
    with torch.no_grad():
        expected = model.generate(torch.tensor([IDS[:8]]), max_new_tokens=12, do_sample=False, eos_token_id=-1)[0, 8:].tolist()
    with engine(tmp_path / "model.gguf") as served:
        answer = served.generate(IDS[:8], temp=0.0)
        assert [next(answer) for _ in range(12)] == expected


TEXTS = (
    "Hello  world 1234 it's\n\n <|end|>user ünïcode 日本 I'LL",
    " leading, trailing ",
    "tabs\tand\r\nlines\n\n\n  indented",
    "HTTPServer2 camelCase __init__ 3.14159e-10 !!!???",
    "don't we'Re THEY'LL 12345678",
    "he helloworld the  the   hello 42!",
)


def tokens_of(path, text):
    with engine(path, vocab_only=True) as model:
        return model.tokenize(text.encode(), add_bos=False, special=True)


@pytest.mark.parametrize("split", ("gpt-2", "smollm", *SPLITS.values()))
def test_tokens(split, tmp_path):
    own = tokenizer(split)
    export_gguf(lively(tiny_llama(vocab_size=VOCABULARY)), own, tmp_path / "model.gguf")
    for text in TEXTS:
        assert tokens_of(tmp_path / "model.gguf", text) == own(text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize("spaces", ("gemma", "legacy", "first"))
def test_tokens_of_sentencepiece(spaces, tmp_path):
    """With "first", texts that start with a special token, as those of chats do."""
    own = sentencepiece(spaces)
    export_gguf(lively(tiny_llama(vocab_size=len(own))), own, tmp_path / "model.gguf")
    start = "<s>" if spaces == "first" else ""
    generator = torch.Generator().manual_seed(0)
    drawn = [[PIECES[i] for i in torch.randint(len(PIECES), (30,), generator=generator)] for _ in range(20)]
    for text in (*TEXTS, "he</s> the", *("".join(pieces).replace("▁", " ") for pieces in drawn)):
        expected = own(start + text, add_special_tokens=False).input_ids
        assert tokens_of(tmp_path / "model.gguf", start + text) == expected, text


def test_the_real_tokenizer(tmp_path):
    """SmolLM2's, where it was fetched."""
    import transformers as hf
    from smollm2_reviews import model_folder

    try:
        own = hf.AutoTokenizer.from_pretrained(model_folder())
    except FileNotFoundError as error:
        pytest.skip(f"not run: {error}")
    export_gguf(lively(tiny_llama(vocab_size=len(own))), own, tmp_path / "model.gguf")
    for text in TEXTS:
        assert tokens_of(tmp_path / "model.gguf", text) == own(text, add_special_tokens=False).input_ids, text
