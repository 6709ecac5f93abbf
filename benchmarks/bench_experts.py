"""One layer of experts, forward and backward: transformers' dense ``grouped_mm``, with and without LoRA, beside frozen ones.

    python benchmarks/bench_experts.py                                     # a GPU, Qwen3-30B-A3B's shape, half a minute
    python benchmarks/bench_experts.py --tokens 128 1024 4096 16384
    python benchmarks/bench_experts.py --shape tiny --device cpu           # does it run?

Random weights, every token to its own random experts. Dense LoRA is what a careful user would write, all experts' adapters as
grouped products (PEFT adds B A to every expert's weight instead, which takes as much memory as the experts again). Routing
weights have a gradient, as they do below a router. ``x dense``: times the dense case with the same adapters. ``host``:
milliseconds that the host needs to issue the step. ``peak``: over weights and inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import common
import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from peft_nvfp4.autograd.experts import ExpertsBranch
from peft_nvfp4.nn.experts.frozen_experts import FrozenExperts
from peft_nvfp4.nn.frozen_linear import FrozenOptions

RANK, SCALING = 16, 2.0


class Shape(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    intermediate: int


SHAPES = {"qwen3-30b-a3b": Shape(128, 8, 2048, 768), "square": Shape(128, 8, 2048, 512), "tiny": Shape(4, 2, 64, 32)}
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


def adapters(shape: Shape, device: torch.device) -> dict[str, ExpertsBranch]:
    """FP32 masters A and B of all experts, both trained."""
    sizes = {"gate_up_proj": (2 * shape.intermediate, shape.hidden), "down_proj": (shape.hidden, shape.intermediate)}

    def one(n: int, k: int) -> ExpertsBranch:
        a, b = torch.randn(shape.experts, RANK, k, device=device), torch.randn(shape.experts, n, RANK, device=device)
        return ExpertsBranch((0.01 * a).requires_grad_(), (0.01 * b).requires_grad_(), SCALING)

    return {name: one(*size) for name, size in sizes.items()}


def dense_lora(experts: nn.Module, own: dict[str, ExpertsBranch], x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """transformers' ``grouped_mm_experts_forward`` with LoRA on both projections."""
    count, k = experts.down_proj.shape[0], index.shape[1]
    ordered, order = index.reshape(-1).sort()
    ends = torch.searchsorted(ordered, torch.arange(count, device=x.device), right=True, out_int32=True)

    def project(name: str, x: Tensor) -> Tensor:
        a, b, scaling = own[name]
        up = (b * scaling).to(x.dtype).transpose(1, 2)
        low = grouped_mm(grouped_mm(x, a.to(x.dtype).transpose(1, 2), offs=ends), up, offs=ends)
        return grouped_mm(x, getattr(experts, name).transpose(1, 2), offs=ends) + low

    h = experts._apply_gate(project("gate_up_proj", x[order // k]))
    out = project("down_proj", h) * weight.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return out[back].view(*index.shape, -1).sum(1).to(x.dtype)


def run(args: argparse.Namespace) -> list[dict]:
    device, shape, rows = args.device, SHAPES[args.shape], []
    torch.manual_seed(0)
    experts, own = dense_experts(shape, device), adapters(shape, device)
    dense_bytes = sum(p.nbytes for p in experts.parameters())
    frozen = FrozenExperts.quantize(copy_of(experts, shape, device), "nvfp4", OPTIONS)
    frozen_bytes = sum(p.nbytes for p in frozen.parameters())
    branches = {name: [branch] for name, branch in own.items()}
    trained = [t for branch in own.values() for t in branch[:2]]
    for tokens in args.tokens:
        x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        index = torch.rand(tokens, shape.experts, device=device).topk(shape.chosen, dim=1).indices
        weight = torch.rand(tokens, shape.chosen, device=device).softmax(-1).to(x.dtype).requires_grad_()

        def measure(case: str, weight_bytes: int, forward: Callable[[], Tensor]) -> float:
            def step() -> None:
                y = forward()
                y.backward(torch.ones_like(y))
                for t in (x, weight, *trained):
                    t.grad = None

            step()  # compiles
            memory = common.peak_memory(step, device, common.memory_now(device))
            times = common.summary([common.burst(step, args.steps, device) for _ in range(3)])
            row = {"tokens": tokens, "case": case, **times, **memory, "host_ms": common.host_ms(step, device)}
            rows.append(row | {"weight_bytes": weight_bytes})
            return times["step_ms"]

        measure("dense, grouped_mm", dense_bytes, lambda: experts(x, index, weight))
        base = measure(f"dense, rank {RANK}", dense_bytes, lambda: dense_lora(experts, own, x, index, weight))
        measure("frozen", frozen_bytes, lambda: frozen(x, index, weight))
        measure(f"frozen, rank {RANK}", frozen_bytes, lambda: frozen(x, index, weight, branches))
        frozen.fuse()
        measure(f"frozen, rank {RANK}, fused product", frozen_bytes, lambda: frozen(x, index, weight, branches))
        frozen.unfuse()
        for row in rows[-4:]:
            row["times_dense"] = row["step_ms"] / base
        print(common.table(rows[-5:], COLUMNS), flush=True)
    return rows


def copy_of(experts: nn.Module, shape: Shape, device: torch.device) -> nn.Module:
    """The same experts, for quantising, which lets their weights go."""
    twin = dense_experts(shape, device)
    twin.load_state_dict(experts.state_dict())
    return twin


COLUMNS = {
    "tokens": lambda row: row["tokens"],
    "case": lambda row: row["case"],
    "step ms": lambda row: row["step_ms"],
    "x dense": lambda row: row["times_dense"],
    "host ms": lambda row: row["host_ms"],
    "weights GB": lambda row: row["weight_bytes"] / common.GB,
    "peak GB": lambda row: row["peak_allocated"] / common.GB,
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--steps", type=int, default=5, help="of a round; three rounds")
    args = parser.parse_args()
    common.write(args, f"experts_{args.device.type}" + ("" if args.shape == "qwen3-30b-a3b" else f"_{args.shape}"), run(args))


if __name__ == "__main__":
    main()
