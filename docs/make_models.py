"""Tries every causal language model of transformers, tiny and random, with ``target_modules="all-linear"``, and writes
``models.md`` and ``../benchmarks/results/families.json``.

python docs/make_models.py                  # all of them, some 20 minutes of one core
python docs/make_models.py llama qwen3_next # these again; the others keep their rows

Each is run dense, then with stock PEFT's LoRA, then with ours: what fails earlier is not ours.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PAGE = Path(__file__).with_name("models.md")
RESULTS = PAGE.parents[1] / "benchmarks" / "results" / "families.json"
IDS = 16 + torch.arange(24).view(2, 12) * 5 % 112

SIZES = {  # pattern of a field's name -> value; the first that fits
    r"(?<!type_)vocab_size(_per_layer_input)?$|^n_words$": 128,
    r"(layers|n_layer|depth)$": 2,
    r"(key_value|kv)_heads$|^n_groups$": 2,
    r"^(n|topk)_group$": 1,
    r"^rotary_dim$": 8,
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
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
}


def tiny_fields(config_class: type) -> dict[str, Any]:
    """What to give to a configuration class to get a small model, with every kind of layer that its default has."""
    fields, changed, tokens = config_class().to_dict(), {}, iter(range(3, 16))
    for name, value in fields.items():
        if name in config_class.sub_configs:
            if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
                changed[name] = {**tiny_fields(CONFIG_MAPPING[value["model_type"]]), "model_type": value["model_type"]}
            elif isinstance(value, dict) and hasattr(config_class.sub_configs[name], "model_type"):
                changed[name] = tiny_fields(config_class.sub_configs[name])
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
    layers = fields.get("num_hidden_layers")
    kinds = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == layers}
    if kinds:
        first = {combination: i for i, combination in reversed(list(enumerate(zip(*map(map, [str] * len(kinds), kinds.values())))))}
        picks = sorted(first.values())[:6]
        picks = picks if len(picks) > 1 else [0, 1]
        changed |= {k: [v[i] for i in picks] for k, v in kinds.items()} | {"num_hidden_layers": len(picks)}
    if "is_decoder" in fields:
        changed["is_decoder"] = True
    if "initializer_range" in fields:
        changed["initializer_range"] = 0.1
    return changed


def merged_fields(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    nested = {k: merged_fields(fields[k], v) if isinstance(v, dict) and isinstance(fields.get(k), dict) else v for k, v in more.items()}
    return fields | nested


def tiny_model(family: str) -> nn.Module:
    """A small random FP32 model of transformers' own class for this ``model_type``, in evaluation mode."""
    config_class = CONFIG_MAPPING[family]
    config = config_class(**merged_fields(tiny_fields(config_class), OVERRIDES.get(family, {})))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, -2), IDS[:, 1:].flatten())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def exercise(model: nn.Module, dense: torch.Tensor) -> dict[str, Any]:
    """Compare with the dense model's logits, train a step, generate, merge."""
    found = {"logits": distance(logits_of(model), dense)}
    torch.manual_seed(1)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in adapters.items():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    loss_of(model.train()(input_ids=IDS).logits).backward()
    gradients = {name: p.grad for name, p in adapters.items()}
    if bad := [name for name, g in gradients.items() if g is not None and not g.isfinite().all()]:
        raise ValueError(f"gradients that are not finite: {', '.join(bad[:3])}")
    idle = [name for name, g in gradients.items() if g is None or not g.any()]
    found |= {"adapters": len(adapters), "without gradient": sorted(idle)}
    with torch.no_grad():
        for name, p in adapters.items():
            if p.grad is not None:
                p -= 1e-2 * p.grad
    model.eval().zero_grad()
    tokens = model.generate(input_ids=IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    found["generated"] = tokens.shape[1] - IDS.shape[1]
    adapted = logits_of(model)
    found["merged"] = distance(logits_of(model.merge_and_unload()), adapted)
    return found


def measure(family: str) -> dict[str, Any]:
    """One row: how far a family comes, and what was found."""
    from peft_nvfp4 import NVFP4LoraConfig
    from peft_nvfp4.quantization.freeze import dense_share

    row: dict[str, Any] = {"class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]}

    def attempt(stage: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # whatever a model may raise: it is the result
            row["failed"], row["reason"] = stage, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            if "-v" in sys.argv:
                import traceback; traceback.print_exc()
            return None

    def dense() -> tuple[nn.Module, torch.Tensor]:
        model = tiny_model(family)
        loss_of(model.train()(input_ids=IDS).logits).backward()
        model.eval().zero_grad()
        row["parameters"] = sum(p.numel() for p in model.parameters())
        logits = logits_of(model)
        model.generate(input_ids=IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        return model, logits

    def tuned(config: type, **settings: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = get_peft_model(copy.deepcopy(model_), config(r=4, target_modules="all-linear", **settings))
        if settings.get("backend") == "nvfp4":
            report = model.base_model.nvfp4_report
            row["dense"] = dense_share(model)
            row["fused"] = dict(Counter(report.fused.values()))
            row["groups"] = sum(map(len, report.groups))
            row["not fused"] = {re.sub(r"\.\d+(?=\.|$)", ".*", name): reason for name, reason in report.skipped.items()}
        return exercise(model, logits)

    if (made := attempt("transformers", dense)) is None:
        return row
    model_, logits = made
    if "-d" in sys.argv:
        return row
    stages = {"peft": (LoraConfig, {})} | {b: (NVFP4LoraConfig, {"backend": b}) for b in ("bf16", "nvfp4", "nf4")}
    for stage, (config, settings) in stages.items():
        row[stage] = attempt(stage, lambda: tuned(config, **settings))
        if stage == "peft" and row[stage] is None:
            row["peft failed"] = row.pop("reason")
            del row["failed"]
    return row


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    import transformers; transformers.logging.set_verbosity_error()
    out = Path(sys.argv[1])
    for family in [a for a in sys.argv[2:] if a[0] != "-"]:
        row = measure(family)
        with out.open("a") as f:
            f.write(json.dumps({family: row}) + "\n")
        print(family, row.get("failed", "ok"), row.get("reason", ""), flush=True)
