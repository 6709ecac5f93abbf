"""One linear in either published layout: its tensors' names, and their bytes to and from this package's.

Codes and block scales are copied. K need be a multiple of 16 there and of 32 here, so up to 16 zero columns are added or taken
off. The global scale is one FP32 number. Where it is stored as its reciprocal, that is taken in FP32 in both directions, as
serving engines do. A power of two goes through that unchanged. Any other number comes back from a round trip as one with the same
reciprocal (:func:`reciprocal`), so what a reader multiplies with stays the same; only a ModelOpt scale written as
compressed-tensors may have no such number, and is then off by one unit in the last place of FP32 (reported by the export).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..numerics.formats import BLOCK, QuantizedMatrix, padded_k


@dataclass(frozen=True)
class Layout:
    """Names of a linear's tensors, each after the linear's own name and a dot."""

    name: str  # as in export_checkpoint
    codes: str
    scales: str
    gscale: str
    input_scale: str  # global scale of a calibrated input, optional: inputs are quantised per token here, so it is only kept
    reciprocal: bool  # the two global scales are stored as reciprocals

    @property
    def required(self) -> tuple[str, str, str]:
        return self.codes, self.scales, self.gscale

    def headers(self, n: int, k: int) -> dict[str, tuple[str, tuple[tuple[int, ...], ...]]]:
        """Tensor -> (safetensors' word for its dtype, shapes that it may have) of a linear (n, k)."""
        return {
            self.codes: ("U8", ((n, k // 2),)),
            self.scales: ("F8_E4M3", ((n, k // BLOCK),)),
            self.gscale: ("F32", ((1,), ())),
            self.input_scale: ("F32", ((1,), ())),
        }

    # -- conversions

    def read(self, tensors: Mapping[str, Tensor], k: int) -> QuantizedMatrix:
        """W (N, K) of this package from a linear's tensors."""
        pad = padded_k(k) - k
        codes, scales = tensors[self.codes].detach(), tensors[self.scales].detach().view(torch.uint8)
        if pad:
            codes, scales = F.pad(codes, (0, pad // 2)), F.pad(scales, (0, pad // BLOCK))
        return QuantizedMatrix(codes, scales, self.read_gscale(tensors[self.gscale]), k)

    def read_gscale(self, stored: Tensor) -> Tensor:
        """(1,) FP32 to multiply with, from a stored global scale."""
        g = stored.detach().reshape(1).clone()  # a copy: in a mapped file, four bytes may lie anywhere
        return 1.0 / g if self.reciprocal else g

    def write(self, w: QuantizedMatrix) -> dict[str, Tensor]:
        """A linear's tensors from W (N, K) of this package, K a multiple of 16."""
        gscale = w.gscale.detach().clone().reshape(1)
        return {
            self.codes: w.codes.detach()[:, : w.k // 2].contiguous(),
            self.scales: w.scales.detach()[:, : w.k // BLOCK].contiguous().view(torch.float8_e4m3fn),
            self.gscale: self.write_gscale(gscale),
        }

    def write_gscale(self, g: Tensor) -> Tensor:
        """Inverse of :meth:`read_gscale`, in the shape that the layout's own tool writes: (1,), or () for ModelOpt."""
        return reciprocal(g) if self.reciprocal else g.reshape(())


def reciprocal(g: Tensor) -> Tensor:
    """FP32 numbers whose FP32 reciprocals are ``g``, where there are such. (Not every number is a reciprocal: where the
    significand is above sqrt(2), reciprocals are sparser than numbers.) The rounded 1 / g is one wherever there is one:
    tests/project/test_mutants.py goes through all significands."""
    return 1.0 / g


COMPRESSED_TENSORS = Layout(
    "compressed-tensors", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", reciprocal=True
)
MODELOPT = Layout("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", reciprocal=False)
LAYOUTS = {layout.name: layout for layout in (COMPRESSED_TENSORS, MODELOPT)}

REFUSED = {
    "pre_quant_scale": "its inputs are multiplied by AWQ's scale of every channel before they are quantised",
    "svdquant_lora_a": "SVDQuant adds a low-rank product to it",
    "svdquant_lora_b": "SVDQuant adds a low-rank product to it",
    "weight_zero_point": "its codes are not symmetric around zero",
    "weight_g_idx": "its columns are in another order",
    "weight_scale_inv": "it is stored in FP8 by blocks",
}
"""Tensors that change what a linear computes in a way that an NVFP4 layer cannot."""

PARTS = frozenset(
    {name for layout in LAYOUTS.values() for name in (*layout.required, layout.input_scale)} - {"weight"} | REFUSED.keys()
)
"""Tensors that belong to a weight and are no parameters of a dense model."""
