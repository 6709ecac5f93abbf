"""The package's operators: schema, argument checks, fake (shape) function and autograd of each, in one place.

    matrix.py     one matrix: quantize, dequantize, transpose_requantize
    linear.py     the path of an activation through frozen linears: quantize_input, dequantize_input, fprop, dgrad
    grouped.py    the products of a mixture's experts, and its rows on their way there and back
    fused.py      producers that emit NVFP4, dropout, rotary embedding
    core.py       what an operator is

Derivatives. None of these operators has a useful one: rounding is flat almost everywhere. Their backward therefore raises, and
the message names the differentiable way: the autograd Functions in :mod:`peft_nvfp4.autograd.frozen_linear`, which call the
operators inside and state their own gradients (:func:`~peft_nvfp4.autograd.frozen_linear.fake_quantize` a straight-through one).
"""

from .matrix import dequantize, quantize, quantize_weight, shared_gscale, transpose_requantize, weight_gscale

__all__ = ["dequantize", "quantize", "quantize_weight", "shared_gscale", "transpose_requantize", "weight_gscale"]
