"""The parts of a model that the fused producers replace, gated MLPs and norms: which modules are found (by what they compute, not
by name), when a fused one steps aside, and its gradients against the documented formulas."""

import copy

import pytest
import torch
import torch.nn.functional as F
from _dataflow_models import loss_and_gradients, tuned
from conftest import tiny_llama
from peft import get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig, attach, detach, freeze_model
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.autograd.fused import GatedQuantize, RMSNormQuantize
from peft_nvfp4.fusion.mlp import FusedGatedMLP, GatedParts
from peft_nvfp4.fusion.norm import NVFP4RMSNorm
from peft_nvfp4.numerics import fused_reference, reference
from peft_nvfp4.numerics.formats import ACTIVATION
from peft_nvfp4.numerics.fused_reference import ACTIVATIONS


class Gated(nn.Module):
    """down(act(gate(x)) * up(x)) in any spelling."""

    def __init__(self, names=("w1", "w3", "w2"), up_first=False, act=F.silu, dropout=0.0, scale=1.0):
        super().__init__()
        for name, (k, n) in zip(names, ((64, 48), (64, 48), (48, 64))):
            setattr(self, name, nn.Linear(k, n))
        self.names, self.up_first, self.act, self.scale, self.dropout = names, up_first, act, scale, nn.Dropout(dropout)

    def forward(self, x, mask=None):
        gate, up, down = (getattr(self, name) for name in self.names)
        a, b = (up(x), gate(x))[::-1] if self.up_first else (gate(x), up(x))
        y = down(self.dropout(self.act(a) * b * self.scale))
        return y if mask is None else y * mask


class Halves(nn.Module):
    """The same with one linear for gate and up."""

    def __init__(self, split):
        super().__init__()
        self.wi, self.wo, self.split = nn.Linear(64, 96), nn.Linear(48, 64), split

    def forward(self, x):
        a, b = self.split(self.wi(x))
        return self.wo(F.gelu(a, approximate="tanh") * b)


class Plain(nn.Module):
    def __init__(self, f=96, n=64):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, f), nn.Linear(f, n)

    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x)))


NOT = "it computes something else than down(act(gate(x)) * up(x)) with SiLU or tanh-GELU"
MLPS = {  # name -> (module, what the report says: GatedParts, a reason, or None where it is no gated MLP at all)
    "w1-w3-w2": (Gated(), (("w1", "w3"), "w2", 0, "silu")),
    "down-first-child": (Gated(("b", "c", "a")), (("b", "c"), "a", 0, "silu")),
    "up-is-called-first": (Gated(up_first=True), (("w3", "w1"), "w2", 1, "silu")),
    "tanh-gelu": (Gated(act=ACTIVATIONS["gelu_tanh"]), (("w1", "w3"), "w2", 0, "gelu_tanh")),
    "halves": (Halves(lambda y: y.chunk(2, -1)), (("wi",), "wo", 0, "gelu_tanh")),
    "gate-in-the-second-half": (Halves(lambda y: y.chunk(2, -1)[::-1]), (("wi",), "wo", 1, "gelu_tanh")),
    "interleaved": (Halves(lambda y: (y[..., ::2], y[..., 1::2])), NOT),
    "exact-gelu": (Gated(act=F.gelu), NOT),
    "scaled": (Gated(scale=0.5), NOT),
    "dropout": (Gated(dropout=0.5), NOT),
    "plain": (Plain(), None),
    "projector": (Plain(128, 128), None),  # by its shapes, 128 -> 128 could be gate and up, and 64 -> 128 the last linear
}


@pytest.mark.parametrize("mlp, expected", MLPS.values(), ids=MLPS.keys())
def test_gated_mlps_are_found_by_what_they_compute(mlp, expected):
    torch.manual_seed(0)
    model = freeze_model(nn.ModuleDict({"mlp": copy.deepcopy(mlp)}))
    x = torch.randn(2, 5, 64)
    rng, flags = torch.get_rng_state(), [m.training for m in model.modules()]
    plain = model.eval()["mlp"](x)
    report = attach(model.train(), run=lambda: model["mlp"](x))
    assert torch.equal(torch.get_rng_state(), rng) and [m.training for m in model.modules()] == flags
    fused = model["mlp"]
    if isinstance(expected, tuple):
        assert report.fused == {"mlp": "gated MLP"} and fused.parts == GatedParts(*expected)
        # as FP32 functions they differ by 2e-6; codes of the product may differ where it is next to a threshold
        torch.testing.assert_close(model.eval()["mlp"](x), plain, atol=2e-2 * plain.abs().max().item(), rtol=0)
    else:
        assert type(fused) is type(mlp) and report.skipped == ({} if expected is None else {"mlp": expected})


