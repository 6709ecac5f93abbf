"""Rotary embedding: the bits of transformers' function forward and backward, and a patch that comes, serves and goes quietly."""

import gc
import shutil
import sys
import types

import pytest
import torch
import transformers as hf
from _assertions import assert_same_bits, unit
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from peft_nvfp4.fusion import rope
from peft_nvfp4.fusion.rope import FUSED, NAME, attach_rope, detach_rope, rotary_embedding
from peft_nvfp4.ops import fused

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
eager = modeling_llama.apply_rotary_pos_emb
by_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def clean():
    """No patch survives a test."""
    yield
    for patch in rope._PATCHES:
        patch.models.clear()
    rope._restore_unused()
    assert modeling_llama.apply_rotary_pos_emb is eager


@pytest.fixture
def everywhere(monkeypatch):
    """Calls on the CPU count as ours, with the reference in place of the kernel. Returns the list of such calls."""
    calls = []

    def call(*args):
        calls.append(args)
        return rotary_embedding(*args)

    monkeypatch.setattr(rope, "_on_a_kernel", lambda x: True)
    monkeypatch.setattr(rope, "rotary_embedding", call)
    return calls


# ---------------------------------------------------------------------------------------------- the function
B, S, D = 2, 5, 12
LAYOUTS = {  # name -> x (b, h, s, d) of that storage
    "tokens first": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
    "heads first": lambda b, h, s, d: torch.randn(b, h, s, d),
    "part of qkv": lambda b, h, s, d: torch.randn(b, s, (h + 3) * d)[..., : h * d].view(b, s, h, d).transpose(1, 2),
    "batch inside": lambda b, h, s, d: torch.randn(s, b, h, d).permute(1, 2, 0, 3),
    "values apart": lambda b, h, s, d: torch.randn(b, h, d, s).transpose(2, 3),
}


def inputs(dtype, layout="tokens first", batch=1, s=S, device="cpu"):
    """(q, k, cos, sin) with zeros of both signs and numbers whose products underflow; the halves of cos and sin differ."""
    q, k = (LAYOUTS[layout](B, h, s, D) for h in (4, 2))
    for x in (q, k):
        x.view_as(x)[:, :, ::2, 1:4] = torch.tensor([0.0, -0.0, 1e-7])
        x[..., 4] *= 2.0**-120
    angles = torch.randn(batch, s, D) * 9
    cos, sin = angles.cos(), angles.sin()
    cos[..., 5], sin[..., 6] = 0.0, -0.0
    return [x.to(device, dtype, memory_format=torch.preserve_format) for x in (q, k, cos, sin)]


def gradients_of(outputs, order):
    """One gradient per output: random, with zeros, in storage of that order."""
    made = [LAYOUTS[order](*t.shape).to(t.device, t.dtype) for t in outputs]
    for g in made:
        g[:, :, 1], g[:, :, 2, ::2] = -0.0, 0.0
    return made


def meaningful_strides(t):
    return [stride for size, stride in zip(t.shape, t.stride()) if size > 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, B], ids=["one cos", "cos per sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
@by_dtype
def test_forward_and_backward_give_the_bits_and_the_layout_of_transformers(dtype, layout, batch, device):
    q, k, cos, sin = inputs(dtype, layout, batch, device=device)
    q.requires_grad_(), k.requires_grad_()
    got, expected = rotary_embedding(q, k, cos, sin), eager(q, k, cos, sin)
    for a, b, name in zip(got, expected, "qk"):
        assert_same_bits(a.cpu(), b.cpu(), name)
        assert meaningful_strides(a) == meaningful_strides(b)
    for order in ("tokens first", "heads first", "values apart"):
        grads = gradients_of(got, order)
        ours, theirs = (torch.autograd.grad(out, (q, k), grads, retain_graph=True) for out in (got, expected))
        for a, b, name in zip(ours, theirs, ("dq", "dk")):
            assert_same_bits(a.cpu(), b.cpu(), f"{name}, gradients with {order}")
            a.transpose(1, 2).view(B * S, -1)  # the gradient of a projection's output: no copy


@pytest.mark.parametrize("s", [1, 3])
def test_one_token_one_head_and_an_expanded_gradient(s):
    """The sum's gradient has no strides; sizes of 1 leave strides open."""
    q, k = (torch.randn(B, s, 1, D, dtype=BF16).transpose(1, 2).requires_grad_() for _ in range(2))
    cos, sin = torch.randn(2, 1, s, D, dtype=BF16)
    got, expected = rotary_embedding(q, k, cos, sin), eager(q, k, cos, sin)
    gradients = [torch.autograd.grad(out[0].sum() + out[1].sum(), (q, k)) for out in (got, expected)]
    for a, b in zip((*got, *gradients[0]), (*expected, *gradients[1])):
        assert_same_bits(a.detach(), b.detach(), "outputs and gradients")


def test_only_what_needs_a_gradient_gets_one():
    q, k, cos, sin = inputs(BF16)
    rotated_q, rotated_k = rotary_embedding(q.requires_grad_(), k, cos, sin)
    assert rotated_q.requires_grad and not rotated_k.requires_grad
    dq = gradients_of([rotated_q], "heads first")[0]
    expected = eager(q, k, cos, sin)[0]
    assert_same_bits(*(torch.autograd.grad(t, q, dq)[0] for t in (rotated_q, expected)), "dq")
    outputs = rotary_embedding(q, k.requires_grad_(), cos, sin)
    outputs[1].sum().backward()
    assert q.grad is None and k.grad is not None  # nothing depends on q
    with torch.no_grad():
        assert not rotary_embedding(q, k, cos, sin)[0].requires_grad


def test_second_derivatives_are_those_of_transformers():
    q, k, cos, sin = inputs(FP32)
    q.requires_grad_(), k.requires_grad_()
    results = []
    for function in (rotary_embedding, eager):
        a, b = function(q, k, cos, sin)
        first = torch.autograd.grad((a**3).sum() + (a.sum(1) * b.sum(1)).sum(), (q, k), create_graph=True)
        results.append(torch.autograd.grad(sum(f.square().sum() for f in first), (q, k)))
    for got, expected in zip(*results):
        # the same operations; only the order in which autograd adds up to 4 + 2 partial gradients may differ
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_nothing_but_cos_and_sin_is_kept():
    q, k, cos, sin = inputs(BF16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotary_embedding(q.requires_grad_(), k.requires_grad_(), cos, sin)
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()} and len(kept) == 2


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=torch.zeros(2, 3, 4)), r"q must be \(B, H, S, D\)"),
        (dict(q=torch.zeros(2, 3, 5, 7)), "D must be even, got 7"),
        (dict(k=torch.zeros(2, 3, 4, 8)), "k must be"),
        (dict(cos=torch.zeros(3, 5, 8)), "cos must be"),
        (dict(sin=torch.zeros(1, 5, 8, dtype=BF16)), "sin must be"),
    ],
)
def test_bad_arguments_name_themselves(change, message):
    arguments = dict(q=torch.zeros(2, 4, 5, 8), k=torch.zeros(2, 1, 5, 8), cos=torch.zeros(1, 5, 8), sin=torch.zeros(1, 5, 8))
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        fused.rotary_embedding(*(arguments | change).values(), False)


# ---------------------------------------------------------------------------------------------- torch.compile
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="not run: inductor needs a C++ compiler (g++)")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize("trained", ["qk", "q"])
def test_the_function_is_captured_whole(backend, trained):
    torch._dynamo.reset()
    q, k, cos, sin = inputs(BF16)
    q.requires_grad_(), k.requires_grad_("k" in trained)
    leaves = [t for t in (q, k) if t.requires_grad]
    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(rotary_embedding, backend=backend, fullgraph=True)
        got, expected = compiled(q, k, cos, sin), rotary_embedding(q, k, cos, sin)
        grads = gradients_of(expected, "tokens first")[: len(leaves)]
        ours, theirs = (torch.autograd.grad(out[: len(leaves)], leaves, grads) for out in (got, expected))
    for a, b in zip((*got, *ours), (*expected, *theirs)):
        assert_same_bits(a.detach(), b.detach(), "compiled")
        assert meaningful_strides(a) == meaningful_strides(b)


def test_an_attached_model_compiles_whole_with_the_original(everywhere):
    torch._dynamo.reset()
    model = tiny("Llama", FP32)
    expected = step(model)
    attach_rope(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = step(model, compiled)
    assert not everywhere
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=0)  # a compiler may reorder FP32 sums


