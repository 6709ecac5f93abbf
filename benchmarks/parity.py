"""Are the codes on a GPU those of the CPU, bit for bit, on a real model?

Three comparisons on SmolLM2-135M: every packed byte of the frozen weights (both layouts), the codes of real layer inputs, and the
codes of real output gradients, all recorded on the CPU in one training step, then quantised again on the GPU. Writes one JSON.

    python benchmarks/parity.py --device cuda
"""

from __future__ import annotations

import copy
import sys

import common
import torch
from common import smollm2_reviews as data
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, ops
from peft_nvfp4.nn import nvfp4
from peft_nvfp4.nn.frozen_linear import FrozenLinear
from peft_nvfp4.numerics.formats import ACTIVATION, GRADIENT, GRADIENT_STOCHASTIC
from peft_nvfp4.quantization.freeze import frozen_layers


def count_mismatches(a, b) -> tuple[int, int]:
    """(values compared, values that differ) over matching tensors."""
    compared = differing = 0
    for x, y in zip(a, b):
        compared += x.numel()
        differing += int((x.cpu().view(torch.uint8) != y.cpu().view(torch.uint8)).sum())
    return compared, differing


def compare_weights(device: torch.device) -> dict[str, int]:
    """Freeze the same weights on the CPU and on the device."""
    nvfp4.PACK_ON_GPU = sys.maxsize  # what is on the CPU is packed there
    model, _ = data.load_smollm2(dtype=torch.bfloat16)
    config = NVFP4LoraConfig(target_modules="all-linear", accuracy="balanced")
    on_cpu = get_peft_model(copy.deepcopy(model), config)
    on_gpu = get_peft_model(model.to(device), copy.deepcopy(config))
    compared = differing = 0
    for (_, a), (_, b) in zip(frozen_layers(on_cpu), frozen_layers(on_gpu)):
        c, d = count_mismatches(a.packed_tensors().values(), b.packed_tensors().values())
        compared, differing = compared + c, differing + d
    return {"compared": compared, "differing": differing}


def record_step(rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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


def compare_tensors(tensors: list[torch.Tensor], fmt, device: torch.device, seed: torch.Tensor | None = None) -> dict[str, int]:
    """Quantise recorded tensors on both devices."""
    compared = differing = 0
    for t in tensors:
        a = ops.quantize(t, fmt, seed=seed)
        b = ops.quantize(t.to(device), fmt, seed=None if seed is None else seed.to(device))
        c, d = count_mismatches(a[:3], b[:3])
        compared, differing = compared + c, differing + d
    return {"compared": compared, "differing": differing}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    inputs, gradients = record_step(args.rows)
    result = {
        "what": "bytes of codes, block scales and global scales on the CPU and on the device, SmolLM2-135M",
        "weights_both_layouts": compare_weights(args.device),
        "layer_inputs": compare_tensors(inputs, ACTIVATION, args.device),
        "output_gradients": compare_tensors(gradients, GRADIENT, args.device),
        "output_gradients_stochastic": compare_tensors(gradients, GRADIENT_STOCHASTIC, args.device, torch.tensor(1234)),
    }
    common.write_json(args.out / f"parity_{args.device.type}.json", common.head(args) | result)
    print(result)


if __name__ == "__main__":
    main()
