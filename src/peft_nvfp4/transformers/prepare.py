"""What a quantised model needs before training, and what it needs of transformers once it counts as a 4-bit one."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..nn.experts.frozen_experts import FrozenExperts
from ..nn.frozen_linear import FrozenLinear
from ..nn.traversal import modules_of


def prepare_model_for_nvfp4_training(
    model: nn.Module, use_gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> nn.Module:
    """PEFT's ``prepare_model_for_kbit_training`` without its cast to FP32.

    That cast doubles embeddings and norms, and with them the activations between the layers (unless autocast is on). Norms here
    compute in FP32 whatever dtype their weights have, and a frozen embedding gains nothing.

    Args:
        use_gradient_checkpointing: recompute each layer in backward; the inputs of the first then require a gradient, without
            which reentrant checkpointing would have none to compute. (transformers sees to that for text models only.)
        gradient_checkpointing_kwargs: of ``torch.utils.checkpoint``; by default ``{"use_reentrant": False}``.

    Returns:
        The same model, with every parameter frozen.
    """
    for p in model.parameters():
        p.requires_grad_(False)
    if use_gradient_checkpointing:
        model.enable_input_require_grads()
        kwargs = {"use_reentrant": False} if gradient_checkpointing_kwargs is None else gradient_checkpointing_kwargs
        newer = getattr(model, "activation_checkpointing_enable", None)  # the same under its name in later transformers
        newer(kwargs) if newer else model.gradient_checkpointing_enable(kwargs)
    return model


def mark_as_4bit(model: nn.Module) -> None:
    """``is_loaded_in_4bit`` is what PEFT, TRL and Trainer ask: for gradient checkpointing, for adapters in BF16, against
    DataParallel. transformers then imports bitsandbytes to count parameters; this model counts its own."""
    model.is_loaded_in_4bit = True
    count_its_own(model)


def unmark_as_4bit(model: nn.Module) -> None:
    """Undo :func:`mark_as_4bit`."""
    model.is_loaded_in_4bit = False
    count_as_others(model)


def count_its_own(model: nn.Module) -> None:
    """Have a frozen model of transformers count its parameters by :func:`num_parameters`. Trainer asks for their number in every
    step, to estimate the floating-point operations."""
    if hasattr(model, "num_parameters"):
        model.num_parameters = _ParameterCount(model)


def count_as_others(model: nn.Module) -> None:
    """Undo :func:`count_its_own`."""
    vars(model).pop("num_parameters", None)


class _ParameterCount:
    """:func:`num_parameters` of a model, without a cycle: ``del model`` frees it."""

    def __init__(self, model: nn.Module):
        self.model = weakref.ref(model)

    def __reduce__(self):
        return _ParameterCount, (self.model(),)

    def __call__(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return num_parameters(self.model(), only_trainable, exclude_embeddings)


def num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Number of parameters, a packed weight counting as the matrix it stands for."""
    modules = list(modules_of(model))
    seen = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)} if exclude_embeddings else set()
    total = 0
    for module in modules:
        if not only_trainable:
            total += _packed_values(module, seen)
        for p in module._parameters.values():
            if p is None or id(p) in seen:
                continue
            seen.add(id(p))
            if p.is_floating_point() and (p.requires_grad or not only_trainable):
                total += p.numel()
    return total


def _packed_values(module: nn.Module, seen: set[int]) -> int:
    """Of the matrix that a module holds packed; 0 if it holds none, or one of the parameters ``seen``."""
    if isinstance(module, FrozenLinear) and not module.weight.is_floating_point() and id(module.weight) not in seen:
        return module.in_features * module.out_features
    return module.elements if isinstance(module, FrozenExperts) else 0
