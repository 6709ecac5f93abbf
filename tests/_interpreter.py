"""Runs a test file as a program in Triton's CPU interpreter, in a process of its own: ``TRITON_INTERPRET`` must be set before
Triton is imported, and must not be for the other tests. The file's ``__main__`` installs :mod:`triton_interpreter`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"


def run_interpreted(file: str) -> subprocess.CompletedProcess:
    """The finished process; skips the test that asks where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("not run: Triton is not installed")
    path = os.pathsep.join(entry for entry in [str(SOURCE), *sys.path] if entry)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
