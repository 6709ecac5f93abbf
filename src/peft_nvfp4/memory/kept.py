"""Bytes that stay: weights in their layouts, adapters, their gradients and optimizer state; and what a decoder layer keeps for
backward, by kind.

Each entry is one row of the design's table (or, for BF16, of what autograd saves of transformers' modules): nothing here was
fitted. With Llama-3.2-1B's sizes and r=16 on all linears the sums are those measured on an H200: 22,136 bytes per token and layer
with one NVFP4 term and ``memory="small"``, 100,712 for transformers and PEFT, 76,136 with Liger's kernels.

**Mixtures of experts.** A token with k experts is k rows of an MLP, and a row's tensors take the same bytes whichever expert it
goes to: nothing is padded. So what is kept does not depend on the routing. Per row of packed experts
(:mod:`peft_nvfp4.nn.experts.frozen_experts`):

    =====================  ==============================================================================================
    rows of the input      codes of the token, once for all of its rows, if an adapter reads them; nf4: the row
    gate and up            codes of both; nf4: gate, up and act(gate)
    inner product          codes, if an adapter reads them; nf4: the row
    output                 the row: the gradient of a routing weight is its product with dy
    =====================  ==============================================================================================

In NF4 every expert has tensors of its own. How much the allocator adds by rounding each of them up to 512 bytes is taken to be
511, of every expert that can have a row. Experts that stay dense (``bf16``, or skipped) are transformers' ``grouped_mm``, and
adapters on them PEFT's own: it adds B A to the weights of all experts in each forward, and autograd keeps the sums, as large as
the experts, in every layer. (PEFT before 0.21 computes B A of all experts in FP32 first, which is not counted.)

The router keeps its probabilities, the chosen indices (8 bytes each) and what it divides. The norm before it has a reader that is
no frozen linear, and stays transformers' own.
"""

from __future__ import annotations

from ..numerics.formats import packed_bytes
from .settings import OPTIMIZERS, Settings
from .shapes import ModelShape, Projection

INT64, FP32, INT32 = 8, 4, 4
GSCALE = 4  # one FP32 global scale
NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256
NF4_OFFSET = 4  # of the nested scales
NF4_TABLES = 4 * (16 + 256) + NF4_OFFSET  # bitsandbytes' code book, that of the nested scales
ALLOCATION = 512
"""Bytes that PyTorch's allocator rounds up to."""

FORWARD, BACKWARD = "frozen linears, forward layout", "frozen linears, backward layout"
DENSE = "routers, experts that stay dense"
EMBEDDING = "embedding and head"

NORMS = "norm outputs"
ATTENTION = "attention (q, k, v, out)"
ATTENTION_OUT = "attention output for o_proj"
ROUTER = "router, order of rows"
ROWS = "experts' inputs"
GATE_UP = "gate and up"
INNER = "MLP's inner activation"
OUTPUTS = "experts' outputs"
HIDDEN = "adapters' hidden values"
STREAM = "residual stream"
KINDS = (NORMS, ATTENTION, ATTENTION_OUT, ROUTER, ROWS, GATE_UP, INNER, OUTPUTS, HIDDEN, STREAM)
"""Of what grows with the tokens."""

MERGED = "weights with their adapters added"
ROUNDING = "experts' tensors, rounded up"
PER_LAYER = (MERGED, ROUNDING)
"""Of what does not."""


def codes(width: int, terms: int = 1) -> int:
    """A row of NVFP4: codes, block scales, and the row's global scale."""
    return terms * (packed_bytes(1, width) + GSCALE)


def is_read(shape: ModelShape, settings: Settings, source: str) -> bool:
    """Whether a linear with an adapter reads this input."""
    return any(settings.is_target(p) for p in shape.reads(source))


# ---------------------------------------------------------------------------------------------- weights and adapters


