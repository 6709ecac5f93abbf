"""The user's settings: :class:`NVFP4LoraConfig`, a ``LoraConfig`` with the six fields of
:class:`~peft_nvfp4.quantization.options.Options`.

On disk an adapter stays a plain LoRA adapter: ``adapter_config.json`` holds what stock PEFT knows (``peft_type`` LORA), so
anyone can load it without this package and without a warning. The six fields go to a side-car, ``nvfp4_adapter.json``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig

from ..nn.wrapping import WRAPPED, warn_caller
from ..quantization.options import NAMES, Options, check_known, option
from . import fingerprint, side_calibration, side_files
from .inits import RESIDUAL_INITS, check_loftq
from .merge_aware import check_merge_aware

SIDE_CAR = "nvfp4_adapter.json"


@dataclass
class NVFP4LoraConfig(LoraConfig):
    """LoRA on a frozen base in NVFP4, NF4 or BF16. All fields of :class:`peft.LoraConfig`, and those of
    :class:`~peft_nvfp4.quantization.options.Options`: ``backend``, ``accuracy``, ``memory``, ``calibration``, ``skip_modules``,
    ``merge_aware``.

    Where codes are kept for backward, RMSNorms and gated MLPs are fused (:func:`peft_nvfp4.attach`;
    ``model.base_model.nvfp4_report`` says what was found, :func:`peft_nvfp4.detach` undoes it).
    :func:`peft_nvfp4.enable_cuda_graphs` records training steps. A base that is frozen already keeps its layouts and its rounding
    of gradients.

    Raises:
        ValueError, TypeError: an unknown word in one of these fields, or fields that exclude each other; the message says which.
    """

    backend: str = option("backend")
    accuracy: str = option("accuracy")
    memory: str = option("memory")
    calibration: str | None = option("calibration")
    skip_modules: list[str] = option("skip_modules")
    merge_aware: bool = option("merge_aware")

    def __post_init__(self) -> None:
        self._post_init_of_peft()
        for name, value in self.options.as_json().items():
            setattr(self, name, value)
        if not WRAPPED:
            warnings.warn(
                "peft_nvfp4 is not registered with PEFT: this config freezes nothing. Call peft_nvfp4.register()", stacklevel=3
            )
        if self.merge_aware:
            check_merge_aware(self)

    @property
    def options(self) -> Options:
        """The fields that stock PEFT does not know.

        Raises:
            ValueError, TypeError: see :class:`~peft_nvfp4.quantization.options.Options`.
        """
        return Options(**{name: getattr(self, name) for name in NAMES})

    def _post_init_of_peft(self) -> None:
        """PEFT's own checks. Of LoftQ it knows its own formats, which need a package and a config; ours needs neither."""
        init = self.init_lora_weights
        if init in RESIDUAL_INITS:
            if not self.inference_mode:  # a saved adapter, perhaps of stock PEFT, is past its start
                check_loftq(self)
            self.init_lora_weights, self.loftq_config = True, {}
        super().__post_init__()
        if init in RESIDUAL_INITS:
            self.init_lora_weights = init

    def to_dict(self) -> dict[str, Any]:
        """What stock PEFT may see: without this package's own fields."""
        known = {key: value for key, value in super().to_dict().items() if key not in NAMES}
        if self.init_lora_weights in RESIDUAL_INITS:  # done, and nothing that stock PEFT could repeat
            known["init_lora_weights"] = True
        return known

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write ``adapter_config.json`` (plain LoRA) and the side-car ``nvfp4_adapter.json``."""
        super().save_pretrained(save_directory, **kwargs)
        folder, own = Path(save_directory), self.options.as_json()
        own |= {} if self.calibration is None else side_calibration.entries(self.calibration, folder)
        side_files.write(folder / SIDE_CAR, own)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str,
        subfolder: str | None = None,
        calibration: str | Path | None = None,
        **kwargs: Any,
    ) -> NVFP4LoraConfig:
        """Read a saved adapter's configuration. Without a side-car (an adapter of a plain ``LoraConfig``) the own fields are
        those of the frozen base that it was trained on, and the defaults where the files say nothing of one.

        Args:
            calibration: folder of the calibration that the adapter was trained with, where it is not in the adapter's folder.

        Raises:
            ValueError: a side file is damaged, or written by a newer version of this package.
        """
        base = LoraConfig.from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        if not isinstance(base, LoraConfig):
            raise ValueError(f"{pretrained_model_name_or_path} holds a {base.peft_type} adapter, not LoRA")
        known = {f.name: getattr(base, f.name) for f in fields(LoraConfig) if f.init}
        place = (pretrained_model_name_or_path, subfolder, cls._split_kwargs(kwargs)[0])
        try:
            path = side_files.find(*place, SIDE_CAR)
        except LocalEntryNotFoundError as error:  # offline: whether there is one cannot be known
            raise ValueError(
                f"cannot tell which settings {pretrained_model_name_or_path} was trained with: its {SIDE_CAR} is not in the "
                "local cache and the Hub cannot be reached. Download it once while online, or read the adapter with "
                "peft.LoraConfig"
            ) from error
        if path is None:
            try:
                return cls(**known, **_words_of_its_base(*place, calibration))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{fingerprint.BASE_FILE} of {pretrained_model_name_or_path}: {error}") from error
        own = side_files.read(path)
        try:
            check_known(own, (*NAMES, side_calibration.DIGEST))
            folder = side_calibration.recorded(own, path.parent, calibration)
            own.pop(side_calibration.DIGEST, None)
            return cls(**known, **own | {"calibration": folder})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def _words_of_its_base(
    adapter: str, subfolder: str | None, hub_options: dict[str, Any], calibration: str | Path | None
) -> dict[str, Any]:
    """The fields that freeze a dense model as the base of an adapter of a plain LoraConfig was frozen."""
    path = side_files.find_quietly(adapter, subfolder, hub_options, fingerprint.BASE_FILE)
    words: dict[str, Any] = {} if calibration is None else {"calibration": str(calibration)}
    if path is None:
        return words
    record = fingerprint.read_file(path)
    words |= {"backend": record["format"], "skip_modules": record.get("skip_modules") or []}
    if record.get("accuracy") is not None:
        words["accuracy"] = record["accuracy"]
    elif record["format"] == "nvfp4" and calibration is None:
        warn_caller(
            f"{adapter} was trained on a calibrated base, or on one with terms of its own, which {path.name} does not hold: name "
            "it (calibration=), or load the base as it was in training"
        )
    return words
