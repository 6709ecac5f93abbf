"""Models with an adapter, with choices for which :class:`~peft_nvfp4.NVFP4LoraConfig` has no word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from peft import get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig, apply_calibration, attach, detach, freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers

LAYER = ("weight_layouts", "gradients", "activations")
"""Fields of ``FrozenOptions`` that :func:`adapted_model` takes."""


def adapted_model(
    model: nn.Module, *, fused: bool = True, recompute_mlp: bool = False, make: Callable = NVFP4LoraConfig, **fields: Any
) -> nn.Module:
    """``get_peft_model`` over a base that is frozen before, where ``fields`` has some of :data:`LAYER`. The others are of the
    config, which ``make`` makes. ``fused``, ``recompute_mlp``: norms and gated MLPs."""
    layer = {name: fields.pop(name) for name in LAYER if name in fields}
    config = make(**fields)
    if layer:
        if config.calibration is not None:
            apply_calibration(model, config.calibration, weight_layouts=layer.get("weight_layouts"))
            for _, linear in frozen_layers(model):
                linear.options = replace(linear.options, **layer)
        freeze_model(model, config.backend, accuracy=config.accuracy, skip_modules=config.skip_modules, progress=False, **layer)
    model = get_peft_model(model, config)
    if not fused:
        detach(model)
    elif recompute_mlp:
        attach(model, recompute_mlp=True)
    return model
