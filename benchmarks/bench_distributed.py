"""Training on several GPUs of one host: tokens/s, peak memory of a card, bytes on the wire.

    torchrun --nproc-per-node 1 benchmarks/bench_distributed.py --shape 3b          # without any wrapper: the reference
    torchrun --nproc-per-node 2 benchmarks/bench_distributed.py --shape 3b
    python benchmarks/bench_distributed.py --report                                  # scaling, from what both wrote

Every process trains on its own batch of the same size (weak scaling), so twice the cards at the same step time is a scaling of 2.
A case is STRATEGY-BACKEND with options of ``llama_cases.py``: ``ddp-nvfp4-graphs``, ``fsdp2-nvfp4-transient``, ``fsdp2-bf16``. On
one process the strategy does not matter. Weights are random and the same on every process; loss at the last 32 positions of each
sequence. FSDP2 units: decoder layers, and the rest around them, as accelerate and Trainer wrap.

Memory is that of PyTorch's allocator (NCCL's own buffers are outside), over what was allocated before the case, on the process
that takes most; the step time is the slowest process's median. ``sent`` is what a card sends in a step in a ring: counted where
PyTorch asks for collectives, not on the link. The report sets the peaks beside those of :mod:`peft_nvfp4.memory`, which has
seen none of them, and BF16's peak under the same strategy over each.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from datetime import timedelta

import common
import torch
import torch.distributed as dist
from llama_cases import LABELS, SHAPES, TARGETS, Case, R, build, last_positions
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from wire import WireCount, count_bytes, count_ddp

from peft_nvfp4 import graph_status
from peft_nvfp4.memory import BUILTIN, estimate

CASES = "ddp-nvfp4 ddp-nvfp4-transient ddp-nvfp4-graphs ddp-nf4 ddp-bf16 fsdp2-nvfp4 fsdp2-nvfp4-transient fsdp2-nf4 fsdp2-bf16"
STRATEGIES, BACKENDS = ("ddp", "fsdp2"), {"nvfp4": "nvfp4", "nf4": "qlora-ours", "bf16": "bf16-ours"}
"""Backends: name here -> as a case of ``llama_cases.py``."""


def parse(name: str) -> tuple[str, Case]:
    strategy, backend, *options = name.split("-")
    if strategy not in STRATEGIES or backend not in BACKENDS:
        raise ValueError(f"unknown case {name!r}: {'|'.join(STRATEGIES)}-{'|'.join(BACKENDS)}, then options of llama_cases.py")
    return strategy, Case("-".join([BACKENDS[backend], *options]))


class Trainer:
    """A case, ready to step."""

    def __init__(self, case: str, args: argparse.Namespace, device: torch.device):
        self.strategy, parsed = parse(case)
        self.model, _ = build(parsed, args.shape, device)  # seeded: the same weights everywhere
        self.wrapped: nn.Module = self._wrap(device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
        torch.manual_seed(1 + dist.get_rank())
        self.inputs = last_positions(torch.randint(SHAPES[args.shape][6], (args.batch, args.seq), device=device))

    def _wrap(self, device: torch.device) -> nn.Module:
        if dist.get_world_size() == 1:
            return self.model
        if self.strategy == "ddp":
            ids = [device.index] if device.type == "cuda" else None
            return DistributedDataParallel(self.model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)
        base = self.model.get_base_model()
        for layer in base.model.layers:
            fully_shard(layer)
        return fully_shard(self.model)

    def loss(self, module: nn.Module) -> Tensor:
        return module(**self.inputs).loss

    def step(self) -> None:
        self.loss(self.wrapped).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wire(self) -> WireCount:
        """Of one step."""
        if isinstance(self.wrapped, DistributedDataParallel):
            # a wrapper takes one hook, and before its first step; the wrapper there is reduces nothing while it is not called
            fresh = DistributedDataParallel(self.model, broadcast_buffers=False)
            count = count_ddp(fresh)
            self.loss(fresh).backward()
            self.optimizer.zero_grad()
            return count
        with count_bytes() as count:
            self.step()
        return count


def run_case(case: str, args: argparse.Namespace, device: torch.device) -> dict:
    """One row; on every process the same but for memory, of which the largest counts."""
    before = common.memory_now(device)
    trainer = Trainer(case, args, device)
    common.release(device)
    at_rest = common.allocated(device) - before["allocated"]
    for _ in range(2):  # kernels are tuned, the optimizer's state is made, graphs are recorded
        trainer.step()
    memory = common.peak_memory(trainer.step, device, before)
    dist.barrier()
    times = common.summary([common.burst(trainer.step, args.steps, device) for _ in range(args.rounds)])
    wire = trainer.wire() if dist.get_world_size() > 1 else WireCount()
    here = {"at_rest": at_rest, **memory, **times, "loss": float(trainer.loss(trainer.wrapped).detach())}
    everywhere: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    row = {"case": case, "shape": args.shape, "world": dist.get_world_size(), "batch": args.batch, "seq": args.seq}
    row |= {key: None if here[key] is None else max(part[key] for part in everywhere) for key in here if key != "loss"}
    row["tokens_per_s"] = 1e3 * row["world"] * args.batch * args.seq / row["step_ms"]
    row["wire_payload"], row["wire_sent_per_card"] = dict(wire.payload), wire.total_sent
    if "graphs" in case:
        row["graphs"] = str(graph_status(trainer.model))
    row["loss"] = [part["loss"] for part in everywhere]
    return row


def predicted(row: dict, world: int) -> int | None:
    """The estimator's peak for a row; None for a shape that it has no name for."""
    if (shape := f"llama-{row['shape']}") not in BUILTIN:
        return None
    strategy, case = parse(row["case"])
    step = {"batch": row["batch"], "sequence": row["seq"], "positions": LABELS, "rank": R, "targets": tuple(TARGETS)}
    return estimate(shape, replace(case.settings(), cards=world, strategy=strategy, **step)).peak


