"""``PactConfig`` on gpt-oss as it is published: experts in MXFP4, which are read a projection of a layer at a time.

>>> model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", quantization_config=PactConfig())

A projection is two tensors, ``*_blocks`` (E, N, K / 32, 16) with two E2M1 codes a byte, and ``*_scales`` (E, N, K / 32) with an
exponent for 32 codes. Transformers makes dense weights of all of them before a model can be frozen: 42 GB of gpt-oss-20b. Here
they become dense when they arrive, and are quantised as those of a dense checkpoint (:mod:`.mixtures`), with the same bits: the
weights are taken over without an error (``tests/nn/test_experts_with_biases.py`` says when).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..numerics.formats import E2M1_GRID

METHOD = "mxfp4"
PROJECTIONS = ("gate_up_proj", "down_proj")
BIAS = 127
"""Of an exponent."""


def is_mxfp4(settings: Any) -> bool:
    """Whether a ``quantization_config`` is of this kind."""
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method)) == METHOD


def decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense weights (E, N, K) of codes (E, N, K / 32, 16) and exponents (E, N, K / 32). The low half of a byte comes first. Bytes
    may be in the dtype of a model, as transformers hands them over: all have 0 to 255."""
    grid = torch.tensor([*E2M1_GRID, *(-v for v in E2M1_GRID)], dtype=dtype, device=blocks.device)
    experts, n, count, _ = blocks.shape
    weights = torch.empty(experts, n, count * 32, dtype=dtype, device=blocks.device)
    for w, b, s in zip(weights, blocks, scales):  # indices take eight times a byte's room
        b = b.to(torch.uint8)
        codes = torch.stack([b & 15, b >> 4], -1).to(torch.int32).flatten(-2)
        torch.ldexp(grid[codes], s.to(torch.int32).unsqueeze(-1) - BIAS, out=w.view(n, count, 32))
    return weights


class DequantizeMxfp4(ConversionOps):
    """Codes and exponents of a projection -> its dense weights, as the model has them: (E, K, N).

    Args:
        fail: takes the reason where that cannot be done: an error here would only be logged.
    """

    def __init__(self, fail: Callable[[str], None]):
        self.fail = fail

    def __deepcopy__(self, memo: dict) -> DequantizeMxfp4:
        """Transformers copies a converter for each parameter: the reason goes to the one quantizer."""
        return self

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
        found = {key.rpartition("_")[2]: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        blocks, scales = found.get("blocks"), found.get("scales")
        name, _, leaf = full_layer_name.rpartition(".")
        parameter = getattr(model.get_submodule(name), leaf)
        fits = blocks is not None and scales is not None and blocks.ndim == 4 and blocks.shape[:3] == scales.shape
        if not fits or blocks.shape[3] != 16:
            self.fail(f"{full_layer_name}_blocks and _scales do not belong together, or one of them is not in the files")
            return {}
        return {full_layer_name: decode(blocks, scales, parameter.dtype).transpose(1, 2)}


def converters(fail: Callable[[str], None]) -> list[WeightConverter]:
    """What a model's conversions are when its experts are in MXFP4."""
    return [WeightConverter([f"{p}_blocks", f"{p}_scales"], [p], [DequantizeMxfp4(fail)]) for p in PROJECTIONS]


def reads_mxfp4(conversion: Any) -> bool:
    """Whether a conversion is one of these, which nothing undoes at saving."""
    return any(isinstance(operation, DequantizeMxfp4) for operation in getattr(conversion, "operations", ()))
