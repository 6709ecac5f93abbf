"""Random bits in Triton: Philox-4x32-10 as in :func:`peft_nvfp4.numerics.philox.philox`, stochastic rounding and dropout.

Number i of a stream is lane i % 4 of the cipher of i // 4 under the seed, so a kernel draws what belongs to its elements and
nothing is stored. Streams of up to 2**34 numbers: the counter is kept in 32 bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.philox import PHILOX_M, PHILOX_W
from .blocks import E4M3_NAN, max6_scale_up
from .codes import PAIR, decode_e2m1, pack_nibbles
from .launch import EXACT_MATH, RANDOM_CHUNK, ceil_div, launch
from .pairs import JOIN_NIBBLES, both, exponent_factor, split_words
from .rows import INF

M0, M1, W0, W1 = map(tl.constexpr, PHILOX_M + PHILOX_W)


@triton.jit
def _load_key(seed_ptr, key0, key1, SEED_ON_DEVICE: tl.constexpr):
    """The two 32-bit halves of the seed, from device memory or from the launch arguments."""
    if SEED_ON_DEVICE:
        seed = tl.load(seed_ptr)
        return seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    else:
        return key0.to(tl.uint32), key1.to(tl.uint32)


@triton.jit
def philox(counter, k0, k1):
    """Four uint32 tensors for every 32-bit counter."""
    c0, c1, c2, c3 = counter, tl.zeros_like(counter), tl.zeros_like(counter), tl.zeros_like(counter)
    for _ in tl.static_range(10):
        h0 = tl.umulhi(c0, tl.full(c0.shape, M0, tl.uint32))
        h1 = tl.umulhi(c2, tl.full(c0.shape, M1, tl.uint32))
        l0 = c0 * tl.full(c0.shape, M0, tl.uint32)
        l1 = c2 * tl.full(c0.shape, M1, tl.uint32)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + tl.full([], W0, tl.uint32), k1 + tl.full([], W1, tl.uint32)
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


@triton.constexpr_function
def _philox_asm():
    """PTX of :func:`philox`. In Triton the two halves of a product are two instructions."""
    lines = [".reg .b32 a, b, c, d, k, l, h, g, m; .reg .b64 p;", "mov.b32 a, $4; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0;"]
    lines += ["mov.b32 k, $5; mov.b32 l, $6;"]
    for _ in range(10):
        lines += [
            f"mul.wide.u32 p, a, {M0.value}; mov.b64 {{m, h}}, p; mul.wide.u32 p, c, {M1.value}; mov.b64 {{c, g}}, p;",
            "lop3.b32 a, g, b, k, 0x96; mov.b32 b, c; lop3.b32 c, h, d, l, 0x96; mov.b32 d, m;",
            f"add.u32 k, k, {W0.value}; add.u32 l, l, {W1.value};",
        ]
    return "\n".join(["{", *lines, "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;", "}"])


ROUND: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 t, q, n, g, up, gap; .reg .f32 x, y, u, v, gx, gy; .reg .b16 i, j; .reg .b32 step, power;
    mov.b32 step, 0x02000200;
    mov.b32 power, 0x74007400;
    abs.bf16x2 t, $1;
    min.bf16x2 t, t, $8;
    shl.b32 g, t, 16;
    mov.b32 x, g;
    and.b32 g, t, 0xFFFF0000;
    mov.b32 y, g;
    max.bf16x2 t, t, $4;
    mad.lo.s32 t, t, 8, $5;
    mul.rn.f16x2 q, t, $6;
    and.b32 q, q, 0xFE00FE00;
    add.u32 n, q, step;
    mul.rn.f16x2 g, q, power;
    mul.rn.f16x2 n, n, power;
    sub.rn.f16x2 gap, n, g;
    mov.b32 {i, j}, g;
    cvt.f32.f16 u, i;
    cvt.f32.f16 v, j;
    neg.f32 x, x;
    neg.f32 y, y;
    fma.rn.f32 x, u, $9, x;
    fma.rn.f32 y, v, $9, y;
    mov.b32 {i, j}, gap;
    cvt.f32.f16 gx, i;
    cvt.f32.f16 gy, j;
    mul.rn.f32 gx, gx, $10;
    mul.rn.f32 gy, gy, $10;
    shr.u32 t, $2, 12;
    cvt.rn.f32.u32 u, t;
    shr.u32 t, $3, 12;
    cvt.rn.f32.u32 v, t;
    fma.rn.f32 x, u, gx, x;
    fma.rn.f32 y, v, gy, y;
    mov.b32 t, x;
    mov.b32 n, y;
    prmt.b32 up, t, n, 0xFFBB;
    and.b32 up, up, step;
    add.u32 q, q, up;
    shr.u32 q, q, 9;
    shr.u32 t, $1, 12;
    lop3.b32 $0, t, $7, q, 0xEA;
    }"""
)
BELOW: tl.constexpr = tl.constexpr(0x40800000 - 8192)
"""4, less 2**-10 of it."""


@triton.constexpr_function
def _join_asm():
    """PTX of the codes of a half block, from those of its four words."""
    moves = "mov.b32 z0, $1; mov.b32 z1, $2; mov.b32 z2, $3; mov.b32 z3, $4;"
    return "\n".join(["{ .reg .b32 z0, z1, z2, z3, t, n;", moves, *JOIN_NIBBLES, "}"])


