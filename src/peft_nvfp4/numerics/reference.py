"""NVFP4 arithmetic in plain PyTorch: the definition that every kernel of the package must reproduce bit for bit.

It runs on any device, needs no compiler, and is the default implementation of the operators in :mod:`peft_nvfp4.ops`.
What to know before changing a line:

* Nothing here may depend on the order of a floating-point sum, on fused multiply-adds or on flushing of subnormals. Products
  of a global scale (a power of two), an E4M3 scale (4 bits) and a threshold (3 bits) are exact in FP32; the one division,
  ``amax / (6 g)``, is IEEE-rounded and cannot land on an E4M3 midpoint unless the true quotient is one (neighbouring FP32
  numerators differ by more than half an ulp of the quotient).
* Codes are those of ``|x|`` compared with ``s * g * t``, t in {.25, .75, ...}, where ties are common. An IEEE-rounded quotient
  ``|x| / (s * g)`` compares alike with t: s * g * t has 7 significant bits, so FP32 numbers next to it have quotients that are
  farther from t than half an ulp (of t = m 2**e, half an ulp is at most 2**-24 / m of it; the quotient is off by at least
  2**-23 / m', where m' is the mantissa of s * g * t, and 2 m > m'). Multiplying by ``1 / (s * g)`` would round some ties the
  wrong way.
* The squared error of the searching rules is summed by halving (16 -> 8 -> 4 -> 2 -> 1), an order that kernels can follow.
* A block with NaN or Inf gets scale NaN and codes 0: it dequantises to NaN and is seen. It does not disturb the global scale.

The file is long because the definition is one piece: quantise, dequantise, and the products fprop and dgrad of what is quantised.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .formats import (
    ACTIVATION,
    BLOCK,
    E2M1_GRID,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MAX_BITS,
    E4M3_NAN,
    GRADIENT,
    GRADIENT_STOCHASTIC,
    GSCALE_EXPONENTS,
    K_ALIGN,
    MSE_OFFSETS,
    NVFP4Format,
    QuantizedMatrix,
)
from .philox import philox
from .products import Dgrad, Fprop

_BF16_OPERAND = torch.bfloat16 if getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)() else torch.float32
CPU_OPERAND = dict.fromkeys((torch.float64, torch.float32, torch.float16), torch.float32) | {torch.bfloat16: _BF16_OPERAND}
"""Dtype in which a CPU multiplies matrices of a dtype fast: FP32 for 16-bit ones, unless it has BF16 instructions. (Without
AVX512-BF16 a BF16 product takes five times as long: measured 44 ms against 8 ms for 240x576x1536.)"""

# ---------------------------------------------------------------------------------------------- scales


def e4m3_encode(v: Tensor) -> Tensor:
    """E4M3 bits (uint8) of non-negative FP32 values, to nearest even, saturating at 448. NaN gives 0x7F."""
    return v.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(bits: Tensor) -> Tensor:
    """FP32 value of E4M3 bits (uint8)."""
    if type(bits) not in (Tensor, torch.nn.Parameter):  # a tensor without values, which finds none in a table
        return bits.view(torch.float8_e4m3fn).float()
    return torch.index_select(_e4m3_values(bits.device), 0, bits.reshape(-1).int()).view(bits.shape)


@functools.lru_cache
def _e4m3_values(device: torch.device) -> Tensor:
    """The value of every byte: a CPU looks it up in a quarter of the time of the cast."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float().to(device)


def power_of_two_scale(amax: Tensor) -> Tensor:
    """Global scale ``2**ceil(log2(amax / (6 * 448)))``, 1 where amax is 0; FP32 in, FP32 out, exact.

    2688 = 1.3125 * 2**11, so the exponent follows from amax's own exponent and one comparison of its mantissa: no logarithm.
    """
    bits = amax.view(torch.int32) + (0x7FFFFF - 0x280000)  # carries into the exponent where the mantissa is above 1.3125
    lowest, highest = ((exponent + 127) << 23 for exponent in GSCALE_EXPONENTS)
    bits = bits.bitwise_and_(0x7F800000).sub_(11 << 23).clamp_(lowest, highest)
    return torch.where(amax > 0, bits.view(torch.float32), 1.0)


