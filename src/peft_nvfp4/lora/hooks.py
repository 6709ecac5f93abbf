"""How the package hooks into PEFT: a handful of methods, wrapped when it is imported and put back by :func:`unregister`.

| method | what the wrapper adds |
|---|---|
| ``_prepare_model`` of ``LoraModel``, ``MixedModel`` | with our config: freezes the base before PEFT lists its modules |
| ``LoraModel._create_new_module`` | a frozen target gets a :class:`FrozenLoraLinear` (frozen experts: a \
:class:`~peft_nvfp4.lora.experts.ParamWrapper`), for any LoRA config |
| ``LoraModel._unload_and_optionally_merge`` | after a merge, frozen linears without an adapter become dense as well |
| ``LoraModel.merge_adapter`` | a dense weight that another layer shares is not changed under it |
| ``LoraConfig.save_pretrained`` | notes which frozen base an adapter was trained on, in a file of its own |
| ``PeftModel.save_pretrained`` | writes ``generation_config.json``, too: where answers end, after training |
| ``PreTrainedModel.save_pretrained`` | writes how a frozen model is to be loaded (:mod:`peft_nvfp4.transformers.saving`) |
| ``PeftConfig.from_pretrained`` | reads that note, so that a base of another format gets a warning |
| ``PeftModel.parameters`` | a faster walk for a model with our config: Trainer takes two in every step |
| ``CallbackHandler.on_train_begin`` | a Trainer that reports to somebody logs :mod:`~peft_nvfp4.training.metrics`, too |
| ``BaseTuner.inject_adapter`` | our config, or LoRA on a ``PactConfig`` model: fuses it after. IA3, ... on frozen linears raise |

Every wrapper passes through untouched when neither our config nor a frozen layer is involved, so plain LoRA models keep PEFT's
own classes and code. Replacing PEFT's tuner class in its mapping instead would change the class of every LoRA model of the
process, and would miss ``PeftMixedModel`` and direct uses of ``LoraModel``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import AdaLoraConfig, LoraConfig, LoraModel, PeftModel
from peft.config import PeftConfigMixin
from peft.tuners.mixed import MixedModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_target_module_exists
from peft.utils.integrations import _skip_init_on_device
from torch import nn

from ..autograd.module_hooks import hooks_of
from ..calibration.run import apply_calibration
from ..fusion.attach import Report, attach, attached, detach
from ..fusion.probe import base_of
from ..memory import Settings
from ..memory.device import grow_segments
from ..nn.experts.frozen_experts import FrozenExperts
from ..nn.frozen_linear import FrozenLinear
from ..nn.plain import report_in
from ..nn.traversal import parameters_of
from ..nn.wrapping import WRAPPED, unwrap_all, warn_caller, wrap
from ..quantization.freeze import dequantize_model, freeze_model, frozen_layers, frozen_matrices, frozen_modules
from ..quantization.layouts import keep_layouts
from ..quantization.options import MEMORY, Options, gpu_is_here
from ..training import distributed, metrics
from ..training.cuda_graphs import disable_cuda_graphs
from ..training.host_level import follow_host_memory
from ..training.memory_level import follow_memory, forget_memory, too_large_for_the_gpu
from ..training.offload.enable import disable_offload, enable_offload, offloaded
from ..training.steps import slow_down_steps, speed_up_steps
from ..transformers import published, saving
from ..transformers.config import PactConfig, pact_config
from ..transformers.prepare import count_as_others, count_its_own, unmark_as_4bit
from . import side_calibration, side_files
from .config import NVFP4LoraConfig
from .experts import ParamWrapper
from .fingerprint import BASE_FILE, note, read_file, remember, source_fingerprint, warn_of_another_base, write
from .inits import RESIDUAL_INITS, leave_factors
from .layer import FrozenLoraLinear, refuse_unsupported
from .merge_aware import refuse_dense
from .selection import adapted_by_parameter, leave_out, note_all_linear, towers_without_adapter, trained_in_full
from .tied import settle_config, untie


def register() -> None:
    """Install the hooks. Done by ``import peft_nvfp4``; calling it again changes nothing."""
    if WRAPPED:
        return
    try:
        distributed.install()
        metrics.install()
        published.install()
        saving.install()
        wrap(LoraModel, "_prepare_model", _prepare_model)
        wrap(MixedModel, "_prepare_model", _prepare_model)
        wrap(LoraModel, "_create_new_module", _create_new_module)
        wrap(LoraModel, "_unload_and_optionally_merge", _unload_and_optionally_merge)
        wrap(LoraModel, "merge_adapter", _merge_adapter)
        wrap(PeftModel, "parameters", _parameters)
        wrap(BaseTuner, "inject_adapter", _inject_adapter)
        wrap(LoraConfig, "save_pretrained", _save_config)
        wrap(PeftModel, "save_pretrained", _save_model)
        wrap(PeftConfigMixin, "from_pretrained", _read_config)
    except Exception:
        unwrap_all()  # all hooks or none
        raise


def unregister() -> None:
    """Remove the hooks: PEFT, transformers, PyTorch and accelerate are as they were before the import. Models made before keep
    working; a new ``NVFP4LoraConfig`` would freeze nothing (it warns), and a new adapter over a frozen layer could not be
    merged."""
    unwrap_all()


def _prepare_model(original: Callable, self: BaseTuner, peft_config: LoraConfig, model: nn.Module) -> None:
    source = None
    if isinstance(peft_config, NVFP4LoraConfig):
        refuse_unsupported(peft_config, peft_config.backend)  # before anything changes
        if frozen_modules(model):
            _check_same_base(model, peft_config)
        elif _has_targets(peft_config, model):  # without any, PEFT will raise: leave the model as it is
            source = source_fingerprint(model)
            freeze_base(peft_config, model)
    if isinstance(peft_config, LoraConfig):
        if frozen_modules(model):
            leave_out(self, peft_config, model)
            remember(peft_config, model, source)
        warn_of_another_base(peft_config, model)
    original(self, peft_config, model)  # layer_replication: clones share the packed weights


def _save_config(original: Callable, self: LoraConfig, save_directory: str, **kwargs: Any) -> None:
    original(self, save_directory, **kwargs)
    write(self, save_directory)


def _save_model(original: Callable, self: PeftModel, save_directory: str, **kwargs: Any) -> None:
    """With ``generation_config.json``: a trainer may have set where answers end, and the base's own file does not say so."""
    original(self, save_directory, **kwargs)
    base = self.get_base_model()
    generation = getattr(base, "generation_config", None)
    if generation is not None and kwargs.get("is_main_process", True) and frozen_modules(base):
        generation.to_json_file(Path(save_directory, "generation_config.json"))


