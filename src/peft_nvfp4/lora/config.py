"""The user's settings: :class:`NVFP4LoraConfig`, a ``LoraConfig`` with thirteen fields of its own.

On disk an adapter stays a plain LoRA adapter: ``adapter_config.json`` holds what stock PEFT knows (``peft_type`` LORA), so
anyone can load it without this package and without a warning. The fields below go to a side-car, ``nvfp4_adapter.json``.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from peft import LoraConfig

from ..nn.frozen_linear import FrozenOptions
from ..nn.registry import BACKENDS
from ..quantization.sites import check_accuracy
from ._registered import registered

SIDE_CAR = "nvfp4_adapter.json"
SIDE_CAR_VERSION = 1
OWN_FIELDS = (
    "backend",
    "accuracy",
    "weight_layouts",
    "gradients",
    "activations",
    "fused",
    "recompute_mlp",
    "recompute_attention",
    "cuda_graphs",
    "skip_modules",
    "calibration",
    "merge_aware",
    "offload",
)


@dataclass
class NVFP4LoraConfig(LoraConfig):
    """LoRA on a frozen base in NVFP4, NF4 or BF16. All fields of :class:`peft.LoraConfig`, and:

    Args:
        backend: storage and arithmetic of the frozen linears. ``"nvfp4"``: PACT, W4A4. ``"nf4"``: QLoRA through bitsandbytes.
            ``"bf16"``: plain LoRA. Changing this word is the only change needed to compare them.
        accuracy: (nvfp4) terms in which activations are quantised, a second one for what the first left over. ``"high"``: two
            everywhere, closest to BF16 activations. ``"balanced"``: two where a norm feeds the linears, a sixth less memory for
            backward and a sixth less work in the forward FP4 GEMMs. ``"paper"``: one everywhere, as PACT does, half of that work
            and 22 % less memory than ``"high"``. What each costs in accuracy: ``docs/accuracy.md``.
        weight_layouts: (nvfp4) ``"cached"`` keeps a forward and a backward layout of every weight (9 bits a weight),
            ``"transient"`` makes the backward one at each use (4.5 bits, slower, the same result bit for bit).
        gradients: (nvfp4) rounding of the gradient that enters the FP4 input-gradient GEMM: ``"nvfp4"`` to nearest,
            ``"nvfp4_sr"`` stochastic, ``"bf16"`` not quantised.
        activations: (nf4, bf16) what is kept for backward: ``"bf16"``, or ``"nvfp4"``, the codes of what LoRA branches read and,
            with ``fused``, of norms and gated MLPs (:mod:`peft_nvfp4.fusion.compressed`). The forward pass stays what it is.
            With ``backend="nvfp4"`` the codes are kept in any case.
        fused: (nvfp4) replace RMSNorms and gated MLPs by ones that emit NVFP4 and keep little else for backward, and compute
            linears of one input together (:func:`peft_nvfp4.attach`): faster and far smaller. Gradients of norms and activations
            are then taken at the 4-bit values. ``model.base_model.nvfp4_report`` says what was found.
        recompute_mlp: (nvfp4, fused) do not keep the codes of the input of an MLP's last linear for its adapter's gradient, but
            make it anew in backward from the kept codes of gate and up: a quarter less memory for activations (a sixth with
            ``accuracy="paper"``). The forward pass is the same; that one gradient is taken at twice-rounded values.
        recompute_attention: (nvfp4, fused) do not keep the codes of attention's output for the adapter of the linear that reads
            it, but make them anew in backward from the output, which attention keeps in any case: 6 % less memory for
            activations (4 % with ``"paper"``), the same bits. Without effect where attention keeps no output
            (``attn_implementation="eager"``).
        cuda_graphs: training replays recordings of the decoder, one for each shape of its inputs (:mod:`peft_nvfp4.training.cuda_graphs`): much
            faster where Python and kernel launches bound the step, and memory that stays allocated. Off by default.
        skip_modules: names (or dotted endings) of modules to leave dense. Output heads and ``modules_to_save`` always stay dense.
        calibration: (nvfp4) folder written by :func:`peft_nvfp4.calibrate` for this base model: its linears get the weights,
            terms and centres stored there, whatever ``accuracy`` says; the others are frozen as without it.
        merge_aware: (nvfp4) train with the weight that merging the adapter into NVFP4 will store, straight-through gradients to A
            and B (:mod:`peft_nvfp4.lora.merge_aware`): slower, and ``peft_nvfp4.merge(model, to="nvfp4")`` is the trained function.
        offload: ``"cpu"`` keeps the frozen weights of decoder layers in the host's memory and fetches each layer while the one
            before it computes (:mod:`peft_nvfp4.training.offload.enable`), for models that do not fit: the weights of two layers are on the GPU,
            and the results are the same bit for bit. Not with ``cuda_graphs``, FSDP or ``device_map``.

    Raises:
        ValueError: an unknown word in one of these fields; the message lists the known ones.
    """

    backend: str = field(default="nvfp4", metadata={"help": "frozen base: 'nvfp4', 'nf4' or 'bf16'"})
    accuracy: str = field(default="high", metadata={"help": "activation terms: 'high', 'balanced' or 'paper'"})
    weight_layouts: str = field(default="cached", metadata={"help": "'cached' or 'transient' backward layout"})
    gradients: str = field(default="nvfp4", metadata={"help": "'nvfp4', 'nvfp4_sr' or 'bf16'"})
    activations: str = field(default="bf16", metadata={"help": "kept for backward by nf4 and bf16: 'bf16' or 'nvfp4'"})
    fused: bool = field(default=True, metadata={"help": "norms and gated MLPs that emit NVFP4"})
    recompute_mlp: bool = field(default=False, metadata={"help": "make the MLP's inner activation anew in backward"})
    recompute_attention: bool = field(default=False, metadata={"help": "keep attention's output once"})
    cuda_graphs: bool = field(default=False, metadata={"help": "record training steps in CUDA graphs"})
    skip_modules: list[str] | None = field(default=None, metadata={"help": "modules to leave dense"})
    calibration: str | None = field(default=None, metadata={"help": "folder of a finished calibration"})
    merge_aware: bool = field(default=False, metadata={"help": "train with the weight that an NVFP4 merge stores"})
    offload: str | None = field(default=None, metadata={"help": "'cpu': frozen weights in the host's memory"})

    def __post_init__(self) -> None:
        self._post_init_of_peft()
        if not isinstance(self.backend, str) or self.backend not in BACKENDS:
            raise ValueError(f"unknown backend {self.backend!r}; choose one of {', '.join(sorted(BACKENDS))}")
        check_accuracy(self.accuracy)
        if self.calibration is not None and self.backend != "nvfp4":
            raise ValueError(f"a calibration is for backend='nvfp4', got {self.backend!r}")
        self.calibration = None if self.calibration is None else str(self.calibration)
        FrozenOptions(self.weight_layouts, self.gradients, activations=self.activations)
        if not registered():
            warnings.warn(
                "peft_nvfp4 is not registered with PEFT: this config freezes nothing. Call peft_nvfp4.register()", stacklevel=3
            )
        if self.merge_aware:
            from .merge_aware import check_merge_aware  # not at the top: only those who use it need it

            check_merge_aware(self)
        if self.offload not in (None, "cpu"):
            raise ValueError(f"offload is None or 'cpu', got {self.offload!r}")
        if self.offload and self.cuda_graphs:
            raise ValueError("offload='cpu' and cuda_graphs=True exclude each other: the copies are no part of a recording")
        for name in ("fused", "recompute_mlp", "recompute_attention", "cuda_graphs", "merge_aware"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is True or False, got {getattr(self, name)!r}")
        if self.skip_modules is not None:
            if isinstance(self.skip_modules, str) or not all(isinstance(name, str) for name in self.skip_modules):
                raise TypeError(f"skip_modules is a list of module names, not a string or other values: {self.skip_modules!r}")
            self.skip_modules = list(self.skip_modules)

    def _post_init_of_peft(self) -> None:
        """PEFT's own checks. Of LoftQ it knows its own formats, which need a package and a config; ours needs neither."""
        init, settings = self.init_lora_weights, self.loftq_config
        if init not in ("loftq", "eora"):
            return super().__post_init__()
        self.init_lora_weights, self.loftq_config = True, {}
        super().__post_init__()
        if init == "eora" and settings:
            raise ValueError("loftq_config is for init_lora_weights='loftq'")
        self.init_lora_weights = init
        self.loftq_config = (settings if isinstance(settings, dict) else vars(settings)) if settings else {}
        from .inits import loftq_iterations  # not at the top: only those who use it need it

        if loftq_iterations(self) > 1 and self.calibration is not None:
            raise ValueError("loftq_iter > 1 rounds the base anew, which would undo the calibration: use loftq_iter=1")
        return None

    def own_fields(self) -> dict[str, Any]:
        """The thirteen fields that stock PEFT does not know."""
        return {name: getattr(self, name) for name in OWN_FIELDS}

    def to_dict(self) -> dict[str, Any]:
        """What stock PEFT may see: without this package's own fields."""
        known = {key: value for key, value in super().to_dict().items() if key not in OWN_FIELDS}
        if self.init_lora_weights in ("loftq", "eora"):  # done, and nothing that stock PEFT could repeat
            known.update(init_lora_weights=True, loftq_config={})
        return known

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write ``adapter_config.json`` (plain LoRA) and the side-car ``nvfp4_adapter.json``."""
        super().save_pretrained(save_directory, **kwargs)
        side_car = {"format_version": SIDE_CAR_VERSION, **self.own_fields()}
        if self.init_lora_weights == "loftq" and self.loftq_config.get("loftq_iter", 1) > 1:
            side_car["loftq_iter"] = self.loftq_config["loftq_iter"]  # the base is a different one, to be made again
        (Path(save_directory) / SIDE_CAR).write_text(json.dumps(side_car, indent=2, sort_keys=True) + "\n")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any) -> NVFP4LoraConfig:
        """Read a saved adapter's configuration. Without a side-car (an adapter of stock PEFT) the own fields get their defaults.

        Raises:
            ValueError: the side-car is damaged, or written by a newer version of this package.
        """
        base = LoraConfig.from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        if not isinstance(base, LoraConfig):
            raise ValueError(f"{pretrained_model_name_or_path} holds a {base.peft_type} adapter, not LoRA")
        known = {f.name: getattr(base, f.name) for f in fields(LoraConfig) if f.init}
        path = _find_side_car(pretrained_model_name_or_path, subfolder, cls._split_kwargs(kwargs)[0])
        if path is None:
            return cls(**known)
        try:
            own = _read_side_car(path)
            if rounds := own.pop("loftq_iter", None):
                known.update(init_lora_weights="loftq", loftq_config={"loftq_iter": rounds})
            return cls(**known, **own)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def _find_side_car(adapter: str, subfolder: str | None, hub_options: dict[str, Any]) -> Path | None:
    """Path of the side-car next to an adapter, local or on the Hub; None if the adapter has none."""
    folder = Path(adapter, subfolder or "")
    if folder.is_dir():
        return folder / SIDE_CAR if (folder / SIDE_CAR).is_file() else None
    try:
        return Path(hf_hub_download(str(adapter), SIDE_CAR, subfolder=subfolder, **hub_options))
    except LocalEntryNotFoundError as error:  # offline: whether there is one cannot be known
        raise ValueError(
            f"cannot tell which settings {adapter} was trained with: its {SIDE_CAR} is not in the local cache and the Hub cannot "
            "be reached. Download it once while online, or read the adapter with peft.LoraConfig"
        ) from error
    except EntryNotFoundError:
        return None


def _read_side_car(path: Path) -> dict[str, Any]:
    """The own fields in a side-car; the caller names the file in what is raised."""
    try:
        content = json.loads(path.read_text())
        version = content.pop("format_version")
        newer = version > SIDE_CAR_VERSION
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"not a valid side-car file ({error}); delete it to load the adapter with default settings") from error
    if newer:
        raise ValueError(f"format version {version}; this package reads up to {SIDE_CAR_VERSION}: upgrade peft_nvfp4")
    unknown = content.keys() - {*OWN_FIELDS, "loftq_iter"}
    if unknown:
        raise ValueError(f"unknown settings: {', '.join(sorted(unknown))}")
    return content
