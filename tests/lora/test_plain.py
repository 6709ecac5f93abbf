"""Hooks on modules that a layer computes without calling them, and what else has to be called: they run, with PEFT's effect."""

import copy

import pytest
import torch
from _peft_models import by_backend
from _wrappers import PassesOn
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize

from peft_nvfp4 import NVFP4LoraConfig, attach, detach
from peft_nvfp4.fusion.mlp import FusedGatedMLP
from peft_nvfp4.fusion.norm import WATCHED

IDS = torch.arange(14).view(2, 7) % 32


def adapted(config=NVFP4LoraConfig, before=None, **settings):
    torch.manual_seed(0)
    base = tiny_llama(num_hidden_layers=2)
    if before is not None:
        before(base.model.layers[1])
    fused, make = settings.pop("fused", True), {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **settings}
    model = get_peft_model(base, config(**make))
    return model if fused else detach(model)


def layer_of(model):
    """The second one: its input has a gradient."""
    return model.base_model.model.model.layers[1]


def run(model):
    """Logits, and the gradient of an adapter."""
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.float().pow(2).mean().backward()
    return logits.detach(), layer_of(model).self_attn.q_proj.lora_A["default"].weight.grad.clone()


def without_norms(model):
    """Fallbacks but for those of norms: hooks on a reader are hooks on the way to it."""
    return {name: reason for name, reason in model.base_model.nvfp4_report.fallbacks.items() if reason != WATCHED.reason}


PLACES = {
    "k_proj.base_layer": lambda layer: layer.self_attn.k_proj.base_layer,
    "down_proj.base_layer": lambda layer: layer.mlp.down_proj.base_layer,
    "lora_A": lambda layer: layer.self_attn.q_proj.lora_A["default"],
    "lora_B": lambda layer: layer.self_attn.q_proj.lora_B["default"],
    "lora_dropout": lambda layer: layer.self_attn.q_proj.lora_dropout["default"],
    "act_fn": lambda layer: layer.mlp.act_fn,
}
SETTINGS = {
    **{"nvfp4": {}, "unfused": dict(fused=False), "nf4": dict(backend="nf4"), "bf16": dict(backend="bf16")},
    "codes kept": dict(backend="bf16", memory="small"),
}
BACKWARD = {"full_backward": lambda m, dx, dy: dx, "full_backward_pre": lambda m, dy: dy}


def double(module, args, y):
    return 2 * y


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_hooks_have_the_effect_that_peft_gives_them(settings):
    """Doubling a module's output by a hook is what another weight (or scaling) does, without hooks."""
    model = adapted(**settings)
    plain = run(model)
    for name, place in PLACES.items():
        module, calls = place(layer_of(model)), []
        assert not model.base_model.nvfp4_report.fallbacks, name
        handle = module.register_forward_hook(lambda m, args, y: (calls.append(1), 2 * y)[1])
        hooked = run(model)
        handle.remove()
        assert calls == [1] and not torch.allclose(hooked[0], plain[0], rtol=1e-3), name
        fallbacks = without_norms(model)
        assert len(fallbacks) == (name != "act_fn" or isinstance(layer_of(model).mlp, FusedGatedMLP))
        for kind, hook in BACKWARD.items():
            seen = []
            handle = getattr(module, f"register_{kind}_hook")(lambda *args: seen.append(hook(*args)))  # noqa: B023
            run(model)
            handle.remove()
            assert len(seen) == 1, (name, kind)
        model.base_model.nvfp4_report.fallbacks.clear()
        for got, expected in zip(run(model), plain):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@by_backend
@pytest.mark.parametrize("scaled", ["lora_A", "lora_B"])
def test_a_hook_on_an_adapter_is_a_factor(backend, scaled):
    model = adapted(backend=backend)
    layer = layer_of(model).self_attn.q_proj
    handle = getattr(layer, scaled)["default"].register_forward_hook(double)
    hooked = run(model)
    handle.remove()
    layer.scaling["default"] *= 2
    logits, gradient = run(model)
    torch.testing.assert_close(hooked[0], logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hooked[1], gradient, rtol=1e-3, atol=1e-6)


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("below", ["lora_dropout", "lora_A"])
def test_an_edit_of_what_an_adapter_is_given_reaches_the_next_one(backend, dtype, below):
    """As in stock PEFT, where the adapters share an FP32 copy of a 16-bit input."""
    config = dict(r=4, target_modules=["0"], init_lora_weights=False)
    inputs = []
    for make in (lambda: NVFP4LoraConfig(**config, backend=backend), lambda: LoraConfig(**config)):
        torch.manual_seed(0)
        model = get_peft_model(nn.Sequential(nn.Linear(32, 32)).to(dtype), make())
        model.add_adapter("second", make())
        model.base_model.set_adapter(["default", "second"])
        layer, seen = model.base_model.model[0], []
        getattr(layer, below)["default"].register_forward_pre_hook(lambda m, args: args[0].detach().fill_(2))
        layer.lora_A["second"].register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))  # noqa: B023
        model(torch.randn(3, 32).to(dtype))
        inputs += seen
    ours, stock = inputs
    assert torch.equal(ours, stock) and ours.dtype == torch.float32 and (ours == 2).all()


