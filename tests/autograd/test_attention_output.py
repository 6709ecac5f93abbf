"""The codes of attention's output are made anew from the output that attention keeps. The same bits as with kept codes, and less
kept by exactly those; where attention keeps no output (plain matrix products), nothing changes."""

import pytest
import torch
from _dataflow_models import IDS, kept_bytes, tuned

from peft_nvfp4.autograd import activation_cache, frozen_linear
from peft_nvfp4.autograd.activation_cache import kept_by_attention
from peft_nvfp4.nn.nvfp4 import NVFP4FrozenLinear
from peft_nvfp4.numerics.formats import padded_k


def run(model) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family, accuracy", [("Llama", "paper"), ("Llama", "high"), ("Qwen2", "balanced"), ("Mistral", "paper")])
def test_attention_output_is_kept_once(family, accuracy, monkeypatch):
    results, sizes = {}, {}
    for again in (False, True):
        model = tuned(family, accuracy=accuracy, fused=True)
        monkeypatch.setattr(frozen_linear, "kept_by_attention", kept_by_attention if again else lambda x: False)
        sizes[again] = kept_bytes(model, IDS.repeat(2, 1)) - kept_bytes(model, IDS)
        results[again] = run(model)
    width, terms = model.config.num_attention_heads * 16, 2 if accuracy == "high" else 1
    layers = model.config.num_hidden_layers
    assert sizes[False] - sizes[True] == layers * IDS.numel() * terms * (padded_k(width) * 9 // 16 + 4)
    (loss, kept), (again, made) = results[False], results[True]
    assert loss == again and kept.keys() == made.keys() and activation_cache.live() == 0
    assert all(torch.equal(kept[name], made[name]) for name in kept)


@pytest.mark.parametrize(
    "how", ["eager attention", "Phi3", "checkpointing", "reentrant", "bfloat16", "autocast", "dropout", "centred"]
)
def test_the_same_gradients(how, monkeypatch):
    """Where attention keeps no output, or (Phi-3, whose heads are laid out otherwise) another copy, codes are kept as without."""
    results, sizes = {}, {}
    for again in (False, True):
        model = tuned(
            "Phi3" if how == "Phi3" else "Llama", accuracy="paper", fused=True, lora_dropout=0.3 if how == "dropout" else 0.0
        ).train()
        monkeypatch.setattr(frozen_linear, "kept_by_attention", kept_by_attention if again else lambda x: False)
        if how == "eager attention":
            model.base_model.model.set_attn_implementation("eager")
        elif how == "bfloat16":
            model.bfloat16()
        elif how in ("checkpointing", "reentrant"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
            model.enable_input_require_grads()
        elif how == "centred":
            for layer in model.modules():
                if isinstance(layer, NVFP4FrozenLinear) and layer.in_features == layer.out_features:
                    layer.set_offset(torch.linspace(-0.1, 0.1, layer.in_features))
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            torch.manual_seed(3)
            sizes[again] = kept_bytes(model, IDS)
            results[again] = run(model)
    (loss, kept), (again, made) = results[False], results[True]
    assert loss == again and all(torch.equal(kept[name], made[name]) for name in kept)
    assert (sizes[True] < sizes[False]) == (how not in ("eager attention", "Phi3", "checkpointing", "reentrant"))


def test_an_output_overwritten_after_the_linear_is_noticed():
    """The kept tensor is attention's own: autograd's version check guards it like any other."""
    model = tuned("Llama", accuracy="paper", fused=True, target_modules=["o_proj"])
    o_proj = model.base_model.model.model.layers[1].self_attn.o_proj
    q = torch.randn(1, 8, 4, 16, requires_grad=True).transpose(1, 2)  # the memory of a projection's output
    x = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(1, 8, 64)
    assert kept_by_attention(x) and not kept_by_attention(x * 2) and not kept_by_attention(torch.randn(2, 64))
    y = o_proj(x)
    with torch.no_grad():
        x.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
