"""Freeze a model in place: replace its linears, one after the other, by :class:`~peft_nvfp4.nn.frozen_linear.FrozenLinear`, and
experts that are 3-D parameters by :class:`~peft_nvfp4.nn.experts.frozen_experts.FrozenExperts` (not with ``backend="bf16"``: they
are dense already).

The whole walk is planned and checked (:mod:`.plan`) before the first layer changes, so a bad weight or a wrong option
leaves the model as it was. Then layers are converted one at a time and the dense weight of each is freed before the next: the
peak stays about one layer above the larger of "before" and "after".
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.utils.logging import tqdm  # honours disable_progress_bar()

from ..autograd.module_hooks import hooks_of
from ..fusion.attach import detach
from ..fusion.probe import share_hooks
from ..nn.experts.frozen_experts import FrozenExperts, frozen_experts, is_experts
from ..nn.frozen_linear import FrozenLinear, FrozenOptions
from ..nn.registry import BACKENDS
from ..nn.wrapping import warn_caller
from ..ops import shared_gscale, weight_gscale
from .groups import check_accuracy, fused_siblings, input_terms, skipped
from .plan import check_names, expert_options, kept_dense, plan, plan_experts

DENSE_SHARE_WARNING = 0.05


def freeze_model(
    model: nn.Module,
    backend: str = "nvfp4",
    *,
    accuracy: str = "high",
    weight_layouts: str = "cached",
    gradients: str = "nvfp4",
    activations: str = "bf16",
    skip_modules: Iterable[str] = (),
    progress: bool = True,
    on_frozen: Callable[[str, nn.Linear, FrozenLinear], None] | None = None,
) -> nn.Module:
    """Freeze the linears (and experts) of ``model`` in the storage format ``backend``, in place. Frozen layers are left alone.

    Args:
        backend: ``"nvfp4"``, ``"nf4"`` (a model loaded by bitsandbytes is adopted) or ``"bf16"``.
        accuracy: see :class:`~.options.Options`.
        weight_layouts, gradients, activations: of every layer, see :class:`~peft_nvfp4.nn.frozen_linear.FrozenOptions`.
        skip_modules: names, or dotted name endings, of modules to leave as they are (with everything inside them).
        progress: show a progress bar when it takes longer than a second.
        on_frozen: called with the name of every linear, the dense layer, about to go, and the frozen one that takes its place.
            The dense linears wait on the CPU until all calls have returned; an error puts them back.

    Returns:
        The same model.

    Raises:
        ValueError: unknown backend or option; NaN or Inf in a weight; weights not loaded (meta device); a model already
            quantised in another way. Nothing has been changed then.
    """
    try:
        cls = BACKENDS[backend]
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    check_accuracy(accuracy)
    layer = FrozenOptions(weight_layouts, gradients, activations=activations)
    check_names(model, skip_modules := tuple(skip_modules))
    names, mixtures = plan(model, backend, skip_modules), plan_experts(model, backend, skip_modules)
    modules: dict[int, nn.Module] = {}  # a module registered under two names is one layer
    weights: dict[int, FrozenLinear] = {}  # two modules that share a weight share its packed form
    _warn_upcast(model, names, mixtures)
    planned = set(names)
    with dense_after_error(model, names if on_frozen is not None else ()):
        for name in tqdm(names, desc=f"Freezing in {backend}", unit="layer", disable=not progress, delay=1.0, mininterval=1.0):
            linear = model.get_submodule(name)
            frozen = modules.get(id(linear)) or _reuse(weights.get(id(linear.weight)), linear)
            if frozen is None:
                options = replace(layer, terms=input_terms(name, accuracy))
                frozen = cls.quantize(linear, options, gscale=_shared_gscale(model, name, planned))
                frozen.shares_input = len(_siblings(model, name, planned)) > 1
                _carry_attributes(linear, frozen)
                if on_frozen is not None:
                    on_frozen(name, linear, frozen)
                    linear.to("cpu")
            modules[id(linear)] = weights[id(linear.weight)] = frozen
            model.set_submodule(name, frozen)
            del linear
    for name in tqdm(mixtures, desc="Freezing experts", unit="layer", disable=not progress, delay=1.0, mininterval=1.0):
        original = model.get_submodule(name)
        if id(original) not in modules:
            modules[id(original)] = FrozenExperts.quantize(original, backend, expert_options(name, layer, accuracy))
            _carry_attributes(original, modules[id(original)])
        model.set_submodule(name, modules[id(original)])
    by_choice = [name for name, module in model.named_modules() if backend == "bf16" and is_experts(module)]
    _warn_dense_share(model, (*skip_modules, *by_choice))
    if backend != "bf16":
        _mark_quantised(model)
    return model


@contextmanager
def dense_after_error(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """An error within the context puts the named dense linears back, where they were."""
    before = {name: (linear := model.get_submodule(name), linear.weight.device) for name in names}
    try:
        yield
    except BaseException:
        for name, (linear, device) in before.items():
            model.set_submodule(name, linear.to(device))
        raise


def _warn_upcast(model: nn.Module, names: list[str], mixtures: list[str]) -> None:
    """A model loaded in 16 bits whose weights are FP32 now went through ``prepare_model_for_kbit_training``, which is meant for
    models that are quantised already; and a model without a single linear to freeze is likely a mistake."""
    if not names and not mixtures and not frozen_modules(model):
        warn_caller("no linear layer of this model can be frozen; it stays as it is")
    loaded = getattr(getattr(model, "config", None), "dtype", None)
    if names and loaded in (torch.bfloat16, torch.float16) and model.get_submodule(names[0]).weight.dtype == torch.float32:
        warn_caller(
            f"the model was loaded in {loaded} and is float32 now, so activations will take twice the memory. If it went through "
            "prepare_model_for_kbit_training, leave that call out (use model.gradient_checkpointing_enable() for checkpointing)."
        )


def _mark_quantised(model: nn.Module) -> None:
    """transformers looks at the dtype of some linear's weight to guess that of the activations, unless the config says that the
    weights are quantised."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "to_dict"):
            module.config._is_quantized = True


