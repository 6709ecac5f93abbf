"""The seven-task section of the report: tests against what is known of small cases, and verdicts of made-up runs."""

import itertools
import statistics

import pytest
from reproduce import verdict
from reproduce.methods import METHODS
from reproduce.seven_tasks import PLANS
from reproduce.tables import Scores


def runs(offsets: dict[str, float], noise: float = 0.001, weights: str = "shipped", seeds: int = 6, **more) -> list[dict]:
    """Of every method on every task: 0.5 and its offset, and noise that differs between methods but for its mean."""
    found = []
    for method, offset in offsets.items():
        signs = [1, -1] if method == "bf16" else [-1, 1]
        for task, seed in itertools.product(PLANS, range(seeds)):
            row = {"task": task, "weights": weights, "method": method, "kind": "final", "lr": 5e-4, "seed": seed, "steps": 200}
            row |= {"label": METHODS[method].label, "nll": 1 - offset, "weight_bytes": 2**20, "prepared_s": 1.0, "train_s": 2.0}
            found.append(row | {"accuracy": 0.5 + offset + noise * signs[seed % 2]} | more)
    return found


def page(*parts: list[dict]) -> str:
    return verdict.page({"runs": sum(parts, [])})


def test_sign_flips_are_exact():
    differences = [1.0, 2.0, 3.0, -0.5]
    means = [statistics.fmean(s * d for s, d in zip(signs, differences)) for signs in itertools.product((1, -1), repeat=4)]
    at_least = sum(abs(mean) >= abs(statistics.fmean(differences)) for mean in means)
    assert verdict.sign_flips(differences) == at_least / 16
    assert verdict.sign_flips([1.0] * 12) == 2 / 2**12 and verdict.sign_flips([0.0, 0.0]) == 1


def test_holm():
    assert verdict.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert verdict.holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}


def test_without_runs_the_page_says_so():
    assert page() == "Here: not run."


def test_what_was_asked_for_is_met_or_missed():
    met = page(runs({"bf16": 0.02, "nf4": 0.01, "high": 0.018}))
    assert "`high` minus BF16 LoRA: −0.20 ± 0.03 points. average of at least −0.5 points: met; error of at most 0.35: met." in met
    assert "`high` minus NF4 QLoRA: +0.80 ± 0.00 points. average of at least +0.0 points: met; no more nats: met;" in met
    missed = page(runs({"bf16": 0.02, "nf4": 0.018, "high": 0.01}, seeds=12))
    assert "−1.00 ± 0.02 points. average of at least −0.5 points: **missed**" in missed
    assert f"on no task below it: **missed**; error of at most 0.35: met ({', '.join(PLANS)})." in missed
    noisy = page(runs({"bf16": 0.02, "nf4": 0.01, "high": 0.02}, noise=0.05))
    assert "error of at most 0.35: **missed**" in noisy


def test_a_task_that_is_not_worse_by_more_than_chance_is_not_named():
    few = page(runs({"bf16": 0.02, "nf4": 0.018, "high": 0.01}, seeds=6))  # 2 / 2**6, seven times
    assert "on no task below it: met" in few and "| 0.031 | 0.219 | 6 |" in few


def test_missing_runs_are_no_verdict():
    found = [run for run in runs({"bf16": 0.02, "nf4": 0.01, "high": 0.02}) if (run["task"], run["method"]) != ("wic", "nf4")]
    assert "- `high` and NF4 QLoRA: no verdict yet, runs are missing (wic)." in page(found)
    assert "`high` minus BF16 LoRA" in page(found) and "| – |" in page(found)


def test_levers_are_compared_with_the_default_and_rates_at_an_end_are_marked():
    lever = runs({"high_gptq": 0.03}, weight_bytes=3 * 2**20, prepared_s=6.0, lr=2e-2)
    text = page(runs({"bf16": 0.02, "nf4": 0.01, "high": 0.02}), lever)
    assert f"| {METHODS['high_gptq'].label} | +1.00 ± 0.00 | −0.010 ± 0.000 | +2.0 | +5.0 | +0.0 | 7 |" in text
    assert "| **0.02** |" in text and "| 0.0005 |" in text


def test_pairs_are_of_seeds_that_both_have_and_that_have_a_score():
    found = runs({"bf16": 0.02, "high": 0.02}, seeds=4)
    found = [run for run in found if (run["method"], run["seed"]) != ("bf16", 1)]
    found[-1].pop("accuracy")  # a run that diverged
    pairs = verdict.paired(Scores({"runs": found}), list(PLANS)[-1], "high", "bf16")
    assert sorted(pairs) == [0, 2]
