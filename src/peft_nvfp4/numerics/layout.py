"""The layout of block scales that FP4 tensor cores read."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .formats import SWIZZLE_COLS, SWIZZLE_ROWS


def swizzle_scales(scales: Tensor) -> Tensor:
    """Block scales (R, nb) in the layout FP4 tensor cores read: rows padded to 128 and columns to 4 with zeros, each 128x4
    tile stored as 32 groups of 16 bytes; byte (r % 32) * 16 + (r // 32) * 4 + c of a tile holds its element (r, c).

    Returns a flat uint8 tensor of ceil(R/128) * 128 * ceil(nb/4) * 4 bytes.
    """
    rows, cols = scales.shape
    if rows % SWIZZLE_ROWS or cols % SWIZZLE_COLS:  # padding by nothing would be a copy
        scales = F.pad(scales, (0, -cols % SWIZZLE_COLS, 0, -rows % SWIZZLE_ROWS))
    tile_rows, tile_cols = scales.shape[0] // SWIZZLE_ROWS, scales.shape[1] // SWIZZLE_COLS
    tiles = scales.view(tile_rows, 4, 32, tile_cols, SWIZZLE_COLS)  # (tile row, r // 32, r % 32, tile column, c)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of :func:`swizzle_scales`."""
    tile_rows, tile_cols = -(-rows // SWIZZLE_ROWS), -(-cols // SWIZZLE_COLS)
    tiles = swizzled.view(tile_rows, tile_cols, 32, 4, SWIZZLE_COLS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tile_rows * SWIZZLE_ROWS, tile_cols * SWIZZLE_COLS)[:rows, :cols].contiguous()
