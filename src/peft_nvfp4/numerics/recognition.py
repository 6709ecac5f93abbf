"""What a function is, found out by calling it: samples of every magnitude, and how near an answer has to be.

A fused module takes the place of one that computes the same function, whatever its name. Samples of one magnitude do not tell: a
SwiGLU that clamps at 10 is a plain one for all |x| < 10. So samples cover eight decades, both signs and zero, each number drawn
by itself; and modules that are set up with a limit are left alone whatever the samples say (:func:`limit_of`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .fused_reference import ACTIVATIONS

DECADES = (-4.0, 4.0)
"""Exponents of ten between which magnitudes are drawn. FP16 holds them, and FP32 their products."""
PAIRS = 4096
"""Numbers that are drawn at least, of gate and of up."""


def rows_for(width: int) -> int:
    """How many rows of samples of a width are enough."""
    return max(8, -(-PAIRS // width))


def samples(*shape: int, generator: torch.Generator) -> Tensor:
    """FP32 numbers on the CPU, drawn by its ``generator``: magnitudes from 1e-4 to 1e4, as many in each decade, both signs, and
    one in sixteen zero."""
    low, high = DECADES
    draw = lambda: torch.rand(*shape, generator=generator, device="cpu")  # noqa: E731
    values = 10 ** (low + (high - low) * draw())
    return torch.where(draw() < 1 / 16, 0.0, torch.where(draw() < 0.5, values, -values))


def agrees(value: Tensor, expected: Tensor, size: Tensor) -> bool:
    """Whether ``value`` is ``expected`` but for a few roundings of its dtype: of the value (in FP32 32, in 16 bits 4), and 2 of
    ``size``, from which a sum inside may have cancelled. Of one dtype; infinities are equal."""
    if value.dtype != expected.dtype or value.shape != expected.shape:
        return False
    eps, roundings = torch.finfo(value.dtype).eps, 32 if value.dtype == torch.float32 else 4
    value, expected, size = (t.double() for t in (value, expected, size))
    near = (value - expected).abs() <= roundings * eps * expected.abs() + 2 * eps * size.abs()
    return bool(((value == expected) | (near & expected.isfinite())).all())


def activation_of(product: Tensor, gate: Tensor, up: Tensor) -> str | None:
    """The activation, a word of :data:`ACTIVATIONS`, with which ``product`` is act(gate) * up; None if it is with none."""
    close = (word for word, act in ACTIVATIONS.items() if agrees(product, act(gate) * up, gate.double() * up.double()))
    return next(close, None)


def limit_of(module: nn.Module) -> str | None:
    """A setting of ``module``, or of a module inside it that has no parameters, that says that values are cut off somewhere: its
    name and value. None if there is none, or it is infinite."""
    for inner in module.modules():
        if inner is not module and any(True for _ in inner.parameters()):
            continue
        for name, value in vars(inner).items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if number and any(word in name.lower() for word in ("limit", "clamp", "clip")):
                return f"{name}={value}"
    return None
