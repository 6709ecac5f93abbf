"""The ``quantization_config`` of a published checkpoint: read, with a reason for what cannot be represented, and written.

compressed-tensors' settings are groups of linears with a scheme each; ModelOpt's are one word, ``quant_algo``, with the same
groups beside it in newer files, in ``config.json`` or, older, in ``hf_quant_config.json`` next to it. What the tensors are is
said by the files (:mod:`.load`); the settings say what they mean. So whatever might change that meaning and is not known here
is refused: an unknown word may be harmless, but a model that is loaded wrongly looks like a bad model, not like an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..numerics.formats import BLOCK
from .layouts import COMPRESSED_TENSORS, MODELOPT, Layout

FORMAT = "nvfp4-pack-quantized"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")

METHODS = {"compressed-tensors": COMPRESSED_TENSORS, "modelopt": MODELOPT, "modelopt_fp4": MODELOPT}
"""``quant_method`` -> layout."""

_NO_ALGORITHM = {
    "NVFP4_AWQ": "AWQ multiplies the inputs by a scale of every channel (pre_quant_scale) before they are quantised",
    "NVFP4_SVD": "SVDQuant adds a low-rank product in 16 bits to every linear",
}
INSTEAD = "Load the original dense model with PactConfig instead, which quantises it"
_OURS = "peft_nvfp4 reads NVFP4 linears with one E4M3 scale for 16 weights, and dense ones"

_TOP = {
    "compressed-tensors": "config_groups format global_compression_ratio ignore kv_cache_scheme quant_method quantization_status "
    "sparsity_config transform_config version moe_sparsity_config dequantize run_compressed use_optimized_inference",
    "modelopt": "config_groups ignore exclude_modules quant_algo quant_method kv_cache_scheme kv_cache_quant_algo producer "
    "quantized_layers group_size version",
}
_GROUP = "targets weights input_activations output_activations format quant_algo"
_ARGS = (
    "num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype zp_dtype observer observer_kwargs"
)


@dataclass(frozen=True)
class Published:
    """What the settings of a checkpoint say. (Which modules they list as dense is not asked: the files say what is packed.)"""

    layout: Layout  # names and scale convention of its tensors
    origin: str  # where the settings were read, for messages


def published_method(settings: Any) -> str | None:
    """The ``quant_method`` of a ``quantization_config``, if it is one of the published layouts'."""
    method = settings.get("quant_method") if isinstance(settings, Mapping) else getattr(settings, "quant_method", None)
    method = str(getattr(method, "value", method))
    return method if method in METHODS else None


def read_settings(settings: Mapping[str, Any], origin: str) -> Published:
    """What a ``quantization_config``, or the content of a ``hf_quant_config.json``, says. Something in it that cannot be
    represented, or is not known, raises ValueError; ``origin`` is the file, for messages."""
    if "quantization" in settings and "quant_method" not in settings:  # hf_quant_config.json
        inner, producer = settings["quantization"], settings.get("producer")
        settings = {**inner, "quant_method": "modelopt", "producer": producer} if isinstance(inner, Mapping) else {}
    method = published_method(settings)
    if method is None:
        known, given = ", ".join(METHODS), settings.get("quant_method")
        raise ValueError(f"{origin} is in no layout that is known here: {known}, got {given!r}")
    layout = METHODS[method]
    _check_known(settings, _TOP[layout.name], "quantization_config", origin)
    (_check_compressed_tensors if layout is COMPRESSED_TENSORS else _check_modelopt)(settings, origin)
    return Published(layout, origin)


def _check_compressed_tensors(settings: Mapping[str, Any], origin: str) -> None:
    status = settings.get("quantization_status", "compressed")
    if status != "compressed":
        raise ValueError(f"{origin}: quantization_status is {status!r}, so the weights are not packed. {INSTEAD}")
    for key in ("transform_config", "sparsity_config", "moe_sparsity_config"):
        value = settings.get(key)
        dense = key == "sparsity_config" and isinstance(value, Mapping) and value.get("format", "dense") == "dense"
        if value and not dense:
            what = "rotates inputs or weights while it computes" if key == "transform_config" else "stores sparse weights"
            raise ValueError(f"{origin}: {key} says that the model {what}, which a frozen NVFP4 layer cannot. {INSTEAD}")
    groups = _groups(settings, origin)
    formats = {str(word) for word in (settings.get("format"), *(g.get("format") for g in groups.values())) if word is not None}
    if formats - {"mixed-precision"} != {FORMAT}:
        names = ", ".join(sorted(formats - {FORMAT, "mixed-precision"})) or "none"
        raise ValueError(f"{origin}: the format is {names}; {_OURS} ({FORMAT}). {INSTEAD}")
    for name, group in groups.items():
        _check_group(name, group, origin)


