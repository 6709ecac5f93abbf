"""A function-preserving rotation of a Llama's residual stream.

SmolLM2's packaged weights were 4-bit before we see them (at most 16 values in each block of 32), so that how well another 4-bit
format holds them says little about BF16 checkpoints. Here the same function gets weights off that grid. With Q a random
orthogonal matrix,

    embedding   E  ->  E Q                          the stream h becomes h Q, and so does what is added to it:
    o, down     W  ->  Q^T W
    norm gain   g  ->  1
    q, k, v, gate, up, head   W  ->  W diag(g) Q

RMSNorm without its gain commutes with Q; the gain moves into the linears that follow. Outlier channels are smeared over all
channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rotate_(model: nn.Module, seed: int) -> nn.Module:
    """Rotate a ``LlamaForCausalLM`` in place and return it; its head is no longer tied to the embedding."""
    generator, hidden = torch.Generator().manual_seed(seed), model.config.hidden_size
    q = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator, dtype=torch.float64))[0].to(model.device)
    head, body = model.lm_head, model.model
    if head.weight is body.embed_tokens.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _readers(q, layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj))
        _readers(q, layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj))
        for writer in (attention.o_proj, mlp.down_proj):
            _put(writer, q.T @ writer.weight.double())
    _readers(q, body.norm, (head,))
    _put(body.embed_tokens, body.embed_tokens.weight.double() @ q)
    return model


def _readers(q: Tensor, norm: nn.Module, linears: tuple[nn.Linear, ...]) -> None:
    for linear in linears:
        _put(linear, (linear.weight.double() * norm.weight.double()) @ q)
    _put(norm, torch.ones_like(norm.weight))


def _put(module: nn.Module, weight: Tensor) -> None:
    module.weight.data = weight.detach().to(module.weight.dtype).contiguous()


@torch.no_grad()
def check(original: nn.Module, rotated: nn.Module, ids: Tensor) -> float:
    """Relative difference of two FP32 models' logits.

    Raises:
        RuntimeError: the rotation changed the function.
    """
    x, y = (m(ids.to(m.device)).logits for m in (original, rotated))
    error = ((x - y.to(x.device)).norm() / x.norm()).item()
    if not error < 1e-3:  # 1e-6 was seen
        raise RuntimeError(f"the rotation changed the function: logits differ by {error:.1e}")
    return error
