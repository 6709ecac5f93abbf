"""Small decoders, composed of parts: norms, attentions, MLPs, experts, residual forms. Plain PyTorch, as a modeling file has it.

The same code is the model that the package freezes and fuses, and the dense reference that it is compared with. In the reference
alone, ``codes`` of a norm or MLP says what it emits when it is fused (``_reference.py``), and :data:`NOISE` adds errors."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, INNER, HEADS, VOCABULARY = 32, 48, 2, 40
HEAD_WIDTH = HIDDEN // HEADS
LIMIT = 10.0  # of a clamped gate: beyond what random numbers of common size reach
SLOTS = ("norm1", "norm2", "norm3", "norm4")


class Noise:
    """Relative size of the random errors that norms, products of MLPs and linears of the reference add. 0 but while
    :func:`_oracle.bounds` measures."""

    size = 0.0

    def added(self, t: Tensor) -> Tensor:
        return t * (1 + self.size * torch.randn(t.shape)).to(t.dtype) if self.size else t


NOISE = Noise()

# ---------------------------------------------------------------------------------------------- norms


class Norm(nn.Module):
    """RMSNorm as transformers writes it, and what looks like one."""

    codes = None

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.variance_epsilon = kind, 1e-6
        start = torch.zeros if kind == "one_plus" else torch.ones
        self.weight = nn.Parameter(start(HIDDEN) + 0.3 * torch.randn(HIDDEN))
        if kind == "biased":
            self.bias = nn.Parameter(0.3 * torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(NOISE.added(x)) if self.codes is None else self.codes.of_norm(self, NOISE.added(x))

    def compute(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.kind == "one_plus":
            return (wide * (1 + self.weight.float())).type_as(x)
        if self.kind == "clipped":
            wide = wide.clamp(-4.5, 4.5)
        y = self.weight * wide.to(x.dtype)
        return y + self.bias if self.kind == "biased" else y


class TorchRMSNorm(nn.RMSNorm):
    codes = None
    compute = nn.RMSNorm.forward
    forward = Norm.forward


NORMS = ("rms", "one_plus", "torch", "biased", "layer", "clipped")


def norm(kind: str) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(HIDDEN)
    if kind == "torch":
        module = TorchRMSNorm(HIDDEN, eps=1e-6)
        module.weight.data += 0.3 * torch.randn(HIDDEN)
        return module
    return Norm(kind)


# ---------------------------------------------------------------------------------------------- MLPs


MLPS = ("silu", "gelu_tanh", "fused", "relu", "gelu", "clamped", "scaled", "plain")
ACTIVATIONS = {"gelu_tanh": lambda: nn.GELU("tanh"), "relu": nn.ReLU, "gelu": nn.GELU}


class MLP(nn.Module):
    """down(act(gate) * up) with gate and up apart or in one linear, clamped or not; or down(act(up))."""

    codes = None

    def __init__(self, kind: str, case):
        super().__init__()
        self.kind, bias = kind, case.bias
        if kind == "fused":
            self.gate_up_proj = nn.Linear(HIDDEN, 2 * INNER, bias=bias)
        elif kind != "plain":
            self.gate_proj = nn.Linear(HIDDEN, INNER, bias=bias)
        if kind != "fused":
            self.up_proj = nn.Linear(HIDDEN, INNER, bias=bias)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=bias)
        self.act_fn = ACTIVATIONS.get(kind, nn.SiLU)()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "plain":
            return self.down_proj(self.act_fn(NOISE.added(self.up_proj(x))))
        gate, up = self.gate_up_proj(x).chunk(2, -1) if self.kind == "fused" else (self.gate_proj(x), self.up_proj(x))
        gate, up = NOISE.added(gate), NOISE.added(up)
        return self.down_proj(self.product(gate, up) if self.codes is None else self.codes.of_product(self, gate, up))

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.kind == "clamped":
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return self.act_fn(gate) * (up + 1 if self.kind == "scaled" else up)


class CastingMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.down_proj.weight.dtype))


class Experts(nn.Module):
    """Two MLPs, each on half of the tokens."""

    def __init__(self, kind: str, case):
        super().__init__()
        self.experts = nn.ModuleList((CastingMLP if case.casts else MLP)(kind, case) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        second = (flat.detach()[:, 0] > flat.detach()[:, 0].median()).float()  # half of the tokens
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (second == i).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(flat[rows]))
        return y.view(x.shape)


# ---------------------------------------------------------------------------------------------- attention


def edit(x: Tensor) -> None:
    """In place, by the model's own code."""
    x.mul_(-1.5)
    x[..., ::2] += 0.5


ATTENTIONS = ("mha", "gqa", "fused", "qk_norm", "none")


