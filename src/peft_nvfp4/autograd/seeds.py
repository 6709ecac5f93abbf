"""Seeds of dropout masks and of stochastic rounding."""

from __future__ import annotations

import torch
from torch import Tensor

TAPES: list = []
"""The innermost is that of the CUDA graph being recorded (peft_nvfp4.training.graph_recording.SeedTape). Not per thread:
backward, and with it what activation checkpointing computes again, runs in a thread of autograd's."""


def draw_seed() -> Tensor:
    """A seed from PyTorch's CPU generator: follows ``torch.manual_seed``, is restored by activation checkpointing, and needs
    no synchronisation with a GPU."""
    if not torch.compiler.is_compiling() and TAPES:
        return TAPES[-1].draw()
    return torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device="cpu")
