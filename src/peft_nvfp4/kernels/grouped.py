"""The products of a mixture's experts on a GPU, in BF16, in one of two ways.

*Dequantise, then PyTorch's grouped GEMM*, which multiplies the rows of every expert with its matrix in one kernel, and reads on
the device where an expert's rows end. As in :mod:`.emulated`, what is summed is laid side by side along K: D(x~), h and ones
against D(W), s B and a constant. Weights are dequantised for one product, all experts at once: a chunk of experts would begin at
a row that only the device knows. Where that would take more than :data:`OPERAND_BYTES`, the rows of every expert's matrix are
taken in chunks.
PyTorch has the kernel for compute capability 9 and 10; elsewhere it loops over the experts and waits for the device.

*Decode in the loop* (:mod:`.triton.grouped_matmul`): on other GPUs, for few rows, for sizes that the GEMM does not take, and for
global scales that are no powers of two.

Both have the same operands, FP32 sums and one rounding. Of an input with two terms they multiply the sum, rounded to BF16; both
terms where ``PEFT_NVFP4_KERNELS=emulated``. FP4 tensor cores are not used: no library has a grouped FP4 product for global scales
by row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import grouped_mm as grouped_gemm

from .. import ops
from ..numerics import grouped as definition
from ..numerics.formats import BLOCK, GRADIENT_STOCHASTIC, QuantizedMatrix
from ..numerics.grouped import GroupedDgrad, GroupedFprop
from ..ops.linear import dequantize_input
from .dispatch import choice
from .emulated import in_three
from .triton.dequantize import write_operand, write_rounded
from .triton.grouped_matmul import grouped_matmul
from .triton.launch import MAX_BLOCKS

ALIGNED = 8
"""Strides of a grouped GEMM's operands are multiples of 16 bytes."""
CAPABILITIES = (9, 10)
"""Major compute capabilities for which PyTorch has a grouped GEMM."""
OPERAND_BYTES = 1 << 30
ROWS_OF_AN_EXPERT = 16
"""Up to so many rows of an expert, on average, decoding in the loop is faster: a weight is read as codes, once."""


def has_grouped_gemm(device: torch.device) -> bool:
    """Whether PyTorch computes a grouped GEMM there in one kernel."""
    return torch.cuda.get_device_capability(device)[0] in CAPABILITIES


def _by_gemm(rows: int, experts: int, device: torch.device, *sizes: int) -> bool:
    many = rows > ROWS_OF_AN_EXPERT * experts
    return many and all(size % ALIGNED == 0 and size for size in sizes) and has_grouped_gemm(device)


