"""Modules that are computed without being called, and what makes a layer call them after all.

A LoRA layer over a frozen linear reads the tensors of the modules below it (the base layer's weight, A and B of an adapter) and
calls none of them; a fused MLP computes the activation by itself. That is the same function only while each of these modules is
plain: exactly the class that the shortcut knows, with nothing attached that runs when the module is called, and set up as it was
when the shortcut was chosen. :func:`obstacle` and :meth:`StandIn.edit` find out, in every call of every layer. Where they find
something, the layer steps aside: it calls the modules, and says so once in the model's report (:class:`StepsAside`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"forward"}
"""What every module has on the instance."""


class Obstacle(NamedTuple):
    """Why a module has to be called."""

    module: nn.Module | None  # None: all modules of the process
    reason: str


EVERYWHERE = Obstacle(None, "hooks on all modules (torch.nn.modules.module.register_module_...) are set")


def obstacle(*modules: tuple[nn.Module, Collection[type]], everywhere: bool = True) -> Obstacle | None:
    """The first of these modules, each with the classes that it may be of (no subclasses), that is not plain; None if all are.
    ``everywhere``: hooks that PyTorch calls for every module count."""
    if everywhere and _has_any_global_hook():
        return EVERYWHERE
    for module, kinds in modules:
        if type(module) not in kinds:
            return Obstacle(module, f"its class is {type(module).__name__}")
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return Obstacle(module, "it has hooks")
        if "forward" in module.__dict__ and not _only_moves_tensors(module):
            return Obstacle(module, "it has a forward of its own")
        if module._compiled_call_impl is not None:
            return Obstacle(module, "it is compiled by itself")
    return None


def _only_moves_tensors(module: nn.Module) -> bool:
    """Whether the instance's ``forward`` is accelerate's, for a model that is spread over devices: it moves inputs to where the
    weight is, and they are there. (One that loads weights from elsewhere has to be called.)"""
    hook, inner = module.__dict__.get("_hf_hook"), module.__dict__.get("_old_forward")
    if type(hook).__name__ != "AlignDevicesHook" or hook.offload:
        return False
    return getattr(inner, "__func__", None) is type(module).forward


def _same(a: Any, b: Any) -> bool:
    """Whether a setting is what it was; numbers, words and tuples by value: copies of a model have others, compilers too."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (isinstance(a, int | float | str) and type(a) is type(b) and a == b)


def _changed(before: dict[str, Any], module: nn.Module) -> str:
    """Which of a module's settings is another one now; empty if none is."""
    now = module.__dict__
    for name, value in before.items():
        if name not in now or not _same(now[name], value):
            shown = [repr(v) if isinstance(v, int | float | str) else type(v).__name__ for v in (value, now.get(name))]
            return f"{name} was {shown[0]} and is {shown[1]}"
    return ""


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Public attributes of a module's own: epsilon, limits, functions; no tensors and children that it has registered."""
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES and name[0] != "_"}


class StepsAside:
    """Base of modules with a shortcut.

    Attributes:
        reported_in: ``fallbacks`` of the model's :class:`~peft_nvfp4.fusion.attach.Report`, and the module's dotted name there.
    """

    reported_in: tuple[dict[str, str], str] | None = None

    def step_aside(self, found: Obstacle) -> None:
        """Enter in the report, once, that modules are called one by one, and why."""
        if self.reported_in is None:
            return
        fallbacks, name = self.reported_in
        if name not in fallbacks:
            fallbacks[name] = self.described(found)

    def described(self, found: Obstacle) -> str:
        """With the module's name."""
        names = [name for name, module in self.named_modules() if name and module is found.module]
        return f"{names[0]}: {found.reason}" if names else found.reason


def fallbacks_of(model: nn.Module) -> dict[str, str]:
    """Where modules with a shortcut enter their fallbacks; a new place if there is none."""
    return next((m.reported_in[0] for m in model.modules() if isinstance(m, StepsAside) and m.reported_in), {})


def report_in(model: nn.Module, fallbacks: dict[str, str]) -> None:
    """Have every module with a shortcut enter its fallbacks there."""
    for name, module in model.named_modules():
        if isinstance(module, StepsAside):
            module.reported_in = fallbacks, name


class _Inner(NamedTuple):
    """A module inside the replaced one that is not called, as it was."""

    parent: nn.Module
    name: str
    module: nn.Module
    settings: dict[str, Any]


class StandIn(StepsAside, nn.Module):
    """Takes the place of a module, ``_outside[0]``, and computes what that did without calling it, nor those of its children that
    :meth:`edit` watches. Children and settings are shared: what is set on this module is set on both."""

    def _take_the_place_of(self, original: nn.Module, called: Iterable[nn.Module] = ()) -> None:
        """Remember how ``original`` is set up. Its children in ``called`` will be called, the others will not."""
        self._modules = original._modules
        self._settings = settings_of(original)
        self._shared = frozenset(n for n in self._settings if n not in self.__dict__ and not hasattr(type(self), n))
        self.__dict__.update((name, self._settings[name]) for name in self._shared)
        self._inner = tuple(_inner(original, set(called)))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_shared", ()):
            setattr(self._outside[0], name, value)

    def was_edited(self) -> bool:
        """Whether the original has to compute, since what is not called has hooks, was replaced, or set up otherwise."""
        if found := self.edit():
            self.step_aside(found)
        return found is not None

    def edit(self) -> Obstacle | None:
        """What is not as it was when this module took the original's place; hooks on what is not called, too."""
        if changed := _changed(self._settings, self._outside[0]):
            return Obstacle(None, changed)
        for inner in self._inner:
            if (now := inner.parent._modules.get(inner.name)) is not inner.module:
                return Obstacle(None, f"{inner.name} was replaced by {type(now).__name__}")
            if changed := _changed(inner.settings, inner.module):
                return Obstacle(inner.module, changed)
            if found := obstacle((inner.module, (type(inner.module),))):
                return found
        return None


def _inner(parent: nn.Module, called: set[nn.Module]) -> Iterable[_Inner]:
    for name, child in parent.named_children():
        if child not in called:
            yield _Inner(parent, name, child, settings_of(child))
            yield from _inner(child, called)
