"""A function-preserving rotation of a Llama's residual stream.

SmolLM2's packaged weights were 4-bit before we see them (at most 16 values in each block of 32), so that how well another 4-bit
format holds them says little about BF16 checkpoints. Here the same function gets weights off that grid. With Q orthogonal,

    embedding   E  ->  E Q                          the stream h becomes h Q, and so does what is added to it:
    o, down     W  ->  Q^T W
    norm gain   g  ->  g'
    q, k, v, gate, up, head   W  ->  W diag(g) Q diag(1 / g')

RMSNorm without its gain commutes with Q; the old gain moves into the linears that follow, and g' is taken out of them.

``full``: Q is a random orthogonal matrix, g' = 1. Outlier channels are smeared over all channels.
``pairs``: Q rotates pairs of channels by random angles; a pair has similar gains and shares one g' in each norm. Outlier channels
stay outlier channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

KINDS = ("full", "pairs")


def _gains(model: nn.Module) -> Tensor:
    """(norms, hidden) gains of all norms."""
    body = model.model
    norms = [n for layer in body.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    return torch.stack([n.weight.detach().double() for n in (*norms, body.norm)])


def make(model: nn.Module, seed: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """(Q (hidden, hidden) float64, pairs (hidden / 2, 2) of channels or None)."""
    g = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    if kind == "full":
        return torch.linalg.qr(torch.randn(hidden, hidden, generator=g, dtype=torch.float64))[0], None
    pairs = _gains(model).abs().clamp(min=1e-6).log().mean(0).cpu().argsort().view(-1, 2)
    angle = 2 * torch.pi * torch.rand(len(pairs), generator=g, dtype=torch.float64)
    q = torch.zeros(hidden, hidden, dtype=torch.float64)
    a, b = pairs.unbind(1)
    q[a, a], q[b, b], q[a, b], q[b, a] = angle.cos(), angle.cos(), angle.sin(), -angle.sin()
    return q, pairs


def rotate_(model: nn.Module, seed: int, kind: str = "full") -> nn.Module:
    """Rotate a ``LlamaForCausalLM`` in place and return it; its head is no longer tied to the embedding."""
    if kind not in KINDS:
        raise ValueError(f"kind is one of {', '.join(KINDS)}, got {kind!r}")
    q, pairs = make(model, seed, kind)
    q, head, body = q.to(model.device), model.lm_head, model.model
    if head.weight is body.embed_tokens.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _readers(q, pairs, layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj))
        _readers(q, pairs, layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj))
        for writer in (attention.o_proj, mlp.down_proj):
            _put(writer, q.T @ writer.weight.double())
    _readers(q, pairs, body.norm, (head,))
    _put(body.embed_tokens, body.embed_tokens.weight.double() @ q)
    return model


def _readers(q: Tensor, pairs: Tensor | None, norm: nn.Module, linears: tuple[nn.Linear, ...]) -> None:
    gain = norm.weight.detach().double()
    new = torch.ones_like(gain)
    if pairs is not None:
        pairs = pairs.to(gain.device)
        new[pairs] = gain[pairs].square().mean(1, keepdim=True).sqrt().clamp(min=1e-6).expand(-1, 2)
    for linear in linears:
        _put(linear, (linear.weight.double() * gain) @ q / new)
    _put(norm, new)


def _put(module: nn.Module, weight: Tensor) -> None:
    module.weight.data = weight.detach().to(module.weight.dtype).contiguous()


@torch.no_grad()
def difference(a: nn.Module, b: nn.Module, ids: Tensor) -> float:
    """Relative difference of two models' logits."""
    x, y = (m(ids.to(m.device)).logits.float() for m in (a, b))
    return ((x - y.to(x.device)).norm() / x.norm()).item()
