"""What a trained model answers: candidates scored by likelihood, or greedy answers compared with the references.

``nll`` (nats per token of the right answer, mean over rows) is reported beside every score: it moves by a few per cent of its
noise where accuracy jumps by whole rows. ``choice_nll`` is the same among a row's candidates only. Candidates of different length
are compared by their mean per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import metrics
from .encoding import IGNORED, WithTexts, encode, prompt_ids, supervised, target_ids
from .prompts import Item
from .recording import Piece, Throttle, arrived
from .tasks import GENERATED, Task
from .training import Trainee, logits_at, token_losses

TOKENS = 8192
"""Of a batch of scoring."""
POSITIONS = 1024
"""Of a batch whose logits over the vocabulary exist at one time."""
PIECES = 8
"""Recorded passes that a model keeps: of each split at two lengths, answers."""


def last_number(answer: str, reference: str) -> float:
    """Of worked solutions (GSM8K): their last numbers agree."""
    found = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (answer, reference)]
    return float(bool(found[0]) and bool(found[1]) and float(found[0][-1]) == float(found[1][-1]))


METRICS = {"exact_match": metrics.exact_match, "f1": metrics.word_f1, "rouge_l": metrics.rouge_l, "last_number": last_number}


class Batch(NamedTuple):
    """Sequences to be scored: of one shape for all batches of a task, so that one recording serves them."""

    ids: Tensor  # (R, T)
    place: Tensor  # (P,) of the flattened (R * T); 0 where there is nothing
    label: Tensor  # (P,); IGNORED where there is nothing
    owner: Tensor  # (p,), p <= P, on the CPU: sequence of every position
    rows: Tensor  # (r,), r <= R, on the CPU: row of every sequence
    candidates: Tensor  # (r,), on the CPU: which of the row's candidates it is


@dataclass
class ScoredSet:
    """Attributes:
    batches: sequences of one of two lengths, at most half of the task's or all of it.
    choices: tokens, where all candidates are single tokens: one sequence a row will do.
    widest: most candidates of a row.
    """

    gold: Tensor
    subsets: list[str]
    batches: list[Batch] = field(default_factory=list)
    choices: tuple[int, ...] | None = None
    widest: int = 1


def scored_set(items: Sequence[Item], task: Task, tokenizer: Any, device: Any, only_target: bool = False) -> ScoredSet:
    """``only_target``: no choice, the right answer alone."""
    tokenizer = WithTexts(tokenizer, items)
    of = [(item.target,) if only_target or not item.candidates else item.candidates for item in items]
    answers = [[target_ids(text, tokenizer, task)[: task.length // 2] for text in texts] for texts in of]
    gold = torch.tensor([0 if len(texts) == 1 else item.gold for item, texts in zip(items, of)])
    made = ScoredSet(gold, [item.subset for item in items], widest=max(map(len, answers)))
    single = all(len(a) == 1 for row in answers for a in row) and len({tuple(map(tuple, row)) for row in answers}) == 1
    if single and made.widest > 1:
        made.choices = tuple(a[0] for a in answers[0])
        answers = [[row[int(g)]] for row, g in zip(answers, gold)]
    longest = [max(map(len, row)) for row in answers]
    prompts = [prompt_ids(item, tokenizer, task.length - n) for item, n in zip(items, longest)]
    flat = [(r, c, prompts[r], a) for r, row in enumerate(answers) for c, a in enumerate(row)]
    flat.sort(key=lambda entry: len(entry[2]) + len(entry[3]))
    half = -(-task.length // 32) * 16
    short = sum(len(p) + len(a) <= half for *_, p, a in flat)
    for part, length in ((flat[:short], half), (flat[short:], task.length)):
        most = rows_of(length, len(part))
        positions = most if made.choices is not None else max(task.length // 2, min(POSITIONS, most * (task.length // 2)))
        start = 0
        while start < len(part):
            stop = _end_of_batch(part, start, most, positions)
            made.batches.append(_batch(part[start:stop], length, most, positions, device))
            start = stop
    return made


def rows_of(length: int, there: int) -> int:
    """Rows of a batch: a power of 2 where there are few, so that splits of different size have the same shape."""
    return max(1, min(TOKENS // length, 1 << max(0, there - 1).bit_length()))


def _end_of_batch(flat: list[tuple], start: int, most: int, positions: int) -> int:
    stop, taken = start, 0
    while stop < len(flat) and stop - start < most and taken + len(flat[stop][3]) <= positions:
        taken += len(flat[stop][3])
        stop += 1
    return stop


def _batch(part: list[tuple], length: int, most: int, positions: int, device: Any) -> Batch:
    rows = encode([(p, a) for *_, p, a in part], length, max(len(a) for *_, a in part))
    at = supervised(rows.at, rows.labels, length)
    fill = lambda t, size, value: torch.cat([t, t.new_full((size - len(t), *t.shape[1:]), value)]).to(device)
    owners = (torch.tensor([entry[i] for entry in part]) for i in (0, 1))
    return Batch(fill(rows.ids, most, 0), fill(at.place, positions, 0), fill(at.label, positions, IGNORED), at.owner, *owners)


# ---------------------------------------------------------------------------------------------- forward passes


class Reader:
    """Reads batches of one shape, and finds (P,) losses of the labels or (P, C) log-probabilities of the choices."""

    def __init__(self, trainee: Trainee, like: Batch, choices: tuple[int, ...] | None):
        self.model = trainee.model
        self.choices = None if choices is None else torch.tensor(choices, device=trainee.device)
        self.ids, self.place, self.label = (t.clone() for t in like[:3])
        self.found: Tensor | None = None
        self.piece = Piece(self._run, trainee.device, trainee.graphs)

    @torch.no_grad()
    def _run(self) -> None:
        if self.choices is None:
            found = token_losses(self.model, self.ids, self.place, self.label)
        else:
            found = logits_at(self.model, self.ids, self.place).log_softmax(-1).index_select(1, self.choices)
        if self.found is None:
            self.found = torch.empty_like(found)
        self.found.copy_(found)

    def __call__(self, batch: Batch) -> Tensor:
        self.ids.copy_(batch.ids)
        self.place.copy_(batch.place)
        self.label.copy_(batch.label)
        self.piece()
        return self.found.clone()


def _piece(trainee: Trainee, key: tuple, make: Callable[[], Any]) -> Any:
    """The trainee's recorded pass of this kind and shape; those of another task are forgotten where there are too many."""
    if key not in trainee.pieces:
        while len(trainee.pieces) >= PIECES:
            trainee.pieces.pop(next(iter(trainee.pieces)))
        trainee.pieces[key] = make()
    return trainee.pieces[key]


