"""What a trained model answers: candidates scored by likelihood, or greedy answers compared with the references.

``nll`` (nats per token of the right answer, mean over rows) is reported beside every score, because its noise is far smaller than
that of accuracy. ``choice_nll`` is the same among a row's candidates only. Candidates of different length are compared by their
mean per token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.functional.text import rouge_score, squad

from .prompts import Item
from .tasks import GENERATED, Task
from .training import IGNORED, Encoded, prompt_ids, target_ids, token_losses

TOKENS, POSITIONS = 8192, 8192
"""Of a batch of scoring: tokens, and positions with a label, each of which has a row of logits."""


def last_number(answer: str, reference: str) -> float:
    """Of worked solutions (GSM8K): their last numbers agree."""
    found = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (answer, reference)]
    return float(bool(found[0]) and bool(found[1]) and float(found[0][-1]) == float(found[1][-1]))


def squad_score(name: str, answer: str, reference: str) -> float:
    """SQuAD's ``exact_match`` or ``f1``."""
    found = squad([{"prediction_text": answer, "id": ""}], [{"answers": {"text": [reference], "answer_start": [0]}, "id": ""}])
    return found[name].item() / 100


def rouge_l(answer: str, reference: str) -> float:
    return rouge_score(answer, reference, rouge_keys="rougeL")["rougeL_fmeasure"].item()


METRICS = {
    **{name: partial(squad_score, name) for name in ("exact_match", "f1")},
    **{"rouge_l": rouge_l, "last_number": last_number},
}


def likelihoods(model: nn.Module, items: Sequence[Item], task: Task, tokenizer: Any) -> dict[str, Any]:
    """:func:`summary` of the candidates' mean negative log-likelihoods; of a generated task the right answer alone is scored."""
    (nll,) = candidate_losses(model, items, task, tokenizer)
    gold = [item.gold if task.kind != GENERATED else 0 for item in items]
    return summary(nll, gold, [item.subset for item in items])


