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

from ..formats import BLOCK as BLOCK_SIZE
from ..formats import padded_k
from .triton_blocks import (
    RULES,
    STOCHASTIC,
    inverse_power,
    power_of_two_scale,
    quantize_blocks,
    quantize_store_terms,
    store_codes,
)
from .triton_random import round_stochastically, seed_arguments
from .triton_rows import BLOCK, INF, block_amax, load_row
from .triton_tables import CHUNK_BLOCKS, EXACT_MATH, MAX_BLOCKS, mode_for, num_warps, row_blocks

OWN, GIVEN, FROM_AMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Where quantize_kernel finds the global scale: the row in its registers, an argument, or a maximum from amax_kernel."""


@triton.jit(do_not_specialize=["M"])  # the number of tokens varies, and must not compile anew
def terms_kernel(
    x_ptr,  # (M, K) any float dtype
    centre_ptr,  # (K,) float32, where HAS_CENTRE
    codes_ptr,  # (T, M, KP / 2) uint8
    scales_ptr,  # (T, M, KP / 16) uint8
    gscale_ptr,  # (T, M) float32
    M,
    K,
    KP,
    x_stride,
    NB: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_CENTRE: tl.constexpr,
    MODE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    blk = tl.arange(0, NB)
    lo, hi = load_row(x_ptr + row * x_stride, blk, K, NB)
    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    quantize_store_terms(
        codes_ptr, scales_ptr, gscale_ptr, centre_ptr, row, lo, hi, blk, M, K, KP, NB, TERMS, HAS_CENTRE, MODE
    )  # fmt: skip


@triton.jit
def amax_kernel(x_ptr, amax_ptr, K, x_stride, amax_stride, NB: tl.constexpr):
    """Largest magnitude of the finite blocks, as the bits of a float32: of every row (amax_stride 1) or of the tensor (0)."""
    row = tl.program_id(0).to(tl.int64)
    lo, hi = load_row(x_ptr + row * x_stride, tl.program_id(1) * NB + tl.arange(0, NB), K, NB)
    amax = block_amax(lo.to(tl.float32), hi.to(tl.float32), NB)
    largest = tl.max(tl.where(amax < INF, amax, 0.0), axis=0)
    tl.atomic_max(amax_ptr + row * amax_stride, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["key0", "key1"])
def quantize_kernel(
    x_ptr,  # (R, K) any float dtype
    given_ptr,  # GIVEN: float32 global scales; FROM_AMAX: int32 bits of the maxima
    codes_ptr,  # (R, KP / 2) uint8
    scales_ptr,  # (R, KP / 16) uint8
    gscale_ptr,  # (R,) or (1,) float32; not written where GIVEN
    seed_ptr,
    key0,
    key1,
    K,
    KP,
    x_stride,
    g_stride,  # 1: a global scale per row, 0: one for all
    NB: tl.constexpr,
    RULE: tl.constexpr,
    MODE: tl.constexpr,
    GLOBAL: tl.constexpr,
    SEED_ON_DEVICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    blk = tl.program_id(1) * NB + tl.arange(0, NB)
    lo, hi = load_row(x_ptr + row * x_stride, blk, K, NB)
    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    amax = block_amax(lo, hi, NB)
    if GLOBAL == GIVEN:
        g = tl.load(given_ptr + row * g_stride)
        inverse_g = inverse_power(g)
    else:
        if GLOBAL == OWN:
            largest = tl.max(tl.where(amax < INF, amax, 0.0), axis=0)
        else:
            largest = tl.load(given_ptr + row * g_stride).to(tl.float32, bitcast=True)
        g, inverse_g = power_of_two_scale(largest)
        tl.store(gscale_ptr + row * g_stride, g)  # one for all: every program stores the same number
    if RULE == STOCHASTIC:
        packed, bits = round_stochastically(lo, hi, amax, g, inverse_g, row, blk, KP, seed_ptr, key0, key1, NB, SEED_ON_DEVICE)
    else:
        packed, bits, _, _, _ = quantize_blocks(lo, hi, amax, g, inverse_g, NB, RULE, MODE)
    store_codes(codes_ptr + row * (KP // 2), scales_ptr + row * (KP // BLOCK), packed, bits, blk, KP)


# ---------------------------------------------------------------------------------------------- launches


def rows_contiguous(x: Tensor) -> Tensor:
    """x (M, K) with K contiguous; rows may have any stride."""
    return x if x.stride(1) == 1 else x.contiguous()


def empty_terms(like: Tensor, terms: int, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Storage of ``terms`` matrices: codes (T, R, Kp/2), scales (T, R, Kp/16), gscale (T, R)."""
    kp = padded_k(k)
    return (
        like.new_empty(terms, rows, kp // 2, dtype=torch.uint8),
        like.new_empty(terms, rows, kp // BLOCK_SIZE, dtype=torch.uint8),
        like.new_empty(terms, rows, dtype=torch.float32),
    )


def quantize_terms(x: Tensor, centre: Tensor | None, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) as ``terms`` NVFP4 terms with a global scale per row: codes (T, M, Kp/2), scales (T, M, Kp/16), gscale (T, M)."""
    m, k = x.shape
    nb = row_blocks(k)
    x = rows_contiguous(x)
    codes, scales, gscale = empty_terms(x, terms, m, k)
    if m:
        terms_kernel[(m,)](
            x, x if centre is None else centre, codes, scales, gscale, m, k, padded_k(k), x.stride(0),
            NB=nb, TERMS=terms, HAS_CENTRE=centre is not None, MODE=mode_for(x.dtype, centre is None),
            num_warps=num_warps(nb, "terms"), **EXACT_MATH,
        )  # fmt: skip
    return codes, scales, gscale


def quantize(x: Tensor, gscale: Tensor | None, seed: Tensor | None, rule: str, per_row: bool, stochastic: bool):
    """The operator ``quantize``: (codes, scales, gscale)."""
    m, k = x.shape
    nb = row_blocks(k)
    if per_row and gscale is None and rule == "max6" and not stochastic and k and nb <= MAX_BLOCKS:
        return tuple(t[0] for t in quantize_terms(x, None, 1))
    x = rows_contiguous(x)
    codes, scales, own = (t[0] for t in empty_terms(x, 1, m, k))
    if gscale is not None:
        where, g_stride, out, given = GIVEN, int(gscale.shape[0] > 1), gscale.clone(), gscale.contiguous()
    else:
        fits = per_row and nb <= MAX_BLOCKS
        where, g_stride = (OWN if fits else FROM_AMAX), int(per_row)
        out = own if per_row else x.new_empty(1, dtype=torch.float32)
        given = out if fits else x.new_zeros(out.shape[0], dtype=torch.int32)
    if m == 0 or k == 0:
        return codes, scales, out if gscale is not None else out.fill_(1.0)
    if where == OWN:
        chunk, chunks = nb, 1
    else:
        chunk = min(nb, CHUNK_BLOCKS)
        chunks = triton.cdiv(padded_k(k), BLOCK_SIZE * chunk)
    warps = num_warps(chunk, "quantize")
    if where == FROM_AMAX:
        amax_kernel[(m, chunks)](x, given, k, x.stride(0), g_stride, NB=chunk, num_warps=warps)
    pointer, key0, key1, on_device = seed_arguments(seed, x) if stochastic else (x, 0, 0, False)
    quantize_kernel[(m, chunks)](
        x, given, codes, scales, out, pointer, key0, key1, k, padded_k(k), x.stride(0), g_stride,
        NB=chunk, RULE=STOCHASTIC.value if stochastic else RULES[rule], MODE=mode_for(x.dtype), GLOBAL=where.value,
        SEED_ON_DEVICE=on_device, num_warps=warps, **EXACT_MATH,
    )  # fmt: skip
    return codes, scales, out
