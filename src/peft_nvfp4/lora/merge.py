"""Merge an adapter into its base, and measure how much of it survives.

>>> model, report = peft_nvfp4.merge(model, to="bf16", probe=tokenizer(texts, return_tensors="pt", padding=True))
>>> print(report)

| ``to`` | the merged weight | for |
|---|---|---|
| ``"bf16"``, ``"fp16"``, ``"fp32"`` | D(W) + s B A, rounded to that dtype | serving anywhere |
| ``"nvfp4"`` | Q(D(W_f) + s B A), codes and scales | serving in 4 bits, where the adapter is large enough to survive rounding |

BF16, too, rounds away what is smaller than half a unit in its last place, most of an adapter after a few steps: the report says.

An adapter trained with ``NVFP4LoraConfig(merge_aware=True)`` has met that rounding in training: merged into NVFP4 it is the
trained function bit for bit (with what was fused in training fused: the result of ``merge`` is; after a reload,
``peft_nvfp4.attach(model)``), and merged into a dense format it becomes D(Q(D(W_f) + s B A)), the same weight (exact in BF16).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.utils import logging

from .. import ops
from ..fusion.attach import attach, attached
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import QuantizedMatrix
from ..quantization.freeze import frozen_layers, frozen_modules
from ..quantization.groups import fused_siblings
from ..training.offload.frozen_methods import computing
from .experts import ParamWrapper
from .layer import FrozenLoraLinear
from .merge_aware import requantized
from .report import (
    DROWNED,
    KEPT_WELL,
    LayerReport,
    MergeReport,
    as_batches,
    compare_logits,
    measure_layer,
    probe_logits,
    weighted,
)
from .tied import settle_config, untie

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = (*DTYPES, "nvfp4")


def merge(
    model: PeftModel, to: str = "bf16", *, adapters: Sequence[str] | None = None, probe: Any = None
) -> tuple[nn.Module, MergeReport]:
    """Merge adapters into the base model, which is changed in place and returned without them.

    Args:
        model: a PEFT model with LoRA adapters, not merged yet.
        to: format of the result, see the module's docstring.
        adapters: their names; the active ones by default.
        probe: token ids (B, T), a batch (``tokenizer(..., return_tensors="pt")``) or a list of batches, on which the logits of
            base, adapter and merged model are compared. A few hundred tokens will do; logits are kept on the CPU.

    Returns:
        The base model, and the report. What the report warns of is also raised as a Python warning.

    Raises:
        TypeError: ``model`` is no PEFT model.
        ValueError: an unknown format; adapters that are merged already or unknown; what was trained, or what it computes on the
            probe, is not finite; a base that is not in NVFP4 for ``to="nvfp4"``. Nothing has been changed then.
    """
    names = _check(model, to, adapters)
    if adapters is not None:
        model.base_model.set_adapter(names)
    layers = {name: m for name, m in _lora_layers(model) if _adapters_of(m, names)}
    batches = None if probe is None else as_batches(probe)
    if batches is not None:
        adapter = probe_logits(model, batches)
        if any(torch.isnan(logits).any() for logits in adapter):
            raise ValueError(f"{', '.join(names)} gives NaN on the probe: there is nothing to merge")
        with model.disable_adapter():
            base = probe_logits(model, batches)
    bar = logging.tqdm(layers.items(), desc="Measuring what a merge keeps", unit="layer", delay=1.0, mininterval=1.0)
    measured = [_measure(name, layer, names, to) for name, layer in bar]
    aware = [set(_adapters_of(m, names)) <= getattr(m, "merge_aware_adapters", set()) for m in layers.values()]
    report = MergeReport(to, names, measured, **weighted(measured), merge_aware=bool(aware) and all(aware))
    merged = _into_nvfp4(model, names) if to == "nvfp4" else _into_dense(model, names, DTYPES[to])
    if to == "nvfp4":
        report.unequal_scales = share_scales(merged)
    if batches is not None:
        report.probe = compare_logits(base, adapter, probe_logits(merged, batches))
    report.warnings = _warnings(report)
    for text in report.warnings:
        warnings.warn(text, stacklevel=2)
    return merged, report


# ---------------------------------------------------------------------------------------------- before


def _check(model: nn.Module, to: str, adapters: Sequence[str] | None) -> list[str]:
    """Names of the adapters to merge, after everything that can be wrong."""
    if to not in FORMATS:
        raise ValueError(f"to must be one of {', '.join(FORMATS)}, got {to!r}")
    if not isinstance(model, PeftModel) or not any(isinstance(m, LoraLayer) for m in model.modules()):
        raise TypeError(f"merge takes a PEFT model with LoRA adapters, got {type(model).__name__}")
    names = [adapters] if isinstance(adapters, str) else list(adapters or model.active_adapters)
    if unknown := [name for name in names if name not in model.peft_config]:
        raise ValueError(f"no adapter named {', '.join(unknown)}; there are {', '.join(model.peft_config)}")
    for name, layer in _lora_layers(model):
        if layer.merged:
            raise ValueError(f"{', '.join(layer.merged_adapters)} is merged already: call unmerge_adapter() first")
        base = layer.get_base_layer()
        ours = isinstance(layer, FrozenLoraLinear | ParamWrapper)
        if to == "nvfp4" and ours and base.backend != "nvfp4":
            raise ValueError(
                f"to='nvfp4' merges into an NVFP4 base, and {name} is frozen in {base.backend}: merge to "
                "'bf16', then freeze the result with peft_nvfp4.freeze_model"
            )
    if bad := next((key for key, p in _trained(model, names) if not torch.isfinite(p).all()), None):
        owner = next((name for name in names if f".{name}." in f"{bad}."), ", ".join(names))
        raise ValueError(f"{owner} holds NaN or Inf in {bad}")
    if to == "nvfp4" and not any(layer.backend == "nvfp4" for _, layer in frozen_modules(model)):
        raise ValueError("to='nvfp4' merges into an NVFP4 base, and no layer of this model is frozen in it")
    return names


def _trained(model: PeftModel, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, parameter) of everything that training these adapters changed: theirs, what was trained in full beside them,
    biases."""
    biases = any(model.peft_config[name].bias != "none" for name in names)
    for key, p in model.named_parameters():
        of_adapter = any(f".{name}." in f"{key}." for name in names)
        if p.is_floating_point() and (of_adapter or p.requires_grad or biases and key.endswith("bias")):
            yield key.removeprefix("base_model.model."), p


