"""Runs other people's tests against this package and writes what came out: ``benchmarks/results/peer_suites.json`` and ``.md``.

    python tests/peer/run.py            # both parts
    python tests/peer/run.py stock      # PEFT's LoRA tests, without and with peft_nvfp4 imported: must not differ
    python tests/peer/run.py helpers    # on our bases: PEFT's common helpers, quantizers.py (transformers), sft.py (TRL)
    python tests/peer/run.py stock --files test_mixed    # these files again; the others stay as they are in the table

PEFT's sources come from its source distribution (``make peer-tests`` installs what else they need). The exit code is 1 where
importing the package changes an outcome, or a helper fails for no reason known to ``reasons.py``.
"""

from __future__ import annotations

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

FILES = (
    "test_custom_models",
    "test_decoder_models",
    "test_initialization",
    "test_lora_variants",
    "test_tuners_utils",
    "test_mixed",
    "test_low_level_api",
    "test_trainable_tokens",
    "test_config",
    "test_mapping",
    "test_other",
    "test_target_parameters",
    "test_lora_conversion",
    "test_integrations",
    "test_velora",
    "test_lorafa",
    "test_loraplus",
    "test_lora_ga",
    "test_lora_intruders",
    "test_bdlora",
    "test_arrow",
    "test_helpers",
    "test_seq_classifier",
    "test_token_classification_qa",
    "test_encoder_decoder_models",
    "test_feature_extraction_models",
)
VERSIONS = ("peft", "torch", "transformers", "bitsandbytes", "trl")
HELPERS = ("helpers.py", "quantizers.py", "sft.py")
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
    options = [
        "-c",
        os.devnull,
        "--rootdir",
        str(sources),
        "-p",
        "plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
        "-W",
        "ignore",
    ]
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
            runs[label] = pytest_run(sources, f"tests/{name}.py", scratch / f"{name}-{label}.jsonl", hub, imported)
            print(f"{name} ({label}): {peer_tables.counts(runs[label])}, {time.perf_counter() - start:.0f} s", flush=True)
        found[name] = peer_tables.compare(runs["plain"], runs["imported"])
    return found


def run_helpers(sources: Path, hub: Path, scratch: Path) -> list[dict]:
    found = []
    for name in HELPERS:
        start = time.perf_counter()
        outcomes = pytest_run(sources, HERE / name, scratch / f"{Path(name).stem}.jsonl", hub, True)
        print(f"{name}: {peer_tables.counts(outcomes)}, {time.perf_counter() - start:.0f} s", flush=True)
        found += outcomes
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="stock, helpers (default: both)")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help=f"folder for PEFT's sources ({DEFAULT_CACHE})")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--files", nargs="*", default=list(FILES), help="files of the stock part")
    arguments = parser.parse_args()
    parts = arguments.parts or ["stock", "helpers"]
    if unknown := set(parts) - {"stock", "helpers"}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are stock and helpers")
    cache = arguments.cache.resolve()
    sources, hub, scratch = unpack(cache), make_hub(cache), cache / "outcomes"
    scratch.mkdir(exist_ok=True)
    path = arguments.results / "peer_suites.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    content["versions"] = {name: version(name) for name in VERSIONS if find_spec(name)}
    if "stock" in parts:
        old = content.get("stock", {}) if set(arguments.files) != set(FILES) else {}
        content["stock"] = {**old, **run_stock(sources, hub, scratch, arguments.files)}
    if "helpers" in parts:
        content["helpers"] = peer_tables.summarise(run_helpers(sources, hub, scratch))
    path.write_text(json.dumps(content, indent=1) + "\n")
    text = peer_tables.markdown(content)
    path.with_suffix(".md").write_text(text)
    print(text)
    return peer_tables.verdict(content)


if __name__ == "__main__":
    sys.exit(main())
