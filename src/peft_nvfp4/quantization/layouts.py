"""How many layouts of their weights the frozen modules of a model keep, changed while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from ..nn.experts.frozen_experts import FrozenExperts
from ..nn.frozen_linear import FrozenLinear
from ..numerics.formats import QuantizedMatrix
from .freeze import frozen_modules

BACKWARD = ("backward_weight", "backward_scales", "backward_gscale")


def layouts(model: nn.Module) -> Iterator[QuantizedMatrix]:
    """W_f and, where it is kept, W_b of every frozen linear in NVFP4 that is no expert of a mixture."""
    for _, module in frozen_modules(model):
        if module.backend == "nvfp4" and not isinstance(module, FrozenExperts):
            yield module.forward_layout
            if module.backward_layout is not None:
                yield module.backward_layout


def keep_layouts(model: nn.Module, weight_layouts: str) -> None:
    """Have all frozen modules in NVFP4 keep both layouts (``"cached"``) or the forward one (``"transient"``) from now on. The
    results do not change by a bit. Calibrated layers are left alone: their backward layout may be no function of the other one.
    """
    done: dict[int, FrozenLinear] = {}  # linears that share a weight share both layouts
    for _, module in frozen_modules(model):
        if module.backend != "nvfp4" or getattr(module, "calibrated", False):
            continue
        twin = None if isinstance(module, FrozenExperts) else done.setdefault(id(module.weight), module)
        if twin is None or twin is module:
            module.keep_layouts(weight_layouts)
        else:
            module.options = replace(module.options, weight_layouts=weight_layouts)
            for name in BACKWARD:
                setattr(module, name, getattr(twin, name))
