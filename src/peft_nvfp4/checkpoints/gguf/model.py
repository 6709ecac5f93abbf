"""A model as one GGUF file."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .families import CONVERTER, Family, added_tensors, family_of, rows, write_sizes
from .packed import add_packed, packed_linears, stays_packed
from .tokenizer import read_vocabulary, strips_like_phi3, write_vocabulary

DTYPES = ("f32", "f16", "bf16", "q8_0")
"""Of a dense model; ``"nvfp4"`` is that of a frozen one."""


def export_gguf(model: nn.Module, tokenizer: Any, path: str | Path, dtype: str = "bf16") -> Path:
    """Write a model and its tokenizer as a GGUF file.

    Args:
        model: a transformers model without adapters: what :func:`peft_nvfp4.merge` returns.
        tokenizer: its fast tokenizer.
        dtype: of a dense model's matrices: ``"f32"``, ``"f16"``, ``"bf16"`` or ``"q8_0"`` (8 bits, in blocks of 32). ``"nvfp4"``
            of a model that is frozen in NVFP4: its own codes and scales, and BF16 for what is dense in it.

    Raises:
        ValueError: a model or tokenizer that is not among those of :mod:`.families` and :mod:`.tokenizer`; a weight that FP16
            cannot hold.

    After an error, and while the file is written (as ``<name>.part``), there is no file of that name that was not there before.
    """
    gguf = require_gguf()
    if dtype not in (*DTYPES, "nvfp4"):
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, nvfp4, got {dtype!r}")
    if dtype == "nvfp4" and not hasattr(gguf.GGMLQuantizationType, "NVFP4"):
        raise ImportError("this version of the gguf package does not know NVFP4: pip install --upgrade gguf")
    family = _check_model(model, dtype)
    config = model.config
    packed = packed_linears(model, family) if dtype == "nvfp4" else {}
    vocabulary = read_vocabulary(tokenizer, config.vocab_size)
    with written(path, family.architecture) as writer:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if dtype == 'f32' else 'MOSTLY'}_{dtype.upper()}"])
        writer.add_name("Phi-3" if strips_like_phi3(tokenizer) else type(model).__name__.removesuffix("ForCausalLM").rstrip("3"))
        write_sizes(writer, config, family)
        write_vocabulary(writer, vocabulary, tokenizer)
        for name, layer in packed.items():
            target = gguf_name(f"{name}.weight", config, family)
            if stays_packed(name, layer):
                add_packed(writer, target, name, layer, config, family)
            else:
                ((_, values),) = rows(f"{name}.weight", layer.dequantize(), config, family)
                add_tensor(writer, target, values, "bf16")
        hidden = {f"{name}.{leaf}" for name, layer in packed.items() for leaf in layer.packed_tensors()}
        for name, tensor in _tensors(model, family, hidden):
            add_tensor(writer, name, tensor, "bf16" if packed else dtype)
    return Path(path)


def require_gguf() -> Any:
    """The ``gguf`` package. Raises ImportError, with what to install, without it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("writing GGUF needs the gguf package: pip install gguf") from error
    return gguf


@contextmanager
def written(path: str | Path, architecture: str) -> Iterator[Any]:
    """A writer, whose file is at ``path`` when the block ends without an error."""
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    writer = require_gguf().GGUFWriter(part, architecture)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    finally:  # after an error, such as a full disk, too
        writer.close()
        part.unlink(missing_ok=True)


def gguf_name(name: str, config: Any, family: Family) -> str:
    """GGUF's name of a weight. Raises ValueError where llama.cpp has no place for it."""
    import gguf

    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture.upper()], config.num_hidden_layers)
    if (target := known.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
        raise ValueError(f"GGUF's {family.architecture} has no place for {name}. {CONVERTER}")
    return target


def add_tensor(writer: Any, name: str, tensor: Tensor, dtype: str) -> None:
    """A matrix in the wanted type; the rest (and rows that Q8_0's blocks do not divide) in FP32."""
    import gguf

    plain = dtype == "f32" or tensor.ndim < 2 or dtype == "q8_0" and tensor.shape[-1] % 32
    if not plain and dtype == "f16" and tensor.abs().max() > torch.finfo(torch.float16).max:
        raise ValueError(f"{name} holds {tensor.abs().max():.3g}, more than FP16 can: write dtype='bf16' or 'f32'")
    values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    writer.add_tensor(name, values if plain else gguf.quants.quantize(values, kind), raw_dtype=None if plain else kind)


def _check_model(model: nn.Module, dtype: str) -> Family:
    family = family_of(getattr(model, "config", None), type(model).__name__)
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError("the model carries an adapter: merge it into a dense format first (peft_nvfp4.merge)")
    if dtype != "nvfp4" and (packed := [name for name, p in model.named_parameters() if not p.is_floating_point()]):
        raise ValueError(f"{packed[0]} is packed: write dtype='nvfp4', or make the model dense with peft_nvfp4.dequantize_model")
    return family


def _tensors(model: nn.Module, family: Family, hidden: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """(GGUF's name, values as llama.cpp has them), but for those of the names ``hidden``."""
    config, state = model.config, {name: t for name, t in model.state_dict().items() if name not in hidden}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    for name, tensor in state.items():
        # a head that was trained by itself is its own matrix, whatever the config says
        if tied and name == "lm_head.weight" and tensor.data_ptr() == state["model.embed_tokens.weight"].data_ptr():
            continue
        if family.shift and name.endswith("norm.weight"):
            tensor = tensor.float() + family.shift
        for part, values in rows(name, tensor, config, family):
            yield gguf_name(part, config, family), values
    yield from added_tensors(config)
