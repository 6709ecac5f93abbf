"""``PactConfig`` on a checkpoint that another tool has packed: where transformers is told about it, and how it is loaded.

>>> model = AutoModelForCausalLM.from_pretrained("RedHatAI/...-NVFP4", quantization_config=PactConfig())

By itself transformers refuses a ``quantization_config`` of another class than the one in ``config.json``, wants compressed-
tensors installed to find out that it is another, and does not know ``"modelopt"`` at all. So the function of transformers that
makes the quantizer is wrapped: where the caller gives a ``PactConfig`` and ``config.json`` says one of the two layouts, it
gets the caller's config alone, and the quantizer is told what the file said. Every other call passes through untouched.

Without a ``PactConfig`` nothing changes: the checkpoint goes to compressed-tensors, for inference.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import modeling_utils

from ..checkpoints import load
from ..checkpoints.settings import Published, published_method, read_settings
from ..nn.wrapping import wrap
from .config import PactConfig
from .mxfp4 import is_mxfp4
from .state import LoadState

HF_QUANT_CONFIG = "hf_quant_config.json"


def install() -> None:
    """Wrap transformers' ``get_hf_quantizer``, until :func:`~peft_nvfp4.nn.wrapping.unwrap_all`."""
    wrap(modeling_utils, "get_hf_quantizer", _get_hf_quantizer)


def _get_hf_quantizer(original: Callable, config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(quantization_config, PactConfig):
        return original(config, quantization_config, *args, **kwargs)
    if is_mxfp4(getattr(config, "quantization_config", None)):  # dense, but for the way it is stored
        del config.quantization_config
        result = original(config, quantization_config, *args, **kwargs)
        result[0].state.mxfp4 = True
        return result
    published = _take_settings(config)
    if published is None:
        return original(config, quantization_config, *args, **kwargs)
    result = original(config, copy.deepcopy(quantization_config), *args, **kwargs)
    quantizer = result[0]  # a PactQuantizer
    quantizer.state.published, quantizer.pre_quantized = published, True
    return result


def _take_settings(config: Any) -> Published | None:
    """What a model's config says of a published layout; taken out of it, since what is loaded is not in that layout."""
    for owner in (config, config.get_text_config(decoder=True)):
        settings = getattr(owner, "quantization_config", None)
        if settings is None or published_method(settings) is None:
            continue
        settings = settings if isinstance(settings, dict) else settings.to_dict()
        published = read_settings(settings, f"the quantization_config of {config.name_or_path or type(config).__name__}")
        del owner.quantization_config
        return published
    return None


def beside(files: Sequence[str]) -> Published | None:
    """The settings in a ``hf_quant_config.json`` in the folder of a checkpoint's files."""
    for folder in dict.fromkeys(Path(file).parent for file in files):
        path = folder / HF_QUANT_CONFIG
        if path.is_file():
            try:
                settings = json.loads(path.read_text())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} is damaged: {error}. Download it again") from error
            if not isinstance(settings, dict):
                raise ValueError(f"{path} is damaged: it holds no settings. Download it again")
            return read_settings(settings, str(path))
    return None


def place(state: LoadState, model: nn.Module) -> None:
    """Put a :class:`~peft_nvfp4.checkpoints.load.PackedLinear` where the files hold a packed linear, and leave in
    ``state.planned`` those that become frozen. Dense ones are listed in ``skip_modules``, for a model that is saved again."""
    packed = load.packed_linears(model, state.published, state.stored, state.planned)
    dense = [name for name in state.planned if name not in packed]
    state.planned = {
        name: tuple(sibling for sibling in group if sibling in packed) for name, group in state.planned.items() if name in packed
    }
    state.config.skip_modules = [*state.config.skip_modules, *dense]
    tied = {key for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items() for key in pair}
    for name, parts in packed.items():
        if f"{name}.weight" in tied:
            raise ValueError(f"{next(iter(parts.values()))} is packed, and {name} of {type(model).__name__} shares its weight")
        state.placed[name] = load.PackedLinear(model.get_submodule(name), state.published.layout, parts)
        model.set_submodule(name, state.placed[name])


def finish(state: LoadState, model: nn.Module) -> None:
    """Turn what was placed into frozen layers, or into dense ones where this package does not freeze."""
    parameters = {f"{name}.{leaf}": p for name, packed in state.placed.items() for leaf, p in packed.named_parameters()}
    load.check_loaded(parameters, state.origin)
    for name in list(state.placed):
        packed = state.placed.pop(name)
        if name in state.planned:
            state.put(model, name, load.frozen_layer(packed, state.options(name)))
        else:
            model.set_submodule(name, load.dense_linear(packed))
