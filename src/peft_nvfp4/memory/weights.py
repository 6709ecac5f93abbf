"""Bytes that do not depend on the batch: frozen weights in their layouts, adapters, gradients, optimizer state."""

from __future__ import annotations

from ..numerics.formats import packed_bytes
from .settings import OPTIMIZERS, Settings
from .shapes import ModelShape, Projection

DENSE = "routers, experts that stay dense"
GSCALE = 4  # one FP32 global scale
NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256
NF4_OFFSET = 4  # of the nested scales
NF4_TABLES = 4 * (16 + 256) + NF4_OFFSET  # bitsandbytes' code book, that of the nested scales


def forward_layout(p: Projection, settings: Settings, dtype_bytes: int) -> int:
    """A frozen linear, or all experts of a projection, as forward reads it."""
    if not settings.is_packed(p) or settings.format == "bf16":
        return p.elements * dtype_bytes
    if settings.format == "nf4":
        n = p.inputs * p.outputs
        blocks = -(-n // NF4_BLOCK)  # double quantisation: a byte for each, and an FP32 number for 256 of them
        beside = NF4_OFFSET if p.of_experts else NF4_TABLES  # experts share one copy of the code books
        return p.count * (-(-n // 2) + blocks + 4 * -(-blocks // NF4_NESTED_BLOCK) + beside)
    return p.count * (packed_bytes(p.outputs, p.inputs) + GSCALE)


def backward_layout(p: Projection, settings: Settings) -> int:
    """Its transpose with codes along the outputs, where it is kept."""
    kept = settings.format == "nvfp4" and settings.frozen.weight_layouts == "cached"
    return p.count * (packed_bytes(p.inputs, p.outputs) + GSCALE) if kept and settings.is_packed(p) else 0


def is_dense_part(p: Projection, settings: Settings) -> bool:
    """A mixture's router, and experts that are not packed: no frozen linear holds them."""
    return not p.is_linear and not settings.is_packed(p)


def adapter_parameters(shape: ModelShape, settings: Settings) -> int:
    """Trained parameters of all layers."""
    return shape.layers * sum(_adapter(p, settings) for p in shape.projections)


def _adapter(p: Projection, settings: Settings) -> int:
    return p.count * settings.rank_of(p) * (p.inputs + p.outputs)


def adapter_copies(shape: ModelShape, settings: Settings) -> int:
    """BF16 copies of FP32 adapters that a forward makes and backward uses. (A router's product B A is made in FP32.)"""
    copied = not settings.liger and settings.adapter_bytes == 4
    per_layer = sum(_adapter(p, settings) for p in shape.projections if p.site != "router") * shape.dtype_bytes if copied else 0
    return per_layer * (1 if settings.checkpointing else shape.layers)


def gradients(shape: ModelShape, settings: Settings) -> int:
    """Of the adapters, all there. A recorded step has them twice: in the recording, and where the optimizer reads them."""
    return adapter_parameters(shape, settings) * settings.adapter_bytes * (2 if settings.cuda_graphs else 1)


def static(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Category -> bytes that are there during the whole step."""
    dtype = shape.dtype_bytes
    layer = [p for p in shape.projections if not is_dense_part(p, settings)]
    dense = sum(p.elements for p in shape.projections if is_dense_part(p, settings)) * dtype
    norms = shape.layers * (shape.norms * shape.hidden + 2 * shape.head_dim * shape.head_norms) + shape.hidden
    biases = shape.layers * sum(p.outputs for p in layer if p.bias)
    trained = adapter_parameters(shape, settings)
    state = OPTIMIZERS[settings.optimizer] * settings.adapter_bytes / 4
    if settings.optimizer.endswith("8bit"):
        state = OPTIMIZERS[settings.optimizer]
    return {
        "frozen linears, forward layout": shape.layers * sum(forward_layout(p, settings, dtype) for p in layer),
        "frozen linears, backward layout": shape.layers * sum(backward_layout(p, settings) for p in layer),
        "embedding and head": shape.vocabulary * shape.hidden * dtype * (1 if shape.tied else 2),
        **({DENSE: shape.layers * dense} if shape.mixture else {}),
        "norms and biases": (norms + biases) * dtype,
        "adapters": trained * settings.adapter_bytes,
        "optimizer": 0 if settings.optimizer.startswith("paged") else int(trained * state),
    }


def host_bytes(shape: ModelShape, settings: Settings) -> int:
    """Optimizer state that a paged optimizer may keep in the host's memory."""
    paged = settings.optimizer.startswith("paged")
    return int(adapter_parameters(shape, settings) * OPTIMIZERS[settings.optimizer]) if paged else 0
