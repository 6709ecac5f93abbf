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
from transformers import DataCollatorForSeq2Seq

from ...training.callbacks import NonFiniteError
from .models import check_tokens, positions
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
    left_out: int  # rows whose prompt alone fills the maximum length (classification: with each label)
    empty: int  # rows without any text
    scores: dict[str, float]  # name -> value, in [0, 1] but for ``perplexity`` and ``nll`` (nats a token)
    samples: list[dict[str, str]] = field(default_factory=list)  # some rows with what the model answered


def encode(rows: Rows, tokenizer: Any, max_length: int) -> dict[int, dict[str, list[int]]]:
    """Number of a row by turn -> its ``input_ids`` and ``labels``, where these are not empty within ``max_length`` tokens."""
    encoded = {}
    for number, (prompt, whole) in enumerate(rows.rendered(tokenizer)):
        ids, start = _encode(prompt, whole, tokenizer, rows.conversational)
        if len(ids[:max_length]) > max(start, 1):  # nothing foretells the first token
            encoded[number] = {"input_ids": ids[:max_length], "labels": ([IGNORED] * start + ids[start:])[:max_length]}
    if not encoded:
        raise ValueError(f"no row of {rows.name} has anything to learn or score within {max_length} tokens: raise --max-length")
    return encoded


def first_tokens(rows: Rows, tokenizer: Any, length: int) -> list[list[int]]:
    """The first tokens of every row, whatever is learned of it."""
    return [_encode(*pair, tokenizer, rows.conversational)[0][:length] for pair in rows.rendered(tokenizer)]


def _encode(prompt: str, whole: str, tokenizer: Any, templated: bool) -> tuple[list[int], int]:
    """(all tokens, with the end of the text; where what is scored starts): where the tokens of the prompt and those of both
    part. A template writes the end itself."""
    eos = "" if templated else tokenizer.eos_token or ""
    texts = (prompt + whole[len(prompt) :].removesuffix(eos) + eos if eos else whole, prompt)
    both, alone = (tokenizer(text, add_special_tokens=not templated).input_ids for text in texts)
    alone = alone if prompt else []
    start = next((i for i, (a, b) in enumerate(zip(both, alone)) if a != b), min(len(both), len(alone)))
    return both, start


def collator(tokenizer: Any) -> DataCollatorForSeq2Seq:
    """Of encoded rows: padded on the right to a multiple of 8."""
    tokenizer.padding_side = "right"
    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED, pad_to_multiple_of=8)


@torch.no_grad()
def evaluate(
    model: nn.Module, tokenizer: Any, rows: Rows, *, batch: int, max_length: int, max_new_tokens: int, generate: bool
) -> Score:
    """Score a model on rows; with ``generate`` it also answers (``prompt`` and ``chat``), which takes most of the time. Raises
    NonFiniteError where the model computes NaN."""
    model.eval()
    format, rows = rows.format, rows.by_turn()
    if format == "classification" and len(rows.labels) < 2:
        only = "".join(rows.labels).strip()
        raise ValueError(f"{rows.name} has the label {only!r} alone, so any model is right: give the others, too, with --labels")
    encoded = encode(rows, tokenizer, max_length)
    places = [f"{rows.name}, {place}" for place in rows.data["place"]]
    check_tokens(model, ((places[number], row["input_ids"]) for number, row in encoded.items()))
    candidates = _candidates(rows, tokenizer, max_length) if format == "classification" else {}
    encoded = {number: row for number, row in encoded.items() if format != "classification" or number in candidates}
    losses, counts = _losses(model, tokenizer, list(encoded.values()), batch)
    if bad := [places[number] for number, loss in zip(encoded, losses) if not math.isfinite(loss)]:
        raise NonFiniteError(
            f"the model's loss is not finite on {len(bad)} of {len(encoded)} rows, the first of them {bad[0]}: the model or the "
            "adapter holds NaN, or overflows in its dtype (--dtype fp32)"
        )
    nll = float(losses.sum() / counts.sum())
    score = Score(
        format,
        len(encoded),
        len(rows.data) - len(encoded),
        len(rows.empty),
        {"nll": nll, "perplexity": math.exp(min(nll, 700.0))},
    )
    prompts, expected = zip(*(pair for number, pair in enumerate(rows.pairs()) if number in encoded))
    if rows.format == "classification":
        answers = _labels(model, tokenizer, [row for number in encoded for row in candidates[number]], rows.labels, batch)
        score.scores = {**_label_scores(answers, expected, rows.labels), **score.scores}
    elif rows.format == "prompt" and generate:
        texts = [pair for number, pair in enumerate(rows.rendered(tokenizer)) if number in encoded]
        answers = _answers(model, tokenizer, [prompt for prompt, _ in texts], batch, max_new_tokens, rows.conversational)
        expected = [_expected(end, whole[len(prompt) :]) for end, (prompt, whole) in zip(expected, texts)]
        score.scores = {**_answer_scores(answers, expected), **score.scores}
    else:
        return score
    shown = zip(prompts[:SAMPLES], expected, answers)
    score.samples = [{"prompt": str(p), "expected": e.strip(), "answer": a.strip()} for p, e, a in shown]
    return score


def _expected(completion: Any, rendered: str) -> str:
    """What an answer is compared with: a text, the last message's, or the call of a tool as the template writes it."""
    said = completion if isinstance(completion, str) else completion[-1].get("content")
    return said if isinstance(said, str) else rendered


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


def _candidates(rows: Rows, tokenizer: Any, length: int) -> dict[int, list[dict[str, list[int]]]]:
    """Number of a row -> one sequence for each label, where all of them fit into ``length`` tokens: a label that is cut off would
    be compared by its beginning alone."""
    result = {}
    for number, (prompt, _) in enumerate(rows.pairs()):
        found = [_encode(prompt, prompt + label, tokenizer, False) for label in rows.labels]
        if any(len(ids) <= max(start, 1) for ids, start in found):
            raise ValueError("a label has no tokens of its own in this tokenizer")
        if all(len(ids) <= length for ids, _ in found):
            result[number] = [{"input_ids": ids, "labels": [IGNORED] * start + ids[start:]} for ids, start in found]
    if not result:
        raise ValueError(f"no row of {rows.name} has anything to score within {length} tokens: raise --max-length")
    return result


def _labels(model: nn.Module, tokenizer: Any, candidates: Sequence[dict], labels: Sequence[str], size: int) -> list[str]:
    """The likeliest completion of every prompt: by the mean log-likelihood of its tokens."""
    losses, counts = _losses(model, tokenizer, candidates, size)
    return [labels[i] for i in (losses / counts).view(-1, len(labels)).argmin(1).tolist()]


def _answers(model: nn.Module, tokenizer: Any, prompts: list[str], size: int, new_tokens: int, templated: bool) -> list[str]:
    """What the model says after every prompt, greedy."""
    answers, limit = [], positions(model.config)
    for at in tqdm(range(0, len(prompts), size), desc="Answering", unit="batch"):
        texts = {"padding": True, "padding_side": "left", "return_tensors": "pt", "return_token_type_ids": False}
        inputs = tokenizer(prompts[at : at + size], add_special_tokens=not templated, **texts).to(model.device)
        length = inputs["input_ids"].shape[1]
        new = new_tokens if limit is None else max(1, min(new_tokens, limit - length))
        out = model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        answers += tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
    return answers


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
