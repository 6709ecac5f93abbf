"""``quantize``, ``calibrate``, ``merge``, ``export``: from one kind of model folder to another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...calibration.run import CalibrationOptions
from ...calibration.run import calibrate as calibrate_model
from ...checkpoints import export_checkpoint
from ...checkpoints.gguf import export_gguf
from ...lora.config import NVFP4LoraConfig
from ...lora.hooks import freeze_base
from ...lora.inspection import inspect_adapter
from ...lora.merge import merge as merge_adapter
from ...quantization.freeze import freeze_model, frozen_modules
from ...transformers.config import PactConfig
from ...transformers.prepare import num_parameters
from . import evaluation, models, texts


@dataclass(frozen=True)
class Written:
    """A folder with a model: bytes of its weights, and how many linears are packed."""

    folder: str
    bytes: int
    packed: int
    dense_bytes: int | None = None


def weight_bytes(folder: str | Path) -> int:
    return sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))


def parameters_in_bf16(model: nn.Module) -> int:
    """Bytes that the whole model takes in BF16, packed weights counting as what they stand for."""
    return 2 * num_parameters(model)


def fresh(folder: str | Path) -> Path:
    """The folder to write to.

    Raises:
        ValueError: it holds something already.
    """
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already and not empty: choose another output folder")
    return path


def _packed(model: nn.Module) -> int:
    """Frozen weights: linears, and the projections of experts."""
    return sum(m.experts * len(m.projections) if hasattr(m, "projections") else 1 for _, m in frozen_modules(model))


def quantize(name: str, output: str, skip_modules: list[str], layers: int | None = None) -> Written:
    """Freeze a model's linears in NVFP4 and save it packed, to be loaded with ``from_pretrained``."""
    path, device = fresh(output), models.default_device()
    config = PactConfig(skip_modules=skip_modules or None)
    settings: dict[str, Any] = {"quantization_config": config}
    if device.type == "cuda":
        settings["device_map"] = {"": device}
    if getattr(models.config_of(name), "quantization_config", None) is not None:
        raise ValueError(f"{name} is quantised already; peft-nvfp4 export writes it in another layout")
    model, tokenizer = models.load(name, torch.bfloat16, torch.device("cpu"), layers, **settings)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Written(str(path), weight_bytes(path), _packed(model), parameters_in_bf16(model))


def calibrate(
    name: str, dataset: str, output: str, options: dict[str, Any], limit: int | None, columns: dict[str, str], layers: int | None
) -> Any:
    """Calibrate a dense model; the same call goes on where an earlier one was stopped. Returns the report."""
    settings = CalibrationOptions(**options)
    data = texts.read(dataset, columns=columns, limit=limit).plain()
    device = models.default_device()
    model, tokenizer = models.load(name, models.choose_dtype("auto", device), torch.device("cpu"), layers)
    return calibrate_model(model, data, tokenizer, settings, output_dir=output, device=device)


def merge(
    adapter: str,
    output: str,
    name: str | None,
    to: str,
    layout: str,
    probe: str | None,
    dtype: str,
    layers: int | None,
    gguf: bool = False,
) -> tuple[Written, Any]:
    """Merge an adapter into its base and save the model, one in NVFP4 in another tool's ``layout``; and what it kept. ``gguf``: a
    dense one as ``model.gguf``, too."""
    if gguf and to == "nvfp4":
        raise ValueError("GGUF has no NVFP4 of this kind: merge to bf16, fp16 or fp32 for --gguf")
    path, device = fresh(output), models.default_device()
    model, tokenizer = models.load_with_adapter(name, adapter, models.choose_dtype(dtype, device), device, layers)
    batches = None
    if probe is not None:
        rows = evaluation.encode(texts.read(probe, limit=8), tokenizer, 128)
        batches = [{"input_ids": torch.tensor([row["input_ids"]], device=device)} for row in rows if row is not None]
    merged, report = merge_adapter(model, to, probe=batches)
    if to == "nvfp4":
        export_checkpoint(merged, path, layout)
    else:
        merged.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if gguf:
        export_gguf(merged, tokenizer, path / "model.gguf", {"fp32": "f32", "fp16": "f16"}.get(to, "bf16"))
    return Written(str(path), weight_bytes(path), _packed(merged), parameters_in_bf16(merged)), report


def export(name: str, output: str, layout: str, layers: int | None = None) -> tuple[Written, Any]:
    """Write a packed model (of ``quantize`` or ``merge --to nvfp4``) in the layout of another tool."""
    path = fresh(output)
    device = models.default_device()
    model, tokenizer = models.load(name, "auto", device, layers)
    if not frozen_modules(model):
        freeze_model(model, "nvfp4")
    report = export_checkpoint(model, path, layout)
    tokenizer.save_pretrained(path)
    return Written(str(path), weight_bytes(path), report.packed, parameters_in_bf16(model)), report


def inspect(adapter: str, name: str | None, probe: bool, dtype: str, layers: int | None) -> Any:
    """Check an adapter against a base model, frozen as the adapter's side-car says."""
    device = models.default_device()
    base = name or models.base_of_adapter(adapter)
    config, layers = NVFP4LoraConfig.from_pretrained(adapter), layers or models.trained_layers(adapter)
    model, _ = models.load(base, models.choose_dtype(dtype, device), device, layers, config.options)
    if not frozen_modules(model):
        freeze_base(config, model)
    return inspect_adapter(model.to(device), adapter, probe=probe)
