"""What the tests of frozen linears share: dense and frozen layers of one size, and how their packed tensors are compared."""

import pytest
import torch
from _assertions import assert_same_bits
from torch import nn

from peft_nvfp4 import BACKENDS, FrozenOptions

IN, OUT, TOKENS = 128, 64, 32


def require(name):
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
    return name


def dense(dtype=torch.float32, bias=True, shape=(IN, OUT)):
    linear = nn.Linear(*shape, bias=bias)
    nn.init.normal_(linear.weight, std=0.1)
    return linear.to(dtype)


def freeze(backend, linear, **options):
    return BACKENDS[backend].quantize(linear, FrozenOptions(**options))


def packed(layer):
    return {name: t.detach().clone() for name, t in layer.packed_tensors().items()}


def assert_same_packed(layer, expected, what="packed tensors"):
    assert layer.packed_tensors().keys() == expected.keys()
    for name, t in expected.items():
        assert_same_bits(layer.packed_tensors()[name].detach(), t, f"{what}: {name}")


def sqnr(got, want):
    error = (got.double() - want.double()).square().sum()
    return float("inf") if error == 0 else float(10 * torch.log10(want.double().square().sum() / error))
