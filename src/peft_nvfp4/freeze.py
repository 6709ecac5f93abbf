"""Freeze a model in place: replace its linears, one after the other, by :class:`~peft_nvfp4.backends.FrozenLinear`, and experts
that are 3-D parameters by :class:`~peft_nvfp4.experts.FrozenExperts` (not with ``backend="bf16"``: they are dense already).

The whole walk is planned and checked before the first layer changes, so a bad weight or a wrong option leaves the model as it
was. Then layers are converted one at a time and the dense weight of each is freed before the next: the peak stays about one layer
above the larger of "before" and "after".

Not frozen: output heads, linears whose weight is an embedding's (tied), what the caller excludes, what the model's class wants
kept in FP32, everything inside a tuner layer (LoRA's own A and B), and subclasses of ``nn.Linear`` (their forward may do more).
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn
from tqdm.auto import tqdm

from .backends import BACKENDS, FrozenLinear, FrozenOptions
from .experts import DOWN, FrozenExperts, frozen_experts, is_experts
from .ops import FLOATS, shared_gscale, weight_gscale
from .sites import check_accuracy, fused_siblings, input_terms

HEADS = frozenset({"lm_head", "embed_out", "score", "classifier", "qa_outputs", "output_head", "summary"})
"""Last name component of output heads; besides, whatever ``get_output_embeddings()`` returns."""

DENSE_SHARE_WARNING = 0.05


def freeze_model(
    model: nn.Module,
    backend: str = "nvfp4",
    *,
    accuracy: str = "balanced",
    weight_layouts: str = "cached",
    gradients: str = "nvfp4",
    activations: str = "bf16",
    skip_modules: Iterable[str] = (),
    progress: bool = True,
    on_frozen: Callable[[str, nn.Linear, FrozenLinear], None] | None = None,
) -> nn.Module:
    """Freeze the linears of ``model`` in the storage format ``backend``, in place. Frozen layers are left alone.

    Args:
        backend: ``"nvfp4"``, ``"nf4"`` (a model loaded by bitsandbytes is adopted) or ``"bf16"``.
        accuracy, weight_layouts, gradients, activations: see :class:`~peft_nvfp4.NVFP4LoraConfig`.
        skip_modules: names, or dotted name endings, of modules to leave as they are (with everything inside them).
        progress: show a progress bar when it takes longer than a second.
        on_frozen: called with the name of every linear, the dense layer, about to go, and the frozen one that takes its place.

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
    FrozenOptions(weight_layouts, gradients, activations=activations)  # validates
    _check_names(model, skip_modules := tuple(skip_modules))
    names, mixtures = plan(model, backend, skip_modules), plan_experts(model, backend, skip_modules)
    modules: dict[int, FrozenLinear] = {}  # a module registered under two names is one layer
    weights: dict[int, FrozenLinear] = {}  # two modules that share a weight share its packed form
    _warn_upcast(model, names)
    planned = set(names)
    for name in tqdm(names, desc=f"Freezing in {backend}", unit="layer", disable=not progress, delay=1.0, mininterval=1.0):
        linear = model.get_submodule(name)
        frozen = modules.get(id(linear)) or _reuse(weights.get(id(linear.weight)), linear)
        if frozen is None:
            options = FrozenOptions(weight_layouts, gradients, input_terms(name, accuracy), activations)
            frozen = cls.quantize(linear, options, gscale=_shared_gscale(model, name, planned))
            frozen.shares_input = len(_siblings(model, name, planned)) > 1
            _carry_attributes(linear, frozen)
            if on_frozen is not None:
                on_frozen(name, linear, frozen)
        modules[id(linear)] = weights[id(linear.weight)] = frozen
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, frozen)
        del linear
    for name in tqdm(mixtures, desc="Freezing experts", unit="layer", disable=not progress, delay=1.0, mininterval=1.0):
        options = expert_options(name, FrozenOptions(weight_layouts, gradients, activations=activations), accuracy)
        parent, _, child = name.rpartition(".")
        experts = FrozenExperts.quantize(model.get_submodule(name), backend, options)
        setattr(model.get_submodule(parent), child, experts)
    _warn_dense_share(model, skip_modules)
    if backend != "bf16":
        _mark_quantised(model)
    return model


