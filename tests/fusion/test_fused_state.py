"""Fused modules keep no state of a call on what calls share: functional calls, replicas, threads; and what has the same bits."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from _dataflow_models import IDS, loss_and_gradients, tuned
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from peft_nvfp4.autograd.activation_cache import dequantized
from peft_nvfp4.ops.linear import quantize_input

SETTINGS = {"nvfp4": {}, "codes kept": dict(backend="bf16", memory="small"), "nf4": dict(backend="nf4", memory="small")}
by_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def model_with(factor=1.0, **settings):
    """Norms' weights times ``factor``; in training, so that modules that keep codes do."""
    model = tuned("Llama", fused=True, **settings).train()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.mul_(factor)
    return model


def logits(model, parameters=None):
    if parameters is None:
        return model(input_ids=IDS, use_cache=False).logits
    return functional_call(model, parameters, (), dict(input_ids=IDS, use_cache=False)).logits


def replica_of(model, factor):
    """As ``nn.parallel.replicate`` makes one: shallow copies of all modules, their parameters as plain attributes."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in copies.items():
        for name, child in module._modules.items():
            replica._modules[name] = copies.get(child)
        for name, p in module._parameters.items():
            if p is None:
                replica._parameters[name] = None
            else:
                value = p.detach().clone() if p.dtype == torch.uint8 else p * (factor if "Norm" in type(module).__name__ else 1)
                setattr(replica, name, value)
        for name, buffer in module._buffers.items():
            replica._buffers[name] = buffer
    return copies[model]


@by_settings
def test_functional_call_with_all_parameters(settings):
    model, other = model_with(**settings), model_with(3.0, **settings)
    before = logits(model).detach()
    parameters = {name: p.detach().clone() for name, p in other.named_parameters()}
    trained = {name: parameters[name].requires_grad_() for name, p in other.named_parameters() if p.requires_grad}
    got, wanted = logits(model, parameters), logits(other)
    assert torch.equal(got, wanted) and not torch.equal(got, before) and torch.equal(logits(model), before)
    got.square().mean().backward()
    wanted.square().mean().backward()
    for name, p in other.named_parameters():
        if p.requires_grad:
            assert torch.equal(trained[name].grad, p.grad), name


def with_a_hook(model):
    model.base_model.model.model.layers[0].input_layernorm.register_forward_hook(lambda m, args, y: None)
    return model


@by_settings
@pytest.mark.parametrize("grad", [True, False])
def test_replicas_in_threads(settings, grad):
    """Each computes with its own weights, and none writes on what the others use; a norm with a hook runs as it was."""
    model, factors = with_a_hook(model_with(**settings)), [1.0, 2.0, 3.0, 0.5] * 3
    replicas = [replica_of(model, factor) for factor in factors]
    state = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}

    def run(replica):
        with torch.set_grad_enabled(grad):
            return logits(replica).detach()

    alone = [run(replica) for replica in replicas[:4]]
    for factor, got in zip(factors, alone):  # not in groups: sums in another order, and what that carries over a threshold
        wanted = run(with_a_hook(model_with(factor, **settings)))
        assert (got - wanted).norm() < 1e-3 * wanted.norm()
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(run, replicas), alone * 3))
    assert all(p is dict(model.named_parameters())[name] and torch.equal(p, value) for name, (p, value) in state.items())


@by_settings
def test_a_patched_original_runs_with_the_weights_of_now(settings):
    """Also a forward set on the instance of the original, as kernel libraries do it, and the original of a copy of the model."""
    model = model_with(**settings)
    twin = copy.deepcopy(model)
    norm, original = (m.base_model.model.model.layers[0].input_layernorm for m in (model, twin))
    assert norm._parameters is norm.original._parameters and original.original is not norm.original
    original.weight = nn.Parameter(original.weight.detach() * 2, requires_grad=False)
    x = torch.randn(2, 64)
    torch.testing.assert_close(original.call_original(x), 2 * norm.call_original(x))
    norm.original.forward = (lambda self, x: self.weight * x).__get__(norm.original)
    replica = norm._replicate_for_data_parallel()
    replica.weight = 5 * norm.weight
    torch.testing.assert_close(replica.call_original(x), 5 * norm.weight * x)


# ---------------------------------------------------------------------------------------------- the same bits, and where not


def whole(reentrant):
    return lambda model: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def a_part(name, reentrant):
    def change(model):
        for layer in model.base_model.model.model.layers:
            part = getattr(layer, name)
            part.forward = lambda *args, f=part.forward, **kwargs: checkpoint(f, *args, use_reentrant=reentrant, **kwargs)

    return change


def nested(model):
    whole(False)(model)
    a_part("mlp", False)(model)


def compiled_norm(model):
    model.base_model.model.model.layers[0].input_layernorm.compile(backend="aot_eager")


SAME = {"layers": whole(False), "reentrant": whole(True), "mlp": a_part("mlp", False), "attention": a_part("self_attn", False)}
NEW_CODES = {"mlp, reentrant": a_part("mlp", True), "nested": nested, "norm compiled": compiled_norm}


@pytest.mark.parametrize("accuracy", ["paper", "balanced", "high"])
def test_which_parts_may_be_recomputed_or_compiled_by_themselves(accuracy):
    """The statement of docs/how-it-works.md. Where linears get another tensor than the norm made, they quantise its values anew.
    With one term these are the same codes (gradients of gate and up may be added in another order). With two terms the values
    differ by 0.2 %, and the gradients of a tiny random model by up to a fifth."""
    outcomes = {}
    for name, change in {"plain": lambda model: None, **SAME, **NEW_CODES}.items():
        torch._dynamo.reset()
        model = tuned("Llama", fused=True, accuracy=accuracy)
        model.enable_input_require_grads()
        change(model)
        outcomes[name] = loss_and_gradients(model)
    loss, gradients = outcomes["plain"]
    for name in SAME:
        assert outcomes[name][0] == loss and torch.equal(outcomes[name][1], gradients), name
    for name in NEW_CODES:
        off = ((outcomes[name][1] - gradients).norm() / gradients.norm()).item()
        assert abs(outcomes[name][0] - loss) < 2e-3 * loss and (off < 1e-5 if accuracy == "paper" else 1e-3 < off < 0.3), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms, blocks, error", [(1, 0.0, 0.0), (2, 0.2, 0.003)], ids=["one term", "two terms"])
def test_values_quantised_again(dtype, terms, blocks, error):
    """Q(D(x~)) is x~ with one term. With two, fewer than a fifth of the blocks differ."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = dequantized(quantize_input(x, None, terms), None, dtype)
    twice = dequantized(quantize_input(once, None, terms), None, dtype)
    differ = (once != twice).view(256, 32, 16).any(-1).float().mean().item()
    assert differ <= blocks and (differ > 0) == (terms == 2)
    assert (once - twice).float().norm() <= error * once.float().norm()
