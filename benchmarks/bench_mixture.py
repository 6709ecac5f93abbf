"""A training step of a whole mixture of experts under a cap on the GPU's memory, beside dense BF16 experts without one.

    python benchmarks/bench_mixture.py qwen3-30b-a3b:small:24:paged_adamw_8bit qwen3-30b-a3b:dense
    python benchmarks/bench_mixture.py qwen3-30b-a3b:smallest:16 qwen3-30b-a3b:smallest:12:adamw_8bit gpt-oss-20b:smallest:16
    python benchmarks/bench_mixture.py tiny:small:1 tiny:dense tiny:smallest:1 tiny-gpt-oss:small:1 --device cpu    # does it run?

A case is SHAPE:MEMORY and, in any order, a cap in GiB, an optimizer (adamw_torch_fused, adamw_8bit, paged_adamw_8bit), ``bf16``
(adapters in BF16 instead of FP32) and ``eager`` (without CUDA graphs). MEMORY is a word of NVFP4LoraConfig's ``memory``, or
``dense``: the baseline, transformers' ``grouped_mm`` experts with stock PEFT, adapters in BF16, which it computes faster.

LoRA r=16 on attention and on both projections of all experts (``target_parameters``), batch 1, labels at every token, gradient
checkpointing, random weights. One decoder layer is made and frozen; the others are copies of it, in memory of their own, so that
a model of 30 billion weights is made in seconds and is never there in BF16 (the baseline's is). Models are made before the cap,
which holds PyTorch's allocator: a CUDA context comes on top, and so does what a paged optimizer keeps in managed memory.

Adapters on all experts are 0.6 billion parameters in Qwen3-30B-A3B: with AdamW in FP32 10 GB, beside 18 GB of frozen weights and
embeddings. So 24 GiB take an optimizer in 8 bits or adapters in BF16, or weights on the host.

Writes ``mixture_<gpu>.json``, and prints each row at once: median seconds of a step, tokens a second, the measured peak and the
estimator's of the same step, what was recorded, what was on the host. A recorded step allocates nothing, and its memory is what
the allocator has reserved.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from typing import NamedTuple

import common
import torch
from bench_offload import timed
from environment import environment
from llama_cases import fill
from measure_peaks import workspace
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, Qwen3MoeConfig

from peft_nvfp4 import (
    NVFP4LoraConfig,
    disable_cuda_graphs,
    freeze_model,
    frozen_bytes,
    graph_status,
    host_checkpoint_status,
)
from peft_nvfp4.memory import Estimate, Settings, estimate
from peft_nvfp4.training.offload.enable import offload_status
from peft_nvfp4.training.packing import packing_status

RANK, ALPHA, WARM_UP = 16, 32, 2
OPTIMIZERS = ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit")
ATTENTION, EXPERTS = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_up_proj", "down_proj"]


def qwen3_moe(**sizes: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**sizes, norm_topk_prob=True, decoder_sparse_step=1, tie_word_embeddings=False)


SHAPES = {
    "qwen3-30b-a3b": qwen3_moe(
        **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
        **{"num_experts": 128, "num_experts_per_tok": 8},
    ),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "tiny": qwen3_moe(
        **{"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "tiny-gpt-oss": GptOssConfig(
        **{"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}


class Case(NamedTuple):
    """A case of the command line."""

    shape: str
    memory: str  # or "dense"
    cap: float | None = None  # GiB
    optimizer: str = "adamw_torch_fused"
    bf16: bool = False
    eager: bool = False
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> Case:
        shape, memory, *words = text.split(":")
        fields: dict = {"bf16": memory == "dense", "text": text}
        for word in words:
            if word in ("bf16", "eager"):
                fields[word] = True
            elif word in OPTIMIZERS:
                fields["optimizer"] = word
            else:
                fields["cap"] = float(word)
        return cls(shape, memory, **fields)

    @property
    def model(self) -> Case:
        """What cases of one model have in common: it is made once."""
        return self._replace(cap=None, optimizer="adamw_torch_fused", text="")

    def settings(self, accuracy: str) -> Settings:
        """For the estimator."""
        dense = self.memory == "dense"
        base = {"backend": "bf16"} if dense else {"memory": self.memory, "accuracy": accuracy}
        return Settings(
            **base,
            rank=RANK,
            targets=(*ATTENTION, *EXPERTS),
            checkpointing=True,
            optimizer=self.optimizer,
            adapter_bytes=2 if self.bf16 else 4,
            loss="full" if dense else "supervised",
        )


# ---------------------------------------------------------------------------------------------- models


def made_by_layers(config: PreTrainedConfig, frozen: dict | None, device: torch.device) -> nn.Module:
    """A model with random weights, made on the device a layer at a time. ``frozen``: options with which its layers are frozen."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    decoder, first = model.model, model.model.layers[0]
    fill(first, device)
    if frozen is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            freeze_model(first, "nvfp4", **frozen, progress=False)
    for i, layer in enumerate(decoder.layers[1:], 1):
        decoder.layers[i] = copy.deepcopy(first)
        for name in ("layer_idx", "layer_type", "sliding_window"):  # what layers differ in besides weights
            if hasattr(layer.self_attn, name):
                setattr(decoder.layers[i].self_attn, name, getattr(layer.self_attn, name))
    for part in (decoder.embed_tokens, decoder.norm, model.lm_head):
        fill(part, device)
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)
    model.config.use_cache = False
    return model


