"""Experts of a mixture, kept by a model as 3-D parameters, frozen one expert at a time.

transformers keeps the experts of a layer in two parameters, ``gate_up_proj`` (E, 2I, H) and ``down_proj`` (E, H, I).
:class:`FrozenExperts` takes the place of the module that holds them. Every expert's matrix is quantised by itself, exactly as a
linear layer with that weight would be, and computes through the same frozen linear; only the storage is shared: each packed
tensor of all experts of a projection is one ``uint8`` parameter with a leading dimension E, named after the projection
(``gate_up_proj`` holds the codes, ``gate_up_proj_scales`` the block scales, ...). Rejected: a module for every expert and
projection. A model of 48 layers with 128 experts would have 12,288 of them, and PEFT would adapt each by itself where the dense
model has one target parameter.

    y_t = sum_j  w_tj * down_e(act(gate_e(x_t)) * up_e(x_t)),    e = index_tj,  j = 1 .. k

Some modules hold their weights transposed, (E, K, N), or gate and up in turn, or have biases (gpt-oss, all three): packed are the
matrices of linears, biases stay dense, and what lies between the projections is computed by the module that was replaced.

Tokens are sorted by expert, on the device (:func:`peft_nvfp4.numerics.grouped.route`). In NVFP4 all experts of a projection are
one operator, forward and backward, adapters included (:mod:`peft_nvfp4.autograd.experts`): no size depends on the routing and
nothing waits for the device, so that a CUDA graph can be recorded. In NF4 each expert runs as a frozen linear on its rows, after
one synchronisation that tells how many there are.

Routers, shared experts and everything else of the mixture stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...autograd.activation_cache import QuantizedInput, quantized_input
from ...autograd.experts import ExpertsBranch, ExpertsLinear, SortedRows, WeightedSum, experts_linear
from ...autograd.frozen_linear import Branch, autocast_input, no_autocast
from ...autograd.fused import GatedQuantize, as_parts
from ...autograd.hosted import Hosted
from ...numerics.formats import QuantizedMatrix
from ...numerics.grouped import Routing, route, segments
from ...numerics.recognition import activation_of, limit_of, rows_for, samples
from ..frozen_linear import FrozenLinear, FrozenOptions, frozen
from ..plain import StandIn
from ..registry import BACKENDS
from .packing import FROM_PACKED, LEAVES, packed_of, scale_factors, stack_name

Adapters = Mapping[str, Sequence[ExpertsBranch]]
"""Name of a projection -> its LoRA branches."""

DOWN = "down_proj"


def first_of(module: nn.Module) -> str:
    """Name of the projection that reads the input: gate and up in one, or up alone."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts that can be frozen: transformers' experts interface says (by these attributes) what such a
    module computes. Experts with a norm of their own cannot."""
    if isinstance(module, FrozenExperts) or not hasattr(module, "is_transposed") or not hasattr(module, "_apply_gate"):
        return False
    if getattr(module, "has_post_expert_norm", False):
        return False
    first, wide = first_of(module), 2 if getattr(module, "has_gate", True) else 1
    biases = {bias_name(name) for name in (first, DOWN)} if getattr(module, "has_bias", False) else set()
    if {name for name, _ in module.named_parameters()} != {first, DOWN} | biases:
        return False
    a, b = getattr(module, first), getattr(module, DOWN)
    if a.ndim != 3 or b.ndim != 3 or not (a.is_floating_point() and b.is_floating_point()):
        return False
    (e, n, k), down = matrices(module, a).shape, tuple(matrices(module, b).shape)
    return n % wide == 0 and down == (e, k, n // wide)


def bias_name(name: str) -> str:
    """Name of a projection's biases (E, N)."""
    return f"{name}_bias"


def matrices(module: nn.Module, weight: Tensor) -> Tensor:
    """Dense experts' weights of a projection as matrices of linears (E, N, K), or back: some modules hold them transposed."""
    return weight.transpose(1, 2) if getattr(module, "is_transposed", False) else weight


