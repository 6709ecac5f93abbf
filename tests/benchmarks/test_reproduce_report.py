"""Memory, time and the report of benchmarks/reproduce: small versions run, tables say what the data say, the page is current."""

import re
import shutil
from pathlib import Path

import common
import pytest
import roofline
from llama_cases import Case
from reproduce import costs, memory, plots, report, run_log, step_time, tables
from reproduce.tables import PAPER, Scores

from peft_nvfp4.cli._run import profiling
from peft_nvfp4.memory import Settings, estimate

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("model", PAPER["accuracy"])
def test_the_papers_averages_are_those_of_its_rows(model):
    for values, mean in PAPER["accuracy"][model].values():
        assert len(values) == len(PAPER["tasks"])
        assert abs(sum(values) / len(values) - mean) < 0.0006  # three printed digits of each


def test_the_papers_breakdown_misses_its_total_by_less_than_five_milliseconds():
    total, *parts = reversed(PAPER["breakdown"].values())
    for column in (0, 1):
        assert 0 < total[column] - sum(part[column] for part in parts) < 5
    assert sorted(c for _, _, categories in parts for c in categories) == sorted(profiling.CATEGORIES)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, dict]:
    """What the two scripts write with ``--small``."""
    out = tmp_path_factory.mktemp("reproduce")
    for module in (memory, step_time):
        module.main(["--small", "--out", str(out)])
    before = {path: path.read_text() for path in out.iterdir()}
    memory.main(["--small", "--out", str(out)])  # nothing is measured a second time
    step_time.main(["--small", "--out", str(out)])
    assert {path: path.read_text() for path in out.iterdir()} == before
    return {name: run_log.read(out, name) for name in ("memory", "step_time")}


def test_small_memory(small):
    data = small["memory"]
    assert [(r["case"], r["batch"], r["seq"]) for r in data["peaks"]] == [
        (case, *point) for case, grid in memory.SMALL.items() for point in grid
    ]
    assert not [r for r in (*data["peaks"], *data["largest"]) if "error" in r]
    one, two, codes, paper_row, checkpointed = data["peaks"]
    # twice the rows keep twice as much, but for what is there once for all rows, the rotary embedding
    assert 1.9 < two["kept_in_layers"] / one["kept_in_layers"] <= 2
    assert two["kept_outside"] > one["kept_outside"] > 0  # embedding's output, final norm, logits
    assert codes["weights"] == one["weights"] > paper_row["weights"]  # compressing what is saved leaves the weights as they are
    assert codes["kept_in_layers"] < one["kept_in_layers"]
    assert checkpointed["kept_in_layers"] < paper_row["kept_in_layers"] / 4
    assert data["largest"][0]["largest_batch"] == memory.SMALL_MOST  # a CPU has no cap


def test_small_times(small):
    rows = small["step_time"]["times"]
    assert not [r for r in rows if "error" in r]
    assert {(r["case"], r["batch"], r["seq"]) for r in rows} == {(c, *p) for c, grid in step_time.SMALL.items() for p in grid}
    profiled = [r for r in rows if "times_ms" in r]
    assert {(r["case"], r["batch"]) for r in profiled} == {(case, 1) for case in step_time.SMALL}
    by_case = {r["case"]: r["times_ms"] for r in profiled}
    assert by_case["bf16"]["quantise/fused"] == 0 < by_case["nvfp4-paper"]["quantise/fused"]
    assert all(r["step_ms"] > 0 for r in rows)


def test_an_error_is_a_row_and_is_tried_again(tmp_path):
    log = memory.log_of(memory.arguments("", ["--small", "--out", str(tmp_path)]), "memory")
    key = {"table": "peaks", "case": "bf16", "batch": 1, "seq": 8}

    def fails():
        raise ValueError("no such thing")

    memory.fill(log, key, fails)
    (row,) = run_log.read(tmp_path, "memory")["peaks"]
    assert row["error"] == "ValueError: no such thing" and "traceback" not in row and log.find(key) is None


@pytest.mark.parametrize("largest", [0, 1, 2, 7, 8, 30, 31, 32])
def test_largest_batch_is_found(largest):
    tried = []

    def fits(batch):
        assert 1 <= batch <= 32 and batch not in tried
        tried.append(batch)
        return batch <= largest

    assert common.largest_fitting(fits, 32) == largest
    assert len(tried) <= 11  # 2 log2(32) + 1: doubling, then bisection


