"""Which implementation of an operator runs, and why: the one place of the package that looks at hardware.

:func:`load` gives every operator that has a kernel an implementation for CUDA tensors. That is a table entry: Triton is
imported and the GPU asked at the first call with a CUDA tensor, so importing the package is as fast, and as safe, without either.
The two products of a training step have several (:mod:`tiers`): the best one that works is found out on the device, at the first
call. :func:`status` says per operator what runs and, where it is not the best there is, why. All compute the same bits (of a
matrix product, up to the order of its sum).

The environment variable ``PEFT_NVFP4_KERNELS``, read by :func:`load`, forces a choice: ``cutlass``, ``scaled_mm`` or
``emulated`` that tier of the two products (the first product on a GPU raises if it does not work there), ``reference`` plain
PyTorch for everything.

>>> print(kernels.status())
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from .. import ops
from ..ops import fused
from . import tiers

VARIABLE = "PEFT_NVFP4_KERNELS"
CAPABILITY = (8, 0)
"""Oldest GPU the kernels are written for (BF16 and FP16 pair arithmetic)."""
WIDEST_ROW = 32768
"""Kernels that hold a row in one program leave wider rows to the reference."""


@dataclass(frozen=True)
class Kernel:
    """A Triton implementation: ``function`` of ``peft_nvfp4.kernels.triton.<module>``, for arguments that ``check`` accepts.
    ``whole_row``: its first argument is a matrix whose rows must fit in one program. ``note``: what else :func:`status` says."""

    module: str
    function: str
    check: Callable
    reference: Callable
    whole_row: bool = False
    note: str = ""


def _fused(module: str, function: str, whole_row: bool = True) -> Kernel:
    return Kernel(module, function, *fused.OPERATORS[function], whole_row)


KERNELS = {
    "quantize": Kernel("quantize", "quantize", ops._check_quantize, ops._quantize),
    "quantize_terms": _fused("quantize", "quantize_terms"),
    "dequantize": Kernel("dequantize", "dequantize", ops._check_dequantize, ops._dequantize),
    "dequantize_terms": _fused("dequantize", "dequantize_terms", whole_row=False),
    "transpose_requantize": Kernel(
        "transpose",
        "transpose_requantize",
        lambda codes, scales, gscale, k, *rest: ops._check_packed("transpose_requantize", codes, scales, gscale, k),
        ops._transpose_requantize,
    ),
    "rmsnorm_quantize": _fused("norm", "rmsnorm_quantize"),
    "rmsnorm_backward": _fused("norm", "rmsnorm_backward"),
    "silu_mul_quantize": _fused("mlp", "silu_mul_quantize"),
    "silu_mul_backward": _fused("mlp", "silu_mul_backward"),
    "gated_values": _fused("mlp", "gated_values", whole_row=False),
    "dropout": _fused("random", "dropout", whole_row=False),
    "rotary_embedding": _fused("rope", "rotary_embedding", whole_row=False),
    "matmul": Kernel(
        "matmul", "matmul", ops._check_matmul, ops._matmul, note="few rows; many: dequantise, then the BF16 GEMM of PyTorch"
    ),
}

PRODUCTS = ("fprop", "dgrad")
"""The products of a training step, which have tiers."""

PLAIN = {"swizzle_scales": "no kernel, one copy"}
"""Operators that are plain PyTorch everywhere, and why."""

_loaded: str | None = None  # None before load(), then "" or the reason why no Triton kernel was registered
_forced = ""  # a name of tiers.NAMES
_choices: dict[torch.device, tiers.Choice] = {}


# ---------------------------------------------------------------------------------------------- choosing


@cache
def _obstacle() -> str:
    """Why the Triton kernels cannot run on this machine's GPU; empty if they can. Imports Triton and asks the driver."""
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        return f"needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, this GPU has {capability[0]}.{capability[1]}"
    try:
        importlib.import_module(f"{__name__}.triton.blocks")
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return ""


@cache
def implementation(name: str) -> Callable:
    """The Triton implementation of an operator with its argument check, whether or not this machine can run it."""
    kernel = KERNELS[name]
    function = getattr(importlib.import_module(f"{__name__}.triton.{kernel.module}"), kernel.function)

    def run(*args):
        kernel.check(*args)
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        if kernel.whole_row and not 0 < first.shape[1] <= WIDEST_ROW:
            return kernel.reference(*args)
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):  # Triton launches on the current device, wherever its arguments live
                return function(*args)
        return function(*args)

    return run


def _on_cuda(name: str) -> Callable:
    """What is registered for CUDA tensors: decides at the first call."""

    def call(*args):
        return (KERNELS[name].reference if _obstacle() else implementation(name))(*args)

    return call


