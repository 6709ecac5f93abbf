"""Models that the tests of offload train, and what makes a mistake of the copies show on a CPU."""

import _steps
import torch
from conftest import tiny_llama
from low_level import adapted_model

from peft_nvfp4 import enable_offload
from peft_nvfp4.nn.frozen_linear import FrozenLinear
from peft_nvfp4.training.offload.enable import _owner
from peft_nvfp4.training.steps import slow_down_steps

BACKENDS = ("nvfp4 cached", "nvfp4 transient", "nf4", "bf16")


def tuned(backend: str, offload: str | None, layers: int = 3, device: str = "cpu", **settings):
    word, _, layouts = backend.partition(" ")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = tiny_llama(dtype, num_hidden_layers=layers)
    settings = dict(r=4, target_modules="all-linear", init_lora_weights=False, weight_layouts=layouts or "cached") | settings
    torch.manual_seed(0)
    model = adapted_model(model, backend=word, **settings)
    slow_down_steps(model)  # offloaded or not, in the same way
    if offload:
        enable_offload(model)
    return model.train().to(device)


def load_other_weights(*models) -> None:
    """Into all of them, which are alike: the rows of layer 1's frozen weights the other way round."""
    values = {name: t.clone() for name, t in models[-1].state_dict().items()}
    for name in (n for n in values if ".layers.1." in n and n.endswith("base_layer.weight")):
        values[name] = values[name].flip(0)
    for model in models:
        model.load_state_dict(values)


def batch(device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)


def steps(model, count: int = 2, checkpointing: bool | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the adapters after ``count`` steps. ``checkpointing``: reentrant or not; None: without."""
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    ids = batch(model.device)
    torch.manual_seed(3)
    losses = _steps.steps(model, ids, count)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


def packed(model) -> dict[str, torch.Tensor]:
    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, FrozenLinear))
    return {f"{n}.{key}": t.cpu().clone() for n, m in layers for key, t in m.packed_tensors().items()}


def at_rest(model) -> bool:
    """All parameters point to the host's bytes."""
    owner = _owner(model)
    return all(p.data_ptr() == home.data_ptr() for layer in owner.layers for p, home, _ in layer.places)


def scrambled(model):
    """On a CPU the host's bytes are as good as the buffers'. Here they are not: every bit pattern is another one until it is
    copied, so whatever computed with them would show."""
    owner, load = _owner(model), _owner(model)._load
    for layer in owner.layers:
        layer.host.data ^= 0x5A

    def loaded(layer, ahead):
        before = owner.status.copies
        load(layer, ahead)
        if owner.status.copies > before:
            owner._slot(layer).data[: layer.size] ^= 0x5A

    owner._load = loaded
    return model


def late(model):
    """A copy on a CPU is there at once, the earliest that a GPU's may be: it must destroy nothing that is needed. Here it also
    comes as late as a GPU's may: when a layer waits for it."""
    owner, load, wait, coming = _owner(model), _owner(model)._load, _owner(model)._wait, {}

    def loaded(layer, ahead):
        before = owner.status.copies
        load(layer, ahead)
        if owner.status.copies > before:
            slot = owner._slot(layer)
            coming[slot] = slot.data.clone()
            slot.data.fill_(0x5A)

    def waited(slot):
        if slot in coming:
            slot.data.copy_(coming.pop(slot))
        wait(slot)

    owner._load, owner._wait = loaded, waited
    return model
