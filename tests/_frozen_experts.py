"""What the tests of packed experts share: the frozen experts of a tiny mixture, their inputs, the formula as a loop, adapters on
them, and how two results are compared."""

import pytest
import torch
import torch.nn.functional as F
from _mixtures import IDS
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.nn.experts.frozen_experts import FrozenExperts
from peft_nvfp4.nn.frozen_linear import FrozenOptions

OPTIONS = {"gate_up_proj": FrozenOptions(terms=2), "down_proj": FrozenOptions()}
ATTENTION_DENSE = {"skip_modules": ["self_attn"]}
BACKEND = pytest.mark.parametrize("backend", ("nvfp4", "nf4"))


def experts_of(model, layer=0):
    return model.model.layers[layer].mlp.experts


def frozen(make, backend="nvfp4", dtype=torch.float32, options=OPTIONS):
    """(dense experts' weights, the same experts frozen)."""
    original = experts_of(make()).to(dtype)
    weights = {name: p.detach().clone() for name, p in original.named_parameters()}
    return weights, FrozenExperts.quantize(original, backend, options)


def routed(tokens=12, experts=4, k=2, dtype=torch.float32, hidden=32):
    """Inputs of an experts module; the last expert gets no token."""
    index = torch.stack([torch.randperm(experts - 1)[:k] for _ in range(tokens)])
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    return x, index, torch.rand(tokens, k, requires_grad=True)


def loop(layers, x, index, weights):
    """The formula, one expert after the other; sums in the order of the k experts of a token."""
    shares = x.new_zeros(*index.shape, x.shape[1])
    for e, (first, down) in enumerate(zip(layers["gate_up_proj"], layers["down_proj"])):
        token, slot = torch.where(index == e)
        if len(token):
            gate, up = first(x[token]).chunk(2, dim=-1)
            shares = shares.index_put((token, slot), down(F.silu(gate) * up))
    return (shares * weights[..., None]).sum(1).to(x.dtype)


def plain(tensors):
    return {name: t.detach().clone() for name, t in tensors.items()}


def assert_equal(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def adapted(make, backend="nvfp4", dense=None, config=NVFP4LoraConfig, **settings):
    torch.manual_seed(1)
    targets = dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    own = {"backend": backend} if config is NVFP4LoraConfig else {}
    return get_peft_model(
        make() if dense is None else dense, config(**{"r": 2, "init_lora_weights": False, **targets, **own, **settings})
    )


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits
