"""The models that ``bench_train.py`` and others step: Llama shapes with random weights, LoRA of this package and of baselines.

A case is a method and options, joined by dashes: ``nvfp4-paper-transient-ckpt``. Methods: ``bf16`` (transformers + PEFT),
``qlora`` (bitsandbytes Linear4bit + PEFT), ``nvfp4`` (this package, preset balanced). Options: OPTIONS.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import common
import torch
from low_level import adapted_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from peft_nvfp4 import disable_cuda_graphs, enable_cuda_graphs
from peft_nvfp4.memory import Settings
from peft_nvfp4.nn.frozen_linear import FrozenOptions
from peft_nvfp4.training.steps import slow_down_steps

#         hidden, inter, layers, heads, kv heads, head_dim, vocab, tied, RoPE factor
SHAPES = {
    "1b": (2048, 8192, 16, 32, 8, 64, 128256, True, 32.0),
    "3b": (3072, 8192, 28, 24, 8, 128, 128256, True, 32.0),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256, False, 8.0),
    "30b": (6656, 17920, 60, 52, 52, 128, 32000, False, 8.0),
    "32b": (5120, 25600, 64, 64, 8, 128, 151936, False, 8.0),  # Qwen3's widths
    "70b": (8192, 28672, 80, 64, 8, 128, 128256, False, 8.0),
    "tiny": (64, 128, 3, 4, 2, 16, 256, True, 32.0),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
R, ALPHA, LABELS = 16, 32, 32
STOCK_ROPE = modeling_llama.apply_rotary_pos_emb  # before anybody puts another in its place

SHARED = {
    "ckpt": "checkpointing of every decoder layer (not reentrant)",
    "compile": "torch.compile of model and loss",
    "graphs": "peft_nvfp4.enable_cuda_graphs: forward and backward of the decoder replayed",
}
STOCK = {
    "liger": "Liger's RMSNorm, SwiGLU, RoPE and fused linear cross-entropy",
    "ours": "this package's backend of the same name instead of stock PEFT",
    "codes": "this package's backend with activations='nvfp4': kept for backward as codes, the forward pass as it is",
}
OWN = {
    **dict.fromkeys(("paper", "balanced", "high"), "accuracy preset"),
    "transient": "weight_layouts='transient': one layout of a weight; with recompute it is memory='small'",
    "recompute": "recompute_mlp=True: the MLP's inner activation recomputed in backward",
    "once": "attention's output is kept once: always so by now, the word stays in the names of older results",
}
OPTIONS = {"bf16": SHARED | STOCK, "qlora": SHARED | STOCK, "nvfp4": SHARED | OWN}
GROUPS = {
    "baselines": "bf16 bf16-liger bf16-compile qlora qlora-liger qlora-ours bf16-codes bf16-ckpt qlora-ckpt",
    "ours": "nvfp4-paper nvfp4-paper-transient nvfp4 nvfp4-transient nvfp4-high nvfp4-paper-ckpt nvfp4-ckpt",
    "graphs": "bf16-graphs nvfp4-paper-graphs nvfp4-paper-transient-recompute-once-graphs nvfp4-graphs nvfp4-high-graphs",
}
GROUPS["all"] = " ".join(GROUPS.values())


class OneLayout(Settings):
    """For the estimator: ``memory="small"`` of NVFP4 weights, with nothing recomputed."""

    recompute_mlp = False


class Recomputed(Settings):
    """For the estimator: ``memory="small"`` of NVFP4 weights, with both layouts kept."""

    frozen = FrozenOptions()


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

    @property
    def stock(self) -> bool:
        """Without this package."""
        return self.method != "nvfp4" and not {"ours", "codes"} & self.options

    @property
    def backend(self) -> str:
        return {"bf16": "bf16", "qlora": "nf4", "nvfp4": "nvfp4"}[self.method]

    def adapted(self, model: nn.Module) -> nn.Module:
        """A dense model (or bitsandbytes') with the adapters of the case."""
        shared = {"r": R, "lora_alpha": ALPHA, "target_modules": TARGETS}
        if self.stock:
            return get_peft_model(model, LoraConfig(**shared))
        if self.method == "nvfp4":
            shared |= {"accuracy": self.accuracy, "recompute_mlp": "recompute" in self}
        layer = {"codes": {"activations": "nvfp4"}, "transient": {"weight_layouts": "transient"}}
        chosen = next((words for option, words in layer.items() if option in self), {})
        return adapted_model(model, **shared, backend=self.backend, **chosen)

    def settings(self) -> Settings:
        """The same for the estimator."""
        savings = {"transient": OneLayout, "recompute": Recomputed}.items()
        kinds = [kind for option, kind in savings if option in self]
        return (kinds[0] if len(kinds) == 1 else Settings)(
            backend=self.backend + "-liger" * ("liger" in self),
            adapter_bytes=2 if self.stock else 4,
            loss="liger" if "liger" in self else "supervised",
            accuracy=self.accuracy,
            memory="small" if kinds or "codes" in self else "fast",
            cuda_graphs="graphs" in self,
            checkpointing="ckpt" in self,
        )


# ---------------------------------------------------------------------------------------------- models


def llama_config(shape: str, layers: int | None = None) -> LlamaConfig:
    hidden, inter, count, heads, kv, head_dim, vocab, tied, factor = SHAPES[shape]
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return LlamaConfig(
        **{"hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers or count, "num_attention_heads": heads},
        **{"num_key_value_heads": kv, "head_dim": head_dim, "vocab_size": vocab, "tie_word_embeddings": tied},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        rope_parameters=rope | {"original_max_position_embeddings": 8192},
    )


def dense_model(config: LlamaConfig, attention: str, device: torch.device) -> LlamaForCausalLM:
    """Random BF16 weights, made on the device. ``causal``: SDPA by a name that transformers' table of mask functions lacks, so
    that no mask is made (compiling or capturing, it would make a dense one and lose flash attention) and no synchronisation looks
    for packed sequences."""
    ALL_ATTENTION_FUNCTIONS.register("causal", sdpa_attention_forward)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    fill(model, device)
    model.tie_weights()
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config).to(device)
    return model


def fill(module: nn.Module, device: torch.device) -> None:
    """Random values for a module without any: N(0, 0.02²), and 1 for the gains of norms."""
    module.to_empty(device=device)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(1.0) if p.ndim == 1 else p.normal_(std=0.02)


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


def build(case: Case, shape: str, device: torch.device):
    """(model with adapters, the function that Liger puts in RoPE's place or None)."""
    torch.manual_seed(0)
    model, rope = dense_model(llama_config(shape), "causal", device), None
    if "liger" in case:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        plain = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP
        apply_liger_kernel_to_llama(model=model)
        _accept_slices()
        rope = modeling_llama.apply_rotary_pos_emb
        modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP = plain
    if case.stock and case.method == "qlora":
        to_bnb(model)
    model = case.adapted(model)
    if case.stock:  # BF16 adapters: faster and smaller than PEFT's default
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16) if p.requires_grad else p.data
    slow_down_steps(model)  # a case says what is on
    if "graphs" in case:
        enable_cuda_graphs(model)
    if "ckpt" in case:
        model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(), rope


