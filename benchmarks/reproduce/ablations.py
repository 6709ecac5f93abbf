"""What single choices are worth: one thing changed, everything else as in a base, paired by seed.

    python benchmarks/reproduce/ablations.py --out OUT
    python benchmarks/reproduce/ablations.py --small

Bases: the paper's recipe with GPTQ weights, and ``balanced``, to nearest (the default when they were measured). Each variant runs
with the seeds and the learning rate of its base (that of the accuracy table where there is one), so that seeds and rows cancel in
the difference.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from reproduce.methods import LAST, METHODS, Method
from reproduce.run_log import read
from reproduce.runner import Group, text_command

TABLE = "ablations"
TASKS = ("sentiment", "commonsense")
LRS = {"sentiment": 7e-4, "commonsense": 1.5e-3}
"""Where the accuracy table has not been made: what an earlier simulation found."""

_PAPER, _BALANCED, _NF4, _BF16 = (METHODS[name] for name in ("paper_gptq", "balanced", "nf4", "bf16"))


def _of(base: Method) -> list[Method]:
    """Variants that both bases have."""
    return [
        base.changed("bf16_gradients", "gradients not rounded", gradients="bf16"),
        base.changed("sr", "gradients rounded stochastically", gradients="nvfp4_sr"),
        base.changed("recompute", "inner MLP activation made anew", recompute_mlp=True),
        base.changed("unfused", "norms and MLPs not fused", fused=False),
        base.changed("rank8", "rank 8", rank=8),
        base.changed("rank32", "rank 32", rank=32),
    ]


VARIANTS: dict[str, list[Method]] = {
    _PAPER.name: [
        _PAPER.changed("nearest", "weights to nearest, scales searched", calibration=None),
        _PAPER.changed("balanced", "two terms at norm outputs", calibration="balanced", accuracy="balanced"),
        _PAPER.changed("high", "two terms everywhere", calibration="high", accuracy="high"),
        _PAPER.changed("centred", "inputs centred", calibration="paper_centred"),
        *_of(_PAPER),
        _PAPER.changed("asymmetric", "GPTQ with the asymmetric target", calibration="paper_asymmetric"),
        _PAPER.changed("plain", "GPTQ from left to right, largest value to 6", calibration="paper_plain"),
        _PAPER.changed("backward", "backward layout by GPTQ on gradients", calibration="paper_backward"),
        _PAPER.changed("budget", "two terms where errors say so, a third more work", calibration="budget_third"),
        _PAPER.changed("four_over_six", "GPTQ with four-over-six scales", calibration="paper_four_over_six"),
        replace(METHODS["w4a16_gptq"], name="paper_gptq:weights_only", label="weights only, activations and gradients exact"),
    ],
    _BALANCED.name: [
        _BALANCED.changed("paper", "one term everywhere", accuracy="paper"),
        _BALANCED.changed("high", "two terms everywhere", accuracy="high"),
        _BALANCED.changed("gptq", "GPTQ weights", calibration="balanced"),
        _BALANCED.changed("last", "last layer in BF16", skip_modules=(LAST,)),
        _BALANCED.changed("first_last", "first and last layer in BF16", skip_modules=("layers.0", LAST)),
        _BALANCED.changed("o_down", "o and down in BF16", skip_modules=("o_proj", "down_proj")),
        *_of(_BALANCED),
        _BALANCED.changed("merge_aware", "trained for a merge into NVFP4", merge_aware=True),
    ],
    _NF4.name: [_NF4.changed("kept_nvfp4", "activations kept in NVFP4", activations="nvfp4")],
    _BF16.name: [_BF16.changed("kept_nvfp4", "activations kept in NVFP4", activations="nvfp4")],
}


def groups(args) -> list[Group]:
    """Task by task: the bases, then their variants, at the learning rate that the accuracy table has for the base."""
    accuracy = read(args.out, "accuracy") or {"runs": []}
    finals = [run for run in accuracy["runs"] if (run["kind"], run["weights"]) == ("final", "shipped")]
    rates = {(run["task"], run["method"]): run["lr"] for run in finals}
    return [
        Group(TABLE, task, "shipped", method, lrs=(rates.get((task, base), LRS[task]),))
        for task in TASKS
        for base, variants in VARIANTS.items()
        for method in (METHODS[base], *variants)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    text_command(__doc__, groups, argv)


if __name__ == "__main__":
    main()
