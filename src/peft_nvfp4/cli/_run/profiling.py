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
from torch import nn
from torch.autograd import DeviceType
from transformers import AutoModelForCausalLM, LlamaConfig

from ...memory import BUILTIN
from . import models

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


def random_model(name: str, dtype: torch.dtype, device: torch.device, layers: int | None = None) -> nn.Module:
    """A model of the shape that a config or a built-in name says, with random weights: times do not depend on them."""
    if (shape := BUILTIN.get(name.lower())) is not None:
        config = LlamaConfig(
            **{"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers},
            **{"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim},
            **{"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied, "max_position_embeddings": 131072},
        )
    else:
        config = models.config_of(name)
    if layers is not None:
        models.shorten(config, layers)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def training_step(model: nn.Module, batch: int, seq: int, supervised: int, device: torch.device) -> Callable[[], None]:
    """A function that does one step over random tokens: forward, backward, AdamW. ``supervised``: labels of the last so many."""
    config = getattr(model.config, "text_config", None) or model.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch, seq), generator=generator, device="cpu").to(device)
    labels = ids.clone()
    labels[:, : max(seq - supervised, 0)] = -100
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")

    def step() -> None:
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
