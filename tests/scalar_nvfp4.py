"""NVFP4 a second time, from the text of the design and the published formats alone: what the reference is tested against.

Nothing here imports torch or the package. There are two layers.

* :func:`quantize_exact` works value by value in :class:`fractions.Fraction` and looks for the nearest representable number in
  the list of all of them. It is the definition, too slow for more than a few thousand values.
* :func:`quantize` is the same in numpy float64. Every number it compares is exact: FP32 inputs have 24 significant bits, an
  E4M3 value 4, an E2M1 value 2, a midpoint one more, and the divisors 6 and 4 two, so no product passes 53 bits; powers of
  two are applied with ``ldexp``, and 2**-149 / 2**116 .. 2**128 / 2**-115 is far inside float64's exponents. There is no
  division.

The only rounded arithmetic is the one the format *defines* as rounded: the squared error of the searching rules, in FP32,
summed by halving. Numbers of the format are stated again here on purpose, so that a change of formats.py is noticed.
"""

from fractions import Fraction

import numpy as np

BLOCK, ALIGN = 16, 32
NAN_BYTE, TOP_BYTE = 0x7F, 0x7E
GLOBAL_EXPONENTS = (-115, 116)
MSE_OFFSETS = (-2, -1, 1, 2, 3, 4, 5, 6)


def _minifloat(bits: int, mantissa_bits: int, bias: int) -> Fraction:
    """Value of a positive minifloat, with subnormals and without infinities."""
    exponent, mantissa = bits >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)


E2M1_EXACT = [_minifloat(code, 1, 1) for code in range(8)]  # 0 .5 1 1.5 2 3 4 6
E4M3_EXACT = [_minifloat(byte, 3, 7) for byte in range(TOP_BYTE + 1)]  # 0 .. 448; byte 0x7F is NaN


E2M1_MID_EXACT = [(a + b) / 2 for a, b in zip(E2M1_EXACT, E2M1_EXACT[1:])]
E4M3_MID_EXACT = [(a + b) / 2 for a, b in zip(E4M3_EXACT, E4M3_EXACT[1:])]
E2M1 = np.array([float(v) for v in E2M1_EXACT])
E4M3 = np.array([float(v) for v in E4M3_EXACT])
E2M1_MID = np.array([float(v) for v in E2M1_MID_EXACT])
E4M3_MID = np.array([float(v) for v in E4M3_MID_EXACT])


# ------------------------------------------------------------------------------------------------ Philox-4x32-10
def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Salmon et al. 2011, the ten-round Philox of four 32-bit words, on Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        hi0, lo0 = divmod(0xD2511F53 * c0, 1 << 32)
        hi1, lo1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c0, c1, c2, c3