class Trainer:
    """One case, ready to step on a batch of fixed shape."""

    def __init__(self, case: Case, shape: str, device: torch.device):
        self.case, self.device = case, device
        self.model, self.rope = build(case, shape, device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=device.type == "cuda")
        self.vocab, self.layers = SHAPES[shape][6], self.model.get_base_model().model.layers
        model = self.model
        self.forward = lambda **inputs: model(**inputs).loss
        if "compile" in case:
            self.forward = torch.compile(self.forward)

    def set_batch(self, batch: int, seq: int) -> None:
        """Random rows with a loss at their last positions: of n + 1 logits, the last predicts nothing."""
        ids = torch.randint(self.vocab, (batch, seq), generator=torch.Generator().manual_seed(0)).to(self.device)
        self.inputs = last_positions(ids)

    @contextmanager
    def context(self) -> Iterator[None]:
        """The rotary embedding of the case: transformers looks it up in a module, where this package and Liger put theirs for the
        whole process."""
        before = modeling_llama.apply_rotary_pos_emb
        if self.case.method != "nvfp4" and "codes" not in self.case:
            modeling_llama.apply_rotary_pos_emb = self.rope or STOCK_ROPE
        try:
            yield
        finally:
            modeling_llama.apply_rotary_pos_emb = before

    def loss(self) -> torch.Tensor:
        with self.context():
            return self.forward(**self.inputs)

    def step(self) -> None:
        with self.context():
            self.forward(**self.inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def clear(self) -> None:
        """Give back what steps of other batches left: gradients, and recordings, which hold their memory."""
        self.optimizer.zero_grad(set_to_none=True)
        if "graphs" in self.case:
            disable_cuda_graphs(self.model)
            enable_cuda_graphs(self.model)
        common.release(self.device)

    def prepare(self, batch: int, seq: int, warmup: int) -> None:
        """Inputs of this shape and warm-up steps."""
        self.set_batch(batch, seq)
        for _ in range(warmup):
            self.step()
        common.synchronize(self.device)


def last_positions(ids: torch.Tensor, labels: int = LABELS) -> dict:
    """Inputs of a model whose loss is on the last positions of each row, with no logits elsewhere."""
    n = min(labels, ids.shape[1] // 2) + 1
    return {"input_ids": ids, "labels": ids[:, -n:].clone(), "logits_to_keep": n, "use_cache": False}


# ---------------------------------------------------------------------------------------------- largest batches


def attempt(trainer: Trainer, batch: int, seq: int) -> bool:
    """Whether four steps of this batch fit, starting from what a fresh model holds."""
    trainer.clear()
    return common.fits(lambda: trainer.prepare(batch, seq, 4), trainer.device)


def largest_batch(trainer: Trainer, seq: int, cap_gib: float, limit: int) -> dict:
    """Largest batch up to ``limit`` under a cap on PyTorch's allocator, with peak and speed there."""
    device = trainer.device
    with common.capped(cap_gib, device):
        best = common.largest_fitting(lambda batch: attempt(trainer, batch, seq), limit)
        row = {"largest_batch": best, "cap_gib": cap_gib}
        if best:
            row |= common.peak_memory(lambda: attempt(trainer, best, seq), device, {"allocated": 0, "reserved": 0})
            row |= common.speed(common.summary([common.burst(trainer.step, 3, device)]), best * seq)
    return row
