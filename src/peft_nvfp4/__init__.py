"""peft_nvfp4: LoRA fine-tuning on a frozen NVFP4, NF4 or BF16 base, as a PEFT plugin.

>>> model = get_peft_model(model, NVFP4LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", backend="nvfp4"))

Importing the package installs its hooks into PEFT (:func:`register`); :func:`unregister` removes them. Its names are those of
:mod:`peft_nvfp4.api`.

The command ``peft-nvfp4`` is the exception. PyTorch, transformers and PEFT take seconds to import, and neither ``--help`` nor
``estimate`` needs them. So in a process that :mod:`peft_nvfp4_cli` has started, names and hooks come when a command asks for
them.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING or "peft_nvfp4_cli" not in sys.modules:
    from .api import *  # noqa: F403
    from .api import __all__ as _names

    __all__ = ["__version__", *_names]


def __getattr__(name: str) -> Any:
    """A public name in the process of the command, where :mod:`peft_nvfp4.api` is not imported yet."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".api", __name__), name)
