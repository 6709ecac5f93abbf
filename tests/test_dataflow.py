"""The fused producers and their attaching: what is found, that nothing of the function changes, and what is kept for backward."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from conftest import tiny_llama
from peft import get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from peft_nvfp4 import NVFP4LoraConfig, attach, dequantize_model, detach, freeze_model, fused_reference, handoff, reference
from peft_nvfp4.branches import mm
from peft_nvfp4.dataflow.attach import attached
from peft_nvfp4.dataflow.mlp import ACTIVATIONS, FusedGatedMLP, GatedParts, GatedQuantize
from peft_nvfp4.dataflow.norm import NVFP4RMSNorm, RMSNormQuantize
from peft_nvfp4.dataflow.probe import base_of
from peft_nvfp4.formats import ACTIVATION, padded_k

SIZES = dict(
    hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
)
FAMILIES = {"Llama": {}, "Mistral": {}, "Qwen2": {}, "Qwen3": dict(head_dim=16), "Gemma2": dict(head_dim=16), "Phi3": {}}
IDS = torch.arange(24).view(2, 12) * 5 % 128


def tuned(family: str, **settings):
    """A tiny model with a random adapter, not fused unless the settings say so."""
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**SIZES, **FAMILIES[family], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = getattr(hf, f"{family}ForCausalLM")(config)
    settings = {"target_modules": "all-linear", "fused": False} | settings
    return get_peft_model(model, NVFP4LoraConfig(r=4, init_lora_weights=False, **settings))


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("accuracy", ["paper", "balanced"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fusing_changes_no_output_and_detaching_puts_everything_back(family, accuracy):
    """Codes come from the same rounded norm output, so logits agree but for the last bit of the norm's mean (one y in 10^4
    rounds differently in BF16; in FP32, as here, by 2**-23, which may flip a code on a threshold: 1e-4 of the loss is far more).
    Gradients pass the norm and the MLP through 4-bit activations (10 % error in part of them), so their direction agrees to
    about 1 - 0.1**2 / 2 per layer; measured 0.985 to 0.997 with two layers."""
    model = tuned(family, accuracy=accuracy)
    keys, (loss, gradients) = list(model.state_dict()), loss_and_gradients(model)
    originals = dict(model.named_modules())
    report = attach(model)
    assert sorted(report.fused.values()) == ["RMSNorm+quantise"] * 4 + ["gated MLP"] * 2 + ["rotary embedding"]
    assert any("norm" in name and "read by" in why for name, why in report.skipped.items())
    fused_loss, fused_gradients = loss_and_gradients(model)
    assert list(model.state_dict()) == keys
    assert fused_loss == pytest.approx(loss, rel=1e-4)
    assert F.cosine_similarity(fused_gradients, gradients, 0) > 0.97
    assert handoff.live() == 0
    detach(model)
    assert all(originals[name] is module for name, module in model.named_modules())
    assert torch.equal(loss_and_gradients(model)[1], gradients)


def test_gemma_norms_that_feed_the_residual_stream_stay():
    report = attach(tuned("Gemma2"))
    assert report.skipped["base_model.model.model.layers.0.post_attention_layernorm"] == "its output is read by add"


def test_models_without_such_parts_are_left_alone():
    torch.manual_seed(0)
    model = hf.OPTForCausalLM(hf.OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64))
    model = get_peft_model(model, NVFP4LoraConfig(target_modules="all-linear"))
    assert attach(model).fused == {}
    bf16 = get_peft_model(
        hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), NVFP4LoraConfig(target_modules="all-linear", backend="bf16")
    )
    (name, reason), *rest = attach(bf16).skipped.items()
    assert name == "(model)" and reason.startswith("no linear is frozen in nvfp4") and not rest


# ---------------------------------------------------------------------------------------------- gated MLPs by structure


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


# ---------------------------------------------------------------------------------------------- norms by structure


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
    assert block.norm.weight.grad.abs().min() > 0 and handoff.live() == 0


def test_a_fused_norm_follows_its_reader():
    """A constant that calibration finds later is what the norm subtracts, too; so nothing is quantised twice."""
    block, x, _ = attached_block(T5LayerNorm())
    block.proj.set_centre(torch.randn(64))
    fused = block(x)
    assert torch.equal(fused, detach(block)(x))


# ---------------------------------------------------------------------------------------------- what others did to the modules


def test_hooks_and_patched_forwards_survive():
    """Hooks of norms and MLPs fire once, whether they were there before or come later; accelerate's patched forwards stay."""
    model, calls = tuned("Llama"), []
    layer = model.base_model.model.model.layers[0]
    patched, forward = layer.self_attn.q_proj, layer.self_attn.q_proj.forward
    patched.forward = lambda *args, **kwargs: calls.append("q") or forward(*args, **kwargs)
    before = vars(patched)["forward"]
    for name in ("input_layernorm", "mlp"):
        getattr(layer, name).register_forward_hook(lambda *args, name=name: calls.append(name))
    attach(model)
    assert calls == ["input_layernorm", "mlp"], "the two-token run, which linears take no part in"
    assert vars(patched)["forward"] is before
    late = layer.mlp.register_forward_pre_hook(lambda *args: calls.append("late"))
    for state in ("attached", "detached"):
        calls.clear()
        model(IDS)
        assert calls == ["input_layernorm", "q", "late", "mlp"], state
        detach(model)
    late.remove()
    attach(model)
    calls.clear()
    model(IDS)
    assert calls == ["input_layernorm", "q", "mlp"]


