"""``BACKENDS`` maps the word that a user writes (``backend="nvfp4"``) to a subclass of :class:`FrozenLinear`.

Looking a word up here is the only place where the package branches on the backend: the LoRA layer, the hooks and the commands
speak to the base class. A backend's module is imported when it is first asked for, since bitsandbytes is optional.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .frozen_linear import FrozenLinear


class _Registry(Mapping):
    """Backend word -> class; a backend's module is imported when it is first asked for (bitsandbytes is optional)."""

    def __init__(self, modules: dict[str, str]):
        self._modules = modules
        self._classes: dict[str, type[FrozenLinear]] = {}
        self.loaded: list[type[FrozenLinear]] = []
        """The classes whose modules are imported."""

    def __getitem__(self, name: str) -> type[FrozenLinear]:
        if name not in self._modules and name not in self._classes:
            raise KeyError(f"unknown backend {name!r}; choose one of {', '.join(sorted(self))}")
        if name not in self._classes:
            importlib.import_module(self._modules[name])
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._modules, **self._classes})

    def __len__(self) -> int:
        return len(self._modules.keys() | self._classes.keys())

    def add(self, name: str, cls: type[FrozenLinear]) -> None:
        self._classes[name] = cls
        self.loaded.append(cls)


BACKENDS = _Registry({name: f"{__package__}.{name}" for name in ("nvfp4", "nf4", "bf16")})


def register_backend(name: str):
    """Class decorator that enters a :class:`FrozenLinear` subclass in :data:`BACKENDS` under ``name``."""

    def enter(cls: type[FrozenLinear]) -> type[FrozenLinear]:
        cls.backend = name
        BACKENDS.add(name, cls)
        return cls

    return enter
