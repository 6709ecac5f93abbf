"""What the tests of the loss share: tiny models of many families with logits of a trained model's size, a batch with labels at a
quarter of its positions, and one training step and how two of them are compared."""

import torch
import transformers as hf
from torch import nn

VOCABULARY = 331  # prime: no other size of these tests
SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY
)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Gemma2": dict(head_dim=16, final_logit_softcapping=5.0),
    "Gemma3": dict(head_dim=16),
    "Granite": dict(logits_scaling=13.0),
    "Cohere": dict(logit_scale=0.3),
    "Mixtral": dict(num_local_experts=4, output_router_logits=True),
    "GPT2": dict(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
}
# FP32 sums of a few hundred terms in another order: relative to the norm of the result, about sqrt(300) * 2**-24 = 1e-6.
EXACT = 2e-6


def build(family: str = "Llama", dtype: torch.dtype = torch.float32, **settings) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(hf, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    usual = {**TOKENS, **({} if family == "GPT2" else SIZES), **FAMILIES.get(family, {}), **settings}
    model = getattr(hf, f"{family}{head}")(config(**usual)).to(dtype).train()
    with torch.no_grad():  # logits of a trained model's size, where a cap bends them
        for parameter in model.get_output_embeddings().parameters():
            parameter.mul_(20)
    return model


def batch(rows: int = 3, length: int = 11) -> dict[str, torch.Tensor]:
    """A quarter of the positions is supervised; a row is not at all."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(rows, length, generator=generator) < 0.75, -100)
    labels[0] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: nn.Module, **inputs):
    """(output, gradients by name) of one training step."""
    model.zero_grad()
    output = model(**(inputs or batch()), use_cache=False)
    output.loss.backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).float().norm() / b.float().norm().clamp_min(1e-6)).item()


def assert_same_step(got, expected, bound: float = EXACT) -> None:
    """Loss and gradients of two steps. A gradient that is nothing but rounding (of a key's bias) is compared with the largest."""
    assert distance(got[0].loss.detach(), expected[0].loss.detach()) <= bound
    assert got[1].keys() == expected[1].keys()
    largest = max(g.float().norm().item() for g in expected[1].values())
    for name, g in expected[1].items():
        assert (got[1][name] - g).float().norm().item() <= bound * max(g.float().norm().item(), 0.01 * largest), name
