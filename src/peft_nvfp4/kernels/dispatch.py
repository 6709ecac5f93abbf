"""Which implementation of an operator runs: the one place of the package that looks at hardware.

:func:`load` gives every operator that has a kernel an implementation for CUDA tensors. That is a table entry: Triton is
imported and the GPU asked at the first call with a CUDA tensor, so importing the package is as fast, and as safe, without either.
All implementations compute the same bits (of a matrix product, up to the order of its sum).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, fields
from functools import cache
from types import ModuleType

import torch

from ..numerics.products import Dgrad, Fprop
from ..ops.core import OPERATORS, first_tensor
from . import implementations

VARIABLE = "PEFT_NVFP4_KERNELS"
CAPABILITY = (8, 0)
"""Oldest GPU the kernels are written for (BF16 and FP16 pair arithmetic)."""
WIDEST_ROW = 32768
"""Kernels that hold a row in one program leave wider rows to the reference."""

KERNELS = {
    "quantize": "quantize",
    "quantize_terms": "quantize",
    "dequantize": "dequantize",
    "dequantize_terms": "dequantize",
    "transpose_requantize": "transpose",
    "rmsnorm_quantize": "norm",
    "rmsnorm_backward": "norm",
    "silu_mul_quantize": "mlp",
    "silu_mul_backward": "mlp",
    "gated_values": "mlp",
    "dropout": "random",
    "rotary_embedding": "rope",
    "combine": "grouped",
    "spread": "grouped",
    "grouped_outer": "grouped",
    "grouped_transpose": "transpose",
}
"""Operator -> the module of ``peft_nvfp4.kernels.triton`` that has a function of its name."""
WHOLE_ROW = ("quantize_terms", "rmsnorm_quantize", "rmsnorm_backward", "silu_mul_quantize", "silu_mul_backward", "gated_values")
"""Operators whose first argument is a matrix, or the codes of one, a row of which must fit in one program."""
PRODUCTS = ("fprop", "dgrad")
"""The products of a training step, which have several implementations (:mod:`implementations`)."""
GROUPED = ("grouped_fprop", "grouped_dgrad", "grouped_mm")
"""The products of a mixture's experts (:mod:`.grouped`)."""

_loaded: str | None = None  # None before load(), then "" or the reason why no Triton kernel was registered
_forced = ""  # a name of implementations.NAMES
_choices: dict[torch.device, implementations.Choice] = {}


@cache
def _obstacle() -> str:
    """Why the Triton kernels cannot run on this machine's GPU; empty if they can. Imports Triton and asks the driver."""
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        return f"needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, this GPU has {capability[0]}.{capability[1]}"
    try:
        importlib.import_module(f"{__package__}.triton.blocks")
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return ""


def _on_its_device(device: torch.device, function: Callable, args: tuple):
    """``function(*args)`` with the device as the current one: kernels are launched there, wherever their arguments live."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return function(*args)
    with torch.cuda.device(device):
        return function(*args)


@cache
def triton_kernel(name: str) -> Callable:
    """The Triton implementation of an operator, whether or not this machine can run it."""
    operator, whole_row = OPERATORS[name], name in WHOLE_ROW
    function = getattr(importlib.import_module(f"{__package__}.triton.{KERNELS[name]}"), name)

    def run(*args):
        first = first_tensor(args)
        if whole_row and not 0 < first.shape[1] * (2 if first.dtype == torch.uint8 else 1) <= WIDEST_ROW:  # two codes a byte
            return operator.reference(*args)
        return _on_its_device(first.device, function, args)

    return run


def _kernel_on_cuda(name: str) -> Callable:
    """What is registered for CUDA tensors: decides at the first call."""

    def first_call(*args):
        run = OPERATORS[name].reference if _obstacle() else triton_kernel(name)
        OPERATORS[name].direct["cuda"] = run
        return run(*args)

    return first_call


def choice(device: torch.device) -> implementations.Choice:
    """What computes the two products on a CUDA device. The first call for a device tries the implementations, which synchronises
    with it, and raises RuntimeError if the one that ``PEFT_NVFP4_KERNELS`` names does not work."""
    chosen = _choices.get(device)
    if chosen is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the kernels for {device} are chosen by trying them, which a CUDA graph cannot record: run a forward pass, or "
                "call peft_nvfp4.kernels.status(), before the capture"
            )
        with torch.cuda.device(device):
            chosen = _choices[device] = implementations.choose(device, _forced, _obstacle())
    return chosen


def _product_on_cuda(name: str) -> Callable:
    def run(product: Fprop | Dgrad):
        device = first_tensor(product).device
        return _on_its_device(device, getattr(choice(device), name), (product,))

    return run


def _grouped_on_cuda(name: str) -> Callable:
    def run(*args):
        if _loaded or _obstacle():
            return OPERATORS[name].reference(*args)
        function = getattr(importlib.import_module(f"{__package__}.grouped"), name)
        return _on_its_device(first_tensor(args).device, function, args)

    return run


def few_rows_module(x: torch.Tensor) -> ModuleType | None:
    """The module whose ``linear`` computes frozen linears of x (M, K) with their adapters, without autograd; None if it cannot:
    it takes few BF16 rows, on a GPU that runs the Triton kernels."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if _loaded != "" or _obstacle():
        return None
    module = importlib.import_module(f"{__package__}.triton.matmul")
    return module if 0 < x.shape[0] <= module.ROWS else None


