"""The ways to compute the two products of a training step (fprop, dgrad) on a GPU, and the choice between them.

    cutlass     FP4 tensor cores, the package's own extension (:mod:`cutlass`)
    scaled_mm   FP4 tensor cores, cuBLASLt through PyTorch (:mod:`scaled_mm`)
    bf16        BF16 tensor cores on dequantised operands, an input of two terms rounded to BF16 (:mod:`emulated`)
    emulated    the same without that rounding: what FP4 tensor cores compute, in up to twice the time
    reference   plain PyTorch (:mod:`..numerics.reference`)

The first that works is taken, once per device, at the first product. An FP4 implementation works if it passes :mod:`check` on
that device; no capability number is asked. What is skipped, and why, is shown by ``kernels.status()``. An implementation that is
there but broken (an extension that cannot be loaded, wrong results) is also said in one warning. One that was asked for by name
and does not work raises.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import ops
from ..numerics import reference
from ..numerics.products import Dgrad, Fprop
from .fp4 import check, cutlass, native, scaled_mm
from .fp4.native import Unavailable

NAMES = ("cutlass", "scaled_mm", "bf16", "emulated", "reference")
"""Best first."""


@dataclass(frozen=True)
class Choice:
    """What runs on a device."""

    implementation: str  # one of NAMES
    note: str  # what to know about it
    fprop: Callable
    dgrad: Callable
    skipped: dict[str, str]  # implementation that would have been better, or was not wanted -> why it does not run


NATIVE: dict[str, Callable[[], native.Gemms]] = {
    "cutlass": lambda: cutlass.load() and cutlass.gemms,
    "scaled_mm": lambda: scaled_mm.gemms,
}
"""FP4 implementation -> its products; raises :class:`Unavailable`. Each takes block scales in tiles as well, as one dimension."""
ANYWHERE = ("scaled_mm",)
"""Implementations that are part of PyTorch, so there on GPUs of every kind: that they cannot run is nothing to warn about."""


def first_line(error: BaseException) -> str:
    """What an exception says, in one line that fits a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def working_gemms(name: str, device: torch.device) -> native.Gemms:
    """The products of an FP4 implementation, if they pass the check on a device. Raises :class:`Unavailable` with what it did
    wrong, or RuntimeError where the attempt has left the GPU unusable for this process."""
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


def _try(name: str, device: torch.device, triton_obstacle: str) -> tuple[Callable, Callable, str]:
    """fprop, dgrad and what to know about them. FP4 tensor cores compute what they take, and what would have run without them the
    rest: few rows among it, which are bound by the weight's bytes, and which the Triton product decodes in its loop."""
    if name == "reference":
        return reference.fprop, reference.dgrad, "plain PyTorch"
    emulated = None if triton_obstacle else importlib.import_module(f"{__package__}.emulated")
    if name == "emulated":
        if emulated is None:
            raise Unavailable(triton_obstacle)
        return emulated.fprop, emulated.dgrad, "dequantise, then the BF16 GEMM of PyTorch: exact products"
    if name == "bf16":
        if emulated is None:
            raise Unavailable(triton_obstacle)
        note = "dequantise, then one BF16 GEMM of PyTorch; PEFT_NVFP4_KERNELS=emulated multiplies both terms of an input"
        return emulated.fprop_of_rounded_inputs, emulated.dgrad, note
    gemms, others = working_gemms(name, device), emulated or reference
    small = emulated.SMALL_ROWS if emulated else 0
    quantize = ops.quantize if triton_obstacle else importlib.import_module(f"{__package__}.triton.quantize").quantize_for_gemm

    def fprop(p: Fprop):
        takes = p.terms[0].codes.shape[0] > small and native.takes_fprop(p)
        return native.fprop(gemms, p) if takes else others.fprop(p)

    def dgrad(p: Dgrad):
        return native.dgrad(gemms, p, quantize) if native.takes_dgrad(p) else others.dgrad(p)

    return fprop, dgrad, "FP4 tensor cores" + (f"; fprop of up to {small} rows: the Triton product" if small else "")


_warned: set[str] = set()


def choose(device: torch.device, forced: str, triton_obstacle: str) -> Choice:
    """The implementation for a device.

    Args:
        forced: a name, or "" for the best that works; one that does not work raises RuntimeError.
        triton_obstacle: why the Triton kernels cannot run, empty if they can.
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
            message = f"peft_nvfp4 does not use its '{name}' kernels, which do not work here: {error}"
            if error.broken and message not in _warned:
                _warned.add(message)
                warnings.warn(message, stacklevel=3)
            continue
        others = {} if not forced else {other: f"PEFT_NVFP4_KERNELS={forced}" for other in NAMES if other != forced}
        return Choice(name, note, fprop, dgrad, skipped or others)
    raise AssertionError("the reference always works")
