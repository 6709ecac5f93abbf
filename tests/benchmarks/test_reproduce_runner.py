"""The runner of ``benchmarks/reproduce`` on a tiny random model and made-up rows: what is run, what is skipped, and the files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from _reproduce import data
from _tiny_models import save_tiny
from reproduce import ablations, accuracy, long_run, methods, run_log, runner

__all__ = ["data"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")


@pytest.fixture
def small(data, tmp_path) -> list[str]:
    """Arguments of a command."""
    model = save_tiny(tmp_path / "model")
    return ["--small", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--model", str(model)]


def group(**k) -> runner.Group:
    return runner.Group(**{**dict(table="accuracy", task="sentiment", weights="shipped", method=methods.METHODS["bf16"]), **k})


def row(g: runner.Group, kind: str, lr=None, seed=None, **found) -> dict:
    return g.key(kind, lr, seed) | {"label": g.method.label, "finite": True} | found


def runs(path: Path, name: str) -> list[dict]:
    return run_log.read(path, name)["runs"]


def test_the_learning_rate_is_that_of_the_least_validation_loss(tmp_path):
    g, log = group(zero_shot=True), run_log.RunLog(tmp_path, "accuracy", {})
    assert runner.missing(g, log) == [("zero_shot", None, None), *(("sweep", lr, 100) for lr in runner.GRID)]
    log.add(row(g, "zero_shot"))
    for lr, nll in zip(runner.GRID, (0.5, 0.3, 0.4)):
        assert runner.chosen_lr(g, log) is None
        log.add(row(g, "sweep", lr, 100, validation_nll=nll))
    assert runner.chosen_lr(g, log) == 7e-4
    assert runner.missing(g, log) == [("final", 7e-4, seed) for seed in range(5)]
    log.add(row(g, "sweep", 7e-4, 100, validation_nll=0.3, finite=False))
    assert runner.chosen_lr(g, log) is None  # the largest is best now: one more is tried
    assert runner.missing(g, log) == [("sweep", runner.BEYOND, 100)]
    log.add(row(g, "sweep", runner.BEYOND, 100, validation_nll=0.6))
    assert runner.chosen_lr(g, log) == 1.5e-3
    assert runner.chosen_lr(group(lrs=(1e-4,)), log) == 1e-4
    assert runner.chosen_lr(group(steps=100), log) is None  # other steps: other runs


def test_ablations_take_the_accuracy_tables_learning_rates(tmp_path):
    args = type("Args", (), {"out": tmp_path})
    assert {g.lrs for g in ablations.groups(args) if g.task == "sentiment"} == {(7e-4,)}
    log = run_log.RunLog(tmp_path, "accuracy", {})
    log.add(row(group(method=methods.METHODS["balanced"]), "final", 3e-4, 0))
    rates = {g.method.name: g.lrs for g in ablations.groups(args) if g.task == "sentiment"}
    assert rates["balanced"] == rates["balanced:sr"] == (3e-4,) and rates["paper_gptq:sr"] == (7e-4,)


def test_a_log_keeps_what_is_there_and_drops_half_a_line(tmp_path):
    g = group()
    log = run_log.RunLog(tmp_path, "accuracy", {"note": 1})
    log.add(row(g, "final", 1e-3, 0, nll=1.0))
    log.add(row(g, "final", 1e-3, 1, error="ValueError: no such thing"))
    with open(log.path, "a") as file:
        file.write('{"table": "accuracy", "subsets": {"a": 1}')  # killed while writing
    again = run_log.RunLog(tmp_path, "accuracy", {"note": 2})
    assert again.find(g.key("final", 1e-3, 0))["nll"] == 1.0
    assert again.find(g.key("final", 1e-3, 1)) is None  # it failed: tried again
    again.add(row(g, "final", 1e-3, 1, nll=2.0))
    content = run_log.read(tmp_path, "accuracy")
    assert content["settings"] == {"note": 2} and [r["nll"] for r in content["runs"]] == [1.0, 2.0]
    assert all(r["commit"] for r in content["runs"]) and content["environment"]["torch"]


def test_lines_are_read_beside_the_published_file(tmp_path):
    old = [{"case": "bf16", "batch": 1, "seq": 8, "weights": 5}, {"case": "bf16", "batch": 2, "seq": 8, "weights": 5}]
    published = {"environment": {"commit": "abc"}, "peaks": old, "largest": []}
    (tmp_path / "memory.json").write_text(json.dumps(published))
    log = run_log.RunLog(tmp_path, "memory", {})
    key = {"table": "peaks", "case": "bf16", "batch": 2, "seq": 8}
    assert log.find(key)["weights"] == 5 and log.find({**key, "batch": 3}) is None
    log.add(key | {"weights": 7})
    log.add({"table": "largest", "case": "bf16", "cap_gib": 16.0, "largest_batch": 3})
    content = run_log.read(tmp_path, "memory")
    assert [r["weights"] for r in content["peaks"]] == [5, 7] and content["largest"][0]["largest_batch"] == 3
    assert content["environment"]["commit"] != "abc"  # of the last session
    assert run_log.read(tmp_path, "step_time") is None


def test_a_plan_runs_to_the_end_and_not_twice(small, tmp_path, monkeypatch):
    command = [*small, "--tasks", "commonsense", "asdiv", "--methods", "bf16", "paper_gptq"]
    accuracy.main(command)
    found = runs(tmp_path / "out", "accuracy")
    kinds = [(r["weights"], r["task"], r["method"], r["kind"]) for r in found]
    assert len(kinds) == len(set(kinds)) == 16
    assert all("exact_match" in r for r in found if r["task"] == "asdiv")
    assert all(0 <= r["accuracy"] <= 1 and len(r["subsets"]) > 1 for r in found if r["task"] == "commonsense")
    monkeypatch.setattr(runner.TextLab, "adapted", None)  # nothing is made again
    accuracy.main(command)
    assert runs(tmp_path / "out", "accuracy") == found
    (tmp_path / "out" / "accuracy.jsonl").write_text("")
    with pytest.raises(SystemExit, match="commonsense, shipped, bf16: TypeError"):
        accuracy.main(command)


def test_a_session_that_was_stopped_goes_on_and_a_failure_costs_the_others_nothing(small, tmp_path, monkeypatch):
    command = [*small, "--tasks", "sentiment", "--methods", "bf16", "paper", "--weights", "shipped"]
    original = run_log.RunLog.add

    def stops(self, found):
        original(self, found)
        if found["kind"] == "zero_shot":
            raise KeyboardInterrupt

    monkeypatch.setattr(run_log.RunLog, "add", stops)
    with pytest.raises(KeyboardInterrupt):
        accuracy.main(command)
    monkeypatch.setattr(run_log.RunLog, "add", original)
    assert [(r["method"], r["kind"]) for r in runs(tmp_path / "out", "accuracy")] == [("bf16", "zero_shot")]
    adapted = runner.TextLab.adapted

    def fails(self, g):
        if g.method.name == "bf16":
            raise ValueError("no such rows")
        return adapted(self, g)

    monkeypatch.setattr(runner.TextLab, "adapted", fails)
    with pytest.raises(SystemExit, match="sentiment, shipped, bf16: ValueError: no such rows"):
        accuracy.main(command)
    monkeypatch.setattr(runner.TextLab, "adapted", adapted)
    accuracy.main(command)
    found = [(r["method"], r["kind"], r["seed"]) for r in runs(tmp_path / "out", "accuracy")]
    assert [m for m, *_ in found] == ["bf16", "paper", "paper", "bf16"] and len(set(found)) == 4


def test_long_runs_keep_a_curve(small, tmp_path, monkeypatch):
    monkeypatch.setattr(long_run, "METHODS_OF_TABLE", long_run.METHODS_OF_TABLE[:2])
    long_run.main(small)
    found = runs(tmp_path / "out", "long_run")
    assert [len(r["curve"]["loss"]) for r in found] == [2, 2]
    assert [p["step"] for p in found[0]["curve"]["held_out"]] == [0, 2] and found[0]["curve"]["held_out"][0]["subsets"]


def test_ablations_run(small, tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, "TASKS", ("sentiment",))
    monkeypatch.setattr(ablations, "VARIANTS", {"balanced": ablations.VARIANTS["balanced"][:1]})
    ablations.main(small)
    assert [r["method"] for r in runs(tmp_path / "out", "ablations")] == ["balanced", "balanced:paper"]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["accuracy", "memory"])
def test_scripts_start_from_any_folder(tmp_path, script):
    command = [sys.executable, str(Path(runner.__file__).with_name(f"{script}.py")), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and f"reproduce/{script}.py" in done.stdout, done.stderr
