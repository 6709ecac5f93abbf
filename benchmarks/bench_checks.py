"""What the looks at hooks, classes and settings of modules cost a step: as it is, and with all of them answering at once.

    python benchmarks/bench_checks.py 1b            recorded steps, then eager ones

A LoRA layer over a frozen linear and a fused MLP look in every call whether the modules that they do not call are plain
(:mod:`peft_nvfp4.nn.plain`). Blocks of steps with and without these looks take turns. Writes ``checks_<gpu>.json``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import bench_dropin
import common
import torch
from environment import environment
from torch import nn

from peft_nvfp4 import disable_cuda_graphs
from peft_nvfp4.fusion import mlp
from peft_nvfp4.lora import layer
from peft_nvfp4.nn.plain import StandIn

BLOCKS = 4
STEPS = {"recorded": 25, "eager": 8}


@contextmanager
def without_looks() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name in ((layer, "obstacle"), (mlp, "obstacle"), (StandIn, "edit")):
            stack.enter_context(mock.patch.object(owner, name, lambda *args, **kwargs: None))
        yield


def step_times(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, count: int) -> list[float]:
    """Milliseconds of each step; the first one is left out."""
    times = []
    for _ in range(count + 1):
        start = time.perf_counter()
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        common.synchronize(ids.device)
        times.append((time.perf_counter() - start) * 1e3)
    return times[1:]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("shape", nargs="?", default="1b")
    args, rows = parser.parse_args(), []
    cuda = args.device.type == "cuda"
    model = bench_dropin.build(args.shape, "nvfp4", [], args.device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=cuda)
    ids = torch.randint(5, model.config.vocab_size, (4, 1024 if cuda else 64), device=args.device)
    for kind, count in STEPS.items():
        if kind == "eager":
            disable_cuda_graphs(model)
        step_times(model, optimizer, ids, 3)
        found: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(BLOCKS):
            found["with"] += step_times(model, optimizer, ids, count)
            with without_looks():
                found["without"] += step_times(model, optimizer, ids, count)
        looks, none = (statistics.median(found[name]) for name in ("with", "without"))
        row = {"shape": args.shape, "steps": kind, "with_checks_ms": round(looks, 3), "without_ms": round(none, 3)}
        rows.append(row | {"ratio": round(looks / none, 4)})
        print(json.dumps(rows[-1]), flush=True)
    path = args.out / f"checks_{'h200' if cuda else 'cpu'}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
