"""Mixtures of experts: what their router and experts keep for backward, and what is there while they run.

A token with k experts is k rows, and a row's tensors take the same bytes whichever expert it goes to: nothing is padded. So what
is kept does not depend on the routing. Three things do, and are bounds here: how many rows one expert has while it runs (all
tokens: no token goes to an expert twice), how many experts run at all (all of them), and how much the allocator adds by rounding
each of an expert's tensors up to 512 bytes (511).

Packed experts (:mod:`peft_nvfp4.nn.experts.frozen_experts`), a row of each:

    =====================  ==============================================================================================
    rows of the input      codes, if an adapter reads them; nf4: the row
    gate and up            codes of both; not fused, and nf4: gate, up and act(gate)
    inner product          codes, if an adapter reads them; nf4: the row
    output                 the row: the gradient of a routing weight is its product with dy
    =====================  ==============================================================================================

Experts that stay dense (``bf16``, or skipped) are transformers' ``grouped_mm``, and adapters on them PEFT's own, which adds
B A to the weights of all experts in each forward: autograd keeps the sums, as large as the experts, in every layer. (PEFT before
0.21 makes B A of all experts in FP32 before, which is not counted.)

The router keeps its probabilities, the chosen indices (8 bytes each) and what it divides. The norm before it has a reader that is
no frozen linear, and stays transformers' own.
"""

from __future__ import annotations

from dataclasses import replace

from ..numerics.formats import packed_bytes
from ..quantization.sites import ACCURACY
from .common import (
    ATTENTION_OUT,
    FP32,
    GATE_UP,
    HIDDEN,
    INNER,
    MERGED,
    NORMS,
    OUTPUTS,
    ROUNDING,
    ROUTER,
    ROWS,
    STREAM,
    Moment,
    codes,
    largest,
    operands,
    read_by_adapter,
)
from .settings import Settings
from .shapes import ModelShape, Projection

INT64, INT32 = 8, 4
ALLOCATION = 512
"""Bytes that PyTorch's allocator rounds up to."""


def as_run(shape: ModelShape, settings: Settings) -> Settings:
    """Packed experts count their rows on the host, which cannot be recorded: such a step is run without."""
    return replace(settings, cuda_graphs=False) if _packed(shape, settings) else settings


def notes(shape: ModelShape, settings: Settings) -> list[str]:
    """What of an estimate is a bound, and what its settings do to a mixture."""
    if shape.mixture is None:
        return []
    if not _packed(shape, settings):
        found = ["experts stay dense, computed by transformers' grouped_mm"]
        if any(settings.is_target(p) for p in _experts(shape)):
            found.append("PEFT adds adapters to the weights of all experts in each forward, and autograd keeps the sums")
        return found
    found = [
        "what experts keep does not depend on the routing; an expert in flight is taken to get every token, and each of its "
        "tensors to be rounded up by 511 bytes: upper bounds"
    ]
    if settings.recompute_mlp:
        found.append(f"memory={settings.memory!r} recomputes nothing of experts")
    return found


def _experts(shape: ModelShape) -> list[Projection]:
    return [p for p in shape.projections if p.of_experts]


def _packed(shape: ModelShape, settings: Settings) -> bool:
    return any(settings.is_packed(p) for p in _experts(shape))


# ---------------------------------------------------------------------------------------------- kept for backward


