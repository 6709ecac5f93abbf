"""Merge-aware training: the forward pass computes with the merged weight, so the merged NVFP4 model is the trained function.

Merging a trained adapter into NVFP4 rounds W + s B A to four bits, and an adapter's delta is often smaller than half a step: it
is lost, or drowned in new rounding errors. With ``NVFP4LoraConfig(merge_aware=True)`` training sees that rounding from the start:

    V  = Q(D(W_f) + sum_i s_i * B_i A_i)            what merging stores, bit for bit
    y  = D(x~) @ D(V).T + bias                      the frozen product, with V in place of W_f
    dx = D(Q(dy)) @ D(V_b).T                        V_b = Q(D(V).T), made in backward

Rounding is flat, so A and B get the straight-through gradient, dV counting as the gradient of what was rounded:

    dV = dy.T @ D(x~),  dA_i = s_i * B_i.T @ dV,  dB_i = s_i * dV @ A_i.T

dV (N, K) is never formed: dA = g.T @ D(x~) with g = s * dy @ B, dB = s * dy.T @ (D(x~) @ A.T). These are plain LoRA's gradients,
and :mod:`peft_nvfp4.autograd.lora` computes them. :class:`AdapterGradient` sits on the output of the frozen product and adds nothing
else.

The price: every layer's weight is dequantised, updated and quantised with a search in every forward pass, and V (4.5 bits a
weight) is kept for backward. Outside of training V is kept while A and B stay the same tensors with the same versions; writes
past the version counter (through ``.data``) are seen only after ``train()``. A CUDA graph makes V anew whenever it is replayed.

What is more than ``s * B A`` on the weight cannot be merged bit for bit, and is refused: DoRA and other variants, a bias of B,
dropout (a merged weight has one input).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig
from torch import Tensor

from .. import ops
from ..autograd import lora
from ..autograd.frozen_linear import dequantize_input, no_autocast
from ..nn.frozen_linear import FrozenLinear, autocast_input
from ..nn.nvfp4 import NVFP4FrozenLinear, next_power_of_two, product
from ..numerics.formats import WEIGHT, QuantizedMatrix
from ..numerics.matmul import exact_matmul

if TYPE_CHECKING:
    from .layer import FrozenLoraLinear


def check_merge_aware(config: LoraConfig) -> None:
    """Raise on settings of LoRA with which the merged weight would not be the trained function.

    Raises:
        ValueError: naming the setting and the way out.
    """
    variants = [f.name for f in fields(config) if f.metadata.get("is_lora_variant") and getattr(config, f.name)]
    if config.init_lora_weights == "mica":
        variants.append("init_lora_weights='mica'")
    refused = {
        f"lora_dropout={config.lora_dropout}": config.lora_dropout and "a merged weight sees one input, without a mask for B A",
        "lora_bias=True": config.lora_bias and "its sum with the layer's bias is rounded differently when merged",
        ", ".join(variants): variants and "such a variant is more than s * B A on the weight",
    }
    for setting, reason in refused.items():
        if reason:
            raise ValueError(f"merge_aware=True does not go with {setting}: {reason}. Leave one of the two out.")


# ---------------------------------------------------------------------------------------------- the merged weight


@torch.no_grad()
def dense_merged(layer: FrozenLoraLinear, names: Sequence[str]) -> Tensor:
    """D(W) + sum of s B A (N, K) in FP32, added as PEFT's merge does."""
    weight = layer.get_base_layer().dequantize(torch.float32).clone()
    with no_autocast(weight), exact_matmul():
        for name in names:
            weight += layer.get_delta_weight(name)
    return weight


@torch.no_grad()
def requantized(base: NVFP4FrozenLinear, weight: Tensor) -> QuantizedMatrix:
    """What ``base`` stores once ``weight`` (N, K) float32 is merged into it, without waiting for the GPU: Q(weight), or what is
    stored where nothing would change. NaN gives NaN."""
    present = base.forward_layout
    there = present.gscale if base.significand == 1.0 else next_power_of_two(present.gscale)
    gscale = torch.maximum(ops.weight_gscale(weight), there)
    new = ops.quantize_weight(weight, WEIGHT, gscale)
    same = (weight == base.dequantize(torch.float32)).all()
    return QuantizedMatrix(*(torch.where(same, old, got) for old, got in zip(present[:3], new[:3])), present.k)


def with_weight(base: NVFP4FrozenLinear, q: QuantizedMatrix) -> NVFP4FrozenLinear:
    """A layer like ``base`` that shares everything with it but the weight. It makes its backward layout where it is needed."""
    options = replace(base.options, weight_layouts="transient")
    known = 1.0 if base.significand == 1.0 else None  # another tool's scale stays where nothing changes (B = 0): a look, a wait
    twin = NVFP4FrozenLinear(base.in_features, base.out_features, None, base.compute_dtype, options, q, known)
    twin.bias, twin.shares_input = base.bias, base.shares_input
    if base.input_centre is not None:
        twin.set_centre(base.input_centre.view(torch.float32))
        twin.input_centre = base.input_centre  # linears of a site know a shared input by this very tensor
    return twin.train(base.training)


