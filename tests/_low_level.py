"""Models with an adapter in every state that the low-level functions allow, for tests of one saving, one rounding or one path."""

from peft import get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig, attach, detach, freeze_model

LAYER = ("weight_layouts", "gradients", "activations")
"""Of ``FrozenOptions``."""


def adapted_model(model: nn.Module, *, fused: bool = True, recompute_mlp: bool = False, make=NVFP4LoraConfig, **settings):
    """``get_peft_model`` over a base that was frozen with those of ``settings`` that are words of a layer; ``make`` gets the
    others. Then detached, or attached again with ``recompute_mlp``."""
    layer = {name: settings.pop(name) for name in LAYER if name in settings}
    config = make(**settings)
    if layer:
        names = config.skip_modules
        freeze_model(model, config.backend, accuracy=config.accuracy, skip_modules=names, progress=False, **layer)
    model = get_peft_model(model, config)
    if not fused:
        detach(model)
    elif recompute_mlp:
        attach(model, recompute_mlp=True)
    return model
