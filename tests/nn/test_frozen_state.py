"""State of frozen layers: what a state dict carries, and the random numbers that are drawn."""

import pytest
import torch
from _families import causal
from _peft_models import IDS, by_backend, config, logits
from accelerate import Accelerator
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import detach, freeze_model


def another(make):
    """The same model with other weights."""
    model = make()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


MAKES = {"llama": tiny_llama, "mixtral": causal("Mixtral", num_local_experts=4)}


@by_backend
@pytest.mark.parametrize("strict", (True, False))
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_state_dict_is_the_whole_state(backend, strict, make):
    """Codes and scales go together, into a model that held other ones."""
    model, other = (freeze_model(m, backend, progress=False) for m in (make(), another(make)))
    assert not torch.equal(logits(other), logits(model))
    keys = other.load_state_dict({key: t.clone() for key, t in model.state_dict().items()}, strict=strict)
    assert keys.missing_keys == keys.unexpected_keys == []
    assert torch.equal(logits(other), logits(model))


@by_backend
def test_an_accelerator_loads_its_state(tmp_path, backend):
    """Base and adapter, from the safetensors that it writes."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(get_peft_model(tiny_llama(), config(backend=backend, init_lora_weights=False)))
    wanted = logits(model)
    accelerator.save_state(tmp_path)
    detach(model)
    for layer in model.base_model.model.model.layers:
        layer.self_attn.q_proj.get_base_layer().requantize_(torch.randn(64, 64))
        layer.self_attn.q_proj.lora_A["default"].weight.data.mul_(2)
    assert not torch.equal(logits(model), wanted)
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-5)


def test_codes_of_another_shape_are_refused():
    pytest.importorskip("bitsandbytes")
    a, b = (freeze_model(torch.nn.Sequential(torch.nn.Linear(*size)), "nf4") for size in ((64, 128), (128, 64)))
    with pytest.raises((ValueError, RuntimeError), match="packed from"):
        a.load_state_dict(b.state_dict())


@pytest.mark.parametrize("adapter", (False, True))
@pytest.mark.parametrize("grad", (False, True))
def test_evaluation_draws_no_random_numbers(adapter, grad):
    """Stochastic rounding of gradients is for training, as dropout is: evaluating changes neither training nor sampling."""
    model = freeze_model(tiny_llama(), gradients="nvfp4_sr", progress=False)
    model = get_peft_model(model, config(lora_dropout=0.1)) if adapter else model
    model.eval()
    before = torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        first = model(IDS).logits
    assert torch.equal(torch.get_rng_state(), before)
    model.train()(IDS)
    assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.eval()(IDS).logits, first)