def test_training_modes_are_kept():
    model = tuned("Llama").train()
    model.base_model.model.model.layers[1].eval()
    model.base_model.model.model.layers[0].mlp.down_proj.eval()
    before = {name: m.training for name, m in model.named_modules()}
    attach(model)
    assert {name: m.training for name, m in model.named_modules()} == before
    detach(model)
    assert {name: m.training for name, m in model.named_modules()} == before
    attach(model)
    model.train()
    detach(model)
    assert all(m.training for m in model.modules())


def test_attaching_twice_is_attaching_once():
    model = tuned("Llama")
    first, expected = attach(model), loss_and_gradients(model)
    assert attach(model) == first and sum(isinstance(m, NVFP4RMSNorm) for m in model.modules()) == 4
    again = loss_and_gradients(model)
    assert again[0] == expected[0] and torch.equal(again[1], expected[1])


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
    assert ((y - exact).abs() <= bound).all() and not ((plain - exact).abs() <= bound).all() and handoff.live() == 0


def test_linears_that_read_an_edited_tensor_are_no_site():
    class Edits(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 32) for _ in range(3))

        def forward(self, x):
            x = x * 1.0
            q = self.q_proj(x)
            x.add_(1)
            return q, self.k_proj(x), self.v_proj(x)

    model, x = freeze_model(Edits()), torch.randn(3, 64)
    assert attach(model, run=lambda: model(x)).sites == [["k_proj", "v_proj"]]


def test_rotary_embeddings_come_and_go():
    gc.collect()  # models of other tests,
    detach(nn.Identity())  # and what they left
    model, modeling = tuned("Llama"), hf.models.llama.modeling_llama
    original = modeling.apply_rotary_pos_emb
    attach(model)
    assert modeling.apply_rotary_pos_emb is not original
    model.merge_and_unload()  # of the model inside, which detaches what was attached from outside
    assert modeling.apply_rotary_pos_emb is original


def test_a_run_that_fails_is_reported_and_nothing_breaks():
    model = tuned("Llama")

    def broken():
        raise RuntimeError("no such input")

    report = attach(model, run=broken)
    assert "no such input" in report.skipped["base_model.model.model.layers.0.input_layernorm"]
    assert "no such input" in report.skipped["(model)"] and report.sites == []
    assert not any(isinstance(m, NVFP4RMSNorm) for m in model.modules())
    assert torch.isfinite(model(input_ids=IDS, labels=IDS).loss)


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