def _read_config(original: Callable, cls: type, folder: str, subfolder: str | None = None, **kwargs: Any) -> Any:
    config = original(cls, folder, subfolder=subfolder, **kwargs)
    if isinstance(config, LoraConfig) and not isinstance(config, NVFP4LoraConfig):
        path = side_files.find_quietly(folder, subfolder, cls._split_kwargs(kwargs)[0], BASE_FILE)
        try:
            if path is not None:
                note(config, read_file(path))
        except ValueError as error:  # what stock PEFT reads is whole
            warn_caller(str(error))
    return config


def freeze_base(config: NVFP4LoraConfig, model: nn.Module) -> None:
    """Freeze a dense model in place as ``get_peft_model`` does before it adds an adapter with this config."""
    side_calibration.check(config.calibration)
    options = config.options
    dense = [find(config, model) for find in (trained_in_full, adapted_by_parameter, towers_without_adapter)]
    on_frozen = partial(leave_factors, config) if config.init_lora_weights in RESIDUAL_INITS else None
    with _skip_init_on_device():  # low_cpu_mem_usage makes new parameters on the meta device; these hold the model's weights
        if options.calibration is not None:
            layouts = options.frozen.weight_layouts
            apply_calibration(model, options.calibration, weight_layouts=layouts, on_frozen=on_frozen)
        freeze_model(
            model,
            options.backend,
            accuracy=options.accuracy,
            weight_layouts=options.frozen.weight_layouts,
            activations=options.frozen.activations,
            skip_modules=[*options.skip_modules, *chain(*dense)],
            on_frozen=on_frozen,
        )
    count_its_own(model)


