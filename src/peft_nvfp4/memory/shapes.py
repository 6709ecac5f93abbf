"""What the estimator must know about a model: widths, counts, and the linears of a decoder layer, read from ``config.json``.

No weights are read and no model is built. Decoders with attention of the usual kind and a gated MLP are understood (Llama,
Mistral, Qwen 2 and 3, Gemma, SmolLM, Phi-3 and whoever names the sizes alike), and the mixtures of experts of Mixtral, Qwen 3 and
gpt-oss; what is not raises, with the missing name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub

SOURCES = ("attention", "o", "mlp", "down")
"""What feeds a linear: the norm before attention, attention itself, the norm before the MLP, the MLP's inner product."""
MIXTURE_SOURCES = ("router", "experts", "expert")
"""What feeds a parameter of a mixture: the norm before it, its rows in the order of the experts, an expert's inner product."""


class Projection(NamedTuple):
    """A linear of every decoder layer; of a mixture also its router, and one projection of all of its experts."""

    name: str
    inputs: int
    outputs: int
    source: str  # a word of SOURCES or MIXTURE_SOURCES
    bias: bool = False
    count: int = 1  # matrices of these sizes: one, or one for each expert
    old: tuple[str, ...] = ()  # names of the linears that it was before transformers 5, which PEFT still knows it by

    @property
    def elements(self) -> int:
        return self.count * self.inputs * self.outputs

    @property
    def biases(self) -> int:
        return self.count * self.outputs * self.bias

    @property
    def of_experts(self) -> bool:
        return self.source in MIXTURE_SOURCES[1:]

    @property
    def is_linear(self) -> bool:
        """Not a parameter of a mixture, which PEFT reaches through ``target_parameters``."""
        return self.source in SOURCES


