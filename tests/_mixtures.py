"""Tiny mixtures of experts of real classes."""

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

IDS = torch.arange(24).reshape(2, 12) * 7 % 128
COMMON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=128, head_dim=16)


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**COMMON, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2))


def qwen3_moe():
    settings = dict(intermediate_size=64, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **settings))


def gpt_oss():
    sizes = dict(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2)
    return GptOssForCausalLM(GptOssConfig(**COMMON, **sizes))


def llama4():
    """Its experts are called in a way of their own, and stay dense."""
    sizes = dict(intermediate_size=48, intermediate_size_mlp=32, num_local_experts=4, num_experts_per_tok=1)
    return Llama4ForCausalLM(Llama4TextConfig(**COMMON, **sizes))


by_family = pytest.mark.parametrize("make", (mixtral, qwen3_moe))
