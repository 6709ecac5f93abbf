"""NVFP4 as the GPTQ solver needs it: choose the block scales of a weight, then round it column by column.

    scales(w, importance)         -> block scales of the weight, fixed before the first column
    round(w, thresholds, scale)   -> codes and values of one column

Both round exactly as :func:`peft_nvfp4.numerics.reference.quantize` does: ``|w|`` is compared with ``s * g * {.25, .75, ...}``,
ties go to the even code, the sign is kept.

*Importance* is one weight per column for the searching rules: error in a column with large inputs costs more. Columns of
importance 0 do not influence the scale, unless the whole block has none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..numerics import reference
from ..numerics.formats import BLOCK, E2M1_THRESHOLDS, NVFP4Format, QuantizedMatrix, padded_k

CHUNK = 1 << 22
"""Elements whose scales are searched at a time."""


class NVFP4Levels:
    """NVFP4 with one global scale.

    Args:
        rule: choice of the block scale, of :data:`peft_nvfp4.numerics.formats.SCALE_RULES`.
        gscale: (1,) float32, a power of two; fixed before the first column.
    """

    def __init__(self, rule: str, gscale: Tensor):
        self.format = NVFP4Format(rule=rule)
        self.gscale = gscale
        device = gscale.device
        self._steps = torch.tensor([t for t, _ in E2M1_THRESHOLDS], device=device)[:, None]
        self._inclusive = torch.tensor([up for _, up in E2M1_THRESHOLDS], device=device)[:, None]
        self._grid = reference._grid(device)

    def scales(self, w: Tensor, importance: Tensor | None) -> Tensor:
        """Block scales (N, Kp/16) of a weight (N, K), E4M3 bytes. Without importance those of ``quantize`` with this rule."""
        kp = padded_k(w.shape[1])
        weights = alive = None
        if importance is not None:
            weights = F.pad(importance, (0, kp - w.shape[1])).view(-1, BLOCK)
            alive = weights > 0  # the columns that count for the scale of their block
            alive |= ~alive.any(-1, keepdim=True)
        step = max(1, CHUNK // kp)
        return torch.cat([self._scales(part, kp, alive, weights) for part in w.split(step)])

    def _scales(self, w: Tensor, kp: int, alive: Tensor | None, weights: Tensor | None) -> Tensor:
        mag = F.pad(w.abs(), (0, kp - w.shape[1])).view(w.shape[0], kp // BLOCK, BLOCK)
        amax = (mag if alive is None else torch.where(alive, mag, 0.0)).amax(-1)
        return reference.choose_scales(mag, amax, self.gscale[:, None], self.format, weights)

    def factors(self, scales: Tensor) -> Tensor:
        """s * g of block scales, what a level is multiplied by."""
        return reference.e4m3_decode(scales) * self.gscale

    def thresholds(self, factor: Tensor) -> Tensor:
        """(..., 7, N) for factors (..., N): a magnitude reaches level i where it is at least threshold i. Products are exact; a
        tie that stays below belongs to the next FP32 number."""
        exact = factor[..., None, :] * self._steps
        return torch.where(self._inclusive, exact, torch.nextafter(exact, exact.new_full((), float("inf"))))

    def round(self, w: Tensor, thresholds: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (N,) and values (N,) of a column w (N,), thresholds (7, N), factor (N,)."""
        index = (w.abs() >= thresholds).sum(0)
        values = torch.copysign(self._grid[index] * factor, w)
        codes = (index | (torch.signbit(w).long() << 3)) * (factor > 0)  # a block of scale 0 has codes 0
        return codes.to(torch.uint8), values

    def pack(self, codes: Tensor, scales: Tensor, k: int) -> QuantizedMatrix:
        codes = F.pad(codes, (0, padded_k(k) - k))
        return QuantizedMatrix(reference.pack(codes), scales, self.gscale.clone(), k)
