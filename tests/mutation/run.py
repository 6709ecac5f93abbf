"""Mutation testing: does a test fail when the arithmetic of a module is wrong?

    python tests/mutation/run.py                                    # every module of TESTS, 80 mutants each
    python tests/mutation/run.py src/peft_nvfp4/ops/matrix.py --count 20 --seed 1

Works on a copy of the tree in a temporary folder. First every test of a module's list runs once and is watched: which lines
of the module it runs, for how long. Then, for each mutant of a seeded sample (see mutants.py), the tests that run the changed
lines are run, the fastest first, until one fails (*killed*) or a budget of seconds is spent; a mutant that takes far longer than
its tests did is killed as well. One process at a time: each is a fork of one that has imported PyTorch, transformers and PEFT,
which would take most of a mutant's time. Linux only.

Writes ``results.json``; a module's rows replace its earlier ones. What is known about survivors: survivors.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
PACKAGE = "src/peft_nvfp4"

TESTS = {
    "numerics/reference.py": (
        "reference reference_layout reference_rounding properties ops_matmul linear products foreign_scales mutants".split()
    ),
    "ops/core.py": ["ops", "ops_matmul"],
    "ops/matrix.py": ["ops", "ops_matmul", "properties", "reference", "mutants"],
    "lora/layer.py": ["lora", "lora_adapters", "lora_merging", "inits", "merge", "merge_aware", "residual_inits"],
    "lora/merge.py": ["merge", "report", "merge_aware", "experts_adapters", "mutants"],
    "calibration/gptq.py": ["gptq", "mutants"],
    "checkpoints/layouts.py": ["layouts", "layouts_hostile", "mutants"],
    "checkpoints/load.py": ["checkpoints_load", "layouts", "layouts_hostile", "streaming_load", "mutants"],
}
"""Module -> names of the test files that are about it."""

MEMORY = 12 << 30  # of one process: a constant in the wrong place may ask for all there is


def forked(work: Callable[[], object], limit: float) -> object:
    """Result of ``work()`` in a fork that says nothing; None where it died or took longer than ``limit`` seconds."""

    def run() -> None:
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        writer.send(work())

    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    writer.close()
    try:
        result = reader.recv() if reader.poll(limit) else None
    except EOFError:
        result = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with whatever it started
    process.join()
    return result


def pytest_with(plugin: object, files: list[str]) -> None:
    import hypothesis
    import pytest

    # no shrinking: that it fails is enough
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")
    stop = ["-x"] if isinstance(plugin, Selection) else []
    pytest.main([*stop, "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not gpu and not slow", *files], plugins=[plugin])


def watch(module: Path, files: list[str]) -> dict:
    recorder = Recorder(str(module))
    pytest_with(recorder, files)
    lines = {test: sorted(numbers) for test, numbers in recorder.lines.items()}
    return {"lines": lines, "seconds": recorder.seconds, "failed": sorted(recorder.failed)}


def chosen(mutant: Mutant, watched: dict, budget: float) -> list[str]:
    """Tests that run the mutant's lines, the fastest first; for what runs on import, any."""
    lines, seconds = watched["lines"], watched["seconds"]
    sound = [test for test in seconds if test not in watched["failed"]]
    tests = [test for test in sound if not set(mutant.lines).isdisjoint(lines.get(test, ()))] or sound
    kept, spent = [], 0.0
    for test in sorted(tests, key=seconds.get):
        spent += seconds[test]
        if kept and spent > budget:
            break
        kept.append(test)
    return kept


def described(mutant: Mutant) -> dict:
    row = {"line": mutant.lines.start, "column": mutant.column, "kind": mutant.kind}
    return {**row, "old": mutant.old[:200], "new": mutant.new[:200]}


def identity(row: dict) -> tuple:
    return row["line"], row.get("column"), row["old"], row["new"]


def judge(mutant: Mutant, module: Path, watched: dict, budget: float) -> dict:
    tests = chosen(mutant, watched, budget)
    files, selection = sorted({test.split("::")[0] for test in tests}), Selection(tests)

    def run() -> str:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for what the tests start
        pytest_with(selection, files)
        return selection.failed

    module.write_text(mutant.source)
    start = time.monotonic()
    failed = forked(run, 30 + 5 * budget)
    by = "died or took too long" if failed is None else failed
    return {**described(mutant), "killed": bool(by), "by": by, "tests": len(tests), "seconds": round(time.monotonic() - start, 1)}


def run_module(name: str, tree: Path, arguments: argparse.Namespace, earlier: list[dict]) -> list[dict]:
    module = tree / PACKAGE / name
    text = module.read_text()
    files = [str(next((ROOT / "tests").glob(f"*/test_{test}.py")).relative_to(ROOT)) for test in arguments.tests or TESTS[name]]
    watched = forked(lambda: watch(module, files), 3600)
    if not watched or not watched["lines"]:
        raise SystemExit(f"the tests of {name} did not run")
    if watched["failed"]:
        print(f"{name}: fail without a change, left out: {', '.join(watched['failed'])}")
    shutil.rmtree(module.parent / "__pycache__", ignore_errors=True)  # a mutant may have the size and second of another
    everything = mutants(text)
    sample = random.Random(arguments.seed).sample(everything, min(arguments.count, len(everything)))
    before = {identity(row): row for row in earlier if row["module"] == name}
    rows = []
    for mutant in sorted(sample):
        known = before.get(identity(described(mutant)))
        if arguments.survivors and known and known["killed"]:
            rows.append({**known, "of": len(everything)})
            continue
        rows.append({"module": name, "of": len(everything), **judge(mutant, module, watched, arguments.budget)})
        if not rows[-1]["killed"]:
            print(f"{name}:{rows[-1]['line']} survives: {rows[-1]['old']}  ->  {rows[-1]['new']}", flush=True)
    module.write_text(text)
    killed = sum(row["killed"] for row in rows)
    print(
        f"{name}: {killed} of {len(rows)} killed ({killed / max(1, len(rows)):.0%}), {len(everything)} mutants in all", flush=True
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TESTS)}")
    parser.add_argument("--count", type=int, default=80, help="mutants of a module")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--budget", type=float, default=20, help="seconds of tests for a mutant")
    parser.add_argument("--tests", nargs="*", help="names of test files, in place of the module's own list")
    parser.add_argument("--survivors", action="store_true", help="leave out what was killed last time, in the same line")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    names = [name.removeprefix(f"{PACKAGE}/") for name in arguments.modules] or list(TESTS)
    if unknown := set(names) - TESTS.keys():
        parser.error(f"no tests are named for {', '.join(sorted(unknown))}; there are {', '.join(TESTS)}")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "*.so"))
        os.chdir(tree)
        sys.path[:0] = [str(tree / "src"), str(tree / "tests")]
        for name in names:
            earlier = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
            rows = run_module(name, tree, arguments, earlier)
            kept = [row for row in earlier if row["module"] != name]
            content = {"seed": arguments.seed, "budget_s": arguments.budget, "rows": kept + rows}
            arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    sys.path.insert(0, str(HERE))
    import peft  # noqa: F401  imported once, before the forks
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    from mutants import Mutant, mutants
    from selection import Recorder, Selection

    torch.set_num_threads(1)
    main()
