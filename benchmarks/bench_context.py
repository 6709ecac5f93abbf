"""The longest context of one training step under a cap on the GPU's memory, as Unsloth's published table counts it.

    python benchmarks/bench_context.py 8b:small:12:43008,49152 8b:small:16:81920
    python benchmarks/bench_context.py 8b:small:24:157696 --layers 4      # the other 28 layers' bytes are there, not their time
    python benchmarks/bench_context.py tiny:small:1:512 --device cpu      # does it run?

A case is SHAPE:MEMORY:CAP:LENGTHS, MEMORY a word of NVFP4LoraConfig's ``memory``, CAP in GiB, LENGTHS in ascending order: they
are tried until one does not fit. Random weights, LoRA r=32 on all linears, batch 1, labels at every token, gradient checkpointing
(nothing else is switched on: what a long sequence needs it has to get by itself), AdamW as TrainingArguments has it by default.
Each length is two whole steps, the first of 1,024 tokens, for the optimizer's state. The cap is on PyTorch's allocator, so a CUDA
context comes on top; so it does in the numbers of others that are compared with.

``--layers N``: N layers compute, and the frozen weights, adapters, gradients and optimizer's state of the others are a tensor of
so many bytes. The peak is that of the whole model, since no layer's activations outlast it; time and the host's memory are not.
``--compare LENGTH``: loss and gradients of a step with checkpoints on the host and MLPs in tiles against one without either.

Writes ``context_<gpu>.json``: a row a length with seconds of the step, peaks of forward and of backward, the host's memory.
"""

from __future__ import annotations

import json
import time

import common
import torch
from environment import environment
from llama_cases import dense_model, llama_config
from peft import get_peft_model
from torch import Tensor, nn

from peft_nvfp4 import (
    NVFP4LoraConfig,
    disable_host_checkpoints,
    enable_host_checkpoints,
    frozen_bytes,
    graph_status,
    host_checkpoint_status,
)

RANK, SHORT = 32, 1024
OPTIMIZER = 4  # copies of an adapter's bytes: itself, its gradient, two moments


def build(shape: str, memory: str, layers: int | None, device: torch.device) -> tuple[nn.Module, int]:
    """(model, bytes that the layers that were left out would take)."""
    torch.manual_seed(0)
    config = llama_config(shape)
    left_out = 0 if layers is None else config.num_hidden_layers - layers
    config.num_hidden_layers -= left_out
    config.max_position_embeddings = 1 << 20
    model = dense_model(config, "sdpa", device)
    model.config.use_cache = False
    lora = dict(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, NVFP4LoraConfig(**lora, memory=memory)).to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = 0 if memory == "smallest" else frozen_bytes(model)
    return model, left_out * (frozen + OPTIMIZER * trained) // config.num_hidden_layers


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


