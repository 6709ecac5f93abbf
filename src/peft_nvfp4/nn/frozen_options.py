"""``FrozenOptions``: how one frozen layer computes. Without PyTorch, since the commands and the estimator read it, too."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT_LAYOUTS = ("cached", "transient")
GRADIENTS = ("nvfp4", "nvfp4_sr", "bf16")
ACTIVATIONS = ("bf16", "nvfp4")


@dataclass(frozen=True)
class FrozenOptions:
    """How one layer computes; every backend takes what concerns it, so that changing the backend is changing one word.

    Attributes:
        weight_layouts: ``"cached"`` keeps forward and backward layout (faster), ``"transient"`` makes the backward one when it
            is needed (half the weight memory, the same bits).
        gradients: rounding of the incoming gradient: ``"nvfp4"``, ``"nvfp4_sr"`` (stochastic; to nearest in evaluation mode) or
            ``"bf16"`` (none).
        terms: NVFP4 terms of the layer's input, 1 or 2.
        activations: (nf4, bf16) what is kept for backward: ``"bf16"``, the input as it is, or ``"nvfp4"``, its codes.
    """

    weight_layouts: str = "cached"
    gradients: str = "nvfp4"
    terms: int = 1
    activations: str = "bf16"

    def __post_init__(self) -> None:
        if self.weight_layouts not in WEIGHT_LAYOUTS:
            raise ValueError(f"weight_layouts must be one of {', '.join(WEIGHT_LAYOUTS)}, got {self.weight_layouts!r}")
        if self.gradients not in GRADIENTS:
            raise ValueError(f"gradients must be one of {', '.join(GRADIENTS)}, got {self.gradients!r}")
        if type(self.terms) is not int or self.terms not in (1, 2):
            raise ValueError(f"terms must be 1 or 2, got {self.terms!r}")
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"activations must be one of {', '.join(ACTIVATIONS)}, got {self.activations!r}")
