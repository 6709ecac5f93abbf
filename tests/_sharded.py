"""Models that the tests of DDP and FSDP2 train, on any number of processes."""

import torch
from conftest import tiny_llama
from low_level import adapted_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def tuned(backend: str, dtype=torch.float32, width: int = 176, **settings):
    """``width``: of the MLP."""
    word, _, layouts = backend.partition(" ")
    model = tiny_llama(dtype, intermediate_size=width)
    settings = dict(r=4, target_modules="all-linear", init_lora_weights=False, weight_layouts=layouts or "cached") | settings
    return adapted_model(model, backend=word, **settings).train()


def batch() -> torch.Tensor:
    return torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(1))


def shard(model, policy=None):
    policy = policy or MixedPrecisionPolicy()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)
