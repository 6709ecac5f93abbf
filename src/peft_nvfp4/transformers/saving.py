"""``save_pretrained`` of a model that was frozen after it had been loaded: by ``freeze_model``, or by a merge into NVFP4.

Its ``config.json`` gets the ``quantization_config`` with which ``from_pretrained`` loads the folder again: a
:class:`~.config.PactConfig` for NVFP4, bitsandbytes' for NF4 (a frozen NF4 linear is stored as a ``Linear4bit``). A model that
was loaded with one has it already, and "bf16" is dense. The model in memory stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.quantizers.auto import AutoHfQuantizer

from ..nn.experts.frozen_experts import frozen_experts
from ..nn.wrapping import wrap
from ..quantization.freeze import frozen_layers, frozen_matrices, frozen_modules
from ..quantization.frozen_as import accuracy_of, skipped_of
from .config import PactConfig
from .quantizer import makes


def install() -> None:
    """Wrap transformers' ``PreTrainedModel.save_pretrained``, until :func:`~peft_nvfp4.nn.wrapping.unwrap_all`."""
    wrap(PreTrainedModel, "save_pretrained", _save_pretrained)


def _save_pretrained(original: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    known = getattr(self, "hf_quantizer", None) or getattr(self.config, "quantization_config", None)  # the latter: exporting
    adapter_only = getattr(self, "_hf_peft_config_loaded", False)
    config = None if known is not None or adapter_only else config_to_save(self)
    if config is None:
        return original(self, *args, **kwargs)
    before = vars(self).get("_weight_conversions")
    self.hf_quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
    self.config.quantization_config, self._weight_conversions = config, _conversions(self)
    try:
        return original(self, *args, **kwargs)
    finally:
        del self.hf_quantizer, self.config.quantization_config, self._weight_conversions
        if before is not None:
            self._weight_conversions = before


def _conversions(model: PreTrainedModel) -> list[Any]:
    """What transformers undoes on saving, as far as it does not split or join weights that are packed."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # made without from_pretrained: what it would be, with no prefix to put back
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in mapping if not isinstance(conversion, PrefixChange)]
    packed = [f"{name}.weight" for name, _ in frozen_layers(model)]
    packed += [f"{name}.{projection}" for name, experts in frozen_experts(model) for projection in experts.projections]
    return [conversion for conversion in conversions if not makes(conversion, packed)]


def config_to_save(model: PreTrainedModel) -> PactConfig | BitsAndBytesConfig | None:
    """What ``from_pretrained`` has to be told of a frozen model; None if nothing.

    Raises:
        ValueError: it carries an adapter, or there is no such thing for it.
    """
    frozen = frozen_modules(model)
    backend = frozen[0][1].backend if frozen else "bf16"
    if backend == "bf16":
        return None
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "the model carries an adapter. Save the adapter (PeftModel.save_pretrained), or merge or unload it and save what "
            "that returns"
        )
    if backend == "nf4":
        return _of_bitsandbytes(model)
    accuracy = accuracy_of(model) or "high"  # terms of its own: calibrated, which is refused, or set by hand
    small = all(options.weight_layouts == "transient" for _, _, options in frozen_matrices(model))
    return PactConfig(accuracy=accuracy, memory="small" if small else "auto", skip_modules=skipped_of(model))


def _of_bitsandbytes(model: PreTrainedModel) -> BitsAndBytesConfig:
    if experts := frozen_experts(model):
        raise ValueError(
            f"{experts[0][0]} holds experts in NF4, a form that from_pretrained cannot read: save the adapter, or make the model "
            "dense with peft_nvfp4.dequantize_model"
        )
    dense = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    layer = frozen_layers(model)[0][1]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=layer._state.nested,
        bnb_4bit_compute_dtype=layer.compute_dtype,
        llm_int8_skip_modules=[f"{re.escape(name)}$" for name in dense],
    )
