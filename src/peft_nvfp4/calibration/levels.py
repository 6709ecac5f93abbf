"""The two functions by which the GPTQ solver knows a number format: choose the block scales, round to the levels.

The solver (:mod:`peft_nvfp4.calibration.gptq`) goes through a weight column by column; all it needs of a format is

    scales(w, importance)         -> what the weight's blocks are multiplied by, fixed before the first column
    round(w, thresholds, scale)   -> codes and values of one column

:class:`NVFP4Levels` rounds exactly as :func:`peft_nvfp4.numerics.reference.quantize` does: by comparing ``|w|`` with ``s * g * {.25, .75,
...}``, ties to the even code, sign kept. :class:`NF4Levels` writes what bitsandbytes reads: blocks of 64 along the row, absmax
quantised again, the 16 NF4 levels.

*Importance* is one weight per column for the searching rules: error in a column with large inputs costs more. Columns of
importance 0 do not influence the scale, unless the whole block has none.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.frozen_linear import FrozenOptions
from ..numerics import reference
from ..numerics.formats import (
    BLOCK,
    E2M1_MAX,
    E2M1_THRESHOLDS,
    E4M3_MAX_BITS,
    MSE_OFFSETS,
    SCALE_RULES,
    NVFP4Format,
    QuantizedMatrix,
    padded_k,
)

CHUNK = 1 << 22
"""Elements whose scales are searched at a time."""


class Scales(NamedTuple):
    """Block scales of a weight (N, K)."""

    stored: Any  # as the format keeps them
    factor: Tensor  # (N, K / block rounded up) float32, what a level is multiplied by


class Levels(Protocol):
    """A number format as the solver sees it."""

    block: int

    def scales(self, w: Tensor, importance: Tensor | None) -> Scales: ...
    def thresholds(self, factor: Tensor) -> Tensor: ...
    def round(self, w: Tensor, thresholds: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]: ...
    def pack(self, codes: Tensor, scales: Scales, k: int) -> Any: ...


def _alive(importance: Tensor | None, blocks: int, width: int) -> Tensor | None:
    """(blocks, width) bool: the columns that count for the scale of their block."""
    if importance is None:
        return None
    alive = F.pad(importance, (0, blocks * width - importance.numel())).view(blocks, width) > 0
    return alive | ~alive.any(-1, keepdim=True)


# ---------------------------------------------------------------------------------------------- NVFP4


class NVFP4Levels:
    """NVFP4 with one global scale.

    Args:
        rule: choice of the block scale, of :data:`peft_nvfp4.numerics.formats.SCALE_RULES`.
        gscale: (1,) float32, a power of two; fixed before the first column.
    """

    block = BLOCK

    def __init__(self, rule: str, gscale: Tensor):
        self.format = NVFP4Format(rule=rule)
        self.gscale = gscale
        device = gscale.device
        self._steps = torch.tensor([t for t, _ in E2M1_THRESHOLDS], device=device)[:, None]
        self._inclusive = torch.tensor([up for _, up in E2M1_THRESHOLDS], device=device)[:, None]
        self._grid = reference._grid(device)

    def scales(self, w: Tensor, importance: Tensor | None) -> Scales:
        """E4M3 bytes (N, Kp/16) and s * g. Without importance those of ``quantize`` with this rule."""
        kp = padded_k(w.shape[1])
        alive = _alive(importance, kp // BLOCK, BLOCK)
        weights = None if importance is None else F.pad(importance, (0, kp - w.shape[1])).view(-1, BLOCK)
        step = max(1, CHUNK // kp)
        bits = torch.cat([self._bits(part, kp, alive, weights) for part in w.split(step)])
        return Scales(bits, reference.e4m3_decode(bits) * self.gscale)

    def _bits(self, w: Tensor, kp: int, alive: Tensor | None, weights: Tensor | None) -> Tensor:
        mag = F.pad(w.abs(), (0, kp - w.shape[1])).view(w.shape[0], kp // BLOCK, BLOCK)
        g = self.gscale[:, None]
        if weights is None:
            return reference._choose_scales(mag, mag.amax(-1), g, self.format)
        amax = torch.where(alive, mag, 0.0).amax(-1)
        bits = reference.e4m3_encode(amax / (g * E2M1_MAX))
        if self.format.rule == "max6":
            return bits
        if self.format.rule == "four_over_six":
            candidates = [reference.e4m3_encode(amax / (g * 4.0))]
        else:
            candidates = [(bits.int() + o).clamp(1, E4M3_MAX_BITS).to(torch.uint8) for o in MSE_OFFSETS]
        mag_g = mag / g[..., None]
        best = _weighted_error(mag_g, bits, weights)
        for candidate in candidates:
            error = _weighted_error(mag_g, candidate, weights)
            better = (error < best) & (amax > 0)
            bits, best = torch.where(better, candidate, bits), torch.where(better, error, best)
        return bits

    def thresholds(self, factor: Tensor) -> Tensor:
        """(..., 7, N) for factors (..., N): a magnitude reaches level i where it is at least threshold i. Products are exact; a
        tie that stays below belongs to the next FP32 number."""
        exact = factor[..., None, :] * self._steps
        return torch.where(self._inclusive, exact, torch.nextafter(exact, exact.new_full((), float("inf"))))

    def round(self, w: Tensor, thresholds: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (N,) and values (N,) of a column w (N,), thresholds (7, N), factor (N,)."""
        index = (w.abs() >= thresholds).sum(0)
        values = torch.copysign(self._grid[index] * factor, w)
        codes = (index | (torch.signbit(w).long() << 3)) * (factor > 0)  # a block of scale 0 has codes 0
        return codes.to(torch.uint8), values

    def pack(self, codes: Tensor, scales: Scales, k: int) -> QuantizedMatrix:
        codes = F.pad(codes, (0, padded_k(k) - k))
        return QuantizedMatrix(reference.pack(codes), scales.stored, self.gscale.clone(), k)