def _warn_upcast(model: nn.Module, names: list[str]) -> None:
    """A model loaded in 16 bits whose weights are FP32 now went through ``prepare_model_for_kbit_training``, which is meant for
    models that are quantised already; and a model without a single linear to freeze is likely a mistake."""
    if not names and not frozen_layers(model):
        warnings.warn("no linear layer of this model can be frozen; it stays as it is", stacklevel=5)
    loaded = getattr(getattr(model, "config", None), "dtype", None)
    if names and loaded in (torch.bfloat16, torch.float16) and model.get_submodule(names[0]).weight.dtype == torch.float32:
        warnings.warn(
            f"the model was loaded in {loaded} and is float32 now, so activations will take twice the memory. If it went through "
            "prepare_model_for_kbit_training, leave that call out (use model.gradient_checkpointing_enable() for checkpointing).",
            stacklevel=5,
        )


def _mark_quantised(model: nn.Module) -> None:
    """transformers looks at the dtype of some linear's weight to guess that of the activations, unless the config says that the
    weights are quantised."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "to_dict"):
            module.config._is_quantized = True


def plan(model: nn.Module, backend: str, skip_modules: tuple[str, ...], loaded: bool = True) -> list[str]:
    """Dotted names of the linears to freeze, after every check that can fail. With ``loaded=False`` the weights are still to
    come: the names, without the checks of what they hold."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if loaded:
        _refuse_other_quantisation(model)
    keep = _kept_dense(model)
    names, inside_tuner = [], ()
    # PyTorch's own transformer layers have a fast path that reads .weight of their linears
    opaque = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, nn.TransformerEncoderLayer))
    if isinstance(model, nn.Linear):
        raise ValueError("freeze_model replaces linears inside a module; a bare nn.Linear has no parent to be replaced in")
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, FrozenLinear) and module.backend != backend:
            raise ValueError(
                f"{name} is already frozen as {module.backend!r}; one model has one backend, got {backend!r}. Reload the base "
                "model, or make it dense with peft_nvfp4.dequantize_model"
            )
        if isinstance(module, BaseTunerLayer):
            inside_tuner += (name + ".",)
            base = module.get_base_layer()
            if (
                isinstance(base, nn.Linear)
                and not isinstance(base, FrozenLinear)
                and not _skipped(name, skip_modules)
                and id(base) not in keep
            ):
                _refuse_wrapped(name, backend)
        if (
            name.startswith(inside_tuner)
            or not isinstance(module, nn.Linear)
            or isinstance(module, FrozenLinear)
            or id(module) in keep
        ):
            continue
        if name.startswith(opaque) or _skipped(name, skip_modules):
            continue
        if not (_convertible(name, module, backend) if loaded else type(module) is nn.Linear):
            continue
        names.append(name)
    return names


