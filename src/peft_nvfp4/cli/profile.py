"""``peft-nvfp4 profile``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..quantization.options import Options
from .common import Batch, Dtype, Layers, Outcome, Rank, base_option, command, stacked_bars, table


@command(busy="Profiling")
def profile(
    model: Annotated[str, typer.Argument(help="Folder with a config.json, Hub id, llama-1b, llama-3b or llama-8b.")],
    backend: Annotated[str, base_option("backend")] = Options.backend,
    batch: Batch = 4,
    seq: Annotated[int, typer.Option(help="Tokens of a row.")] = 1024,
    supervised: Annotated[int, typer.Option(help="Labels at the end of each row.")] = 32,
    rank: Rank = 16,
    accuracy: Annotated[str, base_option("accuracy")] = Options.accuracy,
    memory: Annotated[str, base_option("memory")] = Options.memory,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay recorded steps.")] = False,
    checkpointing: Annotated[bool, typer.Option(help="Checkpoint decoder layers.")] = False,
    layers: Layers = None,
    dtype: Dtype = "auto",
    trace: Annotated[Path | None, typer.Option(help="Chrome trace to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the times.")] = None,
) -> Outcome:
    """Time of a training step by category, as the paper's Table 11, with random weights of the model's shape."""
    import torch
    from peft import get_peft_model

    from ..fusion.loss_attach import attach_loss
    from ..lora.config import NVFP4LoraConfig
    from ..training.cuda_graphs import disable_cuda_graphs
    from ._run import models, profiling

    device = models.default_device()
    cuda = device.type == "cuda"
    settings = {"backend": backend, "accuracy": accuracy, "memory": memory, "r": rank, "lora_alpha": 2 * rank}
    config = NVFP4LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    torch.manual_seed(0)
    adapted = get_peft_model(profiling.random_model(model, models.choose_dtype(dtype), device, layers), config)
    attach_loss(adapted)
    if not cuda_graphs:
        disable_cuda_graphs(adapted)
    if checkpointing:
        adapted.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    step = profiling.training_step(adapted.train(), batch, seq, supervised, device)
    step()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    where = torch.cuda.get_device_name(device) if cuda else "CPU"
    result = {"model": model, "batch": batch, "seq": seq, "layers": layers, "device": where, "cuda_graphs": cuda_graphs}
    result |= {**settings, **profiling.breakdown(step, device, trace=trace)}
    result["peak_bytes"] = torch.cuda.max_memory_allocated(device) if cuda else None
    title = f"{model}, {backend}, {batch} x {seq} tokens, {where}" + ("" if cuda else " (operators on the CPU)")
    if png is not None:
        stacked_bars({backend: result["times_ms"]}, png, "ms of a step", title)
    files = [f"{what}: {path}" for path, what in ((trace, "Chrome trace"), (png, "Drawn")) if path is not None]
    return Outcome(result, [*_tables(result, title), *files])


def _tables(result: dict[str, Any], title: str) -> list:
    """The categories, and the kernels that take longest."""
    total = result["total_ms"]
    rows = [(name, f"{ms:.2f}", f"{100 * ms / (total or 1):.1f} %") for name, ms in result["times_ms"].items()]
    launches = "" if result["launches"] is None else f"{result['launches']:.0f} launches"
    kernels = [(k["name"][:48], k["category"], f"{k['ms']:.2f}", f"{k['count']:.0f}") for k in result["kernels"][:8]]
    return [
        table(title, ("", "ms of a step", "share"), [*rows, ("all", f"{total:.2f}", launches)]),
        table("what takes longest", ("", "category", "ms", "times"), kernels, words=2),
    ]
