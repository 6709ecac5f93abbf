"""Models larger than the card: ``peft_nvfp4.enable_offload`` under a cap on the GPU's memory.

    python benchmarks/bench_offload.py --out results                 # on an H200: about two minutes, 30 GB of the host's memory
    python benchmarks/bench_offload.py --parts tiny --device cpu     # does it run?

Parts:

    equal   some layers of 8B, with and without offload: losses and adapters after two steps, bit for bit
    8b      Llama-8B's shape under 6 GiB
    30b     60 layers, hidden 6656, intermediate 17920, 52 heads, vocabulary 32000, under 16 GiB
    70b     Llama-3-70B's shape under 16 GiB without offload: the estimator's figure, and an attempt to allocate its weights

A model is made layer by layer on the GPU, before the cap: random weights, frozen, moved to the host; no copy of the whole in BF16
exists anywhere. The cap holds PyTorch's allocator to so many bytes less what CUDA takes
(``peft_nvfp4.memory.settings.CONTEXT``).

Times are of a step of 1 x 512 tokens with checkpointing (so most layers are fetched twice). ``compute``: the same step while the
copies are left out (layers compute with whatever is in the buffers). ``copy``: the copies of a step one after the other with
nothing else running. ``overlap``: (compute + copy - step) / min(compute, copy), 1 if the shorter of the two is hidden entirely.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import common
import torch
from environment import environment
from peft import get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from peft_nvfp4 import NVFP4LoraConfig, attach_loss, enable_offload, freeze_model
from peft_nvfp4.memory import Settings, estimate, parse_bytes, usable
from peft_nvfp4.memory.settings import CONTEXT
from peft_nvfp4.numerics.formats import packed_bytes
from peft_nvfp4.training.offload.enable import _owner, offload_status
from peft_nvfp4.training.offload.layers import Offload

LABELS, R = 32, 16
ACCURACY = "balanced"


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    cap: str

    def config(self, layers: int | None = None) -> LlamaConfig:
        return LlamaConfig(
            **{"hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_hidden_layers": layers or self.layers},
            **{"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocabulary},
            **{"tie_word_embeddings": False, "max_position_embeddings": 8192},
        )


SHAPES = {
    "tiny": Shape(64, 176, 4, 4, 2, 128, "1GiB"),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256, "6GiB"),
    "30b": Shape(6656, 17920, 60, 52, 52, 32000, "16GiB"),
    "70b": Shape(8192, 28672, 80, 64, 8, 128256, "16GiB"),
}
PARTS = ("equal", "8b", "30b", "70b")


# ---------------------------------------------------------------------------------------------- models


def made_by_layers(config: LlamaConfig, backend: str, layouts: str, device: torch.device, home: str) -> nn.Module:
    """A model with random weights whose decoder layers are frozen one at a time, and wait in ``home``."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    for layer in model.model.layers:
        fill(layer, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            freeze_model(layer, backend, accuracy=ACCURACY, weight_layouts=layouts, progress=False)
        layer.to(home)
    for part in (model.model.embed_tokens, model.model.norm, model.lm_head):
        fill(part, device)
        part.to(home)
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config).to(home)
    model.config.use_cache = False
    return model


