"""NVFP4 frozen linear: PACT's projection.

Weight W (N, K) is kept as its forward layout W_f (codes along K) and, with ``weight_layouts="cached"``, also as its backward
layout W_b (the transpose, codes along N, made from D(W_f)). Forward quantises the input per token, multiplies FP4 by FP4 and
accumulates in FP32; backward quantises the incoming gradient and multiplies it by W_b. See :mod:`peft_nvfp4.autograd.frozen_linear`.

All parameters are bytes: ``weight`` (N, Kp/2) and ``weight_scales`` (N, Kp/16) and ``weight_gscale`` (4, one FP32), the same
with the prefix ``backward_`` for W_b, and, where a site is centred, ``input_centre`` (4K) and ``output_centre`` (4N), FP32 too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from .. import kernels, ops
from ..autograd import activation_cache
from ..autograd.activation_cache import QuantizedInput
from ..autograd.frozen_linear import (
    Branch,
    Frozen,
    LinearSpec,
    NVFP4Linears,
    SiteSpec,
    StraightThrough,
    dequantize_input,
    draw_seed,
    flatten,
    no_autocast,
    quantize_input,
    total_constant,
)
from ..numerics import reference
from ..numerics.formats import E2M1_MAX, E4M3_MAX, WEIGHT, WEIGHT_BACKWARD, QuantizedMatrix
from .frozen_linear import FrozenLinear, FrozenOptions, autocast_input, frozen
from .registry import register_backend

PARAMETERS = (
    *("weight", "weight_scales", "weight_gscale"),
    *("backward_weight", "backward_scales", "backward_gscale"),
    *("input_centre", "output_centre"),
)


PACK_ON_GPU = 1 << 18
"""Weights of at least so many elements that are on the CPU are packed on the GPU, if there is one: same bits, in a fraction of
the time."""


def _packing_device(weight: Tensor) -> torch.device:
    large = weight.device.type == "cpu" and weight.numel() >= PACK_ON_GPU
    return torch.device("cuda") if large and torch.cuda.is_available() else weight.device


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def next_power_of_two(g: Tensor) -> Tensor:
    """The global scale to quantise under where ``g`` (1,) is there already. Kernels that quantise take it for a power of two,
    which another tool's need not be."""
    return reference.power_of_two_scale(g * (E2M1_MAX * E4M3_MAX))


