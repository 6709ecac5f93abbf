"""Small random models of every causal language model of transformers, for ``make_models.py``: a class's default configuration,
made small by the names of its fields, with one layer of every kind."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {  # pattern of a field's name -> value; the first that fits
    r"(?<!type_)vocab_size(_per_layer_input)?$|^n_words$": 128,
    r"(layers|n_layer|depth)$": 2,
    r"(key_value|kv)_heads$|^n_groups$": 2,
    r"^(n|topk)_group$": 1,
    r"^rotary_dim$": 8,
    r"lora_rank$": 32,
    r"head_dim$|^d_kv$|^head_size$": 16,
    r"heads$|n_head$": 4,
    r"experts_per_tok(en)?$|top_?k(_experts)?$": 2,
    r"^(num|n)_(local_|routed_)?experts$": 4,
    r"intermediate_size$|ffn_dim$|^ffn_hidden_size$|^n_inner$|^d_ff$|^d_inner$": 96,
    r"hidden_size$|^d_model$|^n_embd$|embed_dim$|^emb_dim$|^hidden_dim$|^n_embed$|embedding_size$|^adapter_out_dim$": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
INDEXER = {f"indexer_{name}": n for name, n in dict(n_heads=2, kv_heads=1, head_dim=16, budget=8, compress_ratio=4).items()}
TWICE = {"attention_head_dim": 32, "attention_hidden_size": 128}
OVERRIDES: dict[str, dict[str, Any]] = {  # what a default configuration leaves open, or what must fit together
    "bailing_hybrid": {"num_expert_group": 1, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"hidden_size": 64}},
    "dory": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    | {f"n_{part}_layers": 1 for part in ("input", "recurrent", "output")},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"vision_config": {"adapter_in_dim": 64}, "audio_config": {"adapter_input_size": 64}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"qk_head_dim": 32, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2} | TWICE,
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2} | TWICE,
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
}


def _tiny_fields(config_class: type) -> dict[str, Any]:
    """What to give to a configuration class to get a small model, with every kind of layer that its default has."""
    fields, changed, tokens = config_class().to_dict(), {}, iter(range(3, 16))
    for name, value in fields.items():
        if name in config_class.sub_configs:
            if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
                changed[name] = {**_tiny_fields(CONFIG_MAPPING[value["model_type"]]), "model_type": value["model_type"]}
            elif isinstance(value, dict) and hasattr(config_class.sub_configs[name], "model_type"):
                changed[name] = _tiny_fields(config_class.sub_configs[name])
        elif re.search(r"_token_(id|index)$", name) and isinstance(value, int | list):
            changed[name] = {"pad": 0, "bos": 1, "eos": 2}.get(name.split("_")[0]) or next(tokens)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES.items() if re.search(pattern, name)), value)
            if size < value:
                changed[name] = size
    heads, shared = "num_attention_heads", "num_key_value_heads"
    if shared in fields and fields[shared] in (None, fields.get(heads)) and heads in changed:
        changed[shared] = changed[heads]
    if fields.get("head_dim", 0) is None and "kv_lora_rank" not in fields:
        changed["head_dim"] = 16
    per_layer = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == fields.get("num_hidden_layers")}
    if per_layer:
        kinds = [str(kind) for kind in zip(*per_layer.values(), strict=True)]
        picks = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:6]
        picks = picks if len(picks) > 1 else [0, 1]
        changed |= {k: [v[i] for i in picks] for k, v in per_layer.items()} | {"num_hidden_layers": len(picks)}
    usual = {"is_decoder": True, "initializer_range": 0.1, "init_std": 0.1}
    return changed | {name: value for name, value in usual.items() if name in fields}


def _overridden(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {k for k, v in more.items() if isinstance(v, dict) and isinstance(fields.get(k), dict)}
    return fields | more | {k: _overridden(fields[k], more[k]) for k in both}


def tiny_model(family: str) -> nn.Module:
    """A small random FP32 model of transformers' own class for this ``model_type``, in evaluation mode."""
    config_class = CONFIG_MAPPING[family]
    config = config_class(**_overridden(_tiny_fields(config_class), OVERRIDES.get(family, {})))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()
