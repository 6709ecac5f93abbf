"""Memory, time and the report of benchmarks/reproduce: small versions run, tables say what the data say, the page is current."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from bench_train import Case
from reproduce import costs, memory, others, paper, report, step_time, summaries

from peft_nvfp4.cli._run import profiling
from peft_nvfp4.memory import Settings, estimate

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------------------------------- the paper's figures


@pytest.mark.parametrize("model", paper.ACCURACY)
def test_the_papers_averages_are_those_of_its_rows(model):
    for values, mean in paper.ACCURACY[model].values():
        assert len(values) == len(paper.TASKS)
        assert abs(sum(values) / len(values) - mean) < 0.0006  # three printed digits of each


def test_the_papers_speedups_are_those_of_its_times():
    for _, _, bf16, nvfp4, speedup in paper.GEMMS.values():
        assert abs(bf16 / nvfp4 - speedup) < 0.06


def test_the_papers_breakdown_misses_its_total_by_less_than_five_milliseconds():
    for column in (0, 1):
        total = paper.BREAKDOWN["Reported profile total"][column]
        parts = sum(v[column] for name, v in paper.BREAKDOWN.items() if name in paper.PROFILED)
        assert 0 < total - parts < 5
    assert sorted(c for own in paper.PROFILED.values() for c in own) == sorted(profiling.CATEGORIES)


# ---------------------------------------------------------------------------------------------- small versions


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, dict]:
    """What the two scripts write with ``--small``."""
    out = tmp_path_factory.mktemp("reproduce")
    for module in (memory, step_time):
        module.main(["--small", "--out", str(out)])
    return {name: json.loads((out / f"{name}.json").read_text()) for name in ("memory", "step_time")}


def test_small_memory(small):
    data = small["memory"]
    assert [(r["case"], r["batch"], r["seq"]) for r in data["peaks"]] == [
        (case, *point) for case, grid in memory.SMALL["cases"].items() for point in grid
    ]
    assert not [r for r in (*data["peaks"], *data["largest"]) if "error" in r]
    one, two, codes, paper_row, checkpointed = data["peaks"]
    # twice the rows keep twice as much, but for what is there once for all rows, the rotary embedding
    assert 1.9 < two["kept_in_layers"] / one["kept_in_layers"] <= 2
    assert two["kept_outside"] > one["kept_outside"] > 0  # embedding's output, final norm, logits
    assert codes["weights"] == one["weights"] > paper_row["weights"]  # compressing what is saved leaves the weights as they are
    assert codes["kept_in_layers"] < one["kept_in_layers"]
    assert checkpointed["kept_in_layers"] < paper_row["kept_in_layers"] / 4
    assert data["largest"][0]["largest_batch"] == memory.SMALL["most"]  # a CPU has no cap


def test_small_times(small):
    rows = small["step_time"]["times"]
    assert not [r for r in rows if "error" in r]
    assert {(r["case"], r["batch"], r["seq"]) for r in rows} == {(c, *p) for c, grid in step_time.SMALL.items() for p in grid}
    profiled = [r for r in rows if "times_ms" in r]
    assert {r["case"] for r in profiled} == set(step_time.SMALL)
    assert {(r["batch"], r["seq"]) for r in profiled} == {step_time.SMALL_GRID[0]}
    by_case = {r["case"]: r["times_ms"] for r in profiled}
    assert by_case["bf16"]["quantise/fused"] == 0 < by_case["nvfp4-paper"]["quantise/fused"]
    assert all(r["step_ms"] > 0 for r in rows)


def test_files_are_written_after_every_row_and_name_what_the_time_did_not_allow(tmp_path):
    memory.main(["--small", "--seconds", "1e-9", "--out", str(tmp_path)])
    data = json.loads((tmp_path / "memory.json").read_text())
    assert data["peaks"] == data["largest"] == []
    assert len(data["not_run"]) == len(memory.SMALL["cases"]) + len(memory.SMALL["capped"])


def test_largest_batches_are_added_to_what_a_file_has(tmp_path):
    peaks, there = [{"case": "bf16", "batch": 1, "seq": 8}], {"case": "nvfp4-paper", "cap_gib": 16.0, "largest_batch": 7}
    path = tmp_path / "memory.json"
    for largest, expected in (([there], 7), ([{**there, "error": "of another day"}], memory.SMALL["most"])):
        left = {"not_run": ["peaks of bf16", f"{memory.LARGEST} nvfp4-paper under 16 GiB"]}
        path.write_text(
            json.dumps({"environment": {"commit": "abc"}, "settings": {}, "peaks": peaks, "largest": largest, **left})
        )
        memory.main(["--small", "--largest", "--out", str(tmp_path)])
        data = json.loads(path.read_text())
        assert data["peaks"] == peaks and data["settings"]["kept_from"] == "abc" and data["not_run"] == ["peaks of bf16"]
        assert [row["largest_batch"] for row in data["largest"]] == [expected]


def test_naming_cases_leaves_the_rows_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SMALL", {**memory.SMALL, "cases": {"bf16": ((1, 32),), "nvfp4-paper": ((1, 32),)}})
    monkeypatch.setattr(step_time, "SMALL", {"bf16": ((1, 32),), "nvfp4-paper": ((1, 32),)})
    for module, name, tables in ((memory, "memory", ("peaks", "largest")), (step_time, "step_time", ("times",))):
        path = tmp_path / f"{name}.json"
        others, own = {"case": "bf16", "batch": 7, "seq": 8, "cap_gib": 9}, {"case": "nvfp4-paper", "batch": 7, "seq": 8}
        before = {"environment": {"commit": "b"}, "settings": {"kept_from": "a"}} | {t: [others, own] for t in tables}
        before["not_run"] = ["peaks of nvfp4-paper", "peaks of nvfp4-paper-graphs"]  # what is named is tried again
        path.write_text(json.dumps(before))
        module.main(["--small", "--cases", "nvfp4-paper", "--out", str(tmp_path)])
        data = json.loads(path.read_text())
        assert data["settings"]["kept_from"] == "a, b" and data["not_run"] == ["peaks of nvfp4-paper-graphs"]
        for table in tables:
            kept, new = data[table]
            assert kept == others and new["case"] == "nvfp4-paper" and new.get("batch") != 7 and "error" not in new


@pytest.mark.parametrize("module", [memory, step_time])
def test_a_case_that_is_not_there_is_named(module, tmp_path):
    with pytest.raises(SystemExit, match="unknown cases nvfp5; there are bf16"):
        module.main(["--small", "--cases", "nvfp4-paper,nvfp5", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_an_error_is_a_row_and_the_file_is_there(tmp_path):
    run = memory.Run(memory.arguments("", ["--small", "--out", str(tmp_path)]), "memory", ("peaks",))

    def fails():
        raise ValueError("no such thing")

    run.row("peaks", {"case": "bf16", "batch": 1, "seq": 8}, fails)
    (row,) = json.loads((tmp_path / "memory.json").read_text())["peaks"]
    assert row["error"] == "ValueError: no such thing" and "traceback" not in row


# ---------------------------------------------------------------------------------------------- search and settings


@pytest.mark.parametrize("largest", [0, 1, 2, 7, 8, 30, 31, 32])
@pytest.mark.parametrize("guess", [-3, 1, 7, 8, 20, 32, 99])
def test_largest_batch_is_found_from_any_guess(largest, guess):
    tried = []

    def fits(batch):
        assert 1 <= batch <= 32 and batch not in tried
        tried.append(batch)
        return batch <= largest

    assert memory.largest_near(fits, guess, 32) == largest
    assert len(tried) <= 11  # 2 log2(32) + 1: strides, then bisection
    if guess == largest > 0:
        assert len(tried) == (1 if largest == 32 else 2)


def test_guess_is_where_the_line_meets_the_cap():
    rows = [{"case": "bf16", "batch": b, "seq": 8, "peak_allocated": 100 + 50 * b} for b in (1, 4, 16)]
    assert memory.guess(rows, Case("bf16"), "tiny", 1000, 8) == 17  # 100 + 50 * 17 = 950 <= 980 < 1000
    assert memory.guess(rows[:1], Case("bf16"), "tiny", 1000, 8) == 1  # one point is no line, and the estimator has no such name


@pytest.mark.parametrize("case", [*memory.CASES, *memory.CAPPED])
def test_settings_mean_the_case(case):
    """The estimator's word for each case, against what other tests hold against measurements (tests/memory/test_estimate.py)."""
    settings = memory.settings_of(Case(case))
    assert estimate("llama-1b", settings).peak > 0
    assert settings.checkpointing == case.endswith("ckpt") and settings.compressed == ("nvfp4" in case or "codes" in case)
    assert settings.adapter_bytes == (4 if re.search("nvfp4|ours|codes", case) else 2)
    assert settings.format == {"bf16": "bf16", "qlora": "nf4", "nvfp4": "nvfp4"}[case.split("-")[0]]


