"""Functions of other libraries that this package wraps (of PEFT, transformers, PyTorch, accelerate), how they come back, and
warnings from within them."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

WRAPPED: list[tuple[Any, str, Any]] = []
"""(class or module, name, what it had there of its own, None if it inherits it) of everything that is replaced, in that order."""


def wrap(owner: Any, name: str, wrapper: Callable) -> None:
    """Replace owner.name by a function of its kind (a class method, say) that calls ``wrapper(original, *args, **kwargs)``."""
    original = inspect.getattr_static(owner, name)
    kind = type(original) if isinstance(original, classmethod | staticmethod) else lambda function: function
    original = getattr(original, "__func__", original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    replace(owner, name, kind(wrapped))


def replace(owner: Any, name: str, value: Any) -> None:
    """Set owner.name until :func:`unwrap_all`."""
    WRAPPED.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, value)


LIBRARIES = ("peft_nvfp4", "peft", "transformers", "torch", "accelerate", "trl", "contextlib")


def warn_caller(message: str) -> None:
    """Warn at the line of the user's code that led here, however many frames of :data:`LIBRARIES` lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def unwrap_all() -> None:
    """Put everything back."""
    while WRAPPED:
        owner, name, before = WRAPPED.pop()
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