class Attention(nn.Module):
    """``uncalled`` names a linear that is left out of a call, ``twice`` one that is called twice, ``edited`` one before whose
    call the input is edited in place, ``rescaled`` one whose adapter changes its strength before the call."""

    uncalled = twice = edited = rescaled = ""

    def __init__(self, kind: str, bias: bool):
        super().__init__()
        self.kind = kind
        self.narrow = HIDDEN // 2 if kind == "gqa" else HIDDEN
        if kind == "fused":
            self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=bias)
        else:
            self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=bias)
            self.k_proj = nn.Linear(HIDDEN, self.narrow, bias=bias)
            self.v_proj = nn.Linear(HIDDEN, self.narrow, bias=bias)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        if kind == "qk_norm":
            self.q_norm, self.k_norm = nn.RMSNorm(HEAD_WIDTH, eps=1e-6), nn.RMSNorm(HEAD_WIDTH, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "fused":
            q, k, v = self.qkv_proj(x).chunk(3, -1)
        else:
            q, k, v = (self.linear(name, x) for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (t.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for t in (q, k, v))
        if self.kind == "qk_norm":
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def linear(self, name: str, x: Tensor) -> Tensor:
        if name == self.uncalled:
            return x[..., : HIDDEN if name == "q_proj" else self.narrow]
        if name == self.edited:
            edit(x)
        if name == self.rescaled:
            getattr(self, name).scaling["default"] = -4.0
        y = getattr(self, name)(x)
        return y + getattr(self, name)(x) if name == self.twice else y


# ---------------------------------------------------------------------------------------------- the decoder


RESIDUALS = ("pre", "post", "sandwich", "parallel")


class Layer(nn.Module):
    """One decoder layer. ``checkpointed`` maps a part's name to use_reentrant; ``inner``, where it is a dictionary, gets
    the parts' outputs: a loss may be taken on them. ``edited`` names a part whose output is edited in place."""

    inner: dict | None = None
    edited = ""

    def __init__(self, case):
        super().__init__()
        self.residual, self.reader, self.checkpointed = case.residual, case.reader, {}
        self.attn = None if case.attention == "none" else Attention(case.attention, case.bias)
        self.mlp = (Experts if case.experts else CastingMLP if case.casts else MLP)(case.mlp, case)
        for slot in SLOTS[: 4 if case.residual == "sandwich" else 1 if case.residual == "parallel" else 2]:
            setattr(self, slot, norm(case.norm))

    def part(self, name: str, x: Tensor) -> Tensor:
        module, reentrant = getattr(self, name), self.checkpointed.get(name)
        if reentrant is None or not torch.is_grad_enabled():
            y = module(x)
        else:
            y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant)
        if name == self.edited:
            edit(y)
        if self.inner is not None:
            self.inner[name] = y
        return y

    def attention(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x) if self.attn is None else self.part("attn", x)

    def forward(self, x: Tensor) -> Tensor:
        part, attention = self.part, self.attention
        if self.residual == "parallel":
            h = part("norm1", x)
            return x + attention(h) + part("mlp", h)
        if self.residual == "post":
            x = part("norm1", x + attention(x))
            return part("norm2", x + part("mlp", x))
        if self.residual == "sandwich":
            x = x + part("norm2", attention(part("norm1", x)))
            return x + part("norm4", part("mlp", part("norm3", x)))
        h = part("norm1", x)
        x = x + attention(h) + self.read(h)
        return x + part("mlp", part("norm2", x))

    def read(self, h: Tensor) -> Tensor | float:
        """Of a norm's output, by somebody who is no linear."""
        if not self.reader:
            return 0.0
        if self.reader in ("mT", "data", "real"):
            h = getattr(h, self.reader)
        h = 0.5 * h
        return h.transpose(1, 2) if self.reader == "mT" else h


class Decoder(nn.Module):
    """Tokens (B, S), or embedded ones (B, S, HIDDEN), to logits."""

    def __init__(self, case):
        super().__init__()
        self.checkpointed, self.times = {}, 2 if case.repeated else 1
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(case) for _ in range(case.layers))
        self.norm = norm(case.norm)
        self.lm_head = None if case.tied else nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(input_ids) if x is None else x
        for i, layer in list(enumerate(self.layers)) * self.times:
            reentrant = self.checkpointed.get(f"layers.{i}")
            if reentrant is None or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        x = self.norm(x)
        return F.linear(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)


def decoder(case) -> Decoder:
    """The dense model of a case. Layers differ in the size of their weights; a clamped MLP's reach its limit, and a norm's input
    has channels of outlying size."""
    torch.manual_seed(case.seed)
    model = Decoder(case)
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            for name, p in layer.named_parameters():
                if p.ndim == 2:
                    p.mul_(1.5 * (1, 0.5, 2, 0.8)[i] * (8 if case.mlp == "clamped" and ("gate" in name or "up_" in name) else 1))
        model.embed_tokens.weight[:, 3] *= 12
    return model.to(getattr(torch, case.dtype)).requires_grad_(False)
