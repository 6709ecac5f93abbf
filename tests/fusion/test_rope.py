"""Rotary embedding of a model: the bits of transformers in a training step, and a patch that comes, serves and goes quietly."""

import copy
import gc
import types

import pytest
import torch
import transformers as hf
from _assertions import assert_same_bits, unit
from _rope import BF16, FP32, by_dtype, eager, inputs
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from peft_nvfp4.fusion import rope
from peft_nvfp4.fusion.rope import FUSED, NAME, attach_rope, detach_rope, rotary_embedding


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


# ---------------------------------------------------------------------------------------------- models

FAMILIES = {  # family -> settings
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": dict(head_dim=16),
    "Gemma2": dict(head_dim=16),
    "Gemma3": dict(head_dim=16),
    "SmolLM3": {},
    "Phi3": {},
    "Qwen2_5_VL": {},
}
IDS = torch.arange(24).view(2, 12) * 5 % 128


def tiny(family, dtype):
    torch.manual_seed(0)
    common = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    common |= dict(vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2, **FAMILIES.get(family, {}))
    if family == "Gemma3":
        model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**common))
    elif family == "Qwen2_5_VL":
        tokens = dict(image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123)
        vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4)
        rotary = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]))
        config = hf.Qwen2_5_VLConfig(text_config=common | rotary, vision_config=vision, **tokens)
        model = hf.Qwen2_5_VLForConditionalGeneration(config)
    else:
        model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**common))
    return model.to(dtype).train()


def step(model, call=None):
    model.zero_grad()
    out = (model if call is None else call)(input_ids=IDS, labels=IDS, use_cache=False)
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


def modeling_of(model):
    files, name = rope._modeling_files(model), type(model).__module__
    if name not in files:
        pytest.skip(f"{name} of this transformers version has no function {NAME}")
    return files[name]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attaching_changes_no_bit_of_a_training_step(family, dtype, everywhere):
    model = tiny(family, dtype)
    module = modeling_of(model)
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
    model = tiny("Llama", FP32)
    assert attach_rope(model) == attach_rope(model) == {modeling_llama.__name__: FUSED}
    assert modeling_llama.apply_rotary_pos_emb.__wrapped__ is eager  # one layer of wrapping
    assert modeling_llama.apply_rotary_pos_emb.__doc__ == eager.__doc__
    detach_rope(model)
    detach_rope(model)
    assert modeling_llama.apply_rotary_pos_emb is eager and not rope._PATCHES


def test_other_families_keep_theirs_and_other_models_their_bits(everywhere):
    model, other = tiny("Llama", BF16), tiny("Llama", BF16)
    mistral = modeling_mistral.apply_rotary_pos_emb
    expected = step(other)
    attach_rope(model)
    assert modeling_mistral.apply_rotary_pos_emb is mistral
    assert_same_step(step(other), expected)
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


def test_a_reference_that_outlives_the_patch_calls_the_original(everywhere):
    model = tiny("Llama", FP32)
    attach_rope(model)
    kept = modeling_llama.apply_rotary_pos_emb
    kept(*inputs(BF16))
    assert len(everywhere) == 1
    detach_rope(model)
    kept(*inputs(BF16))
    assert len(everywhere) == 1


def test_a_partial_rotary_embedding_is_left_alone(everywhere):
    """Phi-4-mini rotates part of each head. Where the model does not tell, the calls themselves go to the original."""
    torch.manual_seed(0)
    config = hf.Phi3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
        pad_token_id=0, rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    )  # fmt: skip
    model = hf.Phi3ForCausalLM(config)
    module = modeling_of(model)
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
    monkeypatch.setitem(__import__("sys").modules, "modeling_test", module)
    monkeypatch.setattr(Attention, "__module__", "modeling_test")
    return module


def _half_cos(q, k, cos, sin, unsqueeze_dim=1):
    """What several models do: the first half of cos and sin stands for both."""
    cos, sin = (torch.cat(2 * (t.chunk(2, -1)[0],), -1) for t in (cos, sin))
    return eager(q, k, cos, sin)


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


def _in_place(q, k, cos, sin, unsqueeze_dim=1):
    raise RuntimeError("0 active drivers")


@pytest.mark.parametrize("function", [_half_cos, _in_float, _gradient_in_float, _in_place])
def test_a_function_that_computes_something_else_is_left_alone(function, modeling):
    modeling.apply_rotary_pos_emb = function
    (reason,) = attach_rope(Attention()).values()
    assert ("0 active drivers" if function is _in_place else "computes something else") in reason
    assert modeling.apply_rotary_pos_emb is function and not rope._PATCHES


def test_interleaved_families_are_left_alone():
    common = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    model = hf.CohereForCausalLM(hf.CohereConfig(**common, vocab_size=128, pad_token_id=0))
    assert "computes something else" in attach_rope(model)[type(model).__module__]


def test_a_model_without_such_a_function():
    assert attach_rope(torch.nn.Linear(2, 2)) == {}


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


def test_calls_that_are_ours(everywhere):
    patch = patch_of(lambda *args, **kw: pytest.fail("the original was called"))
    q, k, cos, sin = inputs(BF16)
    for kwargs in ({}, {"unsqueeze_dim": 1}):
        assert_same_bits(patch.replacement(q, k, cos, sin, **kwargs)[0], eager(q, k, cos, sin)[0], "q")
    patch.replacement(torch.nn.Parameter(q), k, cos, sin)
    assert len(everywhere) == 3


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


def test_on_a_cpu_the_original_runs(monkeypatch):
    monkeypatch.setattr(rope, "rotary_embedding", lambda *args: pytest.fail("the reference ran in place of the original"))
    patch = patch_of(eager)
    q, k, cos, sin = inputs(BF16)
    assert_same_bits(patch.replacement(q, k, cos, sin)[1], eager(q, k, cos, sin)[1], "k")


def test_a_copied_model_computes_the_same(everywhere):
    model = tiny("Llama", BF16)
    attach_rope(model)
    twin = copy.deepcopy(model)
    expected = step(model)
    detach_rope(model)
    assert_same_bits(step(twin)[0], expected[0], "logits")


def test_an_attached_model_compiles_whole_with_the_original(everywhere):
    torch._dynamo.reset()
    model = tiny("Llama", FP32)
    expected = step(model)
    attach_rope(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = step(model, compiled)
    assert not everywhere
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=0)  # a compiler may reorder FP32 sums


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
        model.zero_grad()
        out = model(input_ids=IDS.cuda(), labels=IDS.cuda(), use_cache=False)
        out.loss.backward()
        results.append((out.logits.detach().cpu(), [p.grad.cpu() for p in model.model.layers.parameters()]))
        assert len(calls) == 2 * attached
    assert_same_bits(results[1][0], results[0][0], "logits")
    for a, b in zip(results[1][1], results[0][1]):
        assert_same_bits(a, b, "gradient")
