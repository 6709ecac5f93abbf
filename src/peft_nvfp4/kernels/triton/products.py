"""The kernels of products with few rows; :mod:`.matmul` explains them and launches them."""

import triton
import triton.language as tl

from .decode import block_product, load_blocks, operand, scale_factor, signed_bytes
from .pairs import load
from .rows import BLOCK


@triton.jit
def _adapter(hidden, up, m, n, M, N, hidden_stride, scaling, RANK: tl.constexpr, R: tl.constexpr):
    """(h (rows of x, R), scaling * up (rows of w, R)) in BF16, zeros beyond M, N and the rank. Loaded ahead of the loop."""
    r = tl.arange(0, R)[None, :]
    m, n = m[:, None], n[:, None]
    h = tl.load(hidden + m * hidden_stride + r, mask=(m < M) & (r < RANK), other=0.0)
    b = tl.load(up + n * RANK + r, mask=(n < N) & (r < RANK), other=0.0)
    return h, (b.to(tl.float32) * scaling).to(tl.bfloat16)


NUMBERS = ["M", "N", "scaling", "hidden_stride", "x_stride", "x2_stride", "w_stride"]


@triton.jit(do_not_specialize=NUMBERS)
def matmul_vector_kernel(
    x_codes, x_scales, x_gscale,  # (M, NB) int64, NB blocks of 16 codes; (M, NB) uint8; (M,) or (1,) float32
    x2_codes, x2_scales, x2_gscale,  # the second term's, where TERMS == 2
    w_codes, w_scales, w_gscale,  # (N, NB) int64, (N, NB) uint8, (1,) or (N,) float32
    bias,  # (N,) where HAS_BIAS
    hidden, up,  # (M, RANK) bfloat16, (N, RANK) of any dtype
    out,  # (M, N)
    M, N, scaling, hidden_stride, x_stride, x2_stride, w_stride,
    NB: tl.constexpr,  # a model has few different K: worth a compilation each
    TERMS: tl.constexpr,
    RANK: tl.constexpr,  # 0 without an adapter
    R: tl.constexpr,  # a power of two >= RANK
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,  # w's global scale is no power of two: its significand multiplies the sum
    PTX: tl.constexpr,
    BM: tl.constexpr,  # >= M
    BN: tl.constexpr, KB: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    w_row = tl.minimum(n, N - 1).to(tl.int64)[None, :, None]
    x_row = tl.minimum(m, M - 1).to(tl.int64)[:, None, None]
    if RANK > 0:
        h, b = _adapter(hidden, up, m, n, M, N, hidden_stride, scaling, RANK, R)
    acc = tl.zeros((BM, BN, KB), tl.float32)
    for start in range(0, NB, KB):
        blk = start + tl.arange(0, KB)[None, None, :]
        codes, w_scale = load_blocks(w_codes, w_scales, w_gscale, w_row, w_stride, blk, NB, NB, MASKED, SPLIT)
        w = signed_bytes(codes, PTX)
        codes, scale = load_blocks(x_codes, x_scales, x_gscale, x_row, x_stride, blk, NB, NB, MASKED)
        acc = tl.fma(block_product(signed_bytes(codes, PTX), w, PTX), (scale * 0.25) * w_scale, acc)  # twice by twice
        if TERMS == 2:
            codes, scale = load_blocks(x2_codes, x2_scales, x2_gscale, x_row, x2_stride, blk, NB, NB, MASKED)
            acc = tl.fma(block_product(signed_bytes(codes, PTX), w, PTX), (scale * 0.25) * w_scale, acc)
    y = tl.sum(acc, axis=2)
    if SPLIT:
        y *= scale_factor(tl.load(w_gscale + tl.minimum(n, N - 1) * w_stride))[None, :]
    if RANK > 0:
        y += tl.sum(h.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :], axis=2)
    m, n = m[:, None], n[None, :]
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit(do_not_specialize=NUMBERS)
def matmul_tile_kernel(
    x_codes, x_scales, x_gscale, x2_codes, x2_scales, x2_gscale, w_codes, w_scales, w_gscale, bias, hidden, up,  # as above
    values,  # (M, K) D(x) where HAS_VALUES, in place of the first term
    out,  # (M, N), or one after the other for every part of K
    M, N, scaling, hidden_stride, x_stride, x2_stride, w_stride,
    NB: tl.constexpr, TERMS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, PTX: tl.constexpr, K: tl.constexpr, HAS_VALUES: tl.constexpr,
    STEPS: tl.constexpr,  # of KB blocks in a part of K
    BM: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * (STEPS * KB)
    end = tl.minimum(first + STEPS * KB, NB)
    w_row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    x_row = tl.minimum(m, M - 1).to(tl.int64)[:, None]
    once = tl.program_id(1) == 0  # of the parts of K, the first adds what is not a part
    if RANK > 0:
        h, b = _adapter(hidden, up, m, n, M, tl.where(once, N, 0), hidden_stride, scaling, RANK, R)
    w_dtype: tl.constexpr = tl.bfloat16 if PTX else tl.float32
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(STEPS):
        start = first + step * KB
        blk = start + tl.arange(0, KB)[None, :]
        w = operand(w_codes, w_scales, w_gscale, w_row, w_stride, blk, end, NB, BN, KB, MASKED, PTX, SPLIT)
        if HAS_VALUES:
            k = start * BLOCK + tl.arange(0, KB * BLOCK)[None, :]
            x = load(values + x_row * K + k, k < tl.minimum(end * BLOCK, K), not MASKED).to(w_dtype)
        else:
            x = operand(x_codes, x_scales, x_gscale, x_row, x_stride, blk, end, NB, BM, KB, MASKED, PTX)
        acc = tl.dot(w, tl.trans(x), acc)
        if TERMS == 2:
            x = operand(x2_codes, x2_scales, x2_gscale, x_row, x2_stride, blk, end, NB, BM, KB, MASKED, PTX)
            acc = tl.dot(w, tl.trans(x), acc)
    if SPLIT:
        acc *= scale_factor(tl.load(w_gscale + w_row * w_stride))
    if RANK > 0:
        acc = tl.dot(b.to(w_dtype), tl.trans(h.to(w_dtype)), acc)
    m, n = m[None, :], n[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=(n < N) & once, other=0.0).to(tl.float32)
    out += tl.program_id(1).to(tl.int64) * M * N
    tl.store(out + m.to(tl.int64) * N + n, acc.to(out.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit(do_not_specialize=["M", "N"])
def matmul_sum_kernel(parts, out, M, N, PARTS: tl.constexpr, BN: tl.constexpr):
    """out (M, N) = sum of parts (PARTS, M, N) in order."""
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    y = tl.zeros((BN,), tl.float32)
    for part in range(PARTS):
        y += tl.load(parts + (part * M + m) * N + n, mask=n < N, other=0.0)
    tl.store(out + m * N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def lora_down_kernel(
    x,  # (M, K) bfloat16
    a,  # (rank, K), any dtype
    out,  # (M, rank) bfloat16
    K: tl.constexpr,
    BK: tl.constexpr,
):
    """x @ A.T, one element a program: A is small, what counts is that many programs wait for memory at once."""
    r, m = tl.program_id(0), tl.program_id(1)
    acc = tl.zeros((BK,), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        xk = tl.load(x + m * K + k, mask=k < K, other=0.0).to(tl.float32)
        ak = tl.load(a + r * K + k, mask=k < K, other=0.0).to(tl.bfloat16).to(tl.float32)
        acc = tl.fma(xk, ak, acc)
    tl.store(out + m * tl.num_programs(0) + r, tl.sum(acc, axis=0).to(tl.bfloat16))
