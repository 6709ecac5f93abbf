"""RMSNorm that emits NVFP4.

The module returns y = D(y~), the dequantised form of its quantised output, and hands the codes of y~ to the frozen linears
that read y (:mod:`peft_nvfp4.autograd.activation_cache`). For backward it keeps y~, which its readers keep anyway, and 1/rms
(4 bytes a token): the input of the norm, the residual stream, is not kept at all. With w the weight, D = D(y~), c = mean over
the row of dy * D:

    dx = rstd * (w * dy - (D / w) * c)

Source: PACT, Table 7, row RMSNorm; the formula is RMSNorm's gradient with x^ = D / w.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..autograd import activation_cache
from ..autograd.activation_cache import QuantizedInput
from ..autograd.fused import RMSNormQuantize, as_parts
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics import fused_reference
from .probe import share_hooks


class NVFP4RMSNorm(nn.Module):
    """Takes the place of an RMSNorm whose output only frozen NVFP4 linears read. Its ``weight`` is the original's parameter, so
    state-dict keys do not change.

    Falls back to the original where the fused formula does not apply: with a trainable weight, with a weight of another dtype
    than x, or called with more than x.

    Args:
        reader: one of the linears; how it quantises its input is how this norm quantises its output.
        converted: of :class:`~.probe.Readers`. While a compiler traces, what is converted is another tensor, which would come
            without its codes: then the original computes.
    """

    def __init__(self, original: nn.Module, eps: float, plus_one: bool, reader: NVFP4FrozenLinear, converted: bool = False):
        super().__init__()
        self.converted = converted
        self.weight = original.weight
        self.eps, self.plus_one, self.training = eps, plus_one, original.training
        self._outside = (original, reader)  # in a tuple: neither is a submodule of this module
        share_hooks(original, self)

    @property
    def original(self) -> nn.Module:
        """The module this one replaced, with the weight as it is now."""
        module = self._outside[0]
        module.weight, module.training = self.weight, self.training
        return module

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        weight = self.weight
        traced = self.converted and torch.compiler.is_compiling()
        if weight.requires_grad or (weight.dtype != x.dtype and not self.plus_one) or args or kwargs or traced:
            return self.original.forward(x, *args, **kwargs)
        reader = self._outside[1]
        offset, terms = reader.input_offset, reader.options.terms
        mu = None if offset is None else offset.view(torch.float32)
        y, *flat = RMSNormQuantize.apply(x.reshape(-1, x.shape[-1]), weight, mu, self.eps, self.plus_one, terms)
        y, kind = y.view(x.shape), x.device.type
        # what the readers will ask for: autocast gives them y in its own dtype
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else y.dtype
        activation_cache.put(y, QuantizedInput(as_parts(flat, x.shape[-1]), offset, dtype, from_producer=True))
        return y


# ---------------------------------------------------------------------------------------------- recognising one


def looks_like_rmsnorm(module: nn.Module) -> bool:
    """One weight per channel, no bias, an epsilon. What it computes is for :func:`plus_one` to find out."""
    if isinstance(module, NVFP4RMSNorm) or any(True for _ in module.children()):
        return False
    parameters = dict(module.named_parameters(recurse=False))
    return parameters.keys() == {"weight"} and parameters["weight"].ndim == 1 and epsilon(module) is not None


def epsilon(module: nn.Module) -> float | None:
    """The norm's epsilon; None where it has none."""
    values = (getattr(module, key, None) for key in ("variance_epsilon", "eps", "epsilon"))
    return next((value for value in values if isinstance(value, float)), None)


def plus_one(module: nn.Module) -> bool | None:
    """Whether the weight counts as 1 + weight (Gemma); None if the module computes something else, tried on random numbers."""
    weight = module.weight
    x = torch.randn(1, 4, weight.shape[0], generator=torch.Generator().manual_seed(0), device="cpu")
    x *= torch.tensor([1e-3, 0.1, 1.0, 30.0], device="cpu")[:, None]  # the first row's mean square is of the size of an epsilon
    x = x.to(weight.device, weight.dtype)
    with torch.no_grad():
        expected = module.forward(x).float()  # without hooks
        for guess in (False, True):
            got, _ = fused_reference.rmsnorm(x[0], weight, epsilon(module), guess)
            if torch.allclose(got.float(), expected[0], rtol=2**-6, atol=1e-6):
                return guess
    return None
