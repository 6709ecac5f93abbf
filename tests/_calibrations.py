"""What the tests of calibration share: token ids and options for tiny models, and how two calibrated models are compared."""

import torch
from _frozen_models import packed as bits
from torch import nn

from peft_nvfp4.calibration.run import CalibrationOptions
from peft_nvfp4.quantization.freeze import frozen_layers

IDS = torch.randint(1, 128, (8, 24), generator=torch.Generator().manual_seed(3))
FAST = dict(device="cpu", progress=False)
OPTIONS = CalibrationOptions(budget=0.3, offset=True, backward="gptq", report_tokens=8)


def assert_same_model(a: nn.Module, b: nn.Module) -> None:
    first, second = bits(a), bits(b)
    assert first.keys() == second.keys() and first
    for name in first:
        assert torch.equal(first[name], second[name]), name
    for (name, x), (_, y) in zip(frozen_layers(a), frozen_layers(b)):
        assert (x.options, x.shares_input) == (y.options, y.shares_input), name


class Words:
    """A tokenizer: a token is a word's length."""

    eos_token_id = 0

    def __call__(self, text):
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=[len(word) for word in text.split()])