def _aligned(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED


def _padded(x: Tensor) -> Tensor:
    """x (..., n) with n filled up with zeros to what the GEMM wants."""
    return x if x.shape[-1] % ALIGNED == 0 else F.pad(x, (0, -x.shape[-1] % ALIGNED))


def grouped_fprop(p: GroupedFprop) -> tuple[Tensor, Tensor]:
    """The operator ``grouped_fprop``."""
    if p.dtype != torch.bfloat16:
        return definition.grouped_fprop(p, choice(p.ends.device).fprop)
    (experts, n, _), k = p.weight.codes.shape, p.terms[0].k
    rows = p.terms[0].codes.shape[0] if p.sources is None else p.sources.shape[0]
    exact = choice(p.ends.device).implementation == "emulated"
    if p.factors is not None or not _by_gemm(rows, experts, p.ends.device, k, n):
        return _decoded_fprop(p, exact)
    copies, rank = len(p.terms) if exact else 1, 0 if p.a is None else p.a.shape[1]
    extra = _extra_columns(p)
    width = _aligned(copies * k + (0 if extra is None else extra.shape[2])) - copies * k
    x = _input_operand(p, copies, width)
    h = x.new_empty(rows, rank)
    if rank:
        xd = x[:, :k] if copies == 1 else _gathered(dequantize_input.run(p.terms, None, p.dtype), p.sources)
        h = grouped_gemm(xd, p.a.transpose(1, 2), offs=p.ends)
    _fill(x[:, copies * k :], h, 0 if extra is None else extra.shape[2] - rank)
    return _by_weight(x, p.weight, copies, extra, width, p.ends), h


def _extra_columns(p: GroupedFprop) -> Tensor | None:
    """(E, N, c) what h and ones are multiplied with: s B and the constant, in three BF16 parts if it is wider."""
    if p.constant is None:
        return p.up
    constant = p.constant.unsqueeze(2)
    parts = constant if constant.dtype == p.dtype else in_three(constant.flatten(0, 1)).view(*constant.shape[:2], 3)
    return parts if p.up is None else torch.cat([p.up, parts], 2)


def _decoded_fprop(p: GroupedFprop, exact: bool) -> tuple[Tensor, Tensor]:
    xd = dequantize_input.run(p.terms, None, p.dtype)
    xs = [dequantize_input.run([term], None, p.dtype) for term in p.terms] if exact and len(p.terms) == 2 else [xd]
    h = None if p.a is None else grouped_matmul([xd], p.sources, p.ends, p.a)
    y = grouped_matmul(xs, p.sources, p.ends, p.weight, h, p.up, p.factors is not None, p.constant)
    return y, y.new_empty(len(y), 0) if h is None else h


def _gathered(x: Tensor, sources: Tensor | None) -> Tensor:
    return x if sources is None else x.index_select(0, sources)


def _input_operand(p: GroupedFprop, copies: int, width: int) -> Tensor:
    """D(x~) of every row, ``copies`` times or as one sum, and ``width`` columns that are filled later."""
    terms, k = p.terms, p.terms[0].k
    x = p.ends.new_empty(terms[0].codes.shape[0], copies * k + width, dtype=torch.bfloat16)
    if copies < len(terms):
        write_operand(x, terms[0], residual=terms[1])
    else:
        for i, term in enumerate(terms):
            write_operand(x[:, i * k :], term)
    return _gathered(x, p.sources)


def _fill(out: Tensor, columns: Tensor, ones: int) -> None:
    """The last columns of an operand: what is given, then so many ones, then zeros."""
    used = columns.shape[1]
    if used:
        out[:, :used].copy_(columns)
    if ones:
        out[:, used : used + ones].fill_(1.0)
    if used + ones < out.shape[1]:
        out[:, used + ones :].zero_()


def _by_weight(x: Tensor, w: QuantizedMatrix, copies: int, extra: Tensor | None, width: int, ends: Tensor) -> Tensor:
    """x @ [D(W_e) ... | extra_e | 0].T of every expert's rows, by chunks of the rows of W_e."""
    parts = []
    for rows in _chunks(w, x.shape[1]):
        wd = _weight_operand(w, rows, copies, None if extra is None else extra[:, rows], width)
        parts.append(grouped_gemm(x, wd.transpose(1, 2), offs=ends))
        del wd
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _chunks(w: QuantizedMatrix, columns: int) -> Iterator[slice]:
    experts, n, _ = w.codes.shape
    step = max(ALIGNED, OPERAND_BYTES // (2 * columns * experts) // ALIGNED * ALIGNED)
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def _weight_operand(w: QuantizedMatrix, rows: slice, copies: int, extra: Tensor | None, width: int) -> Tensor:
    """[D(W_e) ... | extra_e | 0] (E, rows, copies * K + width)."""
    codes, scales = w.codes[:, rows], w.scales[:, rows]
    experts, n, _ = codes.shape
    gscale = w.gscale[:, None].expand(experts, n).reshape(-1)
    flat = QuantizedMatrix(codes.reshape(experts * n, -1), scales.reshape(experts * n, -1), gscale, w.k)
    out = gscale.new_empty(experts * n, copies * w.k + width, dtype=torch.bfloat16)
    write_operand(out, flat, copies, None if extra is None else extra.reshape(experts * n, -1), 0, width)
    return out.view(experts, n, -1)


def grouped_dgrad(p: GroupedDgrad) -> Tensor:
    """The operator ``grouped_dgrad``."""
    (rows, n), experts = p.dy.shape, p.weight.codes.shape[0]
    k = p.weight.codes.shape[1] if p.quantized else p.weight.k
    if p.dy.dtype != torch.bfloat16 or p.quantized and n > MAX_BLOCKS * BLOCK or not p.quantized and p.factors is not None:
        return definition.grouped_dgrad(p, choice(p.dy.device).dgrad)
    if not p.quantized:
        wd = _weight_operand(p.weight, slice(None), 1, None, 0).transpose(1, 2)
        dx = grouped_mm(p.dy, wd, p.ends)
        return dx if p.g is None else dx.add_(grouped_mm(p.g, p.a.transpose(1, 2), p.ends))
    by_gemm = _by_gemm(rows, experts, p.dy.device, k, n)
    rank = 0 if p.g is None or not by_gemm else p.g.shape[1]
    width = _aligned(n + rank) - n
    dy, g = p.dy.new_empty(rows, n + width), p.g if by_gemm else None
    if p.seed is None:
        write_rounded(dy, p.dy, g, width)
    else:
        write_operand(dy, ops.quantize(p.dy, GRADIENT_STOCHASTIC, seed=p.seed), 1, g, 0, width)
    a = None if p.a is None else p.a.transpose(1, 2)
    if by_gemm:
        return _by_weight(dy, p.weight, 1, a, width, p.ends)
    return grouped_matmul([dy[:, :n]], None, p.ends, p.weight, p.g, a)


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """The operator ``grouped_mm``."""
    if x.dtype != torch.bfloat16:
        return definition.grouped_mm(x, w, ends)
    if not _by_gemm(x.shape[0], w.shape[0], x.device, ALIGNED):
        return grouped_matmul([x], None, ends, w)
    by_column = w.stride(1) == 1 and w.stride(2) % ALIGNED == 0
    if x.shape[1] % ALIGNED or not by_column:
        w = _padded(w).contiguous()
    return grouped_gemm(_padded(x).contiguous(), w.transpose(1, 2), offs=ends)