def test_a_fused_mlp_steps_aside():
    """For more inputs than x, and when its last linear is not in NVFP4 any more."""
    model = freeze_model(nn.ModuleDict({"mlp": Gated()}))
    x, mask = torch.randn(3, 64), torch.randint(2, (3, 1)).float()
    expected, masked = model["mlp"](x), model["mlp"](x, mask)
    attach(model, run=lambda: model["mlp"](x))
    assert isinstance(model["mlp"], FusedGatedMLP)
    assert torch.equal(model["mlp"](x, mask), masked) and torch.equal(model["mlp"](x, mask=mask), masked)
    model["mlp"].w2 = model["mlp"].w2.to_linear()
    fresh = Gated()
    fresh.w1, fresh.w3, fresh.w2 = model["mlp"].w1, model["mlp"].w3, model["mlp"].w2
    assert torch.equal(model["mlp"](x), fresh(x)) and not torch.equal(fresh(x), expected)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gated_gradients_are_those_at_the_kept_codes(act):
    gate, up, dh = (torch.randn(5, 96) for _ in range(3))
    a, b = gate.clone().requires_grad_(), up.clone().requires_grad_()
    h, *_ = GatedQuantize.apply(a, b, None, act, 1)
    h.backward(dh)
    g, u = (reference.dequantize(reference.quantize(t, ACTIVATION)).double().requires_grad_() for t in (gate, up))
    function = F.silu if act == "silu" else lambda z: F.gelu(z, approximate="tanh")
    (function(g) * u).backward(dh.double())
    # sigmoid's relative error is 2e-6 at most, values up to 10
    torch.testing.assert_close(a.grad.double(), g.grad, atol=2e-5, rtol=0)
    torch.testing.assert_close(b.grad.double(), u.grad, atol=2e-5, rtol=0)
    exact = (function(gate) * up).double()
    assert ((h.detach().double() - exact).norm() / exact.norm()).item() < 0.12  # one NVFP4 term: 9.5 % on Gaussian data


def test_sigmoid_by_chunks_has_the_bits_of_one_piece(monkeypatch):
    z = 10 * torch.randn(7, 96).T  # strided, and no multiple of a chunk
    whole = fused_reference.sigmoid(z)
    monkeypatch.setattr(fused_reference, "SIGMOID_CHUNK", 100)
    chunks = fused_reference.sigmoid(z)
    assert chunks.shape == z.shape and torch.equal(chunks, whole)


@pytest.mark.parametrize("how", ["compiled", "hooked"])
def test_whoever_looks_at_the_product_of_the_mlp_finds_values(how):
    """down's input has no values where nobody but down reads it; a compiler, and hooks, are somebody."""
    model, seen = tuned("Llama", accuracy="balanced"), []  # one term at down: quantised again, its values give the same codes
    attach(model)
    if how == "global hook":  # with hooks, norms run as they were
        for norm in (m for m in model.modules() if isinstance(m, NVFP4RMSNorm)):
            norm.register_forward_hook(lambda module, args, y: None)
    expected = loss_and_gradients(model)
    down = model.base_model.model.model.layers[0].mlp.down_proj
    handle = None
    if how == "compiled":
        down.compile(backend="eager")
    else:
        handle = down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        got = loss_and_gradients(model)
    finally:
        if handle is not None:
            handle.remove()
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-6)  # FP32 sums in another order
    assert all(x.abs().sum() > 0 for x in seen)
    assert len(seen) == (how != "compiled")