@torch.no_grad()
def score(trainee: Trainee, data: ScoredSet) -> Generator[bool | None, None, dict]:
    """nll of the right answers and, where there is a choice, accuracy and choice_nll; the same for each subset."""
    trainee.model.eval()
    throttle, found = Throttle(trainee.device), []
    for batch in data.batches:
        key = (data.choices, tuple(batch.ids.shape), len(batch.place))
        reader = _piece(trainee, key, lambda batch=batch: Reader(trainee, batch, data.choices))
        found.append(reader(batch))
        yield from throttle.step()
    yield from arrived(trainee.device)
    means = torch.full((len(data.gold), data.widest), torch.inf)
    for values, batch in zip(found, data.batches):  # on the CPU: the order of a sum is then always the same
        values = values[: len(batch.owner)].float().cpu()
        if data.choices is not None:  # a position for each sequence
            means[batch.rows] = -values
        else:
            sums = torch.zeros(len(batch.rows)).index_add_(0, batch.owner, values)
            means[batch.rows, batch.candidates] = sums / torch.bincount(batch.owner, minlength=len(batch.rows))
    return _summary(means, data)


def _summary(sums: Tensor, data: ScoredSet) -> dict:
    gold = sums.gather(1, data.gold[:, None])[:, 0]
    names = [name for name in dict.fromkeys(data.subsets) if name]
    parts = {name: torch.tensor([s == name for s in data.subsets]) for name in names}
    result: dict[str, Any] = {"nll": gold.mean().item()}
    if data.widest > 1:
        hits = (sums.argmin(1) == data.gold).float()
        result["accuracy"] = hits.mean().item()
        result["choice_nll"] = -(-sums).log_softmax(1).gather(1, data.gold[:, None]).mean().item()
    if names:
        result["subsets"] = {name: {"nll": gold[where].mean().item()} for name, where in parts.items()}
        if data.widest > 1:
            for name, where in parts.items():
                result["subsets"][name]["accuracy"] = hits[where].mean().item()
    return result


