"""What makes a training step fast and small, switched on by ``get_peft_model`` for a frozen base.

The loss at supervised positions (:mod:`peft_nvfp4.fusion.loss_attach`), no padding (:mod:`peft_nvfp4.training.packing`), steps
recorded in CUDA graphs (:mod:`peft_nvfp4.training.cuda_graphs`), generation and evaluation as well
(:mod:`peft_nvfp4.training.decoding`, :mod:`peft_nvfp4.training.evaluation`), the checkpoints of long sequences on the host
(:mod:`peft_nvfp4.training.host_checkpoints`); with ``memory="auto"`` also what is kept
(:mod:`peft_nvfp4.training.memory_level`). Each of them falls back to the model's own way where it cannot give the same numbers,
and says why: ``print(model.base_model.nvfp4_steps)``.
"""

from __future__ import annotations

from torch import nn

from ..fusion.loss_attach import LossReport, attach_loss_at_first_call, detach_loss, loss_report
from .cuda_graphs import (
    GraphStatus,
    decoding_status,
    disable_cuda_graphs,
    enable_cuda_graphs,
    evaluation_status,
    graph_status,
)
from .decoding import DecodingStatus
from .evaluation import EvaluationStatus
from .host_checkpoints import (
    HostCheckpointStatus,
    can_checkpoint,
    disable_host_checkpoints,
    enable_host_checkpoints,
    host_checkpoint_status,
)
from .host_level import HostLevel, host_level
from .memory_level import MemoryLevel, memory_level
from .packing import PackingStatus, decoder_of, disable_packing, enable_packing, packing_status


class StepReport:
    """How the steps of a model ran so far. Printed, it says what was switched on, and why something was not used.

    Attributes:
        loss, packing, recordings, decoding, evaluation, checkpoints: the reports of the parts.
        memory: what ``memory="auto"`` has chosen; None with another word.
        values: what it has chosen on a CPU, where NVFP4 weights are multiplied dequantised.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def loss(self) -> LossReport:
        return loss_report(self.model)

    @property
    def packing(self) -> PackingStatus:
        return packing_status(self.model)

    @property
    def recordings(self) -> GraphStatus:
        return graph_status(self.model)

    @property
    def decoding(self) -> DecodingStatus:
        return decoding_status(self.model)

    @property
    def evaluation(self) -> EvaluationStatus:
        return evaluation_status(self.model)

    @property
    def checkpoints(self) -> HostCheckpointStatus:
        return host_checkpoint_status(self.model)

    @property
    def memory(self) -> MemoryLevel | None:
        return memory_level(self.model)

    @property
    def values(self) -> HostLevel | None:
        return host_level(self.model)

    def __str__(self) -> str:
        parts = (self.loss, self.packing, self.recordings, self.decoding, self.evaluation, self.checkpoints, self.memory)
        parts += (self.values,)
        return "\n".join(str(part) for part in parts if part is not None)


def speed_up_steps(model: nn.Module, recordings: bool = True) -> StepReport:
    """Switch on what makes a training step fast and small, as far as the model allows it. What was switched on before stays.

    Args:
        recordings: record steps in CUDA graphs; not with weights on the host.
    """
    if loss_report(model).reason == "not attached":
        attach_loss_at_first_call(model)
    if decoder_of(model) is not None:
        enable_packing(model)
        if recordings:
            enable_cuda_graphs(model, loud=False)
    if can_checkpoint(model):
        enable_host_checkpoints(model, automatic=True)
    return StepReport(model)


def slow_down_steps(model: nn.Module) -> None:
    """Inverse of :func:`speed_up_steps`."""
    disable_host_checkpoints(model)
    disable_cuda_graphs(model)
    disable_packing(model)
    detach_loss(model)