def build(case: Case, accuracy: str, device: torch.device) -> nn.Module:
    """With adapters, on the device (but for weights on the host), ready to be trained."""
    torch.manual_seed(0)
    config, lora = copy.deepcopy(SHAPES[case.shape]), {"r": RANK, "lora_alpha": ALPHA, "target_modules": ATTENTION}
    lora |= {"target_parameters": [f"mlp.experts.{name}" for name in EXPERTS], "task_type": "CAUSAL_LM"}
    if case.memory == "dense":
        config._experts_implementation = "grouped_mm"
        base, lora_config = made_by_layers(config, None, device), LoraConfig(**lora)
    else:
        layouts = "cached" if case.memory == "fast" else "transient"
        base = made_by_layers(config, {"accuracy": accuracy, "weight_layouts": layouts}, device)
        lora_config = NVFP4LoraConfig(**lora, accuracy=accuracy, memory=case.memory)
    with device:  # PEFT draws a billion random numbers, on the host if nobody says otherwise
        model = get_peft_model(base, lora_config)
    if case.bf16:
        for p in model.parameters():
            p.data = p.data.bfloat16() if p.requires_grad else p.data
    if case.eager:
        disable_cuda_graphs(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


# ---------------------------------------------------------------------------------------------- steps


def optimizer_of(name: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if not name.endswith("8bit"):
        return torch.optim.AdamW(parameters, lr=1e-4, fused=parameters[0].is_cuda)
    import bitsandbytes as bnb

    kind = bnb.optim.PagedAdamW8bit if name.startswith("paged") else bnb.optim.AdamW8bit
    return kind(parameters, lr=1e-4)


def measure(row: dict, model: nn.Module, case: Case, args: argparse.Namespace, before: dict[str, int]) -> None:
    """Steps under the cap; what is known so far is in the row when memory runs out."""
    device = args.device
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(case.optimizer, trained)
    ids = torch.randint(5, model.config.vocab_size, (1, args.tokens), generator=torch.Generator().manual_seed(2)).to(device)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        row.setdefault("loss", []).append(loss.detach())

    row["first_steps_s"] = [ms / 1e3 for ms in timed(step, WARM_UP, device)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [ms / 1e3 for ms in timed(step, args.steps, device)]
    row |= {"seconds": statistics.median(seconds), "steps_s": seconds, "tokens_per_s": args.tokens / statistics.median(seconds)}
    row["loss"] = [loss.item() for loss in row["loss"]]
    if device.type == "cuda":
        row["allocated"] = torch.cuda.max_memory_allocated(device) - before["allocated"]
        row["reserved"] = torch.cuda.max_memory_reserved(device) - before["reserved"]
        row["peak"] = row["reserved" if graph_status(model).graphs else "allocated"]


def estimated(model: nn.Module, case: Case, args: argparse.Namespace) -> Estimate:
    """Of the step as it ran."""
    settings = vars(case.settings(args.accuracy)) | {
        "sequence": args.tokens,
        "workspace": args.workspace,
        "cuda_graphs": bool(graph_status(model).graphs),
        "host_checkpoints": host_checkpoint_status(model).passes > 0,
    }
    return estimate(SHAPES[case.shape], Settings(**settings))


def run_case(case: Case, model: nn.Module, args: argparse.Namespace, before: dict[str, int]) -> dict:
    """A row."""
    row: dict = {**case._asdict(), "tokens": args.tokens}
    row |= {"frozen_bytes": frozen_bytes(model), "trained": sum(p.numel() for p in model.parameters() if p.requires_grad)}
    common.release(args.device)  # what was there while the model was made
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(args.device)
    cap = case.cap or common.total_memory(args.device) / 2**30
    with common.capped(cap, args.device):
        step = lambda: measure(row, model, case, args, before)
        common.guarded(row, lambda: row.update(fits=common.fits(step, args.device)))
    if not row.get("fits"):  # how far it came
        row["loss"] = [float(loss) for loss in row.get("loss", [])]
        row["peak"] = torch.cuda.max_memory_allocated(args.device) if args.device.type == "cuda" else None
    found: dict = {}
    common.guarded(found, lambda: found.update(of=estimated(model, case, args)))
    if "of" in found:
        row |= {"estimate": found["of"].peak, "estimate_at": found["of"].at, "estimate_groups": found["of"].groups()}
        row |= {"estimate_categories": found["of"].categories(), "estimate_host": found["of"].host}
    else:
        row["estimate_error"] = found["error"]
    if row.get("peak") and row.get("estimate"):
        row["estimate_over_peak"] = round(row["estimate"] / row["peak"], 4)
    row |= {"recordings": str(graph_status(model)).splitlines(), "packing": str(packing_status(model)).splitlines()}
    row |= {"offload": str(offload_status(model)), "host_checkpoints": str(host_checkpoint_status(model))}
    model.zero_grad()
    return row


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("cases", nargs="+", type=Case.parse)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4, help="timed ones")
    parser.add_argument("--accuracy", default="balanced", choices=["paper", "balanced", "high"])
    parser.add_argument("--label", default="mixture")
    args, rows = parser.parse_args(), []
    args.workspace = workspace(args.device)
    path = args.out / f"{args.label}_{'h200' if args.device.type == 'cuda' else 'cpu'}.json"
    for kind in dict.fromkeys(case.model for case in args.cases):
        before, start, made = common.memory_now(args.device), time.perf_counter(), {}
        common.guarded(made, lambda: made.update(model=build(kind, args.accuracy, args.device)))  # noqa: B023  at once
        seconds = {"made_s": round(time.perf_counter() - start, 2)}
        for case in (case for case in args.cases if case.model == kind):
            row = run_case(case, made["model"], args, before) if "model" in made else case._asdict() | made
            rows.append(row | seconds)
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "traceback"}), flush=True)
            common.write_json(path, {"environment": environment(), "rows": rows})
            common.release(args.device)
        made.clear()
        common.release(args.device)


if __name__ == "__main__":
    main()