@pytest.mark.parametrize("case", {**memory.CASES, **memory.CAPPED})
def test_settings_mean_the_case(case):
    """The estimator's word for each case, against what other tests hold against measurements (tests/test_estimate.py)."""
    settings = Case(case).settings()
    assert estimate("llama-1b", settings).peak > 0
    assert settings.checkpointing == case.endswith("ckpt") and settings.compressed == ("nvfp4" in case or "codes" in case)
    assert settings.adapter_bytes == (4 if re.search("nvfp4|ours|codes", case) else 2)
    assert settings.format == {"bf16": "bf16", "qlora": "nf4", "nvfp4": "nvfp4"}[case.split("-")[0]]


def test_settings_of_the_default_are_those_of_the_estimator_at_fast():
    assert Case("nvfp4-high").settings() == Settings(memory="fast")
    assert Case("nvfp4").settings() == Settings(accuracy="balanced", memory="fast")
    assert Case("nvfp4-paper-recompute-once-transient-graphs").settings() == Settings(
        accuracy="paper", memory="small", cuda_graphs=True
    )


MEMORY = {
    "peaks": [
        {"case": case, "batch": 4, "seq": seq, "peak_allocated": peak, "weights": 1000, "adapters": 200, "kept_in_layers": kept}
        for case, seq, peak, kept in (
            *(("bf16", 256, 3000, 1500), ("bf16", 512, 4000, 2400)),
            *(("nvfp4-paper", 256, 3000, 1500), ("nvfp4-paper", 512, 4000, 2400), ("nvfp4-paper", 1024, 6000, 4200)),
        )
    ]
}


def test_composition_adds_up():
    rows = costs.composed(MEMORY)
    assert {row["case"] for row in rows} == {"nvfp4-paper"}  # two lengths are no curve
    assert list(costs.parts(rows[-1]).values()) == [1000, 200, 4200, 600]


def test_cells_say_what_does_not_fit_and_what_was_not_measured():
    rows = ({"peak_allocated": 3_000_000_000}, {"skipped": "out of memory"}, {"error": "ValueError"}, {})
    assert [costs.gigabytes(row) for row in rows] == ["3.00", "does not fit", "failed", "–"]


def run(method, task, seed, accuracy, kind="final", weights="shipped", **more):
    shared = {"kind": kind, "weights": weights, "steps": 200, "label": method.upper(), "nll": 1 - accuracy, "lr": 1e-3}
    return {"method": method, "task": task, "seed": seed, "accuracy": accuracy, **shared, **more}


ACCURACY = {
    "runs": [
        *(run("bf16", "a", seed, value) for seed, value in enumerate((0.8, 0.9))),
        *(run("bf16", "b", seed, 0.6) for seed in (0, 1)),
        *(run("paper_gptq", "a", seed, value) for seed, value in enumerate((0.5, 0.7))),
        *(run("balanced_gptq", "a", seed, value) for seed, value in enumerate((0.79, 0.9))),
        run("bf16", "a", 2, 0.1, kind="sweep"),
        run("bf16", "a", None, 0.2, kind="zero_shot"),
        run("bf16", "a", 0, 0.0, weights="rotated"),
    ]
}


def test_differences_pair_seeds_over_the_tasks_that_all_methods_have():
    scores = Scores(ACCURACY)
    assert scores.mean_difference("paper_gptq", "bf16") == (pytest.approx(-25), pytest.approx(5))  # of task a: -30 and -20
    assert scores.mean_difference("paper_gptq", "nf4") is None and tables.plus_minus(None, 1) == "–"
    assert tables.plus_minus((-1.0, float("nan")), 1) == "−1.0 ± –"  # one seed
    assert tables.verdicts(scores).split("\n") == [
        "- `balanced_gptq`, average minus BF16 LoRA's: −0.5 ± 0.5 points; at least −1.0 was asked for: met (in nats +0.005 ± "
        "0.005, less is better).",
        "- `paper_gptq`, average minus BF16 LoRA's: −25.0 ± 5.0 points; at least −1.0 was asked for: **missed** (in nats +0.250 "
        "± 0.050, less is better).",
    ]
    close = [*ACCURACY["runs"][:2], *(run("high", "a", seed, value) for seed, value in enumerate((0.77, 0.9)))]
    found = tables.verdicts(Scores({"runs": close}))
    assert "−1.5 ± 1.5 points; at least −1.0 was asked for: **missed**, by less than the error (in nats " in found


