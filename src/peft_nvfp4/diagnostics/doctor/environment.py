"""What is installed, and the set-up mistakes that people make: the first half of ``peft-nvfp4 doctor``."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.version import Version

from ..._version import __version__
from ...kernels import dispatch
from ...kernels.fp4 import cutlass
from ...kernels.fp4.native import Unavailable

PACKAGES = {"torch": "2.10", "transformers": "5.12", "peft": "0.20", "triton": "", "bitsandbytes": "0.50", "accelerate": ""}
"""Reported packages, and the oldest version that is supported."""
NEWEST = {"peft": "0.23"}
"""The first version that is not."""
VARIABLES = (
    dispatch.VARIABLE,
    "PEFT_NVFP4_EXTENSION",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF",
)
FP4_CAPABILITY = 10
"""GPUs from this compute capability on have FP4 tensor cores. Only for advice: what runs is found out by trying."""


@dataclass(frozen=True)
class Advice:
    """Something about the set-up. ``wrong``: training does not work, or not as well as it could."""

    wrong: bool
    text: str


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _release(text: str) -> tuple[int, ...]:
    """Numbers of a version: "2.11.0+cu130" -> (2, 11, 0)."""
    return Version(text).release


def _query_driver() -> list[str]:
    """``name, driver`` of every GPU as the driver reports them; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in run.stdout.splitlines() if line.strip()] if run.returncode == 0 else []


def _extension() -> str:
    """One line about the compiled extension."""
    try:
        library = cutlass.load()
    except Unavailable as reason:
        return str(reason)
    return f"{library.path}: " + ", ".join(f"{key} {value}" for key, value in library.info.items())


def is_wsl() -> bool:
    return "microsoft" in platform.release().lower()


def describe() -> dict[str, str]:
    """Name -> value of what matters about this machine."""
    found = {
        "peft_nvfp4": __version__,
        "python": platform.python_version(),
        "system": platform.platform() + (" (WSL)" if is_wsl() else ""),
        **{package: installed(package) or "absent" for package in PACKAGES},
        "CUDA of torch": torch.version.cuda or "none (a build for CPUs)",
    }
    driver = _query_driver()
    found["driver"] = driver[0].rsplit(", ", 1)[-1] if driver else "none found"
    if torch.cuda.is_available():
        found["CUDA targets of torch"] = " ".join(torch.cuda.get_arch_list())
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            size = f"{p.multi_processor_count} SMs, {p.total_memory / 2**30:.1f} GiB"
            found[f"GPU {i}"] = f"{p.name}, compute capability {p.major}.{p.minor}, {size}"
    elif driver:
        found["GPU"] = "; ".join(driver) + " (torch cannot use it)"
    else:
        found["GPU"] = "none"
    found["extension"] = _extension()
    found |= {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    return found


# ---------------------------------------------------------------------------------------------- advice


def advice() -> list[Advice]:
    """What is wrong, or could be better, about this set-up."""
    return [*_versions(), *_cuda(), *_gpus(), *_variables(), *_bitsandbytes()]


def _versions() -> Iterator[Advice]:
    for package, oldest in PACKAGES.items():
        have, newest = installed(package), NEWEST.get(package)
        if have and oldest and _release(have) < _release(oldest):
            yield Advice(True, f"{package} {have} is too old: pip install -U '{package}>={oldest}'")
        if have and newest and _release(have) >= _release(newest):
            yield Advice(True, f"{package} {have} is newer than what this version knows: pip install '{package}<{newest}'")


def _cuda() -> Iterator[Advice]:
    if torch.cuda.is_available():
        return
    if not _query_driver():
        yield Advice(False, "no NVIDIA driver was found: everything runs on the CPU, exactly but slowly")
    elif torch.version.cuda is None:
        build = "this torch is a build for CPUs: install one for CUDA (see https://pytorch.org/get-started)"
        yield Advice(True, f"there is an NVIDIA GPU, but {build}")
    else:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.is_available()
        why = f" ({' '.join(str(said[0].message).split())[:300]})" if said else ""
        yield Advice(
            True,
            f"there is an NVIDIA GPU, but torch, built for CUDA {torch.version.cuda}, cannot use it{why}: usually the driver "
            "is too old for this CUDA, or CUDA_VISIBLE_DEVICES hides the GPU",
        )


def _gpus() -> Iterator[Advice]:
    if not torch.cuda.is_available():
        return
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if len(capabilities) > 1:
        yield Advice(False, "the GPUs differ; only the first one is checked here (CUDA_VISIBLE_DEVICES selects another)")
    major, minor = torch.cuda.get_device_capability()
    targets = torch.cuda.get_arch_list()
    if targets and not any(_runs_on(target, major, minor) for target in targets):
        yield Advice(
            True,
            f"this torch has no code for compute capability {major}.{minor} (it has {' '.join(targets)}), which shows as 'no "
            "kernel image is available': install a build for a newer CUDA (RTX 50xx: CUDA 12.8 or later)",
        )
    if major >= FP4_CAPABILITY and torch.version.cuda and _release(torch.version.cuda) < (12, 8):
        yield Advice(True, f"FP4 tensor cores need CUDA 12.8 or later; this torch is built for CUDA {torch.version.cuda}")
    if importlib.util.find_spec("triton") is None:
        package = "triton-windows" if os.name == "nt" else "triton"
        yield Advice(True, f"without Triton the quantising kernels are plain PyTorch, which is slow: pip install {package}")
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    if free < total / 4:
        yield Advice(False, f"only {free:.1f} of {total:.1f} GiB of GPU memory are free: another process holds the rest")
    if torch.version.hip:
        yield Advice(True, "this torch is built for ROCm; the kernels are for NVIDIA GPUs")


def _runs_on(target: str, major: int, minor: int) -> bool:
    """Whether code for a target ("sm_90a", "compute_120") runs on a GPU: of the same generation and not newer, or PTX."""
    kind, _, number = target.partition("_")
    digits = "".join(c for c in number if c.isdigit())
    if not digits:
        return False
    its_major, its_minor = int(digits[:-1]), int(digits[-1])
    if number[-1] == "a":
        return (its_major, its_minor) == (major, minor)
    if kind == "compute" and number[-1] != "f":
        return (its_major, its_minor) <= (major, minor)
    return its_major == major and its_minor <= minor


def _variables() -> Iterator[Advice]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield Advice(True, "TRITON_INTERPRET=1: Triton kernels run in an interpreter, thousands of times slower. Unset it")
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Advice(False, "CUDA_LAUNCH_BLOCKING=1 makes every kernel wait for the one before: for debugging only")
    forced = os.environ.get(dispatch.VARIABLE, "").strip().lower()
    if forced and forced != "auto":
        yield Advice(False, f"{dispatch.VARIABLE}={forced} forces what runs; unset it for the best that works")


def _bitsandbytes() -> Iterator[Advice]:
    if not installed("bitsandbytes"):
        need = "backend='nf4' and 8-bit or paged optimizers need it (pip install 'peft_nvfp4[nf4]')"
        yield Advice(False, f"bitsandbytes is absent: {need}")
    elif is_wsl() or os.name == "nt":
        yield Advice(False, "paged optimizers (optim='paged_adamw_8bit') are known to fail on Windows and WSL: take 'adamw_8bit'")
