"""What a result was measured on: stamped into every file of ``benchmarks/results/``."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def environment() -> dict[str, str]:
    """GPU, driver, processor, package versions and commit, as strings."""
    stamp = {"python": platform.python_version(), "machine": platform.machine(), "processor": processor(), "commit": commit()}
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


def processor() -> str:
    """Name of the CPU, from the kernel where it says so."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


@cache
def commit() -> str:
    """The commit of the source, from git or (where the tree travels without it) from $PEFT_NVFP4_COMMIT."""
    if "PEFT_NVFP4_COMMIT" in os.environ:
        return os.environ["PEFT_NVFP4_COMMIT"]
    try:
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
