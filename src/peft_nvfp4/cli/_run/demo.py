"""``peft-nvfp4 demo``: the packaged model learns sentiment on two backends, from fetching to the table."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import models


@dataclass
class Row:
    """One line of the table."""

    name: str
    accuracy: float
    nll: float
    frozen_mb: float
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(
    backends: list[str],
    steps: int,
    rows: int,
    layers: int | None = None,
    seed: int = 0,
    report: Callable[[str, int, float], None] = lambda backend, step, loss: None,
) -> list[Row]:
    """Before training, then every backend: the same sentences in the same order, from the same initial adapter.

    Raises:
        RuntimeError: model or data are not there and cannot be fetched.
    """
    from peft import get_peft_model

    from ... import NVFP4LoraConfig, data, frozen_bytes

    data.fetch()
    device = models.default_device()
    dtype = models.choose_dtype("auto", device)
    train, test = data.movie_reviews(seed, rows)
    model, tokenizer = data.load_smollm2(dtype, layers)
    before = data.evaluate(model.to(device), tokenizer, test)
    head = model.get_output_embeddings()
    dense = 2 * sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
    found = [Row("before training", before.accuracy, before.nll, dense / 1e6)]
    for backend in backends:
        model, tokenizer = data.load_smollm2(dtype, layers)
        torch.manual_seed(seed)
        config = NVFP4LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", backend=backend)
        model = get_peft_model(model.to(device), config)
        start, said = time.perf_counter(), lambda step, loss: report(backend, step, loss)
        data.fine_tune(model, tokenizer, train, steps=steps, lr=4e-4, warmup=max(steps // 10, 1), seed=seed, progress=said)
        seconds = time.perf_counter() - start
        score = data.evaluate(model, tokenizer, test)
        found.append(Row(backend, score.accuracy, score.nll, frozen_bytes(model) / 1e6, seconds))
        del model
        gc.collect()
    return found
