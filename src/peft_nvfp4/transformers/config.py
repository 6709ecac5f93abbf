"""``PactConfig``: what a QLoRA script says in place of ``BitsAndBytesConfig``.

The packed weights depend on ``skip_modules`` only. Everything else says how the model computes and trains with them, so a saved
model may be loaded with other words: ``from_pretrained(saved, quantization_config=PactConfig(accuracy="balanced"))``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..nn.frozen_linear import FrozenOptions
from ..quantization.sites import check_accuracy

METHOD = "peft_nvfp4"
"""The word in ``config.json``. (transformers' own ``"nvfp4"`` quantises for inference only.)"""

FORMAT_VERSION = 1
"""Of the saved layout: packed ``weight``, ``weight_scales`` and ``weight_gscale`` per linear, all uint8."""

LOADING = ("accuracy", "weight_layouts", "gradients", "fused", "recompute_mlp", "recompute_attention", "cuda_graphs")
"""Fields that a saved model may be loaded with other values of."""


@auto.register_quantization_config(METHOD)
@dataclass(kw_only=True)
class PactConfig(QuantizationConfigMixin):
    """Freeze the linears of a model in NVFP4 while it is loaded; output heads and embeddings stay dense.

    The fields have the names, meanings and defaults of :class:`~peft_nvfp4.NVFP4LoraConfig`. Any LoRA adapter may follow: with a
    plain ``LoraConfig`` the model is fused and trained as said here, an ``NVFP4LoraConfig`` has to say the same.

    Args:
        accuracy: terms in which activations are quantised: ``"high"``, ``"balanced"`` or ``"paper"``.
        weight_layouts: ``"cached"`` keeps a forward and a backward layout of every weight in memory (9 bits a weight),
            ``"transient"`` makes the backward one at each use (4.5 bits, slower). Files hold 4.5 bits in either case.
        gradients: rounding of the incoming gradient: ``"nvfp4"``, ``"nvfp4_sr"`` or ``"bf16"``.
        fused, recompute_mlp, recompute_attention, cuda_graphs: the data flow of training, set up when an adapter is added.
        skip_modules: names (or dotted endings) of modules to leave dense.
        quant_method, format_version: what ``config.json`` says; not to be set.

    Raises:
        ValueError, TypeError: an unknown word or a wrong type; the message lists the known ones.
    """

    accuracy: str = "high"
    weight_layouts: str = "cached"
    gradients: str = "nvfp4"
    fused: bool = True
    recompute_mlp: bool = False
    recompute_attention: bool = False
    cuda_graphs: bool = False
    skip_modules: list[str] | None = None
    quant_method: str = METHOD
    format_version: int = FORMAT_VERSION

    backend: ClassVar[str] = "nvfp4"
    activations: ClassVar[str] = "bf16"

    def __post_init__(self) -> None:
        if self.quant_method != METHOD:
            raise ValueError(f"quant_method is {METHOD!r} here, got {self.quant_method!r}")
        if not isinstance(self.format_version, int) or self.format_version < 1:
            raise ValueError(f"format_version {self.format_version!r} is not a version of the {METHOD} layout")
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version {self.format_version} of the {METHOD} layout is newer than this package, which reads up to "
                f"{FORMAT_VERSION}: upgrade peft_nvfp4"
            )
        check_accuracy(self.accuracy)
        FrozenOptions(self.weight_layouts, self.gradients)  # validates the two
        for name in ("fused", "recompute_mlp", "recompute_attention", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is True or False, got {getattr(self, name)!r}")
        if self.skip_modules is not None:
            if isinstance(self.skip_modules, str) or not all(isinstance(name, str) for name in self.skip_modules):
                raise TypeError(f"skip_modules is a list of module names, got {self.skip_modules!r}")
            self.skip_modules = list(self.skip_modules)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """From a ``quantization_config`` of a ``config.json``.

        Raises:
            ValueError: a newer layout, or settings this version does not know.
        """
        version = config_dict.get("format_version", FORMAT_VERSION)
        if unknown := config_dict.keys() - {f.name for f in fields(cls)}:
            newer = isinstance(version, int) and version > FORMAT_VERSION
            cls(format_version=version) if newer else None  # raises: the version says more than the names
            raise ValueError(f"unknown settings in the {METHOD} quantization_config: {', '.join(sorted(unknown))}")
        return super().from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What ``from_pretrained(saved, quantization_config=...)`` changes."""
        return {name: getattr(self, name) for name in LOADING}


if PactConfig not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (PactConfig,)  # a tuple of classes, to which transformers has no other door


def pact_config(model: Any) -> PactConfig | None:
    """The settings that a model was loaded with, if it was loaded with a :class:`PactConfig`."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    return settings if isinstance(settings, PactConfig) else None