def test_checkpointing_changes_no_bit():
    model = tuned("Llama", lora_dropout=0.1).train()
    attach(model)
    torch.manual_seed(1)
    plain = loss_and_gradients(model)
    for layer in model.base_model.model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kw: checkpoint(forward, *args, use_reentrant=False, **kw)
    torch.manual_seed(1)
    again = loss_and_gradients(model)
    assert plain[0] == again[0] and torch.equal(plain[1], again[1])
    assert handoff.live() == 0


def kept_bytes(model, ids) -> int:
    """Bytes that the decoder's forward keeps for backward, without the model's own parameters."""
    return bytes_for_backward(model, lambda: model.base_model.model.model(input_ids=ids))[1]


def bytes_for_backward(model, call) -> tuple:
    """What ``call()`` returns, and the bytes that it keeps for backward, without the model's own parameters."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = call()
    return result, sum(t.untyped_storage().nbytes() for t in kept.values())


def test_the_residual_stream_and_gate_up_are_not_kept():
    """Without fusing, norm inputs, gate, up and their product are saved dense. What does not grow with the tokens (copies of
    the adapters in the activations' dtype) is taken off: a sequence of 12 tokens in a batch of two against two such batches."""
    sizes = {}
    for fuse in (False, True):
        model = tuned("Llama", accuracy="paper")
        if fuse:
            attach(model)
        sizes[fuse] = kept_bytes(model, IDS.repeat(2, 1)) - kept_bytes(model, IDS)
    assert sizes[True] < 0.45 * sizes[False], sizes  # 1488 and 3760 bytes a token and layer in FP32


LEAST_COSINE = 0.95
"""Of down's dA with h~ made anew to that with h~ kept. h~ kept is 9.5 % off (one term, Gaussian data), h~ made anew by that three
times over, from gate, up and itself: 19 % apart, a cosine of 0.98; a sum over 24 tokens that partly cancel may lose more."""


def cosine(a, b) -> float:
    return F.cosine_similarity(a.flatten().float(), b.flatten().float(), 0).item()


@pytest.mark.parametrize("accuracy, targets", [("paper", "all-linear"), ("high", "all-linear"), ("paper", ["down_proj"])])
def test_recomputing_the_product_keeps_its_codes_no_more(accuracy, targets):
    """Less is kept by exactly the codes, block scales and global scales of h~ (f wide), and only down's dA differs. Where nothing
    before an MLP is trained, gate and up are not kept, so h~ is: the first layer with adapters on down alone."""
    runs, sizes = {}, {}
    for recompute in (False, True):
        model = tuned("Llama", accuracy=accuracy, target_modules=targets)
        attach(model, recompute_mlp=recompute)
        sizes[recompute] = kept_bytes(model, IDS.repeat(2, 1)) - kept_bytes(model, IDS)
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        assert handoff.live() == 0  # an entry of h would hold its codes until backward
        loss.backward()
        runs[recompute] = loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    terms = 2 if accuracy == "high" else 1
    f, layers = model.config.intermediate_size, [1] if targets == ["down_proj"] else [0, 1]
    assert sizes[False] - sizes[True] == len(layers) * IDS.numel() * terms * (padded_k(f) * 9 // 16 + 4)
    (loss, kept), (again, made) = runs[False], runs[True]
    assert loss == again
    differing = {name for name in kept if not torch.equal(kept[name], made[name])}
    assert differing == {name for name in kept if any(f"layers.{i}.mlp.down_proj.lora_A" in name for i in layers)}
    assert all(cosine(kept[name], made[name]) > LEAST_COSINE for name in differing)


@pytest.mark.parametrize(
    "family, accuracy, centred",
    [("Llama", "paper", False), ("Llama", "high", True), ("Gemma2", "high", False), ("Phi3", "balanced", True)],
)
def test_recomputed_gradient(family, accuracy, centred):
    """dA of down is that of D(h~) made from D(gate) and D(up): g.T @ D(h~), with g = dy @ (s * B). The same bits."""
    model, centre = tuned(family, accuracy=accuracy), None
    if centred:
        centre = torch.linspace(-1, 1, model.config.intermediate_size)
        base_of(model.base_model.model.model.layers[-1].mlp.down_proj).set_centre(centre)
    attach(model, recompute_mlp=True)
    mlp, seen = model.base_model.model.model.layers[-1].mlp, {}
    for name in mlp.parts.first:
        getattr(mlp, name).register_forward_hook(lambda m, args, y, name=name: seen.update({name: y.detach().flatten(0, -2)}))

    def keep_gradient(module, args, y):
        y.register_hook(lambda dy: seen.update(dy=dy.flatten(0, -2)))

    mlp.register_forward_hook(keep_gradient)  # not down's: it would see h
    loss_and_gradients(model)
    pair = [seen[name] for name in mlp.parts.first] if len(mlp.parts.first) == 2 else seen["gate_up_proj"].chunk(2, dim=-1)
    assert mlp.parts.gate == 0
    gate, up = (reference.quantize(t, ACTIVATION) for t in pair)
    terms = 2 if accuracy == "high" else 1
    h = fused_reference.gated_values(gate, up, centre, mlp.parts.act, terms, torch.float32)
    a, b = mlp.down_proj.lora_A["default"].weight, mlp.down_proj.lora_B["default"].weight
    assert torch.equal(a.grad, mm(mm(seen["dy"], b * mlp.down_proj.scaling["default"]).T, h))


WAYS = {
    "bfloat16": {},
    "autocast": {},
    "checkpointing": {},
    "reentrant checkpointing": {},
    "dropout": {"lora_dropout": 0.3},
    "two adapters": {},
    "merged and unmerged": {},
    "hooked": {},
    "DoRA": {"use_dora": True},
    "no adapter on down": {"target_modules": ["q_proj", "gate_proj"]},
}


@pytest.mark.parametrize("how", WAYS)
def test_recomputing_together_with(how):
    """The same forward, only down's dA differs and little, an empty table; where it cannot apply the gradients are those of
    keeping."""
    runs = []
    for recompute in (False, True):
        model = tuned("Llama", **WAYS[how]).train()
        if how == "two adapters":
            model.add_adapter("other", NVFP4LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_alpha=3))
            model.base_model.set_adapter(["default", "other"])
        attach(model, recompute_mlp=recompute)
        if how == "bfloat16":
            model.bfloat16()
        elif how == "hooked":
            model.base_model.model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda module, args: None)
        elif "checkpointing" in how:
            reentrant = how == "reentrant checkpointing"
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        merged = None
        if how == "merged and unmerged":
            model.merge_adapter()
            merged = model(input_ids=IDS, labels=IDS).loss.item()
            model.unmerge_adapter()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss, _ = loss_and_gradients(model)
        runs.append(((loss, merged), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (losses, kept), (again, made) = runs
    assert losses == again and handoff.live() == 0
    falls_back = how in ("DoRA", "no adapter on down")
    expected = set() if falls_back else {name for name in kept if "down_proj.lora_A" in name}
    assert {name for name in kept if not torch.equal(kept[name], made[name])} == expected
    assert len(expected) == (0 if falls_back else 4 if how == "two adapters" else 2)
    assert all(cosine(kept[name], made[name]) > LEAST_COSINE for name in expected)


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


def test_recomputing_in_a_compiled_model():
    """One graph, which keeps less too, and the gradients of eager code: FP32 sums in another order are far less than what
    recomputing changes."""
    eager, compiled, sizes = {}, {}, {}
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    for recompute in (False, True):
        model = tuned("Llama", accuracy="paper")
        attach(model, recompute_mlp=recompute)
        mlp = model.base_model.model.model.layers[0].mlp
        torch._dynamo.reset()
        for results, call in ((eager, mlp), (compiled, torch.compile(mlp, backend="aot_eager", fullgraph=True))):
            mlp.zero_grad()
            y, sizes[recompute] = bytes_for_backward(model, lambda call=call: call(x.clone().requires_grad_()))
            y.square().sum().backward()
            results[recompute] = y.detach(), mlp.down_proj.lora_A["default"].weight.grad.clone()
    torch._dynamo.reset()
    assert torch.equal(compiled[True][0], compiled[False][0])
    change = (eager[True][1] - eager[False][1]).norm()
    assert 0 < change and (compiled[True][1] - eager[True][1]).norm() < 1e-3 * change
    assert sizes[False] - sizes[True] == len(x) * (padded_k(model.config.intermediate_size) * 9 // 16 + 4)


def test_a_recomputed_product_stays_within_fp16():
    """256 and 255 become 264 at 4 bits, whose product is past FP16's end (65504), where that of the two was not."""
    for recompute in (False, True):
        model = tuned("Llama", accuracy="paper")
        attach(model, recompute_mlp=recompute)
        mlp = model.half().base_model.model.model.layers[0].mlp
        for layer, value in ((mlp.gate_proj, 256.0), (mlp.up_proj, 255.0)):
            first = F.pad(torch.tensor([value]), (0, 175)).half()
            layer.register_forward_hook(lambda m, args, y, first=first: torch.where(first > 0, first, y))
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
        (mlp(x).float() * 1e-4).sum().backward()
        assert torch.isfinite(mlp.down_proj.lora_A["default"].weight.grad).all()


def test_the_configuration_asks_for_recomputing():
    """It reaches the MLPs of nvfp4. Other backends keep their activations otherwise and ignore it, like the other words for
    nvfp4."""
    for recompute in (False, True):
        model = tuned("Llama", fused=True, recompute_mlp=recompute)
        assert [m.recompute for m in model.modules() if isinstance(m, FusedGatedMLP)] == [recompute] * 2
    others = [tuned("Llama", fused=True, backend="bf16", activations="nvfp4", recompute_mlp=word) for word in (False, True)]
    (loss, kept), (again, made) = map(loss_and_gradients, others)
    assert loss == again and torch.equal(kept, made)


def test_copies_pickles_and_merges(tmp_path):
    model = tuned("Llama")
    attach(model)
    model.eval()
    with torch.no_grad():
        logits = model(IDS).logits
        assert torch.equal(copy.deepcopy(model)(IDS).logits, logits)
        torch.save(model, tmp_path / "model.pt")
        assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(IDS).logits, logits)
    merged = model.merge_and_unload()
    assert not any(isinstance(m, NVFP4RMSNorm | FusedGatedMLP) for m in merged.modules())
    assert type(merged.model.layers[0].mlp) is hf.models.llama.modeling_llama.LlamaMLP


def test_dequantising_detaches():
    """A norm must not quantise for linears that are dense again."""
    model = freeze_model(tuned("Llama").unload()).requires_grad_(False)
    with torch.no_grad():
        expected = dequantize_model(copy.deepcopy(model))(IDS).logits
        attach(model)
        assert torch.equal(dequantize_model(model)(IDS).logits, expected)
    assert not attached(model)


def test_row_sum_does_not_depend_on_the_order():
    x = torch.randn(64, 1000) * torch.logspace(-6, 6, 1000)
    whole = x[:, :992]
    moved = whole.view(64, 62, 16)[:, torch.randperm(62)].reshape(64, 992)
    assert torch.equal(fused_reference.row_sum(whole), fused_reference.row_sum(moved))
    exact = x.double().sum(1)
    assert ((fused_reference.row_sum(x).double() - exact).abs() <= 2**-20 * x.double().abs().sum(1)).all()


@pytest.mark.parametrize("how", ["compiled", "hooked", "global hook"])
def test_whoever_looks_at_the_product_of_the_mlp_finds_values(how):
    """down's input has no values where nobody but down reads it; a compiler, and hooks, are somebody."""
    model, seen = tuned("Llama", accuracy="balanced"), []  # one term at down: quantised again, its values give the same codes
    attach(model)
    expected = loss_and_gradients(model)
    down = model.base_model.model.model.layers[0].mlp.down_proj
    handle = None
    if how == "compiled":
        down.compile(backend="eager")
    elif how == "hooked":
        handle = down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    else:
        hook = lambda module, args: seen.append(args[0]) if module is down else None  # noqa: E731
        handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        got = loss_and_gradients(model)
    finally:
        if handle is not None:
            handle.remove()
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-6)  # FP32 sums in another order
    assert all(x.abs().sum() > 0 for x in seen)
    assert len(seen) == (how != "compiled")
