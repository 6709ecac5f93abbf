"""How :mod:`peft_nvfp4.diagnostics.statistics` looks at a model: hooks that see the tensors of frozen linears, and sums over them.

The hooks hold on to nothing that autograd would not hold anyway, except: gate and up of one gated MLP until its last linear is
called. What a fused norm or a gated MLP quantises is made again from its inputs, with the bits of the fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .. import ops
from ..autograd import activation_cache
from ..autograd.frozen_linear import autocast_input
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
from ..training.offload.layers import computing

SITES = ("weight", "input", "gradient")
NUMBERS = ("error", "underflow", "saturation", "amax", "scale_min", "scale_max")
"""Of a :class:`TensorStatistics`, in the order in which they are shown."""
CHUNK = 1 << 22
"""Values that are compared at a time: bounds the temporary memory."""


@dataclass(frozen=True)
class TensorStatistics:
    """Of one tensor; the module's docstring says what the numbers are. None: not known (an error without the original weight) or
    not defined (scales of NF4).

    Attributes:
        values: how many were looked at.
        used: the layer computes with the quantised tensor.
    """

    error: float | None
    underflow: float | None
    saturation: float | None
    amax: float
    scale_min: float | None
    scale_max: float | None
    values: int
    used: bool = True


# ---------------------------------------------------------------------------------------------- sums over one tensor


class Sums:
    """Running totals of one tensor, on its device: reading them waits for the GPU, adding to them does not."""

    def __init__(self, used: bool = True):
        self.used, self.values, self.known, self.scaled = used, 0, True, True
        self.totals: Tensor | None = None  # squared error, squared norm, not zero, lost, beyond
        self.extremes: Tensor | None = None  # amax, -smallest scale, largest scale

    @torch.no_grad()
    def add(
        self, t: Tensor, parts: Sequence[QuantizedMatrix] = (), centre: Tensor | None = None, d: Tensor | None = None
    ) -> None:
        """Add t (R, K) with its terms; or with d, the values that stand for it in another format."""
        step = max(1, CHUNK // max(1, t.shape[1]))
        for start in range(0, t.shape[0], step):
            rows = slice(start, start + step)
            pieces = [_rows(part, rows) for part in parts]
            self._add(t[rows], pieces, centre, None if d is None else d[rows])

    def _add(self, t: Tensor, parts: Sequence[QuantizedMatrix], centre: Tensor | None, d: Tensor | None) -> None:
        x = t.float()
        moved = x if centre is None else x - centre
        d = dequantize_input(parts, None, torch.float32) if d is None else d.float()
        nonzero = moved != 0
        counts = [(moved - d).square().sum(dtype=torch.float64), x.square().sum(dtype=torch.float64)]
        counts += [nonzero.sum().double(), (nonzero & (d == 0)).sum().double()]
        counts.append((moved.abs() > _top(parts)).sum().double() if parts else counts[0].new_zeros(()))
        scales = parts[0].scales if parts else None
        self._accumulate(torch.stack(counts), _extremes(x, scales), t.numel())
        self.scaled &= scales is not None

    def add_stored(self, d: Tensor, scales: Tensor | None) -> None:
        """A stored weight d of which the original is not at hand: only ranges are known."""
        self.known = False
        self._accumulate(torch.zeros(5, dtype=torch.float64, device=d.device), _extremes(d, scales), d.numel())
        self.scaled &= scales is not None

    def _accumulate(self, totals: Tensor, extremes: Tensor, values: int) -> None:
        self.values += values
        self.totals = totals if self.totals is None else self.totals + totals
        self.extremes = extremes if self.extremes is None else torch.maximum(self.extremes, extremes)

    def merge(self, other: Sums) -> None:
        if other.totals is not None:
            self._accumulate(other.totals, other.extremes, other.values)

    def result(self) -> TensorStatistics:
        error, square, nonzero, lost, beyond = self.totals.tolist()
        amax, low, high = self.extremes.tolist()
        share = lambda part, whole: part / whole if whole else 0.0
        scales = (-low, high) if self.scaled and high > 0 else (None, None)
        known = [share(error, square) ** 0.5, share(lost, nonzero), share(beyond, self.values)] if self.known else [None] * 3
        return TensorStatistics(*known, amax, *scales, self.values, self.used)


def _rows(part: QuantizedMatrix, rows: slice) -> QuantizedMatrix:
    return QuantizedMatrix(
        part.codes[rows], part.scales[rows], part.gscale[rows] if len(part.gscale) > 1 else part.gscale, part.k
    )


def _top(parts: Sequence[QuantizedMatrix]) -> Tensor:
    """The largest magnitude that every place of a matrix can hold. Where that is nothing, the values underflow."""
    top = sum(e4m3_decode(part.scales) * part.gscale[:, None] for part in parts) * E2M1_MAX
    return torch.where(top > 0, top, torch.inf).repeat_interleave(BLOCK, dim=1)[:, : parts[0].k]


def _extremes(x: Tensor, scales: Tensor | None) -> Tensor:
    """(largest magnitude of x, -smallest and largest of the E4M3 scales that are not zero)."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    low, high = torch.full_like(amax, -torch.inf), torch.zeros_like(amax)
    if scales is not None and scales.numel():
        decoded, real = e4m3_decode(scales), (scales != 0) & (scales != E4M3_NAN)
        low, high = -torch.where(real, decoded, torch.inf).amin(), torch.where(real, decoded, 0.0).amax()
    return torch.stack([amax, low, high])


