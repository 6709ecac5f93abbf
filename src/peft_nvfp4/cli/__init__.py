"""The command line, ``peft-nvfp4``. One file per command; what it does is in :mod:`peft_nvfp4.cli._run`, which needs no typer.

It needs ``pip install 'peft_nvfp4[cli]'`` (typer, rich, matplotlib, PyYAML, trl, datasets, torchmetrics).
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = (
    ("doctor", "doctor", "doctor"),
    ("tune", "tune", "tune"),
    ("estimate", "estimate", "estimate_command"),
    ("train", "train", "train"),
    ("eval", "evaluate", "evaluate"),
    ("chat", "chat", "chat"),
    ("quantize", "conversion", "quantize"),
    ("calibrate", "conversion", "calibrate"),
    ("merge", "conversion", "merge"),
    ("export", "conversion", "export"),
    ("inspect", "conversion", "inspect"),
    ("profile", "profile", "profile"),
    ("statistics", "statistics", "statistics"),
)
"""(what is typed, module, function in it)."""


def application():
    """The typer application."""
    import typer

    app = typer.Typer(
        name="peft-nvfp4",
        help="LoRA fine-tuning on a frozen NVFP4, NF4 or BF16 base.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(debug: bool = typer.Option(False, "--debug", help="Show tracebacks of errors.")) -> None:
        from . import common

        common.DEBUG["on"] = common.DEBUG["on"] or debug

    for name, module, function in COMMANDS:
        app.command(name)(getattr(importlib.import_module(f".{module}", __name__), function))
    return app


def main() -> None:
    """The entry point."""
    try:
        app = application()
    except ImportError as error:
        if error.name not in ("typer", "rich", "yaml"):
            raise
        sys.exit(f"peft-nvfp4 needs {error.name}: pip install 'peft_nvfp4[cli]'")
    app()
