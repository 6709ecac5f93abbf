"""Second moments of a linear's input, collected batch by batch: what GPTQ minimises with.

For inputs x~ (K,), as the layer multiplies them, that is D(Q(x)):

    H = E[x~ x~^T]  (K, K)        the error of the output is  E|(W - V) x~|^2 = tr((W - V) H (W - V)^T)
    C = E[x x~^T]   (K, K)        for the asymmetric target: x is the input that the layer should have seen
    mu = E[x]       (K,)          the centre of the site

Kept as running means in FP32: the sum over a batch is formed by one product with FP32 accumulation and then averaged into what is
there, so no sum grows with the number of tokens. On a GPU, BF16 inputs (D(Q(x)) of one term is exact in BF16) go through tensor
cores with FP32 results. Same batches in the same order give the same bits on one device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.matmul import exact_matmul


class Moments:
    """Running H, and where asked for C, of a linear with ``k`` inputs.

    Attributes:
        h: (K, K) float32.
        c: (K, K) float32, or None.
        mean: (K,) float32, mean of x where given, else of x~.
        count: tokens seen.
    """

    def __init__(self, k: int, device: torch.device | str = "cpu", cross: bool = False):
        self.h = torch.zeros(k, k, device=device)
        self.c = torch.zeros(k, k, device=device) if cross else None
        self.mean = torch.zeros(k, device=device)
        self.count = 0

    def add(self, values: Tensor, x: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Average in a batch.

        Args:
            values: (..., K), D(x~) of the tokens.
            x: like ``values``, needed for the cross moment.
            mask: (...) bool, tokens to count (padding is False); all by default.

        Raises:
            ValueError: a shape does not fit, or x is missing where a cross moment is collected.
        """
        k = self.mean.numel()
        if values.shape[-1] != k or (x is not None and x.shape != values.shape):
            raise ValueError(f"expected inputs (..., {k}), got {tuple(values.shape)} and {None if x is None else tuple(x.shape)}")
        if self.c is not None and x is None:
            raise ValueError("the cross moment E[x x~^T] needs x as well as x~")
        values, x = self._rows(values, mask), None if x is None else self._rows(x, mask)
        tokens = values.shape[0]
        if not tokens:
            return
        self.count += tokens
        old, new = 1.0 - tokens / self.count, 1.0 / self.count
        _average(self.h, values, values, old, new)
        if self.c is not None:
            _average(self.c, x, values, old, new)
        seen = values if x is None else x
        self.mean.mul_(old).add_(seen.sum(0, dtype=torch.float32), alpha=new)

    def _rows(self, t: Tensor, mask: Tensor | None) -> Tensor:
        """(tokens, K) of the tokens that count, on this device."""
        rows = t.detach().reshape(-1, t.shape[-1])
        if mask is not None:
            rows = rows[mask.to(rows.device).reshape(-1).bool()]
        return rows.to(self.h.device)


def _average(total: Tensor, a: Tensor, b: Tensor, old: float, new: float) -> None:
    """total = old * total + new * a^T b, the product accumulated in FP32."""
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        total.mul_(old).add_(torch.mm(a.T, b, out_dtype=torch.float32), alpha=new)
        return
    with exact_matmul():
        total.addmm_(a.float().T, b.float(), beta=old, alpha=new)


