"""The longest context of one training step under a cap on the GPU's memory, as Unsloth's published table counts it.

    python benchmarks/bench_context.py 8b:small:12:43008,49152 8b:small:16:81920
    python benchmarks/bench_context.py 8b:small:24:157696:2      # 2 layers compute; the bytes of the other 30 are there
    python benchmarks/bench_context.py tiny:small:1:512 --device cpu      # does it run?

A case is SHAPE:MEMORY:CAP:LENGTHS[:LAYERS], MEMORY a word of NVFP4LoraConfig's ``memory``, CAP in GiB. Lengths are tried in the
order in which they stand, until one does not fit. Random weights (all layers have the same), LoRA r=32 on all linears, batch 1,
labels at every token, gradient checkpointing (nothing else is switched on: what a long sequence needs it has to get by itself),
AdamW as TrainingArguments has it by default. Each length is two whole steps, the first of 1,024 tokens, for kernels and the
optimizer's state. Steps are not recorded: long ones never are, and a recording of the short one would stay. The cap is on
PyTorch's allocator, so a CUDA context comes on top; so it does in the numbers of others that are compared with.

LAYERS: so many layers compute, and the frozen weights, adapters, gradients and optimizer's state of the others are a tensor of
so many bytes. The peak is that of the whole model, since no layer's activations outlast it; time and the host's memory are not.
``--compare LENGTH``: loss and gradients of a step with checkpoints on the host and MLPs in tiles against one without either.

Writes ``context_<gpu>.json`` after each row: seconds of the step, and of locking the host's pages before it (once for a length);
peaks of forward and of backward; ``estimate``, what :mod:`peft_nvfp4.memory` says of this very step of the whole model, and
``ratio``, the estimate over the peak.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

import common
import torch
from environment import environment
from llama_cases import dense_model, llama_config
from peft import get_peft_model
from torch import Tensor, nn

from peft_nvfp4 import (
    NVFP4LoraConfig,
    disable_cuda_graphs,
    disable_host_checkpoints,
    enable_host_checkpoints,
    freeze_model,
    frozen_bytes,
    host_checkpoint_status,
    offload_status,
)
from peft_nvfp4.memory import Settings, estimate
from peft_nvfp4.memory.device import gpu_settings
from peft_nvfp4.memory.kept import EMBEDDING
from peft_nvfp4.quantization.options import Options
from peft_nvfp4.training.host_checkpoints import _watching

RANK, SHORT = 32, 1024
OPTIMIZER = 4  # copies of an adapter's bytes: itself, its gradient, two moments


def build(shape: str, memory: str, layers: int | None, device: torch.device) -> tuple[nn.Module, int]:
    """(model, bytes that the layers that were left out would take). One layer is made and frozen, the others are its copies."""
    torch.manual_seed(0)
    options, config = Options(memory=memory), llama_config(shape, 1)
    whole = llama_config(shape).num_hidden_layers
    layers = layers or whole
    config.max_position_embeddings = 1 << 20
    model = dense_model(config, "sdpa", device)
    model.config.use_cache, model.config.num_hidden_layers = False, layers
    stack = model.model.layers
    freeze_model(stack, accuracy=options.accuracy, weight_layouts=options.frozen.weight_layouts, progress=False)
    for index in range(1, layers):
        stack.append(copy.deepcopy(stack[0]))
        stack[index].self_attn.layer_idx = index
    lora = dict(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, NVFP4LoraConfig(**lora, memory=memory)).to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    disable_cuda_graphs(model)
    if layers < whole:  # theirs alone would take too little of the card to be moved
        enable_host_checkpoints(model)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = 0 if options.offload else frozen_bytes(model)
    return model, (whole - layers) * (frozen + OPTIMIZER * trained) // layers


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


def lock_pages(model: nn.Module, length: int, device: torch.device) -> float:
    """Seconds to make the host's buffers for the checkpoints of a step, where they go there."""
    watching, config, start = _watching(model), model.config, time.perf_counter()
    bytes_ = length * config.hidden_size * model.dtype.itemsize
    if watching.wants(config.num_hidden_layers * bytes_, device):
        watching.buffers.prepare(config.num_hidden_layers, bytes_, device)
        for buffer in [watching.buffers.take(bytes_) for _ in range(config.num_hidden_layers)]:
            watching.buffers.give(buffer)
    return time.perf_counter() - start


def probe(row: dict, model: nn.Module, length: int, device: torch.device) -> None:
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=fused)
    for tokens in (SHORT, length):
        row["lock_seconds"] = round(lock_pages(model, tokens, device), 2)
        ids = torch.randint(5, model.config.vocab_size, (1, tokens), device=device)
        peak(device)
        seen, start = [_counts(model)], time.perf_counter()
        loss = loss_of(model, ids)
        row["forward_peak"] = peak(device)
        seen.append(_counts(model))
        loss.backward()
        row["backward_peak"] = peak(device)
        optimizer.step()
        optimizer.zero_grad()
        common.synchronize(device)
        row["seconds"], row["loss"] = round(time.perf_counter() - start, 2), loss.item()
        (passes, _), (on_host, _), _ = seen = [*seen, _counts(model)]
        row["on_host"] = on_host > passes
        row["rested"] = [after > before for (_, before), (_, after) in zip(seen, seen[1:])]  # in forward, in backward
    row["optimizer_peak"] = peak(device)


