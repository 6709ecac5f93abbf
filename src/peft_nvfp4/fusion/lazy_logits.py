"""Logits that are computed when somebody uses them: what an output with a loss holds where the loss needed only some of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LazyLogits:
    """The logits of an output with a loss, at all positions and part of the graph, computed when they are first used.

    Whatever is done to it (indexing, a method of tensors, a function of torch, arithmetic, an edit in place, a hook) is done to
    the tensor, which is kept from then on; a move or a cast waits until then. So metrics that read ``output.logits`` stay right
    and pay for it; who does not read it pays nothing.

    Args:
        compute: () -> the tensor.
        shape, dtype, device: of it.
    """

    def __init__(self, compute: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        state = dict(shape=torch.Size(shape), dtype=dtype, device=device, _compute=compute, _tensor=None, _casts=[])
        self.__dict__.update(state, _grad=torch.is_grad_enabled())

    def tensor(self) -> Tensor:
        """The same one whenever it is asked for. First used without autograd, it is part of the graph all the same."""
        if self._tensor is None:
            with torch.inference_mode(False), torch.set_grad_enabled(self._grad):
                self.__dict__["_tensor"] = self._compute()
            self.__dict__["_compute"] = None  # lets go of what it was computed from
        return self._tensor

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits | Tensor:
        if self._tensor is not None:
            return self._tensor.to(*args, **kwargs)
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        if (like := empty.to(*args, **kwargs)) is empty:
            return self
        cast = type(self)(lambda: self.tensor().to(*args, **kwargs), self.shape, like.dtype, like.device)
        self._casts.append(weakref.ref(cast))
        return cast

    def float(self) -> LazyLogits | Tensor:
        return self.to(torch.float32)

    def _to_be_edited(self) -> Tensor:
        """The tensor, after the casts that were made of what it is now."""
        for cast in [alive for ref in self._casts if (alive := ref()) is not None]:
            cast.tensor()
        self._casts.clear()
        return self.tensor()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if callable(getattr(Tensor, name)):  # to ask for a method computes nothing
            of = self._to_be_edited if name.endswith("_") else self.tensor
            return lambda *args, **kwargs: getattr(of(), name)(*args, **kwargs)
        return getattr(self.tensor(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._to_be_edited(), name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Copies and pickles are tensors."""
        return self.tensor().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        edits = getattr(function, "__name__", "").endswith("_") or "out" in (kwargs or {})
        as_tensor = cls._to_be_edited if edits else cls.tensor
        args, kwargs = torch.utils._pytree.tree_map_only(cls, as_tensor, (args, kwargs or {}))
        return function(*args, **kwargs)


def _operator(name: str) -> Callable:
    return lambda self, *args: getattr(self.tensor(), name)(*args)


def _in_place(name: str) -> Callable:
    def edit(self: LazyLogits, *args: Any) -> LazyLogits:
        getattr(self._to_be_edited(), name)(*args)
        return self

    return edit


for _name in (
    "getitem len iter contains bool int float array add radd sub rsub mul rmul truediv rtruediv floordiv mod neg abs pow rpow "
    "matmul rmatmul eq ne lt le gt ge and or xor invert array"
).split():
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))
for _name in "setitem iadd isub imul itruediv ipow iand ior ixor".split():
    setattr(LazyLogits, f"__{_name}__", _in_place(f"__{_name}__"))


class EvaluatedLogits(LazyLogits):
    """Of a call without gradient: it says that it is a tensor, since ``Trainer.evaluate`` collects those outputs that are.
    (A class of its own, since a compiler does not trace it.)"""

    @property
    def __class__(self) -> type:
        return Tensor
