"""The transformers quantizer behind :class:`PactConfig`.

``from_pretrained`` builds the model on the meta device and then hands over one weight after the other. Three ways from there:

* **A dense checkpoint** (:class:`StreamingQuantize`). The planned linears stay placeholders. A weight that arrives is held until
  its siblings (q/k/v, gate/up) are there, since they share a global scale; then the group is quantised, takes its place in the
  model and the dense weights are let go. At any time one group is dense. The result is :func:`~peft_nvfp4.freeze_model`'s, bit
  for bit. An alternative in two passes over the file would read everything twice to hold one matrix instead of three.
* **A model packed by another tool** (:mod:`.published`): layers with that tool's tensors, which become ours after loading.
* **A saved model** (:mod:`.checkpoint`). The planned linears become empty packed layers before loading, transformers fills them
  like any parameters, and what is not in the file (the backward layout) is made from what is.

An error inside a conversion would only be logged by transformers, so errors are kept, what follows is not converted any more, and
:meth:`PactQuantizer._process_model_after_weight_loading` raises: ``from_pretrained`` returns a whole model or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantizer

from ..checkpoints.layouts import PARTS
from ..checkpoints.load import check_files, check_indices
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..ops import shared_gscale
from ..quantization import freeze, plan
from ..quantization.freeze import dequantize_model, frozen_layers, frozen_modules
from . import checkpoint, mixtures, mxfp4, published
from .config import METHOD, PactConfig
from .prepare import mark_as_4bit, unmark_as_4bit
from .state import LoadState

RELEASE_BYTES = 1 << 25
"""Dense bytes quantised between two calls of :func:`.checkpoint.release`."""


@register_quantizer(METHOD)
class PactQuantizer(HfQuantizer):
    """Loads, saves and dequantises models of a :class:`PactConfig`.

    Attributes:
        state: what is known of the model that is being loaded.
    """

    requires_calibration = False
    quantization_config: PactConfig

    def __init__(self, quantization_config: PactConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.state = LoadState(quantization_config)
        self._held: dict[str, Tensor] = {}  # dense weights that wait for their siblings
        self._failure: str | None = None
        self._files: list[str] = []
        self._read_bytes = 0

    # -- where a model may go

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        """Every part of the model must be where it computes."""
        devices = {str(device) for device in device_map.values()} if isinstance(device_map, dict) else {str(device_map)}
        if "disk" in devices or "cpu" in devices and len(devices) > 1:
            raise ValueError(
                f"device_map puts parts of the model on {' and '.join(sorted(devices & {'cpu', 'disk'}))}: a frozen NVFP4 layer "
                "is not offloaded. Spread the model over GPUs, choose memory='small' (half of their bytes), or load it "
                "on the CPU alone (device_map='cpu')."
            )

    def update_device_map(self, device_map: Any) -> Any:
        """The current GPU where there is one, as with bitsandbytes; the CPU for offloaded weights. The caller's map wins."""
        if device_map is None:
            on_gpu = torch.cuda.is_available() and not self.quantization_config.options.offload
            device_map = {"": torch.cuda.current_device() if on_gpu else "cpu"}
        return device_map

    def adjust_max_memory(self, max_memory: Mapping) -> dict:
        return {key: value * 0.9 for key, value in max_memory.items()}  # a group of dense weights, and what packing it takes

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        """Bytes an element of this (placeholder or packed) parameter will take."""
        layouts = 2 if self.quantization_config.options.frozen.weight_layouts == "cached" else 1
        name, _, leaf = param_name.rpartition(".")
        if name not in self.state.planned and name not in self.state.mixtures or leaf == "bias":
            return param.element_size()
        return layouts * (param.element_size() if self.pre_quantized else 4.5 / 8)

    # -- before loading

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files: Any = None, **kwargs: Any) -> nn.Module:
        skip = self.quantization_config.options.skip_modules
        plan.check_names(model, skip)
        names = self._untied(model, plan.plan(model, "nvfp4", skip, loaded=False))
        self.state.mixtures = plan.plan_experts(model, "nvfp4", skip, loaded=False)
        if not names and not self.state.mixtures:
            raise ValueError(f"no linear layer of {type(model).__name__} can be frozen in NVFP4; leave quantization_config out")
        self.state.planned = {name: tuple(freeze._siblings(model, name, set(names))) for name in names}
        self._files = list(checkpoint_files or ())
        check_indices(self._files, model.config.name_or_path)
        if self.state.published is None and not self.pre_quantized:
            self.state.published = published.beside(self._files)
            self.pre_quantized = self.state.published is not None
        check_files(self._files, packed=self.pre_quantized)
        if self.state.published is not None:
            mixtures.open_up(self.state, model, self._files)
        self.state.stored = checkpoint.stored_tensors(model, self._files, self)
        if self.state.published is not None:
            published.place(self.state, model)
        elif self.pre_quantized:
            mixtures.place_empty(self.state, model)
            checkpoint.check_layout(model, [*self.state.planned, *self.state.mixtures], self.state.stored)
            for name in self.state.planned:
                self.state.put(model, name, checkpoint.empty_layer(model.get_submodule(name), self.state.options(name)))
        elif foreign := [stored for name, stored in self.state.stored.items() if name.rpartition(".")[2] in PARTS]:
            raise ValueError(
                f"{foreign[0]} belongs to a packed weight, and neither config.json nor {published.HF_QUANT_CONFIG} beside it "
                "says how it is packed. Download all files of the checkpoint"
            )
        return model

    @staticmethod
    def _untied(model: nn.Module, names: list[str]) -> list[str]:
        """Without those whose weight is another parameter's too: it is tied after loading, and would have to be packed twice."""
        tied = {key for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items() for key in pair}
        return [name for name in names if f"{name}.weight" not in tied]

    def update_weight_conversions(self, weight_conversions: list, *model: nn.Module) -> list:
        """The model's conversions, without those that merge experts which are packed one by one, and with those of experts in
        MXFP4."""
        opened = [f"{name}.{leaf}" for name in self.state.opened for leaf in ("gate_up_proj", "down_proj")]
        kept = [c for c in weight_conversions if not makes(c, opened)]
        kept += mxfp4.converters(self._fail) if self.state.mxfp4 else []
        return super().update_weight_conversions(kept, *model)  # transformers 5.12 does not give the model

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason

    # -- a dense checkpoint

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        name, _, leaf = param_name.rpartition(".")
        of_experts = name in self.state.mixtures and not leaf.endswith("_bias")
        return not self.pre_quantized and (leaf == "weight" and name in self.state.planned or of_experts)

    def get_quantize_ops(self) -> ConversionOps:
        return StreamingQuantize(self)

    def collect(self, model: nn.Module, key: str, weight: Tensor) -> None:
        """Take a weight: of experts, to be quantised; of a planned linear, to be quantised with its group if it is the last."""
        name, _, leaf = key.rpartition(".")
        linear = model.get_submodule(name)
        if self._failure is None:
            expected, origin = tuple(getattr(linear, leaf).shape), self.state.origin(key)
            if tuple(weight.shape) != expected:
                self._failure = f"{origin} has the shape {tuple(weight.shape)}, {type(model).__name__} has {expected}"
            elif not all(torch.isfinite(extreme) for extreme in weight.aminmax()):  # NaN is both; no temporaries
                self._failure = f"{origin} holds NaN or Inf; a quantised layer cannot represent them"
        if self._failure is not None:
            linear._parameters[leaf] = nn.Parameter(weight.new_empty(0), requires_grad=False)  # what follows can move it
            linear._is_hf_initialized = True
        elif name in self.state.mixtures:
            mixtures.collect(self.state, model, key, weight)
            self._account(weight)
        else:
            self._held[name] = weight
            linear._is_hf_initialized = True  # nothing to initialise while it waits
            if all(sibling in self._held for sibling in self.state.planned[name]):
                self._freeze_group(model, self.state.planned[name])

    def _freeze_group(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Quantise held weights under one global scale; as :func:`freeze_model` does for linears that are there."""
        weights = {name: self._held.pop(name) for name in names}
        gscale = shared_gscale(list(weights.values())) if len(names) > 1 else None
        for name in names:
            linear, weight = model.get_submodule(name), weights.pop(name)
            bias, linear.bias = linear.bias, None  # it may still be to come
            linear.weight = nn.Parameter(weight, requires_grad=False)
            scale = None if gscale is None else gscale.to(weight.device, copy=True)  # files refuse shared tensors
            layer = NVFP4FrozenLinear.quantize(linear, self.state.options(name), gscale=scale)
            layer.bias = bias
            for p in layer.packed_tensors().values():
                p._is_hf_initialized = True
            layer._is_hf_initialized = bias is None or getattr(bias, "_is_hf_initialized", False)
            self.state.put(model, name, layer)
            self._account(weight)
        del linear, weight

    def _account(self, weight: Tensor) -> None:
        """A weight has been read and packed."""
        self._read_bytes += weight.nbytes
        if self._read_bytes >= RELEASE_BYTES:
            self._read_bytes = 0
            checkpoint.release(self._files)

    def _freeze_rest(self, model: nn.Module) -> None:
        """Groups of which the checkpoint lacks a weight, which transformers has initialised (and said so)."""
        for name, group in self.state.planned.items():
            if isinstance(model.get_submodule(name), NVFP4FrozenLinear):
                continue
            for sibling in group:
                self._held.setdefault(sibling, model.get_submodule(sibling).weight.detach())
            self._freeze_group(model, group)

    # -- after loading

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        if self._failure is not None:
            self._held.clear()
            raise ValueError(self._failure)
        if self.state.published is not None:
            published.finish(self.state, model)
            mixtures.close(self.state, model)
        elif self.pre_quantized:
            checkpoint.finish(model, [*self.state.planned, *self.state.mixtures], self.state.origin)
        else:
            self._freeze_rest(model)
            mixtures.collect_rest(self.state, model)
        for _, layer in frozen_layers(model):
            for p in layer.parameters():
                p.requires_grad_(False)  # transformers lets every floating one it sets be trained: a bias
        freeze._warn_dense_share(model, self.quantization_config.options.skip_modules)
        mark_as_4bit(model)
        model._weight_conversions = [c for c in getattr(model, "_weight_conversions", None) or [] if self._kept(c)]
        checkpoint.release(self._files)
        self.state.stored, self._files = {}, []
        return model

    def _kept(self, conversion: Any) -> bool:
        """Whether a conversion made at loading may be undone at saving: one that split or merged dense weights would meet packed
        ones, which stay under their names in the model."""
        packed = [f"{name}.weight" for name in self.state.planned]
        packed += [f"{name}.{leaf}" for name in self.state.mixtures for leaf in ("gate_up_proj", "up_proj", "down_proj")]
        return not mxfp4.reads_mxfp4(conversion) and not makes(conversion, packed)

    # -- saving, and back to dense

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What ``save_pretrained`` writes: everything but backward layouts, which are made anew with the same bits."""
        return checkpoint.saved_state_dict(model), {}

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise ValueError("the model carries an adapter: merge or unload it, then dequantize()")
        frozen = [name for name, _ in frozen_modules(model)]
        dequantize_model(model)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # the config of a saved model holds a word
        for name in frozen:
            model.get_submodule(name).to(dtype=dtype).requires_grad_(True)
        unmark_as_4bit(model)
        vars(model).pop("_weight_conversions", None)  # those of packed weights: saved as any dense model (5.12 keeps them)
        for module in model.modules():
            if getattr(getattr(module, "config", None), "_is_quantized", False):
                module.config._is_quantized = False
        return model


def makes(conversion: Any, names: list[str]) -> bool:
    """Whether one of these parameters is the result of a conversion of tensors (not of names only)."""
    if not names or not isinstance(conversion, WeightConverter):
        return False
    reverse = conversion.reverse_transform()
    return any(reverse.rename_source_key(name)[1] for name in names)


class StreamingQuantize(ConversionOps):
    """Takes planned weights out of the stream of loaded parameters; whatever else is in it goes on."""

    def __init__(self, quantizer: PactQuantizer):
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], model: nn.Module, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        rest = {}
        for key, value in input_dict.items():
            if not self.quantizer.param_needs_quantization(model, key):
                rest[key] = value
                continue
            self.quantizer.collect(model, key, value[0] if isinstance(value, list) else value)
            if missing_keys is not None:
                missing_keys.discard(key)
        return rest