@register_backend("nvfp4")
class NVFP4FrozenLinear(FrozenLinear):
    """Frozen linear in NVFP4, W4A4.

    Args:
        w: W_f (N, K).
        significand: of its global scale: 1 for a power of two, as this package makes them; None where it may be another tool's:
            it is looked at, which waits for a GPU.

    Attributes:
        site: those linears, where a run of the model has shown which they are (:func:`peft_nvfp4.attach`): computed together.
    """

    site: Site | None = None
    _significand: float | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: Tensor | None,
        compute_dtype: torch.dtype,
        options: FrozenOptions,
        w: QuantizedMatrix,
        significand: float | None = None,
    ):
        super().__init__(in_features, out_features, bias, compute_dtype, options)
        for name in PARAMETERS:
            self.register_parameter(name, None)
        self._store(w, significand)

    @classmethod
    def quantize(
        cls, linear: nn.Linear, options: FrozenOptions | None = None, *, gscale: Tensor | None = None
    ) -> NVFP4FrozenLinear:
        """Quantise ``linear.weight`` with the searching scale rule ("mse"), under ``gscale`` or the next power of two.

        Raises:
            ValueError: the weight holds NaN or Inf.
        """
        weight = linear.weight.detach()
        if not torch.isfinite(weight).all():
            raise ValueError("weight holds NaN or Inf; a quantised layer cannot represent them")
        home, weight = weight.device, weight.to(_packing_device(weight))
        w = ops.quantize_weight(weight, WEIGHT, None if gscale is None else next_power_of_two(gscale.to(weight.device)))
        options = options or FrozenOptions()
        layer = cls(linear.in_features, linear.out_features, linear.bias, weight.dtype, options, w, 1.0)
        return layer.train(linear.training).to(home)

    # -- storage

    def _store(self, w: QuantizedMatrix, significand: float | None = None) -> None:
        """Keep W_f and, where the options ask for it, W_b. ``significand`` of the global scale: looked at if it is not given."""
        self._put("weight", "weight_scales", "weight_gscale", w, significand)
        values = torch.bfloat16 if self.significand == 1.0 else torch.float32  # D(W_f) is exact in it
        if self.options.weight_layouts == "cached" and self.options.gradients != "bf16":
            w_b = ops.quantize_weight(ops.dequantize(w, values).T, WEIGHT_BACKWARD)  # transpose_requantize, by chunks
            self._put("backward_weight", "backward_scales", "backward_gscale", w_b)

    @property
    def significand(self) -> float:
        """Of the global scale of W_f: 1 for a power of two, as this package's own are."""
        if self._significand is None:  # it was nowhere, or in pieces, when it was bound
            self._look()
        return self._significand or 1.0

    def _look(self, known: float | None = None) -> None:
        """Keep the significand of the global scale that is there now. At once: looking waits for a GPU, and within a forward
        neither a compiler nor the recording of a CUDA graph could do it."""
        self._significand = known
        if known is None and not self.weight_gscale.is_meta and not hasattr(self.weight_gscale, "device_mesh"):
            self._significand = reference.significand(self.weight_gscale.view(torch.float32))

    def rewritten(self) -> None:
        self._look()

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args, **kwargs) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if f"{prefix}weight_gscale" in state_dict:  # an adapter's has none
            self._look()

    def _put(self, codes: str, scales: str, gscale: str, q: QuantizedMatrix, significand: float | None = None) -> None:
        for name, data in ((codes, q.codes), (scales, q.scales), (gscale, _bytes(q.gscale))):
            setattr(self, name, frozen(data))  # a new parameter: snapshots, and layers that share the old one, keep it
        if gscale == "weight_gscale":
            self._look(significand)

    @property
    def forward_layout(self) -> QuantizedMatrix:
        """W_f (N, K)."""
        return QuantizedMatrix(self.weight, self.weight_scales, self.weight_gscale.view(torch.float32), self.in_features)

    @property
    def backward_layout(self) -> QuantizedMatrix | None:
        """W_b (K, N) if it is kept."""
        if self.backward_weight is None:
            return None
        return QuantizedMatrix(
            self.backward_weight, self.backward_scales, self.backward_gscale.view(torch.float32), self.out_features
        )

    def set_centre(self, mu: Tensor | None) -> None:
        """Subtract the constant mu (in_features,) from every input before quantising it, and add D(W_f) mu to the output.

        mu is typically the mean input on calibration data: a constant costs nothing in the GEMM, and what remains is smaller.
        """
        if mu is None:
            self.input_centre = self.output_centre = None
            return
        if tuple(mu.shape) != (self.in_features,) or not torch.isfinite(mu).all():
            raise ValueError(f"the centre must hold {self.in_features} finite values, got shape {tuple(mu.shape)}")
        mu = mu.detach().to(self.weight.device, torch.float32)
        self.input_centre = frozen(_bytes(mu))
        self.output_centre = frozen(_bytes(self.dequantize(torch.float32) @ mu))

    @property
    def _centre(self) -> Tensor | None:
        return None if self.input_centre is None else self.input_centre.view(torch.float32)

    @property
    def _constant(self) -> Tensor | None:
        return None if self.output_centre is None else self.output_centre.view(torch.float32)

    # -- the contract

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return ops.dequantize(self.forward_layout, dtype or self.compute_dtype)

    def requantize_(self, weight: Tensor) -> None:
        self._check_dense(weight)
        weight = weight.detach().to(self.weight.device)
        needed = ops.weight_gscale(weight)
        there = next_power_of_two(self.weight_gscale.view(torch.float32))  # if it is large enough: siblings share it
        self._store(ops.quantize_weight(weight, WEIGHT, torch.maximum(needed, there)), 1.0)
        if self.input_centre is not None:
            self.set_centre(self._centre)

    def snapshot(self) -> dict[str, nn.Parameter]:
        return {name: data for name, data in super().snapshot().items() if name not in ("input_centre", "output_centre")}

    def restore(self, snapshot: Mapping[str, nn.Parameter]) -> None:
        before = self.weight_gscale
        super().restore(snapshot)
        if self.weight_gscale is not before:
            self._look()
        if self.input_centre is not None:  # the constant belongs to the weight that is stored now
            self.set_centre(self._centre)

    def lora_input(self, x: Tensor) -> Tensor:
        return self.forward_with_lora_input(x)[1]

    def forward_with_lora_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        key, x = x, autocast_input(x)
        x2 = self._flat(x)
        with no_autocast(x):
            shared = self._quantized_input(key, x2)
            (y,) = product([(self, ())], x2, shared)
            seen = x if shared.exact else StraightThrough.apply(x, self._values(shared, x2))
        return y.view(*x.shape[:-1], self.out_features), seen

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_forward(x, ())

    def lora_forward(self, x: Tensor, branches: Sequence[Branch]) -> Tensor:
        key, x = x, autocast_input(x)  # autocast makes a new tensor for every reader: what they share is x as it came
        x2 = self._flat(x)
        with no_autocast(x):
            shared = self._quantized_input(key, x2)
            generation = kernels.generation(x2)
            if generation is not None and self._draws_nothing(branches):
                y = self._generate(generation, branches, x2, shared)
            elif self.site is None or torch.compiler.is_compiling():
                (y,) = product([(self, branches)], x2, shared)
            else:
                y = self.site.product(self, branches, key, x2, shared)
        return y.view(*x.shape[:-1], self.out_features)

    def _draws_nothing(self, branches: Sequence[Branch]) -> bool:
        """Whether a call needs no random numbers. (The first pass of reentrant checkpointing, which is without autograd too, must
        draw those that the second one will.)"""
        rounds = self.options.gradients == "nvfp4_sr" and self.training
        return not rounds and not any(branch.dropout for branch in branches)

    def _generate(self, kernel: ModuleType, branches: Sequence[Branch], x2: Tensor, shared: QuantizedInput) -> Tensor:
        """y (M, out_features) of few rows, without autograd: no Function, no copies of the adapters, two launches. In generation
        that bookkeeping took most of the time."""
        xd = None
        if branches:
            xd = x2 if shared.exact and not shared.hollow else self._values(shared, x2)
        constant = total_constant(self.bias, self._constant)
        values = xd if self.input_centre is None and len(shared.parts) == 1 else None
        adapters = [(b.a, b.b, b.scaling) for b in branches]
        return kernel.linear(shared.parts, self.forward_layout, constant, adapters, xd, values, self.significand)

    def _flat(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"the input's last dimension must be {self.in_features}, got shape {tuple(x.shape)}")
        return x.reshape(-1, self.in_features)

    def _frozen(self) -> Frozen:
        """This layer's tensors as the Function takes them."""
        # not only with autograd on: reentrant checkpointing draws its first seeds without, and must draw the same number
        sr_seed = draw_seed() if self.options.gradients == "nvfp4_sr" else None
        back = self.backward_layout
        w_b = (None,) * 3 if back is None else back[:3]
        return Frozen(self.bias, self._constant, *self.forward_layout[:3], *w_b, sr_seed)

    def _quantized_input(self, key: Tensor, x2: Tensor) -> QuantizedInput:
        """x~ of the tensor that the layer was called with (x2 is the same, cast and flattened): from whoever quantised it before,
        or made here and, where other linears read the same input, entered for them."""
        shared = activation_cache.get(key, self.options.terms, self.input_centre, x2.dtype)
        if shared is None:
            with torch.no_grad():
                parts = quantize_input(x2.detach(), self.options.terms, self._centre)
            shared = QuantizedInput(tuple(parts), self.input_centre, x2.dtype)
            if self.shares_input:
                activation_cache.put(key, shared)
        return shared

    def _values(self, shared: QuantizedInput, x2: Tensor) -> Tensor:
        """D(x~) in x's dtype, computed once for all linears of the site."""
        if shared.values is None:
            with torch.no_grad():
                shared.values = dequantize_input(list(shared.parts), self._centre, x2.dtype)
        return shared.values

    def extra_repr(self) -> str:
        o = self.options
        return f"{super().extra_repr()}, terms={o.terms}, weight_layouts={o.weight_layouts}, gradients={o.gradients}"


