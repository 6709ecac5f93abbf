"""What several test files share: awkward input distributions, conversions and bitwise assertions that say where they differ."""

import copy
import io
import pickle
import zlib

import numpy as np
import pytest
import torch
from torch import Tensor

from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import NVFP4Format, QuantizedMatrix

FORMATS = {
    f"{rule}-{scale}": NVFP4Format(rule=rule, global_scale=scale)
    for rule in ("max6", "four_over_six", "mse")
    for scale in ("row", "tensor")
} | {f"stochastic-{scale}": NVFP4Format(global_scale=scale, stochastic=True) for scale in ("row", "tensor")}

SEED = -6_148_914_691_236_517_206  # 0xAAAA... in two's complement: both halves of the key are busy, and it is negative


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
by_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def seed_for(fmt: NVFP4Format, device: str = "cpu") -> Tensor | None:
    return torch.tensor(SEED, device=device) if fmt.stochastic else None


def _ties(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """Codes and midpoints times an E4M3 scale times a power of two, a third of them moved to the FP32 number above or below.
    Every block has a 6, every row a 6 * 448, so that the scales come out as chosen."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])
    byte = rng.integers(1, 0x7F, (rows, -(-k // 16)))
    byte[:, 0] = 0x7E
    e, m = byte >> 3, byte & 7
    scale = np.where(e > 0, (8 + m) * 2.0 ** (e - 10), m * 2.0**-9)
    value = grid[rng.integers(0, 16, (rows, scale.shape[1] * 16))]
    value[:, ::16] = 6
    x = (value * scale.repeat(16, 1) * 2.0 ** rng.integers(-9, 9, (rows, 1))).astype(np.float32)
    move = rng.integers(-1, 2, x.shape)
    move[:, ::16] = 0
    x = np.where(move == 0, x, np.nextafter(x, np.where(move > 0, np.inf, 0).astype(np.float32)))
    return (x * rng.choice([-1, 1], x.shape))[:, :k]


def _lattice(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """Small integers, so that candidate scales often have equal errors. In half of the rows one large value makes the others'
    scales subnormal."""
    x = rng.choice([-1, 1], (rows, k)) * rng.integers(0, rng.integers(8, 65, (rows, 1)), (rows, k))
    x[::2, 0] = 2688 * 512
    return x


def _sprinkle(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    x = rng.standard_normal((rows, k))
    at = rng.integers(0, x.size, x.size // 150)
    x.reshape(-1)[at] = rng.choice([np.inf, -np.inf, np.nan, -np.nan], at.size)
    x[0] = np.nan
    return x


def _blockwise(values: np.ndarray, k: int, width: int = 16) -> np.ndarray:
    """One value for ``width`` neighbouring columns."""
    return np.repeat(values, width, axis=1)[:, :k]


_MAKE = {
    "normal": lambda g, s: g.standard_normal(s),
    "student_t": lambda g, s: g.standard_t(2.5, s),
    "uniform": lambda g, s: g.uniform(-1, 1, s),
    "lognormal_wide": lambda g, s: np.exp(6 * g.standard_normal(s)) * g.choice([-1, 1], s),
    "fp32_subnormal": lambda g, s: np.ldexp(g.integers(-(2**23), 2**23, s) >> g.integers(0, 23, s), -149),
    "around_1e30": lambda g, s: g.standard_normal(s) * 1e30,
    "around_1e-30": lambda g, s: g.standard_normal(s) * 1e-30,
    "lower_clamp": lambda g, s: g.standard_normal(s) * 10.0 ** g.uniform(-38, -31, (s[0], 1)),
    "upper_clamp": lambda g, s: np.clip(g.standard_normal(s) * 1.5e38, -3.4e38, 3.4e38),
    "zeros": lambda g, s: g.standard_normal(s) * (g.random((s[0], 1)) < 0.7) * _blockwise(g.random(s) < 0.4, s[1], 8),
    "outlier_per_row": lambda g, s: g.standard_normal(s) + 3e4 * (np.arange(s[1]) == g.integers(0, s[1], (s[0], 1))),
    "inf_and_nan": lambda g, s: _sprinkle(g, *s),
    "ties": lambda g, s: _ties(g, *s),
    "lattice": lambda g, s: _lattice(g, *s),
    "bf16": lambda g, s: g.standard_normal(s),
    "fp16": lambda g, s: g.standard_normal(s) * 100,
    "constant_blocks": lambda g, s: _blockwise(g.standard_normal(s), s[1]),
    "negative_zeros": lambda g, s: np.where(g.random(s) < 0.5, -0.0, g.standard_normal(s) * (g.random(s) < 0.5)),
    "small_blocks": lambda g, s: g.standard_normal(s) * _blockwise(2.0 ** g.uniform(-20, 0, s), s[1]),
}
DISTRIBUTIONS = tuple(_MAKE)
_WIDTHS = (1000, 1008, 1024, 989, 992)  # multiples of 8, of 16, of 32, odd


def sample(name: str, rows: int = 62, k: int | None = None) -> Tensor:
    """A matrix of the named distribution, the same at every call; FP32 except "bf16" and "fp16". Its width is a multiple of 16
    for some names only."""
    k = k or _WIDTHS[DISTRIBUTIONS.index(name) % len(_WIDTHS)]
    x = _MAKE[name](np.random.default_rng(zlib.crc32(name.encode())), (rows, k))
    x = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    return x.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32))


def _through_a_file(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda v: pickle.loads(pickle.dumps(v)), "torch.save": _through_a_file}
"""Ways to copy a module."""


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed))


def to(q: QuantizedMatrix, device: str) -> QuantizedMatrix:
    return QuantizedMatrix(q.codes.to(device), q.scales.to(device), q.gscale.to(device), q.k)


def gaussian(rows: int, k: int, fmt: NVFP4Format, seed: int = 0) -> QuantizedMatrix:
    return reference.quantize(torch.randn(rows, k, generator=generator(seed, rows, k)), fmt)


def assert_same_bits(got: Tensor, expected: Tensor | np.ndarray, what: str) -> None:
    """Equal in dtype, shape and every bit (so -0.0 differs from 0.0, and a NaN equals itself)."""
    expected = torch.as_tensor(expected)
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    got, expected = got.cpu().contiguous(), expected.cpu().contiguous()
    a, b = (t.reshape(-1).view(torch.uint8).view(t.numel(), t.element_size()) for t in (got, expected))
    wrong = (a != b).any(1).nonzero()[:, 0]
    if len(wrong):
        first = np.unravel_index(int(wrong[0]), tuple(got.shape))
        at = tuple(int(i) for i in first)
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.numel()} differ, first at {at}: {got[at].item()}, expected {expected[at].item()}"
        )


def assert_same_matrix(got: QuantizedMatrix, expected: QuantizedMatrix, what: str = "quantised matrix") -> None:
    assert got.k == expected.k, f"{what}: k {got.k}, expected {expected.k}"
    for name in ("gscale", "scales", "codes"):
        assert_same_bits(getattr(got, name), getattr(expected, name), f"{what}: {name}")


def unit(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest in dtype: 2**-p for p significant bits (24, 8, 11)."""
    return torch.finfo(dtype).eps / 2


def assert_same_values(got: Tensor, expected: Tensor, what: str) -> None:
    """Bitwise, except that any NaN equals any NaN (their payload is nobody's promise)."""
    assert_same_bits(got.isnan(), expected.isnan(), f"{what}: NaN")
    assert_same_bits(got.masked_fill(got.isnan(), 0), expected.masked_fill(expected.isnan(), 0), what)
