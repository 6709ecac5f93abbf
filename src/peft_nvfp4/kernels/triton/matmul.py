"""The matrix product on GPUs without FP4 tensor cores: ``matmul``, y (M, N) = sum_t D(x_t) @ D(w).T + bias.

With many rows, dequantising the weight once and calling the BF16 GEMM of PyTorch is best (:func:`many_rows`). With few, as in
generation, the product is a matter of reading the weight: 0.56 bytes a value as codes, but 0.56 + 2 + 2 through a BF16 copy. So
up to ``ROWS`` rows the codes are decoded inside the product, by one of two kernels. Both use exact products and accumulate in
FP32; the order of the sum depends on nothing but the shapes (no atomics).

*Very few rows* (``matmul_vector_kernel``). Both operands are in NVFP4. Twice a grid value is an integer of at most 12, so the sum
of a block's 16 products is an integer of at most 16 * 144: four DP4A instructions give it exactly, and one fused multiply-add by
the product of the two block scales adds it to the FP32 sum. All threads of a program work along K on the same ``BN`` rows of w:
the codes of x are decoded once for BN rows, and one reduction at the end joins the threads.

*More rows* (``matmul_tile_kernel``). A tile of w is decoded to BF16 in registers, also by byte permutation, and multiplied by
tensor cores. The block scale and the powers of two are folded into the BF16 operand, which holds every D exactly. (A global scale
of another tool's that is no power of two is split: its significand multiplies the FP32 sum, in both kernels.) w is the first
operand and y comes out transposed: the tensor core's long side is then N, and M may be small. Where N gives too few programs to
fill the GPU, K is split over ``program_id(1)`` and ``matmul_sum_kernel`` adds the parts in order.

The part of an adapter, h @ (s B).T with its small rank, is added to the FP32 sum before the one rounding, and h = x @ A.T has a
kernel too (``lora_down_kernel``). Both read the FP32 masters A and B and round them in registers: :func:`linear` takes two
launches, where a cast of A, a scaled cast of B, two products and a sum take six. In generation, launches are most of the time.

Rejected: multiplying FP32 values (``values``, D(x) that the caller has) in the first kernel: a conversion and a multiply-add per
value instead of a quarter of a DP4A.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import ops
from ...numerics.formats import BLOCK as BLOCK_SIZE
from ...numerics.formats import QuantizedMatrix
from ...numerics.matmul import full_precision_sums
from ...numerics.reference import without_scale_factor
from .launch import EXACT_MATH, INTERPRETED, ceil_div, launch, power_of_two, rows_contiguous
from .products import lora_down_kernel, matmul_sum_kernel, matmul_tile_kernel, matmul_vector_kernel

VECTOR_ROWS, MORE_VECTOR_ROWS, MORE_VECTOR_ROWS_UP_TO = 4, 8, 1 << 24
"""Up to so many rows ``matmul_vector_kernel`` is used (up to how many for one term, and weights of up to how many values); ..."""
ROWS = 64
"""... and up to so many rows, ``matmul_tile_kernel``.

Microseconds on an H200 (Triton 3.6, in a CUDA graph), one term, the weight not in the L2 cache, by M:

    N x K = 8192 x 2048         1     4     8    16    64   128  |  14336 x 4096:   1     4     8    16    64
    vector                    5.8   8.8  13.0                    |               15.6  24.0  40.1
    tile                           12.3  13.2  12.3  13.9  20.2  |                           33.0  31.8  40.5
    dequantise, then GEMM    20.6  20.0  19.1  19.4  20.7  21.4  |               79.2  79.0  78.6  78.5  78.5
    GEMM of a BF16 weight    11.5  11.5  11.3  11.4  12.4  12.6  |               34.3  33.6  33.8  33.9  37.4
"""
VECTOR = {"programs": 1024, "rows_of_w": (2, 8), "warps": 4}
"""About how many programs, at least and at most how many rows of w each (BN), and most warps of one. A warp takes 64 blocks along
K at a time: two words, or 16 bytes, a thread."""
TILE = {"rows_of_w": 64, "blocks": 8, "warps": 4, "stages": 3, "enough": 112, "programs": 264}
"""Tile of w: rows and blocks along K. Fewer tiles than ``enough`` split K, up to ``programs`` (two per multiprocessor of an H200;
30 us instead of 40 with one, for 4096 x 14336). With more, splitting gains less than its second launch costs the host."""
DOWN = {"columns": 2048, "columns_per_thread": 8}


def _parts(q: QuantizedMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and global scales, contiguous, the codes on an address that 64-bit words may have."""
    codes = q.codes.contiguous()
    return codes if codes.data_ptr() % 8 == 0 else codes.clone(), q.scales.contiguous(), q.gscale


