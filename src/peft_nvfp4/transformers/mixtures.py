"""Experts that are 3-D parameters, while ``from_pretrained`` loads a model: in three ways, as linears (:mod:`.quantizer`).

* A dense checkpoint: transformers gathers the experts of a projection into one tensor, which is quantised when it arrives; at any
  time one projection of one layer is dense.
* A saved model: the files hold the packed parameters of :class:`~peft_nvfp4.nn.experts.frozen_experts.FrozenExperts` under their
  names in the model. Experts that the files hold dense (``skip_modules``) stay dense.
* A model packed by another tool holds every expert's linears by themselves, which transformers would merge on loading if they
  were dense. Their place is taken by linears of those names (:class:`OpenedExperts`), which are loaded as any other packed
  linears, and then joined: codes and scales are copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.core_model_loading import rename_source_key

from ..checkpoints.layouts import PARTS
from ..checkpoints.load import stored_in
from ..checkpoints.settings import INSTEAD
from ..nn.experts.frozen_experts import FrozenExperts, first_of, matrices
from ..nn.experts.packing import packed_of, stack_name
from ..nn.frozen_linear import frozen
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import QuantizedMatrix
from ..quantization.freeze import _carry_attributes
from ..quantization.plan import expert_options
from . import checkpoint
from .state import LoadState


def empty(state: LoadState, model: nn.Module, name: str) -> FrozenExperts:
    """Frozen experts that have no weights yet."""
    options = expert_options(name, state.options(name), state.config.accuracy)
    experts = FrozenExperts(model.get_submodule(name), "nvfp4", options)
    experts._is_hf_initialized = True
    return experts


# ---------------------------------------------------------------------------------------------- a dense checkpoint


def collect(state: LoadState, model: nn.Module, key: str, weight: Tensor) -> None:
    """Take a projection's weights, pack them, and put the frozen experts in place if they are complete."""
    name, _, projection = key.rpartition(".")
    original = model.get_submodule(name)
    experts = state.half_packed.get(name) or state.half_packed.setdefault(name, empty(state, model, name))
    held = original._parameters[projection] = frozen(weight.new_empty(0))
    held._is_hf_initialized = True  # nothing to initialise while the other projection is waited for
    experts.pack(projection, matrices(original, weight))
    experts.compute_dtype = weight.dtype
    for p in experts.parameters():
        p._is_hf_initialized = True
    if all(hasattr(experts, name) for name in experts.projections):
        _place(model, name, state.half_packed.pop(name))


def collect_rest(state: LoadState, model: nn.Module) -> None:
    """Pack what the checkpoint lacks, and transformers has initialised (and said so)."""
    for name in state.mixtures:
        original = model.get_submodule(name)
        if not isinstance(original, FrozenExperts):
            for projection in (first_of(original), "down_proj"):
                if not hasattr(state.half_packed.get(name), projection):
                    collect(state, model, f"{name}.{projection}", getattr(original, projection).detach())


def _place(model: nn.Module, name: str, experts: FrozenExperts) -> None:
    """Frozen experts take the place of dense ones, whose weights are let go."""
    original = model.get_submodule(name)
    for projection in experts.projections:
        original.register_parameter(projection, None)
    experts.take_biases()
    _carry_attributes(original, experts)
    model.set_submodule(name, experts)


# ---------------------------------------------------------------------------------------------- a saved model


def place_empty(state: LoadState, model: nn.Module) -> None:
    """Put experts with empty parameters where the files hold packed ones; the others stay dense."""
    for name in list(state.mixtures):
        first = first_of(model.get_submodule(name))
        if state.stored and not any(f"{name}.{stack_name(p, 'weight_scales')}" in state.stored for p in (first, "down_proj")):
            state.mixtures.remove(name)
            continue
        experts = empty(state, model, name)
        for key, shape in checkpoint.packed_shapes(name, experts).items():
            setattr(experts, key.removeprefix(f"{name}."), frozen(torch.empty(shape, dtype=torch.uint8, device="meta")))
        _place(model, name, experts)


# ---------------------------------------------------------------------------------------------- packed by another tool

_LINEAR = re.compile(r"(.+)\.(\d+)\.(\w+)")


