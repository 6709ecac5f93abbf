"""The FP4 GEMMs of the compiled extension, for operands as the package stores them.

:func:`gemms` is the product, with the semantics of :mod:`native`. The library itself is found and described by :mod:`library`,
the tile of a launch chosen by :mod:`tiles`. Block scales are rearranged at every call (by the library, into the workspace). The
weights of one input are one launch: see ``csrc/collectives.cuh`` for how, and :mod:`tiles` for why.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...numerics.formats import BLOCK, K_ALIGN, QuantizedMatrix
from . import tiles as tile_table
from .library import ABI, PARTS, TERMS, VARIABLE, Arguments, Library, load
from .tiles import Problem, Tile

__all__ = ["VARIABLE", "gemm", "gemms", "load", "measured_file", "tiles_of_library"]

DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def _loaded() -> Library:
    library, reason = load()
    if library is None:
        raise RuntimeError(f"the FP4 extension is not there: {reason}")
    return library


# ---------------------------------------------------------------------------------------------- calling


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"gemm: {message}")


def _check_matrix(name: str, q: QuantizedMatrix, rows: int, kp: int) -> None:
    _require(
        q.codes.dtype == q.scales.dtype == torch.uint8,
        f"{name}: codes and scales are uint8, got {q.codes.dtype}, {q.scales.dtype}",
    )
    _require(tuple(q.codes.shape) == (rows, kp // 2), f"{name}: codes must be {(rows, kp // 2)}, got {tuple(q.codes.shape)}")
    _require(
        tuple(q.scales.shape) == (rows, kp // BLOCK), f"{name}: scales must be {(rows, kp // BLOCK)}, got {tuple(q.scales.shape)}"
    )
    _require(q.gscale.dtype == torch.float32, f"{name}: the global scale is float32, got {q.gscale.dtype}")
    _require(all(t.is_contiguous() for t in q[:3]), f"{name}: codes, scales and global scale must be contiguous")


def _check(terms: Sequence[QuantizedMatrix], weights: Sequence[QuantizedMatrix], constants, adds, outs, dtype) -> None:
    """All arguments of :func:`gemms`; the library checks addresses and alignment."""
    _require(dtype in DTYPES, f"dtype is bfloat16 or float32, got {dtype}")
    _require(1 <= len(terms) <= TERMS, f"an input has one or two terms, got {len(terms)}")
    _require(len(weights) > 0, "at least one weight")
    m, kp = terms[0].codes.shape[0], terms[0].codes.shape[1] * 2
    _require(m > 0 and kp > 0 and kp % K_ALIGN == 0, f"x must not be empty, and K a multiple of {K_ALIGN}, got ({m}, {kp})")
    for i, x in enumerate(terms):
        _check_matrix(f"term {i}", x, m, kp)
        _require(x.gscale.numel() in (1, m), f"term {i}: one global scale, or one for each of {m} rows, got {x.gscale.numel()}")
    for i, w in enumerate(weights):
        n = w.codes.shape[0]
        _check_matrix(f"weight {i}", w, n, kp)
        _require(
            n > 0 and w.gscale.numel() == 1, f"weight {i}: at least one row and one global scale, got {n} and {w.gscale.numel()}"
        )
        _require(w.k == terms[0].k, f"weight {i}: has K={w.k}, the input K={terms[0].k}")
        if (constant := constants[i]) is not None:
            floats = constant.dtype in DTYPES and constant.is_contiguous()
            _require(floats and tuple(constant.shape) == (n,), f"constant {i}: contiguous ({n},) float32 or bfloat16")
        for name, t in (("add", adds[i]), ("out", outs[i])):
            fits = t is None or (t.dtype == dtype and tuple(t.shape) == (m, n) and t.stride(1) == 1)
            _require(fits, f"{name} {i}: must be ({m}, {n}) {dtype} with adjacent columns")
    device = terms[0].codes.device
    tensors = [*(t for q in (*terms, *weights) for t in q[:3]), *(t for t in (*constants, *adds, *outs) if t is not None)]
    _require(all(t.device == device for t in tensors), "all tensors must be on one device")


def _aligned(t: Tensor) -> bool:
    """Whether the library's TMA loads and stores can address a matrix: rows and address in multiples of 16 bytes."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(0) >= t.shape[1]


