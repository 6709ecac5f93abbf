"""A tokenizer's vocabulary for llama.cpp, which splits and merges text itself.

Two kinds are written. **Byte-level BPE** (GPT-2, Llama 3, Qwen, GLM, Phi-4): llama.cpp has the regular expressions by which text
is split before merging, each under a word; an expression that it does not have is refused. **SentencePiece BPE** (Gemma, Llama 2,
Phi-3, Mistral): spaces are "▁", unknown characters are bytes. There llama.cpp knows no merges, it joins the two neighbours whose
union has the highest score. Minus the rank of a piece's first merge is such a score, if every way to join two pieces to a third
is a merge and the merges of a piece follow each other; both are checked.

Where transformers puts the "▁" of SentencePiece before the first word alone (``prepend_scheme="first"``), none is put: llama.cpp
would put one after every special token. So chats, which start with such a token, give the tokens of transformers; a plain text
gives them with a space before it. A token that takes spaces beside it away is known for Phi-3 alone (:func:`strips_like_phi3`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .families import CONVERTER

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""GGUF's types of tokens."""
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = {
    (_LETTERS % "{1,3}", True): "llama-bpe",
    (_LETTERS % "{1,3}", False): "dbrx",
    (_LETTERS % "", False): "qwen2",
    (_CASES % (_SHORT, _SHORT, "{1,3}"), False): "gpt-4o",
    (_CASES % ("", "", ""), True): "tekken",
}
"""(regular expression, are whole words tokens without merges) -> llama.cpp's word, in ``llama-vocab.cpp``."""


@dataclass
class Vocabulary:
    """What :func:`write_vocabulary` writes."""

    model: str
    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    space_prefix: bool | None = None


def read_vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """Of a fast tokenizer, with as many tokens as the model has embeddings. Raises ValueError for other kinds."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {}
    model = content.get("model") or {}
    bpe, spaces = model.get("type") == "BPE", _space_prefix(content)
    plain = content.get("normalizer") in (None, {"type": "NFC"}) and not model.get("byte_fallback")
    split = _split(content.get("pre_tokenizer"), bool(model.get("ignore_merges"))) if bpe and plain else None
    if split is None and not (bpe and model.get("byte_fallback") and spaces is not None):
        raise ValueError(
            f"{type(tokenizer).__name__} is not written as GGUF here: byte-level BPE tokenizers of the kind of GPT-2, SmolLM, "
            f"Llama 3, Qwen 2 and GPT-4o are, and SentencePiece BPE of the kind of Gemma and Llama 2. {CONVERTER}"
        )
    tokens, types = _tokens(content, max(size, len(tokenizer)), sentencepiece=split is None)
    if len(tokens) > size:
        raise ValueError(f"the tokenizer has {len(tokens)} tokens, the model {size}: they do not belong together")
    pairs = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    if split is not None:
        return Vocabulary("gpt2", split, tokens, types, merges=[" ".join(pair) for pair in pairs])
    return Vocabulary("llama", "default", tokens, types, scores=_scores(tokens, types, pairs), space_prefix=spaces)


def _tokens(content: dict[str, Any], count: int, sentencepiece: bool) -> tuple[list[str], list[int]]:
    """(tokens, types) of all ids."""
    by_id = {index: token for token, index in content["model"]["vocab"].items()}
    added = {each["id"]: each for each in content.get("added_tokens") or ()}
    unknown = content["model"].get("unk_token")
    tokens, types = [], []
    for index in range(count):
        if token := added.get(index):
            name = token["content"]
            tokens.append(name if token["special"] or not sentencepiece else name.replace("▁", " "))
            types.append(UNKNOWN if sentencepiece and name == unknown else CONTROL if token["special"] else USER_DEFINED)
        else:
            tokens.append(by_id.get(index, f"[PAD{index}]"))
            types.append(UNUSED if index not in by_id else BYTE if sentencepiece and by_id[index] in BYTE_TOKENS else NORMAL)
    return tokens, types


def _scores(tokens: list[str], types: list[int], pairs: list[tuple[str, ...]]) -> list[float]:
    """Of SentencePiece's pieces. Raises ValueError where scores would join other pieces than the merges do."""
    known = dict.fromkeys(token for token, kind in zip(tokens, types) if kind == NORMAL)  # in their order
    ranks: dict[str, int] = {}
    merges, last = set(pairs), None
    for rank, pair in enumerate(pairs):
        joined = "".join(pair)
        if joined != last and joined in ranks:
            raise ValueError(f"the merges of {joined!r} do not follow each other, which scores cannot say. {CONVERTER}")
        last = joined
        ranks.setdefault(joined, rank)
    for piece in known:
        for middle in range(1, len(piece)):
            pair = (piece[:middle], piece[middle:])
            if pair[0] in known and pair[1] in known and pair not in merges:
                raise ValueError(f"{pair} is no merge, and llama.cpp would join them to {piece!r}. {CONVERTER}")
    return [-float(ranks.get(token, len(pairs))) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types)]


def _space_prefix(content: dict[str, Any]) -> bool | None:
    """Does SentencePiece put a space before a text and after special tokens? None for what is not its way to treat spaces."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer, split = content.get("normalizer"), content.get("pre_tokenizer")
    inert = split is None or split.get("type") == "Split" and split.get("pattern") == {"String": " "}  # no spaces are left
    if normalizer == replace and inert:
        return False
    prepend = {"type": "Prepend", "prepend": "▁"}
    if normalizer == {"type": "Sequence", "normalizers": [prepend, replace]} and split is None:
        return True
    metaspace = split is not None and split.get("type") == "Metaspace" and split.get("replacement") == "▁"
    if normalizer is None and metaspace and not split.get("split", True) and split.get("prepend_scheme") in ("first", "never"):
        return False
    return None


def _split(settings: dict[str, Any] | None, whole_words: bool) -> str | None:
    """GGUF's word for a ``pre_tokenizer`` of tokenizers' JSON; None for one that is not known."""
    steps = (settings or {}).get("pretokenizers") or [settings or {}]
    kinds = [step.get("type") for step in steps]
    if kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if kinds == ["ByteLevel"] and steps[-1].get("use_regex", True) and not whole_words:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return None if whole_words else "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        plain = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        return SPLITS.get(((steps[0].get("pattern") or {}).get("Regex"), whole_words)) if plain else None
    return None


def write_vocabulary(writer: Any, vocabulary: Vocabulary, tokenizer: Any) -> None:
    """The tokenizer's metadata."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        if (index := getattr(tokenizer, name, None)) is not None:
            getattr(writer, f"add_{name}")(index)
    writer.add_add_bos_token(adds_bos(tokenizer))
    ids = tokenizer("a").input_ids
    writer.add_add_eos_token(len(ids) > 1 and ids[-1] == tokenizer.eos_token_id)
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(template)


def strips_like_phi3(tokenizer: Any) -> bool:
    """Do special tokens take the spaces after them away, but for those of Phi-3 that do not? llama.cpp goes by the model's name:
    of one with "phi3" or "phi-3" in it, and of no other, it takes all these tokens to do so, and to be there."""
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    strips = {token.content: token.rstrip for token in tokenizer.added_tokens_decoder.values()}
    return {*kept, "</s>"} <= strips.keys() and all(strip == (name not in kept) for name, strip in strips.items())


def adds_bos(tokenizer: Any) -> bool:
    """Does a tokenizer put its first token before every text?"""
    ids = tokenizer("a").input_ids
    return bool(ids) and ids[0] == tokenizer.bos_token_id
