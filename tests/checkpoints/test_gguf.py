"""GGUF files: read back by transformers, with the same logits and the same tokens."""

import json

import pytest
import torch
import transformers as hf
from _gguf_models import MODELS, VOCABULARY, YARN, sentencepiece, tokenizer
from conftest import tiny_llama
from peft import get_peft_model
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from peft_nvfp4.checkpoints.gguf import export_gguf
from peft_nvfp4.checkpoints.gguf.families import FAMILIES, neighbours, rows
from peft_nvfp4.checkpoints.gguf.model import gguf_name
from peft_nvfp4.checkpoints.gguf.tokenizer import SPLITS
from peft_nvfp4.nn.frozen_linear import FrozenLinear

gguf = pytest.importorskip("gguf", reason="not run: gguf is not installed")

TEXT = "Hello  world 1234 it's\n\n <|end|>user ünïcode 日本 I'LL"
IDS = torch.arange(24).reshape(2, 12) * 11 % 256
READ_BY_TRANSFORMERS = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")


def llama(**settings):
    return tiny_llama(**{"vocab_size": VOCABULARY, **settings})


def read_back(folder, name="model.gguf", dtype=torch.float32):
    return hf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16", "q8_0"))
@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_what_is_written(name, dtype, tmp_path):
    """In F32 every weight comes back; in 16 bits those that are rounded to them; in Q8_0 those of gguf's own dequantisation,
    within half a step of 1/127 of a block's largest, and what the step's rounding to FP16 (2^-11) moves 127 of them by."""
    model = MODELS[name]()
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