def _check_same_base(model: nn.Module, config: NVFP4LoraConfig) -> None:
    """A further adapter must ask for the function that the base computes: changing it would change what the others were trained
    on. How backward computes is the base's, whatever the config says."""
    if config.calibration is not None and not any(getattr(layer, "calibrated", False) for _, layer in frozen_modules(model)):
        raise ValueError("a calibration replaces dense weights, and this base is frozen: load it without quantization_config")
    asked, more, loaded = config.options, False, pact_config(model)
    for name, layer, options in frozen_matrices(model):
        wanted = asked.frozen_at(name)
        terms = layer.backend == "nvfp4" and not getattr(layer, "calibrated", False) and options.terms != wanted.terms
        if layer.backend != asked.backend or terms:
            raise ValueError(
                f"the base is frozen already: {name} is {layer.backend!r} with terms={options.terms}, this config asks for "
                f"{asked.backend!r} with terms={wanted.terms} (accuracy={asked.accuracy!r}). Give the same settings, use a plain "
                "LoraConfig (which takes the base as it is), or reload the base model."
            )
        more |= asked.memory in ("small", "smallest") and (options.weight_layouts, options.activations) == ("cached", "bf16")
    if more and (loaded is None or loaded.memory != "auto"):
        warn_caller(
            f"the base is frozen already, and keeps more than memory={asked.memory!r} asks for. Freeze it with the same word "
            "(PactConfig, NVFP4LoraConfig), or with freeze_model's weight_layouts='transient', activations='nvfp4'"
        )


def _has_targets(config: LoraConfig, model: nn.Module) -> bool:
    """Whether target_modules matches anything; unset or special values are PEFT's to resolve."""
    if not config.target_modules or config.target_modules == "all-linear" or config.target_parameters:
        return True
    return any(check_target_module_exists(config, name) for name, _ in model.named_modules())


def _create_new_module(
    original: Callable, lora_config: LoraConfig, adapter_name: str, target: nn.Module, **kwargs: Any
) -> nn.Module:
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if isinstance(base, FrozenExperts):
        if not kwargs.get("parameter_name"):
            raise ValueError(f"{kwargs.get('target_name')} holds frozen experts: name their projections in target_parameters")
        return ParamWrapper(target, adapter_name, config=lora_config, **kwargs)
    if getattr(lora_config, "merge_aware", False):
        refuse_dense(base, kwargs.get("target_name") or type(base).__name__)
    if not isinstance(base, FrozenLinear):
        return original(lora_config, adapter_name, target, **kwargs)
    if lora_config.fan_in_fan_out:
        warnings.warn("fan_in_fan_out is set to True but the target module is a linear layer. Setting it to False.", stacklevel=2)
        lora_config.fan_in_fan_out = False
    if kwargs.get("parameter_name"):
        raise ValueError(
            f"target_parameters names {kwargs['parameter_name']!r} of a frozen {base.backend} linear, which is packed bytes. "
            "Name the module in target_modules instead, or list it in skip_modules to leave it dense."
        )
    layer = FrozenLoraLinear(target, adapter_name, config=lora_config, **kwargs)
    base.call_hooks += hooks_of(layer)
    if group := getattr(base, "group", None):  # attached before: the linears of its group are computed with their adapters
        group.members = [layer if base_of(member) is base else member for member in group.members]
    return layer


