"""The benchmark of whole mixtures, on tiny ones: every kind of case gives a row, and one that fails costs no other."""

import json

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")


def rows_of(cases, tmp_path, monkeypatch, *options: str) -> list[dict]:
    import bench_mixture

    monkeypatch.setattr(bench_mixture, "WARM_UP", 1)
    words = [*cases, "--device", "cpu", "--tokens", "8", "--steps", "1", "--out", str(tmp_path), *options]
    monkeypatch.setattr("sys.argv", ["bench_mixture.py", *words])
    bench_mixture.main()
    return json.loads((tmp_path / "mixture_cpu.json").read_text())["rows"]


def test_a_row_for_every_case(tmp_path, monkeypatch):
    cases = ["tiny:small:24", "tiny:dense", "tiny:smallest:16", "tiny-gpt-oss:small:16:eager"]
    rows = rows_of(cases, tmp_path, monkeypatch)
    assert {row["text"] for row in rows} == set(cases)
    by_case = {row["text"]: row for row in rows}
    assert all(row["fits"] and row["seconds"] > 0 and len(row["loss"]) == 2 for row in rows)
    frozen, dense, host, gpt_oss = map(by_case.get, cases)
    # 3 layers of 8 experts, three matrices 64 x 32, and attention's four (q and o 64 x 64, k and v 64 x 32)
    weights = 3 * (8 * 3 * 64 * 32 + 2 * 64 * 64 + 2 * 64 * 32)
    assert frozen["frozen_bytes"] == host["frozen_bytes"] == pytest.approx(weights * 4.5 / 8, rel=0.01)
    assert dense["frozen_bytes"] == 0
    assert frozen["trained"] == dense["trained"] and "3 layers" in host["offload"]
    assert "not enabled" in str(gpt_oss["recordings"]) and "cpu" in str(frozen["recordings"])
    assert frozen["estimate"] > host["estimate"]


def test_a_case_that_fails_costs_no_other(tmp_path, monkeypatch):
    rows = rows_of(["tiny:tiniest:1", "tiny:dense"], tmp_path, monkeypatch)
    assert "memory must be one of" in rows[0]["error"] and rows[1]["fits"]


def test_words_of_a_case():
    from bench_mixture import Case

    assert Case.parse("tiny:small:24:adamw_8bit:bf16") == Case.parse("tiny:small:bf16:adamw_8bit:24")._replace(
        text="tiny:small:24:adamw_8bit:bf16"
    )
    with pytest.raises(ValueError, match="could not convert string to float: 'adam'"):
        Case.parse("tiny:small:adam")
