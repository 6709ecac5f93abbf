"""The side table through which quantised activations travel from producer to consumers.

A module passes one tensor on, x. What its consumers want is x already quantised. So the norm that produced x, or else the first
linear that reads it, enters the quantised form in a table under the tensor object itself, and the other linears find it there: q,
k and v quantise once, and keep the same codes for backward.

Why this is safe:

* The key is weak. When the last reference to x goes, the entry goes: nothing to clean up after an exception, no growth.
* An entry counts only while ``x._version`` and the address of its data are what they were, and the offset's: an in-place edit of
  x makes it unfindable. A compiler's tensors count versions, too.
* Where nothing counts, nothing is entered. Tensors made under ``torch.inference_mode`` have no version. Edits past the counter
  (``x.data``, NumPy) are expected of hooks: a norm runs as it was while a module between it and its readers has some, and linears
  with hooks neither enter what they quantise nor take what others did. What is not seen is such an edit in a model's own code.
* Activation checkpointing recomputes x as a new tensor object, which gets its own entry. Several forwards before one backward are
  several tensors.
* One table per thread (DataParallel runs replicas in threads).

While ``torch.compile`` or ``torch.export`` trace there is no table: what a producer enters for its own output becomes an
attribute of the traced tensor, which exists during tracing only, so that the graph passes the codes on; other linears of the
group call the same functional operator on the same input, and the compiler merges the calls.

The table also carries outputs. Linears of one shared-input group are computed together when the first of them is called
(:class:`peft_nvfp4.nn.group.SharedInputGroup`); the others take theirs from the entry of the tensor they are called with.

With one term, Q(D(x~)) is x~: who finds no entry for a producer's output gets the same codes from its values. With two terms it
is not: the residual can carry a sum across a rounding threshold of the first term. Even with the first term's own block scale
13 % of blocks come out otherwise (of Gaussian numbers; the values are 0.2 % off then), so no choice of scales would mend it.

Rejected: a Tensor subclass that carries its codes (every operator would need a rule), and module-level context passed by
decoder layers (needs a patch for every architecture). Attributes instead of the table in eager code, too: they would travel with
pickled and deep-copied tensors.
"""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..numerics.formats import QuantizedMatrix
from ..ops.linear import dequantize_input, quantize_input
from .module_hooks import may_change


class GatedSource(NamedTuple):
    """The NVFP4 copies of gate and up (M, f), and the activation: what a gated MLP keeps for backward."""

    gate: QuantizedMatrix
    up: QuantizedMatrix
    act: str


@dataclass
class QuantizedInput:
    """x~ of one tensor x.

    Attributes:
        terms: one or two, each (M, K).
        offset: the parameter (the bytes of mu, float32) that was subtracted before quantising, compared by identity; or None.
        dtype: of x as it was quantised (autocast may have cast it).
        values: D(x~) (M, K) in x's dtype once somebody has computed it. Never x or a view of it: the entry would keep its own
            key alive.
        from_producer: x itself is D(x~): the module that made x has quantised it, too.
        placeholder: x carries shape and gradient of D(x~) but no values (NaN). Its only consumer is handed this entry.
        source: what x~ can be computed from in backward, if that is kept in any case; then the terms of x~ need not be kept.
        stamp: state of x and of the offset when it was entered, see :func:`stamp`.
        entered: it is in the table (or on the traced tensor).
        outputs: of linears of the shared-input group that were computed before they were called, by the identity of the layer.
            Their autograd graph must not hold x itself: see :meth:`peft_nvfp4.nn.group.SharedInputGroup.output`.
    """

    terms: tuple[QuantizedMatrix, ...]
    offset: Tensor | None
    dtype: torch.dtype
    values: Tensor | None = None
    from_producer: bool = False
    placeholder: bool = False
    source: GatedSource | None = None
    stamp: tuple = ()
    entered: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)

    def dequantized(self, x: Tensor) -> Tensor:
        """D(x~) (M, K) for x (M, K), the tensor of this entry; computed once for all linears that read it."""
        if self.from_producer and not self.placeholder:
            return x.detach()
        if self.values is None:
            with torch.no_grad():
                self.values = dequantized(self.terms, self.offset_values, x.dtype)
        return self.values

    @property
    def offset_values(self) -> Tensor | None:
        """mu (K,) float32."""
        return None if self.offset is None else self.offset.view(torch.float32)


