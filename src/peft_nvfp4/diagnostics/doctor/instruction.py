"""What SM120's FP4 instruction makes of a sum, as far as it is known: a model in plain PyTorch, in FP64.

``mma...kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64`` computes d = c + the sum of four blocks of 16 products, each block
times its two scales. Products and blocks are exact. c and the four blocks are aligned to the largest of their exponents (a
block's is that of its two scales), each is cut off 35 bits behind that exponent's point, and they are added without error; the
sum is cut off to FP32, toward zero. For values of ordinary sizes that is: the exact sum of 64 products and c, truncated to FP32,
once for 64 values of k. So long sums are a little too small in magnitude: about (K / 64) * 2**-24 of what was added up, on
average.

Source: MMA-Sim (github.com/microsoft/MMA-Sim), "RTX Blackwell", fitted to the bits of the hardware by its authors. Whether a card
agrees is reported by ``peft-nvfp4 doctor``, and decides nothing: products are judged by error bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...numerics.formats import BLOCK, E2M1_GRID, E4M3_NAN, QuantizedMatrix

STEP = 64
"""Values of k of one instruction."""
KEPT_BITS = 35
"""Bits that a summand keeps behind the point of the largest exponent."""
ZERO_EXPONENT = -126
"""What the exponent of a zero counts as."""


def _scales(bits: Tensor) -> tuple[Tensor, Tensor]:
    """(significand, exponent) of E4M3 bytes, float64: 1 <= significand < 2, but for subnormal ones and NaN. The sign is
    ignored."""
    byte = bits.long() & 0x7F
    value = torch.where(byte < 8, byte / 8 * 2.0**-6, (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 7).double())
    exponent = torch.where(byte == 0, ZERO_EXPONENT, (torch.frexp(value.double()).exponent - 1).clamp(min=-6)).double()
    significand = torch.where(byte == 0, 0.0, value * torch.exp2(-exponent))
    return torch.where(byte == E4M3_NAN, torch.nan, significand), exponent


def _values(codes: Tensor) -> Tensor:
    """(R, K) float64 of packed codes (R, K/2)."""
    grid = torch.tensor([*E2M1_GRID, *(-v for v in E2M1_GRID)], dtype=torch.float64, device=codes.device)
    return grid[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]


def truncated_to_f32(value: Tensor) -> Tensor:
    """float64 -> float32, toward zero."""
    nearest = value.float()
    beyond = nearest.double().abs() > value.abs()
    return torch.where(beyond, (nearest.view(torch.int32) - 1).view(torch.float32), nearest)


def add_products(c: Tensor, dots: Tensor, x_scales: Tensor, w_scales: Tensor) -> Tensor:
    """d of one instruction for many outputs.

    Args:
        c: (M, N) float32.
        dots: (4, M, N) float64: of each block, the sums of the products of codes.
        x_scales, w_scales: the blocks' E4M3 bytes, (M, 4) and (N, 4).
    """
    (x, x_exponent), (w, w_exponent) = _scales(x_scales.T), _scales(w_scales.T)
    return _add(c, dots, x[:, :, None] * w[:, None], x_exponent[:, :, None] + w_exponent[:, None])


def _add(c: Tensor, dots: Tensor, significand: Tensor, exponent: Tensor) -> Tensor:
    """With the product of each block's two scales taken apart, (4, M, N)."""
    c_exponent = torch.where(c == 0, ZERO_EXPONENT, (torch.frexp(c.double()).exponent - 1).clamp(min=-126)).double()
    largest = torch.maximum(c_exponent, exponent.amax(0))
    blocks = torch.trunc(dots * significand * torch.exp2(exponent - largest + KEPT_BITS))
    unit = torch.exp2(KEPT_BITS - largest)
    return truncated_to_f32((torch.trunc(c.double() * unit) + blocks.sum(0)) / unit)  # integers below 2**53: any order


def accumulated(terms: Sequence[QuantizedMatrix], weight: QuantizedMatrix, tile_k: int) -> Tensor:
    """The accumulators (M, N) float32 after the k loop, before global scales: tiles of ``tile_k`` in ascending order, the terms
    of a tile one after the other."""

    def by_instructions(q: QuantizedMatrix) -> tuple[Tensor, Tensor, Tensor]:
        """(steps, 4, R, 16) values, (steps, 4, R) significands and exponents of scales."""
        rows, pad = len(q.codes), -q.codes.shape[1] % (STEP // 2)
        values = _values(F.pad(q.codes, (0, pad))).view(rows, -1, STEP // BLOCK, BLOCK).permute(1, 2, 0, 3)
        scales = F.pad(q.scales, (0, pad // 8)).view(rows, -1, STEP // BLOCK).permute(1, 2, 0)
        return values, *_scales(scales)

    w, w_significand, w_exponent = by_instructions(weight)
    xs = [by_instructions(t) for t in terms]
    sums = torch.zeros(len(terms[0].codes), len(weight.codes), dtype=torch.float32, device=w.device)
    for tile in range(0, len(w), tile_k // STEP):
        for x, x_significand, x_exponent in xs:
            for i in range(tile, min(tile + tile_k // STEP, len(w))):
                significand = x_significand[i, :, :, None] * w_significand[i, :, None]
                sums = _add(sums, x[i] @ w[i].mT, significand, x_exponent[i, :, :, None] + w_exponent[i, :, None])
    return sums


def modelled(
    terms: Sequence[QuantizedMatrix],
    weight: QuantizedMatrix,
    tile_k: int,
    constant: Tensor | None = None,
    add: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y (M, N) of the extension's kernels: the accumulators, and their epilogue in FP32. The weight's global scale must be a
    power of two."""
    sums = accumulated(terms, weight, tile_k) * weight.gscale
    scaled = sums.double() * terms[0].gscale.double()[:, None]  # fused with the constant: one rounding
    y = (scaled if constant is None else scaled + constant.double()).float()
    return (y if add is None else y + add.float()).to(dtype)
