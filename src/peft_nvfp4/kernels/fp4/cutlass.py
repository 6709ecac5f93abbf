"""The FP4 GEMMs of the compiled extension for RTX 50xx (SM120): loading the library, and :func:`gemms` for operands as the
package stores them, with the semantics of :mod:`native`.

Why ctypes and plain C symbols. The library takes addresses, sizes, a stream and a workspace (``csrc/abi.h``). So one binary
serves every Python and every torch version; it needs no torch to be built, cannot break with torch's C++ ABI, and is loaded when
it is first wanted, where failing to load is an answer and not an ImportError. The price is a few microseconds of ctypes a call.
Rejected: torch's stable ABI, which exists in parts only in the oldest torch supported here.

:func:`load` looks in the package's folder, where setup.py puts the library, or at ``PEFT_NVFP4_EXTENSION``. Block scales are
rearranged at every call (by the library, into the workspace). The weights of one input are one launch: see
``csrc/collectives.cuh`` for how, and :mod:`tiles`, which chooses the tile of a launch, for why.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...numerics.formats import QuantizedMatrix
from . import tiles as tile_table
from .native import Unavailable
from .tiles import Problem, Tile

VARIABLE = "PEFT_NVFP4_EXTENSION"
FILE = "_sm120.dll" if os.name == "nt" else "_sm120.so"
ABI = 1
TERMS, PARTS = 2, 4
DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class _Part(ctypes.Structure):
    """``peft_nvfp4_part`` of abi.h."""

    _fields_ = [
        ("n", c_int64),
        *((name, c_void_p) for name in ("codes", "scales", "gscale", "bias", "c", "d")),
        *(("ldc", c_int64), ("ldd", c_int64), ("bias_is_bf16", c_int32), ("reserved", c_int32)),
    ]


class Arguments(ctypes.Structure):
    """``peft_nvfp4_gemm_args`` of abi.h."""

    _fields_ = [
        *(("version", c_uint32), ("instance", c_int32), ("terms", c_int32), ("parts", c_int32), ("m", c_int64), ("k", c_int64)),
        *(("x_codes", c_void_p * TERMS), ("x_scales", c_void_p * TERMS), ("x_gscale", c_void_p), ("x_gscale_rows", c_int64)),
        ("part", _Part * PARTS),
        *(("workspace", c_void_p), ("workspace_bytes", c_int64), ("stream", c_void_p), ("sm_count", c_int32)),
        ("reserved", c_int32),
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
    return Path(os.environ.get(VARIABLE) or Path(__file__).resolve().parents[2] / FILE)


def load() -> Library:
    """The library; raises :class:`Unavailable` where it is not built, broken, of another version, or for other GPUs. (That it
    also works is another question: :mod:`check`.)"""
    library = _open(_path())
    if not torch.cuda.is_available():
        return library
    devices = range(torch.cuda.device_count())
    capabilities = ["{}.{}".format(*torch.cuda.get_device_capability(i)) for i in devices]
    if any(arch.rstrip("af") in capabilities for arch in library.archs):
        return library
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in devices}))
    archs = ", ".join(library.archs)
    raise Unavailable(f"not built for this machine: {library.path} holds code for {archs}, which {names} cannot run")


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
    outs: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> list[Tensor]:
    """The implementation's products; see :mod:`native` for the arguments. Weights with and those without something to add are a
    launch each, of at most four.

    Args:
        constants: FP32 or BF16.
        dtype: bfloat16 or float32.
        tile: overrides the choice of :mod:`tiles`.

    Raises:
        Unavailable: there is no extension.
        RuntimeError: it refuses.
        ValueError: it has no instance of the tile, or of the types.
    """
    outs = outs or [None] * len(weights)
    library, codes = load(), terms[0].codes
    ys = [
        out if out is not None and _aligned(out) else _empty(codes.shape[0], w.codes.shape[0], codes, dtype)
        for w, out in zip(weights, outs)
    ]
    with torch.cuda.device(codes.device):
        for with_c in (False, True):
            chosen = [i for i in range(len(weights)) if (adds[i] is not None) == with_c]
            for at in range(0, len(chosen), PARTS):
                parts = [(weights[i], constants[i], adds[i], ys[i]) for i in chosen[at : at + PARTS]]
                _launch(library, terms, parts, dtype, tile)
    # without an out a copy only where N is no multiple of 16 bytes
    return [y.contiguous() if out is None else y if y is out else out.copy_(y) for y, out in zip(ys, outs)]


def _launch(library: Library, terms: Sequence[QuantizedMatrix], parts: Sequence[tuple], dtype: torch.dtype, tile) -> None:
    codes = terms[0].codes
    m, kp = codes.shape[0], codes.shape[1] * 2
    with_c = parts[0][2] is not None
    sms = torch.cuda.get_device_properties(codes.device).multi_processor_count
    types = (DTYPES[dtype] if with_c else "none", DTYPES[dtype])
    if tile is None:
        problem = Problem(m, tuple(w.codes.shape[0] for w, *_ in parts), kp, len(terms), with_c, DTYPES[dtype])
        file = tile_table.cache_file(torch.cuda.get_device_name(), library.info["source"])
        tile = tile_table.choose_once(problem, _built(library, *types), sms, file)
    name = (tile.name, *types)
    if name not in library.instances:
        raise ValueError(f"gemm: the extension has no instance {'_'.join(name)}; it has {sorted(library.instances)}")
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
    for part, (w, constant, _, y), add in zip(arguments.part, parts, adds):
        part.n, part.codes, part.scales = w.codes.shape[0], w.codes.data_ptr(), w.scales.data_ptr()
        part.gscale, part.d, part.ldd = w.gscale.data_ptr(), y.data_ptr(), y.stride(0)
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
    if not built:
        names = ", ".join("_".join(name) for name in library.instances)
        raise ValueError(f"gemm: {library.path} was built without instances for c={c}, d={d}; it has {names}")
    return built
