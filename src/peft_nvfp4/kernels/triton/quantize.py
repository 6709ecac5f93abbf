"""Quantisation to NVFP4 in Triton: ``quantize`` and ``quantize_terms``.

One program per row. The row is read once and kept in registers; its maximum gives the global scale, its blocks give block scales
and codes, and a second term (if wanted) quantises what the first left over without going back to memory. Where the global scale
is not the row's own (weights: one for the tensor), rows are cut into chunks instead and a first pass finds the maximum; it is
combined by an integer atomic maximum, which no order can change.

Rejected: several rows per program. Broadcasting per-row scalars over a two-dimensional tile made the compiler repeat the row
reduction for every layout that needs its result (four times); with scalars it happens once, and narrow rows run in
programs of one warp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.formats import ACTIVATION, SWIZZLE_COLS, SWIZZLE_ROWS, NVFP4Format, QuantizedMatrix
from ...numerics.formats import BLOCK as BLOCK_SIZE
from ...numerics.formats import padded_k as padded
from ...ops.linear import empty_terms, matrices
from .blocks import (
    MAX6,
    RULES,
    SCALES_A_TILE,
    STOCHASTIC,
    amax_values,
    finite_part,
    power_of_two_scale,
    quantize_blocks,
    search_blocks,
    store_codes,
    store_terms,
)
from .launch import CHUNK_BLOCKS, MAX_BLOCKS, ceil_div, launch, launch_rows, mode_for, options_for, row_blocks, rows_contiguous
from .random import round_stochastically, seed_arguments
from .rows import BLOCK, load_values, padded_k, row_max

FROM_ROW, GIVEN, FROM_AMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Where quantize_kernel finds the global scale: the row in its registers, an argument, or a maximum from amax_kernel."""