def test_a_task_that_bf16_lora_does_not_learn_is_in_no_average():
    def task(name, untrained, bf16, nf4):
        return [
            run("bf16", name, None, untrained, kind="zero_shot"),
            *(run("bf16", name, seed, value) | {"nll": 1.0} for seed, value in enumerate(bf16)),
            *(run("nf4", name, seed, value) | {"nll": 1.5} for seed, value in enumerate(nf4)),
            *(run("high", name, seed, value) | {"nll": 1.25} for seed, value in enumerate(nf4)),
        ]

    # standard errors of 0.01; above 0.5 by 5 of them, by 1, and below
    runs = [
        *task("a", 0.5, (0.54, 0.56), (0.52, 0.54)),
        *task("b", 0.5, (0.50, 0.52), (0.9, 0.9)),
        *task("c", 0.5, (0.3, 0.32), (0.5, 0.5)),
    ]
    scores = Scores({"runs": runs})
    assert scores.counted() == ["a"] and scores.common() == ["a", "b", "c"]
    assert list(scores.unlearnt()) == ["b", "c"]
    before, trained = scores.unlearnt()["c"]
    assert before == 50 and (trained.mean, trained.se) == (pytest.approx(31), pytest.approx(1))
    assert Scores({"runs": [r for r in runs if r["task"] == "b"]}).averages() == {}  # no task counts: no average
    assert scores.mean_difference("nf4", "bf16")[0] == pytest.approx(-2)
    assert tables.accuracy(scores).splitlines()[0] == "| method | a | b | c | average of 1 |"
    assert tables.verdicts(scores).split("\n")[0] == (
        "- `high`, average minus BF16 LoRA's: −2.0 ± 0.0 points; at least −1.0 was asked for: **missed** "
        "(in nats +0.250 ± 0.000, less is better; over all tasks +18.7 ± 0.5 points)."
    )


def test_a_table_of_several_sessions_names_their_commits():
    runs = [{"commit": "a" * 40}, {"commit": "b" * 40}, {"commit": "a" * 40}]
    files = {"x": {"environment": {"commit": "c" * 40}, "runs": runs}, "y.json": {"environment": {}}}
    found = costs.measured_on(["x"], ["y.json"], files)
    assert "| aaaaaaa, bbbbbbb |" in found and "| unknown |" in found


def test_methods_have_different_names():
    names = [costs.method(c) for c in {*memory.CASES, *memory.CAPPED, *step_time.CASES}]
    assert len(set(names)) == len(names)


def test_the_report_is_what_the_results_say_now():
    """Whatever a table computes shows in it: a change of a number, a name or a word is a change of the page."""
    assert report.PAGE.read_text(encoding="utf-8") == report.page(), "run python benchmarks/reproduce/report.py"


@pytest.fixture
def results(tmp_path) -> Path:
    """A copy of all results."""
    (tmp_path / "reproduce").mkdir()
    names = [path.name for path in report.RESULTS.glob("*.json")] + [f"reproduce/{name}.json" for name in report.MODULES]
    for name in names:
        shutil.copy(report.RESULTS / name, tmp_path / name)
    return tmp_path


def test_a_missing_result_is_named(results):
    (results / "reproduce" / "memory.json").unlink()
    with pytest.raises(FileNotFoundError, match="no memory.json in .*; benchmarks/reproduce/memory.py makes it"):
        report.page(report.Results(results))


def test_what_was_not_finished_is_said():
    runs = ["accuracy.boolq.shipped.paper.0a", "accuracy.boolq.shipped.nf4.1b", "accuracy.wic.rotated.nf4.2c"]
    assert report.unfinished(runs) == ["boolq, shipped: `paper`, `nf4`", "wic, rotated: `nf4`"]


def test_plots_are_those_of_the_page(results, tmp_path):
    pytest.importorskip("matplotlib")
    report.draw(report.Results(results), tmp_path / "reproduce")
    drawn = {path.name: path.stat().st_size for path in (tmp_path / "reproduce").glob("*.png")}
    assert set(drawn) == set(re.findall(r"results/reproduce/([\w.]+png)", report.PAGE.read_text(encoding="utf-8")))
    assert min(drawn.values()) > 5000
    plots.memory(MEMORY, tmp_path / "a.png")


def test_the_projection_is_what_the_script_computes():
    text = (ROOT / "benchmarks" / "roofline.md").read_text(encoding="utf-8")
    assert all(roofline.projection(card) in text for card in roofline.CARDS) and roofline.against_the_paper() in text


def test_links_of_the_report_lead_somewhere():
    text = report.PAGE.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert (report.PAGE.parent / target).is_file(), target
    for command in re.findall(r"`python ([^ `]+)", text):
        assert (ROOT / command).is_file(), command


def test_results_name_no_folders_of_a_machine():
    for path in (report.RESULTS / "reproduce").glob("*.json"):
        assert not re.search(r'"[^"]*/(root|home|tmp|work|usr|mnt)/', path.read_text(encoding="utf-8")), path.name