# ---------------------------------------------------------------------------------------------- models
FAMILIES = {"Llama": {}, "Qwen3": dict(head_dim=16), "Gemma2": dict(head_dim=16), "SmolLM3": {}, "Phi3": {}}
"""Plain; norms of q and k; scaled; layers without; one linear for q, k and v. In which others it is found: test_families."""
IDS = torch.arange(24).view(2, 12) * 5 % 128


def tiny(family, dtype):
    torch.manual_seed(0)
    common = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    common |= dict(vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2, **FAMILIES.get(family, {}))
    return getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**common)).to(dtype).train()


def step(model, call=None):
    model.zero_grad()
    ids = IDS.to(model.device)
    out = (model if call is None else call)(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(got, expected):
    """Bit for bit, except for weights of norms of q and k: their gradient is a sum over tokens and heads, and its FP32 order
    follows the storage of dq and dk, which we write tokens first. Two orders of n = 96 terms differ by at most 2 n 2**-24 times
    the sum of the magnitudes, which is about sqrt(n) < 10 times the largest gradient; then one rounding to the dtype."""
    assert_same_bits(got[0], expected[0], "logits")
    assert got[1].keys() == expected[1].keys() and got[1]
    for name, grad in expected[1].items():
        if "_norm.weight" in name and "self_attn" in name:
            bound = (2 * 96 * 2.0**-24 * 10 + 2 * unit(grad.dtype)) * grad.abs().max().item()
            torch.testing.assert_close(got[1][name], grad, rtol=0, atol=bound)
        else:
            assert_same_bits(got[1][name], grad, name)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attaching_changes_no_bit_of_a_training_step(family, dtype, everywhere):
    model = tiny(family, dtype)
    module = sys.modules[type(model).__module__]
    original = getattr(module, NAME)
    expected = step(model)
    assert attach_rope(model) == {module.__name__: FUSED}
    assert getattr(module, NAME) is not original
    got = step(model)
    skipped_layers = sum(not use for use in getattr(model.config, "no_rope_layers", None) or [])
    assert len(everywhere) == 2 - skipped_layers > 0
    assert_same_step(got, expected)
    detach_rope(model)
    assert getattr(module, NAME) is original
    step(model)
    assert len(everywhere) == 2 - skipped_layers


def test_attach_twice_detach_once(everywhere):
    """Another model of the file is served as well, other files are not touched. A reference that outlives the patch calls the
    original."""
    model, other, mistral = tiny("Llama", FP32), tiny("Llama", FP32), modeling_mistral.apply_rotary_pos_emb
    expected = step(other)
    assert attach_rope(torch.nn.Linear(2, 2)) == {}
    assert attach_rope(model) == attach_rope(model) == {modeling_llama.__name__: FUSED}
    assert modeling_llama.apply_rotary_pos_emb.__wrapped__ is eager  # one layer of wrapping
    assert modeling_llama.apply_rotary_pos_emb.__doc__ == eager.__doc__
    assert_same_step(step(other), expected)
    assert len(everywhere) == 2 and modeling_mistral.apply_rotary_pos_emb is mistral
    kept = modeling_llama.apply_rotary_pos_emb
    detach_rope(model)
    detach_rope(model)
    assert modeling_llama.apply_rotary_pos_emb is eager and not rope._PATCHES
    kept(*inputs(BF16))
    assert len(everywhere) == 2


def test_the_patch_lives_as_long_as_an_attached_model():
    models = [tiny("Llama", FP32) for _ in range(3)]
    for model in models:
        attach_rope(model)
    detach_rope(models.pop())
    assert modeling_llama.apply_rotary_pos_emb is not eager
    del model
    models.pop()
    gc.collect()
    assert modeling_llama.apply_rotary_pos_emb is not eager
    models.pop()
    gc.collect()  # from here on the wrapper is a detour, until the next occasion
    assert not any(patch.models for patch in rope._PATCHES)
    detach_rope(torch.nn.Identity())
    assert modeling_llama.apply_rotary_pos_emb is eager and not rope._PATCHES


def test_a_partial_rotary_embedding_is_left_alone(everywhere):
    """Phi-4-mini rotates part of each head. Where the model does not tell, the calls themselves go to the original."""
    torch.manual_seed(0)
    config = hf.Phi3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
        pad_token_id=0, rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    )  # fmt: skip
    model = hf.Phi3ForCausalLM(config)
    module = sys.modules[type(model).__module__]
    original = getattr(module, NAME)
    assert attach_rope(model) == {module.__name__: "rotates 8 of 16 values per head"}
    assert getattr(module, NAME) is original
    whole = hf.Phi3ForCausalLM(hf.Phi3Config(**{**config.to_dict(), "rope_parameters": None}))
    expected = step(model)
    assert attach_rope(whole) == {module.__name__: FUSED}
    assert_same_step(step(model), expected)
    assert not everywhere


