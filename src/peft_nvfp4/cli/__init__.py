"""The command line: ``peft-nvfp4 doctor``, ``peft-nvfp4 tune``. One file per command.

It needs ``pip install 'peft_nvfp4[cli]'`` (typer). The functions behind the commands do not: :func:`peft_nvfp4.tools.doctor.run`.
"""

from __future__ import annotations

import sys


def application():
    """The typer application."""
    import typer

    from . import doctor, tune

    app = typer.Typer(
        name="peft-nvfp4",
        help="LoRA fine-tuning on a frozen NVFP4, NF4 or BF16 base.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command("doctor")(doctor.doctor)
    app.command("tune")(tune.tune)
    return app


def main() -> None:
    """The entry point."""
    try:
        app = application()
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("peft-nvfp4 needs typer: pip install 'peft_nvfp4[cli]'")
    app()
