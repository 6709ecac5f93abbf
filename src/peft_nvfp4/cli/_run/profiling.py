"""Where the time of a training step goes: torch.profiler's time by category, as the paper's Table 11.

On a GPU a kernel's category follows from its name; dequantising is a category of its own, because on GPUs without FP4 tensor
cores it serves mostly the emulated product. On a CPU there are no kernels: there the categories are those of PyTorch's operators.

>>> result = breakdown(step, device)                   # step: a function that does one training step
>>> result["times_ms"], result["launches"]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

CATEGORIES = ("BF16 GEMMs", "NVFP4 GEMMs", "dequantise", "quantise/fused", "attention", "elementwise/other")
LAUNCHES = re.compile(r"cu(da)?LaunchKernel|cu(da)?LaunchCooperative|cuda(Memcpy|Memset)Async|cudaGraphLaunch")
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|gemv|triton_tem|dot_kernel")
_FP4 = re.compile(r"e2m1|nvf4|fp4|block_?scaled|bstensorop")
_FUSED = re.compile(r"quantize|_rms_?norm_(forward|backward)_kernel|_swiglu|_triton_rope|liger|_element_mul_kernel")
_OWN_FUNCTION = re.compile(r"FrozenLinearFunction|GatedQuantize|RMSNormQuantize|Compressed(Norm|Gate)|peft_nvfp4::")
_CPU_GEMM = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul|addmv|mv)_?$|gemm_4bit")


def category(kernel: str, own: frozenset[str]) -> str:
    """Category of a GPU kernel's name; ``own``: names of this project's Triton kernels."""
    name = kernel.lower()
    if re.match(r"triton_(poi|red|per|for)_", name):  # Inductor: named after the operators around, attention for example
        return "elementwise/other"
    if re.search(r"flash|fmha|attention|sdpa", name):
        return "attention"
    if _GEMM.search(name):
        return "NVFP4 GEMMs" if kernel in own or _FP4.search(name) else "BF16 GEMMs"
    if "dequant" in name:
        return "dequantise"
    return "quantise/fused" if kernel in own or _FUSED.search(name) else "elementwise/other"


def cpu_category(operators: list[str]) -> str:
    """Category of an operator on a CPU, given with those that it runs inside of. What happens inside of this package's Functions
    counts as theirs: products of frozen linears (LoRA's among them) as NVFP4, everything else as quantising."""
    if any(re.search(r"attention|sdpa", name) for name in operators):
        return "attention"
    own, gemm = any(map(_OWN_FUNCTION.match, operators)), _CPU_GEMM.search(operators[0])
    if own:
        return "NVFP4 GEMMs" if gemm else "quantise/fused"
    return "BF16 GEMMs" if gemm else "elementwise/other"


def own_kernels() -> frozenset[str]:
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
    """Per step: launches, host milliseconds inside the profiler, milliseconds by category, and the dearest kernels.

    Args:
        trace: file for a Chrome trace (chrome://tracing, ui.perfetto.dev), with the allocator's totals over time.

    Returns:
        ``times_ms`` (on a GPU also as ``device_ms``), ``total_ms``, ``kernels``, ``profiled_host_ms``, ``launches``.
    """
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    step()
    wait()
    with torch.profiler.profile(activities=kinds, profile_memory=trace is not None) as recorded:
        for _ in range(steps):
            step()
        wait()
    if trace is not None:
        Path(trace).parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(trace))
    averages = recorded.key_averages()
    on_host = [e for e in averages if e.device_type == DeviceType.CPU and not e.key.endswith("Synchronize")]
    spent = _gpu_times(averages) if cuda else _cpu_times(recorded.events())
    times = dict.fromkeys(CATEGORIES, 0.0)
    for (_, kind), (us, _) in spent.items():
        times[kind] += us / steps / 1e3
    dearest = sorted(spent.items(), key=lambda item: -item[1][0])[:25]
    launches = sum(e.count for e in on_host if LAUNCHES.match(e.key)) / steps if cuda else None
    result = {
        "profiled_host_ms": sum(e.self_cpu_time_total for e in on_host) / steps / 1e3,
        "launches": launches,
        "times_ms": times,
        "total_ms": sum(times.values()),
        "kernels": [
            {"name": name[:120], "category": kind, "ms": us / steps / 1e3, "count": count / steps}
            for (name, kind), (us, count) in dearest
        ],
    }
    return result | ({"device_ms": times, "device_total_ms": result["total_ms"]} if cuda else {})


Spent = dict[tuple[str, str], tuple[float, int]]
"""(kernel or operator, category) -> (microseconds, calls)."""


def _gpu_times(averages: Iterable[Any]) -> Spent:
    own, annotations = own_kernels(), ("Optimizer.", "## Call")
    kernels = [e for e in averages if e.device_type == DeviceType.CUDA and not e.key.startswith(annotations)]
    kernels = [e for e in kernels if not getattr(e, "is_user_annotation", False)]
    return {(e.key, category(e.key, own)): (e.self_device_time_total, e.count) for e in kernels}


def _cpu_times(events: Iterable[Any]) -> Spent:
    """An operator in two categories is two."""
    spent: Spent = {}
    for event in events:
        if event.device_type != DeviceType.CPU or event.name.startswith("ProfilerStep"):
            continue
        inside, parent = [event.name], event.cpu_parent
        while parent is not None:
            inside.append(parent.name)
            parent = parent.cpu_parent
        key = event.name, cpu_category(inside)
        us, count = spent.get(key, (0.0, 0))
        spent[key] = us + event.self_cpu_time_total, count + 1
    return spent
