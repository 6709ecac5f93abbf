"""The moments of a step at which memory may be at its peak, and what is there only then.

    forward        the last layer's MLP: gate and up in BF16, the operands of a product
    loss           logits and their gradient
    final norm     its backward, FP32 in transformers, while all layers are kept
    recomputation  (checkpointing) the last layer's forward again: as forward, beside what the layer keeps
    MLP            backward of the last layer's gated product: gradients of the product, of gate and of up
    layer          then: gradients of gate and up, the operands of a product
    first          the same of the first layer, when all gradients of adapters are there
    optimizer      all gradients

Of a mixture, where these are moments of the experts, in :mod:`~peft_nvfp4.memory.mixtures`.

Bytes, on top of the static ones. What backward has freed by then is counted as a negative entry where it matters.
"""

from __future__ import annotations

from ..numerics.formats import packed_bytes
from ..quantization.sites import ACCURACY
from . import activations, mixtures, weights
from .common import FP32, GATE_UP, INNER, Moment, added, codes, largest, operands
from .settings import Settings
from .shapes import ModelShape

FULL_LOSS = 12
"""Bytes a logit in the backward of transformers' loss: log-probabilities, their gradient, the logits' gradient, all FP32."""
CHUNK_LOSS = 8
"""The same in a chunk of :mod:`peft_nvfp4.fusion.loss`: logits and their gradient in BF16, probabilities in FP32."""
CHUNK_BYTES = 128 << 20


