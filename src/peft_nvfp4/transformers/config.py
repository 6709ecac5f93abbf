"""``PactConfig``: what a QLoRA script says in place of ``BitsAndBytesConfig``.

The packed weights depend on ``skip_modules`` only. Everything else says how the model computes and trains with them, so a saved
model may be loaded with other words: ``from_pretrained(saved, quantization_config=PactConfig(accuracy="balanced"))``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..quantization.options import Options, check_known, option

METHOD = "peft_nvfp4"
"""The word in ``config.json``. (transformers' own ``"nvfp4"`` quantises for inference only.)"""

FORMAT_VERSION = 1
"""Of the saved layout: packed ``weight``, ``weight_scales`` and ``weight_gscale`` per linear, all uint8."""

LOADING = ("accuracy", "memory")
"""Fields that a saved model may be loaded with other values of."""


@auto.register_quantization_config(METHOD)
@dataclass(kw_only=True)
class PactConfig(QuantizationConfigMixin):
    """Freeze the linears of a model in NVFP4 while it is loaded; output heads and embeddings stay dense.

    ``accuracy``, ``memory`` and ``skip_modules`` are those of :class:`~peft_nvfp4.quantization.options.Options`. Files hold one
    layout of 4.5 bits a weight whatever ``memory`` says. Any LoRA adapter may follow: with a plain ``LoraConfig`` the model is
    fused and trained as said here, an ``NVFP4LoraConfig`` has to name the same ``accuracy``.

    Args:
        quant_method, format_version: what ``config.json`` says; not to be set.

    Raises:
        ValueError, TypeError: an unknown word or a wrong type; the message lists the known ones.
    """

    accuracy: str = option("accuracy")
    memory: str = option("memory")
    skip_modules: list[str] = option("skip_modules")
    quant_method: str = METHOD
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.quant_method != METHOD:
            raise ValueError(f"quant_method is {METHOD!r} here, got {self.quant_method!r}")
        if type(self.format_version) is not int or self.format_version < 1:
            raise ValueError(f"format_version {self.format_version!r} is not a version of the {METHOD} layout")
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version {self.format_version} of the {METHOD} layout is newer than this package, which reads up to "
                f"{FORMAT_VERSION}: upgrade peft_nvfp4"
            )
        self.skip_modules = list(self.options.skip_modules)

    @property
    def options(self) -> Options:
        """These settings, as of an adapter's config."""
        return Options(accuracy=self.accuracy, memory=self.memory, skip_modules=self.skip_modules)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """From a ``quantization_config`` of a ``config.json``.

        Raises:
            ValueError: a newer layout, or settings this version does not know.
        """
        version = config_dict.get("format_version", FORMAT_VERSION)
        if isinstance(version, int) and version > FORMAT_VERSION:
            cls(format_version=version)  # raises: the version says more than the names
        check_known(config_dict, (f.name for f in fields(cls)), f"settings in the {METHOD} quantization_config")
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
