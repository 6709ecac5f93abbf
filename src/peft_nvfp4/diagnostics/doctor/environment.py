"""What is installed, and the set-up mistakes that people make: the first half of ``peft-nvfp4 doctor``."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from packaging.requirements import Requirement
from packaging.version import Version

from ..._version import __version__
from ...kernels import dispatch
from ...kernels.fp4 import cutlass
from ...kernels.fp4.native import Unavailable
from .results import FAILED, WARNING, Result

PACKAGES = ("torch", "transformers", "peft", "triton", "bitsandbytes", "accelerate")
VARIABLES = (
    dispatch.VARIABLE,
    "PEFT_NVFP4_EXTENSION",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF",
)
OTHER_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
LEAST_DISK = 5 * 10**9
"""Bytes: of the weights of a small model, or of a few hundred compiled kernels."""
FP4_CAPABILITY = 10
"""GPUs from this compute capability on have FP4 tensor cores. Only for advice: what runs is found out by trying."""


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _query_driver() -> list[str]:
    """``name, driver`` of every GPU as the driver reports them; empty without one."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


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
    driver = _query_driver()
    machine = {
        "peft_nvfp4": __version__,
        "python": platform.python_version(),
        "system": platform.platform() + (" (WSL)" if is_wsl() else ""),
        **{package: installed(package) or "absent" for package in PACKAGES},
        "CUDA of torch": torch.version.cuda or "none (a build for CPUs)",
        "driver": driver[0].rsplit(", ", 1)[-1] if driver else "none found",
    }
    if torch.cuda.is_available():
        machine["CUDA targets of torch"] = " ".join(torch.cuda.get_arch_list())
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            size = f"{p.multi_processor_count} SMs, {p.total_memory / 2**30:.1f} GiB"
            machine[f"GPU {i}"] = f"{p.name}, compute capability {p.major}.{p.minor}, {size}"
    else:
        machine["GPU"] = "; ".join(driver) + " (torch cannot use it)" if driver else "none"
    machine["extension"] = _extension()
    return machine | {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def advice() -> list[Result]:
    """What is wrong (training does not work, or not as well as it could) or worth noticing about this set-up."""
    return [*_versions(), *_cuda(), *_gpus(), *_compiler(), *_driver(), *_library(), *_settings(), *_disks()]


wrong = partial(Result, "set-up", "wrong", FAILED)
note = partial(Result, "set-up", "note", WARNING)


def _versions() -> Iterator[Result]:
    """Against what this package requires."""
    try:
        required = requires("peft_nvfp4") or ()
    except PackageNotFoundError:
        yield note("peft_nvfp4 runs from its sources, not installed: versions of other packages are not checked")
        return
    for requirement in map(Requirement, required):
        wanted, have = requirement.specifier, installed(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if have and not wanted.contains(have, prereleases=True):
            yield wrong(f"{requirement.name} {have} is not supported: pip install -U '{requirement.name}{wanted}'")


def _cuda() -> Iterator[Result]:
    if torch.cuda.is_available():
        return
    if not _query_driver():
        yield note("no NVIDIA driver was found: everything runs on the CPU, exactly but slowly")
    elif torch.version.cuda is None:
        yield wrong(
            f"there is an NVIDIA GPU, but this torch is a build for CPUs. Install one for CUDA, such as: {OTHER_TORCH}",
        )
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.is_available()
        why = f" ({' '.join(str(caught[0].message).split())[:300]})" if caught else ""
        yield wrong(
            f"there is an NVIDIA GPU, but torch, built for CUDA {torch.version.cuda}, cannot use it{why}: usually the driver "
            "is too old for this CUDA, or CUDA_VISIBLE_DEVICES hides the GPU",
        )


def _gpus() -> Iterator[Result]:
    if not torch.cuda.is_available():
        return
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if len(capabilities) > 1:
        yield note("the GPUs differ; only the first one is checked here (CUDA_VISIBLE_DEVICES selects another)")
    major, minor = torch.cuda.get_device_capability()
    targets = torch.cuda.get_arch_list()
    if targets and not any(_runs_on(target, major, minor) for target in targets):
        yield wrong(
            f"this torch has no code for compute capability {major}.{minor} (it has {' '.join(targets)}), which shows as 'no "
            f"kernel image is available': install a build for a newer CUDA (RTX 50xx: 12.8 or later), such as: {OTHER_TORCH}",
        )
    if major >= FP4_CAPABILITY and torch.version.cuda and Version(torch.version.cuda).release < (12, 8):
        yield wrong(f"FP4 tensor cores need CUDA 12.8 or later; this torch is built for CUDA {torch.version.cuda}. {OTHER_TORCH}")
    if importlib.util.find_spec("triton") is None:
        package = "triton-windows" if os.name == "nt" else "triton"
        yield wrong(f"without Triton the quantising kernels are plain PyTorch, which is slow: pip install {package}")
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    if free < total / 4:
        yield note(f"only {free:.1f} of {total:.1f} GiB of GPU memory are free: another process holds the rest")
    if torch.version.hip:
        yield wrong("this torch is built for ROCm; the kernels are for NVIDIA GPUs")


def _compiler() -> Iterator[Result]:
    """Triton compiles a launcher for each kernel when it is first called (on Windows it brings a compiler of its own)."""
    if not torch.cuda.is_available() or os.name == "nt" or importlib.util.find_spec("triton") is None:
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        found = "no C compiler was found" if compiler is None else f"CC={compiler} does not exist"
        yield wrong(f"{found}, and Triton's kernels need one: apt-get install gcc libc6-dev (or conda install gcc), or set CC")
    if not (header := _python_header()).is_file():
        yield wrong(
            f"{header} does not exist, and Triton's kernels need it: apt-get install python3-dev, or take a Python that "
            "brings its headers (uv's, conda's)"
        )


def _python_header() -> Path:
    return Path(sysconfig.get_path("include"), "Python.h")


OLDEST_DRIVER = {12: 525, 13: 580}
"""CUDA's major version -> the first driver that serves programs of it."""


def _driver() -> Iterator[Result]:
    """The extension holds a CUDA runtime of its own, which may want a newer driver than torch does."""
    try:
        nvcc = cutlass.load().info["nvcc"]
    except Unavailable:
        return
    oldest = OLDEST_DRIVER.get(int(nvcc.split(".")[0]), 0)
    for name, driver in (line.rsplit(", ", 1) for line in _query_driver()[:1]):
        if int(driver.split(".")[0]) < oldest:
            yield wrong(
                f"the extension was built with CUDA {nvcc}, which needs a driver from {oldest} on; {name} has {driver}: update "
                f"the "
                "driver, or build the extension with nvcc 12.9 (make build-ext)"
            )


def _runs_on(target: str, major: int, minor: int) -> bool:
    """Whether code for a target ("sm_90a", "compute_120") runs on a GPU: of the same generation and not newer, or PTX."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", target)
    if match is None:
        return False
    kind, generation, step, only = match.groups()
    built = int(generation), int(step)
    if only == "a":
        return built == (major, minor)
    return built <= (major, minor) and (built[0] == major or kind == "compute" and not only)


def _library() -> Iterator[Result]:
    """An RTX 50xx without the FP4 library: what is missing for it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 12:
        return
    try:
        cutlass.load()
    except Unavailable as reason:
        build = "pip install --no-deps nvidia-cutlass==4.2.0.0, then in a checkout PEFT_NVFP4_BUILD=1 pip install ."
        toolkit = "CUDA's toolkit, 12.8 or later, or pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl"
        nvcc = _nvcc()
        steps = f"nvcc is here ({nvcc})" if nvcc else f"It is compiled by nvcc, which was not found ({toolkit})"
        yield note(
            f"the FP4 extension for this GPU is not there ({reason}). {steps}: {build} Until then torch's FP4 products or the "
            "emulation run"
        )


def _nvcc() -> str | None:
    """Where csrc/build.py finds it, but for Python packages."""
    places = [Path(os.environ[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return next((str(path) for path in places if path.is_file()), None) or shutil.which("nvcc")


def _disks() -> Iterator[Result]:
    """Where models and compiled kernels are kept."""
    triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    for variable, folder in (("HF_HOME", Path(HF_HUB_CACHE)), ("TRITON_CACHE_DIR", Path(triton))):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(place).free
        if free < LEAST_DISK:
            yield note(
                f"{free / 1e9:.1f} GB are left on the disk of {folder}, where a model or a compiled kernel may not fit: make "
                f"room, or name a folder of another disk in {variable}"
            )


def _settings() -> Iterator[Result]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield wrong("TRITON_INTERPRET=1: Triton kernels run in an interpreter, thousands of times slower. Unset it")
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield note("CUDA_LAUNCH_BLOCKING=1 makes every kernel wait for the one before: for debugging only")
    forced = os.environ.get(dispatch.VARIABLE, "").strip().lower()
    if forced and forced != "auto":
        yield note(f"{dispatch.VARIABLE}={forced} forces what runs; unset it for the best that works")
    if not installed("bitsandbytes"):
        yield note("bitsandbytes is absent: backend='nf4', 8-bit and paged optimizers need it. pip install 'bitsandbytes>=0.50'")
    elif is_wsl() or os.name == "nt":
        yield note("paged optimizers (optim='paged_adamw_8bit') are known to fail on Windows and WSL: take 'adamw_8bit'")
