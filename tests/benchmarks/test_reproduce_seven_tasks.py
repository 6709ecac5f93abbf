"""The rule of ``benchmarks/reproduce/seven_tasks.py``, and its jobs on a tiny random model."""

import time

import pytest
import torch
from _reproduce import data
from _tiny_models import save_tiny
from reproduce import jobs, run_log, seven_tasks
from reproduce.methods import METHODS, Models
from reproduce.seven_tasks import RATES, SWEEP_SEEDS, Group, Queue, chosen_rate, missing, rates_to_try

__all__ = ["data"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")
GROUP = Group("wic", "shipped", METHODS["high"], tuple(range(12)))


@pytest.fixture
def log(tmp_path):
    return run_log.RunLog(tmp_path, seven_tasks.TABLE, {})


def sweep(log, lr, *scores, nll=1.0, finite=True, group=GROUP):
    for seed, score in zip(SWEEP_SEEDS, scores):
        log.add(group.key("sweep", lr, seed) | {"validation_score": score, "validation_nll": nll, "finite": finite})


def test_the_rate_is_that_of_the_best_mean_score(log):
    assert rates_to_try(GROUP, log) == list(RATES[2:6]) and chosen_rate(GROUP, log) is None
    assert missing(GROUP, log) == [("sweep", lr, seed) for lr in RATES[2:6] for seed in SWEEP_SEEDS]
    for lr, scores in zip(RATES[2:6], ((0.5, 0.9), (0.8, 0.8), (0.6, 0.6), (0.95, 0.2))):
        sweep(log, lr, *scores)
    assert chosen_rate(GROUP, log) == RATES[3]
    assert missing(GROUP, log) == [("final", RATES[3], seed) for seed in range(12)]


def test_equal_scores_are_decided_by_the_loss_and_a_run_that_diverged_is_worst(log):
    for lr, nll in zip(RATES[2:6], (0.4, 0.6, 0.5, 0.1)):
        sweep(log, lr, 0.7, 0.7, nll=nll, finite=lr != RATES[5])
    assert rates_to_try(GROUP, log) == [RATES[1]]  # the first one is best
    sweep(log, RATES[1], 0.7, 0.7, nll=0.45)
    assert chosen_rate(GROUP, log) == RATES[2]


@pytest.mark.parametrize("direction, last", [(1, RATES[-1]), (-1, RATES[0])])
def test_no_choice_is_at_the_edge_unless_there_is_nothing_beyond(log, direction, last):
    score = lambda lr: 0.5 + direction * RATES.index(lr) / 100
    tried = []
    while rates := rates_to_try(GROUP, log):
        for lr in rates:
            sweep(log, lr, score(lr), score(lr))
        tried.append(rates)
    assert [len(rates) for rates in tried] == [4, 1, 1] and chosen_rate(GROUP, log) == last


def test_jobs_are_in_order_share_the_device_and_end_in_time(log):
    plan = [Group(task, "shipped", METHODS["bf16"], tuple(range(6))) for task in ("xsum", "wic")]
    queue = Queue(plan, log, seconds=100)
    first = queue.next_job(())
    assert (first.task, first.split, len(first.runs)) == ("xsum", "validation", 4)  # tokens of a step: two jobs
    second = queue.next_job((first,))
    assert second.task == "xsum" and not set(first.runs) & set(second.runs)
    third = queue.next_job((first, second))
    assert third.task == "wic" and len(third.runs) == 8 and queue.next_job((first, second, third)) is None
    seen = {"finite": True, "nll": 1.0, "train_s": 30.0, "score_s": 10.0}
    rows = [seen | {"rouge_l": 0.1 + 0.01 * (lr == RATES[3])} for lr, _ in first.runs]
    queue.take(jobs.Outcome(first, rows, 70.0))
    assert queue.estimate(second) == pytest.approx(40) and 5 < queue.estimate(third) < 40
    queue.end = time.monotonic() + 20
    assert queue.next_job(()).task == "wic"  # the other piece of the first sweep would be too late
    queue.take(jobs.Outcome(second, [], 1.0, "ValueError: no"))
    assert "xsum, shipped, bf16, sweep of 4: ValueError: no" in queue.failed.values()
    assert all(job.task == "wic" for job in queue.jobs(()))


def test_a_job_too_many_takes_no_more_than_the_device_has(log, monkeypatch):
    monkeypatch.setattr(seven_tasks, "TOKENS_AT_ONCE", 20_000)
    plan = [Group(task, "shipped", METHODS["bf16"], (0,)) for task in ("xsum", "disfl_qa", "commonsense")]
    queue = Queue(plan, log, seconds=100)
    first = queue.next_job(())
    assert first.task == "xsum" and queue.next_job((first,)).task == "commonsense"


def test_hits_are_bits():
    assert jobs.packed([True, False, True]) == f"{0b1101:x}" and jobs.packed([0.5, 1 / 3]) == [500, 333]


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_command_runs_to_the_end_and_not_twice(data, tmp_path, monkeypatch, processes):
    model = save_tiny(tmp_path / "model")
    command = ["--small", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--model", str(model)]
    command += ["--tasks", "wic", "--methods", "bf16", "--weights", "shipped", "--processes", str(processes)]
    seven_tasks.main(command)
    found = run_log.read(tmp_path / "out", "seven_tasks")["runs"]
    finals = [row for row in found if row["kind"] == "final"]
    assert len(finals) == 1 and len(finals[0]["by_row"]) == 3 and 0 <= finals[0]["accuracy"] <= 1  # 8 rows and the leading 1
    assert all("validation_score" in row for row in found if row["kind"] == "sweep")
    monkeypatch.setattr(jobs.Lab, "run", None)  # nothing is run again
    seven_tasks.main([*command[:-1], "0"])
    assert run_log.read(tmp_path / "out", "seven_tasks")["runs"] == found


def test_runs_that_do_not_fit_or_diverge_are_split(tmp_path):
    lab = jobs.Lab(Models(tmp_path, torch.device("cpu")), tmp_path)

    def fails(job):
        if len(job.runs) > 2:
            raise torch.OutOfMemoryError("no room")
        if any(lr > 1 for lr, _ in job.runs):
            raise jobs.Diverged("nan")
        return [{"lr": lr, "finite": True} for lr, _ in job.runs]

    lab._trained_and_scored = fails
    job = jobs.Job("wic", (1, 1), "shipped", METHODS["bf16"], "test", ((0.1, 0), (0.2, 0), (9.0, 0), (0.3, 0)))
    outcome = lab.run(job)
    assert not outcome.error and [row["finite"] for row in outcome.rows] == [True, True, False, True]
    lab._trained_and_scored = lambda job: 1 / 0
    assert lab.run(job).error == "ZeroDivisionError: division by zero"


def test_a_calibration_may_read_the_tasks_own_rows(data, tmp_path):
    models = Models(tmp_path / "work", torch.device("cpu"), samples=4, length=16, shipped=save_tiny(tmp_path / "model"))
    lab = jobs.Lab(models, tmp_path / "work")
    for task, name in (("wic", "high_gptq_own"), ("sentiment", "high_gptq_own"), ("sentiment", "high_eora_own")):
        job = jobs.Job(task, (5, 5), "shipped", METHODS[name], "validation", ((1e-3, 0),), 1, 2, 2)  # two rows: few tokens
        (row,) = lab.run(job).rows
        assert row["weight_bytes"] > 0 and row["prepared_s"] > 0
    made = sorted(path.name for path in (tmp_path / "work" / "calibrations").iterdir())
    assert made == ["shipped_high_sentiment", "shipped_high_wic"] and len(lab.adapters) == 3


def test_a_process_keeps_few_models(monkeypatch, tmp_path):
    lab = jobs.Lab(Models(tmp_path, torch.device("cpu"), shipped=tmp_path), tmp_path)
    monkeypatch.setattr(Models, "adapted", lambda *args: (None, None))
    monkeypatch.setattr(jobs, "WideAdapters", lambda model, drawn: drawn)
    for name in ("bf16", "nf4", "high", "paper", "balanced"):
        lab._adapters(jobs.Job("wic", (1, 1), "shipped", METHODS[name], "test", ()))
    assert [name for _, name in lab.adapters] == ["nf4", "high", "paper", "balanced"]
