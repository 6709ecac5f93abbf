"""``peft-nvfp4 eval``: what a model, with or without an adapter, does on data.

| data | scored |
|---|---|
| classification | accuracy and macro F1 of the likeliest label, perplexity |
| prompt, chat | exact match, F1 of words and ROUGE-L of the answer (greedy), perplexity of the reference |
| text | perplexity |

Perplexity is that of the tokens that training would learn from, each weighing the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import metrics, texts

CHUNK = 256
"""Positions whose logits exist in FP32 at one time."""


@dataclass
class Score:
    """Attributes:
    format, rows: of the data.
    scores: name -> value, in [0, 1] but for ``perplexity`` and ``nll`` (nats a token).
    samples: some rows with what the model said.
    """

    format: str
    rows: int
    scores: dict[str, float]
    samples: list[dict[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Say = Callable[[int, int], None]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    rows: texts.Rows,
    *,
    batch: int = 8,
    max_length: int = 1024,
    max_new_tokens: int = 64,
    generate: bool = True,
    samples: int = 3,
    progress: Say = lambda done, total: None,
) -> Score:
    """Score a model on rows.

    Args:
        generate: also let it answer (of ``prompt`` and ``chat``), which takes most of the time.
        progress: called with rows done and their number.
    """
    model.eval()
    encoded = texts.encode(rows, tokenizer, max_length)
    answers = generate and rows.format in ("prompt", "chat")
    total = len(encoded.rows) + len(rows.rows) * (answers or rows.format == "classification")
    losses = _losses(model, tokenizer, encoded.rows, batch, lambda n: progress(n, total))
    counts = torch.tensor([sum(label != texts.IGNORED for label in row["labels"][1:]) for row in encoded.rows])
    nll = float(losses.sum() / counts.sum())
    score = Score(rows.format, len(rows.rows), {"nll": nll, "perplexity": math.exp(min(nll, 700.0))})
    further = lambda n: progress(len(encoded.rows) + n, total)
    if rows.format == "classification":
        found = _labels(model, tokenizer, rows, batch, max_length, further)
        true = [row["label"] for row in rows.rows]
        score.scores = {"accuracy": metrics.accuracy(found, true), "macro_f1": metrics.macro_f1(found, true), **score.scores}
        shown = zip(rows.rows, found)
        score.samples = [{"prompt": r["prompt"], "expected": r["label"], "answer": f} for r, f in shown][:samples]
    elif answers:
        _answer(model, tokenizer, rows, batch, max_length, max_new_tokens, samples, score, further)
    return score


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _sorted_batches(rows: Sequence[dict], size: int) -> list[list[int]]:
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    return [order[i : i + size] for i in range(0, len(order), size)]


def _losses(model: nn.Module, tokenizer: Any, rows: Sequence[dict], size: int, progress: Callable[[int], None]) -> Tensor:
    """Summed negative log-likelihood of every row's labels."""
    collate, out, done = texts.Collator(tokenizer.pad_token_id), torch.zeros(len(rows), dtype=torch.float64), 0
    for indices in _sorted_batches(rows, size):
        inputs = {k: v.to(_device(model)) for k, v in collate([rows[i] for i in indices]).items()}
        labels = inputs.pop("labels")
        logits = model(**inputs, use_cache=False).logits
        out[indices] = _negative_log_likelihood(logits[:, :-1], labels[:, 1:]).double().cpu()
        done += len(indices)
        progress(done)
    return out


def _negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """(B,) sums over positions with a label."""
    total = logits.new_zeros(len(logits), dtype=torch.float32)
    for at in range(0, logits.shape[1], CHUNK):
        part, target = logits[:, at : at + CHUNK].float(), labels[:, at : at + CHUNK]
        loss = F.cross_entropy(part.transpose(1, 2), target, ignore_index=texts.IGNORED, reduction="none")
        total += loss.sum(1)
    return total


def _labels(model, tokenizer, rows: texts.Rows, size: int, max_length: int, progress: Callable[[int], None]) -> list[str]:
    """The likeliest label of every row: by the mean log-likelihood of its tokens after the prompt."""
    words = [texts.completion_ids(f" {label}", tokenizer) for label in rows.labels]
    if any(not word for word in words):
        raise ValueError("a label has no tokens of its own in this tokenizer")
    room = max_length - max(map(len, words))
    if room < 1:
        raise ValueError(f"max_length {max_length} is shorter than the labels")
    candidates = []
    for row in rows.rows:
        prompt = texts.prompt_ids(row, tokenizer)[-room:]
        candidates += [{"input_ids": prompt + w, "labels": [texts.IGNORED] * len(prompt) + w} for w in words]
    per = len(words)
    losses = _losses(model, tokenizer, candidates, size, lambda n: progress(n // per)).view(-1, per)
    best = (losses / torch.tensor([len(w) for w in words], dtype=torch.float64)).argmin(1)
    return [rows.labels[i] for i in best.tolist()]


def _answer(model, tokenizer, rows, size, max_length, new_tokens, samples, score: Score, progress: Callable[[int], None]) -> None:
    """Let the model answer, and compare."""
    prompts, references = [], []
    for row in rows.rows:
        if rows.format == "chat":
            last = max(i for i, m in enumerate(row["messages"]) if m["role"] == "assistant")
            prompts.append(texts.chat_ids(row["messages"][:last], tokenizer, reply=True)[-max_length:])
            references.append(str(row["messages"][last]["content"]))
        else:
            prompts.append(texts.prompt_ids(row, tokenizer)[-max_length:])
            references.append(row["completion"])
    answers = [""] * len(prompts)
    done = 0
    for indices in _sorted_batches([{"input_ids": p} for p in prompts], size):
        for i, text in zip(indices, _generate(model, tokenizer, [prompts[i] for i in indices], new_tokens)):
            answers[i] = text
        done += len(indices)
        progress(done)
    named = {"exact_match": metrics.exact_match, "f1": metrics.word_f1, "rouge_l": metrics.rouge_l}
    found = {k: sum(f(a, r) for a, r in zip(answers, references)) / len(answers) for k, f in named.items()}
    score.scores = {**found, **score.scores}
    shown = zip(prompts, references, answers)
    score.samples = [{"prompt": tokenizer.decode(p), "expected": r.strip(), "answer": a} for p, r, a in shown][:samples]


def _generate(model: nn.Module, tokenizer: Any, prompts: list[list[int]], new_tokens: int) -> list[str]:
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=_device(model))
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=_device(model))
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=pad)
    return [text.strip() for text in tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)]
