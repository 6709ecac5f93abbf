"""The ways to compute the two products of a training step (fprop, dgrad) on a GPU, and the choice between them.

    cutlass     FP4 tensor cores, the package's own extension (:mod:`cutlass`)
    scaled_mm   FP4 tensor cores, cuBLASLt through PyTorch (:mod:`scaled_mm`)
    emulated    BF16 tensor cores on dequantised operands (:mod:`emulated`)
    reference   plain PyTorch (:mod:`..numerics.reference`)

All compute the same function, up to the order of FP32 sums. The first that works is taken, once per device, at the first
product. An FP4 implementation works if it passes :mod:`check` on that device; no capability number is asked. What is skipped, and
why, is part of :class:`Choice` and shown by ``kernels.status()``. An implementation that is there but broken (an extension that
cannot be loaded, wrong results) is also said in one warning. One that was asked for by name and does not work raises.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..numerics import reference
from ..numerics.products import Dgrad, Fprop
from .fp4 import check, cutlass, native, scaled_mm

NAMES = ("cutlass", "scaled_mm", "emulated", "reference")
"""Best first."""


class Unavailable(Exception):
    """An implementation is not there. ``broken``: something is there, but does not work as it should, which the user is told."""

    def __init__(self, reason: str, broken: bool = False):
        super().__init__(reason)
        self.broken = broken


@dataclass(frozen=True)
class Choice:
    """What runs on a device.

    Attributes:
        implementation: one of :data:`NAMES`.
        note: what to know about it.
        skipped: implementation that would have been better, or was not wanted -> why it does not run.
    """

    implementation: str
    note: str
    fprop: Callable
    dgrad: Callable
    skipped: dict[str, str]


# ---------------------------------------------------------------------------------------------- the implementations


def _cutlass() -> native.Gemms:
    library, reason = cutlass.load()
    if library is None:
        raise Unavailable(reason, broken=not reason.startswith("not built"))
    return cutlass.gemms


def _scaled_mm() -> native.Gemms:
    gemms, reason = scaled_mm.load()
    if gemms is None:
        raise Unavailable(reason)
    return gemms


NATIVE: dict[str, Callable[[], native.Gemms]] = {"cutlass": _cutlass, "scaled_mm": _scaled_mm}
"""FP4 implementation -> its products; raises :class:`Unavailable`."""
ANYWHERE = ("scaled_mm",)
"""Implementations that are part of PyTorch, so there on GPUs of every kind: that they cannot run is nothing to warn about."""


def _emulated(triton_obstacle: str) -> tuple[Callable, Callable, str]:
    if triton_obstacle:
        raise Unavailable(triton_obstacle)
    emulated = importlib.import_module(f"{__package__}.emulated")
    return emulated.fprop, emulated.dgrad, "dequantise, then the BF16 GEMM of PyTorch: exact products"


def _reference() -> tuple[Callable, Callable, str]:
    return reference.fprop, reference.dgrad, "plain PyTorch"


def first_line(error: BaseException) -> str:
    """What an exception says, in one line that fits a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def working_gemms(name: str, device: torch.device) -> native.Gemms:
    """The products of an FP4 implementation, if they pass the check on a device.

    Raises:
        Unavailable: with what it did wrong.
        RuntimeError: the attempt has left the GPU unusable for this process.
    """
    gemms = NATIVE[name]()
    try:
        failures = check.failures(native.single(gemms), device)
    except Exception as error:  # a library on a GPU that it was not made for may raise anything: said, never hidden
        _check_alive(name, device, error)
        raise Unavailable(f"cannot run on this device ({first_line(error)})", broken=name not in ANYWHERE) from error
    if failures:
        more = f" (and {len(failures) - 1} more: peft-nvfp4 doctor lists them)" if len(failures) > 1 else ""
        raise Unavailable(failures[0] + more, broken=True)
    return gemms


def _check_alive(name: str, device: torch.device, error: Exception) -> None:
    """Some errors of a kernel end every further use of the GPU by this process."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise RuntimeError(
            f"the '{name}' kernels do not work on {torch.cuda.get_device_name(device)} and have left it unusable for this "
            f"process ({first_line(error)}). Start again with PEFT_NVFP4_KERNELS=emulated, and please report this."
        ) from lost


def _with_fallback(gemms: native.Gemms, triton_obstacle: str) -> tuple[Callable, Callable, int]:
    """fprop and dgrad on FP4 tensor cores where they compute the product, else what would have run without; and up to how many
    rows fprop never does: few rows are bound by the weight's bytes, not by tensor cores, and the Triton product decodes in its
    loop."""
    fprop, dgrad, _ = _reference() if triton_obstacle else _emulated("")
    small = 0 if triton_obstacle else importlib.import_module(f"{__package__}.emulated").SMALL_ROWS

    def native_fprop(p: Fprop):
        takes = p.terms[0].codes.shape[0] > small and native.takes_fprop(p)
        return native.fprop(gemms, p) if takes else fprop(p)

    def native_dgrad(p: Dgrad):
        return native.dgrad(gemms, p) if native.takes_dgrad(p) else dgrad(p)

    return native_fprop, native_dgrad, small


def _try(name: str, device: torch.device, triton_obstacle: str) -> tuple[Callable, Callable, str]:
    if name in NATIVE:
        fprop, dgrad, small = _with_fallback(working_gemms(name, device), triton_obstacle)
        few = f"; fprop of up to {small} rows: the Triton product" if small else ""
        return fprop, dgrad, "FP4 tensor cores" + few
    return _emulated(triton_obstacle) if name == "emulated" else _reference()


# ---------------------------------------------------------------------------------------------- the choice

_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


def choose(device: torch.device, forced: str, triton_obstacle: str) -> Choice:
    """The implementation for a device.

    Args:
        forced: a name, or "" for the best that works.
        triton_obstacle: why the Triton kernels cannot run, empty if they can.

    Raises:
        RuntimeError: the forced implementation does not work.
    """
    skipped: dict[str, str] = {}
    for name in [forced] if forced else NAMES:
        try:
            fprop, dgrad, note = _try(name, device, triton_obstacle)
        except Unavailable as error:
            if forced:
                raise RuntimeError(
                    f"PEFT_NVFP4_KERNELS={forced} cannot run: {error}. Unset PEFT_NVFP4_KERNELS to take the best that works, or "
                    "see what is wrong with: peft-nvfp4 doctor"
                ) from error
            skipped[name] = str(error)
            if error.broken:
                _warn_once(f"peft_nvfp4 does not use its '{name}' kernels, which do not work here: {error}")
            continue
        others = {} if not forced else {other: f"PEFT_NVFP4_KERNELS={forced}" for other in NAMES if other != forced}
        return Choice(name, note, fprop, dgrad, skipped or others)
    raise AssertionError("the reference always works")
