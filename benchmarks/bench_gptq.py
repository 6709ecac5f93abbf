"""How long GPTQ takes for a Llama of real shapes, how much memory, and what it does for the linears' error.

    python benchmarks/bench_gptq.py --calibrate llama-8b [--layers 4]      # the rest is extrapolated
    python benchmarks/bench_gptq.py --calibrate tiny --tokens 4 32         # does it run?

Weights and tokens are random.
"""

from __future__ import annotations

import statistics
import time

import common
import torch
from llama_cases import SHAPES, dense_model, llama_config

from peft_nvfp4.calibration.run import CalibrationOptions, calibrate


def measure_calibration(name: str, layers: int | None, device: torch.device, tokens: tuple[int, int], backward: str) -> dict:
    """Time and peak memory of calibrating a Llama of these shapes, its weights on the CPU; ``layers``: of that many only."""
    config = llama_config(name, layers)
    model = dense_model(config, "sdpa", torch.device("cpu"))
    ids = torch.randint(0, config.vocab_size, tokens)
    options = CalibrationOptions(samples=tokens[0], seq_len=tokens[1], accuracy="balanced", backward=backward)
    start = time.perf_counter()
    report = calibrate(model, ids, options=options, device=device)
    seconds = time.perf_counter() - start
    per_layer = statistics.median(row["seconds"] for row in report.layers.values())
    peak = max(row["peak_gib"] for row in report.layers.values())
    count = config.num_hidden_layers
    whole = seconds + per_layer * (llama_config(name).num_hidden_layers - count)
    row = {"model": f"llama-{name}", "layers": count, "tokens": tokens, "backward": backward, "means": report.means()}
    return {**row, "seconds": seconds, "per_layer_s": per_layer, "whole_model_s": whole, "peak_gib": peak}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--calibrate", choices=[f"llama-{name}" for name in SHAPES if name != "tiny"] + ["tiny"], required=True)
    parser.add_argument("--layers", type=int, help="of the model; the rest is extrapolated")
    parser.add_argument("--tokens", type=int, nargs=2, default=(128, 2048), help="sequences and their length")
    parser.add_argument("--backward", default="requantize", help="how the backward layout is made")
    args = parser.parse_args()
    name = args.calibrate.removeprefix("llama-")
    row = measure_calibration(name, args.layers, args.device, tuple(args.tokens), args.backward)
    print(row)
    common.write_json(args.out / f"calibrate_{args.calibrate}_{args.device.type}.json", common.head(args) | row)


if __name__ == "__main__":
    main()
