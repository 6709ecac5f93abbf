"""Are the codes on a GPU those of the CPU, bit for bit, on a real model?

Three comparisons on SmolLM2-135M: every packed byte of the frozen weights (both layouts), the codes of real layer inputs, and the
codes of real output gradients, all recorded on the CPU in one training step, then quantised again on the GPU. Writes one JSON.

    python benchmarks/parity.py --device cuda
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator

import common
import torch
from common import smollm2_reviews as data
from peft import get_peft_model
from torch import Tensor

from peft_nvfp4 import NVFP4LoraConfig, ops
from peft_nvfp4.nn import nvfp4
from peft_nvfp4.nn.frozen_linear import FrozenLinear
from peft_nvfp4.numerics.formats import ACTIVATION, GRADIENT, GRADIENT_STOCHASTIC
from peft_nvfp4.quantization.freeze import frozen_layers


def compare(pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, int]:
    """Bytes compared, and bytes that differ."""
    compared = differing = 0
    for x, y in pairs:
        compared += x.numel()
        differing += int((x.cpu().view(torch.uint8) != y.cpu().view(torch.uint8)).sum())
    return {"compared": compared, "differing": differing}


def frozen_weights(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Packed tensors of the same weights, frozen on the CPU and on the device."""
    nvfp4.PACK_ON_GPU = sys.maxsize  # what is on the CPU is packed there
    model, _ = data.load_smollm2(dtype=torch.bfloat16)
    config = NVFP4LoraConfig(target_modules="all-linear", accuracy="balanced")
    on_cpu = get_peft_model(copy.deepcopy(model), config)
    on_gpu = get_peft_model(model.to(device), copy.deepcopy(config))
    for (_, a), (_, b) in zip(frozen_layers(on_cpu), frozen_layers(on_gpu)):
        yield from zip(a.packed_tensors().values(), b.packed_tensors().values())


def record_step(rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and output gradients of every frozen linear in one CPU training step."""
    model, tokenizer = data.load_smollm2(dtype=torch.float32)
    model = get_peft_model(model, NVFP4LoraConfig(target_modules="all-linear", accuracy="balanced", init_lora_weights=False))
    inputs, gradients = [], []
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), FrozenLinear):
            module.register_forward_hook(lambda m, args, out: inputs.append(args[0].detach().flatten(0, -2).clone()))
            module.register_full_backward_hook(lambda m, gin, gout: gradients.append(gout[0].detach().flatten(0, -2).clone()))
    train, _ = data.movie_reviews()
    batch = tokenizer([e.text for e in train[:rows]], return_tensors="pt", padding=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    return inputs, gradients


def quantized(tensors: list[Tensor], fmt, device: torch.device, seed: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Codes and scales of recorded tensors, quantised on the CPU and on the device."""
    for t in tensors:
        there = ops.quantize(t.to(device), fmt, seed=None if seed is None else seed.to(device))
        yield from zip(ops.quantize(t, fmt, seed=seed)[:3], there[:3])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    inputs, gradients = record_step(args.rows)
    result = {
        "what": "bytes of codes, block scales and global scales on the CPU and on the device, SmolLM2-135M",
        "weights_both_layouts": compare(frozen_weights(args.device)),
        "layer_inputs": compare(quantized(inputs, ACTIVATION, args.device)),
        "output_gradients": compare(quantized(gradients, GRADIENT, args.device)),
        "output_gradients_stochastic": compare(quantized(gradients, GRADIENT_STOCHASTIC, args.device, torch.tensor(1234))),
    }
    common.write_json(args.out / f"parity_{args.device.type}.json", common.head(args) | result)
    print(result)


if __name__ == "__main__":
    main()