def _lora_layers(model: PeftModel) -> list[tuple[str, LoraLayer]]:
    """(dotted name in the base model, layer)."""
    return [(name, m) for name, m in model.get_base_model().named_modules() if isinstance(m, LoraLayer)]


def _adapters_of(layer: LoraLayer, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that the layer has an adapter of. (PEFT keeps those of an embedding apart.)"""
    return [name for name in names if name in layer.lora_A or name in layer.lora_embedding_A]


@torch.no_grad()
def _measure(name: str, layer: LoraLayer, names: Sequence[str], to: str) -> LayerReport:
    """What merging will do to one layer; it is left as it is."""
    adapters, base = _adapters_of(layer, names), layer.get_base_layer()
    if isinstance(layer, FrozenLoraLinear | ParamWrapper):
        with computing(base):
            return _measure_frozen(name, layer, adapters, to)
    weight = getattr(base, getattr(layer, "parameter_name", None) or "weight")  # of a dense linear, experts or an embedding
    dtype = DTYPES.get(to, weight.dtype)
    stored = next((word for word, known in DTYPES.items() if known == dtype), str(dtype))
    before = weight.detach().float()
    wanted = before + sum(layer.get_delta_weight(adapter).float() for adapter in adapters)
    return measure_layer(name, stored, before, wanted, wanted.to(dtype).float())


def _measure_frozen(name: str, layer: FrozenLoraLinear | ParamWrapper, adapters: Sequence[str], to: str) -> LayerReport:
    """A frozen linear, or one projection of frozen experts (E, N, K): all of them together."""
    base, wanted = layer.get_base_layer(), layer.dense_with(adapters)
    if isinstance(layer, ParamWrapper):
        linears, name = base.layers(layer.parameter_name), f"{name.removesuffix('.base_layer')}.{layer.parameter_name}"
        requantize = to == "nvfp4"
    else:
        linears, wanted = [base], wanted[None]
        requantize = to == "nvfp4" or layer.merge_aware_adapters.issuperset(adapters)
    before = torch.stack([linear.dequantize(torch.float32) for linear in linears])
    after = wanted
    if requantize:
        after = torch.stack([ops.dequantize(requantized(linear, w)) for linear, w in zip(linears, wanted)])
    return measure_layer(name, to, before, wanted, after.to(DTYPES.get(to, torch.float32)).float())


# ---------------------------------------------------------------------------------------------- the merge itself


def _into_dense(model: PeftModel, names: list[str], dtype: torch.dtype) -> nn.Module:
    model.base_model.nvfp4_dense_dtype = dtype
    untie(model, names)
    merged = model.merge_and_unload(progressbar=logging.is_progress_bar_enabled(), adapter_names=names)
    settle_config(merged)
    for p in merged.parameters():  # not .to(dtype): that would round buffers, the frequencies of a rotary embedding
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    if hasattr(getattr(merged, "config", None), "dtype"):
        merged.config.dtype = dtype
    return merged


def _into_nvfp4(model: PeftModel, names: list[str]) -> nn.Module:
    fused = attached(model)
    try:
        model.merge_adapter(adapter_names=names)
    except BaseException:
        for module in model.modules():
            if isinstance(module, BaseTunerLayer) and module.merged:
                module.unmerge()
        raise
    merged = model.unload()
    if fused:  # its norms and MLPs are part of the function that was trained
        attach(merged)
    return merged


# ---------------------------------------------------------------------------------------------- after


def share_scales(model: nn.Module) -> list[list[str]]:
    """Give linears of one input the same global scale, where that changes no value: a power of two moves from the block scales to
    the global one.

    Returns:
        Groups of dotted names in which it would.
    """
    layers = {n: m for n, m in frozen_layers(model) if isinstance(m, NVFP4FrozenLinear)}
    unequal = []
    for siblings in dict.fromkeys(map(fused_siblings, layers)):
        group = [n for n in siblings if n in layers]
        scale = torch.stack([layers[n].forward_layout.gscale.cpu() for n in group]).amax(0)
        behind = [n for n in group if not torch.equal(layers[n].forward_layout.gscale.cpu(), scale)]
        moved = {n: _with_gscale(layers[n].forward_layout, scale) for n in behind}
        if any(q is None for q in moved.values()):
            unequal.append(group)
            continue
        for n, q in moved.items():
            layers[n]._put("weight", "weight_scales", "weight_gscale", q)
    return unequal


def _with_gscale(q: QuantizedMatrix, gscale: Tensor) -> QuantizedMatrix | None:
    """The same values with another global scale (1,); None if a block scale would have to be rounded."""
    gscale = gscale.to(q.gscale, copy=True)  # linears may not share memory: files refuse that
    before = q.scales.view(torch.float8_e4m3fn).float() * q.gscale
    scales = (before / gscale).to(torch.float8_e4m3fn)
    same = torch.equal(scales.float() * gscale, before)
    return QuantizedMatrix(q.codes, scales.view(torch.uint8), gscale, q.k) if same else None


def _warnings(report: MergeReport) -> list[str]:
    if not any(layer.size for layer in report.layers):
        return ["the adapter adds nothing to any weight (B A = 0): the merged model is the base model"]
    found, stored = [], sorted({layer.stored for layer in report.layers})
    if "nvfp4" in stored:
        into, advice = "nvfp4", "Merge to 'bf16' or 'fp32', or train with NVFP4LoraConfig(merge_aware=True)"
    else:  # into dense weights, of their own dtype where the rest of the model is NVFP4
        into, advice = "/".join(stored), "Merge to 'fp32', or keep base and adapter apart"
    # what was trained merge-aware has met the rounding of weights; its logits are the merged model's in any case
    retained, error = (1.0, 0.0) if report.merge_aware else (report.retained, report.error)
    if not retained >= KEPT_WELL:  # or NaN
        found.append(f"near no-op: rounding to {into} leaves {retained:.0%} of the adapter in the weights. {advice}")
    elif not error <= DROWNED:
        found.append(f"rounding to {into} adds {error:.1f} times as much to the weights as the adapter does. {advice}")
    elif (probe := report.probe) and not (probe.retained >= KEPT_WELL and probe.error <= DROWNED):
        found.append(
            f"the merged model is not the model with its adapter: on the probe it keeps {probe.retained:.0%} of the adapter's "
            f"effect, and differs by {probe.error:.1f} times that effect. {advice}"
        )
    if report.unequal_scales:
        found.append(
            f"{len(report.unequal_scales)} groups of linears of one input (the first: {', '.join(report.unequal_scales[0])}) "
            "have different global scales after merging; engines that fuse them need equal ones"
        )
    return found
