"""Random numbers that depend on a seed and a place alone: Philox, and the dropout mask made of it.

The same (seed, index) gives the same number on every device, so that a backward pass draws a mask again instead of keeping it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
_U32 = 0xFFFFFFFF


def philox(seed: Tensor, count: int) -> Tensor:
    """``count`` random 32-bit numbers (int64 tensor): Philox-4x32-10 with key = seed and counter = index // 4 (Salmon et
    al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). The product of two 32-bit words overflows int64, whose wrap-around
    is harmless: both halves are masked."""
    c0 = torch.arange(-(-count // 4), device=seed.device, dtype=torch.int64)
    c1, c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _U32, (seed >> 32) & _U32
    for _ in range(10):
        p0, p1 = c0 * PHILOX_M[0], c2 * PHILOX_M[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _U32) ^ c1 ^ k0, p1 & _U32, ((p0 >> 32) & _U32) ^ c3 ^ k1, p0 & _U32
        k0, k1 = (k0 + PHILOX_W[0]) & _U32, (k1 + PHILOX_W[1]) & _U32
    return torch.stack([c0, c1, c2, c3], dim=1).view(-1)[:count]


def dropout_mask(shape: tuple[int, ...], p: float, seed: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """0 with probability p, else 1 / (1 - p)."""
    keep = philox(seed.to(device), math.prod(shape)) >= int(p * 2**32)
    return (keep.view(shape).to(torch.float32) / (1.0 - p)).to(dtype)
