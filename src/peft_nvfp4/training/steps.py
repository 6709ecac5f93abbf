"""What makes a training step fast and small, switched on by ``get_peft_model`` for a frozen base.

The loss at supervised positions (:mod:`peft_nvfp4.fusion.loss_attach`), no padding (:mod:`peft_nvfp4.training.packing`), steps
recorded in CUDA graphs (:mod:`peft_nvfp4.training.cuda_graphs`). Each of them falls back to the model's own way where it cannot
be the same, and says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..fusion.loss_attach import LossReport, attach_loss, detach_loss
from .cuda_graphs import disable_cuda_graphs, enable_cuda_graphs
from .packing import disable_packing, enable_packing


@dataclass
class StepReport:
    """What :func:`speed_up_steps` switched on: each of the three, and why not."""

    loss: LossReport
    packing: str
    recordings: str

    def __str__(self) -> str:
        return f"{self.loss}\npadding: {self.packing}\nCUDA graphs: {self.recordings}"


def speed_up_steps(model: nn.Module) -> StepReport:
    """Switch on what makes a training step fast and small, as far as the model allows it."""
    loss = attach_loss(model)
    report = StepReport(loss, "not computed where a call can be packed", "of training steps")
    try:
        enable_packing(model)
    except ValueError as reason:
        report.packing = f"as the model does: {reason}"
    try:
        enable_cuda_graphs(model, loud=False)
    except ValueError as reason:
        report.recordings = f"none: {reason}"
    return report


def slow_down_steps(model: nn.Module) -> None:
    """Inverse of :func:`speed_up_steps`."""
    disable_cuda_graphs(model)
    disable_packing(model)
    detach_loss(model)