@pytest.mark.parametrize("split", ("gpt-2", "smollm", *SPLITS.values()))
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
    result = CliRunner().invoke(app, [*command, "--gguf", "bf16", "--dtype", "bf16"])
    assert result.exit_code == 0, result.output
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    again = read_back(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(logits(again), logits(saved))
    refused = CliRunner().invoke(app, [*command[:-3], str(tmp_path / "other"), "--to", "nvfp4", "--gguf", "bf16"])
    assert refused.exit_code != 0 and "merged --to nvfp4 is written as --gguf nvfp4" in refused.output
    assert not (tmp_path / "other").exists()


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


def unlike_gemma(**settings):
    return lambda: MODELS["gemma3"](**settings)


@pytest.mark.parametrize(
    "model, own, message",
    (
        (llama, words, "byte-level BPE.*convert_hf_to_gguf"),
        (llama, unknown_split, "byte-level BPE.*convert_hf_to_gguf"),
        (lambda: llama(vocab_size=200), tokenizer, "260 tokens, the model 200"),
        (lambda: MODELS["qwen2"](rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), tokenizer, "'dynamic'"),
        (lambda: MODELS["qwen3-yarn"](rope_parameters={**YARN, "attention_factor": 2.0}), tokenizer, "with attention_factor"),
        (unlike_gemma(layer_types=["full_attention"] * 7), tokenizer, "order of sliding and full attention.*convert_hf_to_gguf"),
        (unlike_gemma(query_pre_attn_scalar=64), tokenizer, "query_pre_attn_scalar=64 .llama.cpp takes 32"),
        (lambda: MODELS["qwen3-moe"](norm_topk_prob=False), tokenizer, "norm_topk_prob=False.*convert_hf_to_gguf"),
        (lambda: MODELS["qwen3-moe"](mlp_only_layers=[0]), tokenizer, "dense layers.*convert_hf_to_gguf"),
        (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=1, n_head=4)), tokenizer, "gpt2.*glm4 are.*convert_hf"),
        (llama, lambda: sentencepiece("always"), "SentencePiece BPE.*convert_hf_to_gguf"),
        (lambda: llama(hidden_act="gelu"), tokenizer, "hidden_act='gelu'.*convert_hf_to_gguf"),
        (lambda: freeze_model(llama(), progress=False), tokenizer, "is packed: write dtype='nvfp4'"),
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
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight holds 1e\+05, more than FP16 can"):
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
    assert neighbours(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_has_its_place(name, tmp_path):
    """The file's tensors are the model's, in number and in values (up to the order of rows and Gemma's one)."""
    model = MODELS[name]()
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", "f32")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {t.name: torch.tensor(t.data) for t in reader.tensors}
    added = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"} & tensors.keys()
    assert bool(added) == (name in ("llama3-rope", "phi3-longrope"))
    moved = 0.0 if "gemma" not in name else sum(p.numel() for n, p in model.named_parameters() if n.endswith("norm.weight"))
    expected = sum(p.double().sum().item() for p in model.parameters()) + moved
    found = sum(t.double().sum().item() for n, t in tensors.items() if n not in added)
    assert sum(t.numel() for n, t in tensors.items() if n not in added) == sum(p.numel() for p in model.parameters())
    assert found == pytest.approx(expected, abs=1e-3)  # FP32 values, of which a hundred thousand are added in FP64
    assert reader.fields["general.architecture"].contents() == FAMILIES[model.config.model_type].architecture


def test_a_window_that_llama_cpp_does_not_know_ends_the_context(tmp_path):
    for name, length in (("mistral", 512), ("mistral-window", 48), ("phi3-window", 48), ("gemma3", 512)):
        model = MODELS[name]()
        export_gguf(model, tokenizer(), tmp_path / "model.gguf")
        fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
        word = FAMILIES[model.config.model_type].architecture
        assert fields[f"{word}.context_length"].contents() == length
        assert (f"{word}.attention.sliding_window" in fields) == (name == "gemma3")


def test_pieces_are_joined_by_score(tmp_path):
    """The score of a piece falls with the rank of its first merge; what is no piece of its own has no rank."""
    own = sentencepiece()
    export_gguf(llama(vocab_size=len(own) + 2), own, tmp_path / "model.gguf")
    read = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    assert read["tokenizer.ggml.model"] == "llama" and read["tokenizer.ggml.add_space_prefix"] is False
    scores = dict(zip(read["tokenizer.ggml.tokens"], read["tokenizer.ggml.scores"]))
    assert scores["he"] == 0 > scores["ll"] > scores["ello"] > scores["hello"] > scores["a"]
    types = dict(zip(read["tokenizer.ggml.tokens"], read["tokenizer.ggml.token_type"]))
    assert (types["<unk>"], types["<s>"], types["<0x0A>"], types["he"]) == (2, 3, 6, 1)


@pytest.mark.parametrize(
    "merges, message",
    (
        ([("a", "b"), ("b", "a"), ("ab", "a"), ("b", "ab")], "'a', 'ba'. is no merge"),
        ([("a", "b"), ("a", "ba"), ("b", "a"), ("ab", "a")], "merges of 'aba' do not follow each other"),
    ),
)
def test_merges_that_scores_cannot_say(merges, message, tmp_path):
    vocabulary = {token: i for i, token in enumerate(["<unk>", "a", "b", "ab", "ba", "aba", "bab"])}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    own = hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    with pytest.raises(ValueError, match=message):
        export_gguf(llama(), own, tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ("llama", "llama-biases", "mistral", "qwen3"))
def test_nvfp4_has_the_codes_and_scales_of_the_model(name, tmp_path):
    """By gguf's own dequantisation, bit for bit: codes times block scales, which the global scale multiplies (a power of two, so
    that is exact). What is dense is BF16; what has no multiple of 64 inputs, too."""
    model = freeze_model(MODELS[name](), progress=False)
    frozen = {n: m for n, m in model.named_modules() if isinstance(m, FrozenLinear)}
    export_gguf(model, tokenizer(), tmp_path / "model.gguf", "nvfp4")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    family, packed = FAMILIES[model.config.model_type], 0
    for n, layer in frozen.items():
        target = gguf_name(f"{n}.weight", model.config, family)
        ((_, expected),) = rows(f"{n}.weight", layer.dequantize(torch.float32), model.config, family)
        found = torch.tensor(gguf.quants.dequantize(tensors[target].data, tensors[target].tensor_type))
        if layer.in_features % 64 == 0:
            packed += 1
            assert tensors[target].tensor_type.name == "NVFP4"
            found = found * torch.tensor(tensors[target.replace(".weight", ".scale")].data)
        assert torch.equal(found, expected), n
    assert packed and tensors["token_embd.weight"].tensor_type.name == "BF16"
    assert len([t for t in tensors if t.endswith(".scale")]) == packed


@pytest.mark.parametrize(
    "make, message",
    (
        (lambda: MODELS["llama"](), "writes a model frozen in NVFP4"),
        (lambda: freeze_model(MODELS["llama"](), "nf4", progress=False), "writes a model frozen in NVFP4"),
        (lambda: freeze_model(MODELS["qwen3-moe"](), progress=False), "leave out global scales.*write 'q8_0'"),
        (lambda: freeze_model(MODELS["gemma3"](), progress=False), "it has them for llama, mistral, qwen3"),
    ),
    ids=("dense", "nf4", "experts", "gemma3"),
)
def test_what_is_no_nvfp4(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_gguf(make(), tokenizer(), tmp_path / "model.gguf", "nvfp4")
    assert not list(tmp_path.iterdir())
