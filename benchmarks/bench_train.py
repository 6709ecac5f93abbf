"""Training steps of LoRA on Llama shapes: time, memory, launches, categories, largest batch, for this package and its baselines.

    python benchmarks/bench_train.py --shapes 1b --cases table --out results --plot        # the table
    python benchmarks/bench_train.py --shapes 1b --cases bf16-liger,nvfp4-paper --largest-batch
    python benchmarks/bench_train.py --shapes tiny --device cpu --seq 32 --cases all        # does it run?

A case is a method and options, joined by dashes: ``nvfp4-paper-transient-ckpt``. Methods: ``bf16`` (transformers + PEFT),
``qlora`` (bitsandbytes Linear4bit + PEFT), ``nvfp4`` (this package, preset balanced). Options: OPTIONS. Protocol: PROTOCOL.md.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ.setdefault("TQDM_MININTERVAL", "30")
import common
import torch
from environment import environment
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from peft_nvfp4 import NVFP4LoraConfig, disable_cuda_graphs, enable_cuda_graphs, graph_status
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.cli._run import profiling

#         hidden, inter, layers, heads, kv heads, head_dim, vocab, tied, RoPE factor
SHAPES = {
    "1b": (2048, 8192, 16, 32, 8, 64, 128256, True, 32.0),
    "3b": (3072, 8192, 28, 24, 8, 128, 128256, True, 32.0),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256, False, 8.0),
    "tiny": (64, 128, 3, 4, 2, 16, 256, True, 32.0),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
R, ALPHA, LABELS = 16, 32, 32
STOCK_ROPE = modeling_llama.apply_rotary_pos_emb  # before anybody puts another in its place

SHARED = {
    "ckpt": "checkpointing of every decoder layer (not reentrant)",
    "compile": "torch.compile of model and loss",
    "graphs": "peft_nvfp4.enable_cuda_graphs: forward and backward of the decoder replayed",
    "graph": "the whole step (forward, backward, optimizer) captured in a CUDA graph",
    "hf": "loss as transformers computes it: logits at all positions (Liger: its fused loss over all positions)",
}
STOCK = {
    "liger": "Liger's RMSNorm, SwiGLU, RoPE and fused linear cross-entropy",
    "lora32": "adapters in FP32, PEFT's default (without it: BF16, which is faster and smaller)",
    "amp": "FP32 adapters under BF16 autocast, as Trainer(bf16=True) runs",
    "ours": "this package's backend of the same name instead of stock PEFT",
    "codes": "this package's backend with activations='nvfp4': kept for backward as codes, the forward pass as it is",
}
OWN = {
    **dict.fromkeys(("paper", "balanced", "high"), "accuracy preset"),
    "transient": "weight_layouts='transient'",
    "noattach": "fused=False: norms and MLPs as they are",
    "recompute": "recompute_mlp=True: the MLP's inner activation made anew in backward",
    "once": "recompute_attention=True: attention's output kept once",
}
OPTIONS = {"bf16": SHARED | STOCK, "qlora": SHARED | STOCK, "nvfp4": SHARED | OWN}
GROUPS = {
    "baselines": "bf16 bf16-hf bf16-lora32 bf16-amp bf16-liger bf16-liger-hf bf16-compile qlora qlora-hf qlora-liger qlora-ours",
    "ours": "nvfp4-paper nvfp4-paper-transient nvfp4 nvfp4-transient nvfp4-high nvfp4-paper-noattach",
    "ckpt": "bf16-ckpt qlora-ckpt nvfp4-paper-ckpt nvfp4-paper-transient-ckpt nvfp4-ckpt",
    "table": "bf16 bf16-hf bf16-liger bf16-compile qlora qlora-liger bf16-ckpt nvfp4-paper nvfp4-paper-transient "
    "nvfp4-paper-ckpt nvfp4 nvfp4-transient nvfp4-ckpt nvfp4-high",
    "graph": "bf16-graph nvfp4-paper-graph nvfp4-graph",
    "graphs": "bf16-graphs nvfp4-paper-graphs nvfp4-paper-transient-graphs nvfp4-graphs",
}
GROUPS["all"] = " ".join(dict.fromkeys(" ".join(GROUPS.values()).split()))


class Case:
    """A parsed name: ``"ckpt" in case`` asks for an option."""

    def __init__(self, name: str):
        self.name = name
        self.method, *options = name.split("-")
        known = OPTIONS.get(self.method, {})
        if not known or not known.keys() >= set(options):
            choice = f"options of {self.method}: {', '.join(known)}" if known else f"methods: {', '.join(OPTIONS)}"
            raise ValueError(f"unknown case {name!r}; {choice}; groups: {', '.join(GROUPS)}")
        self.options = frozenset(options)
        self.accuracy = next((o for o in options if o in ("paper", "balanced", "high")), "balanced")

    def __contains__(self, option: str) -> bool:
        return option in self.options


# ---------------------------------------------------------------------------------------------- models


def dense_model(shape: str, attention: str, device: torch.device) -> LlamaForCausalLM:
    """A Llama of this shape with random BF16 weights, made on the device."""
    hidden, inter, layers, heads, kv, head_dim, vocab, tied, factor = SHAPES[shape]
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        **{"hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": heads},
        **{"num_key_value_heads": kv, "head_dim": head_dim, "vocab_size": vocab, "tie_word_embeddings": tied},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        rope_parameters=rope | {"original_max_position_embeddings": 8192},
    )
    # no entry in transformers' table of mask functions: no mask is made (compiling or capturing, it would make a dense one and
    # lose flash attention) and no synchronisation looks for packed sequences
    ALL_ATTENTION_FUNCTIONS.register("causal", sdpa_attention_forward)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    model.to_empty(device=device).tie_weights()
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0) if p.ndim == 1 else p.normal_(std=0.02)
    return model


def to_bnb(model: LlamaForCausalLM) -> None:
    """Every projection as bitsandbytes' NF4 with double quantisation, as BitsAndBytesConfig makes it."""
    import bitsandbytes as bnb

    for name, linear in list(model.named_modules()):
        if name.rpartition(".")[2] in TARGETS:
            with torch.device("meta"):
                new = bnb.nn.Linear4bit(linear.in_features, linear.out_features, False, torch.bfloat16, True, "nf4")
            weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4")
            new.weight = weight.to(linear.weight.device)
            new.support_avx512bf16_for_cpu = False  # on a CPU it would repack the weight, and lose gradients
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
    model.is_loaded_in_4bit = True


