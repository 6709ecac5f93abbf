"""GPTQ on NVFP4: round a frozen weight column by column, and let the columns to come make up for each rounding error.

Rounding to nearest minimises |W - V|. What matters is the output: for inputs x~ with second moments H = E[x~ x~^T],

    E|(W - V) x~|^2 = tr((W - V) H (W - V)^T),

rows being independent. GPTQ fixes one column after the other. With U the upper Cholesky factor of H^-1 (H^-1 = U^T U), the error
e = (w_j - v_j) / U[j, j] of column j is best made up for by  W[:, j+1:] -= e U[j, j+1:]. Columns are taken in blocks of 128:
within a block one by one, the effect of a whole block on all later columns as one product.

* H comes from the inputs as the layer multiplies them, D(Q(x)), produced by layers that are quantised already.
* The global scale and all block scales are fixed before the first column (*static groups*), so columns can be taken in any order
  while the memory layout stays what it is. ``act_order`` takes the columns with the largest inputs first: their errors have the
  most columns left to be made up by.
* A block scale is searched for with the error of column k weighted by H[k, k], its *importance*. Columns that no calibration
  token used (H[k, k] = 0) influence no scale, unless the whole block has none, and are rounded to nearest.
* Codes come out of the loop. Deriving them again from the values would choose other scales.
* The *asymmetric* target: the layer sees x~, should answer W x. The best dense weight for that is
  W E[x x~^T] H^-1; it is rounded in place of W. It repairs systematic errors of the activations' rounding, and belongs to W4A4:
  with inputs that are not rounded, it is a worse weight.

The inverse is never formed: with H = R R^T, R upper triangular, U = R^-1.

Sources: Frantar et al., "GPTQ" (2022); act-order with static groups as in GPTQModel; the asymmetric target as in "GPTAQ" (2025).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..numerics import reference
from ..numerics.formats import BLOCK, E2M1_THRESHOLDS, SCALE_RULES, NVFP4Format, QuantizedMatrix, padded_k
from ..numerics.matmul import exact_matmul
from .moments import Moments

DAMPING = (0.01, 0.1, 1.0)
"""Added to H's diagonal, as shares of its mean: the first with which it can be factorised."""
COLUMNS = 128
"""Columns of a block."""
CHUNK = 1 << 22
"""Elements whose scales are searched at a time."""


@dataclass(frozen=True)
class GPTQOptions:
    """How a weight is solved for.

    Attributes:
        rule: choice of the block scales: ``"max6"``, ``"four_over_six"`` or ``"mse"``.
        act_order: columns by falling diag(H), not from left to right.
        asymmetric: solve for the target that makes up for the rounding of the activations (needs the cross moment).
    """

    rule: str = "mse"
    act_order: bool = True
    asymmetric: bool = False

    def __post_init__(self) -> None:
        if self.rule not in SCALE_RULES:
            raise ValueError(f"unknown block-scale rule {self.rule!r}; choose one of {', '.join(SCALE_RULES)}")