def _counts(model: nn.Module) -> tuple[int, int]:
    """Passes whose checkpoints went to the host, times that embedding and head did."""
    status = host_checkpoint_status(model)
    return status.passes, status.rested


def expected(shape: str, memory: str, length: int, model: nn.Module, row: dict) -> dict:
    """The estimator's peak of the whole model's step, as it ran: embedding and head stay where memory is not short."""
    trained = next(p for p in model.parameters() if p.requires_grad)
    run = dict(sequence=length, rank=RANK, checkpointing=True, host_checkpoints=row["on_host"], adapter_bytes=trained.itemsize)
    found = estimate(llama_config(shape), Settings(memory=memory, **run, **gpu_settings()))
    (forward, backward), both = row["rested"], found.static[EMBEDDING]
    head = both if found.shape.tied else both // 2  # is back after forward
    stays = {} if forward else dict.fromkeys(("forward", "loss", "final norm"), both)
    if not backward:
        stays |= dict.fromkeys(("recomputation", "MLP", "attention"), head if forward else both)
    there = {name: {EMBEDDING: stays[name]} if name in stays else {} for name in found.moments}
    totals = {name: sum((found.static | parts | there[name]).values()) for name, parts in found.moments.items()}
    at = max(totals, key=totals.get)
    return {"estimate": totals[at], "estimate_at": at, "offloaded_bytes": found.offloaded, "checkpoint_bytes": found.checkpoints}


def run_length(model: nn.Module, ballast: int, shape: str, memory: str, cap: float, length: int, device: torch.device) -> dict:
    row = {"shape": shape, "memory": memory, "cap_gib": cap, "length": length, "layers": model.config.num_hidden_layers}
    moved, held = offload_status(model).moved_bytes, None

    def step() -> None:
        nonlocal held
        held = torch.empty(ballast, dtype=torch.uint8, device=device)
        probe(row, model, length, device)

    with common.capped(cap, device):
        common.guarded(row, lambda: row.update(fits=common.fits(step, device)))
    if row.get("fits"):
        common.guarded(row, lambda: row.update(expected(shape, memory, length, model, row)))
    if row.get("fits") and device.type == "cuda":
        row["peak"] = max(row[f"{part}_peak"] for part in ("forward", "backward", "optimizer"))
        row["ratio"] = round(row.get("estimate", 0) / row["peak"], 4)
    if device.type == "cuda":  # also where it did not fit: how far it came
        row["reserved"] = torch.cuda.max_memory_reserved(device)
    del held
    model.zero_grad()
    common.release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    host, weights = host_checkpoint_status(model), offload_status(model)
    row |= {"left_out_bytes": ballast, "host_bytes": host.host_bytes, "pinned": host.pinned, "status": str(host)}
    if weights.layers:  # of both steps
        row |= {"moved_bytes": weights.moved_bytes - moved, "offload": str(weights)}
    return row


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


def run_model(shape: str, memory: str, layers: str, cases: list, args, report: Callable[[dict], None]) -> None:
    """All cases of one model, a row each."""
    model, ballast = build(shape, memory, int(layers) if layers else None, args.device)
    if args.compare:
        report({"compared": compare(model, args.compare, args.device)})
        model, ballast = build(shape, memory, int(layers) if layers else None, args.device)
    for cap, lengths in cases:
        for length in lengths:
            row = run_length(model, ballast, shape, memory, cap, length, args.device)
            report(row)
            if not row.get("fits"):
                break


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--compare", type=int, help="first compare a step of this length, on each model")
    args, rows, known = parser.parse_args(), [], environment()
    path = args.out / f"context_{'h200' if args.device.type == 'cuda' else 'cpu'}.json"

    def report(row: dict) -> None:
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "traceback"}), flush=True)
        common.write_json(path, {"environment": known, "rows": rows})

    for model, cases in groupby(_parsed(args.cases), key=itemgetter(0)):  # cases in a row share one
        start, failed = time.perf_counter(), {"model": model}
        common.guarded(failed, lambda: run_model(*model, [case[1:] for case in cases], args, report))  # noqa: B023  (at once)
        if "error" in failed:
            report(failed)
        common.release(args.device)
        print(f"{':'.join(model)}: {time.perf_counter() - start:.0f} s", flush=True)
    print(path)


def _parsed(cases: list[str]) -> list[tuple[list[str], float, list[int]]]:
    """([SHAPE, MEMORY, LAYERS], cap, lengths) of each case."""
    found = []
    for case in cases:
        shape, memory, cap, lengths, layers = (*case.split(":"), "")[:5]
        found.append(([shape, memory, layers], float(cap), [int(n) for n in lengths.split(",")]))
    return found


if __name__ == "__main__":
    main()
