"""GRPO on sums, several seeds: does the reward of examples/grpo.py rise? Mean and range over seeds.

The script itself is run, once for each seed, with its own model (SmolLM2-135M, packaged) and questions (the 36 sums up to nine).
The reward is exact: 1 if the first line of the completion is the answer and nothing else. Recorded: the mean reward of the 16
completions of every step, and how many of all questions the likeliest completion answers, before (adapter off) and after.

    python benchmarks/grpo_seeds.py --seeds 0 1 2                        CPU, some minutes a seed
    python benchmarks/grpo_seeds.py --draw                               the picture again, from the file

Writes grpo_DEVICE.json after each seed (seeds that are in it are not run again), and grpo_DEVICE.png.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import common
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "grpo.py"
WINDOW = 5  # steps that are averaged


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps (%(default)s)")
    parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"], help="(%(default)s)")
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    return parser.parse_args(argv)


def greedy(trainer, rows, correct) -> float:
    """Share of all questions whose likeliest completion is right."""
    tokenizer, model = trainer.processing_class, trainer.model.eval()
    ids = tokenizer(list(rows["prompt"]), return_tensors="pt", padding=True, padding_side="left").to(model.device)
    new = model.generate(**ids, max_new_tokens=3, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(new[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(correct(texts, rows["answer"])) / len(rows)


def run(args: argparse.Namespace, seed: int) -> dict:
    """One run of the script, in this process."""
    start, cpu = time.time(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [str(SCRIPT), "--backend", args.backend, "--steps", str(args.steps), "--seed", str(seed), "--out", folder]
        names = runpy.run_path(str(SCRIPT), run_name="__main__")
    took = {"minutes": (time.time() - start) / 60, "cpu_minutes": (time.process_time() - cpu) / 60}
    trainer, rows, correct = names["trainer"], names["rows"], names["correct"]
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    after = greedy(trainer, rows, correct)
    with trainer.model.disable_adapter():
        before = greedy(trainer, rows, correct)
    picked = {key: [entry[key] for entry in log] for key in ("reward", "entropy", "grad_norm")}
    return {"seed": seed, **picked, "greedy_before": before, "greedy_after": after, **took}


def draw(runs: list[dict], path: Path) -> None:
    """Mean over seeds of the rewards' means over WINDOW steps, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rewards = torch.tensor([row["reward"] for row in runs]).unfold(1, WINDOW, 1).mean(-1)
    steps = torch.arange(rewards.shape[1]) + WINDOW
    fig, ax = plt.subplots(figsize=(7, 3.5))
    ax.fill_between(steps, rewards.amin(0), rewards.amax(0), alpha=0.25, label=f"range of {len(runs)} seeds")
    ax.plot(steps, rewards.mean(0), label="mean")
    ax.set(xlabel="step", ylabel=f"share of right answers, {WINDOW} steps", ylim=(0, 1))
    ax.legend(loc="lower right")
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    path = args.out / f"grpo_{args.device.type}.json"
    content = json.loads(path.read_text()) if path.is_file() else {**common.head(args), "runs": []}
    content["environment"] |= {"trl": version("trl"), "threads": torch.get_num_threads()}
    done = {row["seed"] for row in content["runs"]}
    for seed in [] if args.draw else [seed for seed in args.seeds if seed not in done]:
        content["runs"].append(run(args, seed))
        common.write_json(path, content)
    draw(content["runs"], path.with_suffix(".png"))
    for row in content["runs"]:
        first, last = (sum(part) / WINDOW for part in (row["reward"][:WINDOW], row["reward"][-WINDOW:]))
        print(f"seed {row['seed']}: {first:.3f} to {last:.3f}, greedy {row['greedy_before']:.2f} to {row['greedy_after']:.2f}")


if __name__ == "__main__":
    main()
