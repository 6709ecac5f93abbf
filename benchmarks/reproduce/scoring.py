"""What a trained model answers: candidates scored by likelihood, or greedy answers compared with the references.

``nll`` (nats per token of the right answer, mean over rows) is reported beside every score: it moves by a few per cent of its
noise where accuracy jumps by whole rows. ``choice_nll`` is the same among a row's candidates only. Candidates of different length
are compared by their mean per token.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peft_nvfp4.tools import metrics
from peft_nvfp4.tools.evaluation import _generate

from .encoding import Supervised, encode, prompt_ids, supervised, target_ids
from .prompts import Item
from .tasks import GENERATED, Task
from .training import Trainee, logits_at, token_losses

TOKENS = 32768
"""Of a batch of scoring."""
POSITIONS = 2048
"""Of a batch whose logits over the vocabulary exist at one time."""


def last_number(answer: str, reference: str) -> float:
    """Of worked solutions (GSM8K): their last numbers agree."""
    found = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (answer, reference)]
    return float(bool(found[0]) and bool(found[1]) and float(found[0][-1]) == float(found[1][-1]))


METRICS = {"exact_match": metrics.exact_match, "f1": metrics.word_f1, "rouge_l": metrics.rouge_l, "last_number": last_number}


@dataclass
class ScoredSet:
    """Sequences to be scored, in batches of similar length.

    Attributes:
        batches: (ids, scored positions, row of every sequence, which of its candidates it is).
        choices: (C,) tokens, where all candidates are single tokens: one sequence a row will do.
        widest: most candidates of a row.
    """

    gold: Tensor
    subsets: list[str]
    batches: list[tuple[Tensor, Supervised, Tensor, Tensor]] = field(default_factory=list)
    choices: Tensor | None = None
    widest: int = 1


def scored_set(items: Sequence[Item], task: Task, tokenizer: Any, device: Any, only_target: bool = False) -> ScoredSet:
    """``only_target``: no choice, the right answer alone."""
    of = [(item.target,) if only_target or not item.candidates else item.candidates for item in items]
    answers = [[target_ids(text, tokenizer, task)[: task.length // 2] for text in texts] for texts in of]
    gold = torch.tensor([0 if len(texts) == 1 else item.gold for item, texts in zip(items, of)])
    made = ScoredSet(gold, [item.subset for item in items], widest=max(map(len, answers)))
    single = all(len(a) == 1 for row in answers for a in row) and len({tuple(map(tuple, row)) for row in answers}) == 1
    if single and made.widest > 1:
        made.choices = torch.tensor([a[0] for a in answers[0]], device=device)
        answers = [[row[int(g)]] for row, g in zip(answers, gold)]
    longest = [max(map(len, row)) for row in answers]
    prompts = [prompt_ids(item, tokenizer, task.length - n) for item, n in zip(items, longest)]
    flat = [(r, c, prompts[r], a) for r, row in enumerate(answers) for c, a in enumerate(row)]
    flat.sort(key=lambda entry: len(entry[2]) + len(entry[3]))
    start = 0
    while start < len(flat):
        part, start = _batch(flat, start)
        width = max(len(a) for *_, a in part)
        length = -(-max(len(p) + len(a) for *_, p, a in part) // 16) * 16
        rows = encode([(p, a) for *_, p, a in part], length, width)
        at = supervised(rows.at, rows.labels, length).to(device)
        owners, candidates = (torch.tensor([entry[i] for entry in part]) for i in (0, 1))
        made.batches.append((rows.ids.to(device), at, owners, candidates))
    return made


def _batch(flat: list[tuple], start: int) -> tuple[list[tuple], int]:
    stop, positions = start, 0
    while stop < len(flat):
        positions += len(flat[stop][3])
        total = (stop + 1 - start) * (len(flat[stop][2]) + len(flat[stop][3]))
        if stop > start and (total > TOKENS or positions > POSITIONS):
            break
        stop += 1
    return flat[start:stop], stop


@torch.no_grad()
def score(trainee: Trainee, data: ScoredSet) -> Generator[None, None, dict]:
    """nll of the right answers and, where there is a choice, accuracy and choice_nll; the same for each subset."""
    model = trainee.model
    model.eval()
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for ids, at, owners, candidates in data.batches:
        if data.choices is None:
            found.append((token_losses(model, ids, at), at.owner, torch.stack([owners, candidates])))
        else:
            logs = logits_at(model, ids, at.place).log_softmax(-1)[:, data.choices]
            pairs = [(-logs[:, c], at.owner, torch.stack([owners, torch.full_like(owners, c)])) for c in range(logs.shape[1])]
            found += pairs
        yield
    means = torch.full((len(data.gold), data.widest), torch.inf)
    for losses, owner, (rows, candidates) in found:  # on the CPU: the order of a sum is then always the same
        sums = torch.zeros(len(rows)).index_add_(0, owner.cpu(), losses.float().cpu())
        means[rows, candidates] = sums / torch.bincount(owner.cpu(), minlength=len(rows))
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


@torch.no_grad()
def generate(trainee: Trainee, items: Sequence[Item], task: Task, batch: int = 200) -> Generator[None, None, dict]:
    """The metric of greedy answers, up to the first line's end."""
    model, tokenizer = trainee.model, trainee.tokenizer
    model.eval()
    prompts = [prompt_ids(item, tokenizer, task.length - task.answer) for item in items]
    by_length = sorted(range(len(items)), key=lambda i: len(prompts[i]))
    scores: dict[int, float] = {}
    samples = []
    for start in range(0, len(items), batch):
        indices = by_length[start : start + batch]
        answers = _generate(model, tokenizer, [prompts[i] for i in indices], task.answer)
        for i, answer in zip(indices, answers):
            answer = answer.split("\n")[0].strip()
            scores[i] = max(METRICS[task.metric](answer, reference) for reference in items[i].references)
            samples.append([answer, items[i].references[0]])
        yield
    return {task.metric: sum(scores.values()) / len(scores), "samples": samples[:3]}


@dataclass
class Evaluation:
    """One split of a task, ready to be scored."""

    task: Task
    items: list[Item]
    likelihood: ScoredSet

    @classmethod
    def of(cls, items: Sequence[Item], task: Task, tokenizer: Any, device: Any) -> Evaluation:
        return cls(task, list(items), scored_set(items, task, tokenizer, device, only_target=task.kind == GENERATED))

    def run(self, trainee: Trainee, answers: bool = True) -> Generator[None, None, dict]:
        """Everything; without ``answers`` the likelihoods only."""
        result = yield from score(trainee, self.likelihood)
        if answers and self.task.kind == GENERATED:
            result |= yield from generate(trainee, self.items, self.task)
        return result
