"""Models and adapters by the names that people type: a folder, a Hub id, an adapter's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ...checkpoints.settings import published_method
from ...lora.config import NVFP4LoraConfig
from ...quantization.options import Options
from ...transformers.config import METHOD, PactConfig
from .options import FILE, read_yaml

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``"auto"`` is BF16 on a GPU, and FP32 on a CPU, most of which multiply BF16 slowly."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def config_of(name: str) -> Any:
    """The configuration of a model, without its weights.

    Raises:
        FileNotFoundError: there is no such model.
    """
    try:
        return AutoConfig.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(_absent(name)) from error


def _absent(name: str) -> str:
    return (
        f"no model {name!r}: give a folder with a config.json and weights, or the id of a model on the Hub (downloaded, or "
        "within reach)"
    )


def _packed(name: str, options: Options) -> dict[str, Any]:
    """The argument of ``from_pretrained`` for a model that is packed already, by this package or another tool; else empty."""
    found = getattr(config_of(name), "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if found is None or method != METHOD and published_method(found) is None:
        return {}
    return {"quantization_config": PactConfig(accuracy=options.accuracy, memory=options.memory)}


def load(
    name: str,
    dtype: torch.dtype | str,
    device: torch.device,
    layers: int | None = None,
    options: Options | None = None,
    **kwargs: Any,
) -> tuple[nn.Module, Any]:
    """(model, tokenizer). The model is on ``device`` if its dense weights leave room there, on the CPU otherwise: what packs it
    uses the GPU all the same.

    Args:
        layers: keep only the first ones, for a quick look at the mechanics.
        options: of the ``NVFP4LoraConfig`` to come, for a model that is packed already.
        kwargs: of ``from_pretrained``.

    Raises:
        FileNotFoundError: there is no such model.
    """
    kwargs = _packed(name, options or Options()) | kwargs
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        present = (Path(name) / "config.json").is_file()
        raise FileNotFoundError(str(error) if present else _absent(name)) from error
    _truncate(model, layers)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if device.type == "cuda" and _dense_bytes(model) < 0.7 * torch.cuda.mem_get_info(device)[0]:
        model.to(device)
    return model, tokenizer


def _truncate(model: nn.Module, layers: int | None) -> None:
    if layers is None:
        return
    decoder = model.base_model
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ValueError(f"layers={layers}: {type(model).__name__} has no list of layers to cut")
    decoder.layers = decoder.layers[:layers]
    model.config.num_hidden_layers = len(decoder.layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]


def _dense_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def base_of_adapter(adapter: str | Path) -> str:
    """The base model that an adapter's config names.

    Raises:
        ValueError: it is no adapter, or names none.
    """
    path = Path(adapter) / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{adapter} holds no adapter (no adapter_config.json)")
    try:
        name = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no config of an adapter: {error}") from error
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path} does not name its base model: give it with --model")
    return name


def trained_layers(adapter: str | Path) -> int | None:
    """How many layers of the base an adapter was trained on, if ``peft-nvfp4 train`` was told to keep only the first."""
    path = Path(adapter) / FILE
    layers = read_yaml(path).get("layers") if path.is_file() else None
    return layers if isinstance(layers, int) and layers > 0 else None


def load_with_adapter(
    name: str | None, adapter: str | Path | None, dtype: torch.dtype, device: torch.device, layers: int | None = None
) -> tuple[nn.Module, Any]:
    """(model with the adapter over the frozen base it was trained on, tokenizer); without an adapter, the model as it is."""
    if adapter is None:
        if name is None:
            raise ValueError("give a model, an adapter, or both")
        model, tokenizer = load(name, dtype, device, layers)
        return model.to(device), tokenizer
    config = NVFP4LoraConfig.from_pretrained(str(adapter))
    layers = layers or trained_layers(adapter)
    base, tokenizer = load(name or base_of_adapter(adapter), dtype, device, layers, config.options)
    return PeftModel.from_pretrained(base, str(adapter), config=config).to(device), tokenizer
