"""Rows of BF16 kept as pairs, and their quantisation on two values an instruction, in inline PTX: mode PAIR of codes.

A row is a tensor ``w`` (NB, 8) of 32-bit words: the 16 values of a block as they lie in memory, two neighbours in a word. All
that the quantiser does to such values fits 16-bit arithmetic without losing a bit, in half the instructions and registers:

* *Quotient*. |x| = t 2**(e + 12) and s g = m 2**e with m one of 1, 1.125, ... 1.875. BF16 and FP16 have the mantissa below the
  exponent, so e subtracted from BF16's exponent and a shift by 3 give t in FP16, exactly; what is too small for that is below
  half of the smallest code. q = t r rounds once, with r the FP16 number at 2**12 / m. x / (s g) is a midpoint between two codes
  or differs from it by 1/256; that q then is the midpoint, or on the right side of it, was checked for all 8 x 128 mantissas.
* *Code*. min(2 q, q + 2, q / 2 + 4) + 1028 as in codes; less 4, or -4, leaves 1024 + code + 8 * sign.
* *Value*. The bits of a code, moved to BF16's exponent and mantissa, are its value times 2**-126; D(x) has 6 bits.
* *What is left*, x - D(x), has at most 8 bits (codes).

Rejected: lo and hi in FP32 as in rows with conversions to FP16 pairs: 15 instructions a value, here 8.

The file is long because what it derives is one representation: cut in two, its halves would import each other's PTX.
"""

import triton
import triton.language as tl

from . import launch

PAIR = tl.constexpr(launch.PAIR)


@triton.constexpr_function
def divides(NB, K):
    """Whether no program of NB blocks reaches beyond a row of K values."""
    return K % (16 * NB) == 0


@triton.jit
def load(ptr, inside, WHOLE: tl.constexpr):
    """Numbers at the pointers, 0 where not inside. WHOLE: everything is inside, and the load is not masked."""
    if WHOLE:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=inside, other=0)


@triton.jit
def store(ptr, x, inside, WHOLE: tl.constexpr):
    """Where inside; see :func:`load`."""
    if WHOLE:
        tl.store(ptr, x)
    else:
        tl.store(ptr, x, mask=inside)


@triton.jit
def load_pairs(ptr, blk, K: tl.constexpr, NB: tl.constexpr):
    """Words (NB, 8) of the blocks ``blk`` (NB,) of the BF16 row at ``ptr``, 4-byte aligned; 0 beyond K, which is even."""
    words = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    at = blk[:, None] * 8 + tl.arange(0, 4)[None, :]
    WHOLE: tl.constexpr = divides(NB, K)
    a, b = load(words + at, at < K // 2, WHOLE), load(words + at + 4, at + 4 < K // 2, WHOLE)
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [NB, 8])


@triton.jit
def store_pairs(ptr, w, blk, K: tl.constexpr, NB: tl.constexpr):
    """Inverse of :func:`load_pairs`."""
    words = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    at = blk[:, None] * 8 + tl.arange(0, 8)[None, :]  # the compiler exchanges words so that a warp writes without gaps
    store(words + at, w, at < K // 2, divides(NB, K))


@triton.jit
def opaque(blk, MODE: tl.constexpr):
    """The same numbers, unknown to the compiler. Of addresses of bytes it would know that they are neighbours, and gather the
    bytes in a thread by way of shared memory, which costs more than the wide access saves."""
    if MODE == PAIR:
        blk = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [blk], dtype=tl.int32, is_pure=True, pack=1)
    return blk


