"""What a recording of a decoder has baked in: as long as it is the same, the recording computes what the decoder would."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..fusion.probe import watched
from ..nn.plain import StandIn
from .graph_recording import Unsupported


def _of_parameter(p: nn.Parameter) -> tuple:
    """Of a parameter: the object, too, since gradients go to the one that was recorded; of frozen ones also the version, since
    copies of them may be read."""
    if type(p).__name__ == "DTensor":
        raise Unsupported("the parameters are sharded (FSDP2), and each step gathers them anew")
    return id(p), p.data_ptr(), p.dtype, p.requires_grad, 0 if p.requires_grad or p.is_inference() else p._version


def _adapter_state(layer: nn.Module) -> tuple:
    if layer._forward_pre_hooks:
        raise Unsupported("hooks on adapters (aLoRA) may do something else in every step")
    dropouts = tuple(getattr(d, "p", 0.0) for d in layer.lora_dropout.values())
    chosen = tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters)
    return *chosen, tuple(layer.scaling.items()), dropouts


def _children_read(layer: nn.Module) -> Iterator[nn.Module]:
    """Children of a LoRA layer that it reads: not those of adapters that are disabled or not active, which may be trained
    meanwhile (a policy, while its reference computes)."""
    active = () if layer.disable_adapters else layer.active_adapters
    for child in layer._modules.values():
        if type(child) is nn.ModuleDict:
            yield from (child._modules[name] for name in active if name in child._modules)
        elif child is not None:
            yield child


def baked_in(decoder: nn.Module) -> tuple:
    """What a recording has baked in. Asked in every step, of thousands of modules: ``modules()``, ``parameters()`` and
    ``buffers()`` took longer than the rest of a step's Python, and attributes are read where modules keep them."""
    state: list = [getattr(decoder.config, "_attn_implementation", None)]
    seen: set[int] = set()
    left = [decoder]
    while left:
        module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = module.__dict__
        children = own["_modules"]
        adapted = "lora_A" in children
        if adapted:
            left += _children_read(module)
        elif children:
            left += [child for child in children.values() if child is not None]
        settings = own.get("attention_dropout"), own.get("gradient_checkpointing"), own.get("p")  # p: of dropout
        state.append((type(module), own["training"], own.get("forward"), settings))
        if isinstance(module, StandIn):
            state.append(module.edit())
        if parameters := own["_parameters"]:
            state += [_of_parameter(p) for p in parameters.values() if p is not None]
        if buffers := own["_buffers"]:
            state += [(b.data_ptr(), b.dtype) for b in buffers.values() if b is not None]
        has_hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
        if has_hooks and (hooks := watched(module)):
            kind = type(module).__name__
            for p in decoder.parameters():  # sharded ones are the reason, not the hooks that gather them
                _of_parameter(p)
            raise Unsupported(f"{', '.join(hooks)} would run only while a step is recorded ({kind} has hooks)")
        if adapted:
            if getattr(module, "merge_aware_adapters", None):
                raise Unsupported("merge_aware=True makes the merged weights anew in every pass")
            state.append(_adapter_state(module))
    return tuple(state)
