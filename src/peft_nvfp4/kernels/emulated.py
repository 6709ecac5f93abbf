"""fprop and dgrad on a GPU without FP4 tensor cores, by BF16 GEMMs of dequantised operands: exact, or with one product an input.

BF16 holds every dequantised value exactly, and its tensor cores accumulate in FP32: the function is that of the FP4 instruction.
What is summed is laid side by side along K and becomes one GEMM (:mod:`.triton.dequantize`), the adapters' low-rank products and
the constants included. :func:`fprop_of_rounded_inputs` multiplies an input of two terms once instead of twice, as the sum of both
rounded to BF16: 2^-9 of a value, where two terms leave over about 2^-7 of it. Operands of large inputs are made for :data:`ROWS`
rows at a time, which bounds the extra memory.

A weight of another tool's checkpoint may have a global scale that is no power of two. Its significand f is then the GEMM's alpha,
D(W) / f its operand, and what else is summed is divided by f, in FP32, and split into three BF16 columns each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import ops
from ..numerics import reference
from ..numerics.formats import BLOCK, GRADIENT_STOCHASTIC, QuantizedMatrix
from ..numerics.matmul import full_precision_sums
from ..numerics.products import BackwardLinear, Dgrad, Fprop
from ..numerics.reference import without_scale_factor
from ..ops import linear
from .fp4.native import join
from .triton import matmul
from .triton.dequantize import write_operand, write_rounded
from .triton.launch import MAX_BLOCKS

ROWS = 2048
"""Rows of an operand at a time, where all of them would take more than :data:`OPERAND_BYTES`. Fewer would leave a large GPU's
multiprocessors without a tile."""
OPERAND_BYTES = 48 << 20
SMALL_ROWS = matmul.ROWS
"""Up to here a product is bound by the weight's bytes, and decoding it in the loop (matmul) is faster."""


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = rows if rows * columns * 2 <= OPERAND_BYTES else ROWS
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _aligned(columns: int) -> int:
    """GEMMs want rows of a multiple of 16 bytes."""
    return -(-columns // 8) * 8


def in_three(x: Tensor) -> Tensor:
    """x (N, c) as BF16 (N, 3 c) whose thirds sum to it: 24 significant bits."""
    first = x.to(torch.bfloat16)
    rest = x.float() - first.float()
    second = rest.to(torch.bfloat16)
    return torch.cat([first, second, (rest - second.float()).to(torch.bfloat16)], dim=1)


def fprop_of_rounded_inputs(p: Fprop) -> list[Tensor]:
    """The operator ``fprop``, not exact: x~ is rounded to BF16, as the adapters read it anyway."""
    return fprop(p, exact=False)


def fprop(p: Fprop, exact: bool = True) -> list[Tensor]:
    """The operator ``fprop``."""
    m, k = p.terms[0].codes.shape[0], p.terms[0].k
    if p.dtype != torch.bfloat16 or k == 0:
        return reference.fprop(p, matmul.matmul, linear.dequantize_input.run)
    plain = all(item.constant is None for item in p.linears)
    adapters = [adapter for item in p.linears for adapter in item.adapters]
    if m <= SMALL_ROWS or len(p.terms) == 1 and not adapters and plain:
        return _one_by_one(p)
    copies = len(p.terms) if exact else 1
    # h is computed from the operand where that is exactly D(x~), and h are the only extra columns
    from_operand = copies == 1 and plain and p.a is not None and all(adapter.hidden is None for adapter in adapters)
    if from_operand and all(item.scale_factor == 1.0 for item in p.linears):
        h = p.a.new_empty(m, p.a.shape[0])
        extras = [join([adapter.up for adapter in item.adapters]) for item in p.linears]
        with full_precision_sums():
            return [*_side_by_side(p, copies, extras, h, p.a), h]
    p, h = reference.with_hidden(p, linear.dequantize_input.run)
    extras, columns = [], []
    for item in p.linears:
        constant = None if item.constant is None else item.constant[:, None]
        added = [] if constant is None else [constant if constant.dtype == torch.bfloat16 else in_three(constant)]
        extra = join([adapter.up for adapter in item.adapters] + added)
        ones = [c.new_ones(1, c.shape[1]).expand(m, -1) for c in added]
        multipliers = [adapter.hidden for adapter in item.adapters] + ones
        if extra is not None and item.scale_factor != 1.0:
            extra, multipliers = in_three(extra.float() / item.scale_factor), 3 * multipliers
        extras.append(extra)
        columns += multipliers
    with full_precision_sums():
        ys = _side_by_side(p, copies, extras, join(columns), None)
    return ys if h is None else [*ys, h]


def _one_by_one(p: Fprop) -> list[Tensor]:
    """Every linear by itself, with its low-rank product in the sum (:mod:`triton.matmul`) or, for many rows, added in BF16."""
    p, h = reference.with_hidden(p, linear.dequantize_input.run)
    ys = []
    for weight, constant, factor, adapters in p.linears:
        hidden, up = adapters[0] if adapters else (None, None)
        y = matmul.matmul(p.terms, weight, constant, torch.bfloat16, p.values, factor, hidden, up)
        for hidden, up in adapters[1:]:
            y.addmm_(hidden, up.T)
        ys.append(y)
    return ys if h is None else [*ys, h]


def _side_by_side(
    p: Fprop, copies: int, extras: Sequence[Tensor | None], columns: Tensor | None, a: Tensor | None
) -> list[Tensor]:
    """x = [D(term 1) | D(residual term) | columns] against f [D(W) / f | D(W) / f | extra] (one copy: the sum of both terms
    against one D(W)); the extra columns of a linear stand at its place among those of all, zeros elsewhere. With a, the columns
    are D(x~) @ a.T and are filled here."""
    terms, m, k = p.terms, p.terms[0].codes.shape[0], p.terms[0].k
    used = 0 if columns is None else columns.shape[1]
    width = _aligned(copies * k + used) - copies * k
    chunks = list(_chunks(m, copies * k + width))
    x, ys, first = None, [], 0
    for (w, _, factor, _), extra in zip(p.linears, extras):
        n, wd = w.codes.shape[0], None  # the last linear's operand goes before the next one is made
        wd = w.gscale.new_empty(n, copies * k + width, dtype=torch.bfloat16)
        write_operand(wd, without_scale_factor(w, factor), copies, extra, first, width)
        first += 0 if extra is None else extra.shape[1]
        y = wd.new_empty(m, n)
        for rows in chunks:
            if x is None or len(chunks) > 1:
                x = None  # before the next one is made
                x = _input_operand(terms, copies, columns, width, rows, a if not ys else None)
            _multiply(y, rows, x, wd, factor)
        ys.append(y)
    return ys


def _multiply(y: Tensor, rows: slice, x: Tensor, wd: Tensor, factor: float = 1.0, add: bool = False) -> None:
    """y[rows] = (or, to ``add``, +=) factor * x @ wd.T"""
    y = _rows(y, rows)
    if factor == 1.0 and not add:
        torch.mm(x, wd.T, out=y)
    else:
        y.addmm_(x, wd.T, beta=int(add), alpha=factor)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """x[rows], which takes longer than a launch where it is all of x."""
    return x if rows.stop - rows.start == x.shape[0] else x[rows]


def _rows_of(q: QuantizedMatrix, rows: slice) -> QuantizedMatrix:
    if rows.stop - rows.start == q.codes.shape[0]:
        return q
    return QuantizedMatrix(q.codes[rows], q.scales[rows], q.gscale[rows] if q.gscale.shape[0] > 1 else q.gscale, q.k)


def _input_operand(
    terms: Sequence[QuantizedMatrix], copies: int, columns: Tensor | None, width: int, rows: slice, a: Tensor | None
) -> Tensor:
    k, count = terms[0].k, rows.stop - rows.start
    x = terms[0].gscale.new_empty(count, copies * k + width, dtype=torch.bfloat16)
    first, *others = [_rows_of(term, rows) for term in terms]
    columns = None if columns is None else _rows(columns, rows)
    if a is not None:  # the columns are made of the operand
        write_operand(x, first)
        torch.mm(x[:, :k], a.T, out=columns)
        x[:, k : k + columns.shape[1]] = columns
        x[:, k + columns.shape[1] :] = 0.0
    elif copies == 1:
        write_operand(x, first, 1, columns, 0, width, *others)
    else:
        write_operand(x, first)
        write_operand(x[:, k:], *others, 1, columns, 0, width)
    return x


def dgrad(p: Dgrad) -> Tensor:
    """The operator ``dgrad``."""
    first, columns = p.linears[0], sum(item.weight.k for item in p.linears)
    m, k = first.dy.shape[0], first.weight.codes.shape[0]
    wide = not all(0 < item.weight.k <= MAX_BLOCKS * BLOCK for item in p.linears)
    if first.dy.dtype != torch.bfloat16 or m <= SMALL_ROWS or k == 0 or wide:
        return reference.dgrad(p, matmul.matmul, ops.quantize)
    dx = first.dy.new_empty(m, k)
    together = m * columns * 2 <= OPERAND_BYTES
    with full_precision_sums():
        for i, members in enumerate([p.linears] if together else [[item] for item in p.linears]):
            _accumulate(dx, members, *((None, None) if i else (p.g, p.a)), i == 0)
    return dx


def _accumulate(dx: Tensor, members: Sequence[BackwardLinear], g: Tensor | None, a: Tensor | None, first: bool) -> None:
    """dx = (or, if not first, +=) [D(Q(dy)) ... | g] @ [D(W_b) ... | A.T].T"""
    columns = sum(item.weight.k for item in members)
    width = _aligned(columns + (0 if g is None else g.shape[1])) - columns
    wd, at = dx.new_empty(dx.shape[1], columns + width), 0
    last = len(members) - 1
    for i, (_, w, _) in enumerate(members):
        extra = (a.T if a is not None else None, 0, width) if i == last else ()
        write_operand(wd[:, at:] if at else wd, w, 1, *extra)
        at += w.k
    for rows in _chunks(dx.shape[0], columns + width):
        operand, at = dx.new_empty(rows.stop - rows.start, columns + width), 0
        for i, (dy, w, seed) in enumerate(members):
            extra = (None if g is None else _rows(g, rows), width) if i == last else ()
            _write_gradient(operand[:, at:] if at else operand, dy, seed, rows, *extra)
            at += w.k
        _multiply(dx, rows, operand, wd, add=not first)


def _write_gradient(
    out: Tensor, dy: Tensor, seed: Tensor | None, rows: slice, extra: Tensor | None = None, width: int = 0
) -> None:
    """D(Q(dy)) of some rows into the first columns of out, and behind them ``width`` columns: extra, then zeros."""
    if seed is None:
        write_rounded(out, _rows(dy, rows), extra, width)
        return
    q = ops.quantize(dy, GRADIENT_STOCHASTIC, seed=seed)  # of all rows: an element's random number depends on its place in dy
    write_operand(out, _rows_of(q, rows), 1, extra, 0, width)
