"""The side table through which quantised activations travel from producer to consumers.

A module passes one tensor on, x. What its consumers want is x already quantised. So whoever quantises x first, the norm that
produced it or the first linear that reads it, enters the result in a table under the tensor object itself, and the other linears
of the site find it there: q, k and v quantise once, and keep the same codes for backward.

Why this is safe:

* The key is weak. When the last reference to x goes, the entry goes: nothing to clean up after an exception, no growth.
* An entry counts only while ``x._version`` and the address of its data are what they were: an in-place edit of x makes it
  unfindable. (Edits past the version counter, through ``x.data`` or NumPy, are not seen; therefore only linears that are known to
  share an input with others enter what they quantised.) Tensors made under ``torch.inference_mode`` have no version: there, only
  what a producer entered for its own output counts.
* Activation checkpointing recomputes x as a new tensor object, which gets its own entry. Several forwards before one backward are
  several tensors.
* One table per thread (DataParallel runs replicas in threads).

While ``torch.compile`` traces there is no table: what a producer enters for its own output becomes an attribute of the traced
tensor, which exists during tracing only, so that the graph passes the codes on; other linears of a site call the same functional
operator on the same input, and the compiler merges the calls.

The table also carries outputs. Linears of one site are computed together when the first of them is called
(:class:`peft_nvfp4.nn.nvfp4.Site`); the others collect theirs from the entry of the tensor they are called with.

Rejected: a Tensor subclass that carries its codes (every operator would need a rule), and module-level context passed by
decoder layers (needs a patch for every architecture). Attributes instead of the table in eager code, too: they would travel with
pickled and deep-copied tensors.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..numerics.formats import QuantizedMatrix


class GatedSource(NamedTuple):
    """The NVFP4 copies of gate and up (M, f), and the activation: what a gated MLP keeps for backward."""

    gate: QuantizedMatrix
    up: QuantizedMatrix
    act: str


@dataclass
class QuantizedInput:
    """x~ of one tensor x.

    Attributes:
        parts: one or two terms, each (M, K).
        centre: the parameter that was subtracted before quantising (compared by identity), or None.
        dtype: of x as it was quantised (autocast may have cast it).
        values: D(x~) (M, K) in x's dtype once somebody has computed it. Never x or a view of it: the entry would keep its own
            key alive.
        exact: x itself is D(x~) already (a fused producer returned it).
        hollow: x has the shape and the gradient of D(x~) but no values: its one reader needs only the codes.
        source: what x~ can be made from anew in backward, if that is kept anyway; then nobody need keep the codes of x~.
        stamp: what x was when it was entered.
        entered: it is in the table (or on the traced tensor).
        outputs: of linears of the site that were computed before they were called, by the identity of the layer. Their autograd
            graph must not hold x itself: see :meth:`peft_nvfp4.nn.nvfp4.Site.product`.
    """

    parts: tuple[QuantizedMatrix, ...]
    centre: Tensor | None
    dtype: torch.dtype
    values: Tensor | None = None
    exact: bool = False
    hollow: bool = False
    source: GatedSource | None = None
    stamp: tuple[int, int] = (0, 0)
    entered: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)


ATTRIBUTE = "_peft_nvfp4"
"""Of a tensor while a compiler traces."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.table = WeakTensorKeyDictionary()


_LOCAL = _Local()


def put(x: Tensor, entry: QuantizedInput) -> None:
    """Enter x~ for x, if it is safe to find it there."""
    if torch.compiler.is_compiling():
        entry.entered = entry.exact
        if entry.exact:
            setattr(x, ATTRIBUTE, entry)
    elif entry.exact or not x.is_inference():
        entry.stamp, entry.entered = _stamp(x), True
        _LOCAL.table[x] = entry


def _stamp(x: Tensor) -> tuple[int, int]:
    return (0 if x.is_inference() else x._version, x.data_ptr())


def get(x: Tensor, terms: int, centre: Tensor | None, dtype: torch.dtype) -> QuantizedInput | None:
    """x~ of x with this input spec, if somebody entered it and x has not changed since."""
    compiling = torch.compiler.is_compiling()
    entry = getattr(x, ATTRIBUTE, None) if compiling else _LOCAL.table.get(x)
    if entry is None:
        return None
    same = len(entry.parts) == terms and entry.centre is centre and entry.dtype == dtype
    if same and (compiling or entry.stamp == _stamp(x)):
        return entry
    if entry.hollow:
        raise RuntimeError("a tensor without values was changed, or is read in a way it was not made for: please report this")
    return None


def live() -> int:
    """Number of entries of this thread (for tests: 0 after a step)."""
    return len(_LOCAL.table)
