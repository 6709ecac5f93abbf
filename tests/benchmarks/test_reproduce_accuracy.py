"""The accuracy tables of ``benchmarks/reproduce`` on a tiny random model and made-up rows: the board that hands out groups
of runs, sessions that are stopped and go on, and the tables made of their results."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from _reproduce import write_rows
from _tiny_models import save_tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from reproduce import ablations, accuracy, jobs, long_run, methods, runner, summaries, training, worker

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(tmp_path))
    write_rows(tmp_path / "reproduce")
    return tmp_path


@pytest.fixture
def model(tmp_path):
    return save_tiny(tmp_path / "model")


# ---------------------------------------------------------------------------------------------- the board


def group(**k) -> jobs.Group:
    return jobs.Group(**{**dict(table="accuracy", task="sentiment", weights="shipped", method=methods.METHODS["bf16"]), **k})


def run_of(g: jobs.Group, kind: str, lr, seed, **found) -> dict:
    return dict(zip(jobs.KEY, g.key(kind, lr, seed))) | {"label": g.method.label, "finite": True} | found


def test_the_learning_rate_is_that_of_the_least_validation_loss():
    g, runs = group(), jobs.Runs()
    assert jobs.chosen_lr(g, runs) is None
    for lr, nll in zip(jobs.GRID, (0.5, 0.3, 0.4)):
        runs.add(run_of(g, "sweep", lr, 100, validation_nll=nll))
    assert jobs.chosen_lr(g, runs) == 7e-4
    runs.add(run_of(g, "sweep", 7e-4, 100, validation_nll=0.3, finite=False))
    assert jobs.chosen_lr(g, runs) is None  # the largest is best now: one more is tried
    runs.add(run_of(g, "sweep", jobs.BEYOND, 100, validation_nll=0.6))
    assert jobs.chosen_lr(g, runs) == 1.5e-3
    assert jobs.chosen_lr(group(lrs=(1e-4,)), runs) == 1e-4
    assert jobs.chosen_lr(group(steps=100), runs) is None  # other steps: other runs


def test_claims_are_exclusive_and_come_back_once(tmp_path):
    board, g = jobs.Board(tmp_path), group()
    board.publish([g], [])
    assert board.claim(g, "w0/0") and not board.claim(g, "w1/0")
    assert board.give_back("w1") == 0 and board.give_back("w0") == 1
    assert board.claim(g, "w1/0") and board.give_back("w1") == 1
    assert not board.claim(g, "w2/0") and len(board.failures()) == 2  # it has failed twice
    board.publish([g], [])
    assert board.claim(g, "w2/0") and not board.failures()
    board.record("w2", run_of(g, "final", 1e-3, 0))
    with open(tmp_path / "runs" / "w2.jsonl", "a") as file:
        file.write('{"table": "accuracy", "subsets": {"a": 1}')  # killed while writing
    runs = board.runs()
    assert len(runs.rows) == 1 and runs.left(g)
    for seed in range(1, 5):
        board.record("w3", run_of(g, "final", 1e-3, seed))
    assert not board.runs().left(g) and board.runs().left(group(seeds=(0, 9)))


def test_a_plan_is_json_and_comes_back_the_same(tmp_path):
    plan = [*ablations.groups(tmp_path), *long_run.groups(), group(rows=8, lrs=(1e-3,))]
    jobs.Board(tmp_path).publish(plan, [])
    assert json.loads((tmp_path / "plan.json").read_text())[0]["task"] == plan[0].task
    again = jobs.Board(tmp_path).plan()
    assert again == plan and [g.name for g in again] == [g.name for g in plan]
    assert any(isinstance(g.method.config.get("skip_modules"), tuple) for g in again)


def test_publishing_keeps_what_the_folder_has(tmp_path, monkeypatch):
    board, g = jobs.Board(tmp_path), group()
    board.publish([g], [run_of(g, "final", 1e-3, 0, nll=1.0)])
    board.record("w0", run_of(g, "final", 1e-3, 1, nll=2.0))
    board.record("w0", run_of(g, "final", 1e-3, 0, nll=3.0))
    with monkeypatch.context() as patch:  # killed when the new file was not there yet
        patch.setattr(jobs, "replace_text", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            board.publish([g], [])
    assert len(board.runs().by_key) == 2
    board.publish([g], [])
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["known.jsonl"]
    assert {r["seed"]: r["nll"] for r in board.runs().rows} == {0: 3.0, 1: 2.0}


def test_a_lane_stays_with_its_model_among_the_next_tasks(tmp_path, model):
    options = worker.Options(str(tmp_path), "cpu", shipped=str(model))
    board = jobs.Board(tmp_path)
    bf16, paper = methods.METHODS["bf16"], methods.METHODS["paper"]
    plan = [group(task=t, method=m) for t in ("sentiment", "wic", "boolq") for m in (bf16, paper)]
    plan.insert(0, group(method=methods.METHODS["paper_gptq"]))  # not calibrated
    board.publish(plan, [])
    lane, other = (worker.Lane(board, "w", i, options, worker.Shelf("cpu"), options.workshop()) for i in (0, 1))
    lane.models["shipped", "paper"] = None
    taken = [(g.task, g.method.name) for g in (lane.next_group(), lane.next_group(), other.next_group(), lane.next_group())]
    # wic's is near, boolq's comes only when sentiment's other method is taken
    assert taken == [("sentiment", "paper"), ("wic", "paper"), ("sentiment", "bf16"), ("boolq", "paper")]
    lane.next_group(), lane.next_group()
    assert lane.next_group() is None and [g.method.name for g in lane.free()] == ["paper_gptq"]


# ---------------------------------------------------------------------------------------------- sessions


def arguments(tmp_path, model, **k) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    runner.add_arguments(parser)
    args = parser.parse_args(["--small", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--model", str(model)])
    args = runner.settle(args)
    args.calibration, args.layers = (6, 32), None
    vars(args).update(k)
    return args


def test_a_plan_runs_to_the_end_and_not_twice(data, tmp_path, model):
    args = arguments(tmp_path, model)
    chosen = [methods.METHODS[name] for name in ("bf16", "paper_gptq")]
    plan = [group(task=task, method=m, weights=w, sweep_seeds=(7,)) for w in methods.WEIGHTS for task in ("commonsense", "asdiv")
            for m in chosen]  # fmt: skip
    plan = runner.adjusted(plan, args)
    path = runner.Session(plan, args, {"note": 1}).run()["accuracy"]
    content = json.loads(path.read_text())
    assert content["settings"]["note"] == 1 and content["not_finished"] == [] and content["failures"] == []
    kinds = [(r["weights"], r["task"], r["method"], r["kind"]) for r in content["runs"]]
    assert len(kinds) == len(set(kinds)) == 16
    assert all("exact_match" in r for r in content["runs"] if r["task"] == "asdiv")
    assert all(0 <= r["accuracy"] <= 1 and len(r["subsets"]) > 1 for r in content["runs"] if r["task"] == "commonsense")
    again = runner.Session(plan, args, {"note": 2})
    again.run()
    assert json.loads(path.read_text())["runs"] == content["runs"]


def test_lanes_in_turn_and_a_failure_among_them(data, tmp_path, model, monkeypatch):
    """Two lanes find what one finds, and a group that fails costs no other one its results."""
    random = methods.METHODS["paper"].changed("sr", "stochastic", gradients="nvfp4_sr")  # draws from the lane's generator
    chosen = (methods.METHODS["bf16"], random)
    plan = [group(method=m, lrs=(2e-2, 4e-2), sweep_seeds=(7,), seeds=(0, 1)) for m in chosen]
    broken = group(task="asdiv", lrs=(1e-3,), seeds=(0,))
    results = []
    for lanes in (1, 2):
        args = arguments(tmp_path, model, lanes=lanes, out=tmp_path / f"out{lanes}", work=tmp_path / f"work{lanes}")
        steps = (2, 3, 5)  # lanes that do not begin their runs, and set their seeds, at the same moments
        groups = [jobs.Group(**{**vars(g), "steps": n, "batch": 2, "rows": 8}) for n, g in zip(steps, (broken, *plan))]
        original = worker.Shelf.of

        def fails(self, g, tokenizer, original=original):
            if g.task == "asdiv":
                raise ValueError("no such rows")
            return original(self, g, tokenizer)

        monkeypatch.setattr(worker.Shelf, "of", fails)
        content = json.loads(runner.Session(groups, args, {}).run()["accuracy"].read_text())
        monkeypatch.setattr(worker.Shelf, "of", original)
        assert len(content["not_finished"]) == 1 and len(content["failures"]) == 2 and "no such rows" in content["failures"][0]
        drop = ("seconds", "train_s")
        results.append([{k: v for k, v in r.items() if k not in drop} for r in content["runs"]])
    assert results[0] == results[1]
    kinds = [r["kind"] for r in results[0] if r["method"] == "bf16"]
    # the larger of the two rates may win, and one beyond is tried then
    assert kinds.count("final") == 2 and kinds.count("sweep") in (2, 3) and kinds.count("zero_shot") == 1


def test_nothing_is_started_when_the_time_is_over(data, tmp_path, model):
    args = arguments(tmp_path, model, seconds=1e-3)
    content = json.loads(runner.Session(runner.adjusted([group()], args), args, {}).run()["accuracy"].read_text())
    assert content["runs"] == [] and len(content["not_finished"]) == 1


def short_plan(args) -> list[jobs.Group]:
    return runner.adjusted([group(method=methods.METHODS[name]) for name in ("bf16", "paper")], args)


def test_results_are_written_on_the_way(data, tmp_path, model, monkeypatch):
    args = arguments(tmp_path, model, lanes=1)
    monkeypatch.setattr(runner, "EVERY", 0.0)
    seen = []
    write = runner.write_table
    monkeypatch.setattr(runner, "write_table", lambda *a: seen.append(len(json.loads(write(*a).read_text())["runs"])))
    runner.Session(short_plan(args), args, {}).run()
    assert seen == sorted(seen) and {1, 2, 3, 4} <= set(seen)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_results_are_written_when_told_to_stop(data, tmp_path, model, monkeypatch, number):
    args = arguments(tmp_path, model, lanes=1)
    before = signal.getsignal(number)
    original = jobs.Board.record

    def stops(self, name, row):
        original(self, name, row)
        if row["kind"] == "final":
            os.kill(os.getpid(), number)

    monkeypatch.setattr(jobs.Board, "record", stops)
    content = json.loads(runner.Session(short_plan(args), args, {}).run()["accuracy"].read_text())
    assert [r["kind"] for r in content["runs"]] == ["final", "zero_shot"] and len(content["not_finished"]) == 1
    assert content["failures"] == [f"stopped by {number.name}"] and signal.getsignal(number) is before
    monkeypatch.setattr(jobs.Board, "record", original)
    args.work = tmp_path / "other"  # what was written is enough
    content = json.loads(runner.Session(short_plan(args), args, {}).run()["accuracy"].read_text())
    assert len(content["runs"]) == 4 and content["not_finished"] == content["failures"] == []


def test_folders_of_killed_sessions_are_merged(data, tmp_path, model):
    args = arguments(tmp_path, model)
    plan = short_plan(args)
    runner.Session(plan, args, {"note": 1}).run()
    (args.out / "accuracy.json").unlink()
    with open(args.work / "runs" / "here.jsonl", "a") as file:
        file.write('{"table": "accu')
    second = jobs.Board(tmp_path / "second")
    second.publish([group(task="wic")], [])
    second.record("w0", run_of(group(task="wic"), "final", 1e-3, 0))
    script = Path(runner.__file__)
    command = [sys.executable, str(script), "--merge", str(args.work), str(tmp_path / "second"), "--out", str(args.out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads((args.out / "accuracy.json").read_text())
    assert len(content["runs"]) == 5 and content["settings"]["note"] == 1 and content["environment"]["torch"]
    assert content["not_finished"] == [group(task="wic").name]  # four of its seeds are missing
    runner.merge([args.work], args.out)  # and again: nothing goes, nothing comes twice
    assert len(json.loads((args.out / "accuracy.json").read_text())["runs"]) == 5


def test_a_plan_says_when_what_is_done(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accuracy", "--plan", "--rate", "100", "--tasks", "wic", "boolq"])
    accuracy.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 7 methods, 3 runs of a sweep and 5 that count, 200 steps each: 11200
    assert [line[1:3] for line in lines[:4]] == [[t, w] for t in ("wic", "boolq") for w in ("shipped", "rotated")]
    assert [(line[7], line[9], line[-2]) for line in lines[:2]] == [("11200", "11200", "112"), ("11200", "22400", "224")]
    assert lines[4][:2] == ["28", "groups,"]


@pytest.mark.slow
def test_processes(data, tmp_path, model):
    """With real worker and calibration processes."""
    args = arguments(tmp_path, model, workers=1, gpus=2)
    plan = runner.adjusted([group(method=methods.METHODS[m]) for m in ("paper_gptq", "bf16")], args)
    content = json.loads(runner.Session(plan, args, {}).run()["accuracy"].read_text())
    assert content["not_finished"] == [] and content["failures"] == [] and len(content["runs"]) == 4


@pytest.mark.parametrize("script", ["accuracy", "ablations", "long_run"])
def test_the_commands_print_their_plan(data, script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--plan", "--seeds", "2"])
    {"accuracy": accuracy, "ablations": ablations, "long_run": long_run}[script].main()
    out = capsys.readouterr().out
    assert "calibrations:" in out and script in out


def test_long_runs_keep_a_curve(data, tmp_path, model):
    args = arguments(tmp_path, model)
    plan = runner.adjusted(long_run.groups()[:2], args)
    path = runner.Session(plan, args, {}).run()["long_run"]
    runs = json.loads(path.read_text())["runs"]
    assert [len(r["curve"]["loss"]) for r in runs] == [2, 2]
    assert [p["step"] for p in runs[0]["curve"]["held_out"]] == [0, 2] and runs[0]["curve"]["held_out"][0]["subsets"]
    summaries.plot_long_run({"runs": runs}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    assert summaries.long_run_table({"runs": runs}).count("\n") == 3


def test_what_was_cut_off_is_in_the_table_until_it_is_whole(data, tmp_path, model, monkeypatch):
    args = arguments(tmp_path, model)
    plan = runner.adjusted(long_run.groups()[:1], args)
    late = iter([False, True])  # before either step
    with monkeypatch.context() as patch:
        patch.setattr(worker, "Pause", lambda _, path: training.Pause(lambda: next(late), path))
        content = json.loads(runner.Session(plan, args, {}).run()["long_run"].read_text())
    assert [(r["steps"], r["planned"]) for r in content["runs"]] == [(1, 2)] and content["not_finished"] == [plan[0].name]
    assert "1 of 2" in summaries.long_run_table(content)
    content = json.loads(runner.Session(plan, args, {}).run()["long_run"].read_text())
    assert [(r["steps"], "planned" in r) for r in content["runs"]] == [(2, False)] and content["not_finished"] == []
    assert content["runs"][0]["curve"]["held_out"][0]["step"] == 0 and content["runs"][0]["commit"]


# ---------------------------------------------------------------------------------------------- summaries


def made_up() -> dict:
    rows = []
    for task, metric in (("sentiment", "accuracy"), ("asdiv", "exact_match")):
        for method, shift in (("bf16", 0.0), ("paper", -0.1)):
            g = group(task=task, method=methods.METHODS[method])
            rows.append(run_of(g, "zero_shot", None, None, nll=2.0, **{metric: 0.25}))
            for seed, noise in enumerate((0.0, 0.02, 0.1)):
                extra = 0.01 * seed if method == "paper" else 0.0
                rows.append(run_of(g, "final", 1e-3, seed, nll=1 - shift, **{metric: 0.5 + shift + noise + extra}))
    return {"runs": rows}


def test_tables_of_accuracy():
    content = made_up()
    table = summaries.accuracy_table(content).splitlines()
    assert table[0] == "| method | sentiment | asdiv | average of 2 |" and table[2] == "| Zero-shot, BF16 | 25.0 | 25.0 | 25.0 |"
    assert "| 52.0 (54.0 ± 5.3, 3) |" in table[3] and table[3].endswith("| 52.0 |")
    mean = summaries.averages(content)["paper"]
    # differences -0.10, -0.09, -0.08: mean -0.09, sd 0.01, se 0.01 / sqrt(3); of two tasks, that over sqrt(2)
    assert mean["difference"] == pytest.approx(-0.09) and mean["se"] == pytest.approx(0.01 / math.sqrt(6))
    assert "| −9.0 ± 0.6 | −9.0 ± 0.6 | −9.0 ± 0.4 |" in summaries.difference_table(content)
    assert "+0.100 ± 0.000" in summaries.difference_table(content, value="nll")
    assert "25.0 (2.000)" in summaries.zero_shot_table(content) and "0.001" in summaries.rate_table(content)
    content["runs"] = [r for r in content["runs"] if (r["task"], r["method"]) != ("asdiv", "paper")]
    assert summaries.accuracy_table(content).splitlines()[0].endswith("average of 1 |")


def test_table_of_ablations(tmp_path):
    rows = []
    for method in (
        methods.METHODS["paper_gptq"],
        methods.METHODS["paper_gptq"].changed("sr", "stochastic", gradients="nvfp4_sr"),
    ):
        g = group(table="ablations", method=method)
        for seed in range(3):
            rows.append(run_of(g, "final", 1e-3, seed, nll=1.0 + 0.1 * (":" in method.name), accuracy=0.5 + 0.1 * seed))
    table = summaries.ablation_table({"runs": rows}).splitlines()
    assert "**itself** | 60.0 | 1.000 | 3" in table[2] and "stochastic | +0.0 ± 0.0 | +0.100 ± 0.000 | 3" in table[3]
    summaries.plot_accuracy(made_up(), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_ablations_take_the_accuracy_tables_learning_rates(tmp_path):
    assert {g.lrs for g in ablations.groups(tmp_path) if g.task == "sentiment"} == {(7e-4,)}
    run = run_of(group(method=methods.METHODS["balanced"]), "final", 3e-4, 0)
    (tmp_path / "accuracy.json").write_text(json.dumps({"runs": [run]}))
    rates = {g.method.name: g.lrs for g in ablations.groups(tmp_path) if g.task == "sentiment"}
    assert rates["balanced"] == rates["balanced:sr"] == (3e-4,) and rates["paper_gptq:sr"] == (7e-4,)


def test_scripts_start_from_any_folder(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "reproduce" / "ablations.py"
    done = subprocess.run([sys.executable, str(script), "--plan"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "ablations" in done.stdout, done.stderr
