"""How good are the adapters' gradients when the input gradient goes through an FP4 product, and which W_b serves it best?

SmolLM2-135M with adapters on all linears, weights from GPTQ. One forward pass, several backward passes that differ only in
dx = D(Q(dy)) D(W_b)^T: dy rounded or not, W_b made from what. The gradients of all adapter parameters are compared with those of
the exact backward pass of the same forward, dx = dy D(W_f), per batch: their cosine, their projection ("scale", 1 where nothing
shrinks), the worst layer; and the cosine of the mean over all batches, where noise averages out and bias does not. A second
cosine is to the gradients of the BF16 model, which contain the forward pass's error too.

    python benchmarks/gradient_cosine.py --device cuda                         (90 seconds on an H200 is a guess)
    python benchmarks/gradient_cosine.py --device cpu --calib 6 --batches 3    (10 minutes)

Norms and MLPs are the model's own (``detach``), so that only the linears' backward layouts differ. B is not zero, as after
some training: gradients reach A as well.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import common
import texts
import torch
from common import smollm2_reviews as data
from input_specs import layer_of
from low_level import adapted_model
from reproduce import tables
from torch import Tensor, nn

from peft_nvfp4 import ops
from peft_nvfp4.autograd import frozen_linear
from peft_nvfp4.autograd.frozen_linear import rounded_input
from peft_nvfp4.calibration.run import CalibrationOptions, calibrate
from peft_nvfp4.calibration.store import BACKWARD
from peft_nvfp4.nn.frozen_linear import frozen
from peft_nvfp4.numerics.formats import WEIGHT, WEIGHT_BACKWARD
from peft_nvfp4.quantization.freeze import frozen_layers

EXACT = "exact: dy not rounded, D(W_f)"
ROUNDED = "dy rounded, D(W_f) exact"
DENSE = "W_b from the BF16 weight, four_over_six"
DEFAULT = "W_b from D(W_f), four_over_six (default)"
SEARCHED = "W_b from D(W_f), mse"
SOLVED = "W_b from D(W_f), GPTQ with E[dy dy^T]"
VARIANTS = (EXACT, ROUNDED, DENSE, DEFAULT, SEARCHED, SOLVED)


def with_adapters(model: nn.Module, backend: str, accuracy: str) -> nn.Module:
    """Adapters of rank 16 on all linears, the same numbers whatever the backend."""
    torch.manual_seed(0)
    lora = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    home = next(model.parameters()).device
    peft = adapted_model(model.cpu(), **lora, backend=backend, accuracy=accuracy, fused=False).to(home)
    g = torch.Generator().manual_seed(1)
    for name, p in peft.named_parameters():
        if "lora_" in name:
            p.data = (torch.randn(p.shape, generator=g) * (0.01 if "lora_B" in name else p.shape[1] ** -0.5)).to(p)
    return peft.eval()


def gradients(model: nn.Module, ids: Tensor) -> Iterator[dict[int, Tensor]]:
    """For every sequence: layer -> gradient of its adapters, float32 on the CPU."""
    for row in ids:
        row = row[None].to(next(model.parameters()).device)
        model.zero_grad(set_to_none=True)
        model(input_ids=row, labels=row, use_cache=False).loss.backward()
        parts: dict[int, list[Tensor]] = {}
        for name, p in model.named_parameters():
            if p.grad is not None:
                parts.setdefault(layer_of(name), []).append(p.grad.float().flatten().cpu())
        yield {layer: torch.cat(its) for layer, its in parts.items()}


def whole(grad: dict[int, Tensor]) -> Tensor:
    return torch.cat([grad[layer] for layer in sorted(grad)])


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.double(), b.double(), dim=0).item()


@contextmanager
def backward_of(variant: str, model: nn.Module, dense: dict[str, Tensor], solved: dict[str, dict]) -> Iterator[None]:
    """Within the context the model's backward pass is the variant's. ``dense``: BF16 weights, ``solved``: W_b of GPTQ."""
    layers = frozen_layers(model)
    for name, layer in layers:
        key = name.replace("base_model.model.", "").replace(".base_layer", "")
        layer.options = replace(layer.options, gradients="bf16" if variant in (EXACT, ROUNDED) else "nvfp4")
        if variant == DENSE:
            layer._put(*BACKWARD, ops.quantize_weight(dense[key].T.contiguous(), WEIGHT_BACKWARD))
        elif variant in (DEFAULT, SEARCHED):
            rule = WEIGHT_BACKWARD if variant == DEFAULT else WEIGHT
            layer._put(*BACKWARD, ops.quantize_weight(layer.dequantize(torch.float32).T.contiguous(), rule))
        elif variant == SOLVED:
            for part, t in solved[key].items():
                setattr(layer, part, frozen(t))
    if variant != ROUNDED:
        yield
        return
    dense_gradient = frozen_linear._dense_gradient
    with mock.patch.object(frozen_linear, "_dense_gradient", lambda dy, *weight: dense_gradient(rounded_input(dy), *weight)):
        yield


def compare(found: list[dict[int, Tensor]], exact: list[dict[int, Tensor]], bf16: list[dict[int, Tensor]]) -> dict[str, Any]:
    """Cosines and scales, mean and standard deviation over batches; per layer the mean."""
    pairs = list(zip(found, exact))
    own = [cosine(whole(a), whole(b)) for a, b in pairs]
    scale = [((whole(a).double() @ whole(b).double()) / whole(b).double().square().sum()).item() for a, b in pairs]
    to_bf16 = [cosine(whole(a), whole(b)) for a, b in zip(found, bf16)]
    layers = {layer: statistics.mean(cosine(a[layer], b[layer]) for a, b in pairs) for layer in sorted(found[0])}
    mean = cosine(sum(map(whole, found)), sum(map(whole, exact)))
    return {
        "cosine": statistics.mean(own), "cosine_sd": statistics.pstdev(own), "scale": statistics.mean(scale),
        "cosine_of_mean": mean, "cosine_to_bf16": statistics.mean(to_bf16), "layers": layers,
    }  # fmt: skip


def markdown(args: argparse.Namespace, rows: dict[str, dict]) -> str:
    title = (
        f"SmolLM2-135M-Instruct, accuracy={args.accuracy!r}, GPTQ with {args.calib} x {args.length} tokens; adapters of rank 16 "
        f"on all linears; {args.batches} sequences of {args.length // 2} held-out tokens; {args.dtype} on {args.device.type}. "
        "Cosine of the gradient of all adapters to that of the exact backward pass (± standard deviation over sequences).\n\n"
    )
    head = ["backward", "cosine", "scale", "of the mean", "worst layer", "first / middle / last layer", "to the BF16 model"]
    lines = []
    for name, r in rows.items():
        layers = list(r["layers"].values())
        some = " / ".join(f"{layers[i]:.3f}" for i in (0, len(layers) // 2, -1))
        cells = [name, f"{r['cosine']:.4f} ± {r['cosine_sd']:.4f}", f"{r['scale']:.3f}", f"{r['cosine_of_mean']:.4f}"]
        lines.append([*cells, f"{min(layers):.3f}", some, f"{r['cosine_to_bf16']:.4f}"])
    return title + tables.markdown(head, lines, right=False)


def run(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    base, tokenizer = data.load_smollm2(common.DTYPES[args.dtype], layers=args.layers)
    base.requires_grad_(False).to(args.device)
    calibration, held_out = texts.split(args.text or texts.default_paths())
    ids = texts.token_ids(calibration, tokenizer, args.calib, args.length, 0)
    test = texts.token_ids(held_out, tokenizer, args.batches, args.length // 2, 0)
    bf16 = list(gradients(with_adapters(copy.deepcopy(base), "bf16", args.accuracy), test))
    dense = {n: m.weight for n, m in base.named_modules() if isinstance(m, nn.Linear)}
    shape = dict(samples=args.calib, seq_len=args.length, batch_size=args.batch, report_tokens=0)
    options = CalibrationOptions(**shape, accuracy=args.accuracy, backward="gptq", backward_batches=args.calib)
    model = copy.deepcopy(base)
    calibrate(model, ids, None, options, device=args.device, progress=False)
    solved = {n: {part: getattr(m, part).detach().clone() for part in BACKWARD} for n, m in frozen_layers(model)}
    model = with_adapters(model, "nvfp4", args.accuracy)
    print(f"calibrated, {time.perf_counter() - start:.0f} s", flush=True)
    exact: list[dict[int, Tensor]] = []
    rows: dict[str, dict] = {}
    for name in VARIANTS:
        with backward_of(name, model, dense, solved):
            found = list(gradients(model, test))
        exact = exact or found
        rows[name] = compare(found, exact, bf16)
        print(f"{name}: cosine {rows[name]['cosine']:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    path = args.out / f"gradient_cosine_{args.accuracy}_{args.device.type}"
    content = common.head(args) | {"seconds": time.perf_counter() - start, "rows": rows}
    common.write_report(path, content, markdown(args, rows))


def main() -> None:
    parser = common.text_parser(__doc__)
    parser.set_defaults(batch=1)
    parser.add_argument("--accuracy", default="balanced", help="preset of the inputs")
    parser.add_argument("--calib", type=int, default=32, help="sequences of calibration, for the weights and for E[dy dy^T]")
    parser.add_argument("--batches", type=int, default=16, help="held-out sequences, half as long as those of calibration")
    run(common.parse_texts(parser))


if __name__ == "__main__":
    main()
