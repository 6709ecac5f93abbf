"""The places in PyTorch and accelerate that have to know about packed weights.

| method | what the wrapper adds |
|---|---|
| ``DistributedDataParallel.__init__`` | compares the frozen weights of all processes; DDP leaves packed bytes alone |
| ``FullyShardedDataParallel.__init__`` (FSDP1) | refuses packed weights, and says what to use |
| ``Accelerator._prepare_fsdp2`` | compares, or sends NF4's scales from rank 0; plain parameters for NF4 |
| ``FSDPParamGroup.__init__`` of FSDP2 | refuses units smaller than a decoder layer, and offloaded weights |
| ``FSDPParam`` of FSDP2, PyTorch before 2.13 | parameters that are not floating point: no gradient, no cast |

A model without frozen layers passes through untouched.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from ...fusion.norm import NVFP4RMSNorm
from ...nn.frozen_linear import FrozenLinear
from ...nn.wrapping import replace, wrap
from ...quantization.freeze import frozen_layers, frozen_modules
from ..offload.enable import offloaded
from .base import check_same_base, send

SHARDS_BYTES = torch.__version__ >= (2, 13)
"""Whether FSDP2 takes parameters that are not floating point (pytorch#177844, #185239)."""


def install() -> None:
    """Wrap them, until :func:`~peft_nvfp4.nn.wrapping.unwrap_all`."""
    wrap(DistributedDataParallel, "__init__", _init_ddp)
    wrap(FullyShardedDataParallel, "__init__", _init_fsdp1)
    wrap(Accelerator, "_prepare_fsdp2", _prepare_fsdp2)
    wrap(_fsdp_param_group.FSDPParamGroup, "__init__", _init_group)
    if not SHARDS_BYTES:
        wrap(_fsdp_param.FSDPParam, "init_dtype_attrs", _init_dtype_attrs)
        replace(_fsdp_param, "nn", _with_byte_parameters())


def _init_ddp(original: Callable, self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    if frozen := frozen_modules(module):
        check_same_base(module, kwargs.get("process_group"))
        packed = {id(p) for _, layer in frozen for p in layer.parameters(recurse=False) if not p.requires_grad}
        names = [name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in packed]
        names = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *names]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(dict.fromkeys(names)))
    original(self, module, *args, **kwargs)


def _init_fsdp1(original: Callable, self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    for name, layer in frozen_modules(module):
        if layer.backend != "bf16":
            raise ValueError(
                f"FSDP1 cannot shard {name}: it is frozen in {layer.backend}, which is packed bytes, and FSDP1 joins parameters "
                "of one floating dtype. Use FSDP2: fsdp_version: 2 in accelerate's config (fsdp_config={'version': 2} for "
                "Trainer), or torch.distributed.fsdp.fully_shard"
            )
    original(self, module, *args, **kwargs)


def _init_group(original: Callable, self: Any, params: list, modules: tuple[nn.Module, ...], *args: Any, **kwargs: Any) -> None:
    for module in modules:
        if offloaded(module):
            raise ValueError(
                "offload and FSDP exclude each other: FSDP2 moves weights by itself. Use fully_shard without offload, or "
                "offload with DDP"
            )
        if _is_too_small(module):
            raise ValueError(
                f"fully_shard was called on a {type(module).__name__}, a part of a decoder layer. FSDP2 hands a unit a copy of "
                "its input, so it would not find what the norm before it has quantised, and adapters read frozen weights that "
                "would not be gathered. Shard decoder layers: for layer in base.model.layers: fully_shard(layer)"
            )
    original(self, params, modules, *args, **kwargs)


def _is_too_small(unit: nn.Module) -> bool:
    """A packed linear by itself, with or without adapters, or linears of a fused norm without that norm."""
    packed = [layer for _, layer in frozen_layers(unit) if not layer.weight.is_floating_point()]
    base = unit.get_base_layer() if isinstance(unit, BaseTunerLayer) else unit
    fused = any(getattr(layer, "group", None) is not None for layer in packed)
    return bool(packed) and (base is packed[0] or fused and not any(isinstance(m, NVFP4RMSNorm) for m in unit.modules()))


def _init_dtype_attrs(original: Callable, self: Any, mp_policy: Any) -> None:
    original(self, mp_policy)
    if not self.orig_dtype.is_floating_point:
        self.param_dtype = None  # bytes are not cast for the wire


def _with_byte_parameters() -> types.ModuleType:
    """``torch.nn`` with a ``Parameter`` that, where it is not told whether it has a gradient, asks the dtype."""

    class Parameter(nn.Parameter):
        def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:
            return nn.Parameter(data, requires_grad and (data is None or data.is_floating_point() or data.is_complex()))

    namespace = types.ModuleType(nn.__name__)
    namespace.__dict__.update(nn.__dict__, Parameter=Parameter)
    return namespace


def _prepare_fsdp2(original: Callable, self: Accelerator, *args: Any) -> Any:
    plugin = self.state.fsdp_plugin
    for model in args:
        if isinstance(model, nn.Module) and (frozen := frozen_layers(model)):
            if not plugin.cpu_ram_efficient_loading:
                check_same_base(model)
            states = [t for _, layer in frozen for t in plain_parameters(layer, self.device)]
            if plugin.cpu_ram_efficient_loading:
                send(states)
    return original(self, *args)


def plain_parameters(layer: FrozenLinear, device: torch.device) -> list[Tensor]:
    """Replace a bitsandbytes parameter of a layer by a plain one over the same bytes. What it kept beside them goes to the device
    where the layer will compute (FSDP2 moves parameters, and may find them on the CPU), and is returned."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return []
    state.to(device)
    beside = [t for name, t in layer.packed_tensors().items() if name != "weight"]
    layer.quant_state = state
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
    return beside