# ---------------------------------------------------------------------------------------------- linears of one input


def product(
    members: Sequence[tuple[NVFP4FrozenLinear, Sequence[Branch]]], x2: Tensor, shared: QuantizedInput
) -> tuple[Tensor, ...]:
    """y (M, out_features) of every layer and its branches, for x2 (M, in_features) with x~ in ``shared``."""
    first = members[0][0]
    branched = any(len(branches) for _, branches in members)
    if shared.hollow:
        xd = None
    elif shared.exact:
        xd = x2.detach()
    else:
        xd = first._values(shared, x2) if branched and not _makes_its_own(first, x2) else shared.values
    specs = tuple(
        LinearSpec(
            layer.out_features,
            layer.options.gradients,
            tuple(b.scaling for b in branches),
            tuple(b.dropout for b in branches),
            layer.significand,
        )
        for layer, branches in members
    )
    source = shared.source
    # attention keeps its output in any case: backward quantises that again, to the same codes, instead of keeping them too
    again = source is None and not shared.exact and kept_by_attention(x2)
    spec = SiteSpec(first.in_features, first.options.terms, specs, None if source is None else source.act, again)
    frozen, sources = [], []
    for layer, branches in members:  # seeds in the order of the layers: together or one by one, the numbers are the same
        sources += [t for b in branches for t in (b.a, b.b, draw_seed() if b.dropout else None)]
        frozen.append(layer._frozen())
    flat = flatten([*shared.parts, *(() if source is None else source[:2])], frozen, sources)
    return NVFP4Linears.apply(x2, xd, first._centre, spec, *flat)


VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "TransposeBackward")
ATTENTION = re.compile(r"ScaledDotProduct\w*(Flash|Efficient|Cudnn|FusedOverrideable)|FlashAttn\w*Func")
"""Autograd nodes of attention kernels that keep their output for backward (plain matrix products do not)."""


def kept_by_attention(x: Tensor) -> bool:
    """Whether x is a view of an attention kernel's output. Asked of the names of autograd's nodes: reading what a node has saved
    would unpack it, which hooks (checkpointing, offloading) may answer with work."""
    if torch.compiler.is_compiling():  # a graph has no nodes yet; what is kept is the compiler's choice
        return False
    node = x.grad_fn
    while node is not None and type(node).__name__.startswith(VIEWS):
        node = node.next_functions[0][0]
    return node is not None and ATTENTION.search(type(node).__name__) is not None


def _makes_its_own(layer: NVFP4FrozenLinear, x2: Tensor) -> bool:
    """Whether fprop has D(x~) as its operand anyway, so that nobody need make it before."""
    return layer._centre is None and layer.options.terms == 1 and x2.is_cuda and x2.dtype == torch.bfloat16


@dataclass
class _Output:
    """Of a layer that was computed before it was called, and what it was computed with."""

    y: Tensor
    operands: list[tuple]
    grad: bool


class Site:
    """The frozen linears that read one tensor, computed together when the first of them is called with it.

    Attributes:
        members: the layers, or the LoRA layers around them.
    """

    def __init__(self, members: Sequence[nn.Module]):
        self.members = list(members)

    def product(
        self, layer: NVFP4FrozenLinear, branches: Sequence[Branch], x: Tensor, x2: Tensor, shared: QuantizedInput
    ) -> Tensor:
        """y of ``layer`` for x, as it came, and x2, cast and flattened. Whatever else the site has to compute from the same x is
        left for its layers in ``shared``."""
        grad = torch.is_grad_enabled()
        ready: _Output | None = shared.outputs.pop(id(layer), None)
        if ready is not None and ready.grad == grad and _same(ready.operands, _operands(layer, branches)):
            return ready.y
        # a leaf's gradient accumulator holds the leaf: kept outputs would keep x, and with it their own entry, alive
        if not shared.entered or x.requires_grad and x.grad_fn is None:
            return product([(layer, branches)], x2, shared)[0]
        group = [(layer, branches)] + self._others(layer)
        if not grad and any(branch.dropout for _, its in group for branch in its):
            # the first pass of reentrant checkpointing: each layer's seeds must be drawn where it is called, to be drawn again
            group = group[:1]
        y, *ys = product(group, x2, shared)
        for (other, its), output in zip(group[1:], ys):
            shared.outputs[id(other)] = _Output(output, _operands(other, its), grad)
        return y

    def _others(self, layer: NVFP4FrozenLinear) -> list[tuple[NVFP4FrozenLinear, Sequence[Branch]]]:
        """The other layers with their branches, but for those whose forward is more than that."""
        found, member = [], False
        for module in self.members:
            base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
            if base is layer:
                member = True
                continue
            branches = module.plain_branches() if hasattr(module, "plain_branches") else ()
            if branches is not None and base.options.terms == layer.options.terms and base.input_centre is layer.input_centre:
                found.append((base, branches))
        return found if member else []  # a replica of DataParallel refers to the original's site


def _operands(layer: NVFP4FrozenLinear, branches: Sequence[Branch]) -> list[tuple]:
    """What a layer's output depends on, but for x: tensors with their versions, constants of the branches."""
    tensors = [layer.weight, layer.bias, *(t for branch in branches for t in (branch.a, branch.b))]
    versions = [None if t is None or t.is_inference() else t._version for t in tensors]
    return [*zip(tensors, versions), *((branch.scaling, branch.dropout) for branch in branches)]


def _same(first: list[tuple], second: list[tuple]) -> bool:
    """Tensors are compared by identity."""
    return len(first) == len(second) and all(
        (x[0] is y[0] or isinstance(x[0], float) and x[0] == y[0]) and x[1] == y[1] for x, y in zip(first, second)
    )
