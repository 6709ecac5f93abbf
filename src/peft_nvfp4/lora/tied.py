"""Tied weights and merging: an adapter on one of two layers that share a weight belongs to that layer alone.

Merging it in place would change the other layer as well: LoRA on a tied ``lm_head`` would move the embeddings. So such a layer
gets a weight of its own before it is merged, and a model whose embeddings differ afterwards says so in its config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from ..nn.experts.frozen_experts import FrozenExperts
from ..nn.frozen_linear import FrozenLinear


def untie(model: nn.Module, adapters: Sequence[str] | None = None) -> None:
    """Give the dense layers under LoRA adapters (of these names; all by default) weights that no other layer shares. Packed
    weights need none: merging replaces them, it does not write into them."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        base = layer.get_base_layer()
        adapted = {*layer.lora_A, *layer.lora_embedding_A}
        if isinstance(base, FrozenLinear | FrozenExperts) or adapters is not None and not adapted.intersection(adapters):
            continue
        for name, p in base._parameters.items():
            if p is not None and owners[id(p)] > 1:
                owners[id(p)] -= 1
                base._parameters[name] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)


def settle_config(model: nn.Module) -> None:
    """Where the input and output embeddings of a model are two weights now, its config must not tie them when it is loaded."""
    try:
        weights = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    except (AttributeError, NotImplementedError):  # it has only one of them, or none
        return
    if weights[0] is not weights[1] and weights[0].data_ptr() != weights[1].data_ptr():
        for config in _configs(getattr(model, "config", None)):
            config.tie_word_embeddings = False


def _configs(config: Any) -> list[Any]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [one for one in (config, text) if getattr(one, "tie_word_embeddings", False)]