def merged_layer(layer: FrozenLoraLinear, names: Sequence[str]) -> NVFP4FrozenLinear:
    """The frozen linear that merging ``names`` would leave."""
    base = layer.get_base_layer()
    # not in a CUDA graph: it would outlive what is kept, and a replayed optimizer step leaves no mark on A and B
    capturing = base.weight.is_cuda and torch.cuda.is_current_stream_capturing()
    keep = not layer.training and not torch.is_grad_enabled() and not capturing
    key = _identity(layer, names) if keep else None
    if keep and layer._merged_layer is not None and layer._merged_layer[0] == key:
        return layer._merged_layer[1]
    made = with_weight(base, requantized(base, dense_merged(layer, names)))
    layer._merged_layer = (key, made) if keep else None
    return made


def _identity(layer: FrozenLoraLinear, names: Sequence[str]) -> list[tuple]:
    base = layer.get_base_layer()
    tensors = [base.weight, base.bias, base.input_centre]
    tensors += [t for name in names for t in (layer.lora_A[name].weight, layer.lora_B[name].weight)]
    marks = [None if t is None else (id(t), t.data_ptr(), None if t.is_inference() else t._version) for t in tensors]
    return [*marks, *(layer.scaling[name] for name in names)]


# ---------------------------------------------------------------------------------------------- forward and gradient


@dataclass(frozen=True)
class GradientSpec:
    """What is not a tensor of :class:`AdapterGradient`."""

    k: int
    terms: int
    scalings: tuple[float, ...]


class AdapterGradient(torch.autograd.Function):
    """y (M, N) as it is; in backward A and B of every branch get the gradients stated in the module's docstring. Keeps the codes
    of x~ (which the other linears of the site share) and D(x~) @ A.T."""

    @staticmethod
    def forward(ctx, y, xd, centre, spec: GradientSpec, *flat):
        codes, weights = flat[: 3 * spec.terms], flat[3 * spec.terms :]
        sources = [(a, b, None, s, 0.0) for a, b, s in zip(weights[::2], weights[1::2], spec.scalings)]
        adapters = lora.prepare(sources, xd.dtype)
        hidden = lora.down(xd, adapters)
        ctx.spec, ctx.constants = spec, [(item.rank, item.scaling, item.dropout) for item in adapters.items]
        ctx.dtypes = [(a.dtype, b.dtype) for a, b, *_ in sources]
        ctx.save_for_backward(centre, *codes, *hidden, *adapters.tensors())
        ctx.mark_dirty(y)  # not a view of it: what follows may work in place
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        spec, n, first = ctx.spec, len(ctx.dtypes), 4 + 3 * ctx.spec.terms
        centre, *saved = ctx.saved_tensors
        codes, saved = saved[: 3 * spec.terms], saved[3 * spec.terms :]
        hidden, adapters = saved[:n], lora.restore(saved[n:], ctx.constants)
        wanted = lora.Needs(
            False,
            [a if ctx.needs_input_grad[first + 2 * i] else None for i, (a, _) in enumerate(ctx.dtypes)],
            [b if ctx.needs_input_grad[first + 2 * i + 1] else None for i, (_, b) in enumerate(ctx.dtypes)],
        )
        with no_autocast(dy):
            parts = [QuantizedMatrix(*codes[i : i + 3], spec.k) for i in range(0, len(codes), 3)]
            xd = dequantize_input(parts, centre, dy.dtype) if any(wanted.a) else None
            das, dbs, _ = lora.backward([dy] * n, xd, hidden, adapters, wanted)
        return dy, None, None, None, *([None] * len(codes)), *(g for pair in zip(das, dbs) for g in pair)


@torch.compiler.disable
def forward(layer: FrozenLoraLinear, x: Tensor, names: Sequence[str]) -> Tensor:
    """y (..., N) of a layer whose active adapters are ``names``, all trained merge-aware."""
    merged = merged_layer(layer, names)
    if not torch.is_grad_enabled():
        return merged(x)  # the very call of the merged model
    key, x = x, autocast_input(x)
    x2 = merged._flat(x)
    with no_autocast(x):
        shared = merged._quantized_input(key, x2)
        (y,) = product([(merged, ())], x2, shared)
        weights = [t for name in names for t in (layer.lora_A[name].weight, layer.lora_B[name].weight)]
        if any(w.requires_grad for w in weights):
            xd = x2.detach() if shared.exact else merged._values(shared, x2)
            spec = GradientSpec(merged.in_features, merged.options.terms, tuple(layer.scaling[name] for name in names))
            codes = [t for part in shared.parts for t in part[:3]]
            y = AdapterGradient.apply(y, xd, merged._centre, spec, *codes, *weights)
    return y.view(*x.shape[:-1], merged.out_features)


def refuse_dense(base: object, name: str) -> None:
    """A merge-aware adapter on a linear that is not frozen would be merged into another function than the trained one."""
    if not isinstance(base, FrozenLinear):
        raise ValueError(
            f"merge_aware=True: {name} is no frozen NVFP4 linear (it stays dense), so merging would not give the trained "
            "function bit for bit. Leave it out of target_modules"
        )
