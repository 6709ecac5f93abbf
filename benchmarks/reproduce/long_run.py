"""A long fine-tune, in which a bias of rounding would add up: 3,000 steps on instructions mixed with other tasks' rows.

    python benchmarks/reproduce/long_run.py --out OUT
    python benchmarks/reproduce/long_run.py --small

BF16 and NF4 bases, and NVFP4 with gradients rounded to nearest, stochastically and not at all, all at one learning rate and one
order of rows, eight a step. Loss and gradient norm of every step, held-out loss every 250 steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from reproduce.methods import METHODS
from reproduce.runner import Group, text_command

TABLE, TASK = "long_run", "instructions"
LR = 5e-4
_PAPER = METHODS["paper"]
METHODS_OF_TABLE = (
    METHODS["bf16"],
    _PAPER,
    _PAPER.changed("sr", "NVFP4, gradients rounded stochastically", gradients="nvfp4_sr"),
    _PAPER.changed("bf16_gradients", "NVFP4, gradients not rounded", gradients="bf16"),
    METHODS["nf4"],
    METHODS["balanced"],
)


def groups(args=None) -> list[Group]:
    shared = dict(lrs=(LR,), seeds=(0,), steps=3000, batch=8, curve=250)
    return [Group(TABLE, TASK, "shipped", method, **shared) for method in METHODS_OF_TABLE]


def main(argv: Sequence[str] | None = None) -> None:
    text_command(__doc__, groups, argv)


if __name__ == "__main__":
    main()
