"""Runs other people's tests against this package and writes what came out: ``benchmarks/results/peer_suites.json`` and ``.md``.

    python tests/peer/run.py            # both parts
    python tests/peer/run.py stock      # PEFT's LoRA tests, without and with peft_nvfp4 imported: must not differ
    python tests/peer/run.py helpers    # PEFT's common helpers on our bases
    python tests/peer/run.py stock --files mixed    # these files again; the others stay as they are in the table

PEFT's sources come from its source distribution (``make peer-tests`` installs what else they need). The exit code is 1 where
importing the package changes an outcome, or a helper fails for no reason known to ``peer_tables.py``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import peer_tables  # noqa: E402
from sources import DEFAULT_CACHE, make_hub, unpack  # noqa: E402

FILES = """
custom_models decoder_models initialization lora_variants tuners_utils mixed low_level_api trainable_tokens config
mapping other target_parameters lora_conversion integrations velora lorafa loraplus lora_ga lora_intruders bdlora
arrow helpers seq_classifier token_classification_qa encoder_decoder_models feature_extraction_models
""".split()
"""PEFT's test files about LoRA, without their "test_"."""
VERSIONS = ("peft", "torch", "transformers", "bitsandbytes")
RESULTS = HERE.parents[1] / "benchmarks" / "results"


def pytest_run(sources: Path, test: Path | str, out: Path, hub: Path, imported: bool) -> list[dict]:
    """Outcomes of one file: dictionaries with test, outcome and reason."""
    paths = [str(HERE), str(HERE.parents[1] / "src"), str(sources), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "PEER_OUT": str(out),
        "PEER_IMPORT": str(int(imported)),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(hub),
        "OMP_NUM_THREADS": "1",
    }
    plain = ["-p", "no:cacheprovider", "-q", "--tb=short", "-W", "ignore"]
    options = ["-c", os.devnull, "--rootdir", str(sources), "-p", "plugin", *plain]
    command = [sys.executable, "-m", "pytest", *options, str(test)]
    out.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
    if not out.exists():
        raise SystemExit(f"{' '.join(command)} ended without a result:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return list({entry["test"]: entry for entry in map(json.loads, out.read_text().splitlines())}.values())


def run_stock(sources: Path, hub: Path, scratch: Path, files: list[str]) -> dict:
    found = {}
    for name in files:
        runs = {}
        for label, imported in (("plain", False), ("imported", True)):
            start = time.perf_counter()
            runs[label] = pytest_run(sources, f"tests/test_{name}.py", scratch / f"{name}-{label}.jsonl", hub, imported)
            print(f"{name} ({label}): {peer_tables.counts(runs[label])}, {time.perf_counter() - start:.0f} s", flush=True)
        found[f"test_{name}"] = peer_tables.compare(runs["plain"], runs["imported"])
    return found


def run_helpers(sources: Path, hub: Path, scratch: Path) -> list[dict]:
    start = time.perf_counter()
    outcomes = pytest_run(sources, HERE / "helpers.py", scratch / "helpers.jsonl", hub, True)
    print(f"helpers: {peer_tables.counts(outcomes)}, {time.perf_counter() - start:.0f} s", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["stock", "helpers"], help="default: both")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help=f"folder for PEFT's sources ({DEFAULT_CACHE})")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--files", nargs="*", default=FILES, choices=FILES, metavar="FILE", help="files of the stock part")
    arguments = parser.parse_args()
    cache = arguments.cache.resolve()
    sources, hub, scratch = unpack(cache), make_hub(cache), cache / "outcomes"
    scratch.mkdir(exist_ok=True)
    path = arguments.results / "peer_suites.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    content["versions"] = {name: version(name) for name in VERSIONS if find_spec(name)}
    if arguments.part != "helpers":
        old = content.get("stock", {}) if set(arguments.files) != set(FILES) else {}
        content["stock"] = {**old, **run_stock(sources, hub, scratch, arguments.files)}
    if arguments.part != "stock":
        content["helpers"] = peer_tables.summarise(run_helpers(sources, hub, scratch))
    path.write_text(json.dumps(content, indent=1) + "\n")
    text = peer_tables.markdown(content)
    path.with_suffix(".md").write_text(text)
    print(text)
    return peer_tables.verdict(content)


if __name__ == "__main__":
    sys.exit(main())