@by_backend
def test_a_hook_that_was_there_before(backend):
    """It is carried to the frozen layer, and the report says what it costs."""
    seen = []
    before = lambda layer: layer.self_attn.q_proj.register_forward_hook(lambda m, args, y: seen.append(type(m).__name__))  # noqa: E731
    model = adapted(before=before, backend=backend)
    seen.clear()
    run(model), run(model)
    assert len(seen) == 2 and seen[0].endswith("FrozenLinear")
    report = model.base_model.nvfp4_report
    assert without_norms(model) == {"model.layers.1.self_attn.q_proj": "base_layer: it has hooks"}
    assert "computed module by module: model.layers.*.self_attn.q_proj: base_layer: it has hooks" in str(report)
    assert copy.deepcopy(model).base_model.nvfp4_report == report
    assert attach(model).fallbacks is report.fallbacks


class Other(PassesOn):
    """A module of the user's around one of PEFT's or ours; ``name`` of an attribute is passed on."""

    def __init__(self, inner, calls):
        super().__init__(inner)
        self.calls = calls

    def forward(self, x):
        self.calls.append(1)
        return self.inner(x)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def wrapped(parent, name, module, calls):
    setattr(parent, name, Other(module, calls))


def own_forward(parent, name, module, calls):
    forward = module.forward
    module.forward = lambda x: (calls.append(1), forward(x))[1]


def own_class(parent, name, module, calls):
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, x: (calls.append(1), kind.forward(self, x))[1]})


@by_backend
@pytest.mark.parametrize("change", [wrapped, own_forward, own_class])
def test_a_module_that_is_not_peft_s_own_is_called(backend, change):
    model = adapted(backend=backend)
    plain, calls, layer = run(model), [], layer_of(model).self_attn.q_proj
    change(layer, "base_layer", layer.base_layer, calls)
    for part in ("lora_A", "lora_B", "lora_dropout"):
        change(getattr(layer, part), "default", getattr(layer, part)["default"], calls)
    for got, expected in zip(run(model), plain):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    assert len(calls) == 4 and len(model.base_model.nvfp4_report.fallbacks) == 1


@by_backend
def test_hooks_of_accelerate_that_only_move_tensors_cost_nothing(backend):
    """As ``device_map`` over several GPUs sets them. Those that load weights have to be called, and a forward of the user's own
    below them, too."""
    model, calls = adapted(backend=backend), []
    plain, base = run(model), layer_of(model).self_attn.q_proj.base_layer
    add_hook_to_module(base, AlignDevicesHook("cpu"))
    assert all(map(torch.equal, run(model), plain)) and not model.base_model.nvfp4_report.fallbacks
    remove_hook_from_module(base)
    own_forward(None, "", base, calls)
    add_hook_to_module(base, AlignDevicesHook("cpu"))
    run(model)
    assert calls == [1] and model.base_model.nvfp4_report.fallbacks


@by_backend
def test_parametrisations_and_biases_of_adapters_count(backend):
    model = adapted(backend=backend)
    layer = layer_of(model).self_attn.q_proj
    layer.scaling["default"] *= 2
    expected = run(model)[0]
    layer.scaling["default"] /= 2
    parametrize.register_parametrization(layer.lora_A["default"], "weight", Doubled())
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
    parametrize.remove_parametrizations(layer.lora_A["default"], "weight", leave_parametrized=False)
    layer.lora_A["default"].bias = nn.Parameter(torch.ones(4))
    assert not torch.allclose(model(input_ids=IDS).logits, run(adapted(backend=backend))[0], rtol=1e-3)


@by_backend
def test_global_hooks_see_every_module(backend):
    """As a profiler of modules sets them; stock PEFT calls the same."""

    def called(model):
        names, seen = {m: n.replace("default.", "") for n, m in model.named_modules()}, set()
        handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.add(names.get(m, "")))
        try:
            run(model)
        finally:
            handle.remove()
        return seen

    model = adapted(backend=backend)
    assert called(model) == called(adapted(LoraConfig))
    assert "hooks on all modules" in str(model.base_model.nvfp4_report)


def test_merge_aware_adapters_refuse_what_they_cannot_call():
    model = adapted(merge_aware=True)
    run(model)
    layer = layer_of(model).self_attn.q_proj
    handle = layer.lora_A["default"].register_forward_hook(double)
    with pytest.raises(RuntimeError, match="lora_A.default: it has hooks.*on the LoRA layer itself"):
        run(model)
    handle.remove()
    layer.register_forward_hook(double)
    run(model)


@by_backend
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "mixed batch"])
def test_variants_and_mixed_batches_call_what_peft_calls(backend, dora):
    results = []
    for config, settings in ((NVFP4LoraConfig, dict(backend=backend)), (LoraConfig, {})):
        model, calls = adapted(config, use_dora=dora, **settings), []
        layer = layer_of(model).self_attn.q_proj
        for name, module in dict(base=layer.base_layer, a=layer.lora_A["default"], b=layer.lora_B["default"]).items():
            module.register_forward_hook(lambda *args, name=name: calls.append(name))  # noqa: B023
        with torch.no_grad():
            model.eval()(input_ids=IDS, **({} if dora else dict(adapter_names=["default", "__base__"])))
        results.append(calls)
    assert results[0] == results[1] and {"base", "a", "b"} == set(results[0])