def moments(shape: ModelShape, settings: Settings) -> dict[str, Moment]:
    """Moment -> part -> bytes."""
    tokens = settings.tokens
    kept = {kind: n * tokens for kind, n in activations.kept(shape, settings).items()}
    fixed = mixtures.fixed(shape, settings)
    kept |= {} if settings.checkpointing else {part: n * shape.layers for part, n in fixed.items()}
    kept["final norm"] = activations.final_norm(shape, settings) * tokens
    always = {
        "cuBLAS workspaces": _workspaces(settings),
        "copies of adapters": weights.adapter_copies(shape, settings),
    }
    if settings.accumulation > 1:
        always["gradients"] = weights.gradients(shape, settings)
    if settings.cuda_graphs:
        always["inputs and outputs of the recording"] = 2 * shape.dtype_bytes * shape.hidden * tokens
    backward = _layer_backward(shape, settings)
    once = {}
    if settings.checkpointing:
        once = {kind: n * tokens for kind, n in activations.layer(shape, settings).items()} | fixed
    last = added(kept, once) | {"final norm": 0}
    first = {kind: n // shape.layers for kind, n in kept.items() if kind != "final norm"}
    grads = {"gradients": weights.gradients(shape, settings)}
    again = _recomputation(kept, once, shape, settings) if settings.checkpointing else {}
    return {
        "forward": always | added(_forward_kept(kept, shape, settings), _layer_forward(shape, settings)),
        "loss": always | kept | _loss(shape, settings),
        "final norm": always | kept | {"gradients of activations": _norm_backward(shape, settings) * tokens},
        **({"recomputation": always | again} if again else {}),
        **({"MLP": always | added(last, products)} if (products := _products_backward(shape, settings)) else {}),
        "layer": always | added(last, backward),
        "first layer": always | added(added(first, once), backward) | grads,
        "optimizer": always | {"copies of adapters": 0} | grads,
    }


def _workspaces(settings: Settings) -> int:
    """One for the thread of forward and one for that of backward, and one for products with an FP32 result; a recording has its
    own as well."""
    return settings.workspace * (2 + (settings.backend == "nvfp4") + settings.cuda_graphs)


# ---------------------------------------------------------------------------------------------- loss


def _loss(shape: ModelShape, settings: Settings) -> Moment:
    rows, v, d = settings.logit_rows, shape.vocabulary, shape.hidden * shape.dtype_bytes
    gradient = d * settings.tokens  # of the hidden states, as wide as they are
    if settings.loss == "full":
        return {"logits and loss": FULL_LOSS * v * rows, "gradients of activations": 0}
    if settings.loss == "liger":  # chunks of about rows * d / V positions
        chunk = 1 << max(0, (-(-rows // -(-v // shape.hidden)) - 1).bit_length())
        return {"logits and loss": CHUNK_LOSS * v * min(rows, chunk) + d * rows, "gradients of activations": gradient}
    chunk = min(rows, max(1, CHUNK_BYTES // (4 * v)))
    return {"logits and loss": CHUNK_LOSS * v * chunk + d * rows, "gradients of activations": gradient}


def _norm_backward(shape: ModelShape, settings: Settings) -> int:
    """Bytes per token: in transformers' FP32 arithmetic five matrices as wide as the residual stream; Liger: two of BF16."""
    return (2 * shape.dtype_bytes if settings.liger else 5 * FP32) * shape.hidden


# ---------------------------------------------------------------------------------------------- one layer


def _forward_kept(kept: Moment, shape: ModelShape, settings: Settings) -> Moment:
    """While the last MLP runs: without its own share, and without the final norm's."""
    if settings.checkpointing or shape.mixture:  # experts' moments say themselves what is not there
        return kept | {"final norm": 0}
    layer = activations.layer(shape, settings)
    missing = (GATE_UP, INNER)
    return kept | {"final norm": 0} | {kind: kept[kind] - layer[kind] * settings.tokens for kind in missing}


def _layer_forward(shape: ModelShape, settings: Settings) -> Moment:
    if shape.mixture:
        return mixtures.forward(shape, settings)
    b, f = shape.dtype_bytes, shape.intermediate
    parts = {"gate and up in full": (2 if settings.compressed else 4) * b * f * settings.tokens}
    if settings.backend == "nvfp4" and not settings.native_fp4:
        readers = shape.reads("mlp")
        k = ACCURACY[settings.accuracy]["norm"] * readers[0].inputs
        parts["operands"] = max(operands(settings.tokens, k, p.outputs) for p in readers)
    elif settings.format == "nf4":
        parts["operands"] = b * largest(shape)
    return parts


def _recomputation(kept: Moment, once: Moment, shape: ModelShape, settings: Settings) -> Moment:
    """The MLP of a checkpointed layer while it runs again: what the layer keeps up to there, and the gradient above it."""
    before = once if shape.mixture else once | {GATE_UP: 0, INNER: 0}
    parts = added(added(kept, before) | {"final norm": 0}, _layer_forward(shape, settings))
    return parts | {"gradients of activations": shape.dtype_bytes * shape.hidden * settings.tokens}


def _products_backward(shape: ModelShape, settings: Settings) -> Moment | None:
    """The gradient of the gated product comes in, those of gate and up go out; beside them the stream's. None where autograd does
    that in smaller pieces."""
    if shape.mixture:
        return mixtures.sum_backward(shape, settings)
    if not settings.compressed:
        return None
    b, d, f, tokens = shape.dtype_bytes, shape.hidden, shape.intermediate, settings.tokens
    freed = activations.layer(shape, settings)[INNER] * tokens
    return {INNER: -freed, "gradients of activations": (3 * b * f + b * d) * tokens}


def _layer_backward(shape: ModelShape, settings: Settings) -> Moment:
    """While the gradients of gate and up go through their linears."""
    if shape.mixture:
        return mixtures.backward(shape, settings)
    b, d, f, tokens = shape.dtype_bytes, shape.hidden, shape.intermediate, settings.tokens
    freed = activations.layer(shape, settings)[INNER] * tokens
    parts = {INNER: -freed} if settings.compressed else {}
    # of gate, up and the stream above, and dx; in stock modules, the adapter's share of a gradient beside the frozen weight's
    parts["gradients of activations"] = (2 * b * f + 2 * b * d) * tokens
    if settings.backend == "nvfp4":
        p = max(shape.reads("mlp"), key=lambda p: p.outputs)
        if settings.native_fp4:
            parts["operands"] = tokens * codes(p.outputs)
        else:
            parts["operands"] = operands(tokens, p.outputs, p.inputs)
        if settings.frozen.weight_layouts == "transient":
            parts["operands"] += packed_bytes(p.inputs, p.outputs)
    elif settings.format == "nf4":
        parts["operands"] = b * largest(shape)
    return parts
