"""What is known of a model while ``from_pretrained`` loads it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from ..checkpoints.load import PackedLinear, Stored
from ..checkpoints.settings import Published
from ..nn.experts.frozen_experts import FrozenExperts
from ..nn.frozen_linear import FrozenOptions
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..quantization.freeze import _carry_attributes
from .config import PactConfig


@dataclass
class LoadState:
    """Owned by :class:`~peft_nvfp4.transformers.quantizer.PactQuantizer`, which hands it to the functions that load.

    Attributes:
        config: what the user, or the saved model, asks for.
        published: what another tool's settings say of the checkpoint, if it is one.
        mxfp4: experts are in that format (:mod:`.mxfp4`).
        planned: dotted name of a linear to freeze -> the names, itself included, that share its global scale.
        mixtures: dotted names of the experts (3-D parameters) to freeze.
        stored: name of a tensor in the model -> where it comes from.
        placed: linears packed by another tool that hold its tensors, and are not frozen layers yet.
        opened: experts packed by another tool -> one of their tensors. Their linears are in ``planned``.
        half_packed: experts of which one projection has arrived and the other has not.
    """

    config: PactConfig
    published: Published | None = None
    mxfp4: bool = False
    planned: dict[str, tuple[str, ...]] = field(default_factory=dict)
    mixtures: list[str] = field(default_factory=list)
    stored: dict[str, Stored] = field(default_factory=dict)
    placed: dict[str, PackedLinear] = field(default_factory=dict)
    opened: dict[str, Stored] = field(default_factory=dict)
    half_packed: dict[str, FrozenExperts] = field(default_factory=dict)

    def options(self, name: str) -> FrozenOptions:
        """How the linear of this dotted name is frozen."""
        options = self.config.options.frozen_at(name)
        joined = name.rpartition(".")[0].rpartition(".")[0] in self.opened  # its backward layout is made when it has been joined
        return replace(options, weight_layouts="transient") if joined else options

    def put(self, model: nn.Module, name: str, layer: NVFP4FrozenLinear) -> None:
        """A frozen layer takes the place of the planned linear of this dotted name."""
        layer.shares_input = len(self.planned[name]) > 1
        _carry_attributes(model.get_submodule(name), layer)
        model.set_submodule(name, layer)

    def origin(self, name: str) -> str:
        """A tensor's name and the file it is in, for messages."""
        stored = self.stored.get(name)
        return name if stored is None else str(stored)
