"""BF16 copies of frozen weights, for GPUs with memory to spare: :func:`dequantize` with a memory.

A GPU without FP4 tensor cores multiplies dequantised weights. Dequantising again at every call costs 0.56 bytes of memory to read
and 2 to write per value; a copy that is kept costs 2 bytes of memory instead. :func:`limit` says how many bytes of each device
may go into copies (0, the default: none). The cache fills, in the order of use, until the next copy would not fit, and then stays
as it is: a training step uses every weight in turn, so replacing the least recently used one would replace all of them always.

What a copy belongs to is a storage, not a module: nothing is registered, saved, copied or moved along. An entry is found by the
address of the codes. It is good while codes, scales and global scale are at the same addresses in the same version (an in-place
edit raises a tensor's version), and it goes when one of their storages goes: on ``.to()``, requantising, merging, or with the
model. (A merged layer keeps the bytes it had before, for ``unmerge``; their copy then stays as well, and counts.) Edits that
PyTorch cannot see, through ``.data`` or NumPy, are not seen here either; tensors of ``torch.inference_mode`` have no version, and
get no copy.

CUDA graphs. Within a capture nothing is added, since the copy would be filled only when the graph is replayed. A copy that a
capture reads stays alive until :func:`limit` is called, whatever happens to its weight: the graph holds its address.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..numerics.formats import QuantizedMatrix
from ..numerics.reference import without_significand

VARIABLE = "PEFT_NVFP4_WEIGHT_CACHE"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass
class _Entry:
    values: Tensor
    stamp: tuple
    anchors: list[weakref.ref]  # on the three storages; their callbacks remove the entry
    stream: Any  # that filled it, and the event to wait for on others; None on a CPU
    filled: Any


_limit = 0
_entries: dict[tuple, _Entry] = {}
_captured: dict[int, Tensor] = {}  # id -> copy that a captured graph reads


def limit(bytes_per_device: int) -> None:
    """Let copies take so many bytes on each device; 0 turns the cache off. Drops all copies there are.

    Raises:
        ValueError: a negative number.
    """
    global _limit
    if bytes_per_device < 0:
        raise ValueError(f"the weight cache takes a number of bytes, 0 or more, got {bytes_per_device}")
    _limit = int(bytes_per_device)
    _entries.clear()
    _captured.clear()


def parse(text: str) -> int:
    """Bytes of "0", "500M", "8G" (powers of 1024).

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise ValueError(f"{VARIABLE}={text!r}: write a number of bytes, such as 8G or 500M")
    return int(float(match[1]) * _UNITS[match[2]])


def held(device: torch.device) -> int:
    """Bytes of the copies on this device."""
    copies = {id(e.values): e.values for e in _entries.values()} | _captured
    return sum(t.nbytes for t in copies.values() if t.device == device)


def holds(q: QuantizedMatrix, dtype: torch.dtype = torch.bfloat16, factor: float = 1.0) -> bool:
    """Whether there is a copy that :func:`dequantize` would return."""
    entry = _entries.get(_key(q, dtype, factor)) if _entries else None
    return entry is not None and _versioned(q) and _is_for(entry, q)


def dequantize(q: QuantizedMatrix, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """``ops.dequantize(q, dtype)``, kept for the next call where the limit allows it. Not to be written to. Without ``factor``,
    if that is the significand of q's global scale."""
    if _limit == 0 or not _versioned(q):
        return ops.dequantize(without_significand(q, factor), dtype)
    key = _key(q, dtype, factor)
    capturing = _capturing(q.codes.device)
    entry = _entries.get(key)
    if entry is not None and _is_for(entry, q):
        return _use(entry, capturing)
    if entry is not None and not capturing:
        _entries.pop(key, None)
    if capturing or held(q.codes.device) + q.codes.shape[0] * q.k * dtype.itemsize > _limit:
        return ops.dequantize(without_significand(q, factor), dtype)
    return _fill(key, q, dtype, factor)


def _key(q: QuantizedMatrix, dtype: torch.dtype, factor: float) -> tuple:
    return q.codes.device, q.codes.data_ptr(), q.codes.shape[0], q.k, dtype, factor


def _versioned(q: QuantizedMatrix) -> bool:
    return not (q.codes.is_inference() or q.scales.is_inference())


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stamp(q: QuantizedMatrix) -> tuple:
    """What is compared: addresses and shapes, and versions. The global scale may have none: seen as FP32 in inference mode, bytes
    are an inference tensor even where they themselves are not."""
    where = tuple((t.data_ptr(), t.shape, t.stride()) for t in q[:3])
    return where, q.codes._version, q.scales._version, None if q.gscale.is_inference() else q.gscale._version


def _same(a: tuple, b: tuple) -> bool:
    return a[:3] == b[:3] and (a[3] == b[3] or a[3] is None or b[3] is None)


def _is_for(entry: _Entry, q: QuantizedMatrix) -> bool:
    """An address alone may be another weight's: FSDP2 empties a storage that lives on, and the next weight is gathered there."""
    here = all(anchor() is t.untyped_storage() for anchor, t in zip(entry.anchors, q[:3]))
    return here and _same(entry.stamp, _stamp(q))


def _use(entry: _Entry, capturing: bool) -> Tensor:
    """The copy, made safe to read on the current stream."""
    values = entry.values
    if capturing:  # a capture begins with a synchronisation: the copy is complete
        _captured[id(values)] = values
    elif entry.stream is not None:
        stream = torch.cuda.current_stream(values.device)
        if stream != entry.stream:
            stream.wait_event(entry.filled)
            values.record_stream(stream)
    return values


def _fill(key: tuple, q: QuantizedMatrix, dtype: torch.dtype, factor: float) -> Tensor:
    stamp = _stamp(q)
    with torch.inference_mode(False), torch.no_grad():  # an ordinary tensor, whoever asks first
        values = ops.dequantize(without_significand(q, factor), dtype)
    stream = filled = None
    if values.is_cuda:
        stream = torch.cuda.current_stream(values.device)
        filled = stream.record_event()

    def drop(reference: weakref.ref) -> None:
        if key in _entries and any(anchor is reference for anchor in _entries[key].anchors):
            del _entries[key]

    anchors = [weakref.ref(t.untyped_storage(), drop) for t in q[:3]]
    _entries[key] = _Entry(values, stamp, anchors, stream, filled)
    return values