# ---------------------------------------------------------------------------------------------- hooks


class Measurement:
    """A context in which the frozen linears of a model are watched.

    Args:
        rows: at most so many rows (tokens) of a tensor, evenly spaced; all of them if None.
        sites: of ``"input"`` and ``"gradient"`` those to look at.

    Raises:
        ValueError: the model has no frozen linears, or a site is none.
    """

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
                self._hook(module.register_forward_hook(self._norm))
            elif isinstance(module, FusedGatedMLP) and not isinstance(module, CompressedGatedMLP):
                prefix = f"{name}." if name else ""
                self._first |= {prefix + first: module for first in module.parts.first}
                self._last[prefix + module.parts.down] = module
        for name, module in self.linears.items():
            self._hook(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._hook(module.register_forward_hook(self._after(name)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._halves.clear()

    def _hook(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def result(self, weights: Mapping[str, Tensor] | None = None, stored: bool = True) -> dict[str, dict[str, TensorStatistics]]:
        """What was seen; with stored weights, what became of ``weights`` (dotted name -> dense weight) where those are given."""
        layers: dict[str, dict[str, TensorStatistics]] = {name: {} for name in self.linears}
        for name, module in self.linears.items():
            dense, base = None if weights is None else weights.get(f"{name}.weight"), base_of(module)
            with computing(base):
                if stored and (sums := weight_sums(base, dense)):
                    layers[name]["weight"] = sums.result()
            for site in SITES[1:]:
                if (name, site) in self.sums:
                    layers[name][site] = self.sums[name, site].result()
        return {name: sites for name, sites in layers.items() if sites}

    # -- what the hooks do

    @torch.no_grad()
    def _norm(self, norm: NVFP4RMSNorm, args: tuple, y: Tensor) -> None:
        """A fused norm returned D(Q(y)): compare with y, once for all linears that will read it."""
        if _in_backward() or not self._fused(y, norm._outside[1]):
            return
        x = self._some(args[0])
        true, _ = fused_reference.rmsnorm(x, norm.weight, norm.eps, norm.plus_one)
        sums = Sums()
        _add_input(sums, true, norm._outside[1])
        self._produced[y] = sums

    @staticmethod
    def _fused(x: Tensor, reader: NVFP4FrozenLinear) -> bool:
        """Whether a producer has quantised x already, so that x is not what was quantised."""
        entry = activation_cache.get(x, reader.options.terms, reader.input_centre, autocast_input(x).dtype)
        return entry is not None and entry.from_producer

    def _before(self, name: str) -> Callable:
        @torch.no_grad()
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if "input" not in self.sites or _in_backward():
                return
            x, layer = args[0] if args else next(iter(kwargs.values())), base_of(module)
            sums = self.sums.setdefault((name, "input"), Sums(_uses_input(layer)))
            halves = self._halves.pop(self._last.get(name), None)
            if (produced := self._produced.get(x)) is not None:
                sums.merge(produced)
            elif halves and isinstance(layer, NVFP4FrozenLinear) and self._fused(x, layer):
                _add_input(sums, _gated(halves, self._last[name]), layer)
            else:
                _add_input(sums, self._some(autocast_input(x)), layer)

        return hook

    def _after(self, name: str) -> Callable:
        layer = base_of(self.linears[name])

        def hook(module: nn.Module, args: tuple, y: Tensor) -> None:
            if name in self._first and "input" in self.sites and not _in_backward():
                self._halves.setdefault(self._first[name], []).append(self._some(y.detach()))
            if "gradient" in self.sites and y.requires_grad:
                sums = self.sums.setdefault((name, "gradient"), Sums(_uses_gradient(layer)))
                y.register_hook(lambda dy: _add_gradient(sums, self._some(dy.detach()), layer))

        return hook

    def _some(self, t: Tensor) -> Tensor:
        """t (..., K) as a matrix, of many rows some: a row is quantised by itself, so its numbers do not change."""
        t = t.detach().reshape(-1, t.shape[-1])
        return t if self.rows is None or t.shape[0] <= self.rows else t[:: -(-t.shape[0] // self.rows)]


def _in_backward() -> bool:
    """Within a backward pass, so that a forward is the second one of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _gated(halves: Sequence[Tensor], mlp: FusedGatedMLP) -> Tensor:
    """act(gate) * up as the fused kernel computes it before quantising."""
    parts = mlp.parts
    pair = halves if len(halves) == 2 else halves[0].chunk(2, dim=-1)
    gate, up = pair[parts.gate].float(), pair[1 - parts.gate].float()
    return ((gate * fused_reference._gate(gate, parts.act)[0]) * up).to(halves[0].dtype)


def _uses_input(layer: FrozenLinear) -> bool:
    return isinstance(layer, NVFP4FrozenLinear) or layer.options.activations == "nvfp4"


def _uses_gradient(layer: FrozenLinear) -> bool:
    return isinstance(layer, NVFP4FrozenLinear) and layer.options.gradients != "bf16"


def _add_input(sums: Sums, x: Tensor, layer: FrozenLinear) -> None:
    own = isinstance(layer, NVFP4FrozenLinear)
    terms, centre = (layer.options.terms, layer._centre) if own else (1, None)
    sums.add(x, quantize_input(x, centre, terms), centre)


@torch.no_grad()
def _add_gradient(sums: Sums, dy: Tensor, layer: FrozenLinear) -> None:
    stochastic = layer.options.gradients == "nvfp4_sr" and _uses_gradient(layer)
    seed = torch.zeros((), dtype=torch.int64) if stochastic else None  # its own: the training's numbers are not touched
    sums.add(dy, [ops.quantize(dy.contiguous(), GRADIENT_STOCHASTIC if stochastic else GRADIENT, seed=seed)])


@torch.no_grad()
def weight_sums(layer: FrozenLinear, original: Tensor | None) -> Sums | None:
    """Of a stored weight, against the original if that is at hand; None where FSDP2 holds it in pieces."""
    if in_pieces(layer):
        return None
    own, dense = isinstance(layer, NVFP4FrozenLinear), layer.weight.is_floating_point()
    sums = Sums(used=not dense)
    if original is not None:
        original = original.detach().to(layer.weight.device)
        layer._check_dense(original)
    if dense:  # what NVFP4 would make of it
        w = layer.weight.detach() if original is None else original
        sums.add(w, [ops.quantize_weight(w, WEIGHT)])
    elif original is None:
        sums.add_stored(layer.dequantize(torch.float32), layer.weight_scales if own else None)
    elif own:
        sums.add(original, [layer.forward_layout])
    else:
        sums.add(original, d=layer.dequantize(torch.float32))
    return sums
