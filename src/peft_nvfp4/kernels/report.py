"""What runs where, as a table."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, fields

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
        rows = [tuple(f.name for f in fields(OperatorStatus)), *map(astuple, self.operators)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join(lines + [f"{implementation} is not used: {reason}" for implementation, reason in self.skipped.items()])


def status() -> Status:
    """Implementation of every operator on this machine. With a GPU: asks the driver, imports Triton and tries the implementations
    of the two products."""
    skipped: dict[str, str] = {}
    if torch.cuda.is_available():
        device, reason = torch.cuda.get_device_name(), dispatch._loaded or dispatch._obstacle()
        try:
            choice = dispatch.choice(torch.device("cuda", torch.cuda.current_device()))
            name, note, skipped = choice.implementation, choice.note, choice.skipped
        except RuntimeError as error:
            name, note = "none", str(error)
    else:
        device, name, reason = "cpu", "reference", "no CUDA device"
        note = reason
        if dispatch._forced in implementations.NAMES[:3]:
            note += f", so {dispatch.VARIABLE}={dispatch._forced} has no effect"
    lines = []
    for operator in dispatch.KERNELS:
        limit = f"rows up to {dispatch.WIDEST_ROW}, wider ones: reference" if operator in dispatch.WHOLE_ROW else ""
        lines.append(OperatorStatus(operator, "reference" if reason else "triton", device, reason or limit))
    lines += [OperatorStatus(operator, name, device, note) for operator in dispatch.PRODUCTS]
    return Status(tuple(lines), skipped)
