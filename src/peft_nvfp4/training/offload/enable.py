"""Frozen weights in the host's memory: models whose packed weights do not fit on the GPU.

>>> model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")                   # on the CPU
>>> model = get_peft_model(model, NVFP4LoraConfig(..., memory="smallest"))
>>> Trainer(model=model, ...).train()              # moves everything else to the GPU
>>> print(offload_status(model))

The packed weights of decoder layers live in page-locked host memory, one buffer a layer. On the GPU there are two buffers as
large as the largest layer. Layer i always computes in buffer i mod 2; while it does, a second stream fills the other buffer with
the layer that comes next: i + 1 in forward, i - 1 in backward. What a layer computes is not touched: its parameters point into
the buffer while it runs (``Parameter.data``) and to the host's bytes at all other times. So ``state_dict()`` and whatever else
reads a parameter finds the host's bytes, ``model.to(device)`` moves everything else, and a layer computes with the same bytes on
the same device as without offload: the results are the same bit for bit.

When bytes are fetched: a hook before a layer's forward has its bytes brought, and those of the layer that comes next. Whoever
computes with frozen weights asks for them once more: every product in forward, and every product in backward, whose autograd
Function carries the context in which it may read them (:mod:`peft_nvfp4.autograd.hosted`). As a rule they are there, which costs
an integer compare. So nothing depends on the order in which autograd comes to the layers, or on which outputs have gradients: a
loss on something inside a layer, a cache of keys and values from an earlier forward, a checkpoint that runs several layers again.
What autograd has saved of a parameter is the parameter, or a view of the buffer. Both are right then: the bytes of a layer are
always at the same place. Where the places change between forward and backward (a merge, ``model.to``, the end of offload),
backward raises.

One thread at a time: while a layer's forward or a product's backward runs in one thread, another one that asks for bytes gets an
error. (Rejected: to let it wait. A call inside a layer that waits for another thread's would wait for ever.)

Order between streams: a copy into a buffer waits for everything that was launched before it on the current stream, and on all
streams that have read the buffer; kernels wait for the copy, on each stream that asks. The allocator knows that these streams use
the buffers, so their memory is not reused while a copy is on its way. Bytes that were written to the host (``load_state_dict``)
are copied again.

On a CPU the same code copies at once, from one part of its memory to another.

A host that has no room for all of the weights keeps those of the first layers, and the others stay in the files that they were
loaded from (:mod:`.read_ahead`).

Rejected: ``saved_tensors_hooks`` and moving weights to the GPU at each use (an allocation a layer, and no prefetch); accelerate's
``cpu_offload`` (moves parameters by themselves, one after the other, without overlap).
"""

from __future__ import annotations

import torch
from torch import nn

from ...quantization.freeze import frozen_modules
from ..cuda_graphs import disable_cuda_graphs, records_steps
from .frozen_methods import ON_DEVICE, packed_parameters
from .host_memory import HostMemoryShort
from .layers import ATTRIBUTE
from .transfers import Offload, OffloadStatus


def enable_offload(model: nn.Module) -> None:
    """Keep the packed weights of a (PEFT) model's decoder layers on the host from now on. Called again, it moves adapters that
    were added since to the compute device.

    Raises:
        ValueError: there is no list of decoder layers with frozen linears, or something excludes it: CUDA graphs, sharding
            (FSDP), a model spread over devices (``device_map``), layers that share weights.
        HostMemoryShort: the host has no memory for the weights. The model is as it was.
    """
    layers = find_layers(model)
    if not layers:
        raise ValueError(
            f"offload (memory='smallest') moves the frozen linears of decoder layers, and {type(model).__name__} has no list of "
            "layers with frozen linears in it"
        )
    if (owner := _owner(model)) is not None:
        return _move_the_rest(owner)
    _refuse(model, layers)
    disable_cuda_graphs(model)  # those that nobody asked for
    try:
        Offload(layers, next(p for p in _packed(layers[0])).device)
    except HostMemoryShort:
        disable_offload(model)
        raise
    return None


def disable_offload(model: nn.Module) -> None:
    """Bring the weights back to the compute device. Nothing happens to a model without offload."""
    owner = _owner(model)
    if owner is None:
        return
    owner.release()
    owner.settle()
    if owner.stream is not None:
        torch.cuda.synchronize(owner.device)
    for layer in owner.layers:
        for handle in layer.handles:
            handle.remove()
        layer.forget_views()
        delattr(layer.module, ATTRIBUTE)
        for p in layer.parameters():
            p.data = p.data.to(owner.device)
        for frozen_layer in layer.packed:
            for name in ("_apply", "hosted", *ON_DEVICE):
                frozen_layer.__dict__.pop(name, None)


def offload_status(model: nn.Module) -> OffloadStatus:
    """What is on the host, and what was copied. Waits for the device."""
    owner = _owner(model)
    return OffloadStatus() if owner is None else owner.measured()


def offloaded(module: nn.Module) -> bool:
    """Whether a module is, or holds, a layer with weights on the host."""
    return any(hasattr(m, ATTRIBUTE) for m in module.modules())


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: members of the ``nn.ModuleList`` that holds most bytes of frozen weights, all of which hold some."""
    best, most = [], 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            members = [m for m in module if frozen_modules(m)]
            size = sum(p.nbytes for m in members for p in _packed(m))
            if len(members) == len(module) and size > most:
                best, most = members, size
    return best


def _packed(module: nn.Module) -> list[nn.Parameter]:
    return [p for _, m in frozen_modules(module) for p in packed_parameters(m).values()]


def _owner(model: nn.Module) -> Offload | None:
    return next((vars(m)[ATTRIBUTE].owner for m in model.modules() if ATTRIBUTE in vars(m)), None)


def _move_the_rest(owner: Offload) -> None:
    """An adapter is made where PEFT finds the frozen weight: on the host."""
    for layer in owner.layers:
        ours = {id(p) for p in layer.parameters()}
        for p in layer.module.parameters():
            if id(p) not in ours and p.device != owner.device:
                p.data = p.data.to(owner.device)


def _refuse(model: nn.Module, layers: list[nn.Module]) -> None:
    places = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if len(places) > 1 or any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise ValueError(
            "offload (memory='smallest') and device_map exclude each other: accelerate's hooks move inputs and weights by "
            "themselves. Load the model without device_map, on the CPU"
        )
    if any(hasattr(p, "device_mesh") for layer in layers for p in layer.parameters()):
        raise ValueError("offload (memory='smallest') and FSDP exclude each other: sharded weights come from other processes")
    if records_steps(model):
        raise ValueError("offload (memory='smallest') and CUDA graphs exclude each other: disable_cuda_graphs(model) first")
    seen: set[int] = set()
    for layer in layers:
        ids = {id(p) for p in _packed(layer)}
        if seen & ids:
            raise ValueError("offload (memory='smallest') needs weights of one layer each; layer_replication shares them")
        seen |= ids