class Block(nn.Module):
    """A norm and one linear after it."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.proj = norm, nn.Linear(64, 32)

    def forward(self, x, **kwargs):
        return self.proj(self.norm(x, **kwargs))


class T5LayerNorm(nn.Module):
    """An RMSNorm by another name; ``gate`` as in Mamba 2, ``power`` for one that is none."""

    def __init__(self, power=0.5, eps=1e-6):
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.rand(64) + 0.5), eps, power

    def forward(self, x, gate=None):
        x = x if gate is None else x * F.silu(gate)
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps) ** self.power


def attached_block(norm, **kwargs):
    torch.manual_seed(0)
    block = freeze_model(Block(norm)).requires_grad_(False)
    x = torch.randn(2, 5, 64)
    return block, x, attach(block, run=lambda: block(x, **kwargs))


def test_norms_are_found_by_what_they_compute():
    for norm in (T5LayerNorm(), nn.RMSNorm(64, eps=1e-5), T5LayerNorm(eps=0.5)):
        assert attached_block(norm)[2].fused == {"norm": "RMSNorm+quantise"}
    for norm in (T5LayerNorm(power=0.51), nn.LayerNorm(64, bias=False)):
        assert attached_block(norm)[2].skipped == {"norm": "it is not an RMSNorm of a known formula"}
    assert attached_block(nn.LayerNorm(64))[2].skipped == {}
    gated = attached_block(T5LayerNorm(), gate=torch.ones(2, 5, 64))[2]
    assert gated.skipped == {"norm": "it is called with more than one tensor"}


def test_a_fused_norm_steps_aside():
    """For more inputs than x, and for a weight that is trained."""
    block, x, _ = attached_block(T5LayerNorm())
    gate = torch.randn(2, 5, 64)
    assert isinstance(block.norm, NVFP4RMSNorm)
    assert torch.equal(block.norm(x, gate=gate), block.norm.original.forward(x, gate))
    assert not torch.equal(block.norm(x), block.norm.original.forward(x))
    block.norm.weight.requires_grad_(True)
    assert torch.equal(block.norm(x), block.norm.original.forward(x))
    block(x).sum().backward()
    assert block.norm.weight.grad.abs().min() > 0 and activation_cache.live() == 0


def test_a_fused_norm_follows_its_reader():
    """A constant that calibration finds later is what the norm subtracts, too; so nothing is quantised twice."""
    block, x, _ = attached_block(T5LayerNorm())
    block.proj.set_offset(torch.randn(64))
    fused = block(x)
    assert torch.equal(fused, detach(block)(x))


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("terms", [1, 2])
def test_norm_gradient_is_the_documented_formula(terms, plus_one):
    x, gamma, dy = torch.randn(5, 96, requires_grad=True), torch.rand(96) + 0.5, torch.randn(5, 96)
    y, *_ = RMSNormQuantize.apply(x, gamma, None, 1e-6, plus_one, terms)
    y.backward(dy)
    w, rstd = (gamma + plus_one).double(), 1 / (x.detach().double().square().mean(1, keepdim=True) + 1e-6).sqrt()
    d, g = y.detach().double(), dy.double()
    expected = rstd * (w * g - d / w * (g * d).mean(1, keepdim=True))
    # FP32 arithmetic of about ten operations on values up to 10: 1e-5
    torch.testing.assert_close(x.grad.double(), expected, atol=1e-5, rtol=0)


def test_row_sum_does_not_depend_on_the_order():
    x = torch.randn(64, 1000) * torch.logspace(-6, 6, 1000)
    whole = x[:, :992]
    moved = whole.view(64, 62, 16)[:, torch.randperm(62)].reshape(64, 992)
    assert torch.equal(fused_reference.row_sum(whole), fused_reference.row_sum(moved))
    exact = x.double().sum(1)
    assert ((fused_reference.row_sum(x).double() - exact).abs() <= 2**-20 * x.double().abs().sum(1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_finds_what_the_norm_quantised(dtype):
    """FP32 weights and residual stream under autocast: the reader gets y in 16 bits, and the norm's codes of y in FP32. So its
    output is that without autocast, rounded (half an eps; another half where an FP32 sum in another order moves it)."""
    block, x = attached_block(T5LayerNorm())[0], torch.randn(400, 64)
    with torch.no_grad():
        exact = block(x)
        with torch.autocast("cpu", dtype):
            y = block(x)
            plain = detach(block)(x)
    assert y.dtype == plain.dtype == dtype
    bound = torch.finfo(dtype).eps * exact.abs() + 1e-6
    assert ((y - exact).abs() <= bound).all() and not ((plain - exact).abs() <= bound).all() and activation_cache.live() == 0


@pytest.mark.parametrize("accuracy", ["balanced", "high"])
def test_a_conversion_that_does_nothing(accuracy):
    """x.to(where it is) between a norm and its readers: in eager mode the same tensor, so the norm is fused. While a compiler
    traces it is another one, without the codes, and quantising two terms again does not give them back: then it is not."""
    torch.manual_seed(0)
    base = tiny_llama(num_hidden_layers=1)
    base.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0].to(args[0].dtype).contiguous(),))
    settings = dict(r=4, target_modules="all-linear", init_lora_weights=False, accuracy=accuracy)
    model = get_peft_model(base, NVFP4LoraConfig(**settings)).eval()
    layer = model.get_base_model().model.layers[0]
    assert layer.post_attention_layernorm.converted and not layer.input_layernorm.converted
    ids = torch.arange(24).reshape(2, 12) % 32
    with torch.no_grad():
        eager = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager")(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)  # FP32 sums in another order