def choice(device: torch.device) -> tiers.Choice:
    """What computes the two products on a CUDA device. The first call for a device tries the tiers, which synchronises with it.

    Raises:
        RuntimeError: the tier that ``PEFT_NVFP4_KERNELS`` names does not work here.
    """
    found = _choices.get(device)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the kernels for {device} are chosen by trying them, which a CUDA graph cannot record: run a forward pass, or "
                "call peft_nvfp4.kernels.status(), before the capture"
            )
        with torch.cuda.device(device):
            found = _choices[device] = tiers.choose(device, _forced, _obstacle())
    return found


def _product(name: str) -> Callable:
    """What is registered for the products of a training step: decides at the first call."""

    def call(*args):
        device = args[0][0].device
        function = getattr(choice(device), name)
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # kernels are launched on the current device, wherever their arguments live
                return function(*args)
        return function(*args)

    return call


def generation(x: torch.Tensor):
    """The module whose ``linear`` computes frozen linears of x (M, K) with their adapters, without autograd; None if it cannot:
    it takes few BF16 rows, on a GPU that runs the Triton kernels."""
    if torch.is_grad_enabled() or not x.is_cuda or x.dtype != torch.bfloat16 or torch.compiler.is_compiling():
        return None
    if _loaded != "" or _obstacle():
        return None
    module = _matmul_module()
    return module if 0 < x.shape[0] <= module.ROWS else None


@cache
def _matmul_module():
    return importlib.import_module(f"{__name__}.triton.matmul")


def load() -> None:
    """Give the operators their CUDA implementations. Called when the package is imported; a second call does nothing.

    Raises:
        ValueError: ``PEFT_NVFP4_KERNELS`` has an unknown value.
    """
    global _loaded, _forced
    if _loaded is not None:
        return
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked not in ("", "auto", *tiers.NAMES):
        raise ValueError(f"{VARIABLE}={asked!r}: choose 'auto' (or unset it) or one of {', '.join(map(repr, tiers.NAMES))}")
    _forced = "" if asked == "auto" else asked
    if asked == "reference":
        _loaded = f"{VARIABLE}=reference"
        return
    for name in PRODUCTS:
        ops.register_kernel(name, "cuda", _product(name))
    if importlib.util.find_spec("triton") is None:
        _loaded = "Triton is not installed (pip install triton)"
        return
    _loaded = ""
    for name in KERNELS:
        ops.register_kernel(name, "cuda", _on_cuda(name))


# ---------------------------------------------------------------------------------------------- reporting


@dataclass(frozen=True)
class OperatorStatus:
    """One line of :func:`status`."""

    operator: str
    implementation: str  # "triton", a tier (tiers.NAMES), or "none" where the one that was asked for does not work
    device: str
    note: str  # why not a kernel, or its limits


@dataclass(frozen=True)
class Status:
    """What runs where. Prints as a table.

    Attributes:
        skipped: tier of the two products that does not run -> why.
    """

    operators: tuple[OperatorStatus, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("operator", "implementation", "device", "note")]
        rows += [(o.operator, o.implementation, o.device, o.note) for o in self.operators]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]).rstrip() for row in rows]
        return "\n".join(lines + [f"{tier} is not used: {reason}" for tier, reason in self.skipped.items()])


def _products_status(reason: str, device: str) -> tuple[list[OperatorStatus], dict[str, str]]:
    """Lines of the two products and the tiers that were skipped; a reason: why nothing but the reference can run."""
    if not reason and torch.compiler.is_compiling():
        reason = "the compiler is tracing: not tried"
    skipped: dict[str, str] = {}
    if reason:
        name, note = "reference", reason
    else:
        try:
            found = choice(torch.device("cuda", torch.cuda.current_device()))
            name, note, skipped = found.tier, found.note, found.skipped
        except RuntimeError as error:
            name, note = "none", str(error)
    return [OperatorStatus(operator, name, device, note) for operator in PRODUCTS], skipped


def status() -> Status:
    """Implementation of every operator on this machine. With a GPU: asks the driver, imports Triton and tries the tiers."""
    if not torch.cuda.is_available():
        device, reason, alone = "cpu", "no CUDA device", "no CUDA device"
        if _forced in tiers.NAMES[:3]:
            alone += f", so {VARIABLE}={_forced} has no effect"
    else:
        device, reason = torch.cuda.get_device_name(), _loaded if _loaded is not None else "kernels.load() was not called"
        alone = reason if _forced == "reference" or _loaded is None else ""
        reason = reason or _obstacle()
    lines = []
    for name, kernel in KERNELS.items():
        limit = f"rows up to {WIDEST_ROW}, wider ones: reference" if kernel.whole_row else kernel.note
        lines.append(OperatorStatus(name, "reference" if reason else "triton", device, reason or limit))
    products, skipped = _products_status(alone, device)
    lines += products + [OperatorStatus(name, "reference", device, note) for name, note in PLAIN.items()]
    return Status(tuple(lines), skipped)