# ---------------------------------------------------------------------------------------------- other people's functions
class Attention(torch.nn.Module):
    """Its class claims to come from a modeling file made for the test."""


@pytest.fixture
def modeling(monkeypatch):
    """A modeling file with the function of transformers."""
    module = types.ModuleType("modeling_test")
    module.apply_rotary_pos_emb = eager
    monkeypatch.setitem(sys.modules, "modeling_test", module)
    monkeypatch.setattr(Attention, "__module__", "modeling_test")
    return module


def _in_float(q, k, cos, sin, unsqueeze_dim=1):
    """As Ernie 4.5: one rounding."""
    return tuple(t.to(q.dtype) for t in eager(q.float(), k.float(), cos.float(), sin.float()))


def _gradient_in_float(q, k, cos, sin, unsqueeze_dim=1):
    """The same values, other gradients."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k):
            return eager(q, k, cos, sin)

        @staticmethod
        def backward(ctx, *grads):
            return tuple(t.to(q.dtype) for t in _rotated_back(grads, cos.float(), sin.float()))

    return Function.apply(q, k)


def _rotated_back(grads, cos, sin):
    for g in grads:
        h1, h2 = (g.float() * sin[:, None]).chunk(2, -1)
        yield g.float() * cos[:, None] + torch.cat((h2, -h1), -1)


def _raises(q, k, cos, sin, unsqueeze_dim=1):
    raise RuntimeError("0 active drivers")


@pytest.mark.parametrize("function", [_in_float, _gradient_in_float, _raises])
def test_a_function_that_computes_something_else_is_left_alone(function, modeling):
    modeling.apply_rotary_pos_emb = function
    (reason,) = attach_rope(Attention()).values()
    assert ("0 active drivers" if function is _raises else "computes something else") in reason
    assert modeling.apply_rotary_pos_emb is function and not rope._PATCHES


def test_a_patch_of_somebody_else_stays(modeling, everywhere):
    """Liger rebinds the same global: after ours, it must survive our detaching; a second attach judges it by its bits."""
    model = Attention()
    attach_rope(model)
    modeling.apply_rotary_pos_emb = _in_float
    assert "computes something else" in attach_rope(model)["modeling_test"]
    detach_rope(model)
    assert modeling.apply_rotary_pos_emb is _in_float and not rope._PATCHES

    modeling.apply_rotary_pos_emb = eager
    first, second = Attention(), Attention()
    attach_rope(first)
    ours = modeling.apply_rotary_pos_emb
    modeling.apply_rotary_pos_emb = around = lambda *args: ours(*args)
    assert attach_rope(second) == {"modeling_test": FUSED}  # the same bits: replaced as well
    detach_rope(first)
    assert modeling.apply_rotary_pos_emb is not around
    detach_rope(second)
    assert modeling.apply_rotary_pos_emb is around and not rope._PATCHES


class Subclass(torch.Tensor):
    pass


def patch_of(original):
    """A patch of a modeling file with that function, used by a model that lives as long as the patch."""
    module = types.ModuleType("m")
    module.apply_rotary_pos_emb, module.model = original, torch.nn.Identity()
    patch = rope._Patch(module)
    patch.models.add(module.model)
    return patch


OTHERS = {  # call -> (arguments, keywords) made from (q, k, cos, sin)
    "keywords": lambda q, k, c, s: ((), dict(q=q, k=k, cos=c, sin=s)),
    "a fifth argument": lambda q, k, c, s: ((q, k, c, s, None), {}),
    "other unsqueeze_dim": lambda q, k, c, s: ((q.transpose(1, 2), k.transpose(1, 2), c, s), dict(unsqueeze_dim=2)),
    "three dimensions": lambda q, k, c, s: ((q[:, 0], k[:, 0], c, s), {}),
    "cos of four dimensions": lambda q, k, c, s: ((q, k, c[:, None], s[:, None]), {}),
    "cos of one token": lambda q, k, c, s: ((q, k, c[:, :1], s[:, :1]), {}),
    "fewer cos than values": lambda q, k, c, s: ((q, k, c[..., :6], s[..., :6]), {}),
    "FP32 cos": lambda q, k, c, s: ((q, k, c.float(), s.float()), {}),
    "FP32 k": lambda q, k, c, s: ((q, k.float(), c, s), {}),
    "FP64": lambda q, k, c, s: (tuple(t.double() for t in (q, k, c, s)), {}),
    "trainable cos": lambda q, k, c, s: ((q, k, c.requires_grad_(), s), {}),
    "odd D": lambda q, k, c, s: (tuple(t[..., :7] for t in (q, k, c, s)), {}),
    "q and k of other lengths": lambda q, k, c, s: ((q, k[:, :, :1], c[:, :1], s[:, :1]), {}),
    "a subclass": lambda q, k, c, s: ((q.as_subclass(Subclass), k, c, s), {}),
    "another device": lambda q, k, c, s: ((q, k.to("meta"), c, s), {}),
}


@pytest.mark.parametrize("call", OTHERS)
def test_calls_that_are_not_ours_go_to_the_original(call, everywhere):
    seen = []
    patch = patch_of(lambda *args, **kw: seen.append((args, kw)) or "original")
    args, kwargs = OTHERS[call](*inputs(BF16))
    assert patch.replacement(*args, **kwargs) == "original"
    assert seen == [(args, kwargs)] if not args else seen[0][1] == kwargs and all(a is b for a, b in zip(seen[0][0], args))
    assert not everywhere


def test_calls_that_are_ours(monkeypatch):
    """On a CPU none is: the reference would be slower than the original."""
    calls = []
    monkeypatch.setattr(rope, "rotary_embedding", lambda *args: calls.append(args) or rotary_embedding(*args))
    q, k, cos, sin = inputs(BF16)
    patch = patch_of(eager)
    assert_same_bits(patch.replacement(q, k, cos, sin)[1], eager(q, k, cos, sin)[1], "k")
    assert not calls
    monkeypatch.setattr(rope, "_on_a_kernel", lambda x: True)
    patch = patch_of(lambda *args, **kw: pytest.fail("the original was called"))
    for kwargs in ({}, {"unsqueeze_dim": 1}):
        assert_same_bits(patch.replacement(q, k, cos, sin, **kwargs)[0], eager(q, k, cos, sin)[0], "q")
    patch.replacement(torch.nn.Parameter(q), k, cos, sin)
    assert len(calls) == 3


def test_transforms_go_to_the_original(everywhere, modeling):
    model = Attention()
    attach_rope(model)
    function = modeling.apply_rotary_pos_emb
    q, k, cos, sin = inputs(FP32)
    call = lambda x: function(x, k, cos, sin)[0]
    expected = eager(q, k, cos, sin)[0]
    assert_same_bits(torch.func.vmap(lambda x: call(x[None])[0])(q), expected, "vmap")
    _, tangent = torch.func.jvp(call, (q,), (q,))
    torch.testing.assert_close(tangent, expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(call(dual)).tangent, expected)
    torch.testing.assert_close(torch.jit.trace(call, (q,), check_trace=False)(q), expected)
    assert not everywhere
    call(q)
    assert len(everywhere) == 1


# ---------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@by_dtype
def test_an_attached_model_runs_the_kernel_with_the_bits_of_transformers(dtype, monkeypatch):
    """Eager attention: flash attention's backward adds in no fixed order."""
    calls = []
    monkeypatch.setattr(rope, "rotary_embedding", lambda *args: calls.append(args[0].shape) or rotary_embedding(*args))
    torch.manual_seed(0)
    model = tiny("Llama", dtype).cuda()
    model.set_attn_implementation("eager")
    results = []
    for attached in (False, True):
        if attached:
            assert attach_rope(model) == {modeling_llama.__name__: FUSED}
        logits, gradients = step(model)
        results.append({"logits": logits} | {name: g for name, g in gradients.items() if ".layers." in name})
        assert len(calls) == 2 * attached
    for name, t in results[0].items():
        assert_same_bits(results[1][name], t, name)