# ---------------------------------------------------------------------------------------------- generation


class Writer:
    """Appends the most likely next token to every row, ``ends`` (R,) being the rows' lengths. Without a cache: a recorded pass
    over all that is there takes less time than Python takes to issue one over a single token."""

    def __init__(self, trainee: Trainee, shape: tuple[int, int]):
        self.model = trainee.model
        self.ids = torch.zeros(shape, dtype=torch.int64, device=trainee.device)
        self.ends = torch.ones(shape[0], dtype=torch.int64, device=trainee.device)
        self.starts = torch.arange(shape[0], device=trainee.device) * shape[1]
        self.piece = Piece(self._run, trainee.device, trainee.graphs)

    @torch.no_grad()
    def _run(self) -> None:
        best = logits_at(self.model, self.ids, self.starts + self.ends - 1).argmax(-1)
        self.ids.scatter_(1, self.ends[:, None], best[:, None])
        self.ends.add_(1)


@torch.no_grad()
def generate(trainee: Trainee, items: Sequence[Item], task: Task) -> Generator[bool | None, None, dict]:
    """The metric of greedy answers, up to the first line's end."""
    model, tokenizer = trainee.model.eval(), trainee.tokenizer
    known = WithTexts(tokenizer, items)
    prompts = [prompt_ids(item, known, task.length - task.answer) for item in items]
    by_length = sorted(range(len(items)), key=lambda i: len(prompts[i]))
    most = rows_of(task.length, len(items))
    writer = _piece(trainee, ("write", most, task.length), lambda: Writer(trainee, (most, task.length)))
    model.eval()
    throttle, written = Throttle(trainee.device), []
    for start in range(0, len(items), most):
        rows = [prompts[i] for i in by_length[start : start + most]]
        rows += [[0]] * (most - len(rows))
        writer.ids.copy_(torch.tensor([row + [0] * (task.length - len(row)) for row in rows]))
        writer.ends.copy_(torch.tensor([len(row) for row in rows]))
        for _ in range(task.answer):
            writer.piece()
            yield from throttle.step()
        written.append(writer.ids.clone())
        yield from arrived(trainee.device)
    ids = torch.cat(written).cpu().tolist()
    scores: dict[int, float] = {}
    samples = []
    for i, row in zip(by_length, ids):
        answer = _text(row[len(prompts[i]) : len(prompts[i]) + task.answer], tokenizer)
        scores[i] = max(METRICS[task.metric](answer, reference) for reference in items[i].references)
        samples.append([answer, items[i].references[0]])
    return {task.metric: sum(scores.values()) / len(scores), "samples": samples[:3]}


def _text(tokens: list[int], tokenizer: Any) -> str:
    """The first line of what was written before the end-of-text token."""
    end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
    return tokenizer.decode(tokens[:end], skip_special_tokens=True).strip().split("\n")[0].strip()


@dataclass
class Evaluation:
    """One split of a task, ready to be scored."""

    task: Task
    items: list[Item]
    likelihood: ScoredSet

    @classmethod
    def of(cls, items: Sequence[Item], task: Task, tokenizer: Any, device: Any) -> Evaluation:
        return cls(task, list(items), scored_set(items, task, tokenizer, device, only_target=task.kind == GENERATED))

    def run(self, trainee: Trainee, answers: bool = True) -> Generator[bool | None, None, dict]:
        """Everything; without ``answers`` the likelihoods only."""
        result = yield from score(trainee, self.likelihood)
        if answers and self.task.kind == GENERATED:
            result |= yield from generate(trainee, self.items, self.task)
        return result