def forward_layout(p: Projection, settings: Settings, dtype_bytes: int) -> int:
    """A frozen linear, or all experts of a projection, as forward reads it."""
    if not settings.is_packed(p) or settings.format == "bf16":
        return p.elements * dtype_bytes
    if settings.format == "nf4":
        n = p.inputs * p.outputs
        blocks = -(-n // NF4_BLOCK)  # double quantisation: a byte for each, and an FP32 number for 256 of them
        constants = NF4_OFFSET if p.of_experts else NF4_TABLES  # experts share one copy of the code books
        return p.count * (-(-n // 2) + blocks + 4 * -(-blocks // NF4_NESTED_BLOCK) + constants)
    return p.count * (packed_bytes(p.outputs, p.inputs) + GSCALE)


def backward_layout(p: Projection, settings: Settings) -> int:
    """Its transpose with codes along the outputs, where it is kept."""
    kept = settings.format == "nvfp4" and settings.frozen.weight_layouts == "cached"
    return p.count * (packed_bytes(p.inputs, p.outputs) + GSCALE) if kept and settings.is_packed(p) else 0


def adapter_parameters(shape: ModelShape, settings: Settings) -> int:
    """Trained parameters of all layers."""
    return shape.layers * sum(settings.adapter_of(p) for p in shape.projections)


def adapter_copies(shape: ModelShape, settings: Settings) -> int:
    """BF16 copies of FP32 adapters that forward computes and backward uses. (A router's product B A is in FP32.)"""
    if settings.liger or settings.adapter_bytes != FP32:
        return 0
    layer = sum(settings.adapter_of(p) for p in shape.projections if p.source != "router") * shape.dtype_bytes
    return layer * (1 if settings.checkpointing else shape.layers)


def gradients(shape: ModelShape, settings: Settings) -> int:
    """Of the adapters, all there. A recorded step has them twice: in the recording, and where the optimizer reads them."""
    return adapter_parameters(shape, settings) * settings.adapter_bytes * (2 if settings.cuda_graphs else 1)


def static(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Category -> bytes that are there during the whole step."""
    dtype = shape.dtype_bytes
    dense = [p for p in shape.projections if not p.is_linear and not settings.is_packed(p)]  # no frozen linear holds these
    frozen = [p for p in shape.projections if p not in dense]
    norms = shape.layers * (shape.norms * shape.hidden + 2 * shape.head_dim * shape.head_norms) + shape.hidden
    norms += shape.layers * shape.heads * shape.sinks
    biases = shape.layers * sum(p.biases for p in shape.projections)
    trained = adapter_parameters(shape, settings)
    state = OPTIMIZERS[settings.optimizer]
    if not settings.optimizer.endswith("8bit"):
        state *= settings.adapter_bytes / FP32
    return {
        FORWARD: shape.layers * sum(forward_layout(p, settings, dtype) for p in frozen),
        BACKWARD: shape.layers * sum(backward_layout(p, settings) for p in frozen),
        EMBEDDING: shape.vocabulary * shape.hidden * dtype * (1 if shape.tied else 2),
        **({DENSE: shape.layers * sum(p.elements for p in dense) * dtype} if shape.mixture else {}),
        "norms and biases": (norms + biases) * dtype,
        "adapters": trained * settings.adapter_bytes,
        "optimizer": 0 if settings.optimizer.startswith("paged") else int(trained * state),
    }


def host_bytes(shape: ModelShape, settings: Settings) -> int:
    """Optimizer state that a paged optimizer may keep in the host's memory."""
    paged = settings.optimizer.startswith("paged")
    return int(adapter_parameters(shape, settings) * OPTIMIZERS[settings.optimizer]) if paged else 0


def checkpoint_bytes(shape: ModelShape, settings: Settings) -> int:
    """The inputs of all decoder layers."""
    return shape.layers * shape.dtype_bytes * shape.hidden * settings.tokens


# ---------------------------------------------------------------------------------------------- kept for backward


def layer(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Kind -> bytes per token of one layer, without checkpointing."""
    kept = dict.fromkeys(KINDS, 0) | _attention(shape, settings) | _mlp(shape, settings)
    return kept | (_router(shape, settings) if shape.mixture else {})


def _attention(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """The norms, what feeds o_proj, and what flash attention keeps: q, k, v, its output, and the log-sum-exp of every head. With
    a mask, k and v are repeated. Norms that feed frozen linears are swapped and keep codes; transformers' keep their input in
    FP32 (Liger: as it is) and 1/rms, and what adapters read of their outputs."""
    b, d = shape.dtype_bytes, shape.hidden
    kept = b * (2 * shape.q + 2 * (shape.q if settings.padded else shape.kv)) + FP32 * shape.heads
    if shape.head_norms:  # not fused: FP32 copies of q and k, and their statistics
        kept += FP32 * (shape.q + shape.kv) + FP32 * (shape.heads + shape.kv_heads)
    plain, norms = final_norm(shape, settings), (shape.norms - 2) * FP32 * (d + 1)  # those of the stream alone
    for source in ("attention", "mlp"):
        if shape.mixture and source == "mlp":
            norms += plain
        elif settings.compressed:
            norms += codes(d, settings.terms("norm")) + FP32
        else:
            norms += plain + b * d * is_read(shape, settings, source)
    # nvfp4 recomputes codes of attention's output, which attention keeps; without codes its adapter reads that too
    separate = settings.compressed and settings.backend != "nvfp4" and is_read(shape, settings, "o")
    return {ATTENTION: kept, NORMS: norms, ATTENTION_OUT: codes(shape.q) * separate}


def final_norm(shape: ModelShape, settings: Settings) -> int:
    """Bytes per token of a norm that is left as it is, as the one before the head: its input in FP32 (Liger: as it is), 1/rms."""
    return (shape.dtype_bytes if settings.liger else FP32) * shape.hidden + FP32


def _mlp(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """The gated MLP, once for each token; of a mixture, once for each of a token's experts."""
    b, d, f, mixture = shape.dtype_bytes, shape.hidden, shape.intermediate, shape.mixture
    rows = mixture.chosen if mixture else 1
    packed = settings.packs_experts(shape)
    compressed = settings.compressed and (packed or not mixture)  # what adapters read is kept as codes
    fused = compressed and (settings.backend == "nvfp4" and mixture.fused if mixture else True)  # gate and up are kept as codes
    widths = mixture.widths if mixture else 2 if settings.liger else 3
    inner = codes(f, settings.terms("interior")) if compressed else b * f
    inner *= is_read(shape, settings, "expert" if mixture else "down")
    kept = {
        GATE_UP: rows * (2 * codes(f) if fused else widths * b * f),
        INNER: rows * (inner if mixture or not settings.recompute_mlp else 0),
        HIDDEN: b * sum(settings.rank_of(p) for p in shape.projections if p.is_linear),
    }
    if mixture:
        row = codes(d, settings.terms("norm")) if compressed else b * d
        inputs = 1 if packed and settings.backend == "nvfp4" else rows
        kept |= {ROWS: inputs * row * is_read(shape, settings, "experts"), OUTPUTS: rows * b * d}
        kept[HIDDEN] += b * rows * packed * sum(map(settings.rank_of, shape.experts))
    return kept


def _router(shape: ModelShape, settings: Settings) -> dict[str, int]:
    mixture, b = shape.mixture, shape.dtype_bytes
    k = mixture.chosen
    weights = k * (FP32 if mixture.wide_weights else b)  # which multiply the experts' outputs
    divided = FP32 * (k + 1) if mixture.normalised else 0  # the chosen probabilities and their sum
    order = INT64 * k * (2 if settings.packs_experts(shape) else 3)  # of the rows, the way back; in grouped_mm, the tokens too
    read = b * shape.hidden * is_read(shape, settings, "router")
    probabilities = FP32 * mixture.experts * mixture.all_probabilities  # else they are the weights
    return {ROUTER: probabilities + k * INT64 + divided + weights + order + read}


def per_layer(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Part -> bytes of a mixture's layer that do not grow with the tokens (copies of adapters apart)."""
    if shape.mixture is None:
        return {}
    packed = settings.packs_experts(shape)
    merged = [p for p in shape.projections if settings.is_target(p) and (p.source == "router" or p.of_experts and not packed)]
    in_a_loop = packed and settings.backend == "nf4"
    ends = 0 if in_a_loop else INT32 * shape.mixture.experts  # where the rows of every expert end
    return {
        MERGED: shape.dtype_bytes * sum(p.elements for p in merged) + ends,
        ROUNDING: _rounding(shape, settings) if in_a_loop else 0,
    }


def _rounding(shape: ModelShape, settings: Settings) -> int:
    """What the allocator may add to the tensors of every expert that runs by itself."""
    tensors = shape.mixture.widths - 1  # gate and up in one, and act(gate)
    for source in ("experts", "expert"):
        if is_read(shape, settings, source):
            row = int(source == "expert")  # an inner product for each expert, but all experts' inputs in one
            tensors += (3 if settings.compressed else row) + 3  # three: codes and scales; hidden values, copies of A and B
    running = min(shape.mixture.experts, settings.tokens * shape.mixture.chosen)
    return running * tensors * (ALLOCATION - 1)


def forward_end(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Kind -> bytes per token at the end of forward, of all layers together (the final norm apart). The first norm keeps nothing
    of its input: nothing before it is trained."""
    if settings.checkpointing:
        here = 0 if settings.host_checkpoints else shape.layers
        return dict.fromkeys(KINDS, 0) | {STREAM: here * shape.dtype_bytes * shape.hidden}
    total = {kind: shape.layers * n for kind, n in layer(shape, settings).items()}
    total[NORMS] -= 0 if settings.compressed else final_norm(shape, settings)
    return total