class Mixture(NamedTuple):
    """What a decoder layer has in the place of its MLP."""

    experts: int
    chosen: int  # experts that a token goes to
    normalised: bool  # the weights of a token's experts are divided by their sum
    wide_weights: bool  # those weights stay in FP32
    all_probabilities: bool = True  # the router's softmax is over all experts, in FP32; else over the chosen ones
    fused: bool = True  # in nvfp4 gate and up are kept as codes (``FrozenExperts.fuse``)
    widths: int = 3  # otherwise: matrices as wide as an expert that autograd keeps of gate and up, here both and act(gate)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, as in a config of transformers."""

    hidden: int
    intermediate: int  # of one expert, where there are experts
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # the output head is the embedding
    projections: tuple[Projection, ...]  # of one layer
    norms: int = 2  # RMSNorms of one layer that work on the residual stream; the first two feed linears
    head_norms: bool = False  # q and k are normalised per head (Qwen 3, Gemma 3)
    sinks: bool = False  # every head has one
    dtype_bytes: int = 2  # of what stays dense, and of activations
    name: str = ""
    notes: tuple[str, ...] = ()  # what could not be read from the config, and is not counted
    mixture: Mixture | None = None

    @property
    def q(self) -> int:
        """Width of the queries, and of what attention returns."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    def reads(self, *sources: str) -> list[Projection]:
        """The linears that some sources feed."""
        return [p for p in self.projections if p.source in sources]

    @property
    def experts(self) -> list[Projection]:
        """Empty without a mixture."""
        return self.reads("experts", "expert")

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        layer = sum(p.elements + p.biases for p in self.projections) + self.norms * self.hidden + self.heads * self.sinks
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)


def _projections(hidden: int, width: int, q: int, kv: int, fused: bool = False, qkv_bias: bool = False, o_bias: bool = False):
    attention = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    mlp = (("gate_proj", width), ("up_proj", width))
    if fused:
        attention, mlp = (("qkv_proj", q + 2 * kv),), (("gate_up_proj", 2 * width),)
    return (
        *(Projection(name, hidden, n, "attention", qkv_bias) for name, n in attention),
        Projection("o_proj", q, hidden, "o", o_bias),
        *(Projection(name, hidden, n, "mlp") for name, n in mlp),
        Projection("down_proj", width, hidden, "down"),
    )


class Family(NamedTuple):
    """How a kind of mixture names its sizes, and what its router computes."""

    width: str  # of one expert, in the config
    normalised: bool | str  # or the name of a switch in the config
    wide_weights: bool
    old: dict[str, tuple[str, ...]]  # what PEFT turns into ``target_parameters``: new name -> names before transformers 5
    router: str = "gate"
    biases: bool = False  # of the router and of all experts
    sinks: bool = False
    all_probabilities: bool = True
    fused: bool = True
    widths: int = 3


_QWEN = {"gate": ("gate",), "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
MIXTURES = {
    "mixtral": Family("intermediate_size", True, True, {"gate": ("gate",), "gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen3_moe": Family("moe_intermediate_size", "norm_topk_prob", False, _QWEN),
    "qwen3_vl_moe_text": Family("moe_intermediate_size", True, False, {}),
    # gate and up in one, both cut off, the sigmoid, gate times that, up + 1
    "gpt_oss": Family("intermediate_size", False, False, {}, "router", True, True, False, fused=False, widths=6),
}
"""model_type -> its kind of mixture. One that is not here may have shared experts, attention of another kind, or experts that
cannot be packed."""


def _llama(name: str, hidden: int, intermediate: int, layers: int, heads: int, head_dim: int, tied: bool) -> ModelShape:
    projections = _projections(hidden, intermediate, heads * head_dim, 8 * head_dim)
    return ModelShape(hidden, intermediate, layers, heads, 8, head_dim, 128256, tied, projections, name=name)


BUILTIN = {
    "llama-1b": _llama("llama-1b", 2048, 8192, 16, 32, 64, True),
    "llama-3b": _llama("llama-3b", 3072, 8192, 28, 24, 128, True),
    "llama-8b": _llama("llama-8b", 4096, 14336, 32, 32, 128, False),
}
"""Shapes of Llama 3.2 1B and 3B and of Llama 3.1 8B."""

FUSED_NAMES = {"phi3", "phi4_multimodal"}
MORE_NORMS = {"gemma2": 4, "gemma3_text": 4, "gemma3": 4}
HEAD_NORMS = {"qwen3", "gemma3_text", "gemma3", "qwen3_moe", "qwen3_vl_moe_text"}
UNDERSTOOD = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "phi3", "qwen2_5_vl", "qwen2_vl"}
QKV_BIAS = {"qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl_text"}
TIED_BY_DEFAULT = {"gemma", "gemma2", "gemma3", "gemma3_text"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def model_shape(model: Any) -> ModelShape:
    """The shape of a built-in name, a ``config.json`` (or a folder that holds one, or a model on the Hub: never the weights), a
    config of transformers, or its dictionary.

    Raises:
        FileNotFoundError: no such name and no such file.
        ValueError: a config of a kind that is not understood; the message says what is missing.
    """
    if isinstance(model, ModelShape):
        return model
    if not isinstance(model, str | Path):
        return _from_config(dict(model if isinstance(model, Mapping) else model.to_dict()), "")
    if (known := str(model).lower()) in BUILTIN:
        return BUILTIN[known]
    return _from_config(_content(model), str(model))


def _content(model: str | Path) -> dict[str, Any]:
    """What a file, the config.json of a folder, or that of a model on the Hub says."""
    exists = os.path.exists(model)  # not Path's: False for a text that can be no path
    try:
        if exists:
            file = Path(model) / "config.json" if os.path.isdir(model) else Path(model)
        else:
            file = Path(huggingface_hub.hf_hub_download(str(model), "config.json"))
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if exists:
            why = f"not a valid JSON file: {error}" if isinstance(error, ValueError) else error
            raise ValueError(f"{model} holds no configuration ({why})") from error
        content = None
    if not content or not isinstance(content, dict):
        known = ", ".join(BUILTIN)
        raise FileNotFoundError(f"{model} is neither one of {known} nor a folder, a file or a Hub id with a config.json")
    return content


def _from_config(config: dict[str, Any], label: str) -> ModelShape:
    notes = []
    outer, text = config, config.get("text_config")
    if isinstance(text, dict):
        config = {**{k: v for k, v in config.items() if not isinstance(v, dict)}, **text}
        if "vision_config" in outer or "audio_config" in outer:
            notes.append("of a multimodal model only the text decoder is counted: add its other towers' weights and activations")
    kind = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        raise ValueError(f"{kind or label}: encoder-decoder models are not estimated")

    def size(*names: str) -> int:
        for name in names:
            if isinstance(config.get(name), int):
                return config[name]
        raise ValueError(f"{kind or label or 'this config'}: no {names[0]} in it; the estimator knows decoders with a gated MLP")

    family = _family(kind or label, config)
    hidden, heads, vocabulary = size("hidden_size"), size("num_attention_heads"), size("vocab_size")
    intermediate, layers = size(family.width if family else "intermediate_size"), size("num_hidden_layers")
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    q, kv, bias = heads * head_dim, kv_heads * head_dim, bool(config.get("attention_bias"))
    projections = _projections(hidden, intermediate, q, kv, kind in FUSED_NAMES, bias or kind in QKV_BIAS, bias)
    mixture = None
    if family is not None:
        normalised = bool(config.get(family.normalised)) if isinstance(family.normalised, str) else family.normalised
        counts = size(*EXPERTS), size("num_experts_per_tok")
        mixture = Mixture(*counts, normalised, family.wide_weights, family.all_probabilities, family.fused, family.widths)
        count, old, biases = mixture.experts, family.old, family.biases
        projections = (
            *(p for p in projections if p.source in ("attention", "o")),
            Projection(family.router, hidden, count, "router", biases, old=old.get("gate", ())),
            Projection("gate_up_proj", hidden, 2 * intermediate, "experts", biases, count, old.get("gate_up_proj", ())),
            Projection("down_proj", intermediate, hidden, "expert", biases, count, old.get("down_proj", ())),
        )
    elif kind not in UNDERSTOOD and not kind.startswith(tuple(UNDERSTOOD)):
        notes.append(f"{kind or 'this kind of model'} is counted as if it were a Llama of these sizes")
    tied = config.get("tie_word_embeddings", outer.get("tie_word_embeddings"))
    return ModelShape(
        *(hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary),
        tied=kind in TIED_BY_DEFAULT if tied is None else bool(tied),
        projections=projections,
        norms=MORE_NORMS.get(kind, 2),
        head_norms=kind in HEAD_NORMS,
        sinks=family is not None and family.sinks,
        name=label or kind,
        notes=tuple(notes),
        mixture=mixture,
    )


def _family(kind: str, config: Mapping[str, Any]) -> Family | None:
    """The kind of mixture that a config describes; None without experts."""
    if not any(config.get(key) for key in EXPERTS):
        return None
    if kind not in MIXTURES:
        raise ValueError(f"{kind}: of mixtures of experts {', '.join(MIXTURES)} are estimated, and not this kind")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"{kind}: layers with a dense MLP among those with experts are not estimated")
    return MIXTURES[kind]