@functools.cache
def _accept_slices() -> None:
    """Liger's loss views the hidden states as a matrix, which a slice of the last positions (logits_to_keep) is not."""
    from liger_kernel.transformers.model import llama

    loss = llama.LigerForCausalLMLoss
    llama.LigerForCausalLMLoss = lambda hidden_states, **rest: loss(hidden_states=hidden_states.contiguous(), **rest)


def build(case: Case, shape: str, attention: str, device: torch.device):
    """(model with adapters, the function that Liger puts in RoPE's place or None, notes)."""
    torch.manual_seed(0)
    model, rope, notes = dense_model(shape, attention, device), None, {}
    if "liger" in case:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        plain = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP
        apply_liger_kernel_to_llama(model=model)
        _accept_slices()
        rope = modeling_llama.apply_rotary_pos_emb
        modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP = plain
    common_fields = {"r": R, "lora_alpha": ALPHA, "target_modules": TARGETS}
    if case.method == "nvfp4":
        layouts = "transient" if "transient" in case else "cached"
        fused = "noattach" not in case
        own = {"weight_layouts": layouts, "fused": fused, "recompute_mlp": "recompute" in case}
        own["recompute_attention"] = "once" in case
        config = NVFP4LoraConfig(**common_fields, accuracy=case.accuracy, **own)
        model = get_peft_model(model, config)
        notes["attach"] = str(model.base_model.nvfp4_report) if fused else "not fused"
    elif {"ours", "codes"} & case.options:
        kept = "nvfp4" if "codes" in case else "bf16"
        backend = "nf4" if case.method == "qlora" else "bf16"
        model = get_peft_model(model, NVFP4LoraConfig(**common_fields, backend=backend, activations=kept))
    else:
        if case.method == "qlora":
            to_bnb(model)
        model = get_peft_model(model, LoraConfig(**common_fields))
        for p in model.parameters():
            if p.requires_grad and not {"lora32", "amp"} & case.options:
                p.data = p.data.to(torch.bfloat16)
    if "graphs" in case:
        enable_cuda_graphs(model)
    if "ckpt" in case:
        model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(), rope, notes


