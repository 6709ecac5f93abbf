"""What users do to modules of a model that is frozen and fused already. Every change is large (a sign, a factor of two or three,
an added vector of the values' size): one that is lost shows above all rounding."""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle


def changed(t: Tensor, how: str) -> Tensor | None:
    """-1.5 t + a fixed vector, as a new tensor, in place, or in place past autograd; None where t itself was changed."""
    vector = 2 * torch.randn(t.shape[-1], generator=torch.Generator().manual_seed(t.shape[-1])).to(t.dtype)
    if how == "returned":
        return -1.5 * t + vector
    (t.detach() if how == "detached" else t).mul_(-1.5).add_(vector)
    return None


class Wrapper(nn.Module):
    """A module around another one that passes attributes on, and changes the output; ``reentrant``: checkpoints it instead."""

    def __init__(self, inner: nn.Module, how: str):
        super().__init__()
        self.wrapped, self.how = inner, how

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "reentrant":
            return checkpoint(self.wrapped, x, use_reentrant=True)
        return -1.5 * self.wrapped(x * 1.0)


class Twice(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        return -2 * t


def _tensor_hook(how: str):
    """A hook of the output's gradient; ``input``: that refers to the input. (One that refers to the output leaks in PyTorch.)"""

    def hook(module, args, y):
        if y.requires_grad:
            y.register_hook((lambda g: -2 * g + 0 * args[0].detach().sum()) if how else (lambda g: -2 * g))

    return hook


def _all(gradients):
    return tuple(None if g is None else -2 * g for g in gradients)


def _instance(module: nn.Module, model: nn.Module, place: str) -> None:
    before = module.forward
    module.forward = lambda *args: -1.5 * before(*args)


def checkpointed(module: nn.Module, how: str) -> None:
    before = module.forward

    def forward(x: Tensor) -> Tensor:
        return checkpoint(before, x, use_reentrant=how == "reentrant") if torch.is_grad_enabled() else before(x)

    module.forward = forward


def _replaced(module: nn.Module, model: nn.Module, place: str) -> None:
    """A norm by a layer norm, an activation by another one, a linear by a dense one."""
    torch.manual_seed(5)
    if place.endswith("act_fn"):
        new = nn.Tanh()
    elif "norm" in place.rpartition(".")[2]:
        new = nn.LayerNorm(module.weight.shape[0])
    else:
        new = nn.Linear(module.in_features, module.out_features)
    dtype = next(p for p in model.parameters() if p.is_floating_point() and "lora" not in str(type(p))).dtype
    model.set_submodule(place, new.to(dtype).requires_grad_(False))


def _eps(module: nn.Module, model: nn.Module, place: str) -> None:
    original = module.original if hasattr(module, "original") else module
    setattr(module, "variance_epsilon" if hasattr(original, "variance_epsilon") else "eps", 5.0)


@torch.no_grad()
def _weight(module: nn.Module, model: nn.Module, place: str) -> None:
    module.weight.mul_(-2)


def _trained(module: nn.Module, model: nn.Module, place: str) -> None:
    module.weight.requires_grad_(True)


def _parametrised(module: nn.Module, model: nn.Module, place: str) -> None:
    parametrize.register_parametrization(module, "weight", Twice())


def _scaling(module: nn.Module, model: nn.Module, place: str) -> None:
    """The strength of the adapter changes when the linear is called, after its sister linears."""
    module.register_forward_pre_hook(lambda m, args: m.scaling.update(default=-4.0))


def _scales(module: nn.Module, model: nn.Module, place: str) -> None:
    """The B of the adapter changes in place when the linear is called."""

    def change(m, args):
        if not getattr(m, "_changed_before", False):
            m._changed_before = True
            with torch.no_grad():
                m.lora_B["default"].weight.mul_(-3)

    module.register_forward_pre_hook(change)


def _base(module: nn.Module, model: nn.Module, place: str) -> None:
    """The frozen weight doubles in place when the linear is called: of an NVFP4 layer, its global scales."""

    def change(m, args):
        base = m.base_layer
        if not getattr(base, "changed_before", False):
            base.changed_before = True
            for name in ("weight_gscale", "backward_gscale", "w_b", "weight"):
                t = getattr(base, name, None)
                if t is not None and (name.endswith("gscale") or t.is_floating_point()):
                    (t.data.view(torch.float32) if name.endswith("gscale") else t.data).mul_(2)
                    t.add_(0)

    module.register_forward_pre_hook(change)


SIMPLE = {
    "instance": _instance,
    "replaced": _replaced,
    "eps": _eps,
    "weight": _weight,
    "trained": _trained,
    "parametrised": _parametrised,
    "base": _base,
    "scaling": _scaling,
    "scales": _scales,
}


def apply(model: nn.Module, act, captured: dict) -> RemovableHandle | None:
    """Do ``act`` to the decoder ``model``; ``captured`` gets what it observes. Returns the handle of what is not the model's."""
    module = model.get_submodule(act.place)
    if act.kind in SIMPLE:
        SIMPLE[act.kind](module, model, act.place)
    elif act.kind == "global":
        return register_module_forward_hook(lambda m, args, y: changed(y, "returned") if m is module else None)
    elif act.kind == "wrapped":
        model.set_submodule(act.place, Wrapper(module, act.how))
    elif act.kind == "checkpointed":
        checkpointed(module, act.how)
    elif act.kind == "forward":
        module.register_forward_hook(lambda m, args, y: changed(y, act.how))
    elif act.kind == "pre":
        module.register_forward_pre_hook(lambda m, args: changed(args[0], act.how))
    elif act.kind == "backward":
        module.register_full_backward_hook(lambda m, inputs, outputs: _all(inputs))
    elif act.kind == "backward_pre":
        module.register_full_backward_pre_hook(lambda m, outputs: _all(outputs))
    elif act.kind == "tensor":
        module.register_forward_hook(_tensor_hook(act.how))
    elif act.kind == "capture":
        module.register_forward_hook(lambda m, args, y: captured.__setitem__(f"{act.place} captured", y.detach().float().clone()))
        module.register_forward_pre_hook(
            lambda m, args: captured.__setitem__(f"{act.place} input captured", args[0].detach().float().clone())
        )
    else:
        raise ValueError(act.kind)
    return None
