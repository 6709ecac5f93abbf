"""Models larger than the card: ``peft_nvfp4.enable_offload`` under a cap on the GPU's memory.

    python benchmarks/bench_offload.py                               # on an H200: about two minutes, 30 GB of the host's memory
    python benchmarks/bench_offload.py --parts tiny --device cpu     # does it run?

Parts:

    equal   some layers of 8B, with and without offload: losses and adapters after two steps, bit for bit
    8b      Llama-8B's shape under 6 GiB
    30b     60 layers, hidden 6656, intermediate 17920, 52 heads, vocabulary 32000, under 16 GiB

A model is made layer by layer on the GPU, before the cap: random weights, frozen, moved to the host; no copy of the whole in BF16
exists anywhere. The cap holds PyTorch's allocator to so many bytes less what CUDA takes (``peft_nvfp4.memory.settings.CONTEXT``).

Times are of a step of 1 x 512 tokens with checkpointing (so most layers are fetched twice). ``compute``: the same step while the
copies are left out (layers compute with whatever is in the buffers). ``copy``: the copies of a step one after the other with
nothing else running. ``overlap``: (compute + copy - step) / min(compute, copy), 1 if the shorter of the two is hidden entirely.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial

import common
import torch
from llama_cases import R, fill, last_positions, llama_config
from peft import get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from peft_nvfp4 import NVFP4LoraConfig, enable_offload, freeze_model
from peft_nvfp4.memory.settings import CONTEXT
from peft_nvfp4.training.offload.enable import _owner, offload_status
from peft_nvfp4.training.offload.transfers import Offload

ACCURACY, LAYOUTS = "balanced", "transient"
CAPS = {"tiny": 1, "8b": 6, "30b": 16}
"""Shape of ``llama_cases.py`` -> GiB of the card."""
PARTS = ("equal", "8b", "30b")


# ---------------------------------------------------------------------------------------------- models


def made_by_layers(config: LlamaConfig, backend: str, device: torch.device, home: str) -> nn.Module:
    """A model with random weights whose decoder layers are frozen one at a time, and wait in ``home``."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    for layer in model.model.layers:
        fill(layer, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            freeze_model(layer, backend, accuracy=ACCURACY, weight_layouts=LAYOUTS, progress=False)
        layer.to(home)
    for part in (model.model.embed_tokens, model.model.norm, model.lm_head):
        fill(part, device)
        part.to(home)
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config).to(home)
    model.config.use_cache = False
    return model


def tuned(base: nn.Module, backend: str, offload: bool, device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    settings = {"r": R, "lora_alpha": 2 * R, "target_modules": "all-linear", "backend": backend}
    model = get_peft_model(base, NVFP4LoraConfig(**settings, accuracy=ACCURACY))  # of the layouts that the base has
    if offload:
        enable_offload(model)
    model.to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


class Run:
    """A model with its optimizer and batch."""

    def __init__(self, model: nn.Module, seq: int, device: torch.device):
        self.model = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
        ids = torch.randint(model.config.vocab_size, (1, seq), generator=torch.Generator().manual_seed(2)).to(device)
        self.inputs = last_positions(ids)

    def step(self) -> Tensor:
        loss = self.model(**self.inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


# ---------------------------------------------------------------------------------------------- parts


def equal(args: argparse.Namespace, device: torch.device) -> dict:
    """The same bits with and without."""
    config, found = llama_config(args.equal_shape, args.equal_layers), []
    for offload in (False, True):
        torch.manual_seed(0)
        home = "cpu" if offload else str(device)
        base = made_by_layers(config, args.backend, device, home)
        run = Run(tuned(base, args.backend, offload, device), args.seq, device)
        losses = [run.step().item() for _ in range(2)]
        found.append((losses, [p.detach().cpu() for p in run.model.parameters() if p.requires_grad]))
        del base, run
        common.release(device)
    (losses, adapters), (others, theirs) = found
    same = losses == others and all(map(torch.equal, adapters, theirs))
    return {"layers": args.equal_layers, "losses": losses, "losses_offloaded": others, "bit_equal": same}


def under_cap(name: str, args: argparse.Namespace, device: torch.device) -> dict:
    """A step under the shape's cap."""
    config, start = llama_config(name), time.perf_counter()
    torch.manual_seed(0)
    base = made_by_layers(config, args.backend, device, "cpu")
    common.release(device)
    row = {"cap": f"{CAPS[name]}GiB", "layers": config.num_hidden_layers, "made_s": time.perf_counter() - start}
    with common.capped(CAPS[name], device, CONTEXT):
        start = time.perf_counter()
        run = Run(tuned(base, args.backend, True, device), args.seq, device)
        row["loss"] = [run.step().item()]  # kernels are compiled, pages are locked, the optimizer's state is made
        row["first_step_s"] = time.perf_counter() - start
        before, times = offload_status(run.model), []
        nothing = {"allocated": 0, "reserved": 0}
        row |= common.peak_memory(lambda: times.extend(timed(run.step, args.steps, device)), device, nothing)
        row |= common.summary([times])
        after, owner = offload_status(run.model), _owner(run.model)
        row["moved_bytes"] = (after.moved_bytes - before.moved_bytes) // args.steps
        row["ahead"] = (after.ahead - before.ahead) / max(1, after.copies - before.copies)
        row |= {"host_bytes": after.host_bytes, "pinned": after.pinned, "waited": 1 - after.overlap, "status": str(after)}
        row["copy_ms"] = copy_alone(owner, row["moved_bytes"], device)
        row["compute_ms"] = compute_alone(owner, run, args.steps, device)
        shorter = min(row["copy_ms"], row["compute_ms"])
        row["overlap"] = (row["copy_ms"] + row["compute_ms"] - row["step_ms"]) / shorter
        row["copy_gb_per_s"] = row["moved_bytes"] / row["copy_ms"] / 1e6
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
    "error": lambda row: row["error"],
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", default=" ".join(PARTS), help=f"of {', '.join((*PARTS, 'tiny'))} (all but tiny)")
    parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="timed ones")
    parser.add_argument("--equal-shape", default="8b", choices=CAPS)
    parser.add_argument("--equal-layers", type=int, default=4)
    args, rows = parser.parse_args(), []
    for part in args.parts.split():
        row: dict = {"part": part, "backend": args.backend, "seq": args.seq}
        run = equal if part == "equal" else partial(under_cap, part)
        common.guarded(row, lambda: row.update(run(args, args.device)))  # noqa: B023  (runs at once)
        rows.append(row)
        common.write(args, f"offload_{args.device.type}", rows)
        print(common.table([row], COLUMNS), row.get("status", ""), row.get("traceback", ""), flush=True)
        common.release(args.device)


if __name__ == "__main__":
    main()