class Trainer:
    """One case, ready to step on a batch of fixed shape."""

    def __init__(self, case: Case, shape: str, args: argparse.Namespace):
        self.case, self.device, self.graph = case, args.device, None
        self.model, self.rope, self.notes = build(case, shape, args.attention, args.device)
        cuda = self.device.type == "cuda"
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(params, lr=1e-4, fused=cuda, capturable=cuda and "graph" in case)
        self.vocab, self.layers = SHAPES[shape][6], self.model.get_base_model().model.layers
        model = self.model
        self.forward = (
            (lambda **inputs: model(**inputs).loss)
            if "compile" not in case
            else torch.compile(lambda **inputs: model(**inputs).loss)
        )

    def set_batch(self, batch: int, seq: int) -> None:
        self.graph = None
        ids = torch.randint(self.vocab, (batch, seq), generator=torch.Generator().manual_seed(0)).to(self.device)
        n = min(LABELS, seq // 2)
        if "hf" in self.case:
            labels = ids.clone()
            labels[:, :-n] = -100
            self.inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
        else:  # the same loss: of n + 1 logits, the last predicts nothing
            self.inputs = {"input_ids": ids, "labels": ids[:, -n - 1 :].clone(), "logits_to_keep": n + 1, "use_cache": False}

    @contextmanager
    def context(self):
        """Autocast, and the rotary embedding of the case: transformers looks it up in a module, where this package and Liger put
        theirs for the whole process."""
        now = modeling_llama.apply_rotary_pos_emb
        with ExitStack() as stack:
            if self.case.method != "nvfp4" and "codes" not in self.case:
                modeling_llama.apply_rotary_pos_emb = self.rope or STOCK_ROPE
                stack.callback(setattr, modeling_llama, "apply_rotary_pos_emb", now)
            if "amp" in self.case:
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            yield

    def loss(self) -> torch.Tensor:
        with self.context():
            return self.forward(**self.inputs)

    def eager_step(self) -> None:
        with self.context():
            self.forward(**self.inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.graph.replay() if self.graph is not None else self.eager_step()

    def clear(self) -> None:
        """Give back what steps of other batches left: gradients, and recordings, which hold their memory."""
        self.graph = None
        self.optimizer.zero_grad(set_to_none=True)
        if "graphs" in self.case:
            disable_cuda_graphs(self.model)
            enable_cuda_graphs(self.model)
        common.release(self.device)

    def prepare(self, batch: int, seq: int, warmup: int) -> None:
        """Inputs of this shape and warm-up steps (on a side stream before a capture, as PyTorch asks for)."""
        self.set_batch(batch, seq)
        with ExitStack() as stack:
            if "graph" in self.case:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                stack.enter_context(torch.cuda.stream(side))
            for _ in range(warmup):
                self.eager_step()
        common.synchronize(self.device)

    def capture(self) -> None:
        """Capture the step in a CUDA graph where the case asks for it; otherwise two steps."""
        if "graph" not in self.case:
            for _ in range(2):
                self.step()
            return
        common.release(self.device)  # of the side stream's blocks
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.eager_step()


# ---------------------------------------------------------------------------------------------- measures


def measure(trainer: Trainer, args: argparse.Namespace, before: dict[str, int]) -> dict:
    """Everything but the step time, which :func:`run_shape` takes with all cases in turn."""
    breaks = counters["graph_break"].total()
    # a graph's replay allocates nothing: the peak is that of its capture
    prepare = functools.partial(trainer.prepare, args.batch, args.seq, args.warmup)
    row = common.peak_memory(prepare, args.device, before)
    if "graphs" not in trainer.case:
        row = common.peak_memory(trainer.capture, args.device, before)
    row["host_ms"] = common.host_ms(trainer.step, args.device)
    times = profiling.breakdown(trainer.step, args.device)
    row |= {key: value for key, value in times.items() if key not in ("times_ms", "total_ms")}
    if "compile" in trainer.case:
        row["graph_breaks"] = counters["graph_break"].total() - breaks
    elif "graphs" in trainer.case:
        row["graphs"] = str(graph_status(trainer.model))
    elif "graph" not in trainer.case:  # another sequence length would compile or capture anew

        def forward_at(seq: int):
            trainer.set_batch(args.batch, seq)
            return trainer.loss

        seqs = (args.seq // 2, args.seq)
        row |= common.saved_bytes(trainer.model, trainer.layers, forward_at, seqs, args.batch, args.device)
        trainer.set_batch(args.batch, args.seq)
    common.release(args.device)
    held = common.allocated(args.device) - before["allocated"]
    row["held_outside_model"] = held - common.owned_bytes(trainer.model, trainer.optimizer, trainer.inputs.values())
    row["side_table"] = activation_cache.live()
    return row


def attempt(trainer: Trainer, batch: int, seq: int, device: torch.device) -> bool:
    """Whether four steps of this batch fit, starting from what a fresh model holds."""
    trainer.clear()
    return common.fits(lambda: (trainer.prepare(batch, seq, 2), trainer.capture()), device)


@contextmanager
def capped(gib: float, device: torch.device):
    """So much memory for PyTorch's allocator; a CUDA context comes on top. Without a GPU nothing happens."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def at_largest(trainer: Trainer, best: int, seq: int, device: torch.device) -> dict:
    """Peak and speed at the largest batch that fits."""
    again: list[bool] = []
    run = lambda: again.append(attempt(trainer, best, seq, device))
    row = common.peak_memory(run, device, {"allocated": 0, "reserved": 0})
    if again[0]:
        row |= common.speed(common.summary([common.burst(trainer.step, 3, device)]), best * seq)
    return row


def largest_batch(trainer: Trainer, args: argparse.Namespace) -> dict:
    """Largest batch under the memory cap, and the speed there."""
    with capped(args.cap_gib, args.device):
        best = common.largest_fitting(lambda batch: attempt(trainer, batch, args.seq, args.device), args.max_batch)
        row = {"largest_batch": best, "cap_gib": args.cap_gib}
        return row | at_largest(trainer, best, args.seq, args.device) if best else row


def check_checkpointing(trainer: Trainer, args: argparse.Namespace) -> dict:
    """Are the gradients the same bits with checkpointing? And simply again? (Deterministic algorithms on.)"""
    trainer.prepare(args.batch, args.seq, 2)  # makes B nonzero
    torch.use_deterministic_algorithms(True)  # with warn_only, flash attention's backward keeps its atomic additions
    backend = [SDPBackend.FLASH_ATTENTION] if args.device.type == "cuda" else [SDPBackend.MATH]  # cuDNN's backward varies

    def gradients() -> list[torch.Tensor]:
        trainer.optimizer.zero_grad(set_to_none=True)
        with trainer.context(), sdpa_kernel(backend):
            trainer.loss().backward()
        return [p.grad for p in trainer.model.parameters() if p.requires_grad]

    try:
        first, again = gradients(), gradients()
        trainer.model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        other = gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    return {"equal_again": all(map(torch.equal, first, again)), "equal_checkpointed": all(map(torch.equal, first, other))}


def run_case(case: Case, shape: str, args: argparse.Namespace, row: dict, residents: dict[str, Trainer]) -> None:
    """Fill a case's row; keep its model for the timing at the end, or take the time at once where memory is short."""
    before = common.memory_now(args.device)
    start = time.perf_counter()
    trainer = Trainer(case, shape, args)
    common.synchronize(args.device)
    row |= {"build_s": time.perf_counter() - start} | trainer.notes
    if args.largest_batch:
        row |= largest_batch(trainer, args)
    elif args.check_checkpointing:
        row |= check_checkpointing(trainer, args)
    else:
        row |= measure(trainer, args, before)
        if not args.sequential and (args.device.type == "cpu" or common.allocated(args.device) < args.resident):
            residents[case.name] = trainer
        else:
            timed = common.interleaved({case.name: trainer.step}, args.rounds, args.burst, args.device)[case.name]
            row |= common.speed(timed, args.batch * args.seq)
            row["timed"] = "alone"


def run_shape(shape: str, cases: list[Case], args: argparse.Namespace, rows: list[dict], save) -> None:
    """All cases of one shape: first each by itself, then the timing of those that fit into memory together, interleaved."""
    residents: dict[str, Trainer] = {}
    own = {}
    for case in cases:
        loss = "all positions" if "hf" in case else "supervised positions"
        row = own[case.name] = {"shape": shape, "case": case.name, "loss": loss, "batch": args.batch, "seq": args.seq}
        rows.append(row)
        common.guarded(row, lambda: run_case(case, shape, args, row, residents))
        common.release(args.device)
        print(f"  {shape} {case.name}: {row.get('error', 'ok')}", flush=True)
        save()
    held = common.memory_now(args.device)["allocated"]
    steps = {name: trainer.step for name, trainer in residents.items()}
    for name, timed in common.interleaved(steps, args.rounds, args.burst, args.device).items():
        own[name] |= common.speed(timed, args.batch * args.seq) | {"timed": "interleaved"}
    if residents:
        growth = common.memory_now(args.device)["allocated"] - held
        print(f"  {shape}: memory grew by {growth} bytes over {args.rounds * (args.burst + 1)} steps of each case")
    steps.clear(), residents.clear()
    alone = [row for row in own.values() if row.get("timed") == "alone"]
    if alone:  # what changed meanwhile: the first of them again
        again = {}
        common.guarded(again, lambda: run_case(Case(alone[0]["case"]), shape, args, again, {}))
        alone[0]["step_ms_again"] = again.get("step_ms")
    save()


# ---------------------------------------------------------------------------------------------- report


def expected_saved(case: Case, shape: str) -> float | None:
    """Bytes per token and layer that the design allows for (27,880 for the paper preset on Llama-1B)."""
    if case.method != "nvfp4" or {"noattach", "ckpt", "compile", "graph", "graphs"} & case.options:
        return None
    d, f, _, heads, kv, head_dim, *_ = SHAPES[shape]
    q, k = heads * head_dim, kv * head_dim
    norm, interior = {"paper": (1, 1), "balanced": (2, 1), "high": (2, 2)}[case.accuracy]
    nvfp4 = norm * 2 * d + interior * (q + (0 if "recompute" in case else f)) + 2 * f
    return nvfp4 * 9 / 16 + 2 * (2 * q + 2 * k) + 2 * 7 * R + 4 * heads + 8


COLUMNS = {
    "case": lambda r: f"{r['shape']} {r['case']}",
    "step ms": lambda r: r["step_ms"],
    "min": lambda r: r["step_min_ms"],
    "spread": lambda r: r["spread_ms"],
    "again": lambda r: r["step_ms_again"],
    "tokens/s": lambda r: r["tokens_per_s"],
    "host ms": lambda r: r["host_ms"],
    "launches": lambda r: r["launches"],
    "peak GB": lambda r: r["peak_allocated"] / common.GB,
    "reserved": lambda r: r["peak_reserved"] / common.GB,
    "saved B": lambda r: r["saved_counted"],
    "allocator": lambda r: r["saved_allocator"],
    "design": lambda r: expected_saved(Case(r["case"]), r["shape"]),
    "batch": lambda r: r["largest_batch"],
    "=again": lambda r: r["equal_again"],
    "=ckpt": lambda r: r["equal_checkpointed"],
    "breaks": lambda r: r["graph_breaks"],
    "cached MB": lambda r: r["held_outside_model"] / 1e6,
    "side": lambda r: r["side_table"],
}
BREAKDOWN = {"case": COLUMNS["case"]} | {c: (lambda r, c=c: r["device_ms"][c]) for c in profiling.CATEGORIES}
BREAKDOWN |= {"device ms": lambda r: r["device_total_ms"], "profiled host ms": lambda r: r["profiled_host_ms"]}


def verdicts(rows: list[dict]) -> list[str]:
    """Targets for Llama-1B at 4 x 1024, as far as their cases were run."""
    rows = [r for r in rows if r["shape"] == "1b" and "error" not in r]
    rows = [r for r in rows if "largest_batch" in r or (r["batch"], r["seq"]) == (4, 1024)]
    lines = []

    def least(key: str, words: str, without: str) -> float | None:
        """Least value over the cases with all of these words in their names and none of those."""
        names = [set(row["case"].split("-")) for row in rows]
        chosen = [r for r, n in zip(rows, names) if n >= set(words.split()) and not n & set(without.split())]
        alike = [r for r in chosen if (key == "largest_batch") == ("largest_batch" in r)]
        return min((r[key] for r in alike if r.get(key) is not None), default=None)

    def check(text: str, value: float | None, limit: float | None, met: bool | None = None) -> None:
        if value is not None and limit is not None:
            met = value <= limit if met is None else met
            lines.append(f"{'met   ' if met else 'MISSED'} {text}: {value:,.2f} against {limit:,.2f}")

    eager = least("step_ms", "bf16", "ckpt hf graph compile liger lora32 amp ours")
    qlora = least("step_ms", "qlora", "ckpt hf")
    for preset, words, other in (("paper", "nvfp4 paper", ""), ("balanced", "nvfp4", "paper high")):
        step = least("step_ms", words, f"ckpt noattach hf {other}")
        check(f"{preset}: step ms, compiled BF16", step, least("step_ms", "bf16 compile", "ckpt hf"))
        check(f"{preset}: step ms, 0.6 x eager BF16", step, eager and 0.6 * eager)
        check(f"{preset}: step ms, half of the fastest QLoRA", step, qlora and qlora / 2)
        check(f"{preset}: step ms, the aim", step, 45.0)
        for word, without, limit in (("", "ckpt transient", 3.8), ("transient", "ckpt", 3.3), ("ckpt", "", 2.2)):
            peak = least("peak_allocated", f"{words} {word}", f"noattach hf {without} {other}")
            check(f"{preset}: peak GB, {word or 'cached'}", peak and peak / common.GB, limit)
    saved = least("saved_counted", "nvfp4 paper", "ckpt noattach")
    check("paper: saved bytes, within 3 %", saved, 27880.0, saved and abs(saved / 27880 - 1) < 0.03)
    batch = least("largest_batch", "nvfp4 paper", "ckpt noattach transient")
    check("paper: largest batch, at least", batch, 26.0, batch and batch >= 26)
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1b", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--cases", default="table", help=f"comma-separated cases and groups ({', '.join(GROUPS)})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="times each case's turn comes; each: 1 + burst steps")
    parser.add_argument("--burst", type=int, default=5)
    parser.add_argument("--sequential", action="store_true", help="time every case alone; the first one again at the end")
    parser.add_argument("--attention", default="causal", choices=("causal", "sdpa"), help="sdpa: with transformers' mask code")
    parser.add_argument("--largest-batch", action="store_true", help="search it under --cap-gib instead of measuring --batch")
    parser.add_argument("--cap-gib", type=float, default=16.0)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--check-checkpointing", action="store_true", help="compare gradients instead of measuring")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--label", help="name of the files written (default: train-SHAPES)")
    parser.add_argument("--plot", action="store_true", help="draw a PNG as well")
    args = parser.parse_args()
    args.label = args.label or f"train-{args.shapes.replace(',', '-')}" + "-largest" * args.largest_batch
    args.shapes = args.shapes.split(",")
    names = " ".join(GROUPS.get(name, name) for name in args.cases.split(",")).split()
    try:
        args.cases = [Case(name) for name in dict.fromkeys(names)]
    except ValueError as error:
        parser.error(str(error))
    if args.device.type == "cuda" and args.device.index is None:
        args.device = torch.device("cuda", torch.cuda.current_device())
    args.resident = torch.cuda.get_device_properties(args.device).total_memory // 2 if args.device.type == "cuda" else 0
    return args


def main() -> None:
    args = arguments()
    if args.check_checkpointing:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once
    warnings.filterwarnings("ignore", category=FutureWarning)
    settings = {k: str(v) for k, v in vars(args).items() if k != "cases"}
    head = {"environment": environment() | common.liger_version(), "settings": settings}
    rows: list[dict] = []
    for shape in args.shapes:
        run_shape(shape, args.cases, args, rows, lambda: common.write(args.out, args.label, head, rows))
    failures = [f"FAILED {row['shape']} {row['case']}: {row['error']}" for row in rows if "error" in row]
    for columns in (COLUMNS, BREAKDOWN):
        print(common.table(rows, columns))
    print("\n".join(["", *verdicts(rows), *failures]))
    if args.plot:
        common.plot(rows, args.out / f"{args.label}.png")


if __name__ == "__main__":
    main()
