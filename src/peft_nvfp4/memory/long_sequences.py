"""The moments of a step whose checkpoints are on the host and whose MLPs compute in tiles
(:mod:`peft_nvfp4.training.host_checkpoints`).

Of the residual stream, what a moment needs of it is there: all sizes are those of one layer. With d, q and kv the bytes of a
token's hidden state, queries and keys, c the codes of an input:

    forward        attention's last linear: the embeddings, the layer's input, the norm's output and the result, 4 d; queries,
                   keys, values and attention's output, 2 q + 2 kv; 2 c, of the norm's output and of attention's
    loss           the final norm's input and output, the gradient of that: 3 d, and a chunk of logits
    final norm     the gradient as it was kept, scaled, and put in its place, and the norm's input: 4 d, and a tile
    recomputation  as forward, with the gradient of the layer's output and the next layer's input on its way, without embeddings
    MLP            what the layer has kept (2 q + 2 kv + 2 c, adapters' hidden values, a log-sum-exp a head), the next layer's
                   input on its way, the gradients of the layer's output and of the norm's: 3 d, and a tile
    attention      what is kept of it without the second norm, the input on its way, the gradient of the sum after attention:
                   2 d; gradients of output, queries, keys and values: 2 q + 2 kv; and of an eighth of the heads FlashAttention's
                   copies of output and gradient, dq, its sum in FP32, dk and dv for every query head: (5 q + 4 bytes a query
                   value) / 8

In backward all gradients of adapters are there (those of the last layers to be computed are, nearly).

With Llama-8B's sizes the recomputation takes 71 kB a token, the last moment 70, and forward 62. Embedding and head are on the
host, where memory is short (:mod:`peft_nvfp4.training.resting_weights`); the head not for loss and final norm.
"""

from __future__ import annotations

from dataclasses import replace

from . import kept, moments
from .kept import EMBEDDING, FP32, NORMS, STREAM, codes
from .moments import ACTIVATION_GRADIENTS, COPIES, FINAL_NORM, GRADIENTS, LOGITS, Moment
from .settings import Settings
from .shapes import ModelShape

TILE_VALUES, NORM_VALUES, GROUPS = 32 << 20, 8 << 20, 8
"""Of :mod:`peft_nvfp4.fusion.mlp`, :mod:`peft_nvfp4.training.host_checkpoints` and :mod:`peft_nvfp4.autograd.long_attention`."""
TILE = "a tile of an MLP"
CODES = "codes of attention's output"
ATTENTION_BACKWARD = "gradients within attention"


def in_tiles(shape: ModelShape, settings: Settings) -> bool:
    """Whether MLPs compute a tile at a time: fused ones of a frozen NVFP4 base do."""
    return settings.host_checkpoints and settings.backend == "nvfp4" and shape.mixture is None


def groups(heads: int) -> int:
    """Of attention's heads in backward, of so many heads of keys."""
    return max(n for n in range(1, GROUPS + 1) if heads % n == 0)


def tile_rows(width: int) -> int:
    """Tokens of a tile."""
    return max(256, TILE_VALUES // width // 256 * 256)


def long_moments(shape: ModelShape, settings: Settings) -> dict[str, Moment]:
    """Moment -> part -> bytes."""
    tokens, b = settings.tokens, shape.dtype_bytes
    d, q, kv = b * shape.hidden * tokens, b * shape.q * tokens, b * shape.kv * tokens
    layer = {kind: n * tokens for kind, n in kept.layer(shape, settings).items() if kind not in (kept.GATE_UP, kept.INNER)}
    norms = layer[NORMS] // 2
    first = layer | {NORMS: norms, CODES: codes(shape.q, settings.terms("interior")) * tokens}
    forward, backward = _tile(shape, settings)
    expanded = 2 * q if shape.kv_heads < shape.heads else 0
    group = (3 * q + FP32 * shape.q * tokens + expanded) // groups(shape.kv_heads)
    within = 2 * q + 2 * kv + group
    gradients = {GRADIENTS: kept.gradients(shape, settings)}
    matrix = 0 if shape.tied else b * shape.vocabulary * shape.hidden  # in the place of the static entry; a tied one is the head
    resting, head = ({EMBEDDING: 0}, {EMBEDDING: matrix} if matrix else {}) if settings.cards == 1 else ({}, {})
    norm = 5 * FP32 * min(NORM_VALUES, shape.hidden * tokens)
    named = {
        "forward": first | resting | {STREAM: 4 * d, TILE: forward},
        "loss": head | {STREAM: 2 * d, LOGITS: moments.loss_moment(shape, settings)[LOGITS]},  # with the gradient
        "final norm": head | {STREAM: d, ACTIVATION_GRADIENTS: 3 * d, FINAL_NORM: norm},
        "recomputation": first | resting | {STREAM: 5 * d} | gradients,
        "MLP": layer | resting | {STREAM: d, ACTIVATION_GRADIENTS: 2 * d, TILE: backward} | gradients,
        "attention": layer | resting | {NORMS: norms, STREAM: d, ACTIVATION_GRADIENTS: d, ATTENTION_BACKWARD: within} | gradients,
        "optimizer": {COPIES: 0} | gradients,
    }
    return {name: moments.always_there(shape, settings) | parts for name, parts in named.items()}


def _tile(shape: ModelShape, settings: Settings) -> tuple[int, int]:
    """Bytes of a tile in forward, and in backward with what it has kept of its own."""
    one = replace(settings, batch=1, sequence=min(settings.tokens, tile_rows(shape.intermediate)), positions=None)
    own = {kind: n * one.tokens for kind, n in kept.layer(shape, one).items() if kind in (kept.GATE_UP, kept.INNER)}
    sums = [moments.added(own, moment) for moment in (moments.mlp_forward(shape, one), *moments.mlp_backward(shape, one))]
    forward, *backward = (sum(max(n, 0) for n in moment.values()) for moment in sums)
    return forward, max(forward, *backward)