def linear_of(weight: Tensor) -> nn.Linear:
    """A linear layer around a weight (N, K), without a copy."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = frozen(weight)
    return linear


class FrozenExperts(StandIn):
    """Experts whose weights are frozen and packed. Differentiable in the input and in the routing weights.

    Attributes:
        backend: word of the registry of frozen linears.
        projections: name -> (N, K) of one expert's matrix.
        options: name -> :class:`~peft_nvfp4.nn.frozen_linear.FrozenOptions`.
        compute_dtype: dtype of :meth:`dequantize`; follows ``.to(dtype)``.
        dense_dtype: dtype of what :meth:`to_experts` makes, where it is not ``compute_dtype``.
        act: activation of the fused product, see :meth:`fuse`.
    """

    act: str | None = None
    hosted: Hosted | None = None  # as of a frozen linear

    def __init__(self, original: nn.Module, backend: str, options: Mapping[str, FrozenOptions]):
        super().__init__()
        if backend not in FROM_PACKED:
            raise ValueError(f"experts are frozen in {' or '.join(FROM_PACKED)}, got {backend!r}")
        names = first_of(original), DOWN
        self.backend, self.options = backend, {name: options[name] for name in names}
        self.projections = {name: tuple(matrices(original, getattr(original, name)).shape[1:]) for name in names}
        self.experts = getattr(original, DOWN).shape[0]
        self.compute_dtype = getattr(original, DOWN).dtype
        self.dense_dtype: torch.dtype | None = None
        self.train(original.training)
        self._layers: dict[str, tuple[tuple, list[FrozenLinear]]] = {}
        self._scale_factors: dict[str, list[float]] = {}  # kept: looking waits for a GPU
        self._outside = (original,)
        self._take_the_place_of(original)  # sizes, config and flags that a modeling file may ask for; the activation

    @classmethod
    def quantize(cls, original: nn.Module, backend: str, options: Mapping[str, FrozenOptions]) -> FrozenExperts:
        """Frozen experts that compute what ``original`` did, up to the format's error. Its weights are let go, one projection
        after the other."""
        self = cls(original, backend, options)
        for name in self.projections:
            weight = getattr(original, name).detach()
            original.register_parameter(name, None)
            self.pack(name, matrices(original, weight))
            del weight
        self.take_biases()
        return self

    def take_biases(self) -> None:
        """Biases go from the module that this one replaces to this one; they stay dense."""
        (original,) = self._outside
        for name in map(bias_name, self.projections):
            if (bias := original._parameters.get(name)) is not None:
                original.register_parameter(name, None)
                self.register_parameter(name, bias.requires_grad_(False))

    @property
    def elements(self) -> int:
        """Number of weights."""
        return self.experts * sum(n * k for n, k in self.projections.values())

    # -- storage

    def pack(self, name: str, weight: Tensor) -> None:
        """Quantise a projection's dense weights (E, N, K), each expert by itself, and store them.

        Raises:
            ValueError: a weight holds NaN or Inf.
        """
        cls = BACKENDS[self.backend]
        self.store(name, [packed_of(cls.quantize(linear_of(w), self.options[name])) for w in weight.unbind(0)])

    def store(self, name: str, experts: Sequence[Mapping[str, Tensor]]) -> None:
        """Keep a projection's packed tensors, those of every expert by their names in a frozen linear."""
        for leaf in experts[0]:
            setattr(self, stack_name(name, leaf), frozen(torch.stack([tensors[leaf] for tensors in experts])))
        self._layers.pop(name, None)
        self._scale_factors.pop(name, None)

    def stacks(self, name: str) -> dict[str, nn.Parameter]:
        """A projection's packed tensors, (E, ...) uint8, by the name that they have in a frozen linear."""
        leaves = {stack_name(name, leaf): leaf for leaf in LEAVES}
        return {leaves[key]: p for key, p in self.named_parameters(recurse=False) if key in leaves}

    def packed_tensors(self) -> dict[str, Tensor]:
        """Every tensor that the frozen weights occupy, by name."""
        biases = {bias_name(name) for name in self.projections}
        return {name: p for name, p in self.named_parameters(recurse=False) if name not in biases}

    def layers(self, name: str, keep: bool = False) -> list[FrozenLinear]:
        """A projection's experts as frozen linears that share this module's memory. ``keep`` them for the next call: by whoever
        calls in every step, since they keep the memory, too (of a copy on another device, say)."""
        stacks = self.stacks(name)
        if any(hasattr(t, "device_mesh") for t in stacks.values()):
            raise ValueError(
                "the weights are sharded (FSDP2): save the adapter, load it with its base on one process, and merge there"
            )
        stamp = (self.compute_dtype, self.options[name], *((t.data_ptr(), t.device) for t in stacks.values()))
        if (cached := self._layers.get(name)) is None or cached[0] != stamp:  # moved, merged, or gathered by FSDP
            make, (n, k) = FROM_PACKED[self.backend], self.projections[name]
            known = self._scale_factors.get(name) or scale_factors(stacks, self.experts)
            if not getattr(self, name).is_meta:
                self._scale_factors[name] = known
            slices = ({leaf: t.detach()[e] for leaf, t in stacks.items()} for e in range(self.experts))
            each = zip(slices, known)
            cached = stamp, [make(tensors, n, k, self.compute_dtype, self.options[name], s) for tensors, s in each]
            if keep:
                self._layers[name] = cached
        for layer in cached[1]:
            layer.training, layer.hosted = self.training, self.hosted
        return cached[1]

    def dequantize(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The weights (E, N, K) that a projection computes with, in ``dtype`` (default ``compute_dtype``)."""
        dtype, device = dtype or self.compute_dtype, getattr(self, name).device
        weights = torch.empty(self.experts, *self.projections[name], dtype=dtype, device=device)
        for w, layer in zip(weights, self.layers(name)):
            w.copy_(layer.dequantize(dtype))
        return weights

    def requantize_(self, name: str, weight: Tensor) -> None:
        """Replace a projection's weights by (the quantised form of) dense ones (E, N, K). A failure leaves them as they were."""
        layers = self.layers(name)
        self._layers.pop(name, None)  # not to be met again if only some of them get their new weight
        for layer, w in zip(layers, weight.unbind(0), strict=True):
            layer.requantize_(w)
        self.store(name, [packed_of(layer) for layer in layers])

    def keep_layouts(self, weight_layouts: str) -> None:
        """As of a frozen linear in NVFP4, of all experts."""
        for name, options in self.options.items():
            layers = self.layers(name)
            for layer in layers:
                layer.keep_layouts(weight_layouts)
            for leaf in ("backward_weight", "backward_scales", "backward_gscale") if weight_layouts == "transient" else ():
                setattr(self, stack_name(name, leaf), None)
            self.options[name] = replace(options, weight_layouts=weight_layouts)
            self.store(name, [packed_of(layer) for layer in layers])

    def snapshot(self, name: str) -> dict[str, nn.Parameter]:
        """A projection's parameters, to be given back to :meth:`restore`; by reference, nothing changes them in place."""
        return {stack_name(name, leaf): p for leaf, p in self.stacks(name).items()}

    def restore(self, snapshot: Mapping[str, nn.Parameter]) -> None:
        """Put back the bytes of a snapshot, on the device where the module is now."""
        for key, saved in snapshot.items():
            device = getattr(self, key).device
            setattr(self, key, saved if saved.device == device else frozen(saved.data.to(device)))
        self._scale_factors.clear()

    def rewritten(self) -> None:
        """As of a frozen linear."""
        self._layers.clear()
        self._scale_factors.clear()

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args, **kwargs) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if any(f"{prefix}{stack_name(name, 'weight_gscale')}" in state_dict for name in self.projections):  # not an adapter's
            self.rewritten()

    def to_experts(self, dense: Mapping[str, Tensor] | None = None) -> nn.Module:
        """The module that this one replaced, with dense weights: of the given ones (E, N, K), or of what is stored."""
        dtype, (original,) = self.dense_dtype or self.compute_dtype, self._outside
        for name in self.projections:
            weight = (dense or {}).get(name)
            weight = self.dequantize(name, dtype) if weight is None else weight.detach().to(dtype)
            original.register_parameter(name, frozen(matrices(original, weight).contiguous()))
            if (bias := self._parameters.get(bias_name(name))) is not None:
                original.register_parameter(bias_name(name), frozen(bias.detach().to(dtype, copy=True)))
        return original.train(self.training)

    # -- forward

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, adapters: Adapters | None = None
    ) -> Tensor:
        """y (T, H) of hidden_states (T, H), with the k experts of every token and their weights in the other two, (T, k) each.
        An index of E or more is an expert of another process, and adds nothing here."""
        there = None if self.hosted is None else self.hosted.fetch()
        act = None if self.act is None or self.was_edited() else self.act
        routing = route(top_k_index, self.experts)
        branches = [(adapters or {}).get(name, ()) for name in self.projections]
        if self.backend == "nvfp4":
            rows = self._grouped(hidden_states, routing, act, branches, there)
        else:
            rows = self._one_by_one(hidden_states, routing, branches)
        with no_autocast(hidden_states):
            return WeightedSum.apply(rows, top_k_weights, routing, hidden_states.dtype)

    def _grouped(
        self,
        x: Tensor,
        routing: Routing,
        act: str | None,
        branches: Sequence[Sequence[ExpertsBranch]],
        there: AbstractContextManager | None,
    ) -> Tensor:
        """(R, H) of all experts together; ``act``: that of the fused product, or None."""
        first, down = (self._linear(*item, there) for item in zip(self.projections, branches))
        x = autocast_input(x)
        with no_autocast(x):
            quantized = quantized_input(x, x, self.options[first_of(self)].terms, None, False)
            z = experts_linear(x, quantized, routing, True, first)
        terms = self.options[DOWN].terms
        h, quantized = (self._activate(z), None) if act is None else self._product(z, act, terms)
        del z  # twice as wide as h, and not kept where the product is fused
        with no_autocast(x):
            quantized = quantized or quantized_input(h, h, terms, None, False)
            return experts_linear(h, quantized, routing, False, down)

    def _linear(
        self, name: str, branches: Sequence[ExpertsBranch], there: AbstractContextManager | None
    ) -> ExpertsLinear:
        gradients = self.options[name].gradients
        if gradients == "nvfp4_sr" and not self.training:  # evaluation draws no random numbers
            gradients = "nvfp4"
        (n, k), factors = self.projections[name], self._factors(name)
        w_b = self._stack(name, "backward_weight", "backward_scales", "backward_gscale", n)
        w_f = self._stack(name, "weight", "weight_scales", "weight_gscale", k)
        return ExpertsLinear(w_f, w_b, factors, gradients, tuple(branches), self._parameters.get(bias_name(name)), there=there)

    def _stack(self, name: str, codes: str, scales: str, gscale: str, k: int) -> QuantizedMatrix | None:
        """A layout of all experts, None if it is not kept."""
        found = [self._parameters.get(stack_name(name, leaf)) for leaf in (codes, scales, gscale)]
        return None if found[0] is None else QuantizedMatrix(*found[:2], found[2].view(torch.float32).view(-1), k)

    def _factors(self, name: str) -> tuple[float, ...] | None:
        """Of the global scales; None where all are powers of two, as this package's own."""
        if (known := self._scale_factors.get(name)) is None:
            known = self._scale_factors[name] = scale_factors(self.stacks(name), self.experts)
        return None if all(factor == 1.0 for factor in known) else tuple(known)

    def _one_by_one(self, x: Tensor, routing: Routing, branches: Sequence[Sequence[ExpertsBranch]]) -> Tensor:
        """(R, H), each expert's projections as frozen linears."""
        rows = SortedRows.apply(x, routing)
        first, down = (self.layers(name, True) for name in self.projections)
        inner, outer = ([[Branch(b.a[e], b.b[e], b.scaling, 0.0) for b in of] for e in range(self.experts)] for of in branches)
        biases = [self._parameters.get(bias_name(name)) for name in self.projections]
        outputs, end = [], 0
        for e, here in segments(routing.ends):
            z = first[e].lora_forward(rows[here], inner[e])
            z = z if biases[0] is None else z + biases[0][e]
            y = down[e].lora_forward(self._activate(z), outer[e])
            outputs.append(y if biases[1] is None else y + biases[1][e])
            end = here.stop
        rest = len(rows) - end  # rows of other processes' experts
        if rest or not outputs:
            outputs.append(rows.new_zeros(rest, x.shape[1], dtype=outputs[0].dtype if outputs else x.dtype))
        return torch.cat(outputs)

    def _product(self, z: Tensor, act: str, terms: int) -> tuple[Tensor, QuantizedInput]:
        """act(gate) * up, quantised in the same pass for the last projection; backward keeps codes of gate and up."""
        gate, up = z.chunk(2, dim=-1)
        h, *flat = GatedQuantize.apply(gate, up, None, act, terms, True)
        *codes, _, _ = as_parts(flat, gate.shape[-1])
        return h, QuantizedInput(tuple(codes), None, h.dtype, from_producer=True, placeholder=True)

    def fuse(self) -> str | None:
        """Compute act(gate) * up as a fused gated MLP does (:mod:`peft_nvfp4.fusion.mlp`): from now on the product is quantised
        from FP32, and what backward keeps of gate and up are codes, a quarter of the memory. Returns why not, where it cannot."""
        if self.backend != "nvfp4" or first_of(self) != "gate_up_proj":
            return "its experts are no gated MLPs frozen in nvfp4"
        if limit := limit_of(self._outside[0]):
            return f"its experts cut values off ({limit}), which the fused product does not"
        z = samples(rows_for(64), 128, generator=torch.Generator("cpu").manual_seed(0))
        with torch.no_grad():
            found = {activation_of(self._activate(t), *t.chunk(2, dim=-1)) for t in (z, z.to(self.compute_dtype))}
        self.act = found.pop() if len(found) == 1 else None
        return None if self.act else "its experts compute something else than act(gate) * up with SiLU or tanh-GELU"

    def unfuse(self) -> None:
        """Undo :meth:`fuse`."""
        self.act = None

    def _activate(self, z: Tensor) -> Tensor:
        return self._outside[0]._apply_gate(z) if first_of(self) == "gate_up_proj" else self.act_fn(z)

    def _apply(self, fn: Callable, recurse: bool = True) -> FrozenExperts:
        # compute_dtype follows whatever cast is applied to floating tensors; packed bytes are not cast by anything
        device = getattr(self, DOWN).device
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=device))

        def keeps_bytes(t: Tensor) -> Tensor:  # Module.type() casts integers too
            cast = fn(t)
            return cast if t.is_floating_point() or cast.dtype == t.dtype else t.to(cast.device)

        super()._apply(keeps_bytes, recurse)
        self.compute_dtype = probe.dtype
        self._layers = {}
        return self

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_layers": {}}  # views of this module's memory, not of a copy's

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={(self.experts, *shape)}" for name, shape in self.projections.items())
        return f"{shapes}, backend={self.backend}"


def frozen_experts(model: nn.Module) -> list[tuple[str, FrozenExperts]]:
    """(dotted name, module) of all frozen experts of a model."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, FrozenExperts)]
