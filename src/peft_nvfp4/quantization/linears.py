"""Which modules are linears that can be packed: ``nn.Linear`` itself, and those subclasses in transformers that compute the same.

Falcon's linears, all of its decoder, are such a subclass (it rounds to BF16 once more, before the bias). Other subclasses do more
than a product, return more than a tensor, or mark a linear whose weight is read past it: they stay dense.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes x W^T + b and holds nothing but W and b."""
    cls = type(module)
    if cls is nn.Linear:
        return True
    if not issubclass(cls, nn.Linear) or not cls.__module__.startswith("transformers.models."):
        return False
    return module._parameters.keys() <= {"weight", "bias"} and not module._buffers and not module._modules and _same_forward(cls)


def is_another_product(module: nn.Module) -> bool:
    """Whether it is a linear of transformers with a forward of its own that computes, takes or returns something else, so that no
    adapter of a linear fits: a router (Llama 4), a grouped product (DeepSeek 4)."""
    cls = type(module)
    own = (
        issubclass(cls, nn.Linear) and cls.__module__.startswith("transformers.models.") and cls.forward is not nn.Linear.forward
    )
    return own and not is_plain_linear(module)


@functools.cache
@torch.no_grad()
def _same_forward(cls: type[nn.Linear]) -> bool:
    """Whether a subclass has a forward of its own that computes what that of ``nn.Linear`` does, tried on a small instance."""
    if cls.forward is nn.Linear.forward:  # then the class is there to say that the linear is special
        return False
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
    x, weight, bias = draw(2, 3, 24), draw(8, 24), draw(8)
    try:
        linear = cls(24, 8, device="meta", dtype=torch.float32)
        linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
        y = linear(x)
        linear.bias = None
        without_bias = linear(x)
        return torch.allclose(y, F.linear(x, weight, bias)) and torch.allclose(without_bias, F.linear(x, weight))
    except Exception:  # whatever it wants or returns, it is another kind of module
        return False
