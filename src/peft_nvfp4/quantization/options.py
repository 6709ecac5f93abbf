"""``Options``: what a user says about the frozen base, and what the layers get of it.

The six words stand here once, with their defaults, their checks, a line of help and their form in JSON.
:class:`~peft_nvfp4.NVFP4LoraConfig`, ``PactConfig``, the commands and the memory estimator take them from this class.

Gradients in another rounding, and one of the savings of ``"small"`` without the other, are for ablations: freeze the base with
:func:`peft_nvfp4.freeze_model` (``weight_layouts=``, ``gradients=``, ``activations=``) and fuse it with
:func:`peft_nvfp4.attach` (``recompute_mlp=``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from ..nn.frozen_options import FrozenOptions
from ..nn.registry import BACKENDS
from .groups import check_accuracy, input_terms

MEMORY = ("auto", "fast", "small", "smallest")
"""Words of ``memory``. Of the levels, all but the first, each takes less than the one before."""
MOST_NAMES = 10_000
"""In ``skip_modules``, which files of others may hold."""


@dataclass(frozen=True)
class Options:
    """How the base is frozen, and what training keeps of it.

    Attributes:
        backend: storage and arithmetic of the frozen linears. ``"nvfp4"``: PACT, W4A4. ``"nf4"``: QLoRA through bitsandbytes.
            ``"bf16"``: plain LoRA. Changing this word is the only change needed to compare them.
        accuracy: (nvfp4) terms in which activations are quantised, a second one for what the first left over. ``"high"``: two
            everywhere, closest to BF16 activations. ``"balanced"``: two where a norm feeds the linears, 14 % less memory for
            backward and a sixth less work in the forward FP4 GEMMs. ``"paper"``: one everywhere, as PACT does, half of that work
            and 21 % less memory than ``"high"``. What each costs in accuracy: ``docs/accuracy.md``.
        memory: what is kept. ``"auto"``: what the GPU has room for. With ``"nvfp4"`` the base begins with one layout of each
            weight; the first training step keeps both in as many layers as leave room for a step with a quarter more tokens, and
            does as ``"small"`` in the others. A step that runs out of memory is repeated with less: ``"small"``, then decoder
            layers are checkpointed, then weights are on the host (where they stay from the start if one layout of each does not
            fit the GPU). One line says which and why (:mod:`peft_nvfp4.training.memory_level`). Without a GPU it is ``"fast"``,
            and the FP32 values of NVFP4 weights are kept between steps where the host has room
            (:mod:`peft_nvfp4.training.host_level`).
            ``"fast"``: (nvfp4) a forward and a backward layout of every weight, 9 bits a weight; (nf4, bf16) activations as they
            are. ``"small"``: (nvfp4) one layout of 4.5 bits, the backward one is made at each use with the same bits, and the
            MLP's inner activation is recomputed in backward from the codes of gate and up, a quarter less memory for activations
            (a sixth with ``accuracy="paper"``); (nf4, bf16) activations as NVFP4 codes. The forward pass is that of ``"fast"``
            bit for bit; the gradients that use what was rounded twice, or to codes, are slightly noisier. ``"smallest"``:
            ``"small"``, and the frozen weights of decoder layers are in the host's memory, each fetched while the layer before it
            computes, with the same bits (:func:`peft_nvfp4.training.offload.enable.enable_offload`); not with CUDA graphs, FSDP
            or ``device_map``.
        calibration: (nvfp4) folder written by :func:`peft_nvfp4.calibrate` for this base model: its linears get the weights,
            terms and offsets stored there, whatever ``accuracy`` says; the others are frozen as without it.
        skip_modules: names (or dotted endings) of modules to leave dense. Output heads and ``modules_to_save`` always stay dense.
        merge_aware: (nvfp4) train with the weight that merging the adapter into NVFP4 will store, straight-through gradients to A
            and B (:mod:`peft_nvfp4.lora.merge_aware`): slower, and ``peft_nvfp4.merge(model, to="nvfp4")`` is the trained
            function.

    Raises:
        ValueError, TypeError: an unknown word or a wrong type; the message lists the known ones.
    """

    backend: str = field(default="nvfp4", metadata={"help": "Frozen base: nvfp4, nf4 or bf16."})
    accuracy: str = field(default="high", metadata={"help": "Terms of activations: high, balanced or paper."})
    memory: str = field(default="auto", metadata={"help": "What is kept: auto, fast, small or smallest (weights on the host)."})
    calibration: str | None = field(default=None, metadata={"help": "Folder of peft-nvfp4 calibrate."})
    skip_modules: tuple[str, ...] = field(default=(), metadata={"help": "Names of modules to leave dense."})
    merge_aware: bool = field(default=False, metadata={"help": "Train with the weight that an NVFP4 merge stores."})

    known_backends: ClassVar[Iterable[str]] = BACKENDS

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str) or self.backend not in self.known_backends:
            raise ValueError(f"unknown backend {self.backend!r}; choose one of {', '.join(sorted(self.known_backends))}")
        check_accuracy(self.accuracy)
        if self.memory not in MEMORY:
            raise ValueError(f"memory must be one of {', '.join(MEMORY)}, got {self.memory!r}")
        if not isinstance(self.merge_aware, bool):
            raise TypeError(f"merge_aware is True or False, got {self.merge_aware!r}")
        if self.calibration is not None and self.backend != "nvfp4":
            raise ValueError(f"a calibration is for backend='nvfp4', got {self.backend!r}")
        if self.merge_aware and self.backend != "nvfp4":
            raise ValueError(f"merge_aware=True trains the rounding of an NVFP4 merge: it does not go with {self.backend!r}")
        names = () if self.skip_modules is None else self.skip_modules
        if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"skip_modules is a list of module names, not a string or other values: {names!r}")
        if len(names) > MOST_NAMES:  # each is compared with each module
            raise ValueError(f"skip_modules holds {len(names)} names, more than {MOST_NAMES}: name the modules around them")
        object.__setattr__(self, "skip_modules", tuple(names))
        if self.calibration is not None and not isinstance(self.calibration, str):  # a path; a string may be a kind of its own
            object.__setattr__(self, "calibration", str(self.calibration))

    # -- what layers and models get

    @property
    def level(self) -> str:
        """The level that a base begins with: ``memory``, and for ``"auto"`` the one from which the first training step goes on.
        A calibration may hold backward layouts that cannot be made again, so both are kept."""
        if self.memory != "auto":
            return self.memory
        return "small" if self.backend == "nvfp4" and self.calibration is None and gpu_is_here() else "fast"

    @property
    def frozen(self) -> FrozenOptions:
        """How a layer is frozen, but for the terms of its input (:meth:`frozen_at`)."""
        if self.level == "fast":
            return FrozenOptions()
        return FrozenOptions(weight_layouts="transient") if self.backend == "nvfp4" else FrozenOptions(activations="nvfp4")

    def frozen_at(self, name: str) -> FrozenOptions:
        """How the linear of this dotted name is frozen."""
        return replace(self.frozen, terms=input_terms(name, self.accuracy))

    @property
    def recompute_mlp(self) -> bool:
        """Whether fused gated MLPs recompute their inner activation in backward."""
        return self.backend == "nvfp4" and self.level != "fast"

    @property
    def offload(self) -> bool:
        """Whether frozen weights of decoder layers are on the host."""
        return self.memory == "smallest"

    def as_json(self) -> dict[str, Any]:
        """Name -> value, for a side-car."""
        return {name: getattr(self, name) for name in NAMES} | {"skip_modules": list(self.skip_modules)}


def gpu_is_here() -> bool:
    """Whether a model may come to be trained on a GPU, wherever it was loaded."""
    import torch  # here: --help and the estimator read this module

    return torch.cuda.is_available()


FIELDS = {f.name: f for f in fields(Options)}
NAMES = tuple(FIELDS)


def check_known(content: Iterable[str], known: Iterable[str], what: str = "settings") -> None:
    """Raises ValueError if ``content`` has a name that is not among the known ones (a file of another version, or a typo)."""
    known = tuple(known)
    if unknown := sorted(set(content) - set(known)):
        raise ValueError(
            f"unknown {what}: {', '.join(unknown)}; known: {', '.join(known)}. Leave the others out, or use the version of "
            "peft_nvfp4 that wrote them"
        )


def option(name: str) -> Any:
    """A field of another dataclass with the default and the help of :class:`Options`' field of this name."""
    return field(default=FIELDS[name].default, metadata=dict(FIELDS[name].metadata))


def help_of(name: str) -> str:
    """The line of help on an option, for a command."""
    return FIELDS[name].metadata["help"]