def _shared_gscale(model: nn.Module, name: str, planned: set[str]) -> torch.Tensor | None:
    """One global scale for sibling linears that read the same input; None for a linear alone."""
    siblings = _siblings(model, name, planned)
    if len(siblings) < 2:
        return None
    modules = [model.get_submodule(s) for s in siblings]
    own = model.get_submodule(name).weight
    for module in modules:
        if isinstance(module, FrozenLinear):  # converted before: it was given the group's scale (in an earlier call: its own)
            shared = getattr(module, "weight_gscale", None)
            fits = (
                shared is not None and own.is_floating_point() and weight_gscale(own) <= shared.view(torch.float32).to(own.device)
            )
            return shared.detach().view(torch.float32).to(own.device, copy=True) if fits else None
    weights = [module.weight for module in modules]
    if not all(w.is_floating_point() for w in weights):  # adopted from bitsandbytes
        return None
    return shared_gscale(weights).to(own.device)


def _siblings(model: nn.Module, name: str, planned: set[str]) -> list[str]:
    """The linears, frozen or about to be, that read the same input as the named one (itself included)."""
    children = model.get_submodule(name.rpartition(".")[0])._modules
    return [s for s in fused_siblings(name) if s in planned or isinstance(children.get(s.rpartition(".")[2]), FrozenLinear)]


def _reuse(frozen: FrozenLinear | None, linear: nn.Linear) -> FrozenLinear | None:
    """A second linear that shared the first one's weight: a new module sharing the packed parameters."""
    if frozen is None:
        return None
    twin = copy.deepcopy(frozen, {id(p): p for p in frozen.parameters()})
    twin.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
    return twin


def _carry_attributes(linear: nn.Module, frozen: nn.Module) -> None:
    """What PEFT's preprocessing left on a layer for its initialisation (CorDA, LoRA-GA), and the user's hooks."""
    for attribute in ("eigens", "_peft_loraga_grad"):
        if hasattr(linear, attribute):
            setattr(frozen, attribute, getattr(linear, attribute))
    share_hooks(linear, frozen)
    frozen.call_hooks = hooks_of(frozen)


