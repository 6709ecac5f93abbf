"""What llama.cpp has to be told of an architecture: whether it is the one that transformers computes, sizes, the order of rows.

A family is here if a random model of it, loaded by llama.cpp, gives the logits that transformers gives (``make test-llama``).
Each fact has a reason in llama.cpp's ``src/models/<architecture>.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CONVERTER = "Save the merged model (save_pretrained) and run llama.cpp's convert_hf_to_gguf.py on the folder"


@dataclass(frozen=True)
class Family:
    """An architecture as llama.cpp computes it."""

    architecture: str
    """GGUF's name."""
    activations: tuple[str, ...] = ("silu", "swish")
    """The one that llama.cpp computes, whatever the model says; transformers has several names for one."""
    pairs: bool = False
    """llama.cpp turns neighbouring values of a head, transformers the two halves: rows of q and k are exchanged."""
    scalings: tuple[str, ...] = ("default", "linear", "yarn")
    """Rotary embeddings, by transformers' ``rope_type``."""
    windows: bool = False
    """llama.cpp knows the layers whose attention has a sliding window."""
    shift: float = 0.0
    """Added to the norms' weights: Gemma's are stored less one."""
    global_scales: bool = False
    """llama.cpp multiplies the products of packed MLPs by their global scale; for most architectures it leaves that out."""


FAMILIES = {
    "llama": Family("llama", pairs=True, scalings=("default", "linear", "yarn", "llama3"), global_scales=True),
    "mistral": Family("llama", pairs=True, global_scales=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", global_scales=True),
    "qwen3_moe": Family("qwen3moe"),
    "gemma3_text": Family("gemma3", activations=("gelu_pytorch_tanh",), scalings=("default", "linear"), windows=True, shift=1.0),
    "phi3": Family("phi3", scalings=("default", "longrope")),
    "glm4": Family("glm4", scalings=("default",)),
}
"""transformers' ``model_type`` -> family."""


def family_of(config: Any, name: str) -> Family:
    """Of a model's configuration, checked. Raises ValueError, with ``name``, for what llama.cpp would compute otherwise."""
    kind = getattr(config, "model_type", name)
    if kind not in FAMILIES or not name.endswith("ForCausalLM"):
        raise ValueError(f"{name} ({kind}) is not written as GGUF here, {', '.join(FAMILIES)} are. {CONVERTER}")
    family = FAMILIES[kind]

    def refuse(what: str) -> None:
        raise ValueError(f"{what} is not written as GGUF here for {kind}. {CONVERTER}")

    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu")
    if activation not in family.activations:
        refuse(f"hidden_act={activation!r}")
    for parameters in rotary(config).values():
        if (scaling := parameters.get("rope_type", "default")) not in family.scalings:
            refuse(f"a rotary embedding of type {scaling!r}")
        changed = {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"} & {
            key for key, value in parameters.items() if value is not None
        }
        if scaling == "yarn" and changed:
            refuse(f"yarn with {', '.join(sorted(changed))}")
    if family.windows and layer_types(config) != _every_sixth(config.num_hidden_layers):
        refuse("another order of sliding and full attention than five to one")
    if kind == "gemma3_text":
        # llama.cpp's scale; of 62 layers it takes the one of the 27B model
        scalar = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == 62 else config.head_dim
        if config.query_pre_attn_scalar != scalar:
            refuse(f"query_pre_attn_scalar={config.query_pre_attn_scalar} (llama.cpp takes {scalar})")
        if config.attn_logit_softcapping is not None or getattr(config, "use_bidirectional_attention", False):
            refuse("attention with attn_logit_softcapping or use_bidirectional_attention")
    if kind == "qwen3_moe" and not config.norm_topk_prob:
        refuse("norm_topk_prob=False")
    if kind == "qwen3_moe" and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        refuse("a mixture with dense layers")
    return family


def rotary(config: Any) -> dict[str, dict[str, Any]]:
    """Kind of layer -> parameters of its rotary embedding; ``full_attention`` where there is one for all."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    return parameters if "full_attention" in parameters else {"full_attention": parameters}


def layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ())


def _every_sixth(layers: int) -> list[str]:
    return ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)]


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def context(config: Any, family: Family) -> int:
    """Tokens. Where a model's sliding window is one that llama.cpp does not know, up to the window both compute the same."""
    used = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    some = "sliding_attention" in (layer_types(config) or ["sliding_attention"])
    limit = config.max_position_embeddings
    return min(limit, config.sliding_window) if used and some and not family.windows else limit


def write_sizes(writer: Any, config: Any, family: Family) -> None:
    """The architecture's metadata."""
    import gguf

    size, rope = head_size(config), rotary(config)["full_attention"]
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(context(config, family))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(int(size * (rope.get("partial_rotary_factor") or 1.0)))
    writer.add_rope_freq_base(rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if (scaling := rope.get("rope_type", "default")) in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[scaling.upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if scaling in ("yarn", "longrope"):
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
    if scaling == "longrope":
        writer.add_rope_scaling_attn_factors(_rotary_embedding(config)[1])
    if family.windows:
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base_swa(rotary(config)["sliding_attention"]["rope_theta"])
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _rotary_embedding(config: Any) -> tuple[Tensor, float]:
    """(frequencies in radians per token, factor of cosines and sines) that transformers computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[rotary(config)["full_attention"]["rope_type"]](config, torch.device("cpu"))


def added_tensors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """(GGUF's name, values) of what transformers computes from the configuration: factors of rotary wave lengths."""
    rope = rotary(config)["full_attention"]
    scaling = rope.get("rope_type", "default")
    if scaling == "llama3":
        size = head_size(config)
        plain = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
        yield "rope_freqs.weight", plain / _rotary_embedding(config)[0]
    if scaling == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"], dtype=torch.float32)
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"], dtype=torch.float32)


def rows(name: str, values: Tensor, config: Any, family: Family) -> list[tuple[str, Tensor]]:
    """(name, rows) as llama.cpp has a weight of transformers' name, or LoRA's B of it: the last but one axis are outputs."""
    if name.endswith(".experts.gate_up_proj"):
        gate, up = values.chunk(2, dim=-2)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    if name.endswith(".experts.down_proj"):
        return [(f"{name}.weight", values)]
    if family.pairs and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return [(name, neighbours(values, heads))]
    return [(name, values)]


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rows of a projection to heads whose halves are turned together, in the order in which neighbouring pairs are."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)