def _unload_and_optionally_merge(original: Callable, self: LoraModel, merge: bool = True, **kwargs: Any) -> nn.Module:
    disable_cuda_graphs(self.model)
    forget_memory(self.model)
    if hasattr(self, "nvfp4_steps"):
        slow_down_steps(self.model)
    if not frozen_modules(self.model):
        return original(self, merge=merge, **kwargs)
    detach(self.model)  # fused norms and MLPs belong to frozen layers with adapters
    if merge:
        _set_dense_dtype(self.model, getattr(self, "nvfp4_dense_dtype", None))
        untie(self.model, kwargs.get("adapter_names"))
    model = original(self, merge=merge, **kwargs)
    settle_config(model)
    if merge:
        dequantize_model(model)
        disable_offload(model)
        _forget_quantization(model)
    return model


def _parameters(original: Callable, self: PeftModel, recurse: bool = True) -> Iterator[nn.Parameter]:
    ours = recurse and "nvfp4_steps" in vars(self.base_model)
    return parameters_of(self) if ours else original(self, recurse)


def _merge_adapter(original: Callable, self: LoraModel, adapter_names: list[str] | None = None, **kwargs: Any) -> None:
    if frozen_modules(self.model):
        untie(self.model, adapter_names)
    original(self, adapter_names, **kwargs)


def _set_dense_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Layers become dense in the given dtype, if there is one; adopted bitsandbytes layers otherwise in the dtype of the model
    around them, that of its embedding."""
    if dtype is not None:
        for _, layer in frozen_modules(model):
            layer.dense_dtype = dtype
        return
    adopted = [layer for _, layer in frozen_layers(model) if layer.dense_dtype is not None]
    for layer in adopted:
        layer.dense_dtype = _dtype_around(model) or layer.dense_dtype


def _dtype_around(model: nn.Module) -> torch.dtype | None:
    """That of the embedding, or of the first dense weight where there is no embedding with a weight."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        weight = None
    dense = (p for name, p in model.named_parameters() if "lora_" not in name)
    floating = (p.dtype for p in (weight, *dense) if isinstance(p, torch.Tensor) and p.is_floating_point())
    return next(floating, None)


def _forget_quantization(model: nn.Module) -> None:
    """A model that was loaded in 4 bits and is dense now must not be saved as a 4-bit one."""
    if any(not p.is_floating_point() for p in model.parameters()):
        return
    count_as_others(model)
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    unmark_as_4bit(model)
    model.is_quantized = False
    for owner, attribute in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, attribute):
            delattr(owner, attribute)
    if getattr(model, "_weight_conversions", None):
        model._weight_conversions = [c for c in map(_without_unpacking, model._weight_conversions) if c is not None]


def _without_unpacking(conversion: Any) -> Any:
    """A conversion made at loading, without the reading of packed tensors, which cannot be undone at saving. None if nothing is
    left."""
    operations = getattr(conversion, "operations", [])
    kept = [operation for operation in operations if _is_reversible(operation)]
    if len(kept) < len(operations):
        conversion.operations = kept
    return conversion if kept or not operations else None


def _is_reversible(operation: Any) -> bool:
    try:
        return operation.reverse_op is not None
    except NotImplementedError:
        return False