def test_settings_of_the_default_are_the_estimators_defaults():
    assert memory.settings_of(Case("nvfp4-high")) == Settings()
    assert memory.settings_of(Case("nvfp4")) == Settings(accuracy="balanced")
    assert memory.settings_of(Case("nvfp4-paper-recompute-once-transient-graphs")) == Settings(
        accuracy="paper", recompute_mlp=True, recompute_attention=True, weight_layouts="transient", cuda_graphs=True
    )


# ---------------------------------------------------------------------------------------------- tables


MEMORY = {
    "peaks": [
        {"case": c, "batch": b, "seq": s, "peak_allocated": p, "weights": w, "adapters": a, "kept": k, "kept_in_layers": k}
        for c, b, s, p, w, a, k in (
            ("bf16-ours", 4, 512, 1000 * 2**20, 10, 5, 100),
            ("bf16-codes", 4, 512, 600 * 2**20, 10, 5, 50),
            ("nvfp4-paper", 4, 256, 3_000_000_000, 1_000_000_000, 200_000_000, 1_500_000_000),
            ("nvfp4-paper", 4, 512, 4_000_000_000, 1_000_000_000, 200_000_000, 2_400_000_000),
            ("nvfp4-paper", 4, 1024, 6_000_000_000, 1_000_000_000, 200_000_000, 4_200_000_000),
            ("bf16-liger", 4, 1024, 8_000_000_000, 2_000_000_000, 100_000_000, 5_000_000_000),
        )
    ]
    + [{"case": "bf16", "batch": 4, "seq": 1024, "skipped": "out of memory"}],
    "largest": [
        {"case": "nvfp4-paper", "cap_gib": 8.0, "largest_batch": 9, "seq": 1024},
        {"case": "nvfp4-paper", "cap_gib": 16.0, "largest_batch": 24, "seq": 1024, "tokens_per_s": 65432.1},
        {"case": "bf16-liger", "cap_gib": 16.0, "largest_batch": 12, "seq": 1024},
    ],
}