def fold_blocks(x: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Every block of x (R, nb, 16) combined by halving (16 -> 8 -> 4 -> 2 -> 1): (R, nb). After the first halving all runs of 8
    numbers are combined, in that order, and every eighth run is a block. A CPU vectorises that, and needs a quarter of the time
    of ``amax``."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[:2])
    runs = combine(x[..., :8], x[..., 8:]).reshape(-1)
    for distance in (4, 2, 1):
        runs = combine(runs[:-distance], runs[distance:])
    return runs[::8].reshape(x.shape[:2])


def _squared_error(mag_g: Tensor, s: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over each block of (mag/g - nearest * s)**2, summed by halving, or of its products with weights (nb, 16). mag_g
    (R, nb, 16), s (R, nb)."""
    nearest = _nearest(mag_g, s)
    if not _all(s.amin() > 0.0 if s.numel() else None):
        nearest = torch.where((s > 0)[..., None], nearest, 0.0)
    d = torch.sub(mag_g, nearest.mul_(s[..., None]), out=nearest)
    e = d.mul_(d)
    return fold_blocks(e, torch.add) if weights is None else e.mul_(weights).sum(-1)


@functools.lru_cache
def _grid(device: torch.device) -> Tensor:
    """The eight magnitudes; kept per device: a copy to a GPU would be waited for."""
    with torch.inference_mode(False):
        return torch.tensor(E2M1_GRID, dtype=torch.float32, device=device)


def _nearest(x: Tensor, sg: Tensor) -> Tensor:
    """E2M1 value nearest to x / sg, ties to the even code, saturating; -0 stays -0; anything where sg is 0. x (R, nb, 16) of
    either sign and sg = s * g (R, nb), FP32."""
    quotient = (x / sg[..., None]).clamp_(-E2M1_MAX, E2M1_MAX)
    # The largest power of two that is not above |quotient|, at least 1, by its exponent's bits: 1, 2 or 4. Neighbouring
    # magnitudes are half of it apart, so that dividing and multiplying by that half is exact.
    binade = quotient.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=0x3F800000)
    step = binade.view(torch.float32).mul_(0.5)
    return quotient.div_(step).round_().mul_(step)


def _packed_codes(values: Tensor) -> Tensor:
    """Codes, two a byte (R, K/2), of E2M1 values (R, K) in FP32. FP16's exponent, two bits of it and one of the mantissa, are
    E2M1's where the values are times 2**-14: 0.5 is subnormal in both."""
    half = (values * 2.0**-14).to(torch.float16).view(torch.int16)
    magnitude = (half >> 9).bitwise_and_(7)
    return _pack16(half.bitwise_right_shift_(12).bitwise_and_(8).bitwise_or_(magnitude))


def choose_scales(mag: Tensor, amax: Tensor, g: Tensor, fmt: NVFP4Format, weights: Tensor | None = None) -> Tensor:
    """E4M3 bits of every block's scale. mag (R, nb, 16), amax (R, nb), g (R or 1, 1); weights (nb, 16) of the squared errors that
    the searching rules compare, if they do not count alike."""
    v = amax / (g * E2M1_MAX)
    bits = e4m3_encode(v)
    if fmt.stochastic:  # the smallest scale that is not below v: with it nothing in the block saturates
        return torch.where((e4m3_decode(bits) < v) & (bits < E4M3_MAX_BITS), bits + 1, bits)
    if fmt.rule == "max6":
        return bits
    if fmt.rule == "four_over_six":
        candidates = [e4m3_encode(amax / (g * 4.0))]
    else:
        nearest = bits.int()
        candidates = [(nearest + offset).clamp(1, E4M3_MAX_BITS).to(torch.uint8) for offset in MSE_OFFSETS]
    mag_g = torch.where(amax[..., None] > 0, mag, 0.0) / g[..., None]  # exact: g is a power of two

    def error(candidate: Tensor) -> Tensor:
        return _squared_error(mag_g, e4m3_decode(candidate), weights)

    best = error(bits)
    for candidate in candidates:
        e = error(candidate)
        better = (e < best) & (amax > 0)
        bits, best = torch.where(better, candidate, bits), torch.where(better, e, best)
    return bits


# ---------------------------------------------------------------------------------------------- quantise


class _Rounded(NamedTuple):
    """A quantised matrix before its codes are packed."""

    values: Tensor  # (R, nb, 16) float32: E2M1 values, K padded
    bits: Tensor  # (R, nb) uint8: E4M3 block scales
    gscale: Tensor  # (R,) or (1,) float32
    k: int

    def packed(self) -> QuantizedMatrix:
        return QuantizedMatrix(_packed_codes(self.values.flatten(1)), self.bits, self.gscale, self.k)

    def scaled(self) -> Tensor:
        """What :func:`dequantize` makes of the codes, in FP32, in place of the values."""
        sg = e4m3_decode(self.bits) * self.gscale[:, None]
        return self.values.mul_(sg[..., None]).flatten(1)[:, : self.k]


def quantize(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None = None, seed: Tensor | None = None) -> QuantizedMatrix:
    """Quantise x (R, K), any floating dtype, along K.

    Args:
        gscale: (1,) or (R,) FP32, a power of two to use instead of the one computed from amax (weights of q/k/v share one).
        seed: int64 scalar, needed for ``fmt.stochastic``; the same seed gives the same codes on every device.
    """
    return _round(x, fmt, gscale, seed).packed()


def quantize_dequantize(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None = None) -> tuple[QuantizedMatrix, Tensor]:
    """Q(x) of :func:`quantize`, and D(Q(x)) (R, K) in FP32, which takes two operations then, where codes are looked up in six."""
    rounded = _round(x, fmt, gscale, None)
    return rounded.packed(), rounded.scaled()


def rounded(x: Tensor, fmt: NVFP4Format, seed: Tensor | None = None) -> Tensor:
    """D(Q(x)) (R, K) in FP32, where nobody needs the codes."""
    return _round(x, fmt, None, seed).scaled()


def _round(x: Tensor, fmt: NVFP4Format, gscale: Tensor | None, seed: Tensor | None) -> _Rounded:
    rows, k = x.shape
    padded = (F.pad(x.float(), (0, -k % K_ALIGN)) if k % K_ALIGN else x.float()).contiguous()
    blocks = padded.view(rows, padded.shape[1] // BLOCK, BLOCK)
    mag = blocks.abs()
    amax = fold_blocks(mag, torch.maximum)  # NaN and Inf propagate
    finite = None if _all(amax.amax() < math.inf if amax.numel() else None) else amax < math.inf
    if finite is not None:
        amax = torch.where(finite, amax, 0.0)
    if gscale is None:
        largest = _row_max(amax) if k else amax.new_zeros(rows)
        if fmt.global_scale == "tensor":
            largest = largest.amax().reshape(1) if rows else largest.new_zeros(1)
        gscale = power_of_two_scale(largest)
    g = gscale[:, None]
    bits = choose_scales(mag, amax, g, fmt)
    sg = e4m3_decode(bits) * g
    if fmt.stochastic:
        values = torch.copysign(_grid(mag.device)[_round_stochastically(mag, sg, seed).int()], blocks)
    else:
        values = _nearest(blocks, sg)
    if not _all(sg.amin() > 0.0 if sg.numel() else None) or finite is not None:
        representable = sg > 0.0 if finite is None else (sg > 0.0) & finite
        values = torch.where(representable[..., None], values, 0.0)
    return _Rounded(values, bits if finite is None else torch.where(finite, bits, E4M3_NAN), gscale, k)


def _all(condition: Tensor | None) -> bool:
    """Whether a condition is known to hold: a CPU looks, a GPU would wait for the answer. None of a matrix without elements."""
    return condition is None or condition.is_cpu and bool(condition)


def _row_max(x: Tensor) -> Tensor:
    """Largest value of every row of (R, n): by halving first, which a CPU vectorises."""
    while x.shape[1] % 2 == 0:
        x = torch.maximum(*x.chunk(2, dim=1))
    return x.amax(-1)


def dequantize(q: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values (R, K). Exact in FP32 and BF16; rounded in FP16, whose exponent range is too small. Where a global scale is no power
    of two (of another tool's checkpoint): FP32's code * (block scale * global scale), and that rounded once in BF16 (on a GPU,
    where looking would wait, that is the kernels' business)."""
    if dtype not in (torch.float32, torch.bfloat16) or q.codes.is_cpu and dtype == torch.bfloat16:
        return dequantize(q, torch.float32).to(dtype)  # which a CPU does in half the time of a product in BF16
    rows = q.codes.shape[0]
    values = torch.index_select(_pair_table(dtype, q.codes.device), 0, q.codes.reshape(-1).int()).view(dtype)
    s = (e4m3_decode(q.scales) * q.gscale[:, None]).to(dtype)
    blocks = q.scales.shape[1]
    return values.view(rows, blocks, BLOCK).mul_(s[..., None]).view(rows, blocks * BLOCK)[:, : q.k]


@functools.lru_cache
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Table from a byte to its two values, seen as one integer twice as wide: one look-up for two codes."""
    with torch.inference_mode(False):
        grid = torch.tensor(E2M1_GRID + tuple(-v for v in E2M1_GRID), dtype=dtype, device="cpu")
        byte = torch.arange(256, device="cpu")
        pairs = torch.stack([grid[byte & 15], grid[byte >> 4]], dim=1)
        return pairs.view(torch.int64 if dtype == torch.float32 else torch.int32).view(-1).to(device)


# ---------------------------------------------------------------------------------------------- weights that stay dequantised

_KEPT = WeakTensorKeyDictionary()
"""Codes of a weight -> (:func:`_stamps` of the matrix, D(w)). An entry goes with its codes."""


def keep_values(w: QuantizedMatrix) -> None:
    """Keep D(w) (N, K) in FP32 for :func:`matmul`, at 4 bytes a value: a product on a CPU dequantises its weight otherwise, at
    every call. Not of a weight that is elsewhere, that counts no edits (an inference tensor), or whose global scale is no power
    of two."""
    if w.codes.is_cpu and not any(t.is_inference() for t in w[:3]) and powers_of_two(w.gscale):
        _KEPT[w.codes] = _stamps(w), dequantize(w).contiguous()


def kept_values(w: QuantizedMatrix) -> Tensor | None:
    """D(w), if it is kept and w has not been edited or exchanged since."""
    stamps, values = _KEPT.get(w.codes, (None, None)) if _KEPT else (None, None)
    return values if stamps is not None and stamps == _stamps(w) else None


def _stamps(w: QuantizedMatrix) -> tuple:
    """What edits in place change, and what a new tensor in the place of an old one does. Views that inference mode makes count
    no edits: they are never those that values were kept for."""
    return tuple([(None if t.is_inference() else t._version, t.data_ptr()) for t in w[:3]])


def _round_stochastically(mag: Tensor, sg: Tensor, seed: Tensor | None) -> Tensor:
    """Index of the magnitude below or above, above with probability (mag - below) / (above - below).

    20 random bits u, since u * gap * sg * 2**-20 must be exact in FP32 (20 + 4 significant bits); mag - below is exact by
    Sterbenz' lemma. So the decision is the same on every device.
    """
    if seed is None:
        raise ValueError("stochastic rounding needs a seed (an int64 scalar tensor)")
    grid = _grid(mag.device)
    sg = sg[..., None]
    low = torch.zeros_like(mag, dtype=torch.uint8)
    for value in E2M1_GRID[1:]:
        low += mag >= sg * value
    below = grid[low.int()] * sg
    gap = (grid[(low.int() + 1).clamp(max=7)] - grid[low.int()]) * sg
    u = (philox(seed.to(mag.device), mag.numel()) >> 12).view(mag.shape).float() * 2.0**-20
    return low + (u * gap < mag - below).to(torch.uint8) * (low < 7)


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte: (R, K) uint8 in 0..15, K even -> (R, K/2), low nibble = even k."""
    return _pack16(codes.to(torch.int16))


def _pack16(codes: Tensor) -> Tensor:
    pairs = codes.reshape(-1).view(torch.int32)  # even + 65536 * odd
    return (pairs >> 12).bitwise_or_(pairs).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack`: (R, K/2) -> (R, K)."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).view(packed.shape[0], 2 * packed.shape[1])


def transpose_requantize(q: QuantizedMatrix, fmt: NVFP4Format) -> QuantizedMatrix:
    """The backward layout W_b (K, N) of a forward weight W_f (N, K): D(W_f) in FP32, transposed and quantised along N, so that
    the gradient belongs to the function that the forward computed."""
    return quantize(dequantize(q).T, fmt)


# ---------------------------------------------------------------------------------------------- one or two terms


def quantize_terms(x: Tensor, offset: Tensor | None, terms: int) -> tuple[QuantizedMatrix, ...]:
    """x (M, K) minus the offset (K,) as one or two NVFP4 terms with a global scale per row. The second, the residual term,
    quantises what the first left over (an FP32 difference).

    Both terms have one global scale: a kernel can then multiply them in one pass, as a matrix of 2K columns. What is left over is
    a twelfth of the block scale in size, which E4M3 can say with all its digits unless the block is a thousand times smaller than
    the row's largest value.
    """
    if offset is not None:
        x = x.float() - offset
    if terms == 1:
        return (quantize(x, ACTIVATION),)
    first, values = quantize_dequantize(x, ACTIVATION)
    return first, quantize(_difference(x, values), ACTIVATION, first.gscale.clone())  # results share no memory


def quantize_dequantize_terms(
    x: Tensor, offset: Tensor | None, terms: int, dtype: torch.dtype
) -> tuple[tuple[QuantizedMatrix, ...], Tensor]:
    """x~ of :func:`quantize_terms`, and what :func:`dequantize_terms` makes of it in ``dtype``, without looking up the codes."""
    if offset is not None:
        x = x.float() - offset
    first, total = quantize_dequantize(x, ACTIVATION)
    parts = (first,)
    if terms == 2:
        second, values = quantize_dequantize(_difference(x, total.clone()), ACTIVATION, first.gscale.clone())
        parts, total = (first, second), total.add_(values)
    if offset is not None:
        total = total.add_(offset)
    return parts, total.to(dtype).contiguous()


def _difference(x: Tensor, values: Tensor) -> Tensor:
    """x - values in FP32, in place of the values."""
    return torch.sub(x.float(), values, out=values)


def dequantize_terms(terms: Sequence[QuantizedMatrix], offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of the terms and the offset (K,), in FP32 and in this order, rounded once to ``dtype``: (M, K)."""
    total = dequantize(terms[0])
    for term in terms[1:]:
        total = total.add_(dequantize(term))
    return (total if offset is None else total.add_(offset)).to(dtype).contiguous()


# ---------------------------------------------------------------------------------------------- global scales of other tools


def powers_of_two(g: Tensor) -> bool:
    """Whether all of some normal FP32 numbers are powers of two."""
    return not (g.view(torch.int32) & 0x7FFFFF).any()


def split_scale(g: Tensor) -> tuple[Tensor, Tensor]:
    """Global scales as (powers of two, significands in [1, 2)), whose products they are, exactly; what is no normal number as
    (itself, 1)."""
    bits = g.view(torch.int32)
    exponent = bits & 0x7F800000
    normal = (exponent > 0) & (exponent < 0x7F800000)
    power = torch.where(normal, exponent.view(torch.float32), g)
    return power, torch.where(normal, (bits & 0x7FFFFF | 0x3F800000).view(torch.float32), 1.0)


def scale_factor(g: Tensor) -> float:
    """Significand of a global scale (1,), in [1, 2): 1 for a power of two (and for what is no normal number). Waits for a GPU."""
    return float(split_scale(g)[1])


def without_scale_factor(q: QuantizedMatrix, scale_factor: float) -> QuantizedMatrix:
    """q / scale_factor, if that is the significand of its global scale: a matrix whose values are exact in BF16. The division is
    one of tensors (by a number, a GPU multiplies with the reciprocal, which is inexact)."""
    return q if scale_factor == 1.0 else q._replace(gscale=q.gscale / torch.full_like(q.gscale, scale_factor))


# ---------------------------------------------------------------------------------------------- matrix products


def mm(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``a @ b`` in ``dtype`` (default: a's), accumulated in FP32, rounded once. Where a CPU is slow in 16 bits: through FP32."""
    dtype = dtype or a.dtype
    if a.is_cuda:
        if dtype == a.dtype:
            return a @ b
        return torch.mm(a, b, out_dtype=dtype) if dtype == torch.float32 else (a @ b).to(dtype)
    # a CPU has no product of 16-bit operands with an FP32 result: it would be rounded to 16 bits first
    operand = CPU_OPERAND[a.dtype] if dtype == a.dtype else torch.float32
    return a @ b if operand == a.dtype == dtype else (a.to(operand) @ b.to(operand)).to(dtype)


def add_mm(y: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``y + a @ b`` with FP32 accumulation and one rounding, into y; without y, ``a @ b``."""
    if y is None:
        return mm(a, b)
    operand = a.dtype if a.is_cuda else CPU_OPERAND[a.dtype] if y.dtype == a.dtype else torch.float32
    if operand == a.dtype == y.dtype:
        return y.addmm_(a, b)
    return torch.addmm(y.to(operand), a.to(operand), b.to(operand)).to(y.dtype)


def _add_low_rank(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y + a @ b in FP32, into y (FP32)."""
    return y.addmm_(a.float(), b.float()) if y.is_cpu else y.add_(mm(a, b, torch.float32))


def matmul(
    terms: Sequence[QuantizedMatrix],
    w: QuantizedMatrix,
    constant: Tensor | None,
    dtype: torch.dtype,
    values: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """``y (M, N) = sum_t D(x_t) (M, K) @ D(w) (N, K).T + constant`` in ``dtype``: exact products, FP32 sums, one rounding.

    Only the order of the sum may differ between implementations. The two terms are added in FP32 first, which is exact but for
    residuals below 2**-17 of their block. (A GPU whose TF32 switch is on rounds that sum to 11 bits; the kernels multiply BF16
    operands, which the switch does not reach.)

    A global scale of w that is no power of two has a significand with more bits than BF16 holds. It stays out of the operand and
    multiplies the FP32 sum, as in the epilogue of an FP4 kernel.

    Args:
        terms: may be empty where their values are given.
        values: sum_t D(x_t), if the caller has it unrounded: in ``dtype`` or FP32.
        factor: significand of w's global scale. A CPU looks; a GPU would wait, and believes the caller.
    """
    dense = kept_values(w) if w.codes.is_cpu else None
    split = factor != 1.0 or dense is None and w.gscale.is_cpu and not powers_of_two(w.gscale)
    if split:
        power, scale_factors = split_scale(w.gscale)
        w = w._replace(gscale=power)
    short = w.codes.is_cpu and len(terms) <= 1 and constant is None and not split
    operand = CPU_OPERAND[dtype] if short else torch.float32
    x = values.to(operand) if values is not None else sum(dequantize(t, operand) for t in terms)
    wd = dequantize(w, operand) if dense is None else dense.to(operand)
    if split:
        y = (x @ wd.T).mul_(scale_factors)
        return (y if constant is None else y.add_(constant)).to(dtype)
    # the constant joins before the one rounding: addmm in BF16 would round in between
    return (x @ wd.T if constant is None else torch.addmm(constant.to(operand), x, wd.T)).to(dtype)


def with_hidden(p: Fprop, dequantize_terms: Callable = dequantize_terms) -> tuple[Fprop, Tensor | None]:
    """The product with h of every adapter, and the h that was computed here (M, sum of r); None if all were there."""
    if p.a is None:
        return p, None
    h = mm(p.values if p.values is not None else dequantize_terms(p.terms, None, p.dtype), p.a.T)
    ranks = [adapter.up.shape[1] for linear in p.linears for adapter in linear.adapters if adapter.hidden is None]
    parts = iter(h.split(ranks, dim=1))
    complete = lambda adapter: adapter if adapter.hidden is not None else adapter._replace(hidden=next(parts))
    linears = [linear._replace(adapters=[complete(adapter) for adapter in linear.adapters]) for linear in p.linears]
    return p._replace(linears=linears, a=None), h


def fprop(p: Fprop, matmul: Callable = matmul, dequantize_terms: Callable = dequantize_terms) -> list[Tensor]:
    """y (M, N) of every linear; after them, if the product has ``a``, h (M, sum of r) of its adapters. ``matmul`` and
    ``dequantize_terms``: other implementations of the functions of this module."""
    p, h = with_hidden(p, dequantize_terms)
    ys = []
    for weight, constant, factor, adapters in p.linears:
        y = matmul(p.terms, weight, constant, torch.float32 if adapters else p.dtype, p.values, factor)
        for adapter in adapters:
            y = _add_low_rank(y, adapter.hidden, adapter.up.T)
        ys.append(y.to(p.dtype))
    return ys if h is None else [*ys, h]


def dgrad(p: Dgrad, matmul: Callable = matmul, quantize: Callable | None = None) -> Tensor:
    """dx (M, K) in the gradients' dtype: every dy is quantised, multiplied by its backward layout, and summed in FP32. ``matmul``
    and ``quantize``: other implementations of the functions of this module. (Here nobody reads the codes, so there are none.)"""
    dtype, single, dx = p.linears[0].dy.dtype, len(p.linears) == 1 and p.g is None, None
    for dy, weight, seed in p.linears:
        fmt = GRADIENT if seed is None else GRADIENT_STOCHASTIC
        terms, values = ((), rounded(dy, fmt, seed)) if quantize is None else ([quantize(dy, fmt, None, seed)], None)
        part = matmul(terms, weight, None, dtype if single else torch.float32, values)
        dx = part if dx is None else dx.add_(part)
    return (dx if p.g is None else _add_low_rank(dx, p.g, p.a)).to(dtype)