def random_words(seed: int, count: int) -> np.ndarray:
    """Word i is word i % 4 of counter (i // 4, 0, 0, 0) under the seed's two 32-bit halves (two's complement). uint64 array;
    32 x 32 bits fit uint64, so the vectorised products are exact."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    c0 = np.arange(-(-count // 4), dtype=np.uint64)
    c1, c2, c3 = np.zeros_like(c0), np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return np.stack([c0, c1, c2, c3], axis=1).reshape(-1)[:count]


# ------------------------------------------------------------------------------------------------ exact, value by value
def nearest(value: Fraction, middles: list[Fraction]) -> int:
    """Index of the nearest of the sorted values with these midpoints; a tie goes to the even index, which is the even mantissa
    (codes and bytes count up through mantissas and exponents alike); saturating."""
    for i, middle in enumerate(middles):
        if value < middle or (value == middle and i % 2 == 0):
            return i
    return len(middles)


def global_exponent_exact(amax: Fraction) -> int:
    """Smallest e with amax <= 6 * 448 * 2**e, clamped; 0 for amax 0."""
    if amax == 0:
        return 0
    low, high = GLOBAL_EXPONENTS
    e = low
    while e < high and amax > 2688 * Fraction(2) ** e:
        e += 1
    return e


def _error_float32(t: list[Fraction], codes: list[int], s: Fraction) -> np.float32:
    d = np.array([float(v) for v in t]).astype(np.float32) - np.array([float(E2M1_EXACT[c] * s) for c in codes], np.float32)
    e = d * d
    while len(e) > 1:
        e = e[: len(e) // 2] + e[len(e) // 2 :]
    return e[0]


def _block_exact(t: list[Fraction], rule: str, words: list[int] | None) -> tuple[int, list[int]]:
    """Scale byte and magnitude codes of one finite block of |x| / g."""
    amax = max(t)

    def codes_for(byte: int) -> list[int]:
        return [nearest(v / E4M3_EXACT[byte], E2M1_MID_EXACT) if byte else 0 for v in t]

    if words is not None:
        byte = next((b for b, s in enumerate(E4M3_EXACT) if s >= amax / 6), TOP_BYTE)
        codes = []
        for v, word in zip(t, words if byte else []):
            low = max(c for c in range(8) if E2M1_EXACT[c] * E4M3_EXACT[byte] <= v)
            if low < 7:
                below, above = E2M1_EXACT[low] * E4M3_EXACT[byte], E2M1_EXACT[low + 1] * E4M3_EXACT[byte]
                low += Fraction(word >> 12, 1 << 20) * (above - below) < v - below  # the 20 leading random bits
            codes.append(low)
        return byte, codes or [0] * BLOCK
    byte = nearest(amax / 6, E4M3_MID_EXACT)
    if rule == "four_over_six":
        others = [nearest(amax / 4, E4M3_MID_EXACT)]
    elif rule == "mse":
        others = [min(max(byte + offset, 1), TOP_BYTE) for offset in MSE_OFFSETS]
    else:
        others = []
    if others and amax > 0:
        best = _error_float32(t, codes_for(byte), E4M3_EXACT[byte])
        for other in others:
            error = _error_float32(t, codes_for(other), E4M3_EXACT[other])
            if error < best:
                byte, best = other, error
    return byte, codes_for(byte)


def quantize_exact(x: np.ndarray, rule: str, per_row: bool, seed: int | None = None):
    """Packed codes, scale bytes and global exponents of an FP32 matrix; exact and slow. A seed means stochastic rounding."""
    rows, k = x.shape
    kp = -(-k // ALIGN) * ALIGN
    x = np.pad(x.astype(np.float32), ((0, 0), (0, kp - k)))
    words = random_words(seed, rows * kp).tolist() if seed is not None else None
    finite = np.isfinite(x.reshape(rows, -1, BLOCK)).all(-1)
    amax = [Fraction(float(np.abs(x[r].reshape(-1, BLOCK)[finite[r]]).max(initial=0))) for r in range(rows)]
    exponents = [global_exponent_exact(a) for a in (amax if per_row else [max(amax)])]
    packed, scales = np.zeros((rows, kp // 2), np.uint8), np.zeros((rows, kp // BLOCK), np.uint8)
    for r in range(rows):
        for b in range(kp // BLOCK):
            if not finite[r, b]:
                scales[r, b] = NAN_BYTE
                continue
            block = x[r, b * BLOCK : (b + 1) * BLOCK]
            g = Fraction(2) ** exponents[r if per_row else 0]
            start = r * kp + b * BLOCK
            t = [abs(Fraction(float(v))) / g for v in block]
            scales[r, b], codes = _block_exact(t, rule, words[start : start + BLOCK] if words else None)
            for i, (value, code) in enumerate(zip(block, codes)):
                code |= 8 * bool(np.signbit(value)) if scales[r, b] else 0
                packed[r, (b * BLOCK + i) // 2] |= code << (4 * (i % 2))
    return packed, scales, np.array(exponents)


# ------------------------------------------------------------------------------------------------ exact, vectorised
def global_exponent(amax: np.ndarray) -> np.ndarray:
    _, e = np.frexp(amax)  # 2**(e - 1) <= amax < 2**e and 2688 = .65625 * 2**12
    e = e - 12
    e = np.where(np.ldexp(2688.0, e) >= amax, e, e + 1)
    return np.where(amax > 0, np.clip(e, *GLOBAL_EXPONENTS), 0)


def scale_byte(amax: np.ndarray, divisor: float) -> np.ndarray:
    """Byte of the E4M3 value nearest to amax / divisor, by comparing amax with divisor times every midpoint."""
    limits = divisor * E4M3_MID
    index = np.searchsorted(limits, amax, side="left")  # midpoints strictly below
    tie = limits[np.minimum(index, len(limits) - 1)] == amax
    return index + (tie & (index % 2 == 1))


def codes_of(t: np.ndarray, byte: np.ndarray) -> np.ndarray:
    """Magnitude codes of |x| / g under each block's scale byte."""
    s = E4M3[byte][..., None]
    code = np.zeros(t.shape, np.uint8)
    for i, middle in enumerate(E2M1_MID):
        code += (t > middle * s) | ((t == middle * s) & (i % 2 == 1))
    return np.where(s > 0, code, 0).astype(np.uint8)


