"""peft_nvfp4: LoRA fine-tuning on a frozen NVFP4, NF4 or BF16 base, as a PEFT plugin.

>>> model = get_peft_model(model, NVFP4LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", backend="nvfp4"))

Importing the package installs its hooks into PEFT (:func:`register`); :func:`unregister` removes them.
"""

from . import kernels
from .backends import BACKENDS, FrozenLinear, FrozenOptions
from .calibration.gptq import GPTQOptions
from .calibration.run import CalibrationOptions, apply_calibration, calibrate
from .config import NVFP4LoraConfig
from .dataflow.attach import attach, detach
from .dataflow.loss import linear_cross_entropy
from .dataflow.loss_attach import attach_loss, detach_loss
from .freeze import dequantize_model, freeze_model, frozen_bytes
from .graphs import disable_cuda_graphs, enable_cuda_graphs, graph_status
from .hf import PactConfig, prepare_model_for_nvfp4_training
from .tuner import register, unregister
from .version import __version__

__all__ = [
    "__version__",
    "BACKENDS",
    "CalibrationOptions",
    "FrozenLinear",
    "FrozenOptions",
    "GPTQOptions",
    "NVFP4LoraConfig",
    "PactConfig",
    "apply_calibration",
    "attach",
    "attach_loss",
    "calibrate",
    "dequantize_model",
    "detach",
    "detach_loss",
    "disable_cuda_graphs",
    "enable_cuda_graphs",
    "freeze_model",
    "frozen_bytes",
    "graph_status",
    "kernels",
    "linear_cross_entropy",
    "prepare_model_for_nvfp4_training",
    "register",
    "unregister",
]

register()
kernels.load()
