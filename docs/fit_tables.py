"""What fits on which card: tables of the estimator, which reads the sizes of a model and asks no GPU."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from page_parts import table

from peft_nvfp4.memory import BUILTIN, ModelShape, Settings, card, estimate, largest_batch, longest_context, model_shape, room

NONE_FITS, NOT_ESTIMATED = "–", "?"


def _qwen(hidden: int, intermediate: int, layers: int, heads: int, **more) -> ModelShape:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    return model_shape({"model_type": "qwen3", "tie_word_embeddings": False, **sizes, **more})


MIXTURE = {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
MIXTURE |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
MIXTURE |= {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False}


def _models() -> dict[str, ModelShape]:
    """Sizes as the models' published ``config.json`` files have them."""
    llama_70b = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    llama_70b |= {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
    return {
        "Llama-3.2-1B": BUILTIN["llama-1b"],
        "Llama-3.2-3B": BUILTIN["llama-3b"],
        "Qwen3-4B": _qwen(2560, 9728, 36, 32, tie_word_embeddings=True),
        "Llama-3.1-8B": BUILTIN["llama-8b"],
        "Qwen3-8B": _qwen(4096, 12288, 36, 32),
        "Qwen3-14B": _qwen(5120, 17408, 40, 40),
        "Qwen3-32B": _qwen(5120, 25600, 64, 64),
        "Qwen3-30B-A3B": model_shape(MIXTURE),
        "Llama-3.1-70B": model_shape(llama_70b),
    }


CARDS = ("RTX 4070", "RTX 5080", "RTX 4090", "RTX 5090", "A100 80GB")
SMALL = Settings(memory="small", checkpointing=True, cuda_graphs=True)
HOSTED = replace(SMALL, host_checkpoints=True, cuda_graphs=False)
OFFLOADED = replace(HOSTED, memory="smallest")
QLORA = Settings(backend="nf4-liger", loss="liger", checkpointing=True)
PLANS = {
    "`fast`": replace(SMALL, memory="fast", checkpointing=False),
    "`small`": replace(SMALL, checkpointing=False),
    "QLoRA": replace(QLORA, checkpointing=False),
    "`fast`, ckpt": replace(SMALL, memory="fast"),
    "`small`, ckpt": SMALL,
    "QLoRA, ckpt": QLORA,
    "`small`, ckpt on the host": HOSTED,
    "`smallest`, ckpt on the host": OFFLOADED,
}
"""What ``get_peft_model`` gives with a word of ``memory``, and PEFT on bitsandbytes with Liger's kernels."""


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _on(name: str, plan: Settings, shape: ModelShape) -> tuple[Settings, int]:
    """A plan on a card, and the card's memory. Of a mixture, attention alone gets adapters."""
    gpu = card(name)
    targets = ATTENTION if shape.mixture else plan.targets
    return replace(plan, sequence=2048, targets=targets, native_fp4=gpu.fp4, workspace=gpu.workspace), gpu.memory


def _rows_that_fit(shape: ModelShape, name: str, plan: Settings) -> str:
    if shape.mixture and plan.liger:
        return NOT_ESTIMATED
    return str(largest_batch(shape, *_on(name, plan, shape)) or NONE_FITS)


def _with_memory(name: str) -> str:
    return name if "GB" in name else f"{name}, {round(card(name).memory / 2**30)} GB"


def fits() -> str:
    """README's: rows of 2048 tokens with checkpointing: this package, QLoRA, this package with checkpoints on the host."""
    shapes = _models()
    names = ("Llama-3.2-3B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B")
    rows = [
        [name, *(" / ".join(_rows_that_fit(shapes[name], gpu, plan) for plan in (SMALL, QLORA, HOSTED)) for gpu in CARDS[:4])]
        for name in names
    ]
    return table(["", *map(_with_memory, CARDS[:4])], rows)


def fits_all() -> str:
    """A table a card: rows of 2048 tokens."""
    shapes, parts = _models(), []
    for gpu in CARDS:
        rows = [[name, *(_rows_that_fit(shape, gpu, plan) for plan in PLANS.values())] for name, shape in shapes.items()]
        parts.append(f"### {_with_memory(gpu)}\n\n{table(['', *PLANS], rows)}")
    return "\n\n".join(parts)


def longest_rows() -> str:
    """Thousands of tokens of the longest row: this package with ``small`` and with ``smallest``, QLoRA."""
    rows = [[name, *(" / ".join(_longest(shape, gpu)) for gpu in CARDS)] for name, shape in _models().items()]
    return table(["", *map(_with_memory, CARDS)], rows)


def _longest(shape: ModelShape, name: str) -> list[str]:
    cells = []
    for plan in (HOSTED, OFFLOADED):
        step = longest_context(shape, *_on(name, plan, shape))
        cells.append(NONE_FITS if step is None else f"{step.settings.sequence >> 10}k")
    if shape.mixture:
        return [*cells, NOT_ESTIMATED]
    settings, memory = _on(name, QLORA, shape)
    peak = lambda thousands: estimate(shape, replace(settings, sequence=thousands << 10)).peak
    longest = bisect_right(range(1, 1 << 10), room(settings, memory), key=peak)
    return [*cells, f"{longest}k" if longest else NONE_FITS]
