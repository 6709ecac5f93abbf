"""Bytes per token that a decoder layer keeps for backward, by kind.

Each entry is one row of the design's table (or, for BF16, of what autograd saves of transformers' modules): nothing here was
fitted. With Llama-3.2-1B's sizes and r=16 on all linears the sums are those measured on an H200: 22,136 bytes with one NVFP4 term
and ``memory="small"``, 100,712 for transformers and PEFT, 76,136 with Liger's kernels.
"""

from __future__ import annotations

from ..quantization.sites import ACCURACY
from . import mixtures
from .common import ATTENTION, ATTENTION_OUT, FP32, GATE_UP, HIDDEN, INNER, KINDS, NORMS, STREAM, added, codes, read_by_adapter
from .settings import Settings
from .shapes import ModelShape


def layer(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Kind -> bytes per token of one layer, without checkpointing."""
    kept = _attention(shape, settings)
    kept[HIDDEN] = shape.dtype_bytes * sum(settings.rank_of(p) for p in shape.projections if p.is_linear)
    if shape.mixture is not None:
        return added(kept, mixtures.layer(shape, settings))
    return kept | (_compressed(shape, settings) if settings.compressed else _dense(shape, settings))


def _attention(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """What flash attention keeps: q, k, v, its output, and the log-sum-exp of every head. With a mask, k and v are repeated."""
    b, kv = shape.dtype_bytes, shape.q if settings.padded else shape.kv
    kept = b * (2 * shape.q + 2 * kv) + FP32 * shape.heads
    if shape.head_norms:  # not fused: FP32 copies of q and k, and their statistics
        kept += FP32 * (shape.q + shape.kv) + FP32 * (shape.heads + shape.kv_heads)
    return {ATTENTION: kept}


def _other_norms(shape: ModelShape) -> int:
    """Norms whose output goes to the residual stream, which nothing replaces: their input in FP32, and 1/rms."""
    return (shape.norms - 2) * FP32 * (shape.hidden + 1)


def _compressed(shape: ModelShape, settings: Settings) -> dict[str, int]:
    own = settings.backend == "nvfp4"
    terms = ACCURACY[settings.accuracy] if own else {"norm": 1, "interior": 1}
    o, down = (read_by_adapter(shape, settings, site) for site in ("o", "down"))
    return {
        NORMS: 2 * (codes(shape.hidden, terms["norm"]) + FP32) + _other_norms(shape),
        ATTENTION_OUT: codes(shape.q) if o and not own else 0,  # nvfp4 recomputes them from the output, which attention keeps
        GATE_UP: 2 * codes(shape.intermediate),
        INNER: codes(shape.intermediate, terms["interior"]) if down and not settings.recompute_mlp else 0,
    }


def _dense(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """transformers' modules, or Liger's: the norms' inputs (in FP32, Liger: as they are) and, where an adapter reads them, their
    outputs; gate, up and the activated gate (Liger: gate and up); the product where down's adapter reads it."""
    b, d, f = shape.dtype_bytes, shape.hidden, shape.intermediate
    readers = sum(read_by_adapter(shape, settings, site) for site in ("attention", "mlp"))
    return {
        NORMS: 2 * ((b if settings.liger else FP32) * d + FP32) + readers * b * d + _other_norms(shape),
        ATTENTION_OUT: 0,  # attention keeps it
        GATE_UP: (2 if settings.liger else 3) * b * f,
        INNER: b * f if read_by_adapter(shape, settings, "down") else 0,
    }


def final_norm(shape: ModelShape, settings: Settings) -> int:
    """Bytes per token of the norm before the head, which is left as it is: its input in FP32 (Liger: as it is), and 1/rms."""
    return (shape.dtype_bytes if settings.liger else FP32) * shape.hidden + FP32


def first_norm(shape: ModelShape, settings: Settings) -> int:
    """What the first norm does not keep, since nothing before it is trained."""
    plain = not settings.compressed and not settings.checkpointing
    return (shape.dtype_bytes if settings.liger else FP32) * shape.hidden + FP32 if plain else 0


def kept(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Kind -> bytes per token at the end of forward, of all layers together (the final norm apart)."""
    if settings.checkpointing:
        return dict.fromkeys(KINDS, 0) | {STREAM: shape.layers * shape.dtype_bytes * shape.hidden}
    total = {kind: shape.layers * n for kind, n in layer(shape, settings).items()} | {STREAM: 0}
    total[NORMS] -= first_norm(shape, settings)
    return total