def dequantized(terms: Sequence[QuantizedMatrix], offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D(x~) (M, K), rounded once to ``dtype``. In FP16 it saturates: rounding the largest value up may pass FP16's end where x
    itself did not."""
    if dtype == torch.float16:
        return saturated(dequantize_input.run(terms, offset, torch.float32), dtype)
    return dequantize_input.run(terms, offset, dtype)


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 values in FP16, the largest finite number at most."""
    return values.clamp(-65504.0, 65504.0).to(dtype)


ATTRIBUTE = "_peft_nvfp4"
"""Of a tensor while a compiler traces."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.table = WeakTensorKeyDictionary()


_LOCAL = _Local()


def put(x: Tensor, entry: QuantizedInput) -> None:
    """Enter x~ for x, if it is safe to find it there."""
    if torch.compiler.is_compiling():
        entry.entered = entry.from_producer
        if entry.from_producer:
            entry.stamp = (_traced_version(x),)
            setattr(x, ATTRIBUTE, entry)
    elif not x.is_inference():
        entry.stamp, entry.entered = (*stamp(x), *stamp(entry.offset)), True
        _LOCAL.table[x] = entry


def stamp(x: Tensor | None) -> tuple:
    """What a tensor's in-place edits change, and what ``x.data = y`` does: its version, if it has one, and its address."""
    return () if x is None else (None if x.is_inference() else x._version, x.data_ptr())


_TRACED_VERSIONS = threading.local()


def _traced_version(x: Tensor) -> int:
    """``x._version`` of a compiler's tensor: a constant of the trace. (Dynamo itself makes a number of it that
    is known when the graph runs only, so that nothing could be decided by it.)"""
    if not torch.compiler.is_dynamo_compiling():
        return x._version
    from torch._dynamo.comptime import comptime  # here, since importing dynamo takes seconds

    comptime(_note_version)
    return _noted_version()


def _note_version(context: Any) -> None:
    """Runs in the compiler: looks at ``x`` of :func:`_traced_version`. ``x[i] = 3.0`` is not among the versions that PyTorch 2.10
    counts while it traces, so all such lines of the graph are, whatever they are about."""
    uncounted = sum(node.target is operator.setitem for node in context.graph().nodes)
    _TRACED_VERSIONS.noted = context.get_local("x").as_fake()._version + uncounted


@torch.compiler.assume_constant_result
def _noted_version() -> int:
    return _TRACED_VERSIONS.noted


def get(x: Tensor, terms: int, offset: Tensor | None, dtype: torch.dtype) -> QuantizedInput | None:
    """x~ of x with this input spec, if somebody entered it and x has not changed since."""
    compiling = torch.compiler.is_compiling()
    entry = getattr(x, ATTRIBUTE, None) if compiling else _LOCAL.table.get(x)
    if entry is None:
        return None
    same = len(entry.terms) == terms and entry.offset is offset and entry.dtype == dtype
    return entry if same and entry.stamp == ((_traced_version(x),) if compiling else (*stamp(x), *stamp(offset))) else None


def quantized_input(
    x: Tensor, x2: Tensor, terms: int, offset: Tensor | None, shared: bool, hooks: Sequence[dict] = ()
) -> QuantizedInput:
    """x~ of x, entered by whoever quantised it before, or quantised here and, if other linears read x (``shared``), entered for
    them. x2 (M, K) is x as autocast wants it, flattened: autocast makes a new tensor for every reader, what they share is x.

    Args:
        hooks: of the reader. If any of them may change x, x is quantised as it is now, and what was entered for it is forgotten.
    """
    entry = get(x, terms, offset, x2.dtype)
    changing = (shared or entry is not None) and not torch.compiler.is_compiling() and may_change(hooks)
    if entry is None or changing:
        entry = QuantizedInput((), offset, x2.dtype)
        with torch.no_grad():
            entry.terms = quantize_input.run(x2.detach(), entry.offset_values, terms)
        if changing:
            _LOCAL.table.pop(x, None)
        elif shared:
            put(x, entry)
    return entry


VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "TransposeBackward", "UnsqueezeBackward")
ATTENTION = re.compile(r"ScaledDotProduct\w*(Flash|Efficient|Cudnn|FusedOverrideable)|FlashAttn\w*Func")
"""Autograd nodes of attention kernels that keep their output for backward (plain matrix products do not)."""


def kept_by_attention(x: Tensor) -> bool:
    """Whether x is a view of an attention kernel's output. Asked of the names of autograd's nodes: reading what a node has saved
    would unpack it, which hooks (checkpointing, offloading) may answer with work."""
    if torch.compiler.is_compiling():  # a graph has no nodes yet; what is kept is the compiler's choice
        return False
    node = x.grad_fn
    while node is not None and type(node).__name__.startswith(VIEWS):
        node = node.next_functions[0][0]
    return node is not None and ATTENTION.search(type(node).__name__) is not None


def live() -> int:
    """Number of entries of this thread (for tests: 0 after a step)."""
    return len(_LOCAL.table)
