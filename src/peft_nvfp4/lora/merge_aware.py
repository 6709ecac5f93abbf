"""Merge-aware training: the forward pass computes with the merged weight, so the merged NVFP4 model is the trained function.

Merging a trained adapter into NVFP4 rounds W + s B A to four bits, and an adapter's delta is often smaller than half a step: it
is lost, or drowned in new rounding errors. With ``NVFP4LoraConfig(merge_aware=True)`` training sees that rounding from the start:

    V  = Q(D(W_f) + sum_i s_i * B_i A_i)            what merging stores, bit for bit
    y  = D(x~) @ D(V).T + bias                      the frozen product, with V in place of W_f
    dx = D(Q(dy)) @ D(V_b).T                        V_b = Q(D(V).T), made in backward

Rounding is flat, so A and B get the straight-through gradient, dV counting as the gradient of what was rounded:

    dV = dy.T @ D(x~),  dA_i = s_i * B_i.T @ dV,  dB_i = s_i * dV @ A_i.T

dV (N, K) is never formed: dA = g.T @ D(x~) with g = s * dy @ B, dB = s * dy.T @ (D(x~) @ A.T). These are plain LoRA's gradients,
and :mod:`peft_nvfp4.autograd.frozen_linear` computes them. :class:`AdapterGradient` sits on the output of the frozen product and
adds nothing else.

The price: every layer's weight is dequantised, updated and quantised with a search in every forward pass, and V (4.5 bits a
weight) is kept for backward. Outside of training V is kept while A and B stay the same tensors with the same versions; writes
past the version counter (through ``.data``) are seen only after ``train()``. A CUDA graph makes V anew whenever it is replayed.

What is more than ``s * B A`` on the weight cannot be merged bit for bit, and is refused: DoRA and other variants, a bias of B,
dropout (a merged weight has one input).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig
from torch import Tensor

from .. import ops
from ..autograd.activation_cache import dequantized, quantized_input
from ..autograd.frozen_linear import (
    autocast_input,
    cast_adapters,
    frozen_linear,
    gradients_of_a,
    gradients_of_b,
    hidden_of,
    no_autocast,
)
from ..autograd.trees import flatten, unflatten
from ..nn.frozen_linear import FrozenLinear, unsafe_view
from ..nn.nvfp4 import NVFP4FrozenLinear, next_power_of_two
from ..nn.plain import Obstacle
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
    present_scale = present.gscale if base.scale_factor == 1.0 else next_power_of_two(present.gscale)
    gscale = torch.maximum(ops.weight_gscale(weight), present_scale)
    new = ops.quantize_weight(weight, WEIGHT, gscale)
    same = (weight == base.dequantize(torch.float32)).all()
    return QuantizedMatrix(*(torch.where(same, old, got) for old, got in zip(present[:3], new[:3])), present.k)


def with_weight(base: NVFP4FrozenLinear, q: QuantizedMatrix) -> NVFP4FrozenLinear:
    """A layer like ``base`` that shares everything with it but the weight. It makes its backward layout where it is needed."""
    options = replace(base.options, weight_layouts="transient")
    known = 1.0 if base.scale_factor == 1.0 else None  # another tool's scale stays where nothing changes (B = 0): a look, a wait
    twin = NVFP4FrozenLinear(base.in_features, base.out_features, None, base.compute_dtype, options, q, known)
    twin.bias, twin.shares_input, twin.call_hooks = base.bias, base.shares_input, base.call_hooks
    if base.input_offset is not None:
        twin.set_offset(base.input_offset.view(torch.float32))
        twin.input_offset = base.input_offset  # linears of a group know a shared input by this very tensor
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
    if base.hosted is not None:
        base.hosted.fetch()
    merged = with_weight(base, requantized(base, dense_merged(layer, names)))
    layer._merged_layer = (key, merged) if keep else None
    return merged


def _identity(layer: FrozenLoraLinear, names: Sequence[str]) -> list[tuple]:
    base = layer.get_base_layer()
    tensors = [base.weight, base.bias, base.input_offset]
    tensors += [t for name in names for t in (layer.lora_A[name].weight, layer.lora_B[name].weight)]
    marks = [None if t is None else (id(t), t.data_ptr(), None if t.is_inference() else t._version) for t in tensors]
    return [*marks, *(layer.scaling[name] for name in names)]


# ---------------------------------------------------------------------------------------------- forward and gradient


class AdapterGradient(torch.autograd.Function):
    """y (M, N) as it is; in backward A and B of every branch get the gradients stated in the module's docstring. Keeps the codes
    of x~ (which the other linears of the group share) and D(x~) @ A.T."""

    @staticmethod
    def forward(ctx, y, xd, structure, *leaves):
        terms, offset, branches = unflatten(structure, leaves)
        adapters = cast_adapters(branches, xd.dtype)
        saved, ctx.saved_structure = flatten((terms, offset, tuple(hidden_of(xd, adapters)), adapters))
        ctx.save_for_backward(*saved)
        ctx.structure, ctx.dtypes = structure, [(branch.a.dtype, branch.b.dtype) for branch in branches]
        ctx.mark_dirty(y)  # not a view of it: what follows may work in place
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        terms, offset, hidden, adapters = unflatten(ctx.saved_structure, ctx.saved_tensors)
        _, _, needs = unflatten(ctx.structure, ctx.needs_input_grad[3:])
        no_terms, no_offset, gradients = unflatten(ctx.structure, [None] * (len(ctx.needs_input_grad) - 3))
        dtypes_a = [a if need.a else None for need, (a, _) in zip(needs, ctx.dtypes)]
        dtypes_b = [b if need.b else None for need, (_, b) in zip(needs, ctx.dtypes)]
        dys = [dy] * len(needs)
        with no_autocast(dy):
            xd = dequantized(terms, offset, dy.dtype) if any(dtypes_a) else None
            dbs = gradients_of_b(dys, hidden, adapters, dtypes_b)
            das, _ = gradients_of_a(dys, xd, adapters, dtypes_a, False)
        gradients = tuple(branch._replace(a=da, b=db) for branch, da, db in zip(gradients, das, dbs))
        return dy, None, None, *flatten((no_terms, no_offset, gradients))[0]


@torch.compiler.disable
def forward(layer: FrozenLoraLinear, x: Tensor, names: Sequence[str]) -> Tensor:
    """y (..., N) of a layer whose active adapters are ``names``, all trained merge-aware."""
    branches = layer.branches(names, everywhere=False)
    if isinstance(branches, Obstacle):
        raise RuntimeError(
            f"a merge-aware adapter ({', '.join(names)}) computes with one merged weight, and cannot call the modules below its "
            f"layer, of which one has to be called ({layer.described(branches)}). Put hooks on the LoRA layer itself, or train "
            "without merge_aware"
        )
    merged = merged_layer(layer, names)
    if not torch.is_grad_enabled():
        return merged(x)  # the very call of the merged model
    x2 = merged._flat(autocast_input(x))
    with no_autocast(x):
        quantized = quantized_input(x, x2, merged.options.terms, merged.input_offset, merged.shares_input, merged.call_hooks)
        (y,) = frozen_linear(x2, quantized, [merged.operands(())])
        branches = tuple(branch._replace(dropout=0.0) for branch in branches)
        if any(branch.a.requires_grad or branch.b.requires_grad for branch in branches):
            leaves, structure = flatten((quantized.terms, quantized.offset_values, branches))
            y = AdapterGradient.apply(y, quantized.dequantized(x2), structure, *leaves)
    return unsafe_view(y, (*x.shape[:-1], merged.out_features))


def refuse_dense(base: object, name: str) -> None:
    """A merge-aware adapter on a linear that is not frozen would be merged into another function than the trained one."""
    if not isinstance(base, FrozenLinear):
        raise ValueError(
            f"merge_aware=True: {name} is no frozen NVFP4 linear (it stays dense), so merging would not give the trained "
            "function bit for bit. Leave it out of target_modules"
        )
