"""Entry point of the command ``peft-nvfp4``; :mod:`peft_nvfp4` sees by this module that no model is asked for yet."""

from peft_nvfp4.cli import main

__all__ = ["main"]
