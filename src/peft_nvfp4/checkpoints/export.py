"""Write a model with frozen NVFP4 linears as other tools read it: plain transformers, vLLM and their like.

What is written is the weights' own bytes, and D(W) of the few linears that engines take dense only (:mod:`.engines`). By default
the settings say W4A16, so a reader multiplies D(W) by unquantised inputs; in transformers that are, bit for bit, the logits of
``model.dequantize()``. (A second term and an offset bring the quantised input close to the unquantised one, which such a reader
has: nothing need be folded into the weights.) Where every linear came with a calibrated input scale from another tool
(:mod:`.load`), the scales are written again and the settings say W4A4.

The model's own ``save_pretrained`` writes the files: shards, renamed and tied weights, remote code, generation settings.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from .._version import __version__
from ..nn.experts.frozen_experts import FrozenExperts, frozen_experts
from ..nn.frozen_linear import FrozenLinear
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import BLOCK, QuantizedMatrix
from .engines import taken_dense, warn_of_fused
from .layouts import LAYOUTS, MODELOPT, Layout
from .settings import write_hf_quant_config, write_settings


@dataclass(frozen=True)
class ExportReport:
    """What :func:`export_checkpoint` wrote."""

    packed: int  # number of linears in NVFP4
    dense: tuple[str, ...]  # names of the linears that are not, as the settings list them
    scheme: str  # "W4A16", or "W4A4" where calibrated scales of all inputs are known
    inexact: tuple[str, ...]  # linears whose global scale has no reciprocal in FP32 and is off by one unit in its last place


def export_checkpoint(
    model: nn.Module, save_directory: str | Path, layout: str = "compressed-tensors", max_shard_size: int | str = "5GB"
) -> ExportReport:
    """Write a model's frozen NVFP4 base as a checkpoint of another tool's layout.

    Args:
        model: a transformers model whose linears are frozen in NVFP4, without adapters (``model.unload()`` takes them off; an
            adapter is saved by itself, and served beside its base).
        save_directory: nothing is written if something cannot be represented.
        layout: ``"compressed-tensors"`` or ``"modelopt"``.

    Raises:
        ValueError: an unknown layout; a model that is frozen in another format, not frozen, or carries an adapter.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    names = LAYOUTS[layout]
    layers = _packed_layers(model)
    narrow = [name for name, layer in layers.items() if layer.in_features % BLOCK]
    if narrow:
        warnings.warn(
            f"{narrow[0]} (and {len(narrow) - 1} more) is written dense: its number of inputs, {layers[narrow[0]].in_features}, "
            f"is not a multiple of {BLOCK}, which {layout} asks for",
            stacklevel=2,
        )
    mixtures = [ExpertNames(model, name, experts) for name, experts in frozen_experts(model)]
    stay = {*narrow, *taken_dense(model, layers)}
    packed = {name: layer for name, layer in layers.items() if name not in stay}
    scales = {name: getattr(layer, "published_input_scale", None) for name, layer in packed.items()}
    inputs = bool(packed) and not mixtures and None not in scales.values()
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in packed]
    warn_of_fused(layers, packed, linears)
    routers = (router for mixture in mixtures for router in mixture.routers)
    settings = write_settings(names, dense := (*linears, *routers), inputs, __version__)
    state, inexact = _state_dict(model, layers, packed, names, scales if inputs else {})
    for mixture in mixtures:
        state = {key: t for key, t in state.items() if not key.startswith(f"{mixture.name}.")} | mixture.write(names, inexact)
    with _saved_as(model, settings):
        model.save_pretrained(save_directory, state_dict=state, max_shard_size=max_shard_size)
    if names is MODELOPT:
        content = json.dumps(write_hf_quant_config(settings), indent=4)
        (Path(save_directory) / "hf_quant_config.json").write_text(content + "\n")
    count = len(packed) + sum(mixture.linears for mixture in mixtures)
    return ExportReport(count, dense, "W4A4" if inputs else "W4A16", tuple(inexact))


def _packed_layers(model: nn.Module) -> dict[str, NVFP4FrozenLinear]:
    """Name -> layer, after every check."""
    if not hasattr(model, "save_pretrained") or not hasattr(getattr(model, "config", None), "to_dict"):
        raise ValueError(f"{type(model).__name__} is no transformers model; a checkpoint for other tools needs its config")
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "the model carries an adapter. Save that by itself (PeftModel.save_pretrained) and export what model.unload() "
            "returns, or merge it first"
        )
    frozen = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, FrozenLinear)}
    if not frozen:
        raise ValueError("no linear of the model is frozen in NVFP4: load it with PactConfig, or freeze it with freeze_model")
    for name, layer in frozen.items():
        if not isinstance(layer, NVFP4FrozenLinear):
            raise ValueError(
                f"{name} is frozen in {layer.backend!r}, which is not NVFP4. Export a model frozen with backend='nvfp4'; "
                "peft_nvfp4.dequantize_model makes this one dense, for save_pretrained"
            )
    return frozen


