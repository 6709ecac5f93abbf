"""Random bits in Triton: Philox-4x32-10 as in :func:`peft_nvfp4.reference.philox`, stochastic rounding and dropout.

Number i of a stream is lane i % 4 of the cipher of i // 4 under the seed, so a kernel draws what belongs to its elements and
nothing is stored. Streams of up to 2**34 numbers: the counter is kept in 32 bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .triton_blocks import E4M3_NAN, max6_scale_up
from .triton_codes import EXACT, decode_e2m1, pack_nibbles
from .triton_rows import INF
from .triton_tables import EXACT_MATH, RANDOM_CHUNK

M0: tl.constexpr = tl.constexpr(reference._PHILOX_M[0])
M1: tl.constexpr = tl.constexpr(reference._PHILOX_M[1])
W0: tl.constexpr = tl.constexpr(reference._PHILOX_W[0])
W1: tl.constexpr = tl.constexpr(reference._PHILOX_W[1])


@triton.jit
def load_key(seed_ptr, key0, key1, SEED_ON_DEVICE: tl.constexpr):
    """The two 32-bit halves of the seed, from device memory or from the launch arguments."""
    if SEED_ON_DEVICE:
        seed = tl.load(seed_ptr)
        return seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    else:
        return key0.to(tl.uint32), key1.to(tl.uint32)


@triton.jit
def philox(counter, k0, k1):
    """Four uint32 tensors for every 32-bit counter."""
    c0 = counter
    c1 = tl.zeros_like(c0)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        h0 = tl.umulhi(c0, tl.full(c0.shape, M0, tl.uint32))
        h1 = tl.umulhi(c2, tl.full(c0.shape, M1, tl.uint32))
        l0 = c0 * tl.full(c0.shape, M0, tl.uint32)
        l1 = c2 * tl.full(c0.shape, M1, tl.uint32)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 = k0 + tl.full([], W0, tl.uint32)
        k1 = k1 + tl.full([], W1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _round(x, sg, bits, ok):
    """Nibble of every x (NB, 8): the magnitude below or above, above with probability (mag - below) / gap, by 20 random bits."""
    mag = tl.abs(x)
    low = (mag >= sg * 0.5).to(tl.int32) + (mag >= sg).to(tl.int32) + (mag >= sg * 1.5).to(tl.int32)
    low += (mag >= sg * 2.0).to(tl.int32) + (mag >= sg * 3.0).to(tl.int32) + (mag >= sg * 4.0).to(tl.int32)
    low += (mag >= sg * 6.0).to(tl.int32)
    gap = tl.where(low < 4, 0.5, tl.where(low < 6, 1.0, 2.0)) * sg
    u = (bits >> 12).to(tl.int32).to(tl.float32) * 9.5367431640625e-07  # 2**-20
    up = (u * gap < mag - decode_e2m1(low) * sg) & (low < 7)
    return tl.where(ok, (low + up.to(tl.int32)) | ((x.to(tl.int32, bitcast=True) >> 28) & 8), 0)


@triton.jit
def round_stochastically(
    lo, hi, amax, g, inverse_g, row, blk, KP, seed_ptr, key0, key1,
    NB: tl.constexpr, SEED_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """(bytes, scale bits) of the blocks ``blk`` of row ``row``; element (row, k) takes random number row * KP + k."""
    finite = amax < INF
    bits, s = max6_scale_up(tl.where(finite, amax, 0.0) * inverse_g)
    sg = (s * g)[:, None]
    ok = (finite & (s > 0.0))[:, None]
    k0, k1 = load_key(seed_ptr, key0, key1, SEED_ON_DEVICE)
    counter = (row * (KP // 4)).to(tl.uint32) + (blk[:, None] * 4 + tl.arange(0, 4)[None, :]).to(tl.uint32)
    r0, r1, r2, r3 = philox(counter, k0, k1)
    lo_n = _round(lo, sg, tl.reshape(tl.join(r0, r2), [NB, 8]), ok)
    hi_n = _round(hi, sg, tl.reshape(tl.join(r1, r3), [NB, 8]), ok)
    return pack_nibbles(lo_n, hi_n, EXACT), tl.where(finite, bits, E4M3_NAN)


@triton.jit(do_not_specialize=["threshold", "key0", "key1"])
def dropout_kernel(
    x_ptr, out_ptr, n, keep_value, threshold, seed_ptr, key0, key1,
    CHUNK: tl.constexpr, HAS_X: tl.constexpr, SEED_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """out = x * mask (or mask): 0 where the element's random number is below the threshold, else keep_value."""
    counter = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    k0, k1 = load_key(seed_ptr, key0, key1, SEED_ON_DEVICE)
    r0, r1, r2, r3 = philox(counter.to(tl.uint32), k0, k1)
    random = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [CHUNK * 4])
    at = tl.program_id(0).to(tl.int64) * (CHUNK * 4) + tl.arange(0, CHUNK * 4)
    mask = tl.where(random >= threshold.to(tl.uint32), keep_value, 0.0)
    if HAS_X:
        mask = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32) * mask
    tl.store(out_ptr + at, mask.to(out_ptr.dtype.element_ty), mask=at < n)


# ---------------------------------------------------------------------------------------------- launches


def _signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 of the same bits: a launch argument whose type never changes."""
    return word - (1 << 32) if word >= 1 << 31 else word


def seed_arguments(seed: Tensor, like: Tensor) -> tuple[Tensor, int, int, bool]:
    """(pointer, key0, key1, SEED_ON_DEVICE). A CPU seed travels as two integers, which needs no copy; a CUDA one is read by the
    kernel, which needs no synchronisation."""
    if seed.device.type == "cpu":
        value = int(seed)
        return like, _signed(value & 0xFFFFFFFF), _signed((value >> 32) & 0xFFFFFFFF), False
    return seed.contiguous(), 0, 0, True


@lru_cache(maxsize=64)
def _keep_value(p: float, dtype: torch.dtype) -> float:
    """1 / (1 - p) as the reference's mask holds it."""
    return (torch.ones((), dtype=torch.float32) / (1.0 - p)).to(dtype).item()


def _launch(x: Tensor, p: float, seed: Tensor, has_x: bool) -> Tensor:
    x = x.contiguous() if has_x else x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    n = out.numel()
    if n:
        grid = (triton.cdiv(n, 4 * RANDOM_CHUNK),)
        pointer, key0, key1, on_device = seed_arguments(seed, out)
        dropout_kernel[grid](
            x, out, n, _keep_value(p, x.dtype), _signed(int(p * 2**32)), pointer, key0, key1,
            CHUNK=RANDOM_CHUNK, HAS_X=has_x, SEED_ON_DEVICE=on_device, num_warps=4, **EXACT_MATH,
        )  # fmt: skip
    return out


def dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """x * dropout_mask(x, p, seed) in one pass."""
    return _launch(x, p, seed, True)


def dropout_mask(like: Tensor, p: float, seed: Tensor) -> Tensor:
    """0 with probability p, else 1 / (1 - p)."""
    return _launch(like, p, seed, False)
