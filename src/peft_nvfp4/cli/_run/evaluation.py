"""``peft-nvfp4 eval``: what a model, with or without an adapter, does on data.

| data | scored |
|---|---|
| classification | accuracy and macro F1 of the likeliest label, perplexity |
| prompt, chat | exact match, F1 of words (SQuAD's) and ROUGE-L of the answer (greedy), perplexity of the reference |
| text | perplexity |

Perplexity is that of the tokens that training would learn from, each weighing the same. Every turn of the assistant in a
conversation is an answer. Rows are cut as TRL cuts them for training: at their end, and a row whose prompt alone fills the
maximum length is left out. The metrics are torchmetrics'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score
from torchmetrics.functional.text import rouge_score, squad
from tqdm.auto import tqdm
from transformers import DataCollatorForSeq2Seq, pipeline

from .texts import Rows

IGNORED = -100
"""The label of a position that is not scored."""
SAMPLES = 3
"""Rows that are shown with the model's answer."""


@dataclass
class Score:
    """What a model does on ``rows`` rows of a format."""

    format: str
    rows: int
    left_out: int  # rows whose prompt alone fills the maximum length
    scores: dict[str, float]  # name -> value, in [0, 1] but for ``perplexity`` and ``nll`` (nats a token)
    samples: list[dict[str, str]] = field(default_factory=list)  # some rows with what the model answered


def encode(rows: Rows, tokenizer: Any, max_length: int) -> dict[int, dict[str, list[int]]]:
    """Number of a row -> its ``input_ids`` and ``labels``, where these are not empty within ``max_length`` tokens."""
    eos = "" if rows.conversational else tokenizer.eos_token or ""  # a template writes it itself
    pairs = rows.rendered(tokenizer)
    encoded = [_encode(p, c.removesuffix(eos) + eos, tokenizer, max_length, rows.conversational) for p, c in pairs]
    if not any(encoded):
        raise ValueError(f"no row has anything to learn or to score within {max_length} tokens: raise --max-length")
    return {number: row for number, row in enumerate(encoded) if row is not None}


def _encode(prompt: str, completion: str, tokenizer: Any, max_length: int, templated: bool) -> dict[str, list[int]] | None:
    """What is scored starts where the tokens of the prompt alone and those of both part."""
    both, alone = (tokenizer(text, add_special_tokens=not templated).input_ids for text in (prompt + completion, prompt))
    both, alone = both[:max_length], alone if prompt else []
    start = next((i for i, (a, b) in enumerate(zip(both, alone)) if a != b), min(len(both), len(alone)))
    first = max(start, 1)  # nothing foretells the first token
    return {"input_ids": both, "labels": [IGNORED] * start + both[start:]} if len(both) > first else None


def collator(tokenizer: Any) -> DataCollatorForSeq2Seq:
    """Of encoded rows: padded on the right to a multiple of 8."""
    tokenizer.padding_side = "right"
    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED, pad_to_multiple_of=8)


@torch.no_grad()
def evaluate(
    model: nn.Module, tokenizer: Any, rows: Rows, *, batch: int, max_length: int, max_new_tokens: int, generate: bool
) -> Score:
    """Score a model on rows; with ``generate`` it also answers (``prompt`` and ``chat``), which takes most of the time."""
    model.eval()
    format, rows = rows.format, rows.by_turn()
    encoded = encode(rows, tokenizer, max_length)
    losses, counts = _losses(model, tokenizer, list(encoded.values()), batch)
    nll = float(losses.sum() / counts.sum())
    score = Score(format, len(encoded), len(rows.data) - len(encoded), {"nll": nll, "perplexity": math.exp(min(nll, 700.0))})
    prompts, expected = zip(*(pair for number, pair in enumerate(rows.pairs()) if number in encoded))
    if rows.format == "classification":
        answers = _labels(model, tokenizer, prompts, rows.labels, batch, max_length)
        score.scores = {**_label_scores(answers, expected, rows.labels), **score.scores}
    elif rows.format == "prompt" and generate:
        answers = _answers(model, tokenizer, list(prompts), batch, max_new_tokens)
        expected = [text if isinstance(text, str) else str(text[-1]["content"]) for text in expected]
        score.scores = {**_answer_scores(answers, expected), **score.scores}
    else:
        return score
    shown = zip(prompts[:SAMPLES], expected, answers)
    score.samples = [{"prompt": str(p), "expected": e.strip(), "answer": a.strip()} for p, e, a in shown]
    return score


def _losses(model: nn.Module, tokenizer: Any, rows: Sequence[dict], size: int) -> tuple[Tensor, Tensor]:
    """(summed negative log-likelihood, number) of every row's labels, in FP64. FP32 logits exist of one row at a time."""
    collate, (losses, counts) = collator(tokenizer), torch.zeros(2, len(rows), dtype=torch.float64, device="cpu")
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))  # rows of similar length: little padding
    for at in tqdm(range(0, len(rows), size), desc="Scoring", unit="batch"):
        numbers = order[at : at + size]
        inputs = collate([rows[i] for i in numbers]).to(model.device)
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        for number, row, label in zip(numbers, logits, labels):
            losses[number] = F.cross_entropy(row.float(), label, ignore_index=IGNORED, reduction="sum")
            counts[number] = (label != IGNORED).sum()
    return losses, counts


def _labels(model: nn.Module, tokenizer: Any, prompts: Sequence[str], labels: Sequence[str], size: int, length: int) -> list[str]:
    """The likeliest completion of every prompt: by the mean log-likelihood of its tokens."""
    candidates = [_encode(prompt, label, tokenizer, length, False) for prompt in prompts for label in labels]
    if None in candidates:
        raise ValueError("a label has no tokens of its own in this tokenizer")
    losses, counts = _losses(model, tokenizer, candidates, size)
    return [labels[i] for i in (losses / counts).view(-1, len(labels)).argmin(1).tolist()]


def _answers(model: nn.Module, tokenizer: Any, prompts: list, size: int, new_tokens: int) -> list[str]:
    """What the model says after every prompt, greedy."""
    tokenizer.padding_side = "left"
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    results = generator(prompts, batch_size=size, max_new_tokens=new_tokens, do_sample=False, return_full_text=False)
    return [result[0]["generated_text"] for result in results]


def _label_scores(answers: Sequence[str], expected: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    pair = [torch.tensor([labels.index(text) for text in texts], device="cpu") for texts in (answers, expected)]
    classes = max(2, len(labels))  # torchmetrics wants two
    accuracy = multiclass_accuracy(*pair, num_classes=classes, average="micro")
    f1 = multiclass_f1_score(*pair, num_classes=classes, average="macro")
    return {"accuracy": float(accuracy), "macro_f1": float(f1)}


def _answer_scores(answers: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """Means over rows, in [0, 1]."""
    predictions = [{"prediction_text": answer, "id": str(i)} for i, answer in enumerate(answers)]
    targets = [{"answers": {"answer_start": [0], "text": [text]}, "id": str(i)} for i, text in enumerate(expected)]
    words = squad(predictions, targets)
    rouge = rouge_score(list(answers), list(expected), rouge_keys="rougeL")["rougeL_fmeasure"]
    return {"exact_match": float(words["exact_match"]) / 100, "f1": float(words["f1"]) / 100, "rouge_l": float(rouge)}