def squared_error(t: np.ndarray, byte: np.ndarray) -> np.ndarray:
    """FP32, each operation rounded, summed 16 -> 8 -> 4 -> 2 -> 1 (first half plus second half)."""
    d = t.astype(np.float32) - (E2M1[codes_of(t, byte)] * E4M3[byte][..., None]).astype(np.float32)
    e = d * d
    while e.shape[-1] > 1:
        half = e.shape[-1] // 2
        e = e[..., :half] + e[..., half:]
    return e[..., 0]


def _stochastic_codes(t: np.ndarray, byte: np.ndarray, seed: int) -> np.ndarray:
    s = E4M3[byte][..., None]
    low = sum((t >= value * s) for value in E2M1[1:]).astype(np.int64)
    high = np.minimum(low + 1, 7)
    word = (random_words(seed, t.size) >> np.uint64(12)).reshape(t.shape).astype(np.float64)
    below = E2M1[low] * s  # t - below is exact: below is 0, or t is less than twice as large
    return low + (np.ldexp(word, -20) * (E2M1[high] * s - below) < t - below) * (low < 7)


def quantize(x: np.ndarray, rule: str, per_row: bool, exponent=None, seed: int | None = None):
    """As :func:`quantize_exact`; ``exponent`` (a number or one per row) replaces the global scale's."""
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        rows, k = x.shape
        x = np.pad(x.astype(np.float32), ((0, 0), (0, -k % ALIGN))).reshape(rows, -1, BLOCK)
        finite = np.isfinite(x).all(-1)
        magnitude = np.abs(np.where(finite[..., None], x, 0)).astype(np.float64)
        amax = magnitude.max(-1, initial=0)
        row = amax.max(-1, initial=0)
        if exponent is None:
            exponent = global_exponent(row if per_row else row.max(keepdims=True, initial=0))
        exponent = np.atleast_1d(exponent)
        t = np.ldexp(magnitude, -exponent[:, None, None])
        amax = np.ldexp(amax, -exponent[:, None])
        if seed is not None:
            byte = np.minimum(np.searchsorted(6 * E4M3, amax, side="left"), TOP_BYTE)  # first value not below amax / 6
            code = _stochastic_codes(t, byte, seed)
        else:
            byte = scale_byte(amax, 6.0)
            others = {"max6": (), "four_over_six": (scale_byte(amax, 4.0),)}.get(rule)
            if others is None:
                others = tuple(np.clip(byte + offset, 1, TOP_BYTE) for offset in MSE_OFFSETS)
            best = squared_error(t, byte) if others else None
            for other in others:
                error = squared_error(t, other)
                better = (error < best) & (amax > 0)
                byte, best = np.where(better, other, byte), np.where(better, error, best)
            code = codes_of(t, byte)
        code = np.where((byte > 0)[..., None] & finite[..., None], code | (np.signbit(x) << 3), 0).astype(np.uint8)
        code = code.reshape(rows, -1)
        packed = code[:, 0::2] + 16 * code[:, 1::2]
        return packed, np.where(finite, byte, NAN_BYTE).astype(np.uint8), exponent


def dequantize(packed: np.ndarray, scales: np.ndarray, exponent: np.ndarray, k: int) -> np.ndarray:
    """Values in float64, exact."""
    code = np.stack([packed % 16, packed // 16], axis=-1).reshape(*scales.shape, BLOCK)
    magnitude = E2M1[code % 8] * np.append(E4M3, np.nan)[scales][..., None]
    value = np.ldexp(np.where(code >= 8, -magnitude, magnitude), np.atleast_1d(exponent)[:, None, None])
    return value.reshape(len(packed), -1)[:, :k]


def swizzled_position(row: int, col: int, cols: int) -> int:
    """Byte of scale (row, col) in cuBLAS's 128x4 layout: tiles of 128 rows and 4 columns in row-major order, 512 bytes each;
    inside, ``(row % 32) * 16 + (row / 32) * 4 + col`` with row and col counted within the tile."""
    tiles_across = (cols + 3) // 4
    tile = (row // 128) * tiles_across + col // 4
    row, col = row % 128, col % 4
    return tile * 512 + (row % 32) * 16 + (row // 32) * 4 + col