class ExpertNames:
    """Experts of one layer, under the names of single linears that their files have.

    Attributes:
        leaves: projection -> names of the linears that it is made of, by rows.
        routers: names of the modules beside it that hold a matrix and are no linears here: elsewhere they may be.
    """

    def __init__(self, model: nn.Module, name: str, experts: FrozenExperts):
        self.name, self.experts, self.leaves = name, experts, {}
        converters = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
        for projection, (_, k) in experts.projections.items():
            makers = [c for c in converters if c.reverse_transform().rename_source_key(f"{name}.{projection}")[1]]
            if not makers or k % BLOCK:
                narrow = f"it has {k} inputs, no multiple of {BLOCK}"
                why = narrow if makers else "the files of such a model hold all experts in one"
                raise ValueError(
                    f"{name}.{projection} cannot be written in another tool's layout: {why}. save_pretrained writes a model "
                    "loaded with PactConfig in this package's own"
                )
            sources = [source.removesuffix(".weight").rstrip("\\") for source in makers[0].source_patterns]
            self.leaves[projection] = [re.split(r"\W", source)[-1] for source in sources]
        parent = name.rpartition(".")[0]
        beside = model.get_submodule(parent).named_children()
        matrix = ((n, getattr(m, "weight", None)) for n, m in beside if not isinstance(m, nn.Linear))
        self.routers = [f"{parent}.{n}" for n, weight in matrix if weight is not None and weight.ndim == 2]

    @property
    def linears(self) -> int:
        return self.experts.experts * sum(map(len, self.leaves.values()))

    def write(self, layout: Layout, inexact: list[str]) -> dict[str, Tensor]:
        """Tensors of all linears; names of those whose global scale changed are added to ``inexact``."""
        state = {}
        for projection, leaves in self.leaves.items():
            for e, layer in enumerate(self.experts.layers(projection)):
                w = layer.forward_layout
                for leaf, codes, scales in zip(leaves, w.codes.chunk(len(leaves)), w.scales.chunk(len(leaves))):
                    parts = _written(layout, f"{self.name}.{e}.{leaf}", w._replace(codes=codes, scales=scales), inexact)
                    state |= {key: t.clone() for key, t in parts.items()}
        return state


def _state_dict(
    model: nn.Module, layers: dict[str, NVFP4FrozenLinear], packed: Container[str], layout: Layout, input_scales: dict[str, float]
) -> tuple[dict[str, Tensor], list[str]]:
    """(the model's state dict in another layout, names of the linears whose global scale changed)."""
    replaced = {f"{name}.{leaf}" for name, layer in layers.items() for leaf in layer.packed_tensors()}
    state = {key: tensor for key, tensor in model.state_dict().items() if key not in replaced}
    inexact, seen = [], set()
    for name, layer in layers.items():
        if name not in packed:
            state[f"{name}.weight"] = layer.dequantize()
            continue
        parts = _written(layout, name, layer.forward_layout, inexact)
        if name in input_scales:
            scale = torch.tensor([input_scales[name]], dtype=torch.float32, device=layer.weight.device)
            parts[f"{name}.{layout.input_scale}"] = layout.write_gscale(scale)
        shared = layer.weight.data_ptr() in seen  # files refuse shared tensors
        seen.add(layer.weight.data_ptr())
        state |= {key: t.clone() if shared else t for key, t in parts.items()}
    return state, inexact


def _written(layout: Layout, name: str, w: QuantizedMatrix, inexact: list[str]) -> dict[str, Tensor]:
    """A linear's tensors under their names in the file. Its name is added to ``inexact`` if its global scale has changed."""
    parts = layout.write(w)
    if not torch.equal(layout.read_gscale(parts[layout.gscale]), w.gscale):
        inexact.append(name)
    return {f"{name}.{leaf}": tensor for leaf, tensor in parts.items()}


@contextmanager
def _saved_as(model: nn.Module, settings: dict[str, Any]) -> Iterator[None]:
    """Within the context ``save_pretrained`` takes the state dict that it is given, and writes these settings."""
    config = model.config
    quantizer = vars(model).pop("hf_quantizer", None)
    before = {key: getattr(config, key) for key in ("quantization_config", "dtype", "architectures") if hasattr(config, key)}
    config.quantization_config = settings
    try:
        yield
    finally:
        del config.quantization_config
        for key, value in before.items():
            setattr(config, key, value)
        if quantizer is not None:
            model.hf_quantizer = quantizer
