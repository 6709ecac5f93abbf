"""GGUF files: read back by transformers, with the same logits and the same tokens."""

import json

import pytest
import torch
import transformers as hf
from conftest import tiny_llama
from peft import get_peft_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from peft_nvfp4.checkpoints import gguf as ours
from peft_nvfp4.checkpoints.gguf import export_gguf

gguf = pytest.importorskip("gguf", reason="not run: gguf is not installed")

TEXT = "Hello  world 1234 it's\n\n <|end|>user ünïcode 日本 I'LL"
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
IDS = torch.arange(24).reshape(2, 12) * 11 % 256


def tokenizer(split="gpt-2", chat_template="{{ messages }}"):
    """Byte-level BPE with two merges and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ll", "llo"])}
    inner = Tokenizer(models.BPE(vocabulary, [("l", "l"), ("ll", "o")]))
    steps = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        **{word: [pre_tokenizers.Split(Regex(regex), "isolated")] for regex, word in ours._SPLITS.items()},
    }[split]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt-2", "smollm"))
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    special = dict(bos_token="<|start|>", eos_token="<|end|>")
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=chat_template, **special)


def llama(**settings):
    return tiny_llama(**{"vocab_size": 262, **settings})  # two more than the tokenizer has


def mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, vocab_size=262, sliding_window=None))


def qwen2():
    model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, vocab_size=262))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.1)
    return model


def qwen3():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, vocab_size=262, head_dim=128))  # the one size that transformers reads


MODELS = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True, head_dim=32, rope_theta=5e5),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def read_back(folder, name="model.gguf", dtype=torch.float32):
    return hf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16", "q8_0"))
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_transformers_reads_what_is_written(make, dtype, tmp_path):
    """In F32 every weight comes back; in 16 bits those that are rounded to them; in Q8_0 those of gguf's own dequantisation,
    within half a step of 1/127 of a block's largest, and what the step's rounding to FP16 (2^-11) moves 127 of them by."""
    torch.manual_seed(0)
    model = make()
    if dtype in ("f16", "bf16"):
        for p in model.parameters():
            p.data = p.data.to({"f16": torch.float16, "bf16": torch.bfloat16}[dtype]).float()
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", dtype)
    again = read_back(tmp_path)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name in before:
        bound = 0.0 if dtype != "q8_0" or before[name].ndim == 1 else 0.57 * before[name].abs().max().item() / 127
        assert (before[name] - after[name]).abs().max() <= bound, name
    if dtype != "q8_0":
        torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("split", ("gpt-2", "smollm", "llama-bpe", "qwen2"))
def test_metadata_and_tokens(split, tmp_path):
    """By gguf's own reader, and the tokens of a text by transformers (which knows the way of splitting of GPT-2 only, for this
    architecture)."""
    own = tokenizer(split)
    export_gguf(llama(), own, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    read = {key: field.contents() for key, field in fields.items()}
    assert read["tokenizer.ggml.pre"] == split and read["tokenizer.ggml.model"] == "gpt2"
    assert read["tokenizer.ggml.merges"] == ["l l", "ll o"] and read["tokenizer.chat_template"] == "{{ messages }}"
    tokens, types = read["tokenizer.ggml.tokens"], read["tokenizer.ggml.token_type"]
    assert tokens[:258] == own.convert_ids_to_tokens(range(258)) and tokens[260:] == ["[PAD260]", "[PAD261]"]
    assert types == [1] * 258 + [3, 3] + [5, 5]
    assert read["tokenizer.ggml.bos_token_id"] == 258 and read["tokenizer.ggml.add_bos_token"] is False
    assert (read["llama.block_count"], read["llama.attention.head_count_kv"], read["llama.vocab_size"]) == (2, 2, 262)
    if split == "gpt-2":
        again = hf.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
        assert again(TEXT).input_ids == own(TEXT).input_ids
        assert again.eos_token == "<|end|>" and again.chat_template == own.chat_template


def test_a_merged_model_from_the_command_line(tmp_path, monkeypatch):
    """merge --gguf: the file holds the merged weights."""
    from typer.testing import CliRunner

    from peft_nvfp4 import cli

    app = cli.application()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    own = tokenizer()
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    own.save_pretrained(tmp_path / "base")
    base = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    config = NVFP4LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    command = ["merge", str(tmp_path / "adapter"), "-m", str(tmp_path / "base"), "-o", str(tmp_path / "out"), "--to", "bf16"]
    result = CliRunner().invoke(app, [*command, "--gguf", "--dtype", "bf16"])
    assert result.exit_code == 0, result.output
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    again = read_back(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(logits(again), logits(saved))
    refused = CliRunner().invoke(app, [*command[:-3], str(tmp_path / "other"), "--to", "nvfp4", "--gguf"])
    assert refused.exit_code != 0 and "GGUF" in refused.output and not (tmp_path / "other").exists()


def words():
    inner = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def unknown_split():
    own = tokenizer()
    own.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return own


def scaled():
    rope = dict(
        rope_type="llama3",
        rope_theta=1e4,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    return llama(rope_parameters=rope)


@pytest.mark.parametrize(
    "model, own, message",
    (
        (llama, words, "byte-level BPE.*convert_hf_to_gguf"),
        (llama, unknown_split, "byte-level BPE.*convert_hf_to_gguf"),
        (lambda: llama(vocab_size=200), tokenizer, "260 tokens, the model 200"),
        (scaled, tokenizer, "'llama3'.*convert_hf_to_gguf"),
        (lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, vocab_size=262, sliding_window=8)), tokenizer, "sliding window"),
        (lambda: llama(hidden_act="gelu"), tokenizer, "hidden_act='gelu'.*convert_hf_to_gguf"),
        (lambda: freeze_model(llama(), progress=False), tokenizer, "is packed: merge to 'bf16'"),
        (lambda: get_peft_model(llama(), NVFP4LoraConfig(target_modules=["q_proj"])).base_model.model, tokenizer, "adapter"),
        (lambda: llama().model, tokenizer, "LlamaModel.*convert_hf_to_gguf"),
    ),
)
def test_what_cannot_be_written_is_refused(model, own, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_gguf(model(), own(), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_a_weight_that_fp16_cannot_hold(tmp_path):
    """It would be infinite in the file; BF16 holds it."""
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[2, 3] = 1e5
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1e\+05, more than FP16 can"):
        export_gguf(model, tokenizer(), tmp_path / "model.gguf", "f16")
    assert not list(tmp_path.iterdir())
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", "bf16")


def test_a_head_of_its_own_in_a_model_that_ties(tmp_path):
    """Trained in full beside the embedding (modules_to_save), it is written; llama.cpp takes the embedding only where there is
    none."""
    model = MODELS["llama-tied"]()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    export_gguf(model, tokenizer(), tmp_path / "own.gguf", "f32")
    export_gguf(MODELS["llama-tied"](), tokenizer(), tmp_path / "tied.gguf", "f32")
    own, shared = ({t.name: t.data for t in gguf.GGUFReader(tmp_path / f"{word}.gguf").tensors} for word in ("own", "tied"))
    assert torch.equal(torch.tensor(own["output.weight"]), model.lm_head.weight.detach())
    assert "output.weight" not in shared


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    export_gguf(llama(), tokenizer(), tmp_path / "model.gguf")
    before = (tmp_path / "model.gguf").read_bytes()

    def full(self, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(OSError, match="No space"):
        export_gguf(llama(), tokenizer(), tmp_path / "model.gguf", "f32")
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_bytes() == before


def test_words_for_the_matrices(tmp_path):
    with pytest.raises(ValueError, match="f32, f16, bf16, q8_0"):
        export_gguf(llama(), tokenizer(), tmp_path / "model.gguf", "q4_k")


def test_the_real_tokenizer_is_written(tmp_path):
    from smollm2_reviews import model_folder

    real = hf.AutoTokenizer.from_pretrained(model_folder())
    export_gguf(llama(vocab_size=len(real)), real, tmp_path / "model.gguf")
    again = hf.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert again(TEXT).input_ids == real(TEXT).input_ids
    assert json.dumps(again.special_tokens_map, sort_keys=True) == json.dumps(real.special_tokens_map, sort_keys=True)


def test_rows_of_heads_are_exchanged():
    """Two heads of four rows: the first half of a head goes to its even rows."""
    rows = torch.arange(8.0)[:, None]
    assert ours.neighbours(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