def _inject_adapter(original: Callable, self: BaseTuner, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    config = self.peft_config[adapter_name]
    _refuse_frozen_modules_to_save(model, getattr(config, "modules_to_save", None) or ())
    if isinstance(config, LoraConfig) and not isinstance(config, AdaLoraConfig):
        frozen_before = bool(frozen_modules(model))
        note_all_linear(config)
        result = original(self, model, adapter_name, *args, **kwargs)
        # what was asked for, by the adapter and where the model was loaded
        settings = (config if isinstance(config, NVFP4LoraConfig) else None, pact_config(model))
        asked = [one.options for one in settings if one is not None]
        automatic = bool(asked) and all(options.memory == "auto" for options in asked)
        automatic &= not frozen_before or settings[1] is not None
        level = _level(model, asked, settings[1], automatic)
        if asked and _keeps_codes(model, asked[0]) and not attached(model):  # once for all adapters of a model
            with _skip_init_on_device():  # as above: a fused norm holds the weight of the norm it replaces
                self.nvfp4_report = attach(model, recompute_mlp=replace(asked[0], memory=level).recompute_mlp)
        if frozen_modules(model):
            self.nvfp4_report = getattr(self, "nvfp4_report", None) or Report()
            report_in(model, self.nvfp4_report.fallbacks)
        line = too_large_for_the_gpu(model) if automatic and gpu_is_here() and not offloaded(model) else None
        if level == "smallest" or offloaded(model) or line is not None:
            enable_offload(model)
        if asked and not hasattr(self, "nvfp4_steps"):  # once for all adapters of a model
            if gpu_is_here():
                grow_segments()
            held = offloaded(model) or any(options.merge_aware for options in asked)
            self.nvfp4_steps = speed_up_steps(model, recordings=not held)
            if automatic and gpu_is_here():
                known = Settings(**vars(asked[0]) | {"rank": config.r, "memory": "auto"})
                follow_memory(model, known, "smallest" if line else level, line)
            elif automatic:
                follow_host_memory(model)
        return result
    modules, flags = dict(model.named_modules()), [(p, p.requires_grad) for p in model.parameters()]
    result = original(self, model, adapter_name, *args, **kwargs)
    new = [(name, m) for name, m in model.named_modules() if isinstance(m, BaseTunerLayer) and modules.get(name) is not m]
    wrapped = [n for n, m in new if isinstance(m.get_base_layer(), FrozenLinear) and not isinstance(m, FrozenLoraLinear)]
    if not wrapped:
        return result
    backend = model.get_submodule(wrapped[0]).get_base_layer().backend
    for name in wrapped:  # give the model back as it was
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, modules[name])
    for parameter, flag in flags:
        parameter.requires_grad = flag
    raise ValueError(
        f"{type(config).__name__} cannot adapt {wrapped[0]} (and {len(wrapped) - 1} more): it is frozen in {backend}, and this "
        "method reads base weights directly. Use NVFP4LoraConfig or LoraConfig, or leave these modules out of target_modules."
    )


def _level(model: nn.Module, asked: list[Options], loaded: PactConfig | None, automatic: bool) -> str:
    """Of ``memory``: less memory for the adapter or where the model was loaded is less for both. A word of the adapter's is also
    that of a base that was loaded with ``"auto"``; without a word, a base that was frozen before is left as it is."""
    words = [options.memory for options in asked if options.memory != "auto"]
    if not words:
        return asked[0].level if automatic else "fast"
    level = max(words, key=MEMORY.index)
    if loaded is not None and loaded.memory == "auto":
        keep_layouts(model, "cached" if level == "fast" else "transient")
    return level


def _keeps_codes(model: nn.Module, asked: Options) -> bool:
    """Whether linears keep NVFP4 codes for backward, which fused modules make for them, or should (a report says why not)."""
    if "nvfp4" in (asked.backend, asked.frozen.activations):
        return True
    return any(layer.options.activations == "nvfp4" for _, layer in frozen_layers(model))


def _refuse_frozen_modules_to_save(model: nn.Module, modules_to_save: Iterable[str]) -> None:
    for saved in modules_to_save:
        for name, module in model.named_modules():
            if name.endswith(saved) and (frozen := frozen_modules(module)):
                skip = name.rpartition(".")[2]
                raise ValueError(
                    f"modules_to_save names {name}, which is frozen in {frozen[0][1].backend} and cannot be trained in full. "
                    f"Freeze the model with skip_modules=[{skip!r}] (NVFP4LoraConfig does so for its own modules_to_save)."
                )