def _weighted_error(mag_g: Tensor, bits: Tensor, weights: Tensor) -> Tensor:
    """Sum over each block of weights * (mag/g - level * s)**2. mag_g (R, nb, 16), bits (R, nb), weights (nb, 16)."""
    s = reference.e4m3_decode(bits)
    index = torch.where((s > 0)[..., None], reference._round_to_grid(mag_g, s), 0)
    d = mag_g - reference._grid(mag_g.device)[index.int()] * s[..., None]
    return (d * d * weights).sum(-1)


# ---------------------------------------------------------------------------------------------- NF4


class NF4Matrix(NamedTuple):
    """A weight as bitsandbytes keeps it."""

    packed: Tensor  # (N * K / 2, 1) uint8, high nibble = even k
    state: Any  # bitsandbytes.functional.QuantState


NF4_FACTORS = (0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76)
"""Shares of absmax tried by the rule "mse"."""


class NF4Levels:
    """NF4 of bitsandbytes, with double quantisation of absmax (blocks of 256, 8 bits).

    Args:
        rule: ``"max6"``, absmax itself, or ``"mse"``, the best of nine shares of it.

    Raises:
        ValueError: another rule; a K that is no multiple of 64 (blocks would straddle rows).
    """

    block = 64

    def __init__(self, rule: str, device: torch.device, dtype: torch.dtype):
        from bitsandbytes import functional

        if rule not in ("max6", "mse"):
            raise ValueError(f"NF4 has the rules 'max6' (absmax) and 'mse', got {rule!r} of {', '.join(SCALE_RULES)}")
        self._bnb, self._rule, self._dtype = functional, rule, dtype
        self.table = functional.get_4bit_type("nf4", device=device)
        self._steps = ((self.table[1:] + self.table[:-1]) / 2)[:, None]
        self._zero = int((self.table == 0).nonzero()[0])

    def scales(self, w: Tensor, importance: Tensor | None) -> Scales:
        """(quantised absmax, its state, offset) and what bitsandbytes makes of them."""
        if w.shape[1] % self.block:
            raise ValueError(f"NF4 blocks of {self.block} lie within rows only if K is a multiple of it, got K={w.shape[1]}")
        alive = _alive(importance, w.shape[1] // self.block, self.block)
        weights = None if importance is None else importance.view(-1, self.block)
        step = max(1, CHUNK // w.shape[1])
        absmax = torch.cat([self._absmax(part, alive, weights) for part in w.split(step)])
        offset = absmax.mean()
        quantised, state = self._bnb.quantize_blockwise((absmax - offset).flatten(), blocksize=256)
        factor = self._bnb.dequantize_blockwise(quantised, state).float() + offset
        return Scales((quantised, state, offset), factor.view_as(absmax))

    def _absmax(self, w: Tensor, alive: Tensor | None, weights: Tensor | None) -> Tensor:
        blocks = w.view(w.shape[0], -1, self.block)
        mag = blocks.abs()
        absmax = (mag if alive is None else torch.where(alive, mag, 0.0)).amax(-1)
        if self._rule == "max6":
            return absmax

        def error(candidate: Tensor) -> Tensor:
            d = (
                blocks
                - self.table[torch.bucketize(blocks / candidate[..., None].clamp(min=1e-30), self._steps[:, 0])]
                * (candidate[..., None])
            )
            return (d * d if weights is None else d * d * weights).sum(-1)

        best, found = error(absmax), absmax
        for share in NF4_FACTORS:
            e = error(absmax * share)
            found, best = torch.where(e < best, absmax * share, found), torch.minimum(e, best)
        return found

    def thresholds(self, factor: Tensor) -> Tensor:
        return factor[..., None, :] * self._steps

    def round(self, w: Tensor, thresholds: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.where(factor > 0, (w >= thresholds).sum(0), self._zero)  # a block of zeros may get an absmax below 0
        return index.to(torch.uint8), self.table[index] * factor

    def pack(self, codes: Tensor, scales: Scales, k: int) -> NF4Matrix:
        flat = codes.reshape(-1)
        quantised, state, offset = scales.stored
        outer = self._bnb.QuantState(
            absmax=quantised,
            shape=torch.Size((codes.shape[0], k)),
            dtype=self._dtype,
            blocksize=self.block,
            code=self.table,
            quant_type="nf4",
            offset=offset,
            state2=state,
        )
        return NF4Matrix(((flat[0::2] << 4) | flat[1::2])[:, None].contiguous(), outer)


def nf4_frozen_linear(linear: nn.Linear, q: NF4Matrix, options: FrozenOptions) -> Any:
    """The frozen layer that stores ``q`` in place of ``linear``'s weight."""
    import bitsandbytes as bnb

    from ..nn.nf4 import NF4FrozenLinear

    layer = NF4FrozenLinear(linear.in_features, linear.out_features, linear.bias, q.state.dtype, options)
    layer.weight = bnb.nn.Params4bit(
        q.packed,
        requires_grad=False,
        quant_state=q.state,
        blocksize=q.state.blocksize,
        compress_statistics=True,
        quant_type="nf4",
        bnb_quantized=True,
        module=layer,
    )
    layer.quant_state = q.state
    return layer.train(linear.training)