def _vector_launch(tensors: list, numbers: tuple, constants: dict) -> None:
    m, n, nb = *numbers[:2], constants["NB"]
    warps = min(VECTOR["warps"], power_of_two(ceil_div(nb, 64)))
    if nb % (64 * warps) and nb % (32 * warps) == 0:
        warps //= 2
    bm, kb = power_of_two(m), 64 * warps
    least, most = VECTOR["rows_of_w"]
    bn = min(max(power_of_two(n // VECTOR["programs"]), least), most) if bm < 8 else 4  # more sums do not fit in registers
    constants |= {"BM": bm, "BN": bn, "KB": kb, "MASKED": nb % kb != 0}
    launch(matmul_vector_kernel, (ceil_div(n, bn), 1, 1), tensors, numbers, constants, num_warps=warps, **EXACT_MATH)


def _tile_launch(tensors: list, numbers: tuple, constants: dict, values: Tensor | None) -> None:
    out, m, n, nb = tensors[-1], *numbers[:2], constants["NB"]
    bm, bn, kb = min(max(power_of_two(m), 16), 64), TILE["rows_of_w"], TILE["blocks"]
    tiles, steps = ceil_div(n, bn) * ceil_div(m, bm), ceil_div(nb, kb)
    wanted = TILE["programs"] // tiles if tiles < TILE["enough"] else 1
    part = ceil_div(steps, min(wanted, steps))  # steps of a program
    parts = ceil_div(steps, part)
    target = out if parts == 1 else torch.empty(parts, m, n, dtype=torch.float32, device=out.device)
    masked = nb % (part * kb) != 0 or constants["K"] != nb * BLOCK_SIZE
    constants["R"] = max(constants["R"], 16)  # the least depth of a tensor core's product
    constants |= {"HAS_VALUES": values is not None, "STEPS": part, "BM": bm, "BN": bn, "KB": kb, "MASKED": masked}
    tensors[-1:] = [out if values is None else values, target]
    options = {"num_warps": TILE["warps"], "num_stages": TILE["stages"]}
    launch(matmul_tile_kernel, (ceil_div(n, bn), parts, ceil_div(m, bm)), tensors, numbers, constants, **options, **EXACT_MATH)
    if parts > 1:
        constants = {"PARTS": parts, "BN": 512}
        launch(matmul_sum_kernel, (m, ceil_div(n, 512), 1), (target, out), (m, n), constants, num_warps=4, **EXACT_MATH)


def many_rows(
    terms: Sequence[QuantizedMatrix],
    w: QuantizedMatrix,
    constant: Tensor | None,
    dtype: torch.dtype,
    values: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """:func:`matmul` by PyTorch's BF16 GEMM on dequantised operands. BF16 holds every dequantised value exactly, but for a
    factor: that multiplies the FP32 sum before the constant joins. FP32 results are computed so, too: FP32 operands would be
    slower, and the TF32 switch would round them."""
    wd = ops.dequantize(without_scale_factor(w, factor), torch.bfloat16).T
    single = len(terms) == 1
    x = values.to(torch.bfloat16) if single and values is not None else ops.dequantize(terms[0], torch.bfloat16)
    with full_precision_sums():
        if single and constant is None and dtype == torch.bfloat16:
            return x @ wd if factor == 1.0 else x.new_empty(len(x), wd.shape[1]).addmm_(x, wd, beta=0, alpha=factor)
        y = torch.mm(x, wd, out_dtype=torch.float32)
        if not single:
            y += torch.mm(ops.dequantize(terms[1], torch.bfloat16), wd, out_dtype=torch.float32)
    if factor != 1.0:
        y *= factor
    return (y if constant is None else y.add_(constant)).to(dtype)


def matmul(
    terms: Sequence[QuantizedMatrix],
    w: QuantizedMatrix,
    constant: Tensor | None,
    dtype: torch.dtype,
    values: Tensor | None = None,
    factor: float = 1.0,
    hidden: Tensor | None = None,
    up: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """``sum_t D(x_t) @ D(w).T + constant + hidden @ (scaling * up).T``, rounded once to ``dtype`` for up to :data:`ROWS` rows;
    for more, the adapter is added to the rounded product. hidden (M, r) in BF16 and up (N, r) are given together or not at all;
    scaling * up is rounded to BF16. The rest is as of :func:`peft_nvfp4.numerics.reference.matmul`."""
    if not (0 < terms[0].codes.shape[0] <= ROWS and w.codes.numel()):
        y = many_rows(terms, w, constant, dtype, values, factor)
        return y if up is None else y.addmm_(hidden, (up * scaling if scaling != 1.0 else up).to(dtype).T)
    first, last = terms[0], terms[-1]
    m, n, nb = first.codes.shape[0], w.codes.shape[0], w.codes.shape[1] * 2 // BLOCK_SIZE
    out = torch.empty(m, n, dtype=dtype, device=w.codes.device)
    rank = 0 if up is None else up.shape[1]
    if rank:
        hidden, up = rows_contiguous(hidden), up.contiguous()
    tensors = [
        *(t for q in (first, last, w) for t in _parts(q)),
        *(out if constant is None else constant.contiguous(), hidden if rank else out, up if rank else out, out),
    ]
    strides = (hidden.stride(0) if rank else 0, *(int(q.gscale.shape[0] > 1) for q in (first, last, w)))
    numbers = (m, n, float(scaling), *strides)
    constants = {"NB": nb, "TERMS": len(terms), "RANK": rank, "R": power_of_two(rank), "HAS_BIAS": constant is not None}
    constants |= {"SPLIT": factor != 1.0, "PTX": not INTERPRETED}
    if m <= VECTOR_ROWS or m <= MORE_VECTOR_ROWS and len(terms) == 1 and n * w.k <= MORE_VECTOR_ROWS_UP_TO:
        _vector_launch(tensors, numbers, constants)
    else:
        constants["K"] = w.k
        _tile_launch(tensors, numbers, constants, None if values is None or len(terms) > 1 else values.contiguous())
    return out


def down(x: Tensor, a: Tensor) -> Tensor:
    """``x @ A.T`` (M, r) in BF16, for few rows x (M, K) in BF16 and A (r, K) in any dtype, which is rounded to BF16."""
    m, k = x.shape
    out = x.new_empty(m, a.shape[0])
    if out.numel():
        bk = min(power_of_two(k), DOWN["columns"])
        warps = max(1, bk // (32 * DOWN["columns_per_thread"]))
        tensors, constants = (x.contiguous(), a.contiguous(), out), {"K": k, "BK": bk}
        launch(lora_down_kernel, (a.shape[0], m, 1), tensors, (), constants, num_warps=warps, **EXACT_MATH)
    return out


def linear(
    terms: Sequence[QuantizedMatrix],
    w: QuantizedMatrix,
    constant: Tensor | None,
    branches: Sequence[tuple[Tensor, Tensor, float]],
    x: Tensor,
    values: Tensor | None,
    factor: float = 1.0,
) -> Tensor:
    """A frozen linear with its adapters, without autograd: y (M, N) in BF16 for few rows.

    Args:
        branches: (A (r, K), B (N, r), scaling) of every adapter, in any dtype.
        x: D(x~) (M, K) in BF16, what the adapters see; not read without adapters.
        values, factor: as of :func:`peft_nvfp4.numerics.reference.matmul`.
    """
    if w.codes.is_cuda and w.codes.device.index != torch.cuda.current_device():
        with torch.cuda.device(w.codes.device):  # Triton launches on the current device, wherever its arguments live
            return linear(terms, w, constant, branches, x, values, factor)
    if not branches:
        return matmul(terms, w, constant, torch.bfloat16, values, factor)
    (a, b, scaling), *others = branches
    y = matmul(terms, w, constant, torch.bfloat16, values, factor, down(x, a), b, scaling)
    for a, b, scaling in others:
        y.addmm_(down(x, a), (b * scaling).to(y.dtype).T)
    return y
