"""The moments of a step at which memory may be at its peak, and what is there only then.

    forward        the last layer's MLP: gate and up in BF16, the operands of a product
    loss           logits and their gradient
    final norm     its backward, FP32 in transformers, while all layers are kept
    recomputation  (checkpointing) the last layer's forward again: as forward, and what the layer keeps
    MLP            backward of the last layer's gated product: gradients of the product, of gate and of up
    layer          then: gradients of gate and up, the operands of a product
    first layer    the same of the first layer, when all gradients of adapters are there
    optimizer      all gradients

Of a mixture these are moments of its experts. Two things depend on the routing and are bounds: how many rows one expert has while
it runs (all tokens: no token goes to an expert twice), and how many experts run at all (all of them).

Bytes, on top of the static ones. A negative entry is what is counted as kept and not there yet, or freed already.
"""

from __future__ import annotations

from ..numerics.formats import packed_bytes
from . import kept
from .kept import FP32, GATE_UP, INNER, OUTPUTS, STREAM, codes
from .settings import Settings
from .shapes import ModelShape

FULL_LOSS = 12
"""Bytes a logit in the backward of transformers' loss: log-probabilities, their gradient, the logits' gradient, all FP32."""
CHUNK_LOSS = 2
"""The same in a chunk of :mod:`peft_nvfp4.fusion.loss`: logits in BF16, overwritten by their gradient."""
CHUNK_BYTES = 128 << 20
OPERAND_ROWS, OPERAND_BYTES = 2048, 48 << 20
GROUPED_BYTES = 1 << 30
"""Of a projection of all experts, dequantised (:mod:`peft_nvfp4.kernels.grouped`)."""
"""Of :mod:`peft_nvfp4.kernels.emulated`."""

LOGITS = "logits and loss"
FINAL_NORM = "final norm"
GRADIENTS = "gradients"
COPIES = "copies of adapters"
RECORDING = "inputs and outputs of the recording"
ACTIVATION_GRADIENTS = "gradients of activations"
IN_FULL, IN_FLIGHT, BY_EXPERT = "gate and up in full", "rows of experts", "adapters of experts, expert by expert"

Moment = dict[str, int]
"""Part -> bytes."""


def added(a: Moment, b: Moment) -> Moment:
    return a | {key: a.get(key, 0) + n for key, n in b.items()}


