"""Models and adapters by the names that people type: a folder, a Hub id, an adapter's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ...checkpoints.settings import published_method
from ...lora.config import NVFP4LoraConfig
from ...quantization.options import Options
from ...transformers.config import METHOD, PactConfig
from .options import FILE, read_yaml

ADAPTER, TOKENIZER = "adapter_config.json", ("tokenizer.json", "tokenizer_config.json")
GENERATION = "generation_config.json"
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


def absolute(name: str) -> str:
    """The name of a model or a data file that means the same in every folder; a Hub id is one already."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def check_files(folder: str | Path) -> None:
    """Raises ValueError for a damaged file of a model or an adapter: JSON that is none, tensors that are cut off, a part of the
    weights that is missing."""
    damaged = "copy it again, or delete it and save or download it again"
    for path in sorted(Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged, it is no JSON ({error}): {damaged}") from error
        parts = content.get("weight_map") if isinstance(content, dict) and path.name.endswith(".index.json") else None
        if isinstance(parts, dict) and (missing := sorted({*map(str, parts.values())} - {f.name for f in path.parent.iterdir()})):
            raise ValueError(f"{path} names {missing[0]}, which is not there: the copy of the model is not whole, {damaged}")
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size if path.exists() else 0
            raise ValueError(f"{path} is damaged or cut off, {size:,} bytes ({error}): {damaged}") from error


def config_of(name: str) -> Any:
    """The configuration of a model, without its weights. Raises FileNotFoundError if there is no such model, ValueError for the
    folder of an adapter or of something damaged."""
    folder = Path(name)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{name} is the folder of an adapter, not of a model: give the adapter's base, or merge them first: "
            f"peft-nvfp4 merge {name} --output MERGED"
        )
    check_files(folder)
    try:
        return AutoConfig.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(
            f"no model {name!r}: give a folder with a config.json and weights, or the id of a model on the Hub (downloaded, or "
            "within reach)"
        ) from error