def fill(module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(1.0) if p.ndim == 1 else p.normal_(std=0.02)


def tuned(base: nn.Module, backend: str, layouts: str, offload: str | None, device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    settings = {"r": R, "lora_alpha": 2 * R, "target_modules": "all-linear", "backend": backend}
    model = get_peft_model(base, NVFP4LoraConfig(**settings, accuracy=ACCURACY))  # of the layouts that the base has
    if offload:
        enable_offload(model)
    model.to(device).train()
    attach_loss(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


class Run:
    """A model with its optimizer and batch."""

    def __init__(self, model: nn.Module, vocabulary: int, seq: int, device: torch.device):
        self.model = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
        self.ids = torch.randint(vocabulary, (1, seq), generator=torch.Generator().manual_seed(2)).to(device)
        self.labels = self.ids.clone()
        self.labels[:, :-LABELS] = -100

    def step(self) -> Tensor:
        loss = self.model(input_ids=self.ids, labels=self.labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


# ---------------------------------------------------------------------------------------------- parts


def equal(args: argparse.Namespace, device: torch.device) -> dict:
    """The same bits with and without."""
    shape, found = SHAPES[args.equal_shape], []
    for offload in (None, "cpu"):
        torch.manual_seed(0)
        base = made_by_layers(
            shape.config(args.equal_layers), args.backend, args.layouts, device, "cpu" if offload else str(device)
        )
        run = Run(tuned(base, args.backend, args.layouts, offload, device), shape.vocabulary, args.seq, device)
        losses = [run.step().item() for _ in range(2)]
        found.append((losses, [p.detach().cpu() for p in run.model.parameters() if p.requires_grad]))
        del base, run
        common.release(device)
    (losses, adapters), (others, theirs) = found
    same = losses == others and all(map(torch.equal, adapters, theirs))
    return {"layers": args.equal_layers, "losses": losses, "losses_offloaded": others, "bit_equal": same}


def capped(name: str, args: argparse.Namespace, device: torch.device) -> dict:
    """A step under the shape's cap."""
    shape = SHAPES[name]
    start = time.perf_counter()
    torch.manual_seed(0)
    base = made_by_layers(shape.config(), args.backend, args.layouts, device, "cpu")
    common.release(device)
    row = {"cap": shape.cap, "layers": shape.layers, "made_s": time.perf_counter() - start}
    limit(parse_bytes(shape.cap), device)
    try:
        start = time.perf_counter()
        run = Run(tuned(base, args.backend, args.layouts, "cpu", device), shape.vocabulary, args.seq, device)
        row["loss"] = [run.step().item()]  # kernels are compiled, pages are locked, the optimizer's state is made
        row["first_step_s"] = time.perf_counter() - start
        owner = _owner(run.model)
        before = offload_status(run.model)
        common.synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        row |= common.summary([timed(run.step, args.steps, device)])
        if device.type == "cuda":
            row["peak_allocated"], row["peak_reserved"] = (
                torch.cuda.max_memory_allocated(device),
                torch.cuda.max_memory_reserved(device),
            )
        after = offload_status(run.model)
        row["moved_bytes"] = (after.moved_bytes - before.moved_bytes) // args.steps
        row["ahead"] = (after.ahead - before.ahead) / max(1, after.copies - before.copies)
        row |= {"host_bytes": after.host_bytes, "pinned": after.pinned, "waited": 1 - after.overlap, "status": str(after)}
        row["copy_ms"] = copy_alone(owner, row["moved_bytes"], device)
        row["compute_ms"] = compute_alone(owner, run, args.steps, device)
        shorter = min(row["copy_ms"], row["compute_ms"])
        row["overlap"] = (row["copy_ms"] + row["compute_ms"] - row["step_ms"]) / shorter
        row["copy_gb_per_s"] = row["moved_bytes"] / row["copy_ms"] / 1e6
    finally:
        limit(None, device)
    return row


def timed(step, count: int, device: torch.device) -> list[float]:
    """Milliseconds of each step, the host waiting for the device in between: a step is as long as a second here."""
    times = []
    for _ in range(count):
        common.synchronize(device)
        start = time.perf_counter()
        step()
        common.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def copy_alone(owner: Offload, bytes_: int, device: torch.device) -> float:
    """Milliseconds to copy ``bytes_`` from the host, a layer at a time."""
    sizes, i = 0, 0
    common.synchronize(device)
    start = time.perf_counter()
    while sizes < bytes_:
        layer = owner.layers[i % len(owner.layers)]
        owner.slots[i % len(owner.slots)].data[: layer.size].copy_(layer.host.data, non_blocking=True)
        sizes, i = sizes + layer.size, i + 1
    common.synchronize(device)
    for slot in owner.slots:
        slot.holds = None
    return 1e3 * (time.perf_counter() - start)


def compute_alone(owner: Offload, run: Run, count: int, device: torch.device) -> float:
    """Milliseconds of a step without copies: the same kernels on whatever bytes are there."""
    owner._load = lambda layer, ahead: None
    try:
        run.step()
        return sorted(timed(run.step, count, device))[count // 2]
    finally:
        del owner._load


def too_large(name: str, args: argparse.Namespace, device: torch.device) -> dict:
    """What the estimator says of a model without offload, and where allocating its packed weights ends."""
    shape = SHAPES[name]
    settings = Settings(
        backend="nvfp4",
        accuracy=ACCURACY,
        memory="small",
        batch=1,
        sequence=args.seq,
        checkpointing=True,
        positions=LABELS,
    )
    found = estimate(shape.config(), settings)
    memory = parse_bytes(shape.cap)
    row = {"cap": shape.cap, "estimated": found.peak, "usable": usable(memory), "fits": found.peak <= usable(memory)}
    row["weights"] = sum(n for kind, n in found.static.items() if kind.startswith("frozen"))
    if device.type != "cuda":
        return row
    h, f, kv = shape.hidden, shape.intermediate, shape.hidden // shape.heads * shape.kv_heads
    layer = sum(packed_bytes(n, k) for n, k in ((h, h), (kv, h), (kv, h), (h, h), (f, h), (f, h), (h, f)))
    held: list[Tensor] = []
    limit(memory, device)
    try:
        held.append(torch.empty(2 * shape.vocabulary * h, dtype=torch.bfloat16, device=device))
        for _ in range(shape.layers):
            held.append(torch.empty(layer, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError as error:
        row["allocation"] = " ".join(str(error).split())[:160]
    finally:
        limit(None, device)
    row["layers_allocated"] = f"{len(held) - 1} of {shape.layers}"
    return row


def limit(memory: int | None, device: torch.device) -> None:
    """Hold PyTorch to a card of so many bytes; None: to nothing."""
    common.release(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if memory is None else (memory - CONTEXT) / total, device)


# ---------------------------------------------------------------------------------------------- main


COLUMNS = {
    "part": lambda row: row["part"],
    "cap": lambda row: row["cap"],
    "bit-equal": lambda row: row["bit_equal"],
    "step ms": lambda row: row["step_ms"],
    "compute ms": lambda row: row["compute_ms"],
    "copy ms": lambda row: row["copy_ms"],
    "overlap": lambda row: row["overlap"],
    "GB/s": lambda row: row["copy_gb_per_s"],
    "moved GB": lambda row: row["moved_bytes"] / common.GB,
    "host GB": lambda row: row["host_bytes"] / common.GB,
    "peak GiB": lambda row: row["peak_allocated"] / 2**30,
    "reserved GiB": lambda row: row["peak_reserved"] / 2**30,
    "made s": lambda row: row["made_s"],
    "first step s": lambda row: row["first_step_s"],
    "estimated GiB": lambda row: row["estimated"] / 2**30,
    "fits": lambda row: row["fits"],
    "allocated": lambda row: row["layers_allocated"],
    "error": lambda row: row["error"],
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=" ".join(PARTS), help=f"of {', '.join((*PARTS, 'tiny'))} (all but tiny)")
    parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
    parser.add_argument("--layouts", default="transient", choices=["cached", "transient"])
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="timed ones")
    parser.add_argument("--equal-shape", default="8b", choices=SHAPES)
    parser.add_argument("--equal-layers", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device(args.device)
    rows = []
    for part in args.parts.split():
        row: dict = {"part": part, "backend": args.backend, "layouts": args.layouts, "seq": args.seq}
        run = {"equal": equal, "70b": lambda *a: too_large("70b", *a)}.get(part, lambda *a, part=part: capped(part, *a))
        common.guarded(row, lambda: row.update(run(args, device)))  # noqa: B023  (runs at once)
        rows.append(row)
        head = {"environment": environment(), "settings": {k: str(v) for k, v in vars(args).items()}}
        common.write(args.out, f"offload_{device.type}", head, rows)
        print(common.table([row], COLUMNS), row.get("status", ""), row.get("traceback", ""), flush=True)
        gc.collect()
        common.release(device)


if __name__ == "__main__":
    main()
