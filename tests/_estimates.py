"""Tiny models for the memory estimator's tests, the settings that describe them, and what autograd keeps of their forward."""

import pytest
import torch
from conftest import tiny_llama
from peft import get_peft_model
from peft.tuners.lora import layer as lora_layer
from torch.autograd.function import once_differentiable
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.fusion import rope
from peft_nvfp4.memory import Settings
from peft_nvfp4.ops import fused
from peft_nvfp4.ops import linear as linear_ops
from peft_nvfp4.training import host_level, packed_attention
from peft_nvfp4.training.packed_attention import sunk

WEIGHTS = ("frozen linears, forward layout", "frozen linears, backward layout")
COMMON = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=64)
ATTENTION = {"target_modules": ["q_proj", "o_proj"]}
FACTORS = hasattr(lora_layer, "_LoraFactorsProxy")
"""PEFT from 0.21 on adds adapters to dense experts from copies of A and B in 16 bits. Before, it computed all of B A, in FP32."""


def llama(layers=2, dtype=torch.bfloat16, **settings):
    return tiny_llama(dtype, num_hidden_layers=layers, vocab_size=64, **settings)


def qwen3(layers=2):
    return Qwen3ForCausalLM(Qwen3Config(**COMMON, intermediate_size=160, num_hidden_layers=layers)).to(torch.bfloat16)


def mixtral(layers=2, experts=4, dtype=torch.bfloat16, chosen=2, width=96, **settings):
    torch.manual_seed(0)
    sizes = dict(intermediate_size=width, num_local_experts=experts, num_experts_per_tok=chosen, num_hidden_layers=layers)
    return MixtralForCausalLM(MixtralConfig(**{**COMMON, **sizes, **settings})).to(dtype)


def qwen3_moe(layers=2, experts=4, dtype=torch.bfloat16, chosen=2, width=96, **settings):
    torch.manual_seed(0)
    sizes = dict(moe_intermediate_size=width, num_experts=experts, num_experts_per_tok=chosen, num_hidden_layers=layers)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**COMMON, **sizes, "intermediate_size": 160, **settings})).to(dtype)


def gpt_oss(layers=2, experts=4, dtype=torch.bfloat16, chosen=2, width=96, **settings):
    torch.manual_seed(0)
    sizes = dict(intermediate_size=width, num_local_experts=experts, num_experts_per_tok=chosen, num_hidden_layers=layers)
    kinds = dict(layer_types=["full_attention"] * layers, max_position_embeddings=2048, rope_parameters={"rope_type": "default"})
    return GptOssForCausalLM(GptOssConfig(**{**COMMON, **sizes, **kinds, **settings})).to(dtype)


class FlashAttnOnACpuFunc(torch.autograd.Function):
    """Attention as FlashAttention computes it on a GPU: what it keeps, and nothing besides."""

    @staticmethod
    def forward(ctx, q, k, v, first_tokens, scale, window, sinks):
        bounds, parts = first_tokens.unique().tolist(), []
        heads = (q, *(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)))
        for start, end in zip(bounds, bounds[1:]):
            rows = [t[start:end].transpose(0, 1)[None] for t in heads]
            output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, True, scale=scale)
            parts.append(sunk(output[0], logsumexp[0], sinks))
        output, logsumexp = torch.cat([o.transpose(0, 1) for o, _ in parts]), torch.cat([lse for _, lse in parts], 1)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None, None, None


by_family = pytest.mark.parametrize("make", (mixtral, qwen3_moe))


def adapted(base, **fields):
    """(model with adapters of rank 4, the estimator's settings for it)."""
    if fields.get("backend") == "nf4":
        pytest.importorskip("bitsandbytes")
    fields = {"target_modules": "all-linear", **fields}
    model = get_peft_model(base, NVFP4LoraConfig(r=4, task_type="CAUSAL_LM", **fields)).train()
    targets, parameters = fields.pop("target_modules"), fields.pop("target_parameters", ())
    targets = targets if isinstance(targets, str) else (*targets, *parameters)
    return model, Settings(rank=4, targets=targets, **fields)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Rotary embeddings in one Function, as a kernel computes them: without, a CPU keeps what they multiply with as well. And
    both terms of an input in the same tensors, as a kernel writes them; and no values of weights beside their codes."""
    monkeypatch.setattr(host_level, "SHARE", 0.0)
    monkeypatch.setattr(packed_attention, "_attention_by_sequence", FlashAttnOnACpuFunc.apply)
    monkeypatch.setattr(rope, "_on_a_kernel", lambda x: True)
    together = lambda terms: linear_ops.matrices(*linear_ops.stacked(terms), terms[0].k)
    quantize, multiply = linear_ops.quantize_input.reference, fused.silu_mul_quantize.reference
    monkeypatch.setattr(linear_ops.quantize_input, "reference", lambda *args: together(quantize(*args)))
    gated = lambda out: out._replace(parts=together(out.parts))
    monkeypatch.setattr(fused.silu_mul_quantize, "reference", lambda *args: gated(multiply(*args)))


def storages(model, tokens: int) -> list[int]:
    """Bytes of the storages that autograd keeps of a forward, but for parameters and buffers. Indices count: a GPU holds them,
    too."""
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model(input_ids=torch.arange(tokens)[None] % 64, logits_to_keep=1)
    del output
    return [storage.nbytes() for storage in saved.values()]


FEW, MANY = 48, 96
"""Tokens."""


def noting(forward, experts: list[int]):
    """A router's forward that notes how many experts it has chosen. (With a hook the decoder would not be packed.)"""

    def noted(*args):
        output = forward(*args)
        if len(output[2]) >= FEW:  # not of the trial, before rows are packed
            experts.append(len(output[2].unique()))
        return output

    return noted


def growth(make) -> tuple[float, float]:
    """(bytes per token, bytes besides) of what one more layer keeps; ``make(layers)`` is a model. Every expert gets a row."""
    sizes, experts = {}, []
    for depth in (2, 3):
        model = make(depth)
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.forward = noting(module.forward, experts)
        for tokens in (FEW, MANY):
            sizes[depth, tokens] = sum(storages(model, tokens))
    assert set(experts) <= {4}
    few, many = (sizes[3, n] - sizes[2, n] for n in (FEW, MANY))
    slope = (many - few) / (MANY - FEW)
    return slope, few - slope * FEW
