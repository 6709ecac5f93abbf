"""Calibration data: what users have, turned into batches that a model's forward takes.

    list of texts + tokenizer    shuffled, joined with the end-of-text token, cut into sequences of equal length: no padding
    datasets.Dataset             its column "input_ids" if it has one, else "text" (+ tokenizer)
    token ids                    a tensor (S, T), or a list of lists, cut or joined as texts are
    batches                      a list of dicts (of a processor, with images): passed to the model's forward as they are

The same data, settings and seed give the same batches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]


def batches(
    data: Any, tokenizer: Any = None, *, samples: int = 128, seq_len: int = 2048, batch_size: int = 1, seed: int = 0
) -> list[Batch]:
    """Batches for calibration.

    Args:
        samples: sequences at most.
        seq_len: tokens of a sequence; fewer if the data holds less than one.
        batch_size: sequences run at a time.

    Raises:
        ValueError: no data, texts without a tokenizer, or something that is none of the above.
    """
    if isinstance(data, Tensor) and data.ndim == 2:
        return _stack(list(data[:samples, :seq_len]), batch_size)
    rows = _rows(data)
    if not rows:
        raise ValueError("no calibration data")
    if isinstance(rows[0], Mapping):
        return [dict(row) for row in rows[:samples]]
    if isinstance(rows[0], str):
        if tokenizer is None:
            raise ValueError("calibration texts need their tokenizer: calibrate(model, texts, tokenizer=...)")
        random.Random(seed).shuffle(rows := list(rows))
        rows = _tokenized(rows, tokenizer, samples * seq_len)
    elif not isinstance(rows[0], Sequence | Tensor):
        raise ValueError(f"calibration data is texts, token ids or batches (dicts), got a {type(rows[0]).__name__}")
    return _stack(_pack([torch.as_tensor(row).flatten() for row in rows], samples, seq_len), batch_size)


def _rows(data: Any) -> list:
    if isinstance(data, str | Mapping):
        return [data]
    columns = getattr(data, "column_names", None)
    if columns is None:
        return list(data)
    for column in ("input_ids", "text"):
        if column in columns:
            return list(data[column])
    raise ValueError(f"a dataset for calibration has a column 'input_ids' or 'text'; this one has {', '.join(columns)}")


def _tokenized(texts: list[str], tokenizer: Any, wanted: int) -> list[list[int]]:
    """Token ids of as many texts as are needed, each ended by the end-of-text token."""
    rows, total = [], 0
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        rows.append(tokenizer(text).input_ids + end)
        total += len(rows[-1])
        if total >= wanted:
            break
    return rows


def _pack(rows: list[Tensor], samples: int, seq_len: int) -> list[Tensor]:
    """Sequences of ``seq_len`` tokens, cut from the rows joined; what is left over is dropped, unless there is nothing else."""
    tokens = torch.cat(rows)[: samples * seq_len]
    if tokens.numel() < seq_len:
        return [tokens]
    return list(tokens[: tokens.numel() // seq_len * seq_len].view(-1, seq_len))


def _stack(rows: list[Tensor], batch_size: int) -> list[Batch]:
    return [{"input_ids": torch.stack(rows[i : i + batch_size]).long()} for i in range(0, len(rows), batch_size)]


def token_mask(batch: Batch) -> Tensor | None:
    """(B, T) bool, True for tokens that are not padding; None if there is none."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask.bool().all()):
        return None
    return mask.bool()
