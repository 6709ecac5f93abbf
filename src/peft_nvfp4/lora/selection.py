"""What PEFT will do with the modules of a model, found out before it does: which it trains in full, which get an adapter.

Three things follow for a frozen base. Modules that are trained in full stay dense. "all-linear" does not name linears that an
adapter cannot work on (:func:`leave_out`). And towers of a multimodal model that get no adapter stay dense
(:func:`towers_without_adapter`): whoever keeps adapters off a vision tower, with ``exclude_modules`` or by naming the language
model's linears alone, expects it to compute what it was trained to. Published NVFP4 checkpoints of such models leave the tower
dense, too, and it is a small part of the weights.
"""

from __future__ import annotations

import copy

from peft import LoraConfig
from peft.tuners.tuners_utils import (
    BaseTuner,
    BaseTunerLayer,
    _ExcludedModule,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..nn.wrapping import warn_caller
from ..quantization.direct_reads import read_directly
from ..quantization.linears import is_another_product

_ALL_LINEAR = "_peft_nvfp4_all_linear"


def trained_in_full(config: LoraConfig, model: nn.Module) -> list[str]:
    """Dotted names of the modules that PEFT will train beside the adapter. It takes ``modules_to_save`` for plain endings:
    "classifier" is "pre_classifier" as well."""
    tokens = getattr(config, "trainable_token_indices", None)
    endings = (*(getattr(config, "modules_to_save", None) or ()), *(tokens if isinstance(tokens, dict) else ()))
    return [name for name, _ in model.named_modules(remove_duplicate=False) if name.endswith(endings)] if endings else []


def adapted_by_parameter(config: LoraConfig, model: nn.Module) -> list[str]:
    """Dotted names of the linears whose weight is a target parameter: such an adapter reads the dense weight. (PEFT itself turns
    the routers of some mixtures into target parameters.)"""
    targets = tuple(config.target_parameters or ())
    weights = ((f".{name}.weight", name) for name, m in model.named_modules() if targets and isinstance(m, nn.Linear))
    return [name for key, name in weights if key.endswith(tuple(f".{target}" for target in targets))]


def note_all_linear(config: LoraConfig) -> None:
    """Keep in a config that it says "all-linear": for some mixtures, PEFT replaces the word before it prepares the model."""
    if isinstance(config.target_modules, str) and config.target_modules.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND:
        setattr(config, _ALL_LINEAR, True)


def _resolved(config: LoraConfig, model: nn.Module) -> LoraConfig:
    """A copy whose ``target_modules`` are names where they were "all-linear"."""
    return _maybe_include_all_linear_layers(copy.copy(config), model)


def leave_out(tuner: BaseTuner, config: LoraConfig, model: nn.Module) -> None:
    """Take out of "all-linear" what an adapter cannot work on, and warn of it: linears that PEFT refuses (Mamba's ``out_proj``),
    whose weight is read past the layer, that are more than linears (Llama 4's router), or that are trained in full.
    Other values of ``target_modules`` are the user's choice."""
    if not getattr(config, _ALL_LINEAR, False):
        return
    resolved = _resolved(config, model)
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D | BaseTunerLayer)]
    resolved.target_modules = {name for name in linears if check_target_module_exists(resolved, name)}
    saved, read = set(trained_in_full(config, model)), read_directly(model, values_only=True)
    left: dict[str, str] = {}
    for name in sorted(resolved.target_modules):
        module = model.get_submodule(name)
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if isinstance(check_target_module_exists(resolved, name), _ExcludedModule):
            continue
        try:
            tuner._check_target_module_compatiblity(config, model, name.rpartition(".")[2])
        except ValueError:
            left[name] = "PEFT refuses it in this architecture"
            continue
        if id(base) in read:
            left[name] = "the model reads its weight without calling it"
        elif is_another_product(base):
            left[name] = f"a {type(base).__name__} is more than a linear"
        elif name in saved:
            left[name] = "it is trained in full (modules_to_save)"
    if left:
        config.target_modules = resolved.target_modules - left.keys()
        first = next(iter(left))
        warn_caller(
            f"target_modules='all-linear' leaves out {len(left)} linears that LoRA does not work on: {first} ({left[first]})"
            + (f", {', '.join(list(left)[1:4])}{', ...' if len(left) > 4 else ''}" if len(left) > 1 else "")
        )


def towers_without_adapter(config: LoraConfig, model: nn.Module) -> list[str]:
    """Dotted names of the encoders of other modalities (models in the model, with a config of their own that is not the text
    model's) in which no module gets an adapter."""
    if not isinstance(model, PreTrainedModel) or config.target_parameters:
        return []
    main = {type(model.config), type(model.config.get_text_config())}
    towers: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{tower}.") for tower in towers)
        if name and isinstance(module, PreTrainedModel) and type(module.config) not in main and not inside:
            towers.append(name)
    if not towers:
        return []
    resolved = _resolved(config, model)
    adapted = [name for name, _ in model.named_modules() if name and check_target_module_exists(resolved, name)]
    found = [tower for tower in towers if not any(name.startswith(f"{tower}.") for name in adapted)]
    if found and adapted:
        warn_caller(
            f"{', '.join(found)} gets no adapter and stays dense. To pack it as well, call "
            f"peft_nvfp4.freeze_model(model, {getattr(config, 'backend', 'nvfp4')!r}) before get_peft_model"
        )
    return found if adapted else []
