"""What runs where, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from . import dispatch, implementations


@dataclass(frozen=True)
class OperatorStatus:
    """One line of :func:`status`."""

    operator: str
    implementation: str  # "triton", one of implementations.NAMES, or "none" where the one that was asked for does not work
    device: str
    note: str  # why not a kernel, or its limits


@dataclass(frozen=True)
class Status:
    """What runs where. Prints as a table.

    Attributes:
        skipped: implementation of the two products that does not run -> why.
    """

    operators: tuple[OperatorStatus, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("operator", "implementation", "device", "note")]
        rows += [(o.operator, o.implementation, o.device, o.note) for o in self.operators]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]).rstrip() for row in rows]
        return "\n".join(lines + [f"{implementation} is not used: {reason}" for implementation, reason in self.skipped.items()])


def _products_status(reason: str, device: str) -> tuple[list[OperatorStatus], dict[str, str]]:
    """Lines of the two products and the implementations that were skipped; a reason: why nothing but the reference can run."""
    if not reason and torch.compiler.is_compiling():
        reason = "the compiler is tracing: not tried"
    skipped: dict[str, str] = {}
    if reason:
        name, note = "reference", reason
    else:
        try:
            choice = dispatch.choice(torch.device("cuda", torch.cuda.current_device()))
            name, note, skipped = choice.implementation, choice.note, choice.skipped
        except RuntimeError as error:
            name, note = "none", str(error)
    return [OperatorStatus(operator, name, device, note) for operator in dispatch.PRODUCTS], skipped


def status() -> Status:
    """Implementation of every operator on this machine. With a GPU: asks the driver, imports Triton and tries those of the two
    products."""
    if not torch.cuda.is_available():
        device, reason, alone = "cpu", "no CUDA device", "no CUDA device"
        if dispatch._forced in implementations.NAMES[:3]:
            alone += f", so {dispatch.VARIABLE}={dispatch._forced} has no effect"
    else:
        device, reason = torch.cuda.get_device_name(), dispatch._loaded
        if reason is None:
            reason = "kernels.load() was not called"
        alone = reason if dispatch._forced == "reference" or dispatch._loaded is None else ""
        reason = reason or dispatch._obstacle()
    lines = []
    for name, kernel in dispatch.KERNELS.items():
        limit = f"rows up to {dispatch.WIDEST_ROW}, wider ones: reference" if kernel.whole_row else ""
        lines.append(OperatorStatus(name, "reference" if reason else "triton", device, reason or limit))
    products, skipped = _products_status(alone, device)
    lines += products + [OperatorStatus(name, "reference", device, note) for name, note in dispatch.PLAIN.items()]
    return Status(tuple(lines), skipped)
