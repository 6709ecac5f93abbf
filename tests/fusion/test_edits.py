"""Fused modules after somebody has edited the model: what is set on them, or on the modules below, counts as it does unfused."""

import copy
import pickle

import pytest
import torch
from _dataflow_models import IDS, tuned
from _frozen_experts import adapted, experts_of
from _mixtures import mixtral
from _wrappers import PassesOn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.utils import parametrize

from peft_nvfp4 import attach, detach
from peft_nvfp4.fusion.mlp import FusedGatedMLP
from peft_nvfp4.fusion.norm import NVFP4RMSNorm
from peft_nvfp4.training.steps import slow_down_steps


def layer_of(model):
    return model.base_model.model.model.layers[0]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def half(x):
    return 0.5 * torch.relu(x)


def replace_module(layer):
    layer.mlp.act_fn = nn.ReLU()


def replace_forward(layer):
    layer.mlp.act_fn.forward = half


def hook(layer):
    layer.mlp.act_fn.register_forward_hook(lambda module, args, y: 0 * y)


def epsilon(layer):
    layer.input_layernorm.variance_epsilon = 5.0


def weight(layer):
    layer.input_layernorm.weight = nn.Parameter(torch.full((64,), 3.0), requires_grad=False)


class Tripled(nn.Module):
    def forward(self, weight):
        return 3 * weight


def parametrization(layer):
    parametrize.register_parametrization(layer.input_layernorm, "weight", Tripled())


EDITS = {f.__name__: f for f in (replace_module, replace_forward, hook, epsilon, weight, parametrization)}
UNREPORTED = (weight, parametrization)  # fused norms compute with them


@pytest.mark.parametrize("settings", [{}, dict(backend="nf4", memory="small")], ids=["nvfp4", "codes kept"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_has_the_effect_that_it_has_unfused(edit, settings):
    """Fused and not fused differ by roundings to 4 bits here and there; the edits change every logit."""
    results = {}
    for fused in (True, False):
        model = tuned("Llama", fused=fused, **settings).train()
        before = logits(model)
        edit(layer_of(model))
        results[fused] = logits(model), model(input_ids=IDS, use_cache=False).logits.detach()  # with autograd, too
        if fused and edit not in UNREPORTED:
            (reason,) = set(model.base_model.nvfp4_report.fallbacks.values())
            assert any(word in reason for word in ("replaced by ReLU", "forward of its own", "hooks", "was 1e-06 and is 5.0"))
        assert (results[fused][1] - before).norm() > 0.1 * before.norm()
    for got, expected in zip(results[True], results[False]):
        assert (got - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("settings", [{}, dict(backend="nf4", memory="small")], ids=["nvfp4", "codes kept"])
def test_a_parametrization_comes_and_goes_with_the_fused_norm(settings):
    model = tuned("Llama", **settings)
    attach(model)
    before, layer = logits(model), layer_of(model)
    parametrization(layer)
    changed = logits(model)
    detach(model)
    assert (logits(model) - changed).norm() < 0.05 * changed.norm() < 0.5 * (changed - before).norm()
    attach(model)
    parametrize.remove_parametrizations(layer.input_layernorm, "weight", leave_parametrized=False)
    assert torch.equal(logits(model), before)
    detach(model)
    assert (logits(model) - before).norm() < 0.05 * before.norm()


def test_settings_are_read_and_set_as_on_the_original():
    model = tuned("Llama")
    references = [(layer.mlp, layer.input_layernorm) for layer in model.base_model.model.model.layers]
    attach(model)
    layer = layer_of(model)
    assert isinstance(layer.mlp, FusedGatedMLP) and isinstance(layer.input_layernorm, NVFP4RMSNorm)
    assert layer.mlp.hidden_size == 64 and layer.input_layernorm.variance_epsilon == 1e-6
    fused = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin), fused) and not any(m.edit() for m in twin.modules() if isinstance(m, FusedGatedMLP))
        epsilon(layer_of(twin))
        assert layer_of(twin).input_layernorm.edit() and not layer.input_layernorm.edit()
    references[0][0].act_fn = nn.ReLU()  # on the module that was there before
    changed = logits(model)
    assert isinstance(layer.mlp.act_fn, nn.ReLU) and not torch.allclose(changed, fused, rtol=1e-2)
    epsilon(layer)
    layer.input_layernorm.variance_epsilon = 1e-6
    assert torch.equal(logits(model), changed) and layer.input_layernorm.edit() is None


def test_the_activation_of_experts():
    """Fused, they compute it themselves: not with hooks on it, nor when it is another one."""
    model = adapted(mixtral)
    ids = IDS[:, :6] % 128
    run = lambda: model(input_ids=ids, use_cache=False).logits.detach()  # noqa: E731
    fused, calls = run(), []
    experts = experts_of(model.get_base_model()).get_base_layer()
    assert experts.act == "silu"
    handle = experts.act_fn.register_forward_hook(lambda *args: calls.append(1))
    run()
    handle.remove()
    assert calls and torch.equal(run(), fused)
    experts.act_fn = nn.ReLU()
    replaced = run()
    experts.unfuse()
    assert torch.equal(run(), replaced) and not torch.allclose(replaced, fused, rtol=1e-2)
    assert "act_fn: it has hooks" in model.base_model.nvfp4_report.fallbacks.values()


# ---------------------------------------------------------------------------------------------- who is handed codes


class Wrapper(PassesOn):
    """Around a linear: looks at its input, and passes attributes on."""

    def __init__(self, inner):
        super().__init__(inner)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach().abs().max().item())
        return self.inner(x * 1.0)


def subclassed(down):
    down.__class__ = type("Subclass", (type(down),), {"forward": lambda self, x: super(type(self), self).forward(x * 1.0)})
    return down


AROUND = {
    "wrapper": Wrapper,
    "reentrant": lambda down: checkpoint_wrapper(down, CheckpointImpl.REENTRANT),
    "not reentrant": lambda down: checkpoint_wrapper(down, CheckpointImpl.NO_REENTRANT),
    "subclass": subclassed,
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_what_is_around_down_finds_values(around):
    """One term, so that quantising its values again gives the same codes."""
    model = tuned("Llama", accuracy="paper")
    attach(model)

    def results():
        model.zero_grad()
        y = model(input_ids=IDS, use_cache=False).logits
        y.pow(2).mean().backward()
        return y.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)

    expected = results()
    mlp = layer_of(model).mlp
    mlp.down_proj = around(mlp.down_proj)
    got = results()
    assert len(got) == len(expected) and all(t.isfinite().all() for t in got)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 + 1e-4 * b.abs().max().item())
    assert not isinstance(mlp.down_proj, Wrapper) or min(mlp.down_proj.seen) > 0


def test_a_tensor_without_values_is_loud(monkeypatch):
    """Whoever reads it in spite of everything gets NaN."""
    model, seen = tuned("Llama", accuracy="paper"), []
    attach(model)
    down = layer_of(model).mlp.down_proj
    slow_down_steps(model)  # whose trials compute, too
    method = type(down).forward_codes
    monkeypatch.setattr(type(down), "forward_codes", lambda self, x, *args: (seen.append(x), method(self, x, *args))[1])
    assert logits(model).isfinite().all() and len(seen) == 2 and all(x.isnan().all() for x in seen)