@triton.jit
def unpack(w):
    """FP32 values with even and with odd k."""
    return (w << 16).to(tl.float32, bitcast=True), (w & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack(lo, hi):
    """Words of FP32 values, rounded to BF16 (to nearest even)."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def split_words(w, NB: tl.constexpr):
    """(NB, 8) -> words 0, 1, 2, 3 of both halves of every block: four tensors (NB, 2)."""
    even, odd = tl.split(tl.reshape(w, [NB, 4, 2]))
    w0, w2 = tl.split(tl.reshape(even, [NB, 2, 2]))
    w1, w3 = tl.split(tl.reshape(odd, [NB, 2, 2]))
    return w0, w1, w2, w3


@triton.jit
def join_words(w0, w1, w2, w3, NB: tl.constexpr):
    """Inverse of :func:`split_words`."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [NB, 8])


# ---------------------------------------------------------------------------------------------- scales


@triton.jit
def amax_pairs(w, NB: tl.constexpr):
    """max |x| of every block, FP32 (NB,), NaN if it holds one."""
    w0, w1, w2, w3 = split_words(w, NB)
    half = tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        abs.bf16x2 a, $1;
        abs.bf16x2 b, $2;
        max.NaN.bf16x2 a, a, b;
        abs.bf16x2 b, $3;
        max.NaN.bf16x2 a, a, b;
        abs.bf16x2 b, $4;
        max.NaN.bf16x2 $0, a, b;
        }""",
        "=r,r,r,r,r", [w0, w1, w2, w3], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    first, second = tl.split(half)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        max.NaN.bf16x2 a, $1, $2;
        shl.b32 b, a, 16;
        max.NaN.bf16x2 a, a, b;
        and.b32 $0, a, 0xFFFF0000;
        }""",
        "=f,r,r", [first, second], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def both(x):
    """Pair of twice the FP32 number x, which BF16 holds exactly."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x3232;", "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def reciprocal_approx(d):
    """About 1 / d, off by an ulp at most."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def half_pair(x):
    """FP16 pair of twice the FP32 number x."""
    return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def exponent_factor(sg, ok, BIAS: tl.constexpr, SCALE: tl.constexpr):
    """Of a block with the scale s g = m 2**e, (NB,) each: e + 127 - BIAS as BF16's exponent, and 1 / (m SCALE) in FP16, in both
    halves of a word. SCALE comes as the bits of an FP32 number. Where not ok: an exponent under which every t is 0."""
    exponent = tl.where(ok, (both(sg) & 0x7F807F80) - BIAS * 0x00800080, 0x7F7F7F7F)
    m = ((sg.to(tl.int32, bitcast=True) & 0x00700000) + SCALE).to(tl.float32, bitcast=True)
    return exponent, half_pair(reciprocal_approx(m))