def plan_experts(model: nn.Module, backend: str, skip_modules: tuple[str, ...], loaded: bool = True) -> list[str]:
    """Dotted names of the modules to replace by :class:`~peft_nvfp4.experts.FrozenExperts`, after the checks that :func:`plan`
    makes of linears. Experts that carry an adapter already stay dense, and so do all of a dense backend."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    lists = (getattr(model, key, None) for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    fp32 = tuple(name for kept in lists for name in kept or ())
    names, inside_tuner = [], ()
    for name, module in model.named_modules():
        if isinstance(module, FrozenExperts) and module.backend != backend:
            raise ValueError(
                f"{name} is already frozen as {module.backend!r}; one model has one backend, got {backend!r}. Reload the base "
                "model, or make it dense with peft_nvfp4.dequantize_model"
            )
        if isinstance(module, BaseTunerLayer):
            inside_tuner += (name + ".",)
        passed_over = backend == "bf16" or name.startswith(inside_tuner) or _skipped(name, skip_modules) or _skipped(name, fp32)
        if passed_over or not is_experts(module):
            continue
        for key, weight in module.named_parameters() if loaded else ():
            _check_weight(f"{name}.{key}", weight, backend)
        names.append(name)
    return names


def expert_options(name: str, common: FrozenOptions, accuracy: str) -> dict[str, FrozenOptions]:
    """How the projections of the experts with this dotted name compute."""
    return {
        projection: replace(common, terms=input_terms(f"{name}.{projection}", accuracy))
        for projection in ("gate_up_proj", "up_proj", DOWN)
    }


def _refuse_other_quantisation(model: nn.Module) -> None:
    """A model that another library quantised has its weights where this package does not look."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    method = str(getattr(method, "value", method))
    if method not in ("bitsandbytes", "None"):
        published = method in ("compressed-tensors", "modelopt")
        way_out = (
            "load it with quantization_config=PactConfig(), which reads NVFP4 checkpoints as they are"
            if published
            else ("load it without quantisation (or dequantise it) first")
        )
        raise ValueError(f"the model is already quantised by {method!r}; {way_out}")


def _kept_dense(model: nn.Module) -> set[int]:
    """ids of linears that stay: output heads, tied to an embedding, wanted in FP32 by the model's class."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    lists = (getattr(model, key, None) for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    fp32 = tuple(name for names in lists for name in names or ())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    keep = set() if head is None else {id(head)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (
            name.rpartition(".")[2] in HEADS or id(getattr(module, "weight", None)) in embeddings or _skipped(name, fp32)
        ):
            keep.add(id(module))
    return keep


def _skipped(name: str, skip_modules: tuple[str, ...]) -> bool:
    """Whether a dotted name, or one of its ancestors, equals or ends with one of the given names."""
    parts = name.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(p == s or p.endswith("." + s) for s in skip_modules for p in prefixes)


def _check_names(model: nn.Module, skip_modules: tuple[str, ...]) -> None:
    """A name in skip_modules that matches nothing is likely a typing error."""
    names = [name for name, _ in model.named_modules()]
    unmatched = [s for s in skip_modules if not any(_skipped(name, (s,)) for name in names)]
    if unmatched:
        warnings.warn(f"skip_modules matches no module: {', '.join(unmatched)}", stacklevel=4)


def _convertible(name: str, module: nn.Linear, backend: str) -> bool:
    """True for a plain nn.Linear with sound weights; raises on what must not be passed over silently."""
    weight = getattr(module, "weight", None)
    if weight is None or hasattr(weight, "quant_state") or weight.dtype not in (*FLOATS, torch.float64):
        stored = "no .weight" if weight is None else getattr(weight, "quant_type", str(weight.dtype))
        if backend == "nf4" and stored == "nf4":
            return True
        adopt = ", or use backend='nf4', which adopts bitsandbytes' NF4 layers as they are." if stored == "nf4" else "."
        raise ValueError(
            f"{name} is a {type(module).__name__} whose weight is already quantised ({stored}); backend={backend!r} starts from "
            f"dense weights. Load the model without quantization_config{adopt}"
        )
    if type(module) is not nn.Linear:
        return False
    _check_weight(f"the weight of {name}", weight, backend)
    return True


def _check_weight(what: str, weight: torch.Tensor, backend: str) -> None:
    if weight.is_meta:
        raise ValueError(f"{what} is not loaded (meta device, or offloaded to disk); load the whole model first")
    if weight.dtype == torch.float64 and backend != "bf16":
        raise ValueError(f"{what} is float64; cast the model to float32 or bfloat16 first")
    if backend != "bf16" and not torch.isfinite(weight).all():
        raise ValueError(f"{what} holds NaN or Inf; a quantised layer cannot represent them")


def _refuse_wrapped(name: str, backend: str) -> None:
    raise ValueError(
        f"{name} already carries an adapter on a dense base; backend={backend!r} would have to replace that base under it. "
        "Create the NVFP4LoraConfig adapter first, or freeze the base with peft_nvfp4.freeze_model before adding any adapter."
    )


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
    return [s for s in fused_siblings(name) if s in planned or _is_frozen(model, s)]


def _is_frozen(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), FrozenLinear)
    except AttributeError:
        return False


def _reuse(frozen: FrozenLinear | None, linear: nn.Linear) -> FrozenLinear | None:
    """A second linear that shared the first one's weight: a new module sharing the packed parameters."""
    if frozen is None:
        return None
    twin = copy.deepcopy(frozen, {id(p): p for p in frozen.parameters()})
    twin.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
    return twin


