"""Calibration data: what users have, turned into batches that a model's forward takes.

    texts, conversations    with the tokenizer: shuffled, joined with the end-of-text token, cut into sequences of equal length
    token ids               a tensor or array (S, T), or a list of lists: joined and cut likewise
    rows                    dicts, or a datasets.Dataset (streamed or not), with "input_ids" (what "attention_mask" leaves out is
                            dropped), "messages" (and "tools", for the chat template) or "text": as above
    batches                 dicts of tensors (a processor's, with images; a DataLoader): passed to the model's forward as they are

Where a tokenizer begins every text with a token of its own, every sequence begins with it: models that were trained with one
behave differently without. The same data, settings and seed give the same batches.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]

COLUMNS = ("input_ids", "messages", "text")
"""Of a row, the first that is there counts."""
STREAMED = 32
"""Rows taken from an endless stream, for every sequence that is wanted."""


def batches(
    data: Any, tokenizer: Any = None, *, samples: int = 128, seq_len: int = 2048, batch_size: int = 1, seed: int = 0
) -> list[Batch]:
    """Batches for calibration.

    Args:
        tokenizer: for texts and conversations; a processor will do.
        samples: sequences at most; of ready-made batches, so many batches.
        seq_len: tokens of a sequence; fewer if the data holds less than one.
        batch_size: sequences run at a time.
    """
    if isinstance(data, Tensor) or hasattr(data, "__array_interface__"):
        ids = _ids(data)
        if ids.ndim == 2 and ids.numel():
            return _stack(list(ids[:samples, :seq_len]), batch_size)
        data = [ids] if ids.numel() else []
    rows = _rows(data, samples)
    if not rows:
        raise ValueError("no calibration data")
    if isinstance(rows[0], Mapping) and _is_batch(rows[0]):
        return [dict(row) for row in rows[:samples]]
    rows, first = [_content(row) for row in rows], None
    if not isinstance(rows[0], Tensor):
        if tokenizer is None:
            raise ValueError("calibration texts need their tokenizer: calibrate(model, texts, tokenizer=...)")
        random.Random(seed).shuffle(rows)
        rows, first = _tokenized(rows, getattr(tokenizer, "tokenizer", tokenizer), samples * seq_len)
    elif any(not isinstance(row, Tensor) for row in rows):
        raise ValueError("calibration data is all token ids or all text, not some of each")
    return _stack(_pack(rows, samples, seq_len, first), batch_size)


def _rows(data: Any, samples: int) -> list:
    """Texts, rows or batches as a list."""
    if isinstance(data, str):
        return [data]
    if isinstance(data, Mapping):
        if any(hasattr(part, "column_names") for part in data.values()):
            raise ValueError(f"these are several datasets; give one of them for calibration: {', '.join(map(repr, data))}")
        return [data]
    if not isinstance(data, Iterable):
        raise ValueError(f"calibration data is texts, token ids, a dataset or batches, got a {type(data).__name__}")
    columns = getattr(data, "column_names", None)
    if columns is not None:
        if "pixel_values" in columns:
            raise ValueError("a dataset with images goes in as batches of its processor: a list of dicts, or a DataLoader")
        if not any(column in columns for column in COLUMNS):
            raise ValueError(
                f"a dataset for calibration has a column {', '.join(map(repr, COLUMNS[:-1]))} or {COLUMNS[-1]!r}; this one has "
                f"{', '.join(columns)}"
            )
    return list(data) if hasattr(data, "__len__") else list(itertools.islice(data, STREAMED * samples))


def _is_batch(row: Mapping) -> bool:
    """Whether a dict is what a forward takes, and not one row with text or token ids."""
    tensors = [value for value in row.values() if isinstance(value, Tensor)]
    ids = row.get("input_ids")
    return bool(tensors) and (ids is None or isinstance(ids, Tensor) and ids.ndim == 2)


def _content(row: Any) -> Any:
    """The text (a string), the conversation (a list of messages) or the token ids (a tensor) of a row."""
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping):
        if "pixel_values" in row:
            raise ValueError("batches with images need input_ids (B, T): call the processor with return_tensors='pt'")
        key = next((key for key in COLUMNS if key in row), None)
        if key is None:
            raise ValueError(f"a row of calibration data has one of {', '.join(COLUMNS)}; this one has {', '.join(row)}")
        if key == "messages" and row.get("tools"):
            return row
        if key != "input_ids":
            return row[key]
        ids, mask = _ids(row["input_ids"]).flatten(), row.get("attention_mask")
        return ids if mask is None else ids[_ids(mask).flatten().bool()]
    if isinstance(row, Sequence) and row and isinstance(row[0], Mapping):
        return row
    if not isinstance(row, Sequence | Tensor) and not hasattr(row, "__array_interface__"):
        raise ValueError(f"calibration data is texts, token ids or batches (dicts), got a {type(row).__name__}")
    return _ids(row).flatten()


def _ids(values: Any) -> Tensor:
    """Token ids as a tensor."""
    try:
        ids = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError) as error:
        raise ValueError(f"token ids are integers, in rows of one length ({error})") from error
    if ids.is_floating_point() and ids.numel():
        raise ValueError(f"token ids are integers, got {ids.dtype}")
    return ids


def _tokenized(texts: list, tokenizer: Any, wanted: int) -> tuple[list[Tensor], int | None]:
    """Token ids of as many texts as are needed, each ended by the end-of-text token; and the token that the tokenizer begins
    texts with, which is left out of them."""
    rows, total = [], 0
    bos, eos = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos"))
    # asked of a plain text: the template of a conversation may begin with the same token for another reason
    first = bos if bos is not None and list(tokenizer("a").input_ids)[:1] == [bos] else None
    for text in texts:
        if not text:
            continue
        if isinstance(text, str):
            ids = list(tokenizer(text).input_ids)
        else:
            row = text if isinstance(text, Mapping) else {"messages": text}
            tools = json.loads(tools) if isinstance(tools := row.get("tools"), str) else tools
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False, **({"tools": tools} if tools else {}))
            ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        ids = ids[1:] if first is not None and ids[:1] == [first] else ids
        ids += [] if eos is None or ids[-1:] == [eos] else [eos]
        rows.append(torch.tensor(ids, dtype=torch.long, device="cpu"))
        total += len(ids)
        if total >= wanted:
            break
    if not rows:
        raise ValueError("no calibration data: all texts are empty")
    return rows, first


def _pack(rows: list[Tensor], samples: int, seq_len: int, first: int | None = None) -> list[Tensor]:
    """Sequences of ``seq_len`` tokens, cut from the rows joined; what is left over is dropped, unless there is nothing else."""
    head = torch.tensor([] if first is None else [first], dtype=torch.long, device="cpu")
    body = max(seq_len - len(head), 1)
    tokens = torch.cat([row.long() for row in rows])[: samples * body]
    if not tokens.numel():
        raise ValueError("no calibration data: no token is left")
    parts = [tokens] if tokens.numel() < body else tokens[: tokens.numel() // body * body].view(-1, body)
    return [torch.cat([head, part]) for part in parts]


def _stack(rows: list[Tensor], batch_size: int) -> list[Batch]:
    return [{"input_ids": torch.stack(rows[i : i + batch_size]).long()} for i in range(0, len(rows), batch_size)]


def token_mask(batch: Batch) -> Tensor | None:
    """(B, T) bool, True for tokens that are not padding; None if there is none."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask.bool().all()):
        return None
    return mask.bool()


def count_tokens(data: Sequence[Batch]) -> int:
    """Tokens of some batches, without padding; 0 for batches without token ids."""
    masks = [token_mask(batch) for batch in data]
    return sum(batch["input_ids"].numel() if m is None else int(m.sum()) for batch, m in zip(data, masks) if "input_ids" in batch)