def cells(table: str, first: str) -> list[str]:
    """The row that begins with ``first``."""
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_composition_adds_up():
    table = costs.composition(MEMORY)
    assert "`bf16`" not in table  # one length is no curve
    *_, last = table.splitlines()
    assert last == "| `nvfp4` paper | 1024 | 1.00 | 0.20 | 4.20 | 0.60 | 6.00 | 70 % |"


def test_peaks_say_what_does_not_fit_and_what_was_not_measured():
    table = costs.peaks(MEMORY)
    assert table.splitlines()[0] == "| GB | 4 x 256 | 4 x 512 | 4 x 1024 |"
    assert cells(table, "`nvfp4` paper") == ["3.00", "4.00", "6.00"]
    assert cells(table, "BF16 LoRA") == ["–", "–", "does not fit"]


def test_largest_batches_stand_beside_the_papers():
    table = costs.largest(MEMORY)
    assert cells(table, "`nvfp4` paper") == ["9", "24", "65,432", "26", "31,723"]
    assert cells(table, "BF16 LoRA, Liger") == ["–", "12", "–", "10", "17,162"]


def test_compressed_savings_are_ratios_to_their_own_baseline():
    table = costs.saved_codes(MEMORY, None)
    first = [line for line in table.splitlines() if line.startswith("| 4 x 512 |")]
    assert "| 4 x 512 | HyC-LoRA, 2-bit compression (paper) | 6,112 | 0.63 | 219 |" in first
    assert '| 4 x 512 | `bf16`, `activations="nvfp4"` | 600 | 0.60 | – |' in first
    assert "| 8 x 512 | HyC-LoRA, Own baseline (paper) | OOM | – | n/a |" in table


