"""The benchmark of long contexts runs, and estimates what it runs."""

import json

import pytest

from peft_nvfp4.memory import Settings, estimate
from peft_nvfp4.training import resting_weights


@pytest.mark.parametrize("short", [False, True], ids=["room", "short of memory"])
def test_the_estimate_is_of_the_very_step(short, tmp_path, monkeypatch):
    """Of all layers, whatever number computes; without embedding and head where they have left."""
    import bench_context
    from llama_cases import llama_config

    monkeypatch.setattr(resting_weights, "free_bytes", lambda device: 0 if short else None)
    monkeypatch.setattr(bench_context, "SHORT", 16)
    cases = ["tiny:small:1:64,48", "tiny:small:1:64:2", "tiny:smallest:1:64"]
    monkeypatch.setattr("sys.argv", ["bench_context.py", *cases, "--device", "cpu", "--out", str(tmp_path)])
    bench_context.main()
    rows = json.loads((tmp_path / "context_cpu.json").read_text())["rows"]
    assert [(row["length"], row["layers"], row["on_host"]) for row in rows] == [
        (64, 3, False),
        (48, 3, False),
        (64, 2, True),
        (64, 3, False),
    ]
    assert all(row["fits"] and row["loss"] > 0 and "error" not in row for row in rows)
    cut, offloaded = rows[2:]
    settings = Settings(rank=bench_context.RANK, sequence=64, memory="small", checkpointing=True, host_checkpoints=True)
    found = estimate(llama_config("tiny"), settings)
    embedding = found.static["embedding and head"]
    assert cut["rested"] == [short, short] and cut["left_out_bytes"] > 0 and cut["checkpoint_bytes"] == found.checkpoints
    totals = {name: sum((found.static | parts).values()) for name, parts in found.moments.items()}
    assert cut["estimate"] == max(n + embedding * (not short and name in AWAY) for name, n in totals.items())
    assert offloaded["offloaded_bytes"] > 0 and offloaded["moved_bytes"] > 0


AWAY = ("forward", "recomputation", "MLP", "attention")
"""Moments at which the estimator takes a tied embedding to be on the host."""
