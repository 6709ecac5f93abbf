"""The hooks of :mod:`peft_nvfp4.diagnostics.statistics`, which see the tensors of frozen linears, and the sums over these.

The hooks hold on to nothing that autograd would not hold anyway, except: gate and up of one gated MLP until its last linear is
called. What a fused norm or a gated MLP quantises never exists unquantised: it is recomputed from the norm's input, and from gate
and up, with the bits of the fused kernels (:mod:`peft_nvfp4.numerics.fused_reference`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .. import ops
from ..autograd import activation_cache
from ..autograd.frozen_linear import autocast_input
from ..autograd.module_hooks import observing
from ..fusion.compressed import CompressedGatedMLP
from ..fusion.mlp import FusedGatedMLP
from ..fusion.norm import NVFP4RMSNorm
from ..fusion.probe import base_of, frozen_linears
from ..nn.frozen_linear import FrozenLinear, in_pieces
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics import fused_reference
from ..numerics.formats import BLOCK, E2M1_MAX, E4M3_NAN, GRADIENT, GRADIENT_STOCHASTIC, WEIGHT, QuantizedMatrix
from ..numerics.reference import e4m3_decode
from ..ops.linear import dequantize_input, quantize_input
from ..training.cuda_graphs import GraphedForward
from ..training.offload.frozen_methods import computing

SITES = ("weight", "input", "gradient")
NUMBERS = ("error", "underflow", "saturation", "amax", "scale_min", "scale_max")
"""Of a :class:`TensorStatistics`, in the order in which they are shown."""
CHUNK = 1 << 22
"""Values that are compared at a time: bounds the temporary memory."""


@dataclass(frozen=True)
class TensorStatistics:
    """Of one tensor, see :mod:`peft_nvfp4.diagnostics.statistics`. None: not known (an error without the original weight) or not
    defined (scales of NF4)."""

    error: float | None
    underflow: float | None
    saturation: float | None
    amax: float
    scale_min: float | None
    scale_max: float | None
    values: int  # that were looked at
    used: bool = True  # the layer computes with the quantised tensor


@dataclass
class Sums:
    """Running totals of one tensor, on its device: reading them waits for the GPU, adding to them does not."""

    used: bool = True  # the layer computes with the quantised tensor
    known: bool = True  # what was quantised is at hand; otherwise only ranges are reported
    values: int = 0
    totals: Tensor | None = None  # squared error, squared norm, not zero, underflown, saturated
    extremes: Tensor | None = None  # amax, -smallest scale, largest scale

    @torch.no_grad()
    def add(
        self, t: Tensor, parts: Sequence[QuantizedMatrix] = (), offset: Tensor | None = None, d: Tensor | None = None
    ) -> None:
        """Add t (R, K) with its terms; or with d, the values that stand for it in another format."""
        step = max(1, CHUNK // max(1, t.shape[1]))
        for start in range(0, t.shape[0], step):
            rows = slice(start, start + step)
            pieces = [part._replace(codes=part.codes[rows], scales=part.scales[rows]) for part in parts]
            pieces = [part._replace(gscale=part.gscale[rows]) if len(part.gscale) > 1 else part for part in pieces]
            totals = _measured(t[rows].float(), pieces, offset, None if d is None else d[rows])
            self.accumulate(*totals, t[rows].numel())

    def accumulate(self, totals: Tensor, extremes: Tensor, values: int) -> None:
        self.values += values
        self.totals = totals if self.totals is None else self.totals + totals
        self.extremes = extremes if self.extremes is None else torch.maximum(self.extremes, extremes)

    def result(self) -> TensorStatistics:
        error, square, nonzero, lost, beyond = self.totals.tolist()
        amax, low, high = self.extremes.tolist()
        share = lambda part, whole: part / whole if whole else 0.0
        scales = (-low, high) if high > 0 else (None, None)
        known = [share(error, square) ** 0.5, share(lost, nonzero), share(beyond, self.values)] if self.known else [None] * 3
        return TensorStatistics(*known, amax, *scales, self.values, self.used)


def _measured(x: Tensor, parts: Sequence[QuantizedMatrix], offset: Tensor | None, d: Tensor | None) -> tuple[Tensor, Tensor]:
    """Totals and extremes, as :class:`Sums` has them, of x (R, K) float32."""
    moved = x if offset is None else x - offset
    d = dequantize_input(parts, None, torch.float32) if d is None else d.float()
    nonzero = moved != 0
    saturated, low, high = x.new_zeros(()), x.new_full((), -torch.inf), x.new_zeros(())
    if parts:
        largest = sum(e4m3_decode(part.scales) * part.gscale[:, None] for part in parts) * E2M1_MAX  # that a block can hold
        largest = torch.where(largest > 0, largest, torch.inf)  # where that is nothing, values underflow
        saturated = (moved.abs() > largest.repeat_interleave(BLOCK, dim=1)[:, : parts[0].k]).sum()
        scales = parts[0].scales
        decoded, real = e4m3_decode(scales), (scales != 0) & (scales != E4M3_NAN)
        low, high = -torch.where(real, decoded, torch.inf).amin(), torch.where(real, decoded, 0.0).amax()
    sums = [(moved - d).square().sum(dtype=torch.float64), x.square().sum(dtype=torch.float64)]
    counts = [nonzero.sum(), (nonzero & (d == 0)).sum(), saturated]
    return torch.stack([*sums, *(count.double() for count in counts)]), torch.stack([x.abs().amax(), low, high])


class Measurement:
    """A context in which the frozen linears of a model are watched: at most so many ``rows`` (tokens) of a tensor, evenly spaced;
    all of them if None."""

    def __init__(self, model: nn.Module, rows: int | None = None, sites: Sequence[str] = ("input", "gradient")):
        if unknown := [site for site in sites if site not in SITES]:
            raise ValueError(f"unknown site {unknown[0]!r}; choose from {', '.join(SITES)}")
        if rows is not None and rows < 1:
            raise ValueError(f"rows must be a positive number, got {rows}")
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.linears = frozen_linears(self.model)
        if not self.linears:
            raise ValueError("no frozen linears in this model: freeze it, or give it an adapter with NVFP4LoraConfig, before")
        self.rows, self.sites = rows, sites
        self.sums: dict[tuple[str, str], Sums] = {}
        self._produced = WeakTensorKeyDictionary()  # output of a fused norm -> what it quantised, as sums
        self._halves: dict[nn.Module, list[Tensor]] = {}  # gated MLP -> outputs of its first linears
        self._first = {}  # name of a linear -> the gated MLP it is a first linear of
        self._last = {}  # name of a linear -> the gated MLP it is the last linear of

    def __enter__(self) -> Measurement:
        self._stack = ExitStack()
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in self.model.named_modules():
            if isinstance(forward := vars(module).get("forward"), GraphedForward):
                module.forward = forward.original  # the recordings stay as they are
                self._stack.callback(setattr, module, "forward", forward)
            elif type(module) is NVFP4RMSNorm and "input" in self.sites:
                self._stack.callback(module.register_forward_hook(observing(partial(self._norm))).remove)
            elif isinstance(module, FusedGatedMLP) and not isinstance(module, CompressedGatedMLP):
                prefix = f"{name}." if name else ""
                self._first |= {prefix + first: module for first in module.parts.first}
                self._last[prefix + module.parts.down] = module
        for name, module in self.linears.items():
            before, after = partial(self._before, name), partial(self._after, name)
            self._stack.callback(module.register_forward_pre_hook(observing(before), with_kwargs=True).remove)
            self._stack.callback(module.register_forward_hook(observing(after)).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._halves.clear()

    def result(self, weights: Mapping[str, Tensor] | None = None, stored: bool = True) -> dict[str, dict[str, TensorStatistics]]:
        """What was seen; with stored weights, what became of ``weights`` (dotted name -> dense weight) where those are given."""
        layers: dict[str, dict[str, TensorStatistics]] = {}
        for name, module in self.linears.items():
            sums = {site: self.sums.get((name, site)) for site in SITES}
            if stored:
                with computing(base := base_of(module)):
                    sums["weight"] = weight_sums(base, (weights or {}).get(f"{name}.weight"))
            if measured := {site: total.result() for site, total in sums.items() if total is not None}:
                layers[name] = measured
        return layers

    # -- what the hooks do

    @torch.no_grad()
    def _norm(self, norm: NVFP4RMSNorm, args: tuple, y: Tensor) -> None:
        """A fused norm returned D(Q(y)): compare with y, once for all linears that will read it."""
        if _in_backward() or not self._fused(y, norm._outside[1]):
            return
        unquantised, _ = fused_reference.rmsnorm(self._some(args[0]), norm.weight, norm._eps, norm.plus_one)
        self._produced[y] = sums = Sums()
        _add_input(sums, unquantised, norm._outside[1])

    @staticmethod
    def _fused(x: Tensor, reader: NVFP4FrozenLinear) -> bool:
        """Whether a producer has quantised x already, so that x is not what was quantised."""
        entry = activation_cache.get(x, reader.options.terms, reader.input_offset, autocast_input(x).dtype)
        return entry is not None and entry.from_producer

    @torch.no_grad()
    def _before(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if "input" not in self.sites or _in_backward():
            return
        x, layer = args[0] if args else next(iter(kwargs.values())), base_of(module)
        used = isinstance(layer, NVFP4FrozenLinear) or layer.options.activations == "nvfp4"
        sums = self.sums.setdefault((name, "input"), Sums(used))
        halves = self._halves.pop(self._last.get(name), None)
        if (produced := self._produced.get(x)) is not None:
            sums.accumulate(produced.totals, produced.extremes, produced.values)
        elif halves and isinstance(layer, NVFP4FrozenLinear) and self._fused(x, layer):
            pair, parts = halves if len(halves) == 2 else halves[0].chunk(2, dim=-1), self._last[name].parts
            product = fused_reference.gated_product(pair[parts.gate], pair[1 - parts.gate], parts.act, pair[parts.gate].dtype)
            _add_input(sums, product, layer)  # what the fused kernel quantised
        else:
            _add_input(sums, self._some(autocast_input(x)), layer)

    def _after(self, name: str, module: nn.Module, args: tuple, y: Tensor) -> None:
        if name in self._first and "input" in self.sites and not _in_backward():
            self._halves.setdefault(self._first[name], []).append(self._some(y.detach()))
        if "gradient" in self.sites and y.requires_grad:
            layer = base_of(module)
            used = isinstance(layer, NVFP4FrozenLinear) and layer.options.gradients != "bf16"
            sums = self.sums.setdefault((name, "gradient"), Sums(used))
            y.register_hook(lambda dy: _add_gradient(sums, self._some(dy.detach()), layer))

    def _some(self, t: Tensor) -> Tensor:
        """t (..., K) as a matrix, of many rows some: a row is quantised by itself, so its numbers do not change."""
        t = t.detach().reshape(-1, t.shape[-1])
        return t if self.rows is None or t.shape[0] <= self.rows else t[:: -(-t.shape[0] // self.rows)]


def _in_backward() -> bool:
    """Within a backward pass, so that a forward is the second one of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _add_input(sums: Sums, x: Tensor, layer: FrozenLinear) -> None:
    terms, offset = (layer.options.terms, layer._offset) if isinstance(layer, NVFP4FrozenLinear) else (1, None)
    sums.add(x, quantize_input(x, offset, terms), offset)


@torch.no_grad()
def _add_gradient(sums: Sums, dy: Tensor, layer: FrozenLinear) -> None:
    stochastic = sums.used and layer.options.gradients == "nvfp4_sr"
    seed = torch.zeros((), dtype=torch.int64, device="cpu") if stochastic else None  # not one of the training's
    sums.add(dy, [ops.quantize(dy.contiguous(), GRADIENT_STOCHASTIC if stochastic else GRADIENT, seed=seed)])


@torch.no_grad()
def weight_sums(layer: FrozenLinear, original: Tensor | None) -> Sums | None:
    """Of a stored weight, against the original if that is at hand; None where FSDP2 holds it in pieces."""
    if in_pieces(layer):
        return None
    if original is not None:
        original = original.detach().to(layer.weight.device)
        layer._check_dense(original)
    if layer.weight.is_floating_point():  # what NVFP4 would make of it
        sums, w = Sums(used=False), layer.weight.detach() if original is None else original
        sums.add(w, [ops.quantize_weight(w, WEIGHT)])
    else:
        sums, d = Sums(known=original is not None), layer.dequantize(torch.float32)
        sums.add(d if original is None else original, [layer.forward_layout] if isinstance(layer, NVFP4FrozenLinear) else (), d=d)
    return sums