def layer(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Kind -> bytes per token of a layer, but for attention itself."""
    rows = shape.mixture.chosen
    packed = _packed(shape, settings)
    of_experts = _rows_packed(shape, settings) if packed else _rows_dense(shape, settings)
    hidden = shape.dtype_bytes * sum(settings.rank_of(p) for p in _experts(shape)) if packed else 0
    return {
        **_around_attention(shape, settings),
        ROUTER: _router(shape, settings, packed),
        **{kind: rows * n for kind, n in of_experts.items()},
        HIDDEN: rows * hidden,
    }


def _around_attention(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """The norms, and the input of o_proj. The second norm is transformers' own; what its readers keep is theirs."""
    own, d = settings.backend == "nvfp4", shape.hidden
    terms = ACCURACY[settings.accuracy] if own else {"norm": 1, "interior": 1}
    first, o = (read_by_adapter(shape, settings, site) for site in ("attention", "o"))
    plain = FP32 * (d + 1)
    norm = codes(d, terms["norm"]) + FP32 if settings.compressed else plain + first * shape.dtype_bytes * d
    kept = o and settings.compressed and not own  # else attention keeps it
    return {NORMS: norm + plain, ATTENTION_OUT: codes(shape.q, terms["interior"]) if kept else 0}


def _router(shape: ModelShape, settings: Settings, packed: bool) -> int:
    mixture, b = shape.mixture, shape.dtype_bytes
    k = mixture.chosen
    weights = k * (FP32 if mixture.wide_weights else b)  # which multiply the experts' outputs
    divided = FP32 * (k + 1) if mixture.normalised else 0  # the chosen probabilities and their sum
    order = k * INT64 * (1 if packed else 3)  # places of the rows; in grouped_mm, the way back and the tokens too
    read = b * shape.hidden if read_by_adapter(shape, settings, "router") else 0
    return FP32 * mixture.experts + k * INT64 + divided + weights + order + read


def _rows_packed(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Of one row."""
    b, d, f = shape.dtype_bytes, shape.hidden, shape.intermediate
    own = settings.backend == "nvfp4"
    terms = ACCURACY[settings.accuracy] if own else {"norm": 1, "interior": 1}
    first, down = (read_by_adapter(shape, settings, site) for site in ("experts", "expert"))
    return {
        ROWS: first * (codes(d, terms["norm"]) if settings.compressed else b * d),
        GATE_UP: 2 * codes(f) if settings.backend == "nvfp4" else 3 * b * f,
        INNER: down * (codes(f, terms["interior"]) if settings.compressed else b * f),
        OUTPUTS: b * d,
    }


def _rows_dense(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Of one row: the input of a product is kept where its weight, with an adapter added, has a gradient."""
    b, d, f = shape.dtype_bytes, shape.hidden, shape.intermediate
    first, down = (read_by_adapter(shape, settings, site) for site in ("experts", "expert"))
    return {ROWS: first * b * d, GATE_UP: 3 * b * f, INNER: down * b * f, OUTPUTS: b * d}


def fixed(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Part -> bytes of a layer that do not grow with the tokens (copies of adapters apart)."""
    if shape.mixture is None:
        return {}
    packed = _packed(shape, settings)
    merged = [p for p in shape.projections if settings.is_target(p) and (p.site == "router" or p.of_experts and not packed)]
    ends = 0 if packed else INT32 * shape.mixture.experts  # where the rows of every expert end
    return {
        MERGED: shape.dtype_bytes * sum(p.elements for p in merged) + ends,
        ROUNDING: _rounding(shape, settings) if packed else 0,
    }


def _rounding(shape: ModelShape, settings: Settings) -> int:
    """What the allocator may add to the tensors of every expert that runs."""
    matrix = 3  # codes, scales, global scales; of both terms together
    tensors = 2 * matrix if settings.backend == "nvfp4" else 2  # of gate and up; or they, in one, and act(gate)
    for site in ("experts", "expert"):
        if read_by_adapter(shape, settings, site):
            row = int(site == "expert")  # nf4: an inner product of its own, but all experts' inputs in one
            tensors += (matrix if settings.compressed else row) + 3  # and the hidden values, copies of A and B
    running = min(shape.mixture.experts, settings.tokens * shape.mixture.chosen)
    return running * tensors * (ALLOCATION - 1)


# ---------------------------------------------------------------------------------------------- while it runs


def _sizes(shape: ModelShape, settings: Settings) -> tuple[int, int, int]:
    """Bytes of the experts' outputs (all rows), the same times the routing weights, and a matrix of one expert's inner width."""
    mixture, b, tokens = shape.mixture, shape.dtype_bytes, settings.tokens
    rows = mixture.chosen * tokens
    weighted = FP32 if mixture.wide_weights else b
    return rows * shape.hidden * b, rows * shape.hidden * weighted, tokens * shape.intermediate * b


def _adapters(shape: ModelShape, settings: Settings) -> int:
    """Bytes of a layer's adapters on packed experts."""
    return sum(p.count * settings.rank_of(p) * (p.inputs + p.outputs) for p in _experts(shape)) * settings.adapter_bytes


def forward(shape: ModelShape, settings: Settings) -> Moment:
    """On top of what is kept: one expert in flight while outputs gather, or, later, the outputs weighted and summed. The
    residual stream, the norm's output and the embeddings are there too."""
    outputs, weighted, inner = _sizes(shape, settings)
    stream = settings.tokens * shape.hidden * shape.dtype_bytes
    rows = 0 if read_by_adapter(shape, settings, "experts") and not settings.compressed else outputs  # else they are kept
    if not _packed(shape, settings):
        in_flight = max(2 * weighted + weighted // shape.mixture.chosen, shape.mixture.chosen * inner)
        return {STREAM: 3 * stream, "rows of experts": rows + in_flight}
    first, _ = _experts(shape)
    copies = sum(p.count * settings.rank_of(p) * p.outputs for p in _experts(shape)) * settings.adapter_bytes
    parts = {
        STREAM: 3 * stream,
        "gate and up in full": 3 * inner,
        "rows of experts": rows + outputs,
        OUTPUTS: -outputs,
        "operands": 0,
        "adapters of experts, expert by expert": copies,
    }
    if settings.format == "nf4":
        parts["operands"] = shape.dtype_bytes * largest(shape)
    elif not settings.native_fp4:
        k = ACCURACY[settings.accuracy]["norm"] * first.inputs
        parts["operands"] = operands(settings.tokens, k, first.outputs)
    summed = weighted + weighted // shape.mixture.chosen
    later = {STREAM: 3 * stream, "rows of experts": rows + outputs + max(outputs, summed)}
    if settings.checkpointing:  # what is kept is not there, and counted nowhere else
        parts[OUTPUTS] = 0
    return max(parts, later, key=lambda moment: sum(moment.values()))


def sum_backward(shape: ModelShape, settings: Settings) -> Moment:
    """Gradients of the outputs and of the routing weights: two products as wide as the weights, of which autograd casts one to
    the outputs' dtype and sums the other afterwards. (A checkpointed layer's outputs are gone by then.)"""
    outputs, weighted, _ = _sizes(shape, settings)
    cast = outputs if weighted > outputs and not settings.checkpointing else 0
    above = 0 if _packed(shape, settings) else weighted  # of the rows, before they are put in order
    stream = settings.tokens * shape.hidden * (shape.dtype_bytes + FP32)
    return {"gradients of activations": 2 * weighted + cast + above + stream}


def backward(shape: ModelShape, settings: Settings) -> Moment:
    """The experts one after the other: gradients of all outputs, those of inputs as they gather, and of one expert between."""
    outputs, _, inner = _sizes(shape, settings)
    stream = 2 * settings.tokens * shape.hidden * shape.dtype_bytes
    if not _packed(shape, settings):
        trained = [p.elements for p in _experts(shape) if settings.is_target(p)]
        between = shape.mixture.chosen * inner
        return {
            OUTPUTS: -outputs,
            "gradients of activations": max(4 * between, 2 * between + outputs) + stream,
            "gradients of experts' weights": shape.dtype_bytes * max(trained, default=0),
        }
    first, _ = _experts(shape)
    parts = {
        OUTPUTS: -outputs,
        "gradients of activations": 2 * outputs + 5 * inner + stream,
        "adapters of experts, expert by expert": 2 * _adapters(shape, settings),
    }
    if settings.format == "nf4":
        return parts | {"operands": shape.dtype_bytes * largest(shape)}
    tokens, n = settings.tokens, first.outputs
    parts["operands"] = tokens * codes(n) if settings.native_fp4 else operands(tokens, n, first.inputs)
    if settings.frozen.weight_layouts == "transient":
        parts["operands"] += packed_bytes(first.inputs, n)
    return parts
