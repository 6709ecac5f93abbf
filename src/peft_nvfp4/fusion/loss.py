"""Causal-LM loss that computes logits only at supervised positions, and those a chunk at a time.

    loss = sum_i (logsumexp(y_i) - y_i[label_i]) / n,    y_i = f(W h_i + b),    i over the n positions that have a label

transformers computes y at all T positions: with a vocabulary of 128k, 4 * 1024 positions are 1 GB of BF16 logits, and 2 GB more
for each FP32 tensor of the loss and its gradient. Instruction tuning supervises a small part of them. Here a chunk of logits is
made, turned into its gradient in the same pass (dy = softmax(y) - onehot, then dh = dy W and, for a trained head, dW = dy^T h)
and dropped; what lives until backward is dh, as large as the supervised rows of the hidden states.

Exact: logits are rounded to the dtype of the head's product and then read in FP32, as in transformers; f is applied in the same
dtype and order; 1/n enters dy before it is rounded for the GEMMs. What differs from the ordinary loss is the order of FP32 sums
(so a BF16 logit may differ in its last place, where a GEMM with fewer rows sums in another order). dW is summed in FP32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import dispatch

CHUNK_BYTES = 128 << 20  # of FP32 logits: 256 positions of a 128k vocabulary, where the GEMM is no longer memory bound
TRACED_CHUNKS = 8  # of a loss that a compiler traces: it unrolls the loop, and need not know the number of positions


class Transform(NamedTuple):
    """f of a logit: ``z * scale`` (Cohere), ``z / divisor`` (Granite), then ``softcap * tanh(z / softcap)`` (Gemma 2); in the
    dtype of z, one rounding an operation, as transformers does."""

    scale: float | None = None
    divisor: float | None = None
    softcap: float | None = None

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """(f(z), the tanh, which backward reads)."""
        if self.scale is not None:
            z = z * self.scale
        if self.divisor is not None:
            z = z / self.divisor
        if self.softcap is None:
            return z, None
        t = torch.tanh(z / self.softcap)
        return t * self.softcap, t

    def backward(self, dy: Tensor, t: Tensor | None) -> Tensor:
        if t is not None:
            dy = torch.ops.aten.tanh_backward(dy * self.softcap, t) / self.softcap
        if self.divisor is not None:
            dy = dy / self.divisor
        return dy if self.scale is None else dy * self.scale


class Targets(NamedTuple):
    """The positions whose logits are computed."""

    positions: Tensor | None  # (n,) int64 rows of the flattened hidden states; None: all of them
    labels: Tensor  # (n,) int64, in range everywhere
    valid: Tensor | None  # (n,) bool: which of them count; None: all
    denominator: Tensor | float  # the sum of the losses is divided by it


def linear_cross_entropy(
    hidden: Tensor,  # (..., d)
    weight: Tensor,  # (V, d)
    labels: Tensor,  # (...) int64
    *,
    bias: Tensor | None = None,  # (V,)
    shift: bool = False,
    scale: float | None = None,
    divisor: float | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    num_items_in_batch: Tensor | int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of ``f(hidden @ weight.T + bias)`` at the positions whose label is not ``ignore_index``.

    In FP32 (FP64 for FP64 inputs), also under autocast. Gradients reach ``hidden`` and, if trained, ``weight`` and ``bias``.

    Args:
        shift: labels stand at their own token, as models of transformers take them, and are moved left by one. By default
            ``labels[..., t]`` is what ``hidden[..., t]`` should predict.
        scale, divisor, softcap: f, see :class:`Transform`.
        num_items_in_batch: the sum is divided by it (gradient accumulation over unequal batches; 1 for the sum). By default by
            the number of supervised positions: NaN, with zero gradients, if there are none.
        chunk: positions whose logits exist at one time (default: 128 MB of FP32 logits).

    The number of supervised positions is read on the host (one synchronisation), except while a CUDA graph is captured or a
    compiler traces: then all positions are computed, chunk by chunk (a compiler's loop has 8 chunks).
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels have shape {tuple(labels.shape)}, hidden {tuple(hidden.shape)}: expected one label a position")
    if shift:
        labels = _shifted(labels, ignore_index)
    targets = _targets(labels.reshape(-1).to(hidden.device), ignore_index, num_items_in_batch)
    hidden, transform = hidden.reshape(-1, hidden.shape[-1]), Transform(scale, divisor, softcap)
    return _supervised_loss(hidden, weight, bias, targets, transform, chunk)


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _targets(labels: Tensor, ignore_index: int, denominator: Tensor | int | None) -> Targets:
    """``labels`` (N,); a denominator of None is the number of those that count."""
    supervised = labels != ignore_index
    if torch.compiler.is_compiling() or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        positions, valid = None, supervised
    else:
        positions, valid = supervised.nonzero().squeeze(1), None
        labels = labels[positions]
    if denominator is None:
        denominator = len(labels) if valid is None else valid.sum()
    elif isinstance(denominator, Tensor):
        denominator = denominator.to(labels.device)
    labels = labels if valid is None else labels.masked_fill(~valid, 0)
    return Targets(positions, labels, valid, denominator)


# ---------------------------------------------------------------------------------------------- the loss and its gradient


def _supervised_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, transform: Transform, chunk: int | None
) -> Tensor:
    """The loss of a head that is a plain linear; ``hidden`` (N, d)."""
    if not torch.is_grad_enabled():  # an autograd.Function does not see that itself, and would compute gradients for nobody
        hidden, weight, bias = (t if t is None else t.detach() for t in (hidden, weight, bias))
    return _SupervisedLoss.apply(hidden, weight, bias, targets, transform, chunk)


class _SupervisedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, chunk):
        wants, *wanted = ctx.needs_input_grad[:3]
        dtype = _compute_dtype(hidden)
        w, b = (None if p is None else p.to(dtype) for p in (weight, bias))
        sums = [torch.zeros_like(p, dtype=_wide(p.dtype)) if want else None for p, want in zip((weight, bias), wanted)]
        dh = hidden.new_empty(len(targets.labels), hidden.shape[1], dtype=dtype) if wants else None
        total, fold = hidden.new_zeros((), dtype=_wide(dtype)), _folded(targets.denominator, dtype)
        for at in _chunks(targets, chunk or max(1, CHUNK_BYTES // (4 * len(weight)))):
            h = (hidden[at] if targets.positions is None else hidden.index_select(0, targets.positions[at])).to(dtype)
            valid = None if targets.valid is None else targets.valid[at]
            factor = None
            if wants or any(wanted):
                factor = fold if valid is None else torch.where(valid, fold, 0.0)
            losses, dz = _chunk_of_loss(h, w, b, transform, targets.labels[at], factor)
            total += (losses if valid is None else torch.where(valid, losses, 0)).sum()
            if dz is not None:
                _linear_backward(dz, h, w, dh[at] if wants else None, *sums)
            del dz  # before the next chunk's logits are there
        ctx.save_for_backward(targets.positions, dh, *sums)
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.rest = targets.denominator * fold if dtype == torch.float16 else None
        return total / targets.denominator

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        positions, *kept = ctx.saved_tensors
        gradient = (gradient if ctx.rest is None else gradient / ctx.rest).sum()
        dh, *grads = (None if g is None else (g * gradient).to(dtype) for g, dtype in zip(kept, ctx.dtypes))
        if dh is not None and positions is not None:
            dh = dh.new_zeros(ctx.shape).index_copy_(0, positions, dh)
        return dh, *grads, None, None, None


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Of the head's product."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _folded(denominator: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """The factor that dlogits get before they are rounded: 1/n, as in the ordinary backward. In FP16 a small probability over a
    large n would vanish, and the loss scale comes later, so there it is 2**8: |dh| <= 2**9 max|W| stays far from overflow."""
    if dtype == torch.float16:
        return 256.0
    if isinstance(denominator, Tensor):
        return (1 / denominator).reshape(())
    return 1 / denominator if denominator else 0.0


def _chunks(targets: Targets, chunk: int) -> list[slice]:
    """Slices of nearly equal length, by the number of positions alone; where a compiler must not depend on it, TRACED_CHUNKS."""
    n = len(targets.labels)
    pieces = TRACED_CHUNKS if targets.positions is None and torch.compiler.is_compiling() else -(-n // chunk)
    return [slice(n * i // pieces, n * (i + 1) // pieces) for i in range(pieces)]


def _chunk_of_loss(
    h: Tensor, w: Tensor, b: Tensor | None, transform: Transform, labels: Tensor, factor: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    """(loss of each row, (n,); gradient of the logits that the head gives, (n, V), times ``factor``, one or (n,), or None)."""
    y, t = transform.forward(F.linear(h, w, b))
    if (in_place := dispatch.cross_entropy_of(y)) is not None:
        losses = in_place(labels, factor if not isinstance(factor, float) else y.new_full((1,), factor, dtype=torch.float32))
        dy = None if factor is None else y
    else:
        losses, logp = _losses(y, labels)
        dy = None
        if factor is not None:
            dy = _dlogits(logp, labels, factor[:, None] if isinstance(factor, Tensor) and factor.ndim else factor, y.dtype)
    return losses, None if dy is None else transform.backward(dy, t)


def _losses(y: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(loss of each row, log-probabilities), in FP32."""
    logp = F.log_softmax(y, dim=1, dtype=_wide(y.dtype))
    return -logp.gather(1, labels[:, None]).squeeze(1), logp


def _dlogits(logp: Tensor, labels: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Tensor:
    """factor * d losses / dy in ``dtype``; overwrites logp."""
    p, at = logp.exp_(), labels[:, None]
    return p.scatter_(1, at, p.gather(1, at) - 1).mul_(factor).to(dtype)


def _linear_backward(dz: Tensor, h: Tensor, w: Tensor, dh: Tensor | None, dw: Tensor | None, db: Tensor | None) -> None:
    with torch.autocast(dz.device.type, enabled=False):
        if dh is not None:
            torch.mm(dz, w, out=dh)
        if dw is not None and dz.is_cuda and dz.dtype in (torch.float16, torch.bfloat16):
            torch.addmm(dw, dz.T, h, out_dtype=torch.float32, out=dw)  # chunks rounded to BF16 would add up their errors
        elif dw is not None:
            dw.addmm_(dz.T.to(dw.dtype), h.to(dw.dtype))
        if db is not None:
            db += dz.sum(0, dtype=db.dtype)