def dense_share(model: nn.Module, skip_modules: Iterable[str] = ()) -> dict[str, float]:
    """What of a frozen model's matrix weights stayed dense, though nobody asked for it: Conv1D, custom linears, experts in 3-D
    parameters of a kind that is not known. Output heads, embeddings, adapters and ``skip_modules``
    do not count.

    Returns:
        Kind ("MixtralExperts.gate_up_proj (3-D)") -> share of all weights counted, the largest first.
    """
    skip_modules = tuple(skip_modules)
    keep = kept_dense(model)
    frozen, dense = 0, Counter()
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear):
            frozen += module.in_features * module.out_features
        elif isinstance(module, FrozenExperts):
            frozen += module.elements
        elif (
            id(module) not in keep
            and not isinstance(module, nn.Embedding)
            and not skipped(name, skip_modules)
            and "lora_" not in name
        ):
            for p_name, p in module.named_parameters(recurse=False):
                if p.ndim >= 2 and p.is_floating_point():
                    dense[f"{type(module).__name__}.{p_name} ({p.ndim}-D)"] += p.numel()
    total = frozen + sum(dense.values())
    return {kind: count / total for kind, count in dense.most_common()}


def _warn_dense_share(model: nn.Module, skip_modules: tuple[str, ...]) -> None:
    """Warn when a sizeable share of the matrix weights stayed dense."""
    dense = dense_share(model, skip_modules)
    if sum(dense.values()) > DENSE_SHARE_WARNING:
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in list(dense.items())[:3])
        experts = any("(3-D)" in kind for kind in dense)
        advice = " Experts in 3-D parameters can be adapted, dense, through target_parameters." if experts else ""
        warn_caller(
            f"{sum(dense.values()):.0%} of the matrix weights stay dense, in their full size: {kinds}. "
            f"Only plain nn.Linear layers, and experts of transformers' experts interface, are packed.{advice}"
        )


def frozen_layers(model: nn.Module) -> list[tuple[str, FrozenLinear]]:
    """(dotted name, layer) of every frozen linear."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, FrozenLinear)]


def frozen_modules(model: nn.Module) -> list[tuple[str, FrozenLinear | FrozenExperts]]:
    """(dotted name, module) of every frozen linear and of all frozen experts: a model may have the ones without the others."""
    return [*frozen_layers(model), *frozen_experts(model)]


def frozen_matrices(model: nn.Module) -> Iterator[tuple[str, FrozenLinear | FrozenExperts, FrozenOptions]]:
    """(dotted name without the wrapping of adapters, module, options) of every frozen linear, and of every projection of frozen
    experts."""
    for name, module in frozen_modules(model):
        name = name.replace(".base_layer", "")
        if isinstance(module, FrozenExperts):
            yield from ((f"{name}.{projection}", module, options) for projection, options in module.options.items())
        else:
            yield name, module, module.options


def frozen_bytes(model: nn.Module) -> int:
    """Bytes that the frozen weights of a model occupy: all layouts and scales, without biases, heads and embeddings."""
    seen: dict[int, int] = {}
    for _, layer in frozen_modules(model):
        for tensor in layer.packed_tensors().values():
            tensor = getattr(tensor, "_local_tensor", tensor)  # of FSDP2: this process's share
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def dequantize_model(model: nn.Module) -> nn.Module:
    """Replace every frozen linear by the dense ``nn.Linear`` it computes with, and frozen experts by dense ones, in place; the
    inverse of :func:`freeze_model` up to the format's error. Layers inside an adapter are left alone (merge or unload the adapter
    first)."""
    detach(model)  # a fused norm would go on quantising
    dense: dict[int, nn.Module] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, FrozenLinear | FrozenExperts):
            continue
        if isinstance(model.get_submodule(name.rpartition(".")[0]), BaseTunerLayer):
            continue
        if id(layer) not in dense:
            dense[id(layer)] = layer.to_experts() if isinstance(layer, FrozenExperts) else layer.to_linear()
        model.set_submodule(name, dense[id(layer)])
    return model
