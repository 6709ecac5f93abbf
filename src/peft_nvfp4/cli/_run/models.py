"""Models and adapters by the names that people type: a folder, a Hub id, an adapter's folder."""

from __future__ import annotations

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


def choose_dtype(name: str) -> torch.dtype:
    """``"auto"`` is BF16 on a GPU, and FP32 on a CPU, most of which multiply BF16 slowly."""
    if name == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def config_of(name: str) -> Any:
    """The configuration of a model, without its weights. Raises FileNotFoundError if there is no such model."""
    try:
        return AutoConfig.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(
            f"no model {name!r}: give a folder with a config.json and weights, or the id of a model on the Hub (downloaded, or "
            "within reach)"
        ) from error


def _packed(name: str, options: Options) -> dict[str, Any]:
    """The argument of ``from_pretrained`` for a model that is packed already, by this package or another tool; else empty."""
    stored = getattr(config_of(name), "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if stored is None or method != METHOD and published_method(stored) is None:
        return {}
    return {"quantization_config": PactConfig(accuracy=options.accuracy, memory=options.memory)}


def load(
    name: str,
    dtype: str = "auto",
    layers: int | None = None,
    options: Options | None = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> tuple[nn.Module, Any]:
    """(model, tokenizer). The model is on the GPU, if there is one and its dense weights leave room there; what packs it uses the
    GPU all the same.

    Args:
        dtype: a word of :func:`choose_dtype`, or ``"stored"``.
        options: of the ``NVFP4LoraConfig`` to come, for a model that is packed already.
        kwargs: of ``from_pretrained``.
    """
    kwargs, device = _packed(name, options or Options()) | kwargs, device or default_device()
    kwargs |= {"dtype": "auto" if dtype == "stored" else choose_dtype(dtype)}
    model = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    tokenizer = AutoTokenizer.from_pretrained(name)
    if layers is not None:
        _truncate(model, layers)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if device.type == "cuda" and sum(p.nbytes for p in model.parameters()) < 0.7 * torch.cuda.mem_get_info(device)[0]:
        model.to(device)
    return model, tokenizer


def _truncate(model: nn.Module, layers: int) -> None:
    decoder = model.base_model
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ValueError(f"layers={layers}: {type(model).__name__} has no list of layers to cut")
    decoder.layers = decoder.layers[:layers]
    shorten(model.config, len(decoder.layers))


def shorten(config: Any, layers: int) -> None:
    """Make a config that of a model of so many layers."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def trained_layers(adapter: str | Path) -> int | None:
    """How many layers of the base an adapter was trained on, if ``peft-nvfp4 train`` was told to keep only the first."""
    path = Path(adapter) / FILE
    layers = read_yaml(path).get("layers") if path.is_file() else None
    return layers if isinstance(layers, int) and layers > 0 else None


def load_base(
    adapter: str, name: str | None, dtype: str, layers: int | None, calibration: str | None = None
) -> tuple[NVFP4LoraConfig, nn.Module, Any]:
    """(config of an adapter, the base it was trained on or the one that is named, tokenizer)."""
    config = NVFP4LoraConfig.from_pretrained(adapter, calibration=calibration)
    if not (name := name or config.base_model_name_or_path):
        raise ValueError(f"{adapter} does not name its base model: give it with --model")
    return config, *load(name, dtype, layers or trained_layers(adapter), config.options)


def load_with_adapter(
    name: str | None, adapter: str | None, dtype: str, layers: int | None, calibration: str | None = None
) -> tuple[nn.Module, Any]:
    """(model with the adapter over the frozen base it was trained on, tokenizer); without an adapter, the model as it is."""
    if adapter is None:
        if name is None:
            raise ValueError("give a model, an adapter, or both")
        model, tokenizer = load(name, dtype, layers)
    else:
        config, base, tokenizer = load_base(adapter, name, dtype, layers, calibration)
        model = PeftModel.from_pretrained(base, adapter, config=config)
    return model.to(default_device()), tokenizer
