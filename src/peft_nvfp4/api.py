"""The public names of the package; ``peft_nvfp4`` has them all. Importing this module installs the hooks into PEFT and chooses
kernels."""

from . import kernels
from .calibration.gptq import GPTQOptions
from .calibration.run import CalibrationOptions, apply_calibration, calibrate
from .checkpoints import ExportReport, export_checkpoint
from .diagnostics.statistics import NVFP4StatisticsCallback, tensor_statistics
from .fusion.attach import attach, detach
from .fusion.loss import linear_cross_entropy
from .fusion.loss_attach import attach_loss, detach_loss
from .lora.config import NVFP4LoraConfig
from .lora.hooks import register, unregister
from .lora.inits import preprocess_eora
from .lora.inspection import AdapterReport, inspect_adapter
from .lora.merge import merge
from .lora.report import MergeReport
from .nn.frozen_linear import FrozenLinear, FrozenOptions
from .nn.registry import BACKENDS
from .quantization.freeze import dense_share, dequantize_model, freeze_model, frozen_bytes
from .training import distributed
from .training.callbacks import StopOnNonFinite, deterministic, memory_advice
from .training.cuda_graphs import (
    decoding_status,
    disable_cuda_graphs,
    enable_cuda_graphs,
    evaluation_status,
    graph_status,
    release_forward_recordings,
)
from .training.host_checkpoints import disable_host_checkpoints, enable_host_checkpoints, host_checkpoint_status
from .training.offload.enable import disable_offload, enable_offload, offload_status
from .training.packing import disable_packing, enable_packing, packing_status
from .transformers import PactConfig, prepare_model_for_nvfp4_training

__all__ = [
    "AdapterReport",
    "BACKENDS",
    "CalibrationOptions",
    "ExportReport",
    "FrozenLinear",
    "FrozenOptions",
    "GPTQOptions",
    "MergeReport",
    "NVFP4LoraConfig",
    "NVFP4StatisticsCallback",
    "PactConfig",
    "StopOnNonFinite",
    "apply_calibration",
    "attach",
    "attach_loss",
    "calibrate",
    "decoding_status",
    "dense_share",
    "dequantize_model",
    "detach",
    "detach_loss",
    "deterministic",
    "disable_cuda_graphs",
    "disable_host_checkpoints",
    "disable_offload",
    "disable_packing",
    "distributed",
    "enable_cuda_graphs",
    "enable_host_checkpoints",
    "enable_offload",
    "enable_packing",
    "evaluation_status",
    "export_checkpoint",
    "freeze_model",
    "frozen_bytes",
    "graph_status",
    "host_checkpoint_status",
    "inspect_adapter",
    "kernels",
    "linear_cross_entropy",
    "memory_advice",
    "merge",
    "offload_status",
    "packing_status",
    "prepare_model_for_nvfp4_training",
    "preprocess_eora",
    "register",
    "release_forward_recordings",
    "tensor_statistics",
    "unregister",
]

register()
kernels.load()
