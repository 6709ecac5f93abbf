"""``python -m peft_nvfp4.cli``, the same as ``peft-nvfp4``."""

from . import main

main()
