"""Whether the package's hooks are installed in PEFT: what the config asks and the hooks answer."""

from __future__ import annotations

from typing import Any

ORIGINALS: list[tuple[type, str, Any]] = []
"""(owner, name, what the owner itself defined there or None) of every wrapped method, in the order of wrapping."""


def registered() -> bool:
    """Whether the hooks are installed."""
    return bool(ORIGINALS)
