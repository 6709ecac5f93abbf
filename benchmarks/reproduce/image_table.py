"""Table 4 for the report: the paper's rows, and beside them what ``image_text.json`` holds. Data in, Markdown out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import paper
from .costs import markdown
from .image_tasks import TASKS
from .image_text import METHODS
from .summaries import Run, _difference, _number, by_method, finals, paired, spread
from .tasks import SOURCE_HUB

PAPER_ROWS = {  # method -> row of the paper's table
    "bf16": "BF16 LoRA",
    "paper_gptq_text": "PACT, text calibration",
    "paper_gptq_image": "PACT, image-prompt calibration",
}
NOT_RUN, MODEL = "not run", "Qwen/Qwen2.5-VL-3B-Instruct"
TEXT = (
    "Questions about pictures, options shown, letters scored: accuracy in %, and nats (negative log-likelihood of the right "
    "letter among all tokens). *Paper*: Qwen2.5-VL-3B on ScienceQA. After: median over seeds (mean ± standard deviation, number "
    "of seeds); difference: of paired seeds, ± standard error. Vision tower and connector stay dense in BF16 without adapters; "
    "what the paper does with them is not at hand."
)
HEAD = ("before", "after", "nats before", "nats after", "nats after − BF16 LoRA's", "learning rate")


def section(data: Mapping[str, Any] | None) -> list[str]:
    """What is measured how; a table for each model and task that was run, or one that says that none was."""
    runs = data["runs"] if data else []
    parts = [TEXT]
    for weights, task in dict.fromkeys((r["weights"], r["task"]) for r in runs):
        note = "" if TASKS[task].source == SOURCE_HUB else f", which stands in for {TASKS[task].stands_for}"
        own = [r for r in runs if (r["weights"], r["task"]) == (weights, task)]
        parts += [f"{weights} on `{task}`{note}:", table(own)]
    return parts if runs else [TEXT, f"Here: {NOT_RUN}.", table([])]


def table(runs: list[Run]) -> str:
    """Methods: the paper's accuracy before and after, and here. After: median (mean ± standard deviation, number of seeds);
    difference of the held-out loss: mean over paired seeds ± standard error."""
    after = next(iter(by_method(finals(runs)).values()), {})
    before = {r["method"]: r for r in runs if r["kind"] == "zero_shot"}
    rows = [
        [m.label, *_papers(name), *_here(before.get(name), after.get(name), after.get("bf16"))] for name, m in METHODS.items()
    ]
    return markdown(["", "paper: before", "paper: after", *HEAD], rows)


def _papers(method: str) -> list[str]:
    figures = paper.SCIENCE_QA.get(PAPER_ROWS.get(method, ""))
    return [f"{100 * value:.1f}" for value in figures] if figures else ["–", "–"]


def _here(before: Run | None, after: Mapping[int, Run] | None, reference: Mapping[int, Run] | None) -> list[str]:
    first = [f"{100 * before['accuracy']:.1f}", f"{before['nll']:.3f}"] if before else [NOT_RUN] * 2
    if not after:
        return [first[0], NOT_RUN, first[1], *[NOT_RUN] * 3]
    scores, nlls = (spread([scale * r[key] for r in after.values()]) for key, scale in (("accuracy", 100), ("nll", 1)))
    score = f"{scores['median']:.1f} ({scores['mean']:.1f} ± {_number(scores['sd'], 1)}, {scores['n']})"
    nll = f"{nlls['mean']:.3f} ± {_number(nlls['sd'], 3)}"
    difference = "–" if after is reference else _difference(paired(after, reference or {}, lambda r: r["nll"]), 1, 3)
    return [first[0], score, first[1], nll, difference, ", ".join(f"{lr:g}" for lr in sorted({r["lr"] for r in after.values()}))]