COLUMNS = {
    "shape": lambda row: row["shape"],
    "cards": lambda row: row["world"],
    "case": lambda row: row["case"],
    "step ms": lambda row: row["step_ms"],
    "tokens/s": lambda row: row["tokens_per_s"],
    "scaling": lambda row: row["scaling"],
    "at rest GB": lambda row: row["at_rest"] / common.GB,
    "peak GB": lambda row: row["peak_reserved" if "graphs" in row else "peak_allocated"] / common.GB,
    "estimated GB": lambda row: row["predicted"] / common.GB,
    "peak/estimated": lambda row: row["peak_allocated"] / row["predicted"],
    "BF16/this": lambda row: row["gain"],
    "estimated BF16/this": lambda row: row["predicted_gain"],
    "off by %": lambda row: 100 * (row["gain"] / row["predicted_gain"] - 1),
    "sent MB": lambda row: row["wire_sent_per_card"] / 1e6,
    "loss": lambda row: sum(row["loss"]) / len(row["loss"]),
    "error": lambda row: row["error"],
}


def compared(rows: list[dict]) -> list[dict]:
    """Rows with what follows from several: tokens/s over one card's; BF16's peak (same strategy and cards) over theirs. What a
    CUDA graph holds does not count as allocated: such rows have the peak of reserved memory, and no comparison of it."""
    rows = [row | ({} if {"error", "graphs"} & row.keys() else {"predicted": predicted(row, row["world"])}) for row in rows]
    good = [row for row in rows if "step_ms" in row]
    key = lambda row, *more: (row["shape"], row["batch"], row["seq"], *more)
    alone = {key(row, row["case"].partition("-")[2]): row["tokens_per_s"] for row in good if row["world"] == 1}
    dense = {key(row, row["case"], row["world"]): row for row in good}
    for row in good:
        strategy, case = parse(row["case"])
        reference = alone.get(key(row, row["case"].partition("-")[2]))
        if reference and row["world"] > 1:
            row["scaling"] = row["tokens_per_s"] / reference
        other = dense.get(key(row, "-".join([strategy, "bf16", *(case.options & {"ckpt"})]), row["world"]))
        if other and other["peak_allocated"] and row["peak_allocated"] and "predicted" in row:
            row["gain"] = other["peak_allocated"] / row["peak_allocated"]
            row["predicted_gain"] = row["predicted"] and other["predicted"] / row["predicted"]
    return rows


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    parser.add_argument("--cases", default=CASES, help="separated by spaces (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per process (%(default)s)")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for another process (%(default)s)")
    parser.add_argument("--report", action="store_true", help="print what is in --out, run nothing")
    args = parser.parse_args()
    for case in args.cases.split():
        parse(case)
    return args


def main() -> None:
    args = arguments()
    if args.report:
        rows = [row for path in sorted(args.out.glob("distributed_*.json")) for row in json.loads(path.read_text())["rows"]]
        print(common.table(compared(rows), COLUMNS))
        return
    device = args.device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    # a process whose step failed leaves the others in a collective
    dist.init_process_group(**backend, timeout=timedelta(seconds=args.timeout))
    rows = []
    for case in args.cases.split():
        row = {"case": case, "shape": args.shape, "world": dist.get_world_size()}
        common.guarded(row, lambda: row.update(run_case(case, args, device)))  # noqa: B023  (runs at once)
        rows.append(row)
        common.release(device)
        failed: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failed, row.get("error"))
        if any(failed) and "error" not in row:
            row["error"] = f"on another process: {next(filter(None, failed))}"
        if dist.get_rank() == 0:
            common.write(args, f"distributed_{args.shape}_x{row['world']}", rows)
            print(common.table(compared(rows)[-1:], COLUMNS), row.get("traceback", ""), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