@triton.jit
def convert_to_e4m3(v):
    """encode_e4m3 by the instructions of SM89."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 c, l, u;
        .reg .b32 h;
        .reg .f32 t;
        min.f32 t, $2, 0f43E00000;
        cvt.rn.satfinite.e4m3x2.f32 c, 0f00000000, t;
        cvt.u32.u16 $0, c;
        cvt.rn.f16x2.e4m3x2 h, c;
        mov.b32 {l, u}, h;
        cvt.f32.f16 $1, l;
        }""",
        "=r,=f,f", [v], dtype=(tl.int32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def convert_from_e4m3(bits):
    """decode_e4m3 by the instructions of SM89."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 c, l, u;
        .reg .b32 h;
        cvt.u16.u32 c, $1;
        cvt.rn.f16x2.e4m3x2 h, c;
        mov.b32 {l, u}, h;
        cvt.f32.f16 $0, l;
        }""",
        "=f,r", [bits], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- codes


JOIN_NIBBLES = [  # of z0 .. z3, with codes in the low bytes of both halves
    "prmt.b32 z0, z0, z1, 0x6240; prmt.b32 z2, z2, z3, 0x6240;",
    "prmt.b32 t, z0, z2, 0x5410; prmt.b32 n, z0, z2, 0x7632;",
    "mad.lo.s32 $0, n, 16, t;",
]


@triton.constexpr_function
def _round_asm(bounded, grid):
    """PTX of :func:`round_pairs` for half a block: 4 words to 8 codes and, with ``grid``, 4 words of grid values."""
    x0 = 5 if grid else 1
    e, base, r, sign, top = (f"${x0 + 4 + i}" for i in range(5))
    lines = [
        ".reg .b32 t, q, n, z0, z1, z2, z3, two, half, four, six, eight, cap, power, zero;",
        "mov.b32 two, 0x40004000; mov.b32 half, 0x38003800;",
        "mov.b32 four, 0x64046404; mov.b32 six, 0x64066406; mov.b32 eight, 0x64086408;",
        "mov.b32 cap, 0x640B640B; mov.b32 power, 0x7E807E80; mov.b32 zero, 0x80008000;",
    ]
    for i in range(4):
        x = f"${x0 + i}"
        lines += [
            f"abs.bf16x2 t, {x};",
            f"min.bf16x2 t, t, {top};" if bounded else "",
            f"max.bf16x2 t, t, {e};",
            f"mad.lo.s32 t, t, 8, {base};",
            f"mul.rn.f16x2 q, t, {r};",
            "fma.rn.f16x2 n, q, two, four;",
            "add.rn.f16x2 t, q, six;",
            "min.f16x2 n, n, t;",
            "fma.rn.f16x2 t, q, half, eight;",
            "min.f16x2 n, n, t;",
            "min.f16x2 n, n, cap;",
            f"lop3.b32 t, {x}, {sign}, 0x44004400, 0xEA;",
            f"sub.rn.f16x2 z{i}, n, t;",
        ]
        if grid:
            lines += [
                f"shl.b32 t, z{i}, 6;",
                "and.b32 t, t, 0x01C001C0;",
                f"lop3.b32 t, {x}, {sign}, t, 0xEA;",
                f"fma.rn.bf16x2 ${i + 1}, t, power, zero;",
            ]
    lines += JOIN_NIBBLES
    return "\n".join(["{", *lines, "}"])


FACTOR: tl.constexpr = tl.constexpr(0x39800000 - 700)
"""2**-12, a little less: of 2**12 / 1.375 = 2978.9 the right neighbour in FP16 is 2980. Else it is the nearest."""


@triton.constexpr_function
def _registers(outputs, inputs, kind="r"):
    return ",".join([f"=&{kind}"] * outputs + ["r"] * inputs)


@triton.jit
def round_pairs(w, sg, ok, NB: tl.constexpr, BOUNDED: tl.constexpr, GRID: tl.constexpr):
    """Codes (NB, 2), 8 in a word, of every block under the scale sg (NB,); with GRID also the grid values as pairs (NB, 8).
    Where not ok (NB,), both are 0. BOUNDED: |x| / sg may be beyond 2**27."""
    e, r = exponent_factor(sg, ok, 3, FACTOR)
    sign = tl.where(ok, -2147450880, 0)  # the bits of a word that are signs
    w0, w1, w2, w3 = split_words(w, NB)
    # FP16's largest exponent is 30; BF16's 254
    top = tl.minimum((e & 0xFFFF) + 0x0F7F, 0x7F7F) * 0x10001 if BOUNDED else e
    args = [w0, w1, w2, w3, e[:, None], (e * -8)[:, None], r[:, None], sign[:, None], top[:, None]]
    if GRID:
        codes, g0, g1, g2, g3 = tl.inline_asm_elementwise(
            _round_asm(BOUNDED, True), _registers(5, 9), args,
            dtype=(tl.int32,) * 5, is_pure=True, pack=1,
        )  # fmt: skip
        return codes, join_words(g0, g1, g2, g3, NB)
    else:
        codes = tl.inline_asm_elementwise(
            _round_asm(BOUNDED, False), _registers(1, 9), args, dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
        return codes, w


@triton.constexpr_function
def _two_asm(bounded):
    """PTX of :func:`two_roundings` for a word."""
    lines = [
        ".reg .b32 a, t, q, n, two, half, four, six, eight, cap;",
        "mov.b32 two, 0x40004000; mov.b32 half, 0x38003800;",
        "mov.b32 four, 0x64006400; mov.b32 six, 0x64026402; mov.b32 eight, 0x64046404; mov.b32 cap, 0x64076407;",
        "abs.bf16x2 a, $4;",
        "min.bf16x2 n, a, $11;" if bounded else "mov.b32 n, a;",  # what is left is that of x itself
        "max.bf16x2 t, n, $5;",
        "mad.lo.s32 t, t, 8, $6;",
    ]
    for i in range(2):
        lines += [
            f"mul.rn.f16x2 q, t, ${7 + i};",
            "fma.rn.f16x2 n, q, two, four;",
            f"add.rn.f16x2 ${i}, q, six;",
            f"min.f16x2 n, n, ${i};",
            "fma.rn.f16x2 q, q, half, eight;",
            "min.f16x2 n, n, q;",
            f"min.f16x2 ${i}, n, cap;",
            f"shl.b32 n, ${i}, 6;",
            "and.b32 n, n, 0x01C001C0;",
            f"fma.rn.bf16x2 ${2 + i}, n, ${9 + i}, a;",
        ]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _with_signs_asm():
    """PTX of :func:`join_codes`."""
    lines = [f"shr.u32 t, ${1 + i}, 12; lop3.b32 z{i}, t, $9, ${5 + i}, 0xEA;" for i in range(4)]
    return "\n".join(["{", ".reg .b32 z0, z1, z2, z3, t, n;", *lines, *JOIN_NIBBLES, "}"])


FACTOR_6: tl.constexpr = tl.constexpr(0x3B000000 - 700)
"""As FACTOR, for 6 instead of 3: 2**-9."""
MINUS_2_126: tl.constexpr = tl.constexpr(-(2.0**126))


@triton.jit
def two_roundings(x, s, s_4, ok, ok_4, BOUNDED: tl.constexpr):
    """Of pairs x (NB, 8) under each of two scales (NB,), the second as large or up to twice as large: 1024 + code of |x|, and
    |x| - |D(x)|: (n, n of the second, what is left, and of the second). Scales of 2**-17 to 2."""
    e, r_4 = exponent_factor(s_4, ok_4, 6, FACTOR_6)
    # r of the first under the exponent of the second
    m = (s.to(tl.int32, bitcast=True) - (s_4.to(tl.int32, bitcast=True) & 0x7F800000) + FACTOR_6).to(tl.float32, bitcast=True)
    r = tl.where(ok, half_pair(reciprocal_approx(m)), 0)
    top = tl.minimum((e & 0xFFFF) + 0x0F7F, 0x7F7F) * 0x10001 if BOUNDED else e
    return tl.inline_asm_elementwise(
        _two_asm(BOUNDED), _registers(4, 8),
        [
            x, e[:, None], (e * -8)[:, None], r[:, None], r_4[:, None], both(s * MINUS_2_126)[:, None],
            both(s_4 * MINUS_2_126)[:, None], top[:, None],
        ],
        dtype=(tl.int32,) * 4, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def join_codes(x, n, ok, NB: tl.constexpr):
    """Codes (NB, 2), 8 in a word, of 1024 + code (NB, 8) and the signs of x, where ok (NB,)."""
    x0, x1, x2, x3 = split_words(x, NB)
    n0, n1, n2, n3 = split_words(n, NB)
    return tl.inline_asm_elementwise(
        _with_signs_asm(), "=&r,r,r,r,r,r,r,r,r,r", [x0, x1, x2, x3, n0, n1, n2, n3, tl.where(ok, 0x00080008, 0)[:, None]],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- values


@triton.jit
def multiply_add(a, b, c):
    """a * b + c of BF16 pairs, rounded once."""
    return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def multiply(a, b):
    """a * b of BF16 pairs, for products that are exact. Adding -0.0 changes nothing, and SM80 has no multiplication."""
    return multiply_add(a, b, tl.full(a.shape, -2147450880, tl.int32))


@triton.constexpr_function
def _nibbles(source, j, target):
    """PTX: grid values of the codes at the bits 4 j and 4 j + 16 of a word."""
    move = lambda to: f"shl.b32 {{}}, {source}, {to - 4 * j};" if to >= 4 * j else f"shr.u32 {{}}, {source}, {4 * j - to};"
    return [
        move(6).format("t"),
        "and.b32 t, t, 0x01C001C0;",
        move(12).format("u"),
        "lop3.b32 t, u, 0x80008000, t, 0xEA;",
        f"fma.rn.bf16x2 {target}, t, power, zero;",
    ]


@triton.constexpr_function
def _asm(lines):
    constants = ".reg .b32 t, u, power, zero; mov.b32 power, 0x7E807E80; mov.b32 zero, 0x80008000;"
    return "\n".join(["{", constants, *lines, "}"])


@triton.constexpr_function
def _decode_asm():
    """PTX of :func:`decode_words`: the values k and k + 4 make a pair, since their codes are 16 bits apart."""
    lines = []
    for k in range(4):
        lines += _nibbles("$8", k, "t")
        lines += ["fma.rn.bf16x2 t, t, $9, zero;", f"shl.b32 ${k}, t, 16;", f"and.b32 ${k + 4}, t, 0xFFFF0000;"]
    return _asm(lines)


@triton.constexpr_function
def _nibbles_asm(j):
    """PTX of :func:`decode_nibbles`."""
    return _asm(_nibbles("$1", j, "$0"))


@triton.jit
def decode_words(codes, sg, NB: tl.constexpr):
    """FP32 values (lo, hi) of the codes (NB, 2), 8 in a word, times sg (NB,), which BF16 holds exactly."""
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        _decode_asm(), _registers(8, 2, "f"), [codes, both(sg)[:, None]], dtype=(tl.float32,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    return join_words(v0, v2, v4, v6, NB), join_words(v1, v3, v5, v7, NB)


@triton.jit
def decode_nibbles(codes, J: tl.constexpr):
    """Grid values, as a pair, of the codes at the bits 4 J and 4 J + 16 of a word."""
    return tl.inline_asm_elementwise(_nibbles_asm(J), "=r,r", [codes], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def interleave(a, b, HIGH: tl.constexpr):
    """Words of the low 16 bits of a and of b, or of the high ones."""
    asm: tl.constexpr = "prmt.b32 $0, $1, $2, 0x7632;" if HIGH else "prmt.b32 $0, $1, $2, 0x5410;"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def decode_e4m3_pairs(a, b):
    """Pairs of the values of E4M3 bits (int32, sign clear): exponent and mantissa moved to BF16's, times 2**120."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, power, zero;
        mov.b32 power, 0x7B807B80;
        mov.b32 zero, 0x80008000;
        prmt.b32 t, $1, $2, 0x5410;
        add.u32 u, t, 0x00010001;
        and.b32 u, u, 0x00800080;
        mul.lo.u32 u, u, 255;
        shl.b32 t, t, 4;
        or.b32 t, t, u;
        fma.rn.bf16x2 $0, t, power, zero;
        }""",
        "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
