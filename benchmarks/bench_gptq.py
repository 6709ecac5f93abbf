"""What every option of GPTQ does for the error of one layer, and how long a layer takes.

The layer: Gaussian weights, Gaussian inputs with a power-law spectrum in a random basis and channels of different size, so that
rounding to nearest gives an output error near 13 % under W4A4, of which 9.2 % are the inputs' own rounding. Moments from some
tokens, errors on others. Output errors are relative Frobenius norms against the exact output: W4A4 multiplies D(Q(x)) by the
rounded weight, W4A16 multiplies x. The last table is the input gradient D(Q(dy)) D(W_b)^T, against dy D(W_f) and, so that the
rounding of dy stays apart, against D(Q(dy)) D(W_f).

    python benchmarks/bench_gptq.py                         writes benchmarks/results/gptq_layer.json and .md
    python benchmarks/bench_gptq.py --device cuda --shapes  also times the layers of Llama models
    python benchmarks/bench_gptq.py --device cuda --calibrate llama-8b [--layers 4]
                                                            times a whole calibration (random weights and tokens), nothing else
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from environment import environment
from torch import Tensor

from peft_nvfp4 import ops
from peft_nvfp4.calibration.gptq import GPTQOptions, gptq, gptq_backward
from peft_nvfp4.calibration.moments import Moments
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, WEIGHT, WEIGHT_BACKWARD, NVFP4Format, QuantizedMatrix

N, K, TOKENS, HELD_OUT = 256, 512, 32768, 4096
SHAPES = {  # linears of one input: (rows, columns)
    "llama-1b": {"q/k/v": (3072, 2048), "o": (2048, 2048), "gate/up": (16384, 2048), "down": (2048, 8192)},
    "llama-3b": {"q/k/v": (5120, 3072), "o": (3072, 3072), "gate/up": (16384, 3072), "down": (3072, 8192)},
    "llama-8b": {"q/k/v": (6144, 4096), "o": (4096, 4096), "gate/up": (28672, 4096), "down": (4096, 14336)},
}
LAYERS = {"llama-1b": 16, "llama-3b": 28, "llama-8b": 32}


def mixing(k: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(1000 + seed)
    basis = torch.linalg.qr(torch.randn(k, k, generator=g))[0]
    return (torch.arange(1, k + 1) ** -0.6)[:, None] * basis * torch.exp(0.5 * torch.randn(k, generator=g))


def draw(tokens: int, mix: Tensor, seed: int) -> Tensor:
    return (torch.randn(tokens, mix.shape[0], generator=torch.Generator().manual_seed(seed)) @ mix).bfloat16().float()


def dq(x: Tensor) -> Tensor:
    return reference.dequantize(reference.quantize(x, ACTIVATION))


def nearest(rule: str) -> Callable:
    return lambda w, m, dense: reference.dequantize(ops.quantize_weight(w, NVFP4Format(rule)))


def solved(dense_h: bool = False, **options) -> Callable:
    return lambda w, m, dense: reference.dequantize(gptq([w], dense if dense_h else m, GPTQOptions(**options))[0].q)


def nf4_nearest(w, m, dense) -> Tensor:
    import bitsandbytes as bnb

    packed, state = bnb.functional.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
    return bnb.functional.dequantize_4bit(packed, state).float()


PLAIN = dict(rule="max6", weighted=False, act_order=False)
VARIANTS: dict[str, Callable] = {
    "weights not rounded": lambda w, m, dense: w,
    "to nearest, max6": nearest("max6"),
    "to nearest, four_over_six": nearest("four_over_six"),
    "to nearest, mse": nearest("mse"),
    "GPTQ, max6, H = E[x x^T]": solved(dense_h=True, **PLAIN),
    "GPTQ, max6": solved(**PLAIN),
    "GPTQ, four_over_six": solved(rule="four_over_six", weighted=False, act_order=False),
    "GPTQ, mse": solved(weighted=False, act_order=False),
    "GPTQ, mse weighted": solved(act_order=False),
    "GPTQ, max6, act-order": solved(rule="max6", weighted=False),
    "GPTQ, four_over_six, act-order": solved(rule="four_over_six", weighted=False),
    "GPTQ, four_over_six weighted, act-order": solved(rule="four_over_six"),
    "GPTQ, mse, act-order": solved(weighted=False),
    "**GPTQ, mse weighted, act-order** (default)": solved(),
    "default, damping 0.1 %": solved(damping=0.001),
    "default, damping 10 %": solved(damping=0.1),
    "default, lazy blocks of 32": solved(columns=32),
    "default, asymmetric target": solved(asymmetric=True),
    "NF4 to nearest": nf4_nearest,
}


def relative(a: Tensor, b: Tensor) -> float:
    return 100 * ((a - b).norm() / b.norm()).item()


def measure_forward(seeds: int) -> dict[str, dict[str, list[float]]]:
    """variant -> error -> values (%) over seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        mix = mixing(K, seed)
        w = 0.02 * torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
        x, test = draw(TOKENS, mix, 10 + seed), draw(HELD_OUT, mix, 100 + seed)
        moments, dense = Moments(K, cross=True), Moments(K)
        moments.add(dq(x), x)
        dense.add(x)
        y, rounded = test @ w.T, dq(test)
        for name, run in VARIANTS.items():
            v = run(w, moments, dense)
            row = found.setdefault(name, {"w4a4": [], "w4a16": [], "weight": []})
            row["w4a4"].append(relative(rounded @ v.T, y))
            row["w4a16"].append(relative(test @ v.T, y))
            row["weight"].append(relative(v, w))
    return found