def test_breakdown_puts_categories_side_by_side():
    times = {"BF16 GEMMs": 1.0, "NVFP4 GEMMs": 0.0, "dequantise": 2.0, "quantise/fused": 3.0, "attention": 4.0}
    row = {"case": "nvfp4-graphs", "batch": 4, "seq": 1024, "times_ms": times | {"elementwise/other": 5.0}, "total_ms": 15.0}
    table = costs.breakdown({"times": [row | {"launches": 35.0}]})
    assert cells(table, "Quantization / fused kernels") == ["0", "17.1", "5.0"]
    assert cells(table, "Reported profile total") == ["239.4", "130.1", "15.0"]


def run(method, task, seed, accuracy, kind="final", weights="shipped", **more):
    shared = {"kind": kind, "weights": weights, "steps": 200, "label": method.upper(), "nll": 1 - accuracy, "lr": 1e-3}
    return {"method": method, "task": task, "seed": seed, "accuracy": accuracy, **shared, **more}


ACCURACY = {
    "environment": {},
    "not_finished": ["accuracy.boolq.shipped.paper.0a", "accuracy.boolq.shipped.nf4.1b", "accuracy.wic.rotated.nf4.2c"],
    "failures": [],
    "runs": [
        *(run("bf16", "a", seed, value) for seed, value in enumerate((0.8, 0.9))),
        *(run("bf16", "b", seed, 0.6) for seed in (0, 1)),
        *(run("paper_gptq", "a", seed, value) for seed, value in enumerate((0.5, 0.7))),
        *(run("balanced_gptq", "a", seed, value) for seed, value in enumerate((0.79, 0.9))),
        run("bf16", "a", 2, 0.1, kind="sweep"),
        run("bf16", "a", None, 0.2, kind="zero_shot"),
        run("bf16", "a", 0, 0.0, weights="rotated"),
    ],
}


def test_differences_pair_seeds_over_the_tasks_that_all_methods_have():
    found = others.difference(ACCURACY, "paper_gptq", "bf16")  # task b lacks methods and does not count; -30 and -20
    assert found == (pytest.approx(-25), pytest.approx(5))
    assert others.points(found) == "−25.0 ± 5.0" and others.points((-1.0, float("nan"))) == "−1.0 (one seed)"
    assert others.difference(ACCURACY, "paper_gptq", "nf4") is None and others.points(None) == "not measured"
    assert others.verdicts(ACCURACY, "shipped") == [
        "`balanced_gptq`, average minus BF16 LoRA's: −0.5 ± 0.5 points; at least −1.0 was asked for: met (in nats +0.005 ± "
        "0.005, less is better).",
        "`paper_gptq`, average minus BF16 LoRA's: −25.0 ± 5.0 points; at least −1.0 was asked for: **missed** (in nats +0.250 ± "
        "0.050, less is better).",
    ]
    close = {"runs": [*ACCURACY["runs"][:2], *(run("high", "a", seed, value) for seed, value in enumerate((0.77, 0.9)))]}
    (found,) = others.verdicts(close, "shipped")
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
    data = {"runs": runs}
    assert summaries.counted(data) == ["a"] and summaries.common_tasks(data) == ["a", "b", "c"]
    assert [line.split(":")[0] for line in others.left_out(data, "shipped")] == [f"`{t}` is in no average" for t in "bc"]
    assert "scores 31.0 ± 1.0 (standard error) there, the untrained model 50.0." in others.left_out(data, "shipped")[1]
    assert summaries.averages({"runs": [r for r in runs if r["task"] == "b"]}) == {}  # no task counts: no average
    assert summaries.averages(data)["nf4"]["difference"] == pytest.approx(-0.02)
    assert summaries.accuracy_table(data).splitlines()[0] == "| method | a | b | c | average of 1 |"
    assert others.verdicts(data, "shipped")[0] == (
        "`high`, average minus BF16 LoRA's: −2.0 ± 0.0 points; at least −1.0 was asked for: **missed** "
        "(in nats +0.250 ± 0.000, less is better; over all tasks +18.7 ± 0.5 points)."
    )


def test_a_table_of_several_sessions_names_their_commits():
    runs = [{"commit": "a" * 40}, {"commit": "b" * 40}, {"commit": "a" * 40}]
    found = others.measured_on({"x.json": {"environment": {"commit": "c" * 40}, "runs": runs}, "y.json": {"environment": {}}})
    assert "| aaaaaaa, bbbbbbb |" in found and "| unknown |" in found