@triton.jit(do_not_specialize=["M"])  # the number of tokens varies, and must not compile anew
def terms_kernel(
    x_ptr,  # (M, K) any float dtype
    offset_ptr,  # (K,) float32, where HAS_OFFSET
    codes_ptr, scales_ptr, gscale_ptr,  # (T, M, KP / 2) uint8, (T, M, KP / 16) uint8, (T, M) float32
    M, x_stride,
    K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr, TERMS: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    x = load_values(x_ptr + row * x_stride, blk, K, NB, MODE)
    store_terms(codes_ptr, scales_ptr, gscale_ptr, x_ptr, offset_ptr, row, x, blk, M, K, NB, MODE, TERMS, HAS_OFFSET, True, False)


@triton.jit
def amax_kernel(x_ptr, amax_ptr, x_stride, amax_stride, K: tl.constexpr, NB: tl.constexpr, MODE: tl.constexpr):
    """Largest magnitude of the finite blocks, as the bits of a float32: of every row (amax_stride 1) or of the tensor (0)."""
    row = tl.program_id(0).to(tl.int64)
    x = load_values(x_ptr + row * x_stride, tl.program_id(1) * NB + tl.arange(0, NB), K, NB, MODE)
    largest = row_max(finite_part(amax_values(x, NB, MODE)))
    tl.atomic_max(amax_ptr + row * amax_stride, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["key0", "key1"])
def quantize_kernel(
    x_ptr,  # (R, K) any float dtype
    given_ptr,  # GIVEN: float32 global scales; FROM_AMAX: int32 bits of the maxima
    codes_ptr, scales_ptr,  # (R, KP / 2) uint8, (R, KP / 16) uint8
    gscale_ptr,  # (R,) or (1,) float32; not written where GIVEN
    seed_ptr,
    key0, key1,
    x_stride,
    g_stride,  # 1: a global scale per row, 0: one for all
    K: tl.constexpr, NB: tl.constexpr, RULE: tl.constexpr, MODE: tl.constexpr,
    GLOBAL: tl.constexpr, SEED_ON_DEVICE: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blk = tl.program_id(1) * NB + tl.arange(0, NB)
    KP: tl.constexpr = padded_k(K)
    x = load_values(x_ptr + row * x_stride, blk, K, NB, MODE)
    amax = amax_values(x, NB, MODE)
    if GLOBAL == GIVEN:
        g = tl.load(given_ptr + row * g_stride)
        inverse_g = (0x7F000000 - g.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # 1 / g of a power of two, exact
    else:
        if GLOBAL == FROM_ROW:
            largest = row_max(finite_part(amax))
        else:
            largest = tl.load(given_ptr + row * g_stride).to(tl.float32, bitcast=True)
        g, inverse_g = power_of_two_scale(largest)
        tl.store(gscale_ptr + row * g_stride, g)  # one for all: every program stores the same number
    if RULE == STOCHASTIC:
        codes, bits = round_stochastically(x, amax, g, inverse_g, row, blk, KP, seed_ptr, key0, key1, NB, MODE, SEED_ON_DEVICE)
    elif RULE == MAX6:
        codes, bits, _, _ = quantize_blocks(x, amax, g, inverse_g, NB, MODE, GLOBAL == GIVEN, False)
    else:
        codes, bits = search_blocks(x, amax, inverse_g, NB, RULE, MODE, GLOBAL == GIVEN)
    if SWIZZLED:  # rows r, r + 32, r + 64, r + 96 of a tile of 128 lie together
        scales_ptr += row // 128 * 128 * (KP // BLOCK) + row % 32 * 16 + row % 128 // 32 * SCALES_A_TILE
    else:
        scales_ptr += row * (KP // BLOCK)
    store_codes(codes_ptr + row * (KP // 2), scales_ptr, codes, bits, blk, K, NB, MODE, SWIZZLED)


def quantize_terms(x: Tensor, offset: Tensor | None, terms: int) -> tuple[QuantizedMatrix, ...]:
    """x (M, K) as ``terms`` NVFP4 terms with a global scale per row."""
    m, k = x.shape
    x, out = rows_contiguous(x), empty_terms(x, terms, m, k)
    tensors, constants = (x, x if offset is None else offset, *out), {"TERMS": terms, "HAS_OFFSET": offset is not None}
    launch_rows(terms_kernel, "terms", (m, k), mode_for(x.dtype, k, x), tensors, (m, x.stride(0)), constants)
    return matrices(*out, k)


def quantize_for_gemm(x: Tensor, fmt: NVFP4Format, seed: Tensor | None) -> QuantizedMatrix:
    """The operator ``quantize`` without a given global scale, for a matrix that only an FP4 GEMM reads: its block scales are
    swizzled (one dimension) where K is a multiple of 64 (a row of tiles is then full). Scales of rows past the last one are not
    written."""
    m, k = x.shape
    return quantize(x, fmt, None, seed, swizzled=m > 0 and k > 0 and k % (SWIZZLE_COLS * BLOCK_SIZE) == 0)


def quantize(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None, seed: Tensor | None, swizzled: bool = False) -> QuantizedMatrix:
    """The operator ``quantize``."""
    m, k = x.shape
    nb, per_row = row_blocks(k), fmt.global_scale == "row"
    if fmt == ACTIVATION and gscale is None and k and nb <= MAX_BLOCKS and not swizzled:
        return quantize_terms(x, None, 1)[0]
    x = rows_contiguous(x)
    codes, scales, row_gscale = (t[0] for t in empty_terms(x, 1, m, k))
    if swizzled:
        scales = x.new_empty(-(-m // SWIZZLE_ROWS) * SWIZZLE_ROWS * padded(k) // BLOCK_SIZE, dtype=torch.uint8)
    if gscale is not None:
        where, out, given = GIVEN, gscale.clone(), gscale.contiguous()
    elif per_row and nb <= MAX_BLOCKS:
        where, out, given = FROM_ROW, row_gscale, row_gscale
    else:
        where, out = FROM_AMAX, row_gscale if per_row else x.new_empty(1, dtype=torch.float32)
        given = x.new_zeros(out.shape[0], dtype=torch.int32)
    if m == 0 or k == 0:
        return QuantizedMatrix(codes, scales, out if gscale is not None else out.fill_(1.0), k)
    g_stride = int(out.shape[0] > 1)
    chunk = nb if where == FROM_ROW else min(nb, CHUNK_BLOCKS)
    chunks = 1 if where == FROM_ROW else ceil_div(padded(k), BLOCK_SIZE * chunk)
    mode = mode_for(x.dtype, k, x)
    options = options_for(chunk, "quantize", mode)
    if where == FROM_AMAX:
        constants = {"K": k, "NB": chunk, "MODE": mode}
        launch(amax_kernel, (m, chunks), (x, given), (x.stride(0), g_stride), constants, **options)
    pointer, key0, key1, on_device = seed_arguments(seed, x) if fmt.stochastic else (x, 0, 0, False)
    constants = {"K": k, "NB": chunk, "RULE": STOCHASTIC.value if fmt.stochastic else RULES[fmt.rule], "MODE": mode}
    constants |= {"GLOBAL": where.value, "SEED_ON_DEVICE": on_device, "SWIZZLED": swizzled}
    tensors, numbers = (x, given, codes, scales, out, pointer), (key0, key1, x.stride(0), g_stride)
    launch(quantize_kernel, (m, chunks), tensors, numbers, constants, **options)
    return QuantizedMatrix(codes, scales, out, k)
