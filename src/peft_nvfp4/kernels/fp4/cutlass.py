"""The FP4 GEMMs of the compiled extension for RTX 50xx (SM120): loading the library, and :func:`gemms` for operands as the
package stores them, with the semantics of :mod:`native`.

Why ctypes and plain C symbols. The library takes addresses, sizes, a stream and a workspace (``csrc/abi.h``). So one binary
serves every Python and every torch version; it needs no torch to be built, cannot break with torch's C++ ABI, and is loaded when
it is first wanted, where failing to load is an answer and not an ImportError. The price is a few microseconds of ctypes a call.
Rejected: torch's stable ABI, which exists in parts only in the oldest torch supported here.

:func:`load` looks in the package's folder, where setup.py puts the library, or at ``PEFT_NVFP4_EXTENSION``. Block scales are
rearranged at every call (by the library, into the workspace), but for those that come in tiles: of one dimension, as
:func:`~peft_nvfp4.numerics.layout.swizzle_scales` makes them, of two terms one right after the other. The weights of one input
are one launch: see ``csrc/collectives.cuh`` for how, and :mod:`tiles`, which chooses the tile of a launch, for why.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...numerics.formats import QuantizedMatrix
from ...numerics.products import LowRank
from . import native
from . import tiles as tile_table
from .native import Unavailable
from .tiles import Problem, Tile

VARIABLE = "PEFT_NVFP4_EXTENSION"
FILE = "_sm120.dll" if os.name == "nt" else "_sm120.so"
ABI = 2
TERMS, PARTS = 2, 4
LARGEST_RANK = 256
"""Of a low-rank product inside a launch; larger ones are made before and added."""
DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class _Part(ctypes.Structure):
    """``peft_nvfp4_part`` of abi.h."""

    _fields_ = [
        ("n", c_int64),
        *((name, c_void_p) for name in ("codes", "scales", "gscale", "bias", "c", "d", "h", "up")),
        *((name, c_int64) for name in ("ldc", "ldd", "ldh", "ldup")),
        *((name, c_int32) for name in ("bias_is_bf16", "rank", "scales_swizzled", "reserved")),
    ]


class Arguments(ctypes.Structure):
    """``peft_nvfp4_gemm_args`` of abi.h."""

    _fields_ = [
        *(("version", c_uint32), ("instance", c_int32), ("terms", c_int32), ("parts", c_int32), ("m", c_int64), ("k", c_int64)),
        *(("x_codes", c_void_p * TERMS), ("x_scales", c_void_p * TERMS), ("x_gscale", c_void_p), ("x_gscale_rows", c_int64)),
        ("part", _Part * PARTS),
        *(("workspace", c_void_p), ("workspace_bytes", c_int64), ("stream", c_void_p), ("sm_count", c_int32)),
        ("x_scales_swizzled", c_int32),
    ]


class Library:
    """A loaded library.

    Attributes:
        info: what it was built from and for: ``archs``, ``emulated``, ``cutlass``, ``nvcc``, ``source``.
        archs: GPUs it was built for, as in ``12.0a``.
        instances: (tile name, c, d) -> index.
        tiles: in the order of preference where they are equal.
    """

    def __init__(self, path: Path):
        """Raises OSError (cannot be loaded), AttributeError (a symbol is missing) or ValueError (another version)."""
        self.path = path
        self._c = c = ctypes.CDLL(str(path))
        c.peft_nvfp4_abi.restype = c_int
        if (abi := c.peft_nvfp4_abi()) != ABI:
            raise ValueError(f"its interface has version {abi}, this package speaks version {ABI}; build it again")
        c.peft_nvfp4_gemm.argtypes = c.peft_nvfp4_workspace.argtypes = [ctypes.POINTER(Arguments)]
        c.peft_nvfp4_gemm.restype, c.peft_nvfp4_workspace.restype = c_int, c_int64
        c.peft_nvfp4_error.argtypes = c.peft_nvfp4_describe.argtypes = [c_int]
        c.peft_nvfp4_error.restype = c.peft_nvfp4_describe.restype = c.peft_nvfp4_build_info.restype = c_char_p
        self.info = dict(item.split("=", 1) for item in c.peft_nvfp4_build_info().decode().split())
        self.archs: list[str] = self.info["archs"].split(",")
        self.instances: dict[tuple[str, str, str], int] = {}
        self.tiles: list[Tile] = []
        while text := c.peft_nvfp4_describe(len(self.instances)):
            _, m, n, k, schedule, added, out, _, _ = text.decode().split()
            tile = Tile(int(m), int(n), int(k), schedule)
            self.tiles += [] if tile in self.tiles else [tile]
            self.instances[tile.name, added, out] = len(self.instances)

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"peft_nvfp4 extension: {self._c.peft_nvfp4_error(code).decode()} (code {code})")

    def workspace_bytes(self, arguments: Arguments) -> int:
        size = self._c.peft_nvfp4_workspace(ctypes.byref(arguments))
        self.check(max(0, -size))
        return size

    def gemm(self, arguments: Arguments) -> None:
        self.check(self._c.peft_nvfp4_gemm(ctypes.byref(arguments)))


@cache
def _open(path: Path) -> Library:
    if not path.is_file():
        build = "see 'make build-ext', or csrc/build.py for what it needs"
        how = f"{VARIABLE} names no file" if os.environ.get(VARIABLE) else build
        raise Unavailable(f"not built: {path} does not exist ({how})")
    try:
        return Library(path)
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}", broken=True) from error
    except AttributeError as error:
        raise Unavailable(f"{path} is not the extension, or another version of it: {error}", broken=True) from error
    except (ValueError, KeyError) as error:
        raise Unavailable(f"{path} does not fit: {error}", broken=True) from error


def _path() -> Path:
    """The library's file, absolute: where :data:`VARIABLE` says, else in the package. No search path is asked."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else _installed(__file__)


