"""``peft-nvfp4 statistics``: measure a model on a user's data, and the result as a table and as heat maps.

What is measured, and how: :mod:`peft_nvfp4.diagnostics.statistics`.
"""

from __future__ import annotations

from typing import Any

from peft import PeftModel, get_peft_model

from ...diagnostics.plots import PERCENT, short
from ...diagnostics.statistics import Statistics, TensorStatistics, tensor_statistics
from ...fusion.loss_attach import attach_loss
from ...lora.config import NVFP4LoraConfig
from . import models, options


def measure(
    name: str | None,
    dataset: str,
    *,
    adapter: str | None = None,
    columns: dict[str, str] | None = None,
    limit: int = 8,
    batch: int = 2,
    max_length: int = 512,
    rows: int | None = None,
    layers: int | None = None,
    dtype: str = "auto",
    **lora: Any,
) -> Statistics:
    """Statistics of a model on the first ``limit`` rows of a data file, frozen and with a fresh adapter, or with a trained one.

    Args:
        lora: fields of ``NVFP4LoraConfig``; without an adapter.
    """
    from . import evaluation, texts  # they need what only the command line has

    if adapter is None and name is None:
        raise ValueError("give a model, an adapter, or both")
    device = models.default_device()
    if adapter is None:
        config = options.frozen_config({"target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora})
    else:
        config, layers = NVFP4LoraConfig.from_pretrained(adapter), layers or models.trained_layers(adapter)
    data = texts.read(dataset, columns=columns, limit=limit)
    name = name or models.base_of_adapter(adapter)
    base, tokenizer = models.load(name, models.choose_dtype(dtype, device), device, layers, config.options)
    encoded = [row for row in evaluation.encode(data, tokenizer, max_length) if row is not None]
    if not encoded:
        raise ValueError(f"no row has anything to learn within {max_length} tokens: raise --max-length")
    dense = {key: p.detach() for key, p in base.named_parameters() if p.is_floating_point()}
    if adapter is None:
        model = get_peft_model(base, config)
    else:
        model = PeftModel.from_pretrained(base, adapter, config=config, is_trainable=True)  # trainable: gradients come back
    attach_loss(model.to(device).train())
    collate = evaluation.collator(tokenizer)
    batches = (collate(encoded[i : i + batch]) for i in range(0, len(encoded), batch))
    return tensor_statistics(model, batches, weights=dense, rows=rows)


# ---------------------------------------------------------------------------------------------- as a table


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def cells(name: str, site: str, s: TensorStatistics) -> tuple[str, ...]:
    """One row of the table of layers: what :data:`HEADER` says."""
    scales = "–" if s.scale_min is None else f"{s.scale_min:.2g}–{s.scale_max:.3g}"
    mark = "" if s.used else " *"
    return (short(name), site + mark, *(percent(getattr(s, number)) for number in PERCENT), f"{s.amax:.3g}", scales)


HEADER = ("layer", "tensor", "error", "underfl.", "satur.", "amax", "scales")
"""Of :func:`cells`."""
