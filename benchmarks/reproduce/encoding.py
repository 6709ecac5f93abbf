"""Rows as tensors of one shape, so that a CUDA graph recorded for a task's first batch serves all of them.

Prompt and target are tokenised apart and joined; padding is on the right, where a causal decoder needs no mask. ``at`` are the
positions whose next token is learned or scored, ``labels`` those tokens (-100: none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .prompts import Item
from .tasks import GENERATED, Task

IGNORED = -100


@dataclass(frozen=True)
class Encoded:
    """Sequences on the CPU: ids (N, T), at (N, L), labels (N, L), int64."""

    ids: Tensor
    at: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.ids)


class Supervised(NamedTuple):
    """The positions of some sequences (N, T) that have a label, in one row each: the head runs at these only."""

    place: Tensor  # (P,) of the flattened (N * T)
    label: Tensor  # (P,)
    owner: Tensor  # (P,) sequence

    def to(self, device: torch.device | str) -> Supervised:
        return Supervised(*(t.to(device) for t in self))


def supervised(at: Tensor, labels: Tensor, length: int) -> Supervised:
    """Of (N, L) ``at`` and ``labels``."""
    owner, column = (labels != IGNORED).nonzero(as_tuple=True)
    return Supervised(owner * length + at[owner, column], labels[owner, column], owner)


class WithTexts:
    """A tokenizer that has read the texts of some items already, all in one call: one by one they take ten times as long."""

    def __init__(self, tokenizer: Any, items: Sequence[Item]):
        texts = (text for item in items for text in (item.context, item.question, item.target, *item.candidates))
        self.eos_token_id = tokenizer.eos_token_id
        unique = list(dict.fromkeys(text for text in texts if text))
        self.ids = dict(zip(unique, tokenizer(unique, add_special_tokens=False).input_ids)) if unique else {}

    def __call__(self, text: str, add_special_tokens: bool = False) -> SimpleNamespace:
        return SimpleNamespace(input_ids=self.ids[text])


def tokens(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids if text else []


def prompt_ids(item: Item, tokenizer: Any, room: int) -> list[int]:
    """The context loses its end and, where the question alone is too long, the question its beginning."""
    question = tokens(item.question, tokenizer)
    if len(question) >= room:
        return question[-room:]
    return tokens(item.context, tokenizer)[: room - len(question)] + question


def target_ids(text: str, tokenizer: Any, task: Task) -> list[int]:
    """A target; a generated one ends with the end-of-text token."""
    end = [tokenizer.eos_token_id] if task.kind == GENERATED else []
    return tokens(text, tokenizer) + end


def encode(pairs: Sequence[tuple[list[int], list[int]]], length: int, answer: int, pad: int = 0) -> Encoded:
    """(prompt, target) pairs, no longer than ``length`` together, with targets of at most ``answer`` tokens."""
    ids = torch.full((len(pairs), length), pad)
    at = torch.zeros(len(pairs), answer, dtype=torch.int64)
    labels = torch.full((len(pairs), answer), IGNORED)
    for row, (prompt, target) in enumerate(pairs):
        ids[row, : len(prompt) + len(target)] = torch.tensor(prompt + target)
        at[row, : len(target)] = torch.arange(len(prompt) - 1, len(prompt) + len(target) - 1)
        labels[row, : len(target)] = torch.tensor(target)
    return Encoded(ids, at, labels)


def training_set(items: Sequence[Item], task: Task, tokenizer: Any, limit: int | None = None) -> Encoded:
    """Prompt and right answer of every row whose target is not too long."""
    pairs, items = [], items[:limit]
    tokenizer = WithTexts(tokenizer, items)
    for item in items:
        target = target_ids(item.target, tokenizer, task)
        if 0 < len(target) <= task.answer:
            pairs.append((prompt_ids(item, tokenizer, task.length - len(target)), target))
    if not pairs:
        raise ValueError(f"no row of {task.name} has a target of at most {task.answer} tokens")
    return encode(pairs, task.length, max(len(target) for _, target in pairs))


def order(rows: int, steps: int, batch: int, seed: int) -> Tensor:
    """(steps, batch) rows of every step: whole shuffled passes, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    passes = -(-steps * batch // rows)
    flat = torch.cat([torch.randperm(rows, generator=generator) for _ in range(passes)])
    return flat[: steps * batch].view(steps, batch)
