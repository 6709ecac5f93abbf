"""Dense frozen linear: plain LoRA on the same code path, the baseline that the quantised backends are compared with.

The weight keeps the dtype the model was loaded in (BF16 as a rule); nothing is copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd.hosted import FrozenProduct
from .frozen_linear import FrozenLinear, FrozenOptions, frozen, unsafe_view
from .registry import register_backend


@register_backend("bf16")
class DenseFrozenLinear(FrozenLinear):
    """Frozen linear with a dense weight."""

    @classmethod
    def quantize(
        cls, linear: nn.Linear, options: FrozenOptions | None = None, *, gscale: Tensor | None = None
    ) -> DenseFrozenLinear:
        layer = cls(linear.in_features, linear.out_features, linear.bias, linear.weight.dtype, options or FrozenOptions())
        layer.weight = frozen(linear.weight.detach())
        return layer.train(linear.training)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.weight.detach().to(dtype or self.weight.dtype)

    def requantize_(self, weight: Tensor) -> None:
        self._check_dense(weight)
        self.weight = frozen(weight.detach().to(self.weight.device, self.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        self._refuse_integers(x)
        if self.hosted is None:
            return F.linear(x, self.weight, self.bias)
        there, weight = self.hosted.fetch(), self.weight

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            return F.linear(x, weight, bias)

        rows = x.reshape(-1, self.in_features)  # of more dimensions, PyTorch's product is a view: no edit in place then
        y = FrozenProduct.apply(rows, self.bias, weight, product, lambda dtype: weight.detach().to(dtype), there)
        return unsafe_view(y, (*x.shape[:-1], self.out_features))
