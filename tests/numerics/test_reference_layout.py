"""Bytes and their order: nibbles, swizzled scales, the transposed layout, random bits and the dropout mask."""

import numpy as np
import pytest
import scalar_nvfp4 as scalar
import torch
from _assertions import FORMATS, SEED, assert_same_bits, assert_same_matrix, sample

from peft_nvfp4.numerics import formats, layout, philox, reference
from peft_nvfp4.numerics.formats import WEIGHT, QuantizedMatrix

SEEDS = (0, 1, -1, 2**40 + 3, -(2**63), SEED)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_pack_and_unpack_every_byte():
    byte = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes = torch.stack([byte % 16, byte // 16], dim=-1).view(4, 128)  # even k in the low nibble
    assert_same_bits(reference.pack(codes), byte, "pack")
    assert_same_bits(reference.pack(codes.T.contiguous().T), byte, "pack of a strided tensor")
    assert_same_bits(reference.unpack(byte), codes, "unpack")


@pytest.mark.parametrize(("k", "kp"), [(0, 0), (1, 32), (32, 32), (33, 64), (576, 576), (1000, 1024)])
def test_sizes(k, kp):
    assert formats.padded_k(k) == kp
    assert formats.packed_bytes(7, k) == 7 * (kp // 2 + kp // 16)  # 4.5 bits a value
    q = reference.quantize(torch.ones(7, k), WEIGHT)
    assert q.codes.numel() + q.scales.numel() == formats.packed_bytes(7, k)


SIZES = [(1, 1), (5, 3), (31, 4), (33, 5), (127, 4), (128, 4), (129, 4), (128, 5), (256, 8), (300, 7), (576, 36)]


@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_swizzled_positions(rows, cols):
    """Every byte is where cuBLAS's formula puts it; what is left over is zero; unswizzle brings it back."""
    scales = torch.randint(1, 256, (rows, cols), dtype=torch.uint8, generator=generator())
    swizzled = layout.swizzle_scales(scales)
    expected = np.zeros(-(-rows // 128) * 128 * -(-cols // 4) * 4, np.uint8)
    for r in range(rows):
        for c in range(cols):
            expected[scalar.swizzled_position(r, c, cols)] = scales[r, c]
    assert np.count_nonzero(expected) == rows * cols  # the formula sends no two scales to one byte
    assert_same_bits(swizzled, expected, "swizzled")
    assert_same_bits(layout.unswizzle_scales(swizzled, rows, cols), scales, "unswizzled")


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("name", ["normal", "student_t", "ties", "inf_and_nan", "small_blocks", "negative_zeros"])
def test_transpose_requantize(name, fmt):
    """D(W_f) transposed and quantised along N, by the scalar implementation. 62 x 45: neither is a multiple of 16."""
    if fmt.stochastic:
        with pytest.raises(ValueError, match="needs a seed"):
            reference.transpose_requantize(reference.quantize(sample(name, 62, 45), WEIGHT), fmt)
        return
    q = reference.quantize(sample(name, 62, 45), WEIGHT)
    exponent = np.log2(q.gscale.numpy()).astype(int)
    forward = scalar.dequantize(q.codes.numpy(), q.scales.numpy(), exponent, 45).astype(np.float32)
    packed, scales, exponent = scalar.quantize(forward.T, fmt.rule, fmt.global_scale == "row")
    gscale = np.ldexp(np.float32(1), exponent)
    expected = QuantizedMatrix(torch.from_numpy(packed), torch.from_numpy(scales), torch.from_numpy(gscale), 62)
    assert_same_matrix(reference.transpose_requantize(q, fmt), expected)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's kat_vectors, philox4x32 with 10 rounds
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_scalar_philox_known_answers(counter, key, words):
    assert list(scalar.philox4x32(counter, key)) == words


def test_philox_known_answer():
    assert philox.philox(torch.tensor(0), 4).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("seed", SEEDS)
def test_philox_equals_scalar(seed):
    """Number i is word i % 4 of counter i // 4; asking for fewer numbers gives a prefix."""
    one_by_one = [w for c in range(300) for w in scalar.philox4x32((c, 0, 0, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))]
    assert scalar.random_words(seed, 1200).tolist() == one_by_one
    many = philox.philox(torch.tensor(seed), 300_001)
    assert np.array_equal(many.numpy(), scalar.random_words(seed, 300_001).astype(np.int64))
    for count in (0, 1, 2, 3, 5, 1199):
        assert philox.philox(torch.tensor(seed), count).tolist() == one_by_one[:count]


@pytest.mark.parametrize("p", [0.0, 0.05, 0.1, 0.5, 0.9])
def test_dropout_mask(p):
    """n = 301,301 entries, each kept with probability 1 - p: the rate has standard deviation sqrt(p (1 - p) / n), and the mean of
    the mask, rate / (1 - p), that divided by 1 - p. FP32 rounding of 1 / (1 - p) moves the mean by 2**-24."""
    shape = (7, 301, 143)
    n = 7 * 301 * 143
    mask = philox.dropout_mask(shape, p, torch.tensor(SEED), torch.device("cpu"), torch.float32)
    kept = scalar.random_words(SEED, n) >= np.uint64(int(p * 2**32))
    assert_same_bits(mask, (kept.reshape(shape) / np.float32(1 - p)).astype(np.float32), "mask")
    sigma = (p * (1 - p) / n) ** 0.5
    assert abs((mask != 0).double().mean().item() - (1 - p)) <= 7 * sigma
    assert abs(mask.double().mean().item() - 1) <= 7 * sigma / (1 - p) + 2.0**-24
    again = philox.dropout_mask(shape, p, torch.tensor(SEED), torch.device("cpu"), torch.float32)
    assert_same_bits(again, mask, "the same seed")
    for dtype in (torch.bfloat16, torch.float16):
        low = philox.dropout_mask(shape, p, torch.tensor(SEED), torch.device("cpu"), dtype)
        assert_same_bits(low, mask.to(dtype), f"the mask in {dtype}")


@pytest.mark.parametrize("i", [0, 3, 10])
def test_dropout_mask_at_the_threshold(i):
    """With p = w / 2**32 (exact in FP64) for the random word w of entry i: dropped are the words below w, and entry i is kept."""
    words = scalar.random_words(SEED, 16)
    mask = philox.dropout_mask((16,), float(words[i]) / 2**32, torch.tensor(SEED), torch.device("cpu"), torch.float32)
    assert (mask > 0).tolist() == [w >= words[i] for w in words]