def measure_backward(seeds: int) -> dict[str, dict[str, list[float]]]:
    """source of W_b -> error of dx (%) over seeds, for a W_f from GPTQ; dy exact, or rounded as it is in training."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        w = 0.02 * torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
        moments, gradients = Moments(K), Moments(N)
        moments.add(dq(draw(TOKENS, mixing(K, seed), 10 + seed)))
        mix = mixing(N, 50 + seed)
        gradients.add(dq(draw(TOKENS, mix, 20 + seed)))
        dy = draw(HELD_OUT, mix, 200 + seed)
        q = gptq([w], moments)[0].q
        w_f = reference.dequantize(q)
        layouts: dict[str, Tensor] = {
            "D(W_f), exact": w_f.T,
            "W, four_over_six": values(ops.quantize_weight(w.T.contiguous(), WEIGHT_BACKWARD)),
            "D(W_f), four_over_six (default)": values(reference.transpose_requantize(q, WEIGHT_BACKWARD)),
            "D(W_f), mse": values(reference.transpose_requantize(q, WEIGHT)),
            "D(W_f), GPTQ with E[dy dy^T]": values(gptq_backward(q, gradients).q),
        }
        for name, w_b in layouts.items():
            row = found.setdefault(name, {"dx": [], "dx_of_rounded_dy": []})
            row["dx"].append(relative(dq(dy) @ w_b.T, dy @ w_f))
            row["dx_of_rounded_dy"].append(relative(dq(dy) @ w_b.T, dq(dy) @ w_f))
    return found


def values(q: QuantizedMatrix) -> Tensor:
    return reference.dequantize(q)


def measure_times(device: torch.device, shapes: dict[str, tuple[int, int]]) -> list[dict]:
    """Seconds and peak memory of one solve per site."""
    rows = []
    for site, (n, k) in shapes.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        x = torch.randn(2 * 4096, k, device=device, dtype=torch.bfloat16)
        moments = Moments(k, device)
        moments.add(x[:4096])
        synchronize(device)
        start = time.perf_counter()
        moments.add(x[4096:])
        synchronize(device)
        hessian_s = time.perf_counter() - start
        w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        start = time.perf_counter()
        gptq([w], moments)
        synchronize(device)
        row = {"site": site, "n": n, "k": k, "solve_s": time.perf_counter() - start, "hessian_s_per_4096_tokens": hessian_s}
        if device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        rows.append(row)
        del x, moments, w
    return rows


def measure_calibration(name: str, layers: int | None, device: torch.device, tokens: tuple[int, int], backward: str) -> dict:
    """Time and peak memory of calibrating a Llama of these shapes, its weights on the CPU; ``layers``: of that many only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from peft_nvfp4.calibration.run import CalibrationOptions, calibrate

    sites, count = SHAPES[name], layers or LAYERS[name]
    hidden, heads = sites["o"][1], {"llama-1b": 32, "llama-3b": 24, "llama-8b": 32}[name]
    settings = dict(hidden_size=hidden, intermediate_size=sites["down"][1], num_hidden_layers=count, num_attention_heads=heads)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        config = LlamaConfig(**settings, num_key_value_heads=8, vocab_size=128256, head_dim=hidden // heads)
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    torch.set_default_dtype(torch.float32)
    for p in model.parameters():
        p.data = torch.randn(p.shape, device=device, dtype=p.dtype).mul_(0.02).cpu() if p.ndim > 1 else torch.ones_like(p)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies were not initialised
    ids = torch.randint(0, 128256, tokens)
    options = CalibrationOptions(samples=tokens[0], seq_len=tokens[1], accuracy="balanced", backward=backward)
    start = time.perf_counter()
    report = calibrate(model, ids, options=options, device=device)
    seconds = time.perf_counter() - start
    per_layer = statistics.median(row["seconds"] for row in report.layers.values())
    peak = max(row["peak_gib"] for row in report.layers.values())
    whole = seconds + per_layer * (LAYERS[name] - count)
    row = {"model": name, "layers": count, "tokens": tokens, "backward": backward, "seconds": seconds, "per_layer_s": per_layer}
    return {**row, "whole_model_s": whole, "peak_gib": peak, "means": report.means()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(found: dict[str, dict[str, list[float]]], head: dict[str, str]) -> list[str]:
    lines = ["| variant | " + " | ".join(head.values()) + " |", "|---" * (len(head) + 1) + "|"]
    for name, row in found.items():
        cells = [f"{statistics.mean(row[key]):.2f} ± {statistics.pstdev(row[key]):.2f}" for key in head]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of the timings")
    parser.add_argument("--shapes", action="store_true", help="time the layers of Llama models (a GPU's work)")
    parser.add_argument("--calibrate", choices=SHAPES, help="time a calibration of this model's shapes")
    parser.add_argument("--layers", type=int, help="of the model, with --calibrate; the rest is extrapolated")
    parser.add_argument("--tokens", type=int, nargs=2, default=(128, 2048), help="sequences and their length, with --calibrate")
    parser.add_argument("--backward", default="requantize", help="with --calibrate")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gptq_layer")
    args = parser.parse_args()
    if args.calibrate:
        row = measure_calibration(args.calibrate, args.layers, torch.device(args.device), tuple(args.tokens), args.backward)
        print(json.dumps(row, indent=1))
        path = args.out.with_name(f"calibrate_{args.calibrate}").with_suffix(".json")
        path.write_text(json.dumps({"environment": environment(), **row}, indent=1) + "\n")
        return
    warnings.simplefilter("error")
    forward, backward = measure_forward(args.seeds), measure_backward(args.seeds)
    device = torch.device(args.device)
    shapes = {f"{m}: {s}": nk for m, sites in SHAPES.items() for s, nk in sites.items()} if args.shapes else {}
    measure_times(device, {"warm-up": (256, 512)})
    times = measure_times(device, {"576 x 1536": (576, 1536), **shapes})
    lines = [
        f"W ({N}, {K}), {TOKENS} tokens of calibration, {HELD_OUT} held out, {args.seeds} seeds: mean ± standard deviation of "
        "relative errors in per cent.",
        "",
        *table(forward, {"w4a4": "output, W4A4", "w4a16": "output, W4A16", "weight": "weight"}),
        "",
        "The input gradient, W_f from GPTQ:",
        "",
        *table(backward, {"dx": "dx", "dx_of_rounded_dy": "dx, rounding of dy apart"}),
        "",
        f"One solve on {args.device}, {torch.get_num_threads()} threads: "
        + "; ".join(f"{r['site']} {r['solve_s']:.2f} s" for r in times),
    ]
    print("\n".join(lines))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    content = {"environment": environment(), "forward": forward, "backward": backward, "times": times}
    args.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
