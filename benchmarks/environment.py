"""What a result was measured on: stamped into every file of ``benchmarks/results/``."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch


def environment() -> dict[str, str]:
    """GPU, driver, processor, package versions and commit, as strings."""
    stamp = {"python": platform.python_version(), "machine": platform.machine(), "commit": commit()}
    for package in ("torch", "triton", "transformers", "peft", "bitsandbytes", "liger_kernel"):
        try:
            stamp[package] = version(package)
        except PackageNotFoundError:
            stamp[package] = "absent"
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"]
        first = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
        stamp["gpu"], stamp["driver"], stamp["max_sm_clock"] = first
        stamp["cuda"] = str(torch.version.cuda)
    return stamp


@cache
def commit() -> str:
    """The commit of the source, from git or (where the tree travels without it) from $PEFT_NVFP4_COMMIT."""
    if "PEFT_NVFP4_COMMIT" in os.environ:
        return os.environ["PEFT_NVFP4_COMMIT"]
    try:
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