def check_model(name: str) -> None:
    """Raises ValueError, or FileNotFoundError, if there is no causal language model of that name."""
    config = config_of(name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        other = "it reads images or sound as well" if set(getattr(config, "sub_configs", {})) - {"text_config"} else "no decoder"
        raise ValueError(
            f"{name} is of the kind {config.model_type}, which is no causal language model ({other}): commands are for these. "
            "In Python, get_peft_model with NVFP4LoraConfig takes other models: examples/finetune_vlm.py"
        )


def load_tokenizer(name: str, adapter: str | Path | None = None) -> Any:
    """An adapter's tokenizer, with the chat template it was trained with, where its folder holds one; else the model's."""
    if adapter is not None and any((Path(adapter) / file).is_file() for file in TOKENIZER):
        name = str(adapter)
    check_files(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # many kinds: of a missing package, an unknown class, content that is no tokenizer
        words = " ".join(str(error).split())[:200]
        raise ValueError(f"the tokenizer of {name} cannot be read ({words}): its files are {', '.join(TOKENIZER)}") from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def positions(config: Any) -> int | None:
    """The longest text that a model was made for, in tokens. None where it does not say, or its rotary angles are scaled."""
    config = config.get_text_config()
    limit, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    scaled = isinstance(rope, dict) and rope.get("rope_type", "default") not in ("default", "llama3")
    return limit if isinstance(limit, int) and limit > 0 and not scaled else None


def check_tokens(model: nn.Module, rows: Iterable[tuple[str, Sequence[int]]], flag: str = "--max-length") -> None:
    """Raises ValueError, with the place, for token ids that a model has no embedding for, and for more than its positions."""
    limit, known = positions(model.config), model.get_input_embeddings().weight.shape[0]
    for place, ids in rows:
        if limit is not None and len(ids) > limit:
            raise ValueError(f"{place} has {len(ids)} tokens, the model was made for {limit}: {flag} {limit} cuts longer rows")
        if ids and max(ids) >= known:
            raise ValueError(
                f"{place} has the token {max(ids)}, and the model has {known} embeddings: the tokenizer is another model's, or "
                "the model's embeddings were not resized for the tokens that were added to it"
            )


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
    tokenizer: Any = None,
    **kwargs: Any,
) -> tuple[nn.Module, Any]:
    """(model, tokenizer). The model is on the GPU, if there is one and its dense weights leave room there; what packs it uses the
    GPU all the same.

    Args:
        dtype: a word of :func:`choose_dtype`, or ``"stored"``.
        options: of the ``NVFP4LoraConfig`` to come, for a model that is packed already.
        tokenizer: instead of the model's.
        kwargs: of ``from_pretrained``.
    """
    name = absolute(name)  # as an adapter will name its base
    check_model(name)
    tokenizer = tokenizer or load_tokenizer(name)
    kwargs, device = _packed(name, options or Options()) | kwargs, device or default_device()
    kwargs |= {"dtype": "auto" if dtype == "stored" else choose_dtype(dtype)}
    model = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    if layers is not None:
        _truncate(model, layers)
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


def training_options(adapter: str | Path | None) -> dict[str, Any]:
    """What ``peft-nvfp4 train`` was told about an adapter; empty for others."""
    path = None if adapter is None else Path(adapter) / FILE
    return read_yaml(path) if path is not None and path.is_file() else {}


def trained_layers(adapter: str | Path) -> int | None:
    """How many layers of the base an adapter was trained on, if ``peft-nvfp4 train`` was told to keep only the first."""
    layers = training_options(adapter).get("layers")
    return layers if isinstance(layers, int) and layers > 0 else None


def base_of(adapter: str, name: str | None) -> str:
    """The name of the base that an adapter was trained on, or the one that is given. Raises ValueError, or FileNotFoundError, if
    there is no such adapter or base."""
    if not (Path(adapter) / ADAPTER).is_file() and Path(adapter).exists():
        raise FileNotFoundError(f"no adapter in {adapter}: there is no {ADAPTER}")
    check_files(adapter)
    base = name or PeftConfig.from_pretrained(adapter).base_model_name_or_path
    if not base:
        raise ValueError(f"{adapter} does not name its base model: give it with --model")
    try:
        check_model(base)
    except FileNotFoundError as error:
        if name is not None:
            raise
        relative = "" if Path(base).is_absolute() else f" ({base!r} was looked for in {Path.cwd()}, and on the Hub)"
        raise FileNotFoundError(f"the base of {adapter}, {base}, is not there{relative}: give it with --model") from error
    return base


def load_base(
    adapter: str, name: str | None, dtype: str, layers: int | None, calibration: str | None = None
) -> tuple[NVFP4LoraConfig, nn.Module, Any]:
    """(config of an adapter, the base it was trained on or the one that is named, its tokenizer or that of the base)."""
    base = base_of(adapter, name)
    config = NVFP4LoraConfig.from_pretrained(adapter, calibration=calibration)
    tokenizer = load_tokenizer(base, adapter)
    pinned = {"revision": config.revision} if name is None and config.revision else {}
    return config, *load(base, dtype, layers or trained_layers(adapter), config.options, tokenizer=tokenizer, **pinned)


def tokenizer_of(name: str | None, adapter: str | None) -> Any:
    """The tokenizer that comes with a model, with an adapter, or both; to look at rows before weights are loaded."""
    if adapter is None and name is None:
        raise ValueError("give a model, an adapter, or both")
    return load_tokenizer(name if adapter is None else base_of(adapter, name), adapter)


SIZES = re.compile(r"size mismatch for (\S+): .*?Size\((\[.*?\])\).*?Size\((\[.*?\])\)", re.DOTALL)
"""Of PyTorch's error: a tensor's name, its shapes in the file and in the model."""


def put_on(base: nn.Module, adapter: str, config: NVFP4LoraConfig, **kwargs: Any) -> PeftModel:
    """A base with its adapter. Raises ValueError if a tensor of the adapter is of another size than the base's."""
    try:
        return PeftModel.from_pretrained(base, adapter, config=config, **kwargs)
    except RuntimeError as error:
        if (found := SIZES.search(str(error))) is None:
            raise
        tensor, there, here = found.groups()
        raise ValueError(
            f"{adapter} does not fit {base.name_or_path}: {tensor} is {there} in the adapter and {here} in the model. Give the "
            "base it was trained on with --model; if tokens had been added to that, save it with resize_token_embeddings done"
        ) from error


def load_with_adapter(
    name: str | None, adapter: str | None, dtype: str, layers: int | None, calibration: str | None = None
) -> tuple[nn.Module, Any]:
    """(model with the adapter over the frozen base it was trained on, tokenizer); without an adapter, the model as it is."""
    if adapter is None:
        model, tokenizer = load(name, dtype, layers)
    else:
        config, base, tokenizer = load_base(adapter, name, dtype, layers, calibration)
        model = put_on(base, adapter, config)
        if (Path(adapter) / GENERATION).is_file():  # a trainer may have set where answers end
            base.generation_config = model.generation_config = GenerationConfig.from_pretrained(adapter)
    return model.to(default_device()), tokenizer