def _check_modelopt(settings: Mapping[str, Any], origin: str) -> None:
    algorithm = settings.get("quant_algo")
    layers = settings.get("quantized_layers") or {}
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise ValueError(f"{origin}: quantized_layers does not say of each layer how it is quantised. {INSTEAD}")
    if algorithm == "MIXED_PRECISION":
        other = {name: layer.get("quant_algo") for name, layer in layers.items() if layer.get("quant_algo") not in ALGORITHMS}
        if other or not layers:
            name, word = next(iter(other.items()), ("?", None))
            names = f"{name} (and {max(len(other) - 1, 0)} more)"
            raise ValueError(f"{origin}: quant_algo is MIXED_PRECISION, and {names} is in {word}; {_OURS}. {INSTEAD}")
    elif algorithm not in ALGORITHMS:
        reason = _NO_ALGORITHM.get(str(algorithm), _OURS)
        raise ValueError(f"{origin}: quant_algo {algorithm!r} cannot be represented: {reason}. {INSTEAD}")
    for owner, each in (("quantization", settings), *layers.items()):
        if (size := each.get("group_size")) not in (None, BLOCK):
            raise ValueError(f"{origin}: group_size {size!r} of {owner}; NVFP4 has one scale for {BLOCK} weights. {INSTEAD}")
    if "config_groups" in settings:
        for name, group in _groups(settings, origin).items():
            _check_group(name, group, origin)


def _groups(settings: Mapping[str, Any], origin: str) -> Mapping[str, Mapping[str, Any]]:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ValueError(f"{origin}: config_groups says of no group how it is quantised")
    return groups


def _check_group(name: str, group: Mapping[str, Any], origin: str) -> None:
    """A group's weights are NVFP4. Its input_activations do not matter: inputs are quantised per token here."""
    where = f"config_groups.{name}"
    _check_known(group, _GROUP, where, origin)
    args = group.get("weights")
    if not isinstance(args, Mapping):
        raise ValueError(f"{origin}: {where} does not say how the weights are stored")
    _check_known(args, _ARGS, f"{where}.weights", origin)
    usual = {"symmetric": True, "dynamic": False, "strategy": "tensor_group"}
    for key, value in {"num_bits": 4, "type": "float", "group_size": BLOCK, **usual}.items():
        if args.get(key, usual.get(key)) != value:
            raise ValueError(f"{origin}: {key} of {where}.weights is {args.get(key)!r}, NVFP4 has {value!r}. {INSTEAD}")
    if args.get("actorder") == "group":
        raise ValueError(f"{origin}: actorder 'group' of {where}.weights stores columns in another order. {INSTEAD}")
    if str(args.get("scale_dtype") or "float8_e4m3fn").removeprefix("torch.") != "float8_e4m3fn":
        raise ValueError(f"{origin}: scale_dtype of {where}.weights is {args['scale_dtype']}, NVFP4 has float8_e4m3fn. {INSTEAD}")


def _check_known(settings: Mapping[str, Any], known: str, where: str, origin: str) -> None:
    if unknown := sorted(key for key in settings.keys() - set(known.split()) if settings[key] is not None):
        raise ValueError(
            f"{origin}: {where} has settings that are not known here: {', '.join(unknown)}. They may change what the "
            "stored bytes mean. Upgrade peft_nvfp4, or take them out if you know that they do not"
        )


def write_settings(layout: Layout, ignore: Iterable[str], inputs: bool, version: str) -> dict[str, Any]:
    """``quantization_config`` for a ``config.json``; ``ignore``: linears that are not quantised; ``inputs``: whether the global
    scale of every linear's input is in the files, so that engines may compute W4A4, not W4A16."""
    args = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}
    if layout is MODELOPT:
        group = {"targets": ["Linear"], "weights": args, **({"input_activations": args} if inputs else {})}
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if inputs else "W4A16_NVFP4",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "producer": {"name": "peft_nvfp4", "version": version},
        }
    args |= {"strategy": "tensor_group", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**args, "observer": "minmax"},
        "input_activations": {**args, "dynamic": "local", "observer": "minmax"} if inputs else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def write_hf_quant_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Content of ``hf_quant_config.json``, where older readers of ModelOpt's layout look."""
    return {
        "producer": settings["producer"],
        "quantization": {
            "quant_algo": settings["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": settings["ignore"],
        },
    }
