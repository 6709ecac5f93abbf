"""What of a model is to be frozen, and the checks that can fail: before anything changes.

Not frozen: output heads, linears whose weight is an embedding's (tied) or is read past the layer (:mod:`.direct_reads`), what
the caller excludes, what the model's class wants kept in FP32, everything inside a tuner layer (LoRA's own A and B), and
subclasses of ``nn.Linear`` that may do more (:mod:`.linears`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..nn.experts.frozen_experts import DOWN, FrozenExperts, is_experts
from ..nn.frozen_linear import FrozenLinear, FrozenOptions
from ..nn.wrapping import warn_caller
from ..ops.core import FLOATS
from .direct_reads import read_directly
from .groups import input_terms, skipped
from .linears import is_plain_linear

HEADS = frozenset({"lm_head", "embed_out", "score", "classifier", "qa_outputs", "output_head", "summary"})
"""Last name component of output heads; besides, whatever ``get_output_embeddings()`` returns."""


def plan(model: nn.Module, backend: str, skip_modules: tuple[str, ...], loaded: bool = True) -> list[str]:
    """Dotted names of the linears to freeze, after every check that can fail. With ``loaded=False`` the weights are still to
    come: the names, without the checks of what they hold."""
    if loaded:
        _refuse_other_quantisation(model)
    if isinstance(model, nn.Linear):
        raise ValueError("freeze_model replaces linears inside a module; a bare nn.Linear has no parent to be replaced in")
    keep = kept_dense(model)
    # PyTorch's own transformer layers have a fast path that reads .weight of their linears
    opaque = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, nn.TransformerEncoderLayer))

    def stays(name: str, module: nn.Module) -> bool:
        if isinstance(module, FrozenLinear) or not isinstance(module, nn.Linear):
            return True
        return id(module) in keep or skipped(name, skip_modules)

    names = []
    for name, module, adapted in _walk(model, backend):
        if isinstance(module, BaseTunerLayer) and not stays(name, module.get_base_layer()):
            raise ValueError(
                f"{name} already carries an adapter on a dense base; backend={backend!r} would have to replace that base under "
                "it. Create the NVFP4LoraConfig adapter first, or freeze the base with peft_nvfp4.freeze_model before adding any "
                "adapter."
            )
        if adapted or stays(name, module) or name.startswith(opaque):
            continue
        if _convertible(name, module, backend) if loaded else is_plain_linear(module):
            names.append(name)
    return names


def _walk(model: nn.Module, backend: str, twice: bool = True) -> Iterator[tuple[str, nn.Module, bool]]:
    """(dotted name, module, whether it lies inside a tuner layer), after the check that nothing is frozen in another way.
    ``twice``: a module of two names under both."""
    inside_tuner: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=not twice):
        if isinstance(module, FrozenLinear | FrozenExperts) and module.backend != backend:
            raise ValueError(
                f"{name} is already frozen as {module.backend!r}; one model has one backend, got {backend!r}. Reload the base "
                "model, or make it dense with peft_nvfp4.dequantize_model"
            )
        if isinstance(module, BaseTunerLayer):
            inside_tuner += (name + ".",)
        yield name, module, name.startswith(inside_tuner)


def plan_experts(model: nn.Module, backend: str, skip_modules: tuple[str, ...], loaded: bool = True) -> list[str]:
    """Dotted names of the modules to replace by frozen experts (:mod:`peft_nvfp4.nn.experts`), after the checks that
    :func:`plan` makes of linears. Experts that carry an adapter already stay dense, and so do all of a dense backend."""
    if backend == "bf16":
        return []
    names, stay = [], (*skip_modules, *_kept_in_fp32(model))
    for name, module, adapted in _walk(model, backend, twice=loaded):
        if adapted or skipped(name, stay) or not is_experts(module):
            continue
        for key, weight in module.named_parameters() if loaded else ():
            _check_weight(f"{name}.{key}", weight, backend)
        names.append(name)
    return names


def _kept_in_fp32(model: nn.Module) -> tuple[str, ...]:
    """Names of modules that the model's class wants in FP32."""
    lists = (getattr(model, key, None) for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    return tuple(name for names in lists for name in names or ())


def expert_options(name: str, common: FrozenOptions, accuracy: str) -> dict[str, FrozenOptions]:
    """How the projections of the experts with this dotted name compute."""
    return {
        projection: replace(common, terms=input_terms(f"{name}.{projection}", accuracy))
        for projection in ("gate_up_proj", "up_proj", DOWN)
    }


def _refuse_other_quantisation(model: nn.Module) -> None:
    """A model that another library quantised has its weights where this package does not look."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    method = str(getattr(method, "value", method))
    if method not in ("bitsandbytes", "None"):
        way_out = "load it without quantisation (or dequantise it) first"
        if method in ("compressed-tensors", "modelopt"):
            way_out = "load it with quantization_config=PactConfig(), which reads NVFP4 checkpoints as they are"
        raise ValueError(f"the model is already quantised by {method!r}; {way_out}")


def kept_dense(model: nn.Module) -> set[int]:
    """ids of linears that stay: output heads, tied to an embedding, wanted in FP32 by the model's class, read directly."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    fp32 = _kept_in_fp32(model)
    head = output_embeddings(model)
    keep = read_directly(model) | (set() if head is None else {id(head)})
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (
            name.rpartition(".")[2] in HEADS or id(getattr(module, "weight", None)) in embeddings or skipped(name, fp32)
        ):
            keep.add(id(module))
    return keep


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """What the model calls its output embeddings; None where it has none, or none in its variant."""
    try:
        return getattr(model, "get_output_embeddings", lambda: None)()
    except (AttributeError, NotImplementedError):
        return None


def check_names(model: nn.Module, skip_modules: tuple[str, ...]) -> None:
    """A name in skip_modules that matches nothing is likely a typing error."""
    names = [name for name, _ in model.named_modules()]
    unmatched = [s for s in skip_modules if not any(skipped(name, (s,)) for name in names)]
    if unmatched:
        warn_caller(f"skip_modules matches no module: {', '.join(unmatched)}")


def _convertible(name: str, module: nn.Linear, backend: str) -> bool:
    """True for a plain nn.Linear with sound weights; raises on what must not be passed over silently."""
    weight = getattr(module, "weight", None)
    if weight is None or hasattr(weight, "quant_state") or weight.dtype not in (*FLOATS, torch.float64):
        stored = "no .weight" if weight is None else getattr(weight, "quant_type", str(weight.dtype))
        if backend == "nf4" and stored == "nf4":
            return True
        adopt = ", or use backend='nf4', which adopts bitsandbytes' NF4 layers as they are." if stored == "nf4" else "."
        raise ValueError(
            f"{name} is a {type(module).__name__} whose weight is already quantised ({stored}); backend={backend!r} starts from "
            f"dense weights. Load the model without quantization_config{adopt}"
        )
    if not is_plain_linear(module):
        return False
    _check_weight(f"the weight of {name}", weight, backend)
    return True


def _check_weight(what: str, weight: torch.Tensor, backend: str) -> None:
    if weight.is_meta:
        raise ValueError(f"{what} is not loaded (meta device, or offloaded to disk); load the whole model first")
    if weight.dtype == torch.float64 and backend != "bf16":
        raise ValueError(f"{what} is float64; cast the model to float32 or bfloat16 first")
    if backend != "bf16" and not torch.isfinite(weight).all():
        raise ValueError(f"{what} holds NaN or Inf; a quantised layer cannot represent them")
