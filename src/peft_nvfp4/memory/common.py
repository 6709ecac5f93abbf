"""What the formulas share: the kinds of things that are kept, the size of NVFP4 codes and of an emulated product's operands."""

from __future__ import annotations

from ..numerics.formats import packed_bytes
from .settings import Settings
from .shapes import ModelShape

FP32 = 4

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

OPERAND_ROWS, OPERAND_BYTES = 2048, 48 << 20
"""Of :mod:`peft_nvfp4.kernels.emulated`."""

Moment = dict[str, int]
"""Part -> bytes."""


def codes(width: int, terms: int = 1) -> int:
    """A row of NVFP4: codes, block scales, and the row's global scale."""
    return terms * (packed_bytes(1, width) + FP32)


def read_by_adapter(shape: ModelShape, settings: Settings, site: str) -> bool:
    return any(settings.is_target(p) for p in shape.reads(site))


def _rows(tokens: int, k: int) -> int:
    """Rows of an emulated product's operand at a time."""
    return tokens if tokens * k * 2 <= OPERAND_BYTES else min(tokens, OPERAND_ROWS)


def operands(tokens: int, k: int, n: int) -> int:
    """BF16 operands of an emulated product of (tokens, k) and (n, k)."""
    return 2 * k * (_rows(tokens, k) + n)


def largest(shape: ModelShape) -> int:
    """Elements of the largest frozen matrix of a layer."""
    return max(p.inputs * p.outputs for p in shape.projections)


def added(a: Moment, b: Moment) -> Moment:
    return {key: a.get(key, 0) + b.get(key, 0) for key in dict.fromkeys([*a, *b])}
