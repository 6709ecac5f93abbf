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
from .training import encode, prompt_ids, target_ids, token_losses

TOKENS = 8192
"""Of a batch of scoring."""


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


@torch.no_grad()
def likelihoods(model: nn.Module, items: Sequence[Item], task: Task, tokenizer: Any) -> dict[str, Any]:
    """:func:`summary` of the candidates' mean negative log-likelihoods; of a generated task the right answer alone is scored."""
    model.eval()
    device = next(model.parameters()).device
    scored = task.kind != GENERATED
    candidates = [item.candidates if scored else (item.target,) for item in items]
    sequences = []  # (row, candidate, prompt, answer)
    for row, (item, texts) in enumerate(zip(items, candidates)):
        answers = [target_ids(text, tokenizer, task)[: task.length // 2] for text in texts]
        prompt = prompt_ids(item, tokenizer, task.length - max(map(len, answers)))
        sequences += [(row, c, prompt, answer) for c, answer in enumerate(answers)]
    sequences.sort(key=lambda s: len(s[2]) + len(s[3]))
    nll = torch.full((len(items), max(map(len, candidates))), torch.inf)
    size = max(1, TOKENS // task.length)
    for start in range(0, len(sequences), size):
        part = sequences[start : start + size]
        batch = encode([(prompt, answer) for *_, prompt, answer in part], max(len(p) + len(a) for *_, p, a in part))
        losses, owner = (t.cpu() for t in token_losses(model, batch, device))
        sums = torch.zeros(len(part)).index_add_(0, owner, losses)
        rows, columns = (torch.tensor([s[i] for s in part]) for i in (0, 1))
        nll[rows, columns] = sums / torch.bincount(owner, minlength=len(part))
    gold = [item.gold if scored else 0 for item in items]
    return summary(nll, gold, [item.subset for item in items])


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


@torch.no_grad()
def answers(model: nn.Module, items: Sequence[Item], task: Task, tokenizer: Any) -> dict[str, Any]:
    """The metric of greedy answers, up to the end of their first line, and three of them."""
    model.eval()
    device, end = next(model.parameters()).device, tokenizer.eos_token_id
    texts: list[str] = []
    size = max(1, TOKENS // task.length)
    for start in range(0, len(items), size):
        prompts = [prompt_ids(item, tokenizer, task.length - task.answer) for item in items[start : start + size]]
        longest = max(map(len, prompts))
        ids = torch.tensor([[end] * (longest - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        written = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=task.answer, do_sample=False, pad_token_id=end, eos_token_id=end
        )
        texts += [first_line(row, tokenizer) for row in written[:, longest:].tolist()]
    score = METRICS[task.metric]
    scores = [max(score(text, reference) for reference in item.references) for text, item in zip(texts, items)]
    samples = [[text, item.references[0]] for text, item in zip(texts[:3], items)]
    return {task.metric: sum(scores) / len(scores), "samples": samples}


def first_line(tokens: list[int], tokenizer: Any) -> str:
    """Of what was written before the end-of-text token."""
    end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
    return tokenizer.decode(tokens[:end], skip_special_tokens=True).strip().split("\n")[0].strip()
