"""The arithmetic of the emulated FP4 instruction (csrc/emulated/arithmetic.h), compiled for the host, in every bit.

Two other models: one in floating point (:mod:`peft_nvfp4.diagnostics.doctor.instruction`), over the whole range of scales, and
one of a few lines in Python's integers, for what data looks like: the exact sum, truncated.
"""

import ctypes
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from peft_nvfp4.diagnostics.doctor import instruction
from peft_nvfp4.kernels.fp4 import check

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCE = """
#include "emulated/arithmetic.h"
// m x n outputs over k: one instruction after the other. Codes packed, scales a byte for 16 k, sums the bits of FP32 numbers.
extern "C" void sums(uint32_t const* x, uint32_t const* x_scales, uint32_t const* w, uint32_t const* w_scales, uint32_t* out, int
m,
                     int n, int k) {
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j)
      for (int step = 0; step < k / 64; ++step) {
        int dot[4] = {};
        for (int word = 0; word < 8; ++word)
          dot[word / 2] += peft_nvfp4::dot_of_8(x[(i * k / 8) + step * 8 + word], w[(j * k / 8) + step * 8 + word]);
        uint32_t& sum = out[i * n + j];
        sum = peft_nvfp4::block_scaled_sum(dot, x_scales[i * k / 64 + step], w_scales[j * k / 64 + step], sum);
      }
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("not run: no C++ compiler")
    folder = tmp_path_factory.mktemp("instruction")
    (folder / "sums.cpp").write_text(SOURCE)
    library = folder / "sums.so"
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{CSRC}", "-o", library, folder / "sums.cpp"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def sums_on_host(host, x, w, start):
    """x, w: codes (R, K/2) and scales (R, K/16) as bytes; start (M, N) float32."""
    out = np.ascontiguousarray(start.numpy().view(np.uint32)).copy()
    operands = [t.contiguous() for t in (*x, *w)]
    host.sums(
        *(ctypes.c_void_p(t.data_ptr()) for t in operands), out.ctypes.data_as(ctypes.c_void_p), *out.shape, x[0].shape[1] * 2
    )
    return torch.from_numpy(out.view(np.int32))


def operand(rows, k, seed, low, high):
    """Random codes, scales of bytes low..high-1."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda size, *bounds: torch.randint(*bounds, size, generator=generator, dtype=torch.uint8)
    return draw((rows, k // 2), 0, 256), draw((rows, k // 16), low, high)


RANGES = {"scales of data": (0x28, 0x60, 256, 13), "all scales": (0, 0x7F, 256, 4), "with NaN and signs": (0, 256, 128, 2)}


@pytest.mark.parametrize("low, high, size, steps", RANGES.values(), ids=RANGES)
def test_sums_have_the_bits_of_the_model(host, low, high, size, steps):
    """256 x 256 outputs after every one of 13 and 4 instructions: 10**6 and more in all."""
    (x, w), start = (operand(size, 64 * steps, seed, low, high) for seed in (1, 2)), torch.zeros(size, size)
    start[::3] = torch.randn(len(start[::3]), size) * torch.exp2(torch.randint(-40, 40, (size,)).float())
    start[1, 1], start[2, 2], start[3, 3] = -0.0, 1e-40, 3e38
    for at in range(steps):
        part = lambda q: (q[0][:, at * 32 : at * 32 + 32], q[1][:, at * 4 : at * 4 + 4])  # noqa: B023
        got = sums_on_host(host, part(x), part(w), start)
        (xs, xf), (ws, wf) = part(x), part(w)
        blocks = [instruction._values(q).view(size, 4, 16).transpose(0, 1) for q in (xs, ws)]
        start = instruction.add_products(start, blocks[0] @ blocks[1].mT, xf, wf)
        right = start.view(torch.int32)
        assert torch.equal(got.view(torch.float32).isnan(), start.isnan())
        assert torch.equal(got[~start.isnan()], right[~start.isnan()])


def test_sums_of_data_are_exact_and_cut_off_once_for_64_values(host):
    """Against Python's rational numbers: c and the products, added up exactly, then 24 bits kept."""
    x, w = operand(12, 512, 3, 0x28, 0x60), operand(12, 512, 4, 0x28, 0x60)
    decode = lambda q: check.matrix(torch.stack([q[0] & 15, q[0] >> 4], dim=-1).flatten(1), q[1])
    xv, wv = check.values(decode(x)), check.values(decode(w))
    got = sums_on_host(host, x, w, torch.zeros(12, 12)).view(torch.float32)
    for i in range(12):
        for j in range(12):
            total = Fraction(0)
            for k in range(0, 512, 64):
                total += sum(Fraction(a) * Fraction(b) for a, b in zip(xv[i, k : k + 64].tolist(), wv[j, k : k + 64].tolist()))
                power = max(0, abs(total.numerator).bit_length() - total.denominator.bit_length() + 1)
                unit = Fraction(2) ** (power - 24)
                unit = unit if abs(total) >= unit * 2**23 else unit / 2
                total = (1 if total > 0 else -1) * (abs(total) // unit) * unit
            assert got[i, j].item() == float(total)


def test_extreme_sums(host):
    """Known by hand. One product of 1 (code 2, scale 1) beside c."""
    x, w = (
        check.matrix(torch.tensor([[2] + [0] * 63], dtype=torch.uint8)),
        check.matrix(torch.tensor([[10] + [0] * 63], dtype=torch.uint8)),
    )
    one = lambda c: sums_on_host(host, x[:2], w[:2], torch.tensor([[c]])).view(torch.float32).item()
    assert one(0.0) == -1.0
    assert one(2.0**24) == 2.0**24 - 1  # exact
    assert one(2.0**25) == 2.0**25 - 2  # cut off toward zero: to nearest it would be 2**25
    assert one(2.0**35) == 2.0**35 - 2**11  # the 1 is the last bit kept
    assert one(2.0**36) == 2.0**36  # cut off before the sum
    assert one(float("-inf")) == float("-inf") and np.isnan(one(float("nan")))
