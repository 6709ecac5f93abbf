"""A tier without a build: NVFP4 GEMMs of cuBLASLt through ``torch._scaled_mm``.

PyTorch takes packed codes as ``float4_e2m1fn_x2`` (the low nibble is the even k, as here), x row-major and W transposed as a
view, and block scales as a flat, swizzled ``float8_e4m3fn`` tensor, whose rows are padded to 128 and columns to 4 with zeros
(:func:`peft_nvfp4.numerics.layout.swizzle_scales`). It asks for K to be a multiple of 32, which the storage has, and N of 16: rows of
zero codes are added to W and their outputs cut off. M may be anything.

cuBLASLt knows no global scale per row. So the product comes out in FP32, and one pass applies the scales, adds what is to be
added, and rounds once. Two terms under the same global scales are one product with K doubled.

Not every version of cuBLASLt need offer FP32 results: :func:`variants` lists BF16 ones second. Global scales are powers of two,
so a product rounded to BF16 and then scaled is the correctly rounded product all the same; only what is added to it, and products
of another tool's weights whose scales are no powers of two, are then rounded twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...numerics.formats import SWIZZLE_ROWS, QuantizedMatrix

_scaled_mm = getattr(torch, "_scaled_mm", None)
N_ALIGN = 16
PRODUCT_BYTES = 256 << 20
"""Of an unscaled product at a time. Larger ones are computed by groups of rows: 8192 rows of 8192 outputs are one."""


class _Operand(NamedTuple):
    codes: Tensor  # (R, K/2) float4_e2m1fn_x2
    scales: Tensor  # flat, swizzled, float8_e4m3fn


def _operand(matrices: Sequence[QuantizedMatrix], align: int = 1) -> _Operand:
    """Matrices side by side along K, R padded to a multiple of ``align``."""
    codes, scales = (torch.cat(parts, dim=1) if len(matrices) > 1 else parts[0] for parts in list(zip(*matrices))[:2])
    missing = -codes.shape[0] % align
    if missing:
        codes = F.pad(codes, (0, 0, 0, missing))
    swizzled = ops.swizzle_scales(scales)
    return _Operand(codes.view(torch.float4_e2m1fn_x2), swizzled.view(torch.float8_e4m3fn))


def _product(x: _Operand, w: _Operand, dtype: torch.dtype) -> Tensor:
    """x @ w.T without global scales."""
    return _scaled_mm(x.codes, w.codes.t(), x.scales, w.scales, out_dtype=dtype)


def _finish(product: Tensor, scale: Tensor, constant: Tensor | None, add: Tensor | None, out: Tensor) -> None:
    """out = scale * product + constant + add in FP32, rounded once. scale (M, 1) float32: with it PyTorch computes in FP32,
    whatever the others are."""
    if constant is not None and add is not None:
        torch.add(torch.addcmul(constant, product, scale), add, out=out)
    elif constant is not None or add is not None:
        torch.addcmul(constant if add is None else add, product, scale, out=out)
    else:
        torch.mul(product, scale, out=out)


class ScaledMM:
    """The tier's ``gemms``, over products in ``product_dtype``."""

    def __init__(self, product_dtype: torch.dtype):
        self.product_dtype = product_dtype

    def __call__(self, terms, weights, *, constants, adds, outs=None, dtype=torch.bfloat16) -> list[Tensor]:
        x = _operand(terms)
        rows = terms[0].gscale[:, None]
        ys = []
        for i, (weight, constant, add) in enumerate(zip(weights, constants, adds)):
            w = _operand([weight] * len(terms), N_ALIGN)
            m, n = x.codes.shape[0], weight.codes.shape[0]
            y = outs[i] if outs else torch.empty(m, n, dtype=dtype, device=weight.codes.device)
            scale = rows * weight.gscale
            for part in self._groups(m, w.codes.shape[0]):
                chosen = _Operand(x.codes[part], _scale_rows(x.scales, part, m))
                product = _product(chosen, w, self.product_dtype)[:, :n]
                _finish(product, scale[part], constant, None if add is None else add[part], y[part])
            ys.append(y)
        return ys

    def _groups(self, m: int, n: int) -> list[slice]:
        """Rows in groups of a multiple of 128, the rows of a tile of swizzled scales."""
        step = PRODUCT_BYTES // (n * self.product_dtype.itemsize * SWIZZLE_ROWS) * SWIZZLE_ROWS or SWIZZLE_ROWS
        return [slice(i, min(i + step, m)) for i in range(0, m, step)]


def _scale_rows(swizzled: Tensor, rows: slice, m: int) -> Tensor:
    """The part of swizzled scales that belongs to some rows, which begin at a multiple of 128: tiles of 128 rows follow each
    other."""
    per_tile = swizzled.numel() // -(-m // SWIZZLE_ROWS)
    return swizzled[rows.start // SWIZZLE_ROWS * per_tile : -(-rows.stop // SWIZZLE_ROWS) * per_tile]


def variants() -> list[tuple[str, ScaledMM]]:
    """Ways to call it, best first, each with a word about it; none where this PyTorch has not what it takes."""
    if _scaled_mm is None or not hasattr(torch, "float4_e2m1fn_x2"):
        return []
    return [("FP32 products", ScaledMM(torch.float32)), ("BF16 products", ScaledMM(torch.bfloat16))]
