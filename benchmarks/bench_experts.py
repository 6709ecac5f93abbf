"""One layer of experts, forward and backward: transformers' dense ``grouped_mm`` beside frozen ones with and without adapters.

    python benchmarks/bench_experts.py                                     # a GPU, Qwen3-30B-A3B's shape, half a minute
    python benchmarks/bench_experts.py --shape tiny --device cpu           # does it run?

Random weights, every token to its own random experts. Frozen experts are computed one after the other
(:mod:`peft_nvfp4.nn.experts.frozen_experts`), so with many of them a step is bound by Python and by launches: the table says how
far. ``peak``: over weights and inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import common
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from peft_nvfp4.autograd.frozen_linear import Branch
from peft_nvfp4.nn.experts.frozen_experts import FrozenExperts
from peft_nvfp4.nn.frozen_linear import FrozenOptions

RANK = 16


class Shape(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    intermediate: int


SHAPES = {"qwen3-30b-a3b": Shape(128, 8, 2048, 768), "tiny": Shape(4, 2, 64, 32)}
OPTIONS = {"gate_up_proj": FrozenOptions(terms=2), "down_proj": FrozenOptions()}  # balanced


def dense_experts(shape: Shape, device: torch.device) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.chosen,
        hidden_act="silu",
    )
    config._experts_implementation = "grouped_mm"
    with device:
        experts = Qwen3MoeExperts(config).to(torch.bfloat16).requires_grad_(False)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.02)
    return experts


def adapters(shape: Shape, device: torch.device) -> dict[str, list[list[Branch]]]:
    """Of every expert, A frozen at random and B trained."""
    sizes = {"gate_up_proj": (2 * shape.intermediate, shape.hidden), "down_proj": (shape.hidden, shape.intermediate)}

    def one(n: int, k: int) -> Branch:
        a, b = torch.randn(RANK, k, device=device), torch.randn(n, RANK, device=device)
        return Branch(0.01 * a, (0.01 * b).requires_grad_(), 2.0, 0.0)

    return {name: [[one(*size)] for _ in range(shape.experts)] for name, size in sizes.items()}


def run(args: argparse.Namespace) -> list[dict]:
    device, shape, rows = args.device, SHAPES[args.shape], []
    torch.manual_seed(0)
    x = torch.randn(args.tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    index = torch.rand(args.tokens, shape.experts, device=device).topk(shape.chosen, dim=1).indices
    weight = torch.rand(args.tokens, shape.chosen, device=device).softmax(-1)

    def measure(case: str, forward: Callable[[], Tensor], **more) -> None:
        def step() -> None:
            y = forward()
            y.backward(torch.ones_like(y))
            x.grad = None

        step()  # compiles
        memory = common.peak_memory(step, device, common.memory_now(device))
        times = common.summary([common.burst(step, args.steps, device) for _ in range(3)])
        rows.append({"case": case, **times, **memory, **more})
        print(common.table(rows[-1:], COLUMNS), flush=True)

    experts = dense_experts(shape, device)
    held = sum(p.nbytes for p in experts.parameters())
    measure("dense, grouped_mm", lambda: experts(x, index, weight), weight_bytes=held)
    frozen = FrozenExperts.quantize(experts, "nvfp4", OPTIONS)
    held = sum(p.nbytes for p in frozen.parameters())
    own = adapters(shape, device)
    measure("frozen", lambda: frozen(x, index, weight), weight_bytes=held)
    measure(f"frozen, rank {RANK}", lambda: frozen(x, index, weight, own), weight_bytes=held)
    frozen.fuse()
    measure(f"frozen, rank {RANK}, fused product", lambda: frozen(x, index, weight, own), weight_bytes=held)
    return rows


COLUMNS = {
    "case": lambda row: row["case"],
    "step ms": lambda row: row["step_ms"],
    "weights GB": lambda row: row["weight_bytes"] / common.GB,
    "peak GB": lambda row: row["peak_allocated"] / common.GB,
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5, help="of a round; three rounds")
    args = parser.parse_args()
    common.write(args, f"experts_{args.device.type}", run(args))


if __name__ == "__main__":
    main()
