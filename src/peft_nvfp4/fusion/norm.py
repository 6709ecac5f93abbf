"""RMSNorm that emits NVFP4.

The module returns y = D(y~), the dequantised form of its quantised output, and hands the codes of y~ to the frozen linears
that read y (:mod:`peft_nvfp4.autograd.activation_cache`). For backward it keeps y~, which its readers keep anyway, and 1/rms
(4 bytes a token): the input of the norm, the residual stream, is not kept at all. With w the weight, D = D(y~), c = mean over
the row of dy * D:

    dx = rstd * (w * dy - (D / w) * c)

Source: PACT, Table 7, row RMSNorm; the formula is RMSNorm's gradient with x^ = D / w.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..autograd import activation_cache
from ..autograd.activation_cache import QuantizedInput
from ..autograd.fused import RMSNormQuantize, as_parts
from ..autograd.module_hooks import hooks_of, may_change
from ..nn.frozen_linear import unsafe_view
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..nn.plain import Obstacle
from ..numerics import fused_reference
from ..numerics.recognition import DECADES, agrees, samples
from .fused_module import FusedModule

UNCOUNTED = Obstacle(None, "torch.inference_mode does not count in-place edits of its output: its readers quantise it")
WATCHED = Obstacle(None, "hooks on it, or between it and its readers, may change its output: its readers quantise it")


class NVFP4RMSNorm(FusedModule):
    """Takes the place of an RMSNorm whose output only frozen NVFP4 linears read. Its ``weight`` is the original's parameter, so
    state-dict keys do not change.

    Falls back to the original where the fused formula does not apply: with a trainable weight, with a weight of another dtype
    than x, with another epsilon than it had, or called with more than x; and where y may be changed unseen on its way
    (:meth:`is_watched`): its readers then quantise what they are given, once.

    Args:
        reader: one of the linears; how it quantises its input is how this norm quantises its output.
        converted: of :class:`~.probe.Readers`. While a compiler traces, what is converted is another tensor, which would come
            without its codes: then the original computes.
        hooks: of its readers and of the modules between it and them (:func:`~peft_nvfp4.autograd.module_hooks.hooks_of`).
    """

    def __init__(
        self,
        original: nn.Module,
        eps: float,
        plus_one: bool,
        reader: NVFP4FrozenLinear,
        converted: bool = False,
        hooks: Sequence[list[dict]] = (),
    ):
        super().__init__(original, reader)
        self.converted, self._eps, self.plus_one = converted, eps, plus_one
        self._hooks = [hooks_of(self), *hooks]
        self._take_the_place_of(original)

    @torch.compiler.assume_constant_result
    def is_watched(self) -> bool:
        """Whether y may be changed without anybody counting it: by a hook of this norm, of a reader or of a module between them
        (they write into ``y.data``, too), or under ``torch.inference_mode``."""
        if torch.is_inference_mode_enabled():
            self.step_aside(UNCOUNTED)
            return True
        if any(map(may_change, self._hooks)):
            self.step_aside(WATCHED)
            return True
        return False

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        weight = self.weight
        traced = self.converted and torch.compiler.is_compiling()
        foreign = weight.requires_grad or (weight.dtype != x.dtype and not self.plus_one)
        if foreign or args or kwargs or traced or self.was_edited() or self.is_watched():
            return self.call_original(x, *args, **kwargs)
        reader = self._outside[1]
        offset, terms = reader.input_offset, reader.options.terms
        mu = None if offset is None else offset.view(torch.float32)
        y, *flat = RMSNormQuantize.apply(x.reshape(-1, x.shape[-1]), weight, mu, self._eps, self.plus_one, terms)
        y, kind = unsafe_view(y, x.shape), x.device.type
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
    """Whether the weight counts as 1 + weight (Gemma); None if the module computes something else: tried on samples, in FP32 with
    another weight (its own may hide what is multiplied by it), and in its dtype with its own."""
    weight, generator = module.weight, torch.Generator("cpu").manual_seed(0)
    x = samples(32, weight.shape[0], generator=generator)
    x[16:] = x[16:].sign() * torch.logspace(*DECADES, 16, device="cpu")[:, None]  # a row may be nothing next to epsilon
    other = samples(weight.shape[0], generator=generator).to(weight.device)
    guesses = {False, True}
    for w in (other, weight.detach()):
        values = x.to(weight.device, w.dtype)
        try:
            module._parameters["weight"] = nn.Parameter(w, requires_grad=False)
            with torch.no_grad():
                y = module.forward(values[None])[0]  # without hooks
        finally:
            module._parameters["weight"] = weight
        guesses = {guess for guess in guesses if agrees(y, *_expected(values, w, epsilon(module), guess))}
    return guesses.pop() if len(guesses) == 1 else None


def _expected(x: Tensor, weight: Tensor, eps: float, guess: bool) -> tuple[Tensor, Tensor]:
    """What an RMSNorm of this formula makes of x, and the size of the factors."""
    y, rstd = fused_reference.rmsnorm(x, weight, eps, guess)
    return y, (1 + weight.double().abs()) * x.double() * rstd[:, None]
