"""The same training run on two devices: is the loss curve the same, and are the codes?

SmolLM2-135M on film reviews (`examples/smollm2_reviews.py`), NVFP4 with ``balanced``. ``run`` trains on this machine's device and
writes the losses and, for step 0, the codes of every linear's input (free-running: each layer gets what the layers before it
computed here). ``compare`` reads several such files. Quantising is discontinuous: an FP32 sum in another order moves a value
across a rounding threshold now and then, one code changes, and the change spreads; what can be equal is the curve, within the
noise that two runs on one device show when nothing but the order of sums differs.

    python benchmarks/loss_curve.py run cpu.pt --steps 200 --dtype fp32
    python benchmarks/loss_curve.py run gpu.pt --steps 200 --dtype bf16 --device cuda
    python benchmarks/loss_curve.py compare cpu.pt gpu.pt --out benchmarks/results/loss_curve
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from common import smollm2_reviews as data
from environment import environment
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def record_codes(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list]:
    """Name of a frozen linear -> codes of its input, filled by the next forward; and the hooks that do it."""
    found: dict[str, torch.Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, NVFP4FrozenLinear):
            inner = module._quantized_input

            def recorded(key, x2, inner=inner, name=name):
                shared = inner(key, x2)
                found[name] = shared.parts[0].codes.detach().cpu()
                return shared

            module._quantized_input = recorded
            hooks.append(module)
    return found, hooks


def run(args) -> None:
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    train, test = data.movie_reviews(args.seed, args.rows)
    model, tokenizer = data.load_smollm2(DTYPES[args.dtype])
    torch.manual_seed(args.seed)
    config = NVFP4LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", backend=args.backend,
        accuracy=args.accuracy, fused=not args.unfused,
    )  # fmt: skip
    model = get_peft_model(model, config).to(device)  # initialised on the CPU: the same numbers everywhere
    codes, patched = record_codes(model) if args.codes else ({}, [])
    first: dict[str, torch.Tensor] = {}

    def progress(step: int, loss: float) -> None:
        if step == 0 and patched:
            first.update(codes)
            for module in patched:
                del module._quantized_input
        if step % 20 == 0:
            print(f"{args.out.name} step {step} loss {loss:.4f} side table {activation_cache.live()}", flush=True)

    losses = data.fine_tune(
        model, tokenizer, train, steps=args.steps, batch_size=args.batch_size, lr=args.lr, warmup=max(args.steps // 10, 1),
        seed=args.seed, progress=progress,
    )  # fmt: skip
    inputs, last, _ = data.collate(next(data.training_batches(data.encode(tokenizer, train), args.batch_size, args.seed)), None)
    real = (torch.arange(inputs.shape[1]) <= last[:, None]).flatten()  # padding may be another token with another tokenizer
    score = data.evaluate(model, tokenizer, test)
    print(f"{args.out.name} accuracy {score.accuracy:.4f} nll {score.nll:.4f}", flush=True)
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(args).items()
        if key not in ("function", "out")
    }
    torch.save(
        {"settings": settings, "environment": environment(), "losses": losses, "codes": first, "real": real,
         "accuracy": score.accuracy, "nll": score.nll}, args.out,
    )  # fmt: skip


def smooth(losses: list[float], window: int = 20) -> torch.Tensor:
    return torch.tensor(losses).unfold(0, window, 1).mean(1)


def compare(args) -> None:
    runs = {path.stem: torch.load(path, weights_only=True) for path in args.files}
    pairs = []
    for (a, x), (b, y) in itertools.combinations(runs.items(), 2):
        step0 = x["losses"][0] - y["losses"][0]
        curve = (smooth(x["losses"]) - smooth(y["losses"])).abs()
        both = [name for name in x["codes"] if name in y["codes"]]
        equal = {name: (x["codes"][name] == y["codes"][name])[x["real"]].float().mean().item() for name in both}
        pairs.append(
            {"runs": [a, b], "loss difference at step 0": step0, "smoothed curves: mean difference": curve.mean().item(),
             "smoothed curves: largest difference": curve.max().item(),
             "bytes of input codes equal at step 0, by linear (free-running)": equal}
        )  # fmt: skip
    summary = {name: {k: r[k] for k in ("settings", "environment", "accuracy", "nll", "losses")} for name, r in runs.items()}
    args.out.with_suffix(".json").write_text(json.dumps({"runs": summary, "pairs": pairs}, indent=1) + "\n")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, r in runs.items():
        axes.plot(smooth(r["losses"]), label=name)
    axes.set(xlabel="optimiser step", ylabel="training loss, mean of 20 steps (nats)")
    axes.legend()
    figure.savefig(args.out.with_suffix(".png"), dpi=120)
    for pair in pairs:
        print({k: v for k, v in pair.items() if not isinstance(v, dict)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="train here")
    one.set_defaults(function=run)
    one.add_argument("out", type=Path)
    one.add_argument("--device", default="cpu")
    one.add_argument("--dtype", choices=DTYPES, default="fp32")
    one.add_argument("--backend", default="nvfp4")
    one.add_argument("--accuracy", default="balanced")
    one.add_argument("--unfused", action="store_true")
    one.add_argument("--codes", action="store_true", help="record the codes of step 0")
    one.add_argument("--steps", type=int, default=200)
    one.add_argument("--batch-size", type=int, default=8)
    one.add_argument("--lr", type=float, default=4e-4)
    one.add_argument("--rows", type=int, default=400)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--threads", type=int, default=1)
    two = commands.add_parser("compare", help="compare the files of several runs")
    two.set_defaults(function=compare)
    two.add_argument("files", type=Path, nargs="+")
    two.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