@triton.jit
def _round_pairs(w, r0, r1, r2, r3, sg, ok, NB: tl.constexpr):
    """:func:`_round` of BF16 pairs (NB, 8): words of codes (NB, 2). The quotient q is found as in pairs, times 2**-14, so
    that FP16's exponent and first mantissa bit are the code below. Too large by 2**-10, it is not below the code's value where x
    is not, and not above the next. x - below and the decision follow in FP32, from the sign of u * gap - (x - below)."""
    e, r = exponent_factor(sg, ok, 3, BELOW)
    z = tl.inline_asm_elementwise(
        ROUND, "=&r,r,r,r,r,r,r,r,r,f,f",
        [
            w, tl.reshape(tl.join(r0, r2), [NB, 8]), tl.reshape(tl.join(r1, r3), [NB, 8]), e[:, None], (e * -8)[:, None],
            r[:, None], tl.where(ok, 0x00080008, 0)[:, None], both(sg * 6.0)[:, None], sg[:, None],
            (sg * 9.5367431640625e-07)[:, None],
        ],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    z0, z1, z2, z3 = split_words(z, NB)
    return tl.inline_asm_elementwise(_join_asm(), "=&r,r,r,r,r", [z0, z1, z2, z3], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def round_stochastically(
    x, amax, g, inverse_g, row, blk, KP, seed_ptr, key0, key1,
    NB: tl.constexpr, MODE: tl.constexpr, SEED_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """(codes, scale bits) of the blocks ``blk`` of row ``row``, as quantize_blocks; element (row, k) takes random number
    row * KP + k."""
    finite = amax < INF
    bits, s = max6_scale_up(tl.where(finite, amax, 0.0) * inverse_g, MODE)
    sg, ok = s * g, finite & (s > 0.0)
    k0, k1 = _load_key(seed_ptr, key0, key1, SEED_ON_DEVICE)
    counter = (row * (KP // 4)).to(tl.uint32) + (blk[:, None] * 4 + tl.arange(0, 4)[None, :]).to(tl.uint32)
    if MODE == PAIR:
        r0, r1, r2, r3 = tl.inline_asm_elementwise(
            _philox_asm(), "=&r,=&r,=&r,=&r,r,r,r", [counter, k0, k1], dtype=(tl.uint32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
        codes = _round_pairs(x, r0, r1, r2, r3, sg, ok, NB)
    else:
        r0, r1, r2, r3 = philox(counter, k0, k1)
        sg, ok = sg[:, None], ok[:, None]
        lo_n = _round(x[0], sg, tl.reshape(tl.join(r0, r2), [NB, 8]), ok)
        hi_n = _round(x[1], sg, tl.reshape(tl.join(r1, r3), [NB, 8]), ok)
        codes = pack_nibbles(lo_n, hi_n)
    return codes, tl.where(finite, bits, E4M3_NAN)


@triton.jit(do_not_specialize=["threshold", "key0", "key1"])
def dropout_kernel(
    x_ptr, out_ptr, seed_ptr, n, keep_value, threshold, key0, key1,
    CHUNK: tl.constexpr, SEED_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """out = x * mask; mask: 0 where the element's random number is below the threshold, else keep_value."""
    counter = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    k0, k1 = _load_key(seed_ptr, key0, key1, SEED_ON_DEVICE)
    r0, r1, r2, r3 = philox(counter.to(tl.uint32), k0, k1)
    random = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [CHUNK * 4])
    at = tl.program_id(0).to(tl.int64) * (CHUNK * 4) + tl.arange(0, CHUNK * 4)
    mask = tl.where(random >= threshold.to(tl.uint32), keep_value, 0.0)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * mask).to(out_ptr.dtype.element_ty), mask=at < n)


def _signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 of the same bits: a launch argument whose type never changes."""
    return word - (1 << 32) if word >= 1 << 31 else word


def seed_arguments(seed: Tensor, like: Tensor) -> tuple[Tensor, int, int, bool]:
    """(pointer, key0, key1, SEED_ON_DEVICE). A CPU seed travels as two integers, which needs no copy; a CUDA one is read by the
    kernel, which needs no synchronisation."""
    if seed.device.type == "cpu":
        value = int(seed)
        return (like, _signed(value & 0xFFFFFFFF), _signed((value >> 32) & 0xFFFFFFFF), False)
    return seed.contiguous(), 0, 0, True


@lru_cache(maxsize=64)
def _keep_value(p: float) -> float:
    """1 / (1 - p) as the reference holds it: rounded to FP32."""
    return (torch.ones((), dtype=torch.float32, device="cpu") / (1.0 - p)).item()


def dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Dropout of x in one pass."""
    x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    n = out.numel()
    if n:
        grid = (ceil_div(n, 4 * RANDOM_CHUNK),)
        pointer, key0, key1, on_device = seed_arguments(seed, out)
        numbers = (n, _keep_value(p), _signed(int(p * 2**32)), key0, key1)
        constants = {"CHUNK": RANDOM_CHUNK, "SEED_ON_DEVICE": on_device}
        launch(dropout_kernel, grid, (x, out, pointer), numbers, constants, num_warps=4, **EXACT_MATH)
    return out
