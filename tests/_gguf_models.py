"""Tiny random models of every family that is written as GGUF, and tokenizers of both kinds.

Their weights are larger than transformers' initial ones, under which attention looks everywhere alike: a wrong row order or a
wrong rotary angle would hardly move a logit.
"""

import functools

import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from peft_nvfp4.checkpoints.gguf.tokenizer import SPLITS

VOCABULARY = 262  # two more than the tokenizers have
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(vocab_size=VOCABULARY, max_position_embeddings=512, pad_token_id=None, bos_token_id=None, eos_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
GEMMA_ROPE = dict(sliding_attention=dict(rope_type="default", rope_theta=1e4))
LONG = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75, original_max_position_embeddings=256)
LONG |= dict(short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 2.0], long_factor=[1.0, 1.5, 2.0, 4.0, 8.0, 16.0])
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, head_dim=16)


@torch.no_grad()
def lively(model):
    """Matrices of gain 1.5, norms and biases away from one and zero."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            p.normal_(std=1.5 * p.shape[-1] ** -0.5 if "embed" not in name else 1.0)
        else:
            p.add_(0.2 * torch.randn_like(p))
    return model.eval()


def of(family, config=None, **settings):
    """A maker of lively models."""
    kind = getattr(hf, f"{config or family}Config")
    return lambda **more: lively(getattr(hf, f"{family}ForCausalLM")(kind(**{**SIZES, **settings, **more})))


def linear(factor=4.0):
    return dict(rope_type="linear", rope_theta=1e4, factor=factor)


gemma3 = functools.partial(of, "Gemma3", "Gemma3Text", head_dim=32, query_pre_attn_scalar=32, sliding_window=8)
gemma3 = functools.partial(gemma3, num_hidden_layers=7, tie_word_embeddings=True)
MODELS = {
    "llama": of("Llama"),
    "llama-tied": of("Llama", tie_word_embeddings=True, head_dim=32, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    "llama-biases": of("Llama", attention_bias=True),
    "llama3-rope": of("Llama", rope_parameters=LLAMA3),
    "llama-linear": of("Llama", rope_parameters=linear()),
    "llama-yarn": of("Llama", rope_parameters=YARN),
    "mistral": of("Mistral", sliding_window=None),
    "mistral-window": of("Mistral", sliding_window=48),
    "qwen2": of("Qwen2"),
    "qwen2-yarn": of("Qwen2", rope_parameters=YARN),
    "qwen3": of("Qwen3", head_dim=128),  # the one size that transformers reads
    "qwen3-yarn": of("Qwen3", head_dim=32, rope_parameters=YARN),
    "qwen3-moe": of("Qwen3Moe", **MIXTURE),
    "gemma3": gemma3(),
    "gemma3-linear": gemma3(rope_parameters={"full_attention": linear(8.0), **GEMMA_ROPE}),
    "gemma3-softcapping": gemma3(final_logit_softcapping=3.0),
    "phi3": of("Phi3"),
    "phi3-window": of("Phi3", sliding_window=48),
    "phi3-partial": of("Phi3", rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "phi3-longrope": of("Phi3", rope_parameters=LONG, max_position_embeddings=1024, original_max_position_embeddings=256),
    "glm4": of("Glm4", head_dim=16, attention_bias=True),
}
"""Name -> a function of settings that makes a model in FP32."""


def tokenizer(split="gpt-2", chat_template="{{ messages }}"):
    """Byte-level BPE with two merges and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ll", "llo"])}
    regex, whole = next(((regex, whole) for (regex, whole), word in SPLITS.items() if word == split), (None, False))
    inner = Tokenizer(models.BPE(vocabulary, [("l", "l"), ("ll", "o")], ignore_merges=whole))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    steps += [pre_tokenizers.Split(Regex(regex), "isolated")] if regex else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    inner.decoder = decoders.ByteLevel()
    special = dict(bos_token="<|start|>", eos_token="<|end|>")
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=chat_template, **special)


PIECES = ("▁", *"abcdehlnorstwy!?0123456789", "he", "ll", "▁w", "or", "ello", "llo", "hello", "▁wor", "▁world", "ld", "th", "▁th")
PIECES += ("▁the", "▁▁")


def sentencepiece(spaces="gemma", **more):
    """SentencePiece BPE, as transformers converts one: every way to join two pieces to a third is a merge, by the third's
    rank."""
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokens = [*special.values(), *more.values(), *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [(p[:i], p[i:]) for p in PIECES for i in range(1, len(p)) if p[:i] in PIECES and p[i:] in PIECES]
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    if spaces == "gemma":
        inner.normalizer = replace
        inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif spaces == "legacy":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=spaces, split=False)
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