def _carry_attributes(linear: nn.Linear, frozen: FrozenLinear) -> None:
    """What PEFT's preprocessing left on a layer for its initialisation (CorDA, LoRA-GA), and the user's hooks."""
    for attribute in ("eigens", "_peft_loraga_grad"):
        if hasattr(linear, attribute):
            setattr(frozen, attribute, getattr(linear, attribute))
    for hooks in (
        key for key in vars(linear) if key.startswith(("_forward_", "_backward_", "_is_full_backward_")) and "hook" in key
    ):
        setattr(frozen, hooks, getattr(linear, hooks))  # the same dictionaries: handles can still remove what they added


def dense_share(model: nn.Module, skip_modules: Iterable[str] = ()) -> dict[str, float]:
    """What of a frozen model's matrix weights stayed dense, though nobody asked for it: Conv1D, custom linears, experts in 3-D
    parameters of a kind that is not known (with biases, or transposed). Output heads, embeddings, adapters and ``skip_modules``
    do not count.

    Returns:
        Kind ("MixtralExperts.gate_up_proj (3-D)") -> share of all weights counted, the largest first.
    """
    skip_modules = tuple(skip_modules)
    keep = _kept_dense(model)
    frozen, dense = 0, Counter()
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear):
            frozen += module.in_features * module.out_features
        elif isinstance(module, FrozenExperts):
            frozen += module.elements
        elif (
            id(module) not in keep
            and not isinstance(module, nn.Embedding)
            and not _skipped(name, skip_modules)
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
        warnings.warn(
            f"{sum(dense.values()):.0%} of the matrix weights stay dense, in their full size: {kinds}. "
            f"Only plain nn.Linear layers, and experts without biases in (experts, out, in) order, are packed.{advice}",
            stacklevel=4,
        )


def frozen_layers(model: nn.Module) -> list[tuple[str, FrozenLinear]]:
    """(dotted name, layer) of every frozen linear."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, FrozenLinear)]


def frozen_bytes(model: nn.Module) -> int:
    """Bytes that the frozen linear weights of a model occupy: all layouts and scales, without biases, heads and embeddings."""
    seen: dict[int, int] = {}
    for _, layer in [*frozen_layers(model), *frozen_experts(model)]:
        for tensor in layer.packed_tensors().values():
            tensor = getattr(tensor, "_local_tensor", tensor)  # of FSDP2: this process's share
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def dequantize_model(model: nn.Module) -> nn.Module:
    """Replace every frozen linear by the dense ``nn.Linear`` it computes with, and frozen experts by dense ones, in place; the
    inverse of :func:`freeze_model` up to the format's error. Layers inside an adapter are left alone (merge or unload the adapter
    first)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    from .dataflow.attach import detach  # not at the top: it imports the backends

    detach(model)  # a fused norm would go on quantising
    dense: dict[int, nn.Module] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        parent_name, _, child = name.rpartition(".")
        if isinstance(layer, FrozenExperts) and not isinstance(parent := model.get_submodule(parent_name), BaseTunerLayer):
            setattr(parent, child, dense.setdefault(id(layer), layer.to_experts()))
        if isinstance(layer, FrozenLinear) and not isinstance(parent := model.get_submodule(parent_name), BaseTunerLayer):
            setattr(parent, child, dense.setdefault(id(layer), layer.to_linear()))
    return model