def _empty(m: int, n: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """(m, n), whose rows begin at multiples of 16 bytes."""
    per_row = 16 // dtype.itemsize
    return torch.empty(m, -(-n // per_row) * per_row, dtype=dtype, device=like.device)[:, :n]


def gemms(
    terms: Sequence[QuantizedMatrix],
    weights: Sequence[QuantizedMatrix],
    *,
    constants: Sequence[Tensor | None] | None = None,
    adds: Sequence[Tensor | None] | None = None,
    outs: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> list[Tensor]:
    """For each weight ``y = g_row * g_weight * sum over terms of x @ W.T + constant + add``, summed in FP32, rounded once.

    Args:
        terms: one or two matrices (M, K) with the same global scales.
        weights: (N_i, K) each. Those with and those without something to add are a launch each, of at most four.
        constants: (N_i,) FP32 or BF16, or None.
        adds: (M, N_i) in ``dtype``, or None.
        outs: where to write, or None; may be the add.
        dtype: bfloat16 or float32.
        tile: overrides the choice of :mod:`tiles`.
    """
    nothing = [None] * len(weights)
    constants, adds, outs = list(constants or nothing), list(adds or nothing), list(outs or nothing)
    _require(len(weights) == len(constants) == len(adds) == len(outs), "as many constants, adds and outs as weights")
    _check(terms, weights, constants, adds, outs, dtype)
    library = _loaded()
    m = terms[0].codes.shape[0]
    ys: list[Tensor | None] = [None] * len(weights)
    with torch.cuda.device(terms[0].codes.device):
        for with_c in (False, True):
            chosen = [i for i in range(len(weights)) if (adds[i] is not None) == with_c]
            for at in range(0, len(chosen), PARTS):
                group = chosen[at : at + PARTS]
                for i in group:
                    out = outs[i]
                    ys[i] = (
                        out if out is not None and _aligned(out) else _empty(m, weights[i].codes.shape[0], terms[0].codes, dtype)
                    )
                _launch(library, terms, [(weights[i], constants[i], adds[i], ys[i]) for i in group], dtype, tile)
    return [_delivered(y, out) for y, out in zip(ys, outs)]


def _delivered(y: Tensor, out: Tensor | None) -> Tensor:
    if out is not None:
        return y if y is out else out.copy_(y)
    return y.contiguous()  # a copy only where N is no multiple of 16 bytes


def _launch(
    library: Library, terms: Sequence[QuantizedMatrix], parts: Sequence[tuple], dtype: torch.dtype, tile: Tile | None
) -> None:
    codes = terms[0].codes
    m, kp = codes.shape[0], codes.shape[1] * 2
    with_c = parts[0][2] is not None
    problem = Problem(m, tuple(w.codes.shape[0] for w, *_ in parts), kp, len(terms), with_c, DTYPES[dtype])
    sms = torch.cuda.get_device_properties(codes.device).multi_processor_count
    types = (DTYPES[dtype] if with_c else "none", DTYPES[dtype])
    if tile is None:
        tile = tile_table.choose_once(problem, _built(library, *types), sms, measured_file())
    name = (tile.name, *types)
    _require(name in library.instances, f"the extension has no instance {'_'.join(name)}; it has {sorted(library.instances)}")
    # the rounded-up copies made here live until the launch is queued: their memory is reused in the order of the stream
    adds = [
        None if add is None else add if _aligned(add) else _empty(*add.shape, add, dtype).copy_(add) for _, _, add, _ in parts
    ]
    arguments = Arguments(
        version=ABI, instance=library.instances[name], terms=len(terms), parts=len(parts), m=m, k=kp, sm_count=sms
    )
    for i, x in enumerate(terms):
        arguments.x_codes[i], arguments.x_scales[i] = x.codes.data_ptr(), x.scales.data_ptr()
    arguments.x_gscale, arguments.x_gscale_rows = terms[0].gscale.data_ptr(), terms[0].gscale.numel()
    for i, (w, constant, _, y) in enumerate(parts):
        part, add = arguments.part[i], adds[i]
        part.n, part.codes, part.scales, part.gscale = (
            w.codes.shape[0],
            w.codes.data_ptr(),
            w.scales.data_ptr(),
            w.gscale.data_ptr(),
        )
        part.d, part.ldd = y.data_ptr(), y.stride(0)
        if add is not None:
            part.c, part.ldc = add.data_ptr(), add.stride(0)
        if constant is not None:
            part.bias, part.bias_is_bf16 = constant.data_ptr(), int(constant.dtype == torch.bfloat16)
    workspace = torch.empty(library.workspace_bytes(arguments), dtype=torch.uint8, device=codes.device)
    arguments.workspace, arguments.workspace_bytes = workspace.data_ptr(), workspace.numel()
    arguments.stream = torch.cuda.current_stream(codes.device).cuda_stream
    library.gemm(arguments)


@cache
def _built(library: Library, c: str, d: str) -> tuple[Tile, ...]:
    """Tiles of a library with these types."""
    built = tuple(tile for tile in library.tiles if (tile.name, c, d) in library.instances)
    names = ", ".join("_".join(name) for name in library.instances)
    _require(bool(built), f"{library.path} was built without instances for c={c}, d={d}; it has {names}")
    return built


def gemm(
    terms: Sequence[QuantizedMatrix],
    weight: QuantizedMatrix,
    *,
    constant: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """:func:`gemms` of one weight."""
    return gemms(terms, [weight], constants=[constant], adds=[add], outs=[out], dtype=dtype, tile=tile)[0]


# ---------------------------------------------------------------------------------------------- for tiles.tune


def tiles_of_library() -> list[Tile]:
    """Raises RuntimeError where the extension is not there."""
    return list(_loaded().tiles)


@cache
def _measured_file(gpu: str, source: str, base: tuple) -> Path:
    return tile_table.cache_file(gpu, source)


def measured_file() -> Path:
    """The file of measured tiles of the current GPU and this build."""
    name, source = torch.cuda.get_device_name(), _loaded().info["source"]
    return _measured_file(name, source, (os.environ.get("PEFT_NVFP4_CACHE"), os.environ.get("XDG_CACHE_HOME")))
