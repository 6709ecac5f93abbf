"""fprop and dgrad on a GPU without FP4 tensor cores: exact emulation by BF16 GEMMs of dequantised operands.

BF16 holds every dequantised value exactly, and its tensor cores accumulate in FP32: the function is that of the FP4 instruction.
What is summed is laid side by side along K and becomes one GEMM (:mod:`triton_operands`), the adapters' low-rank products and the
constants included. Operands of large inputs are made for :data:`ROWS` rows at a time, which bounds the extra memory.

A weight of another tool's checkpoint may have a global scale that is no power of two. Its significand f is then the GEMM's alpha,
D(W) / f its operand, and what else is summed is divided by f, in FP32, and split into three BF16 columns each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import ops
from ..numerics.formats import BLOCK, GRADIENT_STOCHASTIC, QuantizedMatrix
from ..numerics.reference import without_significand
from ..ops import linear
from .bf16_matmul import full_precision_sums
from .triton import matmul, operands
from .triton.launch import MAX_BLOCKS

ROWS = 2048
"""Rows of an operand at a time, where all of them would take more than :data:`OPERAND_BYTES`. Fewer would leave a large GPU's
multiprocessors without a tile."""
OPERAND_BYTES = 48 << 20
SMALL_ROWS = matmul.ROWS
"""Up to here a product is bound by the weight's bytes, and decoding it in the loop (matmul) is faster."""
WIDEST = MAX_BLOCKS * BLOCK


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = rows if rows * columns * 2 <= OPERAND_BYTES else ROWS
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _aligned(columns: int) -> int:
    """GEMMs want rows of a multiple of 16 bytes."""
    return -(-columns // 8) * 8


def _columns(constant: Tensor) -> Tensor:
    """A constant (N,) as BF16 columns (N, c) that sum to it: 1, or for FP32 3."""
    return constant[:, None] if constant.dtype == torch.bfloat16 else _in_three(constant[:, None])


def _in_three(x: Tensor) -> Tensor:
    """x (N, c) as BF16 (N, 3 c) whose thirds sum to it: 24 significant bits."""
    first = x.to(torch.bfloat16)
    rest = x.float() - first.float()
    second = rest.to(torch.bfloat16)
    return torch.cat([first, second, (rest - second.float()).to(torch.bfloat16)], dim=1)


# ---------------------------------------------------------------------------------------------- fprop


def fprop(
    x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, values, hidden, ups, owner, a, k, dtype, factors=()
):
    """The operator ``fprop``."""
    factors = factors or [1.0] * len(w_codes)
    arguments = (x_codes, x_scales, x_gscale, w_codes, w_scales, w_gscale, constants, values, hidden, ups, owner, a, k)
    arguments += (dtype, factors)
    linear.check_fprop(*arguments)
    terms = linear._matrices(x_codes, x_scales, x_gscale, k)
    weights = linear._matrices(w_codes, w_scales, w_gscale, k)
    m = x_codes[0].shape[0]
    if dtype != torch.bfloat16 or k == 0:
        return linear.reference_fprop(*arguments)
    plain = all(c is None for c in constants)
    if m <= SMALL_ROWS or len(terms) == 1 and not ups and plain:
        return _separate(terms, weights, constants, values, hidden, ups, owner, a, factors)
    # h is made from the operand where it is exactly D(x~), and the only extra columns
    inside = len(terms) == 1 and plain and a is not None and all(h is None for h in hidden) and list(owner) == sorted(owner)
    inside = inside and all(f == 1.0 for f in factors)
    made = None
    if not inside:
        hidden, made = linear.low_rank(terms, values, a, hidden, ups, dtype)
    extras, columns = [], []
    for i, constant in enumerate(constants):
        own = [j for j, of in enumerate(owner) if of == i]
        added = [] if constant is None else [_columns(constant)]
        extra = _join([ups[j] for j in own] + added)
        beside = [hidden[j] for j in own] + [c.new_ones(1, c.shape[1]).expand(m, -1) for c in added]
        if extra is not None and factors[i] != 1.0:
            extra, beside = _in_three(extra.float() / factors[i]), 3 * beside
        extras.append(extra)
        columns += beside
    if inside:
        made = a.new_empty(m, a.shape[0])
        return [*_side_by_side(terms, weights, extras, made, a, factors), made]
    ys = _side_by_side(terms, weights, extras, _join(columns), None, factors)
    return ys if made is None else [*ys, made]


def _join(pieces: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(pieces), dim=1) if len(pieces) > 1 else pieces[0] if pieces else None


def _separate(terms, weights, constants, values, hidden, ups, owner, a, factors) -> list[Tensor]:
    """Every product by itself, with the low-rank one in its sum (:mod:`triton_matmul`) or, for many rows, added in BF16."""
    hidden, made = linear.low_rank(terms, values, a, hidden, ups, torch.bfloat16)
    ys = []
    for i, (w, constant) in enumerate(zip(weights, constants)):
        own = [j for j, of in enumerate(owner) if of == i]
        h, up = (hidden[own[0]], ups[own[0]]) if own else (None, None)
        y = matmul.product(terms, w, constant, torch.bfloat16, values, h, up, factor=factors[i])
        for j in own[1:]:
            y.addmm_(hidden[j], ups[j].T)
        ys.append(y)
    return ys if made is None else [*ys, made]


def _side_by_side(
    terms: Sequence[QuantizedMatrix],
    weights: Sequence[QuantizedMatrix],
    extras: Sequence[Tensor | None],
    columns: Tensor | None,
    a: Tensor | None,
    factors: Sequence[float],
) -> list[Tensor]:
    """x = [D(term 1) | D(term 2) | columns] against f [D(W) / f | D(W) / f | extra]; the extra columns of a linear stand at its
    place among those of all, zeros elsewhere. With a, the columns are D(x~) @ a.T and are filled here."""
    m, k, copies = terms[0].codes.shape[0], weights[0].k, len(terms)
    used = 0 if columns is None else columns.shape[1]
    width = _aligned(copies * k + used) - copies * k
    chunks = list(_chunks(m, copies * k + width))
    x, ys, first = None, [], 0
    for w, extra, factor in zip(weights, extras, factors):
        n, wd = w.codes.shape[0], None  # the last linear's operand goes before the next one is made
        wd = w.gscale.new_empty(n, copies * k + width, dtype=torch.bfloat16)
        operands.write_operand(wd, without_significand(w, factor), copies, extra, first, width)
        first += 0 if extra is None else extra.shape[1]
        y = wd.new_empty(m, n)
        for rows in chunks:
            if x is None or len(chunks) > 1:
                x = None  # before the next one is made
                x = _input_operand(terms, columns, width, rows, a if not ys else None)
            with full_precision_sums():
                if factor == 1.0:
                    torch.mm(x, wd.T, out=y[rows])
                else:
                    y[rows].addmm_(x, wd.T, beta=0, alpha=factor)
        ys.append(y)
    return ys


def _input_operand(terms: Sequence[QuantizedMatrix], columns: Tensor | None, width: int, rows: slice, a: Tensor | None) -> Tensor:
    k, count = terms[0].k, rows.stop - rows.start
    x = terms[0].gscale.new_empty(count, len(terms) * k + width, dtype=torch.bfloat16)
    for i, term in enumerate(terms):
        part = QuantizedMatrix(
            term.codes[rows], term.scales[rows], term.gscale[rows] if term.gscale.shape[0] > 1 else term.gscale, k
        )
        operands.write_operand(x[:, i * k :], part)
    if a is not None:
        with full_precision_sums():
            torch.mm(x[:, :k], a.T, out=columns[rows])
    _fill(x[:, len(terms) * k :], columns, rows)
    return x


def _fill(out: Tensor, columns: Tensor | None, rows: slice) -> None:
    """The last columns of an operand: what is given, then zeros."""
    used = 0 if columns is None else columns.shape[1]
    if used:
        out[:, :used].copy_(columns[rows])
    if used < out.shape[1]:
        out[:, used:].zero_()


# ---------------------------------------------------------------------------------------------- dgrad


def dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k: int) -> Tensor:
    """The operator ``dgrad``."""
    linear.check_dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k)
    weights = linear._matrices(w_codes, w_scales, w_gscale, [dy.shape[1] for dy in dys])
    m, columns = dys[0].shape[0], sum(w.k for w in weights)
    if dys[0].dtype != torch.bfloat16 or m <= SMALL_ROWS or k == 0 or not all(0 < w.k <= WIDEST for w in weights):
        return linear.reference_dgrad(dys, w_codes, w_scales, w_gscale, seeds, g, a, k)
    together = len(dys) == 1 or m * columns * 2 <= OPERAND_BYTES
    dx = dys[0].new_empty(m, k)
    for group in [range(len(dys))] if together else [[i] for i in range(len(dys))]:
        first = group[0] == 0
        _accumulate(dx, [(dys[i], weights[i], seeds[i]) for i in group], g if first else None, a if first else None, first)
    return dx