def peak(device: torch.device) -> int | None:
    """Since the last call."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    found = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def probe(row: dict, model: nn.Module, length: int, device: torch.device) -> None:
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=fused)
    for tokens in (SHORT, length):
        ids = torch.randint(5, model.config.vocab_size, (1, tokens), device=device)
        peak(device)
        start = time.perf_counter()
        loss = loss_of(model, ids)
        row["forward_peak"] = peak(device)
        loss.backward()
        row["backward_peak"] = peak(device)
        optimizer.step()
        optimizer.zero_grad()
        common.synchronize(device)
        row["seconds"], row["loss"] = round(time.perf_counter() - start, 2), loss.item()


def run_case(results: list[dict], model: nn.Module, ballast: int, memory: str, cap: float, lengths: list[int], device) -> None:
    for length in lengths:
        row = {"memory": memory, "cap_gib": cap, "length": length, "left_out_bytes": ballast}
        held = None

        def step() -> None:
            nonlocal held
            held = torch.empty(ballast, dtype=torch.uint8, device=device)
            probe(row, model, length, device)  # noqa: B023  called at once

        with common.capped(cap, device):
            common.guarded(row, lambda: row.update(fits=common.fits(step, device)))  # noqa: B023
        if device.type == "cuda":  # also where it did not fit: how far it came
            row |= {"peak": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}
            torch.cuda.reset_peak_memory_stats(device)
        del held
        model.zero_grad()
        common.release(device)
        status = host_checkpoint_status(model)
        row["recordings"] = str(graph_status(model)).splitlines()
        row |= {"host_bytes": status.host_bytes, "pinned": status.pinned, "status": str(status)}
        results.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "traceback"}), flush=True)
        if not row.get("fits"):
            break


def compare(model: nn.Module, length: int, device: torch.device) -> dict:
    """Differences of a step with checkpoints on the host to one without, and of that one to itself; two steps of each kind."""
    ids, found, seconds = torch.randint(5, model.config.vocab_size, (1, length), device=device), [], []
    for switch in (disable_host_checkpoints, disable_host_checkpoints, enable_host_checkpoints, enable_host_checkpoints):
        switch(model)
        model.zero_grad()
        common.synchronize(device)
        start = time.perf_counter()
        loss = loss_of(model, ids)
        loss.backward()
        common.synchronize(device)
        seconds.append(round(time.perf_counter() - start, 3))  # the first of each kind compiles kernels, and makes buffers
        found.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    disable_host_checkpoints(model)
    enable_host_checkpoints(model, automatic=True)
    model.zero_grad()
    error = lambda a, b: max(((a[n] - b[n]).norm() / b[n].norm().clamp_min(1e-30)).item() for n in b)
    plain, again, host, _ = found
    same = lambda a, b: sum(torch.equal(a[n], b[n]) for n in b)
    return {
        "length": length,
        "seconds": seconds,
        "losses": [loss for loss, _ in found],
        "tensors": len(plain[1]),
        "again": {"equal": same(again[1], plain[1]), "largest": error(again[1], plain[1])},
        "host": {"equal": same(host[1], plain[1]), "largest": error(host[1], plain[1])},
    }


def run_model(shape: str, memory: str, cases: list[tuple[float, list[int]]], args, compared: dict) -> list[dict]:
    """Rows of all cases of one model."""
    results: list[dict] = []
    model, ballast = build(shape, memory, args.layers, args.device)
    if args.compare and not compared:
        common.guarded(compared, lambda: compared.update(compare(model, args.compare, args.device)))
        print(json.dumps(compared), flush=True)
    if args.layers:  # theirs alone would take too little of the card to be moved
        enable_host_checkpoints(model)
    for cap, lengths in cases:
        run_case(results, model, ballast, memory, cap, lengths, args.device)
    return results


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--layers", type=int, help="keep so many layers, and the bytes of the others")
    parser.add_argument("--compare", type=int, help="compare a step of this length, on the first case's model")
    args, results, compared = parser.parse_args(), [], {}
    for what, cases in _grouped(args.cases).items():
        row = {"case": what}
        common.guarded(row, lambda: results.extend(run_model(*what.split(":"), cases, args, compared)))  # noqa: B023
        if "error" in row:
            results.append(row)
            print(json.dumps(row), flush=True)
        common.release(args.device)
    name = "h200" if args.device.type == "cuda" else "cpu"
    layers = f"_{args.layers}_layers" if args.layers else ""
    path = args.out / f"context_{name}{layers}.json"
    content = {"environment": environment(), "layers": args.layers, "compared": compared, "rows": results}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)


def _grouped(cases: list[str]) -> dict[str, list[tuple[float, list[int]]]]:
    """SHAPE:MEMORY -> (cap, lengths) of its cases: a model is built once."""
    found: dict[str, list] = {}
    for case in cases:
        shape, memory, cap, lengths = case.split(":")
        found.setdefault(f"{shape}:{memory}", []).append((float(cap), [int(n) for n in lengths.split(",")]))
    return found


if __name__ == "__main__":
    main()