@cache
def _installed(module: str) -> Path:
    return Path(module).resolve().parents[2] / FILE


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for a target (``12.0a``; ``12.0f``: of a family) runs on a GPU."""
    major, minor = map(int, arch[:-1].split("."))
    return (major, minor) == capability if arch.endswith("a") else major == capability[0] and minor <= capability[1]


def load() -> Library:
    """The library; raises :class:`Unavailable` where it is not built, broken, of another version, or for other GPUs than the
    current one. (That it also works is another question: :mod:`check`.)"""
    library = _open(_path())
    if not torch.cuda.is_available() or any(runs_on(arch, torch.cuda.get_device_capability()) for arch in library.archs):
        return library
    name, archs = torch.cuda.get_device_name(), ", ".join(library.archs)
    raise Unavailable(f"not built for this GPU: {library.path} holds code for {archs}, which {name} cannot run")


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
    constants: Sequence[Tensor | None],
    adds: Sequence[Tensor | None],
    low_ranks: Sequence[LowRank | None] | None = None,
    outs: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
    sm_count: int = 0,
) -> list[Tensor]:
    """The implementation's products; see :mod:`native` for the arguments. Weights with and those without something to add are a
    launch each, of at most four.

    Args:
        constants: FP32 or BF16.
        dtype: bfloat16 or float32.
        tile: overrides the choice of :mod:`tiles`.
        sm_count: multiprocessors to fill, all by default. With few of them each computes many tiles.

    Raises:
        Unavailable: there is no extension.
        RuntimeError: it refuses.
        ValueError: it has no instance of the tile, or of the types.
    """
    outs = outs or [None] * len(weights)
    low_ranks, adds = _split(low_ranks or [None] * len(weights), adds, dtype)
    library, codes = _open(_path()), terms[0].codes
    ys = [
        out if out is not None and _aligned(out) else _empty(codes.shape[0], w.codes.shape[0], codes, dtype)
        for w, out in zip(weights, outs)
    ]
    with torch.cuda.device(codes.device):
        for with_c in (False, True):
            chosen = [i for i in range(len(weights)) if (adds[i] is not None) == with_c]
            for at in range(0, len(chosen), PARTS):
                parts = [_Product(weights[i], constants[i], adds[i], low_ranks[i], ys[i]) for i in chosen[at : at + PARTS]]
                _launch(library, terms, parts, dtype, tile, sm_count)
    # without an out a copy only where N is no multiple of 16 bytes
    return [y.contiguous() if out is None else y if y is out else out.copy_(y) for y, out in zip(ys, outs)]


class _Product(NamedTuple):
    """One part of a launch."""

    weight: QuantizedMatrix
    constant: Tensor | None
    add: Tensor | None
    low_rank: LowRank | None
    y: Tensor


def _split(low_ranks: Sequence, adds: Sequence, dtype: torch.dtype) -> tuple[list[LowRank | None], list[Tensor | None]]:
    """Low-rank products that a launch computes itself, and what is added. An addend leaves the low-rank product to be made
    before: one matrix is read by the epilogue either way."""
    inside = [None if p is None or a is not None or p.up.shape[1] > LARGEST_RANK else p for p, a in zip(low_ranks, adds)]
    before = [None if p is q else p for p, q in zip(low_ranks, inside)]
    return inside, native.with_products(adds, before, dtype)


def _launch(
    library: Library,
    terms: Sequence[QuantizedMatrix],
    parts: Sequence[_Product],
    dtype: torch.dtype,
    tile: Tile | None,
    sm_count: int,
) -> None:
    codes = terms[0].codes
    m, kp = codes.shape[0], codes.shape[1] * 2
    with_c = parts[0].add is not None
    sms, gpu = _properties(codes.device.index)
    types = (DTYPES[dtype] if with_c else "none", DTYPES[dtype])
    if tile is None:
        rank = max(0 if p.low_rank is None else p.low_rank.up.shape[1] for p in parts)
        problem = Problem(m, tuple(p.weight.codes.shape[0] for p in parts), kp, len(terms), with_c, DTYPES[dtype], rank)
        file = tile_table.cache_file(gpu, library.info["source"])
        tile = tile_table.choose_once(problem, _built(library, *types), sms, file)
    name = (tile.name, *types)
    if name not in library.instances:
        raise ValueError(f"gemm: the extension has no instance {'_'.join(name)}; it has {sorted(library.instances)}")
    arguments = Arguments(
        version=ABI, instance=library.instances[name], terms=len(terms), parts=len(parts), m=m, k=kp, sm_count=sm_count or sms
    )
    for i, x in enumerate(terms):
        arguments.x_codes[i], arguments.x_scales[i] = x.codes.data_ptr(), x.scales.data_ptr()
    arguments.x_scales_swizzled = int(terms[0].scales.ndim == 1)
    arguments.x_gscale, arguments.x_gscale_rows = terms[0].gscale.data_ptr(), terms[0].gscale.numel()
    # the rounded-up copies made here live until the launch is queued: their memory is reused in the order of the stream
    copies = [_describe(part, product) for part, product in zip(arguments.part, parts)]
    workspace = torch.empty(library.workspace_bytes(arguments), dtype=torch.uint8, device=codes.device)
    arguments.workspace, arguments.workspace_bytes = workspace.data_ptr(), workspace.numel()
    arguments.stream = torch.cuda.current_stream(codes.device).cuda_stream
    library.gemm(arguments)
    del copies


def _describe(part: _Part, product: _Product) -> list[Tensor]:
    """Fills in a part; returns copies that must outlive the launch."""
    weight, constant, add, low_rank, y = product
    part.n, part.codes, part.scales = weight.codes.shape[0], weight.codes.data_ptr(), weight.scales.data_ptr()
    part.scales_swizzled = int(weight.scales.ndim == 1)
    part.gscale, part.d, part.ldd = weight.gscale.data_ptr(), y.data_ptr(), y.stride(0)
    copies = []
    if add is not None:
        if not _aligned(add):
            copies.append(add := _empty(*add.shape, add, y.dtype).copy_(add))
        part.c, part.ldc = add.data_ptr(), add.stride(0)
    if low_rank is not None:
        hidden, up = low_rank.hidden, low_rank.up
        if hidden.stride(1) != 1:
            copies.append(hidden := hidden.contiguous())
        if up.stride(1) != 1 or not _aligned(up):
            copies.append(up := _empty(*up.shape, up, up.dtype).copy_(up))
        part.h, part.ldh, part.up, part.ldup, part.rank = (
            hidden.data_ptr(),
            hidden.stride(0),
            up.data_ptr(),
            up.stride(0),
            up.shape[1],
        )
    if constant is not None:
        part.bias, part.bias_is_bf16 = constant.data_ptr(), int(constant.dtype == torch.bfloat16)
    return copies


@cache
def _properties(device: int) -> tuple[int, str]:
    """(multiprocessors, name) of a GPU; asked at every launch."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.name


@cache
def _built(library: Library, c: str, d: str) -> tuple[Tile, ...]:
    """Tiles of a library with these types."""
    built = tuple(tile for tile in library.tiles if (tile.name, c, d) in library.instances)
    if not built:
        names = ", ".join("_".join(name) for name in library.instances)
        raise ValueError(f"gemm: {library.path} was built without instances for c={c}, d={d}; it has {names}")
    return built