def _accumulate(dx: Tensor, members: Sequence[tuple], g: Tensor | None, a: Tensor | None, first: bool) -> None:
    """dx = (or, if not first, +=) [D(Q(dy)) ... | g] @ [D(W_b) ... | A.T].T"""
    columns = sum(w.k for _, w, _ in members)
    width = _aligned(columns + (0 if g is None else g.shape[1])) - columns
    wd, at = dx.new_empty(dx.shape[1], columns + width), 0
    for i, (_, w, _) in enumerate(members):
        last = i == len(members) - 1
        operands.write_operand(wd[:, at:], w, 1, a.T if last and a is not None else None, 0, width if last else 0)
        at += w.k
    for rows in _chunks(dx.shape[0], columns + width):
        operand, at = dx.new_empty(rows.stop - rows.start, columns + width), 0
        for dy, w, seed in members:
            _rounded(operand[:, at : at + w.k], dy, seed, rows)
            at += w.k
        _fill(operand[:, columns:], g, rows)
        with full_precision_sums():
            if first:
                torch.mm(operand, wd.T, out=dx[rows])
            else:
                dx[rows].addmm_(operand, wd.T)


def _rounded(out: Tensor, dy: Tensor, seed: Tensor | None, rows: slice) -> None:
    """D(Q(dy)) of some rows into out."""
    if seed is None:
        operands.write_rounded(out, dy[rows])
        return
    q = ops.quantize(dy, GRADIENT_STOCHASTIC, seed=seed)  # of all rows: an element's random number depends on its place in dy
    operands.write_operand(out, QuantizedMatrix(q.codes[rows], q.scales[rows], q.gscale[rows], q.k))