def cross_entropy_of(logits: torch.Tensor) -> Callable | None:
    """What computes the cross-entropy of such logits (n, V), and its gradient in their place; None: PyTorch's own operators do.
    It takes 16 bits, on a GPU that runs the Triton kernels."""
    if not logits.is_cuda or logits.dtype not in (torch.bfloat16, torch.float16) or torch.compiler.is_compiling():
        return None
    if _loaded != "" or _obstacle():
        return None
    function = importlib.import_module(f"{__package__}.triton.cross_entropy").cross_entropy
    return lambda *args: _on_its_device(logits.device, function, (logits, *args))


def load() -> None:
    """Give the operators their CUDA implementations. Called when the package is imported; a second call does nothing. An unknown
    value of ``PEFT_NVFP4_KERNELS`` raises ValueError."""
    global _loaded, _forced
    if _loaded is not None:
        return
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked not in ("", "auto", *implementations.NAMES):
        names = ", ".join(map(repr, implementations.NAMES))
        raise ValueError(f"{VARIABLE}={asked!r}: choose 'auto' (or unset it) or one of {names}")
    _forced = "" if asked == "auto" else asked
    if asked == "reference":
        _loaded = f"{VARIABLE}=reference"
        return
    for name in PRODUCTS:
        OPERATORS[name].register("cuda", _product_on_cuda(name))
    for name in GROUPED:
        OPERATORS[name].register("cuda", _grouped_on_cuda(name))
    if importlib.util.find_spec("triton") is None:
        _loaded = "Triton is not installed (pip install triton)"
        return
    _loaded = ""
    for name in KERNELS:
        OPERATORS[name].register("cuda", _kernel_on_cuda(name))


@dataclass(frozen=True)
class OperatorStatus:
    """One line of :func:`status`."""

    operator: str
    implementation: str  # "triton", one of implementations.NAMES, or "none" where the one that was asked for does not work
    device: str
    note: str  # why not a kernel, or its limits


@dataclass(frozen=True)
class Status:
    """What runs where. Prints as a table."""

    operators: tuple[OperatorStatus, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # implementation of the two products that does not run -> why

    def __str__(self) -> str:
        rows = [tuple(f.name for f in fields(OperatorStatus)), *map(astuple, self.operators)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join(lines + [f"{implementation} is not used: {reason}" for implementation, reason in self.skipped.items()])


def status() -> Status:
    """Implementation of every operator on this machine. With a GPU: asks the driver, imports Triton and tries the implementations
    of the two products."""
    skipped: dict[str, str] = {}
    if torch.cuda.is_available():
        device, reason = torch.cuda.get_device_name(), _loaded or _obstacle()
        try:
            chosen = choice(torch.device("cuda", torch.cuda.current_device()))
            name, note, skipped = chosen.implementation, chosen.note, chosen.skipped
        except RuntimeError as error:
            name, note = "none", str(error)
    else:
        device, name, reason = "cpu", "reference", "no CUDA device"
        note = reason
        if _forced in implementations.NAMES[:4]:
            note += f", so {VARIABLE}={_forced} has no effect"
    lines = []
    for operator in KERNELS:
        limit = f"rows up to {WIDEST_ROW}, wider ones: reference" if operator in WHOLE_ROW else ""
        lines.append(OperatorStatus(operator, "reference" if reason else "triton", device, reason or limit))
    lines += [OperatorStatus(operator, name, device, note) for operator in PRODUCTS]
    grouped = "reference" if reason else "triton", device, reason or "or PyTorch's grouped GEMM on BF16 operands"
    lines += [OperatorStatus(operator, *grouped) for operator in GROUPED]
    return Status(tuple(lines), skipped)
