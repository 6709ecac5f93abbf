"""A LoRA adapter as a GGUF file, for llama.cpp's ``--lora`` and Ollama's ``ADAPTER``: a few megabytes beside a GGUF of its base.

The base may be of any type, also one that somebody else quantised. llama.cpp adds ``alpha / r * B A x`` to the products of the
base; A and B are PEFT's, under the names of the weights that they belong to. Where an adapter's scale is another one (rsLoRA,
``alpha_pattern``), B carries the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.tuners.lora.layer import Embedding, LoraLayer, ParamWrapper
from torch import Tensor, nn

from .families import Family, family_of, rows
from .model import add_tensor, gguf_name, require_gguf, written

MERGED = "Write the merged model instead: peft_nvfp4.merge and export_gguf, or peft-nvfp4 merge --gguf"


def export_gguf_adapter(model: PeftModel, path: str | Path, dtype: str = "f32") -> Path:
    """Write the active adapter of a model.

    Args:
        model: a model with a plain LoRA adapter on linears or experts; its base may be packed.
        dtype: of A and B: ``"f32"``, ``"f16"`` or ``"bf16"``.

    Raises:
        ValueError: what llama.cpp's adapters cannot hold (DoRA, trained embeddings, biases, a head that is the embedding), or an
            architecture that is not in :data:`~peft_nvfp4.checkpoints.gguf.families.FAMILIES`.
    """
    gguf = require_gguf()
    if dtype not in ("f32", "f16", "bf16"):
        raise ValueError(f"dtype must be one of f32, f16, bf16, got {dtype!r}")
    base = model.get_base_model()
    family = family_of(base.config, type(base).__name__)
    name, settings = _checked(model)
    pairs = list(_pairs(base, name, family, settings.lora_alpha))
    with written(path, family.architecture) as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(settings.lora_alpha))
        writer.add_name(f"{type(base).__name__.removesuffix('ForCausalLM')} adapter")
        for target, a, b in pairs:
            add_tensor(writer, f"{target}.lora_a", a, dtype)
            add_tensor(writer, f"{target}.lora_b", b, dtype)
    return Path(path)


def _checked(model: PeftModel) -> tuple[str, Any]:
    """(name of the active adapter, its configuration)."""
    names = model.active_adapters
    if len(names) != 1:
        raise ValueError(f"{len(names)} adapters are active ({', '.join(names)}), a GGUF file holds one: set_adapter one of them")
    settings = model.peft_config[names[0]]
    kind = getattr(settings.peft_type, "value", settings.peft_type)
    refused = {
        f"a {kind} adapter": not hasattr(settings, "lora_alpha"),
        "DoRA": getattr(settings, "use_dora", False),
        "trained biases": getattr(settings, "bias", "none") != "none" or getattr(settings, "lora_bias", False),
        f"modules_to_save={settings.modules_to_save}": bool(getattr(settings, "modules_to_save", None)),
        "trainable tokens": bool(getattr(settings, "trainable_token_indices", None)),
    }
    if found := [what for what, there in refused.items() if there]:
        raise ValueError(f"llama.cpp's adapters hold plain LoRA, not {found[0]}. {MERGED}")
    return names[0], settings


def _pairs(base: nn.Module, adapter: str, family: Family, alpha: float) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(GGUF's name of a weight, A (r, K), B (N, r), with a leading axis for experts)."""
    config = base.config
    for path, layer in base.named_modules():
        if not isinstance(layer, LoraLayer) or adapter not in layer.lora_A and adapter not in layer.lora_embedding_A:
            continue
        if isinstance(layer, Embedding):
            raise ValueError(f"{path}: an adapter of an embedding is not written as GGUF here. {MERGED}")
        if path == "lm_head" and getattr(config, "tie_word_embeddings", False):
            raise ValueError(f"lm_head is the embedding, in GGUF one tensor, and has an adapter of its own. {MERGED}")
        a, b = layer.lora_A[adapter].weight.detach(), layer.lora_B[adapter].weight.detach()
        name = f"{path}.weight"
        if isinstance(layer, ParamWrapper):  # PEFT's order: A (E r, K), B (N, r E)
            name = f"{path.split('.base_layer')[0]}.{layer.parameter_name}"
            a = a.view(layer.num_experts, -1, a.shape[1])
            b = b.view(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)
        factor = layer.scaling[adapter] * a.shape[-2] / alpha
        for part, values in rows(name, b.float() * factor if factor != 1.0 else b, config, family):
            yield gguf_name(part, config, family), a, values
