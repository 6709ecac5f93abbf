"""The compiled library with the FP4 GEMMs for RTX 50xx (SM120): finding it, and its C interface.

Why ctypes and plain C symbols. The library knows nothing of Python or torch: it takes addresses, sizes, a stream and a
workspace (``csrc/abi.h``). So one binary serves every Python and every torch version; it needs no torch to be built, cannot
break with torch's C++ ABI, and is loaded when it is first wanted, where failing to load is an answer and not an ImportError.
torch's stable ABI was the other way; it exists in parts only in the oldest torch supported here, and would move argument
checks and operator schemas, which the package keeps in one place in Python, into the binary. The price is a few microseconds
of ctypes a call.

:func:`load` never raises: it returns the library, or why there is none. It looks in the package's folder, where setup.py puts
it, or at ``PEFT_NVFP4_EXTENSION``.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path

import torch

from .tiles import Tile

VARIABLE = "PEFT_NVFP4_EXTENSION"
FILE = "_sm120.dll" if os.name == "nt" else "_sm120.so"
ABI = 1
TERMS, PARTS = 2, 4


class _Part(ctypes.Structure):
    """``peft_nvfp4_part`` of abi.h."""

    _fields_ = [
        ("n", c_int64),
        *((name, c_void_p) for name in ("codes", "scales", "gscale", "bias", "c", "d")),
        ("ldc", c_int64),
        ("ldd", c_int64),
        ("bias_is_bf16", c_int32),
        ("reserved", c_int32),
    ]


class Arguments(ctypes.Structure):
    """``peft_nvfp4_gemm_args`` of abi.h."""

    _fields_ = [
        ("version", c_uint32),
        ("instance", c_int32),
        ("terms", c_int32),
        ("parts", c_int32),
        ("m", c_int64),
        ("k", c_int64),
        ("x_codes", c_void_p * TERMS),
        ("x_scales", c_void_p * TERMS),
        ("x_gscale", c_void_p),
        ("x_gscale_rows", c_int64),
        ("part", _Part * PARTS),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("stream", c_void_p),
        ("sm_count", c_int32),
        ("reserved", c_int32),
    ]


class Library:
    """A loaded library.

    Attributes:
        path: the file.
        info: what it was built from and for: ``archs``, ``emulated``, ``cutlass``, ``nvcc``, ``source``.
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
        self.instances: dict[tuple[str, str, str], int] = {}
        self.tiles: list[Tile] = []
        while text := c.peft_nvfp4_describe(len(self.instances)):
            _, m, n, k, schedule, added, out, _, _ = text.decode().split()
            tile = Tile(int(m), int(n), int(k), schedule)
            self.tiles += [] if tile in self.tiles else [tile]
            self.instances[tile.name, added, out] = len(self.instances)

    @property
    def archs(self) -> list[str]:
        """GPUs it was built for, as in ``12.0a``."""
        return self.info["archs"].split(",")

    def error(self, code: int) -> str:
        return self._c.peft_nvfp4_error(code).decode()

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"peft_nvfp4 extension: {self.error(code)} (code {code})")

    def workspace_bytes(self, arguments: Arguments) -> int:
        size = self._c.peft_nvfp4_workspace(ctypes.byref(arguments))
        self.check(max(0, -size))
        return size

    def gemm(self, arguments: Arguments) -> None:
        self.check(self._c.peft_nvfp4_gemm(ctypes.byref(arguments)))


# ---------------------------------------------------------------------------------------------- loading


def _path() -> Path:
    return Path(os.environ.get(VARIABLE) or Path(__file__).resolve().parents[2] / FILE)


@cache
def _open(path: Path) -> tuple[Library | None, str]:
    """A library, or why it is none."""
    if not path.is_file():
        how = (
            f"{VARIABLE} names no file"
            if os.environ.get(VARIABLE)
            else "see 'make build-ext', or csrc/build.py for what it needs"
        )
        return None, f"not built: {path} does not exist ({how})"
    try:
        return Library(path), ""
    except OSError as error:
        return None, f"{path} cannot be loaded: {error}"
    except AttributeError as error:
        return None, f"{path} is not the extension, or another version of it: {error}"
    except (ValueError, KeyError) as error:
        return None, f"{path} does not fit: {error}"


def _made_for_this_machine(library: Library) -> bool:
    """Whether the library holds code for one of the GPUs here. (That it also works is another question: :mod:`probe`.)"""
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return any(f"{major}.{minor}" == arch.rstrip("af") for major, minor in capabilities for arch in library.archs)


def load() -> tuple[Library | None, str]:
    """``(library, "")``, or ``(None, why)``: not built, broken, of another version, or for other GPUs. Never raises."""
    library, reason = _open(_path())
    if library is not None and torch.cuda.is_available() and not _made_for_this_machine(library):
        names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}))
        return (
            None,
            f"not built for this machine: {library.path} holds code for {', '.join(library.archs)}, which {names} cannot run",
        )
    return library, reason
