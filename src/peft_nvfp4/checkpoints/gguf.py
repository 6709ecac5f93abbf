"""A dense model as one GGUF file, for llama.cpp and what is built on it.

>>> model, _ = peft_nvfp4.merge(model, to="bf16")
>>> export_gguf(model, tokenizer, "model.gguf")

The ``gguf`` package (of llama.cpp) knows names of tensors and metadata and writes the file; what remains are the facts of an
architecture and of a tokenizer. Written here are only those whose file can be checked by reading it back with transformers
(tests/checkpoints/test_gguf.py): Llama, Mistral, Qwen 2 and Qwen 3 with the default rotary embedding, and byte-level BPE
tokenizers that split text in a known way. Everything else is refused: ``convert_hf_to_gguf.py`` of llama.cpp converts the folder
that ``save_pretrained`` writes.

llama.cpp turns neighbouring pairs of the first two architectures' queries and keys, transformers turns halves: rows of q and k
are exchanged accordingly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' ``model_type`` -> GGUF's architecture."""

DTYPES = ("f32", "f16", "bf16", "q8_0")

CONVERTER = "Save the merged model (save_pretrained) and run llama.cpp's convert_hf_to_gguf.py on the folder"

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_LETTERS % "{1,3}": "llama-bpe", _LETTERS % "": "qwen2"}


def export_gguf(model: nn.Module, tokenizer: Any, path: str | Path, dtype: str = "bf16") -> Path:
    """Write a dense model and its tokenizer as a GGUF file.

    Args:
        model: a transformers model with dense weights, without adapters: what :func:`peft_nvfp4.merge` returns for "bf16".
        tokenizer: its fast tokenizer.
        dtype: of the matrices: ``"f32"``, ``"f16"``, ``"bf16"`` or ``"q8_0"`` (8 bits, in blocks of 32).

    Raises:
        ValueError: a model or tokenizer that is not among those of the module's docstring; a weight that FP16 cannot hold.

    After an error, and while the file is written (as ``<name>.part``), there is no file of that name that was not there before.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError("writing GGUF needs the gguf package: pip install gguf") from error
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config, architecture = _check_model(model)
    vocabulary = _vocabulary(tokenizer, config.vocab_size)
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    writer = gguf.GGUFWriter(part, architecture)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if dtype == 'f32' else 'MOSTLY'}_{dtype.upper()}"])
    _write_sizes(writer, config, model)
    _write_vocabulary(writer, vocabulary, tokenizer)
    _add_tensors(writer, model, config, dtype)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    finally:  # after an error, such as a full disk, too
        writer.close()
        part.unlink(missing_ok=True)
    return path


def _add_tensors(writer: Any, model: nn.Module, config: Any, dtype: str) -> None:
    """Matrices in the wanted type, the rest (and rows that Q8_0's blocks do not divide) in FP32, under GGUF's names."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[writer.arch.upper()], config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    for name, tensor in _tensors(model, config):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"GGUF's {writer.arch} has no place for {name}. {CONVERTER}")
        kept = kind if tensor.ndim > 1 and not (dtype == "q8_0" and tensor.shape[-1] % 32) else gguf.GGMLQuantizationType.F32
        if kept == gguf.GGMLQuantizationType.F16 and tensor.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(f"{name} holds {tensor.abs().max():.3g}, more than FP16 can: write dtype='bf16' or 'f32'")
        values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        plain = kept == gguf.GGMLQuantizationType.F32
        writer.add_tensor(target, values if plain else gguf.quants.quantize(values, kept), raw_dtype=None if plain else kept)


def _check_model(model: nn.Module) -> tuple[Any, str]:
    """(config, GGUF's architecture)."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in ARCHITECTURES or not type(model).__name__.endswith("ForCausalLM"):
        raise ValueError(
            f"{type(model).__name__} ({kind}) is not written as GGUF here, {', '.join(ARCHITECTURES)} are. {CONVERTER}"
        )
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError("the model carries an adapter: merge it into a dense format first (peft_nvfp4.merge)")
    if packed := [name for name, p in model.named_parameters() if not p.is_floating_point()]:
        raise ValueError(f"{packed[0]} is packed: merge to 'bf16', or make the model dense with peft_nvfp4.dequantize_model")
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):  # which llama.cpp computes, whatever the model says
        raise ValueError(f"hidden_act={config.hidden_act!r} is not written as GGUF here. {CONVERTER}")
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rotary embeddings of type {rope['rope_type']!r} are not written as GGUF here. {CONVERTER}")
    layers = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if layers - {"full_attention"} or window and not layers:
        raise ValueError(f"attention in a sliding window is not written as GGUF here. {CONVERTER}")
    return config, ARCHITECTURES[kind]


def _write_sizes(writer: Any, config: Any, model: nn.Module) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {})
    writer.add_name(type(model).__name__.removesuffix("ForCausalLM"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _tensors(model: nn.Module, config: Any) -> Iterator[tuple[str, Tensor]]:
    """(name in the model, values as GGUF has them)."""
    tied, state = bool(getattr(config, "tie_word_embeddings", False)), model.state_dict()
    for name, tensor in state.items():
        # a head that was trained by itself is its own matrix, whatever the config says
        if tied and name == "lm_head.weight" and tensor.data_ptr() == state["model.embed_tokens.weight"].data_ptr():
            continue
        if ARCHITECTURES[config.model_type] == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = neighbours(tensor, heads)
        yield name, tensor


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rows of a projection to heads whose halves are turned together, in the order in which neighbouring pairs are."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def _vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """Tokens, their types, merges and the word for how text is split, of a byte-level BPE tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {}
    model = content.get("model") or {}
    split = _split(content.get("pre_tokenizer"))
    plain = content.get("normalizer") in (None, {"type": "NFC"}) and not model.get("byte_fallback")
    if model.get("type") != "BPE" or not plain or split is None:
        raise ValueError(
            f"{type(tokenizer).__name__} is not written as GGUF here: byte-level BPE tokenizers of the kind of GPT-2, SmolLM, "
            f"Llama 3 and Qwen 2 are. {CONVERTER}"
        )
    by_id = {index: token for token, index in model["vocab"].items()}
    added = {each["id"]: each for each in content.get("added_tokens") or ()}
    tokens, types = [], []
    for index in range(max(size, len(tokenizer))):
        if token := added.get(index):
            tokens.append(token["content"])
            types.append(3 if token["special"] else 4)  # control, user defined
        else:
            tokens.append(by_id.get(index, f"[PAD{index}]"))
            types.append(1 if index in by_id else 5)  # normal, unused
    if len(tokens) > size:
        raise ValueError(f"the tokenizer has {len(tokens)} tokens, the model {size}: they do not belong together")
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    return {"tokens": tokens, "types": types, "merges": merges, "split": split}


def _split(settings: dict[str, Any] | None) -> str | None:
    """GGUF's word for a ``pre_tokenizer`` of tokenizers' JSON; None for one that is not known."""
    steps = (settings or {}).get("pretokenizers") or [settings or {}]
    kinds = [step.get("type") for step in steps]
    if kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if kinds == ["ByteLevel"] and steps[-1].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        plain = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        return _SPLITS.get((steps[0].get("pattern") or {}).get("Regex")) if plain else None
    return None


def _write_vocabulary(writer: Any, vocabulary: dict[str, Any], tokenizer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary["split"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        if (index := getattr(tokenizer, name, None)) is not None:
            getattr(writer, f"add_{name}")(index)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id)
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(template)
