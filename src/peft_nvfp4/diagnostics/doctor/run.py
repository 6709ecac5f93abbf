"""``peft-nvfp4 doctor``: what this machine has, what is wrong with it, and whether it computes what it should.

On a GPU with FP4 tensor cores this is the acceptance test: nothing about such a GPU is taken for granted, and every mistake that
was thought of has a name (:mod:`~peft_nvfp4.kernels.fp4.check`). The report is made to be pasted into an issue.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

import torch

from ... import kernels
from ...kernels import dispatch, implementations
from ...kernels.dispatch import Status
from . import conformance, environment
from .results import FAILED, NOT_RUN, PASSED, WARNING, Result

ORDER = (PASSED, WARNING, FAILED.lower(), NOT_RUN)


@dataclass
class Report:
    """Of :func:`run`. Prints as text."""

    machine: dict[str, str]  # versions, GPUs, settings
    kernels: Status
    checks: list[Result]  # what is wrong or could be better about the set-up, and what was computed and compared

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not any(check.outcome == FAILED for check in self.checks)

    @property
    def verdict(self) -> str:
        """One line."""
        counts = Counter(check.outcome.lower() for check in self.checks)
        words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ORDER if counts[outcome])
        return f"{'Nothing is wrong' if self.ok else 'SOMETHING IS WRONG'}: {words}"

    def as_dict(self) -> dict:
        """For JSON."""
        return {"ok": self.ok, "verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        width = max(map(len, self.machine))
        lines = ["peft_nvfp4 doctor", "", *(f"{name.ljust(width)}  {value}" for name, value in self.machine.items())]
        lines += ["", str(self.kernels), "", "checks"]
        lines += [f"  {c.outcome:8}{c.group}: {c.name}{c.detail and f' ({c.detail})'}" for c in self.checks]
        return "\n".join([*lines, "", self.verdict])


def _fp4_advice(status: Status) -> list[Result]:
    """A GPU that has FP4 tensor cores, and nothing that uses them."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < environment.FP4_CAPABILITY:
        return []
    used = next(o.implementation for o in status.operators if o.operator == "fprop")
    if used in implementations.NATIVE or dispatch._forced in ("bf16", "emulated", "reference"):
        return []
    why = "; ".join(f"{name}: {reason}" for name, reason in status.skipped.items()) or "see the kernels below"
    return [environment.wrong(f"this GPU has FP4 tensor cores, but products are computed by '{used}': {why}")]


def run() -> Report:
    """Looks at everything. Changes nothing; takes seconds, about a minute where the extension is there."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    status = kernels.status()
    checks = [*environment.advice(), *_fp4_advice(status), *conformance.all_checks(device)]
    return Report(environment.describe(), status, checks)