def test_scores_stand_beside_the_time_of_their_steps():
    times = {"times": [{"case": "nvfp4-paper-graphs", "batch": 4, "seq": 1024, "step_ms": 50.0}]}
    table = others.against_time(ACCURACY, times)
    assert cells(table, "PAPER_GPTQ") == ["60.0", "−25.0 ± 5.0", "200", "50.0", "10.0", "70.3", "125"]
    assert cells(table, "BF16") == ["85.0", "–", "200", "–", "–", "72.9", "240"]
    assert {case for case, _ in others.CLOCKS.values()} <= set(step_time.CASES)


def test_methods_have_different_names():
    names = [costs.method(c) for c in {*memory.CASES, *memory.CAPPED, *step_time.CASES}]
    assert len(set(names)) == len(names)
    assert costs.method("nvfp4") == "`nvfp4` balanced" and costs.method("qlora-ours") == "`nf4`"


def test_plots_are_drawn(small, tmp_path):
    pytest.importorskip("matplotlib")
    costs.draw_memory(MEMORY, tmp_path / "a.png")
    costs.draw_times(small["step_time"], tmp_path / "b.png")
    assert all((tmp_path / f"{n}.png").stat().st_size > 5000 for n in "ab")


# ---------------------------------------------------------------------------------------------- the page


def test_the_report_is_what_the_results_say_now():
    assert report.PAGE.read_text(encoding="utf-8") == report.page(), "run python benchmarks/reproduce/report.py"


@pytest.fixture
def results(tmp_path) -> report.Results:
    """The results of the other benchmarks, none of this folder's."""
    (tmp_path / "reproduce").mkdir()
    for name in report.OTHERS:
        (tmp_path / name).write_bytes((report.RESULTS / name).read_bytes())
    return report.Results(tmp_path)


def test_a_missing_result_is_said_to_be_missing(results):
    page = report.page(results)
    for name in report.MODULES:
        assert f"- `python benchmarks/reproduce/{name}.py`: no result yet." in page
    data = {"environment": {}, "not_run": ["peaks of bf16"], **MEMORY}
    (results.folder / "reproduce" / "memory.json").write_text(json.dumps(data))
    page = report.page(results)
    assert "- peaks of bf16 (`memory.py`: the time was up)." in page
    assert cells(page, "Largest batch in 16 GiB, PACT over BF16 LoRA") == ["2.60", "2.00", "not measured", "not measured"]
    assert cells(page, "Peak memory, PACT over BF16 LoRA") == ["0.53", "0.75", "not measured", "not measured"]


def test_a_page_with_everything(results, small):
    pytest.importorskip("matplotlib")
    curve = {"loss": [2.0] * 20, "gradient_norm": [0.5] * 20, "held_out": [{"step": 0, "nll": 2.5}, {"step": 20, "nll": 1.5}]}
    long_run = {**ACCURACY, "runs": [run("bf16", "instructions", 0, 0.5, curve=curve, train_loss=1.9)]}
    found = {"accuracy": ACCURACY, "ablations": ACCURACY, "long_run": long_run, "memory": {**MEMORY, "environment": {}}}
    for name, data in (found | {"step_time": small["step_time"]}).items():
        (results.folder / "reproduce" / f"{name}.json").write_text(json.dumps(data))
    page = report.page(results)
    assert "Not run yet" not in page and "no result yet" not in page
    assert cells(page, "Average accuracy, PACT minus BF16 LoRA, points") == ["−2.6", "−25.0 ± 5.0", "−0.5 ± 0.5", "not measured"]
    assert cells(page, "Average accuracy, PACT minus QLoRA, points")[1:] == ["not measured"] * 3
    assert "- not finished: boolq, shipped: `paper`, `nf4`\n- not finished: wic, rotated: `nf4`\n" in page and "1.5000" in page
    report.draw(results)
    drawn = set(re.findall(r"results/(reproduce/[\w.]+png)", page))
    assert {f"reproduce/{p.name}" for p in (results.folder / "reproduce").glob("*.png")} == drawn


def test_links_of_the_report_lead_somewhere():
    text = report.PAGE.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert (report.PAGE.parent / target).is_file(), target
    for command in re.findall(r"`python ([^ `]+)", text):
        assert (ROOT / command).is_file(), command


def test_results_name_no_folders_of_a_machine():
    for path in (report.RESULTS / "reproduce").glob("*.json"):
        assert not re.search(r'"[^"]*/(root|home|tmp|work|usr|mnt)/', path.read_text(encoding="utf-8")), path.name
