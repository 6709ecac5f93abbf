"""Does anything grow, or drift, in a long run? Training with evaluation and generation in between, twice from the same seed.

    python benchmarks/soak.py --steps 5000                                             # tiny model, CPU
    python benchmarks/soak.py --shape 1b --minutes 20 --device cuda --label soak_h200  # and with --cuda-graphs

Every step trains on a batch of one of a few lengths; every ``--every`` steps the model is evaluated without gradients and
generates with a KV cache, adapters are switched off and on, and then there is a reading: memory of the process and of the GPU,
live Python objects, entries of the side table, recorded graphs, losses. Each run has a process of its own. With ``--minutes`` the
second run takes as many steps as the first got through.

Flat: the median of the last quarter of the readings is not above that of the second quarter by more than :data:`SLACK`. Equal:
every loss and the final adapter, bit for bit; asked for on a CPU, reported on a GPU (sums of atomics may come in any order).
The exit code is 1 where memory is not flat, the side table was not empty, a loss was not finite, or a CPU's runs differ.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from environment import environment
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.training.cuda_graphs import graph_status

RESULTS = Path(__file__).resolve().parent / "results"
MB = 1e6

# hidden, intermediate, layers, heads, key/value heads, vocabulary; batch, lengths of a batch's rows
SHAPES = {
    "tiny": ((64, 176, 1, 4, 2, 128), 4, (16, 24, 33)),
    "135m": ((576, 1536, 30, 9, 3, 49152), 4, (256, 384, 512)),
    "1b": ((2048, 8192, 16, 32, 8, 128256), 4, (256, 512, 1024)),
}
SLACK = {"rss_mb": (0.02, 8.0), "objects": (0.0, 20.0), "allocated_mb": (0.001, 1.0), "reserved_mb": (0.02, 64.0)}
"""Reading -> (share, absolute) by which it may be larger in the end: allocators keep what they once needed."""


def build(args: argparse.Namespace) -> torch.nn.Module:
    hidden, inter, layers, heads, kv, vocab = SHAPES[args.shape][0]
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        **{"hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": heads},
        **{"num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": True, "pad_token_id": 0},
    )
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        base = LlamaForCausalLM(config).to(dtype)
    shared = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all-linear"}
    lora = NVFP4LoraConfig(**shared, backend=args.backend, accuracy="balanced", cuda_graphs=args.cuda_graphs)
    return get_peft_model(base, lora).to(args.device)


def batch(args: argparse.Namespace, generator: torch.Generator) -> torch.Tensor:
    """Rows that repeat a short random word: something to learn, and never the same again."""
    shape, rows, lengths = SHAPES[args.shape]
    length = lengths[int(torch.randint(len(lengths), (), generator=generator))]
    words = torch.randint(1, min(shape[-1], 1000), (rows, 4), generator=generator)
    return words.repeat(1, -(-length // 4))[:, :length].to(args.device)


def reading(model: torch.nn.Module, started: float) -> dict[str, float]:
    gc.collect()
    cuda = torch.cuda.is_available() and next(model.parameters()).is_cuda
    status = graph_status(model)
    return {
        "seconds": time.perf_counter() - started,
        "rss_mb": psutil.Process().memory_info().rss / MB,
        "objects": len(gc.get_objects()),
        "allocated_mb": torch.cuda.memory_allocated() / MB if cuda else 0.0,
        "reserved_mb": torch.cuda.memory_reserved() / MB if cuda else 0.0,
        "side_table": activation_cache.live(),
        "graphs": len(status.graphs),
        "replays": sum(status.graphs.values()),
        "discarded": status.discarded,
    }


def interlude(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, float]:
    """Evaluation and generation, with and without the adapter."""
    model.eval()
    with torch.no_grad():
        score = model(input_ids=ids, labels=ids).loss.item()
        with model.disable_adapter():
            base = model(input_ids=ids, labels=ids).loss.item()
    made = model.generate(input_ids=ids[:, :8], attention_mask=torch.ones_like(ids[:, :8]), max_new_tokens=8, do_sample=False)
    model.train()
    return {"eval_loss": score, "base_loss": base, "generated": int(made[:, 8:].sum())}


def run(args: argparse.Namespace) -> dict:
    model = build(args).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    generator = torch.Generator().manual_seed(args.seed)
    held_out = batch(args, torch.Generator().manual_seed(args.seed + 1))
    losses, readings, digest = [], [], hashlib.sha256()
    started = time.perf_counter()
    step = 0
    while step < args.steps if args.steps else time.perf_counter() - started < 60 * args.minutes:
        ids = batch(args, generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del loss
        step += 1
        if step % args.every == 0:
            values = torch.stack(losses).double().cpu()
            losses.clear()
            digest.update(values.numpy().tobytes())
            between = interlude(model, held_out)
            readings.append({"step": step, "loss": values.mean().item(), **between, **reading(model, started)})
            print(json.dumps(readings[-1]), file=sys.stderr, flush=True)
    for p in trained:
        digest.update(p.detach().float().cpu().numpy().tobytes())
    return {"steps": step, "seconds": time.perf_counter() - started, "digest": digest.hexdigest(), "readings": readings}


# ---------------------------------------------------------------------------------------------- judgement


def growth(readings: list[dict], name: str) -> tuple[float, bool]:
    """(how much larger in the last quarter than in the second, whether that counts as flat)."""
    values = [r[name] for r in readings]
    quarter = max(1, len(values) // 4)
    before, after = statistics.median(values[quarter : 2 * quarter] or values), statistics.median(values[-quarter:])
    share, absolute = SLACK[name]
    return after - before, after - before <= share * before + absolute


def judge(runs: list[dict], bitwise: bool) -> dict:
    grown = {name: [growth(r["readings"], name) for r in runs] for name in SLACK}
    every = [x for r in runs for x in r["readings"]]
    found = {
        "growth": {name: [amount for amount, _ in values] for name, values in grown.items()},
        "memory_flat": all(flat for values in grown.values() for _, flat in values),
        "side_table_empty": not any(x["side_table"] for x in every),
        "losses_finite": all(abs(x[name]) < float("inf") for x in every for name in ("loss", "eval_loss")),
        "learnt": every[len(runs[0]["readings"]) - 1]["eval_loss"] < every[0]["base_loss"],
        "largest_difference_of_losses": max(
            abs(a[name] - b[name]) for a, b in zip(runs[0]["readings"], runs[-1]["readings"]) for name in ("loss", "eval_loss")
        ),
        "runs_equal": len({r["digest"] for r in runs}) == 1,
    }
    wanted = ["memory_flat", "side_table_empty", "losses_finite"] + ["runs_equal"] * bitwise
    return {**found, "passed": all(found[name] for name in wanted)}


def plot(runs: list[dict], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cuda = any(x["allocated_mb"] for x in runs[0]["readings"])
    panels = [("loss", "training loss"), ("rss_mb", "process memory, MB"), ("objects", "Python objects")]
    panels += [("allocated_mb", "allocated, MB"), ("reserved_mb", "reserved, MB"), ("graphs", "recorded graphs")] if cuda else []
    figure, axes = plt.subplots(len(panels), 1, figsize=(7, 1.7 * len(panels)), sharex=True, layout="constrained")
    for axis, (name, label) in zip(axes, panels):
        for i, r in enumerate(runs):
            style = dict(color=("tab:blue", "tab:orange")[i % 2], linestyle=("-", "--")[i % 2])
            axis.plot([x["step"] for x in r["readings"]], [x[name] for x in r["readings"]], label=f"run {i + 1}", **style)
        axis.set_ylabel(label, fontsize=8)
        if name != "loss":
            axis.set_ylim(0, 1.2 * max(x[name] for r in runs for x in r["readings"]) or 1)
    axes[0].set_title(title, fontsize=9)
    axes[0].legend(fontsize=8)
    axes[-1].set_xlabel("optimizer step")
    figure.savefig(path, dpi=130)


def own_process(args: argparse.Namespace, steps: int | None) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        options = ["--shape", args.shape, "--device", args.device, "--backend", args.backend, "--every", str(args.every)]
        options += ["--seed", str(args.seed), "--threads", str(args.threads), "--alone", str(out)]
        options += ["--cuda-graphs"] * args.cuda_graphs
        options += ["--steps", str(steps)] if steps else ["--minutes", str(args.minutes)]
        subprocess.run([sys.executable, __file__, *options], check=True)
        return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="nvfp4")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float, help="of the first run")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations and readings")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--label", default="soak_cpu", help="name of the files written")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)  # one run, in this process
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.alone:
        args.alone.write_text(json.dumps(run(args)))
        return 0
    runs = [own_process(args, args.steps)]
    runs += [own_process(args, runs[0]["steps"]) for _ in range(args.runs - 1)]
    verdict = judge(runs, bitwise=args.device == "cpu")
    settings = {name: getattr(args, name) for name in ("shape", "device", "backend", "every", "cuda_graphs", "seed", "threads")}
    content = {"environment": environment(), "settings": settings, "verdict": verdict, "runs": runs}
    (args.out / f"{args.label}.json").write_text(json.dumps(content, indent=1) + "\n")
    plot(runs, args.out / f"{args.label}.png", f"{args.shape}, {args.device}, {args.backend}, {runs[0]['steps']} steps twice")
    print(json.dumps(verdict, indent=1))
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
