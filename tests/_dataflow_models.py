"""What the tests of the fused producers share: tiny adapted models of several families, their loss and gradients, and the bytes
that they keep for backward."""

import torch
import transformers as hf
from low_level import adapted_model

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
    return adapted_model(model, r=4, init_lora_weights=False, **settings)


def loss_and_gradients(model, batch=None):
    model.zero_grad()
    loss = model(**(batch or dict(input_ids=IDS, labels=IDS, use_cache=False))).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


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