class NVFP4Levels:
    """NVFP4 with one global scale ``gscale`` (1,) float32, a power of two. Rounds exactly as
    :func:`peft_nvfp4.numerics.reference.quantize` does: ``|w|`` is compared with ``s * g * {.25, .75, ...}``, ties go to the even
    code, the sign is kept."""

    def __init__(self, rule: str, gscale: Tensor):
        self.format, self.gscale = NVFP4Format(rule=rule), gscale
        device = gscale.device
        self._steps = torch.tensor([t for t, _ in E2M1_THRESHOLDS], device=device)[:, None]
        self._inclusive = torch.tensor([up for _, up in E2M1_THRESHOLDS], device=device)[:, None]
        self._grid = reference._grid(device)

    def scales(self, w: Tensor, importance: Tensor) -> Tensor:
        """Block scales (N, Kp/16), E4M3 bytes, of a weight (N, K) whose columns have an importance (K,)."""
        kp = padded_k(w.shape[1])
        weights = F.pad(importance, (0, kp - w.shape[1])).view(-1, BLOCK)
        alive = weights > 0  # the columns that count for the scale of their block
        alive |= ~alive.any(-1, keepdim=True)
        scales = []
        for part in w.split(max(1, CHUNK // kp)):
            mag = F.pad(part.abs(), (0, kp - w.shape[1])).view(-1, kp // BLOCK, BLOCK)
            amax = torch.where(alive, mag, 0.0).amax(-1)
            scales.append(reference.choose_scales(mag, amax, self.gscale[:, None], self.format, weights))
        return torch.cat(scales)

    def factors(self, scales: Tensor) -> Tensor:
        """s * g of block scales, what a level is multiplied by."""
        return reference.e4m3_decode(scales) * self.gscale

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

    def pack(self, codes: Tensor, scales: Tensor) -> QuantizedMatrix:
        k = codes.shape[1]
        return QuantizedMatrix(reference.pack(F.pad(codes, (0, padded_k(k) - k))), scales, self.gscale.clone(), k)


class Factor(NamedTuple):
    """H, taken apart."""

    u: Tensor  # (K, K) upper triangular, H^-1 = U^T U, rows and columns in solving order
    order: Tensor  # (K,) original column of every step
    importance: Tensor  # (K,) diag(H) over its mean, 0 for columns without input
    damping: float  # share of the mean that was added


def factorize(h: Tensor, act_order: bool = True) -> Factor | None:
    """U and the order of the columns; None if H cannot be factorised (not finite, without any input, not positive)."""
    diagonal = h.diagonal()
    alive = diagonal > 0
    mean = (diagonal * alive).sum() / alive.sum()
    if not bool(mean > 0) or not bool(torch.isfinite(mean)):
        return None
    importance = torch.where(alive, diagonal / mean, 0.0)
    k = h.shape[0]
    order = torch.arange(k, device=h.device)
    if act_order:
        order = torch.sort(importance, descending=True, stable=True).indices
    reversed_order = order.flip(0)
    for damping in DAMPING:
        a = h[reversed_order][:, reversed_order]
        a.diagonal().add_(mean * damping)  # columns without input then have no coupling and lose nothing
        lower, info = torch.linalg.cholesky_ex(a)
        if int(info) == 0 and bool(torch.isfinite(lower[-1]).all()):
            del a
            r = lower.flip(0, 1)  # a = L L^T reversed both ways: H = R R^T with R upper triangular
            u = torch.linalg.solve_triangular(r, torch.eye(k, device=h.device, dtype=h.dtype), upper=True)
            return Factor(u, order, importance, damping)
    return None


def solve(target: Tensor, factor: Factor, levels: NVFP4Levels, scale: Tensor) -> Tensor:
    """Codes (N, K) of a target (N, K) float32, with the scales (N, K / 16) fixed.

    Works on the transpose, so that a column is contiguous. Nothing in the loop waits for the GPU.
    """
    u, order = factor.u, factor.order
    w = target.T[order]  # (K, N), a copy
    scale = scale.T.contiguous()
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    diagonal = u.diagonal()
    for start in range(0, w.shape[0], COLUMNS):
        stop = min(start + COLUMNS, w.shape[0])
        block = w[start:stop]
        scales = scale[order[start:stop] // BLOCK]
        thresholds = levels.thresholds(scales)
        errors = torch.empty_like(block)
        rows = zip(block, u[start:stop, start:stop], diagonal[start:stop], scales, thresholds, codes[start:stop], errors)
        for j, (column, u_row, u_jj, column_scale, column_thresholds, column_codes, error) in enumerate(rows):
            rounded, values = levels.round(column, column_thresholds, column_scale)
            column_codes.copy_(rounded)
            torch.div(column - values, u_jj, out=error)
            block[j + 1 :].addr_(u_row[j + 1 :], error, alpha=-1.0)
        w[stop:].addmm_(u[start:stop, stop:].T, errors, alpha=-1.0)
    result = torch.empty_like(codes)
    result[order] = codes
    return result.T.contiguous()


def asymmetric_target(w: Tensor, moments: Moments, factor: Factor) -> Tensor:
    """W + W (C - H) (H + damping)^-1, that is W C H^-1 but for the damping, which pulls towards W."""
    change = (w @ (moments.c - moments.h))[:, factor.order]
    change = (change @ factor.u.T) @ factor.u
    result = w.clone()
    result[:, factor.order] += change
    return result


def gptq(
    weights: Sequence[Tensor], moments: Moments, options: GPTQOptions | None = None, name: str = "weight"
) -> list[QuantizedMatrix] | None:
    """Quantise the weights (N_i, K), any floating dtype, of the linears that read one input, under one global scale, where they
    are. None, after a warning that has their name, where H cannot be factorised.

    Raises:
        ValueError: shapes do not fit; an asymmetric target without cross moments; NaN or Inf in a weight.
    """
    options, k = options or GPTQOptions(), moments.h.shape[0]
    if any(w.ndim != 2 or w.shape[1] != k for w in weights):
        raise ValueError(f"{name}: weights must be (N, {k}), got {[tuple(w.shape) for w in weights]}")
    if options.asymmetric and moments.c is None:
        raise ValueError(f"{name}: an asymmetric target needs cross moments: Moments(k, cross=True)")
    sizes = [w.shape[0] for w in weights]
    target = torch.cat([w.detach().float() for w in weights])
    if not torch.isfinite(target).all():
        raise ValueError(f"{name}: weight holds NaN or Inf; a quantised layer cannot represent them")
    with exact_matmul(), torch.no_grad():
        factor = factorize(moments.h.to(target.device), options.act_order)
        if factor is None:
            why = "no input reached it, or its Hessian is not finite or not positive"
            warnings.warn(f"{name}: GPTQ is not possible ({why}); it is rounded to nearest", stacklevel=2)
            return None
        if factor.damping > DAMPING[0]:
            warnings.warn(f"{name}: its Hessian needed a damping of {factor.damping:g}, not {DAMPING[0]:g}", stacklevel=2)
        if options.asymmetric:
            target = asymmetric_target(target, moments, factor)
        levels = NVFP4Levels(options.rule, ops.weight_gscale(target))
        scales = [levels.scales(part, factor.importance) for part in target.split(sizes)]
        codes = solve(target, factor, levels, levels.factors(torch.cat(scales)))
    return [levels.pack(c, s) for c, s in zip(codes.split(sizes), scales)]


def gptq_backward(
    w: QuantizedMatrix, gradients: Moments, options: GPTQOptions | None = None, name: str = "weight"
) -> QuantizedMatrix | None:
    """Backward layout W_b (K, N) of a forward weight (N, K): D(w)^T solved against the moments of the incoming gradient D(Q(dy)),
    so that the error of dx = dy W is what becomes small. The source is D(w): the gradient belongs to the function that was
    computed. None as in :func:`gptq`."""
    solved = gptq([reference.dequantize(w).T.contiguous()], gradients, options, name)
    return solved and solved[0]


def output_error(w: Tensor, v: Tensor, h: Tensor) -> float:
    """Root of E|(W - V) x~|^2 / E|W x~|^2 for second moments H of x~; W, V (N, K)."""
    w, h = w.float(), h.to(w.device)
    d = w - v.float()
    with exact_matmul():
        return (((d @ h) * d).sum().double() / ((w @ h) * w).sum().double().clamp(min=1e-300)).sqrt().item()