@torch.no_grad()
def candidate_losses(
    model: nn.Module, items: Sequence[Item], task: Task, tokenizer: Any, runs: int = 1, tokens: int | None = None
) -> Tensor:
    """(runs, rows, candidates) mean negative log-likelihood of a candidate's tokens, infinite where a row has fewer candidates;
    of a generated task the right answer is the only one.

    Args:
        runs: the model computes every batch for so many runs (:mod:`reproduce.together`), whose rows follow one another.
        tokens: of a batch, all runs together; :data:`TOKENS` by default.
    """
    model.eval()
    device = next(model.parameters()).device
    candidates = [item.candidates if task.kind != GENERATED else (item.target,) for item in items]
    inputs = []  # (prompt and what the answers below have in common, answers that differ in their last token: row, candidate, it)
    for row, (item, texts) in enumerate(zip(items, candidates)):
        answers = [target_ids(text, tokenizer, task)[: task.length // 2] for text in texts]
        prompt = prompt_ids(item, tokenizer, task.length - max(map(len, answers)))
        for beginning in dict.fromkeys(tuple(answer[:-1]) for answer in answers):
            same = [(row, c, answer) for c, answer in enumerate(answers) if tuple(answer[:-1]) == beginning]
            inputs.append((prompt + list(beginning), same))
    inputs.sort(key=lambda found: len(found[0]))
    found = torch.full((runs, len(items), max(map(len, candidates))), torch.inf)
    most = max(sum(len(answer) for *_, answer in same) for _, same in inputs)
    size = max(1, min((tokens or TOKENS) // task.length, POSITIONS // most) // runs)
    for start in range(0, len(inputs), size):
        part = inputs[start : start + size]
        losses, _ = token_losses(model, repeated(_encoded_answers(part), runs), device)
        scored = [(row, c, len(answer)) for _, same in part for row, c, answer in same]
        rows, columns, counts = (torch.tensor(numbers) for numbers in zip(*scored))
        owner = torch.arange(len(scored)).repeat_interleave(counts)
        sums = torch.zeros(runs, len(scored)).index_add_(1, owner, losses.cpu().view(runs, -1))
        found[:, rows, columns] = sums / counts
    return found


def _encoded_answers(inputs: Sequence[tuple[list[int], list[tuple[int, int, list[int]]]]]) -> Encoded:
    """Of each input all its answers: their tokens are labels, at the positions before them."""
    pairs = [[(len(ids) - len(a) + i, t) for *_, a in same for i, t in enumerate(a)] for ids, same in inputs]
    shape = len(inputs), max(map(len, pairs))
    ids = torch.zeros(len(inputs), max(len(tokens) for tokens, _ in inputs), dtype=torch.int64)
    at, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    for row, ((tokens, _), found) in enumerate(zip(inputs, pairs)):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        at[row, : len(found)], labels[row, : len(found)] = torch.tensor(found).T
    return Encoded(ids, at, labels)


def repeated(batch: Encoded, runs: int) -> Encoded:
    """The rows once for every run."""
    return batch if runs == 1 else Encoded(*(t.repeat(runs, 1) for t in (batch.ids, batch.at, batch.labels)))


def summary(nll: Tensor, gold: Sequence[int], subsets: Sequence[str]) -> dict[str, Any]:
    """Scores of (rows, candidates) negative log-likelihoods (infinite where a row has fewer candidates): nll of the right answers
    and, where there is a choice, accuracy and choice_nll; nll and accuracy of each subset that has a name."""
    right = torch.tensor(gold)
    parts = {"": torch.ones(len(nll), dtype=torch.bool)}
    parts |= {name: torch.tensor([s == name for s in subsets]) for name in subsets if name}
    result: dict[str, dict] = {}
    for name, where in parts.items():
        own = nll.gather(1, right[:, None])[:, 0][where]
        result[name] = {"nll": own.mean().item()}
        if nll.shape[1] > 1:
            result[name]["accuracy"] = (nll.argmin(1) == right)[where].float().mean().item()
            result[name]["choice_nll"] = -(-nll).log_softmax(1).gather(1, right[:, None])[where].mean().item()
    whole = result.pop("")
    return whole | ({"subsets": result} if result else {})


def answers(model: nn.Module, items: Sequence[Item], task: Task, tokenizer: Any) -> dict[str, Any]:
    """The metric of greedy answers, up to the end of their first line, and three of them."""
    (texts,) = written_answers(model, items, task, tokenizer)
    scores = answer_scores(texts, items, task)
    samples = [[text, item.references[0]] for text, item in zip(texts[:3], items)]
    return {task.metric: sum(scores) / len(scores), "samples": samples}


@torch.no_grad()
def written_answers(
    model: nn.Module, items: Sequence[Item], task: Task, tokenizer: Any, runs: int = 1, tokens: int | None = None
) -> list[list[str]]:
    """Greedy answers of every run, up to the end of their first line. Arguments as of :func:`candidate_losses`."""
    model.eval()
    device, end = next(model.parameters()).device, tokenizer.eos_token_id
    texts: list[list[str]] = [[] for _ in range(runs)]
    size = max(1, (tokens or TOKENS) // task.length // runs)
    for start in range(0, len(items), size):
        prompts = [prompt_ids(item, tokenizer, task.length - task.answer) for item in items[start : start + size]]
        longest = max(map(len, prompts))
        ids = torch.tensor([[end] * (longest - len(p)) + p for p in prompts], device=device).repeat(runs, 1)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device).repeat(runs, 1)
        written = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=task.answer, do_sample=False, pad_token_id=end, eos_token_id=end
        )
        found = [first_line(row, tokenizer) for row in written[:, longest:].tolist()]
        for run in range(runs):
            texts[run] += found[run * len(prompts) : (run + 1) * len(prompts)]
    return texts


def answer_scores(texts: Sequence[str], items: Sequence[Item], task: Task) -> list[float]:
    """The task's metric of every answer, against the reference that it is nearest to."""
    score = METRICS[task.metric]
    return [max(score(text, reference) for reference in item.references) for text, item in zip(texts, items)]


def first_line(tokens: list[int], tokenizer: Any) -> str:
    """Of what was written before the end-of-text token."""
    end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
    return tokenizer.decode(tokens[:end], skip_special_tokens=True).strip().split("\n")[0].strip()