class OpenedExperts(nn.Module):
    """The linears of experts one by one, under their names in the files: ``<expert>.<linear>``.

    Attributes:
        original: (the module whose place this one has,): in a tuple it is no submodule.
        roles: name of a linear -> (projection that it is part of, index of that part).
    """

    def __init__(self, original: nn.Module, roles: Mapping[str, tuple[str, int]]):
        super().__init__()
        self.original, self.roles = (original,), dict(roles)
        for e in range(original.down_proj.shape[0]):
            expert = nn.Module()
            for leaf, (projection, _) in roles.items():
                parts = sum(role[0] == projection for role in roles.values())
                _, n, k = getattr(original, projection).shape
                dtype = original.down_proj.dtype
                expert.add_module(leaf, nn.Linear(k, n // parts, bias=False, device="meta", dtype=dtype))
            self.add_module(str(e), expert)

    def linears(self) -> list[str]:
        return [f"{e}.{leaf}" for e, _ in self.named_children() for leaf in self.roles]


def open_up(state: LoadState, model: nn.Module, files: Sequence[str]) -> None:
    """Put :class:`OpenedExperts` where the files hold packed experts, and enter their linears in ``state.planned``. Experts
    that are dense in the files stay dense."""
    renamings, converters, context = checkpoint.conversions(model)
    roles: dict[str, dict[str, tuple[str, int]]] = {}
    for stored in stored_in(files):
        stem, _, leaf = stored.key.rpartition(".")
        plain = rename_source_key(f"{stem}.weight", renamings, [], *context)[0]
        match = _LINEAR.fullmatch(plain.removesuffix(".weight")) if leaf in PARTS else None
        if match is None or match[1] not in state.mixtures or match[3] in roles.get(match[1], {}):
            continue
        target, pattern = rename_source_key(f"{stem}.weight", renamings, converters, *context)
        sources = next((c.source_patterns for c in converters if pattern in c.source_patterns), [pattern])
        roles.setdefault(match[1], {})[match[3]] = target.rpartition(".")[2], sources.index(pattern)
        state.opened[match[1]] = stored
    wanted = {("gate_up_proj", 0), ("gate_up_proj", 1), ("down_proj", 0)}
    if roles and (partly := [n for n in state.mixtures if set(roles.get(n, {}).values()) != wanted]):
        part = next(iter(state.opened.values()))
        raise ValueError(
            f"{part} belongs to packed experts, and not all projections of all experts of the model are packed ({partly[0]}). "
            f"{INSTEAD}"
        )
    state.mixtures = list(roles)
    for name, linears in roles.items():
        opened = OpenedExperts(model.get_submodule(name), dict(sorted(linears.items(), key=lambda item: item[1])))
        model.set_submodule(name, opened)
        state.planned |= {f"{name}.{linear}": (f"{name}.{linear}",) for linear in opened.linears()}


def close(state: LoadState, model: nn.Module) -> None:
    """Make frozen experts of the opened ones, whose linears are frozen now; gate and up of an expert become one matrix."""
    for name in state.opened:
        opened: OpenedExperts = model.get_submodule(name)
        model.set_submodule(name, opened.original[0])
        experts = empty(state, model, name)
        for projection in experts.projections:
            leaves = [leaf for leaf, role in opened.roles.items() if role[0] == projection]
            experts.store(projection, [_joined(experts, projection, name, e, m, leaves) for e, m in opened.named_children()])
        _place(model, name, experts)
        for linear in opened.linears():
            del state.planned[f"{name}.{linear}"]


def _joined(experts: FrozenExperts, projection: str, name: str, e: str, expert: nn.Module, leaves: Sequence[str]) -> dict:
    """Packed tensors of one expert's projection, from those of its linears; which are let go."""
    parts = [expert.get_submodule(leaf).forward_layout for leaf in leaves]
    if not all(torch.equal(part.gscale, parts[0].gscale) for part in parts):
        raise ValueError(
            f"{' and '.join(leaves)} of {name}.{e} have different global scales, and {projection} is one matrix here, with one. "
            f"{INSTEAD}"
        )
    codes, scales = (torch.cat(tensors) for tensors in list(zip(*parts))[:2])
    (n, k), options = experts.projections[projection], experts.options[projection]
    w = QuantizedMatrix(codes, scales, parts[0].gscale, k)
    layer = NVFP4FrozenLinear(k, n, None, experts.compute_dtype, options, w)
    for leaf in leaves:
        delattr(expert, leaf)
    return packed_of(layer)
