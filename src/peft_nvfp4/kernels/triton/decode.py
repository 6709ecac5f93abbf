"""Codes to the operands of a product, in registers: NVFP4 blocks as signed bytes and as BF16, for :mod:`.matmul`.

The instructions matter: an H200 can read a code faster than it can execute three instructions on it. A thread takes a block's 16
codes as one 64-bit word. A byte permutation (``prmt``) is a table of eight bytes looked up by four codes at once; another one
spreads the four signs to masks. So 11 instructions turn 8 codes into signed bytes, 15 into BF16, and 4 scale them.

Triton has no such instructions; they are inline PTX. The CPU interpreter cannot run it: without ``PTX``, the same integers come
from ordinary arithmetic, and :func:`operand` gives FP32 (the interpreter multiplies BF16 wrongly).
"""

from collections.abc import Callable

import triton
import triton.language as tl

from .codes import decode_e2m1
from .pairs import load
from .rows import BLOCK


@triton.jit
def _scale(bits):
    """FP32 value of E4M3 bits (uint8, sign clear): the exponent moved to FP32's is 120 too small, also for subnormals."""
    value = (bits.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return tl.where(bits == 0x7F, float("nan"), value)


@triton.jit
def scale_factor(g):
    """Of a normal number, in [1, 2)."""
    return (g.to(tl.int32, bitcast=True) & 0x7FFFFF | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def load_blocks(
    codes_ptr, scales_ptr, gscale_ptr, row, g_stride, blk, end, NB, MASKED: tl.constexpr, SPLIT: tl.constexpr = False
):  # fmt: skip
    """(codes as one int64 a block, scale s g) of the blocks ``blk`` < ``end`` of the rows ``row``; zero beyond. SPLIT: g without
    its significand, which is for the epilogue."""
    at = row * NB + blk
    # A thread takes 2 neighbours, 16 bytes of codes: left alone it would take 16, for wide loads of scales, and the loads of
    # codes would be 128 bytes apart. In two dimensions 4: loading ahead (cp.async) wants 4 bytes of scales.
    at = tl.max_contiguous(at, [1, 1, 2] if len(at.shape) == 3 else [1, 4])
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int64))
    codes = load(codes_ptr + at, blk < end, not MASKED)
    bits = load(scales_ptr + at, blk < end, not MASKED)
    g = tl.load(gscale_ptr + row * g_stride)
    if SPLIT:
        g = (g.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return codes, _scale(bits) * g


def _codes_asm(codes: str, lines: Callable[[int], list[str]]) -> tl.constexpr:
    """PTX on the 16 codes of a 64-bit word, four at a time: ``lines(four)`` finds their magnitudes as nibbles of m and their
    signs as byte masks k (from bit 7 of a byte: of h for odd codes, of h << 4 for even ones)."""
    asm = [f"mov.b64 {{h0, h1}}, {codes};"]
    for four in range(4):
        half, upper = divmod(four, 2)
        asm += ["shr.u32 m, m, 16;"] if upper else [f"and.b32 m, h{half}, 0x77777777;", f"shl.b32 s, h{half}, 4;"]
        asm += [f"prmt.b32 k, h{half}, s, {'0xBFAE' if upper else '0x9D8C'};", *lines(four)]
    return tl.constexpr("\n".join(["{", ".reg .b32 h<2>, s, m, p, n, k, z; mov.b32 z, 0x80008000;", *asm, "}"]))


BYTES_ASM: tl.constexpr = _codes_asm(
    "$4",
    lambda four: [
        "prmt.b32 p, 0x03020100, 0x0C080604, m;",
        "prmt.b32 n, 0xFDFEFF00, 0xF4F8FAFC, m;",
        f"lop3.b32 ${four}, k, n, p, 0xCA;",
    ],
)
"""p and n are the bytes of the magnitudes 0 1 2 3 4 6 8 12 with either sign."""


@triton.jit
def signed_bytes(codes, PTX: tl.constexpr):
    """Twice the values of 16 codes (int64) as signed bytes: four int32. Without PTX the codes, four times."""
    if PTX:
        return tl.inline_asm_elementwise(BYTES_ASM, "=&r,=&r,=&r,=&r,l", [codes], dtype=(tl.int32,) * 4, is_pure=True, pack=1)
    else:
        return codes, codes, codes, codes


@triton.jit
def _value_product(x, w, J: tl.constexpr):
    """Product of the values of the codes J of two blocks."""
    return decode_e2m1(((x >> (4 * J)) & 15).to(tl.int32)) * decode_e2m1(((w >> (4 * J)) & 15).to(tl.int32))


@triton.jit
def block_product(x, w, PTX: tl.constexpr):
    """Sum of the 16 products of two blocks of signed bytes in FP32, exact. In PTX the sum starts from the bits of FP32 3 * 2**22,
    whose last bit counts 1: no conversion of an integer."""
    x0, x1, x2, x3 = x
    w0, w1, w2, w3 = w
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .s32 t;
            dp4a.s32.s32 t, $1, $5, 0x4B400000;
            dp4a.s32.s32 t, $2, $6, t;
            dp4a.s32.s32 t, $3, $7, t;
            dp4a.s32.s32 t, $4, $8, t;
            mov.b32 $0, t;
            add.f32 $0, $0, 0fCB400000;
            }""",
            "=f,r,r,r,r,r,r,r,r", [x0, x1, x2, x3, w0, w1, w2, w3], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total = _value_product(x0, w0, 0)
        for j in tl.static_range(1, BLOCK):
            total += _value_product(x0, w0, j)
        return total * 4.0


PAIRS_ASM: tl.constexpr = _codes_asm(
    "$8",
    lambda four: [
        "prmt.b32 p, 0x3F3F3F00, 0x40404040, m;",
        "prmt.b32 n, 0xC0800000, 0xC0804000, m;",
        "lop3.b32 p, k, 0x80808080, p, 0xEA;",
        f"prmt.b32 ${2 * four}, n, p, 0x5140;",
        f"prmt.b32 ${2 * four + 1}, n, p, 0x7362;",
        *(f"fma.rn.bf16x2 ${2 * four + i}, ${2 * four + i}, $9, z;" for i in range(2)),
    ],
)
"""Scaled values of 16 codes as eight words, each a pair of BF16 numbers; the scale is such a pair, twice the same. p and n are
the high and low bytes of the magnitudes. fma with -0 is a product: before SM90 the only one."""


@triton.jit
def operand(
    codes_ptr, scales_ptr, gscale_ptr, row, g_stride, blk, end, NB,
    R: tl.constexpr, KB: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr, SPLIT: tl.constexpr = False,
):  # fmt: skip
    """D of R rows by KB blocks, (R, 16 KB): in BF16, or in FP32 without PTX (the CPU interpreter multiplies BF16 wrongly). The
    global scales must be powers of two, or SPLIT (:func:`load_blocks`)."""
    codes, scale = load_blocks(codes_ptr, scales_ptr, gscale_ptr, row, g_stride, blk, end, NB, MASKED, SPLIT)
    if PTX:
        half = (scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF  # exact: 4 significant bits
        a0, a1, a2, a3, a4, a5, a6, a7 = tl.inline_asm_elementwise(
            PAIRS_ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r", [codes, half | (half << 16)], dtype=(tl.int32,) * 8,
            is_pure=True, pack=1,
        )  # fmt: skip
        even, odd = tl.join(tl.join(a0, a4), tl.join(a2, a6)), tl.join(tl.join(a1, a5), tl.join(a3, a7))
        pairs = tl.join(even, odd)  # joining adds a last axis inside the thread: the block in order
        pairs = tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))
        return tl.reshape(pairs, [R, KB * BLOCK]).to(tl.bfloat16, bitcast=True)
    else:
        nibbles = ((codes[:, :, None] >> (tl.arange(0, BLOCK) * 4)[None, None, :]) & 15).to(tl.int32)
        return tl.reshape(decode_e2m1(nibbles) * scale[:, :, None], [R, KB * BLOCK])
