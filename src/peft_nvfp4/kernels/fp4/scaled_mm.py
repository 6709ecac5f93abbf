"""An implementation without a build: NVFP4 GEMMs of cuBLASLt through ``torch.nn.functional.scaled_mm``.

PyTorch takes packed codes as ``float4_e2m1fn_x2``, block scales as a flat, swizzled ``float8_e4m3fn`` tensor, and one global
scale per matrix. It asks for N to be a multiple of 16: rows of zero codes are added to W and their outputs cut off.

cuBLASLt knows no global scale per row. So the product comes out in FP32, with W's global scale, and one pass applies the rows'
scales, adds what is to be added, and rounds once.

Two terms under the same global scales are one product: of [x1 | x2] and [W | W] (K doubled), which copies W, or of x1 above x2
(rows doubled), whose two halves are then added. A copy of W moves 2.25 bytes for each of its N * K values (read, written, and
read again by the product), the other way 16 bytes for each of M * N outputs (written, read twice, written, in FP32). So few rows
are stacked. Two products, the second added to the first, would move those 16 bytes, too: PyTorch's takes no addend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...numerics import layout
from ...numerics.formats import SWIZZLE_COLS, SWIZZLE_ROWS, QuantizedMatrix
from .native import with_products

N_ALIGN = 16
PRODUCT_BYTES = 256 << 20
"""Of an unscaled product at a time. Larger ones are computed by groups of rows: 8192 rows of 8192 outputs are one."""

_scaled_mm = F.scaled_mm


def _operand(codes: Tensor, scales: Tensor, times: int = 1) -> tuple[Tensor, Tensor]:
    """(codes (R, K/2), swizzled scales) as PyTorch takes them, of a matrix ``times`` times side by side. Scales of one dimension
    are swizzled already (``times`` 1)."""
    if scales.ndim == 1:
        return codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn)
    if times > 1 and scales.shape[1] % SWIZZLE_COLS:
        codes, scales, times = codes.repeat(1, times), scales.repeat(1, times), 1
    swizzled = layout.swizzle_scales(scales)
    if times > 1:  # tiles of a row of tiles follow each other
        codes = codes.repeat(1, times)
        swizzled = swizzled.view(-(-len(scales) // SWIZZLE_ROWS), -1).repeat(1, times).flatten()
    return codes.view(torch.float4_e2m1fn_x2), swizzled.view(torch.float8_e4m3fn)


def _padded_rows(q: QuantizedMatrix) -> Tensor:
    """Codes of a weight, N a multiple of 16."""
    missing = -len(q.codes) % N_ALIGN
    return F.pad(q.codes, (0, 0, 0, missing)) if missing else q.codes


def _product(x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, gscale: Tensor) -> Tensor:
    """gscale * x @ w.T in FP32; gscale (1,)."""
    recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    scales = [x_scales, torch.ones_like(gscale)], [w_scales, gscale]
    return _scaled_mm(x, w.t(), scales[0], recipe, scales[1], recipe, swizzle, swizzle, output_dtype=torch.float32)


def _finish(product: Tensor, scale: Tensor, constant: Tensor | None, add: Tensor | None, out: Tensor) -> None:
    """out = scale * product + constant + add in FP32, rounded once. scale (M, 1) float32: with it PyTorch computes in FP32,
    whatever the others are."""
    if constant is not None and add is not None:
        torch.add(torch.addcmul(constant, product, scale), add, out=out)
    elif constant is not None or add is not None:
        torch.addcmul(constant if add is None else add, product, scale, out=out)
    else:
        torch.mul(product, scale, out=out)


def gemms(terms, weights, *, constants, adds, low_ranks=None, outs=None, dtype=torch.bfloat16) -> list[Tensor]:
    """The implementation's products; see :mod:`native` for the arguments."""
    adds = with_products(adds, low_ranks, dtype)
    m, k = len(terms[0].codes), 2 * terms[0].codes.shape[1]
    widest = max(len(w.codes) for w in weights)
    stacked = len(terms) == 2 and 16 * m < 2.25 * k and 2 * m * widest * 4 <= PRODUCT_BYTES
    x, x_scales = terms[0][:2] if len(terms) == 1 else _joined(terms, dim=0 if stacked else 1)
    x, x_scales = _operand(x, x_scales)
    rows = terms[0].gscale[:, None]
    ys = []
    for i, (weight, constant, add) in enumerate(zip(weights, constants, adds)):
        w, w_scales = _operand(_padded_rows(weight), weight.scales, 1 if stacked else len(terms))
        n = len(weight.codes)
        y = outs[i] if outs else torch.empty(m, n, dtype=dtype, device=weight.codes.device)
        for part in [slice(0, m)] if stacked else _groups(m, w.shape[0]):
            if stacked:
                product = _product(x, x_scales, w, w_scales, weight.gscale)[:, :n]
                product = product[:m].add_(product[m:])
            else:
                product = _product(x[part], _scale_rows(x_scales, part, m), w, w_scales, weight.gscale)[:, :n]
            _finish(product, rows[part], constant, None if add is None else add[part], y[part])
        ys.append(y)
    return ys


def _joined(terms: Sequence[QuantizedMatrix], dim: int) -> list[Tensor]:
    """Codes and scales of two terms as one matrix."""
    return [torch.cat(parts, dim) for parts in list(zip(*terms))[:2]]


def _groups(m: int, n: int) -> list[slice]:
    """Rows in groups of a multiple of 128, the rows of a tile of swizzled scales."""
    step = PRODUCT_BYTES // (n * 4 * SWIZZLE_ROWS) * SWIZZLE_ROWS or SWIZZLE_ROWS
    return [slice(i, min(i + step, m)) for i in range(0, m, step)]


def _scale_rows(swizzled: Tensor, rows: slice, m: int) -> Tensor:
    """The part of swizzled scales that belongs to some rows, which begin at a multiple of 128: tiles of 128 rows follow each
    other."""
    per_tile = swizzled.numel() // -(-m // SWIZZLE_ROWS)
    return swizzled[rows.start // SWIZZLE_ROWS * per_tile : -(-rows.stop // SWIZZLE_ROWS) * per_tile]
