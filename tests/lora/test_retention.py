"""benchmarks/retention.py runs, on the real model cut short, and says what it measured."""

import json

import pytest
import smollm2_reviews as data


@pytest.mark.slow
def test_tables(tmp_path):
    """One layer, two steps: numbers mean nothing, but a merge-aware model is unchanged by its merge, and stock PEFT's base gives
    what the BF16 one gives."""
    import retention

    try:
        data.movie_reviews(0, 8)
        data.load_smollm2(layers=1)
    except FileNotFoundError as error:
        pytest.skip(f"not run: {error}")
    out = tmp_path / "retention_cpu.json"
    arguments = "--layers 1 --steps 2 --rows 8 --dtype fp32 --rank 4 --bases nvfp4 bf16 stock".split()
    retention.main([*arguments, "--device", "cpu", "--out", str(tmp_path)])
    (run,) = json.loads(out.read_text())["runs"]
    table = run["retention"]
    assert {"base, NVFP4", "base, dense", "plain: merged into bf16", "plain: merged into nvfp4"} <= table.keys()
    trained, merged = table["merge_aware: as trained"], table["merge_aware: merged into nvfp4"]
    assert (trained["accuracy"], trained["nll"]) == (merged["accuracy"], merged["nll"]) and merged["probe"]["error"] == 0
    assert 0 <= table["plain: merged into nvfp4"]["total"]["retained"] < 1
    bases = run["transfer"]["nvfp4"]
    assert all(bases[kind]["binds"] for kind in bases) and not bases["nvfp4"]["warnings"] and bases["bf16"]["warnings"]
    assert bases["stock"]["nll"] == pytest.approx(bases["bf16"]["nll"], rel=1e-5)