def moments(shape: ModelShape, settings: Settings) -> dict[str, Moment]:
    """Moment -> part -> bytes."""
    tokens, hidden = settings.tokens, shape.dtype_bytes * shape.hidden
    layer = {kind: n * tokens for kind, n in kept.layer(shape, settings).items()} | kept.per_layer(shape, settings)
    layers = {kind: n * tokens for kind, n in kept.forward_end(shape, settings).items()}
    if not settings.checkpointing:
        layers |= {part: n * shape.layers for part, n in kept.per_layer(shape, settings).items()}
    recomputed = layer if settings.checkpointing else {}
    if settings.host_checkpoints:  # the layer's input, and that of the next on its way
        recomputed = recomputed | {STREAM: 2 * hidden * tokens}
    last = added(layers, recomputed)
    first = added({kind: n // shape.layers for kind, n in layers.items()}, recomputed)
    always = always_there(shape, settings)
    gradients = {GRADIENTS: kept.gradients(shape, settings)}
    # in transformers' FP32 arithmetic five matrices as wide as the residual stream; Liger: two of BF16
    norm_backward = (2 * shape.dtype_bytes if settings.liger else 5 * FP32) * shape.hidden
    end = layers | {FINAL_NORM: kept.final_norm(shape, settings) * tokens}
    running = mlp_forward(shape, settings)
    product, backward = _product_backward(shape, settings), _layer_backward(shape, settings)
    named = {
        "forward": added(layers, {k: max(n, 0) for k, n in running.items()} if settings.checkpointing else running),
        "loss": end | loss_moment(shape, settings),
        "final norm": end | {ACTIVATION_GRADIENTS: norm_backward * tokens},
        "recomputation": added(last, running) | {ACTIVATION_GRADIENTS: hidden * tokens} if settings.checkpointing else None,
        "MLP": None if product is None else added(last, product),
        "layer": added(last, backward),
        "first layer": added(first, backward) | gradients,
        "optimizer": {COPIES: 0} | gradients,
    }
    return {name: always | parts for name, parts in named.items() if parts is not None}


def always_there(shape: ModelShape, settings: Settings) -> Moment:
    """Of every moment."""
    # one for the thread of forward and one for that of backward, one for products with an FP32 result, a recording's own
    workspaces = 2 + (settings.backend == "nvfp4") + settings.cuda_graphs
    return {
        "cuBLAS workspaces": settings.workspace * workspaces,
        COPIES: kept.adapter_copies(shape, settings),
        **({GRADIENTS: kept.gradients(shape, settings)} if settings.accumulation > 1 else {}),
        **({RECORDING: 2 * shape.dtype_bytes * shape.hidden * settings.tokens} if settings.cuda_graphs else {}),
    }


def loss_moment(shape: ModelShape, settings: Settings) -> Moment:
    rows = settings.batch * (settings.sequence if settings.positions is None else settings.positions)
    v, d = shape.vocabulary, shape.hidden * shape.dtype_bytes
    if settings.loss == "full":
        return {LOGITS: FULL_LOSS * v * rows, ACTIVATION_GRADIENTS: 0}
    if settings.loss == "liger":  # chunks of about rows * d / V positions
        chunk = 1 << max(0, (-(-rows // -(-v // shape.hidden)) - 1).bit_length())
    else:
        chunk = max(1, CHUNK_BYTES // (4 * v))
    return {LOGITS: CHUNK_LOSS * v * min(rows, chunk) + d * rows, ACTIVATION_GRADIENTS: d * settings.tokens}


def _emulated(tokens: int, k: int, n: int) -> int:
    """BF16 operands of an emulated product of (tokens, k) and (n, k)."""
    rows = tokens if tokens * k * 2 <= OPERAND_BYTES else min(tokens, OPERAND_ROWS)
    return 2 * k * (rows + n)


def _operands(shape: ModelShape, settings: Settings, backward: bool) -> Moment:
    """Of gate's and up's product; or of that of gate's or up's gradient with its weight."""
    if settings.format == "nf4":  # bitsandbytes dequantises a matrix
        return {"operands": shape.dtype_bytes * max(p.inputs * p.outputs for p in shape.projections)}
    if settings.backend != "nvfp4":
        return {}
    tokens, native = settings.tokens, settings.native_fp4
    if shape.mixture:
        return {"operands": _grouped_operands(shape, settings, backward)}
    p = max(shape.reads("mlp", "experts"), key=lambda p: p.outputs)
    if not backward:
        return {"operands": 0 if native else _emulated(tokens, settings.terms("norm") * p.inputs, p.outputs)}
    count = tokens * codes(p.outputs) if native else _emulated(tokens, p.outputs, p.inputs)
    return {"operands": count + packed_bytes(p.inputs, p.outputs) * (settings.frozen.weight_layouts == "transient")}


def _grouped_operands(shape: ModelShape, settings: Settings, backward: bool, *sources: str) -> int:
    """BF16 operands of a projection of all experts (of some sources; else of all), the largest: every row of the input or of dy,
    and the weights or a chunk."""
    if settings.native_fp4:
        return 0
    rows, sizes = settings.tokens * shape.mixture.chosen, []
    for p in shape.reads(*sources or ("experts", "expert")):
        transposed = packed_bytes(p.inputs, p.outputs) * p.count * (backward and settings.frozen.weight_layouts == "transient")
        weights = min(2 * p.count * p.inputs * p.outputs, GROUPED_BYTES)
        sizes.append(2 * rows * (p.outputs if backward else p.inputs) + weights + transposed)
    return max(sizes)


def mlp_forward(shape: ModelShape, settings: Settings) -> Moment:
    """While the MLP runs, without what it has not kept yet."""
    if shape.mixture:
        return _experts_forward(shape, settings)
    layer, width = kept.layer(shape, settings), shape.dtype_bytes * shape.intermediate
    return {
        IN_FULL: (2 if settings.compressed else 4) * width * settings.tokens,
        **_operands(shape, settings, backward=False),
        **{kind: -layer[kind] * settings.tokens for kind in (GATE_UP, INNER)},
    }


def _product_backward(shape: ModelShape, settings: Settings) -> Moment | None:
    """The gradient of the gated product comes in, those of gate and up go out, and the stream's is there. None where autograd
    does that in smaller pieces."""
    if shape.mixture:
        return _sum_backward(shape, settings)
    if not settings.compressed:
        return None
    freed = kept.layer(shape, settings)[INNER] * settings.tokens
    width = shape.dtype_bytes * (3 * shape.intermediate + shape.hidden)
    return {INNER: -freed, ACTIVATION_GRADIENTS: width * settings.tokens}


def mlp_backward(shape: ModelShape, settings: Settings) -> tuple[Moment, ...]:
    """The moments of an MLP's backward."""
    return tuple(m for m in (_product_backward(shape, settings), _layer_backward(shape, settings)) if m is not None)


def _layer_backward(shape: ModelShape, settings: Settings) -> Moment:
    """While the gradients of gate and up go through their linears: these, that of the stream above, and dx. (In stock modules,
    the adapter's share of a gradient and the frozen weight's.)"""
    if shape.mixture:
        return _experts_backward(shape, settings)
    freed = kept.layer(shape, settings)[INNER] * settings.tokens if settings.compressed else 0
    width = 2 * shape.dtype_bytes * (shape.intermediate + shape.hidden)
    return {INNER: -freed, ACTIVATION_GRADIENTS: width * settings.tokens, **_operands(shape, settings, backward=True)}


def _sizes(shape: ModelShape, settings: Settings) -> tuple[int, int, int, int]:
    """Bytes of the residual stream, of the experts' outputs (all rows), of these times the routing weights, and of a matrix of
    one expert's inner width."""
    mixture, stream = shape.mixture, settings.tokens * shape.hidden * shape.dtype_bytes
    weighted = FP32 * settings.tokens * shape.hidden if mixture.wide_weights else stream
    return stream, mixture.chosen * stream, mixture.chosen * weighted, settings.tokens * shape.intermediate * shape.dtype_bytes


def _experts_forward(shape: ModelShape, settings: Settings) -> Moment:
    """One expert in flight while outputs gather, or, later, the outputs weighted and summed. The residual stream, the norm's
    output and the embeddings are there too."""
    stream, outputs, weighted, inner = _sizes(shape, settings)
    summed = weighted + weighted // shape.mixture.chosen
    rows = 0 if kept.is_read(shape, settings, "experts") and not settings.compressed else outputs  # else they are kept
    if not settings.packs_experts(shape):
        return {STREAM: 3 * stream, IN_FLIGHT: rows + max(weighted + summed, shape.mixture.chosen * inner)}
    one = {
        STREAM: 3 * stream,
        IN_FULL: 3 * inner,
        IN_FLIGHT: rows + outputs,
        OUTPUTS: 0 if settings.checkpointing else -outputs,
        BY_EXPERT: sum(p.count * settings.rank_of(p) * p.outputs for p in shape.experts) * settings.adapter_bytes,
        **_operands(shape, settings, backward=False),
    }
    if settings.backend == "nvfp4":  # gate and up of all rows, or the sum of the outputs, which are kept
        every = shape.mixture.chosen * inner
        one |= {IN_FULL: 2 * every, IN_FLIGHT: 0, OUTPUTS: -outputs}
        found = [one, {STREAM: 4 * stream}]
        if not shape.mixture.fused:  # the operator's result is kept; what is cut off and the product; the last projection's input
            kept_later = {kind: -kept.layer(shape, settings)[kind] * settings.tokens for kind in (GATE_UP, INNER)}
            one |= kept_later
            found.append({STREAM: 3 * stream, IN_FULL: 2 * every, INNER: kept_later[INNER], OUTPUTS: -outputs})
            operands = _grouped_operands(shape, settings, False, "expert")
            found.append({STREAM: 3 * stream, IN_FULL: every, "operands": operands})
        return max(found, key=lambda moment: sum(moment.values()))
    later = {STREAM: 3 * stream, IN_FLIGHT: rows + outputs + max(outputs, summed)}
    return max(one, later, key=lambda moment: sum(moment.values()))


def _sum_backward(shape: ModelShape, settings: Settings) -> Moment:
    """Gradients of the outputs and of the routing weights: two products as wide as the weights, of which autograd casts one to
    the outputs' dtype and sums the other afterwards. (A checkpointed layer's outputs are gone by then.)"""
    stream, outputs, weighted, _ = _sizes(shape, settings)
    if settings.packs_experts(shape) and settings.backend == "nvfp4":  # one operator
        return {ACTIVATION_GRADIENTS: outputs + stream + settings.tokens * shape.hidden * FP32}
    cast = outputs if weighted > outputs and not settings.checkpointing else 0
    above = 0 if settings.packs_experts(shape) else weighted  # of the rows, before they are put in order
    return {ACTIVATION_GRADIENTS: 2 * weighted + cast + above + stream + settings.tokens * shape.hidden * FP32}


def _experts_backward(shape: ModelShape, settings: Settings) -> Moment:
    """Gradients of all outputs and, as they gather, of inputs; between them those of one expert."""
    stream, outputs, _, inner = _sizes(shape, settings)
    if not settings.packs_experts(shape):
        between = shape.mixture.chosen * inner
        trained = max((p.elements for p in shape.experts if settings.is_target(p)), default=0)
        return {
            OUTPUTS: -outputs,
            ACTIVATION_GRADIENTS: max(4 * between, 2 * between + outputs) + 2 * stream,
            "gradients of experts' weights": shape.dtype_bytes * trained,
        }
    if settings.backend == "nvfp4":
        return _grouped_backward(shape, settings)
    return {
        OUTPUTS: -outputs,
        ACTIVATION_GRADIENTS: 2 * outputs + 5 * inner + 2 * stream,
        BY_EXPERT: 2 * sum(map(settings.adapter_of, shape.experts)) * settings.adapter_bytes,
        **_operands(shape, settings, backward=True),
    }


def _grouped_backward(shape: ModelShape, settings: Settings) -> Moment:
    """All experts at once: the gradients of the last projection and of its input; those of gate and up, and both in one; that
    and the gradient of the first projection's rows. What was kept goes, one after the other."""
    stream, outputs, _, inner = _sizes(shape, settings)
    every, layer = shape.mixture.chosen * inner, kept.layer(shape, settings)
    codes_of = {kind: -layer[kind] * settings.tokens for kind in (INNER, GATE_UP)}
    adapters = {BY_EXPERT: 2 * sum(map(settings.adapter_of, shape.experts)) * settings.adapter_bytes}
    operands = _operands(shape, settings, backward=True)
    last = {ACTIVATION_GRADIENTS: outputs + every + 2 * stream, **operands}
    product = {ACTIVATION_GRADIENTS: 4 * every + 2 * stream, **codes_of}
    if not shape.mixture.fused:  # by autograd: the gradients of the product and of its two factors, and all that is kept of them
        product = {ACTIVATION_GRADIENTS: 3 * every + 2 * stream, INNER: codes_of[INNER]}
    first = {ACTIVATION_GRADIENTS: 2 * every + outputs + 2 * stream, **codes_of, **adapters, **operands}
    return {OUTPUTS: -outputs} | max((last, product, first), key=lambda moment: sum(moment.values()))
