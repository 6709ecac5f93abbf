"""Where the time of a training step goes: torch.profiler's time by category, as the paper's Table 11.

The category follows from the name of a kernel; on a CPU, which has none, from that of an operator. Dequantising is a category
of its own, because on GPUs without FP4 tensor cores it serves mostly the emulated product.

>>> result = breakdown(step, device)                   # step: a function that does one training step
>>> result["times_ms"], result["launches"]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

CATEGORIES = ("BF16 GEMMs", "NVFP4 GEMMs", "dequantise", "quantise/fused", "attention", "elementwise/other")
LAUNCHES = re.compile(r"cu(da)?LaunchKernel|cu(da)?LaunchCooperative|cuda(Memcpy|Memset)Async|cudaGraphLaunch")
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|gemv|triton_tem|dot_kernel|aten::(add|b|badd)?m[mv]$")
_FP4 = re.compile(r"e2m1|nvf4|fp4|block_?scaled|bstensorop")
_FUSED = re.compile(r"quantize|_rms_?norm_(forward|backward)_kernel|_swiglu|_triton_rope|liger|_element_mul_kernel")


def category(kernel: str, package_kernels: frozenset[str]) -> str:
    """Category of a name; ``package_kernels``: names of this package's Triton kernels."""
    name = kernel.lower()
    if re.match(r"triton_(poi|red|per|for)_", name):  # Inductor: named after the operators around, attention for example
        return "elementwise/other"
    if re.search(r"flash|fmha|attention|sdpa", name):
        return "attention"
    if _GEMM.search(name):
        return "NVFP4 GEMMs" if kernel in package_kernels or _FP4.search(name) else "BF16 GEMMs"
    if "dequant" in name:
        return "dequantise"
    return "quantise/fused" if kernel in package_kernels or _FUSED.search(name) else "elementwise/other"


def triton_kernels() -> frozenset[str]:
    """Names of the Triton kernels defined in the modules of peft_nvfp4 that are loaded."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("peft_nvfp4.")]
    kernels = [v for m in modules for v in vars(m).values() if type(v).__name__ in ("JITFunction", "Autotuner", "Heuristics")]
    names = set()
    for kernel in kernels:
        while hasattr(kernel, "fn"):
            kernel = kernel.fn
        names.add(kernel.__name__)
    return frozenset(names)


def breakdown(
    step: Callable[[], object], device: torch.device, steps: int = 2, trace: str | Path | None = None
) -> dict[str, Any]:
    """Per step: milliseconds by category, their sum, the 25 dearest kernels, host milliseconds inside the profiler, launches.

    Args:
        trace: file for a Chrome trace (chrome://tracing, ui.perfetto.dev), with the allocator's totals over time.
    """
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    step()
    wait()
    with torch.profiler.profile(activities=activities, profile_memory=trace is not None) as recorded:
        for _ in range(steps):
            step()
        wait()
    if trace is not None:
        Path(trace).parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(trace))
    averages = [e for e in recorded.key_averages() if not e.key.startswith(("Optimizer.", "## Call", "ProfilerStep"))]
    host = [e for e in averages if e.device_type == DeviceType.CPU and not e.key.endswith("Synchronize")]
    device_events = [e for e in averages if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    package_kernels, events = triton_kernels(), device_events if cuda else host
    kernels = [
        {
            "name": e.key[:120],
            "category": category(e.key, package_kernels),
            "ms": (e.self_device_time_total if cuda else e.self_cpu_time_total) / steps / 1e3,
            "count": e.count / steps,
        }
        for e in events
    ]
    times = {name: sum(k["ms"] for k in kernels if k["category"] == name) for name in CATEGORIES}
    return {
        "times_ms": times,
        "total_ms": sum(times.values()),
        "kernels": sorted(kernels, key=lambda kernel: -kernel["ms"])[:25],
        "profiled_host_ms": sum(e.self_cpu_time_total for e in host) / steps / 1e3,
        "launches": sum(e.count for e in host if LAUNCHES.match(e.key)) / steps if cuda else None,
    }
