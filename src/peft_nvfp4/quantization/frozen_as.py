"""In which words a model was frozen, read off its layers: what it takes to freeze the dense model in the same way again."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..nn.experts.frozen_experts import is_experts
from .freeze import frozen_matrices, frozen_modules
from .groups import ACCURACY, input_terms
from .plan import HEADS, kept_dense


def accuracy_of(model: nn.Module) -> str | None:
    """The preset that gives the terms of all linears, the most accurate one if there are several; None if none does, or the
    linears are calibrated."""
    terms = {name: options.terms for name, _, options in frozen_matrices(model)}
    if any(getattr(layer, "calibrated", False) for _, layer in frozen_modules(model)):
        return None
    presets = (word for word in reversed(ACCURACY) if all(input_terms(name, word) == n for name, n in terms.items()))
    return next(presets, None)


def skipped_of(model: nn.Module) -> list[str]:
    """``skip_modules`` with which :func:`~.freeze.freeze_model` leaves dense what is dense here: names of modules without a
    frozen one inside, as near to the root as can be."""
    frozen = frozen_modules(model)
    matched = {part for name, _ in frozen for part in _parts(_plain(name))}
    experts = bool(frozen) and frozen[0][1].backend != "bf16"
    keep, found = kept_dense(model), {}
    for name, module in model.named_modules():
        plain = _plain(name)
        linear = type(module) is nn.Linear and id(module) not in keep and plain.rpartition(".")[2] not in HEADS
        if "lora_" in name or ".modules_to_save." in name or not (linear or experts and is_experts(module)):
            continue
        parts = plain.split(".")
        prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
        found[next((prefix for prefix in prefixes if prefix not in matched), plain)] = None
    return list(found)


def _parts(name: str) -> Iterator[str]:
    """Every name in skip_modules that would match this one: its ancestors, itself, and their endings."""
    parts = name.split(".")
    return (".".join(parts[i:j]) for j in range(1, len(parts) + 1) for i in range(j))


def _plain(name: str) -> str:
    """Without the wrapping of adapters."""
    return name.replace(".base_layer", "").replace(".original_module", "")
