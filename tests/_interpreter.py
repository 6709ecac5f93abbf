"""Runs a test file as a program in Triton's CPU interpreter, in a process of its own: ``TRITON_INTERPRET`` must be set before
Triton is imported, and must not be for the other tests. The file's ``__main__`` installs :mod:`triton_interpreter`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"


def interpreted_results(file: str) -> object:
    """What the file prints, as JSON; skips the test that asks where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("not run: Triton is not installed")
    path = os.pathsep.join(entry for entry in [str(SOURCE), *sys.path] if entry)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)
