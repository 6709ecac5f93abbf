"""Where the time of a training step goes: torch.profiler's time by category, as the paper's Table 11, and memory over time.

On a GPU a kernel's category follows from its name; dequantising is a category of its own, because on GPUs without FP4 tensor
cores it serves mostly the emulated product. On a CPU there are no kernels: there the categories are those of PyTorch's operators.

>>> result = breakdown(step, device)                   # step: a function that does one training step
>>> result["times_ms"], result["launches"]
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from ...fusion.loss_attach import attach_loss
from ...memory import BUILTIN
from ...training.cuda_graphs import enable_cuda_graphs
from . import models, options

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
    step: Callable[[], object], device: torch.device, steps: int = 2, trace: str | Path | None = None, memory: bool = False
) -> dict[str, Any]:
    """Per step: launches, host milliseconds inside the profiler, milliseconds by category, and the dearest kernels.

    Args:
        trace: file for a Chrome trace (chrome://tracing, ui.perfetto.dev).
        memory: also the memory over time: ``(milliseconds, bytes)``, from what the profiler's recording begins with.

    Returns:
        ``times_ms`` (on a GPU also as ``device_ms``), ``total_ms``, ``kernels``, ``profiled_host_ms``, ``launches``; where they
        were asked for, ``timeline``.
    """
    cuda = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    step()
    _wait(device)
    with torch.profiler.profile(activities=kinds, profile_memory=memory) as recorded:
        for _ in range(steps):
            step()
        _wait(device)
    own = own_kernels()
    launches, host_us, times, of = 0, 0.0, {}, {}
    for event in recorded.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if not (getattr(event, "is_user_annotation", False) or event.key.startswith(("Optimizer.", "## Call"))):
                times[event.key] = (event.self_device_time_total / steps / 1e3, event.count / steps)
                of[event.key] = category(event.key, own)
        elif not event.key.endswith("Synchronize"):
            host_us += event.self_cpu_time_total
            launches += event.count if LAUNCHES.match(event.key) else 0
    if not cuda:
        times, of = _cpu_times(recorded.events(), steps)
    result = {"profiled_host_ms": host_us / steps / 1e3, "launches": launches / steps if cuda else None}
    result |= _by_category(times, of)
    if cuda:
        result |= {"device_ms": result["times_ms"], "device_total_ms": result["total_ms"]}
    if trace is not None or memory:
        result["timeline"] = _exported(recorded, trace, cuda) if memory or trace else []
    return result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_times(events, steps: int) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """(operator -> (milliseconds, calls) of a step, operator -> category), where an operator in two categories is two."""
    times, of = {}, {}
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU or event.name.startswith("ProfilerStep"):
            continue
        inside, parent = [event.name], event.cpu_parent
        while parent is not None:
            inside.append(parent.name)
            parent = parent.cpu_parent
        kind = cpu_category(inside)
        key = f"{event.name} ({kind})"
        ms, count = times.get(key, (0.0, 0.0))
        times[key], of[key] = (ms + event.self_cpu_time_total / steps / 1e3, count + 1 / steps), kind
    return times, of


def _by_category(times: dict[str, tuple[float, float]], of: dict[str, str]) -> dict[str, Any]:
    total = dict.fromkeys(CATEGORIES, 0.0)
    for name, (ms, _) in times.items():
        total[of[name]] += ms
    dearest = sorted(times.items(), key=lambda item: -item[1][0])[:25]
    kernels = [
        {"name": name.removesuffix(f" ({of[name]})")[:120], "category": of[name], "ms": ms, "count": count}
        for name, (ms, count) in dearest
    ]
    return {"times_ms": total, "total_ms": sum(total.values()), "kernels": kernels}


def _exported(recorded, trace: str | Path | None, cuda: bool) -> list[tuple[float, int]]:
    """Write the Chrome trace, and read the allocator's totals in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace) if trace is not None else Path(folder) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace")).get("traceEvents", [])
    found = []
    for event in events:
        args = event.get("args", {})
        if event.get("name") == "[memory]" and (args.get("Device Type") == 1) == cuda and "Total Allocated" in args:
            found.append((float(event["ts"]) / 1e3, int(args["Total Allocated"]), int(args.get("Bytes", 0))))
    found.sort()
    if not found:
        return []
    start, level, timeline = found[0][0], 0, []
    for at, total, change in found:
        level = total if cuda else level + change  # a CPU has no total: what was allocated since the beginning
        timeline.append((at - start, level))
    return timeline


# ---------------------------------------------------------------------------------------------- a step to look at


def training_step(
    model: nn.Module, batch: int, seq: int, supervised: int | None, device: torch.device, lr: float = 1e-4
) -> Callable[[], None]:
    """A function that does one step over random tokens: forward, backward, AdamW. ``supervised``: labels of the last so many."""
    config = getattr(model.config, "text_config", None) or model.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch, seq), generator=generator).to(device)
    labels = ids.clone()
    if supervised is not None:
        labels[:, : max(seq - supervised, 0)] = -100
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=device.type == "cuda")

    def step() -> None:
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


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
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def profile(
    name: str,
    *,
    backend: str = "nvfp4",
    batch: int = 4,
    seq: int = 1024,
    supervised: int | None = 32,
    layers: int | None = None,
    dtype: str = "auto",
    cuda_graphs: bool = False,
    checkpointing: bool = False,
    trace: str | Path | None = None,
    **lora: Any,
) -> dict[str, Any]:
    """Profile a training step of a model's shape with random weights; see :func:`breakdown`. ``lora``: of ``NVFP4LoraConfig``."""
    device = models.default_device()
    config = options.frozen_config({"target_modules": "all-linear", "task_type": "CAUSAL_LM", "backend": backend, **lora})
    torch.manual_seed(0)
    model = get_peft_model(random_model(name, models.choose_dtype(dtype, device), device, layers), config)
    attach_loss(model)
    if cuda_graphs:
        enable_cuda_graphs(model)
    if checkpointing:
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    step = training_step(model.train(), batch, seq, supervised, device)
    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    result = breakdown(step, device, trace=trace, memory=True)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    settings = {"model": name, "backend": backend, "batch": batch, "seq": seq, "layers": layers, "device": where, **lora}
    settings |= {"cuda_graphs": cuda_graphs}
    return {**settings, "peak_bytes": peak, **result}


def png(result: dict[str, Any], path: str | Path) -> None:
    """Time by category, and memory over two steps."""
    from matplotlib.figure import Figure

    timeline = result.get("timeline") or []
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes, other = figure.subplots(1, 2, width_ratios=(1, 1.3))
    times = {name: ms for name, ms in result["times_ms"].items() if ms > 0}
    axes.bar_label(axes.barh(list(times), list(times.values()), color="#4C72B0"), fmt="{:.1f}", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("ms of a step")
    axes.set_title(f"{result['model']}, {result['backend']}, {result['batch']} x {result['seq']}, {result['device']}", fontsize=9)
    other.plot(
        [at for at, _ in timeline], [n / 2**20 for _, n in timeline], linewidth=0.9, color="#DD8452", drawstyle="steps-post"
    )
    other.set_xlabel("ms (the profiler slows the host down)")
    other.set_ylabel("MiB allocated" if result.get("peak_bytes") else "MiB since the beginning")
    other.set_title("memory over two steps", fontsize=9)
    for panel in (axes, other):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
