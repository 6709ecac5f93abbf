"""Training on several GPUs of one host: tokens/s, peak memory of a card, bytes on the wire.

torchrun --nproc-per-node 1 benchmarks/bench_distributed.py --shape 3b          # without any wrapper: the reference
torchrun --nproc-per-node 2 benchmarks/bench_distributed.py --shape 3b
python benchmarks/bench_distributed.py --report                                  # scaling, from what both wrote

Every process trains on its own batch of the same size (weak scaling), so twice the cards at the same step time is a scaling of 2.
A case is STRATEGY-BACKEND with options: ``ddp-nvfp4``, ``ddp-nvfp4-graphs``, ``fsdp2-nvfp4-transient``, ``fsdp2-bf16``.
Weights are random and the same on every process; loss at the last 32 positions of each sequence. FSDP2 units: decoder layers, the
embedding, the rest. Memory is over what was allocated before the case; the step time is the slowest process's median.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import common
import torch
import torch.distributed as dist
from bench_train import ALPHA, LABELS, SHAPES, TARGETS, R, dense_model
from environment import environment
from peft import get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from peft_nvfp4 import NVFP4LoraConfig, attach_loss, enable_cuda_graphs, graph_status
from peft_nvfp4.distributed import WireCount, count_bytes
from peft_nvfp4.distributed.wire import count_ddp

CASES = "ddp-nvfp4 ddp-nvfp4-transient ddp-nvfp4-graphs ddp-nf4 ddp-bf16 fsdp2-nvfp4 fsdp2-nvfp4-transient fsdp2-nf4 fsdp2-bf16"
STRATEGIES, BACKENDS, OPTIONS = ("ddp", "fsdp2"), ("nvfp4", "nf4", "bf16"), {"transient", "graphs", "ckpt", "paper"}


def parse(case: str) -> tuple[str, str, set[str]]:
    strategy, backend, *options = case.split("-")
    if strategy not in STRATEGIES or backend not in BACKENDS or not OPTIONS.issuperset(options):
        raise ValueError(f"unknown case {case!r}: {'|'.join(STRATEGIES)}-{'|'.join(BACKENDS)}, then any of {', '.join(OPTIONS)}")
    return strategy, backend, set(options)


class Trainer:
    """A case, ready to step."""

    def __init__(self, case: str, args: argparse.Namespace, device: torch.device):
        self.strategy, backend, options = parse(case)
        torch.manual_seed(0)  # the same weights everywhere
        model = dense_model(args.shape, "sdpa" if device.type == "cpu" else "causal", device)
        model.config.use_cache = False
        config = NVFP4LoraConfig(
            r=R,
            lora_alpha=ALPHA,
            target_modules=TARGETS,
            backend=backend,
            weight_layouts="transient" if "transient" in options else "cached",
            accuracy="paper" if "paper" in options else "balanced",
            cuda_graphs=False,
        )
        self.model = get_peft_model(model, config).train()
        attach_loss(self.model)
        if "ckpt" in options:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.enable_input_require_grads()
        if "graphs" in options:
            enable_cuda_graphs(self.model)
        self.wrapped: nn.Module = self._wrap(device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
        torch.manual_seed(1 + dist.get_rank())
        self.ids = torch.randint(SHAPES[args.shape][6], (args.batch, args.seq), device=device)
        self.labels = self.ids.clone()
        self.labels[:, :-LABELS] = -100

    def _wrap(self, device: torch.device) -> nn.Module:
        if dist.get_world_size() == 1:
            return self.model
        if self.strategy == "ddp":
            ids = [device.index] if device.type == "cuda" else None
            return DistributedDataParallel(self.model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)
        base = self.model.get_base_model()
        for layer in base.model.layers:
            fully_shard(layer)
        if base.lm_head.weight is not base.model.embed_tokens.weight:
            fully_shard(base.model.embed_tokens)
        return fully_shard(self.model)

    def loss(self, module: nn.Module) -> Tensor:
        return module(input_ids=self.ids, labels=self.labels).loss

    def step(self) -> None:
        self.loss(self.wrapped).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wire(self) -> WireCount:
        """Of one step."""
        if isinstance(self.wrapped, DistributedDataParallel):
            fresh = DistributedDataParallel(
                self.model, broadcast_buffers=False
            )  # a wrapper takes one hook, before its first step
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


COLUMNS = {
    "cards": lambda row: row["world"],
    "case": lambda row: row["case"],
    "step ms": lambda row: row["step_ms"],
    "tokens/s": lambda row: row["tokens_per_s"],
    "peak GB": lambda row: row["peak_allocated"] / common.GB,
    "at rest GB": lambda row: row["at_rest"] / common.GB,
    "sent MB": lambda row: row["wire_sent_per_card"] / 1e6,
    "scaling": lambda row: row["scaling"],
    "error": lambda row: row["error"],
}


def report(out: Path) -> None:
    """All results of the folder in one table, with tokens/s over that of one card."""
    rows = [row for path in sorted(out.glob("distributed_*.json")) for row in json.loads(path.read_text())["rows"]]
    alone = {
        (r["shape"], r["case"], r["batch"], r["seq"]): r["tokens_per_s"] for r in rows if r.get("world") == 1 and "step_ms" in r
    }
    for row in rows:
        reference = alone.get((row["shape"], row["case"], row.get("batch"), row.get("seq")))
        if reference and row["world"] > 1 and "step_ms" in row:
            row["scaling"] = row["tokens_per_s"] / reference
    for shape in dict.fromkeys(row["shape"] for row in rows):
        print(f"\n{shape}", common.table([row for row in rows if row["shape"] == shape], COLUMNS))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    parser.add_argument("--cases", default=CASES, help="separated by spaces (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per process (%(default)s)")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    parser.add_argument("--report", action="store_true", help="print what is in --out, run nothing")
    args = parser.parse_args()
    [parse(case) for case in args.cases.split()]
    return args


def main() -> None:
    args = arguments()
    if args.report:
        return report(args.out)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
    rows = []
    for case in args.cases.split():
        row = {"case": case, "shape": args.shape, "world": dist.get_world_size()}
        common.guarded(row, lambda: row.update(run_case(case, args, device)))  # noqa: B023  (runs at once)
        rows.append(row)
        common.release(device)
        failed: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(failed, "error" in row)
        if dist.get_rank() == 0:
            head = {"environment": environment(), "settings": {k: str(v) for k, v in vars(args).items()}}
            common.write(args.out, f"distributed_{args.shape}_x{row['world']}", head, rows)
            print(common.table([row], COLUMNS), row.get("traceback", ""), flush=True)
    dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
