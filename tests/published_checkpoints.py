"""Checkpoints in the two published NVFP4 layouts, written by other code than the package's: bytes and values in NumPy."""

import copy
import json

import numpy as np
import torch
from conftest import tiny_llama
from safetensors.torch import save_file

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
IDS = torch.arange(32).reshape(2, 16) * 7 % 128

CT_WEIGHTS = dict(num_bits=4, type="float", symmetric=True, group_size=16, strategy="tensor_group", dynamic=False)
CT_SETTINGS = dict(
    quant_method="compressed-tensors",
    format="nvfp4-pack-quantized",
    quantization_status="compressed",
    global_compression_ratio=None,
    kv_cache_scheme=None,
    ignore=["lm_head", "re:.*vision.*"],
    config_groups={
        "group_0": {
            "targets": ["Linear"],
            "weights": CT_WEIGHTS,
            "input_activations": {**CT_WEIGHTS, "dynamic": "local", "observer": "minmax"},
            "output_activations": None,
        }
    },
    sparsity_config={},
    transform_config={},
    version="0.12.2",
)
OLD_MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "*.gate"],
    },
}
MODELOPT_SETTINGS = dict(
    quant_method="modelopt",
    quant_algo="NVFP4",
    ignore=["lm_head", "*vision*"],
    producer={"name": "modelopt", "version": "0.37.0"},
    kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"},
    config_groups={
        "group_0": {
            "targets": ["Linear"],
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        }
    },
)


SETTINGS = {"modelopt": MODELOPT_SETTINGS, "compressed-tensors": CT_SETTINGS}


def e4m3(byte):
    """Value of an E4M3 byte, from its definition: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([e4m3(byte) for byte in range(0x7F)], dtype=np.float32)


class Packed:
    """A random quantised weight (n, k): codes, bytes of block scales, global scale to multiply with."""

    def __init__(self, rng, n, k, g):
        self.codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
        self.scales = rng.integers(0x58, 0x7F, (n, k // 16), dtype=np.uint8)  # 16 to 448
        self.scales[rng.random(self.scales.shape) < 0.05] = 0
        self.g = np.float32(g)

    def bytes(self):
        return torch.from_numpy(self.codes[:, 0::2] | self.codes[:, 1::2] << 4)

    def values(self, g=None):
        """(n, k) float32."""
        blocks = E4M3[self.scales] * (self.g if g is None else g)
        return torch.from_numpy(GRID[self.codes] * np.repeat(blocks, 16, axis=1))


def quantised(model, power_of_two=True, seed=0, keep_dense=("lm_head",)):
    """Name -> Packed of every linear of a model, q/k/v and gate/up under one global scale."""
    rng, shared, found = np.random.default_rng(seed), {}, {}
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or any(part in name for part in keep_dense):
            continue
        parent, _, leaf = name.rpartition(".")
        group = (parent, {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gu", "up_proj": "gu"}.get(leaf, leaf))
        g = 2.0 ** -int(rng.integers(12, 15)) if power_of_two else rng.uniform(0.05, 0.4) / 2688
        found[name] = Packed(rng, module.out_features, module.in_features, shared.setdefault(group, g))
    return found


def tensors(packed, layout, input_scale=0.01):
    """A linear's tensors in a layout. compressed-tensors' global scales are reciprocals, in FP32, of shape (1,)."""
    scales = torch.from_numpy(packed.scales).view(torch.float8_e4m3fn)
    if layout == "modelopt":
        own = {"weight": packed.bytes(), "weight_scale": scales, "weight_scale_2": torch.tensor(packed.g)}
        return own | ({} if input_scale is None else {"input_scale": torch.tensor(input_scale)})
    inverse = np.float32(1) / packed.g
    own = {"weight_packed": packed.bytes(), "weight_scale": scales, "weight_global_scale": torch.tensor([inverse])}
    return own | ({} if input_scale is None else {"input_global_scale": torch.tensor([1 / input_scale])})


def write(folder, layout, model=None, weights=None, settings=None, shards=3, input_scale=0.01, change=None):
    """Write a checkpoint and return its quantised weights. ``change(state)`` may spoil the tensors."""
    model = tiny_llama(torch.bfloat16) if model is None else model
    weights = quantised(model) if weights is None else weights
    model.save_pretrained(folder)
    state = {name: t.clone() for name, t in model.state_dict().items() if name.removesuffix(".weight") not in weights}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, packed in weights.items():
        state |= {f"{name}.{leaf}": t for leaf, t in tensors(packed, layout, input_scale).items()}
    if change is not None:
        change(state)
    (folder / "model.safetensors").unlink()
    names, files = sorted(state), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name].contiguous() for name in names[i::shards]}  # a linear's tensors in different files
        save_file(part, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    edit_config(folder, settings or SETTINGS[layout])
    return weights


def edit_config(folder, settings):
    """Put settings (None: none) into config.json."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def as_loaded(model, folder):
    """Through from_pretrained: the buffers of its rotary embedding are then in FP32, which .to(bfloat16) has rounded."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=model.dtype)


def dense_model(model, weights):
    """The same model with the weights' values, by NumPy."""
    model = copy.deepcopy(model)
    for name, w in weights.items():
        model.get_submodule(name).weight.data = w.values().to(model.dtype)
    return model
