"""What the fused norm and the fused MLP have in common: they take the place of a module, and call it where they do not apply."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from ..nn.plain import StandIn
from .probe import share_hooks

CONTENTS = ("_parameters", "_buffers", "_modules")


class FusedModule(StandIn):
    """Takes the place of ``original``, under its names: parameters, buffers, children and hooks that either of the two has, or is
    given, are those of both. So the original can compute at any time, without anything being set on it.
    """

    def __init__(self, original: nn.Module, *others: nn.Module):
        super().__init__()
        for name in CONTENTS:
            setattr(self, name, vars(original)[name])
        share_hooks(original, self)
        self.training = original.training
        self._outside = (original, *others)  # in a tuple: these are no submodules of this module

    @property
    def original(self) -> nn.Module:
        """The module this one replaced, with the contents and the mode that this one has now."""
        self._share_parametrizations()
        self._outside[0].training = self.training
        return self._outside[0]

    def _share_parametrizations(self) -> None:
        """``torch.nn.utils.parametrize`` puts a property of the class in the place of a parameter. The original's class gets the
        properties that this one's has now."""
        names, original = set(self._modules.get("parametrizations", ())), self._outside[0]
        if names != vars(type(original)).get("_parametrized", set()):
            kind = type(original).__base__ if "_parametrized" in vars(type(original)) else type(original)
            members = {name: getattr(type(self), name) for name in names} | {"_parametrized": names}
            original.__class__ = type(kind.__name__, (kind,), members) if names else kind

    def train(self, mode: bool = True) -> FusedModule:
        self._outside[0].training = mode
        return super().train(mode)

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """The original's ``forward`` with the contents and the mode of this module. A replica (of ``nn.DataParallel``) has
        contents of its own: then a copy of the original computes, since other threads use the original."""
        self._share_parametrizations()
        original, contents = self._outside[0], {name: vars(self)[name] for name in CONTENTS}
        if original.training != self.training or any(vars(original)[name] is not held for name, held in contents.items()):
            parameters = {name: vars(self)[name] for name in original._parameters if name in vars(self)}  # as replicas have them
            original, shared = object.__new__(type(original)), original
            vars(original).update(vars(shared) | contents | parameters | {"training": self.training})
            if getattr(forward := vars(shared).get("forward"), "__self__", None) is shared:  # a method set on the instance
                vars(original)["forward"] = MethodType(forward.__func__, original)
        return original.forward(*args, **kwargs)
